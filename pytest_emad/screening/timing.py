"""Times of a screening: of its phases, predicted from a short measurement, and of a few candidates.

Requests of candidates are paired (``benchmark.clock``): each candidate and full depth continue the same prompt one
after the other. EMAD-X3 and EMAD-X4 judge the result on more requests and against more baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from scipy import stats

from emad_ref.calibration.cached_lens import SAMPLED_TOKENS
from emad_ref.calibration.lens_fit import LensPlan
from emad_ref.calibration.trace import iterate_head_slices, iterate_states_after, readout_columns
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.teacher_forcing import BATCH_ROWS
from emad_ref.models.generation import Generate
from emad_ref.models.loading import LoadedModel
from emad_ref.models.threads import all_threads_for_batches
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import Floats, Record
from emad_ref.signals import log_probabilities
from pytest_emad.benchmark.clock import WARM_UP, CallTime, time_call, time_pairs, timing_setup
from pytest_emad.screening.exit_families import TUNED_LENS
from pytest_emad.screening.selection import SelectedPoint, SelectionRow
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.traces import ScreeningText, TextSplits, layers_to_read, make_lens_plan
from pytest_emad.statistics.estimate import fieller_interval

T = TypeVar("T")
FULL_DEPTH = "full depth"
CANDIDATES = 3
PROMPT_LENGTHS = (16, 64, 128)  # tokens: after a long prompt a model repeats itself more often
NEW_TOKENS = 64
PAIRS = 9  # three per prompt length
ERROR = 0.05  # of a two-sided interval


@dataclass(frozen=True)
class CandidateTime:
    """``seconds`` per token of a row, and ``fast``: the speed-up over full depth of the same decoder.

    ``low``, ``high``: 95 % interval of ``fast`` over paired requests (Fieller's, of the ratio of total times).
    """

    name: str
    seconds: float
    fast: float
    low: float
    high: float


def make_greedy_generate(decoder: WalkedDecoder) -> Generate:
    """Make a function that generates one prompt at a time, greedily, without a stop token."""
    return lambda prompt, new: decoder.generate([prompt], new).emitted[0]


def timed_pair_count(settings: ScreeningSettings) -> int:
    """Number of timed pairs of a candidate and full depth, without warm-up."""
    return max(len(PROMPT_LENGTHS), settings.scale_amount_by_documents(PAIRS))


def time_candidates(
    model: LoadedModel,
    candidates: Mapping[str, WalkedDecoder],
    text: ScreeningText,
    settings: ScreeningSettings,
    *,
    rows: int = 1,
    pairs: int | None = None,
) -> list[CandidateTime]:
    """Times of full depth and then ``candidates``, on batches of ``rows`` prompts of ``text``.

    ``pairs``: ``timed_pair_count`` by default. Empty without candidates, or if no window holds a prompt.

    Raises:
        BadArgument: as ``time_pairs``.
    """
    pairs = timed_pair_count(settings) if pairs is None else pairs
    new = min(NEW_TOKENS, model.stepper.max_positions // 2)
    batches = list(islice(_prompt_batches(text, model.stepper.max_positions - new, rows), WARM_UP + pairs))
    if not batches or not candidates:
        return []

    def request(decoder: WalkedDecoder, pair: int) -> Record:
        return decoder.generate(batches[pair % len(batches)], new)

    full = WalkedDecoder(model.stepper, full_depth(model.stepper.layers), max_rows=rows)
    timed = time_pairs(
        {name: partial(request, decoder) for name, decoder in {FULL_DEPTH: full, **candidates}.items()},
        pairs,
        np.random.default_rng(settings.seed),
        synchronize=full.synchronize,
    )
    return [_candidate_time(name, timed.seconds[FULL_DEPTH], own, new) for name, own in timed.seconds.items()]


def _candidate_time(name: str, full: Floats, own: Floats, new: int) -> CandidateTime:
    """From [pairs] seconds of full depth and of the candidate, ``new`` tokens each."""
    fast = float(full.sum() / own.sum())
    reach = float(stats.t.ppf(1 - ERROR / 2, len(own) - 1))
    # full depth against itself has no spread, and a quadratic without one no two roots
    bounds = (fast, fast) if name == FULL_DEPTH else fieller_interval(full, own, reach)
    return CandidateTime(name, float(own.mean()) / new, fast, *bounds)


def _prompt_batches(text: ScreeningText, room: int, rows: int) -> Iterator[list[Prompt]]:
    """Batches of openings of consecutive windows, each batch cut to the next of ``PROMPT_LENGTHS`` that fits.

    The windows start again at the first once all are used.
    """
    windows = text.windows
    for number in range(len(windows)):
        own = [windows[(number * rows + row) % len(windows)] for row in range(rows)]
        length = min(PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)], room, *(len(window.tokens) for window in own))
        yield [Prompt(window.tokens[:length]) for window in own]


def choose_points_to_time(
    rows: Sequence[SelectionRow], decoded: Sequence[SelectedPoint], rise: float
) -> dict[str, OperatingPoint]:
    """Name → point of at most three: the ``decoded`` ones, then monotone ones on the lens by their saving."""
    monotone = [
        row
        for row in rows
        if isinstance(row, SelectedPoint)
        and (row.level, row.family.readout, row.family.depth) == (rise, TUNED_LENS, "monotone")
    ]
    best = [*decoded, *sorted(monotone, key=lambda row: -row.net.value)][:CANDIDATES]
    return {f"{row.family.name}, {row.family.depth} depth, {row.how}, {row.point.name}": row.point for row in best}


# ---------------------------------------------------------------- the screening itself

MEASURED_TOKENS, MEASURED_STEPS = 512, 6
BACKWARD = 3.0  # a step with gradients, in passes without
LIKELY_POINTS = 2  # likely number of decoded thresholds, of at most five


@dataclass(frozen=True)
class UnitCosts:
    """Seconds of a model on this machine.

    ``forward`` of a token in a batch, ``head`` of a row with all signals and its divergence, ``step`` of decoding one
    row, and ``batch_step`` of ``BATCH_ROWS`` rows.
    """

    forward: float
    head: float
    step: float
    batch_step: float


def measure_unit_costs(model: LoadedModel, text: ScreeningText) -> UnitCosts:
    """Measure on windows of ``text``: the second of two runs each."""
    stepper, windows = model.stepper, list(text.windows)
    batch = [windows[at % len(windows)] for at in range(max(1, MEASURED_TOKENS // len(windows[0].tokens)))]
    tokens = sum(each.n_decided for each in batch)
    decoder = WalkedDecoder(stepper, full_depth(stepper.layers), max_rows=BATCH_ROWS)
    timed = partial(_second_call, synchronize=decoder.synchronize)
    with all_threads_for_batches(text.n_tokens):  # as lens and traces read it
        forward = timed(lambda: [*iterate_states_after(stepper, batch)][-1])
    rows = forward.result[: next(iterate_head_slices(stepper, tokens)).stop]
    target = torch.zeros(len(rows), dtype=torch.int64, device=stepper.device)

    def read() -> None:
        logits = stepper.logits(rows)
        readout_columns(logits, target, "after the last layer", log_probabilities(logits))

    def decode(count: int) -> None:
        decoder.generate([Prompt(windows[0].tokens[:2])] * count, MEASURED_STEPS)

    with all_threads_for_batches(text.n_tokens):
        head = timed(read)
    step, batch_step = (timed(partial(decode, count)).seconds / MEASURED_STEPS for count in (1, BATCH_ROWS))
    return UnitCosts(forward.seconds / tokens, head.seconds / len(rows), step, batch_step)


def _second_call(run: Callable[[], T], synchronize: Callable[[], None]) -> CallTime[T]:
    with torch.inference_mode(), timing_setup():
        run()
        return time_call(run, synchronize)


def predict_phase_seconds(
    model: LoadedModel, texts: TextSplits, settings: ScreeningSettings, costs: UnitCosts
) -> dict[str, float]:
    """Predicted seconds of the longest phases, from counts of tokens, heads and steps.

    ``decoding`` assumes that ``LIKELY_POINTS`` thresholds are decoded, one judged, and a head read before each exit
    besides the one at it; ``timing`` that all candidates take the time of full depth.
    ``drafts.predict_drafting_seconds`` predicts the time of drafts.
    """
    plan, read = make_lens_plan(model, settings), layers_to_read(model)
    heads = len(read or range(1, model.stepper.layers))
    shown, certified = texts.choose.n_tokens + texts.evaluate.n_tokens, texts.certify.n_tokens
    profile = sum(each.n_decided for each in texts.calibrate.windows[: settings.n_profile_windows])
    fed = certified * LIKELY_POINTS + texts.evaluate.n_tokens
    return {
        "lens": predict_fit_seconds(plan, texts.calibrate.n_tokens, model.stepper.vocabulary_size, costs),
        "traces": (shown + profile) * (costs.forward + costs.head) + heads * (2 * shown + profile) * costs.head,
        "decoding": certified * (costs.forward + costs.head) + fed * (costs.forward + 2 * costs.head),
        "timing": (1 + CANDIDATES) * predict_candidate_timing_seconds(settings, costs),
    }


def predict_fit_seconds(plan: LensPlan, tokens: int, vocabulary: int, costs: UnitCosts) -> float:
    """Predicted seconds of fitting a lens, and its gate, on ``tokens`` positions."""
    fitted, part = len(plan.layers), min(1.0, SAMPLED_TOKENS / vocabulary)
    cached = (1 - plan.held_out) * tokens * (costs.forward + costs.head)
    refined = plan.steps * plan.tokens_per_step * (1 + BACKWARD * fitted) * part * costs.head / 2
    held_out = min(plan.held_out * tokens, plan.held_out_tokens) * 2 * (costs.forward + fitted * costs.head)
    return cached + refined + held_out


def predict_candidate_timing_seconds(settings: ScreeningSettings, costs: UnitCosts) -> float:
    """Predicted seconds of timing one candidate."""
    return (WARM_UP + timed_pair_count(settings)) * NEW_TOKENS * costs.step


def format_predicted_duration(predicted: Mapping[str, float]) -> str:
    """``about 20 minutes (lens 5, traces 15)``; below two minutes in seconds."""
    total = sum(predicted.values())
    unit, per_unit = ("seconds", 1.0) if total < 120 else ("minutes", 60.0)
    parts = ", ".join(f"{phase} {seconds / per_unit:.0f}" for phase, seconds in predicted.items())
    return f"about {total / per_unit:.0f} {unit} ({parts})"
