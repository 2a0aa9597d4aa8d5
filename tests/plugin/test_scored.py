"""Published tasks beside the world's own: what is scored, how it is paired, and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.models.loading import Loaded, load
from emad_ref.point import full_depth
from emad_ref.policy.thresholds import fixed_entropy
from emad_ref.verdict.claims import Leg, load_register
from emad_ref.verdict.judge import PointEvidence
from emad_ref.verdict.legs import not_applicable, row
from pytest_emad import harnessed
from pytest_emad.harnessed import report_tasks
from pytest_emad.options import BUDGETS, Settings
from pytest_emad.session import Evidence
from pytest_emad.stopping import RunStopped
from tests.decoders.foreign import ForeignDecoder
from tests.unit.tasks.test_datasets import write, write_folder

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
from emad_ref.tasks.evaluation import evaluate_tasks
from emad_ref.tasks.harness import EmadLM

EARLY = fixed_entropy(4, (1, 2, 3), 1.0)
FULL = full_depth(4)
SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip

Make = Callable[..., Evidence]


@pytest.fixture(scope="module")
def nano() -> Loaded:
    return load("emad-nano")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("data"))
    problem = {"problem": "One?", "level": "Level 1", "type": "any", "solution": "$\\boxed{1}$."}
    for subject in SUBJECTS:
        for split in ("train", "test"):
            write(folder / f"math/{subject}/{split}.jsonl", [problem])
    return folder


@pytest.fixture
def made(nano: Loaded, data: Path) -> Make:
    """Evidence of a run with these options; ``decoder`` makes the decoder under test, ours by default."""

    def make(*tasks: str, decoder: Any = None, loaded: Loaded = nano, **options: Any) -> Evidence:
        unset = dict.fromkeys(Settings.__dataclass_fields__)
        chosen = {"budget": BUDGETS["smoke"], "seed": 0, "corpus": "self", "data": data, "allow_code_execution": False}
        settings = Settings(**{**unset, **chosen, "tasks": frozenset(tasks), **options})

        def ours(request: Any) -> WalkedDecoder:
            return WalkedDecoder(nano.stepper, request.point, max_rows=request.max_rows)

        return Evidence(loaded, settings, decoder or ours)

    return make


def reported(run: Evidence) -> dict[str, list[Any]]:
    """What ``report_tasks`` puts on record."""
    held: dict[str, list[Any]] = {"tables": [], "notes": []}

    class Record:
        def table(self, title: str, model: str, rows: list[Any]) -> None:
            held["tables"] += rows

        def note(self, text: str) -> None:
            held["notes"].append(text)

    report_tasks(run, Record())  # type: ignore[arg-type]
    return held


# ---------------------------------------------------------------- what is scored


def test_right_and_wrong_answers_are_lm_evals_per_document(made: Make, nano: Loaded, data: Path) -> None:
    scored = made("arc_easy", "gsm8k", limit=3).scored
    assert scored.tasks == ["arc_easy", "gsm8k"]
    for point in (FULL, EARLY):
        theirs = evaluate_tasks(EmadLM(nano, point=point), scored.tasks, data=data, limit=3)
        for task in scored.tasks:
            assert scored.correct(task, point).dtype == np.bool_
            assert scored.correct(task, point).tolist() == theirs[task].scores.astype(bool).tolist()
    assert scored.accuracy(FULL).keys() == {"arc_easy", "gsm8k"}


def test_guessing_gets_one_option_in_so_many_and_no_written_answer(made: Make) -> None:
    scored = made("arc_easy", "gsm8k").scored
    assert scored.chance("arc_easy") == pytest.approx((1 / 2 + 1 / 3) / 2)  # the folder's two questions
    assert made("arc_easy", limit=1).scored.chance("arc_easy") == 1 / 2
    assert scored.chance("gsm8k") == 0.0


def test_perplexity_tasks_are_further_corpora_paired_with_full_depth(made: Make, nano: Loaded, data: Path) -> None:
    scored = made("wikitext", "arc_easy").scored
    ((name, (nll, full, tokens)),) = scored.harnessed.corpora(EARLY).items()
    assert name == "lm-eval's wikitext"
    assert scored.tasks == ["arc_easy"]
    theirs = [evaluate_tasks(EmadLM(nano, point=p), ["wikitext"], data=data)["wikitext"] for p in (EARLY, FULL)]
    np.testing.assert_array_equal(nll, theirs[0].scores)
    np.testing.assert_array_equal(full, theirs[1].scores)
    np.testing.assert_array_equal(tokens, theirs[0].tokens)
    assert np.abs(nll - full).max() > 0.01, "depth made no difference: nothing was tested"


def test_f1_judges_the_runs_corpus_and_the_tasks_together(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made("wikitext", "arc_easy")
    own = (np.array([2.0]), np.array([1.0]), np.array([5]))
    monkeypatch.setattr(Evidence, "at", lambda self, loss: PointEvidence("p", 0.5, {"self": own}))
    judged = run.scored.judged(SimpleNamespace(point=EARLY))  # type: ignore[arg-type]
    assert list(judged.perplexity) == ["self", "lm-eval's wikitext"]
    assert judged.perplexity["self"] is own


def test_a_score_that_is_neither_right_nor_wrong_is_shown_and_not_judged(made: Make) -> None:
    run = made("samsum", limit=1)
    assert run.scored.tasks == []
    assert run.scored.harnessed.corpora(EARLY) == {}
    run.__dict__["points"] = [EARLY]
    (shown,) = reported(run)["tables"]
    assert (shown["task"], shown["metric"], shown["point"]) == ("samsum", "rougeL", EARLY.name)


def test_a_group_is_one_task_and_its_parts_are_not_counted_again(made: Make) -> None:
    scored = made("hendrycks_math", "hendrycks_math_algebra", limit=1).scored
    assert scored.tasks == ["hendrycks_math"]
    assert scored.harnessed.scored["hendrycks_math"].documents == len(SUBJECTS)


def test_contexts_that_lose_their_beginning_are_counted_over_a_whole_group(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the note says of which task and how many."""
    long = {"problem": "One and one? " * 120, "level": "Level 1", "type": "any", "solution": "$\\boxed{2}$."}
    for subject in SUBJECTS:
        write(tmp_path / f"math/{subject}/test.jsonl", [long])
    run = made("hendrycks_math", data=tmp_path, limit=1)
    monkeypatch.setattr(type(run), "points", [EARLY])
    (note,) = reported(run)["notes"]
    assert f"lose their beginning ({len(SUBJECTS)} of hendrycks_math's requests)" in note


def test_a_tag_is_its_tasks(made: Make) -> None:
    assert made("ai2_arc").scored.tasks == ["arc_challenge", "arc_easy"]


def test_the_worlds_own_tasks_are_not_counted_again_on_a_corpus_of_the_world(made: Make) -> None:
    assert made("world_recall", corpus="self", limit=2).scored.harnessed.answered == ["world_recall"]
    assert made("world_recall", corpus="world:premise").scored.harnessed.answered == []


def test_margins_are_chosen_without_published_tasks(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harnessed.Harnessed, "result", lambda *_: pytest.fail("a published task was scored"))
    assert made("arc_easy").scored.validated == []


@pytest.mark.parametrize(
    ("limit", "budget", "documents"), [(3, "smoke", 3), (None, "smoke", 5), (None, "standard", 7), (6, "smoke", 6)]
)
def test_as_many_documents_as_asked_for_else_all_else_what_the_smallest_budget_holds(
    made: Make, limit: int | None, budget: str, documents: int
) -> None:
    run = made("gsm8k", limit=limit, budget=replace(BUDGETS[budget], items=5))
    assert run.scored.harnessed.scored["gsm8k"].documents == documents
    run.__dict__["points"] = []
    bounded = limit is None and budget == "smoke"
    assert ("--emad-limit sets another number" in harnessed._scored_note(run)) == bounded


# ---------------------------------------------------------------- under whose decoder


def test_a_foreign_decoder_is_asked_token_by_token_and_keeps_no_journal(made: Make, nano: Loaded, tmp_path) -> None:
    asked = []

    def foreign(request: Any) -> ForeignDecoder:
        asked.append(request.point.name)
        return ForeignDecoder(nano.model, request.point)

    theirs, ours = made("arc_easy", decoder=foreign, report=tmp_path), made("arc_easy")
    for point in (FULL, EARLY):
        assert theirs.scored.correct("arc_easy", point).tolist() == ours.scored.correct("arc_easy", point).tolist()
    assert asked == [FULL.name, EARLY.name]
    assert not (tmp_path / "journal").exists()


def test_what_a_foreign_decoder_gets_wrong_counts(made: Make, nano: Loaded) -> None:
    """Scores come from the decoder under test: one that always exits first is not full depth."""
    shallow = fixed_entropy(4, (1,), 1e9)
    lying = made("wikitext", decoder=lambda request: ForeignDecoder(nano.model, shallow), limit=1)
    honest = made("wikitext", limit=1)
    wrong, right = (run.scored.harnessed.result("wikitext", FULL).scores for run in (lying, honest))
    assert np.abs(wrong - right).max() > 0.01


def test_results_are_kept_beside_the_report_and_not_run_again(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made("arc_easy", "gsm8k", limit=2, report=tmp_path)
    before = [first.scored.correct(task, EARLY).tolist() for task in first.scored.tasks]
    assert len(list((tmp_path / "journal").glob("*.jsonl"))) == 1
    for name in ("_scorer", "_generate"):
        monkeypatch.setattr(EmadLM, name, lambda *_: lambda batch: pytest.fail("run again"))
    again = made("arc_easy", "gsm8k", limit=2, report=tmp_path)
    assert [again.scored.correct(task, EARLY).tolist() for task in again.scored.tasks] == before


# ---------------------------------------------------------------- what cannot be scored


def test_programs_need_leave_and_a_sandbox(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (refused,) = made("humaneval").scored.harnessed.unmeasured.values()
    assert "--emad-allow-code-execution allows that" in refused
    monkeypatch.setattr(harnessed, "availability", lambda: "no namespaces")
    (refused,) = made("humaneval", allow_code_execution=True).scored.harnessed.unmeasured.values()
    assert refused.endswith("they cannot be confined here: no namespaces")


def test_a_model_too_short_for_the_answers_says_so(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harnessed, "availability", lambda: "")
    (reason,) = made("humaneval", allow_code_execution=True).scored.harnessed.unmeasured.values()
    assert reason == "it takes 1024 new tokens, and the model has 512 positions"


def test_without_a_tokenizer_no_text_can_be_scored(made: Make, nano: Loaded) -> None:
    (reason,) = made("arc_easy", loaded=replace(nano, tokenizer=None)).scored.harnessed.unmeasured.values()
    assert "without a tokenizer" in reason


def test_data_out_of_reach_leaves_a_reason_that_names_the_folder_option(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emad_ref.tasks.datasets.reachable", lambda: False)
    monkeypatch.setenv("HF_DATASETS_CACHE", "nowhere")
    (reason,) = made("arc_easy", data=None).scored.harnessed.unmeasured.values()
    assert "out of reach" in reason
    assert "--emad-data DIR" in reason


def test_an_unmeasured_task_is_a_leg_that_keeps_the_row_from_surviving(made: Make) -> None:
    claim, run = load_register()["EMAD-F1"], made("humaneval")
    held = row(claim, "m", [Leg("p: perplexity", "survived", 0.0, None, 40, 0.01, "", p_survive=0.01)])
    assert held.verdict == "survived"
    told = run.scored.with_unmeasured(held, claim)
    assert told.verdict == "inconclusive"
    assert [leg.name for leg in told.legs] == ["p: perplexity", "task humaneval"]
    idle = not_applicable(claim, "m", "nothing saves enough")
    assert run.scored.with_unmeasured(idle, claim) is idle
    assert made().scored.with_unmeasured(held, claim) is held


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("gsm9k", r"--emad-tasks='gsm9k', but expected some of .*gsm8k.*wikitext"),
        ("pile", "data=.*pile.*, but expected a folder that holds valid"),
    ],
)
def test_a_task_that_is_not_there_ends_the_run(made: Make, tmp_path: Path, task: str, said: str) -> None:
    with pytest.raises(RunStopped, match=said):
        made(task, data=tmp_path).scored.harnessed.check()


def test_without_lm_eval_the_extra_is_named(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harnessed, "find_spec", lambda name: None)
    with pytest.raises(RunStopped, match=r"--emad-tasks='arc_easy', but expected the extra .*pytest-emad\[tasks\]"):
        made("arc_easy").scored.harnessed.check()
    assert made().scored.tasks == []
