"""EMAD-E5: does a run execute E[D_t] / L of full depth's blocks, exactly? (EMAD, Method, Complexity and speedup)

Blocks, not FLOPs: attention costs more the longer the text, and readouts and repair come on top; those are EMAD-F1's
and EMAD-E3's matter. By the decoder's own count of what it executed while decoding, prompt left out. Weights need not
mean anything. It does not apply to a decoder that does not count its work, nor where depth never fell: any decoder
runs all blocks then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import with_flop_evidence
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.protocol import Decoder, Unsupported
from emad_ref.record import Ints
from emad_ref.statistics.legs import combine_verdict, count_leg, judge_exact
from emad_ref.statistics.verdicts import Verdict

REQUESTS, NEW, LENGTH = 6, 24, 8  # tokens of a request: new ones, and of its prompt; of two none may ever fall


@dataclass(frozen=True)
class BlockCountEvidence:
    """Blocks of each request's decoded tokens, int64 [requests].

    ``executed`` by the decoder's count; ``decided`` Σ D_t of what it says it decided; ``full`` tokens × L.
    """

    executed: Ints
    decided: Ints
    full: Ints


def decide(found: BlockCountEvidence, asked: ClaimContext) -> Verdict:
    """Equal as integers, request by request; the share of full depth's blocks is listed."""
    errors = {"executed blocks = Σ D_t": np.abs(found.executed - found.decided).astype(float)}
    verdict = judge_exact(asked.claim, asked.model, errors, 0.0)
    if not found.full.sum():
        return verdict
    if verdict.verdict == "survived" and found.decided.sum() == found.full.sum():
        return asked.not_applicable("depth never fell in these requests: any decoder runs all blocks then")
    shares = [
        count_leg(name, blocks.sum() / found.full.sum(), len(found.full), "share of full depth's blocks")
        for name, blocks in (("executed", found.executed), ("E[D_t] / L", found.decided))
    ]
    return combine_verdict(asked.claim, asked.model, [*verdict.legs, *shares])


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Requests under a point whose depth comes down in many steps; what they say does not matter.

    Raises:
        Unsupported: the decoder under test declines, or does not count its work.
    """
    with evidence.subject.open(evidence.replay_validity.probing_point) as decoder:
        if not decoder.capabilities.counted:
            raise Unsupported("the decoder does not count its work")
        found = blocks_of(evidence, decoder)
    verdict = with_flop_evidence(decide(found, asked), evidence.flop_verification)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def blocks_of(evidence: ModelMeasurements, decoder: Decoder) -> BlockCountEvidence:
    """What ``decoder`` executed and decided while it continued openings of the run's text."""
    executed, decided, full = [], [], []
    for prompt in evidence.subject.prompts(REQUESTS, LENGTH):
        record = decoder.generate([prompt], NEW, frozenset())
        assert record.work is not None, "a decoder that says it counts"
        assert record.prompt_work is not None, "a decoder that says it counts"
        depth = record.tokens.of(0, phase=1).depth
        executed.append((record.work[0] - record.prompt_work[0]).tokens.sum())
        decided.append(depth.sum())
        full.append(len(depth) * evidence.subject.stepper.layers)
    return BlockCountEvidence(np.array(executed), np.array(decided), np.array(full))


QUESTIONS = (Question("EMAD-E5", "model", answer, suite="cost", decide=decide),)
