"""EMAD-E2: does depth that never rises need no K/V backfill? (EMAD, Method, KV-consistent scheduling)

The logits of a token under any admissible depth sequence must equal the full model's readout at that token's depth:
every layer it attends to was run for every earlier token. Logits of the decoder under test are held against the
judge's own; the largest difference over all sequences is the verdict's estimate. Weights need not mean anything. It
does not apply to a decoder that takes no depth from outside.

Who asks may bring depth sequences of its own (the suite draws them with Hypothesis) to ``differences_at``, and hand
all differences to ``answered``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.protocol import Prompt
from emad_ref.record import Floats, Ints
from emad_ref.statistics.legs import judge_exact
from emad_ref.statistics.verdicts import Verdict

PROMPT, FED = 6, 8  # tokens: before the first forced depth, and under forced depths
SEEDS = 2**16  # of the tokens that are fed


@dataclass(frozen=True)
class ForcedDepthEvidence:
    """``differences`` [comparisons] largest |difference| of a logit at a position.

    ``tolerance`` the honest one: of the dtype, or the noise that the decoder declares.
    """

    differences: Floats
    tolerance: float


def decide(found: ForcedDepthEvidence, asked: ClaimContext) -> Verdict:
    """One leg: every comparison within the tolerance."""
    errors = {"logits under drawn depths": found.differences}
    return judge_exact(asked.claim, asked.model, errors, found.tolerance)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Depth sequences from the run's generator, as many as the budget has examples."""
    layers, rng = evidence.subject.stepper.layers, asked.rng
    drawn = [
        differences_at(evidence, np.sort(rng.integers(1, layers + 1, FED))[::-1], int(rng.integers(SEEDS)))
        for _ in range(evidence.study.budget.examples)
    ]
    return answered(evidence, asked, drawn)


def answered(evidence: ModelMeasurements, asked: ClaimContext, drawn: Sequence[Floats]) -> Answer:
    """The answer from ``differences_at`` of every depth sequence drawn; no text is read."""
    differences = np.concatenate(drawn) if drawn else np.zeros(0)
    allowed = evidence.subject.allowed(evidence.subject.capabilities)
    verdict = decide(ForcedDepthEvidence(differences, allowed), asked)
    return Answer(verdict, fingerprint=evidence.fingerprint)


def differences_at(evidence: ModelMeasurements, falls: Sequence[int] | Ints, seed: int) -> Floats:
    """Largest |difference| of a logit at the last position of a prompt and at every position fed after it.

    Args:
        falls: depths 1…L; their running minimum, which is admissible, is what tokens are forced to.
        seed: of the tokens, which are drawn from the whole vocabulary.

    Returns:
        [1 + len(falls)] of the prompt's last position, at full depth, and of each forced one.

    Raises:
        Unsupported: the decoder under test declines full depth or a depth from outside.
    """
    subject, depths = evidence.subject, np.minimum.accumulate(np.asarray(falls))
    tokens = np.random.default_rng(seed).integers(0, subject.stepper.vocabulary, PROMPT + len(depths))
    reference = subject.lens(tokens)
    with subject.open(subject.full) as decoder:
        session, step = decoder.start([Prompt(tokens[:PROMPT])])
        seen = [step.logits[0, 0]]
        for token, depth in zip(tokens[PROMPT:], depths, strict=True):
            seen.append(session.feed(token[None, None], np.array([[depth]])).logits[0, 0])
        session.close()
    read = reference[np.arange(PROMPT - 1, len(tokens)), np.append(subject.stepper.layers, depths) - 1]
    differences: Floats = np.abs(np.array(seen) - read).max(axis=1)
    return differences


QUESTIONS = (Question("EMAD-E2", "model", answer, suite="invariants", decide=decide),)
