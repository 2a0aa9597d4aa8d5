"""The example decoder that is provided by the hook: short, self-contained, and judged at its tier."""

from __future__ import annotations

import importlib.util
import tomllib
from types import ModuleType

import numpy as np
import pytest

from emad_ref.point import full_depth
from emad_ref.protocol import Prompt, Unsupported
from pytest_emad.audit import check_generation
from pytest_emad.audit.trajectory import DecoderUnderTest
from tests.decoders.audited_model import lens_of
from tests.examples.conftest import EXAMPLES, Suites
from tests.small_models import LAYERS, small_model

PLUGIN = EXAMPLES / "plugin"
TOLERANCE = 1e-9  # float64: sums in a different order


@pytest.fixture
def module() -> ModuleType:
    described = importlib.util.spec_from_file_location("plain_decoder", PLUGIN / "plain_decoder.py")
    assert described is not None
    assert described.loader is not None
    loaded = importlib.util.module_from_spec(described)
    described.loader.exec_module(loaded)
    return loaded


def test_it_is_fewer_than_65_lines_of_python() -> None:
    (file,) = PLUGIN.rglob("*.py")
    assert len(file.read_text(encoding="utf-8").splitlines()) < 65


def test_its_entry_point_is_its_module() -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"plain": "plain_decoder"}
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == ["plain_decoder.py"]


def test_sessions_answer_as_fresh_ones_would(module: ModuleType) -> None:
    model = small_model("gpt_neox")
    lens, decoder = lens_of(model), module.Decoder()
    decoder.model = model
    session, step = decoder.start([Prompt(np.arange(7)), Prompt(np.arange(3)), Prompt(np.arange(4))])
    histories = [list(range(7)), list(range(3)), list(range(4))]

    def hold(logits: np.ndarray, n: int) -> None:
        assert session.length.tolist() == [len(row) for row in histories]
        for row, history in enumerate(histories):
            np.testing.assert_allclose(logits[row], lens(np.array(history))[-n:, -1], atol=TOLERANCE)

    hold(step.logits, 1)
    for row, fed in enumerate(([8, 9], [1, 2], [3, 4])):
        histories[row] += fed
    hold(session.feed(np.array([[8, 9], [1, 2], [3, 4]])).logits, 2)
    session.rollback(np.array([8, 5, 6]))  # the second row keeps all its tokens
    session.drop(np.array([2]))
    histories = [[*histories[0][:8], 5], [*histories[1][:5], 6]]
    hold(session.feed(np.array([[5], [6]])).logits, 1)
    with pytest.raises(Unsupported, match="forced depths"):
        session.feed(np.array([[5], [6]]), np.array([[1], [1]]))


def test_its_records_are_what_it_did(module: ModuleType) -> None:
    decoder = module.Decoder()
    decoder.model, decoder.temperature, decoder.seed = small_model("gpt_neox"), 0.0, 0
    prompts = [Prompt(np.arange(7)), Prompt(np.arange(1)), Prompt(np.arange(4))]
    lens, full = lens_of(decoder.model), full_depth(LAYERS)
    finding = check_generation(DecoderUnderTest(decoder, lens, full, TOLERANCE, exact_context=True), prompts, 8)
    assert finding.passed is True, finding


@pytest.mark.slow  # invariants and fidelity, whole
def test_it_is_judged_at_its_tier_without_a_waiver(suites: Suites) -> None:
    said = suites(
        *("invariants", "fidelity", "-p", "plain_decoder", "--emad-backend", "plain_decoder"),
        *("--emad-tier", "sessions", "--emad-inconclusive", "fail"),
        path=PLUGIN,
    )
    assert "tier sessions (streams nothing, one request at a time); live: " in said, said
    assert "waived" not in said
