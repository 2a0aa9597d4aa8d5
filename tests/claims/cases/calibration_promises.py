"""Simulated calibration sets that keep or break their guarantee by construction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.claims.calibration_promises import THRESHOLDS, GuaranteeEvidence, PromiseEvidence
from pytest_emad.measurements.early_exits import SET_SIZE, TextConsistency
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.cases.learned_exits import names
from tests.claims.simulated_exits import leg_by_name
from tests.claims.simulation import Case, celled, says

# ---------------------------------------------------------------- EE-7
#
# Calibration sets without common items, on losses of known true risk, set by set and threshold by threshold.

LAYERS = 8
MEAN_EXIT = np.linspace(7.0, 3.0, len(THRESHOLDS))
RISK = (0.0, 0.01, 0.2, 0.4, 0.6)  # of each threshold, strict to loose
POOL, SETS = 200, 64


def losses(rng: np.random.Generator, *shape: int, risk: tuple[float, ...] = RISK) -> np.ndarray:
    """Return [..., λ] losses 0 or 1: an item with a loss at one threshold has it at every looser one."""
    return (rng.random(shape)[..., None] < np.array(risk)).astype(float)


def found(
    *misled: float, sets: int = SETS, pool: int = POOL, risk: tuple[float, ...] = RISK
) -> Callable[[np.random.Generator], PromiseEvidence]:
    """Return one task for each share of sets with no loss; those choose the loosest threshold, whatever its risk."""

    def draw(rng: np.random.Generator) -> PromiseEvidence:
        tasks = {}
        for number, share in enumerate(misled):
            drawn = losses(rng, sets, SET_SIZE, risk=risk)
            drawn[rng.random(sets) < share] = 0.0
            tasks[f"task {number}"] = TextConsistency(losses(rng, pool, risk=risk), drawn, MEAN_EXIT)
        return tasks, LAYERS, {}

    return draw


def safe_and_useful(verdict: Verdict) -> None:
    legs = leg_by_name(verdict)
    assert legs["task 0: sets that chose any exit"].estimate == 1.0, "without a loss the strictest always passes"
    saved = legs["task 0: blocks saved per token"].estimate
    assert saved is not None
    assert 1.0 <= saved <= 2.5, "λ = 0.99 saves a block and 0.9 two; 0.7 loses more than is tolerated"
    assert abs((legs["task 0, λ=0.4: difference from full depth"].estimate or 0.0) - 0.4) <= 0.14  # 4 × 0.49 / √200


def never_survives(reason: str) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        assert verdict.verdict == "inconclusive"
        assert reason in verdict.reason

    return check


HARMLESS = (0.0, 0.0, 0.01, 0.02, 0.03)
HOPELESS = (0.09, 0.2, 0.3, 0.4, 0.6)
EE_7 = [
    Case("Learn-then-Test itself", "holds", found(0.0), 20, least=0.9, check=safe_and_useful),
    Case("a fifth of the sets see no loss", "fails", found(0.0, 0.2), draws=20, least=0.9, check=says("task 1")),
    Case("a tenth, twice what is allowed", "power", found(0.1, sets=400), draws=5),
    Case("a twentieth of the sets", "edge", found(0.05), draws=60),
    Case("a twentieth, on a small pool", "edge", found(0.05, pool=100), draws=60),
    Case("no threshold strays", "premise", found(0.0, risk=HARMLESS), 5, check=says("nothing could break")),
    Case("most sets certify nothing", "tied", found(0.0, risk=HOPELESS), 5, check=never_survives("half are needed")),
    Case("two sets", "tied", found(0.0, sets=2), 5, check=never_survives("about 63 calibration sets")),
    *(
        Case(f"a pool of {pool}", "tied", found(0.0, pool=pool), 3, check=never_survives("at least 100 are needed"))
        for pool in (30, 60)
    ),
]


# ---------------------------------------------------------------- EMAD-X2
#
# Exits of known risk, with calibration sets that certify known thresholds.

EXIT_RISK, ERROR = 0.1, 0.05
GRID = (0.01, 0.03, 0.3)  # risks of three thresholds, strict to loose: the last one exceeds the guarantee
EXIT_POOL = 400


def exit_losses(rng: np.random.Generator, mean: float, count: int) -> np.ndarray:
    """Return [count] losses in 0–1, most of them small."""
    return rng.beta(2 * mean, 2 * (1 - mean), count) if mean else np.zeros(count)


def promised(
    mean: float | None,
    *,
    count: int = 200,
    power: float | None = 0.9,
    sets: int = 0,
    broken: float = 0.0,
    full: float = 0.0,
    grid: tuple[float, ...] = GRID,
) -> Callable[[np.random.Generator], GuaranteeEvidence]:
    """Make an exit of this mean loss; shares of its ``sets`` are ``broken`` or chose ``full`` depth."""

    def found(rng: np.random.Generator) -> GuaranteeEvidence:
        fresh = (
            Absent("nothing was certified")
            if mean is None
            else ByDocument.from_whole_documents(exit_losses(rng, mean, count))
        )
        luck = rng.random(sets)
        chosen = np.where(luck < broken, len(grid) - 1, np.where(luck > 1 - full, -1, 1))
        pool = ByDocument.from_whole_documents(np.stack([exit_losses(rng, each, EXIT_POOL) for each in grid], axis=1))
        draws = (chosen, pool) if sets else None
        return GuaranteeEvidence(fresh, EXIT_RISK, ERROR, 300, power, draws)

    return found


def costly(share: float, count: int, rest: float = 0.0) -> Callable[[np.random.Generator], GuaranteeEvidence]:
    """Make a screening guarantee, B = 0.2 and δ = 0.01: this share of documents loses B, the others ``rest``."""

    def found(rng: np.random.Generator) -> GuaranteeEvidence:
        lost = np.where(rng.random(count) < share, 0.2, rest)
        return GuaranteeEvidence(ByDocument.from_whole_documents(lost), 0.01, ERROR, 300, 0.9, cap=0.2)

    return found


def open_for_want_of_power(verdict: Verdict) -> None:
    assert verdict.verdict == "inconclusive"
    assert "certifies an exit in 40% of draws" in verdict.reason


DOCUMENTS = {"icc": (0.0,)}  # whole documents, independent by construction
EMAD_X2 = [
    Case("half of what is tolerated, and power", "holds", promised(0.05), draws=10),
    Case("200 sets keep it, and certify", "holds", promised(0.05, sets=200, full=0.1), draws=10),
    Case("full depth here, an exit in most sets", "holds", promised(None, sets=200, full=0.1), draws=5),
    Case("three times as much is lost", "fails", promised(0.3), draws=10),
    Case("a fifth of the sets break it", "fails", promised(0.05, sets=200, broken=0.2), draws=10),
    Case("most sets certify nothing", "fails", promised(0.05, sets=200, full=0.6), draws=10),
    *celled("what is tolerated, to the last", "edge", lambda n, _: promised(EXIT_RISK, count=n), draws=8, **DOCUMENTS),
    Case("a twentieth of the sets break it", "edge", promised(0.05, sets=200, broken=ERROR), draws=40),
    Case("four in five certify", "edge", promised(0.05, sets=200, full=0.2), draws=40),
    *celled("twice as much is lost", "power", lambda n, _: promised(0.2, count=n), n=(60, 200), icc=(0.0,)),
    # below 59 documents no distribution-free test certifies anything, and with 80 it certifies too little
    *celled("nearly nothing is lost", "power", lambda n, _: promised(0.01, count=n), n=(100, 200), icc=(0.0,),
            wanted="survived"),
    Case("a tenth of the sets break it", "power", promised(0.05, sets=400, broken=0.1), draws=5),
    Case("a set too small, as it says itself", "tied", promised(0.05, power=0.4), draws=5,
         check=open_for_want_of_power),
    Case("no power is stated", "tied", promised(0.05, power=None), draws=5, check=says("the guarantee states none")),
    Case("no threshold could break it", "holds", promised(0.02, sets=200, grid=(0.0, 0.01, 0.02)), draws=5,
         check=names("not applicable", "nothing could break")),
    Case("full depth was chosen", "premise", promised(None), check=says("keeps any promise", "nothing was certified")),
    Case("31 documents, and no loss at all", "tied", costly(0.0, 31), draws=5, check=says("documents would decide it")),
    *celled("a twentieth of all documents lose B", "edge", lambda n, _: costly(0.05, n), n=(31, 60, 200), draws=3,
            icc=(0.0,)),
    *celled("half of what is tolerated is lost by a fortieth of all documents", "edge",
            lambda n, _: costly(0.025, n, rest=0.00512), n=(31, 60, 200), draws=3, icc=(0.0,)),
    *celled("a tenth of all documents lose B", "power", lambda n, _: costly(0.1, n), n=(200, 400), icc=(0.0,)),
    *celled("no document loses anything", "power", lambda n, _: costly(0.0, n), n=(80, 200), icc=(0.0,),
            wanted="survived"),
    Case("29 documents", "tied", promised(0.05, count=29), draws=5, check=says("at least 30")),
]  # fmt: skip


CASES = {
    "EE-7": EE_7,
    "EMAD-X2": EMAD_X2,
}
