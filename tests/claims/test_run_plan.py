"""How a run decides a claim: refusals, results of other claims that it needs, and the run's Holm family."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from emad_ref.protocol import Unsupported
from emad_ref.text.world import TASKS
from pytest_emad.claims import base
from pytest_emad.claims.base import Answer, ClaimContext, Question, RunPlan, answer_question, find_question_of_claim
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.statistics.legs import build_measured_count_leg
from pytest_emad.statistics.rates import RESAMPLES
from pytest_emad.statistics.verdicts import load_register

CLAIM = load_register()["EMAD-E5"]


@dataclass(frozen=True)
class Simulated:
    """Simulated measurements for any claim."""

    name: str = "simulated"
    corpus: str = "made up"
    fingerprint: str = "abc"


def context() -> ClaimContext:
    return ClaimContext(CLAIM, "simulated", np.random.default_rng(0))


def test_what_a_decoder_declines_is_not_applicable_and_refused() -> None:
    def answer(evidence: Simulated, asked: ClaimContext) -> Answer:
        raise Unsupported("only lowers depth")

    found = answer_question(Question("EMAD-E5", "model", answer), Simulated(), context())
    assert found.verdict.verdict == "not applicable"
    assert found.verdict.reason == found.refused.reason == "only lowers depth"
    assert (found.corpus, found.fingerprint) == ("made up", "abc")


def test_what_is_lacking_decides_whether_a_claim_applies() -> None:
    premise, data = context().lacking(Absent("no exits", "premise")), context().lacking(Absent("no files"))
    assert (premise.verdict, premise.reason, premise.why) == ("not applicable", "no exits", "no exits")
    assert (data.verdict, data.reason, data.legs) == ("unmeasured", "no files", ())
    leg = build_measured_count_leg("time", 1.0, 3, "s")
    assert context().lacking(Absent("no files"), [leg]).legs == (leg,)


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_who_declines_says_why(reason: object) -> None:
    with pytest.raises(BadArgument, match="expected a sentence"):
        Unsupported(reason)  # type: ignore[arg-type]


def test_other_errors_are_not_swallowed() -> None:
    def answer(evidence: Simulated, asked: ClaimContext) -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        answer_question(Question("EMAD-E5", "model", answer), Simulated(), context())


def test_a_row_without_a_question_is_named_with_the_way_to_add_one() -> None:
    with pytest.raises(BadArgument, match=r"claim='EMAD-X9'.*own-claim"):
        find_question_of_claim("EMAD-X9")


# ------------------------------------------------------------ the plan of a run

REGISTER = load_register()
LAYERS = 12
RUN = Study()
# Legs of one model of twelve layers, smoke budget, without a named margin or tasks: counted by hand where their number
# follows from several settings. Rows not listed here are covered by their simulation.
LEGS = {
    "EMAD-F1": 4, "EMAD-F1-literal": 66, "EMAD-F2": 5, "EMAD-E1": 11, "EMAD-E4": 8, "EMAD-E6": 7, "EMAD-E7": 2,
    "EMAD-E9": 2, "EMAD-E10": 1 + len(TASKS), "EMAD-E12": 1, "EMAD-N1": 2, "EMAD-R1": 4, "EMAD-R2": 4, "EMAD-R3": 4,
    "EMAD-R4": 4, "EMAD-R5": 7, "EE-1": 6, "EE-3": 24, "EE-7": 3, "EE-9": 16, "EE-13": 6, "EE-15": 7, "EE-16": 10,
    "EAD-F1": 10, "EAD-F2": 3, "EMAD-X1": 1, "EMAD-X2": 3, "EMAD-X3": 5, "EMAD-X4": 3, "EMAD-X7": 1,
}  # fmt: skip


def other_legs(claim: str, study: Study = RUN, **docket: Any) -> int:
    return RunPlan(REGISTER, study, **docket).count_other_legs(claim, LAYERS)


@pytest.mark.parametrize("claim", REGISTER)
def test_every_row_counts_its_legs(claim: str) -> None:
    counted = find_question_of_claim(claim).legs(RUN, LAYERS)
    assert counted == LEGS.get(claim, counted)
    assert (counted > 0) == bool(REGISTER[claim].minimum), "a row with a smallest n has statistical legs, and no other"


def test_the_two_falsifiers_count_each_other() -> None:
    assert other_legs("EMAD-F1") == 2 * len(RUN.budget.batch_sizes) + 1 == 5, "prompt lookup takes one row"
    assert other_legs("EMAD-F2") == 2 * 2


def test_a_named_margin_is_one_more_point_and_a_task_may_be_one_more_corpus() -> None:
    assert other_legs("EMAD-F2", Study(margin=0.1)) == 2 * 3
    assert other_legs("EMAD-F2", Study(tasks=frozenset({"wikitext"}))) == 3 * 2
    assert other_legs("EMAD-F2", Study(tasks=frozenset({"ai2_arc"}))) == 4 * 2, "a tag counts each of its two tasks"


def test_larger_budgets_time_more_batch_sizes() -> None:
    assert other_legs("EMAD-F1", Study(budget=BUDGETS["full"])) == 3 * 3 + 1, "plus a compiled baseline"
    assert other_legs("EMAD-F1", Study(device="cuda")) == 2 * 3 + 1


def test_every_model_of_the_run_has_legs() -> None:
    assert other_legs("EMAD-F1", models=2) == 5 + 4 + 5
    assert other_legs("EMAD-F2", models=2) == 4 + 4 + 5


def test_a_pair_is_decided_once_however_many_models_a_run_judges() -> None:
    gated = {"gate_claims": frozenset({"EMAD-R5"})}
    assert other_legs("EMAD-F1", **gated) == 5 + 7
    assert other_legs("EMAD-F1", models=2, **gated) == 5 + 4 + 5 + 7


def test_rows_that_do_not_gate_stand_alone_until_the_user_gates_them() -> None:
    assert other_legs("EMAD-E1") == 0
    gated = {"gate_claims": frozenset({"EMAD-E1"})}
    assert other_legs("EMAD-E1", **gated) == 4 + 5
    assert other_legs("EMAD-F1", **gated) == 5 + 11


class OneModel:
    """Measurements of which a claim reads only the name."""

    name, corpus, fingerprint = "m", "text", "f00d"


def counting(monkeypatch: pytest.MonkeyPatch, refusal: str = "") -> list[ClaimContext]:
    """Record the contexts in which EMAD-F1 is decided; with ``refusal``, the decoder declines it."""
    decided: list[ClaimContext] = []

    def answer(evidence: OneModel, asked: ClaimContext) -> Answer:
        decided.append(asked)
        if refusal:
            raise Unsupported(refusal)
        return Answer(asked.not_applicable(f"drawn {asked.rng.random()}"))

    rows = {**base._own_questions(), "EMAD-F1": replace(find_question_of_claim("EMAD-F1"), answer=answer)}
    monkeypatch.setattr(base, "_own_questions", lambda: rows)
    return decided


def test_a_claim_that_another_needs_is_decided_once_as_the_run_would_report_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decided, plan, model = counting(monkeypatch), RunPlan(REGISTER, RUN, frozenset({"EMAD-R5"})), OneModel()
    needed = plan.make_context("EMAD-R5", "small + m", LAYERS).verdict_of("EMAD-F1", model)
    assert plan.make_context("EMAD-F2", "m", LAYERS).verdict_of("EMAD-F1", model) is needed
    assert plan.answer_claim("EMAD-F1", model, LAYERS).verdict is needed
    (asked,) = decided
    own = plan.make_context("EMAD-F1", "m", LAYERS)
    assert (asked.claim, asked.model, asked.other_legs) == (own.claim, own.model, own.other_legs)
    assert needed.reason == f"drawn {own.rng.random()}", "the same resamples: the same verdict"
    assert plan.answer_claim("EMAD-F1", OneModel(), LAYERS).verdict is not needed, "another model has its own verdict"


def test_a_refusal_is_decided_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal reaches the run and every claim that needs EMAD-F1: the decoder declined."""
    decided, plan, model = counting(monkeypatch, "only lowers depth"), RunPlan(REGISTER, RUN), OneModel()
    assert plan.answer_claim("EMAD-F1", model, LAYERS).refused.reason == "only lowers depth"
    with pytest.raises(Unsupported, match="only lowers depth"):
        plan.make_context("EMAD-F2", "m", LAYERS).verdict_of("EMAD-F1", model)
    assert len(decided) == 1


def test_answers_go_with_the_measurements_that_they_were_decided_on(monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, "only lowers depth")
    plan, model = RunPlan(REGISTER, RUN), OneModel()
    plan.answer_claim("EMAD-F1", model, LAYERS)
    freed = ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_a_claim_hears_of_those_alone_that_it_needs() -> None:
    asked = RunPlan(REGISTER, RUN).make_context("EMAD-F2", "m", LAYERS)
    with pytest.raises(BadArgument, match=r"claim='EMAD-X1'.*needs of the question of EMAD-F2"):
        asked.verdict_of("EMAD-X1", OneModel())
    with pytest.raises(BadArgument, match=r"claim='EAD-F1'.*needs"):
        asked.row_of("EAD-F1")


def test_what_a_claim_needs_is_a_row_and_needs_no_circle() -> None:
    needs = {claim: set(find_question_of_claim(claim).needs) for claim in REGISTER}
    needed = set().union(*needs.values())
    assert needed == {"EMAD-F1", "EMAD-X1", "EAD-F1"}
    assert not any(needs[claim] for claim in needed)


def test_outside_a_run_no_other_claim_is_decided() -> None:
    alone = ClaimContext(REGISTER["EMAD-F2"], "m", np.random.default_rng(0))
    with pytest.raises(BadArgument, match=r"claim='EMAD-F1'.*RunPlan"):
        alone.verdict_of("EMAD-F1", OneModel())


def test_the_samples_drawn_by_default_reach_the_smallest_level_of_a_run_that_gates_every_row() -> None:
    """Two models: about three hundred legs, so Holm requires p ≤ 5 % / 300 of the first."""
    docket = RunPlan(REGISTER, RUN, frozenset(REGISTER), models=2)
    family = docket.count_other_legs("EMAD-E9", LAYERS) + find_question_of_claim("EMAD-E9").legs(RUN, LAYERS)
    assert family > 250
    assert family * 20 <= RESAMPLES + 1


def test_every_question_draws_from_the_studys_seed() -> None:
    docket = RunPlan(REGISTER, Study(seed=3))
    drawn = [docket.make_context(claim, "m", LAYERS).rng.random() for claim in ("EMAD-E9", "EMAD-R1")]
    assert drawn == [np.random.default_rng(3).random()] * 2


def test_a_row_that_takes_long_waits_for_a_larger_budget_unless_it_gates() -> None:
    waiting = {name for name in REGISTER if find_question_of_claim(name).budget != "smoke"}
    pair = {name for name in REGISTER if find_question_of_claim(name).about == "pair"}
    exits = {f"EMAD-X{number}" for number in range(1, 9)}
    engines = {name for name in REGISTER if name.startswith("ENG-")}
    assert waiting == {"EMAD-E7", "EMAD-E12"} | exits | pair | engines, "a default run takes the sum of their times"
    assert not any(REGISTER[name].gate for name in waiting), "a waiting gate would pass without a decision"
