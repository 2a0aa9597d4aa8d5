"""A user's T5 is judged on SQuAD and SamSum files; without them its rows are unmeasured, arithmetic is still shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from pytest_emad.statistics.goldens import load_known_verdicts_from_folders
from tests.suites.conftest import Run, add_tokenizer, only, text_of, verdicts_of
from tests.unit.tasks.test_datasets import squad_rows, write

pytest.importorskip("rouge_score", reason="the extra `tasks` is not installed")

MODEL = "claims/test_model.py"
ROWS = ("EE-1", "EE-2", "EE-3", "EE-4", "EE-8", "EE-9", "EE-10", "EE-12", "EE-13", "EE-15")
ITEMS = 12
NO_FILES = (
    "no SQuAD/SamSum files; --emad-data DIR holds squad/validation.jsonl, samsum/validation.jsonl or samsum/test.jsonl"
)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store a T5 with a tokenizer of whole words, without a mark that it is untrained."""
    folder = tmp_path_factory.mktemp("models") / "t5"
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=6, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a data folder with words that its tokenizer knows."""
    questions = [(f"w{n + 3} w{n + 4}", f"w{n + 5}") for n in range(ITEMS)]
    context = " ".join(f"w{n}" for n in range(3, 60))
    write(tmp_path / "data/squad/validation.jsonl", squad_rows(context, *questions))
    write(
        tmp_path / "data/samsum/test.jsonl",
        [{"id": str(n), "dialogue": f"w{n + 3} w{n + 4}", "summary": f"w{n + 5} w{n + 6}"} for n in range(ITEMS)],
    )
    return tmp_path / "data"


@pytest.mark.slow  # half a minute of decoding
def test_rows_are_decided_on_the_files_and_recorded_under_them(
    judge: Run, t5: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # tables are as wide as the terminal
    out, golden = tmp_path / "out", tmp_path / "golden"
    golden.mkdir()
    more = ("-vv", "--emad-update-golden", *only("EE-2", "EE-3", "EE-12"))
    result = judge("claims", model=t5, data=data, report=out, golden=golden, more=more)
    verdicts = verdicts_of(out)
    for claim in ("EE-2", "EE-12"):
        legs = {leg["name"]: leg for leg in verdicts[claim]["legs"]}
        about = {name.split(",")[0] for name in legs if not name.startswith("evidence")}
        assert about == {"squad", "samsum"}, text_of(result)
    assert verdicts["EE-3"]["verdict"] == "not applicable"
    legs = {leg["name"]: leg for leg in verdicts["EE-3"]["legs"]}
    assert legs.keys() == {"squad", "samsum"}, "an untrained T5 solves neither"
    assert all("not solved: full depth scores 0.0" in leg["reason"] for leg in legs.values())
    kept = {entry["claim"]: entry["corpus"] for entry in load_known_verdicts_from_folders([golden]).entries}
    assert kept["EE-2"] == kept["EE-3"] == "squad+samsum"
    result.stdout.fnmatch_lines(
        ["*squad: 12 of 12 pairs of validation.jsonl; 0 sources cut*", "*samsum: 12 of 12 pairs of test.jsonl*"]
    )
    result.stdout.fnmatch_lines(["*early exits on squad+samsum*"])


def test_without_files_rows_are_unmeasured_and_arithmetic_goes_on(judge: Run, t5: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = judge(MODEL, model=t5, report=out, more=only(*ROWS, "EE-14"))
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    verdicts = verdicts_of(out)
    for claim in ("EE-2", "EE-3", "EE-9", "EE-10", "EE-12", "EE-13", "EE-14", "EE-15"):
        assert (verdicts[claim]["verdict"], verdicts[claim]["reason"]) == ("unmeasured", NO_FILES)
    assert verdicts["EE-1"]["verdict"] == verdicts["EE-8"]["verdict"] == "falsified"
    assert verdicts["EE-4"]["verdict"] == "unmeasured"
    for claim, outcome, papers in (
        ("EE-1", "falsified", [7.440, 2.942]),
        ("EE-4", "measured", [5.001, 2.500]),
    ):
        legs = {leg["name"]: leg for leg in verdicts[claim]["legs"]}
        assert (legs["items"]["outcome"], legs["items"]["reason"]) == ("unmeasured", NO_FILES)
        assert {legs[f"{t5}, never exiting, j={j}: confidence FLOPs"]["outcome"] for j in (2, 4)} == {outcome}
        large = [legs[f"t5-large, never exiting, j={j}: confidence FLOPs"]["estimate"] for j in (7, 19)]
        assert large == pytest.approx(papers, abs=5e-4)  # derived in tests/unit/sweep/test_published_arithmetic.py


def test_one_file_of_the_two_leaves_the_other_a_leg(judge: Run, t5: Path, data: Path, tmp_path: Path) -> None:
    (data / "samsum/test.jsonl").unlink()
    out = tmp_path / "out"
    result = judge(MODEL, model=t5, data=data, report=out, more=only("EE-3"))
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    legs = {leg["name"]: leg for leg in verdicts_of(out)["EE-3"]["legs"]}
    assert legs["samsum"]["outcome"] == "unmeasured"
    assert legs["samsum"]["reason"] == f"no samsum/validation.jsonl or samsum/test.jsonl in --emad-data {data}"
    assert legs["squad"]["outcome"] == "not applicable"


def test_a_file_that_does_not_fit_is_one_error_of_the_run(judge: Run, t5: Path, data: Path) -> None:
    write(data / "samsum/test.jsonl", [{"id": "1", "dialogue": "w3"}])
    result = judge(MODEL, model=t5, data=data, more=only(*ROWS))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert text_of(result).count("test.jsonl, line 1: summary") == 1
