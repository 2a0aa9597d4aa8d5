"""What captures and replays, by kind of device.

CUDA's way is PyTorch's documentation's ("CUDA semantics", CUDA Graphs): a warm-up on a side stream, so that libraries
have made what they make once, then a capture, in which kernels are noted and none runs. All graphs of one engine share
a pool of memory: what one leaves in it another may overwrite, so a result has to be copied before anything else is
replayed.

This has not met a GPU. ``tests/graphs.py`` has an engine for the CPU that repeats operations on the same tensors, and
bakes in whatever else they were called with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from emad_ref.errors import EmadError

WARM_UP = 2  # runs before a capture: the first chooses kernels and makes workspaces, the second finds them made


class NotCaptured(EmadError):
    """The device, or a library on it, refused a capture."""


class Engine(Protocol):
    """Captures on one device."""

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What does to the tensors that ``function`` closes over what one call of it does now.

        Each call gives the same tensor, which is valid until anything of this engine is replayed or captured.
        ``function`` runs several times in between: running it twice must be running it once.

        Raises:
            NotCaptured: it cannot be.
        """
        ...


class CudaEngine:
    """CUDA graphs on ``device``; one pool of memory for all of them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None
        self._first: torch.cuda.CUDAGraph | None = None  # a pool is given up with the last of its graphs

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See ``Engine.capture``."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            try:
                return self._captured(function, before)
            except RuntimeError as error:  # PyTorch's word for whatever CUDA and its libraries refuse
                raise NotCaptured(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
            finally:
                torch.cuda.set_stream(before)  # a capture that failed leaves its own stream behind

    def _captured(self, function: Callable[[], Tensor], before: torch.cuda.Stream) -> Callable[[], Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(before)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                function()
        before.wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads, an energy meter's say, go on with what a capture forbids
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._first = self._first or graph

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


ENGINES: dict[str, Callable[[torch.device], Engine]] = {"cuda": CudaEngine}  # kind of device → what captures there
