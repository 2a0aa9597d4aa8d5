"""Memory: closed sessions release theirs, and a long session releases what it rolled back."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_emad.audit.memory import MemoryReading, check_session_memory_leak
from pytest_emad.benchmark.machine import absent_memory, live_tensor_bytes, used_memory_bytes
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.suite_support import AuditFindingGate

SESSION = 4 * 2**20  # bytes of K/V, at two a number, that a session is to hold
ENOUGH = 8 * 2**20  # over all sessions: well above what reading memory is off by
FED = 3 * 2**20  # bytes of K/V that one session is fed, and rolls back: token by token, where a decoder takes no more
FEWEST, MOST = 4, 64  # sessions, and requests as many; a model too small for that many to be seen is left alone
ROWS = 4


def test_what_is_closed_or_rolled_back_gives_its_memory_back(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    subject, geometry = emad_evidence.subject, emad_evidence.subject.stepper.geometry
    if absent := absent_memory(subject.stepper.device):
        pytest.skip(f"not applicable ({absent.reason})")
    token, longest = 2 * 2 * geometry.layers * geometry.kv_heads * geometry.head_dim, subject.window_size // 2
    tokens = min(math.ceil(SESSION / token), ROWS * longest)
    rows = math.ceil(tokens / longest)
    rounds = max(FEWEST, math.ceil(ENOUGH / (2 * tokens * token)))
    if rounds > MOST:
        pytest.skip(f"not applicable (K/V of {token} bytes a token are too few to be seen in the memory in use)")

    def read() -> MemoryReading:
        return used_memory_bytes(subject.stepper.device), live_tensor_bytes()

    prompts, _ = subject.draw_prompts_with_continuations(emad_rng, [tokens // rows] * rows, 1)
    with subject.open_decoder(subject.full_depth_point, max_rows=rows) as decoder:
        emad_audit(
            check_session_memory_leak(
                decoder, prompts, rounds, math.ceil(FED / token / rows), token, geometry.layers, read
            )
        )
