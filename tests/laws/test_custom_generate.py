"""``custom_generate=adaptive(point)``: Transformers' own tokens at full depth, our decoder's at any other point.

In float64 on random weights, so that no tie is broken by the order of a sum.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from emad_ref import adaptive
from emad_ref.decoding.custom_generate import AdaptiveOutput, AdaptiveSeq2SeqOutput
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.point import full_depth
from emad_ref.policy.early_exit import early_exit
from emad_ref.policy.thresholds import fixed_entropy
from emad_ref.protocol import Prompt
from tests.small import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import VOCABULARY as WORDS
from tests.unit.models.test_seq2seq import small_t5

FULL = full_depth(LAYERS)
PAD = 0
PROMPTS = ([5, 9, 2, 44, 17], [61, 3], [8, 30, 12])
NEW = 24


def batch() -> dict[str, torch.Tensor]:
    """Padded on the left, as Transformers wants prompts of a decoder-only model."""
    width = max(map(len, PROMPTS))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in PROMPTS]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generated(model, *, custom=None, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(**batch(), **{"max_new_tokens": NEW, "pad_token_id": PAD, **options}, custom_generate=custom)


@pytest.fixture(scope="module", params=["gpt_neox", "llama"])
def model(request):
    return small_model(request.param)


@pytest.fixture(scope="module")
def halfway(model):
    """A point that some tokens leave early and others do not."""
    decoder = WalkedDecoder(CausalStepper(model), fixed_entropy(LAYERS, (2, 4), 0.0), max_rows=len(PROMPTS))
    signal = decoder.generate([Prompt(np.array(prompt)) for prompt in PROMPTS], NEW).signal
    return fixed_entropy(LAYERS, (2, 4), float(np.nanmedian(signal)))


SETTINGS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "ends": {"eos_token_id": list(range(1, VOCABULARY, 7))},
    "sampled ends": {"do_sample": True, "eos_token_id": list(range(1, VOCABULARY, 9))},
    "by length": {"max_new_tokens": None, "max_length": 11},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_at_full_depth_the_tokens_are_transformers_own(model, options):
    theirs, ours = generated(model, **options), generated(model, custom=adaptive(FULL), **options)
    assert ours.tolist() == theirs.tolist()


def test_scores_and_logits_are_transformers_own(model):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.5}
    theirs, ours = generated(model, **asked), generated(model, custom=adaptive(FULL), **asked)
    for name in ("scores", "logits"):
        for mine, other in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)  # both are rounded to float32


def test_at_another_point_tokens_and_depths_are_our_decoders(model, halfway):
    stop = frozenset(range(1, VOCABULARY, 11))
    found = generated(model, custom=adaptive(halfway), return_dict_in_generate=True, eos_token_id=sorted(stop))
    assert isinstance(found, AdaptiveOutput)
    decoder = WalkedDecoder(CausalStepper(model), halfway, max_rows=len(PROMPTS))
    record = decoder.generate([Prompt(np.array(prompt)) for prompt in PROMPTS], NEW, stop)
    width = batch()["input_ids"].shape[1]
    assert found.depths.shape == found.sequences[:, width:].shape
    for row, emitted in enumerate(record.emitted):
        depth = record.tokens.of(row, 1).depth
        assert found.sequences[row, width : width + len(emitted)].tolist() == emitted.tolist()
        assert found.depths[row, : len(emitted)].tolist() == depth.tolist()
        assert (found.sequences[row, width + len(emitted) :] == PAD).all()
        assert (found.depths[row, len(emitted) :] == 0).all()
    assert len(np.unique(record.tokens.depth)) > 1, "otherwise nothing left early"
    assert len({len(emitted) for emitted in record.emitted}) > 1, "otherwise no row ended before another"


def test_an_encoder_decoder_reads_its_source_without_padding():
    model = small_t5(num_layers=LAYERS)  # Transformers' own cache counts the encoder's layers, where they are fewer
    sources = {"input_ids": torch.tensor([[5, 9, 2, 44], [61, 3, 1, PAD]]),
               "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}  # fmt: skip
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, "num_return_sequences": 2, "do_sample": True}

    def run(custom):
        torch.manual_seed(0)
        return model.generate(**sources, **options, custom_generate=custom)

    layers = model.config.num_decoder_layers
    assert run(adaptive(full_depth(layers))).sequences.tolist() == run(None).sequences.tolist()
    point = early_exit("softmax_response", layers, WORDS, 1, 0.1)
    found = model.generate(
        **sources, max_new_tokens=12, return_dict_in_generate=True, custom_generate=adaptive(point), eos_token_id=None
    )
    assert isinstance(found, AdaptiveSeq2SeqOutput)
    decoder = WalkedDecoder(Seq2SeqStepper(model), point, max_rows=2)
    opening = np.array([model.config.decoder_start_token_id])
    prompts = [Prompt(opening, np.array(source)) for source in ([5, 9, 2, 44], [61, 3, 1])]
    record = decoder.generate(prompts, 12)
    assert found.sequences[:, 1:].tolist() == [emitted.tolist() for emitted in record.emitted]
    assert found.depths.tolist() == [record.tokens.of(row, 1).depth.tolist() for row in (0, 1)]
    assert found.depths.unique().numel() > 1, "otherwise nothing left early"


class Heard(BaseStreamer):
    def __init__(self):
        self.ids, self.ended = [], False

    def put(self, value):
        self.ids += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_a_streamer_hears_the_prompt_and_every_token(model):
    heard = Heard()
    ids = torch.tensor([PROMPTS[0]])
    found = model.generate(
        ids, max_new_tokens=5, pad_token_id=PAD, custom_generate=adaptive(FULL, streamer=heard), do_sample=False
    )
    assert (heard.ids, heard.ended) == (found[0].tolist(), True)


REFUSED = {
    "beams": ({"num_beams": 2}, "num_beams=2, but expected 1"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True, but"),
    "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True, but"),
    "holes": ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]] * 3)}, "attention_mask[0]=[1, 0, 1, 1, 1]"),
    "positions": ({"max_new_tokens": 1000}, "positions="),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_means_nothing_here_is_refused_by_name(model, options, message):
    with pytest.raises(BadArgument) as caught:
        model.generate(
            **{**batch(), "max_new_tokens": 3, "pad_token_id": PAD, **options}, custom_generate=adaptive(FULL)
        )
    assert message in str(caught.value)


def test_a_cache_that_holds_tokens_is_refused(model):
    held = model(torch.tensor([PROMPTS[0][:2]]), use_cache=True).past_key_values
    with pytest.raises(BadArgument, match="past_key_values='2 positions', but expected none"):
        model.generate(
            torch.tensor([PROMPTS[0]]), past_key_values=held, max_new_tokens=2, custom_generate=adaptive(FULL)
        )


def test_a_point_of_another_model_is_refused(model):
    with pytest.raises(BadArgument, match=r"point\.layers"):
        generated(model, custom=adaptive(full_depth(LAYERS + 1)))


def test_one_callable_serves_several_models():
    custom = adaptive(FULL)
    for family in ("gpt_neox", "llama", "gpt_neox"):
        model = small_model(family)
        assert generated(model, custom=custom).tolist() == generated(model).tolist()
