"""Every parameter and buffer has the dtype that Transformers' ``from_pretrained`` gives it, in every family.

Transformers keeps rotary frequencies in float32 whatever the dtype of the model, and T5's ``wo`` in float16.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from emad_ref.models.bundled import weights_folder
from emad_ref.models.loading import copy_in_dtype, load
from emad_ref.models.model_spec import ModelSpec
from emad_ref.models.quantisation import int8_copy
from emad_ref.protocol import Prompt, TokenLogProbs
from pytest_emad.measurements import engine
from tests.small_models import FAMILIES, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import KINDS, small_t5

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)


def make_model(family):
    return small_t5(family, torch.float32) if family in KINDS else small_model(family, torch.float32)


def tensors(model):
    """Return every parameter and buffer by name, non-persistent ones too."""
    return dict((*model.named_parameters(), *model.named_buffers()))


def dtypes(model):
    return {name: tensor.dtype for name, tensor in tensors(model).items()}


def logits(model):
    ids = torch.arange(90)[None] % VOCABULARY
    sources = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        return model(input_ids=ids, **sources).logits


@pytest.mark.values("gpt_neox", "opt_350m", "gemma2", "qwen3_moe", "t5", "gptj", "llama3")
@pytest.mark.parametrize("family", [*FAMILIES, *KINDS])
def test_a_folder_is_read_in_the_dtypes_of_from_pretrained(family, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    for dtype in DTYPES:
        theirs = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
        loaded = load(tmp_path, dtype=dtype)
        assert dtypes(loaded.model) == dtypes(theirs), dtype
        if dtype == torch.float64 and loaded.geometry.experts:
            theirs.set_experts_implementation("eager")
        assert torch.equal(logits(loaded.model), logits(theirs)), dtype
        assert loaded.stepper.layers  # its check against the model's own logits passes


@pytest.mark.parametrize("family", ["gpt_neox", "llama3", "gemma3", "gptj", "mixtral", *KINDS])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_copy_in_another_dtype_is_the_model_loaded_in_it(family, dtype, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    copied, theirs = tensors(copy_in_dtype(model, dtype)), tensors(type(model).from_pretrained(tmp_path, dtype=dtype))
    assert copied.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert copied[name].dtype == tensor.dtype, name
        assert torch.equal(copied[name], tensor), name
    assert {tensor.dtype for tensor in tensors(model).values()} == {torch.float32}, "the original was cast"


@pytest.mark.parametrize("name", ["emad-nano", "emad-t5-tiny"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_bundled_and_random_models_and_copies_from_their_source_do_not_differ(name, dtype):
    bundled = load(name, dtype=dtype)
    theirs = dtypes(type(bundled.model).from_pretrained(weights_folder() / name, dtype=dtype))
    assert (torch.float32 in theirs.values()) == (name == "emad-nano" or dtype == torch.float16)
    assert dtypes(bundled.model) == theirs
    assert dtypes(ModelSpec.from_loaded(bundled).load().model) == theirs
    assert dtypes(load(f"random:{name}", dtype=dtype).model) == theirs


def test_the_control_keeps_its_frequencies_in_float32():
    found = dtypes(load("control:identity-upper", dtype=torch.bfloat16).model)
    assert {dtype for name, dtype in found.items() if "inv_freq" in name} == {torch.float32}
    assert {dtype for name, dtype in found.items() if "inv_freq" not in name} == {torch.bfloat16}


def test_an_int8_copy_keeps_the_dtypes_of_what_it_does_not_quantise():
    loaded = load("emad-nano")
    theirs, found = dtypes(loaded.model), dtypes(int8_copy(loaded).model)
    assert found.keys() < theirs.keys()
    assert all(theirs[name] == dtype for name, dtype in found.items())


def test_the_precision_that_an_engine_states_is_that_of_from_pretrained(tmp_path):
    """``EngineAnswers`` compares with the folder's model in the stated precision; rotary positions are far out."""
    model = small_model("llama3", torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    tokens = np.arange(120) % VOCABULARY
    prompt, answer = Prompt(tokens[:104]), tokens[104:]
    read, fed = torch.from_numpy(tokens[:104])[None], torch.from_numpy(answer[:-1])[None]

    def log_p(of):
        with torch.inference_mode():
            first = of(read, use_cache=True)
            rest = of(fed, past_key_values=first.past_key_values)
            logits = torch.cat([first.logits[0, -1:], rest.logits[0]]).double().numpy()
            return log_softmax(logits, axis=-1)

    expected, every = log_p(loaded.model), np.tile(np.arange(VOCABULARY), (len(answer), 1))
    theirs = log_p(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval())
    row = TokenLogProbs(answer, every, expected)
    wanted = engine._compare(theirs, expected)
    answers = object.__new__(engine.EngineAnswers)
    answers._subject = SimpleNamespace(loaded=loaded, stepper=loaded.stepper)
    answers._twins = {}
    answers.__dict__ |= {"_varied": [prompt], "_reading": SimpleNamespace(shown=[row], known=[expected])}
    found = [column.values.item() for column in answers._twin("bfloat16")]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
