"""A model that cannot be loaded: the message names the file, the fault and a remedy; what can be loaded is."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import BadFile, read_text
from emad_ref.models import diagnosis, tokenizer_files
from emad_ref.models.bundled import weights_folder
from emad_ref.models.downloads import require_gguf
from emad_ref.models.loading import load

WEIGHTS, BIN = "model.safetensors", "pytorch_model.bin"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 123456789\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>"
COMMIT, OTHER = "0123456789" * 4, "9876543210" * 4
Change = Callable[[Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of a bundled model."""
    return Path(shutil.copytree(weights_folder() / "emad-nano", tmp_path / "mine"))


def refused(name: Path | str) -> str:
    """Return the only error of loading, its message on one line."""
    with pytest.raises(EmadError) as caught:
        load(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def to_bin(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / BIN)
    (folder / WEIGHTS).unlink()


def to_shards(folder: Path) -> list[str]:
    load(str(folder)).model.save_pretrained(folder, max_shard_size="200KB")
    (folder / WEIGHTS).unlink(missing_ok=True)
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


# ---------------------------------------------------------------- files that are none

READ = ("config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("file", READ)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LFS, "is a git-lfs pointer, not the file: run `git lfs pull` in its folder"),
        (b"# xet version 0\nfilesize = 9\n", "is a Xet pointer, not the file"),
        (b"/annex/objects/SHA256E-s12--ab\n", "is a git-annex pointer, not the file: run `git annex get "),
        (PAGE, "is a web page"),
        (b"", "is empty: fetch it"),
    ],
    ids=["lfs", "xet", "annex", "page", "empty"],
)
def test_what_stands_for_a_file_is_named(folder: Path, file: str, content: bytes, said: str) -> None:
    (folder / file).write_bytes(content)
    assert f"{file} {said}" in refused(folder)


@pytest.mark.parametrize("file", [BIN, "tokenizer.model", "chat_template.jinja", "model.onnx"])
def test_a_pointer_that_nothing_reads_is_no_fault(folder: Path, file: str) -> None:
    (folder / file).write_bytes(LFS)
    assert load(str(folder)).tokenizer is not None


def test_a_shard_that_is_a_pointer_is_named(folder: Path) -> None:
    last = to_shards(folder)[-1]
    (folder / last).write_bytes(LFS)
    assert f"{last} is a git-lfs pointer" in refused(folder)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("../../blobs/ab", r"is a link that leads nowhere (../../blobs/ab): fetch it"),
        ("../.git/annex/objects/ab", "is a git-annex link without its content: run `git annex get"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_link_without_its_content_is_named(folder: Path, file: str, target: str, said: str) -> None:
    (folder / file).unlink()
    (folder / file).symlink_to(target)
    assert f"{file} {said}" in refused(folder)


def test_a_file_without_permission_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read every file
    said = diagnosis.describe_damaged_file(folder, "fetch it")
    assert said.startswith("config.json cannot be read (Permission denied): run `chmod -R u+rX ")
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(BadFile, match=r"make it readable for this user, as by chmod u\+r \(Permission denied\)"):
        read_text(folder / "config.json", "config")


def rename_to_bin(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / BIN)


def rename_to_safetensors(folder: Path) -> None:
    to_bin(folder)
    (folder / BIN).rename(folder / WEIGHTS)


def cut_bin(folder: Path) -> None:
    to_bin(folder)
    (folder / BIN).write_bytes((folder / BIN).read_bytes()[:50_000])


def nest_bin(folder: Path) -> None:
    torch.save({"step": 3, "state_dict": load_file(folder / WEIGHTS)}, folder / BIN)
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / WEIGHTS).write_text("Entry not found"), f"{WEIGHTS} holds text ('Entry not found')"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"GGUF" + bytes(99)), f"{WEIGHTS} is a model of llama.cpp"),
        (rename_to_bin, f"{BIN} is a safetensors file: rename it to {WEIGHTS}"),
        (rename_to_safetensors, f"{WEIGHTS} is a file of torch.save: rename it to {BIN}"),
        (cut_bin, f"{BIN} is cut off or damaged"),
        (nest_bin, f"{BIN} holds no tensors at its top, but below 'state_dict'"),
    ],
)
def test_weights_of_another_kind_are_named(folder: Path, change: Change, said: str) -> None:
    change(folder)
    assert said in refused(folder)


def test_a_pointer_is_refused_wherever_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes(LFS)
    with pytest.raises(BadFile, match=r"corpus='.*texts.txt', but expected .*it is a git-lfs pointer.*git lfs pull"):
        read_text(tmp_path / "texts.txt", "corpus")
    (tmp_path / "model.gguf").write_bytes(LFS)
    with pytest.raises(BadArgument, match=r"model\.gguf is a git-lfs pointer, not the file: run `git lfs pull`"):
        require_gguf(tmp_path / "model.gguf")


# ---------------------------------------------------------------- files that are missing


def test_a_folder_one_level_too_high_names_the_models_below(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (500, 1500):
        shutil.copytree(folder, tmp_path / "run" / f"checkpoint-{step}")
    below = f"{tmp_path}/run/checkpoint-1500, {tmp_path}/run/checkpoint-500"
    assert f"config.json is not in this folder but below it: name {below}" in refused(tmp_path / "run")
    assert load(below.split(", ")[0]).tokenizer is not None


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.Q4_0.gguf", "is a model of llama.cpp: name the file itself"),
        ("tf_model.h5", "holds weights of TensorFlow: convert them"),
        ("flax_model.msgpack", "holds weights of Flax: convert them"),
        ("model.onnx", "is an export to another runtime: name the model that was exported"),
        ("consolidated.00.pth", "is in the format of the model's authors"),
        ("model.fp16.safetensors", f"is not the name that Transformers reads: rename it to {WEIGHTS}"),
        ("model-00001-of-00002.safetensors", "is a shard, and its index model.safetensors.index.json is missing"),
        ("model.safetensors.incomplete", "is a download that did not end"),
        ("model.safetensors.dvc", "is a pointer of DVC: run `dvc pull`"),
        ("lit_model.pth", "is a file of torch.save: load its tensors"),
        ("zero_to_fp32.py", "belongs to a training state of DeepSpeed"),
    ],
)
def test_weights_in_another_format_are_named(folder: Path, file: str, said: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "optimizer.pt").write_bytes(b"x")  # of a training run, and no model
    (folder / file).write_bytes(b"x")
    told = refused(folder)
    assert "weights (model.safetensors or its shards) are missing" in told
    assert f"{file} {said}" in told


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.gguf", "model.gguf is a model of llama.cpp: name the file itself"),
        ("params.json", "params.json is in the format of the model's authors"),
        ("model_index.json", "model_index.json is of a pipeline of diffusers"),
        (WEIGHTS, "config.json is missing: fetch it"),
    ],
)
def test_a_folder_without_config_says_what_it_holds(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_bytes(bytes(9))
    assert said in refused(tmp_path)


# ---------------------------------------------------------------- what a config asks for


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize(
    "kernel",
    ["flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/flash-attn", "paged|sdpa"],
)
def test_a_kernel_of_a_config_is_left_out_and_said(folder: Path, key: str, kernel: str) -> None:
    plain = load(str(folder))
    edit(folder, **{key: kernel})
    loaded = load(str(folder))
    assert f"config.json names the kernel {kernel}: the attention runs with sdpa instead" in loaded.remarks
    assert loaded.stepper.layers == plain.stepper.layers
    assert loaded.fingerprint == plain.fingerprint


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_kernel_that_can_be_walked_is_no_remark(folder: Path, kernel: str) -> None:
    edit(folder, _attn_implementation=kernel)
    loaded = load(str(folder))
    assert loaded.model.config._attn_implementation == kernel
    assert not any("kernel" in remark for remark in loaded.remarks)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "gptneox"}, "correct model_type='gptneox' in config.json (nearest: gpt_neox"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "c.C"}}, "config.json has auto_map: the code of 'new'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "FineGrainedFP8Config(dequantize=True)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "name the weights that it was quantised from"),
        ({"quantization_config": {}}, "remove the key from config.json"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "config.text_config.quantization_config"),
    ],
)
def test_a_config_that_cannot_be_met_names_its_key(folder: Path, fields: dict[str, Any], said: str) -> None:
    edit(folder, **fields)
    assert said in refused(folder)


def test_a_model_for_another_task_is_named(folder: Path, tmp_path: Path) -> None:
    weights = {name: value for name, value in load_file(folder / WEIGHTS).items() if "embed_out" not in name}
    save_file(weights | {"score.weight": torch.zeros(2, 64)}, folder / WEIGHTS, {"format": "pt"})
    edit(folder, architectures=["GPTNeoXForSequenceClassification"])
    assert "config.architectures says 'GPTNeoXForSequenceClassification', which has no head over" in refused(folder)
    config = hf.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    hf.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    assert "config.architectures says 'BertForMaskedLM', which has no head" in refused(tmp_path / "bert")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_names_of_a_wrapper_are_named(folder: Path, prefix: str) -> None:
    weights = {prefix + name: value for name, value in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    assert f"names have the prefix {prefix!r} of a wrapper" in refused(folder)


# ---------------------------------------------------------------- text models that also read images or sound

TEXT: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
WRAPPED: dict[str, Callable[[], Any]] = {
    "mistral3": lambda: hf.Mistral3ForConditionalGeneration(
        hf.Mistral3Config(
            text_config={**TEXT, "model_type": "mistral"}, vision_config={**IMAGE, "model_type": "pixtral"},
            image_token_index=119,
        )
    ),
    "llava": lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            text_config={**TEXT, "model_type": "llama"}, vision_config={**IMAGE, "model_type": "clip_vision_model"},
            image_token_index=119,
        )
    ),
    "internvl": lambda: hf.InternVLForConditionalGeneration(
        hf.InternVLConfig(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config={**IMAGE, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
            image_token_id=119,
        )
    ),
    "idefics3": lambda: hf.Idefics3ForConditionalGeneration(
        hf.Idefics3Config(
            text_config={**TEXT, "model_type": "llama"}, vision_config={**IMAGE}, image_token_id=119, scale_factor=2
        )
    ),
    "qwen2_audio": lambda: hf.Qwen2AudioForConditionalGeneration(
        hf.Qwen2AudioConfig(
            text_config={**TEXT, "model_type": "qwen2"},
            audio_config={
                "model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16, "num_mel_bins": 8, "max_source_positions": 16,
            },
            audio_token_index=119,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_a_text_model_inside_a_wrapper_runs_as_text(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = WRAPPED[name]().eval()
    model.save_pretrained(tmp_path)
    edit(tmp_path, _attn_implementation="flash_attention_2")
    loaded = load(str(tmp_path))
    ids = torch.arange(3, 50)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert loaded.stepper.layers == 3  # its construction compares the stepper's logits with the model's
    assert any("names the kernel flash_attention_2" in remark for remark in loaded.remarks)


def test_a_wrapper_that_generates_no_text_is_named(tmp_path: Path) -> None:
    hf.Blip2Config(text_config={"model_type": "t5"}).save_pretrained(tmp_path)  # answers about images alone
    assert "expected a family with a class of transformers that generates text" in refused(tmp_path)


# ---------------------------------------------------------------- tokenizers


def sentencepiece_file() -> bytes:
    """Return a SentencePiece model of a few pieces: fields of a protobuf, each a tag, a length and content."""

    def text_field(tag: int, content: bytes) -> bytes:
        return bytes([tag, len(content)]) + content

    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, **dict.fromkeys("▁abcdefgh", 1)}
    return b"".join(
        text_field(0x0A, text_field(0x0A, piece.encode()) + b"\x15" + struct.pack("<f", -at) + bytes([0x18, kind]))
        for at, (piece, kind) in enumerate(kinds.items())
    )


@pytest.fixture
def wordless(folder: Path) -> Path:
    """Return a model without any file of a tokenizer."""
    for path in (*folder.glob("tokenizer*"), *folder.glob("special_tokens*")):
        path.unlink()
    return folder


@pytest.mark.parametrize(
    ("file", "settings"),
    [("tokenizer.model", {"tokenizer_class": "LlamaTokenizer"}), ("spiece.model", {"tokenizer_class": "T5Tokenizer"})],
)
def test_a_sentencepiece_file_alone_names_what_it_needs(
    wordless: Path, monkeypatch: pytest.MonkeyPatch, file: str, settings: dict[str, str]
) -> None:
    monkeypatch.setattr(diagnosis, "_is_installed", lambda module: False)
    monkeypatch.setattr("transformers.utils.import_utils.is_sentencepiece_available", lambda: False)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (wordless / file).write_bytes(sentencepiece_file())
    (wordless / "tokenizer_config.json").write_text(json.dumps(settings))
    told = refused(wordless)
    assert f"{file} is a SentencePiece file, without a tokenizer.json: `pip install sentencepiece protobuf`" in told
    assert "AutoTokenizer.from_pretrained('" in told


@pytest.mark.parametrize("same", [True, False])
def test_ids_of_a_sentencepiece_file_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """Transformers converts some to other ids: spaces at the start are lost."""
    tokenizer = load(str(folder)).tokenizer
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_file())

    class Processor:
        def __init__(self, model_file: str):
            assert model_file == str(folder / "tokenizer.model")

        def encode(self, text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids if same or not text.startswith(" ") else [3, *ids]

    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: name)
    monkeypatch.setattr(
        tokenizer_files, "import_module", lambda name: SimpleNamespace(SentencePieceProcessor=Processor)
    )
    if same:
        tokenizer_files.require_sentencepiece_ids("mine", tokenizer, folder)
        return
    with pytest.raises(BadArgument, match=r"the ids of tokenizer\.model; .* reads \" Two  .* otherwise: add the"):
        tokenizer_files.require_sentencepiece_ids("mine", tokenizer, folder)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config.json": b'{"tokenizer_class": "T5Tokenizer"}'}, "T5Tokenizer reads spiece.model, tokenizer"),
        ({"tokenizer_config.json": b'{"tokenizer_class": "LlamaTokenizer"}'}, "and none of them is there: add the"),
        ({"tokenizer_config.json": b'{"tokenizer_class": "Mine"}'}, "tokenizer.json is missing: fetch it"),
        ({"tokenizer_config.json": b"{}", "qwen.tiktoken": b"IQ== 0\n"}, "qwen.tiktoken needs code of its repository"),
        (
            {"tokenizer.model": b"IQ== 0\nIg== 1\n"},
            "tokenizer.model is a vocabulary of tiktoken, without a tokenizer.j",
        ),
        ({"tekken.json": b'{"config": {}, "vocab": []}'}, "tekken.json is a vocabulary of mistral-common, without a"),
        ({"vocab.json": b'{"a": 0}'}, "vocab.json is half of a vocabulary, merges.txt is missing"),
        ({"spiece.model": sentencepiece_file()}, "state the tokenizer_class that reads spiece.model in tokenizer_con"),
        ({"tokenizer.json": b'{"model": {"voc'}, "tokenizer.json is no JSON"),
    ],
)
def test_a_tokenizer_without_a_vocabulary_is_named(
    wordless: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], said: str
) -> None:
    monkeypatch.setattr(diagnosis, "_is_installed", lambda module: False)
    for name, content in files.items():
        (wordless / name).write_bytes(content)
    assert said in refused(wordless)


# ---------------------------------------------------------------- the hub's cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of some/model in a hub's cache with one commit, without a name, while the hub is away."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    home = tmp_path / "hub" / "models--some--model"
    shutil.copytree(weights_folder() / "emad-nano", home / "snapshots" / COMMIT)
    (home / "refs").mkdir()
    return home


@pytest.mark.parametrize(
    ("ref", "content", "said"),
    [
        ("", "", f"its cache has no such revision: name some/model@{COMMIT}"),
        ("main", f"{COMMIT}\n", f"refs/main holds '{COMMIT}\\n', and must hold the commit alone"),
        ("main", OTHER, f"refs/main names '{OTHER}', which has no snapshot with config.json: name some/model@{COMMIT}"),
        ("v1", COMMIT, "its cache has no such revision: name some/model@v1"),
    ],
)
def test_a_snapshot_without_its_name_is_offered(cache: Path, ref: str, content: str, said: str) -> None:
    if ref:
        (cache / "refs" / ref).write_text(content)
    told = refused("some/model")
    assert said in told
    assert load(told.rsplit("name ", 1)[1]).provenance["commit"] == COMMIT


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "config.json",
            f"its cache holds the commit {COMMIT}, but config.json is a link without its content: `hf down",
        ),
        (
            WEIGHTS,
            f"{WEIGHTS} is a link that leads nowhere (../../blobs/ab): run `hf download some/model --revision {COMMIT}",
        ),
    ],
)
def test_a_link_without_its_blob_is_fetched(cache: Path, file: str, said: str) -> None:
    (cache / "refs" / "main").write_text(COMMIT)
    snapshot = cache / "snapshots" / COMMIT
    (snapshot / file).unlink()
    (snapshot / file).symlink_to("../../blobs/ab")
    assert said in refused("some/model")


def test_a_cache_of_unfinished_downloads_says_so(cache: Path) -> None:
    shutil.rmtree(cache / "snapshots")
    (cache / "blobs").mkdir()
    (cache / "blobs" / "ab.incomplete").touch()
    assert "holds 1 downloads that did not end: `hf download some/model`" in refused("some/model")


def test_weights_missing_from_a_snapshot_are_fetched(cache: Path) -> None:
    (cache / "refs" / "main").write_text(COMMIT)
    os.remove(cache / "snapshots" / COMMIT / WEIGHTS)
    assert f"are missing: run `hf download some/model --revision {COMMIT}`" in refused("some/model")
