"""Whether scores of published tasks hold for this decoder: one pass per request equals decoding token by token."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.audit.finding import Finding
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.suite_support import AuditFindingGate

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
from pytest_emad.tasks.continuation_scoring import ForcedInput, score_by_decoding, score_by_replay

ROWS, CONTEXT = 4, 8
CONTINUATIONS = (1, 3, 7, 12)  # tokens: rows of a batch end one by one


def test_at_full_depth_log_likelihoods_are_those_of_decoding_token_by_token(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate
) -> None:
    subject, longest = emad_evidence.subject, max(CONTINUATIONS)
    if subject.is_seq2seq:
        pytest.skip("not applicable (an encoder-decoder model: requests have no source)")
    texts = [prompt.tokens.tolist() for prompt in subject.make_equal_prompts(ROWS, CONTEXT + longest)]
    requests = [
        ForcedInput(tuple(text[: CONTEXT + n - 1]), CONTEXT - 1, (text[CONTEXT + n - 1],))
        for text, n in zip(texts, CONTINUATIONS, strict=True)
    ]
    with subject.open_decoder(subject.full_depth_point, max_rows=ROWS) as decoder:
        slow = np.array([likelihood for likelihood, _ in score_by_decoding(decoder, requests)])
        noise = subject.compute_allowed_difference(decoder.capabilities)
    fast = np.array(
        [likelihood for likelihood, _ in score_by_replay(subject.stepper, subject.full_depth_point, requests)]
    )
    allowed = 2 * noise * np.array(CONTINUATIONS)  # per token: its logit and the normaliser
    off = np.abs(fast - slow)
    detail = f"log-likelihoods off by {off.max():.2g} nats over {CONTINUATIONS} tokens"
    emad_audit(Finding("log-likelihoods", bool((off <= allowed).all()), detail, n=sum(CONTINUATIONS), ties=0))
