"""Measurements of a pair: models that may form one, tasks worth routing, the chosen rule, counts of work."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emad_ref.absent import Absent
from emad_ref.decoding.self_speculation import self_speculate
from emad_ref.decoding.speculation import ACCEPTED, UNREACHED, speculate
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule, switch
from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import flops
from emad_ref.models.generation import LOOKUP
from emad_ref.models.geometry import geometry_of
from emad_ref.models.loading import load
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import DECODE, DRAFT, VERIFY, Record
from emad_ref.text.documents import TaskExample
from pytest_emad.audit.finding import AuditRefutedError
from pytest_emad.benchmark.clock import PairedTimings
from pytest_emad.claims.pair_answers import make_timed_arms
from pytest_emad.measurements import pair_measurements as pair_module
from pytest_emad.measurements import pair_timing
from pytest_emad.measurements.latency import TimingResult
from pytest_emad.measurements.pair_answers import (
    PAIR_ROWS,
    TEXTS,
    ItemAnswers,
    compute_max_answer_tokens,
    group_by_prompt_length,
    is_right,
)
from pytest_emad.measurements.pair_measurements import LEAST_RUNS, TRIED_WINDOWS, PairMeasurements, make_varied_rules
from pytest_emad.measurements.pair_models import DRAFT_TOKENS, make_self_speculative_decoder, make_speculative_decoder
from pytest_emad.measurements.pair_routing import PAPER, PairComparison, SwitchingConstants
from pytest_emad.measurements.pair_timing import (
    TRANSFORMERS_NAMES,
    compute_acceptance_rate_per_output,
    make_decoder_arm,
    make_speculative_arm,
)
from pytest_emad.measurements.run_resources import RunResources, make_decoder_on_judge_model
from pytest_emad.measurements.study import BUDGETS, PAIR_SIZES, PairSampleSizes, Study
from pytest_emad.screening.drafts import ASSISTED
from pytest_emad.statistics.accuracy import estimate_accuracy_drop
from pytest_emad.statistics.units import ByItem
from pytest_emad.tasks.answers import GENERATED_LINE
from pytest_emad.tasks.scoring import EncodedTaskItem

NAMES = ("emad-nano", "emad-tiny")
SAVINGS = (0.415, 0.67)
FEW = PairSampleSizes(compared=4, tried=2, thresholds=15, judged=4, calibrate=4, reported=2)
TASK = "inventory"
ITEMS = (TASK, "evaluate", FEW.judged)


@pytest.fixture(scope="module")
def models():
    return tuple(load(name) for name in NAMES)


def paired(small, large, make=make_decoder_on_judge_model, size=None, **study) -> PairMeasurements:
    return PairMeasurements(small, large, Study(**study), RunResources(make), names=NAMES, savings=SAVINGS, size=size)


@pytest.fixture(scope="module")
def bundled(models) -> PairMeasurements:
    """Answers are cached: the tests below share a few items."""
    return paired(*models, size=FEW)


@pytest.fixture
def pair(models) -> PairMeasurements:
    """Return an empty pair; tests put in validation results by hand."""
    return paired(*models)


def worth(gap: float = 0.5, worth_routing: bool = True, standing: str = "") -> SimpleNamespace:
    """Return both models' results on a task, as validation could find them."""
    return SimpleNamespace(gap=SimpleNamespace(value=gap), is_worth_routing=worth_routing, summary=standing)


# ------------------------------------------------------------ messages


def test_a_pair_is_called_by_the_names_it_was_given(models) -> None:
    named = PairMeasurements(*models, Study(), RunResources(), names=("./small", "./large"), savings=SAVINGS)
    assert named.name == named.names.name == "./small + ./large"
    assert named.corpus == "world tasks"
    assert named.fingerprint == "+".join(model.fingerprint for model in models)
    assert (named.names.corpus, named.names.fingerprint) == ("", ""), "names alone stand for no text and no weights"


def test_what_a_study_says_of_the_model_under_test_is_not_said_of_a_pair(models, tmp_path) -> None:
    """Its profile and its margin; and fewer documents calibrate two models than one."""
    pair = paired(*models, margin=0.5, profile=tmp_path / "profile.json", budget=BUDGETS["standard"])
    for evidence in pair.models.both:
        assert (evidence.study.margin, evidence.study.profile) == (None, None)
        assert evidence.study.budget == replace(BUDGETS["standard"], calibrate=PAIR_SIZES["standard"].calibrate)
    assert pair.size is PAIR_SIZES["standard"]


# ------------------------------------------------------------ models that may form a pair


def test_a_model_without_tokenizer_is_refused(models) -> None:
    with pytest.raises(BadArgument, match="emad-tiny came without"):
        paired(models[0], replace(models[1], tokenizer=None))


def test_another_tokenizer_is_refused(models) -> None:
    other = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: "another", padding=None, truncation=None))
    with pytest.raises(BadArgument, match="the same tokenizer"):
        paired(models[0], replace(models[1], tokenizer=other))


def test_a_padded_embedding_makes_no_other_pair(models, bundled) -> None:
    """Rows above the tokenizer's ids, here with the largest logits of all, have no effect on a pair's output."""
    large = copy.deepcopy(models[1].model)
    size = large.get_input_embeddings().num_embeddings
    large.resize_token_embeddings(size + 8, mean_resizing=False)
    with bundled.models.open_partners() as (_, plain):
        first = plain.decoder.generate(bundled.latency.make_prompts(2)[:1], 1, frozenset()).emitted[0]
    with torch.no_grad():
        head = large.get_output_embeddings().weight
        head[size:] = 3 * head[int(first[0])]
    wide = replace(models[1], model=large, geometry=geometry_of(large.config))
    pair = paired(models[0], wide)
    assert (pair.models.vocabulary, wide.geometry.vocabulary) == (size, size + 8)
    prompts = bundled.latency.make_prompts(2)[:1]
    with pair.models.open_partners() as (small, padded), bundled.models.open_partners() as (_, plain):
        rule = SwitchingRule(0.3, least_run=2)
        for write in (
            lambda large: switch(small, large, rule, prompts, 12),
            lambda large: speculate(small, large, prompts, 12),
        ):
            cut, own = write(padded), write(plain)
            assert cut.record.emitted[0].tolist() == own.record.emitted[0].tolist()
        unbounded = padded.decoder.generate(prompts, 12, frozenset()).emitted[0]
    assert unbounded.max() >= size, "padding that no draw could hit would prove nothing"
    with pair.models.open_self_drafter() as model, bundled.models.open_self_drafter() as expected:
        cut, own = (self_speculate(one, 4, prompts, 12) for one in (model, expected))
        assert cut.record.emitted[0].tolist() == own.record.emitted[0].tolist()


def test_a_small_model_that_is_no_smaller_is_refused(models) -> None:
    with pytest.raises(BadArgument, match=r"fewer parameters.*other way round"):
        paired(*reversed(models))


def test_an_encoder_decoder_is_refused(models) -> None:
    """It needs a source, and no prompt of a task has one."""
    reader = replace(models[1], geometry=replace(models[1].geometry, encoder_layers=2))
    with pytest.raises(BadArgument, match="decoder-only"):
        paired(models[0], reader)


def test_random_weights_leave_nothing_to_judge(models) -> None:
    noise = paired(replace(models[0], trained=False), models[1])
    absent = noise.routing_rules.absent_premise()
    assert "random weights" in absent.reason
    assert absent.lacking == "premise"


# ------------------------------------------------------------ tasks and thresholds


def compared(pair, small, large, guess=0.0, items=60) -> PairComparison:
    """Return both models alone: [items] right by either, in the order of the items."""
    rights = [ByItem.from_independent_items(np.arange(items) < right) for right in (small, large)]
    gap = estimate_accuracy_drop(rights[1], rights[0], threshold=0.1)
    return PairComparison(*(ItemAnswers(right, np.ones(items), np.ones(items), None) for right in rights), guess, gap)


def test_a_task_counts_where_the_large_model_is_shown_to_beat_a_guess_and_the_small_one_by_ten_points(pair) -> None:
    found = {
        "clear": compared(pair, 20, 50),
        "clearer": compared(pair, 10, 55),
        "too few items to tell": compared(pair, 40, 49),
        "guessed": compared(pair, 20, 50, guess=0.8),
        "worse": compared(pair, 54, 20),
    }
    pair.routing_rules.comparisons = found
    assert 0.1 < found["too few items to tell"].gap.value < 0.2, "better by more than ten points, not shown"
    assert pair.routing_rules.tasks_worth_routing == ["clearer", "clear"], "the largest gap first"
    assert pair.routing_rules.absent_premise() is None
    assert (
        "too few items to tell (0.817 against 0.667, 15.0 points better ["
        in pair.routing_rules.tasks_not_worth_routing_note
    )
    assert (
        "guessed (0.833 against 0.333; not solved: a guess gets 0.800)"
        in pair.routing_rules.tasks_not_worth_routing_note
    )
    assert "clear (" not in pair.routing_rules.tasks_not_worth_routing_note


def test_a_repeated_item_beats_a_guess_once(pair) -> None:
    one = compared(pair, 0, 60, guess=0.5)
    repeated = replace(one, large=replace(one.large, right=ByItem(one.large.right.values, np.zeros(60, dtype=int))))
    assert one.is_solved
    assert not repeated.is_solved


def test_a_pair_that_cannot_be_told_apart_says_where_and_by_how_much(pair) -> None:
    pair.routing_rules.comparisons = {"a": compared(pair, 50, 52)}
    absent = pair.routing_rules.absent_premise()
    assert "a (0.867 against 0.833, 3.3 points better [" in absent.reason
    assert "nothing to route" in absent.reason
    assert absent.lacking == "premise"
    assert pair.routing_rules.absent_tasks() is None


def test_without_a_task_there_are_texts_to_write_on_and_nothing_to_judge(models) -> None:
    """A user's models on a user's corpus, without a named task."""
    own = paired(*models, size=FEW, corpus="self")
    assert own.answers.scorable_tasks == {}
    assert own.corpus == TEXTS
    assert own.routing_rules.decodable_tasks == [TEXTS]
    absent = own.routing_rules.absent_premise()
    assert "name some with --emad-tasks" in absent.reason
    assert absent.lacking == "data"
    assert absent == own.routing_rules.absent_tasks()


def test_share_and_saving_are_inverse(pair) -> None:
    for saving in (0.1, 0.415, 0.67):
        assert pair.models.compute_paper_saving(pair.models.large_share_at_saving(saving)) == pytest.approx(
            saving, abs=1e-12
        )  # float64 arithmetic


def done(large_share, score, items=20) -> ItemAnswers:
    right = ByItem.from_independent_items(np.arange(items) < round(score * items))
    emitted = np.full(items, 100)
    return ItemAnswers(right, emitted, np.full(items, round(100 * large_share)), None)


@pytest.fixture
def tabled(pair, monkeypatch):
    """Simulate validation: shares and scores of three rules and of either model alone; the same on judged items, with
    three points more of the large model."""
    rules = [SwitchingRule(bits) for bits in (0.1, 0.2, 0.3)]
    ends = [pair.answers.make_single_model_rule(LARGE), pair.answers.make_single_model_rule(SMALL)]
    found = dict(
        zip(
            [ends[0], *rules, ends[1]],
            [done(1.0, 0.9), done(0.8, 0.9), done(0.4, 0.8), done(0.2, 0.4), done(0.0, 0.3)],
            strict=True,
        )
    )
    later = {rule: done(one.large_share + 0.03 * (rule in rules), one.mean_score) for rule, one in found.items()}
    monkeypatch.setattr(pair.routing_rules, "try_rules", lambda task, constants=None: found)
    monkeypatch.setattr(
        pair.answers, "answer_by_switching_rules", lambda rules, *where: [later[rule] for rule in rules]
    )
    return pair, rules, ends


def test_neighbours_on_the_front_take_turns_so_that_the_saving_is_met_exactly(tabled) -> None:
    pair, rules, (_, small) = tabled
    assert pair.routing_rules.find_front_rules(TASK) == [
        pair.answers.make_single_model_rule(LARGE),
        rules[0],
        rules[1],
        small,
    ], "the third is no corner"
    share = pair.models.large_share_at_saving(0.415)
    found = pair.routing_rules.evaluate_mixture_at_saving(TASK, 0.415)
    assert found.rules == (rules[0], rules[1])
    probability = (share - 0.43) / 0.4  # from the judged items' tokens
    assert found.score.values.mean() == pytest.approx(probability * 0.9 + (1 - probability) * 0.8)
    assert found.attained == pytest.approx(pair.models.compute_paper_saving(share + 0.03)), (
        "the saving of validation's proportion"
    )
    assert found.neighbours == pytest.approx(
        (pair.models.compute_paper_saving(0.83), pair.models.compute_paper_saving(0.43))
    )


def test_beyond_the_small_model_alone_nothing_saves(tabled) -> None:
    pair, _, _ = tabled
    assert pair.routing_rules.evaluate_mixture_at_saving(TASK, pair.models.compute_paper_saving(0.0) + 0.01) is None
    assert pair.routing_rules.evaluate_mixture_at_saving(TASK, pair.models.compute_paper_saving(0.0) - 0.01).rules[
        1
    ] == pair.answers.make_single_model_rule(SMALL)


@pytest.mark.parametrize(("saving", "chosen"), [(0.1, 0), (0.5, 1), (0.7, 2), (0.89, 2)])
def test_one_rule_is_put_forward_and_it_switches(tabled, saving, chosen) -> None:
    """The best of those that save enough; otherwise the cheapest, but never a single model."""
    pair, rules, _ = tabled
    pair.routing_rules.savings = (saving,)
    assert pair.routing_rules.select_rule_for_paper_saving(TASK) == rules[chosen]


@pytest.mark.parametrize(("saving", "chosen"), [(0.1, 0), (0.415, 1), (0.67, 2), (0.9, 2)])
def test_without_a_score_the_nearest_rule_is_taken(tabled, saving, chosen) -> None:
    pair, rules, _ = tabled
    assert pair.routing_rules.find_rule_nearest_saving(TASK, saving) == rules[chosen]


@pytest.mark.parametrize(
    ("median", "constants"),
    [
        (7, SwitchingConstants(1, 1)),
        (12, SwitchingConstants(3, 3)),
        (24, SwitchingConstants(5, 6)),
        (40, PAPER),
        (400, PAPER),
    ],
)
def test_the_papers_constants_are_shortened_to_a_quarter_of_the_median_answer(pair, monkeypatch, median, constants):
    monkeypatch.setattr(pair.routing_rules, "large_model_median_answer_tokens", lambda task: median)
    assert pair.routing_rules.scale_paper_constants(TASK) == constants


def test_rules_are_tried_with_either_model_first_and_both_models_alone_are_among_them(bundled) -> None:
    tried = bundled.routing_rules.try_rules(TASK)
    own = bundled.routing_rules.scale_paper_constants(TASK)
    ends = [bundled.answers.make_single_model_rule(model) for model in (SMALL, LARGE)]
    assert [tried[rule].large_share for rule in ends] == [0.0, 1.0]
    starts = [rule.start for rule in tried if rule not in ends]
    assert starts.count(SMALL) == starts.count(LARGE) <= FEW.thresholds
    assert {(rule.window, rule.least_run) for rule in tried if rule not in ends} == {(own.window, own.least_run)}
    assert bundled.routing_rules.format_rule_name(ends[0]) == "the small model alone"
    assert bundled.routing_rules.try_rules(TASK) is tried


def test_no_rule_is_chosen_on_fewer_than_sixty_items_or_judged_on_fewer_than_a_hundred() -> None:
    for size in PAIR_SIZES.values():
        assert size.compared >= size.tried >= 60
        assert size.judged >= 100


# ------------------------------------------------------------ answers


def test_alone_either_model_emits_everything(bundled) -> None:
    small, large = (bundled.answers.answer_by_one_model(model, *ITEMS) for model in (SMALL, LARGE))
    assert (small.large_share, large.large_share) == (0.0, 1.0)
    assert small.flops < large.flops
    assert len(large.right) == FEW.judged


def test_switching_that_never_switches_answers_and_costs_as_the_large_model(bundled) -> None:
    """Requests of equal length share a batch, so that padding does not separate the two counts."""
    never = bundled.answers.answer_by_switching(SwitchingRule(0.0, start=LARGE), *ITEMS)
    records, emitted = decoded_alone(bundled)
    assert never.large_share == 1.0
    assert [walk.tokens.tolist() for walk in never.walks] == emitted
    assert all(np.concatenate(bundled.answers.make_greedy_choice_masks(LARGE, never, *ITEMS))), (
        "greedy choices are its own"
    )
    # the timed path reads a prompt whole, with masked keys, a session its last position apart: p² or p² − p + 1
    assert never.flops == pytest.approx(bundled.models.compute_flops_per_decoding(records).sum(), rel=0.002)


def decoded_alone(bundled) -> tuple[list[Record], list[list[int]]]:
    """Return the large model's own records, and the tokens of each item."""
    requests = bundled.answers.get_task(ITEMS[0]).texts(*ITEMS[1:])
    records, emitted = [], [[]] * len(requests)
    with bundled.large.subject.open_decoder(bundled.large.subject.full_depth_point, max_rows=PAIR_ROWS) as decoder:
        for rows in group_by_prompt_length(requests):
            prompts = [Prompt(requests[row].prompt) for row in rows]
            records.append(decoder.generate(prompts, requests[rows[0]].most, requests[rows[0]].stop))
            for row, tokens in zip(rows, records[-1].emitted, strict=True):
                emitted[row] = tokens.tolist()
    return records, emitted


def test_a_text_with_divergent_tokens_by_the_large_model_is_its_own(bundled) -> None:
    """EAD-A6: decoded token by token; both models extend the same history, and the large one wins where they differ."""
    written = bundled.answers.answer_by_one_model(LARGE, *ITEMS)
    agrees = bundled.answers.make_greedy_choice_masks(SMALL, written, *ITEMS)
    task, *drawn = ITEMS
    with bundled.models.open_partners() as partners:
        for request, walk, same in zip(
            bundled.answers.get_task(task).texts(*drawn), written.walks, agrees, strict=True
        ):
            history = request.prompt
            for at in range(len(walk.tokens)):
                small, large = (
                    partner.decoder.generate([Prompt(history)], 1, frozenset()).emitted[0][0] for partner in partners
                )
                assert same[at] == (small == large)
                history = np.append(history, small if small == large else large)
            assert history[len(request.prompt) :].tolist() == walk.tokens.tolist()
    assert 0 < np.concatenate(agrees).mean() < 1


def test_another_models_token_is_no_agreement(bundled) -> None:
    written = bundled.answers.answer_by_one_model(SMALL, *ITEMS)
    wrong = []
    for walk in written.walks:
        tokens = walk.tokens.copy()
        tokens[2] = (tokens[2] + 1) % 500
        wrong.append(replace(walk, tokens=tokens))
    honest, forged = (
        bundled.answers.make_greedy_choice_masks(LARGE, replace(written, walks=tuple(walks)), *ITEMS)
        for walks in (written.walks, wrong)
    )
    assert [agrees[2] for agrees in forged] == [False] * FEW.judged
    assert any(agrees[2] for agrees in honest)


def test_speculation_answers_as_the_large_model_and_leaves_it_fewer_tokens(bundled) -> None:
    found, alone = bundled.answers.answer_by_speculation(*ITEMS), bundled.answers.answer_by_one_model(LARGE, *ITEMS)
    assert found.right.values.tolist() == alone.right.values.tolist()
    assert 0 < found.large_share < 1
    shared = bundled.answers.answer_by_speculation_without_flops(DRAFT_TOKENS, None, *ITEMS)
    assert shared.by_large.tolist() == found.by_large.tolist()
    assert shared.right.values.tolist() == found.right.values.tolist()
    assert shared.flops is None, "tokens read from shared texts executed nothing"


def test_the_large_model_drafts_for_itself_at_its_probes_and_answers_as_it_would(bundled) -> None:
    assert bundled.models.drafting_exit_layers == (4, 8)
    alone = bundled.answers.answer_by_one_model(LARGE, *ITEMS)
    shallow, deep = (
        bundled.answers.answer_by_self_speculation(layer, *ITEMS) for layer in bundled.models.drafting_exit_layers
    )
    for found in (shallow, deep):
        assert found.right.values.tolist() == alone.right.values.tolist()
        assert found.emitted.tolist() == alone.emitted.tolist()
        assert found.large_share == 1.0
        assert 0.5 < found.accepted_share <= 1.0
    assert shallow.accepted_share <= deep.accepted_share
    assert alone.accepted_share is None
    assert bundled.answers.answer_by_self_speculation(4, *ITEMS) is shallow
    (geometry,) = {bundled.large.loaded.geometry}
    spent = sum(flops(run.record.work[0], geometry).total for run in shallow.runs)
    assert shallow.flops == spent == bundled.models.compute_flops_per_decoding(shallow.runs).sum(), (
        "the work is the large model's"
    )


def test_acceptance_is_of_all_runs_together(bundled) -> None:
    found = bundled.answers.answer_by_speculation(*ITEMS)
    verdicts = np.concatenate([run.drafts.verdict for run in found.runs])
    judged = verdicts[verdicts != UNREACHED]
    assert found.accepted_share == (judged == ACCEPTED).mean()


def refusing(request):
    if request.point.schedule == "free_deferred":
        raise Unsupported("depth never rises here")
    return make_decoder_on_judge_model(request)


def shallow_only(request):
    decoder = make_decoder_on_judge_model(request)
    decoder.capabilities = replace(decoder.capabilities, deepens=False)
    return decoder


@pytest.mark.parametrize(
    ("make", "reason"), [(refusing, "depth never rises here"), (shallow_only, "does not take up tokens that stopped")]
)
def test_a_decoder_that_cannot_draft_for_itself_says_why(models, make, reason) -> None:
    pair = paired(*models, make)
    assert reason in pair.models.absent_drafting.reason
    assert pair.models.drafting_exit_layers == ()
    with pytest.raises(Unsupported, match=reason):
        pair.answers.answer_by_self_speculation(4, *ITEMS)


@pytest.mark.parametrize(("make", "more"), [(make_decoder_on_judge_model, {"self-speculative"}), (refusing, set())])
def test_self_speculation_is_timed_beside_the_rivals_where_it_can_be(models, monkeypatch, make, more) -> None:
    pair = paired(*models, make)
    pair.routing_rules.comparisons = {TASK: worth(0.0, False)}
    prompts, ran = pair.latency.make_prompts(1), []

    def timed(arms, pairs):
        ran.append({name: arm(prompts[0], 6) for name, arm in arms.items()})
        outputs = {name: [done] for name, done in ran[0].items()}
        return TimingResult(PairedTimings({}, {}, ()), [prompts], outputs, [0])

    monkeypatch.setattr(pair.latency, "time_arms", timed)
    monkeypatch.setitem(vars(pair.latency), "n_new_tokens", 6)
    try:
        pair.latency.time_emad_arms(pair.large.subject.full_depth_point)
    except Unsupported as refusal:  # which the plugin would report as a skipped test
        pytest.fail(f"one arm's refusal took the others along: {refusal}")
    (done,) = ran
    assert set(done) == {"large", "EMAD", "speculative", *TRANSFORMERS_NAMES} | more
    for name in TRANSFORMERS_NAMES:
        assert done[name][0].tolist() == done["large"].emitted[0].tolist(), name
    if more:
        assert done["self-speculative"].record.emitted[0].tolist() == done["large"].emitted[0].tolist()
        assert set(done["self-speculative"].record.tokens.depth.tolist()) == {4, 12}, "it exits at the first probe"


def test_answers_are_decoded_once(bundled) -> None:
    assert bundled.answers.answer_by_one_model(LARGE, *ITEMS) is bundled.answers.answer_by_one_model(LARGE, *ITEMS)


def test_timed_results_are_those_of_the_timed_prompts(bundled) -> None:
    bundled.routing_rules.comparisons = {TASK: worth()}
    with bundled.models.open_partners() as (small, large):
        timed = bundled.latency.time_arms(
            {"large": make_decoder_arm(large.decoder), "speculative": make_speculative_arm(small, large)}, 2
        )
    assert {name: len(seconds) for name, seconds in timed.seconds.items()} == {"large": 2, "speculative": 2}
    for one, other in zip(timed.outputs["large"], timed.outputs["speculative"], strict=True):
        assert len(one.emitted[0]) == bundled.latency.n_new_tokens
        assert one.emitted[0].tolist() == other.record.emitted[0].tolist()
    assert len(bundled.models.compute_flops_per_decoding(timed.outputs["speculative"])) == 2
    assert compute_acceptance_rate_per_output(timed, "large") == []
    assert compute_acceptance_rate_per_output(timed, "speculative") == [
        done.acceptance_rate for done in timed.outputs["speculative"]
    ]


class OneTokenOff:
    """An arm or a decoder with a wrong last token."""

    def __init__(self, run):
        self._run = run

    def __call__(self, *asked):
        done = self._run(*asked)
        record = done.record if hasattr(done, "record") else done
        emitted = [np.append(row[:-1], row[-1] + 1) for row in record.emitted]
        changed = replace(record, emitted=emitted)
        return replace(done, record=changed) if hasattr(done, "record") else changed


@pytest.mark.parametrize(
    ("liar", "said"),
    [("make_speculative_arm", "row 0, new token .* no tie excuses it"), ("make_decoder_arm", "EMAD, row 0")],
)
def test_an_arm_that_lies_while_it_is_timed_has_no_time(bundled, monkeypatch, liar, said) -> None:
    honest = getattr(pair_timing, liar)
    point = bundled.large.subject.full_depth_point
    monkeypatch.setattr(bundled.latency, "_pairs", 2)
    monkeypatch.setitem(vars(bundled.latency), "n_new_tokens", 6)  # the last token is wrong, the preceding ones right
    emad = []

    def lies(decoder, *more):
        arm = honest(decoder, *more)
        emad.append(arm)
        return (
            arm if liar == "make_decoder_arm" and len(emad) == 1 else OneTokenOff(arm)
        )  # only the first one is the large model

    monkeypatch.setattr(pair_timing, liar, lies)
    with pytest.raises(AuditRefutedError, match=said):
        bundled.latency.time_emad_arms(point)


def test_transformers_ways_keep_no_record_have_no_flops_and_are_held_to_the_large_models_tokens(bundled) -> None:
    bundled.routing_rules.comparisons = {TASK: worth()}
    with bundled.models.open_partners() as (_, large):
        timed = bundled.latency.time_arms(
            {"large": make_decoder_arm(large.decoder), **bundled.latency.transformers_arms.arms}, 1
        )
    assert {name: len(timed.audited_decodings(name)) for name in timed.outputs} == {"large": 1, ASSISTED: 0, LOOKUP: 0}
    made = make_timed_arms(bundled, timed, ("large", *TRANSFORMERS_NAMES))
    assert {name: one.spent is None for name, one in made.items()} == {"large": False, ASSISTED: True, LOOKUP: True}
    bundled.latency.require_lossless(timed, large.decoder.capabilities)
    for name in TRANSFORMERS_NAMES:
        (emitted,) = timed.outputs[name]
        lies = replace(
            timed, outputs={**timed.outputs, name: [np.append(emitted[:, :-1], emitted[:, -1:] + 1, axis=1)]}
        )
        with pytest.raises(AuditRefutedError, match=r"row 0, new token .* no tie excuses it"):
            bundled.latency.require_lossless(lies, large.decoder.capabilities)


def test_a_way_that_transformers_refuses_is_absent_with_its_reason(models, monkeypatch) -> None:
    def refuses(model, device, assistant):
        def arm(prompt, new):
            raise ValueError("assisted generation is not supported with stateful models\nsuch as this")

        return arm

    monkeypatch.setattr(pair_timing, "make_transformers_generate", refuses)
    pair = paired(*models)
    pair.routing_rules.comparisons = {TASK: worth(0.0, False)}
    found = pair.latency.transformers_arms
    assert list(found.arms) == [LOOKUP]
    assert found.absent == {ASSISTED: Absent("ValueError: assisted generation is not supported with stateful models")}


def test_an_arm_that_stops_early_has_no_time(bundled) -> None:
    with bundled.models.open_partners() as (_, large):
        whole = large.decoder.generate(bundled.latency.make_prompts(1), bundled.latency.n_new_tokens, frozenset())
        early = replace(whole, emitted=[whole.emitted[0][:-1]])
        with pytest.raises(AuditRefutedError, match="short, request 0"):
            bundled.latency.time_arms({"large": make_decoder_arm(large.decoder), "short": lambda prompt, new: early}, 1)


def test_work_that_nobody_counted_is_not_zero(bundled) -> None:
    (counted, *_), _ = decoded_alone(bundled)
    assert bundled.models.compute_flops_per_decoding([counted])[0] > 0
    assert bundled.models.compute_flops_per_decoding([counted, replace(counted, work=None)]) is None


# ------------------------------------------------------------ speculation as a decoder


def test_speculation_shows_its_verifiers_record_only(bundled) -> None:
    prompts = bundled.latency.make_prompts(2)[:1]
    with bundled.models.open_partners() as (draft, verifier):
        decoder = make_speculative_decoder(draft, verifier)
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
    prompts = bundled.latency.make_prompts(2)[:1]
    with bundled.models.open_self_drafter() as model:
        decoder = make_self_speculative_decoder(model, 4)
        record = decoder.generate(prompts, 8, frozenset())
        own = model.decoder.generate(prompts, 8, frozenset())
    kept = record.tokens.kept
    assert DRAFT not in record.tokens.phase
    assert record.tokens.token[kept].tolist() == own.tokens.token.tolist()
    assert record.tokens.depth[kept].tolist() == own.tokens.depth.tolist()
    assert not decoder.capabilities.counted
    assert not decoder.capabilities.deepens


# ------------------------------------------------------------ scores


def item(scoring: str, answer: str, **more) -> EncodedTaskItem:
    example = TaskExample("t", more.pop("prompt", "p"), answer, scoring, **more)
    return EncodedTaskItem(example, np.array([1]), (np.arange(3), np.arange(5)))


def test_an_answer_counts_by_its_beginning_and_a_program_by_running() -> None:
    assert is_right(item("exact", " 9."), " 9. And more")
    assert not is_right(item("exact", " 9."), " 19.")
    assert is_right(item("choice", " barn"), " barn.")
    program = item("runs", " x\n", prompt="def f(x):\n    return", check="assert f(2) == 4\n")
    assert is_right(program, " x * 2\n")
    assert not is_right(program, " x\n")


def test_room_for_the_longest_answer() -> None:
    assert compute_max_answer_tokens([item("exact", "a"), item("choice", "a")]) == 5
    assert compute_max_answer_tokens([item("runs", "a")]) == GENERATED_LINE


# ------------------------------------------------------------ the table of constants


def test_one_constant_at_a_time_is_varied_and_never_against_itself(bundled) -> None:
    rules, own = make_varied_rules(bundled, TASK), bundled.routing_rules.scale_paper_constants(TASK)
    assert len(set(rules)) == len(rules)
    base = next(rule for rule in rules if rule.window != own.window)
    changed = [
        {field for field in ("threshold_bits", "window", "least_run") if getattr(rule, field) != getattr(base, field)}
        - {"window"}
        for rule in rules
    ]
    assert all(len(fields) <= 1 for fields in changed)
    assert [rule.window for rule in rules if rule.window != own.window] == [w for w in TRIED_WINDOWS if w != own.window]
    runs = [rule.least_run for rule in rules if rule.least_run != own.least_run]
    assert runs == [least for least in LEAST_RUNS if least != own.least_run]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_decoder_on_judge_model, ""),
        # test_self_speculation_is_timed_beside_the_rivals_where_it_can_be has one that refuses
        pytest.param(refusing, "depth never rises here", marks=pytest.mark.slow),
    ],
)
def test_every_way_to_decode_stands_in_one_table(models, monkeypatch, make, reason) -> None:
    pair = paired(*models, make, FEW)
    pair.routing_rules.comparisons = {TASK: worth()}
    for name, few in (("TRIED_WINDOWS", (1,)), ("LEAST_RUNS", (5,)), ("WIDTHS", (2,)), ("GATES_BITS", (0.3,))):
        monkeypatch.setattr(pair_module, name, few)
    shown = pair_module.make_cost_score_table(pair)
    (table,) = shown.tables
    assert table.title == f"{pair_module.TITLE}, {TASK}"
    rows = {row["decoding"]: row for row in table.rows}
    assert (rows["small alone"]["large-model share %"], rows["large alone"]["large-model share %"]) == (0.0, 1.0)
    assert all(row["tokens/s"] > 0 and row["task"] == TASK for row in table.rows)
    drafting = [name for name in rows if name.startswith("self-speculative")]
    assert len(drafting) == (0 if reason else 2)
    assert all(("speculative" in name) is (row["acceptance %"] is not None) for name, row in rows.items())
    for name in TRANSFORMERS_NAMES:
        assert (rows[name]["score"], rows[name]["MFLOPs per token"]) == (None, None), "there is no record of them"
    assert [reason in note for note in shown.notes] == ([True] if reason else [])
