"""Are greedy tokens and depths those that were once recorded for these weights, on text of the same seed?"""

from __future__ import annotations

from typing import Any

from emad_ref.evidence.gathered import Evidence
from pytest_emad.auditing import Auditor
from pytest_emad.recording import Recorder

NEW, ROWS, LENGTH = 32, 4, 8


def test_tokens_and_depths_are_the_golden_ones(
    emad_evidence: Evidence, emad_record: Recorder, emad_audit: Auditor
) -> None:
    evidence, subject = emad_evidence, emad_evidence.subject
    point = evidence.bridging.probing_point
    prompts = subject.prompts(ROWS, LENGTH)
    with subject.open(point, max_rows=ROWS) as decoder:
        record = decoder.generate(prompts, NEW, frozenset())
        declared = decoder.capabilities.logit_noise
    found: dict[str, Any] = {
        "prompts": [p.tokens.tolist() for p in prompts],
        "point": {"probes": list(point.probes), "thresholds": [list(row) for row in point.thresholds]},
        "emitted": [e.tolist() for e in record.emitted],
        "depths": [record.tokens.of(row, phase=1).depth.tolist() for row in range(ROWS)],
    }
    read = f"{evidence.corpus}-seed-{subject.seed}"
    golden = emad_record.golden(f"{evidence.fingerprint[:16]}-{subject.dtype}-{read}-greedy", found)
    if golden is None:
        emad_record.note(f"{evidence.name}: golden row not applicable (no golden recorded)")
        return
    assert golden["prompts"] == found["prompts"], "the golden was recorded for other prompts: record it again"
    depths = found["depths"], golden["depths"]
    emad_audit.same_tokens(prompts, found["emitted"], golden["emitted"], point, *depths, declared=declared)
