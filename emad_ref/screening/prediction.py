"""Latency of a decoding step, predicted from micro-benchmarks of its parts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.kv_cache import KVCache
from emad_ref.models.stepper import ForwardContext, Stepper
from emad_ref.point import Estimator, OperatingPoint, full_depth
from emad_ref.probes.estimators import EntropyReader, entropy_reader
from emad_ref.probes.lens import Translator, raised_dtype
from emad_ref.protocol import Prompt
from emad_ref.record import Floats, Ints


@dataclass(frozen=True, eq=False)  # holds arrays: a set of costs is itself, not its values
class ComponentCosts:
    """Seconds of the parts of a decoding step of one row.

    ``layers`` L and ``vocabulary`` V of the model, ``threads`` of the machine, ``keys`` that blocks were timed at.
    ``step``      a token's decoding without blocks, heads, probes and fills: embedding, frame, choosing, the record.
    ``token``     the part of it that is embedding and frame: what one more token of a step costs before block 1.
    ``probe``     a signal from the logits at a probe, and deciding by it; without head and lens.
    ``lengths``   int64 [N] tokens in one pass, ascending from 1; ``block`` and ``head`` [N] seconds of one block, and
                  of a full head, over so many.
    ``per_key``   more seconds of a block for each key that it attends to; ≥ 0.
    ``again``     layer e → seconds of a block for one token where only layers 1…e run, time and again, as in drafting.
    ``pruned``    rows of the head read → seconds of a head over them, for one token.
    ``lens``, ``gate``, ``fill``, ``translator``  one translator of a tuned lens; one linear gate with its norm, and
                  deciding by it; K and V of one layer from the state below it; one translator of states. None: not
                  measured.
    ``whole``     one token at full depth as our decoder runs it, for a check of the sum; None: not measured.
    ``intervals`` name of a part → 95 % interval of its median.

    Raises:
        BadArgument: lengths that do not ascend from 1, arrays of other sizes, seconds that are negative or not finite.
    """

    layers: int
    vocabulary: int
    threads: int
    keys: int
    step: float
    token: float
    probe: float
    lengths: Ints
    block: Floats
    head: Floats
    per_key: float
    again: Mapping[int, float] = field(default_factory=dict)
    pruned: Mapping[int, float] = field(default_factory=dict)
    lens: float | None = None
    gate: float | None = None
    fill: float | None = None
    translator: float | None = None
    whole: float | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if list(self.lengths) != sorted(set(self.lengths.tolist())) or len(self.lengths) < 1 or self.lengths[0] != 1:
            raise BadArgument("costs.lengths", self.lengths.tolist(), "numbers of tokens, ascending from 1")
        for name in ("block", "head"):
            shape = getattr(self, name).shape
            if shape != self.lengths.shape:
                raise BadArgument(f"costs.{name}", shape, f"shape {list(self.lengths.shape)}, one per length")
        optional = {name: getattr(self, name) for name in ("lens", "gate", "fill", "translator", "whole")}
        seconds = {
            **{name: getattr(self, name) for name in ("step", "token", "probe", "per_key")},
            **{name: value for name, value in optional.items() if value is not None},
            **{f"{name}[{i}]": value for name in ("block", "head") for i, value in enumerate(getattr(self, name))},
            **{f"again[{layer}]": value for layer, value in self.again.items()},
            **{f"pruned[{rows}]": value for rows, value in self.pruned.items()},
        }
        for name, value in seconds.items():
            if not (math.isfinite(value) and value >= 0):
                raise BadArgument(f"costs.{name}", float(value), "seconds ≥ 0", "measure again")

    def blocks(self, count: float, tokens: float = 1, keys: float | None = None) -> float:
        """Seconds of ``count`` blocks over ``tokens`` tokens in one pass, against ``keys`` keys (those timed at).

        Raises:
            BadArgument: fewer than one token.
        """
        return count * float(self.passes(np.array([tokens], dtype=np.float64), keys)[0])

    def passes(self, tokens: Floats, keys: float | None = None) -> Floats:
        """[m] seconds of one block over each of ``tokens`` [m]; ``keys`` as in ``blocks``, and what it raises."""
        more = 0.0 if keys is None else self.per_key * (keys - self.keys)
        return np.maximum(0.0, _along(self.lengths, self.block, tokens) + more)

    def shallow(self, layer: int, keys: float | None = None) -> float:
        """Seconds of layers 1…``layer`` for one token, right after the same for the token before it."""
        if layer not in self.again:
            return self.blocks(layer, keys=keys)
        more = 0.0 if keys is None else self.per_key * (keys - self.keys)
        return layer * max(0.0, self.again[layer] + more)

    def heads(self, tokens: float = 1) -> float:
        """Seconds of a full head over ``tokens`` tokens in one pass."""
        return 0.0 if tokens == 0 else float(_along(self.lengths, self.head, np.array([tokens], dtype=np.float64))[0])

    def pruned_head(self, rows: int) -> float:
        """Seconds of a head over ``rows`` of the vocabulary, for one token.

        Raises:
            BadArgument: fewer rows than one or more than there are; nothing but the full head was measured.
        """
        if not 1 <= rows <= self.vocabulary:
            raise BadArgument("rows", rows, f"1–{self.vocabulary} of the vocabulary")
        if rows == self.vocabulary:
            return self.heads()
        if not self.pruned:
            raise BadArgument("rows", rows, "a head that was measured", "measure one over so many rows")
        sizes = sorted(self.pruned)
        # below the fewest rows measured: no cheaper than those, which errs to the dear side
        return float(np.interp(rows, [*sizes, self.vocabulary], [*(self.pruned[k] for k in sizes), self.head[0]]))

    def of(self, part: str) -> float:
        """Seconds of ``lens``, ``gate``, ``fill``, ``translator`` or ``whole``.

        Raises:
            BadArgument: it was not measured.
        """
        seconds: float | None = getattr(self, part)
        if seconds is None:
            raise BadArgument(f"costs.{part}", None, "seconds that were measured", f"measure with a {part}")
        return seconds


def _along(lengths: Ints, seconds: Floats, tokens: Floats) -> Floats:
    """``seconds`` at ``tokens`` by the lines between measured lengths, and by their mean slope beyond them."""
    if (tokens < 1).any():
        raise BadArgument("tokens", float(tokens.min()), "at least 1")
    # of a single length nothing says what more tokens cost: in proportion errs to the dear side
    last, first = int(lengths[-1]), int(lengths[0])
    slope = max(0.0, float(seconds[-1] - seconds[0]) / (last - first)) if last > first else float(seconds[0])
    within: Floats = np.interp(tokens, lengths, seconds)
    return within + slope * np.maximum(0.0, tokens - last)


class NullModel:
    """Everything of ``stepper`` but its passes."""

    def __init__(self, stepper: Stepper):
        self._stepper = stepper
        self._logits = stepper.unembedding.new_zeros(1, stepper.vocabulary)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def run(self, hidden: Tensor, first: int, last: int, frame: ForwardContext, cache: KVCache | None) -> Tensor:
        """``hidden`` itself."""
        return hidden

    def fill(self, hidden: Tensor, layer: int, frame: ForwardContext, cache: KVCache) -> None:
        """Nothing is written."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Zeros [..., V]."""
        return self._logits.expand(hidden.shape[:-1].numel(), -1).reshape(*hidden.shape[:-1], -1)


def null_model(stepper: Stepper) -> Stepper:
    """``stepper`` without the time of its passes."""
    return cast(Stepper, NullModel(stepper))


class PartKind(StrEnum):
    """What is timed in a lap; ``SIZED`` ones at several sizes."""

    TOKEN, BLOCK, HEAD = "token", "block", "head"  # of a pass of so many tokens
    FAR_TOKEN, FAR_BLOCK, FAR_HEAD = "far token", "far", "far head"  # of one token with more keys
    LENS, GATE, FILL, TRANSLATOR = "lens", "gate", "fill", "translator"
    PRUNED = "pruned"  # a head over so many rows
    AGAIN = "again"  # so many blocks, one token after another
    LOOP, PROBING, GATING, WHOLE = "loop", "probing", "gating", "whole"  # of a decoder


SIZED = (PartKind.TOKEN, PartKind.BLOCK, PartKind.HEAD, PartKind.PRUNED, PartKind.AGAIN)


class Part(NamedTuple):
    """One thing that a lap times: ``size`` is tokens of a pass, rows of a head or layers; 1 where there is but one."""

    kind: PartKind
    size: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.kind in SIZED else str(self.kind)


REPEATS = 4  # shallow passes in a row, the first of which is not counted
LOOPED, WHOLE = 16, 3  # tokens that a decoder decodes without passes, and with them
MOST_PROBES = 3
OPENING = Prompt(np.zeros(1, dtype=np.int64))


@dataclass(frozen=True)
class ComponentBenchmark:
    """What is timed in every lap; arguments as ``prediction.measure_costs`` has them, checked there.

    ``turns``: times that each pass runs in a row, the first of several not counted.
    """

    stepper: Stepper
    lengths: tuple[int, ...]
    draft_layers: tuple[int, ...]
    heads: tuple[int, ...]
    lens: Callable[[Tensor], Tensor]
    translator: Callable[[Tensor], Tensor] | None
    keys: tuple[int, int]
    clock: Callable[[], float]
    turns: int = 1

    @torch.inference_mode()
    def lap(self, rng: np.random.Generator) -> dict[Part, float]:
        """Part → seconds."""
        near, far = self.keys
        arms: list[Callable[[dict[Part, float]], None]] = [
            *(partial(self._pass, n, near) for n in self.lengths),
            partial(self._pass, 1, far),
            *(partial(self._in_a_row, layer) for layer in self.draft_layers),
            *(partial(self._loop, kind, decoder) for kind, decoder in self._decoders.items()),
        ]
        parts: dict[Part, float] = {}
        for chosen in rng.permutation(len(arms)).tolist():
            arms[chosen](parts)
        return parts

    # ------------------------------------------------------------ arms

    def _pass(self, n: int, keys: int, parts: dict[Part, float]) -> None:
        """``n`` tokens through all blocks and the head; beside a single one whatever else may be run for it."""
        stepper, layers, far = self.stepper, self.stepper.layers, keys == self.keys[1]
        turns: list[dict[Part, float]] = []
        for _ in range(self.turns):
            turns.append({})
            with self._timed(turns[-1], Part(PartKind.FAR_TOKEN if far else PartKind.TOKEN, n)):
                cache, frame, hidden = self._start(n, keys)
            with self._timed(turns[-1], Part(PartKind.FAR_BLOCK if far else PartKind.BLOCK, n), layers):
                hidden = stepper.run(hidden, 0, layers, frame, cache)
            with self._timed(turns[-1], Part(PartKind.FAR_HEAD if far else PartKind.HEAD, n)):
                logits = stepper.logits(hidden)
            logits.argmax(dim=-1).tolist()
        parts |= _steady(turns)
        if n == 1 and not far:
            self._beside(hidden, cache, frame, parts)

    def _beside(self, hidden: Tensor, cache: KVCache, frame: ForwardContext, parts: dict[Part, float]) -> None:
        stepper, layers = self.stepper, self.stepper.layers
        with self._timed(parts, Part(PartKind.LENS)):
            read = self.lens(hidden)
        with self._timed(parts, Part(PartKind.GATE)):
            self._gate.read(hidden[:, -1], 0).entropy_nats.item()
        for rows, weights in self._pruned.items():
            with self._timed(parts, Part(PartKind.PRUNED, rows)):
                F.linear(stepper.normed(read), weights)
        cache.truncate(np.array(frame.starts))
        with self._timed(parts, Part(PartKind.FILL), layers):
            for layer in range(1, layers + 1):
                stepper.fill(hidden, layer, frame, cache)
        if self.translator is not None:
            with self._timed(parts, Part(PartKind.TRANSLATOR)):
                self.translator(hidden)

    def _in_a_row(self, last: int, parts: dict[Part, float]) -> None:
        """Shallow passes as drafting has them: the next begins where the draft's readout ended."""
        turns: list[dict[Part, float]] = []
        near = self.keys[0]
        cache, frame, hidden = self._start(1, near)
        for turn in range(REPEATS):
            turns.append({})
            with self._timed(turns[-1], Part(PartKind.AGAIN, last), last):
                hidden = self.stepper.run(hidden, 0, last, frame, cache)
            if self._pruned:
                F.linear(self.stepper.normed(self.lens(hidden)), self._pruned[min(self._pruned)])
            frame = self.stepper.frame(np.array([[near + turn + 1]]), cache)
            hidden = self.stepper.embed(self._zeros[:, :1], frame)
        parts |= _steady(turns)

    def _loop(self, kind: PartKind, decoder: WalkedDecoder, parts: dict[Part, float]) -> None:
        tokens = WHOLE if kind is PartKind.WHOLE and not self.brief else LOOPED
        with self._timed(parts, Part(kind), tokens):
            decoder.generate([OPENING], tokens, frozenset())

    # ------------------------------------------------------------ what arms need

    def _start(self, n: int, keys: int) -> tuple[KVCache, ForwardContext, Tensor]:
        """The cache that holds ``keys`` tokens, the frame of ``n`` more, and their embeddings."""
        cache = self._caches[keys]
        cache.truncate(np.array([keys]))
        frame = self.stepper.frame(keys + np.arange(n)[None], cache)
        return cache, frame, self.stepper.embed(self._zeros[:, :n], frame)

    @contextmanager
    def _timed(self, parts: dict[Part, float], part: Part, times: int = 1) -> Iterator[None]:
        self._wait()
        start = self.clock()
        yield
        self._wait()
        parts[part] = (self.clock() - start) / times

    def _wait(self) -> None:
        for device in {self.stepper.device, *self.stepper.places}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    @cached_property
    def _zeros(self) -> Tensor:
        return torch.zeros(1, max(self.lengths), dtype=torch.int64, device=self.stepper.device)

    @cached_property
    def _caches(self) -> dict[int, KVCache]:
        return {keys: self._filled(keys) for keys in self.keys}

    def _filled(self, keys: int) -> KVCache:
        """K/V of one row with ``keys`` entries in every layer: copies of the first, whose values do not matter."""
        stepper = self.stepper
        cache = stepper.new_cache(1, keys + max(*self.lengths, REPEATS))
        frame = stepper.frame(np.zeros((1, 1), dtype=np.int64), cache)
        stepper.run(stepper.embed(self._zeros[:, :1], frame), 0, stepper.layers, frame, cache)
        if keys > 1:
            rest = stepper.frame(np.arange(1, keys)[None], cache)
            for layer in cache.layers:
                first, other = (held.expand(-1, keys - 1, -1)[None] for held in layer.entries(0))
                layer.write(first, other, rest)
        return cache

    @cached_property
    def _pruned(self) -> dict[int, Tensor]:
        """Rows read → those rows of the head, spread over the vocabulary."""
        weights, vocabulary = self.stepper.unembedding.detach(), self.stepper.vocabulary
        at = {rows: np.linspace(0, vocabulary - 1, rows).astype(np.int64) for rows in self.heads}
        return {rows: weights[torch.from_numpy(ids).to(weights.device)] for rows, ids in at.items()}

    @cached_property
    def _gate(self) -> EntropyReader:
        return entropy_reader(self.stepper, idle_gate(self.stepper, 1), (1,))

    @cached_property
    def _decoders(self) -> dict[PartKind, WalkedDecoder]:
        """Our decoder whole; and at full depth with probes that never fire, of both kinds and none, of a model that is
        not brief over a stepper whose passes take no time."""
        layers, stepper = self.stepper.layers, self.stepper if self.brief else null_model(self.stepper)
        full = full_depth(layers)
        decoders = {PartKind.WHOLE: WalkedDecoder(self.stepper, full), PartKind.LOOP: WalkedDecoder(stepper, full)}
        gate = idle_gate(self.stepper, len(self.probes))
        for kind, estimator in ((PartKind.PROBING, Estimator()), (PartKind.GATING, gate)):
            decoders[kind] = WalkedDecoder(stepper, never_left(kind, layers, self.probes, estimator))
        return decoders

    @property
    def brief(self) -> bool:
        """Whether passes are so short that the loop around them, too, has to be timed with them."""
        return self.turns > 1

    @property
    def probes(self) -> tuple[int, ...]:
        """Layers after which the decoders without passes read."""
        return tuple(range(1, self.stepper.layers))[:MOST_PROBES]


def idle_gate(stepper: Stepper, probes: int) -> Estimator:
    """A linear gate at so many probes, which costs what one does and says nothing."""
    return Estimator("linear", weights=((0.0,) * (stepper.unembedding.shape[1] + 1),) * probes)


def never_left(name: str, layers: int, probes: tuple[int, ...], estimator: Estimator) -> OperatingPoint:
    """Full depth, ``estimator`` asked after each of ``probes``, which never fires."""
    never = ((-math.inf,) * len(probes),)
    return OperatingPoint(name, "never", layers, layers, probes, never, estimator=estimator)


def _steady(turns: list[dict[Part, float]]) -> dict[Part, float]:
    """Mean seconds of each part over ``turns`` but the first, which found what others left in the caches."""
    counted = turns[1:] or turns
    return {name: float(np.mean([turn[name] for turn in counted])) for name in counted[0]}


LENGTHS = (1, 2, 3, 4, 6, 8)  # tokens in one pass; kernels change between some of them
NEAR, FAR = 32, 256  # keys
FEWEST_LAPS, MOST_LAPS = 5, 40
SECONDS = 20
SHARES = (32, 8)  # of the vocabulary: one row in so many is read by a pruned head
DRAFT_LAYERS = (1, 2, 4)
RESAMPLES = 999
BRIEF = 0.02  # seconds of a pass that may find in a cache what the one before it read
TURNS = 4


def measure_costs(
    stepper: Stepper,
    *,
    lengths: Sequence[int] = LENGTHS,
    draft_layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    lens: Callable[[Tensor], Tensor] | None = None,
    translator: Callable[[Tensor], Tensor] | None = None,
    keys: tuple[int, int] | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: str | None = None,
    between: Callable[[int], None] | None = None,
) -> ComponentCosts:
    """Time the parts of a decoding step of one row on this machine.

    Args:
        stepper: of a decoder-only model.
        lengths: tokens in one pass, ascending from 1.
        draft_layers: layers to which shallow passes are timed in a row; by default of 1, 2, 4 those below the last.
        heads: rows of the vocabulary that pruned heads read; a 32nd and an 8th by default.
        lens: what stands in front of a head, [..., D] → [..., D]; a full matrix and bias by default.
        translator: of states, in front of K/V fills; not timed by default.
        keys: two numbers of keys that blocks attend to, the first of them those of all passes.
        seconds: to spend; no fewer than 5 laps all the same, and no more than 40.
        clock: in seconds.
        progress: names a bar; None shows none.
        between: called after each lap with its number from 0, untimed.

    Raises:
        BadArgument: lengths that do not ascend from 1, draft layers, heads or keys outside the model's; no seconds.
    """
    if not seconds > 0:
        raise BadArgument("seconds", seconds, "seconds to spend")
    if list(lengths[:1]) != [1] or list(lengths) != sorted(set(lengths)):
        raise BadArgument("lengths", list(lengths), "numbers of tokens, ascending from 1")
    room = stepper.max_positions - max(*lengths, REPEATS)
    keys = keys or (min(NEAR, room // 8), min(FAR, room))
    if not 1 <= keys[0] < keys[1] <= room:
        raise BadArgument("keys", keys, f"two numbers in 1–{room}, ascending", "the positions of this model")
    if draft_layers is None:
        draft_layers = [layer for layer in DRAFT_LAYERS if layer < stepper.layers]
    heads = [max(1, stepper.vocabulary // share) for share in SHARES] if heads is None else heads
    for name, numbers, end in (("draft_layers", draft_layers, stepper.layers), ("heads", heads, stepper.vocabulary)):
        if not all(1 <= number < end for number in numbers):
            raise BadArgument(name, list(numbers), f"numbers in 1–{end - 1}")
    lens = lens or _full_lens(stepper)
    course = ComponentBenchmark(
        stepper, tuple(lengths), tuple(draft_layers), tuple(heads), lens, translator, keys, clock
    )
    laps: list[dict[Part, float]] = []
    spent: list[float] = []
    rng = np.random.default_rng(seed)
    tried = course.lap(rng)  # warms up
    if stepper.layers * tried[Part(PartKind.BLOCK)] < BRIEF:
        course = replace(course, turns=TURNS)
    with tqdm(desc=progress, disable=progress is None, total=MOST_LAPS, unit="lap") as bar:
        while len(laps) < FEWEST_LAPS or (len(laps) < MOST_LAPS and sum(spent) < seconds):
            start = clock()
            laps.append(course.lap(rng))
            spent.append(clock() - start)
            bar.update()
            if between is not None:
                between(len(laps) - 1)
    return _costs(course, laps, np.array(spent), rng)


def _costs(
    course: ComponentBenchmark, laps: Sequence[dict[Part, float]], spent: Floats, rng: np.random.Generator
) -> ComponentCosts:
    """Medians over ``laps``, each as if it had been as fast as the median one; ``spent`` [laps] seconds of each."""
    parts, pace = list(laps[0]), spent / np.median(spent)
    seconds = np.array([[lap[part] for part in parts] for lap in laps]) / pace[:, None]
    medians = dict(zip(parts, np.median(seconds, axis=0).tolist(), strict=True))
    low, high = stats.bootstrap(
        (seconds,), np.median, axis=0, n_resamples=RESAMPLES, method="percentile", rng=rng
    ).confidence_interval
    one = {kind: medians[Part(kind)] for kind in PartKind if Part(kind) in medians}
    probes, full = len(course.probes), one[PartKind.HEAD]
    passes = course.stepper.layers * one[PartKind.BLOCK] + full if course.brief else 0.0
    read = full if course.brief else 0.0
    near, far = course.keys

    def of(kind: PartKind, sizes: Sequence[int]) -> dict[int, float]:
        return {size: medians[Part(kind, size)] for size in sizes}

    return ComponentCosts(
        layers=course.stepper.layers,
        vocabulary=course.stepper.vocabulary,
        threads=torch.get_num_threads(),
        keys=near,
        # differences may come out below what no part can cost less than
        step=max(one[PartKind.TOKEN], one[PartKind.LOOP] - passes),
        token=one[PartKind.TOKEN],
        probe=max(0.0, (one[PartKind.PROBING] - one[PartKind.LOOP]) / probes - read),
        gate=max(one[PartKind.GATE], (one[PartKind.GATING] - one[PartKind.LOOP]) / probes),
        lengths=np.array(course.lengths, dtype=np.int64),
        block=np.array(list(of(PartKind.BLOCK, course.lengths).values())),
        head=np.array(list(of(PartKind.HEAD, course.lengths).values())),
        per_key=max(0.0, (one[PartKind.FAR_BLOCK] - one[PartKind.BLOCK]) / (far - near)),
        again=of(PartKind.AGAIN, course.draft_layers),
        pruned=of(PartKind.PRUNED, course.heads),
        lens=one[PartKind.LENS],
        fill=one[PartKind.FILL],
        translator=one.get(PartKind.TRANSLATOR),
        whole=one[PartKind.WHOLE],
        intervals=dict(zip(map(str, parts), zip(low.tolist(), high.tolist(), strict=True), strict=True)),
    )


def _full_lens(stepper: Stepper) -> Translator:
    """A translator of full rank, of zeros: its values do not matter to time."""
    width = stepper.geometry.hidden
    matrix = torch.zeros(width, width, dtype=raised_dtype(stepper), device=stepper.device)
    return Translator((matrix,), matrix[0].clone())


LEAVING = ("monotone", "positional")
DEFERRING = ("free_deferred", "chunked")
FILLING = ("free_eager", "copying", "translated")
READ = ("full", "linear")  # estimators whose readings are costed
UNLIKELY = 1e-9  # share of passes that a tail of still longer ones may hold


def shares_of(depths: Ints, layers: int) -> Floats:
    """[L] share of tokens at each depth 1…L, of ``depths`` in any order."""
    shares: Floats = np.bincount(depths.ravel(), minlength=layers + 1)[1:] / depths.size
    return shares


def seconds_per_token(
    costs: ComponentCosts,
    point: OperatingPoint,
    depth_shares: Floats,
    *,
    keys: float | None = None,
    passes: Floats | None = None,
) -> float:
    """Seconds of one decoded token at ``point``: the sum of ``parts_of_token``, which says what it takes and raises."""
    return sum(parts_of_token(costs, point, depth_shares, keys=keys, passes=passes).values())


def parts_of_token(
    costs: ComponentCosts,
    point: OperatingPoint,
    depth_shares: Floats,
    *,
    keys: float | None = None,
    passes: Floats | None = None,
) -> dict[str, float]:
    """Seconds a decoded token spends in each part of a step.

    Args:
        depth_shares: [L] share of tokens at each depth 1…L (``shares_of``).
        keys: mean number of keys; those that blocks were timed at by default.
        passes: under a deferred schedule, [L, n] passes of 1, 2, … tokens through each layer, per token
            (``passes_of``); by default as if exits were independent of one another.

    Raises:
        BadArgument: shares of other layers, that do not sum to 1, or above the ceiling; a reading or a part whose cost
            was not measured.
    """
    _require_point(costs, point, depth_shares)
    token = _token(point, depth_shares)
    if point.estimator.kind == "full":
        # a probe reads by lens and head, and where a token leaves that reading is what it emits
        heads, translated, gates = token.reads + 1 - token.emitted, token.reads + token.below - token.emitted, 0.0
    else:
        heads, translated, gates = 1.0, token.below, token.reads
    if point.lens is None:
        translated = 0.0
    return {
        "step": costs.step,
        **_blocks(costs, point, token, keys, passes),
        "heads": heads * costs.heads(),
        "lens": translated * costs.of("lens") if translated else 0.0,
        "probes": token.reads * costs.probe,
        "gates": gates * costs.of("gate") if gates else 0.0,
    }


def passes_of(depths: Iterable[Ints], layers: int, ceiling: int | None = None) -> Floats:
    """[L, longest] passes of 1, 2, … tokens through each layer, per token, where exits are deferred.

    ``depths``: decided depths of each sequence, in order. A layer runs for a token that is as deep, with every token
    before it that has not run it yet.
    """
    sequences, last = list(depths), layers if ceiling is None else ceiling
    counted: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        for layer in range(1, last + 1):
            ran = np.flatnonzero(sequence >= layer)
            for size in np.diff(ran, prepend=-1).tolist():
                counted[layer, size] = counted.get((layer, size), 0) + 1
    longest = max(size for _, size in counted)
    passes = np.zeros((layers, longest))
    for (layer, size), times in counted.items():
        passes[layer - 1, size - 1] = times
    return passes / sum(len(sequence) for sequence in sequences)


def require_shares(name: str, shares: Floats) -> None:
    """Raises BadArgument where ``shares`` are none: below 0, or of another sum than 1."""
    if shares.ndim != 1 or not (shares >= 0).all() or not np.isclose(shares.sum(), 1):
        raise BadArgument(name, shares.tolist(), "shares ≥ 0 that sum to 1")


# ---------------------------------------------------------------- private


@dataclass(frozen=True, eq=False)
class _Token:
    """What a mean token does, each a number a token.

    ``runs``     [L] passes through each layer: the share of tokens that go as deep.
    ``reads``    readings at probes.
    ``emitted``  readings at probes that are emitted, since the token leaves there.
    ``below``    exits below the last layer; ``early`` below the ceiling.
    ``owed``     layers above exits, whose K and V are filled in; ``apart``: without those right above one, which are
                 given the exit's state itself.
    """

    runs: Floats
    reads: float
    emitted: float
    below: float
    early: float
    owed: float
    apart: float


def _token(point: OperatingPoint, depth_shares: Floats) -> _Token:
    # within a chunk the depth stands: its first token alone is asked
    asked = 1 / point.period if point.schedule == "chunked" and point.period else 1.0
    runs = depth_shares[::-1].cumsum()[::-1]
    at = np.array(point.probes, dtype=np.int64) - 1
    leaving, above = depth_shares[: point.ceiling - 1], point.ceiling - np.arange(1, point.ceiling)
    return _Token(
        runs,
        reads=asked * float(runs[at].sum()),
        emitted=asked * float(depth_shares[at].sum()),
        below=float(depth_shares[:-1].sum()),
        early=float(leaving.sum()),
        owed=float(leaving @ above),
        apart=float(leaving @ (above - 1)),
    )


def _blocks(
    costs: ComponentCosts, point: OperatingPoint, token: _Token, keys: float | None, passes: Floats | None
) -> dict[str, float]:
    """Seconds of blocks and of K/V fills."""
    schedule = point.schedule
    if schedule in DEFERRING:
        sizes = [_independent(float(share)) for share in token.runs] if passes is None else list(passes)
        return {"blocks": sum(float(row @ costs.passes(np.arange(1.0, len(row) + 1), keys)) for row in sizes)}
    if schedule == "free_eager":  # every block runs but the last above an exit, which fills K and V alone
        run, filled = point.ceiling - token.early, token.early
    else:
        run, filled = float(token.runs.sum()), 0.0 if schedule in LEAVING else token.owed
    translated = token.apart if schedule == "translated" else 0.0
    fills = filled * costs.of("fill") if filled else 0.0
    return {
        "blocks": costs.blocks(run, keys=keys),
        "fills": fills + (translated * costs.of("translator") if translated else 0.0),
    }


def _independent(share: float) -> Floats:
    """[n] passes of 1, 2, … tokens per token, where each token runs the layer with probability ``share``."""
    if share >= 1:
        return np.ones(1)
    if share <= 0:
        return np.zeros(1)
    longest = int(np.ceil(np.log(UNLIKELY) / np.log1p(-share)))
    return (share**2 * (1 - share) ** np.arange(longest)).astype(np.float64)


def _require_point(costs: ComponentCosts, point: OperatingPoint, depth_shares: Floats) -> None:
    if point.layers != costs.layers or depth_shares.shape != (costs.layers,):
        raise BadArgument("depth_shares", depth_shares.shape, f"shape [{costs.layers}], of the layers that were timed")
    require_shares("depth_shares", depth_shares)
    if depth_shares[point.ceiling :].any():
        deepest = int(np.flatnonzero(depth_shares)[-1]) + 1
        raise BadArgument("depth_shares", deepest, f"no depth above the ceiling {point.ceiling}")
    if point.schedule not in (*LEAVING, *DEFERRING, *FILLING):
        known = ", ".join((*LEAVING, *DEFERRING, *FILLING))
        raise BadArgument("point.schedule", point.schedule, f"one whose work is priced here ({known})")
    if point.probes and (point.estimator.kind not in READ or point.confidence is not None):
        found = "a confidence" if point.confidence is not None else point.estimator.name
        raise BadArgument("point.estimator", found, f"one whose cost is measured ({', '.join(READ)})")
