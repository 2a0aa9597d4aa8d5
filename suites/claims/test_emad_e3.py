"""EMAD-E3: is probe overhead below 5 % of block FLOPs at stride 4–8? Arithmetic on geometries, no weights."""

from __future__ import annotations

import pytest

from emad_ref.meters.flops import probe_share
from emad_ref.models.geometry import geometry_named
from emad_ref.verdict.judge import judge_e3

GEOMETRIES = ("pythia-410m", "pythia-1.4b", "opt-1.3b", "llama-7b")
STRIDES = (4, 8)
CONTEXT = 512


@pytest.mark.emad(claim="EMAD-E3")
def test_probes_cost_little(emad_evidence, emad_record, emad_register):
    """A token that runs to full depth has read every probe: the share the paper's "<5 %" speaks of, at its largest."""
    geometries = {f"{emad_evidence.name} (under test)": emad_evidence.loaded.geometry}
    geometries |= {name: geometry_named(name) for name in GEOMETRIES}
    shares = {
        name: {
            f"full softmax, stride {stride}": probe_share(geometry, (geometry.layers - 1) // stride, CONTEXT)
            for stride in STRIDES
            if stride < geometry.layers
        }
        for name, geometry in geometries.items()
    }
    verdict = judge_e3(shares, emad_register["EMAD-E3"], emad_evidence.name)
    emad_record.claim(verdict, fingerprint=emad_evidence.fingerprint)
