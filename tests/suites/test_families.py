"""One small random model of every supported family passes the suites that any decoder must pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.small_models import FAMILIES, small_model
from tests.suites.conftest import Run, text_of

AUDITS = ("invariants/test_depth.py", "fidelity/test_bridge.py", "fidelity/test_full_depth.py")
WHOLE = ("gpt_neox", "gemma3")  # the default's family; rotary tables per layer kind, windows, float32 norms


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Map each family to a folder of a random model with weights under which every layer matters."""
    place = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        model = small_model(family, torch.float32)
        model.generation_config.bos_token_id = 0  # its own text is the corpus, which needs an opening token
        model.save_pretrained(place / family)
    return {family: place / family for family in FAMILIES}


@pytest.mark.slow  # a minute and a half: all families, one after the other
def test_every_family_passes_the_audits(judge: Run, folders: dict[str, Path]) -> None:
    """In one run, one model after the other; the drawn properties take longer and are tested on two families below."""
    models = [argument for folder in folders.values() for argument in ("--emad-model", folder)]
    result = judge(*AUDITS, more=(*models, "-v", "--tb=short"))
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    text = result.stdout.str()
    for family in FAMILIES:
        assert text.count(f"[{family}]") + text.count(f"[{family}-") >= 10, family


@pytest.mark.slow  # whole folders of the suites; the main job runs them on a model of the first family
@pytest.mark.parametrize("family", WHOLE)
def test_a_family_passes_by_the_command_a_user_types(judge_apart: Run, folders: dict[str, Path], family: str) -> None:
    result = judge_apart("invariants", "fidelity", model=folders[family])
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    result.stdout.fnmatch_lines(["*EMAD-E2 *survived*"])
