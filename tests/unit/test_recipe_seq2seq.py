"""The training recipe of encoder-decoders in small, and the two bundled models made by it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from emad_ref.errors import BadArgument
from emad_ref.exit_rules import PRUNINGS, SHRINK
from emad_ref.probes.pruned_vocabulary import vocabulary_size_at_confidence
from emad_ref.text.seq2seq_pairs import (
    COLOURS,
    LARGEST_NUMBER,
    NAMES,
    PLACES,
    SENTINELS,
    THINGS,
    TOWNS,
    generate_corrupted_pairs,
    generate_source_target_pairs,
)
from emad_ref.training import seq2seq as module
from emad_ref.training.loop import get_recipe, train
from emad_ref.training.seq2seq import (
    END_ID,
    IGNORED,
    PAD_ID,
    RECIPES,
    SHARES,
    Seq2SeqRecipe,
    build_tokenizer,
    bundled_folder,
    collate_batch,
    compute_loss,
    create_initial_model,
    create_optimisers,
    iterate_batches,
    iterate_training_pairs,
    layer_loss_weights,
    load_starting_model,
    sample_loss_layers_and_weights,
    tokenizer_pieces,
)
from pytest_emad.measurements.early_exits import scale_minimum_exit_layers

MICRO = Seq2SeqRecipe(
    "micro", encoder_layers=1, layers=2, hidden=32, heads=2, head_size=8, feed_forward=32, early_read=1, steps=3,
    batch=4, warmup=1,
)  # fmt: skip
BUNDLED = ("emad-t5-tiny", "emad-t5-tiny-tuned")


def weights(folder):
    return dict(AutoModelForSeq2SeqLM.from_pretrained(folder).named_parameters())


@pytest.fixture(scope="module")
def words():
    return build_tokenizer()


@pytest.fixture(scope="module")
def batch(words):
    return next(iterate_batches(MICRO, words))


# ---------------------------------------------------------------- tokenizer


def test_every_text_comes_back(words):
    texts = [
        *(
            text
            for task in SHARES
            for pair in generate_source_target_pairs(task, "evaluate", 50)
            for text in (pair.source, pair.target)
        ),
        "Ben will, on that day.",  # a name that is not in the lexicon
        "naïve – ünïcode ☃\n\t  two  spaces , here",
    ]
    for text in texts:
        # the tokenizer adds one opening space: a text that has one already cannot be distinguished
        assert words.decode(words.encode(text), skip_special_tokens=True) == text.removeprefix(" ")
    assert len(words) == len(tokenizer_pieces()) == len(set(tokenizer_pieces()))


def test_the_ids_are_t5s_own_first_and_no_causal_model_is_asked(words, monkeypatch):
    assert words.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]
    assert (words.pad_token_id, words.eos_token_id) == (PAD_ID, END_ID)
    monkeypatch.setattr(module, "bundled_folder", lambda name: pytest.fail(f"read {name}"))
    assert build_tokenizer().get_vocab() == words.get_vocab()


def test_every_word_of_the_world_is_one_token_first_and_later_and_end_of_text_closes(words):
    for word in (*NAMES, *THINGS, *TOWNS, *PLACES, *COLOURS, *map(str, range(LARGEST_NUMBER + 1))):
        (one, end) = words.encode(word)
        assert end == END_ID
        assert words.encode(f"Who has {word}?")[2] == one, word
    unknown = words.unk_token_id
    assert not any(
        unknown in words.encode(pair.source)
        for task in SHARES
        for pair in generate_source_target_pairs(task, "validate", 50)
    )


def test_prunings_of_this_vocabulary_keep_sets_of_different_sizes(words):
    """Otherwise no claim about them could have either outcome."""
    layers = RECIPES["emad-t5-tiny-tuned"].layers
    for minimum in scale_minimum_exit_layers(layers):
        fixed, decaying = (PRUNINGS[name](minimum, layers, len(words)).kept for name in ("fixed", "decaying"))
        assert all(k < most for k, most in zip(decaying, fixed, strict=True))
        assert max(fixed) < vocabulary_size_at_confidence(len(words), SHRINK, 1.0)
    fixed, decaying = (
        PRUNINGS[name](scale_minimum_exit_layers(layers)[0], layers, len(words)).kept for name in ("fixed", "decaying")
    )
    assert decaying[-1] <= fixed[-1] / 2


def test_every_sentinel_is_one_special_token(words):
    ids = [words.encode(sentinel) for sentinel in SENTINELS]
    assert all(len(each) == 2 for each in ids)
    assert len({each[0] for each in ids}) == len(SENTINELS)
    assert words.decode(words.encode("to <extra_id_3> the"), skip_special_tokens=True) == "to the"


# ---------------------------------------------------------------- batches


def test_the_decoder_is_fed_its_target_one_later_and_padding_is_not_scored():
    made = collate_batch([([5, 6, 0], [7, 8, 0]), ([9, 0], [4, 0])], pad=511)
    assert made.source.tolist() == [[5, 6, 0], [9, 0, 511]]
    assert made.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert made.fed.tolist() == [[511, 7, 8], [511, 4, 0]]
    assert made.target.tolist() == [[7, 8, 0], [4, 0, IGNORED]]


def test_each_stage_trains_on_its_own_pairs_of_the_train_split():
    first = list(islice(iterate_training_pairs(MICRO), 6))
    assert first == list(generate_corrupted_pairs("train", 6))
    tuning = list(islice(iterate_training_pairs(replace(MICRO, starts_from="emad-t5-tiny")), 2 * sum(SHARES.values())))
    qa, summary, count = (
        list(generate_source_target_pairs(task, "train", 2 * share)) for task, share in SHARES.items()
    )
    assert tuning == [*qa[:4], summary[0], *count[:3], *qa[4:], summary[1], *count[3:]]


def test_batches_lose_no_pair_and_are_the_same_each_time(words):
    pool = list(islice(iterate_batches(MICRO, words), module.POOL))
    again = list(islice(iterate_batches(MICRO, words), module.POOL))
    assert all(
        torch.equal(a.source, b.source) and torch.equal(a.target, b.target) for a, b in zip(pool, again, strict=True)
    )
    rows = [row[row != PAD_ID].tolist() for made in pool for row in made.source]
    expected = [
        words.encode(pair.source)[: MICRO.window]
        for pair in generate_corrupted_pairs("train", module.POOL * MICRO.batch)
    ]
    assert sorted(rows) == sorted(expected)


# ---------------------------------------------------------------- loss and optimisers


def test_later_layers_weigh_more_and_weights_sum_to_one():
    assert layer_loss_weights(4).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert float(layer_loss_weights(8).sum()) == pytest.approx(1)


def test_the_layers_that_are_read_give_calms_loss_in_expectation(batch):
    """Over many batches every layer below the last is read equally often, with a weight that covers the others."""
    recipe, total, draws = Seq2SeqRecipe("deep"), torch.zeros(10), 900
    for draw in range(draws):
        target = torch.tensor([[draw]])
        layers, weights = sample_loss_layers_and_weights(recipe, replace(batch, target=target))
        assert (len(layers), layers[-1]) == (recipe.early_read + 1, recipe.layers)
        assert layers == sorted(set(layers))
        total[[layer - 1 for layer in layers]] += weights
    # 300 of 900 draws read a layer below the last: 5 deviations of a binomial are 71
    torch.testing.assert_close(total / draws, layer_loss_weights(recipe.layers), rtol=0.24, atol=0)
    assert sample_loss_layers_and_weights(recipe, batch)[0] == sample_loss_layers_and_weights(recipe, batch)[0]


def test_the_loss_is_calms_and_its_last_layer_is_the_models_own(batch):
    model = create_initial_model(MICRO).eval()
    with torch.no_grad():
        own = model(
            input_ids=batch.source,
            attention_mask=batch.mask,
            decoder_input_ids=batch.fed,
            labels=batch.target,
            output_hidden_states=True,
        )
        first = model.decoder.final_layer_norm(own.decoder_hidden_states[1]) * MICRO.hidden**-0.5
        early = torch.nn.functional.cross_entropy(
            model.lm_head(first).flatten(0, 1), batch.target.flatten(), ignore_index=IGNORED
        )
        total, last = compute_loss(model, MICRO, batch)
    assert float(last) == pytest.approx(float(own.loss), rel=1e-5)  # float32 sums in a different order
    assert float(total) == pytest.approx(float(early) / 3 + 2 * float(own.loss) / 3, rel=1e-5)


def test_every_parameter_has_one_optimiser_and_position_tables_are_no_matrices():
    model = create_initial_model(MICRO)
    muon, adam = ([id(p) for g in o.param_groups for p in g["params"]] for o in create_optimisers(model, MICRO))
    assert sorted(muon + adam) == sorted(id(p) for p in model.parameters())
    named = {id(p): name for name, p in model.named_parameters()}
    assert len(muon) == 6 * MICRO.encoder_layers + 10 * MICRO.layers
    assert {named[i].split(".")[-2] for i in muon} == {"q", "k", "v", "o", "wi", "wo"}


def test_queries_and_nothing_else_learn_slower_by_the_root_of_the_head_size():
    """T5 does not scale its scores: at the full rate attention saturates before positions are learned."""
    model = create_initial_model(MICRO)
    named = {id(p): name for name, p in model.named_parameters()}
    muon, _ = create_optimisers(model, MICRO)
    rates = {named[id(p)].split(".")[-2]: group["lr"] for group in muon.param_groups for p in group["params"]}
    full = MICRO.matrix_rate
    assert rates.pop("q") == pytest.approx(full / MICRO.head_size**0.5)
    assert rates == dict.fromkeys(("k", "v", "o", "wi", "wo"), full)


# ---------------------------------------------------------------- training


def test_three_steps_train_the_same_model_each_time_and_save_what_transformers_loads(words, tmp_path):
    losses = []
    for folder in ("first", "again"):
        torch.manual_seed(len(losses))  # the caller's generator is not used
        losses.append(train(MICRO, tmp_path / folder))
    assert losses[0] == losses[1]
    assert math.isfinite(losses[0])
    first, again = (
        dict(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / folder).named_parameters())
        for folder in ("first", "again")
    )
    start = dict(create_initial_model(MICRO).named_parameters())
    assert set(first) == set(start)
    assert all(torch.equal(first[name], again[name]) for name in first)
    # a table row of a distance in no text has no gradient, but AdamW and Muon change every table and matrix
    assert all(not torch.equal(first[name], start[name]) for name in first)
    read = AutoTokenizer.from_pretrained(tmp_path / "first")
    text = next(generate_source_target_pairs("qa", "evaluate", 1)).source
    assert read.encode(text) == words.encode(text)
    assert read.decode(read.encode(text), skip_special_tokens=True) == text


def test_tuning_starts_from_the_pre_trained_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "bundled_folder", lambda name: tmp_path / name)
    tuned = replace(MICRO, starts_from="base", seed=7)
    with pytest.raises(BadArgument, match=r"starts_from='base', but expected a bundled model; train that one first"):
        load_starting_model(tuned)
    base = create_initial_model(replace(MICRO, seed=3))
    base.save_pretrained(tmp_path / "base")
    begun = dict(load_starting_model(tuned).named_parameters())
    assert all(torch.equal(begun[name], weight) for name, weight in base.named_parameters())


def test_the_recipes_are_found_by_name_and_differ_in_the_tuning_alone():
    first, tuned = (get_recipe(name) for name in BUNDLED)
    assert (first.starts_from, tuned.starts_from) == ("", first.name)
    sizes = ("encoder_layers", "layers", "hidden", "heads", "head_size", "feed_forward", "seed", "family")
    assert all(getattr(first, size) == getattr(tuned, size) for size in sizes)
    assert set(RECIPES) == set(BUNDLED)
    with pytest.raises(BadArgument, match=r"name='emad-t5-huge', but expected one of emad-tiny, .*emad-t5-tiny"):
        get_recipe("emad-t5-huge")


# ---------------------------------------------------------------- the bundled models


@pytest.fixture(scope="module")
def bundled():
    return {name: AutoModelForSeq2SeqLM.from_pretrained(bundled_folder(name)).eval() for name in BUNDLED}


def written(model, words, asked):
    read = words([pair.source for pair in asked], padding=True, return_tensors="pt")
    ids = model.generate(
        input_ids=read.input_ids, attention_mask=read.attention_mask, max_new_tokens=40, do_sample=False
    )
    return words.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", BUNDLED)
def test_the_bundled_models_are_what_their_recipe_says(bundled, name):
    config, recipe = bundled[name].config, RECIPES[name]
    assert (config.num_layers, config.num_decoder_layers, config.d_model) == (
        recipe.encoder_layers, recipe.layers, recipe.hidden,
    )  # fmt: skip
    assert (config.d_kv, config.num_heads, config.d_ff, config.vocab_size) == (
        recipe.head_size, recipe.heads, recipe.feed_forward, len(tokenizer_pieces()),
    )  # fmt: skip
    assert {p.dtype for p in bundled[name].parameters()} == {torch.float32}
    assert sum(file.stat().st_size for file in bundled_folder(name).iterdir()) < 8e6


@pytest.mark.parametrize("name", BUNDLED)
def test_generate_of_transformers_runs_on_them(bundled, words, name):
    """Its cache size comes from the config: with the encoder's depth it would be four layers short."""
    read = words(
        [pair.source for pair in generate_source_target_pairs("qa", "validate", 2)], padding=True, return_tensors="pt"
    )
    asked = {"input_ids": read.input_ids, "attention_mask": read.attention_mask}
    out = bundled[name].generate(
        **asked, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        whole = bundled[name](**asked, decoder_input_ids=out.sequences[:, :-1]).logits
    torch.testing.assert_close(torch.stack(out.logits, dim=1), whole, atol=1e-4, rtol=0)  # float32, cached or not


def test_the_pre_trained_model_fills_in_what_was_hidden_and_the_tuned_one_no_longer(bundled, words):
    """Held-out span corruption: 2.1 nats when it was made; uniform guessing would be log 1,075 = 7.0."""
    rows = [(words.encode(p.source), words.encode(p.target)) for p in generate_corrupted_pairs("validate", 48)]
    with torch.no_grad():
        first, tuned = (
            float(compute_loss(bundled[name], RECIPES[name], collate_batch(rows, PAD_ID))[1]) for name in BUNDLED
        )
    assert first < 2.6
    assert tuned > 4


def test_the_tuned_model_answers_questions_and_the_pre_trained_one_does_not(bundled, words):
    asked = list(generate_source_target_pairs("qa", "validate", 40))
    first, tuned = (
        sum(out == pair.target for out, pair in zip(written(bundled[name], words, asked), asked, strict=True))
        for name in BUNDLED
    )
    assert first == 0
    assert tuned >= 24  # 102 of 120 when it was made


def test_the_tuned_model_summarises_and_the_pre_trained_one_does_not(bundled, words):
    """The whole summary, letter by letter, because the pre-trained model's output only shares words with it."""
    told = list(generate_source_target_pairs("summary", "validate", 40))
    first, tuned = (
        sum(out == pair.target for out, pair in zip(written(bundled[name], words, told), told, strict=True))
        for name in BUNDLED
    )
    assert first == 0
    assert tuned >= 20  # 79 of 120 when it was made: a wrong sum makes the whole summary wrong


@pytest.mark.parametrize("task", ["qa", "summary"])
def test_early_layers_of_the_tuned_model_know_much_and_the_last_knows_more(bundled, words, task):
    """Otherwise exits would cost nothing or everything: accuracy of each layer's best token on forced targets."""
    rows = [
        (words.encode(p.source), words.encode(p.target)) for p in generate_source_target_pairs(task, "validate", 40)
    ]
    made = collate_batch(rows, PAD_ID)
    model = bundled["emad-t5-tiny-tuned"]
    with torch.no_grad():
        out = model(
            input_ids=made.source, attention_mask=made.mask, decoder_input_ids=made.fed, output_hidden_states=True
        )
        first = model.lm_head(model.decoder.final_layer_norm(out.decoder_hidden_states[1])).argmax(-1)
    real = made.target != IGNORED
    early, last = (float((top == made.target)[real].float().mean()) for top in (first, out.logits.argmax(-1)))
    assert 0.5 < early < last - 0.1  # 0.70 → 0.94 (qa) and 0.76 → 1.00 (summary) when it was made


@pytest.mark.parametrize("name", BUNDLED)
def test_their_tokenizer_is_the_recipes(words, name):
    stored = AutoTokenizer.from_pretrained(bundled_folder(name))
    assert stored.backend_tokenizer.to_str() == words.backend_tokenizer.to_str()
