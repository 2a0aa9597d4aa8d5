"""What to do with a model: leave early at one point, with what is promised of it, or leave it alone, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from emad_ref.point import OperatingPoint
from emad_ref.screening.decoding import Certified
from emad_ref.screening.guarantee import Guarantee
from emad_ref.screening.reached import Reached, Row
from emad_ref.screening.slack import Slack, ceiling_at
from emad_ref.screening.texts import ENOUGH, FEWEST
from emad_ref.sweep.ceilings import SLACK
from emad_ref.verdict.interval import Estimate

WORTH = 0.05  # net, its lower bound: below it no changed output is worth what was saved
ONE_SIDED = 0.05


@dataclass(frozen=True)
class Recommended:
    """``lossy`` or ``why_none``, as in an exit; ``guarantee`` of it; ``sentence``: the same in words."""

    lossy: OperatingPoint | None
    why_none: str
    guarantee: Guarantee | None
    sentence: str


def recommended(
    oracles: Sequence[Slack],
    proven: Certified | None,
    judged: Sequence[Reached],
    within_reach: Sequence[Row],
    rise: float,
    inconclusive: str,
    documents: int,
) -> Recommended:
    """The first of ``judged`` that evaluation confirms and that is worth it, or why none is.

    ``within_reach``: the most that each family could save with any number of documents. ``inconclusive``: why nothing
    can be recommended on so little text, or "". ``documents``: of evaluation; what no more of them could change is said
    on ``FEWEST``.
    """
    if inconclusive and documents < FEWEST:
        return _none(inconclusive)
    most = ceiling_at(oracles, rise)
    oracle = f"{_share(most.net, most.low, most.high)} at {rise:.1%} more perplexity"
    if most.net <= SLACK:
        return _none(
            f"no slack: leave this model alone; even a rule that knew how far every readout is from the end would save "
            f"{oracle}, deciding not charged"
        )
    best = max((row for row in within_reach if isinstance(row, Reached)), key=lambda row: row.net.high, default=None)
    knew = f"a rule that knew would save {oracle}"
    if (best is None or best.net.high < WORTH) and (inconclusive or documents < ENOUGH):
        return _none(f"{_never(best, rise, documents)}; {knew}")
    room = f"{knew}, ours {'nothing' if best is None else 'at most ' + _saved(best.net)}"
    if inconclusive:
        return _none(f"{inconclusive}; {room}")
    if proven is None or not judged:
        return _none(f"no rule of ours is sure to stay below {rise:.1%} more perplexity and saves anything; {room}")
    # a next point is asked only where the one before is confirmed, and saves too little: none is looked for by luck
    confirmed = list(takewhile(lambda row: not _unconfirmed(row, rise), judged))
    row = next((row for row in confirmed if row.net.low >= WORTH), judged[0])
    if against := _unconfirmed(row, rise) or _too_little(row):
        return _none(f"{against}; {room}")
    promise = proven.promise if proven.promise.chosen == row.point.name else None
    unpromised = "" if promise is not None or proven.promised is None else "Nothing is promised of it, but of another: "
    name = f"{row.family.readout}, {row.family.name}, free depth, {row.point.name} after layers {_listed(row.point)}"
    said = f"leave early: {name}, saves {_reached(row)} on evaluation text. {unpromised}{proven.promise.statement}"
    return Recommended(row.point, "", promise, said)


def _unconfirmed(row: Reached, rise: float) -> str:
    """Why evaluation does not confirm a point; "" where it does."""
    if row.rise.n < ENOUGH:
        return (
            f"inconclusive: {row.point.name} saves {_reached(row)}, but on {row.rise.n} documents; {ENOUGH} are the "
            "fewest to recommend on (more --documents)"
        )
    if row.rise.p_below > ONE_SIDED:
        return f"evaluation does not confirm {row.point.name}: {_reached(row)}, at most {rise:.1%} allowed"
    return ""


def _too_little(row: Reached) -> str:
    """That a point saves too little; "" where it does not."""
    worth = row.net.low >= WORTH
    return "" if worth else f"not worth it: {row.point.name} saves {_reached(row)}, {WORTH:.0%} is the least"


def _never(best: Reached | None, rise: float, documents: int) -> str:
    """That nothing is worth it, and that more documents would not change it."""
    saved = "anything" if best is None else f"more than {_saved(best.net)}"
    return (
        f"not worth it: no rule of ours saves {saved} at {rise:.1%} more perplexity on {documents} documents, "
        f"{WORTH:.0%} is the least, and more documents would not change it"
    )


def _reached(row: Reached) -> str:
    return f"{_saved(row.net)} at {row.rise.value:+.2%} perplexity"


def _saved(net: Estimate) -> str:
    return _share(net.value, net.low, net.high)


def _share(value: float, low: float, high: float) -> str:
    return f"{value:.1%} net [{low:.1%}, {high:.1%}]"


def _none(why: str) -> Recommended:
    return Recommended(None, why, None, why)


def _listed(point: OperatingPoint) -> str:
    return ", ".join(map(str, point.probes))
