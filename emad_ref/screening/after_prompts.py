"""How fast drafting for itself is predicted to be after prompts of each length, one by one.

What a model says right away is another text than what it says after a long prompt: it repeats itself sooner or later,
and agrees with its drafts more or less often. A mean over lengths is the time of no request; what a request of one
length takes compares with the row of that length, the pass through the prompt itself left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from emad_ref.calibration.trace import TokenSequence
from emad_ref.decoding.drafting import Drafting
from emad_ref.errors import BadArgument
from emad_ref.meters.costs import Costs
from emad_ref.screening.drafts import DraftColumns, of_texts, simulated
from emad_ref.screening.predicted_rounds import seconds_per_token_drafting
from emad_ref.screening.timing import full_seconds


@dataclass(frozen=True)
class AfterPrompt:
    """``texts`` of the model's own after prompts of ``prompt`` tokens, ``emitted`` tokens in rounds.

    ``agreement``: share of drafts that the model itself would emit; ``tokens`` a round; predicted ``seconds`` of one,
    and ``full`` those at full depth, both against as many keys as there are to look back on, on average.
    """

    prompt: int
    texts: int
    emitted: int
    agreement: float
    tokens: float
    seconds: float
    full: float

    @property
    def fast(self) -> float:
        """How many times as fast as full depth."""
        return self.full / self.seconds

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> AfterPrompt:
        """What ``asdict`` gave. Raises BadArgument for fields that are missing, or no numbers above 0."""
        held: dict[str, Any] = {field.name: given.get(field.name) for field in fields(AfterPrompt)}
        for name, value in held.items():
            share = name == "agreement"
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and not share):
                expected = "a share" if share else "a number above 0"
                raise BadArgument(f"after prompts: {name}", value, expected, "screen the model again")
        return AfterPrompt(**held)


def after_prompts(
    costs: Costs, way: Drafting, texts: Sequence[TokenSequence], columns: DraftColumns
) -> tuple[AfterPrompt, ...]:
    """A row per length of prompt, the shortest first, of ``columns`` of ``texts``.

    Raises:
        BadArgument: as ``seconds_per_token_drafting`` and ``simulated``.
    """
    lengths = np.array([text.adaptive_from + 1 for text in texts])
    found = []
    for prompt in np.unique(lengths).tolist():
        at = np.flatnonzero(lengths == prompt).tolist()
        ends = [len(texts[number].tokens) for number in at]
        mine, keys = of_texts(columns, at), (prompt + float(np.mean(ends))) / 2
        rounds = simulated(mine, way.threshold, way.longest, way.copied)
        seconds = seconds_per_token_drafting(costs, way, rounds, keys=keys)
        emitted = sum(ends) - len(ends) * (prompt + 1)  # the first comes from the prompt's pass
        agreement = float(mine.agrees.mean())
        found.append(
            AfterPrompt(prompt, len(at), emitted, agreement, rounds.tokens, seconds, full_seconds(costs, keys))
        )
    return tuple(found)


def read_after_prompts(screened: Mapping[str, Any]) -> tuple[AfterPrompt, ...]:
    """The rows in a screening's record (``tabled``); none in one that has none.

    Raises:
        BadArgument: as ``AfterPrompt.from_json``.
    """
    return tuple(AfterPrompt.from_json(row) for row in screened.get("drafts", {}).get("after", ()))


def nearest(rows: Sequence[AfterPrompt], prompt: int) -> AfterPrompt | None:
    """The row whose prompts are most like one of ``prompt`` tokens, in proportion; None where there is none."""
    return min(rows, key=lambda row: max(row.prompt / prompt, prompt / row.prompt), default=None)
