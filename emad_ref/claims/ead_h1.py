"""EAD-H1: do the token shares of the paper's two headlines give the savings it claims? (EAD, Abstract)

Arithmetic on the paper's own numbers by its own cost; no model is read, and it always applies. Where the abstract names
no size of the small model, the one that reproduces its saving is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.benchmark.flops import token_share_cost
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.measurements.study import PairNames
from emad_ref.statistics.legs import judge_exact
from emad_ref.statistics.verdicts import Verdict

BILLION = 1e9


@dataclass(frozen=True)
class Headline:
    """``large_share`` of emitted tokens, parameters of both models, and the saving ``claimed`` for them, a fraction."""

    name: str
    large_share: float
    small_parameters: float
    large_parameters: float
    claimed: float


@dataclass(frozen=True)
class HeadlineEvidence:
    headlines: tuple[Headline, ...]


PAPER = HeadlineEvidence(
    (
        Headline("LLaMA 11B + 3B at 43 % of tokens", 0.43, 3 * BILLION, 11 * BILLION, 0.415),
        Headline("Qwen 14B + 1.5B at 25 % of tokens", 0.25, 1.5 * BILLION, 14 * BILLION, 0.67),
    )
)


def decide(found: HeadlineEvidence, asked: ClaimContext) -> Verdict:
    """One leg per headline: by how much its saving misses the claimed one."""
    differences = {}
    for headline in found.headlines:
        saving = 1 - token_share_cost(
            headline.large_share,
            small_parameters=headline.small_parameters,
            large_parameters=headline.large_parameters,
        )
        leg = f"{headline.name}: saves {saving:.2%}, the paper says {headline.claimed:.1%}"
        differences[leg] = np.array([abs(saving - headline.claimed)])
    return judge_exact(asked.claim, asked.model, differences, asked.claim.thresholds["saving"])


def answer(names: PairNames, asked: ClaimContext) -> Answer:
    """On record under the names of the run's pair, though nothing of it is read."""
    return Answer(decide(PAPER, asked))


QUESTIONS = (Question("EAD-H1", "names", answer, decide=decide),)
