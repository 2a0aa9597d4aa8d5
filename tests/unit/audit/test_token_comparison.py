"""Comparison of tokens that must be equal: to the end, or to a tie; goldens, recorded and compared."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.teacher_forcing import teacher_force
from emad_ref.exit_rules import softmax_response_point
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from pytest_emad.audit.finding import AuditRefutedError, FirstDifference, Tally
from pytest_emad.audit.reference_logits import LogitLens, token_thresholds
from pytest_emad.audit.token_comparison import (
    BadGoldenError,
    GoldenTokens,
    check_same_tokens,
    compare_golden,
    emitted_depths,
    golden_key,
    is_next_token_tied,
    logit_margins,
    prompts_and_predicted_tokens,
    require_reference_step,
    threshold_distances,
)
from pytest_emad.audit.trajectory import Judge
from tests.small_models import LAYERS as SMALL_LAYERS
from tests.small_models import small_model

LAYERS, TOLERANCE, MANY = 3, 1e-3, 150
PROMPT = Prompt(np.array([1, 2, 3]))
FLAT, SURE = np.zeros(4), np.array([9.0, 0.0, 0.0, 0.0])


def lens(*, near: dict[int, int] | None = None, first_probe: np.ndarray = SURE):
    """Return logits [n, layers, 4] sure of token 0, except at ``near``: position → layer with two close leaders."""

    def logits(tokens):
        given = np.broadcast_to(SURE, (len(tokens), LAYERS, 4)).copy()
        given[:, 0] = first_probe
        for position, layer in (near or {}).items():
            if position < len(tokens):
                given[position, layer - 1, 1] = 9.0 - TOLERANCE / 2
        return given

    return LogitLens(logits)


def test_each_token_that_is_likeliest_has_the_prompt_where_it_leads_most_and_the_rarest_come_first() -> None:
    best = {(7,): (0, 1.0), (7, 8): (2, 1.0), (7, 8, 9): (2, 3.0), (4,): (2, 2.0), (4, 4): (1, 0.5)}

    def logits(tokens):
        given = np.zeros((len(tokens), LAYERS, 4))
        for at in range(len(tokens)):
            token, lead = best[tuple(tokens[: at + 1].tolist())]
            given[at, -1, token] = lead
        return given

    texts = [np.array([7, 8, 9]), np.array([4, 4])]
    prompts, tokens = prompts_and_predicted_tokens(LogitLens(logits), texts, 9)
    assert [(prompt.tokens.tolist(), token) for prompt, token in zip(prompts, tokens, strict=True)] == [
        ([7], [0]),
        ([4, 4], [1]),
        ([7, 8, 9], [2]),
    ]
    assert prompts_and_predicted_tokens(LogitLens(logits), texts, 2)[1] == tokens[:2]


def rows(*different: int, length: int = MANY) -> list[list[int]]:
    row = [0] * length
    for at in different:
        row[at] = 1
    return [row]


def compared(found, wanted, oracle=None, point=None, depths=(None, None), prompts=(PROMPT,)):
    return check_same_tokens(oracle or lens(), TOLERANCE, prompts, found, wanted, point, *depths)


def test_equal_rows_pass_without_a_tie() -> None:
    finding = compared(rows(), rows())
    assert (finding.passed, finding.ties, finding.n) == (True, 0, MANY)
    finding.require()


def test_an_untied_difference_names_the_row_and_both_tokens() -> None:
    prompts, found, wanted = (PROMPT, PROMPT), [*rows(), *rows(7)], [*rows(), *rows()]
    finding = compared(found, wanted, prompts=prompts)
    assert finding.passed is False
    said = (
        "row 1, new token 7: 1 (depth full), but expected 0 (depth full), and no tie excuses it: the two likeliest are"
    )
    assert finding.detail.startswith(said)
    assert finding.detail.endswith(" nats apart")
    assert finding.difference is not None
    assert (finding.difference.emitted, finding.difference.expected) == (1, 0)
    assert finding.difference.position == len(PROMPT.tokens) + 6
    assert f"the two likeliest are {finding.difference.gap_nats:.2g} nats apart" in finding.detail
    with pytest.raises(AuditRefutedError, match="row 1, new token 7"):
        finding.require()


def test_a_short_row_may_end_in_a_tie_where_no_share_is_asked_for() -> None:
    oracle = lens(near={3 + 4 - 1: LAYERS})
    found, wanted = rows(4, length=8), rows(length=8)
    assert check_same_tokens(oracle, TOLERANCE, [PROMPT], found, wanted).passed is False
    assert check_same_tokens(oracle, TOLERANCE, [PROMPT], found, wanted, most_ties=1.0).passed is True
    assert check_same_tokens(lens(), TOLERANCE, [PROMPT], found, wanted, most_ties=1.0).passed is False


def test_a_row_that_ends_early_is_another_text() -> None:
    finding = compared(rows(length=4), rows(length=5))
    assert (finding.passed, finding.detail) == (False, "row 0: 4 tokens, but 5 expected")


def test_two_logits_within_the_tolerance_excuse_the_rest_of_the_row() -> None:
    """Position 9 is after the prompt's three tokens and seven new ones: its logits emit new token 7."""
    finding = compared(rows(7, 8, 100), rows(), lens(near={9: LAYERS}))
    assert (finding.passed, finding.ties) == (True, 1)
    assert finding.detail == f"1 of {MANY} tokens stand after a tie's first difference"
    assert compared(rows(8), rows(), lens(near={9: LAYERS})).passed is False, "the tie is one token earlier"


def test_more_than_one_token_in_a_hundred_tied_is_no_longer_noise() -> None:
    short = 99
    finding = compared(rows(7, length=short), rows(length=short), lens(near={9: LAYERS}))
    assert (finding.passed, finding.ties) == (False, 1)
    assert finding.detail == "1 ties in 99 tokens: more than 1% is no longer noise"


def test_another_depth_is_a_difference_and_logits_are_read_where_it_stopped() -> None:
    found, wanted = [[LAYERS] * MANY], [[LAYERS] * 7 + [2] * (MANY - 7)]
    finding = compared(rows(), rows(), depths=(found, wanted))
    assert finding.detail.startswith("row 0, new token 7: 0 (depth 3), but expected 0 (depth 2), and no tie excuses it")
    assert finding.difference is None, "the tokens are equal"
    assert compared(rows(), rows(), lens(near={9: 2}), depths=(found, wanted)).passed
    assert compared(rows(), rows(), lens(near={9: LAYERS}), depths=(found, wanted)).passed is False


@pytest.mark.parametrize(("off", "passed"), [(TOLERANCE / 2, True), (2 * TOLERANCE, False)])
def test_a_signal_near_its_threshold_is_a_tie_where_depth_is_decided(off, passed) -> None:
    flat = float(np.log(4))  # nats of FLAT
    point = OperatingPoint("p", "quantile", LAYERS, LAYERS, (1,), ((flat + off,),))
    oracle = lens(first_probe=FLAT)
    assert compared(rows(7), rows(), oracle, point).passed is passed
    assert compared(rows(7), rows(), oracle, full_depth(LAYERS)).passed is False, "full depth compares no signal"


def test_what_the_decoder_itself_nearly_emits_otherwise_is_a_tie_under_copied_states() -> None:
    """These logits are not in the lens, which has exact K and V everywhere."""
    stepper = CausalStepper(small_model("gpt_neox", seed=3))
    point = OperatingPoint("p", "quantile", stepper.layers, stepper.layers, (1,), ((4.15,),), "copying")
    decoder, prompt, emitted = WalkedDecoder(stepper, point), Prompt(np.array([5, 9, 2])), [7, 30, 4]
    forced = teacher_force(decoder, TokenSequence(np.array([5, 9, 2, *emitted, 0]), 2))
    session, step = decoder.start([prompt])
    for token in emitted:
        step = session.feed(np.array([[token]]))
    first, second = np.sort(step.logits[0, 0])[[-1, -2]]
    assert set(forced.depth.tolist()) == {1, stepper.layers}, "states are copied, and some token runs all layers"
    far = np.nanmin(np.abs(step.signal[0, 0] - 4.15))
    for tolerance in (0.99, 1.01):
        tied = is_next_token_tied(decoder, point, prompt, emitted, tolerance * min((first - second) / 2, far))
        assert tied is (tolerance > 1)
    for excused in (True, False):
        found = check_same_tokens(
            lens(), TOLERANCE, (PROMPT,), rows(7), rows(), tied_when_decoded=lambda *history, said=excused: said
        )
        assert found.passed is excused


class LensThatRoundsCoarsely(LogitLens):
    """A lens whose rounding moves a logit by up to 5 after ``tokens`` tokens, and no other."""

    def __init__(self, at: int):
        super().__init__(lens().logits)
        object.__setattr__(self, "at", at)

    def max_rounding_error(self, tokens, layers):
        return 5.0 if len(tokens) == self.at else 0.0  # type: ignore[attr-defined]  # two leads of 9 may be off by 5 each


@pytest.mark.parametrize(
    "point", [None, full_depth(LAYERS), OperatingPoint("p", "quantile", LAYERS, LAYERS, (1,), ((-1.0,),))]
)
@pytest.mark.parametrize(("at", "passed"), [(10, True), (9, False)])
def test_two_logits_within_the_rounding_measured_there_excuse_the_rest_of_the_row(at, passed, point) -> None:
    assert compared(rows(7), rows(), LensThatRoundsCoarsely(at), point).passed is passed


GOLDEN_TOLERANCE = 1e-3
GOLDEN = GoldenTokens(
    np.array([[5, 6, 7], [8, 9, 1]]),
    np.array([[4, 4, 2], [4, 2, 2]]),
    np.array([[1.0, 1e-3, 1.0], [1.0, 1.0, 1.0]]),
    np.array([[1.0, 1.0, np.inf], [1.0, 5e-4, 1.0]]),
)


def other(name: str, row: int, at: int, value: int) -> GoldenTokens:
    changed = getattr(GOLDEN, name).copy()
    changed[row, at:] = value
    return replace(GOLDEN, **{name: changed})


def test_the_same_is_the_same_through_json() -> None:
    stored = GoldenTokens.from_json(json.loads(json.dumps(GOLDEN.to_json(), allow_nan=False)))
    finding = compare_golden(stored, GOLDEN, GOLDEN_TOLERANCE)
    assert (finding.passed, finding.n, finding.ties) == (True, 6, 0)
    assert stored.room[0, 2] == np.inf


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (other("token", 0, 0, 3), r"row 0, new token 0: 3 \(4\), but the golden has 5 \(4\), by a margin of 1 logits"),
        (other("token", 0, 2, 3), r"row 0, new token 2: 3 \(2\), but the golden has 7 \(2\)"),
        (
            other("depth", 0, 1, 3),
            r"row 0, new token 1: 6 \(3\), but the golden has 6 \(4\)",
        ),
        (other("depth", 1, 0, 3), r"row 1, new token 0: 8 \(3\)"),
        (replace(GOLDEN, token=GOLDEN.token[:1]), r"but the golden holds \(2, 3\)"),
    ],
)
def test_what_no_rounding_excuses_is_named(found: GoldenTokens, said: str) -> None:
    finding = compare_golden(GOLDEN, found, GOLDEN_TOLERANCE)
    assert finding.passed is False
    assert re.search(said, finding.detail), finding.detail


@pytest.mark.parametrize(
    "found",
    [
        other("token", 0, 1, 3),  # both logits may be off: twice the tolerance
        other("depth", 1, 1, 4),  # a signal next to its threshold
        other("token", 1, 2, 3),  # after this tie the caches differ
    ],
)
def test_what_rounding_excuses_is_a_tie(found: GoldenTokens) -> None:
    finding = compare_golden(GOLDEN, found, GOLDEN_TOLERANCE)
    assert (finding.passed, finding.ties) == (True, 1)
    assert "1 of 2 rows part from the golden at a tie" in finding.detail
    assert compare_golden(GOLDEN, found, GOLDEN_TOLERANCE / 4).passed is False


def test_a_signal_may_be_further_off_than_a_logit() -> None:
    found = other("depth", 1, 1, 4)
    assert compare_golden(GOLDEN, found, GOLDEN_TOLERANCE / 4, noise=2.0).passed is True


def test_many_ties_are_no_longer_rounding() -> None:
    near = replace(GOLDEN, margin=np.zeros((2, 3)))
    found = replace(near, token=near.token + 1)
    finding = compare_golden(near, found, GOLDEN_TOLERANCE)
    assert finding.passed is False
    assert "2 of 2 rows part from the golden at a tie" in finding.detail
    assert compare_golden(near, found, GOLDEN_TOLERANCE, declared=2 * GOLDEN_TOLERANCE).passed is True, (
        "except with declared noise"
    )


@pytest.mark.parametrize("damage", [{"token": None}, {"depth": [[1]]}, {"room": "far"}, {"margin": {}}])
def test_what_is_no_golden_is_said(damage: dict[str, object]) -> None:
    with pytest.raises(BadGoldenError, match="record it anew"):
        GoldenTokens.from_json(GOLDEN.to_json() | damage)
    with pytest.raises(BadGoldenError, match="record it anew"):
        GoldenTokens.from_json({})


def test_ids_tell_what_was_drawn_by_whom() -> None:
    assert golden_key("ab", "float32", "self", 0, "full") == "ab-float32-self-seed-0-full"
    assert golden_key("ab", "float32", "self", 0, "drawn", "torch-2.13") == "ab-float32-self-seed-0-drawn-torch-2.13"


def test_what_is_taken_is_what_was_shown_and_compared() -> None:
    """Margins and rooms by hand, from logits and signals of a session fed the same tokens."""
    point = OperatingPoint("half", "fixed_entropy", SMALL_LAYERS, SMALL_LAYERS, (1, 2), ((3.0, 3.5),))
    decoder = WalkedDecoder(CausalStepper(small_model("gpt_neox")), point, max_rows=2)
    prompts = [Prompt(np.arange(5)), Prompt(np.arange(3))]
    record = decoder.generate(prompts, 6, frozenset())
    margin = logit_margins(decoder, prompts, record.emitted)
    room = threshold_distances(record, point)
    depth = emitted_depths(record)
    for row, prompt in enumerate(prompts):
        session, step = decoder.start([prompt])
        for at, token in enumerate(record.emitted[row]):
            best = torch.tensor(step.logits[0, -1]).topk(2)
            assert int(best.indices[0]) == token
            assert margin[row, at] == pytest.approx(float(best.values[0] - best.values[1]))
            assert depth[row, at] == step.depth[0, -1]
            read = np.abs(step.signal[0, -1] - np.array(point.thresholds[0]))
            assert room[row, at] == pytest.approx(np.nanmin(np.append(read, np.inf)))
            step = session.feed(np.array([[token]]))


@pytest.mark.parametrize("shape", [(0,), (1,), ()], ids=str)
def test_a_record_without_a_signal_for_each_probe_is_named(shape: tuple[int, ...]) -> None:
    point = OperatingPoint("half", "fixed_entropy", SMALL_LAYERS, SMALL_LAYERS, (1, 2), ((3.0, 3.5),))
    decoder = WalkedDecoder(CausalStepper(small_model("gpt_neox")), point)
    record = decoder.generate([Prompt(np.arange(5))], 2, frozenset())
    without = replace(record, signal=np.zeros((len(record.tokens), *shape)))
    with pytest.raises(AuditRefutedError, match=r"record.signal has shape .*, but \[6, 2\] was expected; NaN stands"):
        threshold_distances(without, point)


# ---------------------------------------------------------------- a step beside the reference decoder's

AT_STEP = OperatingPoint("p", "quantile", LAYERS, LAYERS, (1,), ((1.0,),))
SHOWN = np.array([0.0, 5.0, 5.0 - TOLERANCE, 0.0])


@pytest.mark.parametrize(
    ("signal", "depth", "logits", "emitted", "said"),
    [
        (0.5, 1, SHOWN, 1, None),
        (0.5, 2, None, None, "depth 2, but the reference decoder takes depth 1"),
        (1.0 - TOLERANCE / 2, 2, None, None, None),
        (0.5, 1, SHOWN + 2 * TOLERANCE, None, "logits off by"),
        (0.5, 1, np.where(SHOWN == 0, np.nan, SHOWN), None, "logits off by nan"),
        (0.5, 1, None, 2, None),
        (0.5, 1, None, 3, r"emitted 3, but the reference decoder 1, which leads by 5 logits"),
    ],
)
def test_a_step_is_the_reference_decoders_up_to_a_tie(signal, depth, logits, emitted, said) -> None:
    judge = Judge(Tally("step", needed=0), None, AT_STEP, TOLERANCE)
    with judge.tally as tally:
        same = require_reference_step(judge, "here", np.array([[signal]]), (1, SHOWN), depth, logits, emitted, 7)
        assert same is (depth == 1)
    assert tally.n == 1
    if said is None:
        assert tally.complaint is None
        assert tally.ties == (depth != 1) + (emitted == 2)
    else:
        assert re.search(f"^here: {said}", tally.complaint or "")
    assert tally.difference == (FirstDifference(7, 3, 1, 5.0) if emitted == 3 else None)


def test_thresholds_that_decay_are_compared_at_the_rows_own_position() -> None:
    point = softmax_response_point(LAYERS, (1,), 0.9)
    point = replace(point, decay=(1.0, 1.0))
    late = float(token_thresholds(point, np.zeros(3, dtype=np.int64))[-1, 0])
    signals = np.array([[0.0], [0.0], [late]])
    judge = Judge(Tally("step", needed=0), None, point, TOLERANCE)
    assert require_reference_step(judge, "here", signals, (1, SHOWN), 2) is False
    with pytest.raises(AuditRefutedError, match="no tie excuses it"):
        require_reference_step(judge, "here", signals[-1:], (1, SHOWN), 2)
