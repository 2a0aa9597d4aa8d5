"""A model from the hub's cache without network: with a tokenizer, without one, at a revision, and with no cache.

The cache has the layout of huggingface_hub; its weights are tiny.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suites.conftest import Run, text_of, verdicts_of

COMMIT = "9879c9b5f8bea9051dcb0e68dff21493d67e9d4f"
EARLIER, EARLIER_COMMIT = "step3000", "0b1c2d3e4f5a69788796a5b4c3d2e1f001234567"
NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once, like a host without a network
LOADS = """
import json
from emad_ref.models.loading import load
print(json.dumps(load("pythia-410m").provenance))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache; ``snapshot_of(cache)`` is the folder of EleutherAI/pythia-410m."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "hf" / "hub"


def put_into(cache: Path, folder: Path, revision: str = "main", commit: str = COMMIT) -> None:
    repository = cache / "models--EleutherAI--pythia-410m"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)


def loaded_apart() -> subprocess.CompletedProcess[str]:
    """Run ``load("pythia-410m")`` in a subprocess: huggingface_hub reads its environment once."""
    return subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=120)


@pytest.mark.slow  # whole runs; a test below shows without one that the cache suffices to load
@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_cached_model_reaches_verdicts_on_its_own_text(
    request: pytest.FixtureRequest, judge_afresh: Run, cache: Path, ungated: Path, tmp_path: Path, tokenizer: bool
) -> None:
    """WikiText is out of reach here, so the corpus is ``self`` even where the model could read it."""
    put_into(cache, request.getfixturevalue("reader" if tokenizer else "tiny"))
    options = {"model": "pythia-410m", "claims": ungated, "report": tmp_path / "out"}
    result = judge_afresh("claims", "fidelity/test_full_depth.py", **options)
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    verdicts = verdicts_of(tmp_path / "out")
    assert verdicts["EMAD-E1"]["verdict"] in ("survived", "falsified")
    assert 100 < verdicts["EMAD-E1"]["n"] <= 200  # documents of unequal lengths count as fewer
    assert "perplexity on self" in json.dumps(verdicts["EMAD-F1"])


# tests/unit/models/test_hub_client.py loads one that reads from the cache
@pytest.mark.parametrize("tokenizer", [pytest.param(True, marks=pytest.mark.slow), False])
def test_without_a_network_the_cache_is_enough_and_nothing_is_retried(
    request: pytest.FixtureRequest, cache: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: bool
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    put_into(cache, request.getfixturevalue("reader" if tokenizer else "tiny"))
    done = loaded_apart()
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr
    provenance = json.loads(done.stdout)
    assert provenance["commit"] == COMMIT
    assert provenance["hub_id"] == "EleutherAI/pythia-410m"
    missing = "" if tokenizer else "tokenizer.json, tokenizer_config.json"
    assert provenance["tokenizer_missing"].startswith(f"none of {missing}" if missing else "")
    assert bool(provenance["tokenizer_missing"]) != tokenizer


def test_without_a_network_and_a_cache_the_refusal_is_quick(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    done = loaded_apart()
    assert "ModelUnavailable: name='pythia-410m', but its hub repository EleutherAI/pythia-410m" in done.stderr
    assert "Retrying" not in done.stderr


@pytest.mark.slow  # three runs; another test shows without a run that a revision names a model
def test_a_revision_reaches_report_and_golden_and_the_golden_holds_for_another_commit(
    judge_afresh: Run, cache: Path, tiny: Path, tmp_path: Path
) -> None:
    """Two commits with the same weights: the second is compared with the golden of the first."""
    put_into(cache, tiny)
    put_into(cache, tiny, EARLIER, EARLIER_COMMIT)
    goldens = tmp_path / "goldens"
    goldens.mkdir()
    name = f"pythia-410m@{EARLIER}"
    options = {"golden": goldens, "report": tmp_path / "out"}
    judge_afresh("fidelity/test_golden.py", model=name, more=("--emad-update-golden",), **options)
    entries = json.loads((goldens / "index.json").read_text())
    (recorded,) = entries[0]["provenance"]["models"]
    assert all(entry["provenance"]["models"] == [recorded] for entry in entries)
    (reported,) = json.loads((tmp_path / "out" / "report.json").read_text())["models"]
    assert recorded == reported
    assert (reported["name"], reported["revision"], reported["commit"]) == (name, EARLIER, EARLIER_COMMIT)
    assert {"dtype": "float32", "device": "cpu", "hub_id": "EleutherAI/pythia-410m"}.items() <= reported.items()

    again = judge_afresh("fidelity/test_golden.py", model="pythia-410m", more=("--emad-require", "golden"), **options)
    assert again.ret == pytest.ExitCode.OK, text_of(again)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [model["commit"] for model in report["models"]] == [COMMIT]
    assert [golden["outcome"] for golden in report["goldens"]] == ["read"] * len(entries)


def test_a_revision_of_a_folder_ends_the_run_with_a_remedy(judge_apart: Run, tiny: Path) -> None:
    result = judge_apart("fidelity/test_golden.py", model=f"{tiny}@main")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "expected none, for only the hub has revisions" in text_of(result)
