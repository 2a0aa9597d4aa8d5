"""Early-exit rules on a decoder-only model: the table of rules that replay cannot decide, made by decoding.

Softmax response stands on the Pareto table by replay (EMAD-R3). A contrast or a pruned vocabulary changes what is
emitted, so these rules are decoded: teacher-forced on openings of the evaluated documents, beside EMAD as calibrated
and full depth on the same tokens. Under pruning some tokens have no probability and a text no perplexity; the share of
next tokens that are told right compares them all.
"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.policy.early_exit import early_exit
from emad_ref.protocol import Prompt
from pytest_emad.exits import RULES, THRESHOLD, costs, difference, minimum_layers

TEXTS, TOKENS = 20, 20
SATURATION = ("saturation", "none")


def test_early_exit_rules_by_decoding(emad_evidence, emad_record, emad_rng):
    evidence = emad_evidence
    if reason := evidence.without_quality:
        pytest.skip(f"not applicable ({reason})")
    texts = np.stack([prompt.tokens for prompt in evidence.prompts(TEXTS, TOKENS)])
    rows, reference = [], None
    for name, minimum, point in rules(evidence, emad_record):
        right, nll, depth, spent = decoded(evidence, point, texts)
        first = reference is None
        reference = (right, spent) if first else reference
        lost = difference(
            reference[0].mean(axis=1), right.mean(axis=1), threshold=0.0, rng=emad_rng, unit="accuracy lost"
        )
        rows.append(
            {
                "rule": name,
                "j": minimum,
                "mean depth": float(depth.mean()),
                "accuracy": float(right.mean()),
                "accuracy lost": lost.value,
                "low": None if first else bound(lost.low),
                "high": None if first else bound(lost.high),
                "perplexity": float(np.exp(nll.mean())) if np.isfinite(nll).all() else None,
                "net reduction": None if spent is None else 1 - spent.decoding / reference[1].decoding,
                "confidence share": None if spent is None else spent.confidence / spent.decoding,
            }
        )
    emad_record.table(f"early-exit rules by decoding on {evidence.corpus}", evidence.name, rows)
    assert rows[0]["mean depth"] == evidence.stepper.layers
    assert all(row["mean depth"] >= row["j"] for row in rows if row["j"] is not None)


def bound(value):
    """As JSON knows numbers: where too few texts differ, nothing bounds the mean."""
    return float(value) if np.isfinite(value) else None


def rules(evidence, record):
    """(name, minimum layer, point): full depth, EMAD as calibrated, then each rule at the paper's first minimum."""
    yield "full depth", None, evidence.full
    yield "EMAD, mean − margin 0", None, evidence.profile.point(0.0)
    layers, vocabulary = evidence.stepper.layers, evidence.stepper.vocabulary
    minimum = minimum_layers(layers)[0]
    for name, (signal, pruning) in {**RULES, "saturation": SATURATION}.items():
        try:
            point = early_exit(signal, layers, vocabulary, minimum, THRESHOLD, pruning=pruning)
        except BadArgument as refusal:  # a vocabulary too small to prune, or too few layers
            record.note(f"{evidence.name}: {name} is not on the table: {refusal}")
            continue
        yield name, minimum, point


def decoded(evidence, point, texts):
    """Teacher-forced: right, nats and depth, [texts, decided positions] each, and costs per text (None: uncounted)."""
    prompts = [Prompt(text[:1]) for text in texts]
    with evidence.open(point, max_rows=len(texts)) as decoder:
        session, step = decoder.start(prompts)
        steps = [step, *(session.feed(texts[:, [at]]) for at in range(1, TOKENS - 1))]
        work = session.work
        session.close()
    logits = np.concatenate([each.logits for each in steps], axis=1)
    targets, depth = texts[:, 1:], np.concatenate([each.depth for each in steps], axis=1)
    top = logits.max(axis=-1, keepdims=True)
    own = np.take_along_axis(logits - top, targets[..., None], axis=-1)[..., 0]
    nll = np.log(np.exp(logits - top).sum(axis=-1)) - own
    spent = None if work is None else costs(work, evidence.loaded.geometry, len(texts))
    return logits.argmax(axis=-1) == targets, nll, depth, spent
