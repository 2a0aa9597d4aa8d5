"""The exit file stores all that decoding needs and names its model; a damaged file gives one clear error."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emad_ref.absent import Absent
from emad_ref.calibration.lens_files import FittedLens, save_lens
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, DraftLengths
from emad_ref.decoding.streaming import make_prompt_from_text
from emad_ref.errors import BadArgument
from emad_ref.models import loading
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.probes.tuned_lens import StateTranslators, Translator
from emad_ref.protocol import Prompt
from pytest_emad import cli
from pytest_emad.screening.exit import BadExit, Exit, load_exit, save_exit
from pytest_emad.screening.guarantee import Guarantee, ThresholdTest
from tests.letter_tokenizer import Letters
from tests.random_lenses import FINGERPRINT, drawn_lens
from tests.small_models import LAYERS, small_model

NATS = {2: 0.5, 4: 0.25}
DRAFTING = Drafting(
    2,
    3,
    0.25,
    None,
    EntropyEstimator("linear", weights=((0.1 + 0.2,) * 33,)),
    np.array([1, 5, 7]),
    by_rows=(DraftLengths(2, 3, 0), DraftLengths(8, 1, 4)),
)
PROMISE = Guarantee(
    "excess", 0.2, 0.01, 0.05, 300, "numbers", (ThresholdTest("gate", 0.004, 0.01),), 0, 0.0, 0.9, 210, None
)


def promise_of(point: OperatingPoint) -> Guarantee:
    return replace(PROMISE, tested=(PROMISE.tested[0]._replace(point=point.digest),))


@pytest.fixture
def model():
    walked = small_model("gpt_neox")
    return SimpleNamespace(stepper=CausalStepper(walked), fingerprint=FINGERPRINT, model=walked, name="small")


@pytest.fixture
def found(model):
    lens = drawn_lens(model.stepper, [2, 4])
    gate = EntropyEstimator("linear", weights=((0.25,) * 33, (0.1 + 0.2,) * 33))
    point = OperatingPoint(
        "gate", "gate", LAYERS, LAYERS, (2, 4), ((0.3, float("-inf")),), "copying", gate, "divergence", lens=lens.digest
    )
    return Exit(FittedLens(lens, {"corpus": "numbers"}, NATS, NATS, 7, gate), point, screened={"seed": 3})


def test_everything_comes_back(found, tmp_path):
    save_exit(tmp_path / "e", found)
    back = load_exit(tmp_path / "e")
    assert (back.lossy, back.screened) == (found.lossy, {"seed": 3})
    assert (back.fitted.lens.digest, back.fitted.gate) == (found.fitted.lens.digest, found.fitted.gate)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize(
    "drafting",
    [DRAFTING, Drafting(4, 2), replace(DRAFTING, copied=8), Drafting(2, 0, copied=4)],
    ids=["gated", "always", "copies besides", "copies alone"],
)
def test_its_promise_and_its_way_of_drafting_come_back(found, tmp_path, drafting):
    save_exit(tmp_path / "e", replace(found, guarantee=promise_of(found.lossy), drafting=drafting))
    back = load_exit(tmp_path / "e")
    assert back.guarantee == promise_of(found.lossy)
    assert {**vars(back.drafting), "vocabulary": None} == {**vars(drafting), "vocabulary": None}
    np.testing.assert_array_equal(back.drafting.vocabulary, drafting.vocabulary)


def test_state_translators_come_back_and_are_attached(model, found, tmp_path):
    width = model.stepper.geometry.hidden
    drawn = Translator((torch.randn(width, 2).double(), torch.randn(width, 2).double()), torch.randn(width).double())
    pairs = {(at, layer): drawn for at in (2, 4) for layer in range(at + 1, LAYERS)}
    translators = StateTranslators(FINGERPRINT, "float64", LAYERS, pairs)
    point = replace(found.point, schedule="translated", translators=translators.digest)
    with pytest.raises(BadArgument, match="the digest of its own translators"):
        replace(found, lossy=point)
    save_exit(tmp_path / "e", replace(found, lossy=point, translators=translators))
    back = load_exit(tmp_path / "e")
    assert (back.lossy, back.translators.digest) == (point, translators.digest)
    record = WalkedDecoder(model.stepper, back.attach(model).point).generate([Prompt(np.array([1, 2, 3]))], 4)
    assert len(record.emitted[0]) == 4


def test_without_a_lossy_point_it_says_why_and_runs_all_layers(found, tmp_path):
    save_exit(tmp_path / "e", replace(found, lossy=Absent("no slack")))
    back = load_exit(tmp_path / "e")
    assert (back.lossy, back.point) == (Absent("no slack"), full_depth(LAYERS))


def test_what_is_attached_decodes(model, found):
    prompt = [Prompt(np.array([1, 2, 3]))]
    with pytest.raises(BadArgument, match=r"point\.lens="):
        WalkedDecoder(model.stepper, found.point).generate(prompt, 4)
    assert found.attach(model) is found
    record = WalkedDecoder(model.stepper, found.point).generate(prompt, 4)
    assert len(record.emitted[0]) == 4


def test_generate_of_transformers_takes_it(model, found):
    ids = torch.tensor([[1, 2, 3]])
    made = model.model.generate(ids, max_new_tokens=6, do_sample=False, custom_generate=found.custom_generate(model))
    record = WalkedDecoder(model.stepper, found.point).generate([Prompt(ids[0].numpy())], 6)
    assert made[0, 3:].tolist() == record.emitted[0].tolist()
    with pytest.raises(BadArgument, match="loaded='small', but expected the very model that generates"):
        small_model("gpt_neox").generate(ids, max_new_tokens=2, custom_generate=found.custom_generate(model))


def let_commands_load(model, monkeypatch) -> None:
    """Complete ``model`` by a tokenizer, and let every name of a command lead to it."""
    model.tokenizer, model.opening_token_id, model.end_token_ids = Letters(), 0, frozenset({0})
    model.geometry = model.stepper.geometry
    monkeypatch.setattr(loading, "load", lambda name: model)
    monkeypatch.setattr(cli, "require_weights_available", lambda name: None)


def test_the_command_line_decodes_with_it(model, found, tmp_path, monkeypatch, capsys):
    let_commands_load(model, monkeypatch)
    save_exit(tmp_path / "e", found)
    save_exit(tmp_path / "none", replace(found, lossy=Absent("no slack")))
    save_exit(tmp_path / "advised", replace(found, leave_early=True))
    depths = {}
    for name, file, *way in (("e", "e"), ("e lossy", "e", "--lossy"), ("advised", "advised"), ("none", "none")):
        assert (
            cli.main(["generate", "small", "hello", "--exit", str(tmp_path / file), *way, "--max-new-tokens", "30"])
            == 0
        )
        depths[name] = [json.loads(line)["depth"] for line in capsys.readouterr().out.splitlines()]
    record = WalkedDecoder(model.stepper, found.point).generate([make_prompt_from_text(model, "hello")], 30)
    early, full = record.tokens.select_sequence(0, 1).depth.tolist(), [LAYERS] * 30
    assert depths == {"e": full, "e lossy": early, "advised": early, "none": full}
    assert set(early) != {LAYERS}, "no token exited early: nothing was tested"
    assert cli.main(["generate", "small", "hello", "--exit", str(tmp_path / "none"), "--lossy"]) == 4
    assert "this one has none: no slack" in capsys.readouterr().err
    asked = ["generate", "small", "hello", "--exit", str(tmp_path / "e")]
    assert cli.main([*asked, "--lossless"]) == 4
    assert "expected an exit with drafts" in capsys.readouterr().err
    model.fingerprint = "beef"
    assert cli.main(asked) == 4
    assert "lens.fingerprint='f00d', but expected beef of this model" in capsys.readouterr().err


@pytest.mark.parametrize("copied", [0, 4])
@pytest.mark.parametrize("options", [(), ("--temperature", "0.8", "--seed", "3")], ids=["greedy", "sampled"])
def test_what_is_drafted_is_the_models_own_output(model, found, tmp_path, monkeypatch, capsys, options, copied):
    let_commands_load(model, monkeypatch)
    gate = replace(found.fitted.gate, weights=found.fitted.gate.weights[:1])
    drafting = Drafting(2, 3, 1e9, found.fitted.lens.digest, gate, copied=copied)
    save_exit(tmp_path / "e", replace(found, drafting=drafting))
    save_exit(tmp_path / "none", replace(found, drafting=drafting, lossy=Absent("no slack")))
    asked, said = ["generate", "small", "hello", "--max-new-tokens", "20", *options], []
    for how in ((), ("--exit", str(tmp_path / "e"), "--lossless"), ("--exit", str(tmp_path / "none"))):
        assert cli.main([*asked, *how]) == 0
        said.append([json.loads(line)["token"] for line in capsys.readouterr().out.splitlines()])
    assert said[1] == said[2]
    assert len(said[1]) == 20
    if not options:  # a sampled draft has other draws from the same distribution
        assert said[1] == said[0]


def test_another_model_is_refused(model, found):
    model.fingerprint = "beef"
    with pytest.raises(BadArgument, match=r"lens\.fingerprint='f00d', but expected beef of this model"):
        found.attach(model)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lossy": full_depth(4)}, "6, the layers of its lens"),
        ({"lossy": replace(full_depth(LAYERS), lens="other")}, "the digest of its own lens"),
        ({"drafting": Drafting(2, 3, lens="other")}, "the digest of its own lens"),
        ({"drafting": Drafting(6, 3)}, "a layer in 1–5"),
        (
            {"guarantee": replace(PROMISE, tested=(ThresholdTest("gate", 0, 0, "another of this name"),))},
            "the point that is recommended",
        ),
        ({"guarantee": PROMISE, "lossy": Absent("no slack")}, "the point that is recommended"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(found, wrong, said):
    with pytest.raises(BadArgument, match=said):
        replace(found, **wrong)


def test_changed_and_foreign_files_are_one_clear_error(found, tmp_path):
    save_exit(tmp_path / "e", found)
    save_lens(tmp_path / "lens", found.fitted)
    data = (tmp_path / "e").read_bytes()
    for damaged, said in (
        (data[:-20], "cannot be read"),
        (data.replace(rb"\"schema\": 5", rb"\"schema\": 3"), "has schema=3, but this version reads 5 alone"),
        (data.replace(found.fitted.lens.digest.encode(), b"0" * 64), "was changed or cut"),
        ((tmp_path / "lens").read_bytes(), "has format='lens', but expected 'exit'"),
    ):
        assert damaged != data
        (tmp_path / "e").write_bytes(damaged)
        with pytest.raises(BadExit, match=rf"^exit='.*/e' .*{said}.*; screen the model again with `emad screen`$"):
            load_exit(tmp_path / "e")


def test_a_write_that_fails_leaves_what_was_there(found, tmp_path, monkeypatch):
    (tmp_path / "e").write_bytes(b"before")
    monkeypatch.setattr("safetensors.torch.save", lambda *parts, **about: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_exit(tmp_path / "e", found)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("e", b"before")]
