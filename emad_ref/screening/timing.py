"""Times of a screening: its own, predicted from a short measurement, and those of the few candidates.

Requests of candidates are paired (``benchmark.clock``): each candidate and full depth continue the same prompt next to
one another. EMAD-X3 and EMAD-X4 judge the result on more requests and against more baselines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from emad_ref.benchmark.clock import time_pairs
from emad_ref.calibration.trace import head_blocks, readout_columns, states_after
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import DraftingDecoder
from emad_ref.models.loading import LoadedModel
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import Ints
from emad_ref.screening.families import TUNED_LENS
from emad_ref.screening.selection import SelectedPoint, SelectionRow
from emad_ref.screening.settings import (
    CONTINUED_TOKENS,
    DRAFT_LENS_STEPS,
    MAX_LESSONS,
    MAX_WINDOWS,
    MOST_DRAFT_LAYERS,
    ScreeningSettings,
)
from emad_ref.screening.traces import ScreeningText, TextSplits, layers_to_read, lens_plan

T = TypeVar("T")
FULL_DEPTH = "full depth"
CANDIDATES = 3
PROMPT_LENGTHS = (16, 64, 128)  # tokens: after a long prompt a model repeats itself more often
NEW_TOKENS = 64
PAIRS = 9  # three per prompt length

Generate = Callable[[Prompt, int], Ints]  # (prompt, new tokens) → emitted tokens


@dataclass(frozen=True)
class CandidateTime:
    """``seconds`` per token at batch 1, and ``fast``: the speed-up over full depth of the same decoder."""

    name: str
    seconds: float
    fast: float


def generate_by(decoder: WalkedDecoder | DraftingDecoder) -> Generate:
    """One prompt at a time, greedily, without a stop token."""
    return lambda prompt, new: decoder.generate([prompt], new).emitted[0]


def pairs_of(settings: ScreeningSettings) -> int:
    """Timed pairs of a candidate and full depth, besides the one that warms up."""
    return max(len(PROMPT_LENGTHS), settings.part(PAIRS))


def time_candidates(
    model: LoadedModel, candidates: Mapping[str, Generate], text: ScreeningText, settings: ScreeningSettings
) -> list[CandidateTime]:
    """Times of full depth and then ``candidates``, after prompts of ``text``; empty if no window holds a prompt.

    Raises:
        BadArgument: as ``time_pairs``.
    """
    pairs = pairs_of(settings)
    new = min(NEW_TOKENS, model.stepper.max_positions // 2)
    prompts = list(islice(_prompts(text, model.stepper.max_positions - new), 1 + pairs))
    if not prompts or not candidates:
        return []

    def request(generate: Generate, pair: int) -> None:
        generate(prompts[pair % len(prompts)], new)

    full = WalkedDecoder(model.stepper, full_depth(model.stepper.layers))
    arms = {FULL_DEPTH: generate_by(full), **candidates}
    timed = time_pairs(
        {name: partial(request, generate) for name, generate in arms.items()},
        pairs,
        np.random.default_rng(settings.seed),
        synchronize=full.synchronize,
    )
    seconds = {name: float(each.sum()) for name, each in timed.seconds.items()}
    return [CandidateTime(name, spent / (pairs * new), seconds[FULL_DEPTH] / spent) for name, spent in seconds.items()]


def _prompts(text: ScreeningText, room: int) -> Iterator[Prompt]:
    """Openings of windows, each with the next of ``PROMPT_LENGTHS`` that fits it and ``room``."""
    for number, window in enumerate(text.windows):
        length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
        yield Prompt(window.tokens[: min(length, len(window.tokens), room)])


def points_to_time(
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

MEASURED_TOKENS, MEASURED_ROWS, MEASURED_STEPS = 512, 32, 4
DECODED_POINTS, SHOWN_POINTS = 5, 2  # decoded on certification text, and on evaluation text
SAMPLED_HEAD = 4096  # tokens of the vocabulary that a step of a lens fit reads
BACKWARD = 3.0  # a step with gradients, in passes without
SIGNALS = 1.5  # a head with its divergence, in heads with signals alone
REPLAYS = 4e-4  # seconds per token of headroom, families and intervals


@dataclass(frozen=True)
class UnitCosts:
    """Seconds of a model on this machine.

    ``forward``: a token in a batch, all blocks. ``head``: a row's logits with all signals. ``step``: a row's token in
    a decoding step of ``MEASURED_ROWS`` rows. ``alone``: a token decoded alone.
    """

    forward: float
    head: float
    step: float
    alone: float


def measure_unit_costs(model: LoadedModel, text: ScreeningText) -> UnitCosts:
    """Measure on windows of ``text``: the second of two passes each."""
    stepper, windows = model.stepper, list(text.windows)
    batch = [windows[at % len(windows)] for at in range(max(1, MEASURED_TOKENS // len(windows[0].tokens)))]
    tokens = sum(len(each.tokens) - 1 - each.adaptive_from for each in batch)
    forward, states = _seconds(lambda: [*states_after(stepper, batch)][-1])
    rows = states[: next(head_blocks(stepper, tokens)).stop]
    target = torch.zeros(len(rows), dtype=torch.int64, device=stepper.device)
    head, _ = _seconds(lambda: readout_columns(stepper.logits(rows), target, "after the last layer"))
    prompts = [Prompt(windows[at % len(windows)].tokens[: PROMPT_LENGTHS[0]]) for at in range(MEASURED_ROWS)]
    decoder = WalkedDecoder(stepper, full_depth(stepper.layers), max_rows=MEASURED_ROWS)

    def step(many: list[Prompt]) -> float:
        """Seconds of one more token of all ``many`` prompts."""
        longer, shorter = (_seconds(partial(decoder.generate, many, new))[0] for new in (1 + MEASURED_STEPS, 1))
        return max(0.0, longer - shorter) / MEASURED_STEPS

    return UnitCosts(forward / tokens, head / len(rows), step(prompts) / len(prompts), step(prompts[:1]))


def _seconds(run: Callable[[], T]) -> tuple[float, T]:
    with torch.inference_mode():
        run()
        began = time.perf_counter()
        result = run()
        return time.perf_counter() - began, result


def predict_seconds(
    model: LoadedModel, texts: TextSplits, settings: ScreeningSettings, costs: UnitCosts
) -> dict[str, float]:
    """Predicted seconds of each phase of a screening that takes every step.

    Counts tokens, heads and decoding steps; what depends on the outcome is counted at its most.
    """
    plan, read = lens_plan(model, settings), layers_to_read(model)
    heads, fitted = len(read or range(1, model.stepper.layers)), len(plan.layers)
    part = min(1.0, SAMPLED_HEAD / model.stepper.vocabulary)
    calibrate, choose, certify, evaluate = (
        each.tokens for each in (texts.calibrate, texts.choose, texts.certify, texts.evaluate)
    )

    def fit(tokens: float, layers: int, steps: int) -> float:
        """A lens with its gate."""
        rows = (1 - plan.held_out) * tokens
        refined = steps * plan.tokens_per_step * (1 + BACKWARD * layers) * part * costs.head / 2
        held_out = min(plan.held_out * tokens, plan.held_out_tokens)
        return rows * (costs.forward + costs.head) + refined + held_out * 2 * (costs.forward + layers * costs.head)

    shown = choose + evaluate
    few = settings.part(MAX_WINDOWS)
    lessons = few if read else settings.part(MAX_LESSONS)
    per_window = len(PROMPT_LENGTHS) * CONTINUED_TOKENS
    arms = 1 + CANDIDATES
    requests = (1 + pairs_of(settings)) * arms * NEW_TOKENS * costs.alone
    return {
        "lens": fit(calibrate, fitted, plan.steps),
        "traces": shown * (costs.forward + (1 + 2 * heads * SIGNALS) * costs.head),
        "families": shown * REPLAYS * heads,
        "decoding": certify * (costs.forward + costs.head)
        + (DECODED_POINTS * certify + SHOWN_POINTS * evaluate) * costs.step,
        "timing": requests,
        "drafts": (lessons + 2 * few) * per_window * costs.step
        + fit(lessons * per_window, MOST_DRAFT_LAYERS, settings.part(DRAFT_LENS_STEPS))
        + requests,
    }


def duration_text(predicted: Mapping[str, float]) -> str:
    """``a screening of about 18 minutes (lens 3, traces 9, …)``; below two minutes in seconds."""
    total = sum(predicted.values())
    unit, per_unit = ("seconds", 1.0) if total < 120 else ("minutes", 60.0)
    parts = ", ".join(f"{phase} {seconds / per_unit:.0f}" for phase, seconds in predicted.items())
    return f"a screening of about {total / per_unit:.0f} {unit} ({parts})"
