"""The package of docs/own-claim.md, installed as printed there: claim, corpus, table, provenance, family."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import emad_ref
from emad_ref.errors import BadArgument
from pytest_emad.extensions import JudgeExtension
from tests.forked_python import run_forked
from tests.small_models import small_model

ROOT = Path(emad_ref.__file__).parents[1]
FILES = re.compile(r"<!-- file: (?P<path>\S+) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
TABLES_TO_THE_REFERENCE = "from emad_ref.extensions import Extension\nEXTENSION = Extension(tables={})\n"
METADATA = "Metadata-Version: 2.1\nName: mine\nVersion: 0.1\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package as an installer lays it out."""
    folder = tmp_path_factory.mktemp("site")
    found = FILES.findall((ROOT / "docs" / "own-claim.md").read_text(encoding="utf-8"))
    assert len(found) == 8
    for path, text in found:
        target = folder / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / "mine" / "__init__.py").touch()
    (folder / "mine-0.1.dist-info" / "METADATA").write_text(METADATA)
    return folder


def run(site: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{ROOT}"
    return run_forked(arguments, cwd=cwd, env=environment)


def suites(site: Path, tmp_path: Path, *arguments: object) -> tuple[subprocess.CompletedProcess[str], dict]:
    shared = ("-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--emad-report", tmp_path / "out")
    done = run(site, "pytest", *shared, *arguments, cwd=tmp_path)
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    return done, report


def test_suites_ask_the_claim_on_the_corpus_and_show_table_and_provenance(site: Path, tmp_path: Path) -> None:
    done, report = suites(
        site, tmp_path, ROOT / "suites/claims/test_model.py", ROOT / "suites/claims/test_tables.py",
        "-k", "MY-1 or layer", "--emad-model", "emad-nano", "--emad-corpus", "mine:alphabet",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (claim,) = report["claims"]
    assert (claim["id"], claim["verdict"], claim["gate"]) == ("MY-1", "survived", True)
    assert 195 <= claim["n"] <= 200  # documents of like length
    (table,) = report["tables"]
    assert table["title"] == "loss by layer"
    assert [row["layer"] for row in table["rows"]] == [1, 2, 3, 4]
    assert report["provenance"]["extensions"] == {"mine": {"rack": "north"}}


@pytest.mark.slow  # a run; other tests check that its row is decided and its gate is known
def test_a_falsified_claim_of_others_fails_the_run(site: Path, tmp_path: Path) -> None:
    """Its gate and its thresholds work like those of any row."""
    (tmp_path / "strict.toml").write_text("[MY-1]\nthresholds = { nll_nats = 0.01 }\n")
    arguments = ("--emad-model", "emad-nano", "--emad-register", tmp_path / "strict.toml", "-k", "MY-1")
    done, report = suites(site, tmp_path, ROOT / "suites/claims/test_model.py", *arguments)
    assert done.returncode == 1
    assert [claim["verdict"] for claim in report["claims"]] == ["falsified"]


def test_a_family_of_others_is_walked_and_audited(site: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 96}
    config = AutoConfig.for_model("starcoder2", bos_token_id=0, eos_token_id=0, **sizes)
    small_model("starcoder2", torch.float32, config=config).save_pretrained(tmp_path / "model")
    audits = [ROOT / "suites/invariants" / name for name in ("test_depth.py", "test_session_machine.py")]
    done, _ = suites(site, tmp_path, *audits, "--emad-model", tmp_path / "model")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_without_the_package_its_names_are_unknown(tmp_path: Path) -> None:
    done = run(tmp_path, "pytest_emad", "judge", "emad-nano", "--only", "MY-1", cwd=tmp_path)
    assert done.returncode == 4
    assert "--emad-only='MY-1', but expected an id of the register" in done.stderr


@pytest.mark.parametrize(
    ("path", "text", "status", "said"),
    [
        ("mine/emad.py", "EXTENSION = 3\n", 4, "emad_ref.extensions: mine='int', but expected"),
        (
            "mine/emad.py",
            "import nowhere\n",
            4,
            "uninstall mine or mend it: No module named 'nowhere'",
        ),
        ("mine/judge.py", "EXTENSION = 3\n", 4, "pytest_emad.extensions: mine='int', but expected"),
        ("mine/judge.py", TABLES_TO_THE_REFERENCE, 4, "unexpected keyword argument 'tables'"),
        ("mine/claims.toml", "[EMAD-F1]\ngate = true\n", 4, "an id that no other row has"),
        ("mine/claims.toml", "[MY-1]\ngate = true\n", 4, "a table of exactly"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(
    site: Path, tmp_path: Path, path: str, text: str, status: int, said: str
) -> None:
    """Status 2 as of any bad value of ``--corpus``, whose reader is the first to load corpora; 4 otherwise."""
    broken = tmp_path / "site"
    for source in site.rglob("*"):
        if source.is_file() and "__pycache__" not in source.parts:
            target = broken / source.relative_to(site)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    (broken / path).write_text(text)
    done = run(broken, "pytest_emad", "judge", "emad-nano", "--only", "MY-1", "--corpus", "mine:alphabet", cwd=tmp_path)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_questions_need_rows() -> None:
    with pytest.raises(BadArgument, match="rows of a register"):
        JudgeExtension(questions={"MY-1": "mine.my_1"})
