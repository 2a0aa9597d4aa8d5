"""The CUDA graph engine on a stub of CUDA: its calls of PyTorch, their order, and its cleanup."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fast.graph_capture import CAPTURE_ENGINES, WARM_UP_RUNS, CudaCaptureEngine, GraphCaptureError
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from tests.small_models import LAYERS, small_model


class Cuda:
    """Replaces ``torch.cuda``: ``said`` logs the calls; ``refuses``, if set, is raised at the end of a capture."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.stream_now, self.pools, self.refuses = "default", 0, ""

    def side(self) -> Any:
        return Waiting(self, "side")

    def current_stream(self) -> Any:
        return Waiting(self, self.stream_now)

    def set_stream(self, stream: Any) -> None:
        self.stream_now = stream.name

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def new_graph(self) -> Any:
        return Graph(self)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.said.append(str(device))
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        yield
        self.stream_now = before

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
        before, self.stream_now = self.stream_now, "capture"
        self.said.append(("capture", pool, capture_error_mode))
        yield
        if self.refuses:  # as in PyTorch, its stream stays the current one
            raise RuntimeError(self.refuses)
        self.stream_now = before


class Waiting:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Waiting) -> None:
        self.cuda.said.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def replay(self) -> None:
        self.cuda.said.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    standing = Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", standing.side)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", standing.new_graph)
    for name in ("current_stream", "set_stream", "graph_pool_handle", "device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(standing, name))
    return standing


def test_a_capture_is_warmed_up_aside_and_both_streams_wait(cuda: Cuda):
    engine, result = CudaCaptureEngine(torch.device("cuda:0")), torch.zeros(1)

    def function() -> torch.Tensor:
        cuda.said.append(f"run on {cuda.stream_now}")
        return result

    replay = engine.capture(function)
    assert cuda.said == [
        "cuda:0",
        "side waits for default",
        *["run on side"] * WARM_UP_RUNS,
        "default waits for side",
        ("capture", 1, "thread_local"),
        "run on capture",
    ]
    assert replay() is result
    assert cuda.said[-1] == "replay"
    assert cuda.stream_now == "default"


def test_graphs_of_one_engine_share_a_pool_that_its_first_graph_keeps(cuda: Cuda):
    engine = CudaCaptureEngine(torch.device("cuda:0"))
    for _ in range(3):
        engine.capture(lambda: torch.zeros(1))
    assert [said[1] for said in cuda.said if said[0] == "capture"] == [1, 1, 1]
    assert isinstance(engine._first, Graph)


def test_a_refused_capture_says_why_and_leaves_the_stream_as_it_was(cuda: Cuda):
    cuda.refuses = "CUDA error: operation not permitted when stream is capturing\nCompile with `TORCH_USE_CUDA_DSA`"
    with pytest.raises(GraphCaptureError, match=r"^RuntimeError: CUDA error: operation .* capturing$"):
        CudaCaptureEngine(torch.device("cuda:0")).capture(lambda: torch.zeros(1))
    assert cuda.stream_now == "default"


def test_only_cuda_has_an_engine():
    assert {"cuda": CudaCaptureEngine} == CAPTURE_ENGINES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "opt", "gemma3"])
def test_on_a_device_captured_steps_decide_as_those_one_by_one(family: str):
    model = small_model(family).to("cuda")
    captured, eager = CausalStepper(model), CausalStepper(model, backend="eager")
    prompts = [Prompt(np.arange(1, 1 + length)) for length in (7, 1, 5)]
    records = []
    for thresholds in ((-1.0,) * 3, None):
        if thresholds is None:
            thresholds = tuple(float(value) for value in np.nanquantile(records[1].signal, 0.4, axis=0))
        point = OperatingPoint("ruled", "quantile", LAYERS, LAYERS, (1, 3, 5), (thresholds,), "monotone")
        records += [WalkedDecoder(one, point, max_rows=3).generate(prompts, 100) for one in (captured, eager)]
    assert captured.backend == "fast, captured graphs"
    for ours, theirs in (records[:2], records[2:]):
        assert np.array_equal(ours.tokens.token, theirs.tokens.token)
        assert np.array_equal(ours.tokens.depth, theirs.tokens.depth)
        assert np.nanmax(abs(ours.signal - theirs.signal)) < 1e-9  # float64: sums over keys in another order
        assert np.array_equal(ours.work[0].tokens, theirs.work[0].tokens)
