"""Premises of EMAD about entropy.

Entropy falls by layer (E1) and with context (E9). Probes are cheap (E3) and rank tokens like the full softmax (E4). A
steeper profile gains more (E11). One matrix embeds and unembeds (E13).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from emad_ref.calibration.monotonicity import describe_corrections, iterate_profile_warnings
from emad_ref.calibration.trace import Trace
from emad_ref.exit_rules import default_probes
from emad_ref.flop_ledger import probes_to_blocks_flops_ratio
from emad_ref.models.geometry import Geometry, published_geometry
from emad_ref.point import EntropyEstimator
from emad_ref.probes.estimators import probe_flops
from emad_ref.record import Bools, Floats
from pytest_emad.claims.base import (
    Answer,
    ClaimContext,
    Question,
    make_context_with_flop_evidence,
    make_model_question,
    make_unmet_quality_verdict,
)
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.pareto import MarginGain, measure_best_margin_gain
from pytest_emad.measurements.traces import PAPER_KS, PAPER_RANKS, READ
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import (
    LegTest,
    build_measured_count_leg,
    build_measured_estimate_leg,
    unmeasured_leg,
)
from pytest_emad.statistics.rates import (
    cap_document_weights,
    estimate_entropy_changes,
    estimate_entropy_slope,
    estimate_rank_correlation,
    estimate_within_document_slope,
    mean_rate,
)
from pytest_emad.statistics.units import ByDocument, DocumentMembership
from pytest_emad.statistics.verdicts import Leg, Outcome, Verdict
from pytest_emad.sweep.diagnostics import (
    compare_estimators,
    depth_by_position_doubling,
    entropy_agreement_auroc_by_layer,
    final_layer_agreement_rate,
    input_echo_rate_by_layer,
    replay_monotone_and_free_depths,
)

# ---------------------------------------------------------------- EMAD-E1: by layer


EntropySums = tuple[ByDocument, ByDocument]  # Σ_t H_ℓ(t) [documents, L], nats; tokens [documents]


def decide_entropy_profile(found: EntropySums, asked: ClaimContext) -> Verdict:
    """EMAD-E1: a leg per step between adjacent layers of the trace; the slope over all layers is listed as measured.

    A step that is flat within its interval leaves the row inconclusive. The decoder under test does not matter.
    """
    threshold = asked.claim.thresholds["entropy_rise_nats"]
    steps = estimate_entropy_changes(*found, threshold=threshold, rng=asked.rng)
    tests = [
        asked.make_leg_test(f"layer {layer} → {layer + 1}", step, "above", threshold, on=str(layer))
        for layer, step in enumerate(steps, start=1)
    ]
    slope = estimate_entropy_slope(*found, threshold=threshold, rng=asked.rng)
    return asked.decide_tests(tests, [build_measured_estimate_leg("slope over all layers", slope, threshold=threshold)])


def answer_entropy_profile(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-E1 from the evaluation trace; attaches each layer's readout quality, and rises of the profile."""
    if absent := evidence.subject.absent_quality:
        return Answer(asked.lacking(absent), evidence.corpus, evidence.fingerprint)
    traces = evidence.traces
    verdict = decide_entropy_profile(traces.entropy_sums, asked)
    profile = traces.profile
    targets = dict(zip(profile.probes, profile.targets_nats, strict=True))
    rises = {leg.on: leg.estimate for leg in verdict.legs if leg.outcome == "falsified"}
    rows = make_layer_readout_quality_rows(traces.evaluation.fully_read_trace, targets, rises)
    table = AttachedTable(f"readouts by layer on {evidence.corpus}", rows, "entropy profile")
    said = [each for each in (*iterate_profile_warnings(profile), describe_corrections(profile)) if each]
    notes = tuple(f"{evidence.name}, profile of {profile.corpus}: {each}" for each in said)
    return Answer(verdict, evidence.corpus, evidence.fingerprint, Attachments((table,), notes))


def make_layer_readout_quality_rows(
    trace: Trace, targets: Mapping[int, float], rises: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """A row per layer: mean entropy, share of echoed inputs, and share of agreement with the last layer.

    ``targets``: probe layer → isotonic target of the calibration text, nats. ``rises``: layer, as text → rise from it
    to the next, nats, if proven.
    """
    columns = zip(
        trace.entropy_nats.mean(axis=0),
        input_echo_rate_by_layer(trace),
        final_layer_agreement_rate(trace),
        entropy_agreement_auroc_by_layer(trace),
        strict=True,
    )
    return [
        {
            "layer": layer,
            "mean entropy, nats": float(entropy),
            "shown rise, nats": rises.get(str(layer - 1)),
            "target, nats": targets.get(layer),
            "echo %": float(echo),
            "agrees with last %": float(agrees),
            "AUROC of low entropy for that": None if np.isnan(auroc) else float(auroc),
        }
        for layer, (entropy, echo, agrees, auroc) in enumerate(columns, start=1)
    ]


# ---------------------------------------------------------------- EMAD-E3: cost of probes


GEOMETRIES = ("pythia-410m", "pythia-1.4b", "opt-1.3b", "llama-7b")
STRIDES = (4, 8)
CONTEXT = 512
K, RANK = 64, 64


# geometry → estimator and stride → FLOPs of all probes of a full-depth token over those of its blocks
ProbeShares = Mapping[str, Mapping[str, float]]


def decide_probe_cost(found: ProbeShares, asked: ClaimContext) -> Verdict:
    """EMAD-E3: a leg per geometry, estimator and stride, by arithmetic; a share survives only below the threshold.

    A token at full depth reads every probe, which gives the largest share of the paper's bound. The first geometry is
    the model under test: its worst leg gives the row's number if it decided equally.
    """
    threshold = asked.claim.thresholds["probe_share"]
    by_geometry = [
        [
            Leg(
                f"{geometry}, {estimator}",
                "survived" if share < threshold else "falsified",
                float(share),
                None,
                1,
                threshold,
                asked.claim.unit,
                good="lower",
            )
            for estimator, share in by_estimator.items()
        ]
        for geometry, by_estimator in found.items()
    ]
    legs = [leg for own in by_geometry for leg in own]
    if not legs:
        return asked.unmeasured("no geometry was counted")
    shallow = "" if by_geometry[0] else f"{asked.model} is too shallow for a probe at these strides"
    return asked.combine_legs(legs, headline=by_geometry[0], notes=[shallow])


def answer_probe_cost(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """The model under test beside small models of the papers."""
    geometries = {f"{evidence.name} (under test)": evidence.loaded.geometry}
    geometries |= {f"geometry of {name}": published_geometry(name) for name in GEOMETRIES}
    found = {name: compute_probe_share_by_estimator(geometry) for name, geometry in geometries.items()}
    estimators = dict.fromkeys(name for shares in found.values() for name in shares)
    rows = [
        {"estimator": estimator} | {f"{name} %": shares.get(estimator) for name, shares in found.items()}
        for estimator in estimators
    ]
    table = AttachedTable("cost of probing as a share of block FLOPs, by geometry", rows)
    return Answer(decide_probe_cost(found, asked), "", evidence.fingerprint, Attachments((table,)))


def compute_probe_share_by_estimator(geometry: Geometry) -> dict[str, float]:
    """Estimator and stride → share, at a context of ``CONTEXT`` tokens, for strides with a probe."""
    return {
        f"{estimator.name}, stride {stride}": probes_to_blocks_flops_ratio(
            geometry, (geometry.layers - 1) // stride, CONTEXT, probe_flops(geometry, estimator)
        )
        for stride in STRIDES
        if stride < geometry.layers
        for estimator in make_paper_estimators(geometry)
    }


def make_paper_estimators(geometry: Geometry) -> tuple[EntropyEstimator, ...]:
    """Full softmax, top-K by exact and low-rank retrieval, low-rank logits, and the linear probe, at fitting sizes."""
    k, rank = min(K, geometry.vocabulary), min(RANK, geometry.embedding_width)
    return (
        EntropyEstimator(),
        EntropyEstimator("topk", k=k),
        EntropyEstimator("topk", k=k, rank=rank, search="lowrank"),
        EntropyEstimator("lowrank", k=k, rank=rank),
        EntropyEstimator("linear"),
    )


# ---------------------------------------------------------------- EMAD-E4: ranking by cheap probes


ESTIMATORS = len(PAPER_KS) + len(PAPER_RANKS)  # of the paper


@dataclass(frozen=True)
class EstimatorRankCorrelationEvidence:
    """``full`` [tokens, probes] entropies of the full softmax after ``probes``, nats; ``document`` [tokens].

    ``readings``: estimator and size → uncorrected estimates [tokens, probes], nats. ``listed``: those that only report.
    """

    probes: Sequence[int]
    full: Floats
    readings: Mapping[str, Floats]
    document: DocumentMembership
    listed: Collection[str] = ()


def decide_estimator_rank_correlation(found: EstimatorRankCorrelationEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-E4: a leg per estimator, size and probe: Spearman's ρ against the threshold, resampled by document.

    Uses the paper's sizes (``EntropyEstimators.paper_topk_and_lowrank_estimators``) and uncorrected estimates. The
    linear probe, which is not the paper's, is only listed.
    """
    threshold = asked.claim.thresholds["spearman"]
    legs: dict[str, Estimate] = {}
    beside: list[Leg] = []
    for estimator, nats in found.readings.items():
        for i, probe in enumerate(found.probes):
            columns = nats[:, i], found.full[:, i]
            rho = estimate_rank_correlation(*columns, found.document, threshold=threshold, rng=asked.rng)
            name = f"{estimator}, layer {probe}"
            if estimator in found.listed:
                beside.append(build_measured_estimate_leg(name, rho, "ours, not the paper's"))
            else:
                legs[name] = rho
    return asked.judge_against_threshold(legs, "below", threshold, beside)


def answer_estimator_rank_correlation(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-E4 from estimators fitted on two splits, read on the third; attaches errors and changed exits."""
    if absent := make_unmet_quality_verdict(evidence, asked):
        return Answer(absent, evidence.corpus, evidence.fingerprint)
    estimates = evidence.entropy_estimators
    fitted = estimates.correct_estimators([*estimates.paper_topk_and_lowrank_estimators, estimates.linear_estimator])
    trace, document = estimates.take_trace_with_documents("evaluate", READ, fitted)
    full = estimates.take_probe_columns(trace.entropy_nats)
    read = {estimator: estimates.compute_uncorrected_estimates(trace, estimator) for estimator in fitted}
    readings, ours = {each.name: nats for each, nats in read.items()}, {estimates.linear_estimator.name}
    found = EstimatorRankCorrelationEvidence(estimates.probes, full, readings, document, listed=ours)
    verdict = decide_estimator_rank_correlation(found, asked)
    table = AttachedTable(
        "entropy estimators against the full softmax", make_estimator_layer_error_rows(evidence, full, read)
    )
    return Answer(verdict, evidence.corpus, evidence.fingerprint, Attachments((table,)))


def make_estimator_layer_error_rows(
    evidence: ModelMeasurements, full: Floats, read: Mapping[EntropyEstimator, Floats]
) -> list[dict[str, Any]]:
    """RMSE after correction, and the share of exit decisions at τ = mean H that would change."""
    targets = [(float(target),) for target in evidence.traces.profile.targets_nats]
    vocabulary, width = evidence.subject.stepper.unembedding.shape
    return [
        {
            "estimator": row.estimator.name,
            "layer": row.probe,
            "K / V": row.estimator.k / vocabulary if row.estimator.k else None,
            "r / d": row.estimator.rank / width if row.estimator.rank else None,
            "ρ": row.spearman,
            "bias, nats": row.bias_nats,
            "RMSE, nats": row.rmse_nats,
            "decisions changed %": next(iter(row.changed.values())),
            "tokens": row.tokens,
        }
        for row in compare_estimators(evidence.entropy_estimators.probes, full, read, targets)
    ]


# ---------------------------------------------------------------- EMAD-E9: along the context


HARD_LEG = "hard tokens that come after depth has fallen below what they would take"
EXERCISED = 0.05  # least share of skipped blocks for depth to count as falling, as for tasks


@dataclass(frozen=True)
class ContextDepthEvidence:
    """Per token [tokens]: log₂ of its position, entropy of the last layer in nats, depth if free, its document.

    ``above_cap`` bool [tokens]: its free depth exceeds what the monotone constraint allows.
    ``blocks_saved``: share of blocks that the monotone rule leaves out.
    """

    doublings: Floats
    entropy_nats: Floats
    free_depth: Floats
    above_cap: Bools
    document: DocumentMembership
    blocks_saved: float


def decide_context_entropy_and_depth(found: ContextDepthEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-E9: two legs, both within documents: the slope of entropy, and the share of hard tokens above the cap.

    Each document's own mean is removed, since long easy documents would cause a slope. A text may become easier on
    average and still need depth above the cap (``hard_above_cap``). Depths are replayed at the calibrated default. If
    no token is hard, or depth falls too little, the second leg is unmeasured, and the row does not survive.
    """
    tests, beside = [_entropy_slope(found, asked)], _free_depth(found, asked)
    late = _late_hard_tokens(found, asked)
    if isinstance(late, Absent):
        beside.insert(0, unmeasured_leg(HARD_LEG, late.reason))
    else:
        tests.append(late)
    return asked.decide_tests(tests, beside)


def _entropy_slope(found: ContextDepthEvidence, asked: ClaimContext) -> LegTest:
    most = asked.claim.thresholds["slope_nats"]
    columns = found.doublings, found.entropy_nats, found.document
    slope = estimate_within_document_slope(*columns, threshold=most, rng=asked.rng, unit=asked.claim.unit)
    return asked.make_leg_test("entropy of the last layer, within documents", slope, "above", most)


def _late_hard_tokens(found: ContextDepthEvidence, asked: ClaimContext) -> LegTest | Absent:
    """Share of each document's hard tokens above the cap, without documents that have none.

    Absent: no hard token can exceed the cap on any text.
    """
    most, least_nats = asked.claim.thresholds["hard_above_cap"], asked.claim.thresholds["hard_nats"]
    hard = found.entropy_nats > least_nats
    if not hard.any():
        return Absent(f"no token is above {least_nats:g} nats at the last layer: none can come too late")
    if found.blocks_saved < EXERCISED:
        left_out = f"{100 * found.blocks_saved:.1f} % of blocks are left out"
        return Absent(f"depth hardly falls: {left_out}, so none can come too late")
    document = DocumentMembership(found.document.number[hard])
    late = ByDocument.from_summed_windows(found.above_cap[hard].astype(np.int64), document)
    all_hard = ByDocument.from_summed_windows(np.ones(len(document), dtype=np.int64), document)
    columns = cap_document_weights(late, all_hard)
    share = mean_rate(*columns, threshold=most, rng=asked.rng, unit="share of hard tokens")
    return asked.make_leg_test(HARD_LEG, share, "above", most)


def _free_depth(found: ContextDepthEvidence, asked: ClaimContext) -> list[Leg]:
    columns = found.doublings, found.free_depth, found.document
    free = estimate_within_document_slope(*columns, threshold=0.0, rng=asked.rng, unit="layers per doubling")
    above = ByDocument.from_summed_windows(found.above_cap.astype(np.int64), found.document)
    tokens = ByDocument.from_summed_windows(np.ones(len(found.document), dtype=np.int64), found.document)
    capped = mean_rate(above, tokens, threshold=0.0, rng=asked.rng, unit="share of tokens")
    return [
        build_measured_estimate_leg("unconstrained exit depth, within documents", free),
        build_measured_estimate_leg("share of tokens whose unconstrained depth exceeds the monotone cap", capped),
    ]


def gather_context_depth(evidence: ModelMeasurements) -> ContextDepthEvidence:
    """From the evaluation trace and the calibrated default."""
    traces, trace = evidence.traces, evidence.traces.evaluation
    bound, free = replay_monotone_and_free_depths(trace, traces.profile.point(0.0))
    return ContextDepthEvidence(
        doublings=np.log2(trace.position + 1.0),
        entropy_nats=trace.entropy_nats[:, -1].astype(np.float64),
        free_depth=free.astype(np.float64),
        above_cap=free > bound,
        document=traces.document_of_token,
        blocks_saved=float(1 - bound.mean() / trace.layers),
    )


def make_context_depth_table(evidence: ModelMeasurements) -> Attachments:
    """Table by doubling of the position: depth at the calibrated default, and without the monotone constraint."""
    rows = [
        {
            "positions": f"{part.first}–{part.last}" if part.first < part.last else str(part.first),
            "tokens": part.tokens,
            "mean depth": part.depth,
            "mean free depth": part.free_depth,
            "mean entropy of the last layer, nats": part.entropy_nats,
        }
        for part in depth_by_position_doubling(evidence.traces.evaluation, evidence.traces.profile.point(0.0))
    ]
    return Attachments((AttachedTable(f"depth by position on {evidence.corpus}", rows, "depth by position"),))


# ---------------------------------------------------------------- EMAD-E11: gain of a flat profile


def decide_profile_slope_gain(found: tuple[EntropySums, MarginGain], asked: ClaimContext) -> Verdict:
    """EMAD-E11: the slope of the profile, the gain at equal quality, and its loss on evaluation; no threshold.

    An ablation gives the trend over models and corpora (``measurements.pareto.correlate_entropy_slope_with_gain``).
    """
    sums, (point, saved, rise) = found
    slope, documents = estimate_entropy_slope(*sums, threshold=0.0, rng=asked.rng), len(sums[1])
    chosen = f"{point}, chosen on validation"
    legs = [
        build_measured_count_leg(f"net reduction at equal quality ({chosen})", saved, documents, asked.claim.unit),
        build_measured_count_leg(f"perplexity at that point ({chosen})", rise, documents, "relative rise"),
        build_measured_estimate_leg("slope of the mean profile", slope),
    ]
    return asked.combine_legs(legs)


def answer_profile_slope_gain(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the evaluation trace, and the sweep of margins on validation."""
    verdict = make_unmet_quality_verdict(evidence, asked)
    if verdict is None:
        found = evidence.traces.entropy_sums, measure_best_margin_gain(evidence.baseline_comparison)
        verdict = decide_profile_slope_gain(found, make_context_with_flop_evidence(evidence, asked))
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


# ---------------------------------------------------------------- EMAD-E13: one matrix


def decide_tied_embedding(tied: bool, asked: ClaimContext) -> Verdict:
    """EMAD-E13: whether the config ties the embeddings; it always applies."""
    outcome: Outcome = "survived" if tied else "falsified"
    said = "the premise holds" if tied else "the premise does not hold: embedding and unembedding are separate"
    leg = Leg("tied unembedding", outcome, float(tied), None, 1, 1.0, asked.claim.unit, said, good="higher")
    return asked.combine_legs([leg])


def answer_tied_embedding(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the geometry of the model under test."""
    verdict = decide_tied_embedding(evidence.loaded.geometry.tied, asked)
    return Answer(verdict, fingerprint=evidence.fingerprint)


QUESTIONS = (
    Question(
        "EMAD-E1",
        "model",
        answer_entropy_profile,
        legs=lambda study, layers: layers - 1,
        decide=decide_entropy_profile,
    ),
    Question("EMAD-E3", "model", answer_probe_cost, decide=decide_probe_cost),
    Question(
        "EMAD-E4",
        "model",
        answer_estimator_rank_correlation,
        legs=lambda study, layers: ESTIMATORS * len(default_probes(layers)),
        decide=decide_estimator_rank_correlation,
    ),
    make_model_question(
        "EMAD-E9",
        gather_context_depth,
        decide_context_entropy_and_depth,
        attach=make_context_depth_table,
        legs=lambda study, layers: 2,
    ),
    Question("EMAD-E11", "model", answer_profile_slope_gain, decide=decide_profile_slope_gain),
    Question("EMAD-E13", "model", answer_tied_embedding, decide=decide_tied_embedding),
)
