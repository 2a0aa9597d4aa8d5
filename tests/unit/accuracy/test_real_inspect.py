"""Logs that inspect_ai itself writes, with its mock model: both forms give the scores that its own results state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_emad.accuracy.comparison import compare_accuracy
from pytest_emad.accuracy.loading import read_evaluation

inspect_ai = pytest.importorskip("inspect_ai", reason="inspect_ai is not installed")
pytest.importorskip("zstandard", reason="the extra `inspect` is not installed")
SAMPLES = 12


class WordEncoding:
    """Counts words as tokens; the real encodings are fetched from a network."""

    def encode(self, text: str, **options: Any) -> list[str]:
        return text.split()


def run_inspect(folder: Path, form: str, wrong: set[int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Evaluate twelve sums in two epochs; the mock model errs at ``wrong``."""
    import tiktoken
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput, get_model
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    for name in ("get_encoding", "encoding_for_model"):
        monkeypatch.setattr(tiktoken, name, lambda *ignored: WordEncoding())

    def answer(messages: Any, *ignored: Any) -> Any:
        number = int(messages[-1].text.split()[2])
        return ModelOutput.from_content("mockllm", "unknown" if number in wrong else f"It is {number + 1}")

    samples = [
        Sample(id=f"s{n}", input=f"What is {n} plus 1?", target=str(n + 1), metadata={"page": n // 2})
        for n in range(SAMPLES)
    ]
    task = inspect_ai.Task(name="sums", dataset=samples, solver=generate(), scorer=match(), epochs=2)
    model = get_model("mockllm/model", custom_outputs=answer, memoize=False)
    (log,) = inspect_ai.eval(task, model=model, log_dir=str(folder), log_format=form, display="none")
    assert log.status == "success", log.error
    return folder


@pytest.mark.parametrize("form", ["eval", "json"])
def test_logs_of_inspect_are_read_as_they_are(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = run_inspect(tmp_path / "base", form, {3}, monkeypatch)
    candidate = run_inspect(tmp_path / "candidate", form, {3, 5, 7}, monkeypatch)
    (task,) = read_evaluation(base).tasks
    assert task.task == "sums"
    assert task.scores["match"].mean() == pytest.approx(1 - 1 / SAMPLES)
    comparison = compare_accuracy(base, candidate, cluster="page")
    (test,) = comparison.tests
    assert (test.items, test.independent, test.lost, test.gained) == (2 * SAMPLES, SAMPLES // 2, 4, 0)
    assert {item.id for item in comparison.differing_items} == {"s5", "s5, epoch 2", "s7", "s7, epoch 2"}
    assert comparison.differing_items[0].candidate.answer == "unknown"
    json.dumps(comparison.to_json())
