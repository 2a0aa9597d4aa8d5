"""The training recipe in small: it trains, saves a loadable model, and depends only on its seed."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from emad_ref.errors import BadArgument
from emad_ref.text import world
from emad_ref.training import causal, loop
from emad_ref.training.causal import (
    VOCABULARY,
    compute_loss,
    create_initial_model,
    create_optimisers,
    iterate_batches,
    train_tokenizer,
)
from emad_ref.training.loop import (
    RECIPES,
    BadTrainingState,
    TrainingDiverged,
    get_recipe,
    learning_rate_factor_at_step,
    train,
)
from emad_ref.training.recipe import END_OF_TEXT, Recipe

MICRO = Recipe("micro", layers=2, hidden=32, heads=2, early_exit=((1, 0.25),), steps=3, batch=2, window=32, warmup=1)


@pytest.fixture(scope="module")
def tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "TOKENIZER_DOCUMENTS", 200)
        return train_tokenizer()


@pytest.fixture
def quick(monkeypatch, tokenizer):
    monkeypatch.setitem(loop.FAMILIES, "causal", replace(causal.FAMILY, tokenizer=lambda: tokenizer))


def weights(folder):
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


# ---------------------------------------------------------------- tokenizer and batches


def test_the_tokenizer_gives_back_every_text(tokenizer):
    texts = [
        *islice(world.generate_documents("world:curriculum", "evaluate"), 20),
        "naïve – ünïcode ☃\n\t  two  spaces , here",
        "",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer) == VOCABULARY


def test_end_of_text_is_token_0_and_opens_and_ends(tokenizer):
    assert tokenizer.convert_tokens_to_ids(END_OF_TEXT) == 0
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)


def test_the_tokenizer_is_the_same_each_time(tokenizer, monkeypatch):
    monkeypatch.setattr(causal, "TOKENIZER_DOCUMENTS", 200)
    assert train_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_batches_are_opened_documents_packed_end_to_end_without_loss(tokenizer):
    drawn = torch.cat([ids.flatten() for ids in islice(iterate_batches(MICRO, tokenizer), 20)]).tolist()
    documents = world.generate_documents("world:curriculum", "train", MICRO.seed + 1)
    expected = []
    while len(expected) < len(drawn):
        expected += [0, *tokenizer.encode(next(documents), add_special_tokens=False)]
    assert drawn == expected[: len(drawn)]
    assert next(iterate_batches(MICRO, tokenizer)).shape == (2, 33)


# ---------------------------------------------------------------- loss, rates, optimisers


def test_the_loss_adds_weighted_exits_to_the_models_own_loss():
    model = create_initial_model(MICRO).eval()
    ids = torch.randint(0, VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model(ids, labels=ids, output_hidden_states=True)
        exit_logits = model.get_output_embeddings()(model.gpt_neox.final_layer_norm(states.hidden_states[1]))[:, :-1]
        early = torch.nn.functional.cross_entropy(exit_logits.flatten(0, 1), ids[:, 1:].flatten())
        total, last = compute_loss(model, MICRO, ids)
        plain, plain_last = compute_loss(model, replace(MICRO, early_exit=()), ids)
    assert float(last) == pytest.approx(float(states.loss), rel=1e-5)
    assert float(total) == pytest.approx(float(states.loss + 0.25 * early), rel=1e-5)
    assert float(plain) == float(plain_last) == pytest.approx(float(last), rel=1e-6)


def test_the_rate_rises_to_its_peak_and_falls_to_almost_nothing():
    recipe = Recipe("r", steps=1000, warmup=100)
    rates = [learning_rate_factor_at_step(recipe, step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates.index(max(rates)) == 99
    assert rates[99:] == sorted(rates[99:], reverse=True)
    assert 0 < rates[-1] < 0.025


def test_every_parameter_has_exactly_one_optimiser_and_blocks_matrices_have_muon():
    model = create_initial_model(MICRO)
    muon, adam = create_optimisers(model, MICRO)
    groups = [{id(p) for g in o.param_groups for p in g["params"]} for o in (muon, adam)]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == {id(p) for p in model.parameters()}
    assert all(p.ndim == 2 for g in muon.param_groups for p in g["params"])
    assert id(model.get_input_embeddings().weight) in groups[1]
    assert id(model.get_output_embeddings().weight) in groups[1]


# ---------------------------------------------------------------- training


def test_three_steps_train_and_save_what_transformers_loads(quick, tokenizer, tmp_path):
    loss = train(MICRO, tmp_path)
    assert math.isfinite(loss)
    start = dict(create_initial_model(MICRO).named_parameters())
    after = weights(tmp_path)
    assert set(after) == set(start)
    assert all(not torch.equal(after[name], start[name]) for name in after if "weight" in name)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = next(world.generate_documents("world:premise", "evaluate"))
    assert again.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert again.decode(again.encode(text, add_special_tokens=False)) == text
    assert again.bos_token_id == 0
    assert sum(file.suffix == ".safetensors" for file in tmp_path.iterdir()) == 1


def test_a_recipe_gives_the_same_weights_each_time_and_another_seed_gives_others(quick, tmp_path):
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    losses = []
    for folder in (first, again):
        torch.manual_seed(len(losses))  # the caller's generator is not used
        losses.append(train(MICRO, folder))
    assert losses[0] == losses[1]
    train(replace(MICRO, seed=1), other)
    for name, weight in weights(first).items():
        assert torch.equal(weight, weights(again)[name]), name
    matrices = [name for name, weight in weights(first).items() if weight.ndim == 2]
    assert all(not torch.equal(weights(first)[name], weights(other)[name]) for name in matrices)


def test_initial_weights_come_from_the_seed_alone():
    first, again, other = (
        create_initial_model(replace(MICRO, seed=seed)).get_output_embeddings().weight for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_training_leaves_the_callers_generator_alone(quick, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(MICRO, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_the_loss_falls(quick, tokenizer, tmp_path):
    recipe = replace(MICRO, steps=40, batch=4, window=64, warmup=5)
    ids = next(iterate_batches(replace(recipe, seed=99), tokenizer))
    before = float(compute_loss(create_initial_model(recipe).eval(), recipe, ids)[1])
    train(recipe, tmp_path)
    after = float(compute_loss(AutoModelForCausalLM.from_pretrained(tmp_path), recipe, ids)[1])
    assert before == pytest.approx(math.log(VOCABULARY), abs=0.3)
    assert after < before - 1


def test_a_loss_that_is_no_number_stops_the_training_and_saves_nothing(quick, tmp_path):
    with pytest.raises(
        TrainingDiverged, match=r"loss=nan at step 1 of micro, .*lower matrix_rate \(inf\) or other_rate"
    ):
        train(replace(MICRO, matrix_rate=math.inf), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_steps_are_refused(tmp_path):
    with pytest.raises(BadArgument, match=r"recipe\.steps=0, but expected at least one step"):
        train(replace(MICRO, steps=0), tmp_path)


def test_recipes_are_found_by_name():
    for name in RECIPES:
        assert get_recipe(name).name == name
    with pytest.raises(
        BadArgument, match="name='emad-huge', but expected one of emad-tiny, emad-tiny-plain, emad-nano"
    ):
        get_recipe("emad-huge")


def test_exits_are_trained_where_the_default_probes_stand():
    from emad_ref.exit_rules import default_probes

    assert tuple(layer for layer, _ in RECIPES["emad-tiny"].early_exit) == default_probes(RECIPES["emad-tiny"].layers)
    assert RECIPES["emad-tiny-plain"].early_exit == ()


# ---------------------------------------------------------------- interrupted, resumed and stored training


class PowerCut(Exception):
    pass


LONGER = replace(MICRO, steps=6)


def cut_at(monkeypatch, step):
    """Interrupt the training before the loss of that step."""
    family, calls = loop.FAMILIES["causal"], iter(range(100))

    def loss(*given):
        if next(calls) == step:
            raise PowerCut
        return family.loss(*given)

    monkeypatch.setitem(loop.FAMILIES, "causal", replace(family, loss=loss))
    return lambda: monkeypatch.setitem(loop.FAMILIES, "causal", family)


@pytest.fixture
def interrupted(quick, monkeypatch, tmp_path):
    """Return a training that broke in its fifth step, with a checkpoint after every second one."""
    mend = cut_at(monkeypatch, 4)
    with pytest.raises(PowerCut):
        train(LONGER, tmp_path / "out", every=2)
    mend()
    return tmp_path / "out"


def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(interrupted, tmp_path):
    loss = train(LONGER, tmp_path / "whole")
    assert not interrupted.exists()
    assert train(LONGER, interrupted, resume=True, every=2) == loss
    resumed, whole = weights(interrupted), weights(tmp_path / "whole")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_an_unfinished_training_is_not_written_over_unasked(interrupted):
    with pytest.raises(BadTrainingState, match=r"holds an unfinished training, but expected none; pass resume"):
        train(LONGER, interrupted)


@pytest.mark.parametrize("change", [{"seed": 1}, {"steps": 7}, {"steps": 4}, {"hidden": 64}])
def test_a_training_of_another_recipe_is_refused(interrupted, change):
    with pytest.raises(BadTrainingState, match=r"train with the same recipe and torch, or delete it to start anew"):
        train(replace(LONGER, **change), interrupted, resume=True)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b"[]", lambda b: b[:-500], lambda b: b[: len(b) // 2]])
def test_a_damaged_training_is_refused(interrupted, damage):
    checkpoint = interrupted.with_name("out.checkpoint")
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    with pytest.raises(BadTrainingState, match=r"cannot be read .*delete it to start anew"):
        train(LONGER, interrupted, resume=True)


def test_the_old_model_stays_until_the_new_one_is_whole(quick, monkeypatch, tmp_path):
    train(MICRO, tmp_path / "out")
    old = weights(tmp_path / "out")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(loop.FAMILIES["causal"].tokenizer()), "save_pretrained", full)
        with pytest.raises(BadArgument, match=r"out=.* a folder that can be written; .* \(No space left"):
            train(replace(MICRO, seed=1), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert all(torch.equal(old[name], value) for name, value in weights(tmp_path / "out").items())
    train(replace(MICRO, seed=1), tmp_path / "out")
    assert not torch.equal(old["lm_head.weight"], weights(tmp_path / "out")["lm_head.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["file", "with a thesis", "below a file"])
def test_a_place_that_cannot_be_replaced_is_refused_before_the_first_step(quick, monkeypatch, tmp_path, kind):
    monkeypatch.setitem(loop.FAMILIES, "causal", None)  # the family is not requested
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    places = {"file": "file", "with a thesis": "full", "below a file": "file/out"}
    with pytest.raises(BadArgument, match=r"^out='"):
        train(MICRO, tmp_path / places[kind])
    assert (tmp_path / "full" / "thesis.tex").exists()
