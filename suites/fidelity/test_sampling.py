"""Sampled tokens follow the model's distribution at their depths, at the requested temperature and seed."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.protocol import Capabilities, Prompt
from pytest_emad.audit.sampling import (
    SampledRecord,
    check_sampling,
    choose_early_stop_tokens,
    choose_open_prompts,
    draw_temperature,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate

DIFFERENT, FEWEST = 15, 7  # prompts, one of them twice: a step of many rows costs little more than of one
NEW = 16
FEWEST_NEW = {"hot": 8, "cold": 12}  # of a large model: hot, nearly every token is open
# at full depth a cold distribution leaves fewer tokens open, and a temperature that is off by 6 % shows in 4,000 tokens
SEEDS = {"hot": 4, "hot, full": 16, "cold": 2, "cold, full": 4}
MOST_LOGITS, FEWEST_SEEDS = 2**28, 10  # held at once (2 GiB), and seeds below which no vocabulary brings their number
TEMPERATURES = {"hot": (1.6, 2.0), "cold": (0.4, 0.7)}  # a tail is drawn, and servers take up to 2; where 1 is too hot
COLDEST = ((0.0, 0.05), (0.1, 0.2))  # between round numbers, where servers round, clamp or decode greedily
COLDEST_SEEDS, COLDEST_PROMPTS = 6, 16  # with as many new tokens as above: a penalty of few logits shows soonest there
TEXTS, FEWEST_TEXTS, TEXT = 32, 8, 32  # texts of so many tokens, whose beginnings are searched for those prompts
OWN_SEEDS, OWN_COLDEST = 4, 2  # at most: our decoder samples by one rule from logits that other audits compare


@pytest.mark.parametrize("full", [True, False], ids=["full", "probing"])
@pytest.mark.parametrize("warmth", TEMPERATURES)
def test_tokens_are_drawn_from_the_distribution_at_their_depths(
    emad_evidence: ModelMeasurements,
    emad_audit: AuditFindingGate,
    emad_record: Recorder,
    emad_rng: np.random.Generator,
    warmth: str,
    full: bool,
) -> None:
    """The first two rows share a prompt. The first seed is used twice, and once more while rows end early.

    Full depth is also sampled at two temperatures below 0.2, after prompts with two tokens or more that stay likely
    there: a decoder that rounds or clamps the temperature, or decodes greedily, shows.
    """
    subject = emad_evidence.subject
    point = subject.full_depth_point if full else emad_evidence.replay_validity.probing_point
    temperature = draw_temperature(emad_rng, *TEMPERATURES[warmth])
    different = subject.scale_by_audit_share(DIFFERENT, FEWEST)
    new = subject.scale_by_audit_share(NEW, FEWEST_NEW[warmth])
    prompts, _ = subject.draw_prompts_with_continuations(
        emad_rng, subject.draw_short_lengths(emad_rng, different, new), 1
    )
    prompts = [prompts[0], *prompts]
    seeds, coldest_seeds = SEEDS[f"{warmth}, full" if full else warmth], COLDEST_SEEDS
    if subject.has_reference_decoder:
        seeds = subject.scale_by_audit_share(min(seeds, OWN_SEEDS), 2)
        coldest_seeds = subject.scale_by_audit_share(OWN_COLDEST, 1)
    seeds = min(seeds, max(FEWEST_SEEDS, MOST_LOGITS // (subject.stepper.vocabulary_size * len(prompts) * new)))
    first, *others = (int(seed) for seed in emad_rng.choice(2**16, seeds, replace=False))

    def drawn(
        asked: float, rows: list[Prompt], length: int, seed: int, stop: frozenset[int] = frozenset()
    ) -> tuple[SampledRecord, Capabilities]:
        with subject.open_decoder(point, max_rows=len(rows), temperature=asked, seed=seed) as decoder:
            return (seed, decoder.generate(rows, length, stop)), decoder.capabilities

    records = [drawn(temperature, prompts, new, seed)[0] for seed in (*others, first, first)]
    stop = choose_early_stop_tokens(records[-1][1].emitted)
    ended, capabilities = drawn(temperature, prompts, new, first, stop)
    finding = check_sampling(
        records, subject.reference_lens, point, prompts, new, temperature, capabilities, emad_rng, subject.tolerance,
        ended=ended, stop=stop,
    )  # fmt: skip
    emad_audit(finding)
    if not full or warmth != "cold":
        return
    texts, _ = subject.draw_prompts_with_continuations(
        emad_rng, [min(TEXT, subject.window_size - new)] * subject.scale_by_audit_share(TEXTS, FEWEST_TEXTS), 1
    )
    for low, high in COLDEST:
        coldest = draw_temperature(emad_rng, low, high, step=high - low)
        asked = choose_open_prompts(
            subject.reference_lens, [each.tokens for each in texts], COLDEST_PROMPTS, coldest, subject.tolerance
        )
        if not asked:
            emad_record.record_note(f"temperature {coldest:.3f} is not judged: rounding decides what is drawn there")
            continue
        records = [
            drawn(coldest, asked, new, seed)[0]
            for seed in emad_rng.choice(2**16, coldest_seeds, replace=False).tolist()
        ]
        given = point, asked, new, coldest, capabilities, emad_rng, subject.tolerance
        emad_audit(check_sampling(records, subject.reference_lens, *given, needed=COLDEST_PROMPTS))
