"""Captured graphs: one decoding step of one token per row, replayed instead of launched kernel by kernel.

At batch 1 an accelerator waits for Python longer than it multiplies. So if fused steps run with a cache and one query
per row, this module captures the blocks between two probes once and then replays them:

    one graph per   segment (first, last] × rows × bucket of keys × K/V buffers

``models.fast.graph_buffers`` holds K/V and inputs at fixed addresses.

A graph repeats addresses, shapes and every Python decision of its capture. So positions and rows are tensors, and a
query attends to a whole *bucket* of keys, a power of two, under a mask built from its position. Keys past it are
executed, add nothing and are counted (``LayerInputs.executed``). Depths, tokens, blocks and readouts equal those of
uncaptured steps; sums over keys are in another order.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from emad_ref.absent import Absent
from emad_ref.errors import EmadError
from emad_ref.models.families import FAST, SLIDING_ATTENTION
from emad_ref.models.fast.fused_blocks import AttentionInputs, FusedBlock, RotaryTables, flatten_single_cpu_token
from emad_ref.models.fast.graph_buffers import (
    BufferPool,
    CapturedGraph,
    GraphBufferSpec,
    KVBuffers,
    StaticKVCache,
    StepInputBuffers,
    bucket_size,
)
from emad_ref.models.kv_cache import KVCache, RunningRows
from emad_ref.models.placement import LayerPlacement
from emad_ref.models.stepper import Stepper

WARM_UP_RUNS = 2  # runs before a capture: the first chooses kernels and allocates workspaces, the second reuses them


class GraphCaptureError(EmadError):
    """Raised if the device, or a library on it, refuses a capture."""


class CapturableStepper(Stepper, Protocol):
    """A stepper whose steps and readout can be captured, as ``models.causal.CausalStepper``."""

    window: int | None
    rotary: Any

    @property
    def blocks(self) -> list[Any]: ...
    @property
    def head_modules(self) -> list[Any]: ...
    def fused_steps_and_placements(self, first: int, last: int) -> list[tuple[FusedBlock | None, LayerPlacement]]: ...
    def compute_logits_uncaptured(self, hidden: Tensor) -> Tensor: ...
    def signed_rotary_table(self, placement: LayerPlacement, positions: int) -> RotaryTables: ...


class CaptureEngine(Protocol):
    """Captures on one device."""

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture one call of ``function`` as a graph over the tensors that it closes over; returns its replay.

        Each replay returns the same tensor, which is valid until this engine replays or captures again. ``function``
        runs several times during the capture, so it must be idempotent.

        Raises:
            GraphCaptureError: the capture fails.
        """
        ...


class CudaCaptureEngine:
    """CUDA graphs on ``device``; one pool of memory for all of them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None
        self._first: torch.cuda.CUDAGraph | None = None  # a pool is freed with the last of its graphs

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See ``CaptureEngine.capture``."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            try:
                return self._captured(function, before)
            except RuntimeError as error:  # PyTorch's error for every refusal of CUDA and its libraries
                raise GraphCaptureError(
                    f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                ) from error
            finally:
                torch.cuda.set_stream(before)  # a failed capture leaves its own stream current

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
        # other threads, such as an energy meter, continue with calls that a capture forbids
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._first = self._first or graph

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


CAPTURE_ENGINES: dict[str, Callable[[torch.device], CaptureEngine]] = {
    "cuda": CudaCaptureEngine
}  # kind of device → its engine


ParameterPlace = tuple[dict[str, Any], str]  # (parameter table of a module, name in it)


def list_parameter_tables_and_names(parts: Iterable[nn.Module]) -> list[ParameterPlace]:
    """Places of every parameter of these modules."""
    return [
        (module._parameters, name)
        for part in parts
        for module in part.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def parameter_addresses(places: Iterable[ParameterPlace]) -> tuple[int, ...]:
    """Current addresses of the parameters; a replaced parameter or new data changes one."""
    return tuple([table[name].data_ptr() for table, name in places])


def can_capture_head_modules(parts: Sequence[Any]) -> bool:
    """Whether these modules behave as their classes, without hooks; the last one is a linear layer."""
    if not all(isinstance(part, nn.Module) for part in parts) or type(parts[-1]) is not nn.Linear:
        return False
    return not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for part in parts
        for module in part.modules()
    )


class _BucketWriter:
    """Cache of captured fused steps: stores at the rows' positions, returns a bucket of keys and values."""

    def __init__(self, buffers: KVBuffers, inputs: StepInputBuffers, keys: int):
        self._keys, self._values, self._inputs, self._bucket = buffers.keys, buffers.values, inputs, keys
        self._whole = len(inputs.positions) == buffers.rows

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        return self._put(self._keys[layer_idx], keys), self._put(self._values[layer_idx], values)

    def _put(self, buffer: Tensor, states: Tensor) -> Tensor:
        at, bucket = self._inputs, buffer.narrow(2, 0, self._bucket)
        if self._whole:
            buffer.scatter_(2, at.positions[:, None, None, None].expand_as(states), states)
            return bucket
        # an index before and one after the slice: the values are [rows, kv_heads, head_dim]
        buffer[at.places, :, at.positions] = states[:, :, 0]
        return bucket.index_select(0, at.places)


class CapturableLayerSegment:
    """Layers first+1 … last of ``stepper`` over the rows of ``inputs``, against ``keys`` keys of ``buffers`` each.

    A call returns h_last [rows, 1, D] of ``inputs.hidden`` and writes K and V; it is idempotent.
    """

    def __init__(
        self, stepper: CapturableStepper, first: int, last: int, buffers: KVBuffers, inputs: StepInputBuffers, keys: int
    ):
        self._steps = _require_fused(stepper.fused_steps_and_placements(first, last))
        self._inputs, self._writer = inputs, _BucketWriter(buffers, inputs, keys)
        self._dtype, self._window = stepper.dtype, stepper.window
        placements = {placement for _, placement in self._steps}
        # lives as long as the graph: a grown table is a new tensor
        self._rotary: dict[LayerPlacement, RotaryTables | None] = {
            placement: None if stepper.rotary is None else stepper.signed_rotary_table(placement, keys)
            for placement in placements
        }
        with torch.inference_mode(False), torch.no_grad():
            self._slots = torch.arange(keys, device=inputs.positions.device)

    def __call__(self) -> Tensor:
        inputs = {placement: self._attention_inputs(placement) for placement in self._rotary}
        hidden = self._inputs.hidden
        states = flatten_single_cpu_token(hidden)
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
        """Additive [rows, 1, 1, keys]: as ``kv_cache.attention_mask``, from positions known at replay."""
        here = self._inputs.positions[:, None]
        visible = self._slots <= here
        if placement.kind == SLIDING_ATTENTION and self._window is not None:
            visible = visible & (self._slots > here - self._window)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(self._dtype).min)[:, None, None]


def _require_fused(
    steps: Sequence[tuple[FusedBlock | None, LayerPlacement]],
) -> list[tuple[FusedBlock, LayerPlacement]]:
    """All steps; blocks without a step rule out capture (``make_step_graphs``)."""
    present = [(step, placement) for step, placement in steps if step is not None]
    assert len(present) == len(steps), "a block without a fused step cannot be captured"
    return present


class CapturedReadouts:
    """Captured readouts of one stepper. ``able``: whether a graph can run its norm and head."""

    def __init__(self, stepper: CapturableStepper, engine: CaptureEngine):
        self._engine, self.able = engine, can_capture_head_modules(stepper.head_modules)
        self._places = list_parameter_tables_and_names(stepper.head_modules) if self.able else []
        self._states: dict[int, Tensor] = {}  # [states, D], inputs of the graphs
        self._graphs: dict[int, CapturedGraph] = {}

    def logits(self, stepper: CapturableStepper, hidden: Tensor) -> Tensor:
        """[..., V] of ``hidden`` [..., D]. Raises GraphCaptureError."""
        *shape, width = hidden.shape
        states = self._still(hidden.numel() // width, width, hidden)
        states.copy_(hidden.reshape(states.shape))
        read, captured = parameter_addresses(self._places), self._graphs.get(len(states))
        if captured is None or captured.read != read:
            replay = self._engine.capture(partial(stepper.compute_logits_uncaptured, states))
            captured = self._graphs[len(states)] = CapturedGraph(replay, read, states)
        return captured.replay().view(*shape, -1).clone()

    def _still(self, count: int, width: int, like: Tensor) -> Tensor:
        if count not in self._states:
            with torch.inference_mode(False), torch.no_grad():
                self._states[count] = torch.zeros(count, width, dtype=like.dtype, device=like.device)
        return self._states[count]


MAX_CAPTURED_ROWS = 16  # most rows of a captured step; larger batches hide the launch time


class GraphCaptureWarning(UserWarning):
    """Warning that steps run one by one although graphs were requested."""


class StepGraphs:
    """The graphs of one stepper. ``refused``: reason why capture ended, else empty."""

    def __init__(self, stepper: CapturableStepper, engine: CaptureEngine):
        geometry = stepper.geometry
        self.pool = BufferPool(
            GraphBufferSpec(
                stepper.layers,
                geometry.kv_heads,
                geometry.head_dim,
                geometry.hidden,
                stepper.dtype,
                stepper.device,
            )
        )
        self._engine, self._owner = engine, weakref.ref(stepper)
        self._places = [list_parameter_tables_and_names([block]) for block in stepper.blocks]
        self._readouts = CapturedReadouts(stepper, engine)
        self.refused = ""

    @property
    def capture_status_text(self) -> str:
        """Text for reports, after the backend's name."""
        return f"nothing captured: {self.refused}" if self.refused else "captured graphs"

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """A cache whose steps can be captured."""
        stepper = self._owner()
        assert stepper is not None, "asked by its own stepper"
        return StaticKVCache(self.pool, stepper.layers, rows, capacity)

    def run_layers(
        self, stepper: CapturableStepper, hidden: Tensor, first: int, last: int, running: RunningRows, cache: KVCache
    ) -> tuple[Tensor, int] | None:
        """(States as of ``Stepper.run_layers``, keys executed per query) of checked rows; None: run it uncaptured."""
        if not isinstance(cache, StaticKVCache) or not self._takes(stepper, first, last, running, cache):
            return None
        keys, buffers, rows = bucket_size(running.keys), cache.lease.buffers(running.keys), len(running.rows)
        read = parameter_addresses(chain.from_iterable(self._places[first:last]))
        graph = buffers.graphs.get((first, last, rows, keys))
        # some rows stop soon: capture for fewer rows now, with the first step, so that no later token waits for it
        counts = (rows,) if graph is not None and graph.read == read else range(1, rows + 1)
        try:
            for count in counts:
                buffers.step_input_buffers(count).copy_inputs(hidden, running)
                captured = self._captured(stepper, first, last, buffers, count, keys, read)
        except GraphCaptureError as reason:
            self._refuse(str(reason))
            return None
        # graphs share memory: the next replay of any of them may overwrite this result
        result = captured.replay().clone()
        cache.mark_written(first, last, running)
        return result, keys

    def logits(self, stepper: CapturableStepper, hidden: Tensor) -> Tensor | None:
        """As ``Stepper.logits``; None if the readout must run uncaptured."""
        few = 0 < hidden.numel() <= MAX_CAPTURED_ROWS * hidden.shape[-1] and hidden.dtype == stepper.dtype
        if not few or not self._readouts.able or not self._may(stepper):
            return None
        try:
            return self._readouts.logits(stepper, hidden)
        except GraphCaptureError as reason:
            self._refuse(str(reason))
            return None

    def _takes(
        self, stepper: CapturableStepper, first: int, last: int, running: RunningRows, cache: StaticKVCache
    ) -> bool:
        return (
            running.queries == 1
            and first < last
            and len(running.rows) <= MAX_CAPTURED_ROWS
            and cache.lease.pool is self.pool
            and cache.has_original_layers(first, last)
            and self._may(stepper)
        )

    def _may(self, stepper: CapturableStepper) -> bool:
        return (
            not self.refused
            and self._owner() is stepper  # a copy may have other tables or blocks
            and not torch.is_grad_enabled()
            and not torch._C._len_torch_dispatch_stack()
        )

    def _captured(
        self,
        stepper: CapturableStepper,
        first: int,
        last: int,
        buffers: KVBuffers,
        rows: int,
        keys: int,
        read: tuple[int, ...],
    ) -> CapturedGraph:
        """The graph of this segment over weights at ``read``. Raises GraphCaptureError."""
        graph = buffers.graphs.get((first, last, rows, keys))
        if graph is None or graph.read != read:
            segment = CapturableLayerSegment(stepper, first, last, buffers, buffers.step_input_buffers(rows), keys)
            graph = CapturedGraph(self._engine.capture(segment), read, segment)
            buffers.store_graph((first, last, rows, keys), graph)
        return graph

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        warnings.warn(
            GraphCaptureWarning(f"no graph could be captured, and steps run one by one from here on: {reason}"),
            stacklevel=4,
        )


def make_step_graphs(stepper: CapturableStepper, backend: str) -> StepGraphs | Absent | None:
    """Graphs of a finished stepper; ``Absent`` if it allows none; None if no engine is asked for or fits its device.

    ``backend``: the requested one.
    """
    make = CAPTURE_ENGINES.get(stepper.device.type)
    if make is None or backend != FAST:
        return None
    if stepper.devices != (stepper.device,):
        return Absent("the model is spread over several devices")
    if any(step is None for step, _ in stepper.fused_steps_and_placements(0, stepper.layers)):
        return Absent("some block has no fused step")
    types = {parameter.dtype for block in stepper.blocks for parameter in block.parameters()}
    if types != {stepper.dtype}:
        return Absent(f"weights of several types: {', '.join(sorted(map(str, types)))}")
    return StepGraphs(stepper, make(stepper.device))


__all__ = [
    "CAPTURE_ENGINES",
    "CaptureEngine",
    "GraphCaptureError",
    "GraphCaptureWarning",
    "StaticKVCache",
    "StepGraphs",
    "make_step_graphs",
]
