"""The example of an engine on the shared base: right in every variant, red for each planted fault."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.audit.decoding_checks import generation
from emad_ref.audit.finding import Finding
from emad_ref.audit.log_probs import log_probs
from emad_ref.audit.requests import endings, repetitions
from emad_ref.audit.sampling import sampling
from emad_ref.audit.trajectory import DecoderUnderTest
from emad_ref.point import full_depth
from emad_ref.protocol import ModelRef, Request
from tests.decoders.subject import LAYERS, drawn, lens_of, tiny_neox
from tests.examples.conftest import EXAMPLES

FULL, NEW, TOLERANCE, HOT = full_depth(LAYERS), 6, 1e-9, 12.0
RETURNED = 1e-6  # ``generate`` returns logits as float32
PROMPTS, _ = drawn((4, 1, 26, 3, 2, 5, 17), 1)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    place = EXAMPLES / "engines" / "transformers_engine.py"
    described = importlib.util.spec_from_file_location("transformers_engine", place)
    assert described is not None
    assert described.loader is not None
    loaded = importlib.util.module_from_spec(described)
    described.loader.exec_module(loaded)
    return loaded


def opened(made: Callable[..., Any], kind: str = "dynamic", temperature: float = 0.0, seed: int = 0) -> Any:
    model = SimpleNamespace(model=copy.deepcopy(tiny_neox()))
    model.model.generation_config.eos_token_id = list(range(0, 100, 7))  # the model's own ends, which end no row
    return made(Request(ModelRef("m", lambda: model), FULL, seed, len(PROMPTS), temperature), kind)


def checked(check: str, made: Callable[..., Any], kind: str = "dynamic") -> Finding:
    rng = np.random.default_rng(0)
    if check == "sampling":
        rows = [PROMPTS[0], PROMPTS[0], PROMPTS[2]]
        records = [(seed, opened(made, kind, HOT, seed).generate(rows, 12)) for seed in (1, 2, 3, 1)]
        lens, said = lens_of(tiny_neox()), opened(made, kind).capabilities
        return sampling(records, lens, FULL, rows, 12, HOT, said, rng, TOLERANCE, needed=50)
    under_test = DecoderUnderTest(opened(made, kind), lens_of(tiny_neox()), FULL, TOLERANCE)
    checks: dict[str, Callable[[], Finding]] = {
        "generation": lambda: generation(under_test, PROMPTS, NEW),
        "endings": lambda: endings(under_test, PROMPTS, NEW, rng),
        "repetitions": lambda: repetitions(under_test, PROMPTS, NEW, rng),
        "log-probabilities": lambda: log_probs(replace(under_test, tolerance=RETURNED), PROMPTS, NEW, 5),
    }
    return checks[check]()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("check", ["generation", "endings", "repetitions", "log-probabilities", "sampling"])
def test_every_variant_is_right(module: ModuleType, check: str, kind: str) -> None:
    finding = checked(check, module.TransformersEngine, kind)
    assert finding.passed is True, finding.detail


def faulty(base: Any, change: Callable[..., tuple[Any, Any]]) -> Any:
    """The engine, asked for what ``change`` makes of prompt and stop set."""

    class Faulty(base):  # type: ignore[misc]  # a module's class
        def ask(self, prompt: Any, max_new: int, stop: Any, *rest: Any, **settings: Any) -> Any:
            changed, stops = change(np.asarray(prompt), stop)
            found = super().ask(changed, max_new, stops, *rest, **settings)
            found.sequences = (
                found.sequences[:, len(changed) - len(prompt) :] if len(changed) >= len(prompt) else found.sequences
            )
            return found

    return Faulty


FAULTS: dict[str, tuple[str, Callable[..., tuple[Any, Any]]]] = {
    "padding without a mask": ("repetitions", lambda prompt, stop: (np.append([0] * 3, prompt), stop)),
    "stop ids ignored": ("endings", lambda prompt, stop: (prompt, frozenset())),
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
