"""What a run knows of a pair: who may form one, which tasks are worth routing, which rule is chosen, what counts."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emad_ref.decoding.acceptance import ACCEPTED, UNREACHED
from emad_ref.decoding.selfdraft import self_speculate
from emad_ref.decoding.speculative import speculate
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule, switch
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.meters.flops import flops
from emad_ref.models.geometry import geometry_of
from emad_ref.models.loading import load
from emad_ref.protocol import Unsupported
from emad_ref.record import DECODE, DRAFT, VERIFY
from emad_ref.sweep.routing import Routing
from emad_ref.tasks.scoring import Item
from emad_ref.text.documents import Example
from pytest_emad import pairing
from pytest_emad.options import BUDGETS, DEFAULT_PAIR, Settings
from pytest_emad.pairing import Pair, Sizes, is_right, longest, retained, self_speculation, speculation
from tests.plugin.conftest import Run

LEAST = 0.415
FEW = Sizes(compared=4, tried=2, judged=4, calibrate=4, reported=2)
TASK = "inventory"
ITEMS = (TASK, "evaluate", FEW.judged)


def settings() -> Settings:
    small, large = DEFAULT_PAIR
    given = {"budget": BUDGETS["smoke"], "seed": 0, "small_model": small, "large_model": large}
    return Settings(**(dict.fromkeys(Settings.__dataclass_fields__) | given))


def walked(request):
    return WalkedDecoder(request.model.load().stepper, request.point, max_rows=request.max_rows)


@pytest.fixture(scope="module")
def models():
    return tuple(load(name) for name in DEFAULT_PAIR)


@pytest.fixture(scope="module")
def bundled(models) -> Pair:
    """Answers are kept: the tests below share a few items."""
    pair = Pair(*models, settings(), walked, least_saving=LEAST)
    pair.size = FEW
    return pair


@pytest.fixture
def pair(models) -> Pair:
    """Nothing gathered yet: validation results are put in by hand."""
    return Pair(*models, settings(), walked, least_saving=LEAST)


# ------------------------------------------------------------ who may form a pair


def test_a_model_without_tokenizer_is_refused(models) -> None:
    with pytest.raises(BadArgument, match="emad-tiny came without"):
        Pair(models[0], replace(models[1], tokenizer=None), settings(), walked, least_saving=LEAST)


def test_another_tokenizer_is_refused(models) -> None:
    other = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: "another"))
    with pytest.raises(BadArgument, match="the same tokenizer"):
        Pair(models[0], replace(models[1], tokenizer=other), settings(), walked, least_saving=LEAST)


def test_a_padded_embedding_makes_no_other_pair(models, bundled) -> None:
    """Rows above the tokenizer's ids, here with the largest logits there are, take no part in what a pair writes."""
    large = copy.deepcopy(models[1].model)
    size = large.get_input_embeddings().num_embeddings
    large.resize_token_embeddings(size + 8, mean_resizing=False)
    with bundled.partners() as (_, plain):
        first = plain.decoder.generate(bundled.prompts(2)[:1], 1, frozenset()).emitted[0]
    with torch.no_grad():
        head = large.get_output_embeddings().weight
        head[size:] = 3 * head[int(first[0])]
    wide = replace(models[1], model=large, geometry=geometry_of(large.config))
    pair = Pair(models[0], wide, settings(), walked, least_saving=LEAST)
    assert (pair.vocabulary, wide.geometry.vocabulary) == (size, size + 8)
    prompts = bundled.prompts(2)[:1]
    with pair.partners() as (small, padded), bundled.partners() as (_, plain):
        rule = SwitchingRule(0.3, least_run=2)
        for write in (
            lambda large: switch(small, large, rule, prompts, 12),
            lambda large: speculate(small, large, prompts, 12),
        ):
            cut, own = write(padded), write(plain)
            assert cut.record.emitted[0].tolist() == own.record.emitted[0].tolist()
        unbounded = padded.decoder.generate(prompts, 12, frozenset()).emitted[0]
    assert unbounded.max() >= size, "padding that no draw could hit would prove nothing"
    with pair.drafting() as model, bundled.drafting() as expected:
        cut, own = (self_speculate(one, 4, prompts, 12) for one in (model, expected))
        assert cut.record.emitted[0].tolist() == own.record.emitted[0].tolist()


def test_a_small_model_that_is_no_smaller_is_refused(models) -> None:
    with pytest.raises(BadArgument, match=r"fewer parameters.*other way round"):
        Pair(*reversed(models), settings(), walked, least_saving=LEAST)


def test_an_encoder_decoder_is_refused(models) -> None:
    """It reads a source, which no prompt of a task has."""
    reader = replace(models[1], geometry=replace(models[1].geometry, encoder_layers=2))
    with pytest.raises(BadArgument, match="decoder-only"):
        Pair(models[0], reader, settings(), walked, least_saving=LEAST)


def test_a_refused_pair_ends_the_run_before_any_question(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test_pair(emad_pair):\n    assert False, 'never asked'\n")
    result = run("--emad-small-model", "emad-tiny", "--emad-large-model", "emad-nano")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = result.stdout.str() + result.stderr.str()
    assert "--emad-small-model, --emad-large-model=" in said
    assert "never asked" not in said


def test_random_weights_leave_nothing_to_judge(models) -> None:
    noise = Pair(replace(models[0], trained=False), models[1], settings(), walked, least_saving=LEAST)
    assert "random weights" in noise.premise()


# ------------------------------------------------------------ tasks and thresholds


def test_tasks_are_those_on_which_the_large_model_is_ten_points_better(pair) -> None:
    pair.__dict__["compared"] = {"a": (0.5, 0.625), "b": (0.5, 0.5625), "c": (0.25, 0.75), "d": (0.9, 0.3)}
    assert pair.tasks == ["c", "a"], "the largest gap first"
    assert pair.timed_task == "c"
    assert "useless on b (0.562 against 0.500), d (0.300 against 0.900)" in pair.note
    assert pair.premise() == ""


def test_a_pair_that_is_useless_everywhere_says_so(pair) -> None:
    pair.__dict__["compared"] = {"a": (0.5, 0.55)}
    assert "useless on a" in pair.premise()
    assert "nothing to route" in pair.premise()


def test_share_and_saving_are_inverse(pair) -> None:
    for saving in (0.1, 0.415, 0.67):
        assert pair.saving(pair.share_for(saving)) == pytest.approx(saving, abs=1e-12)  # float64 arithmetic


RULES = [SwitchingRule(bits) for bits in (0.1, 0.2, 0.3)]


@pytest.mark.parametrize(
    ("saving", "chosen"),
    [
        (0.1, RULES[0]),  # all save as much: the best score
        (0.5, RULES[1]),
        (0.8, RULES[2]),
        (0.95, None),  # more than the small model alone would save
    ],
)
def test_of_the_rules_that_save_enough_the_best_is_chosen(pair, monkeypatch, saving, chosen) -> None:
    shares, scores = (0.8, 0.4, 0.05), (0.9, 0.8, 0.7)
    table = {
        rule: Routing(rule.threshold_bits, share, score)
        for rule, share, score in zip(RULES, shares, scores, strict=True)
    }
    monkeypatch.setattr(pair, "tried", lambda task: table)
    assert pair.chosen(TASK, saving) == chosen
    pair.least_saving = saving
    assert pair.put_forward(TASK) == (chosen or RULES[2]), "where none saves enough, the cheapest"


def test_thresholds_are_tried_with_either_model_first_and_the_papers_constants(bundled) -> None:
    tried = bundled.tried(TASK)
    assert len(tried) == 2 * len(pairing.SHARES)
    assert {(rule.start, rule.window, rule.least_run) for rule in tried} == {(SMALL, 5, 10), (LARGE, 5, 10)}
    assert all(0 <= routing.large_share <= 1 for routing in tried.values())


# ------------------------------------------------------------ answers


def test_alone_either_model_emits_everything(bundled) -> None:
    small, large = (bundled.alone(model, *ITEMS) for model in (SMALL, LARGE))
    assert (small.large_share, large.large_share) == (0.0, 1.0)
    assert small.flops < large.flops
    assert len(large.right) == FEW.judged


def test_switching_that_never_switches_answers_and_costs_as_the_large_model(bundled) -> None:
    """Requests of equal length share a batch, so that not one key of padding separates the two counts."""
    never = bundled.switched(SwitchingRule(0.0, start=LARGE), *ITEMS)
    alone = bundled.alone(LARGE, *ITEMS)
    assert never.large_share == 1.0
    assert never.right.tolist() == alone.right.tolist()
    assert never.emitted.tolist() == alone.emitted.tolist()
    (run,) = never.runs
    assert all(np.concatenate(bundled.agreement(run, bundled.items(*ITEMS)))), "greedy choices are its own"
    # the timed path reads a prompt whole, masked keys included, a session its last position apart: p² or p² − p + 1
    assert never.flops == pytest.approx(alone.flops, rel=0.002)


def test_another_models_token_is_no_agreement(bundled) -> None:
    rule = SwitchingRule(float(np.log2(bundled.large.loaded.geometry.vocabulary)), start=SMALL)
    (run,) = bundled.switched(rule, *ITEMS).runs
    emitted = [tokens.copy() for tokens in run.record.emitted]
    wrong = [np.where(np.arange(len(tokens)) == 2, (tokens + 1) % 500, tokens) for tokens in emitted]
    forged = replace(run, record=replace(run.record, emitted=wrong))
    assert not any(agrees[2] for agrees in bundled.agreement(forged, bundled.items(*ITEMS)) if len(agrees) > 2)


def test_speculation_answers_as_the_large_model_and_leaves_it_fewer_tokens(bundled) -> None:
    found, alone = bundled.speculated(*ITEMS), bundled.alone(LARGE, *ITEMS)
    assert found.right.tolist() == alone.right.tolist()
    assert 0 < found.large_share < 1
    padded = bundled.speculated(*ITEMS, padded=True)
    assert padded.by_large.tolist() == found.by_large.tolist(), "neighbours change the work, not the tokens"


def test_the_large_model_drafts_for_itself_at_its_probes_and_answers_as_it_would(bundled) -> None:
    assert bundled.exit_layers == (4, 8)
    alone = bundled.alone(LARGE, *ITEMS)
    shallow, deep = (bundled.self_speculated(layer, *ITEMS) for layer in bundled.exit_layers)
    for found in (shallow, deep):
        assert found.right.tolist() == alone.right.tolist()
        assert found.emitted.tolist() == alone.emitted.tolist()
        assert found.large_share == 1.0
        assert 0.5 < found.acceptance <= 1.0
    assert shallow.acceptance <= deep.acceptance
    assert alone.acceptance is None
    assert bundled.self_speculated(4, *ITEMS) is shallow
    (geometry,) = {bundled.large.loaded.geometry}
    spent = sum(flops(run.record.work[0], geometry).total for run in shallow.runs)
    assert shallow.flops == spent == bundled.spent(shallow.runs).sum(), "the work is the large model's"


def test_acceptance_is_of_all_runs_together(bundled) -> None:
    found = bundled.speculated(*ITEMS)
    verdicts = np.concatenate([run.drafts.verdict for run in found.runs])
    judged = verdicts[verdicts != UNREACHED]
    assert found.acceptance == (judged == ACCEPTED).mean()


def refusing(request):
    if request.point.schedule == "free_deferred":
        raise Unsupported("depth never rises here")
    return walked(request)


def shallow_only(request):
    decoder = walked(request)
    decoder.capabilities = replace(decoder.capabilities, deepens=False)
    return decoder


@pytest.mark.parametrize(
    ("make", "reason"), [(refusing, "depth never rises here"), (shallow_only, "does not take up tokens that stopped")]
)
def test_a_decoder_that_cannot_draft_for_itself_says_why(models, make, reason) -> None:
    pair = Pair(*models, settings(), make, least_saving=LEAST)
    assert reason in pair.without_drafting
    assert pair.exit_layers == ()
    with pytest.raises(Unsupported, match=reason):
        pair.self_speculated(4, *ITEMS)


@pytest.mark.parametrize(("make", "more"), [(walked, {"self-speculative"}), (refusing, set())])
def test_self_speculation_is_timed_beside_the_rivals_where_it_can_be(models, monkeypatch, make, more) -> None:
    pair = Pair(*models, settings(), make, least_saving=LEAST)
    pair.__dict__ |= {"compared": {TASK: (0.5, 0.5)}, "emad_point": pair.large.full}
    monkeypatch.setattr(pair, "timed", lambda arms, pairs: {name: arm(prompts[0], 6) for name, arm in arms.items()})
    prompts = pair.prompts(1)
    try:
        done = pair.rivals
    except Unsupported as refusal:  # which the plugin would report as a skipped test
        pytest.fail(f"one arm's refusal took the others along: {refusal}")
    assert set(done) == {"large", "EMAD", "speculative"} | more, "nothing to route: no EAD"
    if more:
        assert done["self-speculative"].record.emitted[0].tolist() == done["large"].emitted[0].tolist()
        assert set(done["self-speculative"].record.tokens.depth.tolist()) == {4, 12}, "it leaves at the first probe"


def test_answers_are_decoded_once(bundled) -> None:
    assert bundled.alone(LARGE, *ITEMS) is bundled.alone(LARGE, *ITEMS)


def test_timed_results_are_those_of_the_timed_prompts(bundled) -> None:
    bundled.__dict__["compared"] = {TASK: (0.0, 1.0)}
    with bundled.partners() as (small, large):
        arms = {
            "large": lambda prompt, new: large.decoder.generate([prompt], new, frozenset()),
            "speculative": lambda prompt, new: speculate(small, large, [prompt], new),
        }
        timings, results = bundled.timed(arms, 2)
    assert {name: len(seconds) for name, seconds in timings.seconds.items()} == {"large": 2, "speculative": 2}
    for one, other in zip(results["large"], results["speculative"], strict=True):
        assert one.emitted[0].tolist() == other.record.emitted[0].tolist()
    assert len(bundled.spent(results["speculative"])) == 2
    assert bundled.spent([replace(results["large"][0], work=None)]) is None, "not counted is not zero"


# ------------------------------------------------------------ speculation as a decoder


def test_speculation_shows_its_verifiers_record_only(bundled) -> None:
    prompts = bundled.prompts(2)[:1]
    with bundled.partners() as (draft, verifier):
        decoder = speculation(draft, verifier)
        record = decoder.generate(prompts, 8, frozenset())
        own = verifier.decoder.generate(prompts, 8, frozenset())
        with pytest.raises(Unsupported, match="no session"):
            decoder.start(prompts)
    kept = record.tokens.kept
    assert set(record.tokens.model.tolist()) == {0}
    assert record.work is None
    assert not decoder.capabilities.counted
    assert record.tokens.token[kept].tolist() == own.tokens.token.tolist()
    assert record.signal.shape == (len(record.tokens), 0)
    decided = record.tokens.phase[kept][len(prompts[0].tokens) - 1 :]
    assert set(decided.tolist()) <= {DECODE, VERIFY}


def test_self_speculation_shows_what_was_verified_only(bundled) -> None:
    prompts = bundled.prompts(2)[:1]
    with bundled.drafting() as model:
        decoder = self_speculation(model, 4)
        record = decoder.generate(prompts, 8, frozenset())
        own = model.decoder.generate(prompts, 8, frozenset())
    kept = record.tokens.kept
    assert DRAFT not in record.tokens.phase
    assert record.tokens.token[kept].tolist() == own.tokens.token.tolist()
    assert record.tokens.depth[kept].tolist() == own.tokens.depth.tolist()
    assert not decoder.capabilities.counted
    assert not decoder.capabilities.deepens


# ------------------------------------------------------------ scores


def item(scoring: str, answer: str, **more) -> Item:
    example = Example("t", more.pop("prompt", "p"), answer, scoring, **more)
    return Item(example, np.array([1]), (np.arange(3), np.arange(5)))


def test_an_answer_counts_by_its_beginning_and_a_program_by_running() -> None:
    assert is_right(item("exact", " 9."), " 9. And more")
    assert not is_right(item("exact", " 9."), " 19.")
    assert is_right(item("choice", " barn"), " barn.")
    program = item("runs", " x\n", prompt="def f(x):\n    return", check="assert f(2) == 4\n")
    assert is_right(program, " x * 2\n")
    assert not is_right(program, " x\n")


def test_room_for_the_longest_answer() -> None:
    assert longest([item("exact", "a"), item("choice", "a")]) == 5
    assert longest([item("runs", "a")]) == pairing.GENERATED_LINE


def test_retained_score_is_a_ratio_tested_item_by_item() -> None:
    rng = np.random.default_rng(0)
    reference = np.arange(200) % 2 == 0
    candidate = reference & (np.arange(200) % 8 != 0)  # keeps 3 of 4
    found = retained(candidate, reference, 0.9, rng)
    assert found.value == pytest.approx(0.75, abs=1e-12)
    assert found.low < 0.75 < found.high < 0.9
    assert found.p_below < 0.05 < found.p_above
    kept = retained(candidate, reference, 0.6, np.random.default_rng(0))
    assert kept.p_above < 0.05 < kept.p_below
    assert retained(reference, reference, 1.0, rng).value == 1.0


def test_no_score_cannot_be_retained() -> None:
    with pytest.raises(BadArgument, match="no item right"):
        retained(np.ones(3, dtype=bool), np.zeros(3, dtype=bool), 0.9, np.random.default_rng(0))
