"""Causal language model layer by layer: the blocks of a decoder-only family, called in turn.

Without a cache the blocks are the Hugging Face modules themselves: full depth equals the model's own forward bit by bit
if the masks agree. A checkpoint needs no conversion. Construction compares the model's size and its full-depth logits
with ``model(ids).logits`` (``models.stepper``): an unknown or changed family fails loudly. With a cache, blocks run
their fused step (``models.fast.fused_blocks``) if there is one, unless the backend is ``walked``. Steps of one token
are captured if the device supports it (``models.fast.graph_capture``), unless the backend is ``eager``.

A model may be spread over several devices, block by block (``models.placement``): a block gets its states, masks and
rotary tables on its own device, and its K and V stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from emad_ref.models.families import (
    FAST,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    WALKED,
    anatomy_of,
    get_family,
    layer_attention_types,
)
from emad_ref.models.fast.fused_blocks import (
    AttentionInputs,
    FusedBlock,
    RotaryTables,
    apply_linear,
    flatten_single_cpu_token,
    fuse_block,
    fuse_norm,
    signed_rotary_tables,
)
from emad_ref.models.fast.graph_capture import make_step_graphs
from emad_ref.models.geometry import Geometry, geometry_of
from emad_ref.models.kv_cache import CacheWriter, KVCache, RunningRows, attention_mask, make_running_rows
from emad_ref.models.placement import (
    LayerPlacement,
    copy_without_hooks,
    device_of,
    to_device,
    wrap_with_device_moves,
)
from emad_ref.models.stepper import (
    CHECKED_ROWS,
    CHECKED_TOKENS,
    FIRST_TABLE,
    LayerInputs,
    checked_pieces,
    find_cache_keyword,
    get_decoder_submodule_by_name,
    model_logits,
    require_backend,
    require_eval_mode_and_kernel,
    require_parameters_match_geometry,
    require_stepper_matches_model,
)
from emad_ref.record import Bools, Ints


class CausalLayerInputs:
    """``LayerInputs`` of a decoder-only model: rows, positions and K/V, and per ``LayerPlacement`` masks and rotations.

    Masks and rotary tables are computed once per placement. ``ragged``: whether rows may be padded, as prompts are.
    """

    def __init__(self, stepper: CausalStepper, running: RunningRows, cache: KVCache | None, ragged: bool):
        self.running, self.cache, self.executed, self.ragged = running, cache, running.keys, ragged
        self._stepper, self._writer = stepper, None if cache is None else CacheWriter(cache, running)
        self._arguments: dict[LayerPlacement, dict[str, Any]] = {}
        self._attention_inputs: dict[LayerPlacement, AttentionInputs] = {}

    def select_rows(self, running: RunningRows) -> CausalLayerInputs:
        """See ``LayerInputs.select_rows``."""
        if running is self.running:
            return self
        return CausalLayerInputs(self._stepper, running, self.cache, self.ragged)

    def block_kwargs(self, placement: LayerPlacement) -> dict[str, Any]:
        """Keyword arguments of a block's module."""
        if placement not in self._arguments:
            stepper, anatomy = self._stepper, self._stepper.anatomy
            arguments: dict[str, Any] = {"attention_mask": self._mask(placement), **dict(anatomy.constants)}
            if stepper.rotary is None and anatomy.positions_inside:
                arguments["position_ids"] = self.running.broadcastable_positions_on(placement.device)
            if stepper.rotary is not None:
                arguments["position_embeddings"] = self._rotary(stepper.rotary_table(placement, self.running.keys))
            if self._writer is not None:
                arguments[stepper.cache_keyword] = self._writer
            self._arguments[placement] = arguments
        return self._arguments[placement]

    def attention_inputs(self, placement: LayerPlacement) -> AttentionInputs:
        """Inputs of a block's fused step."""
        if placement not in self._attention_inputs:
            assert self._writer is not None, "fused steps write to a cache"
            stepper, running = self._stepper, self.running
            table = None if stepper.rotary is None else stepper.signed_rotary_table(placement, running.keys)
            rotary = None if table is None else self._rotary(table)
            inputs = AttentionInputs(self._writer, self._mask(placement), rotary, several=running.queries > 1)
            self._attention_inputs[placement] = inputs
        return self._attention_inputs[placement]

    def _mask(self, placement: LayerPlacement) -> Tensor | None:
        stepper = self._stepper
        return attention_mask(
            self.running,
            stepper.window if placement.kind == SLIDING_ATTENTION else None,
            stepper.dtype,
            placement.device,
            flagged=stepper.attention_kernel == "sdpa",
            always=stepper.anatomy.always_masked,
        )

    def _rotary(self, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(cos, sin) at the running rows' positions, [1, n, …] if all rows start together, else [rows, n, …]."""
        running, (cos, sin) = self.running, tables
        if running.start is not None:
            return cos.narrow(1, running.start, running.queries), sin.narrow(1, running.start, running.queries)
        slots = running.positions_on(cos.device)
        return cos[0][slots], sin[0][slots]


class _KVWritten(Exception):
    """Raised to leave a block once its K and V are stored."""


class _FillWriter(CacheWriter):
    """A writer that ends the block, so its attention and MLP never run."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        super().update(keys, values, layer_idx)
        raise _KVWritten


class CausalStepper:
    """A ``Stepper`` of one decoder-only model, on one device or spread over several (``models.placement``).

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal LM in eval mode, of a family in ``models.families``, with sdpa or eager attention. A spread model also
        runs on its own, as by ``accelerate.dispatch_model``.
    check : bool
        Compare full-depth logits with the model's own (2 × 12 tokens, in one pass and in three).
    backend : str
        ``fast``: with a cache, fused steps, on CUDA as captured graphs; ``eager``: fused steps one by one; ``walked``:
        modules alone.

    Attributes
    ----------
    device : torch.device
        Device of the head, of token ids, states and logits.
    devices : tuple of torch.device
        Devices of the blocks.

    Raises
    ------
    BadArgument
        An unknown backend, a family without a row, training mode, offloaded weights, a block on several devices,
        another attention implementation.
    SizeMismatch
        The row counts other parameters than the model holds (quantised models are exempt).
    ModelMismatch
        The layers do not reproduce the model's logits.
    """

    def __init__(self, model: Any, *, check: bool = True, backend: str = FAST):
        require_backend(backend)
        config = model.config.get_text_config()
        if get_family(config.model_type).is_encoder_decoder:
            raise BadArgument("model_type", config.model_type, "a decoder-only family", "Seq2SeqStepper walks this one")
        self.model, self.config, self.anatomy = model, config, anatomy_of(config)
        self.geometry: Geometry = geometry_of(config)
        self.layers, self.vocabulary_size = self.geometry.layers, self.geometry.vocabulary
        self.attention_kernel: str = config._attn_implementation
        require_eval_mode_and_kernel(model, self.attention_kernel)
        require_parameters_match_geometry(model, self.geometry)
        decoder = model.get_decoder()
        blocks: Any = get_decoder_submodule_by_name(config.model_type, decoder, self.anatomy.blocks)
        self.cache_keyword = find_cache_keyword(blocks[0])
        self._head = copy_without_hooks(model.get_output_embeddings())
        self.device, self.dtype = self._head.weight.device, self._head.weight.dtype
        self._blocks = [
            (copy_without_hooks(block), LayerPlacement(kind, device_of(f"layer {number}", block) or self.device))
            for number, (block, kind) in enumerate(zip(blocks, layer_attention_types(config), strict=True), start=1)
        ]
        # fused steps where available; other blocks keep their own forward
        self._steps = [
            fuse_block(block, self.attention_kernel) if backend != WALKED else None for block, _ in self._blocks
        ]
        self.placements: tuple[LayerPlacement, ...] = tuple(dict.fromkeys(placement for _, placement in self._blocks))
        self.devices: tuple[torch.device, ...] = tuple(dict.fromkeys(placement.device for placement in self.placements))
        windowed = any(placement.kind == SLIDING_ATTENTION for placement in self.placements)
        self.window: int | None = config.sliding_window if windowed else None
        self._embedding = wrap_with_device_moves("embedding", model.get_input_embeddings(), self.device)
        self._final_norm = self._part(decoder, self.anatomy.final_norm)
        norm = None if backend == WALKED or self._final_norm is None else fuse_norm(self._final_norm)
        self._norm = norm or self._final_norm
        self._project_in = self._part(decoder, self.anatomy.project_in)
        self._project_out = self._part(decoder, self.anatomy.project_out)
        self._positions: Any = get_decoder_submodule_by_name(config.model_type, decoder, self.anatomy.positions)
        inside = self.anatomy.positions_inside and not hasattr(decoder, str(self.anatomy.rotary))
        rotary = None if inside else get_decoder_submodule_by_name(config.model_type, decoder, self.anatomy.rotary)
        self.rotary: Any = None if rotary is None else copy_without_hooks(rotary)
        self.logit_softcap: float | None = _config_number(config, self.anatomy.softcap)
        self._embedding_factor = _config_number(config, self.anatomy.embedding_factor)
        self._logits_divisor = _config_number(config, self.anatomy.logits_divisor)
        # the first position without an entry in a table of positions, of the model or inside its blocks
        ends = self._positions is not None or self.anatomy.positions_inside
        self._end: int | None = self.max_positions if ends else None
        self._tables: dict[LayerPlacement, tuple[Tensor, Tensor]] = {}
        self._signed: dict[LayerPlacement, tuple[Tensor, RotaryTables]] = {}
        self._requested = backend
        graphs = make_step_graphs(self, backend)
        self._without = graphs if isinstance(graphs, Absent) else None
        self._graphs = None if isinstance(graphs, Absent) else graphs
        if check:
            self._compare_with_model()

    @property
    def backend(self) -> str:
        """The running backend: as requested, and for ``fast`` on a capable device, whether steps are captured."""
        if self._graphs is None:
            why = "" if self._without is None else f", nothing captured: {self._without.reason}"
            return f"{self._requested}{why}"
        return f"{self._requested}, {self._graphs.capture_status_text}"

    @property
    def is_capturing_graphs(self) -> bool:
        """Whether steps of one token are captured."""
        return self._graphs is not None and not self._graphs.refused

    @property
    def blocks(self) -> list[Any]:
        """The blocks, as called."""
        return [block for block, _ in self._blocks]

    @property
    def head_modules(self) -> list[Any]:
        """The modules of the readout, in order."""
        return [part for part in (self._final_norm, self._project_out, self._head) if part is not None]

    def fused_steps_and_placements(self, first: int, last: int) -> list[tuple[FusedBlock | None, LayerPlacement]]:
        """The fused steps of layers first+1 … last, None for a block without one, and the placement of each."""
        placements = (placement for _, placement in self._blocks[first:last])
        return list(zip(self._steps[first:last], placements, strict=True))

    @property
    def max_positions(self) -> int:
        """Number of supported positions, limited by a table of learned positions."""
        return int(self.config.max_position_embeddings)

    def open_cache(self, sources: Sequence[Ints | None], capacity: int = 256) -> KVCache:
        """An empty cache with one row per source; each source is None, since these models have none.

        Raises:
            BadArgument: a source.
        """
        for row, source in enumerate(sources):
            if source is not None:
                raise BadArgument(f"prompts[{row}].source", source, "None", "this model has no encoder to read it")
        return self.new_cache(len(sources), capacity)

    def new_cache(self, rows: int, capacity: int = 256) -> KVCache:
        """An empty cache for ``rows`` sequences; ``capacity`` slots at first, more as needed."""
        return KVCache(self.layers, rows, capacity) if self._graphs is None else self._graphs.new_cache(rows, capacity)

    def prepare_forward(
        self,
        positions: Ints,
        cache: KVCache | None,
        rows: Ints | None = None,
        lengths: Ints | None = None,
        caps: Ints | None = None,
        by_rule: Bools | None = None,
    ) -> CausalLayerInputs:
        """See ``Stepper.prepare_forward``."""
        running = make_running_rows(self.layers, positions, cache, rows, lengths, self._end, caps, by_rule)
        return CausalLayerInputs(self, running, cache, lengths is not None)

    def embed(self, tokens: Tensor, inputs: LayerInputs) -> Tensor:
        """h_0 [rows, n, D] of ``tokens`` int64 [rows, n]: embedding, input projection, learned positions."""
        hidden, running = self._embedding(tokens), inputs.running
        if self._embedding_factor is not None:
            hidden = hidden * self._embedding_factor
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._positions is not None:
            table, offset = self._positions.weight, self.anatomy.position_offset
            if running.start is None:
                return hidden + to_device(table[running.positions_on(table.device) + offset], self.device)
            return hidden + to_device(table.narrow(0, running.start + offset, running.queries), self.device)
        return hidden

    def run_layers(self, hidden: Tensor, first: int, last: int, inputs: LayerInputs) -> Tensor:
        """See ``Stepper.run_layers``. Each block writes its K and V through the ``CacheWriter`` among its inputs."""
        if not 0 <= first <= last <= self.layers:
            raise BadArgument("first, last", (first, last), f"0 ≤ first ≤ last ≤ {self.layers}")
        assert isinstance(inputs, CausalLayerInputs), "inputs come from this stepper's prepare_forward"
        running, cache, inputs.executed = inputs.running, inputs.cache, inputs.running.keys
        if cache is not None:
            cache.require_earlier_entries(first, last, running)
        if self._graphs is not None and cache is not None and not inputs.ragged:
            replayed = self._graphs.run_layers(self, hidden, first, last, running, cache)
            if replayed is not None:
                hidden, inputs.executed = replayed
                return hidden
        here: LayerPlacement | None = None
        shape = hidden.shape
        for (block, placement), step in zip(self._blocks[first:last], self._steps[first:last], strict=True):
            if placement != here:  # looked up only on a change: in a small model each call takes noticeable time
                here, attention = placement, None
                hidden = hidden if hidden.device == placement.device else to_device(hidden, placement.device)
            if step is None or cache is None:
                out = block(hidden.view(shape), **inputs.block_kwargs(placement))
                hidden = out[0] if isinstance(out, tuple) else out  # by family and release of transformers
            else:
                attention = attention or inputs.attention_inputs(placement)
                hidden = step(flatten_single_cpu_token(hidden), attention)
        hidden = hidden.view(shape)
        return hidden if hidden.device == self.device else to_device(hidden, self.device)

    def write_kv(self, hidden: Tensor, layer: int, inputs: LayerInputs) -> None:
        """Write K and V of ``layer`` (1…L) from the state below it, ``hidden`` [rows, n, D]; no attention, no MLP.

        Executes the block's norm and its query, key and value projections. Raises as ``Stepper.write_kv``.
        """
        if not 1 <= layer <= self.layers:
            raise BadArgument("layer", layer, f"a layer in 1–{self.layers}")
        assert isinstance(inputs, CausalLayerInputs), "inputs come from this stepper's prepare_forward"
        running, cache = inputs.running, inputs.cache
        assert cache is not None, "K and V are written to a cache"
        cache.require_earlier_entries(layer - 1, layer, running)
        block, placement = self._blocks[layer - 1]
        arguments = {**inputs.block_kwargs(placement), self.cache_keyword: _FillWriter(cache, running)}
        try:
            block(to_device(hidden, placement.device), **arguments)
        except _KVWritten:
            return
        raise AssertionError(f"layer {layer} never updated its cache")

    def apply_final_norm(self, hidden: Tensor) -> Tensor:
        """The head's input [..., E] of states [..., D] after any layer: final norm, output projection.

        A family's divisor of logits is applied here, so estimates from some rows of the head need no special case.
        """
        if self._norm is not None:
            hidden = self._norm(hidden)
        if self._logits_divisor is not None:
            hidden = hidden / self._logits_divisor
        return hidden if self._project_out is None else self._project_out(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Readout [..., V] of states [..., D] after any layer: final norm, output projection, head, softcap."""
        replayed = None if self._graphs is None else self._graphs.logits(self, hidden)
        return self.compute_logits_uncaptured(hidden) if replayed is None else replayed

    def compute_logits_uncaptured(self, hidden: Tensor) -> Tensor:
        """``logits`` without a captured graph."""
        normed = self.apply_final_norm(hidden)
        logits = self._head(normed) if self._requested == WALKED else apply_linear(self._head, normed)
        return logits if self.logit_softcap is None else torch.tanh(logits / self.logit_softcap) * self.logit_softcap

    @property
    def unembedding(self) -> Tensor:
        """[V, E] rows of the head."""
        return self._head.weight

    @property
    def unembedding_bias(self) -> Tensor | None:
        """[V], or None."""
        return self._head.bias

    def rotary_table(self, placement: LayerPlacement, positions: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, ≥ positions, d] of the model's own rotary module, on the blocks' device.

        Tables are kept between forwards.
        """
        key = placement if self.anatomy.rotary_per_kind else LayerPlacement(FULL_ATTENTION, placement.device)
        if key not in self._tables or self._tables[key][0].shape[1] < positions:
            size = self._tables[key][0].shape[1] if key in self._tables else FIRST_TABLE // 2
            home = device_of("rotary", self.rotary) or self.device
            # inference-mode tensors cannot take part in a later forward outside of it
            with torch.inference_mode(False), torch.no_grad():
                wanted = max(positions, 2 * size)
                at = torch.arange(wanted if self._end is None else min(wanted, self._end), device=home)[None]
                like = torch.empty(0, dtype=self.dtype, device=home)
                per_kind = (placement.kind,) if self.anatomy.rotary_per_kind else ()
                cos, sin = self.rotary(like, at, *per_kind)
                self._tables[key] = to_device(cos, placement.device), to_device(sin, placement.device)
        return self._tables[key]

    def signed_rotary_table(self, placement: LayerPlacement, positions: int) -> RotaryTables:
        """``rotary_table`` as fused steps take it, [1, ≥ positions, 1, 1, d]."""
        cos, sin = self.rotary_table(placement, positions)
        signed = self._signed.get(placement)
        if (
            signed is None or signed[0] is not cos
        ):  # the cached entry is valid for this table only: tables grow, and a substituted stepper has another
            with torch.inference_mode(False), torch.no_grad():
                signed = self._signed[placement] = cos, signed_rotary_tables(cos, sin)
        return signed[1]

    def _part(self, decoder: Any, name: str | None) -> Any:
        """A part of the decoder, called on this stepper's device; None if the family has none."""
        part = get_decoder_submodule_by_name(self.config.model_type, decoder, name)
        return None if part is None else wrap_with_device_moves(str(name), part, self.device)

    @torch.inference_mode()
    def _compare_with_model(self) -> None:
        """Compare with the model's own logits: one plain pass, and a prompt, a chunk and one token on a cache."""
        ids = (
            torch.arange(CHECKED_ROWS * CHECKED_TOKENS, device=self.device).view(CHECKED_ROWS, -1)
            % self.vocabulary_size
        )
        theirs, stepped = model_logits(self.model, self.device, input_ids=ids), None
        if self.geometry.experts:  # rounding may choose other experts: the model's own cache moves its logits, too
            cache = DynamicCache(config=self.config)
            pieces = (ids[:, start:end] for start, end in checked_pieces(ids))
            own = [model_logits(self.model, self.device, input_ids=ids, past_key_values=cache) for ids in pieces]
            stepped = torch.cat(own, dim=1)
        empty = self.new_cache(CHECKED_ROWS, CHECKED_TOKENS)
        require_stepper_matches_model(self, self.config.model_type, ids, theirs, None, empty, stepped)


def _config_number(config: Any, key: str | None) -> float | None:
    """An optional number of the family's config."""
    return None if key is None else getattr(config, key)
