"""The example engines pass the audits in every variant and fail for each planted fault.

Engines of other wheels run where those are installed, as by ``tox -e engines``; no extra of this project requires them.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedTokenizerFast

from emad_ref.models.loading import load
from emad_ref.models.model_spec import find_or_save_folder
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import ModelRef, Prompt, Request
from pytest_emad.audit.decoding_checks import check_generation
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.log_probs import check_log_probs
from pytest_emad.audit.sampling import check_sampling
from pytest_emad.audit.tolerances import tolerance
from pytest_emad.audit.trajectory import DecoderUnderTest
from pytest_emad.claims.engines import decide_stated_saving_and_speedup
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.stated_rule import measure_own_rule_speedup
from pytest_emad.measurements.study import Study
from pytest_emad.remote.token_decoder import TokenDecoder
from tests.claims.simulation import asked
from tests.decoders.audited_model import LAYERS, drawn, lens_of, tiny_neox
from tests.decoders.covering_cases import check_small_cases
from tests.examples.conftest import EXAMPLES, Suites
from tests.examples.models import folder_of
from tests.small_models import small_model
from tests.suites.conftest import SIZES, add_tokenizer

FULL, NEW, TOLERANCE, HOT = full_depth(LAYERS), 6, 1e-9, 12.0
RETURNED = 1e-6  # ``generate`` returns logits as float32
PROMPTS, _ = drawn((4, 1, 26, 3, 2, 5, 17), 1)


@pytest.mark.parametrize("file", sorted((EXAMPLES / "engines").glob("*.py")), ids=lambda file: file.stem)
def test_it_is_at_most_forty_lines_of_python(file: Path) -> None:
    """Blank lines and the docstring do not count."""
    source = file.read_text(encoding="utf-8")
    code = source.replace(ast.get_docstring(ast.parse(source), clean=False) or "", "")
    assert sum(bool(line.strip(' "')) for line in code.splitlines()) <= 40


@functools.cache
def example(name: str) -> ModuleType:
    described = importlib.util.spec_from_file_location(name, EXAMPLES / "engines" / f"{name}.py")
    assert described is not None
    assert described.loader is not None
    loaded = importlib.util.module_from_spec(described)
    described.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return example("transformers_engine")


def opened(made: Callable[..., Any], kind: str = "dynamic", temperature: float = 0.0, seed: int = 0) -> Any:
    model = SimpleNamespace(model=copy.deepcopy(tiny_neox()))
    model.model.generation_config.eos_token_id = list(range(0, 100, 7))  # the model's own ends must end no row
    return made(Request(ModelRef("m", lambda: model), FULL, seed, len(PROMPTS), temperature), kind)


def checked(check: str, made: Callable[..., Any], kind: str = "dynamic") -> Finding:
    rng = np.random.default_rng(0)
    if check == "sampling":
        rows = [PROMPTS[0], PROMPTS[0], PROMPTS[2]]
        records = [(seed, opened(made, kind, HOT, seed).generate(rows, 12)) for seed in (1, 2, 3, 4)]
        lens, said = lens_of(tiny_neox()), opened(made, kind).capabilities
        return check_sampling(records, lens, FULL, rows, 12, HOT, said, rng, TOLERANCE, needed=50)
    under_test = DecoderUnderTest(opened(made, kind), lens_of(tiny_neox()), FULL, TOLERANCE)
    return finding_of(check, replace(under_test, tolerance=RETURNED) if check == "log-probabilities" else under_test)


def finding_of(check: str, under_test: DecoderUnderTest) -> Finding:
    values = {"point": ("full",), "neighbours": ("none",), "arrays": ("kept",)}
    layers = under_test.point.layers
    exiting = OperatingPoint("unused", "emad", layers, layers, (1,), ((0.0,),))
    known = under_test.lens, exiting, under_test.tolerance
    checks: dict[str, Callable[[], Finding]] = {
        "generation": lambda: check_generation(under_test, PROMPTS, NEW),
        "requests": lambda: check_small_cases("requests", lambda point: under_test.decoder, *known, **values),
        "log-probabilities": lambda: check_log_probs(under_test, PROMPTS, NEW, 5),
    }
    return checks[check]()


@pytest.mark.parametrize("kind", ["dynamic", "static", "lookup"])
@pytest.mark.parametrize("check", ["generation", "requests", "log-probabilities", "sampling"])
def test_every_variant_is_right(module: ModuleType, check: str, kind: str) -> None:
    finding = checked(check, module.TransformersEngine, kind)
    assert finding.passed is True, finding.detail


def faulty(base: Any, change: Callable[..., tuple[Any, Any]]) -> Any:
    """Return the engine with prompt and stop set changed by ``change``."""

    class Faulty(base):  # type: ignore[misc]  # a module's class
        def continue_row(self, prompt: Any, max_new: int, stop: Any, seed: int) -> Any:
            changed, stops = change(np.asarray(prompt), stop)
            return super().continue_row(changed, max_new, stops, seed)

    return Faulty


FAULTS: dict[str, tuple[str, Callable[..., tuple[Any, Any]]]] = {
    "padding without a mask": ("requests", lambda prompt, stop: (np.append([0] * 3, prompt), stop)),
    "stop ids ignored": ("requests", lambda prompt, stop: (prompt, frozenset())),
    "the first token is read as another": (
        "generation",
        lambda prompt, stop: (np.append(prompt[:1] ^ 1, prompt[1:]), stop),
    ),
    "log-probabilities of another prompt": (
        "log-probabilities",
        lambda prompt, stop: (np.append(prompt[:1] ^ 1, prompt[1:]), stop),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refuted(module: ModuleType, fault: str) -> None:
    check, change = FAULTS[fault]
    assert checked(check, faulty(module.TransformersEngine, change)).passed is False


# --- engines of their own wheels ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shipped:
    """An engine of ``wheels`` (import names), the tier that it reaches, and a fixture or a name of its model."""

    wheels: tuple[str, ...]
    tier: str = "logprobs"
    model: str = "llama"


ENGINES = {
    "ctranslate2_engine": Shipped(("ctranslate2",)),
    "onnx_engine": Shipped(("onnxruntime", "onnxscript")),
    "onnxruntime_genai_engine": Shipped(("onnxruntime_genai",)),  # its builder knows no GPT-NeoX
    "openvino_engine": Shipped(("openvino_genai",), "tokens", "emad-tiny"),
    "economize_engine": Shipped(("economize",), "tokens"),
    "vllm_engine": Shipped(("vllm",), model="emad-tiny"),  # its kernels on CPUs take heads of 32 and more
}
KINDS = ("static", "lookup", "early-exit", "bfloat16")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a random Llama of four layers, heads of 16, and its tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    sizes = SIZES | {"hidden_size": 64, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = AutoConfig.for_model("llama", **sizes)
    small_model("llama", torch.float32, config=config).save_pretrained(folder)
    add_tokenizer(folder)
    ends = {"bos_token": "<end>", "unk_token": "<end>"}  # CTranslate2 asks for them
    PreTrainedTokenizerFast.from_pretrained(folder, **ends).save_pretrained(folder)
    return str(folder)


def installed(name: str) -> ModuleType:
    for wheel in ENGINES[name].wheels:
        pytest.importorskip(wheel, reason=f"{wheel} is not installed: tox -e engines")
    if name == "openvino_engine" and shutil.which(os.environ.get("EMAD_OPTIMUM", "optimum-cli")) is None:
        pytest.skip("optimum-cli, which exports models for OpenVINO, is not installed: tox -e engines")
    return example(name)


def model_of(name: str, llama: str) -> str:
    return llama if ENGINES[name].model == "llama" else ENGINES[name].model


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_a_wheel_is_judged_at_its_tier(suites: Suites, llama: str, name: str) -> None:
    installed(name)
    tier = ENGINES[name].tier
    said = suites(
        *("invariants", "fidelity", "-p", name, "--emad-model", model_of(name, llama), "--emad-tier", tier),
        *("--emad-expect-decoder", "foreign"),
        path=EXAMPLES / "engines",
    )
    assert re.search(rf"tier {tier}( \([^)]*\))?; live: ", said), said


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize("kind", KINDS)
def test_generate_is_judged_at_its_tier(suites: Suites, llama: str, monkeypatch: Any, kind: str) -> None:
    """On the random Llama bfloat16 would stay undecided: its noise hides any defect in such flat logits."""
    monkeypatch.setenv("EMAD_GENERATE", kind)
    model = "emad-nano" if kind == "bfloat16" else llama
    said = suites(
        *("invariants", "fidelity", "-p", "transformers_engine", "--emad-model", model, "--emad-tier", "logprobs"),
        *("--emad-expect-decoder", "foreign"),
        path=EXAMPLES / "engines",
    )
    assert "tier logprobs (streams nothing, one request at a time); live: " in said, said


def cut(base: Any) -> Any:
    """Read only the last two tokens of a prompt."""

    class Cut(base):  # type: ignore[misc]  # a module's class
        def complete(self, prompts: Any, max_new: int, stop: Any) -> Any:
            return super().complete([prompt[-2:] for prompt in prompts], max_new, stop)

    return Cut


def endless(base: Any) -> Any:
    """End no row at a stop id."""

    class Endless(base):  # type: ignore[misc]  # a module's class
        def complete(self, prompts: Any, max_new: int, stop: Any) -> Any:
            return super().complete(prompts, max_new, frozenset())

    return Endless


def padded(base: Any) -> Any:
    """Pad shorter prompts on the left without masking the padding."""

    class Padded(base):  # type: ignore[misc]  # a module's class
        def complete(self, prompts: Any, max_new: int, stop: Any) -> Any:
            longest = max(len(prompt) for prompt in prompts)
            rows = [np.append([0] * (longest - len(prompt)), prompt).astype(int) for prompt in prompts]
            return super().complete(rows, max_new, stop)

    return Padded


def misread(base: Any) -> Any:
    """Report log-probabilities after a different first token."""

    class Misread(base):  # type: ignore[misc]  # a module's class
        def log_probs(self, prompts: Any, max_new: int, top: int) -> Any:
            other = [replace(each, tokens=np.append(each.tokens[:1] ^ 1, each.tokens[1:])) for each in prompts]
            return super().log_probs(other, max_new, top)

    return Misread


OF_WHEELS = {
    "too few tokens": ("generation", cut),
    "stop ids ignored": ("requests", endless),
    "padding": ("requests", padded),
    "log-probabilities of another prompt": ("log-probabilities", misread),
}


@pytest.mark.parametrize("fault", OF_WHEELS)
@pytest.mark.parametrize("name", ENGINES)
def test_a_fault_planted_in_an_engine_of_a_wheel_is_refuted(
    llama: str, name: str, fault: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    module, (check, planted) = installed(name), OF_WHEELS[fault]
    if check == "log-probabilities" and ENGINES[name].tier == "tokens":
        pytest.skip(f"{name} reports no log-probabilities of several tokens")
    engine = next(each for each in vars(module).values() if is_engine(each))
    for made, passed in ((engine, True), (planted(engine), False)):
        monkeypatch.setattr(module, engine.__name__, made)
        finding = found_of(module, check, model_of(name, llama), pytestconfig)
        assert finding.passed is passed, finding.detail


def found_of(module: ModuleType, check: str, name: str, config: pytest.Config) -> Finding:
    """Return the finding of ``check`` for the decoder that the example's hook makes."""
    loaded = load(name)
    model = ModelRef(name, lambda: load(name), lambda: find_or_save_folder(loaded))
    request = Request(model, full_depth(loaded.stepper.layers), 0, len(PROMPTS))
    decoder = module.pytest_emad_make_decoder(config, request)
    noise = tolerance(loaded.geometry.family, "float32", "cpu")
    return finding_of(check, DecoderUnderTest(decoder, lens_of(loaded.model), request.point, noise))


def test_onnxruntime_genai_drops_padding_that_a_prompt_holds(
    llama: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """A defect of 0.18: the model builder pads with the end of text, and attention masks such ids at a prompt's end."""
    module = installed("onnxruntime_genai_engine")
    ended = [Prompt(np.append(prompt.tokens, 0)) for prompt in PROMPTS]
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", ended)
    assert found_of(module, "generation", llama, pytestconfig).passed is True
    monkeypatch.setattr(module, "SETTINGS", '{"model": {"eos_token_id": 0}}')
    module.built.cache_clear()
    try:
        assert found_of(module, "generation", llama, pytestconfig).passed is False
    finally:
        module.built.cache_clear()


def is_engine(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, TokenDecoder) and value is not TokenDecoder


# --- engines by their URL -------------------------------------------------------------------------------------------


@contextmanager
def listening(words: list[object], log: Path) -> Iterator[str]:
    """Run a server that gets a free port as its last word, until the block ends; yield its URL once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with (
        log.open("w") as said,
        subprocess.Popen(
            [sys.executable, *map(str, words), url.rpartition(":")[2]], stdout=said, stderr=subprocess.STDOUT
        ) as server,
    ):
        try:
            while server.poll() is None:
                with suppress(OSError), urlopen(f"{url}/v1/models", timeout=5):
                    break
                time.sleep(0.5)
            assert server.poll() is None, log.read_text()
            yield url
        finally:
            server.terminate()


def judged_by_url(suites: Suites, url: str, model: str) -> str:
    return suites(
        *("invariants", "fidelity", "--emad-model", model, "--emad-decoder", url, "--emad-tier", "logprobs"),
        *("--emad-expect-decoder", "foreign"),
    )


def test_llama_cpp_engine_by_its_url(suites: Suites, tmp_path: Path) -> None:
    for wheel in ("xllamacpp", "gguf"):
        pytest.importorskip(wheel, reason=f"{wheel} is not installed: tox -e engines")
    from tests.gguf_models import small_llama, write_gguf

    model = small_llama(positions=96)
    model.save_pretrained(tmp_path / "llama")
    words = [f"w{number}" for number in range(model.config.vocab_size)]
    plain = {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.merges": ["w 1"],
    }  # it loses ids of tokens of half a character
    file = write_gguf(tmp_path / "llama.gguf", model, **plain)
    with listening([EXAMPLES / "engines" / "llama_cpp_server.py", file], tmp_path / "server.log") as url:
        assert "tier logprobs; live: " in judged_by_url(suites, url, str(tmp_path / "llama"))


def test_vllm_engine_by_its_url(suites: Suites, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed: tox -e engines")
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder_of("emad-tiny"), "--dtype", "float32"]
    with listening([*command, "--enforce-eager", "--port"], tmp_path / "server.log") as url:
        assert "tier logprobs; live: " in judged_by_url(suites, url, "emad-tiny")


# --- a foreign exit rule --------------------------------------------------------------------------------------------


def test_a_public_packages_stated_speed_up_is_falsified() -> None:
    """tide-inference runs every block and logs what skipping them would save (docs/engines.md)."""
    pytest.importorskip("TIDE", reason="tide-inference is not installed: pip install --no-deps tide-inference==0.2.1")
    subject = ModelUnderTest(load("emad-nano"), Study(), RunResources(example("tide_engine").TideEngine))
    found = measure_own_rule_speedup(subject, 60)
    assert found.stated.speedup is not None
    assert found.stated.speedup > 2
    verdict = decide_stated_saving_and_speedup(found, asked("ENG-7", np.random.default_rng(0)))
    legs = {leg.name.partition(",")[0]: leg for leg in verdict.legs}
    assert verdict.verdict == "falsified"
    assert (legs["speed-up"].outcome, legs["blocks saved"].outcome) == ("falsified", "falsified")
    assert legs["blocks saved"].estimate == 0
