"""A model folder is checked before transformers reads it: errors name file and remedy, usual folders load.

Nothing waits: a check that opens a pipe hangs the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from emad_ref.errors import BadArgument, EmadError
from emad_ref.models.bundled import weights_folder
from emad_ref.models.checkpoint import CheckpointWeightFiles, describe_defaulted_heads, read_config
from emad_ref.models.loading import load
from emad_ref.models.names import ModelUnavailable
from tests.small_models import small_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TENSOR = "model.layers.2.mlp.up_proj.weight"
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    small_model("llama", torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """Return a copy, to be damaged."""
    return Path(shutil.copytree(llama, tmp_path / "copy"))


HEADS = [  # family, content of config.json, whether it states the number of heads
    ("gpt_neox", {"num_attention_heads": 4}, True),
    ("gpt_neox", {"hidden_size": 64}, False),
    ("gpt2", {"n_head": 12}, True),
    ("gpt2", {"n_layer": 12}, False),
    ("t5", {"num_heads": 8}, True),
    ("gemma3_text", {"text_config": {"num_attention_heads": 8}}, True),
    ("gemma3_text", {"text_config": {}, "vision_config": {"num_attention_heads": 8}}, False),
]


@pytest.mark.parametrize(("family", "declared", "says"), HEADS, ids=str)
def test_a_number_of_heads_that_the_config_does_not_say_is_told(family: str, declared: dict, says: bool) -> None:
    """Weights fill the model for any number of heads."""
    said = describe_defaulted_heads(AutoConfig.for_model(family), declared)
    assert bool(said) is not says
    assert says or f"num_attention_heads: {AutoConfig.for_model(family).num_attention_heads}, the default of" in said


def test_a_model_with_the_default_number_of_heads_says_so(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(weights_folder() / "emad-nano", tmp_path / "nano"))
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    (remark,) = load(str(folder)).remarks
    assert remark == "config.json does not say num_attention_heads: 64, the default of gpt_neox, is taken"


def refused(folder: Path) -> str:
    """Return the only error of loading, its message on one line."""
    with pytest.raises(EmadError) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


# ---------------------------------------------------------------- adapters and other files with the weights


@pytest.mark.parametrize(
    "file",
    [
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "adapters.safetensors",
        "french/adapter_config.json",
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_an_adapter_is_refused_beside_weights_and_alone(copy: Path, file: str, alone: bool) -> None:
    (copy / file).parent.mkdir(exist_ok=True)
    (copy / file).write_text("{}")
    if alone:
        (copy / WEIGHTS).unlink()
        (copy / "config.json").unlink()
    said = refused(copy)
    assert f"expected a whole model without an adapter; it holds {file}: merge it" in said


def test_files_that_change_nothing_are_told(copy: Path) -> None:
    beside = ["medusa_lm_head.pt", "model.gguf", "modules.json", "quantize_config.json", "value_head.bin"]
    for name in (*beside, "optimizer.pt", "README.md"):
        (copy / name).write_text("{}")
    edit(copy, auto_map={"AutoModelForCausalLM": "mine.Model"})
    loaded = load(str(copy))
    assert (loaded.provenance["weights"], loaded.provenance["unread"]) == ([WEIGHTS], beside)
    assert "mine.Model" in loaded.provenance["code_not_run"]
    assert load("emad-nano").provenance["unread"] == []


@pytest.mark.parametrize(
    ("made", "same"),
    [
        (lambda weights: weights, True),
        (lambda weights: {name: value.half() for name, value in weights.items()}, True),
        (lambda weights: {"prefix." + name: value for name, value in weights.items()}, True),
        (lambda weights: weights | {TENSOR: weights[TENSOR] * 1.001}, False),
        (lambda weights: weights | {TENSOR: weights[TENSOR][:3]}, False),
    ],
)
def test_weights_in_another_format_are_the_same_or_refused(copy: Path, made: Any, same: bool) -> None:
    torch.save(made(load_file(copy / WEIGHTS)), copy / "pytorch_model.bin")
    if same:
        assert load(str(copy)).provenance["unread"] == ["pytorch_model.bin"]
    else:
        assert f"one set of weights; {TENSOR} in {WEIGHTS} is not the one in pytorch_model.bin" in refused(copy)


def test_one_file_and_shards_at_once_are_refused(copy: Path) -> None:
    sharded(copy)
    shutil.copy(copy / "model-00001-of-00005.safetensors", copy / WEIGHTS)
    assert "expected one set of weights; it holds model.safetensors and 5 shards" in refused(copy)


def test_an_index_whose_shards_are_gone_is_left_over(copy: Path) -> None:
    """transformers leaves one if a sharded model is saved again in one file."""
    sharded(copy)
    small_model("llama", torch.float32).save_pretrained(copy)
    assert (copy / INDEX).exists()
    assert load(str(copy)).provenance["weights"] == [WEIGHTS]


def test_masks_of_old_may_differ_between_two_formats(copy: Path) -> None:
    weights = load_file(copy / WEIGHTS)
    mask = "model.layers.0.self_attn.bias"
    save_file(weights | {mask: torch.ones(3, dtype=torch.bool)}, copy / WEIGHTS, {"format": "pt"})
    torch.save(weights | {mask: torch.zeros(1, 3)}, copy / "pytorch_model.bin")
    assert load(str(copy)).provenance["unread"] == ["pytorch_model.bin"]


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are POSIX's")
def test_a_subfolder_that_cannot_be_read_is_passed_over(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as lost+found on a separate volume; root, as in a container, may read it."""
    locked, stat = str(copy / "lost+found"), os.stat
    Path(locked).mkdir()

    def refusing(path: Any, *args: Any, **options: Any) -> Any:
        if os.path.dirname(os.fspath(path) if isinstance(path, str | Path) else "") == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    assert load(str(copy)).provenance["weights"] == [WEIGHTS]


# ---------------------------------------------------------------- which files may be read


def sharded(folder: Path) -> dict[str, Any]:
    (folder / WEIGHTS).unlink()
    small_model("llama", torch.float32).save_pretrained(folder, max_shard_size="50KB")
    return dict(json.loads((folder / INDEX).read_text()))


def renamed(folder: Path, name: Any) -> None:
    """Let the index call its first shard ``name``."""
    index = sharded(folder)
    first = min(index["weight_map"].values())
    places = {tensor: name if file == first else file for tensor, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": places}))


@pytest.mark.parametrize(
    "name",
    [
        *("../copy/model-00001-of-00005.safetensors", "./model-00001-of-00005.safetensors", "/etc/passwd", "a/b"),
        *("..", ".", "", "a\0b", "a\\b", 3, None, ["a"], {}),
    ],
)
def test_an_index_names_plain_files_of_its_own_folder(copy: Path, name: Any) -> None:
    renamed(copy, name)
    assert f"plain files of its own folder in {INDEX}; it names {name!r}" in refused(copy)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"metadata": {}}', "a weight_map of tensors and files"),
        ('{"weight_map": []}', "a weight_map of tensors and files"),
        ("[]", "an object of JSON"),
        ("{", "a readable JSON file"),
    ],
)
def test_an_index_that_is_none_is_refused(copy: Path, index: str, said: str) -> None:
    sharded(copy)
    (copy / INDEX).write_text(index)
    assert said in refused(copy)


def test_a_tensor_in_two_shards_is_refused(copy: Path) -> None:
    index = sharded(copy)
    shutil.copy(copy / "model-00001-of-00005.safetensors", copy / "more.safetensors")
    (copy / INDEX).write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"x": "more.safetensors"}}))
    assert "each tensor in one file" in refused(copy)


def test_a_link_to_a_file_is_a_file_as_in_the_hubs_cache(copy: Path, tmp_path: Path) -> None:
    sharded(copy)
    fingerprint = load(str(copy)).fingerprint
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(copy.iterdir())):
        os.rename(file, tmp_path / "blobs" / str(number))
        file.symlink_to(f"../blobs/{number}")
    assert load(str(copy)).fingerprint == fingerprint


READ = ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json")


@pytest.mark.parametrize("file", READ)
@pytest.mark.parametrize(
    ("put", "said"),
    [
        (os.mkfifo, "is a pipe"),
        (os.mkdir, "is a folder"),  # transformers would treat it as absent
        (lambda path: path.symlink_to(os.devnull), "is a device"),
        (lambda path: path.symlink_to("/nowhere"), "is a link that leads nowhere"),
        (lambda path: path.symlink_to(path), "is a link that leads nowhere"),
    ],
)
def test_what_would_hang_or_never_end_is_refused(copy: Path, file: str, put: Change, said: str) -> None:
    (copy / file).unlink(missing_ok=True)
    put(copy / file)
    assert re.search(rf"expected a folder of (plain|whole) files; {re.escape(file)} {said}", refused(copy))


def test_a_socket_and_a_pipe_among_templates_are_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)  # a socket's name may have a hundred letters
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s")
        assert "s is a socket" in refused(copy)
    (copy / "s").unlink()
    (copy / "additional_chat_templates").mkdir()
    os.mkfifo(copy / "additional_chat_templates" / "a.jinja")
    assert "a.jinja is a pipe" in refused(copy)


def test_other_configs_stay_in_the_folder(copy: Path) -> None:
    edit(copy, configuration_files=["../x.4.0.0.json"])
    said = "plain files of its own folder in config.json: configuration_files; it names '../x.4.0.0.json'"
    assert said in refused(copy)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", 3])
def test_a_config_names_weights_of_its_own_folder(copy: Path, name: Any) -> None:
    edit(copy, transformers_weights=name)
    assert "plain files of its own folder in config.json" in refused(copy)


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int32, torch.complex64])
@pytest.mark.parametrize("format", [WEIGHTS, "pytorch_model.bin"])
def test_weights_that_are_no_floating_point_are_refused(copy: Path, dtype: torch.dtype, format: str) -> None:
    weights = load_file(copy / WEIGHTS)
    weights[TENSOR] = weights[TENSOR].to(dtype)
    (copy / WEIGHTS).unlink()
    write = torch.save if format.endswith("bin") else lambda held, path: save_file(held, path, {"format": "pt"})
    write(weights, copy / format)
    assert f"expected weights in floating point; {TENSOR} is stored as" in refused(copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_and_masks_of_old_load(copy: Path, dtype: torch.dtype) -> None:
    weights = {name: value.to(dtype) for name, value in load_file(copy / WEIGHTS).items()}
    weights["model.layers.0.self_attn.bias"] = torch.ones(3, dtype=torch.bool)
    save_file(weights, copy / WEIGHTS, {"format": "pt"})
    assert load(str(copy)).geometry.layers == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:50],
        lambda data: data[:-5],
        lambda data: data + b"abc",
        lambda data: (2).to_bytes(8, "little") + b"[]",
        lambda data: (2**62).to_bytes(8, "little") + b"{}",
        lambda data: (lambda head: len(head).to_bytes(8, "little") + head)(
            b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 0]}}'
        ),
    ],
)
def test_a_damaged_header_is_one_error(copy: Path, damage: Callable[[bytes], bytes]) -> None:
    (copy / WEIGHTS).write_bytes(damage((copy / WEIGHTS).read_bytes()))
    assert f"a complete safetensors file; {WEIGHTS}: " in refused(copy)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 5000},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**9},
        {"intermediate_size": 10**9},
        {"hidden_size": 10**6},
        {"head_dim": 10**6},
    ],
)
def test_a_config_that_its_files_cannot_fill_is_refused_before_a_layer_is_built(
    copy: Path, fields: dict[str, int]
) -> None:
    edit(copy, **fields)
    before = time.process_time()
    assert "its config describes" in refused(copy)
    assert time.process_time() - before < 2  # 5,000 layers take half a minute


def test_a_layer_more_than_there_is_stays_named_tensor_by_tensor(copy: Path) -> None:
    edit(copy, num_hidden_layers=7)
    assert "9 missing (model.layers.6." in refused(copy)


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize("key", ["text_config", "decoder", "generator", "encoder", "text_encoder", "vision_config"])
@pytest.mark.parametrize("value", ["abc", [], 3, True])
def test_a_part_that_is_no_object_is_refused(copy: Path, key: str, value: Any) -> None:
    edit(copy, **{key: value})
    assert f"config.{key}={value!r}, but expected an object" in refused(copy)


@pytest.mark.parametrize("key", ["text_config", "decoder", "generator", "text_encoder"])
@pytest.mark.parametrize("value", [{}, {"text_config": {"text_config": {}}}, {"model_type": "llama"}])
def test_a_part_that_the_family_has_not_is_refused(copy: Path, key: str, value: Any) -> None:
    edit(copy, **{key: value})
    assert f"config.{key}={value!r}, but expected none: llama has no such part" in refused(copy)


def test_a_part_without_a_value_is_as_absent(copy: Path) -> None:
    edit(copy, text_config=None, decoder=None)
    assert load(str(copy)).geometry.layers == 6


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", ["12", -3, 0, 1.5, None, True, [2], {}, float("nan")])
def test_a_size_that_is_no_count_is_one_error(copy: Path, key: str, value: Any) -> None:
    edit(copy, **{key: value})
    refused(copy)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rms_norm_eps": "small"}, "fields have the types of its family"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights that are not quantised"),
        ({"is_encoder_decoder": True}, "config.is_encoder_decoder=True, but expected False"),
        ({"sliding_window": -1}, "config.sliding_window=-1, but expected a whole number"),
        ({"rope_parameters": "abc"}, "fields have the types of its family"),
        ({"rope_parameters": {"rope_type": "nope"}}, "files that it can read"),
        ({"model_type": ["llama"]}, "files that it can read"),
    ],
)
def test_other_nonsense_is_one_error(copy: Path, fields: dict[str, Any], said: str) -> None:
    edit(copy, **fields)
    assert said in refused(copy)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        (
            "gpt_neox",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            "must match the size",
        ),
        ("opt", {"dropout": -1}, "dropout probability"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("mixtral", {"num_experts_per_tok": 50}, "index k out of range"),
        ("t5", {"relative_attention_max_distance": 0}, "math domain error"),
    ],
)
def test_a_config_that_fits_the_weights_and_does_not_run_is_one_error(
    tmp_path: Path, family: str, fields: dict[str, Any], said: str
) -> None:
    folder = tmp_path / family
    model = small_model(family, torch.float32) if family != "t5" else load("emad-t5-tiny").model
    model.save_pretrained(folder)
    edit(folder, **fields)
    loaded = load(str(folder))
    with pytest.raises(
        BadArgument, match=rf"^model=.*{family}.*a config whose model runs .*{said}.*; mend config.json$"
    ):
        loaded.stepper  # noqa: B018  # it runs the model


def test_a_field_that_stands_twice_is_one_error(copy: Path) -> None:
    """Another reader takes the other value."""
    (copy / "config.json").write_text('{"eos_token_id": 0, "eos_token_id": 5}')
    assert "the key 'eos_token_id' stands twice" in refused(copy)


@pytest.mark.parametrize("text", ['{"max_new_tokens": -1}', '{"watermarking_config": 5}'])
def test_settings_of_generation_that_cannot_be_read_name_their_file(copy: Path, text: str) -> None:
    (copy / "generation_config.json").write_text(text)
    assert "expected a generation_config.json that transformers can read" in refused(copy)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "{", "{}", '{"a": 1e999}', "[" * 5000, "\0"])
def test_a_config_that_is_no_object_is_one_error(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    refused(copy)


def test_a_family_that_computes_a_table_of_positions_has_few(tmp_path: Path) -> None:
    small_model("gptj", torch.float32).save_pretrained(tmp_path / "gptj")
    edit(tmp_path / "gptj", n_positions=10**9)
    assert "config.max_position_embeddings=1000000000, but expected at most 1,048,576" in refused(tmp_path / "gptj")


def test_headers_are_read_and_numbers_are_not(llama: Path) -> None:
    held = CheckpointWeightFiles.from_folder("llama", llama, read_config("llama", llama))
    assert held is not None
    found = held.read_headers()
    assert found.block_count == 6
    assert sum(found.numbers.values()) == sum(p.numel() for p in small_model("llama").parameters())
    assert set(found.dtypes.values()) == {"F32"}


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointWeightFiles.from_folder("none", tmp_path, {}) is None
    with pytest.raises(ModelUnavailable, match="the folder is empty: fetch it"):
        load(str(tmp_path))
