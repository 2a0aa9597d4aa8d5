"""Text splits of a screening, the lens and gate fitted on them, and traces for selection and evaluation.

    calibrate  its training documents fit the lens, its others the gate and the maps of K and V
    validate   every other document (every third if a head costs more than a block and there are enough) chooses rules
               and thresholds; the rest certify them, since a guarantee is void if its own text has chosen the rule
    evaluate   shown savings and losses are of this split

Each split has one window per document if there are enough documents, since intervals resample documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO

import numpy as np
from tqdm import tqdm

from emad_ref.absent import Absent
from emad_ref.calibration.cached_lens import fit_lens_from_cache
from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.lens_fit import LensPlan, held_out_windows
from emad_ref.calibration.linear_maps import fit_gate
from emad_ref.calibration.trace import Trace, take_own_and_lens_traces
from emad_ref.calibration.windows import MOST_WINDOWS, TokenSequence, select_windows_round_robin, window_size
from emad_ref.errors import EmadError
from emad_ref.models.loading import LoadedModel
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import attach_lens, weight_dtype_name
from emad_ref.record import Floats
from emad_ref.replay.replay import ReplayResult, TraceReplayer
from emad_ref.text.corpora import DistinctDocumentIterator
from emad_ref.text.documents import Documents, Split
from emad_ref.tuning import windows_of
from pytest_emad.screening.settings import WINDOWS_PER_DOCUMENT, ScreeningSettings
from pytest_emad.statistics.units import DocumentMembership

MIN_DOCUMENTS = 30  # least documents for a recommendation, as for falsifying a claim about perplexity
ENOUGH_DOCUMENTS = 200  # documents that let a claim about perplexity survive


class TooLittleText(EmadError):
    """Raised for a corpus too small to screen a model on."""


@dataclass(frozen=True, eq=False)
class ScreeningText:
    """Windows of one split, in order; ``near_duplicates``: documents of the split dropped as near-duplicates."""

    windows: tuple[TokenSequence, ...]
    near_duplicates: int = 0

    @property
    def document_of_window(self) -> DocumentMembership:
        """[windows] the document that each was cut from."""
        return DocumentMembership(np.array([window.document for window in self.windows], dtype=np.int64))

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(np.unique(self.document_of_window.number))

    @property
    def n_tokens(self) -> int:
        """Number of decided positions."""
        return int(self.window_lengths.sum())

    @property
    def window_lengths(self) -> Floats:
        """float64 [windows] decided positions."""
        return np.array([window.n_decided for window in self.windows], dtype=np.float64)

    def first_windows(self, windows: int) -> ScreeningText:
        """The first ``windows`` windows."""
        return ScreeningText(self.windows[:windows])


@dataclass(frozen=True, eq=False)
class TextSplits:
    """The three splits, the second in two parts: to choose on and to certify on."""

    calibrate: ScreeningText
    choose: ScreeningText
    certify: ScreeningText
    evaluate: ScreeningText


def read_text_splits(model: LoadedModel, settings: ScreeningSettings, progress: str | None = None) -> TextSplits:
    """Read the splits, with the requested windows or as many as there are.

    Raises:
        TooLittleText: a split without a window, or with a single document.
        BadArgument: as ``tuning.windows_of``.
    """
    large = layers_to_read(model) is not None
    is_third = large and settings.documents >= 2 * MIN_DOCUMENTS
    choosing = settings.documents // 2 if is_third else settings.documents
    counts: dict[Split, int] = {
        "calibrate": (1 if large else WINDOWS_PER_DOCUMENT) * settings.documents,
        "validate": choosing + settings.documents,
        "evaluate": settings.documents,
    }
    splits: dict[Split, ScreeningText] = {}
    with tqdm(desc=progress, disable=progress is None, total=sum(counts.values()), unit="window") as bar:
        for split, count in counts.items():
            read: list[Documents] = []
            windows = tuple(_with_progress(_windows(model, settings, split, count, read.append), bar))
            splits[split] = ScreeningText(
                windows, max((t.left_out for t in read if isinstance(t, DistinctDocumentIterator)), default=0)
            )
    texts = TextSplits(splits["calibrate"], *_divided(splits["validate"], 3 if is_third else 2), splits["evaluate"])
    for purpose, text in vars(texts).items():
        if text.n_documents < 2:
            raise TooLittleText(
                f"corpus={settings.corpus!r} has {text.n_documents} documents to {purpose} on, but expected at least "
                "2; name a larger one"
            )
    return texts


def _divided(text: ScreeningText, every: int) -> tuple[ScreeningText, ScreeningText]:
    """Every ``every``-th document, and the rest."""
    first = text.document_of_window.document_index % every == 0
    chosen, rest = (
        ScreeningText(tuple(w for w, of in zip(text.windows, first, strict=True) if of == part), text.near_duplicates)
        for part in (True, False)
    )
    return chosen, rest


def _windows(
    model: LoadedModel, settings: ScreeningSettings, split: Split, count: int, report: Callable[[Documents], None]
) -> Iterator[TokenSequence]:
    """The first window of each document; if these are fewer than ``count``, then further windows in turns.

    A judged split gets at most ``MOST_WINDOWS`` of each document.
    """

    def cut(limit: int | None, per_document: int) -> Iterator[TokenSequence]:
        return windows_of(
            model,
            settings.corpus,
            split,
            data=settings.data,
            limit=limit,
            per_document=per_document,
            longest=settings.window,
            corpus_group=settings.corpus_group,
            told=report,
        )

    count_given = 0
    for window in cut(count, 1):
        count_given += 1
        yield window
    if count_given < count:
        documents: set[int] = set()
        for window in select_windows_round_robin(cut(None, count if split == "calibrate" else MOST_WINDOWS), count):
            if window.document in documents:
                yield window
            documents.add(window.document)


def _with_progress(windows: Iterator[TokenSequence], bar: tqdm[None]) -> Iterator[TokenSequence]:
    for window in windows:
        yield window
        bar.update()


def absent_text(texts: TextSplits) -> Absent | None:
    """Why so little text allows no recommendation; None if there is enough."""
    for purpose, text in (("choose", texts.choose), ("certify", texts.certify), ("judge", texts.evaluate)):
        if text.n_documents < MIN_DOCUMENTS:
            least = f"{MIN_DOCUMENTS} are the fewest that say anything"
            return Absent(f"inconclusive: {text.n_documents} documents to {purpose} on, {least}")
    return None


LENS_STEPS = 400  # steps that refine the closed form: held-out divergences are below those of 800 from the identity
HELD_OUT_TOKENS, FEWEST_HELD_OUT = 20_000, 4_000  # positions that measure the lens and fit its gate
SHARE_OF_BLOCK = 0.1  # largest cost of a full translator
RANK_OF_WIDTH = 8  # D / 8: half the cost of a block's narrowest matrix
FEW_LAYERS = 6  # parts of a model between the layers read, if reading them costs more than the blocks
DEEP = 16  # layers from which on only every second one is translated


def fit_lens_and_gate(
    model: LoadedModel, text: ScreeningText, settings: ScreeningSettings, progress: str | None = None
) -> FittedLens:
    """A lens with its gate, attached to the model's stepper.

    Raises:
        EmptyCorpus: too few documents to hold any out.
    """
    return fit_lens_and_gate_by_plan(model, make_lens_plan(model, settings), text.windows, progress)


def fit_lens_and_gate_by_plan(
    model: LoadedModel, plan: LensPlan, windows: Sequence[TokenSequence], progress: str | None = None
) -> FittedLens:
    """The lens of ``plan`` and its gate, fitted on held-out windows; attached to the model's stepper.

    Raises:
        BadArgument: layers or a rank that the model lacks.
        EmptyCorpus: too few documents to hold any out.
    """
    fitted = fit_lens_from_cache(model.stepper, plan, lambda: iter(windows), progress=progress)
    name = attach_lens(model.stepper, fitted.lens, model.fingerprint)
    named, held_out = None if progress is None else f"{progress}, gate", held_out_windows(plan, lambda: iter(windows))
    gate = fit_gate(model.stepper, held_out, plan.layers, name, tokens=plan.held_out_tokens, progress=named)
    return replace(fitted, gate=gate)


def iterate_unseen_windows(
    model: LoadedModel, text: ScreeningText, settings: ScreeningSettings
) -> Iterator[TokenSequence]:
    """Windows of ``text`` outside the lens' fitting text, for further fits."""
    return held_out_windows(make_lens_plan(model, settings), lambda: iter(text.windows))


def make_lens_plan(model: LoadedModel, settings: ScreeningSettings) -> LensPlan:
    """Plan of the lens fit of this model: text and settings."""
    stepper = model.stepper
    plan = LensPlan(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=weight_dtype_name(stepper),
        corpus=settings.corpus,
        window=window_size(stepper.max_positions, settings.window),
        layers=layers_to_read(model) or _dense_layers(stepper.layers),
        held_out=0.3,
        seed=settings.seed,
        steps=settings.scale_amount_by_documents(LENS_STEPS),
        held_out_tokens=choose_held_out_token_count(model, settings),
    )
    return replace(plan, rank=_lens_rank(model, plan))


def choose_held_out_token_count(model: LoadedModel, settings: ScreeningSettings) -> int:
    """Positions that measure a lens and fit its gate; the fewest if their heads cost more than blocks."""
    if layers_to_read(model) is not None:
        return FEWEST_HELD_OUT
    return settings.scale_amount_by_documents(HELD_OUT_TOKENS, FEWEST_HELD_OUT)


def layers_to_read(model: LoadedModel) -> tuple[int, ...] | None:
    """Layers of the lens and of every trace if a head costs more FLOPs than a block; None: every layer.

    A head of 49,152 tokens costs as much as eight blocks of SmolLM2-135M: rules that read one often save no work, and
    reading it after every layer would take most of a screening.
    """
    geometry = model.geometry
    if not geometry.has_costly_head:
        return None
    stride = max(1, geometry.layers // FEW_LAYERS)
    return tuple(range(stride, geometry.layers, stride))


def _dense_layers(layers: int) -> tuple[int, ...]:
    stride = 1 if layers <= DEEP else 2
    first = 1 if stride == 1 else layers % 2 or 2  # so that it includes the last layer below the end
    return tuple(range(first, layers, stride))


def _lens_rank(model: LoadedModel, plan: LensPlan) -> int | None:
    width = model.geometry.hidden
    cheap = 2 * width**2 <= SHARE_OF_BLOCK * model.geometry.block_flops()
    taught = width**2 <= plan.steps * plan.tokens_per_step
    return None if cheap and taught else max(1, width // RANK_OF_WIDTH)


@dataclass(frozen=True, eq=False)
class TextTracesByReadout:
    """``text`` with its traces: ``own`` by the model's head, ``tuned`` through the lens."""

    text: ScreeningText
    own: Trace
    tuned: Trace
    _replayers: dict[object, TraceReplayer] = field(default_factory=dict)

    def replay(self, point: OperatingPoint) -> ReplayResult:
        """Replay ``point`` on its trace, which is prepared once for all points with the same readout."""
        key = point.lens, point.estimator
        if key not in self._replayers:
            self._replayers[key] = TraceReplayer(self.trace_for_point(point))
        return self._replayers[key].replay(point)

    def trace_for_point(self, point: OperatingPoint) -> Trace:
        """The trace for replaying ``point``, with its gate."""
        trace = self.own if point.lens is None else self.tuned
        if point.estimator.kind == "linear" and point.estimator not in trace.estimates:
            (whole,) = (gate for gate in trace.estimates if gate.kind == "linear")
            estimates = {**trace.estimates, point.estimator: trace.estimates[whole]}
            macs = {**trace.macs_per_row, point.estimator: trace.macs_per_row[whole]}
            return replace(trace, estimates=estimates, macs_per_row=macs)
        return trace


def take_text_traces_by_readout(
    stepper: Stepper,
    text: ScreeningText,
    fitted: FittedLens,
    layers: Sequence[int] | None,
    progress: str | None = None,
    file: TextIO | None = None,
) -> TextTracesByReadout:
    """Both traces of ``text`` after ``layers``; ``fitted`` is attached to ``stepper``. Others as in ``take_trace``."""
    gate = {} if fitted.gate is None else {fitted.gate: tuple(fitted.lens.translators)}
    own, tuned = take_own_and_lens_traces(
        stepper, text.windows, fitted.lens.digest, estimators=gate, layers=layers, progress=progress, file=file
    )
    return TextTracesByReadout(text, own, tuned)
