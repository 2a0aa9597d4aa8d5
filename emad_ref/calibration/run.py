"""A calibration of any length: constant memory, resumable, in this process or by workers.

    corpora → windows → batches → entropies → running statistics → profile

After every unit (a batch, or a shard of batches from a worker) the state goes into a checkpoint, written whole or not
at all. A resumed run reads the text before that place again without running the model, continues only if it is the
same
text, and ends with the same bits. A checkpoint of another configuration is refused by field. Workers run each batch in
one forward as this process would, so what is added is the same numbers in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from emad_ref.calibration.entropy_statistics import (
    ADDED,
    BUCKETS,
    DocumentMoments,
    EntropyStatistics,
    batch_statistics,
)
from emad_ref.calibration.profile import (
    MINIMUM_TOKENS,
    Profile,
    bins_to_json,
    library_versions,
    profile_from,
    require_probes,
    shorten,
)
from emad_ref.calibration.trace import TOKENS_PER_BATCH, EmptyCorpus, TokenSequence, Trace, batched, stream_traces
from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import open_atomic, open_regular, parse_json, require_writable
from emad_ref.models.model_spec import ModelSpec, load_cached
from emad_ref.models.stepper import Stepper
from emad_ref.point import BinSpec, OperatingPoint
from emad_ref.record import Floats, Ints
from emad_ref.workers.dispatch import WorkerPool, dispatch_in_order

Corpora = Mapping[str, Callable[[], Iterable[TokenSequence]]]
"""Name → its windows from the first, anew at every call: the first pass and a resumed run read them again."""
Batches = Iterable[list[TokenSequence]]
StatisticsSource = Callable[[Batches], Iterator[tuple[list[TokenSequence], list[EntropyStatistics]]]]
"""Batches → those of one unit after another, in order: their windows, and statistics to add up one by one. By this
process, whose units are batches, or by others (``calibration.run``)."""


class BadCheckpoint(EmadError):
    """A checkpoint that cannot be read, belongs to another configuration, or to another text."""


@dataclass(frozen=True)
class CalibrationPlan:
    """What a calibration is of; two runs with equal plans and texts have equal profiles.

    ``every_layer``  read entropies after every layer, not at the probes and the last alone: a curve to choose probes
                     by, which thresholds need none of, and which takes a head more for each.
    ``window``, ``documents``  how the windows were cut, for the record: tokens each, and their limit per corpus.
    ``tokens``  decided positions to take from each corpus; None takes all.
    """

    model: str
    fingerprint: str
    dtype: str
    window: int
    probes: tuple[int, ...]
    bins: BinSpec = field(default_factory=BinSpec)
    tokens: int | None = None
    documents: int | None = None
    minimum_tokens: int = MINIMUM_TOKENS
    tokens_per_batch: int = TOKENS_PER_BATCH
    every_layer: bool = False

    def read(self, layers: int) -> tuple[int, ...]:
        """After which of a model's ``layers`` entropies are read, the last among them; without a probe, after all.

        No threshold needs the last, but a profile that rises at the end is seen nowhere else.
        """
        return tuple(range(1, layers + 1)) if self.every_layer or not self.probes else (*self.probes, layers)

    def to_json(self) -> dict[str, Any]:
        """Every field by name as JSON gives it back, and the libraries' versions: they change the last digits."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        held = json.dumps(plain | {"bins": bins_to_json(self.bins), "versions": library_versions()})
        return dict(json.loads(held))


@dataclass(frozen=True)
class CorpusPosition:
    """How far one corpus was read: ``windows`` and decided ``tokens`` of it, ``digest`` sha256 of those windows."""

    windows: int = 0
    tokens: int = 0
    digest: str = hashlib.sha256().hexdigest()


@dataclass(frozen=True)
class _CalibrationState:
    statistics: EntropyStatistics
    places: dict[str, CorpusPosition]

    @property
    def tokens(self) -> int:
        return sum(place.tokens for place in self.places.values())


def calibrate(
    stepper: Stepper,
    plan: CalibrationPlan,
    corpora: Corpora,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    every: int = 1,
    progress: str | None = None,
    parts: StatisticsSource | None = None,
) -> Profile:
    """The profile of ``corpora``, one after another; ``progress`` names the bar, None shows none.

    ``parts``: who takes the statistics of batches; None: this process, by ``stepper``. They are added up here, in the
    order of the text, so that the profile is the same to the last bit whoever took them.

    ``checkpoint``: file to write after ``every`` units; the caller removes it once the profile is kept. ``resume``:
    go on from it if it is there.

    Raises:
        BadArgument: impossible probes, no corpora, a limit below 1.
        BadCheckpoint: a checkpoint is there but ``resume`` is not set, or it is unreadable, or of another run.
        EmptyCorpus: a corpus without a window.
    """
    require_probes(plan.probes, stepper.layers)
    _require_count("tokens", plan.tokens)
    _require_count("every", every)
    if not corpora:
        raise BadArgument("corpora", [], "at least one corpus")
    if checkpoint is not None:
        require_writable(checkpoint, "checkpoint")
    configuration, taken = plan.to_json(), parts or local_statistics(stepper, plan)
    read = plan.read(stepper.layers)
    fresh = _CalibrationState(EntropyStatistics.none(plan.bins.count, len(read)), {})
    state = (
        fresh
        if checkpoint is None
        else _load_checkpoint(checkpoint, resume, configuration, tuple(corpora), fresh) or fresh
    )
    total = None if plan.tokens is None else plan.tokens * len(corpora)
    with tqdm(
        desc=progress, disable=progress is None, unit="tok", unit_scale=True, initial=state.tokens, total=total
    ) as bar:
        for name, windows in corpora.items():
            for number, further in enumerate(_read_corpus(taken, plan, name, windows(), state), start=1):
                state = further
                bar.update(state.tokens - bar.n)
                if checkpoint is not None and number % every == 0:
                    _save_checkpoint(checkpoint, configuration, state)
            if name not in state.places:
                raise EmptyCorpus(
                    f"corpus={name!r} has no window of two tokens, but expected at least one document of two tokens; "
                    "check the source and the split"
                )
    return profile_from(
        state.statistics,
        plan.probes,
        layers=stepper.layers,
        read=read,
        model=plan.model,
        fingerprint=plan.fingerprint,
        corpora={name: place.tokens for name, place in state.places.items()},
        dtype=plan.dtype,
        bins=plan.bins,
        minimum_tokens=plan.minimum_tokens,
    )


def local_statistics(stepper: Stepper, plan: CalibrationPlan) -> StatisticsSource:
    """Statistics taken here, batch after batch."""
    first, read = first_probe(plan), plan.read(stepper.layers)

    def parts(batches: Batches) -> Iterator[tuple[list[TokenSequence], list[EntropyStatistics]]]:
        for batch in batches:
            yield batch, [batch_statistics(stepper, batch, plan.bins, first, read)]

    return parts


def first_probe(plan: CalibrationPlan) -> int | None:
    """Where confidence and predicted token are read."""
    return plan.probes[0] if plan.probes else None


def _read_corpus(
    parts: StatisticsSource,
    plan: CalibrationPlan,
    name: str,
    windows: Iterable[TokenSequence],
    state: _CalibrationState,
) -> Iterator[_CalibrationState]:
    """The state after each further unit of one corpus."""
    stream = limit_tokens(windows, plan.tokens)
    if name not in state.places:
        state = replace(state, statistics=state.statistics.closed())
    digest, place = hashlib.sha256(), state.places.get(name, CorpusPosition())
    for window in islice(stream, place.windows):
        digest.update(window_bytes(window))
    if digest.hexdigest() != place.digest:
        raise BadCheckpoint(
            f"corpus={name!r}: its first {place.windows} windows are another text than at the checkpoint, but expected "
            "the same; delete the checkpoint to start anew"
        )
    for read, found in parts(batched(stream, plan.tokens_per_batch)):
        for window in read:
            digest.update(window_bytes(window))
        tokens = sum(int(each.tokens.sum()) for each in found)
        place = CorpusPosition(place.windows + len(read), place.tokens + tokens, digest.hexdigest())
        # one by one: sums of floats depend on how their terms are grouped
        state = _CalibrationState(sum(found, state.statistics), {**state.places, name: place})
        yield state


def window_bytes(window: TokenSequence) -> bytes:
    """What a window is: its length before its tokens, so that no two cuts of one text look the same."""
    return np.array([len(window.tokens), window.adaptive_from, *window.tokens], dtype="<i8").tobytes()


def _require_count(name: str, count: int | None) -> None:
    if count is not None and count < 1:
        raise BadArgument(name, count, "a count ≥ 1")


def limit_tokens(windows: Iterable[TokenSequence], tokens: int | None) -> Iterator[TokenSequence]:
    """Windows with ``tokens`` decided positions altogether, the last one shortened; None passes all.

    Raises:
        BadArgument: a limit below 1.
    """
    _require_count("tokens", tokens)
    left = tokens
    for window in windows:
        decided = len(window.tokens) - 1 - window.adaptive_from
        if left is None or decided <= left:
            yield window
        else:
            yield replace(window, tokens=window.tokens[: window.adaptive_from + left + 1])
        if left is not None:
            left -= min(decided, left)
            if left == 0:
                return


def token_counts(corpora: Corpora, vocabulary: int, tokens: int | None, progress: str | None = None) -> Ints:
    """int64 [vocabulary] how often each token is a target in the windows that ``calibrate`` reads with that limit.

    Raises:
        EmptyCorpus: no window in any of them.
    """
    counts = np.zeros(vocabulary, dtype=np.int64)
    with tqdm(desc=progress, disable=progress is None, unit="tok", unit_scale=True) as bar:
        for windows in corpora.values():
            for window in limit_tokens(windows(), tokens):
                targets = window.tokens[window.adaptive_from + 1 :]
                np.add.at(counts, targets, 1)
                bar.update(len(targets))
    if not counts.any():
        raise EmptyCorpus(
            f"corpora={list(corpora)!r} have no window, but expected at least one document of two tokens; "
            "check the source and the split"
        )
    return counts


# ---------------------------------------------------------------- the checkpoint


def _load_checkpoint(
    checkpoint: Path, resume: bool, configuration: dict[str, Any], corpora: tuple[str, ...], fresh: _CalibrationState
) -> _CalibrationState | None:
    """The state to go on from; None where there is no checkpoint."""
    if not checkpoint.exists():
        return None
    if not resume:
        raise BadCheckpoint(
            f"checkpoint={str(checkpoint)!r} holds an unfinished calibration, but expected none; pass resume "
            "(--resume) to go on with it, or delete it"
        )
    state, theirs = _read_checkpoint(checkpoint)
    for name in sorted(configuration.keys() | theirs.keys()):
        if configuration.get(name) != theirs.get(name):
            raise BadCheckpoint(
                f"checkpoint={str(checkpoint)!r} has {name}={shorten(theirs.get(name))!r}, but expected "
                f"{shorten(configuration.get(name))!r} as in this run; calibrate with the same settings, or delete "
                "it to "
                "start anew"
            )
    if not state.statistics.is_of(fresh.statistics.tokens.size, fresh.statistics.layers):
        raise BadCheckpoint(
            f"checkpoint={str(checkpoint)!r} holds arrays of another shape or type, but expected those of its plan; "
            "delete it to start anew"
        )
    read = tuple(state.places)
    if corpora[: len(read)] != read:
        raise BadCheckpoint(
            f"checkpoint={str(checkpoint)!r} has read corpora {list(read)}, but expected the first of {list(corpora)}; "
            "name the same corpora in the same order, or delete it to start anew"
        )
    return state


def _save_checkpoint(path: Path, configuration: dict[str, Any], state: _CalibrationState) -> None:
    """Write as .npz; the file is complete or as it was."""
    places = {name: [place.windows, place.tokens, place.digest] for name, place in state.places.items()}
    about = json.dumps({"plan": configuration, "places": places})
    statistics = state.statistics
    assert statistics.documents is not None, "windows know their documents"
    with open_atomic(path, "checkpoint") as file:  # a file, not a path: NumPy appends .npz to those
        np.savez(
            file,
            about=np.array(about),
            **{name: getattr(statistics, name) for name in ADDED},
            documents=_pack_moments(statistics.documents),
        )


def _pack_moments(moments: DocumentMoments) -> Floats:
    """[3 + L, 1 + L]: the count and the last document's number; its sums; the products."""
    head = np.zeros((2, len(moments.products)))
    head[0, :2] = moments.count, -1
    if moments.last is not None:
        head[0, 1], head[1] = moments.last
    return np.concatenate([head, moments.products])


def _unpack_moments(packed: Floats) -> DocumentMoments:
    count, number = int(packed[0, 0]), int(packed[0, 1])
    return DocumentMoments(count, packed[2:], last=(number, packed[1]) if number >= 0 else None)


def _position_from_json(held: Any) -> CorpusPosition:
    windows, tokens, digest = held
    if not (type(windows) is type(tokens) is int and windows >= 0 <= tokens and isinstance(digest, str)):
        raise ValueError(f"{held!r:.60} is no place in a corpus")
    return CorpusPosition(windows, tokens, digest)


def _read_checkpoint(path: Path) -> tuple[_CalibrationState, dict[str, Any]]:
    """State and plan of a checkpoint."""
    try:
        with open_regular(path, "checkpoint") as file, np.load(file, allow_pickle=False) as held:
            about = parse_json(str(held["about"]))
            arrays = {name: held[name] for name in ADDED}
            documents = _unpack_moments(held["documents"])
        statistics = EntropyStatistics(**(arrays | {"sequences": int(arrays["sequences"])}), documents=documents)
        places = {str(name): _position_from_json(place) for name, place in about["places"].items()}
        plan: dict[str, Any] = about["plan"]
        if not isinstance(plan, dict):
            raise ValueError("its plan is none")
    except Exception as error:  # a damaged archive raises whatever zip, zlib, NumPy and its headers' parser raise
        raise BadCheckpoint(
            f"checkpoint={str(path)!r} cannot be read ({type(error).__name__}: {error}), but expected one that "
            "`emad calibrate` wrote; delete it to start anew"
        ) from error
    return _CalibrationState(statistics, places), plan


BATCHES_PER_SHARD = 8  # batches a unit: what one histogram travels for, and the most that a lost worker costs

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PackedStatistics:
    """Statistics of a unit's batches, in little: ``tokens`` int64 [batches, bins]; ``sums``, ``squares`` float64
    [batches, bins, L]; ``sequences`` int64 [batches]; ``documents`` of each batch. Of the histogram, whose counts add
    up in any order, the cells of all batches together that hold something: ``cells`` int64 of it flattened, and their
    ``counts``.
    """

    tokens: Ints
    sums: Floats
    squares: Floats
    sequences: Ints
    documents: tuple[DocumentMoments | None, ...]
    cells: Ints
    counts: Ints

    @staticmethod
    def of(batches: Sequence[EntropyStatistics]) -> PackedStatistics:
        together = sum((each.histogram for each in batches[1:]), batches[0].histogram)
        cells = np.flatnonzero(together)
        return PackedStatistics(
            np.array([each.tokens for each in batches]),
            np.array([each.sums for each in batches]),
            np.array([each.squares for each in batches]),
            np.array([each.sequences for each in batches]),
            tuple(each.documents for each in batches),
            cells,
            together.ravel()[cells],
        )

    def unpacked(self) -> list[EntropyStatistics]:
        """One per batch, to be added up in order; the last has the histogram of all."""
        shape = (*self.sums.shape[1:], BUCKETS)
        empty, together = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        together.ravel()[self.cells] = self.counts
        last = len(self.sequences) - 1
        return [
            EntropyStatistics(tokens, sums, squares, together if number == last else empty, int(sequences), documents)
            for number, (tokens, sums, squares, sequences, documents) in enumerate(
                zip(self.tokens, self.sums, self.squares, self.sequences, self.documents, strict=True)
            )
        ]


@dataclass(frozen=True, eq=False)
class _StatisticsShard:
    """Batches to take statistics of."""

    whence: ModelSpec
    plan: CalibrationPlan
    batches: Sequence[list[TokenSequence]]

    def read(self) -> PackedStatistics:
        taken = local_statistics(load_cached(self.whence).stepper, self.plan)
        return PackedStatistics.of([each for _, found in taken(self.batches) for each in found])


@dataclass(frozen=True, eq=False)
class _TraceShard:
    """Batches to trace, ``rules`` beside the plain columns; heads after ``layers``, None: after every one."""

    whence: ModelSpec
    rules: tuple[OperatingPoint, ...]
    layers: tuple[int, ...] | None
    batches: Sequence[list[TokenSequence]]

    def read(self) -> list[Trace]:
        stepper = load_cached(self.whence).stepper
        taken = (stream_traces(stepper, each, rules=self.rules, layers=self.layers) for each in self.batches)
        return [trace for traces in taken for trace in traces]


def worker_statistics(crew: WorkerPool, whence: ModelSpec, plan: CalibrationPlan) -> StatisticsSource:
    """Statistics taken by ``crew``, of the model that comes from ``whence``.

    Iterating raises WorkersLost, and what loading or reading raise in a worker.
    """

    def parts(batches: Batches) -> Iterator[tuple[list[TokenSequence], list[EntropyStatistics]]]:
        units = (_StatisticsShard(whence, plan, shard) for shard in _shards(batches))
        for unit, found in dispatch_in_order(crew, _StatisticsShard.read, units):
            yield [window for batch in unit.batches for window in batch], found.unpacked()

    return parts


def worker_traces(
    crew: WorkerPool,
    whence: ModelSpec,
    sequences: Iterable[TokenSequence],
    rules: Sequence[OperatingPoint] = (),
    layers: Sequence[int] | None = None,
) -> Iterator[Trace]:
    """Traces batch by batch, as ``trace.stream_traces`` gives them. Raises as ``worker_statistics``."""
    read = None if layers is None else tuple(layers)
    units = (_TraceShard(whence, tuple(rules), read, shard) for shard in _shards(batched(sequences)))
    for _, found in dispatch_in_order(crew, _TraceShard.read, units):
        yield from found


def _shards(batches: Iterable[T]) -> Iterator[list[T]]:
    source = iter(batches)
    while shard := list(islice(source, BATCHES_PER_SHARD)):
        yield shard
