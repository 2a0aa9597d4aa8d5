"""Long prompts: the decoder is right after hundreds of tokens and up to the last positions of the window.

A few long audits with lengths drawn for this run; ``test_pairs`` has many short ones, and the window's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.point import OperatingPoint
from emad_ref.signals import SIGNALS
from pytest_emad.audit.decoding_checks import require_record_matches_lens
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.positions import (
    check_positions_in_window,
    draw_block_end_lengths,
    draw_buffer_edge_lengths,
    draw_long_lengths,
)
from pytest_emad.audit.threshold_comparisons import UNREACHED_THRESHOLD
from pytest_emad.audit.trajectory import Judge
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate

FED = 12  # tokens after a prompt
LAST = {1: 16, 2: 8}  # new tokens that a prompt leaves room for, and rows: a cut changes one token in ten
ENDING = ((3, 16), (17, 33))  # new tokens with which two more rows end there: drafts of usual lengths pass the end
OWN_ROWS = 4  # rows of our own decoder that cover the window: other tests have more rows
AFTER_BLOCKS = 8  # new tokens after prompts that end at the edges of blocks: one token that was not read shows late
ROWS = 8  # prompts of a request that end at the edges of blocks
PASSING, SHORTER = 8, 40  # rows that pass nearly every position of the window, and tokens of the longest prompt
BEYOND = 8  # tokens beyond the window, where the model has them: a buffer of the window's size ends there, too
MOST = 2**27  # logits of a generated row that an audit holds at once, those of all layers


def test_every_position_is_written_and_read(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_record: Recorder, emad_rng: np.random.Generator
) -> None:
    """By single steps, by feeds of any width, and in prompts that end at the edges of K/V blocks of any usual size.

    The reference decoder has buffers in place of blocks: its prompts end at their edges.
    """
    subject = emad_evidence.subject
    ours, share = subject.has_reference_decoder, subject.audit_share
    if share < 1:
        emad_record.record_note(
            f"{subject.name}: audits of our own decoder ask for {share:.0%} of their rows, tokens, seeds and variants, "
            f"or the fewest that decide, in the first {subject.audited_window_size} positions; --emad-budget standard "
            "asks for all"
        )
    rows = OWN_ROWS if ours else max(subject.budget.batch_sizes) + 1
    window = min(subject.stepper.max_positions, subject.audited_window_size + BEYOND)
    prompts, _ = subject.draw_prompts_with_continuations(emad_rng, [window] * rows, 0)
    texts = np.stack([prompt.tokens for prompt in prompts])
    with subject.open_decoder(subject.full_depth_point, max_rows=rows) as decoder:
        under_test = subject.make_decoder_under_test(decoder, subject.full_depth_point)
        edges = draw_buffer_edge_lengths if ours else draw_block_end_lengths
        emad_audit(check_positions_in_window(under_test, subject.compute_model_logits, texts, emad_rng, edges))


def test_generation_passes_every_position(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    """Rows start evenly spread over the window, at a point that reads every probe and never exits early."""
    probing = emad_evidence.replay_validity.probing_point
    unreached = ((UNREACHED_THRESHOLD[SIGNALS[probing.signal].sense],) * len(probing.probes),)
    point = replace(probing, name="watching", thresholds=unreached)
    subject, rows = emad_evidence.subject, max(emad_evidence.subject.budget.batch_sizes) + 1
    new = -(-(subject.audited_window_size - 1) // rows) + BEYOND
    emad_audit(check_generation_to_window_end(subject, point, emad_rng, rows, new))


def check_generation_to_window_end(
    subject: ModelUnderTest, point: OperatingPoint, rng: np.random.Generator, rows: int, new: int
) -> Finding:
    """Check ``rows`` rows of at most ``new`` tokens that start evenly spread over the window and end within it.

    Every later step of a row reads a position's K/V, so a fault at a position shows in some row.
    """
    new = min(new, subject.audited_window_size - 1, MOST // (subject.stepper.vocabulary_size * subject.stepper.layers))
    lengths = rng.permutation(np.linspace(1, subject.audited_window_size - new, rows).astype(int)).tolist()
    return check_long_generation(subject, point, rng, lengths, new)


def check_long_generation(
    subject: ModelUnderTest, point: OperatingPoint, rng: np.random.Generator, lengths: Sequence[int], new: int
) -> Finding:
    """Check one request of ``new`` tokens after prompts of ``lengths``."""
    with subject.open_decoder_and_draw_prompts(point, rng, lengths, 1) as (under_test, prompts, _):
        judge = Judge.for_check("generation", under_test, needed=0)
        with judge.tally:
            require_record_matches_lens(judge, under_test.decoder.generate(prompts, new, frozenset()), prompts, new)
    return judge.tally.to_finding()


@pytest.mark.parametrize("full", [True, False], ids=["full", "probing"])
def test_generation_holds_far_into_the_window(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator, full: bool
) -> None:
    """Depths, signals and tokens; where depth changes too few tokens, ``test_bridge`` has the power.

    Full depth also takes prompts that leave room for one or two tokens: a server may truncate long ones. Decoders other
    than the reference may offer no sessions, so they also take prompts that end at the edges of blocks, rows that pass
    every position token by token, and rows of several tokens that end with the window, where drafts may pass its end.
    """
    subject = emad_evidence.subject
    point = subject.full_depth_point if full else emad_evidence.replay_validity.probing_point
    requests = [(draw_long_lengths(emad_rng, subject.audited_window_size - FED)[: None if full else 2], FED)]
    others = full and not subject.has_reference_decoder
    if full:
        requests += [
            ([subject.audited_window_size - room] * (rows if others else 1), room) for room, rows in LAST.items()
        ]
    if others:
        rooms = [int(emad_rng.integers(least, most + 1)) for least, most in ENDING]
        requests += [([subject.audited_window_size - room] * 2, room) for room in rooms]
        ends = draw_block_end_lengths(emad_rng, subject.audited_window_size - AFTER_BLOCKS)
        requests += [(ends[first : first + ROWS], AFTER_BLOCKS) for first in range(0, len(ends), ROWS)]
    for lengths, new in requests:
        emad_audit(check_long_generation(subject, point, emad_rng, lengths, new))
    if others:
        emad_audit(
            check_generation_to_window_end(subject, point, emad_rng, PASSING, subject.audited_window_size - SHORTER)
        )
