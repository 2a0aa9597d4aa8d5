"""Task definitions of a user's folder, and lm-eval's own: found by name, scored, refused with their own message."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from emad_ref.errors import BadArgument
from emad_ref.exit_rules import fixed_entropy_point
from emad_ref.models.loading import LoadedModel, load
from emad_ref.point import full_depth
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import Study
from pytest_emad.tasks.answers import SHOWN
from pytest_emad.tasks.datasets import TaskDataUnavailable
from pytest_emad.tasks.evaluation import evaluate_tasks, make_task_manager
from pytest_emad.tasks.lm_eval_model import EmadLM

DEFINITION = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}} The"
doc_to_choice: "{{{{options}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
# letters as options, so that the model does not say the same of every row
ROWS = [
    {"question": f"{one} {other}.", "options": [one, other, third], "answer": number % 3}
    for number, (one, other, third) in enumerate(permutations("abkmz", 3))
]


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "tasks"
    own.mkdir()
    (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("colours", "arc_easy"):
        (own / f"{name}.yaml").write_text(definition(own, name))
    return own


def definition(own: Path, name: str, kind: str = "multiple_choice") -> str:
    return DEFINITION.format(name=name, file=own / "rows.jsonl", kind=kind)


def test_a_task_of_ones_own_is_scored_and_shows_prompts_and_answers(nano: LoadedModel, folder: Path) -> None:
    found = evaluate_tasks(EmadLM(nano), ["colours"], definitions=folder)["colours"]
    assert found.n == len(ROWS)
    assert found.prompts[0] == "a b. The"
    right = [answer == row["options"][row["answer"]] for answer, row in zip(found.answers, ROWS, strict=True)]
    assert found.scores.tolist() == right


def test_a_definition_of_ones_own_goes_before_ours(nano: LoadedModel, folder: Path) -> None:
    assert evaluate_tasks(EmadLM(nano), ["arc_easy"], definitions=folder, limit=2)["arc_easy"].n == 2
    with pytest.raises(BadArgument, match="a folder that holds"):  # ours reads the data folder, which has no ARC
        evaluate_tasks(EmadLM(nano), ["arc_easy"], data=folder)


def test_names_of_lm_eval_itself_are_known_and_unknown_ones_get_the_nearest() -> None:
    stock = make_task_manager(names=["boolq"])
    assert "boolq" in stock.all_tasks
    assert "boolq" not in make_task_manager(names=["arc_easy"]).all_tasks
    with pytest.raises(BadArgument, match=r"tasks='boolqq', but expected a task of lm-eval, .*nearest: boolq"):
        evaluate_tasks(None, ["arc_easy", "boolqq"])  # type: ignore[arg-type]  # refused before the model is asked


def test_a_definition_that_lm_eval_cannot_use_is_named(nano: LoadedModel, folder: Path) -> None:
    (folder / "colours.yaml").write_text(definition(folder, "colours").replace("rows.jsonl", "absent.jsonl"))
    with pytest.raises(TaskDataUnavailable, match=r"lm-eval cannot make colours: .*absent\.jsonl"):
        evaluate_tasks(EmadLM(nano), ["colours"], definitions=folder)


def measured(nano: LoadedModel, folder: Path, **options: Any) -> ModelMeasurements:
    study = Study(corpus="self", tasks=frozenset({"colours"}), task_path=folder, **options)
    return ModelMeasurements(nano, study, RunResources())


def test_a_run_scores_it_and_names_what_an_exit_loses(nano: LoadedModel, folder: Path) -> None:
    scored, shallow = measured(nano, folder).task_scores, fixed_entropy_point(4, (1,), 1e9)
    assert scored.published.accuracy_tasks == ["colours"]
    full, early = (scored.correctness_by_item("colours", point).values for point in (full_depth(4), shallow))
    count, first = scored.lost_answers("colours", shallow)
    assert count == int((full & ~early).sum()) > 0
    lost = [f"{row['question']} The" for row, is_lost in zip(ROWS, full & ~early, strict=True) if is_lost]
    assert [one.prompt for one in first] == lost[:SHOWN]
    assert all(one.full_depth != one.at_point for one in first)
    assert scored.lost_answers("colours", full_depth(4)) == (0, [])


def test_the_digest_of_the_folder_is_among_the_settings_that_may_change_a_verdict(folder: Path) -> None:
    before = Study(task_path=folder).non_default_setting_lines
    (folder / "colours.yaml").write_text("task: colours\n")
    assert before != Study(task_path=folder).non_default_setting_lines


def test_an_output_type_that_is_not_read_is_a_reason(nano: LoadedModel, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("pytest_emad.measurements.task_scores.READ_OUTPUT_TYPES", ("generate_until",))
    found = measured(nano, folder).task_scores.published.absent_by_task
    assert {task: absent.reason for task, absent in found.items()} == {
        "colours": "its output type is 'multiple_choice'; generate_until are scored here"
    }
