"""``emad drift``: what it says of text and of records, with which exit status, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref import cli
from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.linear_maps import fit_gate
from emad_ref.calibration.trace import take_trace
from emad_ref.errors import BadArgument
from emad_ref.models import loading
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.point import OperatingPoint
from emad_ref.probes.lens import attach_lens
from emad_ref.screening.drift import read_features
from emad_ref.screening.exit import Exit, load_exit, save_exit
from emad_ref.screening.guarantee import Guarantee, ThresholdTest
from emad_ref.screening.record_files import signs_of_files
from emad_ref.tuning import windows_of
from tests.lenses import FINGERPRINT, drawn_lens
from tests.letters import Letters
from tests.small import LAYERS, small_model

PROBES = (2, 4)
WORDS = {"plain": "one or two of the words", "odd": "ZZZZ QQQQ XXXX"}  # no letter in common


def texts(kind: str, count: int, seed: int = 0) -> str:
    """Paragraphs of one word list in random order."""
    rng = np.random.default_rng(seed)
    lines = (" ".join(rng.permutation(WORDS[kind].split() * 3)) for _ in range(count))
    return "\n\n".join(lines)


@pytest.fixture(scope="module")
def model():
    walked = small_model("gpt_neox")
    return SimpleNamespace(
        name="small",
        model=walked,
        tokenizer=Letters(),
        fingerprint=FINGERPRINT,
        opening=0,
        ends=frozenset({0}),
        stepper=CausalStepper(walked),
        geometry=geometry_of(walked.config),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for kind in WORDS:
        (folder / f"{kind}.txt").write_text(texts(kind, 320))
    return folder


@pytest.fixture(scope="module")
def promise(model, files):
    """An exit whose guarantee is about plain.txt."""
    lens = drawn_lens(model.stepper, PROBES, scale=0.1)
    name = attach_lens(model.stepper, lens, FINGERPRINT)
    windows = list(windows_of(model, str(files / "plain.txt"), "validate"))
    gate = fit_gate(model.stepper, windows, PROBES, name)
    trace = take_trace(model.stepper, windows, estimators={gate: PROBES}, lens=name)
    levels = tuple(float(np.quantile(trace.estimates[gate][:, probe - 1], 0.4)) for probe in PROBES)
    point = OperatingPoint(
        "gate", "gate", LAYERS, LAYERS, PROBES, (levels,), "free_eager", gate, "divergence", lens=name
    )
    signs = read_features(model.stepper, point, windows, "plain text")
    tried = (ThresholdTest("gate", 0.001, 0.01),)
    guarantee = Guarantee("excess", 0.2, 0.01, 0.05, len(windows), "plain text", tried, "gate", 0.0, 0.9, 80)
    nats = dict.fromkeys(PROBES, 0.5)
    fitted = FittedLens(lens, {"model": "small"}, nats, nats, 7, gate)
    return Exit(fitted, point, guarantee=guarantee, signs=signs)


@pytest.fixture
def drift(promise, model, tmp_path, monkeypatch, capsys):
    """Run the verb with an exit written to a file; (status, printed, complained)."""
    asked = []
    monkeypatch.setattr(loading, "load", lambda name: asked.append(name) or model)
    path = tmp_path / "exit.safetensors"

    def run(*options, found=promise):
        save_exit(path, found)
        status = cli.main(["drift", str(path), *map(str, options)])
        return status, *capsys.readouterr()

    run.asked = asked
    return run


def test_text_of_the_same_kind_speaks(drift, files):
    status, said, _ = drift(files / "plain.txt")
    assert status == 0
    assert "Nothing is seen to have moved" in said
    assert "Promised was: With probability 95% over draws of these" in said.replace("\n", " ")
    assert "exits after 2" in said
    assert drift.asked == ["small"], "the model that it was screened on"


def test_text_of_another_kind_has_moved(drift, files):
    status, said, _ = drift(files / "odd.txt", "--documents", "20", "--model", "elsewhere", "--seed", "3")
    assert status == 1
    assert "The text has moved" in said
    assert "the guarantee does not speak of it" in said.replace("\n", " ")
    assert "20 documents of" in said.replace("\n", " ")
    assert drift.asked == ["elsewhere"]


def test_too_little_text_says_so(drift, files):
    status, said, _ = drift(files / "plain.txt", "--documents", "2")
    assert status == 2
    assert "Too little text to say" in said


def test_several_texts_are_one_mixture_of_documents(drift, files):
    status, said, _ = drift(files / "plain.txt", files / "odd.txt", "--documents", "15")
    assert status == 1
    assert "30 documents of" in said.replace("\n", " ")


# ---------------------------------------------------------------- records


def lines(depths, **more) -> str:
    return "".join(json.dumps({"depth": int(depth), "layers": LAYERS, **more}) + "\n" for depth in depths)


def drawn(rng, shares, tokens=40):
    return rng.choice([*PROBES, LAYERS], tokens, p=shares)


def written(folder, promise, count, shares=None) -> list[str]:
    """Options that name records, one a file, whose depths have the reference's shares, or others."""
    rng = np.random.default_rng(0)
    shares = promise.signs.values.values[:, :3].mean(axis=0) if shares is None else shares
    options = []
    for number in range(count):
        path = folder / f"{number}.jsonl"
        path.write_text(lines(drawn(rng, shares), text="x", token=1, model="small"))
        options += ["--record", str(path)]
    return options


def test_records_are_compared_by_their_depths(drift, promise, tmp_path):
    status, said, _ = drift(*written(tmp_path, promise, 12, shares=[0.9, 0.1, 0.0]))
    assert status == 1
    assert "signal" not in said.split("Promised")[0]
    assert drift.asked == [], "no model is needed"


def test_a_file_may_hold_many_documents_and_signals(promise, tmp_path):
    first = lines([2, 6], document=3, signal=[0.1, None]) + "\n" + lines([4], document=5, signal=[0.3, 0.2])
    (tmp_path / "a").write_text(first)
    (tmp_path / "b").write_text(lines([6, 6, 6], signal=[0.5, 0.5]))
    found = signs_of_files([tmp_path / "a", tmp_path / "b"], promise.point, "two files")
    assert found.values.values[:, :3].tolist() == [[0.5, 0, 0.5], [0, 1, 0], [0, 0, 1]]
    assert found.values.values[:, 3].tolist() == pytest.approx([0.1, 0.3, 0.5])
    assert np.isnan(found.values.values[0, 4])


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        "{}",
        '{"depth": 2}',
        '{"depth": 2, "layers": 99}',
        '{"depth": 2.5, "layers": 6}',
        '{"depth": 2, "layers": 6, "document": "a"}',
        '{"depth": 2, "layers": 6, "signal": [0.1]}',
        '{"depth": 2, "layers": 6, "signal": [0.1, "a"]}',
        '{"depth": 2, "layers": 6, "signal": 3}',
    ],
)
def test_lines_that_record_nothing_are_refused_by_number(promise, tmp_path, line):
    (tmp_path / "a").write_text(lines([2]) + line + "\n")
    with pytest.raises(BadArgument, match="a, line 2="):
        signs_of_files([tmp_path / "a"], promise.point, "a file")


@pytest.mark.parametrize("content", ["", lines([2]) + lines([2], signal=[0.1, 0.2]), lines([9])])
def test_files_that_record_nothing_are_refused(promise, tmp_path, content):
    (tmp_path / "a").write_text(content)
    with pytest.raises(BadArgument):
        signs_of_files([tmp_path / "a"], promise.point, "a file")


# ---------------------------------------------------------------- what is refused, with status 2: nothing can be said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "a text to read, or --record FILE"),
        (["a.txt", "--record", "a.jsonl"], "and not both"),
        (["no/such/text"], "no/such/text"),
        (["--record", "no/such/file"], "no/such/file"),
    ],
)
def test_what_cannot_be_read_is_named(drift, options, said):
    status, printed, complained = drift(*options)
    assert (status, printed) == (2, "")
    assert complained.startswith("emad: ")
    assert said in complained


def test_an_exit_without_a_promise_has_nothing_that_could_cease_to_speak(drift, promise, files):
    bare = (
        replace(promise, guarantee=None),
        replace(promise, lossy=None, guarantee=None, why_none="no slack: leave this model alone"),
        replace(promise, guarantee=replace(promise.guarantee, chosen=None)),
        replace(promise, signs=None),
    )
    reasons = ("not certified", "no slack: leave this model alone", "Nothing is promised", "screen the model again")
    for found, reason in zip(bare, reasons, strict=True):
        status, _, complained = drift(files / "plain.txt", found=found)
        assert status == 2
        assert reason in complained


def test_a_file_that_is_no_exit_is_refused(tmp_path, capsys):
    (tmp_path / "e").write_text("no exit")
    assert cli.main(["drift", str(tmp_path / "e"), "world:mixed"]) == 2
    assert "expected one that `emad screen` wrote" in capsys.readouterr().err


def test_signs_are_kept_in_the_file(promise, tmp_path):
    save_exit(tmp_path / "e", promise)
    back = load_exit(tmp_path / "e")
    assert back.signs.names == promise.signs.names
    assert back.signs.values.values == pytest.approx(promise.signs.values.values, abs=1e-7, nan_ok=True)
    save_exit(tmp_path / "e", replace(promise, signs=None))
    assert load_exit(tmp_path / "e").signs is None
