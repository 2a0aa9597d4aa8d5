"""EMAD-E8: does adaptive depth compose with speculative decoding, in the verifier only and in draft and verifier?"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from emad_ref.decoding.speculative import speculate
from emad_ref.verdict.interval import log_ratio
from emad_ref.verdict.legs import counted, estimated, not_applicable, row
from pytest_emad.pairing import CORPUS, DRAFTED, speculation

CHECKED = 4  # prompts on which the output is compared token by token


@pytest.mark.emad(claim="EMAD-E8", measures=True)
def test_adaptive_depth_composes_with_speculation(emad_pair, emad_record, emad_register):
    """Lossless towards the verifier at its own point: where EMAD decides its depth, the EMAD model's output."""
    pair, claim = emad_pair, emad_register["EMAD-E8"]
    with emad_record.unless_unsupported(claim.id, pair.name):
        if reason := pair.without_quality:
            verdict = not_applicable(claim, pair.name, reason)
        else:
            verdict = row(claim, pair.name, composed(pair, pair.auditor(emad_record)))
        emad_record.claim(verdict, corpus=CORPUS, fingerprint=pair.fingerprint)


def composed(pair, audit):
    depths = {
        "no EMAD": (pair.small.full, pair.large.full),
        "EMAD in the verifier": (pair.small.full, pair.emad_point),
        "EMAD in draft and verifier": (pair.small.profile.point(0.0), pair.emad_point),
    }
    with ExitStack() as stack:
        partners = {name: stack.enter_context(pair.partners(*points, rows=CHECKED)) for name, points in depths.items()}
        for draft, verifier in partners.values():
            same_output(pair, audit, draft, verifier)
        timings, results = pair.timed({name: speculative(*both) for name, both in partners.items()}, pair.size.reported)
    legs = []
    for name in sorted(depths):  # adaptive depth first: the row quotes its first leg
        seconds = timings.seconds[name]
        accepted = [done.acceptance for done in results[name] if done.acceptance is not None]
        legs += [
            estimated(f"{name}: speed against none", log_ratio(timings.seconds["no EMAD"], seconds)),
            counted(f"{name}: tokens per second", pair.timed_new / np.median(seconds), len(seconds), "tokens/s"),
            counted(f"{name}: acceptance", np.mean(accepted), len(accepted), "accepted per judged draft"),
            counted(f"{name}: rows whose output is the verifier's own", CHECKED, CHECKED, "rows, up to ties"),
        ]
    return legs


def speculative(draft, verifier):
    return lambda prompt, new: speculate(draft, verifier, [prompt], new, k=DRAFTED)


def same_output(pair, audit, draft, verifier):
    """Fail the test unless speculation emits what its verifier emits alone."""
    prompts = pair.prompts(CHECKED)
    own = verifier.decoder.generate(prompts, pair.timed_new, frozenset())
    found = speculation(draft, verifier).generate(prompts, pair.timed_new, frozenset())
    emitted = [[tokens.tolist() for tokens in record.emitted] for record in (found, own)]
    audit.same_tokens(prompts, *emitted, verifier.point)
