"""Captured graphs: one decoding step of one token per row, replayed instead of launched kernel by kernel.

At batch 1 an accelerator waits for Python longer than it multiplies. So where fused steps run with a cache, one query
per row, the blocks between two probes are captured once and replayed from then on:

    one graph per   segment (first, last] × rows × bucket of keys × K/V buffers

``models.graph_buffers`` holds K/V and inputs at fixed addresses.

A graph repeats addresses, shapes and every Python decision of its capture. So positions and rows are tensors, and a
query attends to a whole *bucket* of keys, a power of two, under a mask made from its position: keys past it are
executed, add nothing and are counted (``ForwardContext.executed``). Depths, tokens, blocks and readouts are those of
the steps run one by one; sums over keys are in another order.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from emad_ref.errors import EmadError
from emad_ref.models.families import FAST, SLIDING_ATTENTION
from emad_ref.models.forward_inputs import LayerPlacement
from emad_ref.models.fused_blocks import AttentionInputs, FusedBlock, RotaryTables, as_vector
from emad_ref.models.graph_buffers import (
    BufferPool,
    BufferShape,
    CapturedGraph,
    KVBuffers,
    StaticKVCache,
    StepBuffers,
    bucket_size,
)
from emad_ref.models.kv_cache import KVCache
from emad_ref.models.stepper import ForwardContext

if TYPE_CHECKING:
    from emad_ref.models.causal import CausalStepper


WARM_UP_RUNS = 2  # runs before a capture: the first chooses kernels and makes workspaces, the second finds them made


class GraphCaptureError(EmadError):
    """The device, or a library on it, refused a capture."""


class CaptureEngine(Protocol):
    """Captures on one device."""

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What does to the tensors that ``function`` closes over what one call of it does now.

        Each call gives the same tensor, which is valid until anything of this engine is replayed or captured.
        ``function`` runs several times in between: running it twice must be running it once.

        Raises:
            GraphCaptureError: it cannot be.
        """
        ...


class CudaCaptureEngine:
    """CUDA graphs on ``device``; one pool of memory for all of them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None
        self._first: torch.cuda.CUDAGraph | None = None  # a pool is given up with the last of its graphs

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See ``CaptureEngine.capture``."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            try:
                return self._captured(function, before)
            except RuntimeError as error:  # PyTorch's word for whatever CUDA and its libraries refuse
                raise GraphCaptureError(
                    f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                ) from error
            finally:
                torch.cuda.set_stream(before)  # a capture that failed leaves its own stream behind

    def _captured(self, function: Callable[[], Tensor], before: torch.cuda.Stream) -> Callable[[], Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(before)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
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


CAPTURE_ENGINES: dict[str, Callable[[torch.device], CaptureEngine]] = {
    "cuda": CudaCaptureEngine
}  # kind of device → what captures there


ParameterPlace = tuple[dict[str, Any], str]  # a module's table of parameters, and a name in it


def parameter_places(parts: Iterable[nn.Module]) -> list[ParameterPlace]:
    """Of every parameter of some modules."""
    return [
        (module._parameters, name)
        for part in parts
        for module in part.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def parameter_addresses(places: Iterable[ParameterPlace]) -> tuple[int, ...]:
    """Where they lie now: another number where a parameter was put in another's place, or got other data."""
    return tuple([table[name].data_ptr() for table, name in places])


def has_no_hooks(parts: Sequence[Any]) -> bool:
    """Whether these are modules that do what their class does, nothing hung on them; the last one multiplies."""
    if not all(isinstance(part, nn.Module) for part in parts) or type(parts[-1]) is not nn.Linear:
        return False
    return not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for part in parts
        for module in part.modules()
    )


class _BucketWriter:
    """What fused steps see as their cache: stores at the rows' positions, gives a bucket of keys and values."""

    def __init__(self, buffers: KVBuffers, inputs: StepBuffers, keys: int):
        self._keys, self._values, self._inputs, self._bucket = buffers.keys, buffers.values, inputs, keys
        self._whole = len(inputs.positions) == buffers.rows

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        return self._put(self._keys[layer_idx], keys), self._put(self._values[layer_idx], values)

    def _put(self, buffer: Tensor, states: Tensor) -> Tensor:
        at, seen = self._inputs, buffer.narrow(2, 0, self._bucket)
        if self._whole:
            buffer.scatter_(2, at.positions[:, None, None, None].expand_as(states), states)
            return seen
        # an index before and one after the slice: what is put there is [rows, kv_heads, head_dim]
        buffer[at.places, :, at.positions] = states[:, :, 0]
        return seen.index_select(0, at.places)


class CapturedSegment:
    """Layers first+1 … last of ``stepper`` over the rows of ``inputs``, against ``keys`` keys of ``buffers`` each.

    Called, it gives h_last [rows, 1, D] of ``inputs.hidden``, and writes K and V; called twice, it has done no more.
    """

    def __init__(
        self, stepper: CausalStepper, first: int, last: int, buffers: KVBuffers, inputs: StepBuffers, keys: int
    ):
        self._steps = _require_fused(stepper.steps(first, last))
        self._inputs, self._writer = inputs, _BucketWriter(buffers, inputs, keys)
        self._dtype, self._window = stepper.dtype, stepper.window
        placements = {placement for _, placement in self._steps}
        # as long as the graph: a table that grows is another one
        self._rotary: dict[LayerPlacement, RotaryTables | None] = {
            placement: None if stepper.rotary is None else stepper.signed_rotary_table(placement, keys)
            for placement in placements
        }
        with torch.inference_mode(False), torch.no_grad():
            self._slots = torch.arange(keys, device=inputs.positions.device)

    def __call__(self) -> Tensor:
        inputs = {placement: self._attention_inputs(placement) for placement in self._rotary}
        hidden = self._inputs.hidden
        states = as_vector(hidden)
        for step, placement in self._steps:
            states = step(states, inputs[placement])
        return states.view(hidden.shape)

    def _attention_inputs(self, placement: LayerPlacement) -> AttentionInputs:
        positions, rotary = self._inputs.positions, self._rotary[placement]
        if rotary is not None:
            cos, sin = rotary
            rotary = cos[0].index_select(0, positions)[:, None], sin[0].index_select(0, positions)[:, None]
        return AttentionInputs(self._writer, self._mask(placement), rotary, several=False)

    def _mask(self, placement: LayerPlacement) -> Tensor:
        """Additive [rows, 1, 1, keys]: as ``stepper.attention_mask``, of positions that are known when it runs."""
        here = self._inputs.positions[:, None]
        seen = self._slots <= here
        if placement.kind == SLIDING_ATTENTION and self._window is not None:
            seen = seen & (self._slots > here - self._window)
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self._dtype).min)[:, None, None]


def _require_fused(
    steps: Sequence[tuple[FusedBlock | None, LayerPlacement]],
) -> list[tuple[FusedBlock, LayerPlacement]]:
    """All of them: where a block has none, nothing is captured (``capture.make_graphs``)."""
    present = [(step, placement) for step, placement in steps if step is not None]
    assert len(present) == len(steps), "a block without a fused step cannot be captured"
    return present


class CapturedReadouts:
    """Of one stepper. ``able``: whether its norm and head are such that a graph does what they do."""

    def __init__(self, stepper: CausalStepper, engine: CaptureEngine):
        self._engine, self.able = engine, has_no_hooks(stepper.head)
        self._places = parameter_places(stepper.head) if self.able else []
        self._states: dict[int, Tensor] = {}  # [states, D], where graphs read them
        self._graphs: dict[int, CapturedGraph] = {}

    def logits(self, stepper: CausalStepper, hidden: Tensor) -> Tensor:
        """[..., V] of ``hidden`` [..., D]. Raises GraphCaptureError."""
        *shape, width = hidden.shape
        states = self._still(hidden.numel() // width, width, hidden)
        states.copy_(hidden.reshape(states.shape))
        read, found = parameter_addresses(self._places), self._graphs.get(len(states))
        if found is None or found.read != read:
            replay = self._engine.capture(partial(stepper.read_out, states))
            found = self._graphs[len(states)] = CapturedGraph(replay, read, states)
        return found.replay().view(*shape, -1).clone()

    def _still(self, count: int, width: int, like: Tensor) -> Tensor:
        if count not in self._states:
            with torch.inference_mode(False), torch.no_grad():
                self._states[count] = torch.zeros(count, width, dtype=like.dtype, device=like.device)
        return self._states[count]


MAX_CAPTURED_ROWS = 16  # of a captured step; a batch of more hides what launching takes


class GraphCaptureWarning(UserWarning):
    """Graphs were wanted, and steps run one by one."""


class StepGraphs:
    """The graphs of one stepper. ``refused``: why nothing is captured any more; empty as long as it is."""

    def __init__(self, stepper: CausalStepper, engine: CaptureEngine):
        geometry = stepper.geometry
        self.pool = BufferPool(
            BufferShape(
                stepper.layers,
                geometry.kv_heads,
                geometry.head_dim,
                geometry.hidden,
                stepper.dtype,
                stepper.device,
            )
        )
        self._engine, self._owner = engine, weakref.ref(stepper)
        self._places = [parameter_places([block]) for block in stepper.blocks]
        self._readouts = CapturedReadouts(stepper, engine)
        self.refused = ""

    @property
    def summary(self) -> str:
        """For reports, after the backend's name."""
        return f"nothing captured: {self.refused}" if self.refused else "captured graphs"

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """One whose steps can be captured."""
        stepper = self._owner()
        assert stepper is not None, "asked by its own stepper"
        return StaticKVCache(self.pool, stepper.layers, rows, capacity)

    def run(
        self, stepper: CausalStepper, hidden: Tensor, first: int, last: int, frame: ForwardContext, cache: KVCache
    ) -> Tensor | None:
        """As ``Stepper.run``, of a frame and a cache that were looked at; None where it is to run one by one.

        Says in ``frame.executed`` how many keys each query is executed against.
        """
        frame.executed = frame.keys
        if not isinstance(cache, StaticKVCache) or not self._takes(stepper, first, last, frame, cache):
            return None
        keys, buffers, rows = bucket_size(frame.keys), cache.lease.buffers(frame.keys), len(frame.rows)
        read = parameter_addresses(chain.from_iterable(self._places[first:last]))
        known = buffers.graphs.get((first, last, rows, keys))
        # soon some rows leave, and no token is to wait for that capture: it is made with the first
        counts = (rows,) if known is not None and known.read == read else range(1, rows + 1)
        try:
            for count in counts:
                buffers.inputs(count).take(hidden, frame)
                captured = self._captured(stepper, first, last, buffers, count, keys, read)
        except GraphCaptureError as reason:
            self._refuse(str(reason))
            return None
        # graphs share memory: the next replay of any of them may overwrite this one's result
        result = captured.replay().clone()
        cache.hold(first, last, frame)
        frame.executed = keys
        return result

    def logits(self, stepper: CausalStepper, hidden: Tensor) -> Tensor | None:
        """As ``Stepper.logits``; None where it is to run by itself."""
        few = 0 < hidden.numel() <= MAX_CAPTURED_ROWS * hidden.shape[-1] and hidden.dtype == stepper.dtype
        if not few or not self._readouts.able or not self._may(stepper):
            return None
        try:
            return self._readouts.logits(stepper, hidden)
        except GraphCaptureError as reason:
            self._refuse(str(reason))
            return None

    def _takes(
        self, stepper: CausalStepper, first: int, last: int, frame: ForwardContext, cache: StaticKVCache
    ) -> bool:
        return (
            frame.queries == 1
            and first < last
            and len(frame.rows) <= MAX_CAPTURED_ROWS
            and not frame.prepared.ragged
            and cache.lease.pool is self.pool
            and cache.holds(first, last)
            and self._may(stepper)
        )

    def _may(self, stepper: CausalStepper) -> bool:
        return (
            not self.refused
            and self._owner() is stepper  # a copy may have other tables, or other blocks
            and not torch.is_grad_enabled()
            and not torch._C._len_torch_dispatch_stack()
        )

    def _captured(
        self,
        stepper: CausalStepper,
        first: int,
        last: int,
        buffers: KVBuffers,
        rows: int,
        keys: int,
        read: tuple[int, ...],
    ) -> CapturedGraph:
        """The graph of this segment over weights at ``read``. Raises GraphCaptureError."""
        found = buffers.graphs.get((first, last, rows, keys))
        if found is None or found.read != read:
            segment = CapturedSegment(stepper, first, last, buffers, buffers.inputs(rows), keys)
            found = CapturedGraph(self._engine.capture(segment), read, segment)
            buffers.keep((first, last, rows, keys), found)
        return found

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        warnings.warn(
            GraphCaptureWarning(f"no graph could be captured, and steps run one by one from here on: {reason}"),
            stacklevel=4,
        )


def make_graphs(stepper: CausalStepper, backend: str) -> tuple[StepGraphs | None, str]:
    """The graphs of a stepper that is made, and why there are none where its device has an engine; else "".

    ``backend``: the one asked for.
    """
    make = CAPTURE_ENGINES.get(stepper.device.type)
    if make is None or backend != FAST:
        return None, ""
    if stepper.places != (stepper.device,):
        return None, "the model is spread over several devices"
    if any(step is None for step, _ in stepper.steps(0, stepper.layers)):
        return None, "some block has no fused step"
    types = {parameter.dtype for block in stepper.blocks for parameter in block.parameters()}
    if types != {stepper.dtype}:
        return None, f"weights of several types: {', '.join(sorted(map(str, types)))}"
    return StepGraphs(stepper, make(stepper.device)), ""


__all__ = [
    "CAPTURE_ENGINES",
    "CaptureEngine",
    "GraphCaptureError",
    "GraphCaptureWarning",
    "StaticKVCache",
    "StepGraphs",
    "make_graphs",
]
