"""Simulated timed requests with a known ratio of total times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.audit.finding import Finding
from pytest_emad.claims.speedup import (
    BackfillEvidence,
    SelfSpeculationEvidence,
    SpeedupEvidence,
    TimedBatch,
)
from pytest_emad.measurements.latency import ADAPTIVE
from pytest_emad.measurements.operating_points import NllPair
from pytest_emad.statistics.gate import describe_verdict, format_measurement_and_requirement
from pytest_emad.statistics.units import ByDocument, ByPair
from pytest_emad.statistics.verdicts import Verdict, load_register
from tests.claims.simulation import Case, celled, says

# ---------------------------------------------------------------- EMAD-F2
#
# Requests with a known ratio of total times; a pair shares its prompts and the machine's speed.

PAIRS, NOISE = 30, 0.05
SLOWER = {"full depth": 1.0, "generate": 0.9}  # speeds of baselines; full depth's is 1
COMPILED = {"full depth": 0.8, "generate": 0.7, "compiled generate": 1.0}


def timed(
    *ratios: float,
    speeds: Mapping[str, float] = SLOWER,
    pairs: int = PAIRS,
    unusable: Absent | None = None,
    noise: float = NOISE,
):
    """Per batch size, make the point ``ratio`` times as fast as a baseline of speed 1."""

    def found(rng: np.random.Generator) -> SpeedupEvidence:
        batches = {}
        for batch, ratio in enumerate(ratios, start=1):
            mood = 0.2 * np.exp(0.3 * rng.standard_normal(pairs))

            def seconds(speed: float, mood: np.ndarray = mood) -> ByPair:
                return ByPair(mood * np.exp(noise * rng.standard_normal(pairs)) / speed)

            baselines = {name: seconds(speed) for name, speed in speeds.items()}
            batches[batch] = TimedBatch(seconds(ratio), baselines)
        return SpeedupEvidence(
            batches, unusable, {} if "compiled generate" in speeds else {"compiled": Absent("not tried")}
        )

    return found


def mixed(total: float, pairs: int = 60):
    """Half of the requests are short and twice as fast, half long and hardly faster: ``total`` times as fast together.
    The mean of the requests' own ratios would be 1.45."""

    def found(rng: np.random.Generator) -> SpeedupEvidence:
        long = rng.permutation(pairs) % 2 == 0
        full = np.where(long, 9.0, 1.0)
        point = np.where(long, 10 / total - 0.5, 0.5)
        full, point = (arm * np.exp(NOISE * rng.standard_normal(pairs)) for arm in (full, point))
        return SpeedupEvidence({1: TimedBatch(ByPair(point), {"full depth": ByPair(full)})})

    return found


def the_same_twice(rng: np.random.Generator) -> SpeedupEvidence:
    """One arm under two names."""
    found = timed(1.0)(rng)
    return replace(found, batches={1: replace(found.batches[1], baselines={"full depth": found.batches[1].adaptive})})


def checked(found, passed: bool, detail: str):
    """Mark the emitted tokens of the timed requests as checked."""

    def looked_at(rng: np.random.Generator) -> SpeedupEvidence:
        made, check = found(rng), Finding("timed", passed, detail, 96, 0)
        return replace(made, batches={rows: replace(each, check=check) for rows, each in made.batches.items()})

    return looked_at


def names_the_difference(verdict: Verdict) -> None:
    assert "adaptive, row 0: 3 tokens" in verdict.reason
    (broken,) = [leg for leg in verdict.legs if leg.outcome == "falsified"]
    assert broken.name == "batch 1: timed requests"
    assert "adaptive, row 0: 3 tokens" in format_measurement_and_requirement(verdict.to_json()), (
        "the summary shows the difference, not the number of comparisons"
    )
    message = " ".join(describe_verdict(verdict, load_register()[verdict.id]).split())
    assert message.count("3 tokens") == 1, message


def lists_what_was_compared(verdict: Verdict) -> None:
    (leg,) = [leg for leg in verdict.legs if leg.name == "batch 1: timed requests"]
    assert (leg.outcome, leg.n, leg.unit) == ("measured", 96, "tokens compared")


def lists_the_ratio(verdict: Verdict) -> None:
    assert verdict.reason == "no usable point: random weights"
    numbers = {leg.name: leg for leg in verdict.legs if leg.outcome == "measured"}
    assert set(numbers) == {"batch 1, against full depth", "batch 1, against generate"}
    assert abs(numbers["batch 1, against full depth"].estimate - 1.33) < 0.1


UNUSABLE = Absent("no usable point: random weights", "premise")
EMAD_F2 = [
    Case("a third faster", "holds", timed(1.33, 1.3), draws=30),
    Case("as fast as all baselines ask, the compiled one too", "holds", timed(1.3, speeds=COMPILED), draws=30),
    Case("faster than generate, which is as fast as full depth", "holds",
         timed(1.3, speeds={"full depth": 1.0, "generate": 1.0}), draws=30, least=0.8),
    Case("as fast", "fails", timed(1.0, pairs=60), draws=30),
    Case("half the threshold's gain, 200 pairs", "fails", timed(1.05, pairs=200), draws=30, least=0.8),
    Case("the same arm twice", "fails", the_same_twice, draws=30),
    Case("slower than generate", "fails", timed(1.3, speeds={"full depth": 1.0, "generate": 1.5}), draws=30),
    Case("slower than generate, on a machine that does something else besides", "fails",
         timed(1.3, speeds={"full depth": 1.0, "generate": 1.9}, noise=0.3), draws=30, least=0.8),
    Case("faster than generate, by less than a tenth", "fails",
         timed(1.3, speeds={"full depth": 1.0, "generate": 1.26}, pairs=120), draws=30, least=0.8),
    Case("slower than compiled steps alone", "fails", timed(0.9, speeds=COMPILED), draws=30),
    Case("slower than prompt lookup alone", "fails",
         timed(1.3, speeds={"full depth": 1.0, "generate": 1.0, "generate with prompt lookup": 1.6}), draws=30),
    Case("faster in batches of one alone", "fails", timed(1.33, 1.0, pairs=60), draws=30, least=0.9),
    *celled("faster by the threshold", "edge", lambda n, _: timed(1.1, pairs=n), icc=(0.0,), draws=20),
    *celled("by the threshold, at two batch sizes and against each of three", "edge",
            lambda n, _: timed(1.1, 1.1, speeds=dict.fromkeys(COMPILED, 1.0), pairs=n), icc=(0.0,), draws=20),
    *celled("by the threshold, on a machine that does something else besides", "edge",
            lambda n, _: timed(1.1, speeds=dict.fromkeys(COMPILED, 1.0), pairs=n, noise=0.4), icc=(0.0,), draws=20),
    *celled("a mix of requests by the threshold", "edge", lambda n, _: mixed(1.1, n), icc=(0.0,), draws=20),
    *celled("twice the threshold's gain, two batch sizes", "power", lambda n, _: timed(1.2, 1.2, pairs=n),
            icc=(0.0,), wanted="survived"),
    *celled("as fast, two batch sizes", "power", lambda n, _: timed(1.0, 1.0, pairs=n), icc=(0.0,)),
    Case("a mix of requests, faster", "holds", mixed(1.25, 120), draws=20, least=0.9),
    Case("what was timed has been looked at", "holds", checked(timed(1.33), True, "96 positions compared, 0 ties"),
         draws=5, check=lists_what_was_compared),
    Case("what was timed is not what was asked", "fails",
         checked(timed(1.33), False, "adaptive, row 0: 3 tokens"), draws=5, check=names_the_difference),
    Case("nor is it so on random weights", "fails",
         checked(timed(1.33, unusable=UNUSABLE), False, "adaptive, row 0: 3 tokens"), draws=5,
         check=names_the_difference),
    Case("no point that F1 lets stand", "premise", timed(1.33, unusable=UNUSABLE), draws=5, check=lists_the_ratio),
    Case("nothing was timed", "premise", timed()),
]  # fmt: skip


# ---------------------------------------------------------------- EMAD-X3
#
# Requests with a known ratio of total times, as for EMAD-F2: the same rule on another point.

UNUSABLE_EXIT = Absent("no usable exit: EMAD-X1 is falsified", "premise")
EMAD_X3 = [
    Case("a third faster", "holds", timed(1.33, 1.3), draws=10),
    Case("as fast", "fails", timed(1.0, pairs=60), draws=10),
    Case("slower than compiled steps alone", "fails", timed(0.9, speeds=COMPILED), draws=10),
    Case("what was timed is not what was asked", "fails", checked(timed(1.33), False, "adaptive, row 0: 3 tokens"),
         draws=5, check=says("adaptive, row 0")),
    *celled("faster by the threshold", "edge", lambda n, _: timed(1.1, pairs=n), icc=(0.0,), draws=20),
    *celled("twice the threshold's gain", "power", lambda n, _: timed(1.2, pairs=n), icc=(0.0,), wanted="survived"),
    Case("no exit that X1 lets survive", "premise", timed(1.33, unusable=UNUSABLE_EXIT), draws=5,
         check=says(UNUSABLE_EXIT.reason)),
    Case("nothing was timed", "premise", timed()),
]  # fmt: skip


# ---------------------------------------------------------------- EMAD-X4
#
# Requests drafted and verified in known time, with EMAD-F2's baselines and other lossless methods.


def drafted(
    raced: Callable, beside: float | None = None, kept: float = 0.6
) -> Callable[[np.random.Generator], SelfSpeculationEvidence]:
    """``beside``: the speed of prompt lookup relative to full depth."""

    def found(rng: np.random.Generator) -> SelfSpeculationEvidence:
        made = raced(rng)
        ways = {}
        if beside is not None:
            alone = made.batches[min(made.batches)]
            full = alone.baselines["full depth"]
            ways = {ADAPTIVE: alone.adaptive, "prompt lookup": full.with_values(full.values / beside)}
        return made, ways, dict.fromkeys(made.batches, kept)

    return found


def lists_what_stands_beside(verdict: Verdict) -> None:
    """Prompt lookup is twice as fast as full depth, drafting 1.33 times: it is listed and decides nothing."""
    legs = {leg.name: leg for leg in verdict.legs if leg.outcome == "measured"}
    assert 0.6 < legs["batch 1, against prompt lookup"].estimate < 0.73
    assert legs["batch 1: verified tokens that stand"].estimate == 0.6


def says_where_the_gain_ends(verdict: Verdict) -> None:
    """The larger batch is slower: it is listed and decides nothing."""
    (leg,) = [leg for leg in verdict.legs if leg.name.endswith("against full depth") and leg.outcome == "measured"]
    assert not leg.name.startswith("batch 1,")
    assert 0.75 < leg.estimate < 0.85


UNTRAINED = Absent("random weights: perplexity and accuracy of noise say nothing", "premise")
EMAD_X4 = [
    Case("a third faster, and prompt lookup faster still", "holds", drafted(timed(1.33, 1.3), beside=2.0), draws=10,
         check=lists_what_stands_beside),
    Case("a third faster, several at once slower", "holds", drafted(timed(1.33, 0.8)), draws=10,
         check=says_where_the_gain_ends),
    Case("as fast", "fails", drafted(timed(1.0, pairs=60)), draws=10),
    Case("slower than compiled steps", "fails", drafted(timed(0.9, speeds=COMPILED)), draws=10),
    Case("another token than the model's own", "fails", drafted(checked(timed(1.5), False, "drafting, row 0: token 7")),
         draws=5, check=says("drafting, row 0: token 7")),
    *celled("faster by the threshold", "edge", lambda n, _: drafted(timed(1.1, pairs=n)), icc=(0.0,), draws=20),
    *celled("twice the threshold's gain", "power", lambda n, _: drafted(timed(1.2, pairs=n)), icc=(0.0,),
            wanted="survived"),
    *celled("as fast, two batch sizes", "power", lambda n, _: drafted(timed(1.0, 1.0, pairs=n)), icc=(0.0,)),
    Case("random weights", "premise", drafted(timed(1.33, unusable=UNTRAINED)), draws=5, check=says(UNTRAINED.reason)),
    Case("nothing was timed", "premise", drafted(timed())),
]  # fmt: skip


# ---------------------------------------------------------------- EMAD-E7
#
# Pairs of requests with a known ratio of times, and copied K/V that costs a known number of nats.

REPAIR_PAIRS, REPAIR_NOISE = 40, 0.05
COPIED_NATS = 0.2  # per token


def repairs(eager: float, deferred: float, *, quality: bool = False, skipped: float = 0.4, pairs: int = REPAIR_PAIRS):
    """Speed of the exact repairs relative to full depth; requests differ, a pair's noise is 5 %."""

    def found(rng: np.random.Generator) -> BackfillEvidence:
        request = rng.uniform(0.5, 1.5, pairs)

        def faster(ratio: float) -> ByPair:
            return ByPair(request / ratio * np.exp(REPAIR_NOISE * rng.standard_normal(pairs)))

        beside = {"net_reductions": {"eager backfill": 0.01}, "quality": copies(rng)} if quality else {}
        exact = {"eager backfill": faster(eager), "deferred fill": faster(deferred)}
        return BackfillEvidence(faster(1.0), exact, faster(1.5), faster(1.4), skipped, **beside)

    return found


def the_same_arm(pairs: int, icc: float):
    """Both repairs are full depth under another name."""

    def found(rng: np.random.Generator) -> BackfillEvidence:
        made = repairs(1.0, 1.0, pairs=pairs)(rng)
        return replace(made, exact=dict.fromkeys(made.exact, made.full))

    return found


def copies(rng: np.random.Generator, documents: int = 30) -> NllPair:
    tokens = rng.integers(20, 30, documents)
    exact = tokens * (2.0 + 0.3 * rng.standard_normal(documents))
    copied = exact + tokens * (COPIED_NATS + 0.02 * rng.standard_normal(documents))
    return tuple(ByDocument.from_whole_documents(column) for column in (copied, exact, tokens))


def lists_copying_and_no_more(verdict: Verdict) -> None:
    """Neither FLOPs nor quality is listed without replay; copying is fast, and decides nothing."""
    listed = {leg.name: leg for leg in verdict.legs if leg.outcome == "measured"}
    assert list(listed) == ["state copying", "monotone", "blocks left out"]
    assert abs(listed["state copying"].estimate - 1.5) < 0.1
    assert abs(listed["monotone"].estimate - 1.4) < 0.1
    assert listed["blocks left out"].estimate == 0.4


def lists_what_replay_says(verdict: Verdict) -> None:
    listed = {leg.name: leg.estimate for leg in verdict.legs if leg.outcome == "measured"}
    assert listed["eager backfill: FLOPs"] == 0.01
    assert abs(listed["state copying: perplexity"] - np.expm1(COPIED_NATS)) < 0.03


def says_that_nothing_is_owed(verdict: Verdict) -> None:
    assert "leaves out 1.0 % of blocks" in verdict.reason
    assert {leg.outcome for leg in verdict.legs} == {"measured"}
    assert {"eager backfill", "deferred fill"} < {leg.name for leg in verdict.legs}


EMAD_E7 = [
    Case("both repairs are slower than full depth", "holds", repairs(0.9, 0.8), 5, check=lists_copying_and_no_more),
    Case("with FLOPs and copies beside", "holds", repairs(0.9, 0.8, quality=True), check=lists_what_replay_says),
    Case("deferred fill is faster", "fails", repairs(0.9, 1.1), draws=5),
    *celled("deferred fill is exactly as fast", "edge", lambda n, _: repairs(0.8, 1.0, pairs=n), icc=(0.0,), draws=20),
    *celled("deferred fill is a tenth faster", "power", lambda n, _: repairs(0.8, 1.1, pairs=n), icc=(0.0,)),
    *celled("both are a tenth slower", "power", lambda n, _: repairs(0.9, 0.9, pairs=n), icc=(0.0,), wanted="survived"),
    *celled("both are full depth itself", "tied", the_same_arm, icc=(0.0,)),
    Case("a rule that hardly fires", "premise", repairs(0.9, 0.8, skipped=0.01), check=says_that_nothing_is_owed),
]


CASES = {
    "EMAD-F2": EMAD_F2,
    "EMAD-X3": EMAD_X3,
    "EMAD-X4": EMAD_X4,
    "EMAD-E7": EMAD_E7,
}
