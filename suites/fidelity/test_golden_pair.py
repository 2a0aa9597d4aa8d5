"""Golden tokens of a pair: switching, speculative decoding, and self-speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from emad_ref.decoding.partner import Partner
from emad_ref.decoding.switching import SwitchingRule, switch
from emad_ref.protocol import Prompt
from pytest_emad.audit.token_comparison import GoldenTokens, emitted_depths, logit_margins, threshold_distances
from pytest_emad.audit.tolerances import ROLLING_BITS_FACTOR
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.pair_models import (
    SpeculativeDecoder,
    make_self_speculative_decoder,
    make_speculative_decoder,
)
from pytest_emad.run.options import RunSettings
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate

NEW, LENGTH, ROWS = 24, 8, 2
RULE = SwitchingRule(threshold_bits=2.5, window=3, least_run=3)
DRAWN = "ead drawn"

Taking = Callable[[PairMeasurements, Sequence[Prompt]], GoldenTokens]


def make_switching_generator(temperature: float) -> Taking:
    """Entropy-adaptive decoding; the emitting model's index stands in place of a depth."""

    def take(pair: PairMeasurements, prompts: Sequence[Prompt]) -> GoldenTokens:
        with pair.models.open_partners(rows=ROWS) as partners:
            made = switch(*partners, RULE, prompts, NEW, temperature=temperature, seed=pair.large.subject.seed)
            model, emitted = np.stack(made.model), made.record.emitted
            margin = np.full(model.shape, np.inf)
            if not temperature:
                both = np.stack([logit_margins(partner.decoder, prompts, emitted) for partner in partners])
                margin = np.take_along_axis(both, model[None], axis=0)[0]
        return GoldenTokens(np.stack(emitted), model, margin, np.abs(np.stack(made.rolling_bits) - RULE.threshold_bits))

    return take


def verified_golden_tokens(decoder: SpeculativeDecoder, verifier: Partner, prompts: Sequence[Prompt]) -> GoldenTokens:
    made = decoder.generate(prompts, NEW, frozenset())
    margin = logit_margins(verifier.decoder, prompts, made.emitted)
    return GoldenTokens(np.stack(made.emitted), emitted_depths(made), margin, threshold_distances(made, verifier.point))


def speculative_golden_tokens(pair: PairMeasurements, prompts: Sequence[Prompt]) -> GoldenTokens:
    with pair.models.open_partners(rows=ROWS) as (draft, verifier):
        return verified_golden_tokens(make_speculative_decoder(draft, verifier), verifier, prompts)


def self_drafted_golden_tokens(pair: PairMeasurements, prompts: Sequence[Prompt]) -> GoldenTokens:
    if absent := pair.models.absent_drafting:
        pytest.skip(f"not applicable ({absent.reason})")
    with pair.models.open_self_drafter(ROWS) as model:
        return verified_golden_tokens(
            make_self_speculative_decoder(model, pair.models.drafting_exit_layers[0]), model, prompts
        )


PAIRED: dict[str, Taking] = {
    "ead": make_switching_generator(0.0),
    DRAWN: make_switching_generator(1.0),
    "speculative": speculative_golden_tokens,
    "self-speculative": self_drafted_golden_tokens,
}


@pytest.fixture
def pair_auditor(emad_pair: PairMeasurements, emad_settings: RunSettings, emad_record: Recorder) -> AuditFindingGate:
    large = emad_pair.large.subject
    return AuditFindingGate(large.reference_lens, large.tolerance, emad_settings, emad_record)


@pytest.mark.parametrize("kind", PAIRED)
def test_a_pair_emits_its_golden_tokens(emad_pair: PairMeasurements, pair_auditor: AuditFindingGate, kind: str) -> None:
    subjects = small, large = [evidence.subject for evidence in emad_pair.models.both]
    if large.seed:
        pytest.skip("not applicable (pairs are on record for seed 0 alone)")
    if kind == DRAWN and not all(subject.has_reference_decoder for subject in subjects):
        pytest.skip("not applicable (other decoders show other logits, from which other tokens are drawn)")
    declared = max(subject.compute_allowed_difference(subject.capabilities) for subject in subjects)
    prompts = large.make_equal_prompts(ROWS, LENGTH)
    about = f"{small.fingerprint[:16]}+{large.fingerprint[:16]}", large.dtype, large.corpus, large.seed, kind

    def take() -> GoldenTokens:
        return PAIRED[kind](emad_pair, prompts)

    if not pair_auditor.compare_with_golden(
        about, take, prompts, ROLLING_BITS_FACTOR, declared=declared, drawn=kind == DRAWN
    ):
        pytest.skip("not applicable (no golden recorded)")
