"""``emad lens`` and ``emad generate --lens``: output, files and refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from emad_ref.calibration import lens_fit
from emad_ref.calibration.lens_files import load_lens
from emad_ref.console import INTERRUPTED
from emad_ref.models import loading
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from pytest_emad import cli
from tests.letter_tokenizer import Letters
from tests.small_models import LAYERS, small_model


@pytest.fixture
def small(monkeypatch):
    """Replace ``load``: it knows one small model; tests change its attributes."""
    model = small_model("gpt_neox")
    loaded = SimpleNamespace(
        name="small",
        model=model,
        tokenizer=Letters(),
        fingerprint="f00d",
        opening_token_id=0,
        end_token_ids=frozenset({0}),
        stepper=CausalStepper(model),
        geometry=geometry_of(model.config),
    )
    monkeypatch.setattr(loading, "load", lambda name: loaded)
    monkeypatch.setattr(cli, "require_weights_available", lambda name: None)
    return loaded


OPTIONS = ("--steps", "4", "--held-out", "200")


def fitted(out, *options):
    return cli.main(["lens", "small", str(out), *OPTIONS, *options])


def test_lens_writes_a_file_and_prints_every_layer(small, tmp_path, capsys):
    out = tmp_path / "new" / "small.safetensors"
    assert fitted(out, "--corpus", "world:mixed", "--rank", "3", "--seed", "5") == 0
    found = load_lens(out)
    assert (found.lens.fingerprint, found.lens.dtype, found.lens.rank, found.tokens) == ("f00d", "float64", 3, 200)
    assert [found.plan[name] for name in ("corpus", "seed", "steps", "window")] == ["world:mixed", 5, 4, 128]
    assert list(found.lens.translators) == list(range(1, LAYERS))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [str(layer) for layer in range(1, LAYERS)]
    assert f"{found.tuned_nats[2]:7.4f} nats; without the lens {found.raw_nats[2]:7.4f} nats" in lines[1]
    assert lines[-1] == f"200 held-out tokens; lens {found.lens.digest[:12]} written to {out}"
    assert [path.name for path in out.parent.iterdir()] == [out.name], "no checkpoint is left"


def test_lens_is_full_at_all_layers_by_default_and_at_some_if_asked(small, tmp_path):
    assert fitted(tmp_path / "l", "--layers", "2", "4") == 0
    lens = load_lens(tmp_path / "l").lens
    assert (list(lens.translators), lens.rank) == ([2, 4], None)


def test_an_interrupted_fit_is_resumed(small, tmp_path, capsys, monkeypatch):
    out, judged = tmp_path / "l", lens_fit._measure_batches

    def cut(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(lens_fit, "_measure_batches", cut)
    assert fitted(out) == INTERRUPTED
    monkeypatch.setattr(lens_fit, "_measure_batches", judged)
    assert fitted(out) == 4
    assert "pass resume (--resume)" in capsys.readouterr().err
    assert fitted(out, "--resume") == 0
    assert fitted(tmp_path / "whole") == 0
    assert load_lens(out).lens.digest == load_lens(tmp_path / "whole").lens.digest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rank", "some"), "rank='some', but expected full, or a rank ≥ 1"),
        (("--rank", "99"), "rank=99, but expected a rank of at most 32"),
        (("--rank", "0"), "rank=0, but expected a rank ≥ 1"),
        (("--layers", "6"), "layers=(6,), but expected layers in 1–5"),
        (("--layers", "4", "2"), "layers=(4, 2), but expected ascending layers"),
        (
            ("--exit-gate", "--held-out", "1"),
            "held_out=1, but expected at least 2 tokens with --exit-gate; a gate is fitted",
        ),
        (("--steps", "0"), "steps=0, but expected a number from 1 to"),
        (("--rate", "0"), "rate=0.0, but expected a number above 0 to 1"),
        (("--corpus", "nowhere"), "corpus='nowhere'"),
        (("--seed", "-1"), "--seed='-1'"),
    ],
)
def test_bad_input_is_one_line(small, tmp_path, capsys, options, said):
    assert fitted(tmp_path / "l", *options) == 4
    errors = capsys.readouterr().err.strip().splitlines()
    assert said in errors[-1]
    assert not (tmp_path / "l").exists()


def test_an_encoder_decoder_is_declined(small, tmp_path, capsys):
    small.model.config.is_encoder_decoder = True
    assert fitted(tmp_path / "l") == 4
    assert "expected a decoder-only model" in capsys.readouterr().err


def written(capsys):
    """Return the depths of the tokens written to a pipe."""
    return {json.loads(line)["depth"] for line in capsys.readouterr().out.splitlines()}


def test_generate_leaves_where_the_lens_is_sure_enough(small, tmp_path, capsys):
    assert fitted(tmp_path / "l") == 0
    capsys.readouterr()

    def depths(threshold):
        asked = ["--lens", str(tmp_path / "l"), "--entropy", threshold, "--max-new-tokens", "8"]
        assert cli.main(["generate", "small", "hello", *asked]) == 0
        return written(capsys)

    assert depths("0") == {LAYERS}
    assert depths("99") == {1}
    small.fingerprint = "beef"
    assert cli.main(["generate", "small", "hello", "--lens", str(tmp_path / "l"), "--entropy", "1"]) == 4
    assert "lens.fingerprint='f00d', but expected beef of this model" in capsys.readouterr().err


def test_generate_leaves_where_the_gate_expects_little_divergence(small, tmp_path, capsys):
    out = tmp_path / "l"
    asked = ["generate", "small", "hello", "--lens", str(out), "--max-new-tokens", "8", "--divergence"]
    assert fitted(out) == 0
    assert cli.main([*asked, "1"]) == 4
    assert "divergence=1.0, but expected a lens with a gate" in capsys.readouterr().err
    plain = load_lens(out)
    assert fitted(out, "--exit-gate") == 0
    gated = load_lens(out)
    assert (plain.gate, plain.lens.digest) == (None, gated.lens.digest)
    assert gated.gate is not None
    assert [len(row) for row in gated.gate.weights] == [33] * (LAYERS - 1)
    capsys.readouterr()
    for threshold, depths in (("-99", {LAYERS}), ("99", {1})):
        assert cli.main([*asked, threshold]) == 0
        assert written(capsys) == depths


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--divergence", "1"), "divergence=1.0, but expected --lens too"),
        (("--entropy", "1"), "entropy=1.0, but expected --lens too"),
        (("--lens", "l"), "lens='l', but expected either --entropy NATS or --divergence ROOT too"),
        (("--lens", "l", "--entropy", "1", "--divergence", "1"), "either --entropy NATS or --divergence ROOT"),
        (("--lens", "none", "--entropy", "1"), "lens='none'"),
        (("--lens", "l", "--entropy", "nan"), "entropy=nan"),
    ],
)
def test_generate_refuses_half_of_it(small, capsys, options, said):
    assert cli.main(["generate", "small", "hello", *options]) == 4
    assert said in capsys.readouterr().err
