"""Without exits the decoder emits the model's tokens, and the last layer's lens is the model's distribution."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.audit.finding import Finding
from pytest_emad.audit.sampling import choose_open_prompts
from pytest_emad.audit.token_comparison import prompts_and_predicted_tokens
from pytest_emad.audit.tolerances import check_declared_noise, find_first_excess
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.suite_support import AuditFindingGate

NEW, FEWEST_NEW, PROMPTS, LENGTH = 32, 16, 4, 8
TEXTS, FEWEST_TEXTS, TEXT = 32, 4, 32  # texts of so many tokens, of which every beginning may be a prompt
MOST_SAID, TOGETHER = 256, 16  # such prompts, and those of a request
NEAR_TIES = 32  # prompts of which another token is nearly as likely


def test_without_exits_tokens_are_the_models_own_greedy_continuation(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    """Continues a few prompts, then once each token that the model emits after text and after random tokens.

    Prompts of which the second token is nearly as likely show a decoder that draws at a small temperature.
    """
    subject = emad_evidence.subject
    prompts, new = subject.make_equal_prompts(PROMPTS, LENGTH), subject.scale_by_audit_share(NEW, FEWEST_NEW)
    with subject.open_decoder(subject.full_depth_point, max_rows=PROMPTS) as decoder:
        record = decoder.generate(prompts, new, frozenset())
        declared = decoder.capabilities.logit_noise
    own = subject.generate_greedy(prompts, new)
    emad_audit.require_same_tokens(prompts, [e.tolist() for e in record.emitted], own.tolist(), declared=declared)
    texts = subject.scale_by_audit_share(TEXTS, FEWEST_TEXTS)
    drawn, _ = subject.draw_prompts_with_continuations(emad_rng, [min(TEXT, subject.window_size - 1)] * texts, 1)
    read = [each.tokens for each in drawn]
    read += [np.append(text[:1], emad_rng.integers(0, subject.stepper.vocabulary_size, len(text) - 1)) for text in read]
    lens = subject.reference_lens
    prompts, wanted = prompts_and_predicted_tokens(lens, read, MOST_SAID)
    near = choose_open_prompts(lens, read, subject.scale_by_audit_share(NEAR_TIES, TOGETHER), 0.0, subject.tolerance)
    best = [[int(lens(prompt.tokens).last_layer[-1].argmax())] for prompt in near]
    with subject.open_decoder(subject.full_depth_point, max_rows=TOGETHER) as decoder:
        for asked, expected in ((prompts, wanted), *([(near, best)] if near else [])):
            said = [
                emitted.tolist()
                for first in range(0, len(asked), TOGETHER)
                for emitted in decoder.generate(asked[first : first + TOGETHER], 1, frozenset()).emitted
            ]
            emad_audit.require_same_tokens(asked, said, expected, declared=declared)


def test_last_layer_readout_is_the_models_distribution(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate
) -> None:
    subject = emad_evidence.subject
    (prompt,) = subject.make_equal_prompts(1, LENGTH)
    own = subject.compute_model_logits(prompt.tokens)
    tokens, layers = prompt.tokens, [subject.stepper.layers]
    off = np.abs(subject.reference_lens(tokens).last_layer - own).max(axis=-1)
    excess = find_first_excess(subject.reference_lens, tokens, 0, off, layers, subject.tolerance)
    assert excess is None, f"the last layer's lens is off by {off.max():.2e}"
    with subject.open_decoder(subject.full_depth_point) as decoder:
        _, step = decoder.start([prompt])
        allowed = subject.compute_allowed_difference(decoder.capabilities)
    off = np.abs(step.logits[0, -1:] - own[-1:]).max(axis=-1)
    excess = find_first_excess(subject.reference_lens, tokens, len(tokens) - 1, off, layers, allowed)
    _, allowed = excess or (0, allowed)
    detail = f"the decoder's full-depth logits are off by {off[0]:.2g}, {allowed:g} allowed"
    emad_audit(Finding("full-depth logits", excess is None, detail, n=own.shape[-1], ties=0))


@pytest.mark.parametrize("full", [True, False], ids=["full", "probing"])
def test_declared_noise_is_what_rounding_can_honestly_need(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, full: bool
) -> None:
    subject = emad_evidence.subject
    with subject.open_decoder(
        subject.full_depth_point if full else emad_evidence.replay_validity.probing_point
    ) as decoder:
        emad_audit(check_declared_noise(decoder.capabilities.logit_noise, subject.max_declarable_noise))
