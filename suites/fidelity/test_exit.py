"""An exit's points: the decoder agrees with replay and with the reference decoder.

Audits compare with the model's own states. For a point that copies or translates states above an exit, they audit the
same point with exact states; copied states are compared with those of the reference decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import DraftingDecoder
from emad_ref.point import OperatingPoint
from emad_ref.record import Ints
from pytest_emad.audit.decoding_checks import check_decisions, check_generation
from pytest_emad.measurements.learned_exit import ExitEvaluation
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.suite_support import AuditFindingGate

FED, NEW, ROWS = 12, 24, 5


@pytest.fixture
def exact_kv_point(emad_exit: ExitEvaluation) -> OperatingPoint:
    point = emad_exit.exact_kv_point
    if isinstance(point, Absent):
        pytest.skip(f"the exit has no lossy point: {point.reason}")
    return point


def test_teacher_forced_depths_and_losses_are_replays(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, exact_kv_point: OperatingPoint
) -> None:
    emad_audit(emad_evidence.replay_validity.check_bridge(exact_kv_point))


def test_signals_depths_and_ledger_are_the_rules(
    emad_evidence: ModelMeasurements,
    emad_audit: AuditFindingGate,
    emad_rng: np.random.Generator,
    exact_kv_point: OperatingPoint,
) -> None:
    subject = emad_evidence.subject
    lengths = subject.draw_short_lengths(emad_rng, ROWS, FED)
    with subject.open_decoder_and_draw_prompts(exact_kv_point, emad_rng, lengths, FED) as (
        under_test,
        prompts,
        continuation,
    ):
        emad_audit(check_decisions(under_test, prompts, continuation))


def test_generated_tokens_are_the_argmax_at_their_depths(
    emad_evidence: ModelMeasurements,
    emad_audit: AuditFindingGate,
    emad_rng: np.random.Generator,
    exact_kv_point: OperatingPoint,
) -> None:
    subject = emad_evidence.subject
    prompts, _ = subject.draw_prompts_with_continuations(emad_rng, subject.draw_short_lengths(emad_rng, ROWS, NEW), 1)
    with subject.open_decoder(exact_kv_point, max_rows=ROWS) as decoder:
        emad_audit(check_generation(subject.make_decoder_under_test(decoder, exact_kv_point), prompts, NEW))


def test_made_up_states_are_those_of_our_own_decoder(
    emad_evidence: ModelMeasurements,
    emad_exit: ExitEvaluation,
    emad_audit: AuditFindingGate,
    emad_rng: np.random.Generator,
) -> None:
    """Compared row by row, which shows a row that depends on others."""
    point, subject = emad_exit.recommended_point, emad_evidence.subject
    if isinstance(point, Absent) or point is emad_exit.exact_kv_point:
        pytest.skip("no point of the exit makes states up")
    prompts, _ = subject.draw_prompts_with_continuations(emad_rng, subject.draw_short_lengths(emad_rng, ROWS, NEW), 1)
    with subject.open_decoder(point, max_rows=ROWS) as decoder:
        found = decoder.generate(prompts, NEW, frozenset())
    alone = [WalkedDecoder(subject.stepper, point).generate([prompt], NEW, frozenset()) for prompt in prompts]
    emad_audit.require_same_tokens(prompts, _lists(found.emitted), _lists([each.emitted[0] for each in alone]), point)


def test_drafts_leave_the_models_own_output(
    emad_evidence: ModelMeasurements,
    emad_exit: ExitEvaluation,
    emad_audit: AuditFindingGate,
    emad_rng: np.random.Generator,
) -> None:
    subject, drafting = emad_evidence.subject, emad_exit.exit.drafting
    if drafting is None:
        pytest.skip("the exit holds no way to draft")
    prompts, _ = subject.draw_prompts_with_continuations(emad_rng, subject.draw_short_lengths(emad_rng, ROWS, NEW), 1)
    with subject.open_decoder(subject.full_depth_point, max_rows=ROWS) as decoder:
        wanted = decoder.generate(prompts, NEW, frozenset())
    found = DraftingDecoder(subject.stepper, drafting, max_rows=ROWS).generate(prompts, NEW, frozenset())
    noise = decoder.capabilities.logit_noise
    emad_audit.require_same_tokens(prompts, _lists(found.emitted), _lists(wanted.emitted), declared=noise)


def _lists(emitted: Sequence[Ints]) -> list[list[int]]:
    return [tokens.tolist() for tokens in emitted]
