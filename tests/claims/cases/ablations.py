"""Simulated families of operating points at a known distance between their true fronts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from emad_ref.record import Floats
from emad_ref.replay.grids import SAVING_LEVELS
from emad_ref.replay.losses import Losses
from pytest_emad.claims.ablations import NO_DAMAGE, ForeignProfileEvidence
from pytest_emad.statistics.fronts import PointFamily
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.simulation import REGISTER, Case, celled
from tests.handmade_losses import handmade_losses

# ---------------------------------------------------------------- building blocks
#
# Duels of known outcome for EMAD-R1 to R4, which share one rule: families at a known distance between their fronts.
#
# A family is a curve of loss over saving. Documents differ in difficulty, in saving, and in their distance from the
# curve, which neighbouring points share. Every saving of a family is in ``SAVINGS``, so both sides' hulls
# pass through the same places and differ by the curve alone.

SAVINGS = np.linspace(0.0, 0.65, 27)
CHOSEN_ON = 60  # validation documents
SPREAD = 0.05  # nats per token: between documents, at the largest saving, around the curve
Curve = Callable[[Floats], Floats]
Rivals = tuple[PointFamily, PointFamily]


def convex(savings: Floats) -> Floats:
    """Return nats lost per token at each saving: the last saving costs most."""
    return 0.3 * savings**2


def linear(savings: Floats) -> Floats:
    """Return a linear curve: no point is better than a mixture of full depth and the last one."""
    return 0.2 * savings


class Text:
    """``documents`` of one split: the length, difficulty and saving of each."""

    def __init__(self, rng: np.random.Generator, documents: int):
        self.rng, self.tokens = rng, rng.integers(60, 300, documents)
        self.level = 2.0 + 0.3 * rng.standard_normal(documents)
        self.hardness = np.exp(0.3 * rng.standard_normal(documents) - 0.045)
        self.willingness = 1 + 0.3 * rng.uniform(-1, 1, documents)

    def split(self, curve: Curve, savings: Floats = SAVINGS, name: str = "") -> Losses:
        """Return a family's points on this text; the first of ``savings`` is full depth's, 0."""
        shape = len(self.tokens), len(savings)
        away = np.cumsum(self.rng.standard_normal(shape), axis=1) / np.sqrt(shape[1])
        away[:, 0] = 0.0
        lost = curve(savings) * self.hardness[:, None] + SPREAD * np.sqrt(savings / 0.65) * away
        rate, spent = self.level[:, None] + lost, 1 - savings * self.willingness[:, None]
        full = 1000.0 * self.tokens * (1 + 0.001 * self.tokens)
        names = ["full depth", *(f"{name} {saved:.3f}" for saved in savings[1:])]
        return handmade_losses(rate * self.tokens[:, None], full[:, None] * spent, self.tokens, names)


def family(name: str, texts: tuple[Text, Text], curve: Curve, savings: Floats = SAVINGS) -> PointFamily:
    validation, evaluation = (text.split(curve, savings, name) for text in texts)
    return PointFamily(validation, evaluation)


def met(rise: float, documents: int = 200, curve: Curve = convex, savings: Floats = SAVINGS):
    """Put EMAD's curve above the rival's by ``rise`` nats per token at the largest saving, in proportion below it."""

    def found(rng: np.random.Generator) -> Rivals:
        texts = Text(rng, CHOSEN_ON), Text(rng, documents)
        ours = family("emad", texts, lambda savings: curve(savings) + rise * savings / 0.65, savings)
        return ours, family("rival", texts, curve, savings)

    return found


def nearly(rise: float, documents: int = 200, spread: float = 0.002):
    """Make EMAD's losses the rival's own, ``rise`` nats per token higher on average at every saving."""

    def found(rng: np.random.Generator) -> Rivals:
        texts = Text(rng, CHOSEN_ON), Text(rng, documents)
        rival = family("rival", texts, convex)
        losses = rival.evaluation
        more = rise + spread * rng.standard_normal(documents)
        exits = (np.arange(len(losses)) > 0)[:, None]
        raised = replace(losses, nats=losses.nats + exits * more * losses.tokens)
        return renamed(replace(rival, evaluation=raised)), rival

    return found


def says_tied_within_the_margin(verdict: Verdict) -> None:
    assert verdict.verdict == "inconclusive"
    assert "tied: shown to differ by less than ±0.1 %" in verdict.reason
    assert verdict.why.startswith("tied: "), "the summary shows it"
    assert {(leg.p_falsify, leg.p_survive) for leg in verdict.legs} == {(1.0, 1.0)}


def renamed(side: PointFamily) -> PointFamily:
    def other(losses: Losses) -> Losses:
        first, *points = losses.points
        return replace(losses, points=(first, *(replace(point, name=f"other {point.name}") for point in points)))

    return replace(side, validation=other(side.validation), evaluation=other(side.evaluation))


def itself(rng: np.random.Generator) -> Rivals:
    """Return a rival that is EMAD under another name."""
    ours = family("emad", (Text(rng, CHOSEN_ON), Text(rng, 200)), convex)
    return ours, renamed(ours)


def halved(side: PointFamily) -> PointFamily:
    """Apply the family to every second document, full depth to the others."""

    def half(split: Losses) -> Losses:
        odd = np.arange(len(split.tokens)) % 2 == 1
        nats, flops = (np.where(odd, values, values[0]) for values in (split.nats, split.flops))
        return replace(split, nats=nats, flops=flops)

    other = renamed(side)
    return replace(other, validation=half(other.validation), evaluation=half(other.evaluation))


def on_every_second(curve: Curve, documents: int = 200):
    """EMAD against itself on every second document: half the saving, or worse where its front bends."""

    def found(rng: np.random.Generator) -> Rivals:
        ours = family("emad", (Text(rng, CHOSEN_ON), Text(rng, documents)), curve)
        return ours, halved(ours)

    return found


def halves_of(curve: Curve) -> Callable[[int, float], Callable[[np.random.Generator], Rivals]]:
    return lambda documents, icc: on_every_second(curve, documents)


def shallow(rng: np.random.Generator) -> Rivals:
    texts = Text(rng, CHOSEN_ON), Text(rng, 40)
    return family("emad", texts, convex), family("rival", texts, convex, np.array([0.0, 0.05, 0.1]))


def both_sides_save_the_same(verdict: Verdict) -> None:
    assert [leg.name.partition(" net: ")[0] for leg in verdict.legs] == [f"{level:.0%}" for level in SAVING_LEVELS]
    for leg, level in zip(verdict.legs, SAVING_LEVELS, strict=True):
        assert f"both save {level:.2%} net" in leg.reason or level == SAVING_LEVELS[-1], "the last is optional"
        assert " against " in leg.name


def is_tied(verdict: Verdict) -> None:
    assert verdict.verdict == "inconclusive"
    assert {leg.reason.partition(";")[0] for leg in verdict.legs} == {"tied: both decide the same"}
    assert {(leg.estimate, leg.interval, leg.p_falsify) for leg in verdict.legs} == {(0.0, None, None)}


def says_that_nothing_met(verdict: Verdict) -> None:
    assert verdict.reason == "no point of both sweeps saves 15 % of FLOPs on validation"


def alike(curve: Curve) -> Callable[[int, float], Callable[[np.random.Generator], Rivals]]:
    return lambda documents, icc: met(0.0, documents, curve)


SHORT = [  # one rule for four rivals, so EMAD-R1 alone measures the error rates of every cell
    Case("EMAD wins at every saving", "holds", met(-0.1), draws=1, check=both_sides_save_the_same),
    Case("EMAD loses at every saving", "fails", met(0.1), draws=1, check=both_sides_save_the_same),
    *celled("both are alike", "edge", alike(convex), n=(60,), icc=(0.0,), draws=2),
    Case("EMAD under another name", "tied", itself, draws=1, check=is_tied),
    Case("a difference of no interest", "tied", nearly(0.0002), draws=2, check=says_tied_within_the_margin),
    Case("two sweeps that never meet", "premise", shallow, check=says_that_nothing_met),
]
MARGIN = math.log1p(REGISTER["EMAD-R1"].thresholds["tie_margin"])
LONG = [
    *SHORT,
    *celled("EMAD loses by the tie margin", "edge", lambda n, _: nearly(MARGIN, n), n=(200,), icc=(0.0,), draws=2),
    *celled("EMAD wins by the tie margin", "edge", lambda n, _: nearly(-MARGIN, n), n=(200,), icc=(0.0,), draws=2),
    *celled("EMAD loses by twice the tie margin", "power", lambda n, _: nearly(2 * MARGIN, n), n=(200,), icc=(0.0,)),
    *celled(
        "EMAD wins by twice the tie margin",
        "power",
        lambda n, _: nearly(-2 * MARGIN, n),
        n=(200,),
        icc=(0.0,),
        wanted="survived",
    ),
    *celled("both are alike, fronts bend", "edge", alike(convex), n=(30, 200), icc=(0.0,), draws=2),
    *celled("both are alike, fronts are straight", "edge", alike(linear), icc=(0.0,), draws=2),
    *celled("a straight front against itself on every second document", "edge", halves_of(linear), icc=(0.0,), draws=2),
    Case("EMAD on every second document, fronts bend", "holds", on_every_second(convex), draws=4, least=0.75),
    Case("EMAD loses by about four standard errors at each saving", "power", met(0.02), draws=5),
]


# ---------------------------------------------------------------- EMAD-E6
#
# Foreign thresholds with a known damage, and remedies that remove a known part of it.

FOREIGN = "world:mixed"
ONE = np.array([0.0, 0.5])  # full depth, and thresholds at m = 0
OWN = 0.02  # nats per token that the own profile's thresholds lose at the largest saving


def losing(nats: float) -> Curve:
    """Return nats per token lost at the largest saving, in proportion below it."""
    return lambda savings: nats * savings / ONE[-1]


def damaged(plain: float, documents: int = 200, saved: float = 0.5, **remedied: float):
    """Return nats lost per token at half the FLOPs: without a remedy and under each; ``saved`` by each."""

    def found(rng: np.random.Generator) -> ForeignProfileEvidence:
        texts = Text(rng, CHOSEN_ON), Text(rng, documents)

        def at(name: str, nats: float, savings: Floats = ONE) -> PointFamily:
            return family(name, texts, losing(nats), savings)

        remedies = {name: at(name, nats, np.array([0.0, saved])) for name, nats in remedied.items()}
        return ForeignProfileEvidence(at("own", OWN), at("foreign", plain), remedies, FOREIGN)

    return found


def same_damage(documents: int, icc: float):
    return damaged(0.3, documents, position=0.3)


def decided_alike(rng: np.random.Generator) -> ForeignProfileEvidence:
    """All bins used their parent's thresholds."""
    found = damaged(0.3)(rng)
    return ForeignProfileEvidence(found.own, found.plain, {"position": found.plain}, FOREIGN)


def is_tied_shift(verdict: Verdict) -> None:
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


def idle(rng: np.random.Generator) -> ForeignProfileEvidence:
    texts = Text(rng, CHOSEN_ON), Text(rng, 40)
    own, plain = (family(name, texts, losing(OWN), ONE / 10) for name in ("own", "foreign"))
    return ForeignProfileEvidence(own, plain, {}, FOREIGN)


EMAD_E6 = [
    Case("both lower the damage", "holds", damaged(0.3, position=0.15, margin=0.1), 2, check=names_damage_and_saving),
    Case(
        "a remedy that saves less", "holds", damaged(0.3, 200, 0.2, position=0.04), 2, check=compares_where_both_reach
    ),
    Case("one adds to it", "fails", damaged(0.3, position=0.15, confidence=0.45), 2, check=names_what_harms),
    *celled("conditioning changes nothing", "edge", same_damage, icc=(0.0,), draws=2),
    Case("no bin of its own", "tied", decided_alike, draws=2, check=is_tied_shift),
    Case("a foreign profile that does less", "premise", damaged(OWN / 4, position=OWN), 2, check=says_no_damage),
    Case("nothing is saved", "premise", idle, check=says_nothing_is_saved),
]


CASES = {
    "EMAD-R1": LONG,
    "EMAD-R2": SHORT,
    "EMAD-R3": SHORT,
    "EMAD-R4": SHORT,
    "EMAD-E6": EMAD_E6,
}
