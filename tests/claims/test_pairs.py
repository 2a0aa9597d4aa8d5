"""Claims about a pair beyond ``decide``: premises, counts taken from records, and refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule
from emad_ref.models.loading import load
from emad_ref.protocol import Unsupported
from pytest_emad.audit.finding import AuditRefutedError
from pytest_emad.claims import speculation, switching
from pytest_emad.claims.base import RunPlan, answer_question, find_question_of_claim
from pytest_emad.measurements.pair_answers import TEXTS
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.pair_routing import PAPER, RuleMixtureScores, SwitchingConstants
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import PairNames, PairSampleSizes, Study
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import load_register
from tests.claims.pair_items import right
from tests.claims.simulation import asked

ROUTED = ("EAD-F1", "EAD-F2", "EAD-A1", "EAD-A2", "EAD-A3", "EAD-A4", "EAD-A6")
SPECULATING = ("EMAD-E8", "EMAD-R5")
FEW = PairSampleSizes(compared=2, tried=2, thresholds=15, judged=8, calibrate=4, reported=2)


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def pair(**holders) -> SimpleNamespace:
    return SimpleNamespace(name="small + large", corpus="world tasks", fingerprint="a+b", **holders)


NOISE = SimpleNamespace(absent_quality=Absent("random weights", "premise"))


# ------------------------------------------------------------ premises


@pytest.mark.parametrize("claim", ROUTED)
def test_a_pair_with_nothing_to_route_is_not_judged(claim) -> None:
    rules = SimpleNamespace(absent_premise=lambda: Absent("there is nothing to route", "premise"))
    useless = pair(routing_rules=rules, models=NOISE)
    answer = answer_question(find_question_of_claim(claim), useless, asked(claim, rng()))
    assert (answer.verdict.verdict, answer.verdict.reason) == ("not applicable", "there is nothing to route")
    assert (answer.corpus, answer.fingerprint) == ("world tasks", "a+b")


@pytest.mark.parametrize("claim", ROUTED)
def test_a_pair_that_nobody_asked_anything_is_unmeasured(claim) -> None:
    rules = SimpleNamespace(absent_premise=lambda: Absent("no task"))
    unasked = pair(routing_rules=rules, models=NOISE)
    answer = answer_question(find_question_of_claim(claim), unasked, asked(claim, rng()))
    assert (answer.verdict.verdict, answer.verdict.reason) == ("unmeasured", "no task")


@pytest.mark.parametrize("claim", ["EAD-A3", "EAD-A4", "EAD-A6"])
def test_tokens_of_options_are_nobodys(claim) -> None:
    rules = SimpleNamespace(
        absent_premise=lambda: None,
        tasks_worth_routing=["arc_easy"],
        written_tasks_worth_routing=[],
    )
    answer = answer_question(find_question_of_claim(claim), pair(routing_rules=rules), asked(claim, rng()))
    assert answer.verdict.verdict == "not applicable"
    assert "arc_easy: options are read, no token is emitted" in answer.verdict.reason


def test_divergent_tokens_are_those_that_the_small_model_would_not_write() -> None:
    """EAD is read at their share, on the large model's own answers."""
    asked_of, shares = [], []
    own = SimpleNamespace(right=ByItem.from_independent_items(np.array([True, False])), emitted=np.array([3, 2]))

    def mixture(task: str, share: float) -> SimpleNamespace:
        shares.append(share)
        return SimpleNamespace(score=own.right.with_values(np.array([0.5, 0.0])), name="rules")

    def masks(model: int, *items: object) -> list[np.ndarray]:
        asked_of.append(model)
        return [np.array([True, False, True]), np.array([False, True])]

    rules = SimpleNamespace(
        absent_premise=lambda: None,
        tasks_worth_routing=["facts"],
        written_tasks_worth_routing=["facts"],
        answer_judged_items_alone=lambda model, task: asked_of.append(model) or own,
        evaluate_mixture_at_large_share=mixture,
    )
    routed = pair(
        routing_rules=rules,
        answers=SimpleNamespace(make_greedy_choice_masks=masks),
        size=SimpleNamespace(judged=2),
    )
    answer = answer_question(find_question_of_claim("EAD-A6"), routed, asked("EAD-A6", rng()))
    assert (asked_of, shares) == ([LARGE, SMALL], [2 / 5])
    lost, divergent, score = (leg.estimate for leg in answer.verdict.legs)
    assert (lost, divergent, score) == (0.25, 2 / 5, 0.5)


@pytest.mark.parametrize("claim", SPECULATING)
def test_weights_without_quality_are_not_judged(claim) -> None:
    answer = answer_question(find_question_of_claim(claim), pair(models=NOISE), asked(claim, rng()))
    assert (answer.verdict.verdict, answer.verdict.reason) == ("not applicable", "random weights")


@pytest.mark.parametrize("claim", [*ROUTED, *SPECULATING])
def test_a_decoder_that_declines_makes_the_claim_not_applicable(claim) -> None:
    def declines() -> str:
        raise Unsupported("no session")

    class Declining:
        absent_quality = property(lambda self: declines())

    declined = pair(routing_rules=SimpleNamespace(absent_premise=declines), models=Declining())
    answer = answer_question(find_question_of_claim(claim), declined, asked(claim, rng()))
    assert (answer.verdict.verdict, answer.verdict.reason) == ("not applicable", "no session")


def test_the_headline_is_asked_of_names_alone() -> None:
    names = PairNames("no such model", "nor this one")
    answer = answer_question(find_question_of_claim("EAD-H1"), names, replace(asked("EAD-H1", rng()), model=names.name))
    assert (answer.verdict.verdict, answer.verdict.model) == ("survived", "no such model + nor this one")
    assert (answer.corpus, answer.fingerprint) == ("", "")


@pytest.mark.parametrize("claim", ["EAD-H1", *ROUTED, *SPECULATING])
def test_a_pair_is_judged_once_however_many_models_a_run_judges(claim) -> None:
    plan, question = RunPlan(load_register(), Study(), models=5), find_question_of_claim(claim)
    assert question.about == ("names" if claim == "EAD-H1" else "pair")
    assert plan._decisions_per_run(question) == 1
    assert plan._decisions_per_run(replace(question, about="model")) == 5


@pytest.mark.parametrize(("trained", "corpus"), [(True, "world tasks"), (False, TEXTS)])
def test_what_catching_up_costs_needs_no_score(trained, corpus) -> None:
    """Without a task that distinguishes the models, and without trained weights."""
    names = ("emad-nano", "emad-tiny")
    small, large = map(load, names)
    loaded = replace(small, trained=trained), replace(large, trained=trained)
    alike = PairMeasurements(*loaded, Study(), RunResources(), names=names, savings=(0.415, 0.67), size=FEW)
    alike.routing_rules.comparisons = {}
    answer = answer_question(find_question_of_claim("EAD-H2"), alike, asked("EAD-H2", rng()))
    assert (answer.verdict.verdict, answer.corpus) == ("measured", corpus)
    assert answer.verdict.n == FEW.judged
    shares = [leg.estimate for leg in answer.verdict.legs if leg.name.endswith("by token share")]
    assert 1 <= len(shares) <= 2
    assert answer.verdict.legs[0].name.endswith("token share less FLOPs executed")


@pytest.mark.slow  # half a minute of timing
def test_time_needs_no_score_and_decides_nothing_without_one() -> None:
    """If no task distinguishes the models, the ratios are reported for the rule nearest to the wanted saving."""
    names = ("emad-nano", "emad-tiny")
    alike = PairMeasurements(*map(load, names), Study(), RunResources(), names=names, savings=(0.415, 0.67), size=FEW)
    alike.routing_rules.comparisons = {}
    answer = answer_question(find_question_of_claim("EAD-F2"), alike, asked("EAD-F2", rng()))
    assert answer.verdict.verdict == "not applicable"
    assert "there is nothing to route" in answer.verdict.reason
    assert [leg.outcome for leg in answer.verdict.legs] == ["measured"] * 9
    wall, assisted, flops, lookup, *speeds = answer.verdict.legs
    assert (wall.name, flops.name) == ("wall-clock", "FLOPs")
    assert assisted.name == "wall-clock, against assisted generation"
    assert lookup.name == "wall-clock, against prompt lookup"
    spent = {
        arm: alike.models.compute_flops_per_decoding(alike.latency.switching_timings.outputs[arm]).sum()
        for arm in ("EAD", "speculative")
    }
    assert flops.estimate == pytest.approx(spent["speculative"] / spent["EAD"], rel=1e-9)
    arms = ("large", "EAD", "speculative", "assisted", "prompt lookup")
    assert [leg.name for leg in speeds] == [f"{arm}: tokens per second" for arm in arms]
    assert alike.latency.timed_switching_rule == alike.routing_rules.find_rule_nearest_saving(
        alike.latency.task_to_time, 0.415
    )
    (note,) = answer.attachments.notes
    assert note.startswith("emad-nano + emad-tiny: timed large, speculative, EAD, assisted, prompt lookup, ")
    assert note.endswith("30 pairs in this process alone (the budget smoke starts no others)")


# ------------------------------------------------------------ rules that no simulation covers


def test_one_result_without_a_rule_keeps_the_other_from_surviving() -> None:
    alone, switched = right(rng(), 300, 0.8, 0.0, 0.3)
    kept = RuleMixtureScores("rules", switched, switched, 0.41, (0.4, 0.5)), alone
    found = switching.SwitchingScoreEvidence({("task", "llama"): kept, ("task", "qwen"): None})
    verdict = switching.decide_switching_score(found, asked("EAD-F1", rng()))
    assert [leg.outcome for leg in verdict.legs] == ["survived", "measured", "unmeasured"]
    assert verdict.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("claim", "constants", "compared"),
    [
        ("EAD-A1", PAPER, [1, 2, 10, 20]),
        ("EAD-A1", SwitchingConstants(2, 2), [1, 5, 10, 20]),
        ("EAD-A2", PAPER, [1, 5, 20, 40]),
        ("EAD-A2", SwitchingConstants(5, 7), [1, 5, 10, 20, 40]),  # shortened: the paper's value is another
    ],
)
def test_no_value_is_compared_with_itself_and_all_at_one_saving(claim, constants, compared) -> None:
    score, savings = ByItem.from_independent_items(np.array([1.0, 0.5, 0.0])), []

    def routed(task, saving, varied):
        savings.append((saving, varied))
        return SimpleNamespace(score=score)

    rules = SimpleNamespace(
        absent_premise=lambda: None, tasks_worth_routing=["task"],
        scale_paper_constants=lambda task: constants,
        evaluate_mixture_at_saving=routed,
        select_rule_for_paper_saving=lambda task: SwitchingRule(0.3, constants.window, constants.least_run),
        answer_judged_items=lambda rule, task: SimpleNamespace(large_share=0.5),
    )  # fmt: skip
    answer = answer_question(
        find_question_of_claim(claim), pair(routing_rules=rules, savings=(0.415, 0.67)), asked(claim, rng())
    )
    lost = [leg.name for leg in answer.verdict.legs if "score lost" in leg.name]
    assert [int(name.split(" = ")[1].split()[0]) for name in lost] == compared
    assert {saving for saving, _ in savings} == {0.415}
    assert len(savings) == len(compared) + 1


def test_tokens_are_decisive_by_their_own_entropy_and_wrong_by_the_large_models_choice() -> None:
    """The small model is 0. First item: high small wrong, high large, low small right. Second: low small wrong."""
    walks = (
        SimpleNamespace(entropy_bits=np.array([0.5, 0.9, 0.1]), model=np.array([0, 1, 0])),
        SimpleNamespace(entropy_bits=np.array([0.49]), model=np.array([0])),
    )
    done = SimpleNamespace(walks=walks, right=ByItem(np.array([True, False]), np.array([7, 7])))
    agrees = [np.array([False, False, True]), np.array([False])]
    found = switching.count_high_entropy_token_errors("task", done, agrees, threshold_bits=0.5)
    assert found.wrong.cluster.tolist() == [7, 7], "items of a cluster stay together"
    columns = (found.decisive, found.decisive_small, found.wrong, found.calm, found.calm_wrong)
    assert [column.values.tolist() for column in columns] == [[2, 0], [1, 0], [1, 0], [1, 1], [0, 1]]


def test_gates_whose_mixtures_score_best_are_judged(monkeypatch) -> None:
    """The corners of validation's front: a mixture below the line between its neighbours is not judged."""
    tried = {(2, None): (0.3, 0.8), (8, None): (0.4, 0.8), (2, 2.0): (0.1, 0.5), (8, 2.0): (0.2, 0.6)}

    def gated(k, gate_bits, task, split, count):
        assert (split, count) == ("validate", FEW.tried)
        share, score = tried[k, gate_bits]
        return SimpleNamespace(large_share=share, mean_score=score)

    alone = SimpleNamespace(large_share=1.0, mean_score=0.8)
    monkeypatch.setattr(switching, "choose_entropy_gates", lambda pair, task: [None, 2.0])
    answering = pair(
        answers=SimpleNamespace(answer_by_speculation_without_flops=gated, answer_by_one_model=lambda *asked: alone),
        size=FEW,
    )
    assert switching.find_pareto_gate_options(answering, "task") == [(0, None), (2, None), (2, 2.0)]


def test_gates_keep_no_refused_draft_some_or_every_one() -> None:
    drafts = (np.array([0.3, 2.5]), np.array([1.0]))
    answers = SimpleNamespace(answer_by_speculation_without_flops=lambda *asked: SimpleNamespace(entropy_bits=drafts))
    answering = pair(answers=answers, size=FEW, models=SimpleNamespace(vocabulary=512))
    none, middle, _, every = switching.choose_entropy_gates(answering, "task")
    assert none is None
    assert middle == 1.0
    assert every > 9.0, "a gate refuses entropies at or above it; 512 tokens have at most 9 bits"


# ------------------------------------------------------------ E8: the output is the verifier's own


@pytest.fixture(scope="module")
def bundled() -> PairMeasurements:
    names = ("emad-nano", "emad-tiny")
    made = PairMeasurements(*map(load, names), Study(), RunResources(), names=names, savings=(0.415,), size=FEW)
    made.routing_rules.comparisons = {
        "inventory": SimpleNamespace(is_worth_routing=True, gap=SimpleNamespace(value=1.0))
    }
    return made


def test_adaptive_depth_is_timed_only_behind_the_same_output(bundled) -> None:
    answer = answer_question(find_question_of_claim("EMAD-E8"), bundled, asked("EMAD-E8", rng()))
    assert answer.verdict.verdict == "measured"
    assert answer.verdict.n == FEW.reported
    assert {leg.estimate for leg in answer.verdict.legs if "verifier's own" in leg.name} == {speculation.CHECKED}
    assert answer.attachments.notes == (), "no tie on this text"


class Lying:
    """Speculation that changes one token of the last row."""

    def __init__(self, decoder):
        self._decoder = decoder

    def generate(self, prompts, new, stop):
        record = self._decoder.generate(prompts, new, stop)
        emitted = [tokens.copy() for tokens in record.emitted]
        emitted[-1][2] += 1
        return replace(record, emitted=emitted)


def test_an_untied_difference_cannot_be_missed(bundled, monkeypatch) -> None:
    """The value is neither a number nor a verdict: reading it fails before anything is timed."""
    own = speculation.make_speculative_decoder
    monkeypatch.setattr(speculation, "make_speculative_decoder", lambda draft, verifier: Lying(own(draft, verifier)))
    monkeypatch.setattr(bundled.latency, "time_arms", lambda arms, pairs: pytest.fail("timed all the same"))
    with pytest.raises(AuditRefutedError, match=r"row 3, new token 2: .* and no tie excuses it"):
        answer_question(find_question_of_claim("EMAD-E8"), bundled, asked("EMAD-E8", rng()))
