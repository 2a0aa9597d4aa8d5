"""Self-speculation of one model: whether and how it should draft for itself, and other lossless ways.

    agrees[e, S][p]   the readout after layer e, over the vocabulary S, and the model itself have one argmax at p
    gate[e][p]        the gate's expected √KL there
    copies[p], stands[p]   whether the text repeats itself there, and the number of consecutive right copies
    a round at p      k = copies, if there are any, else drafts while gate ≤ τ, k ≤ longest;
                      a = the number of these before the first rejected one; emits a + 1 tokens, goes on at p + a + 1

How many tokens a round drafts or copies goes by the number of rows: a round of one row may emit several tokens for the
price of one, while many rows read the weights once for all of them anyway, and each refused draft costs. So lengths are
measured once, from one row up, until no length pays (``measure_lengths_by_rows``); the exit stores them.

Drafts are for text that the model writes: greedy continuations of prompts. A separate lens is fitted on such
continuations, since one fitted on corpus text agrees with them far less often. Rounds of drafting are simulated on
columns of continuations: emitted tokens exactly, drafts behind the first wrong one by the gates of the right text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from emad_ref.absent import Absent
from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.lens_fit import LensPlan, states_and_final_log_probs
from emad_ref.calibration.trace import EmptyCorpus
from emad_ref.calibration.windows import TokenSequence, iterate_batches
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, DraftingDecoder, DraftLengths, PromptLookup
from emad_ref.decoding.teacher_forcing import BATCH_ROWS
from emad_ref.errors import BadArgument
from emad_ref.models.bundled import bundled_model_names
from emad_ref.models.generation import Generate
from emad_ref.models.geometry import Geometry
from emad_ref.models.loading import LoadedModel, load, shared_vocabulary_size
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.probes.draft_reader import EarlyExitDraftReader
from emad_ref.probes.tuned_lens import weight_dtype_name
from emad_ref.protocol import Prompt
from emad_ref.record import Bools, Floats, Ints, Work
from emad_ref.signals import to_numpy_float64
from pytest_emad.benchmark.clock import WARM_UP
from pytest_emad.screening.phases import DRAFTED_TEXTS
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.timing import (
    NEW_TOKENS,
    PROMPT_LENGTHS,
    CandidateTime,
    UnitCosts,
    make_greedy_generate,
    predict_candidate_timing_seconds,
    predict_fit_seconds,
    time_candidates,
    timed_pair_count,
)
from pytest_emad.screening.traces import (
    HELD_OUT_TOKENS,
    ScreeningText,
    TextSplits,
    choose_held_out_token_count,
    fit_lens_and_gate_by_plan,
    layers_to_read,
    make_lens_plan,
)

ASSISTED, OWN_HEAD_DRAFTS, LENS_DRAFTS, COPIES_ALONE = "assisted", "self", "lens", "copies"


def make_drafting_generate(loaded: LoadedModel, drafting: Drafting) -> Generate:
    """Make a function that generates by self-speculation with the reference decoder."""
    return make_greedy_generate(DraftingDecoder(loaded.stepper, drafting))


def make_drafting_ablations(loaded: LoadedModel, drafting: Drafting) -> dict[str, Generate]:
    """Generate with either half of ``drafting`` alone, if it has two, and with drafts by the model's own head."""
    ways = {}
    if drafting.longest:
        ways[OWN_HEAD_DRAFTS] = Drafting(drafting.layer, drafting.longest)
    if drafting.longest and drafting.copied:
        ways[LENS_DRAFTS] = replace(drafting, copied=0)
        ways[COPIES_ALONE] = Drafting(drafting.layer, 0, copied=drafting.copied)
    return {name: make_drafting_generate(loaded, way) for name, way in ways.items()}


def find_assistant_model(loaded: LoadedModel) -> LoadedModel | None:
    """The smallest bundled decoder-only model with the same ids and fewer parameters; None without one."""
    candidates = []
    for name in bundled_model_names():
        other = load(name, device=str(loaded.stepper.device), dtype=loaded.stepper.dtype)
        if other.geometry.encoder_layers or other.geometry.parameter_count() >= loaded.geometry.parameter_count():
            continue
        try:
            shared_vocabulary_size(loaded, other)
        except BadArgument:  # its ids differ
            continue
        candidates.append(other)
    return min(candidates, key=lambda each: each.geometry.parameter_count(), default=None)


@dataclass(frozen=True, eq=False)
class DraftingRoundShares:
    """Rounds of drafting: shares of rounds with 0, 1, … ``drafts`` read after the layer, and with 0, 1, … ``copies``.

    The first of ``copies`` is 0; all shares sum to 1. ``tokens``: emitted per round.
    """

    drafts: Floats
    tokens: float
    copies: Floats


LONGEST = (1, 2, 3, 4, 6, 8)
COPIED = (0, 4, 8, 16)
SURE = (0.3, 0.5, 0.7, 0.85)  # shares of tokens below a threshold; the threshold inf accepts all
SHARES_OF_VOCABULARY = (1 / 8, 1 / 2)


@dataclass(frozen=True, eq=False)
class DraftColumns:
    """Drafts of one kind (layer, readout, vocabulary) compared with texts that the model wrote.

    ``drafting``  the kind, with threshold inf and longest 1.
    ``agrees`` [tokens], ``gate`` float64 [tokens] √nats, None without one; ``starts`` int64 [texts + 1] offsets.
    ``stands`` int64 [tokens] number of right copies among ``max(COPIED)``, −1 without an earlier match.
    """

    drafting: Drafting
    agrees: Bools
    gate: Floats | None
    starts: Ints
    stands: Ints
    _runs_by: dict[float | None, list[list[int]]] = field(default_factory=dict, repr=False)

    def gated_run_lengths(self, threshold: float | None) -> list[list[int]]:
        """For each text and token, the length of the run with gates of at most ``threshold``.

        None: the run with agreeing drafts.
        """
        if threshold not in self._runs_by:
            if threshold is None:
                flags = self.agrees
            else:
                assert self.gate is not None or threshold == math.inf, "a threshold compares a gate that was read"
                flags = np.ones(len(self.agrees), dtype=bool) if self.gate is None else self.gate <= threshold
            bounds = zip(self.starts[:-1], self.starts[1:], strict=True)
            self._runs_by[threshold] = [_runs(flags[first:end]) for first, end in bounds]
        return self._runs_by[threshold]


def generate_continuations(
    stepper: Stepper,
    windows: Iterable[TokenSequence],
    prompt: int,
    new: int,
    *,
    point: OperatingPoint | None = None,
    rows: int = 16,
    written: Callable[[int], object] = lambda texts: None,
) -> list[TokenSequence]:
    """Greedy continuations at ``point`` (None: full depth), after ``prompt`` tokens of each window that is long enough.

    ``new`` tokens are decided in each, the first by the prompt's last position. Windows with a source keep it.
    ``written(n)`` is called after every n of them, at most ``rows``.

    Raises:
        BadArgument: no window is long enough.
    """
    long_windows = [window for window in windows if len(window.tokens) >= prompt]
    if not long_windows:
        raise BadArgument("windows", 0, f"some of at least {prompt} tokens", "shorten the prompt")
    decoder = WalkedDecoder(stepper, full_depth(stepper.layers) if point is None else point, max_rows=rows)
    texts = []
    for first in range(0, len(long_windows), rows):
        batch = long_windows[first : first + rows]
        emitted = decoder.generate([Prompt(each.tokens[:prompt], each.source) for each in batch], new).emitted
        for window, tokens in zip(batch, emitted, strict=True):
            texts.append(
                replace(window, tokens=np.concatenate([window.tokens[:prompt], tokens]), first_decided=prompt - 1)
            )
        written(len(batch))
    return texts


def most_frequent_tokens(texts: Iterable[TokenSequence], size: int) -> Ints:
    """int64 [≤ size] ascending ids of the most frequent emitted tokens; ties go to the smaller id."""
    emitted = np.concatenate([text.tokens[text.first_decided + 1 :] for text in texts])
    ids, counts = np.unique(emitted, return_counts=True)
    most: Ints = np.sort(ids[np.argsort(-counts, kind="stable")[:size]]).astype(np.int64)
    return most


def candidate_vocabularies(stepper: Stepper, texts: Sequence[TokenSequence]) -> list[Ints | None]:
    """All ids, and the most frequent ones at ``SHARES_OF_VOCABULARY`` of them, each size once."""
    sizes = [max(1, int(share * stepper.vocabulary_size)) for share in SHARES_OF_VOCABULARY]
    by_size = {len(ids): ids for ids in (most_frequent_tokens(texts, size) for size in sizes)}
    return [None, *by_size.values()]


def restrict_gate_to_layer(gate: EntropyEstimator, layers: Sequence[int], layer: int) -> EntropyEstimator:
    """The part of a gate with probes at ``layers`` that reads after ``layer``."""
    return replace(gate, weights=(gate.weights[list(layers).index(layer)],))


@torch.inference_mode()
def compute_draft_columns(
    stepper: Stepper,
    texts: Sequence[TokenSequence],
    layers: Sequence[int],
    lens: str | None,
    gates: Mapping[int, EntropyEstimator],
    among: Sequence[Ints | None] = (None,),
) -> tuple[DraftColumns, ...]:
    """Columns of every layer and vocabulary, in that order, for the decided positions of ``texts``.

    Raises:
        BadArgument: a lens that is not attached or lacks a layer, layers outside 1 … L − 1.
    """
    kinds = [Drafting(layer, 1, lens=lens, gate=gates.get(layer), vocabulary=ids) for layer in layers for ids in among]
    for kind in kinds:
        kind.require_fits_model(stepper.layers, stepper.vocabulary_size)
    readers = [EarlyExitDraftReader(stepper, kind.layer, lens, kind.gate, kind.vocabulary) for kind in kinds]
    agrees: list[list[Bools]] = [[] for _ in kinds]
    gate: list[list[Floats]] = [[] for _ in kinds]
    uncounted = Work.none(stepper.layers)
    for batch in iterate_batches(texts):
        states, final = states_and_final_log_probs(stepper, layers, batch)
        own = final.argmax(dim=-1)
        for kind, reader, right, expected in zip(kinds, readers, agrees, gate, strict=True):
            hidden = states[kind.layer]
            right.append((reader.draft_tokens(hidden, uncounted) == own).cpu().numpy())
            if kind.gate is not None:
                expected.append(to_numpy_float64(reader.predict_sqrt_kl(hidden, uncounted)))
    starts = np.cumsum([0, *(text.n_decided for text in texts)])
    stands = np.concatenate([_standing_copies(text) for text in texts])
    return tuple(
        DraftColumns(kind, np.concatenate(right), np.concatenate(expected) if expected else None, starts, stands)
        for kind, right, expected in zip(kinds, agrees, gate, strict=True)
    )


def simulate_drafting_rounds(
    columns: DraftColumns, threshold: float, longest: int, copied: int = 0
) -> DraftingRoundShares:
    """Simulate the rounds of drafting on the texts; the first decided token of each comes from the prompt."""
    drafts, copies, emitted = [0] * (longest + 1), [0] * (copied + 1), 0
    texts = zip(
        columns.starts[:-1].tolist(), columns.gated_run_lengths(threshold), columns.gated_run_lengths(None), strict=True
    )
    all_stands = columns.stands.tolist()
    for first, going, right in texts:
        at, last = 1, len(right)  # the prompt's last position decided the first token
        stands = all_stands[first : first + last]
        while at < last:
            room = last - at - 1
            if copied and room and stands[at] >= 0:
                count, accepted = min(copied, room), stands[at]
                copies[count] += 1
            else:
                count, accepted = min(longest, going[at], room), right[at]
                drafts[count] += 1
            at += min(count, accepted) + 1
        emitted += last - 1
    assert emitted > 0, "texts of two decided tokens or more"
    rounds = sum(drafts) + sum(copies)
    return DraftingRoundShares(np.array(drafts) / rounds, emitted / rounds, np.array(copies) / rounds)


def drafting_weight_flops_per_token(geometry: Geometry, drafting: Drafting, rounds: DraftingRoundShares) -> float:
    """Weights read per emitted token, in FLOPs of one row: a pass reads them once, whatever the number of its tokens.

    A round of k drafts runs k times through layers 1…e and the draft's head, and once through all layers and the head.
    """
    ids = drafting.vocabulary
    head = geometry.head_flops() * (1.0 if ids is None else len(ids) / geometry.vocabulary)
    drafts = float(rounds.drafts @ np.arange(len(rounds.drafts)))
    whole = geometry.layers * geometry.block_flops() + geometry.head_flops()
    return (whole + drafts * (drafting.layer * geometry.block_flops() + head)) / rounds.tokens


def rank_drafting_settings(
    columns: Iterable[DraftColumns],
    cost: Callable[[Drafting, DraftingRoundShares], float],
    *,
    longest: Sequence[int] = LONGEST,
    sure: Sequence[float] = SURE,
    copied: Sequence[int] = COPIED,
) -> list[Drafting]:
    """Every setting of every kind of draft, cheapest first by ``cost``; also copies alone, which need no draft.

    ``sure``: thresholds as shares of tokens below them; the infinite threshold is always included.
    """
    ranked: list[tuple[float, Drafting]] = []

    def add(each: DraftColumns, threshold: float, most: int, copies: int) -> None:
        drafting = replace(each.drafting, threshold=threshold, longest=most, copied=copies)
        ranked.append((cost(drafting, simulate_drafting_rounds(each, threshold, most, copies)), drafting))

    kinds = list(columns)
    for each in kinds:
        levels = [] if each.gate is None else np.unique(np.quantile(each.gate, sure)).tolist()
        for setting in product((*levels, math.inf), longest, copied):
            add(each, *setting)
    if kinds:  # copies read no draft, and run through all layers at once
        alone = replace(kinds[0], drafting=Drafting(kinds[0].drafting.layer, 1), gate=None)
        for copies in filter(None, copied):
            add(alone, math.inf, 0, copies)
    return [drafting for _, drafting in sorted(ranked, key=lambda each: each[0])]


def _standing_copies(text: TokenSequence) -> Ints:
    """[decided] number of consecutive copies that continue the text, −1 without an earlier match."""
    tokens, lookup, most = text.tokens.tolist(), PromptLookup(), max(COPIED)
    counts = []
    for position in range(
        text.first_decided + 1, len(tokens)
    ):  # the token at ``position`` − 1 is fed, the next is drafted
        offered = lookup.find_continuation(tokens[:position], most)
        right = 0
        while right < len(offered) and position + right < len(tokens) and offered[right] == tokens[position + right]:
            right += 1
        counts.append(right if offered else -1)
    return np.array(counts, dtype=np.int64)


def _runs(flags: Bools) -> list[int]:
    """[n] length of the run of set flags from each place on."""
    places = np.arange(len(flags))
    next_unset = np.minimum.accumulate(np.where(flags, len(flags), places)[::-1])[::-1]
    runs: list[int] = (next_unset - places).tolist()
    return runs


DRAFT_LENS_STEPS = 250  # of 512 tokens, after the closed form


def candidate_draft_layers(layers: int) -> tuple[int, ...]:
    """Candidate layers: the first third, four at most. Each costs every drafted token its blocks."""
    return tuple(range(1, max(1, min(4, layers // 3)) + 1))


def fit_draft_lens(
    model: LoadedModel,
    texts: Sequence[TokenSequence],
    layers: Sequence[int],
    *,
    corpus: str,
    rank: int | None = None,
    steps: int = DRAFT_LENS_STEPS,
    tokens: int = HELD_OUT_TOKENS,
    seed: int = 0,
    progress: str | None = None,
) -> FittedLens:
    """Fit a lens of ``layers`` with its gate, attached to the model's stepper.

    ``texts``: the model's continuations of calibration text (``generate_continuations``); ``corpus``: that text's
    name, for the record.

    Raises:
        BadArgument: layers or a rank that the model lacks.
        EmptyCorpus: no text, or too few documents to hold any out.
    """
    plan = LensPlan(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=weight_dtype_name(model.stepper),
        corpus=f"{corpus}, continued by the model",
        window=max((len(text.tokens) for text in texts), default=0),
        layers=tuple(layers),
        rank=rank,
        steps=steps,
        held_out=0.3,
        held_out_tokens=tokens,
        seed=seed,
    )
    return fit_lens_and_gate_by_plan(model, plan, texts, progress)


CONTINUED_TOKENS = 112
# windows after each prompt length: to choose or report on, to fit on, and for all of these if heads cost more
MAX_WINDOWS, MAX_LESSONS, LARGE_WINDOWS = 64, 256, 36
WORTH_SPEEDUP = 1.05  # speed-up over full depth


@dataclass(frozen=True, eq=False)
class SelfDraftingResult:
    """Result of the search for a drafting setting.

    ``drafting``: the recommended setting, or why there is none. ``best``: the fastest timed; None without any.

    ``spoken``: the lens and gate of the drafts' readout, attached to the model's stepper. On continuations of
    evaluation text: ``agreement``, the share of drafts of its kind that the model itself would emit, and ``tokens``
    emitted per round. ``time``: measured after prompts of evaluation text.
    """

    best: Drafting | None
    drafting: Drafting | Absent
    spoken: FittedLens | None = None
    agreement: float | None = None
    tokens: float | None = None
    time: CandidateTime | None = None

    @property
    def recommendation_text(self) -> str:
        """Text of the recommendation."""
        if isinstance(self.drafting, Absent):
            return f"lossless: {self.drafting.reason}"
        assert self.time is not None, "a recommended setting was timed"
        return (
            f"lossless: {_in_words(self.drafting, self.agreement or 0.0)}; {self.tokens:.2f} tokens a round, "
            f"{self.time.fast:.2f}× as fast as full depth with one row, its output unchanged; "
            f"{_rows_in_words(self.drafting)}"
        )


def _in_words(way: Drafting, agreement: float) -> str:
    copies = f"let it copy up to {way.copied} tokens where its text repeats itself" if way.copied else ""
    if not way.longest:
        return copies
    head = "the whole vocabulary" if way.vocabulary is None else f"{len(way.vocabulary)} words of the vocabulary"
    return (
        f"{copies}{', and ' if copies else 'let it '}draft for itself after layer {way.layer} by {head}, "
        f"{'as long as its gate lets it' if way.uses_gate else 'always'}, up to {way.longest} tokens a round "
        f"({agreement:.0%} of drafts agree)"
    )


def _rows_in_words(way: Drafting) -> str:
    """The largest batch that drafts."""
    most = max((lengths.rows for lengths in way.by_rows or ()), default=1)
    return f"up to {most} rows at once" if most > 1 else "one row at a time"


def choose_drafting(
    model: LoadedModel,
    texts: TextSplits,
    fitted: FittedLens,
    settings: ScreeningSettings,
    progress: str | None = None,
    *,
    keep: Callable[[str, Callable[[], Any]], Any] = lambda part, work: work(),
) -> SelfDraftingResult:
    """The fastest of three kinds of drafting: copies alone, drafts alone, and both, each at its best setting.

    Settings are ranked on continuations of the selection text by the weights that they read
    (``drafting_weight_flops_per_token``); the best of each kind is then timed beside full depth. The fastest is timed
    again if it pays, and that time decides. ``progress`` names the bars; None shows none. ``keep``: as
    ``PhaseRunner.keep``, for the longest part.
    """
    layers = candidate_draft_layers(model.geometry.layers)
    writes = None if progress is None else f"{progress}, texts of the model"
    try:
        taught, few = _continued_windows(model, settings)
        amounts = ((texts.calibrate, taught), (texts.choose, few), (texts.evaluate, few))
        lessons, chosen, judged = keep(DRAFTED_TEXTS, lambda: [_continued(model, *each, writes) for each in amounts])
    except BadArgument as error:  # too short a text to continue
        return SelfDraftingResult(None, Absent(f"no text to draft on: {error}"))
    try:
        spoken = fit_draft_lens(
            model,
            lessons,
            layers,
            corpus=settings.corpus,
            rank=fitted.lens.rank,
            steps=settings.scale_amount_by_documents(DRAFT_LENS_STEPS),
            tokens=choose_held_out_token_count(model, settings),
            seed=settings.seed,
            progress=progress,
        )
    except EmptyCorpus as error:
        return SelfDraftingResult(None, Absent(f"too little text to fit a lens for drafts on: {error}"))
    assert spoken.gate is not None, "a lens for drafts has a gate"
    among = candidate_vocabularies(model.stepper, lessons)
    gates = {layer: restrict_gate_to_layer(spoken.gate, layers, layer) for layer in layers}
    read = partial(compute_draft_columns, model.stepper, lens=spoken.lens.digest, gates=gates)
    ranked = rank_drafting_settings(
        read(chosen, layers, among=among), partial(drafting_weight_flops_per_token, model.geometry)
    )
    ways = {name: next(way for way in ranked if _kind(way) == name) for name in dict.fromkeys(map(_kind, ranked))}
    timed = time_candidates(
        model, {name: DraftingDecoder(model.stepper, way) for name, way in ways.items()}, texts.evaluate, settings
    )
    fastest = max(timed[1:], key=lambda each: each.fast)
    way = ways[fastest.name]
    if fastest.fast >= WORTH_SPEEDUP:  # timed again, since a choice among several favours noise
        again = {fastest.name: DraftingDecoder(model.stepper, way)}
        _, fastest = time_candidates(model, again, texts.evaluate, settings)
    (shown_columns,) = read(judged, [way.layer], among=[way.vocabulary])
    rounds = simulate_drafting_rounds(shown_columns, way.threshold, way.longest, way.copied)
    found: Drafting | Absent
    if fastest.fast < WORTH_SPEEDUP:
        speedup = f"{fastest.fast:.2f}× as fast as full depth, {WORTH_SPEEDUP:.2f}× is the least"
        found = Absent(f"drafting for itself is {speedup}")
    else:
        found = way = replace(way, by_rows=measure_lengths_by_rows(model, way, texts.evaluate, settings))
    agreement = float(shown_columns.agrees.mean())
    return SelfDraftingResult(way, found, spoken, agreement, rounds.tokens, fastest)


ROWS = (2, 4, 8, 16)  # batch sizes at which lengths are measured, while any pays


def measure_lengths_by_rows(
    model: LoadedModel, way: Drafting, text: ScreeningText, settings: ScreeningSettings
) -> tuple[DraftLengths, ...]:
    """Lengths of ``way`` for more than one row: at each of ``ROWS`` the fastest of ``candidate_lengths``.

    The candidates of a batch size follow from the lengths of the one before. The fastest is timed again, since a choice
    among several favours noise. The search ends at the first batch size at which it is not ``WORTH_SPEEDUP`` times as
    fast as full depth, both times.
    """

    def speedups(rows: int, tried: Iterable[DraftLengths], pairs: int | None) -> list[tuple[float, DraftLengths]]:
        named = {f"drafts {each.longest}, copies {each.copied}": each for each in tried}
        decoders = {
            name: DraftingDecoder(
                model.stepper, replace(way, longest=each.longest, copied=each.copied, by_rows=None), max_rows=rows
            )
            for name, each in named.items()
        }
        timed = time_candidates(model, decoders, text, settings, rows=rows, pairs=pairs)[1:]
        return [(each.fast, named[each.name]) for each in timed]

    found: list[DraftLengths] = []
    lengths = way.lengths_at(1)
    for rows in ROWS:
        fast, lengths = max(speedups(rows, candidate_lengths(lengths, rows), len(PROMPT_LENGTHS)))
        if fast < WORTH_SPEEDUP or max(speedups(rows, [lengths], None))[0] < WORTH_SPEEDUP:
            break
        found.append(lengths)
    return tuple(found)


def candidate_lengths(before: DraftLengths, rows: int) -> list[DraftLengths]:
    """Lengths to try with ``rows`` rows: those of fewer rows, half of them, drafts or copies alone; each once."""
    _, longest, copied = before
    tried = ((longest, copied), ((longest + 1) // 2, (copied + 1) // 2), (longest, 0), (0, copied))
    return [DraftLengths(rows, *each) for each in dict.fromkeys(tried) if any(each)]


def predict_drafting_seconds(
    model: LoadedModel, texts: TextSplits, settings: ScreeningSettings, costs: UnitCosts
) -> float:
    """Predicted seconds of ``choose_drafting``."""
    layers, room = candidate_draft_layers(model.geometry.layers), model.stepper.max_positions
    taught, few = _continued_windows(model, settings)
    written, steps = [], 0
    for text, count in ((texts.calibrate, taught), (texts.choose, few), (texts.evaluate, few)):
        tokens = 0
        for prompt in PROMPT_LENGTHS:
            long, new = sum(len(w.tokens) >= prompt for w in text.windows), min(CONTINUED_TOKENS, room - prompt)
            tokens += min(long, count) * max(0, new)
            steps += math.ceil(min(long, count) / BATCH_ROWS) * max(0, new)
        written.append(tokens)
    plan = replace(
        make_lens_plan(model, settings),
        layers=layers,
        steps=settings.scale_amount_by_documents(DRAFT_LENS_STEPS),
        held_out_tokens=choose_held_out_token_count(model, settings),
    )
    heads = 1 + len(layers) * (1 + sum(SHARES_OF_VOCABULARY))
    read = written[1] * (costs.forward + heads * costs.head) + written[2] * (costs.forward + 2 * costs.head)
    timed = (1 + KINDS + 2) * predict_candidate_timing_seconds(settings, costs)
    requests = (1 + LENGTHS) * (WARM_UP + len(PROMPT_LENGTHS)) + 2 * (WARM_UP + timed_pair_count(settings))
    timed += len(ROWS) * requests * NEW_TOKENS * costs.batch_step
    return (
        steps * costs.batch_step
        + predict_fit_seconds(plan, written[0], model.stepper.vocabulary_size, costs)
        + read
        + timed
    )


def _continued_windows(model: LoadedModel, settings: ScreeningSettings) -> tuple[int, int]:
    """Windows to continue after each prompt length: of the text to fit on, and of each judging text."""
    if layers_to_read(model):
        return settings.scale_amount_by_documents(LARGE_WINDOWS), settings.scale_amount_by_documents(LARGE_WINDOWS)
    return settings.scale_amount_by_documents(MAX_LESSONS), settings.scale_amount_by_documents(MAX_WINDOWS)


KINDS = 3  # timed kinds of drafting: copies, drafts, both
LENGTHS = 4  # most lengths that are timed at a batch size


def _kind(way: Drafting) -> str:
    return "copies" if not way.longest else "drafts and copies" if way.copied else "drafts"


def _continued(model: LoadedModel, text: ScreeningText, count: int, progress: str | None = None) -> list[TokenSequence]:
    """Continuations of at most ``count`` windows after every prompt length.

    Raises:
        BadArgument: no window is long enough.
    """
    room, texts = model.stepper.max_positions, []
    prompts = {
        prompt: [window for window in text.windows if len(window.tokens) >= prompt][:count]
        for prompt in PROMPT_LENGTHS
        if prompt + 1 < room  # one token comes from the prompt's pass, so no draft is needed
    }
    with tqdm(desc=progress, disable=progress is None, total=sum(map(len, prompts.values())), unit="text") as bar:
        for prompt, long in prompts.items():
            new = min(CONTINUED_TOKENS, room - prompt)
            if long:
                texts += generate_continuations(model.stepper, long, prompt, new, rows=BATCH_ROWS, written=bar.update)
    if not texts:
        raise BadArgument("windows", 0, f"some of at least {min(PROMPT_LENGTHS)} tokens", "give longer documents")
    return texts
