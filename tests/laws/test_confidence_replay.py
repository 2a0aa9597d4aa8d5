"""Replay of confidence rules equals decoding in signals, emitted tokens and work (exact schedules)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emad_ref.calibration import confidence_columns
from emad_ref.calibration.confidence_columns import ConfidenceColumnsKey
from emad_ref.calibration.trace import Trace, concatenate_traces, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import DECAY_FORMS, OperatingPoint, ScheduleName
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, READOUTS, Floats, Ints, Work
from emad_ref.replay.replay import (
    compute_decode_flops_by_sequence,
    compute_decode_work,
    iterate_point_replays,
    replay,
)
from tests.laws.test_confidence import RULES as EVERY_RULE
from tests.plain_forms import decode_and_prompt_work
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5, some_sources

pytestmark = pytest.mark.each_value

RULES = {name: point for name, point in EVERY_RULE.items() if point.confidence is not None}
SCHEDULES: tuple[ScheduleName, ...] = ("monotone", "free_eager", "free_deferred")
STORED = 1e-5  # traces hold float32, and take a full head's log-softmax in float32
FULL, SUBSET = READOUTS.index("full"), READOUTS.index("subset")
FAMILIES = (
    "gpt_neox",
    "opt_350m",
    "t5",
)  # heads of d·V, with a projection before the head, and of a decoder that reads a source


@cache
def stepper_of(family: str) -> Stepper:
    return Seq2SeqStepper(small_t5()) if family == "t5" else CausalStepper(small_model(family))


@cache
def texts(family: str) -> list[TokenSequence]:
    rng = np.random.default_rng(1)
    sources = some_sources(9, 4) if family == "t5" else [None, None]
    lengths = ((22, 0), (18, 5))
    return [
        TokenSequence(rng.integers(0, VOCABULARY, n), start, source=source)
        for (n, start), source in zip(lengths, sources, strict=True)
    ]


@cache
def trace_of(family: str) -> Trace:
    return take_trace(stepper_of(family), texts(family), rules=RULES.values())


def firing(trace: Trace, point: OperatingPoint, schedule: ScheduleName, quantile: float) -> OperatingPoint:
    """Return thresholds that a share 1 − ``quantile`` of all tokens pass at each deciding layer."""
    seen = trace.confidence_rule_columns(point).signal[:, np.array(point.probes) - 1]
    levels = [
        math.inf if old == math.inf else float(np.quantile(column, quantile))
        for column, old in zip(seen.T, point.thresholds[0], strict=True)
    ]
    return replace(point, thresholds=(tuple(levels),), schedule=schedule)


def decoded(stepper: Stepper, point: OperatingPoint, sequence: TokenSequence) -> tuple[Ints, Floats, Work]:
    """Decode with teacher forcing: (depth [n], logits [n, V], work)."""
    start = sequence.first_decided
    session, step = WalkedDecoder(stepper, point).start([Prompt(sequence.tokens[: start + 1], sequence.source)])
    steps = [step, *(session.feed(token[None, None]) for token in sequence.tokens[start + 1 : -1])]
    work = session.work
    session.close()
    return np.array([int(s.depth[0, 0]) for s in steps]), np.stack([s.logits[0, 0] for s in steps]), work


def nats(logits: Floats, targets: Ints) -> Floats:
    log_p = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    return -log_p[np.arange(len(targets)), targets]


def require_equal(family: str, trace: Trace, point: OperatingPoint) -> Ints:
    """Decode every text, compare replay with it, and return the depths."""
    found, counted = replay(trace, point), []
    for number, sequence in enumerate(texts(family)):
        rows = slice(trace.starts[number], trace.starts[number + 1])
        depth, logits, work = decoded(stepper_of(family), point, sequence)
        assert depth.tolist() == found.depth[rows].tolist()
        nll = nats(logits, sequence.tokens[sequence.first_decided + 1 :])
        assert np.isinf(nll).tolist() == np.isinf(found.nll_nats[rows]).tolist()
        assert np.allclose(nll, found.nll_nats[rows], atol=STORED, rtol=0)
        assert logits.argmax(axis=1).tolist() == found.top1[rows].tolist()
        counted.append(work)
    if family != "t5":  # the cost of a source is counted, not derived
        decode, prompt = decode_and_prompt_work(trace, point, found.depth, found.macs_per_row)
        geometry = stepper_of(family).geometry
        assert compute_decode_flops_by_sequence(trace, found, geometry).sum() == flops(decode, geometry).total
        whole = sum(counted, Work.none(LAYERS))
        assert whole == decode + prompt, whole.describe_difference(decode + prompt)
    return found.depth


@pytest.fixture(params=RULES)
def named(request: pytest.FixtureRequest) -> OperatingPoint:
    return RULES[request.param]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_of_a_rule_is_decoding_under_it(named: OperatingPoint, family: str, schedule: ScheduleName) -> None:
    """Compares depth, loss, likeliest token, and the Work that replay derives."""
    trace = trace_of(family)
    depth = require_equal(family, trace, firing(trace, named, schedule, 0.95 if schedule == "monotone" else 0.7))
    assert len(set(depth.tolist())) > 1, "the point must discriminate"


@settings(max_examples=15)
@given(st.data())
def test_replay_of_drawn_thresholds_is_decoding_under_them(data: st.DataObject) -> None:
    named, schedule = data.draw(st.sampled_from(list(RULES))), data.draw(st.sampled_from(SCHEDULES))
    levels = st.one_of(st.just(math.inf), st.floats(0, 1, width=32))
    point = RULES[named]
    row = tuple(math.inf if old == math.inf else data.draw(levels) for old in point.thresholds[0])
    falls = data.draw(st.sampled_from([{}, *({"decay": (20.0, 40.0), "decay_form": form} for form in DECAY_FORMS)]))
    require_equal("gpt_neox", trace_of("gpt_neox"), replace(point, thresholds=(row,), schedule=schedule, **falls))


@pytest.mark.parametrize("name", ["fixed", "decaying", "jsd fixed"])
def test_a_pruned_rule_loses_some_next_tokens_for_good(name: str) -> None:
    trace, point = trace_of("gpt_neox"), RULES[name]
    found = replay(trace, firing(trace, point, "free_eager", 0.3))
    assert 0 < np.isinf(found.nll_nats).mean() < 1
    assert (found.top1[np.isinf(found.nll_nats)] != trace.target[np.isinf(found.nll_nats)]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_rule_emits_is_what_replay_sees_in_its_own_text(named: OperatingPoint, schedule: ScheduleName) -> None:
    stepper, prompt = stepper_of("gpt_neox"), np.array([5, 9, 2, 44])
    point = firing(trace_of("gpt_neox"), named, schedule, 0.9 if schedule == "monotone" else 0.6)
    record = WalkedDecoder(stepper, point).generate([Prompt(prompt)], 12, frozenset())
    history = np.concatenate([prompt, record.emitted[0]])
    trace = take_trace(stepper, [TokenSequence(history, len(prompt) - 1)], rules=[point])
    found = replay(trace, point)
    assert found.depth.tolist() == record.tokens.select_sequence(0, DECODE).depth.tolist()
    assert found.top1.tolist() == record.emitted[0].tolist()


def below(point: OperatingPoint) -> OperatingPoint:
    """Return the rule under a ceiling one layer below the model's last."""
    assert point.confidence is not None, "one of RULES"
    confidence = replace(point.confidence, kept=point.confidence.kept[:-1])
    probes, row = point.probes[:-1], point.thresholds[0][:-1]
    return replace(point, ceiling=LAYERS - 1, probes=probes, thresholds=(row,), confidence=confidence)


@pytest.mark.parametrize("name", ["saturation", "jsd", "fixed"])
def test_a_ceiling_below_the_last_layer_makes_another_rule(name: str) -> None:
    """It emits a full head at its ceiling, where the uncut rule emits its own distribution."""
    point = below(RULES[name])
    with pytest.raises(BadArgument, match=r"^point\.confidence="):
        replay(trace_of("gpt_neox"), replace(point, schedule="monotone"))
    trace = take_trace(stepper_of("gpt_neox"), texts("gpt_neox"), rules=[point])
    depth = require_equal("gpt_neox", trace, firing(trace, point, "free_deferred", 0.7))
    assert len(set(depth.tolist())) > 1
    assert max(depth) == LAYERS - 1


def test_many_rules_replayed_together_are_replayed_each_alone() -> None:
    trace = trace_of("gpt_neox")
    points = [firing(trace, point, schedule, 0.8) for point in RULES.values() for schedule in SCHEDULES]
    for together, point in zip(iterate_point_replays(trace, points), points, strict=True):
        alone = replay(trace, point)
        assert together.depth.tolist() == alone.depth.tolist()
        assert together.nll_nats.tolist() == alone.nll_nats.tolist()


# ---------------------------------------------------------------- the columns


def test_a_rule_is_recorded_once_whatever_its_thresholds_and_its_schedule() -> None:
    points = [
        replace(RULES["jsd"], thresholds=((math.inf, *(λ,) * 3),), schedule=schedule)
        for λ in (0.1, 0.9)
        for schedule in SCHEDULES
    ]
    trace = take_trace(stepper_of("gpt_neox"), texts("gpt_neox")[:1], rules=points)
    assert list(trace.rules) == [ConfidenceColumnsKey.from_point(points[0])]
    assert all(trace.confidence_rule_columns(point) is trace.confidence_rule_columns(points[0]) for point in points)


def test_columns_do_not_depend_on_how_many_tokens_are_read_at_a_time(
    named: OperatingPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = trace_of("gpt_neox").confidence_rule_columns(named)
    monkeypatch.setattr(confidence_columns, "FEWEST_TOKENS", 3)
    monkeypatch.setattr(confidence_columns, "LOGITS_AT_A_TIME", 1)
    apart = take_trace(stepper_of("gpt_neox"), texts("gpt_neox"), rules=[named]).confidence_rule_columns(named)
    for column in ("signal", "nll_nats"):
        assert np.allclose(getattr(apart, column), getattr(together, column), atol=STORED, rtol=0, equal_nan=True)
    for column in ("top1", "macs", "heads", "shows"):
        assert np.array_equal(getattr(apart, column), getattr(together, column))


def test_columns_of_texts_apart_join_to_those_of_texts_together(named: OperatingPoint) -> None:
    parts = [take_trace(stepper_of("gpt_neox"), [text], rules=[named]) for text in texts("gpt_neox")]
    whole, together = (
        concatenate_traces(parts).confidence_rule_columns(named),
        trace_of("gpt_neox").confidence_rule_columns(named),
    )
    for column in ("signal", "nll_nats"):
        assert np.allclose(getattr(whole, column), getattr(together, column), atol=STORED, rtol=0, equal_nan=True)
    for column in ("top1", "macs", "heads", "shows"):
        assert np.array_equal(getattr(whole, column), getattr(together, column))


def test_at_layers_that_a_rule_does_not_read_the_full_head_speaks(named: OperatingPoint) -> None:
    trace = trace_of("gpt_neox")
    unread = [layer - 1 for layer in range(1, LAYERS + 1) if layer not in named.probes]
    columns = trace.confidence_rule_columns(named)
    assert LAYERS - 1 in unread
    assert np.isnan(columns.signal[:, unread]).all()
    assert np.array_equal(columns.nll_nats[:, unread], trace.nll_nats[:, unread])
    assert np.array_equal(columns.top1[:, unread], trace.top1[:, unread])
    assert not columns.heads[:, unread].any()
    assert not columns.shows[unread].any()


def test_a_rule_that_was_not_traced_is_refused(named: OperatingPoint) -> None:
    trace, point = take_trace(stepper_of("gpt_neox"), texts("gpt_neox")), replace(named, schedule="monotone")
    expected = r"^point\.confidence=.*, but expected one that this trace records \(none\); trace it too"
    with pytest.raises(BadArgument, match=expected):
        replay(trace, point)
    with pytest.raises(BadArgument, match=expected):
        compute_decode_work(trace, np.full(len(trace), LAYERS), point)


def test_copied_states_are_refused_though_the_rule_is_traced(named: OperatingPoint) -> None:
    trace, point = trace_of("gpt_neox"), replace(named, schedule="copying")
    with pytest.raises(BadArgument, match="copied states are decoded, not replayed"):
        replay(trace, point)


def test_a_point_without_a_confidence_is_no_rule_to_trace() -> None:
    with pytest.raises(BadArgument, match=r"^point\.confidence=None, but expected a confidence; any trace decides"):
        take_trace(stepper_of("gpt_neox"), texts("gpt_neox"), rules=[EVERY_RULE["response"]])
