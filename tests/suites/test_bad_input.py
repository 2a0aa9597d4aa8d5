"""Bad input to a suite run gives one error with value, expectation and remedy, and never a pass.

Every case selects suites of several tests, so that an error repeated in each test would show.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from emad_ref.calibration.profile import Profile
from emad_ref.models.bundled import weights_folder
from emad_ref.models.loading import load
from pytest_emad.statistics.goldens import INDEX, VERDICTS, Goldens
from tests.suites.conftest import Run, only, text_of

ASKED = ("invariants", "fidelity")
NANO = weights_folder() / "emad-nano"
WORDS = " ".join(f"w{i}" for i in range(1, 40))


def assert_one_clear_error(result: pytest.RunResult, *said: str) -> None:
    """Assert status 4, no reported test, each part of the message, the message once, and no frames of code."""
    text = text_of(result)
    assert result.ret == pytest.ExitCode.USAGE_ERROR, text
    assert not {"passed", "failed", "errors"} & set(outcomes(result)), text
    for part in said:
        assert part in text
    assert text.count(said[0]) == 1, text
    assert "Traceback" not in text
    assert "\nE   " not in text


def edit(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def outcomes(result: pytest.RunResult) -> dict[str, int]:
    try:
        return result.parseoutcomes()
    except ValueError:  # refused before collection: there is no summary line
        return {}


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "damaged"))


@pytest.fixture(scope="session")
def profile(tiny: Path) -> Profile:
    """Return a profile of the tiny model."""
    model = load(str(tiny))
    return Profile(
        model="tiny", fingerprint=model.fingerprint, corpus="self", dtype="float32", layers=4, probes=(1, 2),
        read=(1, 2), mean_nats=(4.0, 3.0), targets_nats=(4.0, 3.0), tokens=100, sequences=10, versions={},
    )  # fmt: skip


class TestModel:
    def test_unknown_name(self, judge: Run) -> None:
        result = judge(*ASKED, model="emad-tinny")
        assert_one_clear_error(
            result, "'emad-tinny', but expected one of", "pythia-410m", "OWNER/REPOSITORY of the hub"
        )

    def test_folder_without_weights(self, judge: Run, copy: Path) -> None:
        (copy / "model.safetensors").unlink()
        result = judge(*ASKED, model=copy)
        assert_one_clear_error(
            result, "but weights (model.safetensors or its shards) are missing", str(copy), "fetch it"
        )

    def test_truncated_weights(self, judge: Run, copy: Path) -> None:
        stored = (copy / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(stored[: len(stored) // 2])
        result = judge(*ASKED, model=copy)
        assert_one_clear_error(result, "but expected a complete safetensors file", str(copy), "save the weights again")

    def test_weights_that_are_not_numbers(self, judge: Run, copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        name = "gpt_neox.layers.2.mlp.dense_h_to_4h.weight"
        weights[name][3, 5] = torch.nan
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        result = judge(*ASKED, model=copy)
        remedy = "take an earlier checkpoint"
        assert_one_clear_error(result, f"but expected finite weights; {name} holds NaN", str(copy), remedy)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda folder: (folder / "adapter_config.json").write_text("{}"), "a whole model without an adapter"),
            (lambda folder: os.mkfifo(folder / "generation_config.json.pipe"), "a folder of plain files"),
            (lambda folder: edit(folder, num_hidden_layers=5000), "its config describes"),
            (lambda folder: edit(folder, text_config="abc"), "config.text_config='abc', but expected an object"),
            (lambda folder: edit(folder, num_hidden_layers="12"), "fields have the types of its family"),
            (lambda folder: shutil.copy(NANO / "tokenizer.json", folder), "rows of the embedding"),
        ],
        ids=["adapter", "pipe", "layers", "part", "type", "tokenizer"],
    )
    def test_a_folder_that_is_not_what_it_seems(self, judge: Run, copy: Path, change: Any, said: str) -> None:
        change(copy)
        assert_one_clear_error(judge(*ASKED, model=copy), said, str(copy) if said.startswith("a ") else said)

    def test_hub_model_without_a_hub(self, judge: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
        result = judge(*ASKED, model="pythia-410m")
        assert_one_clear_error(result, "'pythia-410m', but its hub repository EleutherAI/pythia-410m", "download it")

    def test_device_that_is_not_there(self, judge: Run, tiny: Path) -> None:
        result = judge(*ASKED, model=tiny, device="cuda:99")
        assert_one_clear_error(result, "device='cuda:99', but expected a device of this machine")


class TestCorpus:
    def test_empty_file(self, judge: Run, reader: Path, tmp_path: Path) -> None:
        (tmp_path / "empty.txt").touch()
        result = judge(*ASKED, model=reader, corpus=tmp_path / "empty.txt")
        assert_one_clear_error(result, "has no document of two tokens for split 'calibrate'", "use a larger corpus")

    def test_too_few_documents_for_every_split(self, judge: Run, reader: Path, tmp_path: Path) -> None:
        (tmp_path / "one.txt").write_text(WORDS)
        result = judge(*ASKED, model=reader, corpus=tmp_path / "one.txt")
        assert_one_clear_error(result, "has no document of two tokens for split 'validate'", "use a larger corpus")

    def test_path_that_does_not_exist(self, judge: Run, reader: Path, tmp_path: Path) -> None:
        result = judge(*ASKED, model=reader, corpus=tmp_path / "absent.txt")
        assert_one_clear_error(result, "looked at", "--emad-corpus=", "absent.txt", "or an existing file")

    def test_text_for_a_model_that_cannot_read(self, judge: Run, tiny: Path) -> None:
        result = judge(*ASKED, model=tiny, corpus="world:mixed")
        assert_one_clear_error(result, "came without a tokenizer", "corpus='world:mixed'", "choose --emad-corpus self")

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (WORDS.encode("utf-16"), "byte order mark of UTF-16"),
            (b"w1 w2\n\nw3 \0 w4\n\nw5 w6\n\nw7 w8\n", "expected text without NUL"),
            (b"w1 \xff w2\n\nw3 w4\n", "a file in UTF-8"),
        ],
    )
    def test_bytes_that_are_no_text(self, judge: Run, reader: Path, tmp_path: Path, data: bytes, said: str) -> None:
        (tmp_path / "bad.txt").write_bytes(data)
        assert_one_clear_error(judge(*ASKED, model=reader, corpus=tmp_path / "bad.txt"), said, "bad.txt")

    def test_a_pipe(self, judge: Run, reader: Path, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.txt")
        result = judge(*ASKED, model=reader, corpus=tmp_path / "pipe.txt")
        assert_one_clear_error(result, "or an existing file", "pipe.txt")

    def test_lines_that_are_not_json(self, judge: Run, reader: Path, tmp_path: Path) -> None:
        (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
        result = judge(*ASKED, model=reader, corpus=tmp_path / "bad.jsonl")
        assert_one_clear_error(result, "bad.jsonl, line 1=", 'whose field "text" is a string', "mend the line")


class TestProfile:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"fingerprint": "another"}, ["profile.fingerprint='another', but the model under test has", "calibrate"]),
            ({"dtype": "bfloat16"}, ["profile.dtype='bfloat16', but the model under test has 'float32'", "calibrate"]),
            (
                {"layers": 12, "probes": (1, 9), "read": (1, 9)},
                ["profile.layers=12, but the model under test has 4", "calibrate"],
            ),
        ],
    )
    def test_profile_that_does_not_fit(
        self, judge: Run, tiny: Path, tmp_path: Path, profile: Profile, change: dict[str, Any], said: list[str]
    ) -> None:
        replace(profile, **change).save(tmp_path / "profile.json")
        assert_one_clear_error(judge(*ASKED, model=tiny, profile=tmp_path / "profile.json"), *said)

    @pytest.mark.parametrize(
        ("before", "after", "said"),
        [
            ('"schema": 5', '"schema": 7', "has schema=7, but this version reads 5 alone"),
            ('"tokens": 100', '"tokens": 101', "was changed or cut after it was written"),
        ],
    )
    def test_changed_file(
        self, judge: Run, tiny: Path, tmp_path: Path, profile: Profile, before: str, after: str, said: str
    ) -> None:
        profile.save(tmp_path / "profile.json")
        text = (tmp_path / "profile.json").read_text(encoding="utf-8")
        (tmp_path / "profile.json").write_text(text.replace(before, after), encoding="utf-8")
        result = judge(*ASKED, model=tiny, profile=tmp_path / "profile.json")
        assert_one_clear_error(result, said, "profile.json", "calibrate again")

    def test_a_profile_that_fits_is_used(
        self, judge: Run, tiny: Path, tmp_path: Path, profile: Profile, ungated: Path
    ) -> None:
        profile.save(tmp_path / "profile.json")
        options = {"model": tiny, "profile": tmp_path / "profile.json", "register": ungated}
        judge("claims/test_model.py", more=only("EMAD-E13"), **options).assert_outcomes(passed=1)

    def test_margin_under_which_nothing_exits(self, judge: Run, tiny: Path) -> None:
        result = judge(*ASKED, model=tiny, margin=50)
        assert_one_clear_error(result, "margin_nats=50.0, but expected at most", "nothing would exit")


class TestGoldens:
    @pytest.fixture
    def goldens(self, tmp_path: Path) -> Path:
        folder = tmp_path / "goldens"
        folder.mkdir()
        Goldens((folder,), folder).update("some-greedy", [1, 2], {})
        return folder

    def test_altered_file(self, judge: Run, tiny: Path, goldens: Path) -> None:
        next(goldens.glob("some-greedy*")).write_text("[1, 3]\n")
        result = judge(*ASKED, model=tiny, golden=goldens)
        assert_one_clear_error(result, "has SHA-256", "golden 'some-greedy'", "but the index says", "restore it")

    def test_missing_file_that_the_index_lists(self, judge: Run, tiny: Path, goldens: Path) -> None:
        next(goldens.glob("some-greedy*")).unlink()
        result = judge(*ASKED, model=tiny, golden=goldens)
        assert_one_clear_error(result, "golden 'some-greedy' is listed in", "is missing; restore it")

    @pytest.mark.parametrize("name", [INDEX, VERDICTS])
    def test_lists_that_cannot_be_read(self, judge: Run, tiny: Path, goldens: Path, name: str) -> None:
        (goldens / name).write_text("[{")
        result = judge(*ASKED, model=tiny, golden=goldens, gate="known")
        assert_one_clear_error(result, "cannot be read as JSON", name, "restore it")


class TestOptions:
    def test_report_folder_that_cannot_be_written(self, judge_apart: Run, tiny: Path, tmp_path: Path) -> None:
        """The folder lies below a regular file: access bits do not stop root."""
        (tmp_path / "file").touch()
        result = judge_apart(*ASKED, model=tiny, report=tmp_path / "file" / "out")
        assert_one_clear_error(result, "but expected a folder that can be written", "--emad-report=", "Not a directory")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("[EMAD-F1]\ntreshold = 0.2\n", ["field='treshold', but expected gate or thresholds", "EMAD-F1"]),
            ("[EMAD-F1]\nthresholds = { rise = 0.2 }\n", ["thresholds='rise', but expected one of", "perplexity_rise"]),
            ("[EMAD-F9]\ngate = true\n", ["row='EMAD-F9', but expected one of", "docs/own-claim.md adds one"]),
            ("[EMAD-F1\n", ["but expected valid TOML in UTF-8", "claims file="]),
        ],
    )
    def test_claims_file_with_something_unknown(
        self, judge: Run, tiny: Path, tmp_path: Path, content: str, said: list[str]
    ) -> None:
        (tmp_path / "claims.toml").write_text(content)
        assert_one_clear_error(judge("claims", *ASKED, model=tiny, register=tmp_path / "claims.toml"), *said)


@pytest.mark.slow  # three processes, each of which imports torch
def test_processes_end_with_one_error_too(judge_apart: Run, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    result = judge_apart(*ASKED, model=copy, more=("-n", 2))
    assert_one_clear_error(result, "but weights (model.safetensors or its shards) are missing", str(copy), "fetch it")


RAISES = """
from emad_ref.errors import BadArgument

def test_of_a_suite(emad_record):
    raise BadArgument("length", 7, "at most 5", "shorten it")

def test_of_the_users_own():
    raise BadArgument("length", 8, "at most 5", "shorten it")
"""


class TestErrorInsideATest:
    def test_it_is_its_message(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile(RAISES)
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
        result.assert_outcomes(failed=2)
        text = result.stdout.str()
        assert "\nBadArgument: length=7, but expected at most 5; shorten it\n" in text
        assert '>       raise BadArgument("length", 7' not in text  # the suites' own frames explain nothing
        assert '>       raise BadArgument("length", 8' in text  # other tests keep their traceback

    def test_a_traceback_can_be_asked_for(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile(RAISES)
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--tb=long")
        assert '>       raise BadArgument("length", 7' in result.stdout.str()
