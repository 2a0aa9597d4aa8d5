"""``emad``: what each verb prints and writes, and that bad input exits 1 with a line that says why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from emad_ref import cli
from emad_ref.calibration.profile import load_profile
from emad_ref.models import loading
from emad_ref.training import recipe
from tests.small import LAYERS, VOCABULARY, small_model


class Letters:
    """One token per character, so that no tokenizer has to be trained."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) % VOCABULARY for letter in text]

    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)


@pytest.fixture
def small(monkeypatch):
    """``load`` that knows one small model; tests change its attributes."""
    loaded = SimpleNamespace(
        name="small", model=small_model("gpt_neox"), tokenizer=Letters(), fingerprint="f00d", opening=0, trained=True
    )

    def load(name):
        assert name == "small"
        return loaded

    monkeypatch.setattr(loading, "load", load)
    return loaded


def calibrated(tmp_path, *options):
    out = tmp_path / "profiles" / "small.json"
    assert cli.main(["calibrate", "small", str(out), "--documents", "3", *options]) == 0
    return out


def test_calibrate_writes_a_profile_and_prints_every_layer(small, tmp_path, capsys):
    out = calibrated(tmp_path, "--probes", "2", "4")
    profile = load_profile(out)
    assert (profile.probes, profile.layers, profile.sequences) == ((2, 4), LAYERS, 3)
    assert (profile.model, profile.fingerprint, profile.dtype) == ("small", "f00d", "float64")
    assert profile.corpus == "world:premise"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:LAYERS]] == [str(layer) for layer in range(1, LAYERS + 1)]
    assert ["target" in line for line in lines[:LAYERS]] == [layer in (2, 4) for layer in range(1, LAYERS + 1)]
    assert lines[-1] == f"{profile.tokens} tokens; written to {out}"


def test_calibrate_uses_the_default_probes(small, tmp_path):
    assert load_profile(calibrated(tmp_path)).probes == (2, 4)


def test_calibrate_reads_a_file_or_the_models_own_text(small, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {i}" for i in range(9)), encoding="utf-8")
    assert load_profile(calibrated(tmp_path, "--corpus", str(text))).sequences == 3
    small.tokenizer = None
    assert load_profile(calibrated(tmp_path, "--corpus", "self")).corpus == "self"


def test_generate_shows_the_text_and_a_depth_for_every_token(small, capsys):
    assert cli.main(["generate", "small", "hello", "--tokens", "5"]) == 0
    text, depths = capsys.readouterr().out.splitlines()
    emitted = text.removeprefix("hello").count("<")
    assert 1 <= emitted <= 5
    assert depths == f"depths: {' '.join(['6'] * emitted)}  (mean 6.00 of 6)"


def test_generate_exits_early_with_a_profile_and_not_above_the_margin(small, tmp_path, capsys):
    out = calibrated(tmp_path)
    capsys.readouterr()

    def mean(*options):
        assert cli.main(["generate", "small", "hello", "--tokens", "12", "--profile", str(out), *options]) == 0
        return float(capsys.readouterr().out.split("(mean ")[1].split()[0])

    highest = max(load_profile(out).targets_nats)
    assert mean("--margin", "0") < LAYERS
    assert mean("--margin", f"{highest - 1e-6:.9f}") == LAYERS


def test_generate_samples_by_its_seed(small, capsys):
    def text(seed):
        assert cli.main(["generate", "small", "hello", "--tokens", "8", "--temperature", "1", "--seed", seed]) == 0
        return capsys.readouterr().out

    assert text("1") == text("1")
    assert text("1") != text("2")


def test_world_prints_documents(capsys):
    assert cli.main(["world", "world:premise", "--documents", "2"]) == 0
    assert capsys.readouterr().out.count("?") >= 2


def test_train_writes_where_it_says(monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(recipe, "train", lambda chosen, out: seen.append((chosen.name, out)) or 1.25)
    assert cli.main(["train", "emad-nano", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"emad-nano: 1.2500 nats/token at the end of training; written to {tmp_path}\n"
    assert cli.main(["train", "emad-nano"]) == 0
    assert [out.parts[-3:] for _, out in seen[1:]] == [("models", "weights", "emad-nano")]
    assert seen[0] == ("emad-nano", tmp_path)


BAD = [
    (["train", "emad-huge"], "name='emad-huge', but expected one of emad-tiny"),
    (["world", "world:none"], "corpus='world:none', but expected one of"),
    (["world", "world:premise", "--split", "test"], "split='test', but expected one of train"),
    (["calibrate", "small", "{tmp}/p.json", "--corpus", "nowhere"], "corpus='nowhere'"),
    (["calibrate", "small", "{tmp}/p.json", "--documents", "0"], "at least one document of two tokens"),
    (
        ["calibrate", "small", "{tmp}/p.json", "--documents", "2", "--probes", "4", "2"],
        "probes=(4, 2), but expected ascending",
    ),
    (["calibrate", "small", "{tmp}/p.json", "--documents", "2", "--probes", "6"], "probes=(6,)"),
    (["generate", "small", "hi", "--tokens", "0"], "max_new=0"),
    (["generate", "small", "hi", "--tokens", "1000"], "positions="),
    (["generate", "small", "hi", "--temperature", "-1"], "temperature=-1.0"),
    (["generate", "small", "hi", "--profile", "{tmp}/none.json"], "a readable JSON file"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=[" ".join(argv)[:40] for argv, _ in BAD])
def test_bad_input_exits_1_and_says_why_on_stderr(small, tmp_path, capsys, argv, message):
    assert cli.main([part.format(tmp=tmp_path) for part in argv]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("emad: "), "only a progress bar may stand before it"
    assert message in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not list(tmp_path.glob("*"))


def test_the_profile_of_another_model_is_refused(small, tmp_path, capsys):
    out = calibrated(tmp_path)
    small.fingerprint = "beef"
    assert cli.main(["generate", "small", "hi", "--profile", str(out)]) == 1
    assert "profile.fingerprint='f00d', but the model under test has 'beef'" in capsys.readouterr().err


def test_impossible_probes_are_refused_before_the_long_pass(small, monkeypatch, tmp_path):
    monkeypatch.setattr("emad_ref.calibration.trace.take_trace", lambda *_, **__: pytest.fail("the pass was run"))
    assert cli.main(["calibrate", "small", str(tmp_path / "p.json"), "--probes", "6"]) == 1


def test_a_model_without_a_tokenizer_reads_no_text(small, tmp_path, capsys):
    small.tokenizer = None
    for argv in (["generate", "small", "hi"], ["calibrate", "small", str(tmp_path / "p.json")]):
        assert cli.main(argv) == 1
        assert "model='small', but expected a model with a tokenizer; pass the folder" in capsys.readouterr().err


def test_an_empty_prompt_needs_an_opening_token(small, capsys):
    assert cli.main(["generate", "small", "", "--tokens", "2"]) == 0
    small.opening = None
    assert cli.main(["generate", "small", "", "--tokens", "2"]) == 1
    assert "start with the model's opening token" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["dance"], ["train"], ["generate", "small"], ["world", "x", "--documents", "few"]]
)
def test_what_cannot_be_parsed_is_a_usage_error(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: emad" in capsys.readouterr().err
