"""Identities of monotone depth: logits need no backfill (EMAD-E2) and blocks are counted exactly (E5).

EMAD-E12 tests the first of them, and the rise of perplexity, on an int8 copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.calibration.profile import profile_of
from emad_ref.calibration.trace import Trace, compute_stepwise_logits, concatenate_traces, take_trace, trace_stepwise
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import default_probes
from emad_ref.models.loading import LoadedModel
from emad_ref.models.quantisation import int8_copy
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import Floats, Ints
from emad_ref.replay.losses import replay_losses
from pytest_emad.audit.tolerances import measured_tolerance
from pytest_emad.claims.base import Answer, ClaimContext, Question, make_context_with_flop_evidence
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.operating_points import NllPair
from pytest_emad.statistics.legs import (
    build_measured_count_leg,
    decide_legs,
    legs_from_errors_and_tolerance,
    verdict_from_errors_and_tolerance,
)
from pytest_emad.statistics.rates import estimate_perplexity_rise, nll_pair_by_document
from pytest_emad.statistics.verdicts import Leg, Outcome, Verdict

PROMPT, FED = 6, 8  # tokens: before the first forced depth, and under forced depths
SEEDS = 2**16  # seed of the fed tokens


# ([comparisons] largest |difference| of a logit at a position; largest honest one, by dtype or declared noise)
LogitDifferences = tuple[Floats, float]


def decide_forced_depths(found: LogitDifferences, asked: ClaimContext, example: str = "") -> Verdict:
    """EMAD-E2: one leg, every logit of the decoder under test within the tolerance of the judge's readout at its depth.

    A suite may pass its own depth sequences (the bundled suite draws them with Hypothesis) to
    ``measure_forced_logit_differences``, and all differences to ``answer_from_differences``. The row does not apply to
    a decoder without forced depths. ``example``: the simplest input with a larger difference; "" without any.
    """
    differences, tolerance = found
    errors = {"logits under drawn depths": differences}
    return verdict_from_errors_and_tolerance(asked.claim, asked.model, errors, tolerance, example=example)


def answer_forced_depths(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-E2 with depth sequences from the run's generator, as many as the budget has examples."""
    layers, rng = evidence.subject.stepper.layers, asked.rng
    drawn = [
        measure_forced_logit_differences(
            evidence, np.sort(rng.integers(1, layers + 1, FED))[::-1], int(rng.integers(SEEDS))
        )
        for _ in range(evidence.subject.budget.examples)
    ]
    return answer_from_differences(evidence, asked, drawn)


def answer_from_differences(
    evidence: ModelMeasurements, asked: ClaimContext, drawn: Sequence[Floats], example: str = ""
) -> Answer:
    """The answer from ``measure_forced_logit_differences`` of every drawn depth sequence, without text.

    ``example``: as in ``decide_forced_depths``.
    """
    differences = np.concatenate(drawn) if drawn else np.zeros(0)
    allowed = evidence.subject.compute_allowed_difference(evidence.subject.capabilities)
    return Answer(decide_forced_depths((differences, allowed), asked, example), fingerprint=evidence.fingerprint)


def measure_forced_logit_differences(evidence: ModelMeasurements, falls: Sequence[int] | Ints, seed: int) -> Floats:
    """Largest |difference| of a logit at the last position of a prompt and at every position fed after it.

    Args:
        falls: depths 1…L; tokens are forced to their running minimum, which is admissible.
        seed: of the tokens, drawn from the whole vocabulary.

    Returns:
        [1 + len(falls)] of the prompt's last position, at full depth, and of each forced one. If the measured rounding
        of a position exceeds the tolerance, the difference is divided by their ratio.

    Raises:
        Unsupported: the decoder under test declines full depth or a depth from outside.
    """
    subject, depths = evidence.subject, np.minimum.accumulate(np.asarray(falls))
    tokens = np.random.default_rng(seed).integers(0, subject.stepper.vocabulary_size, PROMPT + len(depths))
    at_depths = np.append(subject.stepper.layers, depths)
    reference = subject.reference_lens(tokens).slice_positions(PROMPT - 1, len(tokens)).at_depth(at_depths)
    with subject.open_decoder(subject.full_depth_point) as decoder:
        session, step = decoder.start([Prompt(tokens[:PROMPT])])
        seen = [step.logits[0, 0]]
        for token, depth in zip(tokens[PROMPT:], depths, strict=True):
            seen.append(session.feed(token[None, None], np.array([[depth]])).logits[0, 0])
        session.close()
        tolerance = subject.compute_allowed_difference(decoder.capabilities)
    differences: Floats = np.abs(np.array(seen) - reference).max(axis=1)
    for at in np.flatnonzero(differences > tolerance).tolist():
        allowed = measured_tolerance(subject.reference_lens, tokens[: PROMPT + at], [int(at_depths[at])], tolerance)
        differences[at] *= tolerance / allowed
    return differences


# ---------------------------------------------------------------- EMAD-E5: blocks executed


REQUESTS, FEWEST_REQUESTS = 6, 3  # requests of the reference decoder with a large model
NEW, LENGTH = 24, 8  # new tokens and prompt tokens of a request; with only two, depth may never fall


# blocks of each request's decoded tokens, int64 [requests]: executed by the decoder's count, Σ D_t of its reported
# depths, and tokens × L
BlockCounts = tuple[Ints, Ints, Ints]


def decide_block_count(found: BlockCounts, asked: ClaimContext) -> Verdict:
    """EMAD-E5: equal integers for each request, without the prompt; lists the share of full depth's blocks.

    It does not apply to a decoder that does not count its work, or if depth never fell.
    """
    executed, decided, full = found
    errors = {"executed blocks = Σ D_t": np.abs(executed - decided).astype(float)}
    legs = legs_from_errors_and_tolerance(asked.claim, errors, 0.0)
    if not full.sum():
        return asked.combine_legs(legs)
    if decided.sum() == full.sum() and all(leg.outcome == "survived" for leg in legs):
        return asked.not_applicable("depth never fell in these requests: any decoder runs all blocks then")
    shares = [
        build_measured_count_leg(name, blocks.sum() / full.sum(), len(full), "share of full depth's blocks")
        for name, blocks in (("executed", executed), ("E[D_t] / L", decided))
    ]
    return asked.combine_legs([*legs, *shares])


def answer_block_count(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-E5 from requests under a point with many depth steps; their text does not matter.

    Raises:
        Unsupported: the decoder under test declines, or does not count its work.
    """
    with evidence.subject.open_decoder(evidence.replay_validity.probing_point) as decoder:
        if not decoder.capabilities.counted:
            raise Unsupported("the decoder does not count its work")
        found = count_blocks(evidence, decoder)
    verdict = decide_block_count(found, make_context_with_flop_evidence(evidence, asked))
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def count_blocks(evidence: ModelMeasurements, decoder: Decoder) -> BlockCounts:
    """Executed and decided blocks of ``decoder`` while it continues openings of the run's text."""
    executed, decided, full = [], [], []
    requests = evidence.subject.scale_by_audit_share(REQUESTS, FEWEST_REQUESTS)
    for prompt in evidence.subject.make_equal_prompts(requests, LENGTH):
        record = decoder.generate([prompt], NEW, frozenset())
        if record.work is None or record.prompt_work is None:
            raise BadArgument(
                "record of generate", f"work={record.work}, prompt_work={record.prompt_work}",
                "both, of a decoder whose capabilities say counted=True", "report both, or declare counted=False",
            )  # fmt: skip
        depth = record.tokens.select_sequence(0, phase=1).depth
        executed.append((record.work[0] - record.prompt_work[0]).tokens.sum())
        decided.append(depth.sum())
        full.append(len(depth) * evidence.subject.stepper.layers)
    return np.array(executed), np.array(decided), np.array(full)


# ---------------------------------------------------------------- EMAD-E12: an int8 copy


INT8_CALIBRATED = 40  # windows: means over a plain pass, which average the noise of shared scales
# Windows decoded token by token, one per document: about 40 s, 8 and 16 minutes with 12 layers. Those of smoke can only
# falsify the row; it survives from 300 documents on, and only with a loss near 0.
INT8_EVALUATED = {"smoke": 36, "standard": 400, "full": 800}
INT8_FED, INT8_PROMPT = 12, 6


@dataclass(frozen=True)
class Int8AdaptiveDepthEvidence:
    """``logits``: of positions under forced depths. ``sums``: NLL at ``point`` and at the copy's own full depth."""

    logits: LogitDifferences
    point: OperatingPoint
    net_reduction: float
    sums: NllPair


def decide_adaptive_depth_on_int8(found: Int8AdaptiveDepthEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-E12: EMAD-E2's invariant on an int8 copy against its own full depth, and perplexity if enough is saved.

    If the calibrated default saves too little, the invariant can still falsify the row, but not let it survive. Both
    use token-by-token passes, because of the copy's dynamic scales, by the project's stepper at points calibrated on
    the copy, so no bridge is needed.
    """
    claim, saved = asked.claim, found.net_reduction
    point, documents, digest = found.point.name, len(found.sums[2]), found.point.digest
    reduction = build_measured_count_leg(
        f"{point}: reduction", saved, documents, "net FLOP reduction", point=digest, kind="reduction"
    )
    invariant, smallest = _invariant_leg(*found.logits), claim.thresholds["flop_reduction"]
    if saved < smallest:
        legs = [reduction, invariant]
        if invariant.outcome == "falsified":
            return asked.combine_legs(legs)
        reason = f"{point}, calibrated on the copy, saves {100 * saved:.1f} %"
        return asked.not_applicable(f"no point saves {100 * smallest:g} % of FLOPs: {reason}", legs)
    bound = claim.thresholds["perplexity_rise"]
    estimate = estimate_perplexity_rise(*found.sums, threshold=bound, rng=asked.rng)
    test = asked.make_leg_test(f"{point}: perplexity", estimate, "above", bound, point=digest, kind="perplexity")
    return asked.combine_legs([reduction, invariant, *decide_legs([test], asked.other_legs)])


def _invariant_leg(differences: Floats, tolerance: float) -> Leg:
    moved, compared = float(differences.max()), len(differences)
    outcome: Outcome = "survived" if moved <= tolerance else "falsified"
    unit = "largest |difference| of a logit"
    return Leg("logits under drawn depths", outcome, moved, None, compared, tolerance, unit)


def answer_adaptive_depth_on_int8(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-E12 by decoding token by token; the reference is the copy's own full depth."""
    if absent := evidence.subject.absent_quality:
        return Answer(asked.lacking(absent), evidence.corpus, evidence.fingerprint)
    try:
        int8 = int8_copy(evidence.loaded)
    except BadArgument as refusal:
        return Answer(asked.unmeasured(str(refusal)), evidence.corpus, evidence.fingerprint)
    point, trace = calibrate_and_trace_quantised_copy(evidence, int8)
    loss = replay_losses(trace, int8.geometry, [point])[1]
    logits = measure_int8_forced_logit_differences(evidence, int8)
    found = Int8AdaptiveDepthEvidence(logits, point, loss.net_reduction, nll_pair_by_document(loss))
    return Answer(decide_adaptive_depth_on_int8(found, asked), evidence.corpus, evidence.fingerprint)


def calibrate_and_trace_quantised_copy(evidence: ModelMeasurements, int8: LoadedModel) -> tuple[OperatingPoint, Trace]:
    """(The copy's calibrated default, the trace of its evaluation windows)."""
    subject = evidence.subject
    calibration = take_trace(int8.stepper, subject.cut_windows("calibrate", INT8_CALIBRATED))
    texts = subject.cut_windows("evaluate", INT8_EVALUATED[subject.budget.name])
    profile = profile_of(
        calibration,
        default_probes(int8.stepper.layers),
        model=int8.name,
        fingerprint=int8.fingerprint,
        corpus=evidence.corpus,
        dtype="int8",
    )
    return profile.point(0.0), concatenate_traces([trace_stepwise(int8.stepper, text) for text in texts])


def measure_int8_forced_logit_differences(evidence: ModelMeasurements, int8: LoadedModel) -> LogitDifferences:
    """([positions] largest |Δlogit| between forced depths and the copy's own full depth, largest honest one).

    Raises:
        Unsupported: the decoder under test declines full depth or a depth from outside.
    """
    rng = np.random.default_rng(evidence.study.seed)
    tokens = rng.integers(0, int8.stepper.vocabulary_size, INT8_PROMPT + INT8_FED)
    depths = np.sort(rng.integers(1, int8.stepper.layers + 1, INT8_FED))[::-1]
    reference = compute_stepwise_logits(int8.stepper, tokens, INT8_PROMPT - 1)[1:]  # a prompt's last position is a step
    subject = evidence.for_model_copy_in_memory(int8).subject
    with subject.open_decoder(evidence.subject.full_depth_point) as decoder:
        allowed = subject.compute_allowed_difference(decoder.capabilities)
        session, _ = decoder.start([Prompt(tokens[:INT8_PROMPT])])
        forced = zip(tokens[INT8_PROMPT:], depths, strict=True)
        steps = [session.feed(token[None, None], np.array([[depth]])) for token, depth in forced]
    seen = np.array([step.logits[0, 0] for step in steps])
    differences: Floats = np.abs(seen - reference[np.arange(INT8_FED), depths - 1]).max(axis=1)
    return differences, allowed


QUESTIONS = (
    Question("EMAD-E2", "model", answer_forced_depths, suite="invariants", decide=decide_forced_depths),
    Question("EMAD-E5", "model", answer_block_count, suite="cost", decide=decide_block_count),
    Question(
        "EMAD-E12",
        "model",
        answer_adaptive_depth_on_int8,
        legs=lambda study, layers: 1,
        budget="standard",
        decide=decide_adaptive_depth_on_int8,
    ),
)
