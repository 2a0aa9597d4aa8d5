"""EMAD-F1 and its literal reading: premises, minimum n, Holm correction, reasons and measurements."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from emad_ref.point import full_depth
from pytest_emad.claims import quality
from pytest_emad.claims.base import ClaimContext
from pytest_emad.claims.quality import QualityEvidence, simes_pvalue
from pytest_emad.measurements.operating_points import PointMeasurements
from pytest_emad.statistics.accuracy import TaskAccuracy
from pytest_emad.statistics.gate import deciding_leg_name, describe_deciding_leg
from pytest_emad.statistics.number_format import format_quantity
from pytest_emad.statistics.units import ByDocument, ByItem
from pytest_emad.statistics.verdicts import Verdict, load_register

REGISTER = load_register()
F1 = REGISTER["EMAD-F1"]


def corpus(rise: float, n: int = 200, spread: float = 0.002, seed: int = 1):
    """Make documents whose perplexity rises by ``rise`` on average."""
    source = np.random.default_rng(seed)
    tokens = source.integers(100, 300, n)
    reference = 2.0 * tokens
    candidate = reference + tokens * (math.log1p(rise) + spread * source.standard_normal(n))
    return (
        ByDocument.from_whole_documents(candidate),
        ByDocument.from_whole_documents(reference),
        ByDocument.from_whole_documents(tokens),
    )


def task(lost: int, n: int = 1000):
    reference, candidate = np.ones(n, bool), np.ones(n, bool)
    candidate[:lost] = False
    return TaskAccuracy(
        ByItem.from_independent_items(reference), ByItem.from_independent_items(candidate), guess=0.0, saving=0.3
    )


def point(rise=0.001, lost=(0, 0, 0), saves=0.3, name="p", n=500, spread=0.002, items=1000) -> PointMeasurements:
    tasks = {f"task{i}": task(k, items) for i, k in enumerate(lost)}
    return PointMeasurements(name, name, saves, {"world": corpus(rise, n, spread)}, tasks)


def f1(*points: PointMeasurements, claim=F1, other_legs=0, unmeasured=None, decide=quality.decide_quality) -> Verdict:
    asked = ClaimContext(claim, "m", np.random.default_rng(5), other_legs)
    verdict = decide(QualityEvidence(points, unmeasured or {}), asked)
    assert json.loads(json.dumps(verdict.to_json())) == verdict.to_json()
    return verdict


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {leg.name: leg.outcome for leg in verdict.legs}


# --- judged points ------------------------------------------------------------------------------------------------


def test_it_survives_where_every_leg_is_shown_to_hold():
    verdict = f1(point())
    assert verdict.verdict == "survived"
    assert verdict.model == "m"
    assert outcomes(verdict)["p: perplexity on world"] == "survived"
    assert outcomes(verdict)["p: accuracy on two or more tasks"] == "survived"
    assert outcomes(verdict)["p: task0"] == "measured"


def test_perplexity_alone_falsifies():
    verdict = f1(point(rise=0.03))
    assert verdict.verdict == "falsified"
    assert verdict.threshold == 0.01
    assert verdict.unit == "relative rise"
    assert verdict.estimate == pytest.approx(0.03, abs=0.002)
    assert verdict.interval[0] > 0.01


def test_two_tasks_falsify_but_not_one():
    two = f1(point(lost=(90, 60, 0)))
    assert two.verdict == "falsified"
    assert two.unit == "accuracy drop"
    assert two.estimate == pytest.approx(0.06)
    assert describe_deciding_leg(two.to_json()) == (
        "p: accuracy on two or more tasks: task1, the second-worst of 3 tasks that count; "
        "one may lose: task0, the worst, loses 9.00 %"
    )
    assert f1(point(lost=(60, 0, 0))).verdict == "survived"


def test_a_bad_task_leaves_the_row_open_while_another_is_unproven():
    """One task may lose; the second is shown neither to lose nor to hold."""
    verdict = f1(point(lost=(60, 10, 0)))
    assert verdict.verdict == "inconclusive"
    reasons = {leg.name: leg.reason for leg in verdict.legs}
    assert "task1, the second-worst" in reasons["p: accuracy on two or more tasks"]


def test_any_falsified_point_falsifies():
    verdict = f1(point(name="good"), point(rise=0.05, name="bad"))
    assert verdict.verdict == "falsified"
    assert "bad" in verdict.reason
    assert "1 of 4 legs" in verdict.reason


def test_points_below_fifteen_per_cent_are_listed_but_not_judged():
    verdict = f1(point(name="good"), point(rise=0.5, saves=0.149, name="idle"))
    assert verdict.verdict == "survived"
    assert outcomes(verdict)["idle: reduction"] == "not applicable"
    assert f1(point(rise=0.5, saves=0.15)).verdict == "falsified"


@pytest.mark.parametrize("points", [[], [point(saves=0.1)], [point(saves=-0.2), point(saves=0.149)]])
def test_without_a_point_that_saves_enough_it_is_not_applicable_never_survived(points):
    verdict = f1(*points)
    assert verdict.verdict == "not applicable"
    assert verdict.reason
    assert verdict.estimate is None
    assert verdict.n == 0


@pytest.mark.parametrize("saves", [math.nan, 1.5, math.inf])
def test_a_reduction_that_is_no_share_is_refused(saves):
    with pytest.raises(BadArgument, match="net_reduction"):
        f1(point(saves=saves))


# --- evidence that decides nothing --------------------------------------------------------------------------------


def test_a_point_estimate_inside_with_a_crossing_interval_is_inconclusive():
    verdict = f1(point(rise=0.011, spread=0.02, n=200))
    assert verdict.verdict == "inconclusive"
    assert verdict.estimate < 0.01 < verdict.interval[1]
    assert "documents would decide it" in verdict.reason


@pytest.mark.parametrize("rise", [0.0, 0.05])
def test_below_the_minimum_of_documents_the_number_needed_is_named(rise):
    verdict = f1(point(rise=rise, n=31))
    assert verdict.verdict == "inconclusive"
    assert "28 documents, at least 30 are needed; 31 unequal documents count as 28" in verdict.reason
    assert f1(point(rise=rise, n=36)).verdict == ("falsified" if rise else "inconclusive")


def test_few_documents_may_falsify_but_not_survive():
    """A sample of 200 misses every ruined document one time in eight if the decoder ruins 1 % of them."""
    few, enough = f1(point(n=200)), f1(point(n=500))
    assert few.verdict == "inconclusive"
    assert "185 documents cannot exclude that 1.62 % of them fail, by up to 1 nats per token" in few.reason
    assert "documents would decide it in four of five samples if the estimate is true" in few.reason
    assert enough.verdict == "survived"
    reasons = {leg.name: leg.reason for leg in enough.legs}
    said = "462 documents cannot exclude that 0.649 % of them fail, by up to 1 nats per token"
    broken = "unseen documents would break it: 0.45 % that lose 2 nats per token or 0.09 % that lose 10 nats per token"
    assert reasons["p: perplexity on world"].endswith(f"the largest has 0.3 % of the tokens; {said}; {broken}")
    assert f1(point(rise=0.05, n=40)).verdict == "falsified"


def test_one_document_with_most_of_the_tokens_is_told_and_decides_nothing():
    """One of 500 documents has 60 % of the tokens: the effective number is two or three."""
    tokens = np.full(500, 100)
    tokens[7] = 1.5 * 100 * 499
    full = ByDocument.from_whole_documents(2.0 * tokens)
    lost = ByDocument.from_whole_documents(2.1 * tokens)
    for arms in ((full, full), (lost, full)):
        verdict = f1(
            PointMeasurements("p", "p", 0.5, {"world": (*arms, ByDocument.from_whole_documents(tokens))}, point().tasks)
        )
        assert (verdict.verdict, verdict.n) == ("inconclusive", 2)
        said = (
            "2 documents, at least 30 are needed; 500 unequal documents count as 2; the largest has 60 % of the tokens"
        )
        assert said in verdict.reason


# --- reasons ------------------------------------------------------------------------------------------------------


def of_documents(each: np.ndarray) -> str:
    """The reason of the perplexity leg if documents of 100 tokens rise by ``each`` nats per token."""
    tokens = ByDocument.from_whole_documents(np.full(len(each), 100))
    full = ByDocument.from_whole_documents(200.0 + np.zeros(len(each)))
    (leg, *_) = f1(
        PointMeasurements("p", "p", 0.5, {"world": (full.with_values(200 + 100 * each), full, tokens)}, point().tasks)
    ).legs
    return f"{leg.outcome}: {leg.reason}"


def noise(n: int) -> np.ndarray:
    """Return noise in nats per token of ``n`` documents, of mean exactly 0."""
    each = 0.004 * np.random.default_rng(3).standard_normal(n)
    return each - each.mean()


def documents_asked_for(reason: str) -> int:
    found = re.search(r"about ([\d,]+) documents would decide it in four of five samples", reason)
    assert found, reason
    return int(found[1].replace(",", ""))


def test_one_ruined_document_asks_for_more_of_its_kind():
    ruined = np.zeros(200)
    ruined[11] = 200 * math.log(1.021)  # all of a rise of 2.1 %
    said = of_documents(ruined)
    assert said.startswith("inconclusive: only 1 of 200 documents differ from the others, too few to resample")
    alone, beside_noise = map(documents_asked_for, (said, of_documents(noise(200) + ruined)))
    assert alone == pytest.approx(beside_noise, rel=0.1)
    assert alone > 2_000, "ten such documents at least"


def test_a_rise_on_the_threshold_is_told_so_and_asks_for_nothing():
    skewed = np.exp(1.5 * np.random.default_rng(2).standard_normal(400))
    skewed *= math.log(1.01) / skewed.mean()
    for each in (skewed, noise(400) + math.log(1.01)):
        assert "too near the threshold for any number of documents" in of_documents(each)


@pytest.mark.parametrize("nats", [300.0, 800.0])
def test_a_rise_of_hundreds_of_nats_is_falsified_with_a_finite_number(nats):
    verdict = f1(PointMeasurements("p", "p", 0.5, {"world": corpus(math.expm1(1.0), spread=0.1)}, point().tasks))
    assert verdict.verdict == "falsified"
    tokens = ByDocument.from_whole_documents(np.full(400, 100))
    full = ByDocument.from_whole_documents(np.full(400, 200.0))
    steep = full.with_values(200 + 100 * (nats + noise(400)))
    leg = f1(PointMeasurements("p", "p", 0.5, {"world": (steep, full, tokens)}, point().tasks)).legs[0]
    assert leg.outcome == "falsified"
    assert math.log1p(leg.estimate) == pytest.approx(min(nats, 700))
    assert ("800 nats per token" in leg.reason) == (nats == 800)
    assert format_quantity(leg.estimate, leg.unit).count("0") < 10  # it fits into a line


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_is_no_number_names_the_document(wrong):
    full = ByDocument.from_whole_documents(np.full(40, 200.0))
    tokens = ByDocument.from_whole_documents(np.full(40, 100))
    broken = full.with_values(np.where(np.arange(40) == 17, wrong, 200.0))
    with pytest.raises(BadArgument, match=r"nll_candidate\[17\]=(nan|inf), but expected a finite number; look at doc"):
        f1(PointMeasurements("p", "p", 0.5, {"world": (broken, full, tokens)}, point().tasks))


def test_a_task_below_the_minimum_of_items_shows_nothing():
    """99 items, 90 of them lost: below the minimum, that is no evidence."""
    verdict = f1(point(lost=(90, 90), items=99))
    assert verdict.verdict == "inconclusive"
    assert "99 items, at least 100 are needed" in verdict.reason
    assert f1(point(lost=(90, 90), items=100)).verdict == "falsified"


@pytest.mark.parametrize("lost", [(), (0,), (500,)])
def test_with_fewer_than_two_tasks_it_cannot_survive_on_perplexity_alone(lost):
    """One task reports its loss and decides nothing: the criterion requires two tasks."""
    verdict = f1(point(lost=lost))
    assert verdict.verdict == "inconclusive"
    leg = next(leg for leg in verdict.legs if leg.name == "p: accuracy on two or more tasks")
    assert leg.outcome == ("inconclusive" if lost else "unmeasured")
    assert leg.estimate == (lost[0] / 1000 if lost else None)
    assert leg.p_falsify is leg.p_survive is None
    if lost:
        assert leg.interval[0] <= leg.estimate <= leg.interval[1]
        assert verdict.why == "name a second task that counts: --emad-tasks"
    assert f1(point(rise=0.05, lost=lost)).verdict == "falsified"


def test_tasks_that_full_depth_does_not_solve_prove_nothing():
    good = point()
    wrong, coin = (
        ByItem.from_independent_items(values) for values in (np.zeros(1000, dtype=bool), np.arange(1000) % 2 == 0)
    )
    poor = replace(good, tasks=good.tasks | dict.fromkeys(list(good.tasks)[1:], TaskAccuracy(wrong, wrong, 0.0, 0.3)))
    verdict = f1(poor)
    assert verdict.verdict == "inconclusive"
    said = " ".join(leg.reason for leg in verdict.legs)
    assert "1 of 3 tasks counts: task1 not solved: 0.0 % right, 0.0 % by guessing; task2 not solved" in said
    guessed = dict.fromkeys("ab", TaskAccuracy(coin, coin, 0.0, 0.3))
    assert f1(replace(good, tasks=guessed)).verdict == "survived"
    assert f1(replace(good, tasks=guessed | {"a": TaskAccuracy(coin, coin, 0.5, 0.3)})).verdict == "inconclusive"


@pytest.mark.parametrize("lost", [0, 970])
def test_one_task_beside_others_on_which_the_rule_never_acts_proves_nothing(lost):
    """A loss of 0 % on inventory survived although facts, chart and code ran at full depth."""
    idle = {name: replace(held, saving=0.0) for name, held in point().tasks.items()}
    verdict = f1(replace(point(), tasks={"inventory": task(lost), **idle}))
    assert verdict.verdict == "inconclusive"
    assert f"worst task that counts: inventory loses {lost / 10:.1f} points at p" in verdict.reason
    standing = {leg.name: leg.reason for leg in verdict.legs}
    assert standing["p: task0"] == "not exercised: saves 0.0 %"
    assert standing["p: inventory"] == ""
    assert "1 of 4 tasks counts" in standing["p: accuracy on two or more tasks"]


@pytest.mark.parametrize(("rise", "verdict"), [(0.001, "survived"), (0.03, "falsified"), (0.0103, "inconclusive")])
def test_the_worst_task_and_its_loss_stand_in_the_reason_whatever_the_verdict(rise, verdict):
    found = f1(point(rise, lost=(0, 60, 0), spread=0.01), point(lost=(0, 5, 0), name="q"))
    assert found.verdict == verdict
    assert found.reason.endswith("; worst task that counts: task1 loses 6.0 points at p")


def test_tasks_that_were_not_to_be_judged_are_not_named_the_worst():
    saving, idle = point(lost=(0, 0, 5)), point(lost=(500, 500, 500), saves=0.1, name="idle")
    assert f1(saving, idle).reason.endswith("task2 loses 0.5 points at p")


@pytest.mark.parametrize(("pvalues", "found"), [([0.04], 0.04), ([0.04, 0.04], 0.04), ([0.01, 0.9], 0.02), ([1, 1], 1)])
def test_partial_conjunctions_are_by_simes(pvalues, found):
    assert simes_pvalue(pvalues) == pytest.approx(found)


def test_simes_of_nothing_is_refused():
    with pytest.raises(BadArgument, match="at least one"):
        simes_pvalue([])


def test_two_of_five_tasks_at_the_threshold_are_falsified_and_survive_at_five_per_cent():
    """The two-task criterion, on independent uniform p-values, decides either way at its level."""
    rng, draws = np.random.default_rng(4), 2_000
    at_threshold = np.sort(rng.random((draws, 5)), axis=1)
    falsified = np.mean([simes_pvalue(p[1:]) <= 0.05 for p in at_threshold])
    survived = np.mean([simes_pvalue([0.0, *p][-2:]) <= 0.05 for p in np.sort(rng.random((draws, 2)), axis=1)])
    assert falsified <= 0.05
    assert survived == pytest.approx(0.05, abs=0.015)  # three standard errors


def test_without_a_corpus_it_cannot_survive():
    bare = replace(point(), perplexity={})
    verdict = f1(bare)
    assert verdict.verdict == "inconclusive"
    assert outcomes(verdict)["p: perplexity"] == "unmeasured"


def test_lossless_exits_survive_and_say_what_they_do_not_exclude():
    tokens = ByDocument.from_whole_documents(np.full(400, 100))
    nll = ByDocument.from_whole_documents(2.0 * tokens.values)
    verdict = f1(PointMeasurements("p", "p", 0.5, {"world": (nll, nll, tokens)}, point().tasks))
    assert verdict.verdict == "survived"
    assert verdict.legs[0].interval is None
    assert "the same in each of 400 documents" in verdict.legs[0].reason
    assert "400 documents cannot exclude that 0.75 % of them fail" in verdict.legs[0].reason


def test_an_unmeasured_task_is_a_leg_that_keeps_the_row_from_surviving():
    told = f1(point(), unmeasured={"humaneval": Absent("it runs generated programs")})
    assert told.verdict == "inconclusive"
    assert told.legs[:-1] == f1(point()).legs
    assert (told.legs[-1].name, told.legs[-1].outcome) == ("task humaneval", "unmeasured")
    assert told.legs[-1].reason == "it runs generated programs"
    idle = f1(point(saves=0.1), unmeasured={"humaneval": Absent("it runs generated programs")})
    assert (idle.verdict, len(idle.legs)) == ("not applicable", 1)
    assert f1(point(rise=0.05), unmeasured={"humaneval": Absent("it runs generated programs")}).verdict == "falsified"


# --- Holm, thresholds, the literal reading ------------------------------------------------------------------------


def test_holm_makes_a_marginal_leg_inconclusive_among_many():
    marginal = next(
        candidate
        for seed in range(200)
        if 0.01
        < (
            leg := f1(candidate := replace(point(), perplexity={"world": corpus(0.016, 40, 0.02, seed)})).legs[0]
        ).p_falsify
        < 0.025
        and leg.outcome == "falsified"
    )
    verdict = f1(marginal, other_legs=20)
    assert verdict.legs[0].outcome == "inconclusive"
    assert "Holm over 22 legs" in verdict.legs[0].reason


def test_gating_legs_decided_elsewhere_make_a_marginal_leg_inconclusive():
    """Legs that may falsify share the error; a leg survives at 5 % on its own beside any number of others."""
    assert f1(point(0.0106, n=200)).verdict == "falsified"
    crowded = f1(point(0.0106, n=200), other_legs=60)
    assert crowded.verdict == "inconclusive"
    assert "after Holm over 62" in " ".join(leg.reason for leg in crowded.legs)
    assert f1(point(0.002)).legs[0].outcome == f1(point(0.002), other_legs=500).legs[0].outcome == "survived"


def test_it_can_falsify_even_where_holm_asks_for_very_small_p_values():
    """With thousands of legs Holm requires p below 1/10,000: the number of bootstrap samples must follow."""
    assert f1(point(rise=0.05), other_legs=3000).verdict == "falsified"


def test_the_registers_thresholds_are_followed():
    strict = replace(F1, thresholds=F1.thresholds | {"perplexity_rise": 0.0001})
    assert f1(point(rise=0.002)).verdict == "survived"
    assert f1(point(rise=0.002), claim=strict).verdict == "falsified"
    eager = replace(F1, thresholds=F1.thresholds | {"flop_reduction": 0.5})
    assert f1(point(rise=0.5), claim=eager).verdict == "not applicable"


def test_the_literal_reading_does_not_gate_and_lists_only_the_worst():
    sweep = [point(rise=0.0, name=f"p{i}") for i in range(12)] + [point(rise=0.05, name="worst")]
    verdict = f1(*sweep, claim=REGISTER["EMAD-F1-literal"], decide=quality.decide_quality_at_every_margin)
    assert not REGISTER["EMAD-F1-literal"].gate
    assert verdict.verdict == "falsified"
    assert len(verdict.legs) == 20
    assert verdict.legs[0].name == "worst: perplexity on world"
    assert verdict.n == 26
    assert "worst 20 of 65 legs" in verdict.reason
    assert deciding_leg_name(verdict.to_json()) == "worst: perplexity on world", "although n counts the judged legs"


# --- measurements -------------------------------------------------------------------------------------------------


def test_the_runs_corpus_and_perplexity_tasks_are_judged_together():
    own, other = corpus(0.0), corpus(0.02)
    held = PointMeasurements("p", "p", 0.5, {"self": own}, point().tasks)
    asked = []

    def corpora(at):
        asked.append(at)
        return {"lm-eval's wikitext": other}

    evidence = SimpleNamespace(
        points=SimpleNamespace(measure_point=lambda loss: held),
        task_scores=SimpleNamespace(published=SimpleNamespace(compute_document_nlls_by_task=corpora)),
    )
    judged = quality.measure_point_on_all_corpora(evidence, SimpleNamespace(point=full_depth(4)))
    assert list(judged.perplexity) == ["self", "lm-eval's wikitext"]
    assert judged.perplexity["self"] is own
    assert judged.tasks is held.tasks
    assert asked == [full_depth(4)]
    assert outcomes(f1(judged))["p: perplexity on lm-eval's wikitext"] == "falsified"
