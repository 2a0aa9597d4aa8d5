"""Times of answers by the arrival of their tokens: to the first token, between tokens, to the end.

Tokens and not messages are counted: a server that lags puts several tokens into one event, and their times would
otherwise grow by that number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emad_ref.protocol import TokenArrivals

AT_ONCE, FIRST_TOKEN, BETWEEN, WHOLE = "requests at once", "first token, ms", "between tokens, ms", "whole answer, ms"
UNSTREAMED = "1, unstreamed"
WITHIN = " (95 %)"  # ending of a column name for the 95th percentile in place of the median


def stream_latency_rows(arrivals: Mapping[int, Sequence[TokenArrivals]]) -> list[dict[str, Any]]:
    """Rows of ``answer_latencies``. ``arrivals``: answers by number of requests at once, 0: unstreamed."""
    return [
        {AT_ONCE: str(at_once) if at_once else UNSTREAMED, "answers": len(answers)}
        | answer_latencies(answers, streamed=at_once > 0)
        for at_once, answers in arrivals.items()
    ]


def answer_latencies(answers: Sequence[TokenArrivals], *, streamed: bool) -> dict[str, float | None]:
    """Median and 95th percentile of times of ``answers`` in ms; of whole ones those to the end alone.

    Tokens that arrive together share the time since those before them.
    """
    times: dict[str, list[float]] = {FIRST_TOKEN: [], BETWEEN: [], WHOLE: [each.whole_s for each in answers]}
    for each in answers if streamed else ():
        arrived = [(seconds, len(list(group))) for seconds, group in groupby(each.seconds.tolist())]
        times[FIRST_TOKEN] += [seconds for seconds, _ in arrived[:1]]
        times[BETWEEN] += [(b - a) / held for (a, _), (b, held) in pairwise(arrived) for _ in range(held)]
    return {
        f"{name}{ending}": _percentile_ms(seconds, share)
        for name, seconds in times.items()
        for ending, share in (("", 0.5), (WITHIN, 0.95))
    }


def _percentile_ms(seconds: Sequence[float], share: float) -> float | None:
    """The smallest of ``seconds`` that at least ``share`` of them do not exceed, in ms; None of none."""
    return round(1e3 * sorted(seconds)[math.ceil(share * len(seconds)) - 1], 3) if seconds else None
