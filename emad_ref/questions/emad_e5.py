"""EMAD-E5: is the block compute of a run E[D_t] / L of full depth's, exactly? (EMAD, Method, Complexity and speedup)

By the decoder's own count of what it executed while decoding, prompt left out. Weights need not mean anything. It does
not apply to a decoder that does not count its work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.evidence.gathered import Evidence
from emad_ref.protocol import Decoder
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.record import Ints
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.exact import judge_exact

REQUESTS, NEW, LENGTH = 2, 24, 8  # tokens of a request: new ones, and of its prompt


@dataclass(frozen=True)
class Found:
    """Blocks of each request's decoded tokens, int64 [requests].

    ``executed`` by the decoder's count; ``decided`` Σ D_t of what it says it decided; ``full`` tokens × L.
    """

    executed: Ints
    decided: Ints
    full: Ints


def decide(found: Found, asked: Asked) -> Verdict:
    """Equal as integers, and as shares of full depth."""
    errors = {
        "counted blocks = Σ D_t": np.abs(found.executed - found.decided).astype(float),
        "counted share = E[D_t]/L": np.abs(found.executed / found.full - found.decided / found.full),
    }
    return judge_exact(asked.claim, asked.model, errors, 0.0)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """Requests under a point whose depth comes down in many steps; what they say does not matter."""
    with evidence.subject.open(evidence.bridging.probing_point) as decoder:
        if not decoder.capabilities.counted:
            reason = "the decoder does not count its work"
            return Answer(asked.not_applicable(reason), fingerprint=evidence.fingerprint)
        found = counted(evidence, decoder)
    return Answer(decide(found, asked), fingerprint=evidence.fingerprint)


def counted(evidence: Evidence, decoder: Decoder) -> Found:
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
    return Found(np.array(executed), np.array(decided), np.array(full))


QUESTION = Question("EMAD-E5", "model", answer, suite="cost")
