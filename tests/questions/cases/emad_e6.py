"""Foreign thresholds that do a known damage, and remedies that take a known part of it away."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.emad_e6 import NO_DAMAGE, ProfileShiftEvidence
from emad_ref.record import Floats
from emad_ref.statistics.fronts import PointFamily
from emad_ref.statistics.verdicts import Verdict
from tests.questions.duelling import CHOSEN_ON, Curve, Text, family
from tests.questions.simulation import Case, celled

FOREIGN = "world:mixed"
ONE = np.array([0.0, 0.5])  # full depth, and thresholds at m = 0
OWN = 0.02  # nats per token that the own profile's loses where it saves all


def losing(nats: float) -> Curve:
    """Nats per token at the most that is saved, in proportion before it."""
    return lambda savings: nats * savings / ONE[-1]


def damaged(plain: float, documents: int = 200, saved: float = 0.5, **remedied: float):
    """Nats per token lost where half the FLOPs are saved: without a remedy, and under each; ``saved`` by each."""

    def found(rng: np.random.Generator) -> ProfileShiftEvidence:
        texts = Text(rng, CHOSEN_ON), Text(rng, documents)

        def at(name: str, nats: float, savings: Floats = ONE) -> PointFamily:
            return family(name, texts, losing(nats), savings)

        remedies = {name: at(name, nats, np.array([0.0, saved])) for name, nats in remedied.items()}
        return ProfileShiftEvidence(at("own", OWN), at("foreign", plain), remedies, FOREIGN)

    return found


def same_damage(documents: int, icc: float):
    return damaged(0.3, documents, position=0.3)


def decided_alike(rng: np.random.Generator) -> ProfileShiftEvidence:
    """All bins fell back to their parent."""
    found = damaged(0.3)(rng)
    return ProfileShiftEvidence(found.own, found.plain, {"position": found.plain}, FOREIGN)


def is_tied(verdict: Verdict) -> None:
    (leg,) = [leg for leg in verdict.legs if leg.outcome != "measured"]
    assert leg.reason == "tied: both decide the same; both save 45.00% net"


def names_damage_and_saving(verdict: Verdict) -> None:
    remedies = [leg for leg in verdict.legs if leg.outcome != "measured"]
    assert [leg.name for leg in remedies] == [
        f"{name} against none, profile of {FOREIGN}" for name in ("position", "margin")
    ]
    assert all(leg.reason.startswith("both save 4") for leg in remedies)
    (damage,) = [leg for leg in verdict.legs if leg.outcome == "measured"]
    assert damage.name == f"damage of the profile of {FOREIGN}"
    assert abs(damage.estimate - (0.3 - OWN) * 0.45 / 0.5) < 0.05


def compares_where_both_reach(verdict: Verdict) -> None:
    (leg,) = [leg for leg in verdict.legs if leg.outcome != "measured"]
    assert 0.18 < float(leg.reason.removeprefix("both save ").partition("%")[0]) / 100 <= 0.21
    assert abs(leg.estimate - (0.1 / 0.5 * 0.2 - 0.3 / 0.5 * 0.2)) < 0.03


def names_what_harms(verdict: Verdict) -> None:
    (harmful,) = [leg for leg in verdict.legs if leg.outcome == "falsified"]
    assert harmful.name == f"confidence against none, profile of {FOREIGN}"


def says_no_damage(verdict: Verdict) -> None:
    assert verdict.verdict == "not applicable"
    assert verdict.reason.startswith(NO_DAMAGE)
    assert "% net" in verdict.reason


def says_nothing_is_saved(verdict: Verdict) -> None:
    assert verdict.reason == "own and foreign thresholds do not both save 15 % of FLOPs on validation"


def idle(rng: np.random.Generator) -> ProfileShiftEvidence:
    texts = Text(rng, CHOSEN_ON), Text(rng, 40)
    own, plain = (family(name, texts, losing(OWN), ONE / 10) for name in ("own", "foreign"))
    return ProfileShiftEvidence(own, plain, {}, FOREIGN)


CASES = [
    Case("both lower the damage", "holds", damaged(0.3, position=0.15, margin=0.1), 2, check=names_damage_and_saving),
    Case(
        "a remedy that saves less", "holds", damaged(0.3, 200, 0.2, position=0.04), 2, check=compares_where_both_reach
    ),
    Case("one adds to it", "fails", damaged(0.3, position=0.15, confidence=0.45), 2, check=names_what_harms),
    *celled("conditioning changes nothing", "edge", same_damage, icc=(0.0,), draws=2),
    Case("no bin of its own", "tied", decided_alike, draws=2, check=is_tied),
    Case("a foreign profile that does less", "premise", damaged(OWN / 4, position=OWN), 2, check=says_no_damage),
    Case("nothing is saved", "premise", idle, check=says_nothing_is_saved),
]
