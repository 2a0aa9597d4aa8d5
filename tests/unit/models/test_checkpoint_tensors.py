"""A checkpoint fills its model, or the error names the tensors; known leftovers of published files raise no error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.checkpoint import require_all_weights_loaded
from emad_ref.models.loading import load
from tests.small_models import FAMILIES, LAYERS, small_model

Weights = dict[str, Tensor]
ALL = range(LAYERS)


def unchanged(weights: Weights) -> None:
    pass


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., str]:
    """Return a small model on disk with changed tensors and config."""

    def store(family: str, change: Callable[[Weights], object] = unchanged, **config: object) -> str:
        folder = tmp_path / family
        small_model(family, torch.float32).save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        held = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(held | config))
        return str(folder)

    return store


def drop(pattern: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.pop(name) for name in list(weights) if re.search(pattern, name)]


def replace_all(weights: Weights) -> None:
    """Replace them by as many numbers in as many layers, under a meaningless name."""
    weights.clear()
    weights["x.5.weight"] = torch.zeros(60_000)


def rename(weights: Weights) -> None:
    for name in [name for name in weights if ".mlp." in name]:
        weights[name.replace(".mlp.", ".feed_forward.")] = weights.pop(name)


def widen(weights: Weights) -> None:
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    weights[name] = torch.zeros(2 * len(weights[name]), weights[name].shape[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_fills_its_model(stored: Callable[..., str], family: str) -> None:
    assert load(stored(family)).trained


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (drop(r"layers\.4\.mlp"), {}, r"4 missing \(gpt_neox\.layers\.4\.mlp\.dense_4h_to_h\.bias, .*, …\)"),
        (drop(r"layers\.5\."), {}, r"12 missing \(gpt_neox\.layers\.5\."),
        (drop(r"^embed_out|^lm_head"), {}, r"1 missing \(lm_head\.weight\)"),
        (drop(r"final_layer_norm\.bias"), {}, r"1 missing \(gpt_neox\.final_layer_norm\.bias\)"),
        (replace_all, {}, r"76 missing.*; 1 that the config"),
        (rename, {}, r"24 missing .*; 24 that the config leaves no place for \(gpt_neox\.layers\.0\.feed_forward"),
        (unchanged, {"num_hidden_layers": 4}, r"24 that the config leaves no place for \(gpt_neox\.layers\.4"),
        (unchanged, {"num_hidden_layers": 8}, r"24 missing \(gpt_neox\.layers\.6\."),
        (widen, {}, r"1 of another shape.*\(gpt_neox\.layers\.1\.mlp\.dense_h_to_4h\.weight \[128, 32\] for \[64"),
        (unchanged, {"vocab_size": 90}, r"2 of another shape than the config says"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    stored: Callable[..., str], change: Callable[[Weights], object], config: dict[str, object], said: str
) -> None:
    with pytest.raises(
        BadArgument, match=r"expected a checkpoint that fills the model of its config; tensors: " + said
    ):
        load(stored("gpt_neox", change, **config))


def add_tables(weights: Weights) -> None:
    for layer in ALL:
        attention = f"gpt_neox.layers.{layer}.attention"
        weights[f"{attention}.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8)
        weights[f"{attention}.masked_bias"] = torch.tensor(-1e9)
        weights[f"{attention}.rotary_emb.inv_freq"] = torch.zeros(4)


def as_published_gpt2(weights: Weights) -> None:
    """Names without the outer module, one mask per layer, and in fine-tuned models the value behind the mask."""
    for name in list(weights):
        weights[name.removeprefix("transformer.")] = weights.pop(name)
    for layer in ALL:
        weights[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128)
        weights[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gpt_neox", add_tables),
        ("gpt2", as_published_gpt2),
        ("llama", lambda w: w.update({f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in ALL})),
        ("gptj", lambda w: w.update({f"transformer.h.{n}.attn.masked_bias": torch.tensor(-1e9) for n in ALL})),
        ("llama3", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()})),
    ],
)  # fmt: skip
def test_tables_of_published_checkpoints_and_tied_copies_are_no_false_alarm(
    stored: Callable[..., str], family: str, change: Callable[[Weights], object]
) -> None:
    plain = small_model(family, torch.float32)
    loaded = load(stored(family, change))
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, plain(ids).logits)


def test_the_bundled_encoder_decoder_is_filled_by_one_of_its_tied_tensors(tmp_path: Path) -> None:
    loaded = load("emad-t5-tiny")
    loaded.model.save_pretrained(tmp_path / "t5")
    weights = load_file(tmp_path / "t5" / "model.safetensors")
    again = load(str(tmp_path / "t5"))
    ids = torch.arange(5)[None]
    with torch.inference_mode():
        first, second = (each.model(input_ids=ids, decoder_input_ids=ids).logits for each in (loaded, again))
    assert torch.equal(first, second)
    drop(r"decoder\.block\.2\.")(weights)
    save_file(weights, tmp_path / "t5" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadArgument, match=r"missing \(decoder\.block\.2\."):
        load(str(tmp_path / "t5"))


def test_a_head_that_is_not_tied_though_the_config_says_so_is_refused(stored: Callable[..., str]) -> None:
    with pytest.raises(BadArgument, match=r"one tensor for embedding and head, as tie_word_embeddings says; the file"):
        load(stored("gpt_neox", tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": "32"}, "fields have the types of its family; .*'hidden_size' expected int, got str"),
        ({"hidden_size": 0}, "config.hidden_size=0, but expected a whole number of at least 1"),
        ({"hidden_act": "unheard-of"}, "files that it can read; KeyError: 'unheard-of'"),
        (
            {"max_position_embeddings": -3},
            "config.max_position_embeddings=-3, but expected a whole number of at least 1",
        ),
        ({"max_position_embeddings": 1}, "config.max_position_embeddings=1, but expected 2 or more"),
        ({"bos_token_id": 500}, "config's first token id=500, but expected 0–100, as vocab_size says"),
    ],
)
def test_a_config_of_impossible_values_is_one_clear_error(
    stored: Callable[..., str], config: dict[str, object], said: str
) -> None:
    with pytest.raises(BadArgument, match=said):
        load(stored("gpt_neox", **config))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "a readable JSON file; .*nested too deep"),
        ("null", "an object of JSON"),
        ("[]", "an object of JSON"),
        ('{"model_type": []}', "files that it can read"),
    ],
)
def test_a_config_that_is_no_config_is_one_clear_error(stored: Callable[..., str], content: str, said: str) -> None:
    folder = stored("gpt_neox")
    Path(folder, "config.json").write_text(content)
    with pytest.raises(BadArgument, match=said):
        load(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pytorch_model.bin", r"pytorch_model\.bin is (empty|no file of torch\.save)|pytorch_model\.bin holds text"),
        ("tokenizer.json", r"a tokenizer that transformers can read from tokenizer\.json|tokenizer\.json is empty"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"{}", b"hello", b"[]"])
def test_weights_and_tokenizers_that_are_none_are_one_clear_error(
    stored: Callable[..., str], name: str, said: str, content: bytes
) -> None:
    folder = Path(stored("gpt_neox"))
    (folder / name).write_bytes(content)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    with pytest.raises(BadArgument, match=said):
        load(str(folder))


def test_layer_2_stands_before_layer_10() -> None:
    keys = {"a.10.w", "a.2.w", "a.2.b", "b.1", "a.11.w"}
    with pytest.raises(BadArgument, match=r"5 missing \(a\.2\.b, a\.2\.w, a\.10\.w, …\);"):
        require_all_weights_loaded(
            "mine",
            small_model("llama", torch.float32),
            {"missing_keys": keys, "unexpected_keys": set(), "mismatched_keys": set()},
        )


def test_a_table_that_is_not_finite_is_refused(stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored, or computed from a config whose numbers overflow."""
    from emad_ref.models import loading

    read = loading._read_weights

    def overflowing(*given: object) -> object:
        model, found = read(*given)
        model.gpt_neox.rotary_emb.inv_freq[0] = torch.inf
        return model, found

    monkeypatch.setattr(loading, "_read_weights", overflowing)
    with pytest.raises(BadArgument, match=r"expected finite weights; gpt_neox\.rotary_emb\.inv_freq holds NaN"):
        load(stored("gpt_neox"))
