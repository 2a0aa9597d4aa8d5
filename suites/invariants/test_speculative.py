"""Greedy speculative decoding emits the verifier's greedy tokens, alone and in batches, at full and adaptive depth.

Self-speculation emits the model's own tokens, whichever layer drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from emad_ref.decoding.partner import Partner
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder
from pytest_emad.audit.decoding_checks import check_generation
from pytest_emad.audit.finding import MIN_DISCRIMINATING
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.pair_models import make_self_speculative_decoder, make_speculative_decoder
from pytest_emad.run.options import RunSettings
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate

NEW, BESIDE = 12, 4
Points = Callable[[ModelMeasurements, ModelMeasurements], tuple[OperatingPoint, OperatingPoint]]
POINTS: dict[str, Points] = {
    "full depth": lambda small, large: (small.subject.full_depth_point, large.subject.full_depth_point),
    "emad in the verifier": lambda small, large: (small.subject.full_depth_point, large.replay_validity.probing_point),
    "emad in both": lambda small, large: (small.replay_validity.probing_point, large.replay_validity.probing_point),
    "first layer in the verifier": lambda small, large: (small.subject.full_depth_point, first_layer_exit_point(large)),
}
DISCRIMINATING = "first layer in the verifier"  # where depth decides nearly every token; at the others few of a dozen


def first_layer_exit_point(large: ModelMeasurements) -> OperatingPoint:
    """Every token leaves after one layer."""
    return replace(large.replay_validity.shallow_point, name="first layer", probes=(1,))


@pytest.fixture
def pair_auditor(emad_pair: PairMeasurements, emad_settings: RunSettings, emad_record: Recorder) -> AuditFindingGate:
    """Compare with the large model, up to ties of its logits."""
    large = emad_pair.large.subject
    return AuditFindingGate(large.reference_lens, large.tolerance, emad_settings, emad_record)


@pytest.mark.parametrize("rows", [1, BESIDE])
@pytest.mark.parametrize("depth", POINTS)
def test_speculation_emits_what_its_verifier_would(
    emad_pair: PairMeasurements, pair_auditor: AuditFindingGate, rows: int, depth: str
) -> None:
    with emad_pair.models.open_partners(*POINTS[depth](*emad_pair.models.both), rows=rows) as (draft, verifier):
        needed = MIN_DISCRIMINATING if depth == DISCRIMINATING else 0
        require_same_emissions(
            emad_pair, pair_auditor, rows, verifier, [make_speculative_decoder(draft, verifier)], needed
        )


def test_a_model_that_drafts_for_itself_emits_what_it_would(
    emad_pair: PairMeasurements, pair_auditor: AuditFindingGate
) -> None:
    if absent := emad_pair.models.absent_drafting:
        pytest.skip(f"not applicable ({absent.reason})")
    with emad_pair.models.open_self_drafter(BESIDE) as model:
        decoders = [make_self_speculative_decoder(model, layer) for layer in emad_pair.models.drafting_exit_layers]
        require_same_emissions(emad_pair, pair_auditor, BESIDE, model, decoders)


def require_same_emissions(
    pair: PairMeasurements,
    auditor: AuditFindingGate,
    rows: int,
    verifier: Partner,
    decoders: Sequence[Decoder],
    needed: int = 0,
) -> None:
    """Compare token by token up to ties, and depths with replay of the emitted tokens; ``needed``: as of the audit."""
    large, point = pair.large.subject, verifier.point
    prompts, _ = large.make_ragged_prompts_with_continuations(rows, 1)
    own = verifier.decoder.generate(prompts, NEW, frozenset())
    for decoder in decoders:
        found = decoder.generate(prompts, NEW, frozenset())
        theirs, mine = ([tokens.tolist() for tokens in one.emitted] for one in (found, own))
        auditor.require_same_tokens(prompts, theirs, mine, point, declared=verifier.decoder.capabilities.logit_noise)
        auditor(
            check_generation(
                replace(large.make_decoder_under_test(decoder, point), exact_context=True), prompts, NEW, needed=needed
            )
        )
