"""Spot checks of the answers behind verdicts and of timed requests: right ones pass, wrong ones are named."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.protocol import Prompt, Step
from emad_ref.record import Ints, Record
from pytest_emad.audit.decoding_checks import require_record_matches_lens
from pytest_emad.audit.finding import Finding, Tally
from pytest_emad.audit.spot_checks import (
    KEPT_REQUESTS,
    AuditedDecoder,
    TimedRequestOutputs,
    check_speedup_explained,
    check_timed_lengths,
    check_timed_requests,
)
from pytest_emad.audit.trajectory import Judge
from tests.decoders.audited_model import LAYERS as TINY_LAYERS
from tests.decoders.audited_model import VOCABULARY as TINY_VOCABULARY
from tests.decoders.audited_model import drawn, lens_of, spread_point, tiny_neox
from tests.decoders.cached_decoder import CachedDecoder, CachedSession
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.decoders.planted_defects import DEFECTS
from tests.small_models import LAYERS, VOCABULARY, small_model

TOLERANCE, NEW = 1e-9, 6
PROMPTS, CONTINUATION = drawn((4, 1, 6, 3), 8)
POINT = spread_point()


class OtherLastToken(CachedDecoder):
    """Changes the last token of the last row."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        record = super().generate(prompts, max_new, stop)
        record.emitted[-1][-1] = (record.emitted[-1][-1] + 1) % 101
        return record


class OneShort(CachedDecoder):
    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        return super().generate(prompts, max_new - 1, stop)


class OffByOne(CachedSession):
    """Shows, in feeds, the logits of the neighbours in the vocabulary."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        return replace(step, logits=np.roll(step.logits, 1, axis=-1))


class ShowsOthers(CachedDecoder):
    session = OffByOne


def audited(decoder: CachedDecoder) -> AuditedDecoder:
    lens = lens_of(tiny_neox())
    return AuditedDecoder(decoder, POINT, lambda source: lens, TOLERANCE, lambda: pytest.fail("the lens says it"))


def generated(decoder: AuditedDecoder) -> None:
    for _ in range(2 * KEPT_REQUESTS):
        decoder.generate(PROMPTS, NEW, frozenset())


def fed(decoder: AuditedDecoder) -> None:
    """Rows are dropped, tokens rolled back, depths forced: the rest of each session is still checked."""
    for _ in range(KEPT_REQUESTS):
        session, _ = decoder.start(PROMPTS)
        session.feed(CONTINUATION[:, :1])
        length = session.length.copy()
        session.feed(CONTINUATION[:, 1:2])
        session.rollback(length)
        session.feed(CONTINUATION[:, 2:3], session.cap[:, None].copy())
        session.drop(np.array([1]))
        session.feed(CONTINUATION[[0, 2, 3], 3:4])
        session.close()


@pytest.mark.parametrize("ask", [generated, fed])
def test_right_answers_pass(ask: Callable[[AuditedDecoder], None]) -> None:
    decoder = audited(CachedDecoder(tiny_neox(), POINT))
    ask(decoder)
    finding = decoder.check_kept_answers()
    assert finding.passed is True, finding.detail
    assert finding.n > 0


@pytest.mark.parametrize(
    ("made", "ask", "said"),
    [
        (OtherLastToken, generated, r"row 3, position \d+, depth \d+: emitted \d+, but the argmax"),
        (OneShort, generated, r"row 0: 5 tokens and 'length', but max_new=6"),
        (ShowsOthers, fed, r"session, row \d, position \d+, depth \d+: logits off"),
    ],
)
def test_wrong_answers_are_named(made: type[CachedDecoder], ask: Callable[[AuditedDecoder], None], said: str) -> None:
    decoder = audited(made(tiny_neox(), POINT))
    ask(decoder)
    finding: Finding = decoder.check_kept_answers()
    assert finding.passed is False
    assert re.search(f"of the answers that this verdict reads, {said}", finding.detail), finding


def test_a_decoder_that_is_asked_nothing_is_not_complained_of() -> None:
    assert audited(CachedDecoder(tiny_neox(), POINT)).check_kept_answers().passed is True


def test_which_answers_are_kept_follows_no_seed() -> None:
    """Eight of sixteen requests are checked, different ones in each run."""
    kept = set()
    for _ in range(20):
        np.random.default_rng(0)
        decoder = audited(CachedDecoder(tiny_neox(), POINT))
        kept.add(tuple(decoder._place(number, KEPT_REQUESTS) for number in range(1, 3 * KEPT_REQUESTS)))
    assert len(kept) > 1


# ---------------------------------------------------------------- copied states above an exit


def copying(changed: float = 0.0) -> Finding:
    """Return the finding on a ``copying`` decoder whose thresholds differ by ``changed``."""
    stepper = CausalStepper(small_model("gpt_neox", seed=3))
    asked = OperatingPoint("c", "quantile", LAYERS, LAYERS, (1, 3), ((4.0, 4.0),), "copying")
    theirs = replace(asked, thresholds=tuple(tuple(one + changed for one in row) for row in asked.thresholds))
    decoder = AuditedDecoder(
        WalkedDecoder(stepper, theirs, max_rows=3), asked, lambda source: pytest.fail("the lens says nothing"), 1e-6,
        lambda: WalkedDecoder(stepper, asked),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [Prompt(rng.integers(0, VOCABULARY, n)) for n in (3, 1, 5)]
    decoder.generate(prompts, NEW, frozenset())
    session, _ = decoder.start(prompts)
    session.feed(rng.integers(0, VOCABULARY, (3, 4)))
    session.feed(rng.integers(0, VOCABULARY, (3, 2)), np.full((3, 2), LAYERS - 1))  # the rule exits nowhere so deep
    return decoder.check_kept_answers()


def test_where_states_are_made_up_a_decoder_of_ours_is_asked_the_same() -> None:
    finding = copying()
    assert finding.passed is True, finding.detail
    assert finding.n >= 2 * NEW
    finding = copying(changed=10.0)
    assert finding.passed is False
    assert re.search(
        r"position \d+, depth \d+: depth \d+, but the reference decoder takes depth \d+", finding.detail
    ), finding


# ---------------------------------------------------------------- timed requests

TIMED_NEW = 12
TIMED_PROMPTS, _ = drawn((6, 6, 6), 1)
POINTS = {"full": full_depth(TINY_LAYERS), "adaptive": POINT}


def emitted_by(decoder: type, rows: int = 3) -> TimedRequestOutputs:
    """Return one request's outputs: an honest full depth, ``decoder`` at the point, and full depth without a record."""
    model, prompts = tiny_neox(), TIMED_PROMPTS[:rows]
    full = CachedDecoder(model, POINTS["full"]).generate(prompts, TIMED_NEW, frozenset())
    adaptive = decoder(model, POINT).generate(prompts, TIMED_NEW, frozenset())
    return TimedRequestOutputs(prompts, {"full": full, "adaptive": adaptive}, {"generate": full.emitted})


def judged(request: TimedRequestOutputs, *, counted: bool = True, rows: list[int] | None = None) -> Finding:
    noise = dict.fromkeys(("full", "adaptive", "generate"), TOLERANCE)
    return check_timed_requests([request], POINTS, TIMED_NEW, lens_of(tiny_neox()), noise, counted=counted, rows=rows)


def with_record(request: TimedRequestOutputs, **changes: object) -> TimedRequestOutputs:
    changed = replace(request.records["adaptive"], **changes)
    return replace(request, records=dict(request.records) | {"adaptive": changed})


@pytest.fixture(scope="module")
def honest() -> TimedRequestOutputs:
    return emitted_by(CachedDecoder)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_honest_request_passes(rows: int) -> None:
    finding = judged(emitted_by(CachedDecoder, rows))
    assert finding.passed is True, finding.detail
    assert finding.n == 3 * rows * TIMED_NEW
    assert finding.ties == 0


def test_a_decoder_that_does_not_count_is_judged_by_tokens_and_depths() -> None:
    assert judged(emitted_by(ForeignDecoder), counted=False).passed is True
    assert "reports model 0" in judged(emitted_by(ForeignDecoder)).detail


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("full-depth tokens in generate only", "adaptive, row 0"),
        ("probes left out of the work", "work.readout_rows"),
        ("depth rises behind a false cap", "adaptive, row"),
        ("truncated generation", "9 tokens"),
    ],
)
def test_a_decoder_that_lies_where_it_is_timed_is_named(defect: str, said: str) -> None:
    decoder, _ = DEFECTS[defect]
    finding = judged(emitted_by(decoder, rows=1))
    assert finding.passed is False
    assert said in finding.detail


def test_another_token_is_found_in_an_arm_without_a_record(honest: TimedRequestOutputs) -> None:
    tokens = [row.copy() for row in honest.emitted["generate"]]
    tokens[2][TIMED_NEW - 1] = (tokens[2][TIMED_NEW - 1] + 1) % TINY_VOCABULARY
    finding = judged(replace(honest, emitted={"generate": tokens}))
    assert finding.passed is False
    assert "generate, row 2" in finding.detail
    assert "the argmax at that depth" in finding.detail


def test_work_of_half_the_tokens_is_found(honest: TimedRequestOutputs) -> None:
    work = honest.records["adaptive"].work[0]
    finding = judged(with_record(honest, work={0: replace(work, tokens=work.tokens // 2)}))
    assert finding.passed is False
    assert "work.tokens" in finding.detail


def test_of_many_rows_some_are_held_against_the_lens_and_all_against_the_ledger(honest: TimedRequestOutputs) -> None:
    emitted = [row.copy() for row in honest.emitted["generate"]]
    emitted[0][TIMED_NEW - 1] = (emitted[0][TIMED_NEW - 1] + 1) % TINY_VOCABULARY
    assert judged(replace(honest, emitted={"generate": emitted}), rows=[1, 2]).passed is True, "row 0 is not checked"
    work = honest.records["adaptive"].work[0]
    short = with_record(honest, work={0: replace(work, tokens=work.tokens * 2 // 3)})
    assert judged(short, rows=[1]).passed is False


def test_rows_are_not_chosen_where_the_lens_has_to_count() -> None:
    pruned = replace(POINT, estimator=EntropyEstimator("topk", k=4))
    record = CachedDecoder(tiny_neox(), POINT).generate(TIMED_PROMPTS, TIMED_NEW, frozenset())
    judge = Judge(Tally("t"), lens_of(tiny_neox()), pruned, TOLERANCE)
    with pytest.raises(BadArgument, match=r"rows=\[0\], but expected None"):
        require_record_matches_lens(judge, record, TIMED_PROMPTS, TIMED_NEW, rows=[0])


def test_ties_are_counted_and_excused_however_many(
    honest: TimedRequestOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_tied(judge: Judge, *_: object) -> None:
        judge.tally.ties += TIMED_NEW

    monkeypatch.setattr(Judge, "require_tokens_are_argmax", all_tied)
    finding = judged(replace(honest, records={}))
    assert (finding.passed, finding.ties) == (True, 3 * TIMED_NEW)
    assert finding.detail == f"{3 * TIMED_NEW} positions compared, {3 * TIMED_NEW} ties"


def test_lengths_are_those_asked_for_in_every_request() -> None:
    whole = [np.zeros(TIMED_NEW, dtype=np.int64)] * 2
    assert check_timed_lengths({"full": [whole] * 5, "generate": [whole] * 5}, 2, TIMED_NEW).passed is True
    short = [whole[0], whole[0][:-1]]
    finding = check_timed_lengths({"full": [whole] * 5, "generate": [whole, short]}, 2, TIMED_NEW)
    assert finding.passed is False
    assert "generate, request 1: [12, 11] new tokens, but 12" in finding.detail
    assert check_timed_lengths({"full": [whole[:1]]}, 2, TIMED_NEW).passed is False, "a row is missing"


def test_a_record_may_be_read_twice(honest: TimedRequestOutputs) -> None:
    assert isinstance(honest.records["full"], Record)
    assert judged(honest) == judged(honest)


@pytest.mark.parametrize(
    ("ratio", "left_out", "passed"),
    [
        (3.0, 0.2, False),  # three times as fast with a fifth less work
        (1.8, 0.2, True),
        (3.9, 0.75, True),  # a quarter of the layers
        (0.7, 0.2, True),
    ],
)
def test_a_speed_is_explained_by_the_work_left_out(ratio: float, left_out: float, passed: bool) -> None:
    """A pause of the machine in one pair of five proves nothing."""
    full = np.array([1.0, 1.1, 0.9, 1.0, 40.0])
    seconds = {"full": full, "adaptive": np.append(full[:4] / ratio, 1.0)}
    work = np.full((5, 2), 1000.0)
    finding = check_speedup_explained("adaptive", "full", 1, seconds, {"full": work, "adaptive": work * (1 - left_out)})
    assert finding.passed is passed, finding.detail
    assert ("explains at most" in finding.detail) is not passed


@pytest.mark.parametrize(("by_pair", "passed"), [([1.7, 1.0, 1.9], True), ([1.7, 1.6, 1.9], False)])
def test_a_busy_machine_is_not_a_slowed_full_depth(by_pair: list[float], passed: bool) -> None:
    """With few pairs, the work has to explain the smallest ratio."""
    seconds, work = {"full": np.array(by_pair), "adaptive": np.ones(3)}, np.full((3, 2), 1000.0)
    assert check_speedup_explained("adaptive", "full", 1, seconds, {"full": work, "adaptive": work}).passed is passed


def test_drafted_work_says_nothing_of_time() -> None:
    seconds, unknown = {"full": np.ones(3), "adaptive": np.ones(3) / 9}, np.full((3, 2), np.nan)
    assert check_speedup_explained(
        "adaptive", "full", 1, seconds, {"full": np.ones((3, 2)), "adaptive": unknown}
    ).passed
