"""Sampled tokens follow the model's distribution at temperatures between round numbers.

``test_pairs`` asks for round temperatures, at every point, and compares seeds, stop sets and ways of sending.
"""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.audit.sampling import check_sampling, choose_open_prompts, draw_temperature
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate

# lowest, highest, step of the round numbers between which servers round, clamp or decode greedily, and seeds
TEMPERATURES = {
    "hot": (1.6, 2.0, 0.1, 4),  # a tail is drawn, and servers take up to 2
    "cold": (0.4, 0.7, 0.1, 4),
    "colder": (0.1, 0.2, 0.1, 6),
    "coldest": (0.0, 0.05, 0.05, 6),
}
ROWS, FEWEST_ROWS = 16, 7  # prompts
NEW = 16
FEWEST_NEW = {"hot": 8}  # of a large model: hot, nearly every token is open
FEWEST_COLD_NEW = 12
MOST_LOGITS, FEWEST_SEEDS = 2**28, 2  # held at once (2 GiB), and seeds below which no vocabulary brings their number
TEXTS, FEWEST_TEXTS, TEXT = 32, 8, 32  # texts of so many tokens, whose beginnings are searched for open prompts
OWN_SEEDS = 2  # at most: our decoder samples by one rule from logits that other audits compare
OPEN_TOKENS = {"hot": 100, "cold": 50}  # fewest tokens that are not certain
FEWEST_OPEN = 16  # of the colder ones


@pytest.mark.parametrize("warmth", TEMPERATURES)
def test_tokens_are_drawn_at_temperatures_that_are_not_round(
    emad_evidence: ModelMeasurements,
    emad_audit: AuditFindingGate,
    emad_record: Recorder,
    emad_rng: np.random.Generator,
    warmth: str,
) -> None:
    """Cold ones after prompts with two tokens or more that stay likely there: a decoder that rounds or clamps shows."""
    subject = emad_evidence.subject
    low, high, step, seeds = TEMPERATURES[warmth]
    temperature = draw_temperature(emad_rng, low, high, step)
    new = subject.scale_by_audit_share(NEW, FEWEST_NEW.get(warmth, FEWEST_COLD_NEW))
    texts, _ = subject.draw_prompts_with_continuations(
        emad_rng, [min(TEXT, subject.window_size - new)] * subject.scale_by_audit_share(TEXTS, FEWEST_TEXTS), 1
    )
    rows, lens = subject.scale_by_audit_share(ROWS, FEWEST_ROWS), subject.reference_lens
    prompts = choose_open_prompts(lens, [each.tokens for each in texts], rows, temperature, subject.tolerance)
    if not prompts:
        emad_record.record_note(f"temperature {temperature:.3f} is not judged: rounding decides what is drawn there")
        return
    if subject.has_reference_decoder:
        seeds = min(seeds, OWN_SEEDS)
    seeds = min(seeds, max(FEWEST_SEEDS, MOST_LOGITS // (subject.stepper.vocabulary_size * len(prompts) * new)))
    records = []
    for seed in emad_rng.choice(2**16, seeds, replace=False).tolist():
        opened = subject.open_decoder(
            subject.full_depth_point, max_rows=len(prompts), temperature=temperature, seed=seed
        )
        with opened as decoder:
            records.append((seed, decoder.generate(prompts, new, frozenset())))
            capabilities = decoder.capabilities
    given = subject.full_depth_point, prompts, new, temperature, capabilities, emad_rng, subject.tolerance
    emad_audit(check_sampling(records, lens, *given, needed=OPEN_TOKENS.get(warmth, FEWEST_OPEN)))
