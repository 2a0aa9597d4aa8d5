"""``custom_generate=adaptive(point)`` emits Transformers' tokens at full depth and the reference decoder's elsewhere.

In float64 on random weights, so that the order of a sum breaks no tie.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from emad_ref import adaptive
from emad_ref.decoding.custom_generate import IDLE, REFUSED, TAKEN, AdaptiveOutput, AdaptiveSeq2SeqOutput
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import early_exit_point, fixed_entropy_point
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import VOCABULARY as WORDS
from tests.unit.models.test_seq2seq import small_t5

pytestmark = pytest.mark.each_value

FULL = full_depth(LAYERS)
PAD = 0
PROMPTS = ([5, 9, 2, 44, 17], [61, 3], [8, 30, 12])
NEW = 24


def batch() -> dict[str, torch.Tensor]:
    """Pad prompts on the left, as Transformers requires for a decoder-only model."""
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
    """Return a point at which some tokens exit early."""
    decoder = WalkedDecoder(CausalStepper(model), fixed_entropy_point(LAYERS, (2, 4), 0.0), max_rows=len(PROMPTS))
    signal = decoder.generate([Prompt(np.array(prompt)) for prompt in PROMPTS], NEW).signal
    return fixed_entropy_point(LAYERS, (2, 4), float(np.nanmedian(signal)))


class EndsAtOdd(StoppingCriteria):
    """End a row at an odd token, once it has ten tokens."""

    def __call__(self, input_ids, scores, **ignored):
        return (input_ids[:, -1] % 2 == 1) & (input_ids.shape[1] >= 10)


SETTINGS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "min-p": {"do_sample": True, "min_p": 0.05},
    "top-h": {"do_sample": True, "top_h": 0.4},
    "cutoffs": {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.001, "eta_cutoff": 0.001},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "the prompt penalised": {"encoder_repetition_penalty": 1.7, "encoder_no_repeat_ngram_size": 1},
    "banned": {"bad_words_ids": [[token] for token in range(0, VOCABULARY, 3)], "remove_invalid_values": True},
    "suppressed": {"suppress_tokens": list(range(0, VOCABULARY, 2)), "begin_suppress_tokens": list(range(1, 90))},
    "biased": {"sequence_bias": [[[7], 2.0], [[9, 7], 20.0]], "renormalize_logits": True},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 9, "bos_token_id": 4},
    "decaying": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 11},
    "guided": {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[8, 9]] * 3),
               "negative_prompt_attention_mask": torch.ones(3, 2, dtype=torch.long)},
    "watermarked": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "ends": {"eos_token_id": list(range(1, VOCABULARY, 7))},
    "sampled ends": {"do_sample": True, "eos_token_id": list(range(1, VOCABULARY, 9))},
    "at least": {"eos_token_id": list(range(1, VOCABULARY, 2)), "min_length": 12},
    "by length": {"max_new_tokens": None, "max_length": 11},
    "by time": {"max_time": 1e-9},
    "by a criterion": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(9)])},
    "by a criterion, row by row": {"stopping_criteria": StoppingCriteriaList([EndsAtOdd()])},
    "by a criterion and ends": {"stopping_criteria": StoppingCriteriaList([EndsAtOdd()]), "eos_token_id": [4, 8]},
    "by a processor": {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)]), "do_sample": True},
    "by a prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [row + 1, (int(ids[-1]) * 7) % VOCABULARY]},
    "by a config": {"generation_config": GenerationConfig(repetition_penalty=1.4, pad_token_id=PAD),
                    "max_new_tokens": 7},
    "idle": {"num_assistant_tokens": 3, "use_cache": False, "length_penalty": 2.0, "cache_implementation": "dynamic"},
}  # fmt: skip


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_at_full_depth_the_tokens_are_transformers_own(model, options):
    theirs, ours = generated(model, **options), generated(model, custom=adaptive(FULL), **options)
    assert ours.tolist() == theirs.tolist()


# ---------------------------------------------------------------- generate's arguments, one by one

UNHEARD = {"streamer", "assistant_model", "synced_gpus", "tokenizer", "assistant_tokenizer"}  # of any callable
TOLD_ELSEWHERE = {  # accepted, and tested separately below
    "inputs", "kwargs", "custom_generate", "stop_strings", "return_dict_in_generate", "output_scores", "output_logits",
    "decoder_start_token_id",
}  # fmt: skip


def arguments() -> set[str]:
    """Return every argument that ``generate`` of the installed transformers accepts."""
    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    named = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    popped = {"tokenizer", "assistant_tokenizer"}  # named in its kwargs
    return settings | named | popped


def test_every_argument_of_generate_has_its_one_place():
    places = [TAKEN, IDLE, UNHEARD, REFUSED]
    assert sorted(name for place in places for name in place) == sorted(arguments())


def test_every_setting_that_is_taken_is_compared_with_transformers():
    compared = {name for options in (*SETTINGS.values(), {"pad_token_id": PAD}) for name in options}
    assert compared - IDLE - {"cache_implementation"} == TAKEN - TOLD_ELSEWHERE


def test_what_no_callable_is_given_is_still_not_given(model):
    """If transformers starts to pass one on, the page is wrong and ``adaptive`` can take it."""
    heard, arrived = Heard(), {}

    def custom(model, input_ids, tokenizer=None, assistant_tokenizer=None, **rest):
        arrived.update(rest, tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer)
        return input_ids

    model.generate(
        torch.tensor([PROMPTS[0]]), streamer=heard, assistant_model=model, synced_gpus=False, tokenizer=words(),
        assistant_tokenizer=words(), max_new_tokens=2, custom_generate=custom,
    )  # fmt: skip
    assert not {name for name in UNHEARD if arrived.get(name) is not None}


def test_the_page_says_what_the_code_does():
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    rows = dict(re.findall(r"^\| (supported|no effect|refused|never arrives) \| (.*) \|$", page, flags=re.MULTILINE))
    said = {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows.items()}
    assert said == {"supported": TAKEN, "no effect": IDLE, "refused": set(REFUSED), "never arrives": UNHEARD}


VALUES = {  # those that transformers itself passes to a callable
    "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": [1], "force_words_ids": [[7]],
    "prompt_lookup_num_tokens": 3, "assistant_early_exit": 2, "speculation_type": "eagle", "penalty_alpha": 0.6,
    "dola_layers": "high", "cache_implementation": "offloaded", "prefill_chunk_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"continuous_batching_config"}))
def test_what_is_refused_is_refused_by_its_name(model, name):
    with pytest.raises(BadArgument, match=f"^{name}="):
        generated(model, custom=adaptive(FULL), **{"max_new_tokens": 3, name: VALUES.get(name, True)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 0),  # equal to False
        *(("stop_strings", value) for value in ("", [], [""], [1], 5, {"a": 1}, torch.tensor(1))),
    ],
    ids=str,
)
def test_an_odd_value_is_refused_by_its_name(model, name, value):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
    with pytest.raises(BadArgument, match=f"^{name}="):
        generated(model, custom=adaptive(FULL, tokenizer=tokenizer), **{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.5])
def test_a_length_that_is_no_count_is_refused(model, value):
    with pytest.raises(BadArgument, match=r"^max_length=.*expected a whole number"):
        generated(model, custom=adaptive(FULL), max_new_tokens=value)


def test_a_setting_of_transformers_to_come_is_refused(model, monkeypatch):
    monkeypatch.setattr(GenerationConfig, "__init__", with_a_new_setting(GenerationConfig.__init__))
    assert generated(model, custom=adaptive(FULL), max_new_tokens=2).shape[1] == 7
    with pytest.raises(BadArgument, match=r"warp=2, but expected None; this version of transformers is newer"):
        generated(model, custom=adaptive(FULL), max_new_tokens=2, generation_config=GenerationConfig(warp=2))


def with_a_new_setting(made):
    def init(self, *, warp=None, **kwargs):
        self.warp = warp
        made(self, **kwargs)

    return init


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one character for each id."""
    backend = Tokenizer(BPE({chr(ord("0") + i): i for i in range(VOCABULARY)}, []))
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": VOCABULARY - 1}], ids=["strings alone", "strings and an end"])
@pytest.mark.parametrize("listed", [True, False])
def test_stop_strings_are_transformers_own_with_a_tokenizer(model, listed, ends):
    free = generated(model).tolist()
    said = words().decode(free[0][7:9])
    strings = [said, *(words().decode(row[10:11]) for row in free[1:])] if listed else said
    asked = {"stop_strings": strings, **ends}
    theirs = generated(model, **asked, tokenizer=words())
    assert (theirs.tolist() != free) == (listed or bool(ends)), "a row that has ended stays in the batch"
    for custom in (
        adaptive(FULL, tokenizer=words()),
        adaptive(FULL, loaded=SimpleNamespace(model=model, stepper=CausalStepper(model), tokenizer=words())),
    ):
        assert generated(model, custom=custom, **asked).tolist() == theirs.tolist()
        assert generated(model, custom=custom, **asked, tokenizer=words()).tolist() == theirs.tolist()
    with pytest.raises(BadArgument, match=r"stop_strings=.*pass adaptive\(point, tokenizer=…\)"):
        generated(model, custom=adaptive(FULL), **asked, tokenizer=words())


def test_positions_of_each_rows_own_tokens_are_taken_and_others_refused(model):
    counted = (batch()["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    theirs = generated(model, position_ids=counted, max_new_tokens=4)
    assert generated(model, custom=adaptive(FULL), position_ids=counted, max_new_tokens=4).tolist() == theirs.tolist()
    with pytest.raises(BadArgument, match=r"^position_ids="):
        generated(model, custom=adaptive(FULL), position_ids=counted + 3, max_new_tokens=4)


@pytest.mark.parametrize(
    "options", [{"decoder_start_token_id": 9}, {"decoder_input_ids": torch.tensor([[0, 9], [0, 8]])},
                {"encoder_no_repeat_ngram_size": 1, "forced_bos_token_id": 7}]
)  # fmt: skip
def test_an_encoder_decoder_starts_where_it_is_told(options):
    model = small_t5(num_layers=LAYERS)
    sources = {"input_ids": torch.tensor([[5, 9, 2], [61, 3, 1]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    custom = adaptive(full_depth(model.config.num_decoder_layers))
    ours, theirs = (model.generate(**sources, **options, max_new_tokens=8, custom_generate=c) for c in (custom, None))
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
        depth = record.tokens.select_sequence(row, 1).depth
        assert found.sequences[row, width : width + len(emitted)].tolist() == emitted.tolist()
        assert found.depths[row, : len(emitted)].tolist() == depth.tolist()
        assert (found.sequences[row, width + len(emitted) :] == PAD).all()
        assert (found.depths[row, len(emitted) :] == 0).all()
    assert len(np.unique(record.tokens.depth)) > 1, "no token exited early: nothing was tested"
    assert len({len(emitted) for emitted in record.emitted}) > 1, "no row ended before another: nothing was tested"


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
    point = early_exit_point("softmax_response", layers, WORDS, 1, 0.1)
    found = model.generate(
        **sources, max_new_tokens=12, return_dict_in_generate=True, custom_generate=adaptive(point), eos_token_id=None
    )
    assert isinstance(found, AdaptiveSeq2SeqOutput)
    decoder = WalkedDecoder(Seq2SeqStepper(model), point, max_rows=2)
    opening = np.array([model.config.decoder_start_token_id])
    prompts = [Prompt(opening, np.array(source)) for source in ([5, 9, 2, 44], [61, 3, 1])]
    record = decoder.generate(prompts, 12)
    assert found.sequences[:, 1:].tolist() == [emitted.tolist() for emitted in record.emitted]
    assert found.depths.tolist() == [record.tokens.select_sequence(row, 1).depth.tolist() for row in (0, 1)]
    assert found.depths.unique().numel() > 1, "no token exited early: nothing was tested"


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


MEANINGLESS = {
    "beams": ({"num_beams": 2}, "num_beams=2, but expected 1"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True, but"),
    "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True, but"),
    "holes": ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]] * 3)}, "attention_mask[0]=[1, 0, 1, 1, 1]"),
    "positions": ({"max_new_tokens": 1000}, "positions="),
}


@pytest.mark.parametrize(("options", "message"), MEANINGLESS.values(), ids=MEANINGLESS)
def test_what_means_nothing_here_is_refused_by_name(model, options, message):
    with pytest.raises(BadArgument) as caught:
        model.generate(
            **{**batch(), "max_new_tokens": 3, "pad_token_id": PAD, **options}, custom_generate=adaptive(FULL)
        )
    assert message in str(caught.value)


def test_a_cache_that_holds_tokens_is_refused(model):
    """Transformers 5.24 calls it ``cache``, and takes the older name."""
    held = model(torch.tensor([PROMPTS[0][:2]]), use_cache=True).past_key_values
    with pytest.raises(BadArgument, match=r"(cache|past_key_values)='2 positions', but expected none"):
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
