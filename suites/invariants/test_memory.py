"""Does a decoder that serves many sessions give back what the closed ones held?"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from emad_ref.audit.memory import memory
from emad_ref.evidence.gathered import Evidence
from emad_ref.meters.memory import used_bytes, without_reading
from pytest_emad.auditing import Auditor

SESSION = 4 * 2**20  # bytes of K/V, at two a number, that a session is to hold
ENOUGH = 32 * 2**20  # over all of them: well above what reading memory is off by
MOST = 64  # sessions and requests; a model too small for that many to be seen is left alone
ROWS = 4


def test_closed_sessions_give_their_memory_back(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject, geometry = emad_evidence.subject, emad_evidence.subject.stepper.geometry
    if reason := without_reading(subject.stepper.device):
        pytest.skip(f"not applicable ({reason})")
    token = 2 * 2 * geometry.layers * geometry.kv_heads * geometry.head_dim
    tokens = min(math.ceil(SESSION / token), ROWS * (subject.window - 1))
    rows = math.ceil(tokens / (subject.window - 1))
    rounds = math.ceil(ENOUGH / (2 * tokens * token))
    if rounds > MOST:
        pytest.skip(f"not applicable (K/V of {token} bytes a token are too few to be seen in the memory in use)")
    prompts, _ = subject.drawn_rows(emad_rng, [tokens // rows] * rows, 1)
    with subject.open(subject.full, max_rows=rows) as decoder:
        read = partial(used_bytes, subject.stepper.device)
        emad_audit(memory(decoder, prompts, rounds, tokens * token, read))
