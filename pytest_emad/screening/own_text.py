"""Free generation at a point: how likely the model at full depth finds text that it did not write there.

Screening chooses points by text that is given. A point that generates reads its own tokens, and what it loses can grow.
Full depth and the point continue the same prompts greedily, and full depth scores both continuations.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from emad_ref.calibration.trace import take_trace
from emad_ref.decoding.teacher_forcing import BATCH_ROWS
from emad_ref.models.loading import LoadedModel
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.record import Floats, Ints
from pytest_emad.screening.drafts import generate_continuations
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.traces import MIN_DOCUMENTS, ScreeningText
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.rates import estimate_perplexity_rise
from pytest_emad.statistics.units import ByDocument

PROMPT_TOKENS = 64
NEW_TOKENS = 64


@dataclass(frozen=True)
class OwnText:
    """Greedy continuations at ``point``, scored at full depth.

    ``rise``: of their perplexity over that of full depth's continuations of the same prompts, paired by document.
    ``same``: mean number of tokens before the first that full depth does not emit, of ``new``.
    """

    point: OperatingPoint
    rise: Estimate
    same: float
    new: int


def judge_own_text(
    model: LoadedModel, points: list[OperatingPoint], text: ScreeningText, settings: ScreeningSettings
) -> list[OwnText]:
    """Continue a prompt of each of the first documents of ``text`` at every point.

    Empty without points, or if no two windows hold a prompt. Continuations have no stop token.
    """
    stepper = model.stepper
    new = min(NEW_TOKENS, stepper.max_positions // 2)
    prompt = min(PROMPT_TOKENS, stepper.max_positions - new)
    of_document = {window.document: window for window in text.windows if len(window.tokens) >= prompt}
    windows = list(of_document.values())[: settings.scale_amount_by_documents(MIN_DOCUMENTS, fewest=2)]
    if len(windows) < 2 or not points:
        return []

    def continue_at(point: OperatingPoint) -> tuple[list[Ints], Floats]:
        """Emitted tokens of each window, and the nats that full depth gives them."""
        written = generate_continuations(stepper, windows, prompt, new, point=point, rows=BATCH_ROWS)
        trace = take_trace(stepper, written, layers=())
        return [each.tokens[prompt:] for each in written], trace.token_positions.sum_by_sequence(trace.nll_nats[:, -1])

    numbers = np.array([window.document for window in windows], dtype=np.int64)
    expected, reference = continue_at(full_depth(stepper.layers))

    def judged(point: OperatingPoint) -> OwnText:
        emitted, nats = continue_at(point)
        rise = estimate_perplexity_rise(
            *(ByDocument(column, numbers) for column in (nats, reference, np.full(len(windows), float(new)))),
            threshold=settings.rise,
            rng=np.random.default_rng(settings.seed),
            worst=None,  # says what these prompts show; it promises nothing of others
        )
        equal = [
            sum(1 for _ in takewhile(bool, mine == theirs)) for mine, theirs in zip(emitted, expected, strict=True)
        ]
        return OwnText(point, rise, float(np.mean(equal)), new)

    return [judged(point) for point in points]
