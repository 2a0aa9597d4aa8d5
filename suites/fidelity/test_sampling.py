"""Sampled tokens follow the model's distribution at their depths, at the requested temperature and seed."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.audit.sampling import SampledRecord, check_sampling, choose_early_stop_tokens
from emad_ref.measurements.model_measurements import ModelMeasurements
from emad_ref.protocol import Capabilities
from pytest_emad.suite_support import AuditFindingGate

DIFFERENT, FEWEST = 15, 7  # prompts, one of them twice: a step of many rows costs little more than of one
NEW = 16
FEWEST_NEW = {"hot": 8, "cold": 12}  # of a large model: hot, nearly every token is open
# at full depth a cold distribution leaves fewer tokens open, and a temperature that is off by 6 % shows in 4,000 tokens
SEEDS = {"hot": 4, "hot, full": 16, "cold": 2, "cold, full": 4}
MOST_LOGITS, FEWEST_SEEDS = 2**28, 10  # held at once (2 GiB), and seeds below which no vocabulary brings their number
COLDER, COLDEST = 8, 6  # nearly greedy, where a penalty of few logits shows soonest; seeds there
OWN_SEEDS, OWN_COLDEST = 4, 2  # at most: our decoder samples by one rule from logits that other audits compare
TEMPERATURES = {"hot": (2.2, 3.2), "cold": (0.4, 0.7)}  # where a tail is drawn, too; where 1 is too hot


@pytest.mark.parametrize("full", [True, False], ids=["full", "probing"])
@pytest.mark.parametrize("warmth", TEMPERATURES)
def test_tokens_are_drawn_from_the_distribution_at_their_depths(
    emad_evidence: ModelMeasurements,
    emad_audit: AuditFindingGate,
    emad_rng: np.random.Generator,
    warmth: str,
    full: bool,
) -> None:
    """The first two rows share a prompt. The first seed is used twice, and once more while rows end early.

    Full depth is also sampled at an eighth of the lowest temperature, where only the argmax is likely: a decoder that
    clamps the temperature shows there.
    """
    subject = emad_evidence.subject
    point = subject.full_depth_point if full else emad_evidence.replay_validity.probing_point
    temperature = float(emad_rng.uniform(*TEMPERATURES[warmth]))
    different = subject.scale_by_audit_share(DIFFERENT, FEWEST)
    new = subject.scale_by_audit_share(NEW, FEWEST_NEW[warmth])
    prompts, _ = subject.draw_prompts_with_continuations(
        emad_rng, subject.draw_short_lengths(emad_rng, different, new), 1
    )
    prompts = [prompts[0], *prompts]
    seeds, coldest_seeds = SEEDS[f"{warmth}, full" if full else warmth], COLDEST
    if subject.has_reference_decoder:
        seeds = subject.scale_by_audit_share(min(seeds, OWN_SEEDS), 2)
        coldest_seeds = subject.scale_by_audit_share(OWN_COLDEST, 1)
    seeds = min(seeds, max(FEWEST_SEEDS, MOST_LOGITS // (subject.stepper.vocabulary_size * len(prompts) * new)))
    first, *others = (int(seed) for seed in emad_rng.choice(2**16, seeds, replace=False))

    def drawn(
        seed: int, stop: frozenset[int] = frozenset(), asked: float = temperature
    ) -> tuple[SampledRecord, Capabilities]:
        with subject.open_decoder(point, max_rows=len(prompts), temperature=asked, seed=seed) as decoder:
            return (seed, decoder.generate(prompts, new, stop)), decoder.capabilities

    records = [drawn(seed)[0] for seed in (*others, first, first)]
    stop = choose_early_stop_tokens(records[-1][1].emitted)
    ended, capabilities = drawn(first, stop)
    finding = check_sampling(
        records, subject.reference_lens, point, prompts, new, temperature, capabilities, emad_rng, subject.tolerance,
        ended=ended, stop=stop,
    )  # fmt: skip
    emad_audit(finding)
    if full and warmth == "cold":
        coldest = [
            drawn(seed, asked=temperature / COLDER)[0]
            for seed in emad_rng.choice(2**16, coldest_seeds, replace=False).tolist()
        ]
        given = point, prompts, new, temperature / COLDER, capabilities, emad_rng, subject.tolerance
        emad_audit(check_sampling(coldest, subject.reference_lens, *given, needed=0))
