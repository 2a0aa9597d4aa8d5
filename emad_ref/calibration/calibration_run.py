"""Calibration of any length: constant memory, resumable, in this process or by workers.

    corpora → windows → batches → H_ℓ → running statistics → profile         (EMAD, "Calibration details")

After every unit (a batch, or a shard of batches from a worker) the state goes into a checkpoint, written completely or
not at all. A resumed run reads the earlier text again without running the model, continues only if it is the same text,
and ends with the same bits. A checkpoint of another configuration is refused with the differing field. Workers run each
batch in one forward like this process, so the sums have the same terms in the same order.
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
import torch
from tqdm import tqdm

from emad_ref.calibration.entropy_statistics import (
    ARRAYS,
    BUCKETS,
    DocumentMoments,
    EntropyStatistics,
    measure_batch_statistics,
)
from emad_ref.calibration.profile import (
    MINIMUM_TOKENS,
    Profile,
    bins_to_json,
    library_versions,
    profile_from_statistics,
    require_probes,
    shorten,
)
from emad_ref.calibration.trace import PLAIN_TRACE, EmptyCorpus, Trace, TraceOptions, stream_traces
from emad_ref.calibration.windows import TOKENS_PER_BATCH, TokenSequence, iterate_batches
from emad_ref.errors import BadArgument, EmadError
from emad_ref.file_formats import FileFormat
from emad_ref.files import require_writable
from emad_ref.models.model_spec import ModelSpec, load_cached
from emad_ref.models.stepper import Stepper
from emad_ref.point import ThresholdBinSpec
from emad_ref.record import Floats, Ints
from emad_ref.workers.dispatch import WorkerPool, dispatch_in_order

Corpora = Mapping[str, Callable[[], Iterable[TokenSequence]]]
"""Name → its windows from the first, anew at every call: the first pass and a resumed run read them again."""
Batches = Iterable[list[TokenSequence]]
StatisticsSource = Callable[[Batches], Iterator[tuple[list[TokenSequence], list[EntropyStatistics]]]]
"""Batches → those of one unit after another, in order: their windows, and statistics to add up one by one. Of this
process, whose units are batches (``local_statistics_source``), or of workers (``worker_statistics_source``)."""


class BadCheckpoint(EmadError):
    """Raised for a checkpoint that cannot be read, or belongs to another configuration or text."""


CHECKPOINT = FileFormat("checkpoint", 2, "delete it to start anew", BadCheckpoint)


@dataclass(frozen=True)
class CalibrationPlan:
    """Plan of a calibration; runs with equal plans and texts have equal profiles.

    ``every_layer``  read entropies after every layer, instead of the probes and the last: a curve for choosing probes.
                     Thresholds do not need it, and each layer costs another head.
    ``window``, ``documents``  how the windows were cut, for the record: tokens each, and their limit per corpus.
    ``tokens``  decided positions to take from each corpus; None takes all.
    """

    model: str
    fingerprint: str
    dtype: str
    window: int
    probes: tuple[int, ...]
    bins: ThresholdBinSpec = field(default_factory=ThresholdBinSpec)
    tokens: int | None = None
    documents: int | None = None
    minimum_tokens: int = MINIMUM_TOKENS
    tokens_per_batch: int = TOKENS_PER_BATCH
    every_layer: bool = False

    def layers_to_read(self, layers: int) -> tuple[int, ...]:
        """Layers of a model's ``layers`` whose entropies are read, including the last; without a probe, all.

        No threshold needs the last, but only it shows a profile that rises at the end.
        """
        return tuple(range(1, layers + 1)) if self.every_layer or not self.probes else (*self.probes, layers)

    def to_json(self) -> dict[str, Any]:
        """Every field by name as JSON, and the libraries' versions, which change the last digits."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        encoded = json.dumps(plain | {"bins": bins_to_json(self.bins), "versions": library_versions()})
        return dict(json.loads(encoded))


@dataclass(frozen=True)
class CorpusPosition:
    """Position in one corpus: ``windows`` and decided ``tokens`` read, ``digest`` sha256 of those windows."""

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
    """Calibrate: the entropy profile of one or several corpora, in constant memory.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    plan : CalibrationPlan
        Probes, bins and limits.
    corpora : mapping of str to iterable of TokenSequence
        Windows by corpus name, read one after another.
    checkpoint : Path or None
        File to write after ``every`` units; the caller removes it once the profile is kept.
    resume : bool
        Continue from the checkpoint if it exists.
    every : int
        Units between two checkpoints.
    progress : str or None
        Name of the progress bar; None shows none.
    parts : StatisticsSource or None
        Source of the statistics of batches, such as workers; None: this process. They are added up here, in the order
        of the text, so the profile has the same bits for any source.

    Returns
    -------
    Profile
        Mean entropies and isotonic targets, nats.

    Raises
    ------
    BadArgument
        Impossible probes, no corpora, a limit below 1.
    BadCheckpoint
        A checkpoint exists but ``resume`` is not set, or it is unreadable, or of another run.
    EmptyCorpus
        A corpus without a window.

    References
    ----------
    EMAD, "Calibration details".
    """
    require_probes(plan.probes, stepper.layers)
    _require_count("tokens", plan.tokens)
    _require_count("every", every)
    if not corpora:
        raise BadArgument("corpora", [], "at least one corpus")
    if checkpoint is not None:
        require_writable(checkpoint, "checkpoint")
    configuration, source = plan.to_json(), parts or local_statistics_source(stepper, plan)
    read = plan.layers_to_read(stepper.layers)
    state = None if checkpoint is None else _load_checkpoint(checkpoint, resume, configuration, tuple(corpora))
    if state is None:
        state = _CalibrationState(EntropyStatistics.empty(plan.bins.bin_count, len(read)), {})
    total = None if plan.tokens is None else plan.tokens * len(corpora)
    with tqdm(
        desc=progress, disable=progress is None, unit="tok", unit_scale=True, initial=state.tokens, total=total
    ) as bar:
        for name, windows in corpora.items():
            for number, further in enumerate(_read_corpus(source, plan, name, windows(), state), start=1):
                state = further
                bar.update(state.tokens - bar.n)
                if checkpoint is not None and number % every == 0:
                    _save_checkpoint(checkpoint, configuration, state)
            if name not in state.places:
                raise EmptyCorpus(
                    f"corpus={name!r} has no window of two tokens, but expected at least one document of two tokens; "
                    "check the source and the split"
                )
    return profile_from_statistics(
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


def local_statistics_source(stepper: Stepper, plan: CalibrationPlan) -> StatisticsSource:
    """Statistics computed in this process, batch after batch."""
    first, read = first_probe(plan), plan.layers_to_read(stepper.layers)

    def parts(batches: Batches) -> Iterator[tuple[list[TokenSequence], list[EntropyStatistics]]]:
        for batch in batches:
            yield batch, [measure_batch_statistics(stepper, batch, plan.bins, first, read)]

    return parts


def first_probe(plan: CalibrationPlan) -> int | None:
    """The layer whose top-1 probability and predicted token are read."""
    return plan.probes[0] if plan.probes else None


def _read_corpus(
    parts: StatisticsSource,
    plan: CalibrationPlan,
    name: str,
    windows: Iterable[TokenSequence],
    state: _CalibrationState,
) -> Iterator[_CalibrationState]:
    """Yield the state after each further unit of one corpus."""
    stream = limit_tokens(windows, plan.tokens)
    if name not in state.places:
        state = replace(state, statistics=state.statistics.with_document_ended())
    digest, place = hashlib.sha256(), state.places.get(name, CorpusPosition())
    for window in islice(stream, place.windows):
        digest.update(window_to_bytes(window))
    if digest.hexdigest() != place.digest:
        raise BadCheckpoint(
            f"corpus={name!r}: its first {place.windows} windows are another text than at the checkpoint, but expected "
            "the same; delete the checkpoint to start anew"
        )
    for read, statistics in parts(iterate_batches(stream, plan.tokens_per_batch)):
        for window in read:
            digest.update(window_to_bytes(window))
        tokens = sum(int(each.tokens.sum()) for each in statistics)
        place = CorpusPosition(place.windows + len(read), place.tokens + tokens, digest.hexdigest())
        # one by one: sums of floats depend on the grouping of their terms
        state = _CalibrationState(sum(statistics, state.statistics), {**state.places, name: place})
        yield state


def window_to_bytes(window: TokenSequence) -> bytes:
    """Bytes of a window: its length before its tokens, so that different cuts of one text differ."""
    return np.array([len(window.tokens), window.first_decided, *window.tokens], dtype="<i8").tobytes()


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
        decided = window.n_decided
        if left is None or decided <= left:
            yield window
        else:
            yield replace(window, tokens=window.tokens[: window.first_decided + left + 1])
        if left is not None:
            left -= min(decided, left)
            if left == 0:
                return


def count_targets_by_token(corpora: Corpora, vocabulary: int, tokens: int | None, progress: str | None = None) -> Ints:
    """int64 [vocabulary] how often each token is a target in the windows that ``calibrate`` reads with that limit.

    Raises:
        EmptyCorpus: no window in any of them.
    """
    counts = np.zeros(vocabulary, dtype=np.int64)
    with tqdm(desc=progress, disable=progress is None, unit="tok", unit_scale=True) as bar:
        for windows in corpora.values():
            for window in limit_tokens(windows(), tokens):
                targets = window.tokens[window.first_decided + 1 :]
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
    checkpoint: Path, resume: bool, configuration: dict[str, Any], corpora: tuple[str, ...]
) -> _CalibrationState | None:
    """The state to continue from; None without a checkpoint."""
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
    read = tuple(state.places)
    if corpora[: len(read)] != read:
        raise BadCheckpoint(
            f"checkpoint={str(checkpoint)!r} has read corpora {list(read)}, but expected the first of {list(corpora)}; "
            "name the same corpora in the same order, or delete it to start anew"
        )
    return state


def _save_checkpoint(path: Path, configuration: dict[str, Any], state: _CalibrationState) -> None:
    """Write the state; the file is complete or unchanged."""
    statistics = state.statistics
    assert statistics.documents is not None, "windows know their documents"
    arrays = {name: getattr(statistics, name) for name in ARRAYS} | {"documents": _pack_moments(statistics.documents)}
    about = {
        "plan": configuration,
        "sequences": statistics.sequences,
        "places": {name: [place.windows, place.tokens, place.digest] for name, place in state.places.items()},
    }
    CHECKPOINT.write_tensors(path, {name: torch.from_numpy(array) for name, array in arrays.items()}, about)


def _pack_moments(moments: DocumentMoments) -> Floats:
    """[3 + read, 1 + read]: the count and the last document's number; its sums; the products."""
    head = np.zeros((2, len(moments.products)))
    head[0, :2] = moments.count, -1
    if moments.last is not None:
        head[0, 1], head[1] = moments.last
    return np.concatenate([head, moments.products])


def _unpack_moments(packed: Floats) -> DocumentMoments:
    count, number = int(packed[0, 0]), int(packed[0, 1])
    return DocumentMoments(count, packed[2:], last=(number, packed[1]) if number >= 0 else None)


def _read_checkpoint(path: Path) -> tuple[_CalibrationState, dict[str, Any]]:
    """State and plan of a checkpoint."""
    tensors, about = CHECKPOINT.read_tensors(path)
    arrays = {name: tensors[name].numpy() for name in ARRAYS}
    documents = _unpack_moments(tensors["documents"].numpy())
    statistics = EntropyStatistics(**arrays, sequences=about["sequences"], documents=documents)
    return _CalibrationState(
        statistics, {name: CorpusPosition(*place) for name, place in about["places"].items()}
    ), about["plan"]


BATCHES_PER_SHARD = 8  # batches per unit, with one histogram; a lost worker costs at most these

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PackedStatistics:
    """Compact statistics of a unit's batches: ``tokens`` int64 [batches, bins]; ``sums``, ``squares`` float64 [batches,
    bins, read]; ``sequences`` int64 [batches]; ``documents`` of each batch. The histogram, whose counts add up in any
    order, is stored for all batches together by its non-zero cells: ``cells`` int64 of it flattened, and their
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
    def pack(batches: Sequence[EntropyStatistics]) -> PackedStatistics:
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

    def unpack(self) -> list[EntropyStatistics]:
        """Statistics of each batch, to be added up in order; the last has the histogram of all."""
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

    model_spec: ModelSpec
    plan: CalibrationPlan
    batches: Sequence[list[TokenSequence]]

    def read(self) -> PackedStatistics:
        source = local_statistics_source(load_cached(self.model_spec).stepper, self.plan)
        return PackedStatistics.pack([each for _, statistics in source(self.batches) for each in statistics])


@dataclass(frozen=True, eq=False)
class _TraceShard:
    """Batches to trace."""

    model_spec: ModelSpec
    options: TraceOptions
    batches: Sequence[list[TokenSequence]]

    def read(self) -> list[Trace]:
        stepper = load_cached(self.model_spec).stepper
        taken = (stream_traces(stepper, each, self.options) for each in self.batches)
        return [trace for traces in taken for trace in traces]


def worker_statistics_source(crew: WorkerPool, spec: ModelSpec, plan: CalibrationPlan) -> StatisticsSource:
    """Statistics taken by ``crew`` with the model of ``spec``.

    Iterating raises WorkersLost, and errors of loading or reading in a worker.
    """

    def parts(batches: Batches) -> Iterator[tuple[list[TokenSequence], list[EntropyStatistics]]]:
        units = (_StatisticsShard(spec, plan, shard) for shard in _shards(batches))
        for unit, packed in dispatch_in_order(crew, _StatisticsShard.read, units):
            yield [window for batch in unit.batches for window in batch], packed.unpack()

    return parts


def iterate_worker_traces(
    crew: WorkerPool,
    spec: ModelSpec,
    sequences: Iterable[TokenSequence],
    options: TraceOptions = PLAIN_TRACE,
) -> Iterator[Trace]:
    """Traces batch by batch, as from ``trace.stream_traces``, without ``observe``.

    Raises as ``worker_statistics_source``.
    """
    units = (_TraceShard(spec, options, shard) for shard in _shards(iterate_batches(sequences)))
    for _, trace in dispatch_in_order(crew, _TraceShard.read, units):
        yield from trace


def _shards(batches: Iterable[T]) -> Iterator[list[T]]:
    source = iter(batches)
    while shard := list(islice(source, BATCHES_PER_SHARD)):
        yield shard
