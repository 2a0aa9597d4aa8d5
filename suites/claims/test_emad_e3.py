"""EMAD-E3: is probe overhead below 5 % of block FLOPs at stride 4–8? Arithmetic on geometries, no weights."""

from __future__ import annotations

import pytest

from emad_ref.meters.flops import probe_share
from emad_ref.models.geometry import geometry_named
from emad_ref.point import Estimator
from emad_ref.readout.cost import reading_flops
from emad_ref.verdict.judge import judge_e3

GEOMETRIES = ("pythia-410m", "pythia-1.4b", "opt-1.3b", "llama-7b")
STRIDES = (4, 8)
CONTEXT = 512
K, RANK = 64, 64


@pytest.mark.emad(claim="EMAD-E3")
def test_probes_cost_little(emad_evidence, emad_record, emad_register):
    """A token that runs to full depth has read every probe: the share the paper's "<5 %" speaks of, at its largest.

    Every estimator of the paper is a leg: exact top-K computes the products of a full head, and says so.
    """
    geometries = {f"{emad_evidence.name} (under test)": emad_evidence.loaded.geometry}
    geometries |= {name: geometry_named(name) for name in GEOMETRIES}
    shares = {
        name: {
            f"{estimator.name}, stride {stride}": probe_share(
                geometry, (geometry.layers - 1) // stride, CONTEXT, reading_flops(geometry, estimator)
            )
            for stride in STRIDES
            if stride < geometry.layers
            for estimator in estimators(geometry)
        }
        for name, geometry in geometries.items()
    }
    verdict = judge_e3(shares, emad_register["EMAD-E3"], emad_evidence.name)
    emad_record.claim(verdict, fingerprint=emad_evidence.fingerprint)


def estimators(geometry):
    """Full, top-K by exact and by low-rank retrieval, low-rank logits, and the linear probe, at sizes that fit."""
    k, rank = min(K, geometry.vocabulary), min(RANK, geometry.embedding_width)
    return (
        Estimator(),
        Estimator("topk", k=k),
        Estimator("topk", k=k, rank=rank, search="lowrank"),
        Estimator("lowrank", k=k, rank=rank),
        Estimator("linear"),
    )
