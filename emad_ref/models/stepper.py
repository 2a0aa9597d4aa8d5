"""A causal language model as embed → layers first+1 … last → logits, one call each.

    hidden = stepper.embed(tokens, frame)                # [rows, n, D]
    hidden = stepper.run(hidden, 0, j, frame, cache)     # h_j: the state after j blocks
    logits = stepper.logits(hidden)                      # head(norm(h_j)), the readout at any depth

The blocks are the Hugging Face modules themselves, called in turn: full depth is the model's own forward to the bit
where the masks agree, and a checkpoint needs no conversion. What a forward needs once (positions, masks, rotary
tables) is a ``Frame``. Construction holds the model's size and its full-depth logits against ``model(ids).logits``
(``models.agreement``): an unknown or changed family fails loudly.

A model may be spread over several devices, block by block (``models.placement``). What crosses the surface lives on
``stepper.device``, the head's: token ids go in there, states and logits come out there. Inside, a block gets its
states, masks and rotary tables on its own device, and its K and V stay there.

No loop over tokens, no exits, no sampling. Call under ``torch.inference_mode()``. Layers count from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.agreement import (
    CHECKED_ROWS,
    CHECKED_TOKENS,
    part_named,
    require_same,
    require_size,
    require_usable,
)
from emad_ref.models.anatomy import FULL, SLIDING, anatomy_of, layer_kinds
from emad_ref.models.cache import Cache
from emad_ref.models.families import row_of
from emad_ref.models.fused import fused
from emad_ref.models.geometry import Geometry, geometry_of
from emad_ref.models.placement import bare, device_of, to_device, visited
from emad_ref.record import Ints

FIRST_TABLE = 256  # positions a rotary table starts with; it doubles


class Station(NamedTuple):
    """What decides a block's arguments: its ``kind`` of attention, and the ``device`` its weights lie on."""

    kind: str
    device: torch.device


class Frame:
    """What the blocks of one forward need, computed once: positions, masks, rotary tables. Made by ``Stepper.frame``.

    ``rows``, ``starts``, ``ends``: per row, its session row, first position, and length after a layer ran.
    ``start``: the common first position, None if rows differ. ``queries``: n. ``keys``: keys every query is executed
    against, padding and masked ones included.
    """

    def __init__(
        self,
        stepper: Stepper,
        rows: tuple[int, ...],
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        queries: int,
        cached: bool,
    ):
        self.stepper, self.queries, self.cached = stepper, queries, cached
        self.rows, self.starts, self.lengths = rows, starts, lengths
        self.ends = tuple(start + n for start, n in zip(starts, lengths, strict=True))
        self.start = starts[0] if starts.count(starts[0]) == len(starts) else None
        self.keys = max(starts) + queries
        self.single = cached and queries == 1 and self.start is not None  # one query per row that sees every key
        self._slots: dict[torch.device, Tensor] = {}
        self._taken: dict[tuple[int, ...], Frame] = {}
        self._writer: _Writer | None = None
        self._arguments = {station: self._arguments_of(station) for station in stepper.stations}

    def take(self, keep: Ints) -> Frame:
        """The frame of a subset of its rows: ``keep`` int64 indices into them; ``hidden[keep]`` goes with it."""
        chosen = tuple(np.asarray(keep, dtype=np.int64).tolist())
        if chosen not in self._taken:
            if not chosen or not all(0 <= i < len(self.rows) for i in chosen):
                raise BadArgument("keep", list(chosen), f"some indices in 0–{len(self.rows) - 1}")
            rows, starts, lengths = (
                tuple(column[i] for i in chosen) for column in (self.rows, self.starts, self.lengths)
            )
            self._taken[chosen] = Frame(self.stepper, rows, starts, lengths, self.queries, self.cached)
        return self._taken[chosen]

    def slots(self, device: torch.device) -> Tensor:
        """int64 [rows, n] positions on ``device``."""
        if device not in self._slots:
            first = torch.tensor(self.starts, device=device)
            self._slots[device] = first[:, None] + torch.arange(self.queries, device=device)
        return self._slots[device]

    def arguments(self, cache: Cache | None) -> dict[Station, dict[str, Any]]:
        """Keyword arguments of a block, by its station."""
        if (cache is not None) != self.cached:
            raise BadArgument("cache", cache, "the cache the frame was made for, or None if it was made without one")
        if cache is not None and (self._writer is None or self._writer.cache is not cache):
            self._writer = _Writer(cache, self)
            for arguments in self._arguments.values():
                arguments[self.stepper.anatomy.cache_keyword] = self._writer
        return self._arguments

    def _arguments_of(self, station: Station) -> dict[str, Any]:
        window = self.stepper.window if station.kind == SLIDING else None
        arguments: dict[str, Any] = {"attention_mask": self._mask(window, station.device)}
        arguments.update(self.stepper.anatomy.constants)
        if self.stepper.anatomy.positions_inside:
            slots = self.slots(station.device)
            arguments["position_ids"] = slots if self.start is None else slots[:1]
        if self.stepper.rotary is not None:
            arguments["position_embeddings"] = self._rotary(station)
        return arguments

    def _rotary(self, station: Station) -> tuple[Tensor, Tensor]:
        """(cos, sin), [1, n, d] if all rows start at the same position, else [rows, n, d]."""
        cos, sin = self.stepper.rotary_table(station, self.keys)
        if self.start is not None:
            return cos.narrow(1, self.start, self.queries), sin.narrow(1, self.start, self.queries)
        slots = self.slots(station.device)
        return cos[0][slots], sin[0][slots]

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Additive mask [rows or 1, 1, n, keys]; None where attending to everything or SDPA's causal flag is right.

        A query at position p sees slots s ≤ p and, in a window of w, s > p − w.
        """
        windowed = window is not None and self.keys > window
        # SDPA's flag aligns query i with key i, so it is only right when there is nothing before the chunk
        unmasked = self.queries == 1 or (self.stepper.kernel == "sdpa" and self.start == 0)
        if self.start is not None and not windowed and unmasked and not self.stepper.anatomy.always_masked:
            return None
        here = self.slots(device) if self.start is None else self.slots(device)[:1]
        there = torch.arange(self.keys, device=device)
        seen = there <= here[:, :, None]
        if window is not None and windowed:
            seen &= there > here[:, :, None] - window
        mask = torch.zeros(seen.shape, dtype=self.stepper.dtype, device=device)
        return mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)[:, None]


class _Writer:
    """What a block sees as its cache: ``update`` stores at the frame's slots and returns what to attend over."""

    def __init__(self, cache: Cache, frame: Frame):
        self.cache, self._layers, self._frame = cache, cache.layers, frame

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._layers[layer_idx].write(keys, values, self._frame)


class _Stored(Exception):
    """Leaves a block once its K and V are stored."""


class _Filler(_Writer):
    """A writer that ends the block: its attention and MLP never run."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        super().update(keys, values, layer_idx)
        raise _Stored


class Stepper:
    """Walks one model, on one device or spread over several (``models.placement``).

    ``model``: a transformers causal LM in eval mode, of a family in ``models.anatomy``, with sdpa or eager attention.
    One that is spread runs by itself too, as ``accelerate.dispatch_model`` leaves it.
    ``check``: compare full-depth logits with the model's own (two forwards of 2 × 12 tokens).
    ``device``: the head's, where token ids go in, and states and logits come out. ``places``: devices of the blocks.

    Raises:
        BadArgument: a family without a row, training mode, offloaded weights, a block on several devices, another
            attention implementation.
        SizeMismatch: the row counts other parameters than the model holds (quantised models are exempt).
        ModelMismatch: the walk does not reproduce the model.
    """

    def __init__(self, model: Any, *, check: bool = True):
        config = model.config.get_text_config()
        if row_of(config.model_type).reads_a_source:
            raise BadArgument("model_type", config.model_type, "a decoder-only family", "Seq2SeqStepper walks this one")
        self.model, self.config, self.anatomy = model, config, anatomy_of(config)
        self.geometry: Geometry = geometry_of(config)
        self.layers, self.vocabulary = self.geometry.layers, self.geometry.vocabulary
        self.kernel: str = config._attn_implementation
        require_usable(model, self.kernel)
        require_size(model, self.geometry)
        decoder = model.get_decoder()
        blocks: Any = part_named(config.model_type, decoder, self.anatomy.blocks)
        self._head = bare(model.get_output_embeddings())
        self.device, self.dtype = self._head.weight.device, self._head.weight.dtype
        self._blocks = [
            (self._state_of(block), Station(kind, device_of(f"layer {number}", block) or self.device))
            for number, (block, kind) in enumerate(zip(blocks, layer_kinds(config), strict=True), start=1)
        ]
        self._steps = [(fused(block, self.kernel) or block, station) for block, station in self._blocks]
        self.stations: tuple[Station, ...] = tuple(dict.fromkeys(station for _, station in self._blocks))
        self.places: tuple[torch.device, ...] = tuple(dict.fromkeys(station.device for station in self.stations))
        windowed = any(station.kind == SLIDING for station in self.stations)
        self.window: int | None = config.sliding_window if windowed else None
        self._embedding = visited("embedding", model.get_input_embeddings(), self.device)
        self._final_norm = self._part(decoder, self.anatomy.final_norm)
        self._project_in = self._part(decoder, self.anatomy.project_in)
        self._project_out = self._part(decoder, self.anatomy.project_out)
        self._positions: Any = part_named(config.model_type, decoder, self.anatomy.positions)
        rotary = part_named(config.model_type, decoder, self.anatomy.rotary)
        self.rotary: Any = None if rotary is None else bare(rotary)
        self.softcap: float | None = _configured(config, self.anatomy.softcap)
        self._embedding_factor = _configured(config, self.anatomy.embedding_factor)
        self._logits_divisor = _configured(config, self.anatomy.logits_divisor)
        self._tables: dict[Station, tuple[Tensor, Tensor]] = {}
        if check:
            self._compare_with_model()

    @property
    def max_positions(self) -> int:
        """Positions the model was made for; a table of learned positions holds no more."""
        return int(self.config.max_position_embeddings)

    def open(self, sources: Sequence[Ints | None], capacity: int = 256) -> Cache:
        """An empty cache with one row per source, each None: these models read none.

        Raises:
            BadArgument: a source.
        """
        for row, source in enumerate(sources):
            if source is not None:
                raise BadArgument(f"prompts[{row}].source", source, "None", "this model has no encoder to read it")
        return self.new_cache(len(sources), capacity)

    def new_cache(self, rows: int, capacity: int = 256) -> Cache:
        """An empty cache for ``rows`` sequences; ``capacity`` slots at first, more as needed."""
        return Cache(self.layers, rows, capacity)

    def frame(
        self, positions: Ints, cache: Cache | None, rows: Ints | None = None, lengths: Ints | None = None
    ) -> Frame:
        """Prepare one forward.

        ``positions`` int64 [rows, n], consecutive in each row; without a cache they start at 0.
        ``rows`` int64 [rows] session rows taking part, ascending; all by default.
        ``lengths`` int64 [rows] valid tokens of a chunk padded on the right, 1…n; n by default. What is computed for
        the padding is meaningless and gets overwritten.

        Raises:
            BadArgument: other shapes or values, or positions beyond a table of learned positions.
        """
        positions = np.asarray(positions)
        if positions.ndim != 2 or 0 in positions.shape:
            raise BadArgument("positions", positions.shape, "shape [rows ≥ 1, n ≥ 1]")
        count, queries = positions.shape
        starts = tuple(positions[:, 0].tolist())
        if queries > 1 and (np.diff(positions, axis=1) != 1).any():
            raise BadArgument("positions", positions.tolist(), "consecutive positions in each row")
        if min(starts) < 0 or (cache is None and max(starts) > 0):
            raise BadArgument("positions", list(starts), "first positions ≥ 0, and 0 without a cache")
        ends = self._positions is not None or self.anatomy.positions_inside
        if ends and max(starts) + queries > self.max_positions:
            raise BadArgument("positions", max(starts) + queries - 1, f"less than {self.max_positions}")
        present = count if cache is None else cache.rows
        chosen = tuple(range(present)) if rows is None else tuple(np.asarray(rows).tolist())
        if len(chosen) != count or list(chosen) != sorted({*range(present)} & {*chosen}):
            raise BadArgument("rows", list(chosen), f"{count} ascending rows of 0–{present - 1}")
        valid = (queries,) * count if lengths is None else tuple(np.asarray(lengths).tolist())
        if len(valid) != count or not all(1 <= n <= queries for n in valid):
            raise BadArgument("lengths", list(valid), f"{count} lengths in 1–{queries}")
        return Frame(self, chosen, starts, valid, queries, cache is not None)

    def embed(self, tokens: Tensor, frame: Frame) -> Tensor:
        """h_0 [rows, n, D] of ``tokens`` int64 [rows, n]: embedding, input projection, learned positions."""
        hidden = self._embedding(tokens)
        if self._embedding_factor is not None:
            hidden = hidden * self._embedding_factor
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._positions is not None:
            table, offset = self._positions.weight, self.anatomy.position_offset
            if frame.start is None:
                return hidden + to_device(table[frame.slots(table.device) + offset], self.device)
            return hidden + to_device(table.narrow(0, frame.start + offset, frame.queries), self.device)
        return hidden

    def run(self, hidden: Tensor, first: int, last: int, frame: Frame, cache: Cache | None) -> Tensor:
        """h_last from h_first, [rows, n, D]: executes layers first+1 … last and writes their K/V.

        Raises:
            BadArgument: not 0 ≤ first ≤ last ≤ L.
            MissingEntry: a layer does not hold exactly the entries below a row's first position; nothing was written.
        """
        if not 0 <= first <= last <= self.layers:
            raise BadArgument("first, last", (first, last), f"0 ≤ first ≤ last ≤ {self.layers}")
        if cache is not None:
            cache.require(first, last, frame)
        arguments = frame.arguments(cache)
        for block, station in (self._steps if frame.single else self._blocks)[first:last]:
            hidden = block(to_device(hidden, station.device), **arguments[station])
        return to_device(hidden, self.device)

    def fill(self, hidden: Tensor, layer: int, frame: Frame, cache: Cache) -> None:
        """Write K and V of ``layer`` (1…L) from the state below it, ``hidden`` [rows, n, D]; no attention, no MLP.

        Executes the block's norm and its query, key and value projections.

        Raises:
            BadArgument: no such layer.
            MissingEntry: as in ``run``.
        """
        if not 1 <= layer <= self.layers:
            raise BadArgument("layer", layer, f"a layer in 1–{self.layers}")
        cache.require(layer - 1, layer, frame)
        block, station = self._blocks[layer - 1]
        arguments = {**frame.arguments(cache)[station], self.anatomy.cache_keyword: _Filler(cache, frame)}
        try:
            block(to_device(hidden, station.device), **arguments)
        except _Stored:
            return
        raise AssertionError(f"layer {layer} never updated its cache")

    def normed(self, hidden: Tensor) -> Tensor:
        """The head's input [..., E] of states [..., D] after any layer: final norm, output projection.

        What a family divides its logits by is divided out here, so that estimates that read some rows of the head
        need not know of it.
        """
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._logits_divisor is not None:
            hidden = hidden / self._logits_divisor
        return hidden if self._project_out is None else self._project_out(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Readout [..., V] of states [..., D] after any layer: final norm, output projection, head, softcap."""
        logits: Tensor = self._head(self.normed(hidden))
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    @property
    def unembedding(self) -> Tensor:
        """[V, E] rows of the head."""
        return self._head.weight

    @property
    def unembedding_bias(self) -> Tensor | None:
        """[V], or None."""
        return self._head.bias

    def rotary_table(self, station: Station, positions: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, ≥ positions, d] of the model's own rotary module, kept between forwards, where blocks read."""
        key = station if self.anatomy.rotary_per_kind else Station(FULL, station.device)
        if key not in self._tables or self._tables[key][0].shape[1] < positions:
            held = self._tables[key][0].shape[1] if key in self._tables else FIRST_TABLE // 2
            home = device_of("rotary", self.rotary) or self.device
            # tensors made in inference mode cannot take part in a later forward outside it
            with torch.inference_mode(False), torch.no_grad():
                at = torch.arange(max(positions, 2 * held), device=home)[None]
                like = torch.empty(0, dtype=self.dtype, device=home)
                per_kind = (station.kind,) if self.anatomy.rotary_per_kind else ()
                cos, sin = self.rotary(like, at, *per_kind)
                self._tables[key] = to_device(cos, station.device), to_device(sin, station.device)
        return self._tables[key]

    def _state_of(self, block: Any) -> Any:
        """``block`` bare, as a function to the state alone."""
        plain = bare(block)
        return (lambda *args, **kwargs: plain(*args, **kwargs)[0]) if self.anatomy.in_a_tuple else plain

    def _part(self, decoder: Any, name: str | None) -> Any:
        """A part of the decoder, called on this stepper's device; None where the family has none."""
        part = part_named(self.config.model_type, decoder, name)
        return None if part is None else visited(str(name), part, self.device)

    @torch.inference_mode()
    def _compare_with_model(self) -> None:
        """One plain pass, and one cached step after a prompt, against the model's own logits."""
        ids = torch.arange(CHECKED_ROWS * CHECKED_TOKENS, device=self.device).view(CHECKED_ROWS, -1) % self.vocabulary
        theirs = to_device(self.model(ids, use_cache=False).logits, self.device).double()
        cache = self.new_cache(CHECKED_ROWS, CHECKED_TOKENS)
        require_same(self.config.model_type, self.dtype, self._full_depth(ids, 0, None), theirs)
        self._full_depth(ids[:, :-1], 0, cache)
        require_same(
            self.config.model_type, self.dtype, self._full_depth(ids[:, -1:], CHECKED_TOKENS - 1, cache), theirs[:, -1:]
        )

    def _full_depth(self, ids: Tensor, start: int, cache: Cache | None) -> Tensor:
        positions = np.tile(np.arange(start, start + ids.shape[1]), (len(ids), 1))
        frame = self.frame(positions, cache)
        return self.logits(self.run(self.embed(ids, frame), 0, self.layers, frame, cache)).double()


def _configured(config: Any, key: str | None) -> float | None:
    """A number that the family's config may hold under ``key``."""
    return None if key is None else getattr(config, key)
