"""Simulated criteria, oracles and components with known savings and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from emad_ref.absent import Absent
from emad_ref.record import Floats, Ints
from emad_ref.replay.losses import PointLoss
from pytest_emad.claims.learned_exits import CriterionEvidence, OracleLosses
from pytest_emad.measurements.learned_exit import ComponentExchange
from pytest_emad.statistics.verdicts import Verdict
from tests.claims import document_shapes as shapes
from tests.claims.simulation import Case, celled, says
from tests.handmade_losses import handmade_losses

# ---------------------------------------------------------------- building blocks
#
# Ways of decoding with known savings and losses on the same simulated documents.

EACH = 1000.0  # work of a token at full depth
LOSES, SAVES = 0.004, 0.05  # nats per token and share of work, between documents of one text


class Text:
    """``count`` documents of different length and level, and ways of decoding on them."""

    def __init__(self, rng: np.random.Generator, count: int):
        self._rng = rng
        self._tokens = rng.integers(100, 300, count)
        self._nll = self._tokens * rng.uniform(1.0, 3.0, count)

    def spent(self, name: str, saves: float, rises: float) -> PointLoss:
        """Return a way that saves this share and raises perplexity by this rate on average."""
        lost = math.log1p(rises) + LOSES * self._rng.standard_normal(len(self._tokens))
        share = saves + SAVES * self._rng.standard_normal(len(self._tokens))
        return beside_full_depth(name, self._nll, self._nll + self._tokens * lost, self._tokens, 1 - share)


def beside_full_depth(name: str, full: Floats, nats: Floats, tokens: Ints | Floats, spent: Floats) -> PointLoss:
    """Return the row of a way with these sums [documents], and shares ``spent`` of full depth's work."""
    work = EACH * np.asarray(tokens)[:, None] * np.stack([np.ones(len(spent)), spent], axis=1)
    return handmade_losses(np.stack([full, nats], axis=1), work, tokens, ["full depth", name])[1]


# ---------------------------------------------------------------- EMAD-X1
#
# Criteria with known savings and losses, one of them chosen, and an oracle.

WEAK = ((0.05, 0.001), (0.1, 0.004), (0.12, 0.03), (0.3, 0.05))  # each saves too little or loses too much


def criteria(
    *others: tuple[float, float],
    chosen: tuple[float, float] | None = None,
    count: int = 800,
    slack: float | None = 0.45,
) -> Callable[[np.random.Generator], CriterionEvidence]:
    """Each criterion has its (saving, loss); the chosen one is screened together with the ``others``."""

    def found(rng: np.random.Generator) -> CriterionEvidence:
        text = Text(rng, count)
        one = Absent(WHY) if chosen is None else text.spent("chosen", *chosen)
        screened = [text.spent(f"criterion {at}", *each) for at, each in enumerate(others)]
        screened += [] if isinstance(one, Absent) else [one]
        return CriterionEvidence(count, one, screened, slack)

    return found


WHY = "no criterion is within 1 % on validation"
DOCUMENTS = {"icc": (0.0,)}  # whole documents, independent by construction


def shaped(rises: str) -> Callable[[int, float], Callable[[np.random.Generator], CriterionEvidence]]:
    """The only criterion saves 30 % and loses one per cent, in documents with rises of this shape."""

    def made(n: int, icc: float) -> Callable[[np.random.Generator], CriterionEvidence]:
        def found(rng: np.random.Generator) -> CriterionEvidence:
            lost, full, tokens = shapes.documents(rng, 0.01, n, rises, "one window")
            spent = 0.7 + 0.02 * rng.standard_normal(n)
            one = beside_full_depth("chosen", full.values, lost.values, tokens.values, spent)
            return CriterionEvidence(n, one, [], 0.45)

        return found

    return made


def names(outcome: str, part: str) -> Callable[[Verdict], None]:
    """Check: a leg of this outcome has this text in its name or reason."""

    def check(verdict: Verdict) -> None:
        said = [f"{leg.name} {leg.reason}" for leg in verdict.legs if leg.outcome == outcome]
        assert any(part in each for each in said), said

    return check


def never_falsified(verdict: Verdict) -> None:
    assert verdict.verdict != "falsified", verdict.reason


EMAD_X1 = [
    Case("one of five does it", "holds", criteria(*WEAK, chosen=(0.3, 0.003)), draws=10,
         check=names("measured", "others may be left")),
    Case("none of four does it, and none was chosen", "fails", criteria(*WEAK), draws=10),
    Case("nor does the oracle", "fails", criteria(*WEAK, slack=0.118), draws=5,
         check=names("measured", "no criterion on this lens")),
    Case("the chosen one fails beside all others, 40 documents", "fails",
         criteria((0.03, 0.0), chosen=(0.4, 0.05), count=40), draws=10, least=0.9),
    Case("the chosen one fails, another would do it", "tied", criteria((0.3, 0.003), chosen=(0.3, 0.05)), draws=10,
         check=never_falsified),
    *celled("the only one saves the threshold", "edge", lambda n, _: criteria(chosen=(0.15, 0.0), count=n),
            draws=8, **DOCUMENTS),
    *celled("the only one loses the threshold", "edge", lambda n, _: criteria(*WEAK, chosen=(0.3, 0.01), count=n),
            draws=8, **DOCUMENTS),
    *celled("the only one loses the threshold, log-normal", "edge", shaped("log-normal 1.6"), n=(200, 400), icc=(0.0,),
            draws=2),
    *celled("the only one ruins 1 %", "edge", shaped("1 % ruined"), n=(200, 400), icc=(0.0,), draws=2),
    *celled("the only one does both", "edge", lambda n, _: criteria(chosen=(0.15, 0.01), count=n), draws=8,
            **DOCUMENTS),
    *celled("three lose the threshold", "edge",
            lambda n, _: criteria((0.3, 0.01), (0.4, 0.01), chosen=(0.2, 0.01), count=n), draws=8, **DOCUMENTS),
    *celled("twice as much is saved, nothing lost", "power", lambda n, _: criteria(*WEAK, chosen=(0.3, 0.0), count=n),
            n=(400,), icc=(0.0,), wanted="survived"),
    *celled("the best lose twice as much, others save nothing", "power",
            lambda n, _: criteria((0.3, 0.02), (0.4, 0.02), (0.0, 0.0), chosen=(0.25, 0.02), count=n), n=(60, 200),
            icc=(0.0,)),
    Case("no slack", "premise", criteria(*WEAK, slack=0.047), check=says("no slack", "4.7 %", "leave this model")),
    Case("nothing was screened", "tied", criteria(), check=says(WHY)),
    Case("29 documents", "tied", criteria(*WEAK, chosen=(0.3, 0.0), count=29), draws=5, check=says("at least 30")),
    Case("200 documents never survive", "tied", criteria(chosen=(0.3, 0.0), count=200), draws=5,
         check=says("cannot exclude", "documents would decide it")),
]  # fmt: skip


# ---------------------------------------------------------------- EMAD-X5
#
# Oracles with known savings of blocks.


def ceilings(rng: np.random.Generator) -> OracleLosses:
    text = Text(rng, 200)
    truths = {"tuned lens, free depth": (0.48, 0.01), "raw lens, depth that only falls": (0.0, 0.0)}
    return [(0.01, text.spent(name, *truth)) for name, truth in truths.items()]


def check_ceilings(verdict: Verdict) -> None:
    free, falling = verdict.legs
    assert verdict.estimate == free.estimate
    for leg, truth in ((free, 0.48), (falling, 0.0)):
        assert leg.interval is not None
        assert leg.estimate is not None
        assert abs(leg.estimate - truth) < 0.02
        assert leg.interval[0] < leg.estimate < leg.interval[1]
    assert free.name == "tuned lens, free depth, at 1 %"
    assert "perplexity rises by 1.0" in free.reason or "perplexity rises by 0.9" in free.reason


EMAD_X5 = [
    Case("what two oracles save", "value", ceilings, draws=10, check=check_ceilings),
    Case("no oracle", "premise", lambda rng: []),
]


# ---------------------------------------------------------------- EMAD-X6
#
# Components whose replacement changes FLOPs by known shares.

GAINS = {"readout": 0.0, "monotone rule": 0.2, "criterion": 0.02}


def exchanges(rng: np.random.Generator) -> Sequence[ComponentExchange]:
    text = Text(rng, 200)
    emad = text.spent("EMAD as published", 0.01, 0.0)
    after = {part: text.spent(f"another {part}", 0.01 + gain, 0.005) for part, gain in GAINS.items()}
    return [(part, emad, spent) for part, spent in after.items()]


def check_exchanges(verdict: Verdict) -> None:
    """The largest gain comes first, each gain is a difference of shares, and the row is decided by it."""
    parts = [leg.name.partition(":")[0] for leg in verdict.legs]
    assert parts == ["monotone rule", "criterion", "readout"]
    for part, leg in zip(parts, verdict.legs, strict=True):
        assert leg.estimate is not None
        assert abs(leg.estimate - GAINS[part]) < 0.02
    assert verdict.estimate == verdict.legs[0].estimate
    assert "EMAD as published" in verdict.legs[0].name


EMAD_X6 = [
    Case("the monotone rule fails", "value", exchanges, draws=10, check=check_exchanges),
    Case("nothing was exchanged", "premise", lambda rng: []),
]


CASES = {
    "EMAD-X1": EMAD_X1,
    "EMAD-X5": EMAD_X5,
    "EMAD-X6": EMAD_X6,
}
