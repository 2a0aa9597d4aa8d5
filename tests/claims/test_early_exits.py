"""Behaviour shared by all claims about early exits: the premise, the corpus of the verdict, and notes on the items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.errors import RunStopped
from emad_ref.models.loading import LoadedModel, load
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Unsupported
from pytest_emad.claims import early_exit_answers, early_exit_flops, early_exit_settings
from pytest_emad.claims.base import Answer, find_question_of_claim
from pytest_emad.claims.early_exit_answers import (
    RuleComparisons,
    answer_early_exit_claim,
    make_unmet_early_exit_verdict,
)
from pytest_emad.measurements.attachments import AttachedTable
from pytest_emad.measurements.early_exits import EarlyExitMeasurements, ExitScores
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import Study
from pytest_emad.statistics.legs import build_measured_count_leg, verdict_from_legs
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.simulation import asked
from tests.claims.test_simulated_truth import simulations
from tests.small_exits import TUNED, published, somebodys
from tests.unit.tasks.test_datasets import squad_rows, write

PASSAGE = "Ada put the tea in the red box. The red box is in the barn."
SQUAD = squad_rows(PASSAGE, ("What did Ada put?", "the tea"))
SAMSUM = [{"id": "1", "dialogue": "Ada: Tea, two cups?\nBob: Yes.", "summary": "Bob wants two cups of tea."}]
DECIDED = ("EE-1", "EE-3", "EE-7", "EE-9", "EE-13", "EE-15")
ROWS = AttachedTable("rows", [{"one": 1}])


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load(TUNED)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return published(tmp_path, SQUAD, SAMSUM)


@pytest.fixture
def made(bundled: LoadedModel) -> Callable[..., ModelMeasurements]:
    return partial(somebodys, bundled)


def ee(claim: str):
    return asked(claim, np.random.default_rng(0))


def answered(run: ModelMeasurements) -> Answer:
    """Answer a claim without decoding: one measured leg."""

    def verdict() -> Verdict:
        return verdict_from_legs(ee("EE-3").claim, run.name, [build_measured_count_leg("one", 1.0, 1, "blocks")])

    return answer_early_exit_claim(run, ee("EE-3"), verdict, lambda: (ROWS,))


def test_a_verdict_is_kept_under_the_corpus_that_it_was_decided_on(made, data: Path) -> None:
    answer = answered(made(data))
    assert (answer.verdict.verdict, answer.corpus, len(answer.attachments.notes)) == ("measured", "squad+samsum", 2)
    assert answer.attachments.tables == (ROWS,)
    worlds = answered(made(bundled=True))
    assert (worlds.corpus, worlds.attachments.notes) == ("world:pairs", ())
    (data / "squad/validation.jsonl").unlink()
    assert answered(made(data)).corpus == "samsum"


def test_what_was_not_asked_never_stands_for_a_verdict_on_files(made, data: Path) -> None:
    for run, outcome in (
        (made(), "unmeasured"),
        (made(data, trained=False), "not applicable"),
        (made(data, tokenizer=None), "unmeasured"),
    ):
        answer = answered(run)
        assert answer.verdict == make_unmet_early_exit_verdict(run, ee("EE-3"))
        assert (answer.verdict.verdict, answer.corpus) == (outcome, "random tokens")
        assert (answer.attachments.notes, answer.attachments.tables) == ((), ())
        assert answer.fingerprint == run.fingerprint


def test_a_decoder_that_declines_leaves_what_is_known_of_the_items(made, data: Path) -> None:
    def declined() -> Verdict:
        raise Unsupported("no such rule here")

    answer = answer_early_exit_claim(made(data), ee("EE-3"), declined)
    assert (answer.verdict.verdict, answer.verdict.reason) == ("not applicable", "no such rule here")
    assert len(answer.attachments.notes) == 2


def test_a_file_that_does_not_fit_ends_the_run_before_anything_is_decoded(made, data: Path) -> None:
    write(data / "samsum/validation.jsonl", [{"id": "1", "dialogue": " ", "summary": "Nothing."}])
    with pytest.raises(RunStopped, match=r"validation\.jsonl, line 1: dialogue"):
        answer_early_exit_claim(made(data), ee("EE-3"), lambda: pytest.fail("decoded"))


@pytest.mark.parametrize(("claim", "outcome"), [("EE-1", "falsified"), ("EE-4", "measured")])
def test_arithmetic_stands_beside_what_is_unmeasured_and_alone_where_scores_say_nothing(
    made, data: Path, claim: str, outcome: str
) -> None:
    without_files, random = (
        find_question_of_claim(claim).answer(run, ee(claim)) for run in (made(), made(data, trained=False))
    )
    *arithmetic, items = without_files.verdict.legs
    assert (items.name, items.outcome) == ("items", "unmeasured")
    assert "no SQuAD/SamSum files" in items.reason
    assert random.verdict.legs == tuple(arithmetic)
    assert random.verdict.verdict == outcome
    assert without_files.corpus == random.corpus == "random tokens"
    own = {leg.name: leg.outcome for leg in arithmetic if leg.name.endswith("confidence FLOPs")}
    assert len(own) == 8, "two parts at two minimum layers, for this model and the paper's"


def test_a_decoder_only_model_is_told_so_and_not_counted() -> None:
    run = ModelMeasurements(load("emad-nano"), Study(), RunResources())
    for claim in ("EE-1", "EE-4", "EE-13"):
        answer = find_question_of_claim(claim).answer(run, ee(claim))
        assert (answer.verdict.verdict, answer.verdict.legs) == ("not applicable", ())
        assert "a decoder-only model" in answer.verdict.reason
    arithmetic = early_exit_flops.answer_pruning_gain_by_formula(run, ee("EE-8"))
    assert "needs an encoder-decoder model" in arithmetic.verdict.reason
    assert (arithmetic.corpus, arithmetic.fingerprint) == ("", "")


def test_tuning_needs_both_models(made, data: Path) -> None:
    answer = early_exit_answers.answer_earlier_exit_after_finetuning(made(data, name="my-t5"), ee("EE-13"))
    assert answer.verdict.verdict == "not applicable"
    assert "one model before and after tuning" in answer.verdict.reason
    assert answer.corpus == "squad+samsum"


def test_jsd_meets_softmax_response_from_the_layer_on_at_which_it_decides_itself() -> None:
    """Each side of each contest, named after the earliest layer at which its point allows an exit."""
    sides: list[OperatingPoint] = []

    def answered(task: str, rule: str, minimum: int) -> Any:
        sides.append(EarlyExitMeasurements.make_point(exits, rule, minimum))  # type: ignore[arg-type]  # as far as a point needs it
        return SimpleNamespace(exited=sides[-1])

    exits = SimpleNamespace(
        subject=SimpleNamespace(stepper=SimpleNamespace(layers=24, vocabulary_size=32_128)),
        solved_task_layer_pairs=[("qa", 7), ("qa", 19)],
        answer_by_rule=answered,
    )
    contests = list(early_exit_answers.iterate_jsd_comparisons(exits))  # type: ignore[arg-type]

    def earliest(point: OperatingPoint) -> int:
        return min(layer for layer, least in zip(point.probes, point.thresholds[0], strict=True) if least < 1)

    assert [earliest(each.ours) for each in contests] == [8, 7, 20, 19]
    assert [earliest(each.theirs) for each in contests] == [8, 7, 20, 19]
    assert [each.ours.confidence.emit for each in contests] == ["contrastive", "expert"] * 2
    assert {each.ours.signal for each in contests} == {"jsd_contrast"}
    assert {each.theirs.signal for each in contests} == {"softmax_response"}


def recorded_exits(asked: list[tuple[str, str, int, float]]) -> Any:
    """Return exits of a model of 24 layers that note (task, rule, minimum, λ), and answer with that tuple's number."""

    def answered(task: str, rule: str, minimum: int, threshold: float = 0.9) -> Any:
        asked.append((task, rule, minimum, threshold))
        return SimpleNamespace(exited=len(asked) - 1)

    return SimpleNamespace(
        subject=SimpleNamespace(stepper=SimpleNamespace(layers=24, vocabulary_size=32_128)),
        solved_task_names=["squad", "samsum", "count"],
        solved_task_layer_pairs=[("squad", 7), ("squad", 19), ("samsum", 7), ("samsum", 19)],
        minimum_exit_layers=(7, 19),
        absent_by_task={},
        unsolved_by_task={},
        answer_by_rule=answered,
        find_layer_of_lowest_confidence={"squad": 4, "samsum": Absent("lowest after the first layer")}.get,
        models_before_and_after_tuning=Absent("no twin"),
    )


def test_settings_compare_what_the_paper_says_with_what_it_replaces() -> None:
    asked: list[tuple[str, str, int, float]] = []
    found = early_exit_settings.gather_settings(recorded_exits(asked))

    def sides(given: RuleComparisons) -> list[tuple[Any, Any]]:
        return [(asked[each.ours], asked[each.theirs]) for each in given.contests]  # type: ignore[call-overload]  # numbers of the stand-in

    assert sides(found.lowered) == [
        ((task, "softmax", 7, 0.5), (task, "softmax", 7, 0.9)) for task in ("squad", "samsum")
    ]
    assert sides(found.since_lowest) == [(("squad", "softmax", 4, 0.9), ("squad", "softmax", 1, 0.9))]
    assert list(found.absent_layers) == ["samsum"]
    assert sides(found.adaptive) == [
        (("squad", rule, 7, 0.9), ("squad", "softmax", 7, 0.9))
        for rule in ("JSD, adaptive", "JSD, adaptive, plausible")
    ]
    assert found.lost == Absent("no twin")


def test_table_1_takes_the_mean_of_each_item_over_its_five_minimum_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int, float]] = []
    monkeypatch.setattr(early_exit_answers, "mean_exit_scores", lambda each: [asked[one] for one in each])
    found = list(early_exit_answers.iterate_mean_exit_comparisons(recorded_exits(asked)))
    rivals = ("JSD, fixed", "JSD, decaying")
    each = [(task, rival) for task in ("squad", "samsum") for rival in rivals]
    minima = (15, 17, 18, 19, 20)
    for comparison, (task, rival) in zip(found, each, strict=True):
        assert comparison.ours == [(task, "JSD, adaptive", minimum, 0.9) for minimum in minima]
        assert comparison.theirs == [(task, rival, minimum, 0.9) for minimum in minima]


def test_a_mean_over_settings_is_of_each_items_score_and_exit() -> None:
    """Two items under two settings, with (score, Σ depth, tokens)."""
    first, second = (
        ExitScores(*(ByItem(np.array(column), np.arange(2)) for column in columns))
        for columns in (([1.0, 0.0], [8.0, 30.0], [4, 10]), ([0.0, 0.0], [8.0, 10.0], [2, 10]))
    )
    mean = early_exit_answers.mean_exit_scores([first, second])
    assert mean.score.values.tolist() == [0.5, 0.0]
    assert mean.mean_exit_by_item.values.tolist() == [3.0, 2.0]


def test_summaries_are_also_asked_where_the_paper_gains_most() -> None:
    found = early_exit_answers.gather_contrastive_scores(full_depth_beside(recorded_exits([])))
    assert [each.where for each in found.contests] == [
        "squad, j=7", "squad, j=19", "samsum, j=7", "samsum, j=19", "samsum, j=17",
    ]  # fmt: skip


def full_depth_beside(exits: Any) -> Any:
    """Return ``exits`` that also answer at full depth."""
    exits.full_depth_point, exits.answer_at_point = None, lambda task, point: SimpleNamespace(exited=None)
    return exits


@pytest.mark.parametrize("claim", [claim for claim in DECIDED if claim != "EE-7"])
def test_a_task_that_the_model_does_not_solve_takes_no_part(claim: str) -> None:
    found, decide = survives(claim), find_question_of_claim(claim).decide
    told = {"qa": Absent("not solved: full depth scores 0.100, an honest guess 0.200", "premise")}
    verdict = decide(having(found, unsolved=told), ee(claim))
    assert verdict.verdict == "survived"
    (leg,) = [leg for leg in verdict.legs if leg.name == "qa"]
    assert (leg.outcome, leg.reason) == ("not applicable", told["qa"].reason)


def test_the_papers_formula_needs_no_items(made) -> None:
    answer = early_exit_flops.answer_pruning_gain_by_formula(made(), ee("EE-8"))
    assert (answer.verdict.verdict, answer.corpus) == ("falsified", "")
    bounds = [leg.estimate for leg in answer.verdict.legs if "bound" in leg.name]
    assert bounds == pytest.approx([12.0, 24 / 7, 24 / 19])


def survives(claim: str) -> Any:
    """Return the first simulated case of ``claim``, which holds."""
    case = simulations()[claim][0]
    assert case.truth == "holds"
    return case.found(np.random.default_rng(0))


def having(found: Any, **facts: Any) -> Any:
    """Return ``found`` with some tasks removed; EE-3 stores judged and shown tasks apart, EE-7 is a tuple."""
    if not isinstance(found, tuple):
        return replace(found, **facts)
    return (*found[:2], facts["missing"]) if isinstance(found[0], dict) else (replace(found[0], **facts), found[1])


@pytest.mark.parametrize("claim", DECIDED)
def test_a_task_that_was_not_asked_cannot_have_survived(claim: str) -> None:
    found, decide = survives(claim), find_question_of_claim(claim).decide
    assert decide(found, ee(claim)).verdict == "survived"
    verdict = decide(having(found, missing={"samsum": Absent("no file")}), ee(claim))
    assert verdict.verdict == "inconclusive"
    (leg,) = [leg for leg in verdict.legs if leg.name == "samsum"]
    assert (leg.outcome, leg.reason) == ("unmeasured", "no file")


@pytest.mark.parametrize("claim", DECIDED)
def test_fewer_items_than_the_register_asks_for_decide_nothing(claim: str) -> None:
    more = replace(ee(claim).claim, minimum={"items": 1000})
    verdict = find_question_of_claim(claim).decide(survives(claim), replace(ee(claim), claim=more))
    assert verdict.verdict == "inconclusive"
    assert any("at least 1000 are needed" in leg.reason for leg in verdict.legs)


@pytest.mark.parametrize("claim", DECIDED)
def test_legs_decided_elsewhere_share_the_error(claim: str) -> None:
    """With so many other legs no p-value here is small enough to falsify; a leg that survives shares no error."""

    def legs(found: Any, outcome: str, other_legs: int = 0) -> list[str]:
        verdict = find_question_of_claim(claim).decide(found, replace(ee(claim), other_legs=other_legs))
        return [leg.name for leg in verdict.legs if leg.outcome == outcome and leg.p_falsify is not None]

    failing = [case.found(np.random.default_rng(0)) for case in simulations()[claim] if case.truth == "fails"]
    assert any(legs(found, "falsified") for found in failing)
    assert not any(legs(found, "falsified", 10**40) for found in failing)
    holding = survives(claim)
    assert legs(holding, "survived") == legs(holding, "survived", 10**40) != []
