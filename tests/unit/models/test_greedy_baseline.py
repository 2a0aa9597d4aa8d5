"""The baseline decodes greedily: a model's generation config changes neither its tokens nor its work."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from emad_ref.models.generation import (
    absent_drafting,
    describe_ignored_settings,
    greedy_generate,
    ignored_generation_settings,
    make_prompt_lookup_generate,
    make_transformers_generate,
)
from emad_ref.models.loading import load
from emad_ref.protocol import Prompt
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import Study
from tests.small_models import VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5

NEW = 8
READ = torch.tensor([[5, 9, 2, 44], [61, 3, 8, 30]])
HOSTILE: dict[str, Any] = {
    "repetition_penalty": 1.8,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": list(range(0, VOCABULARY, 2)),
    "begin_suppress_tokens": list(range(0, VOCABULARY, 2)),
    "bad_words_ids": [[token] for token in range(0, VOCABULARY, 2)],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 7,
    "min_length": 60,
    "min_new_tokens": 60,
    "max_length": 6,
    "max_time": 1e-9,
    "stop_strings": ["a"],
    "num_beams": 3,
    "num_return_sequences": 2,
    "do_sample": True,
    "guidance_scale": 3.0,
    "exponential_decay_length_penalty": [1, 5.0],
    "sequence_bias": [[[7], 100.0]],
    "cache_implementation": "static",
    "use_cache": False,
    "prompt_lookup_num_tokens": 3,
    "num_assistant_tokens": 1,
    "num_assistant_tokens_schedule": "heuristic",
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 1,
    "output_scores": True,
    "return_dict_in_generate": True,
    "eos_token_id": list(range(0, VOCABULARY, 2)),
    "pad_token_id": 7,
}


def given(read: torch.Tensor = READ) -> dict[str, torch.Tensor]:
    return {"inputs": read, "attention_mask": torch.ones_like(read)}


@torch.inference_mode()
def argmax(model: Any, read: torch.Tensor, new: int) -> list[list[int]]:
    """Decode greedily by definition: the whole text is read again for every token."""
    for _ in range(new):
        read = torch.cat([read, model(read, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return read.tolist()


@pytest.fixture(scope="module")
def plain() -> Any:
    return small_model("llama")


@pytest.fixture
def hostile(plain: Any) -> Any:
    """Return the same model; tests change its generation config."""
    kept, plain.generation_config = plain.generation_config, GenerationConfig()
    yield plain
    plain.generation_config = kept


@pytest.mark.parametrize("name", HOSTILE)
def test_no_setting_of_the_model_changes_a_token(hostile: Any, name: str) -> None:
    setattr(hostile.generation_config, name, HOSTILE[name])
    before = copy.deepcopy(hostile.generation_config.to_dict())
    assert greedy_generate(hostile, given(), NEW).tolist() == argmax(hostile, READ, NEW)
    assert hostile.generation_config.to_dict() == before, "the model's own config is restored"
    assert set(ignored_generation_settings(hostile)) == {name} - {"eos_token_id", "pad_token_id"}


def test_every_setting_there_is_stays_outside(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Future settings of transformers, too: none of the model's settings takes effect, and the note names all."""
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    for name in names:
        setattr(hostile.generation_config, name, f"the model's {name}")
    seen = []

    def generate(inputs: torch.Tensor, generation_config: GenerationConfig, **rest: Any) -> torch.Tensor:
        seen.append((hostile.generation_config.to_diff_dict(), generation_config.to_diff_dict(), set(rest)))
        return inputs

    monkeypatch.setattr(hostile, "generate", generate)
    greedy_generate(hostile, given(), NEW, ends={4, 2})
    chosen = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [2, 4], "pad_token_id": 2}
    ((own, asked, rest),) = seen
    assert set(own) <= {"transformers_version"}
    assert {name: value for name, value in asked.items() if name != "transformers_version"} == chosen
    assert rest == {"attention_mask"}
    ids = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
    assert set(ignored_generation_settings(hostile)) == names - ids
    assert 'top_k="the model\'s top_k"' in describe_ignored_settings(ignored_generation_settings(hostile))


def test_what_fails_leaves_the_models_settings_alone(hostile: Any) -> None:
    mine = hostile.generation_config
    with pytest.raises(AttributeError):
        greedy_generate(hostile, {"inputs": "no tensor", "attention_mask": None}, NEW)
    assert hostile.generation_config is mine


def test_a_row_ends_at_each_of_the_ends_and_is_filled(plain: Any) -> None:
    texts = argmax(plain, READ, NEW)
    first, second = texts[0][6], texts[1][5]
    for padding, fill in ((None, min(first, second)), (3, 3)):
        rows = greedy_generate(plain, given(), NEW, ends={first, second}, padding=padding).tolist()
        for row, text in zip(rows, texts, strict=True):
            end = next(at for at in range(4, len(text)) if text[at] in (first, second))
            assert row[: end + 1] == text[: end + 1]
            assert set(row[end + 1 :]) <= {fill}


def test_values_are_told_in_short() -> None:
    said = describe_ignored_settings({"suppress_tokens": list(range(500)), "num_beams": 4})
    assert "num_beams=4: left out of every baseline" in said
    assert len(said) < 250
    assert describe_ignored_settings({}) == ""


# ---------------------------------------------------------------- callers


SPOILED = {name: HOSTILE[name] for name in ("repetition_penalty", "suppress_tokens", "num_beams", "max_length")}


@pytest.fixture
def nano() -> Any:
    """Return emad-nano with a generation config as a user could ship it."""
    loaded = load("emad-nano")
    for name, value in SPOILED.items():
        setattr(loaded.model.generation_config, name, value)
    return loaded


def test_every_baseline_of_a_run_is_plain(nano: Any) -> None:
    tokens = nano.tokenizer.encode("Ada has 3 pens. Ada finds 4 pens. Ada has")
    (wanted,) = argmax(nano.model, torch.tensor([tokens]), NEW)
    prompt = Prompt(np.array(tokens))
    subject = ModelUnderTest(nano, Study(), RunResources())
    assert subject.generate_greedy([prompt], NEW)[0].tolist() == wanted[len(tokens) :]
    own = nano.model, nano.stepper.device
    for way in (
        make_transformers_generate(*own),
        make_prompt_lookup_generate(*own),
        make_transformers_generate(*own, assistant=load("emad-nano").model),
    ):
        assert way(prompt, NEW).tolist() == wanted[len(tokens) :]


def test_an_assistants_settings_are_left_out_too(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, model = [], load("emad-nano").model
    monkeypatch.setattr(
        model, "generate", lambda assistant_model, **rest: asked.append(assistant_model.generation_config)
    )
    greedy_generate(model, given(), NEW, assistant=nano.model)
    assert set(asked[0].to_diff_dict()) <= {"transformers_version"}
    assert nano.model.generation_config.num_beams == SPOILED["num_beams"], "the config is restored"


def test_an_encoder_decoders_baseline_is_plain() -> None:
    model = small_t5(num_layers=6)
    read, start = torch.tensor([[5, 9, 2]]), torch.tensor([[0]])
    wanted = start
    with torch.inference_mode():
        for _ in range(NEW):
            logits = model(input_ids=read, decoder_input_ids=wanted, use_cache=False).logits
            wanted = torch.cat([wanted, logits[:, -1:].argmax(-1)], dim=1)
    model.generation_config.update(**SPOILED, encoder_no_repeat_ngram_size=1, forced_bos_token_id=7)
    found = greedy_generate(model, given(read) | {"decoder_input_ids": start}, NEW, decoder_start_token_id=0)
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_what_a_config_wants_collected_is_not_and_is_named(tmp_path: Path, name: str) -> None:
    model = small_model("llama", torch.float32, config=copy.deepcopy(small_model("llama").config))
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace("{", f'{{"{name}": true,', 1))
    loaded = load(str(tmp_path / "model"))
    assert f"{name}=True: left out" in loaded.remarks[0]
    seen: list[SimpleNamespace] = []
    loaded.model.register_forward_hook(lambda module, given, made: seen.append(made))
    greedy_generate(loaded.model, given(), 2)
    assert (seen[0].hidden_states, seen[0].attentions) == (None, None)


# ------------------------------------------------------------ drafts over a sliding window


@pytest.mark.parametrize("family", ["mistral_window", "gemma2", "gemma3", "smollm3_window"])
def test_drafts_are_refused_where_the_cache_returns_keys_beyond_a_window(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Planted: the cache of transformers 5.17, whose windows return all that they keep."""
    windowed, plain = small_model(family), small_model("llama")
    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", DynamicLayer.update)
    for models in ((windowed,), (plain, windowed), (windowed, plain)):
        assert absent_drafting(*models).reason.startswith("a sliding window, and the cache of transformers ")
    assert absent_drafting(plain) is None


@pytest.mark.parametrize("family", ["mistral_window", "gemma3"])
def test_drafts_over_a_sliding_window_give_the_models_tokens_or_a_reason(family: str) -> None:
    """With the installed transformers: beyond the window, by lookup and by a draft model of the same family."""
    model, draft = small_model(family), small_model(family, seed=1)
    prompt = Prompt(np.tile(np.array([5, 9, 2, 44]), 4))
    plain = make_transformers_generate(model, torch.device("cpu"))(prompt, NEW)
    if not absent_drafting(model, draft):
        for options in ({"assistant": draft}, {"assistant": model}, {"prompt_lookup_num_tokens": 3}):
            drafted = make_transformers_generate(model, torch.device("cpu"), **options)(prompt, NEW)
            np.testing.assert_array_equal(drafted, plain)
