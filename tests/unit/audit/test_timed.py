"""What was emitted while a clock ran is judged by itself: an honest record passes, and each lie is named by its arm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.audit import tolerance
from emad_ref.audit.answers import TimedRequest, no_faster_than_work, timed_lengths, timed_requests
from emad_ref.audit.decoding_checks import judge_record
from emad_ref.audit.finding import Finding, Tally
from emad_ref.audit.trajectory import Judge
from emad_ref.errors import BadArgument
from emad_ref.point import Estimator, full_depth
from emad_ref.record import Record
from tests.decoders.cached import CachedDecoder
from tests.decoders.defective import DEFECTS
from tests.decoders.foreign import ForeignDecoder
from tests.decoders.subject import LAYERS, VOCABULARY, drawn, lens_of, spread_point, tiny_neox

TOLERANCE = tolerance("gpt_neox", "float64", "cpu")
NEW, POINT = 12, spread_point()
PROMPTS, _ = drawn((6, 6, 6), 1)
POINTS = {"full": full_depth(LAYERS), "adaptive": POINT}


def emitted_by(decoder: type, rows: int = 3) -> TimedRequest:
    """One request as arms made it: an honest full depth, ``decoder`` at the point, and full depth without a record."""
    model, prompts = tiny_neox(), PROMPTS[:rows]
    full = CachedDecoder(model, POINTS["full"]).generate(prompts, NEW, frozenset())
    adaptive = decoder(model, POINT).generate(prompts, NEW, frozenset())
    return TimedRequest(prompts, {"full": full, "adaptive": adaptive}, {"generate": full.emitted})


def judged(request: TimedRequest, *, counted: bool = True, rows: list[int] | None = None) -> Finding:
    noise = dict.fromkeys(("full", "adaptive", "generate"), TOLERANCE)
    return timed_requests([request], POINTS, NEW, lens_of(tiny_neox()), noise, counted=counted, rows=rows)


def with_record(request: TimedRequest, **changes: object) -> TimedRequest:
    changed = replace(request.records["adaptive"], **changes)
    return replace(request, records=dict(request.records) | {"adaptive": changed})


@pytest.fixture(scope="module")
def honest() -> TimedRequest:
    return emitted_by(CachedDecoder)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_honest_request_passes(rows: int) -> None:
    finding = judged(emitted_by(CachedDecoder, rows))
    assert finding.passed is True, finding.detail
    assert finding.n == 3 * rows * NEW
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


def test_another_token_is_found_in_an_arm_without_a_record(honest: TimedRequest) -> None:
    tokens = [row.copy() for row in honest.emitted["generate"]]
    tokens[2][NEW - 1] = (tokens[2][NEW - 1] + 1) % VOCABULARY
    finding = judged(replace(honest, emitted={"generate": tokens}))
    assert finding.passed is False
    assert "generate, row 2" in finding.detail
    assert "the argmax at that depth" in finding.detail


def test_work_of_half_the_tokens_is_found(honest: TimedRequest) -> None:
    work = honest.records["adaptive"].work[0]
    finding = judged(with_record(honest, work={0: replace(work, tokens=work.tokens // 2)}))
    assert finding.passed is False
    assert "work.tokens" in finding.detail


def test_of_many_rows_some_are_held_against_the_lens_and_all_against_the_ledger(honest: TimedRequest) -> None:
    emitted = [row.copy() for row in honest.emitted["generate"]]
    emitted[0][NEW - 1] = (emitted[0][NEW - 1] + 1) % VOCABULARY
    assert judged(replace(honest, emitted={"generate": emitted}), rows=[1, 2]).passed is True, "row 0 is not looked at"
    work = honest.records["adaptive"].work[0]
    short = with_record(honest, work={0: replace(work, tokens=work.tokens * 2 // 3)})
    assert judged(short, rows=[1]).passed is False


def test_rows_are_not_chosen_where_the_lens_has_to_count() -> None:
    pruned = replace(POINT, estimator=Estimator("topk", k=4))
    record = CachedDecoder(tiny_neox(), POINT).generate(PROMPTS, NEW, frozenset())
    judge = Judge(Tally("t"), lens_of(tiny_neox()), pruned, TOLERANCE)
    with pytest.raises(BadArgument, match=r"rows=\[0\], but expected None"):
        judge_record(judge, record, PROMPTS, NEW, rows=[0])


def test_ties_are_counted_and_excused_however_many(honest: TimedRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_tied(judge: Judge, *_: object) -> None:
        judge.tally.ties += NEW

    monkeypatch.setattr(Judge, "tokens", all_tied)
    finding = judged(replace(honest, records={}))
    assert (finding.passed, finding.ties) == (True, 3 * NEW)
    assert finding.detail == f"{3 * NEW} positions compared, {3 * NEW} ties"


def test_lengths_are_those_asked_for_in_every_request() -> None:
    whole = [np.zeros(NEW, dtype=np.int64)] * 2
    assert timed_lengths({"full": [whole] * 5, "generate": [whole] * 5}, 2, NEW).passed is True
    short = [whole[0], whole[0][:-1]]
    finding = timed_lengths({"full": [whole] * 5, "generate": [whole, short]}, 2, NEW)
    assert finding.passed is False
    assert "generate, request 1: [12, 11] new tokens, but 12" in finding.detail
    assert timed_lengths({"full": [whole[:1]]}, 2, NEW).passed is False, "a row is missing"


def test_a_record_may_be_read_twice(honest: TimedRequest) -> None:
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
    """One pair in five in which the machine paused says nothing."""
    full = np.array([1.0, 1.1, 0.9, 1.0, 40.0])
    seconds = {"full": full, "adaptive": np.append(full[:4] / ratio, 1.0)}
    work = np.full((5, 2), 1000.0)
    finding = no_faster_than_work("adaptive", "full", 1, seconds, {"full": work, "adaptive": work * (1 - left_out)})
    assert finding.passed is passed, finding.detail
    assert ("explains at most" in finding.detail) is not passed


def test_drafted_work_says_nothing_of_time() -> None:
    seconds, unknown = {"full": np.ones(3), "adaptive": np.ones(3) / 9}, np.full((3, 2), np.nan)
    assert no_faster_than_work("adaptive", "full", 1, seconds, {"full": np.ones((3, 2)), "adaptive": unknown}).passed
