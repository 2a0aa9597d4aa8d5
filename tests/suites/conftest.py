"""Fixtures of the suite tests: tiny local models, and an inner pytest that judges them with this checkout's suites."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, PreTrainedTokenizerFast

import emad_ref
from emad_ref.models.loading import load
from tests.forked_python import run_pytest
from tests.small_models import small_model

ROOT = Path(emad_ref.__file__).parents[1]
SUITES = ROOT / "suites"
SIZES: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 96, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
UNGATED = "[EMAD-F1]\ngate = false\n"  # random weights cannot pass it, and these tests are about the machinery

# of pytest; searching all installed distributions takes a third of a short run's time
PLUGINS = [
    name
    for name in ("pytest_emad.plugin", "_hypothesis_pytestplugin", "pytest_benchmark.plugin", "xdist.plugin")
    if find_spec(name.partition(".")[0])
]

Run = Callable[..., pytest.RunResult]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the outer run's CI, options, threads and the network from the inner runs, which load few plugins."""
    for name in ("CI", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": ",".join(PLUGINS),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session", autouse=True)
def imported_for_good(tiny: Path) -> None:
    """Import for good: pytester unloads modules imported while it is active; torch's cannot load twice."""
    for module in (
        *("hypothesis.stateful", "scipy.stats", "scipy.optimize", "torch._dynamo", "torch.distributed.fsdp"),
        *(
            "pytest_emad.run.suite_support",
            "pytest_emad.measurements.model_measurements",
            "pytest_emad.claims.tables",
            "pytest_emad.claims.identities",
            "pytest_emad.report.summary_layout",
            "pytest_emad.report.tables",
            "pytest_emad.report.depth_explorer",
            "pytest_emad.audit.requests",
            "pytest_emad.audit.point_fields",
            "pytest_emad.audit.memory",
            "pytest_emad.run.hypothesis_profile",
            "matplotlib.figure",
            "matplotlib.backends.backend_svg",
        ),
    ):
        importlib.import_module(module)
    model = load(str(tiny)).model
    model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=1, pad_token_id=0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a GPT-NeoX of four layers, without a tokenizer: its corpus is its own text."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    small_model("gpt_neox", torch.float32, config=AutoConfig.for_model("gpt_neox", **SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reader(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model with a tokenizer of whole words, so that it reads files."""
    folder = tmp_path_factory.mktemp("models") / "reader"
    shutil.copytree(tiny, folder)
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Add a tokenizer of the words w1 … w119; every other word is <end>."""
    words = {"<end>": 0} | {f"w{i}": i for i in range(1, SIZES["vocab_size"])}
    backend = Tokenizer(WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)


@pytest.fixture(scope="session")
def ungated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a claims file under which quality is reported without a gate."""
    file = tmp_path_factory.mktemp("claims") / "ungated.toml"
    file.write_text(UNGATED)
    return file


# Rows about a pair of bundled models for any model under test: minutes of decoding that test nothing here.
OF_A_PAIR = ("test_pair.py", "test_speculative.py", "test_switching.py", "test_golden_pair.py")


def _arguments(suites: tuple[str, ...], options: dict[str, object], more: tuple[object, ...]) -> list[str]:
    """Return paths of ``suites``, ``--emad-NAME VALUE`` for each option, and the rest unchanged."""
    flags = [str(part) for name, value in options.items() for part in (f"--emad-{name.replace('_', '-')}", value)]
    paths = [str(SUITES / suite) for suite in suites]
    ignored = [f"--ignore-glob={SUITES}/*/{name}" for name in OF_A_PAIR]
    return ["-p", "no:cacheprovider", f"-c{ROOT / 'pyproject.toml'}", *ignored, *paths, *flags, *map(str, more)]


def _run_by(start: Callable[..., pytest.RunResult]) -> Run:
    def run(*suites: str, more: tuple[object, ...] = (), **options: object) -> pytest.RunResult:
        return start(*_arguments(suites, options, more))

    return run


@pytest.fixture
def judge(pytester: pytest.Pytester) -> Run:
    """``judge("invariants", model=folder)`` runs suites in this process, seconds faster than in a subprocess."""
    return _run_by(pytester.runpytest_inprocess)


@pytest.fixture
def judge_apart(pytester: pytest.Pytester) -> Run:
    """Run the same in a subprocess, as a user's command."""
    return _run_by(partial(run_pytest, pytester))


@pytest.fixture
def judge_afresh(pytester: pytest.Pytester) -> Run:
    """Run the same in a process that imports everything anew: huggingface_hub reads its environment once."""
    return _run_by(pytester.runpytest_subprocess)


def only(*claims: str) -> tuple[str, str]:
    """``more=only("EMAD-F1", "EE-8")``: run these claims alone, and every test without a claim."""
    return "-k", " or ".join(["not test_claim", *(f"{claim}]" for claim in claims)])


def text_of(result: pytest.RunResult) -> str:
    """Return the whole output of the run, from both streams."""
    return f"{result.stdout.str()}\n{result.stderr.str()}"


def verdicts_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the ``claims`` of a run with ``--emad-report folder``, by id."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {claim["id"]: claim for claim in report["claims"]}
