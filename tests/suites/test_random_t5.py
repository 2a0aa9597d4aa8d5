"""A small random T5 passes the suites that any decoder must pass; its claims are decided or give a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from tests.suites.conftest import Run, only, text_of, verdicts_of

# Tests of the two suites that an encoder-decoder cannot take (a forward without decoder inputs, lm-eval's
# requests without sources), and speculation, which is about a pair of other models.
LEFT_OUT = ("speculat",)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a T5 with more decoder than encoder layers, as transformers' own generate() fails on."""
    folder = tmp_path_factory.mktemp("models") / "t5"
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=5, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():  # with the usual initialisation, blocks hardly matter next to the embedding
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return folder


# In CI depths, rollback, rows, generation, cache and bridge; the decoder has tests/laws/test_seq2seq_decoding.py.
OFTEN = (
    "invariants/test_depth.py",
    "invariants/test_kv_consistency.py",
    "fidelity/test_bridge.py",
    "fidelity/test_full_depth.py",
)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(OFTEN, id="often"),
        pytest.param(("invariants", "fidelity"), marks=pytest.mark.slow, id="everything"),
    ],
)
def test_audits_pass(judge: Run, t5: Path, tmp_path: Path, asked: tuple[str, ...]) -> None:
    """Depth, rollback, rows, bridge, generation, sampling, operations in any order, its own greedy tokens."""
    out, chosen = tmp_path / "out", " and ".join(f"not {name}" for name in LEFT_OUT)
    result = judge(*asked, model=t5, report=out, more=("-k", chosen))
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    assert result.parseoutcomes()["passed"] >= 9
    assert verdicts_of(out)["EMAD-E2"]["verdict"] == "survived"


def test_rows_about_plain_documents_do_not_apply_and_block_compute_is_counted(
    judge: Run, t5: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = only("EMAD-F1", "EMAD-F1-literal", "EMAD-E1", "EMAD-E5", "EMAD-F2", "EMAD-E7")
    result = judge("claims/test_model.py", "cost", model=t5, report=out, more=("--emad-all-claims", *asked))
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    verdicts = verdicts_of(out)
    for claim in ("EMAD-F1", "EMAD-F1-literal", "EMAD-F2", "EMAD-E1", "EMAD-E7"):
        assert verdicts[claim]["verdict"] == "not applicable"
        assert "an encoder-decoder model" in verdicts[claim]["reason"]
    assert verdicts["EMAD-E5"]["verdict"] == "survived"


def test_early_exit_rows_without_tasks_or_training_say_so(judge: Run, t5: Path, tmp_path: Path) -> None:
    """A stored model without a tokenizer cannot read the tasks; arithmetic needs none."""
    out = tmp_path / "out"
    result = judge("claims", model=t5, report=out, more=only("EE-3", "EE-8"))
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    verdicts = verdicts_of(out)
    assert verdicts["EE-3"]["verdict"] == "unmeasured"
    assert "without a tokenizer" in verdicts["EE-3"]["reason"]
    assert verdicts["EE-8"]["verdict"] == "falsified"
    bounds = [leg["estimate"] for leg in verdicts["EE-8"]["legs"] if "bound" in leg["name"]]
    assert bounds == pytest.approx([12.0, 24 / 7, 24 / 19])


def test_random_weights_still_give_the_arithmetic_of_pruning(
    judge: Run, monkeypatch: pytest.MonkeyPatch, t5: Path, tmp_path: Path
) -> None:
    from emad_ref.models import bundled

    monkeypatch.setattr(bundled, "weights_folder", lambda: t5.parent)
    out = tmp_path / "out"
    result = judge("claims/test_model.py", model="random:t5", report=out, more=only("EE-1", "EE-4", "EE-5"))
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    verdicts = verdicts_of(out)
    assert verdicts["EE-1"]["verdict"] == "falsified"
    assert verdicts["EE-4"]["verdict"] == "measured"
    assert verdicts["EE-5"]["verdict"] == "not applicable"
    assert "random weights" in verdicts["EE-5"]["reason"]
