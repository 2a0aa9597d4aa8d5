"""Requests as users send them: shared prefixes, temperatures at once, streams. ``test_pairs`` has all else.

No test forces a depth. Cases ``full`` run at full depth through ``generate`` alone, so they also judge a decoder
that offers neither exits nor sessions, such as an engine behind a URL. Cases ``sessions`` add sessions at full depth.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import pytest

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Unsupported
from pytest_emad.audit.requests import check_and_time_streams, check_temperatures_at_once
from pytest_emad.audit.sampling import draw_temperature
from pytest_emad.audit.shared_prefixes import VARIATIONS, check_nested_prompts, check_shared_prefixes
from pytest_emad.benchmark.arrivals import stream_latency_rows
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.report.provenance import STREAMING
from pytest_emad.report.tables import STREAM_TIMES
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate

NEW, BATCHED = 12, 8  # new tokens of a row, and of one of many beginnings
TOLD_APART, DIFFERENT = 32, 3  # new tokens, and prompts that they must tell apart, where no signal is read
FIRST_NEW = 8  # new tokens that our own decoder is asked for first
FEWEST_VARIATIONS = 8  # of a prompt: replaced and exchanged tokens
SHARED = (12, 40)  # tokens of a prompt that others share the beginning of
SHARED_BLOCKS = (136, 200)  # the same, of several blocks of any usual prefix cache (16 to 64 tokens)
SHARED_HALVES = (264, 320)  # the same, of two blocks of the largest usual ones (128 tokens)
NESTED = 200  # tokens of a text of which a request holds many beginnings: some blocks of usual sizes
UNSEEN = 4  # random ids before them, so that no cache holds them
BETWEEN = 4  # new tokens where exits are probed
SAMPLED = 4  # prompts of requests at several temperatures at once
HOT = (1.6, 2.0)  # the highest of them: most tokens are open, and servers refuse more than 2
STREAMED, STREAMED_NEW = 6, 16  # prompts and new tokens of streamed answers
TOGETHER = 16  # rows of a request
CASES = pytest.mark.parametrize("case", ["full", "sessions", "probing"])


def full_or_probing_point(evidence: ModelMeasurements, full: bool) -> OperatingPoint:
    return evidence.subject.full_depth_point if full else evidence.replay_validity.probing_point


@CASES
def test_prompts_that_share_a_beginning_are_read_to_their_ends(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator, case: str
) -> None:
    """Cases ``full`` take prompts of several blocks; the reference decoder keeps none between requests.

    They take many beginnings of one text in one request, too. The reference decoder generates fewer tokens if these
    distinguish enough prompts.
    """
    subject, full = emad_evidence.subject, case != "probing"
    point, blocks = full_or_probing_point(emad_evidence, full), case == "full" and not subject.has_reference_decoder
    for shortest, longest in (SHARED_BLOCKS, SHARED_HALVES) if blocks else (SHARED,):
        halves = (shortest, longest) == SHARED_HALVES
        room = subject.window_size - TOLD_APART
        beyond = min(longest, room if halves else 2 * room // 3)  # one variation continues it by half
        length = int(emad_rng.integers(min(shortest, beyond - 1), beyond))
        (text, other), _ = subject.draw_prompts_with_continuations(emad_rng, [length] * 2, 1)
        variations = subject.scale_by_audit_share(VARIATIONS, FEWEST_VARIATIONS)
        with subject.open_decoder(point, max_rows=variations) as decoder:
            texts = subject.make_decoder_under_test(decoder, point), text.tokens, other.tokens
            if not full:
                emad_audit(check_shared_prefixes(*texts, BETWEEN, emad_rng, variations=variations))
                continue
            for new in (FIRST_NEW, TOLD_APART) if subject.has_reference_decoder else (TOLD_APART,):
                sessions = case == "sessions"
                asked = partial(check_shared_prefixes, *texts, new, emad_rng, sessions=sessions, needed=DIFFERENT)
                finding = asked(halves=True) if halves else asked(variations=variations)
                if finding.passed is not None:
                    break
            emad_audit(finding)
    if case != "full":
        return
    length = min(NESTED, subject.window_size - BATCHED)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, [length], 1, max_rows=TOGETHER) as (
        under_test,
        (nested,),
        _,
    ):
        unseen = emad_rng.integers(0, subject.stepper.vocabulary_size, UNSEEN)
        beginning = np.concatenate([unseen, nested.tokens[UNSEEN:]])
        emad_audit(check_nested_prompts(under_test, beginning, BATCHED, emad_rng))


def test_requests_at_once_get_the_answers_that_each_gets_alone(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    """Greedy ones and some at two temperatures share batches, if the decoder allows it."""
    subject = emad_evidence.subject
    if subject.has_reference_decoder:
        pytest.skip("the reference decoder takes one request at a time")
    temperature, seed = draw_temperature(emad_rng, *HOT), int(emad_rng.integers(2**16))

    def open_sampled(asked: float) -> AbstractContextManager[Decoder]:
        return subject.open_decoder(subject.full_depth_point, max_rows=SAMPLED, temperature=asked, seed=seed)

    lengths = subject.draw_short_lengths(emad_rng, SAMPLED, NEW)
    with subject.open_decoder_and_draw_prompts(subject.full_depth_point, emad_rng, lengths, 1) as (greedy, prompts, _):
        emad_audit(check_temperatures_at_once(open_sampled, greedy, prompts, NEW, temperature))


def test_streamed_tokens_are_those_of_whole_answers(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_record: Recorder, emad_rng: np.random.Generator
) -> None:
    """One, two and eight streams at once, if the decoder streams. Their times are reported and decide nothing."""
    subject = emad_evidence.subject
    if subject.has_reference_decoder:
        pytest.skip("the reference decoder streams nothing")
    lengths = subject.draw_short_lengths(emad_rng, STREAMED, STREAMED_NEW)
    with subject.open_decoder_and_draw_prompts(subject.full_depth_point, emad_rng, lengths, 1) as (
        under_test,
        prompts,
        _,
    ):
        try:
            finding, arrivals = check_and_time_streams(under_test, prompts, STREAMED_NEW)
        except Unsupported as refusal:
            refusal.features = (STREAMING,)  # also where the answers show it, and no call was declined
            raise
        emad_audit(finding)
    if "PYTEST_XDIST_WORKER" in os.environ:
        emad_record.record_note("streamed answers are not timed under -n, where other tests run beside them")
    else:
        emad_record.record_table(STREAM_TIMES, subject.name, stream_latency_rows(arrivals))
