"""T5 layer by layer: the encoder once per source, the decoder one layer at a time, as a ``Stepper``.

    cache = stepper.open_cache(sources)                      # encoder states [rows, s, D], computed here and only here
    inputs = stepper.prepare_forward(positions, cache)
    hidden = stepper.embed(tokens, inputs)                   # [rows, n, D]
    hidden = stepper.run_layers(hidden, 0, j, inputs)        # h_j: the state after j decoder blocks
    logits = stepper.logits(hidden)                          # lm_head(c · norm(h_j)), the readout at any depth

c is D^-½ if the head is the embedding's table (T5), else 1 (v1.1). A block attends to its own earlier positions and to
the source. K and V of the source depend on the encoder alone: a layer computes them for a row when the row first runs
there, so unreached layers cost nothing, and a K/V-only pass (``write_kv``) does not need the source. The relative
position bias belongs to block 0 and serves all blocks, once per forward; cross-attention has none.

Layers are the decoder's. The first decoding step of a row is the last position of its decoder prompt, usually the start
token alone: position 0, whose logits give the first new token, is already subject to the rule.

Sources of different lengths are padded on the right and masked, in the encoder and in cross-attention. The cache counts
the work executed for sources; there are no exits and no sampling here. Call under ``torch.inference_mode()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from sys import maxsize
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from emad_ref.errors import BadArgument
from emad_ref.models.families import anatomy_of, get_family
from emad_ref.models.fast.fused_blocks import apply_linear
from emad_ref.models.geometry import Geometry, geometry_of
from emad_ref.models.kv_cache import CacheWriter, KVCache, RunningRows, attention_mask, make_running_rows
from emad_ref.models.placement import copy_without_hooks, device_of, to_device, wrap_with_device_moves
from emad_ref.models.stepper import (
    CHECKED_ROWS,
    CHECKED_TOKENS,
    FIRST_TABLE,
    LayerInputs,
    find_cache_keyword,
    get_decoder_submodule_by_name,
    model_logits,
    require_eval_mode_and_kernel,
    require_parameters_match_geometry,
    require_stepper_matches_model,
)
from emad_ref.record import Bools, Ints, Work


@dataclass(frozen=True)
class EncodedSources:
    """Encoder output for some sources.

    ``states`` [rows, s, D], s the longest; ``lengths`` positions without padding, one per row.
    """

    states: Tensor
    lengths: tuple[int, ...]

    @property
    def padded_length(self) -> int:
        """s: the keys of cross-attention, padding included."""
        return self.states.shape[1]

    def select_rows(self, rows: Sequence[int]) -> EncodedSources:
        return EncodedSources(self.states[list(rows)], tuple(self.lengths[row] for row in rows))


class CrossAttentionCache:
    """K and V [rows, heads, s, d_kv] of the sources in one layer, for the session rows that have reached it."""

    def __init__(self) -> None:
        self._rows: tuple[int, ...] = ()
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def row_ids(self) -> Ints:
        """int64 [present] session rows held, ascending."""
        return np.array(self._rows, dtype=np.int64)

    def missing_rows(self, rows: tuple[int, ...]) -> list[int]:
        """The ``rows`` without entries."""
        return [] if rows == self._rows else [row for row in rows if row not in self._rows]

    def add_rows(self, rows: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Add these rows."""
        if self._keys is not None and self._values is not None:
            keys, values = torch.cat([self._keys, keys]), torch.cat([self._values, values])
        rows_now = (*self._rows, *rows)
        order = sorted(range(len(rows_now)), key=rows_now.__getitem__)
        if order != list(range(len(rows_now))):
            keys, values = keys[order], values[order]
        self._rows, self._keys, self._values = tuple(rows_now[i] for i in order), keys, values

    def keys(self, rows: tuple[int, ...]) -> Tensor:
        """[rows, heads, s, d_kv] of held rows."""
        return self._of(self._keys, rows)

    def values(self, rows: tuple[int, ...]) -> Tensor:
        """[rows, heads, s, d_kv] of held rows."""
        return self._of(self._values, rows)

    def keep_rows(self, numbers: dict[int, int]) -> None:
        """Keep only the rows that ``numbers`` names, renumbered; the order must not change."""
        places = [i for i, row in enumerate(self._rows) if row in numbers]
        if len(places) < len(self._rows) and self._keys is not None and self._values is not None:
            self._keys = self._keys[places] if places else None
            self._values = self._values[places] if places else None
        self._rows = tuple(numbers[self._rows[i]] for i in places)

    def _of(self, buffer: Tensor | None, rows: tuple[int, ...]) -> Tensor:
        assert buffer is not None, "a block runs after its cross-attention K and V were filled"
        return buffer if rows == self._rows else buffer[[self._rows.index(row) for row in rows]]


class Seq2SeqKVCache(KVCache):
    """K/V of one batch of decoders, the encoder output for their sources, and the work executed for sources.

    ``cross[i]`` holds the sources' K and V of layer i + 1. Executed so far, padding and dropped rows included:
    ``encoder_tokens`` positions and ``encoder_context`` Σ queries × keys (per encoder layer) of the encoder;
    ``cross_fills`` int64 [L] source positions projected to K and V, ``cross_context`` int64 [L] Σ queries × source keys
    of the decoder's blocks.
    """

    def __init__(self, layers: int, rows: int, capacity: int, encoded: EncodedSources | None = None):
        super().__init__(layers, rows, capacity)
        self.encoded = encoded
        self.cross = [CrossAttentionCache() for _ in range(layers)]
        self.cross_fills, self.cross_context = np.zeros(layers, dtype=np.int64), np.zeros(layers, dtype=np.int64)
        self.encoder_tokens = 0 if encoded is None else rows * encoded.padded_length
        self.encoder_context = self.encoder_tokens * (0 if encoded is None else encoded.padded_length)

    def encoder_work(self) -> Work:
        return replace(
            super().encoder_work(),
            cross_fills=self.cross_fills.copy(),
            cross_context=self.cross_context.copy(),
            encoder_tokens=self.encoder_tokens,
            encoder_context=self.encoder_context,
        )

    def free_layers_above(self, caps: Ints) -> None:
        before = self._caps
        super().free_layers_above(caps)
        if self._caps is before:
            return
        for own, cross in zip(self.layers, self.cross, strict=True):
            cross.keep_rows({row: row for row in own.row_ids.tolist()})

    def drop_rows(self, rows: Ints) -> None:
        before = self.rows
        super().drop_rows(rows)
        gone = set(np.atleast_1d(np.asarray(rows, dtype=np.int64)).tolist())
        remaining = [row for row in range(before) if row not in gone]
        self.encoded = None if self.encoded is None else self.encoded.select_rows(remaining)
        for cross in self.cross:
            cross.keep_rows({row: i for i, row in enumerate(remaining)})


class Seq2SeqLayerInputs:
    """``LayerInputs`` of T5's decoder, over the sources that ``cache`` holds for the running rows.

    ``arguments``: the blocks' keyword arguments, by device.
    """

    def __init__(self, stepper: Seq2SeqStepper, running: RunningRows, cache: Seq2SeqKVCache, encoded: EncodedSources):
        self.running, self.cache, self.encoded, self.executed = running, cache, encoded, running.keys
        self._stepper = stepper
        bias, block_cache = stepper.position_bias(self._distances(stepper.devices[0])), _BlockCache(cache, running)
        self.arguments = {
            device: self._block_arguments(to_device(bias, device), encoded, stepper.dtype, block_cache)
            for device in stepper.devices
        }

    def select_rows(self, running: RunningRows) -> Seq2SeqLayerInputs:
        """See ``LayerInputs.select_rows``."""
        if running is self.running:
            return self
        return Seq2SeqLayerInputs(self._stepper, running, self.cache, self.encoded)

    def _block_arguments(
        self, bias: Tensor, encoded: EncodedSources, dtype: torch.dtype, block_cache: _BlockCache
    ) -> dict[str, Any]:
        """Keyword arguments of the blocks on one device, that of ``bias``."""
        flagged = self._stepper.attention_kernel == "sdpa"
        return {
            "attention_mask": attention_mask(self.running, None, dtype, bias.device, flagged=flagged),
            "position_bias": bias,
            # its presence makes a block attend to a source; ``_reach`` reads its values, the block does not
            "encoder_hidden_states": encoded.states,
            "encoder_attention_mask": self._source_mask(encoded, bias.device),
            "encoder_decoder_position_bias": bias.new_zeros(
                1, bias.shape[1], self.running.queries, encoded.padded_length
            ),
            self._stepper.cache_keyword: block_cache,
        }

    def _distances(self, device: torch.device) -> Tensor:
        """int64 [rows or 1, n, keys] positions from each key up to its query; 0 for keys that a mask hides."""
        here = self.running.broadcastable_positions_on(device)
        return (here[:, :, None] - torch.arange(self.running.keys, device=device)).clamp_(min=0)

    def _source_mask(self, encoded: EncodedSources, device: torch.device) -> Tensor | None:
        """Additive mask [rows, 1, 1, s]; None if no source is padded."""
        lengths = [encoded.lengths[row] for row in self.running.rows]
        if min(lengths) == encoded.padded_length:
            return None
        visible = torch.arange(encoded.padded_length) < torch.tensor(lengths)[:, None]
        mask = torch.zeros(visible.shape, dtype=encoded.states.dtype)
        return mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[:, None, None].to(device)


class _CrossAttentionEntries:
    """Cross-attention entries of one layer: K and V of the running rows."""

    def __init__(self, layer: CrossAttentionCache, rows: tuple[int, ...]):
        self._layer, self._rows = layer, rows

    @property
    def keys(self) -> Tensor:
        return self._layer.keys(self._rows)

    @property
    def values(self) -> Tensor:
        return self._layer.values(self._rows)


class _BlockCache(EncoderDecoderCache):
    """Cache interface of a T5 block; the block checks for this class, but uses only the four names below."""

    def __init__(self, cache: Seq2SeqKVCache, running: RunningRows):
        self.self_attention_cache: Any = CacheWriter(cache, running)
        self.cross_attention_cache: Any = SimpleNamespace(
            layers=[_CrossAttentionEntries(layer, running.rows) for layer in cache.cross]
        )
        # the stepper fills cross-attention before it calls a block, so that T5 never projects the source itself
        self.is_updated = dict.fromkeys(range(len(cache.cross)), True)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Read only if a block computes its own position bias; the stepper passes it in."""
        return 0


class Seq2SeqStepper:
    """A ``Stepper`` of one T5; its caches belong to sources.

    Parameters
    ----------
    model : transformers.T5ForConditionalGeneration
        In eval mode, T5 or v1.1, with sdpa or eager attention.
    check : bool
        Compare full-depth logits with the model's own, over sources and decoder inputs of 2 rows.

    Raises
    ------
    BadArgument
        Another family, training mode, offloaded weights, a block on several devices, another attention implementation.
    SizeMismatch
        The row counts other parameters than the model holds.
    ModelMismatch
        The layers do not reproduce the model's logits.
    """

    def __init__(self, model: Any, *, check: bool = True):
        config = model.config
        if not get_family(config.model_type).is_encoder_decoder:
            raise BadArgument("model_type", config.model_type, "t5", "CausalStepper walks decoder-only families")
        self.model, self.config, anatomy = model, config, anatomy_of(config)
        self.geometry: Geometry = geometry_of(config)
        self.layers, self.vocabulary_size = self.geometry.layers, self.geometry.vocabulary
        self.attention_kernel: str = config._attn_implementation
        require_eval_mode_and_kernel(model, self.attention_kernel)
        require_parameters_match_geometry(model, self.geometry)
        decoder = model.get_decoder()
        blocks: Any = get_decoder_submodule_by_name(config.model_type, decoder, anatomy.blocks)
        self.cache_keyword = find_cache_keyword(blocks[0])
        self._head = copy_without_hooks(model.get_output_embeddings())
        self.device, self.dtype = self._head.weight.device, self._head.weight.dtype
        self._blocks = [
            (copy_without_hooks(block), device_of(f"layer {number}", block) or self.device)
            for number, block in enumerate(blocks, start=1)
        ]
        self._bias = self._blocks[0][0].layer[0].SelfAttention
        self.devices: tuple[torch.device, ...] = tuple(dict.fromkeys(device for _, device in self._blocks))
        self._embedding = wrap_with_device_moves("embedding", decoder.embed_tokens, self.device)
        norm: Any = get_decoder_submodule_by_name(config.model_type, decoder, anatomy.final_norm)
        self._final_norm = wrap_with_device_moves(anatomy.final_norm, norm, self.device)
        self.logit_softcap: float | None = None
        self._scale: float | None = config.d_model**-0.5 if config.scale_decoder_outputs else None
        self._buckets: Tensor | None = None
        if check:
            self._compare_with_model()

    @property
    def max_positions(self) -> int:
        """Unlimited: distances beyond the last bucket share it."""
        return maxsize

    def encode(self, sources: Sequence[Ints | None]) -> EncodedSources:
        """Run the encoder over ``sources``, each int64 [s ≥ 1], padded on the right to the longest.

        Raises:
            BadArgument: no source, or one that is empty, of another shape or dtype, or outside the vocabulary.
        """
        checked = [self._checked_source(row, source) for row, source in enumerate(sources)]
        if not checked:
            raise BadArgument("sources", [], "at least one source")
        lengths = tuple(len(source) for source in checked)
        ids = np.zeros((len(checked), max(lengths)), dtype=np.int64)
        for row, source in enumerate(checked):
            ids[row, : lengths[row]] = source
        present = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        mask = None if present.all() else torch.from_numpy(present.astype(np.int64)).to(self.device)
        encoder = self.model.get_encoder()
        states = encoder(input_ids=torch.from_numpy(ids).to(self.device), attention_mask=mask).last_hidden_state
        return EncodedSources(to_device(states, self.device), lengths)

    def open_cache(self, sources: Sequence[Ints | None], capacity: int = 256) -> Seq2SeqKVCache:
        """An empty cache with one row per source; runs the encoder. Raises as ``encode``."""
        return Seq2SeqKVCache(self.layers, len(sources), capacity, self.encode(sources))

    def new_cache(self, rows: int, capacity: int = 256) -> Seq2SeqKVCache:
        """A cache without sources: nothing can run on it; see ``open_cache``."""
        return Seq2SeqKVCache(self.layers, rows, capacity)

    def prepare_forward(
        self,
        positions: Ints,
        cache: KVCache | None,
        rows: Ints | None = None,
        lengths: Ints | None = None,
        caps: Ints | None = None,
        by_rule: Bools | None = None,
    ) -> Seq2SeqLayerInputs:
        """See ``Stepper.prepare_forward``; the cache must come from ``open_cache``, which gives it the sources.

        Raises:
            BadArgument: other shapes or values, or a cache without sources.
        """
        if not isinstance(cache, Seq2SeqKVCache) or cache.encoded is None:
            raise BadArgument("cache", cache, "a cache that holds sources", "make it with open_cache(sources)")
        running = make_running_rows(self.layers, positions, cache, rows, lengths, None, caps, by_rule)
        return Seq2SeqLayerInputs(self, running, cache, cache.encoded)

    def embed(self, tokens: Tensor, inputs: LayerInputs) -> Tensor:
        """h_0 [rows, n, D] of ``tokens`` int64 [rows, n]: the embedding; positions are a bias on scores."""
        hidden: Tensor = self._embedding(tokens)
        return hidden

    def run_layers(self, hidden: Tensor, first: int, last: int, inputs: LayerInputs) -> Tensor:
        """h_last from h_first, [rows, n, D]: executes decoder layers first+1 … last and writes their K/V.

        Rows that reach a layer for the first time have their source projected to its K and V.

        Raises:
            BadArgument: not 0 ≤ first ≤ last ≤ L.
            MissingEntryError: a layer does not hold exactly the entries below a row's first position; nothing was
            written.
        """
        if not 0 <= first <= last <= self.layers:
            raise BadArgument("first, last", (first, last), f"0 ≤ first ≤ last ≤ {self.layers}")
        assert isinstance(inputs, Seq2SeqLayerInputs), "inputs come from this stepper's prepare_forward"
        running, cache, encoded = inputs.running, inputs.cache, inputs.encoded
        cache.require_earlier_entries(first, last, running)
        for number in range(first, last):
            self._reach(number, running.rows, cache, encoded)
            block, device = self._blocks[number]
            hidden = block(to_device(hidden, device), **inputs.arguments[device])[0]
        cache.cross_context[first:last] += len(running) * running.queries * encoded.padded_length
        return to_device(hidden, self.device)

    def write_kv(self, hidden: Tensor, layer: int, inputs: LayerInputs) -> None:
        """Write K and V of ``layer`` (1…L) from the state below it, ``hidden`` [rows, n, D]; no attention, no MLP.

        Executes the norm and the key and value projections of self-attention. K and V of cross-attention do not depend
        on the decoder, so they need no filling.

        Raises:
            BadArgument: no such layer.
            MissingEntryError: as in ``run_layers``.
        """
        if not 1 <= layer <= self.layers:
            raise BadArgument("layer", layer, f"a layer in 1–{self.layers}")
        assert isinstance(inputs, Seq2SeqLayerInputs), "inputs come from this stepper's prepare_forward"
        inputs.cache.require_earlier_entries(layer - 1, layer, inputs.running)
        block, device = self._blocks[layer - 1]
        part = block.layer[0]
        keys, values = self._keys_and_values(part.SelfAttention, part.layer_norm(to_device(hidden, device)))
        inputs.cache.layers[layer - 1].write(keys, values, inputs.running)

    def apply_final_norm(self, hidden: Tensor) -> Tensor:
        """The head's input [..., D] of states [..., D] after any layer: final norm, and the scale of a tied head."""
        normed: Tensor = self._final_norm(hidden)
        return normed if self._scale is None else normed * self._scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Readout [..., V] of states [..., D] after any layer: final norm, scale of a tied head, head."""
        return apply_linear(self._head, self.apply_final_norm(hidden))

    @property
    def unembedding(self) -> Tensor:
        """[V, D] rows of the head."""
        return self._head.weight

    @property
    def unembedding_bias(self) -> Tensor | None:
        """[V], or None."""
        return self._head.bias

    def position_bias(self, distances: Tensor) -> Tensor:
        """[rows, heads, n, keys] bias on scores, of block 0 and on its device, for ``distances`` int64 ≥ 0."""
        return self._bias.relative_attention_bias(self._bucket_table(distances.shape[2])[distances]).permute(0, 3, 1, 2)

    def _bucket_table(self, positions: int) -> Tensor:
        """int64 [≥ positions] bucket of each distance: not a weight, so it may be kept between forwards."""
        if self._buckets is None or len(self._buckets) < positions:
            size = FIRST_TABLE // 2 if self._buckets is None else len(self._buckets)
            # inference-mode tensors cannot take part in a later forward outside of it
            with torch.inference_mode(False):
                self._buckets = self._bias._relative_position_bucket(
                    -torch.arange(max(positions, 2 * size), device=self.devices[0]),
                    bidirectional=False,
                    num_buckets=self._bias.relative_attention_num_buckets,
                    max_distance=self._bias.relative_attention_max_distance,
                )
        return self._buckets

    def _reach(self, number: int, rows: tuple[int, ...], cache: Seq2SeqKVCache, encoded: EncodedSources) -> None:
        """Add the sources of new rows to the cross-attention of layer ``number`` + 1."""
        missing = cache.cross[number].missing_rows(rows)
        if not missing:
            return
        states = encoded.states if len(missing) == cache.rows else encoded.states[missing]
        block, device = self._blocks[number]
        attention = block.layer[1].EncDecAttention
        cache.cross[number].add_rows(missing, *self._keys_and_values(attention, to_device(states, device)))
        cache.cross_fills[number] += len(missing) * encoded.padded_length

    def _keys_and_values(self, attention: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, heads, n, d_kv] each, from [rows, n, D]."""
        shape = (*states.shape[:2], -1, self.geometry.head_dim)
        return attention.k(states).view(shape).transpose(1, 2), attention.v(states).view(shape).transpose(1, 2)

    def _checked_source(self, row: int, sent: Ints | None) -> Ints:
        source: Ints = np.asarray(sent)
        if source.ndim != 1 or len(source) == 0 or source.dtype.kind not in "iu":
            raise BadArgument(f"sources[{row}]", source.tolist(), "integers of shape [s ≥ 1]", "T5 reads a source")
        bad = source[(source < 0) | (source >= self.vocabulary_size)]
        if len(bad):
            raise BadArgument(f"sources[{row}]", int(bad[0]), f"ids in 0–{self.vocabulary_size - 1}")
        return source.astype(np.int64, copy=False)

    @torch.inference_mode()
    def _compare_with_model(self) -> None:
        """Compare one pass, and one cached step after a prompt, with the model's own logits.

        Sources have two lengths.
        """
        ids = (
            torch.arange(CHECKED_ROWS * CHECKED_TOKENS, device=self.device).view(CHECKED_ROWS, -1)
            % self.vocabulary_size
        )
        lengths = [CHECKED_TOKENS - 5 * row for row in range(CHECKED_ROWS)]
        mask = torch.arange(CHECKED_TOKENS, device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
        read = ids.flip(1)
        inputs = {"input_ids": read, "attention_mask": mask.long(), "decoder_input_ids": ids}
        theirs = model_logits(self.model, self.device, **inputs)
        sources = [row[:n].cpu().numpy() for row, n in zip(read, lengths, strict=True)]
        whole, stepped = self.open_cache(sources), self.open_cache(sources, CHECKED_TOKENS)
        require_stepper_matches_model(self, self.config.model_type, ids, theirs, whole, stepped)
