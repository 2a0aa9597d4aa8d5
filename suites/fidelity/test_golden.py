"""Are greedy tokens and depths those that were once recorded for these weights?"""

from __future__ import annotations

NEW, ROWS, LENGTH = 32, 4, 8


def test_tokens_and_depths_are_the_golden_ones(emad_evidence, emad_record, emad_audit):
    evidence = emad_evidence
    point = evidence.probing_point
    prompts = evidence.prompts(ROWS, LENGTH)
    with evidence.open(point, max_rows=ROWS) as decoder:
        record = decoder.generate(prompts, NEW, frozenset())
    found = {
        "prompts": [p.tokens.tolist() for p in prompts],
        "point": {"probes": list(point.probes), "thresholds": [list(row) for row in point.thresholds]},
        "emitted": [e.tolist() for e in record.emitted],
        "depths": [record.tokens.of(row, phase=1).depth.tolist() for row in range(ROWS)],
    }
    golden = emad_record.golden(f"{evidence.fingerprint[:16]}-{evidence.dtype}-{evidence.corpus}-greedy", found)
    if golden is None:
        emad_record.note(f"{evidence.name}: golden row not applicable (no golden recorded)")
        return
    assert golden["prompts"] == found["prompts"], "the golden was recorded for other prompts: record it again"
    emad_audit.same_tokens(prompts, found["emitted"], golden["emitted"], point, found["depths"], golden["depths"])
