"""``--emad-tasks`` from the command line to the verdict: legs, table, notes; one error for bad input."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.suites.conftest import Run, only, text_of, verdicts_of
from tests.unit.tasks.test_datasets import write

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
for module in ("datasets", "pytest_emad.tasks.evaluation", "pytest_emad.tasks.lm_eval_model"):
    import_module(module)  # pytester unloads modules, and their registrations cannot be made twice

F1 = ("claims/test_model.py",)
NOT_LITERAL = only("EMAD-F1")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder with words that the tiny reader knows."""
    folder = tmp_path_factory.mktemp("data")
    write(
        folder / "arc/ARC-Easy/test.jsonl",
        [
            {"question": f"w{n} w{n + 1}", "choices": {"text": [f"w{n}", "w2"], "label": ["A", "B"]}, "answerKey": "A"}
            for n in range(3, 15)
        ],
    )
    pages = (" ".join(f"w{(n * k) % 119 + 1}" for k in range(1, 40)) for n in range(1, 36))
    (folder / "wikitext-2").mkdir()
    text = "\n".join(f" = w{n} = \n {page}\n" for n, page in enumerate(pages))
    (folder / "wikitext-2" / "test.txt").write_text(text, encoding="utf-8")
    write(
        folder / "humaneval/HumanEval.jsonl",
        [
            {"task_id": "0", "prompt": "w1", "canonical_solution": "w2", "test": "w3", "entry_point": "w4"},
        ],
    )
    return folder


def test_tasks_reach_the_verdict_the_table_and_the_notes(
    judge: Run, reader: Path, data: Path, ungated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # tables are as wide as the terminal
    out = tmp_path / "out"
    result = judge(
        *F1, model=reader, corpus="self", data=data, tasks="arc_easy,wikitext,humaneval", limit=32, register=ungated,
        report=out, more=("-vv", *NOT_LITERAL),
    )  # fmt: skip
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    legs = {leg["name"]: leg for leg in verdicts_of(out)["EMAD-F1"]["legs"]}
    assert legs["emad m=0.00: arc_easy"]["n"] == 12
    assert legs["emad m=0.00: perplexity on lm-eval's wikitext"]["n"] == 32
    assert "--emad-allow-code-execution" in legs["task humaneval"]["reason"]
    assert legs["task humaneval"]["outcome"] == "unmeasured"
    result.stdout.fnmatch_lines(
        ["*lm-eval's tasks at the points put forward*", "*arc_easy * acc *", "*wikitext * word*"]
    )
    result.stdout.fnmatch_lines(
        ["*arc_easy (12 of 12 documents), wikitext (32 of 35 documents)*beginning (none did); no margin is chosen*"]
    )


@pytest.mark.parametrize(
    ("task", "said", "collected"),
    [
        ("gsm9k", "--emad-tasks='gsm9k', but expected a task of lm-eval", False),
        ("pile", "but expected a folder that holds ", True),
    ],
)
def test_a_task_that_is_not_there_is_one_error(
    judge: Run, reader: Path, data: Path, task: str, said: str, collected: bool
) -> None:
    result = judge(*F1, model=reader, corpus="self", data=data, tasks=task, more=NOT_LITERAL)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert text_of(result).count(said) == 1
    assert ("collected" in text_of(result)) is collected, "a name is refused before collection"
    assert not collected or not result.parseoutcomes().get("failed")
