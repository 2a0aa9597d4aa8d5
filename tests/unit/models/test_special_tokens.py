"""Opening and end tokens of a text, from any mix of config, generation config and tokenizer."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from emad_ref.decoding.self_corpus import iterate_sampled_documents
from emad_ref.decoding.streaming import make_prompt_from_text, stream
from emad_ref.errors import BadArgument
from emad_ref.models.loading import load
from emad_ref.models.tokenizers import SpecialTokens, special_tokens_of
from tests.small_models import VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<turn>", "<mask>")
UNK, BOS, EOS, PAD, TURN, MASK, WORD = range(7)
LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
OPT = {"unk_token": "</s>", "bos_token": "</s>", "eos_token": "</s>"}
QWEN = {"eos_token": "</s>", "pad_token": "<pad>"}  # no bos_token


def tokenizer(**named: str) -> PreTrainedTokenizerFast:
    words = {word: at for at, word in enumerate((*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCABULARY))))}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def said(
    config: dict[str, Any], generation: dict[str, Any], named: dict[str, str] | None, **more: Any
) -> SpecialTokens:
    """Return the tokens of a model with these two files and a tokenizer with these roles; None: no tokenizer."""
    inner = SimpleNamespace(vocab_size=VOCABULARY)
    held = SimpleNamespace(is_encoder_decoder=more.pop("seq2seq", False), get_text_config=lambda: inner)
    model = SimpleNamespace(config=held, generation_config=SimpleNamespace(to_dict=lambda: generation))
    return special_tokens_of(model, None if named is None else tokenizer(**named), config)


def ids(bos: Any = None, eos: Any = None, **more: Any) -> dict[str, Any]:
    return {"bos_token_id": bos, "eos_token_id": eos, **more}


AGREED = ids(BOS, EOS)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str] | None, int | None, set[int], str]] = {
    # config, generation_config, tokenizer → opening, ends, part of the remarks
    "all agree": (AGREED, AGREED, LLAMA, BOS, {EOS}, ""),
    "one by one": (ids(), ids(), LLAMA, BOS, {EOS}, ""),
    "generation_config alone": ({}, AGREED, None, BOS, {EOS}, ""),
    "generation_config over config": (ids(BOS), ids(TURN), None, TURN, set(), "is 4, config.bos_token_id is 1"),
    "a list of ends": (ids(BOS, [EOS, TURN]), ids(BOS, [EOS, TURN]), LLAMA, BOS, {EOS, TURN}, ""),
    "a list in one file": (AGREED, ids(BOS, [EOS, TURN]), LLAMA, BOS, {EOS, TURN}, ""),
    "ends that differ": (ids(BOS, EOS), ids(BOS, TURN), LLAMA, BOS, {EOS, TURN}, "ends of a text differ"),
    "an end that is a word": (AGREED, ids(BOS, [EOS, 40]), LLAMA, BOS, {EOS, 40}, "40 ('w40'), no special token"),
    "an end outside": (AGREED, ids(BOS, [EOS, -1, 500]), LLAMA, BOS, {EOS}, "names 500, outside the vocabulary of 101"),
    "no end at all": (ids(BOS), ids(BOS), {"bos_token": "<s>"}, BOS, set(), ""),
    "shifted by one": (ids(UNK, BOS), ids(UNK, BOS), LLAMA, BOS, {BOS, EOS},
                       "bos_token_id is 0 ('<unk>'), the tokenizer's unk_token: left out, texts open with 1 ('<s>')"),
    "an end as opening": (ids(EOS, EOS), ids(EOS, EOS), LLAMA, BOS, {EOS}, "the tokenizer's eos_token: left out"),
    "a word as opening": (ids(40, EOS), ids(40, EOS), LLAMA, BOS, {EOS}, "no special token of the tokenizer: left out"),
    "another special token": (ids(TURN, EOS), {}, LLAMA, TURN, {EOS}, "; the tokenizer says 1"),
    "Qwen": (ids(PAD, EOS), ids(PAD, [EOS, PAD]), QWEN, PAD, {EOS, PAD}, "the tokenizer has no bos_token"),
    "Qwen, a mask": (ids(MASK, EOS), {}, QWEN | {"mask_token": "<mask>"}, EOS, {EOS}, "texts open with 2 ('</s>')"),
    "OPT": (ids(EOS, EOS), ids(EOS, EOS), OPT, EOS, {EOS}, ""),
    "no opening declared": (ids(None, EOS), ids(None, EOS), QWEN, EOS, {EOS}, ""),
    "nothing declared": ({}, {}, {}, None, set(), ""),
    "no tokenizer": (ids(7, 8), {}, None, 7, {8}, ""),
    "inside text_config": ({"text_config": AGREED}, {}, None, BOS, {EOS}, ""),
    "beside text_config": (ids(BOS, [EOS, TURN], text_config=ids(BOS, EOS)), {}, None, BOS, {EOS, TURN}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("config", "generation", "named", "opening", "ends", "remark"), CASES.values(), ids=CASES)
def test_opening_and_ends(config, generation, named, opening, ends, remark) -> None:
    found = said(config, generation, named)
    assert (found.opening, found.ends) == (opening, ends)
    assert remark in "\n".join(found.remarks)
    assert bool(remark) == bool(found.remarks), found.remarks


def test_an_opening_of_the_tokenizer_without_a_row_is_left_out() -> None:
    held = tokenizer(eos_token="</s>")
    held.add_special_tokens({"bos_token": "<added>"})
    assert held.bos_token_id == VOCABULARY
    inner = SimpleNamespace(vocab_size=VOCABULARY)
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False, get_text_config=lambda: inner),
        generation_config=SimpleNamespace(to_dict=dict),
    )
    found = special_tokens_of(model, held, ids(TURN, EOS))
    assert found.opening == TURN
    assert f"tokenizer.bos_token_id names {VOCABULARY}, outside the vocabulary" in "\n".join(found.remarks)


def test_padding_is_the_first_that_is_declared() -> None:
    for config, generation, named, padding in (
        ({"pad_token_id": 7}, {"pad_token_id": 8}, QWEN, 8),
        ({"pad_token_id": 7}, {}, QWEN, 7),
        ({}, {}, QWEN, PAD),
        ({"pad_token_id": -1}, {}, QWEN, PAD),
        ({}, {}, LLAMA, None),
    ):
        assert said(config, generation, named).padding == padding


START = "decoder_start_token_id"


@pytest.mark.parametrize(
    ("config", "generation", "named", "start"),
    [
        ({START: PAD}, {}, LLAMA, PAD),
        ({}, {START: PAD}, LLAMA, PAD),
        ({START: PAD}, {START: TURN}, LLAMA, TURN),
        ({"bos_token_id": BOS}, {}, LLAMA, BOS),
        ({"bos_token_id": BOS}, {START: PAD}, LLAMA, PAD),
        ({START: 40}, {}, None, 40),
    ],
)
def test_a_decoder_starts_as_transformers_starts_it(config, generation, named, start) -> None:
    assert said(config, generation, named, seq2seq=True).opening == start


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        ({"pad_token_id": 0}, {}, r"decoder_start_token_id=None, but expected a token id; add it to generation_config"),
        (
            {START: PAD},
            {START: 40},
            r"generation_config\.decoder_start_token_id=40, but expected a special token.*'w40'",
        ),
        ({START: 500}, {}, "config's first token id=500, but expected 0–100, as vocab_size says"),
    ],
)
def test_a_decoder_without_a_start_token_is_refused(config, generation, message) -> None:
    with pytest.raises(BadArgument, match=message):
        said(config, generation, LLAMA, seq2seq=True)


@pytest.mark.parametrize("value", ["2", 2.0, True, [2], {"id": 2}])
def test_an_opening_that_is_no_id_is_refused(value) -> None:
    with pytest.raises(BadArgument, match=r"generation_config\.bos_token_id=.*expected a token id; mend the file"):
        said({}, ids(value), None)


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], [[2]], {"id": 2}])
def test_ends_that_are_no_ids_are_refused(value) -> None:
    with pytest.raises(BadArgument, match=r"config\.eos_token_id=.*expected a token id, or a list of them"):
        said(ids(BOS, value), {}, None)


# ---------------------------------------------------------------- equal results everywhere


def stored(
    place: Path, model: Any, named: dict[str, str], config: dict[str, Any], generation: dict[str, Any] | None
) -> str:
    """Store ``model`` with these entries in its files; ... leaves an entry out, None the whole generation config."""
    model.save_pretrained(place)
    tokenizer(**named).save_pretrained(place)
    for name, changes in (("config.json", config), ("generation_config.json", generation or {})):
        file = place / name
        held = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in held.items() if value is not ...}))
    if generation is None:
        (place / "generation_config.json").unlink()
    return str(place)


def llama() -> Any:
    return small_model("llama", torch.float32)


def transformers_own(folder: str, prompt: list[int], new: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    read = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(read), "max_new_tokens": new, "do_sample": False, "pad_token_id": PAD}
    return model.generate(read, **given)[0, len(prompt) :].tolist()


def third_token() -> int:
    """Return the model's third token after <s> w9 w17, which it emits no earlier: as an end token it is reached."""
    read = torch.tensor([[BOS, 9, 17]])
    said = llama().generate(
        read, attention_mask=torch.ones_like(read), max_new_tokens=6, do_sample=False, pad_token_id=PAD
    )
    third = int(said[0, 5])
    assert third not in said[0, 3:5].tolist()
    return third


@pytest.mark.parametrize("where", ["config", "generation_config", "both"])
def test_a_streamed_text_ends_where_transformers_ends_it(tmp_path: Path, where: str) -> None:
    ends = ids(BOS, [EOS, third_token()])
    plain = ids(BOS, EOS)
    config, generation = {"config": (ends, None), "generation_config": (plain, ends), "both": (ends, ends)}[where]
    folder = stored(tmp_path / "model", llama(), LLAMA, config, generation)
    loaded = load(folder)
    own = transformers_own(folder, [BOS, 9, 17], 12)
    assert [piece.token for piece in stream(loaded, "w9 w17", tokens=12)] == own
    assert len(own) == 3
    assert "no special token" in loaded.remarks[0]


def test_defaults_of_a_class_are_nobodys_word(tmp_path: Path) -> None:
    """LLaMA's are 1 and 2; here <s> and </s> have other ids, and no file says which."""
    words = {"eos_token": "<turn>", "unk_token": "<unk>"}
    nowhere = {"bos_token_id": ..., "eos_token_id": ..., "pad_token_id": ...}
    loaded = load(stored(tmp_path / "model", llama(), words, nowhere, None))
    assert loaded.model.config.bos_token_id == 1, "the defaults of transformers"
    assert (loaded.opening_token_id, loaded.end_token_ids) == (TURN, {TURN})
    start = small_t5(dtype=torch.float32, num_layers=6)  # generate counts the encoder's layers
    folder = stored(tmp_path / "t5", start, LLAMA, {START: ..., "eos_token_id": ...}, {START: PAD, "eos_token_id": ...})
    loaded = load(folder)
    assert (loaded.opening_token_id, loaded.end_token_ids) == (PAD, {EOS})
    own = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    own = own.generate(torch.tensor([[9, 17]]), max_new_tokens=5, do_sample=False, eos_token_id=EOS)[0].tolist()
    assert own[0] == make_prompt_from_text(loaded, "w9 w17").tokens[0] == PAD
    assert [piece.token for piece in stream(loaded, "w9 w17", tokens=5)] == own[1:]


def test_a_models_own_text_ends_at_every_end_and_holds_none(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[[EOS, TURN]] *= 3.0  # a model that sometimes ends its texts
    loaded = load(stored(tmp_path / "model", model, LLAMA, AGREED, ids(BOS, [EOS, TURN])))
    given, derived = (
        [d.tolist() for d in islice(iterate_sampled_documents(loaded.stepper, BOS, 40, "train", ends=ends), 32)]
        for ends in (loaded.end_token_ids, None)
    )
    assert given == derived, "the stepper's own model declares them, too"
    assert not np.isin(np.concatenate(given), [BOS, EOS, TURN]).any()
    assert len({len(text) for text in given}) > 5, "no text ended early: nothing was tested"


def test_a_model_that_opens_no_text_writes_none(tmp_path: Path) -> None:
    loaded = load(stored(tmp_path / "model", llama(), {}, ids(), ids()))
    assert loaded.opening_token_id is None
    with pytest.raises(BadArgument, match="corpus='self', but expected a model that declares which token opens a text"):
        iterate_sampled_documents(loaded.stepper, loaded.opening_token_id, 8, "train", ends=loaded.end_token_ids)


def test_what_is_remarked_is_told_once_and_stands_among_the_facts(tmp_path: Path, caplog) -> None:
    folder = stored(tmp_path / "model", llama(), LLAMA, ids(UNK, EOS), ids(UNK, EOS))
    facts = [load(folder).facts for _ in range(2)]
    assert [record.getMessage() for record in caplog.records].count(f"{folder}: {facts[0]['remarks'][0]}") == 1
    assert json.loads(json.dumps(facts[1]["special_tokens"])) == {"opening": BOS, "ends": [EOS], "padding": None}


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"eos_token_id": "2"}', '{"bos_token_id": 500}'])
def test_a_generation_config_that_is_none_is_one_clear_error(tmp_path: Path, content: str) -> None:
    folder = stored(tmp_path / "model", llama(), LLAMA, AGREED, AGREED)
    Path(folder, "generation_config.json").write_text(content)
    with pytest.raises(Exception, match=r"generation_config|could not be read|files that it can read") as caught:
        load(folder)
    assert type(caught.value).__module__.startswith("emad_ref")


@pytest.mark.parametrize("name", ["emad-nano", "emad-tiny", "emad-t5-tiny"])
def test_nothing_is_remarked_of_bundled_models(name: str) -> None:
    loaded = load(name)
    assert (loaded.opening_token_id, loaded.end_token_ids, loaded.remarks) == (0, {1} if "t5" in name else {0}, ())
