"""The recipe of a small partner model: a student with the model's own embeddings learns its distribution."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from emad_ref.models.loading import load, shared_vocabulary_size
from tests.examples.conftest import EXAMPLES

KEPT = (0, 3, 7, 11)
STEPS = 12


@pytest.fixture(scope="module")
def module() -> ModuleType:
    described = importlib.util.spec_from_file_location("distil", EXAMPLES / "student" / "distil.py")
    assert described is not None
    assert described.loader is not None
    loaded = importlib.util.module_from_spec(described)
    described.loader.exec_module(loaded)
    return loaded


def divergence(module: ModuleType, student: torch.nn.Module, windows: torch.Tensor) -> float:
    """Return nats per token on windows that the student did not read."""
    taught = load("emad-tiny").model.base_model(windows).last_hidden_state
    with torch.no_grad():
        return float(module.loss_of(student, windows, taught, torch.Generator().manual_seed(0))[1])


@pytest.mark.slow
def test_a_student_learns_from_calibration_text_and_is_a_partner(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = load("emad-tiny")
    windows = module.windows_of(teacher, ["world:mixed"], 60)
    untrained = module.student_of(teacher.model, KEPT)
    assert untrained.config.num_hidden_layers == len(KEPT)
    arguments = ["emad-tiny", str(tmp_path / "s"), "--corpus", "world:mixed", "--documents", "50"]
    monkeypatch.setattr(module, "WARM_UP", 1)  # of so few steps
    module.main([*arguments, "--layers", ",".join(map(str, KEPT)), "--steps", str(STEPS)])
    student = load(str(tmp_path / "s"))
    assert student.geometry.layers == len(KEPT)
    assert shared_vocabulary_size(student, teacher) == teacher.geometry.vocabulary
    for part in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(student.model, part)().weight, getattr(teacher.model, part)().weight)
    unread = windows[-8:]
    learned, before = (divergence(module, each, unread) for each in (student.model, untrained))
    assert learned < 0.8 * before


def test_the_teachers_states_are_read_once(module: ModuleType) -> None:
    teacher, reads = load("emad-tiny"), []
    windows = module.windows_of(teacher, ["world:mixed"], 20)
    hook = teacher.model.base_model.register_forward_hook(lambda *called: reads.append(1))
    kept: dict[int, torch.Tensor] = {}
    first = module.final_states(teacher.model, windows, torch.tensor([2, 0]), kept)
    again = module.final_states(teacher.model, windows, torch.tensor([0, 2]), kept)
    hook.remove()
    assert len(reads) == 1
    assert torch.equal(first, again.flip(0))
