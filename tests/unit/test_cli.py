"""``emad``: the output and files of each verb; bad input exits with status 1 and one line that gives the reason."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from emad_ref.calibration import calibration_run as run_module
from emad_ref.calibration.profile import load_profile, merge
from emad_ref.models import loading
from emad_ref.models.bundled import weights_folder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.text import corpora as corpora_module
from emad_ref.training import loop
from pytest_emad import cli
from pytest_emad.cli import screening
from pytest_emad.measurements import model_under_test
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.pareto import FamilyComparison
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.report.figures import require_drawable
from tests.letter_tokenizer import Letters
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.report.sample_report import report as reported
from tests.unit.report.sample_report import verdict, written
from tests.unit.test_files import device

JUDGED = ("calibrate", "validate", "evaluate")


@pytest.fixture
def small(monkeypatch):
    """Replace ``load``: it knows one small model; tests change its attributes."""
    model = small_model("gpt_neox")
    loaded = SimpleNamespace(
        name="small", model=model, tokenizer=Letters(), fingerprint="f00d",
        opening_token_id=0, end_token_ids=frozenset({0}),
        trained=True, bundled=False,
        geometry=geometry_of(model.config), stepper=CausalStepper(model),
    )  # fmt: skip

    def load(name, **options):
        assert name == "small"
        return loaded

    for module in (loading, model_under_test):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(cli, "require_weights_available", lambda name: None)
    return loaded


def calibrated(tmp_path, *options):
    out = tmp_path / "profiles" / "small.json"
    assert cli.main(["calibrate", "small", str(out), "--documents", "3", *options]) == 0
    return out


@pytest.mark.parametrize(("options", "read"), [((), (2, 4, LAYERS)), (("--every-layer",), tuple(range(1, LAYERS + 1)))])
def test_calibrate_writes_a_profile_and_prints_every_layer_read(small, tmp_path, capsys, options, read):
    out = calibrated(tmp_path, "--probes", "2", "4", *options)
    profile = load_profile(out)
    assert (profile.probes, profile.layers, profile.sequences) == ((2, 4), LAYERS, 3)
    assert (profile.model, profile.fingerprint, profile.dtype) == ("small", "f00d", "float64")
    assert profile.corpus == "world:premise"
    lines = capsys.readouterr().out.splitlines()
    assert profile.read == read
    assert [line.split()[1] for line in lines[: len(read)]] == [str(layer) for layer in read]
    assert ["target" in line for line in lines[: len(read)]] == [layer in (2, 4) for layer in read]
    assert [float(line.split()[3]) for line in lines[: len(read)]] == pytest.approx(profile.mean_nats, abs=5e-5)
    assert lines[-1] == f"{profile.tokens} tokens; written to {out}"


def test_calibrate_uses_the_default_probes(small, tmp_path):
    assert load_profile(calibrated(tmp_path)).probes == (2, 4)


def test_calibrate_reads_a_file_or_the_models_own_text(small, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {i}" for i in range(9)), encoding="utf-8")
    assert load_profile(calibrated(tmp_path, "--corpus", str(text))).sequences == 3
    small.tokenizer = None
    assert load_profile(calibrated(tmp_path, "--corpus", "self")).corpus == "self"


def generated(capsys, *options):
    assert cli.main(["generate", "small", "hello", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_generate_prints_an_object_per_token_to_a_pipe(small, capsys):
    rows = generated(capsys, "--max-new-tokens", "5")
    assert 1 <= len(rows) <= 5
    for row in rows:
        assert row == {"text": f"<{row['token']}>", "token": row["token"], "depth": 6, "layers": 6, "model": "small"}


def test_generate_writes_text_where_it_is_asked_for(small, capsys, monkeypatch):
    tokens = [row["token"] for row in generated(capsys, "--max-new-tokens", "12")]
    monkeypatch.setenv("COLUMNS", "20")
    assert cli.main(["generate", "small", "hello", "--max-new-tokens", "12", "--format", "text"]) == 0
    text, *lines = capsys.readouterr().out.splitlines()
    assert text == "hello" + "".join(f"<{token}>" for token in tokens)
    depths = " ".join(["6"] * len(tokens))
    assert " ".join(lines) == f"depths: {depths} {len(tokens)} tokens, mean depth 6.00 of 6"
    assert max(map(len, lines)) <= 20


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "\x1b[38;5;"), ({"COLORTERM": "truecolor"}, "\x1b[38;2;"), ({"NO_COLOR": "1"}, None)],
)
def test_generate_colours_the_text_in_a_terminal(small, capsys, monkeypatch, environment, expected):
    for name in ("NO_COLOR", "COLORTERM", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["generate", "small", "hello", "--max-new-tokens", "4"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert ("\x1b" in first) is ("depth 1 " in first) is (expected is not None)
    assert rest[0].startswith("hello" + (expected or "<")) if expected else first.startswith("hello<")
    assert any(line.startswith("depths: ") for line in rest) is (expected is None), "colours show it already"


def test_generate_exits_early_with_a_profile_and_not_above_the_margin(small, tmp_path, capsys):
    out = calibrated(tmp_path)
    capsys.readouterr()

    def mean(*options):
        rows = generated(capsys, "--max-new-tokens", "12", "--profile", str(out), *options)
        return sum(row["depth"] for row in rows) / len(rows)

    highest = max(load_profile(out).targets_nats)
    assert mean("--margin", "0") < LAYERS
    assert mean("--margin", f"{highest - 1e-6:.9f}") == LAYERS


def test_generate_exits_early_at_a_confidence(small, capsys):
    assert {row["depth"] for row in generated(capsys, "--confidence", "0")} == {1}
    assert {row["depth"] for row in generated(capsys, "--confidence", "1")} == {LAYERS}


def test_generate_samples_by_its_seed(small, capsys):
    def text(seed):
        return generated(capsys, "--max-new-tokens", "8", "--temperature", "1", "--seed", seed)

    assert text("1") == text("1")
    assert text("1") != text("2")


def test_generate_by_a_pair_names_who_wrote(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    argv = ["generate", "emad-tiny", "Kai", "--small-model", "emad-nano", "--max-new-tokens", "12"]
    argv += ["--threshold", "0.3", "--entropy-window", "2", "--least-run", "2"]
    assert cli.main(argv) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["model"] for row in rows} == {"emad-tiny", "emad-nano"}
    assert all(row["depth"] == row["layers"] for row in rows)
    assert cli.main([*argv, "--format", "text"]) == 0
    *text, runs, count = capsys.readouterr().out.splitlines()
    assert "\n".join(text) == "Kai" + "".join(row["text"] for row in rows)
    assert runs.startswith("models: emad-tiny × ")
    assert count == f"12 tokens, {sum(row['model'] == 'emad-tiny' for row in rows)} of them by emad-tiny"


def test_generate_lets_an_encoder_decoder_answer_its_source(capsys):
    argv = [
        "generate",
        "emad-t5-tiny-tuned",
        "question: Where is Mia? context: Mia went to the barn.",
        "--max-new-tokens",
        "9",
    ]
    assert cli.main([*argv, "--confidence", "0.9"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["layers"] for row in rows} == {10}
    assert min(row["depth"] for row in rows) < 10
    assert cli.main([*argv, "--confidence", "0.9", "--format", "text"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [argv[2], "".join(row["text"] for row in rows)]


def test_world_prints_documents(capsys):
    assert cli.main(["world", "world:premise", "--documents", "2"]) == 0
    assert capsys.readouterr().out.count("?") >= 2


def test_train_writes_where_it_says(monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(loop, "train", lambda chosen, out, resume: seen.append((chosen.name, out)) or 1.25)
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
    (["calibrate", "small", "{tmp}/p.json", "--documents", "0"], "documents=0, but expected a number from 1 to"),
    (["world", "world:premise", "--documents", "-3"], "documents=-3, but expected a number from 1 to 1,000,000,000"),
    (["lens", "small", "{tmp}/l", "--held-out", "0"], "--held-out=0, but expected a number from 1 to 1,000,000,000"),
    (["generate", "small", "hi", "--entropy", "-1"], "entropy=-1.0, but expected a number from 0 to 1,000,000"),
    (
        ["calibrate", "small", "{tmp}/p.json", "--documents", "2", "--probes", "4", "2"],
        "probes=(4, 2), but expected ascending",
    ),
    (["calibrate", "small", "{tmp}/p.json", "--documents", "2", "--probes", "6"], "probes=(6,)"),
    (
        ["generate", "small", "hi", "--max-new-tokens", "0"],
        "--max-new-tokens=0, but expected a number from 1 to 1,000,000,000",
    ),
    (["generate", "small", "hi", "--max-new-tokens", "1000"], "positions="),
    (["generate", "small", "hi", "--margin", "1"], "margin=1.0, but expected --profile too"),
    (["generate", "small", "hi", "--least-run", "3"], "--least-run=3, but expected --small-model too"),
    (["generate", "small", "hi", "--temperature", "-1"], "temperature=-1.0"),
    (
        ["generate", "small", "hi", "--profile", "{tmp}/none.json"],
        "none.json', but expected an existing file; looked at",
    ),
    (["sweep", "small", "--documents", "0"], "documents=0, but expected a number from 1 to 1,000,000,000"),
    (["calibrate", "small", "{tmp}"], "expected a regular file, or none yet; choose another name (it is a folder)"),
    (["calibrate", "small", "."], "out='.', but expected the name of a file"),
    (["world", ""], "corpus='', but expected one of"),
    (["world", "x" * 300], "but expected one of"),
    (["calibrate", "small", "/dev/full/p.json"], "out='/dev/full/p.json', but expected a place"),
    (
        ["calibrate", "small", "{tmp}/p.json", "--documents", str(10**15)],
        "but expected a number from 1 to 1,000,000,000",
    ),
    (["sweep", "small", "--out", "/dev/null/x.json"], "out='/dev/null/x.json', but expected"),
    (["generate", "small", "hi", "--profile", "/dev/zero"], "--profile='/dev/zero', but expected an existing file"),
    (
        ["generate", "small", "hi", "--seed", "-1"],
        "--seed='-1', but expected a whole number ≥ 0, and at most 4294967295",
    ),
    (["generate", "small", "hi", "--seed", str(2**32)], "--seed='4294967296', but expected a whole number ≥ 0"),
    (["generate", "small", "hi", "--confidence", "2"], "confidence=2.0, but expected a number from 0 to 1"),
    (["generate", "small", "hi", "--confidence", "-1"], "confidence=-1.0, but expected a number from 0 to 1"),
    (["generate", "small", "hi", "--confidence", "inf"], "confidence=inf, but expected a number from 0 to 1"),
    (["generate", "small", "hi", "--entropy-window", str(10**20)], "but expected a number from 1 to 1,000,000,000"),
    (["generate", "small", "hi", "--least-run", "0"], "--least-run=0, but expected a number from 1 to 1,000,000,000"),
    (["lens", "small", "{tmp}/l.safetensors", "--rate", "1e300"], "rate=1e+300, but expected a number above 0 to 1"),
    (["lens", "small", "{tmp}/l.safetensors", "--rate", "0"], "rate=0.0, but expected a number above 0 to 1"),
    (["screen", "small", "{tmp}/e", "--rise", "nan"], "rise=nan, but expected a fraction above 0 and below 0.22; 0.01"),
    (["screen", "small", "{tmp}/e", "--rise", "inf"], "rise=inf, but expected a fraction above 0 and below 0.22; 0.01"),
    (["generate", "small", "hi", "--temperature", "nan"], "temperature=nan, but expected a number from 0 to 1,000"),
    (["screen", "small", "{tmp}/e.safetensors", "--threads", str(10**12)], "but expected a number from 1 to 4,096"),
    (["generate", "small", "hi", "--margin", "nan"], "--margin='nan', but expected a finite number of nats"),
    (["generate", "small", "hi", "--temperature", "inf"], "temperature=inf, but expected a number from"),
    (["calibrate", "small", "{tmp}/p.json", "--stride", "3"], "--stride=3, but expected one of 2, 4, 6, 8"),
    (["sweep", "small", "--documents", "few"], "--documents='few', but expected a whole number in plain digits"),
    (["sweep", "small", "--budget", "large"], "--budget='large', but expected one of smoke, standard, full"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=[" ".join(argv)[:40] for argv, _ in BAD])
def test_bad_input_exits_4_and_says_why_on_stderr(small, tmp_path, capsys, argv, message):
    assert cli.main([part.format(tmp=tmp_path) for part in argv]) == 4
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("emad: "), "only a progress bar may precede it"
    assert message in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize(
    ("command", "said"), [("| head -n 1", ""), ("> /dev/full", "emad: output: No space left on device\n")]
)
def test_output_that_nobody_takes_is_no_traceback(command, said):
    words = f"{sys.executable} -m pytest_emad world world:premise --documents 2000 {command}"
    assert subprocess.run(words, shell=True, capture_output=True, text=True).stderr == said


def test_a_device_is_refused_before_the_pass_and_never_replaced(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_module, "measure_batch_statistics", lambda *_, **__: pytest.fail("the pass was run"))
    monkeypatch.setattr(model_under_test, "take_trace", lambda *_, **__: pytest.fail("a pass was run"))
    full = device(tmp_path / "full.json")
    for argv in (["calibrate", "small", full], ["merge", full, "a.json", "b.json"], ["sweep", "small", "--out", full]):
        if full.suffix or argv[0] != "sweep":
            assert cli.main([*map(str, argv)]) == 4
            assert "a regular file, or none yet; choose another name (it is a device)" in capsys.readouterr().err
        assert full.is_char_device()


@pytest.mark.parametrize("verb", ["calibrate", "generate", "sweep", "screen", "lens"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "a whole model without an adapter"),
        (lambda folder: os.mkfifo(folder / "vocab.json"), "a folder of plain files; vocab.json is a pipe"),
        (lambda folder: (folder / "config.json").write_text('{"decoder": 3}'), "config.decoder=3, but expected an"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "a tokenizer that transformers can read"),
    ],
)
def test_a_folder_that_is_not_what_it_seems_is_one_line(tmp_path, capsys, verb, change, said):
    folder = shutil.copytree(weights_folder() / "emad-nano", tmp_path / "mine")
    change(folder)
    more = {"generate": ["hi"], "sweep": []}.get(verb, [str(tmp_path / "out")])
    assert cli.main([verb, str(folder), *more]) == 4
    error = capsys.readouterr().err
    line = error.splitlines()[-1]  # only a progress bar may precede it
    assert line.startswith("emad: ")
    assert said in line
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"one\n\ntwo\0\n\nthree\n\nfour\n", "bad.txt, line 3="),
        ("one\n\ntwo".encode("utf-16"), "byte order mark of UTF-16"),
    ],
)
def test_bytes_that_are_no_text_are_one_line(tmp_path, capsys, data, said):
    (tmp_path / "bad.txt").write_bytes(data)
    corpus = ["--corpus", str(tmp_path / "bad.txt")]
    assert cli.main(["calibrate", "emad-nano", str(tmp_path / "p.json"), *corpus]) == 4
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert cli.main(["world", str(tmp_path / "bad.txt"), "--split", "evaluate"]) == 4
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a b", "n": NaN}', "mend the line (NaN is no JSON number)"),
        ('{"text": "a", "text": "b"}', "mend the line (the key 'text' stands twice in one object)"),
        ('{"text": "a b", "n": ' + "9" * 30 + "}", "mend the line (a whole number of 30 digits is beyond 64 bits)"),
        ('{"text": "a b"', "mend the line (Expecting ',' delimiter"),
    ],
)
def test_a_line_that_is_no_json_says_why(tmp_path, capsys, line, said):
    (tmp_path / "bad.jsonl").write_text(line)
    assert cli.main(["world", str(tmp_path / "bad.jsonl")]) == 4
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "\n \n", "word"])
def test_a_corpus_without_a_document_to_print_says_so(tmp_path, capsys, content):
    (tmp_path / "few.txt").write_text(content)
    assert cli.main(["world", str(tmp_path / "few.txt")]) == 4
    assert "few.txt', but expected a document of split evaluate; choose another --split" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["a\udcffb", "a\0b"])
def test_a_prompt_that_is_no_text_is_one_line(capsys, prompt):
    assert cli.main(["generate", "emad-nano", prompt]) == 4
    assert capsys.readouterr().err.splitlines()[-1].startswith("emad: prompt=")


def test_a_vocabulary_that_is_permuted_is_told(tmp_path, caplog):
    """Every text survives the round trip; only the loss shows it."""
    folder = shutil.copytree(weights_folder() / "emad-nano", tmp_path / "mine")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words, ids = zip(*tokenizer["model"]["vocab"].items(), strict=True)
    tokenizer["model"]["vocab"] = dict(zip(words, ids[7:] + ids[:7], strict=True))
    calibrate = ["calibrate", str(folder), str(tmp_path / "p.json"), "--documents", "2"]
    assert cli.main(calibrate) == 0
    assert "not its own tokenizer" not in caplog.text
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert cli.main(calibrate) == 0
    assert "is above that of a guess among its 512 tokens (6.24)" in caplog.text


def test_the_profile_of_another_model_is_refused(small, tmp_path, capsys):
    out = calibrated(tmp_path)
    small.fingerprint = "beef"
    assert cli.main(["generate", "small", "hi", "--profile", str(out)]) == 4
    assert "profile.fingerprint='f00d', but the model under test has 'beef'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--probes", "6"],
        ["--stride", "6"],
        ["--stride", "8"],
        ["--quantiles", "1.0"],
        ["--bins", "mood"],
        ["--bins", "frequency,mood"],
        ["--bins", "position,top1_probability,frequency"],
        ["--bins-of", "none.json"],
        ["--corpus", "world:premise", "--corpus", "nowhere"],
        ["--corpus", "world:premise", "--corpus", "world:premise"],
        ["--tokens", "0"],
    ],
    ids=" ".join,
)
def test_bad_options_are_refused_before_the_long_pass(small, monkeypatch, tmp_path, options):
    monkeypatch.setattr(run_module, "measure_batch_statistics", lambda *_, **__: pytest.fail("the pass was run"))
    monkeypatch.setattr(run_module, "count_targets_by_token", lambda *_, **__: pytest.fail("the corpus was read"))
    assert cli.main(["calibrate", "small", str(tmp_path / "p.json"), *options]) == 4
    assert not list(tmp_path.iterdir())


def test_strides_place_the_probes(small, tmp_path):
    assert load_profile(calibrated(tmp_path, "--stride", "2")).probes == (2, 4)
    assert load_profile(calibrated(tmp_path, "--stride", "4")).probes == (4,)


def test_several_corpora_share_a_profile_up_to_their_tokens(small, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a paragraph\n\n" * 9, encoding="utf-8")
    corpora = ["--corpus", "world:mixed", "--corpus", str(text)]
    out = tmp_path / "p.json"
    assert cli.main(["calibrate", "small", str(out), *corpora, "--tokens", "700"]) == 0
    short = load_profile(out).corpora[str(text)]
    assert load_profile(out).corpora == {"world:mixed": 700, str(text): short}
    assert 0 < short < 700
    assert f"{text} ended after {short} of 700 tokens" in capsys.readouterr().out


def test_bins_and_quantiles_are_printed(small, tmp_path, capsys):
    out = calibrated(tmp_path, "--bins", "position,top1_probability", "--quantiles", "0.25", "0.5")
    profile = load_profile(out)
    lines = capsys.readouterr().out.splitlines()
    whole = profile.drop_last_bin_features(2)
    read = len(profile.read)
    for place, line in enumerate(lines[:read]):
        for quantile in (0.25, 0.5):
            assert f"q{quantile:g} {whole.quantile_nats(quantile)[0, place]:.4f}" in line
    bins = [line for line in lines[read:] if ": " in line and " tokens, targets " in line]
    counts = [int(line.split(": ")[1].split()[0]) for line in bins]
    assert counts == profile.statistics.tokens.tolist()
    thin = ["too few tokens" in line for line in bins]
    assert thin == [dropped > 0 for dropped in profile.dropped_features]
    assert "q0.9 " in printed(calibrated, capsys, tmp_path, "--quantiles")


def printed(run, capsys, *arguments):
    run(*arguments)
    return capsys.readouterr().out


def test_frequency_buckets_come_from_the_calibration_text_itself(small, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("aaaa bbb cc\n\n" * 12, encoding="utf-8")
    bins = load_profile(calibrated(tmp_path, "--corpus", str(text), "--bins", "frequency")).bins
    assert len(bins.frequency) == VOCABULARY
    seen = {token for token in range(VOCABULARY) if bins.frequency[token] == 0}
    assert seen == {ord(letter) % VOCABULARY for letter in "abc \n"}  # number of ids in the first bucket of 101


def test_profiles_with_the_bins_of_the_first_are_merged(small, tmp_path, capsys):
    first, second, both = (str(tmp_path / f"{name}.json") for name in ("first", "second", "both"))
    few = ["--documents", "3"]
    assert cli.main(["calibrate", "small", first, "--bins", "frequency", *few]) == 0
    assert cli.main(["calibrate", "small", second, "--corpus", "world:mixed", "--bins-of", first, *few]) == 0
    capsys.readouterr()
    assert cli.main(["merge", both, first, second]) == 0
    profiles = [load_profile(path) for path in map(type(tmp_path), (first, second, both))]
    assert profiles[2] == merge(profiles[:2])
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{profiles[2].tokens} tokens of world:premise + world:mixed; written to {both}"
    )
    assert cli.main(["merge", both, first, first]) == 4
    assert "profile.corpora=['world:premise'], but expected each corpus in one profile" in capsys.readouterr().err


def test_a_forgotten_out_costs_no_profile(small, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("aaaa bbb cc\n\n" * 12, encoding="utf-8")
    first, second, third, both = (str(tmp_path / f"{name}.json") for name in ("first", "second", "third", "both"))
    for path, corpus in {first: "world:premise", second: "world:mixed", third: str(text)}.items():
        assert cli.main(["calibrate", "small", path, "--corpus", corpus, "--documents", "3"]) == 0
    before = [Path(path).read_bytes() for path in (first, second, third)]
    form = "emad merge OUT PROFILE PROFILE"
    for argv, said in {
        (first, second): f"profiles=['{second}'], but expected at least two profiles after OUT; {form}",
        (first, second, third): f"a new file, or an earlier merge on world:mixed + {text}; OUT stands first: {form}",
        (first, first, second): "expected another file than the profiles that are read; it would be replaced",
    }.items():
        assert cli.main(["merge", *argv]) == 4
        assert said in capsys.readouterr().err
    assert cli.main(["calibrate", "small", first, "--bins-of", first]) == 4
    assert "expected another file than the profiles that are read" in capsys.readouterr().err
    assert [Path(path).read_bytes() for path in (first, second, third)] == before
    for _ in range(2):  # the second one replaces the first
        assert cli.main(["merge", both, first, second]) == 0


@pytest.mark.parametrize("verb", ["calibrate", "lens", "screen", "merge", "sweep"])
@pytest.mark.parametrize("content", ["a,b\n1,2\n", '{"model": "mine"}'])
def test_a_file_of_another_kind_is_not_replaced(small, tmp_path, capsys, verb, content):
    mine = tmp_path / "mine.json"
    mine.write_text(content)
    out = {"sweep": ["--out", str(mine)], "merge": [str(mine), "a", "b"]}.get(verb, [str(mine)])
    assert cli.main([verb, *(["small"] if verb != "merge" else []), *out]) == 4
    assert "to replace; choose another (it holds something else)" in capsys.readouterr().err
    assert mine.read_text() == content


class PowerCut(Exception):
    """An exception that no code catches."""


def test_an_interrupted_calibration_is_resumed_and_leaves_no_checkpoint(small, monkeypatch, tmp_path, capsys):
    whole = calibrated(tmp_path, "--documents", "30")
    expected = load_profile(whole)
    out = tmp_path / "p.json"
    argv = ["calibrate", "small", str(out), "--documents", "30"]
    taken = run_module.measure_batch_statistics
    calls = []

    def breaks(stepper, batch, *bins):
        if calls:
            raise PowerCut
        calls.append(len(batch))
        return taken(stepper, batch, *bins)

    monkeypatch.setattr(run_module, "measure_batch_statistics", breaks)
    with pytest.raises(PowerCut):
        cli.main(argv)
    assert [path.name for path in tmp_path.glob("p.json*")] == ["p.json.checkpoint"]
    assert cli.main(argv) == 4
    assert "holds an unfinished calibration, but expected none; pass resume (--resume)" in capsys.readouterr().err
    rest = []
    monkeypatch.setattr(
        run_module, "measure_batch_statistics", lambda s, batch, *b: rest.append(len(batch)) or taken(s, batch, *b)
    )
    assert cli.main([*argv, "--resume"]) == 0
    assert load_profile(out) == expected
    assert sum(calls) + sum(rest) == 30
    assert [path.name for path in tmp_path.glob("p.json*")] == ["p.json"]


def test_a_model_without_a_tokenizer_reads_no_text(small, tmp_path, capsys):
    small.tokenizer = None
    for argv in (["generate", "small", "hi"], ["calibrate", "small", str(tmp_path / "p.json")]):
        assert cli.main(argv) == 4
        assert "model='small', but expected a model with a tokenizer; pass the folder" in capsys.readouterr().err


def test_an_encoder_decoder_is_no_model_of_documents(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(small.model.config, "is_encoder_decoder", True)
    for argv in (["calibrate", "small", str(tmp_path / "p.json")], ["sweep", "small"]):
        assert cli.main(argv) == 4
        assert "model='small', but expected a decoder-only model; an encoder-decoder reads" in capsys.readouterr().err


def test_an_empty_prompt_needs_an_opening_token(small, capsys):
    assert cli.main(["generate", "small", "", "--max-new-tokens", "2"]) == 0
    small.opening_token_id = None
    assert cli.main(["generate", "small", "", "--max-new-tokens", "2"]) == 4
    assert "start with the model's opening token" in capsys.readouterr().err


UNPARSABLE = [
    [],
    ["dance"],
    ["train"],
    ["generate", "small"],
    ["merge", "out.json"],
    ["calibrate", "small", "p.json", "--stride", "2", "--probes", "1"],
    ["calibrate", "small", "p.json", "--bins", "position", "--bins-of", "q.json"],
    ["report"],
    ["sweep"],
]


@pytest.mark.parametrize("argv", UNPARSABLE, ids=" ".join)
def test_what_cannot_be_parsed_is_a_usage_error(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 4
    assert "usage: emad" in capsys.readouterr().err


# ---------------------------------------------------------------- emad report


def test_report_makes_the_pages_again_from_one_folder(tmp_path, capsys):
    written(tmp_path / "run", reported("m", tables=[]))
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'run'}: report.md")
    assert "### Claims" in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert cli.main(["report", str(tmp_path / "run" / "report.json")]) == 0
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "deep" / "out")]) == 0
    assert (tmp_path / "deep" / "out" / "report.md").read_bytes() == (tmp_path / "run" / "report.md").read_bytes()


def test_report_sets_several_runs_on_one_page(tmp_path):
    folders = [str(written(tmp_path / name, reported(name, tables=[]))) for name in ("one", "two")]
    assert cli.main(["report", *folders, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "# Verdicts on one, two" in text
    assert text.index("## one") < text.index("## two")
    assert not (tmp_path / "one" / "report.md").exists()


def test_report_shows_what_changed_since_another(tmp_path, capsys):
    run, earlier = (
        written(tmp_path / outcome, reported("m", tables=[], claims=[verdict(outcome)]))
        for outcome in ("falsified", "survived")
    )
    assert cli.main(["report", str(run)]) == 0
    page = run / "index.html"
    assert "What changed" not in page.read_text(encoding="utf-8")
    assert cli.main(["report", str(run), "--against", str(earlier)]) == 0
    assert "What changed" in page.read_text(encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["report", str(run), str(earlier), "--out", str(tmp_path / "o"), "--against", str(earlier)]) == 4
    assert "against=" in capsys.readouterr().err


def test_report_refuses_what_it_cannot_read_or_write(tmp_path, capsys):
    good, bad = written(tmp_path / "good", reported("m")), written(tmp_path / "bad", reported("m"))
    stored = (bad / "report.json").read_text(encoding="utf-8")
    (bad / "report.json").write_text(stored.replace('"schema": 8', '"schema": 4'), encoding="utf-8")
    other, blocked, mine = written(tmp_path / "other", reported("n")), tmp_path / "file", tmp_path / "mine"
    blocked.touch()
    mine.mkdir()
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    (mine / "index.html").write_text("<h1>My page</h1>")
    for argv, message in (
        ([tmp_path / "none"], "report.json' cannot be read (No such file or directory)"),
        ([bad], "has schema=4, but this version reads 8 alone"),
        ([good, bad, "--out", tmp_path / "out"], "has schema=4"),
        ([good, other], "out=None, but expected a folder for the pages"),
        ([good, good, "--out", tmp_path / "out"], "at least one, each once"),
        ([good, "--out", blocked], "out="),
        ([good, "--out", loop], "out="),
        ([loop], "report.json' cannot be read"),
        ([good, "--out", mine], "index.html', but expected a new file, or one of a report to replace"),
        ([good, other, "--out", other], "expected another folder than that of a report, whose own pages would be lost"),
        ([good, "--against", other, "--out", other], "expected another folder than that of a report"),
    ):
        assert cli.main(["report", *map(str, argv)]) == 4
        captured = capsys.readouterr()
        assert captured.err.startswith("emad: ")
        assert message in captured.err
        assert captured.out == ""
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- emad sweep


def swept(*options):
    """Give ``--corpus`` for a model that is not bundled: its default would be WikiText, if available."""
    named = [] if "--corpus" in options else ["--corpus", "world:premise"]
    return cli.main(["sweep", "small", "--documents", "4", *named, *map(str, options)])


def test_sweep_prints_and_writes_the_best_of_every_family(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    out = tmp_path / "deep" / "sweep.json"
    assert swept("--out", out) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {"model", "fingerprint", "corpus", "dtype", "version", "window", "tokens", "rows", "notes"} <= set(found)
    assert (found["model"], found["corpus"], set(found["tokens"])) == ("small", "world:premise", set(JUDGED))
    rows = found["rows"]
    assert {"EMAD, mean − margin", "fixed truncation", "softmax response"} <= {row["family"] for row in rows}
    first, second = dict.fromkeys(row["table"] for row in rows)
    assert first == "best perplexity at equal net FLOPs on world:premise"
    assert {"EMAD, mean − margin", "early exit: softmax"} <= {r["family"] for r in rows if r["table"] == second}
    assert all(row["net reduction %"] <= 0.60 for row in rows)
    require_drawable("pareto", rows)
    text = capsys.readouterr().out
    assert [row["point"] for row in rows if row["point"] not in text] == []
    lines = text.splitlines()
    assert lines[-2].startswith(f"full depth: perplexity {found['full depth perplexity']:.4g} on ")
    assert lines[-1] == f"written to {out}"


def test_sweep_prints_the_table_and_notes_of_evidence(small, tmp_path, capsys):
    """The rows that the plugin records, and the reason for a rule without one."""
    assert swept("--out", tmp_path / "sweep.json") == 0
    found = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    few = replace(BUDGETS["smoke"], calibrate=4, validate=4, evaluate=4)
    shown = ModelMeasurements(
        small, Study(corpus="world:premise", budget=few), RunResources()
    ).baseline_comparison.make_pareto_tables()
    assert found["rows"] == [{"table": table.title, **row} for table in shown.tables for row in table.rows]
    assert found["notes"] == list(shown.notes)
    assert any("early exit: softmax, decaying is not on the Pareto table" in note for note in shown.notes)
    assert set(shown.notes) <= set(capsys.readouterr().out.splitlines())


def test_sweep_reads_as_many_windows_as_the_budget_or_the_user_says(small, monkeypatch):
    asked = []
    monkeypatch.setattr(
        screening, "build_sweep_result", lambda evidence: asked.append(evidence.subject.budget) or SWEPT
    )
    monkeypatch.setattr(ModelMeasurements, "require_prerequisites_of_all_claims", lambda self: None)
    for options in ([], ["--budget", "full"], ["--budget", "standard", "--documents", "7"]):
        assert cli.main(["sweep", "small", *options]) == 0
    assert asked[:2] == [BUDGETS["smoke"], BUDGETS["full"]]
    assert asked[2] == replace(BUDGETS["standard"], calibrate=7, validate=7, evaluate=7)


SWEPT = {"rows": [], "notes": [], "tokens": {"evaluate": 1}, "full depth perplexity": 1.0, "corpus": "c"}


def test_sweep_reads_three_splits_of_the_corpus_asked_for(small, monkeypatch, tmp_path):
    read = []
    documents = corpora_module.iterate_corpus_documents

    def watched(corpus, split, **options):
        read.append((corpus, split, options))
        return documents(corpus, split, **options)

    monkeypatch.setattr(model_under_test, "iterate_corpus_documents", watched)
    assert swept("--corpus", "world:mixed", "--data", tmp_path) == 0
    assert read == [("world:mixed", split, {"seed": 0, "data": tmp_path, "corpus_group": None}) for split in JUDGED]


def test_sweep_writes_rows_for_spreadsheets(small, tmp_path, capsys):
    both = [tmp_path / f"sweep.{form}" for form in ("csv", "json")]
    for out in both:
        assert swept("--out", out) == 0
    with both[0].open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    rows = json.loads(both[1].read_text(encoding="utf-8"))["rows"]
    assert [row["point"] for row in read] == [row["point"] for row in rows]
    assert [float(row["net reduction %"]) for row in read] == [row["net reduction %"] for row in rows]


def test_sweep_reads_the_models_own_text_and_says_where_nothing_saves_enough(small, monkeypatch, tmp_path, capsys):
    small.tokenizer = None
    monkeypatch.setattr(FamilyComparison, "make_pareto_rows", lambda self, seed: [])
    assert swept("--corpus", "self", "--out", tmp_path / "sweep.csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "small: no point of any sweep saves 15 % of FLOPs net"
    assert lines[-2].startswith("full depth: ")
    assert (tmp_path / "sweep.csv").read_text(encoding="utf-8") == "\n"


def test_sweep_refuses_before_the_long_passes(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(model_under_test, "take_trace", lambda *_, **__: pytest.fail("a pass was run"))
    assert swept("--out", tmp_path / "sweep.txt") == 4
    assert "expected a file name that ends in .csv or .json" in capsys.readouterr().err
    assert swept("--corpus", "nowhere") == 4
    assert "corpus='nowhere'" in capsys.readouterr().err
    small.tokenizer = None
    assert swept("--corpus", "world:premise") == 4
    assert "came without a tokenizer" in capsys.readouterr().err
    small.trained = False
    assert swept("--corpus", "self") == 4
    assert "expected trained weights; random weights have no meaningful perplexity" in capsys.readouterr().err
