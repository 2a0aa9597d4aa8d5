"""A graph-capture engine for the CPU: it records operations once and replays them on the same tensors.

    made = capturing(monkeypatch); CausalStepper(model)        # its steps are captured, as on CUDA

Like a CUDA graph, a capture fixes the address of each tensor and every other argument (numbers, shapes). So a position,
length or mask that Python computed during the capture keeps its value, and a test sees the error. The engine refuses
what a capturing stream refuses: reading numbers from the device, and tensors made from host data. A graph does not keep
its inputs alive: a freed tensor is an error, because its address may be reused. All graphs share one memory for
results: the replay of one graph sets the results of all others to NaN.

Not emulated: streams, kernels, memory that a capture frees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from emad_ref.models.fast import graph_capture
from emad_ref.models.fast.graph_capture import GraphCaptureError

# operations that wait for the device, or copy from the host
REFUSED = frozenset({"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "lift_fresh", "lift"})


class Freed(RuntimeError):
    """A graph reads a tensor that was freed."""


class Tape(TorchDispatchMode):
    """Record the operations that run inside; ``play`` repeats them. Earlier tensors are not kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any]] = []
        self._made: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets their id

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in REFUSED:
            raise GraphCaptureError(f"{function}: operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        given = tree_map(self._noted, (args, kwargs or {}))
        leaves = [leaf if isinstance(leaf, Tensor) else None for leaf in tree_leaves(result)]
        for leaf in leaves:
            if leaf is not None and not any(leaf is each for each in tree_leaves((args, kwargs))):
                self._made[id(leaf)] = leaf
        self._calls.append((function, given, [None if leaf is None else id(leaf) for leaf in leaves]))
        return result

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Made(id(leaf)) if id(leaf) in self._made else weakref.ref(leaf)

    def play(self, wanted: Tensor) -> Tensor:
        """Replay, and return the new value of ``wanted``, a tensor made during the recording."""
        now: dict[int, Tensor] = {}

        def current(leaf: Any) -> Any:
            if isinstance(leaf, Made):
                return now[leaf.number]
            if not isinstance(leaf, weakref.ref):
                return leaf
            there = leaf()
            if there is None:
                raise Freed("a graph reads a tensor that is gone")
            return there

        for function, (args, kwargs), numbers in self._calls:
            after = function(*tree_map(current, args), **tree_map(current, kwargs))
            for number, new in zip(numbers, tree_leaves(after), strict=True):
                if number in self._made:
                    now[number] = new
        return now[id(wanted)]


@dataclass(frozen=True)  # not a tuple: trees of arguments are mapped leaf by leaf
class Made:
    """The number of a tensor that a recorded operation made."""

    number: int


class TapeEngine:
    """A capture engine; ``captures`` and ``replays`` count; ``refuses``: the reason to refuse every capture, if any."""

    def __init__(self, device: torch.device) -> None:
        self.captures = self.replays = 0
        self.refuses = ""
        self._results: list[Tensor] = []

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self.refuses:
            raise GraphCaptureError(self.refuses)
        self.captures += 1
        function()  # the warm-up
        with Tape() as tape:
            noted = function()
        mine = noted.clone()
        self._results.append(mine)

        def replay() -> Tensor:
            self.replays += 1
            for result in self._results:
                result.fill_(torch.nan)
            return mine.copy_(tape.play(noted))

        return replay


def capturing(monkeypatch: Any) -> list[TapeEngine]:
    """Make all steppers capture on the CPU from now on; return the list of their engines."""
    made: list[TapeEngine] = []

    def engine(device: torch.device) -> TapeEngine:
        made.append(TapeEngine(device))
        return made[-1]

    monkeypatch.setitem(graph_capture.CAPTURE_ENGINES, "cpu", engine)
    return made
