"""EMAD-E3: does probing cost less than 5 % of block FLOPs in small models at stride 4–8? (EMAD, Method, Complexity)

A token that runs to full depth has read every probe: the share the paper's bound speaks of, at its largest. Arithmetic
on geometries, no weights: a leg has no interval. Every estimator of the paper is a leg on every geometry: exact top-K
computes the products of a full head, and says so. It always applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emad_ref.benchmark.flops import probe_share
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.models.geometry import Geometry, geometry_named
from emad_ref.point import Estimator
from emad_ref.probes.estimators import probe_flops
from emad_ref.statistics.legs import combine_verdict
from emad_ref.statistics.verdicts import Leg, Outcome, Verdict

GEOMETRIES = ("pythia-410m", "pythia-1.4b", "opt-1.3b", "llama-7b")
STRIDES = (4, 8)
CONTEXT = 512
K, RANK = 64, 64


@dataclass(frozen=True)
class ProbeCostEvidence:
    """Geometry → estimator and stride → FLOPs of all probes of a token at full depth as a share of its blocks'."""

    shares: Mapping[str, Mapping[str, float]]


def decide(found: ProbeCostEvidence, asked: ClaimContext) -> Verdict:
    """One leg per geometry, estimator and stride; a share survives below the threshold, not at it."""
    threshold, legs = asked.claim.thresholds["probe_share"], []
    for geometry, by_estimator in found.shares.items():
        for estimator, share in by_estimator.items():
            outcome: Outcome = "survived" if share < threshold else "falsified"
            name = f"{geometry}, {estimator}"
            legs.append(Leg(name, outcome, float(share), None, 1, threshold, asked.claim.unit, good="lower"))
    return combine_verdict(asked.claim, asked.model, legs) if legs else asked.unmeasured("no geometry was counted")


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """The model under test beside small models of the papers."""
    geometries = {f"{evidence.name} (under test)": evidence.loaded.geometry}
    geometries |= {name: geometry_named(name) for name in GEOMETRIES}
    found = ProbeCostEvidence({name: shares_of(geometry) for name, geometry in geometries.items()})
    return Answer(decide(found, asked), fingerprint=evidence.fingerprint)


def shares_of(geometry: Geometry) -> dict[str, float]:
    """Estimator and stride → share, at a context of ``CONTEXT`` tokens; strides that leave a probe."""
    return {
        f"{estimator.name}, stride {stride}": probe_share(
            geometry, (geometry.layers - 1) // stride, CONTEXT, probe_flops(geometry, estimator)
        )
        for stride in STRIDES
        if stride < geometry.layers
        for estimator in estimators(geometry)
    }


def estimators(geometry: Geometry) -> tuple[Estimator, ...]:
    """Full, top-K by exact and by low-rank retrieval, low-rank logits, and the linear probe, at sizes that fit."""
    k, rank = min(K, geometry.vocabulary), min(RANK, geometry.embedding_width)
    return (
        Estimator(),
        Estimator("topk", k=k),
        Estimator("topk", k=k, rank=rank, search="lowrank"),
        Estimator("lowrank", k=k, rank=rank),
        Estimator("linear"),
    )


QUESTIONS = (Question("EMAD-E3", "model", answer, decide=decide),)
