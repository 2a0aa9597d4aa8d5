"""Folders that lm-eval itself writes: two runs of a small task, a group and two filters; and the rows of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_emad.accuracy.comparison import compare_accuracy
from pytest_emad.accuracy.loading import read_evaluation
from tests.evaluation_folders import choice_row, generated_row

CHOICE = """
task: letters_{name}
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: mcc}}, {{metric: acc_norm}}]
"""
GENERATED = """
task: places
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
repeats: 2
generation_kwargs: {{until: ["."], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
filter_list:
  - name: strict
    filter: [{{function: regex, regex_pattern: "(\\\\w+)"}}, {{function: take_first}}]
  - name: flexible
    filter: [{{function: regex, group_select: -1, regex_pattern: "(\\\\w+)"}}, {{function: take_first}}]
"""
GROUP = """
group: letters
task: [letters_a, letters_b]
aggregate_metric_list: [{metric: acc, weight_by_size: false}]
"""
PLACES = ["barn", "shed", "kitchen", "garden"]


def write_tasks(folder: Path) -> None:
    questions = []
    for number in range(12):
        name, place = ("Kai", "Mia", "Lena")[number % 3], number * 7 % 4
        question = f"{name} went to the {PLACES[place]}. Then {number} came. {name} is in the"
        questions.append({"question": question, "choices": PLACES, "answer": place})
    for name, rows in (("a", questions[:8]), ("b", questions[8:])):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"letters_{name}.yaml").write_text(CHOICE.format(name=name, data=data))
    (folder / "places.yaml").write_text(GENERATED.format(data=folder / "a.jsonl"))
    (folder / "letters.yaml").write_text(GROUP)


def run_lm_eval(tasks: Path, out: Path, model: str) -> Path:
    """Run lm-eval as its command does, without the standard errors of mcc, whose bootstrap takes minutes."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    import pytest_emad.tasks.lm_eval_model  # noqa: F401  # registers `emad`

    tracker = EvaluationTracker(output_path=str(out))
    results: dict[str, Any] = simple_evaluate(
        model="emad",
        model_args=f"pretrained={model}",
        tasks=["letters", "places"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        evaluation_tracker=tracker,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
    home = tmp_path_factory.mktemp("lm-eval")
    write_tasks(home)
    first, second = (run_lm_eval(home, home / f"out-{model}", model) for model in ("emad-nano", "emad-tiny"))
    return first, second


@pytest.mark.slow
def test_the_files_of_lm_eval_are_read_as_they_are(folders: tuple[Path, Path]) -> None:
    evaluation = read_evaluation(folders[0])
    tasks = {(task.task, task.filter): task for task in evaluation.tasks}
    assert set(tasks) == {("letters_a", "none"), ("letters_b", "none"), ("places", "strict"), ("places", "flexible")}
    assert len(tasks["letters_a", "none"].ids) == len(tasks["places", "strict"].ids) == 8
    assert list(tasks["letters_a", "none"].scores) == ["acc", "acc_norm"]
    assert {each.subject for each in evaluation.omissions} == {"letters_a: mcc", "letters_b: mcc"}
    (group,) = evaluation.groups
    assert (group.name, list(group.members), group.metric) == ("letters", ["letters_a", "letters_b"], "acc")
    assert evaluation.model == "emad-nano"
    (results,) = folders[0].glob("*/results_*.json")
    score = json.loads(results.read_text())["results"]["letters_a"]["acc,none"]
    assert tasks["letters_a", "none"].scores["acc"].mean() == pytest.approx(score)


@pytest.mark.slow
def test_two_runs_of_lm_eval_are_compared(folders: tuple[Path, Path]) -> None:
    comparison = compare_accuracy(*folders)
    assert [test.name for test in comparison.tests] == ["places (strict)", "places (flexible)", "letters"]
    assert [part.items for part in comparison.tests[2].parts] == [8, 4]
    assert comparison.verdict == "inconclusive"
    for item in comparison.differing_items:
        assert item.base.prompt == item.candidate.prompt
        assert item.base.prompt.endswith("is in the")


@pytest.mark.slow
def test_rows_of_the_other_tests_have_the_keys_and_forms_of_lm_evals(folders: tuple[Path, Path]) -> None:
    def real(task: str) -> dict[str, Any]:
        (file,) = folders[0].glob(f"*/samples_{task}_*.jsonl")
        row: dict[str, Any] = json.loads(file.read_text().splitlines()[0])
        return row

    def form(value: Any) -> Any:
        return type(value) if not isinstance(value, list) else [form(value[0])]

    choice = choice_row(0, {"acc": 0.0, "mcc": [1, 1], "acc_norm": 0.0})
    generated = generated_row(0, {"exact_match": 0.0}, filter="strict", repeats=2)
    for mine, theirs in ((choice, real("letters_a")), (generated, real("places"))):
        assert list(mine) == list(theirs)
        for key in set(mine) - {"doc"}:
            assert form(mine[key]) == form(theirs[key]), key
        assert set(mine["arguments"]) == set(theirs["arguments"])
        assert set(mine["arguments"]["gen_args_0"]) == set(theirs["arguments"]["gen_args_0"])
