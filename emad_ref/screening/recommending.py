"""What to do with a model: leave early at one point, with what is promised of it, or leave it alone, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emad_ref.point import OperatingPoint
from emad_ref.screening.decoding import Certified
from emad_ref.screening.guarantee import Guarantee
from emad_ref.screening.reached import Reached
from emad_ref.screening.slack import Slack, ceiling_at
from emad_ref.screening.texts import ENOUGH, FEWEST
from emad_ref.sweep.ceilings import SLACK

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
    rise: float,
    inconclusive: str,
    documents: int,
) -> Recommended:
    """``inconclusive``: why nothing can be recommended on so little text, or "". ``documents``: of evaluation; that
    there is no slack takes no other text.
    """
    most = ceiling_at(oracles, rise)
    if inconclusive and (documents < FEWEST or most > SLACK):
        return _none(inconclusive)
    if most <= SLACK:
        return _none(
            f"no slack: leave this model alone; even a rule that knew how far every readout is from the end would save "
            f"{most:.1%} net at {rise:.1%} more perplexity, deciding not charged"
        )
    room = f"a rule that knew would save {most:.1%} net at {rise:.1%} more perplexity"
    if proven is None or not judged:
        return _none(f"no rule of ours is sure to stay below {rise:.1%} more perplexity and saves anything; {room}")
    row = judged[0]
    reached = f"{row.net.value:.1%} net [{row.net.low:.1%}, {row.net.high:.1%}] at {row.rise.value:+.2%} perplexity"
    if row.rise.n < ENOUGH:
        return _none(
            f"inconclusive: {row.point.name} saves {reached}, but on {row.rise.n} documents; {ENOUGH} are the fewest "
            f"to recommend on (more --documents); {room}"
        )
    if row.rise.p_below > ONE_SIDED:
        return _none(f"evaluation does not confirm {row.point.name}: {reached}, at most {rise:.1%} allowed; {room}")
    if row.net.low < WORTH:
        return _none(f"not worth it: {row.point.name} saves {reached}, {WORTH:.0%} is the least; {room}")
    promise = proven.promise if proven.promise.chosen == row.point.name else None
    sure = promise.statement if promise is not None else proven.promise.statement
    name = f"{row.family.readout}, {row.family.name}, free depth, {row.point.name} after layers {_listed(row.point)}"
    said = f"leave early: {name}, saves {reached} on evaluation text. {sure}"
    return Recommended(row.point, "", promise, said)


def _none(why: str) -> Recommended:
    return Recommended(None, why, None, why)


def _listed(point: OperatingPoint) -> str:
    return ", ".join(map(str, point.probes))
