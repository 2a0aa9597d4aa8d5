"""EMAD-E12: is adaptive depth orthogonal to quantisation? (EMAD, Discussion, Composability)

Two legs on an int8 copy of the model, held against the copy's own full depth: logits under forced admissible depths are
the copy's (the invariant of EMAD-E2), and where the calibrated default saves enough FLOPs, perplexity rises by no more
than EMAD-F1 allows. Where it saves less, nothing was composed: the invariant can still falsify the row, but it does not
carry it, and the row does not apply.

Both come from token-by-token passes, as the copy's dynamic scales demand. The second replays depths over such passes by
our own stepper, at points calibrated on the copy: no decoder's replay of the original is spoken for, so no bridge is
asked. It does not apply to weights without quality, and is unmeasured where the model has no int8 copy here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.calibration.profile import profile_of
from emad_ref.calibration.trace import (
    TokenSequence,
    Trace,
    concatenate_traces,
    stepwise_logits,
    take_trace,
    trace_stepwise,
)
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.errors import BadArgument
from emad_ref.exit_rules.rules import default_probes
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.traces import documents_of
from emad_ref.models.loading import LoadedModel
from emad_ref.models.quantisation import int8_copy
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Floats
from emad_ref.statistics.legs import combine_verdict, count_leg, decide_legs, leg_test
from emad_ref.statistics.rates import perplexity_rise
from emad_ref.statistics.units import ByDocument
from emad_ref.statistics.verdicts import Leg, Outcome, Verdict
from emad_ref.sweep.losses import PointLoss, loss_table

CALIBRATED = 40  # windows: means of a plain pass, in which the noise of shared scales averages out
# Windows decoded token by token, from as many documents: of a model of 12 layers some 40 s, 8 and 16 minutes. Those of
# smoke can falsify the row; a perplexity row survives from 300 documents on, and only if it loses nearly nothing there.
EVALUATED = {"smoke": 36, "standard": 400, "full": 800}
FED, PROMPT = 12, 6


@dataclass(frozen=True)
class QuantisedRise:
    """NLL sums at a point and at the copy's own full depth, nats, and tokens, by document."""

    point: str
    net_reduction: float
    nll_nats: ByDocument
    full_nll_nats: ByDocument
    tokens: ByDocument


@dataclass(frozen=True)
class QuantisationEvidence:
    """``differences`` [positions] largest |difference| of a logit under forced depths; ``tolerance`` the honest one."""

    differences: Floats
    tolerance: float
    rise: QuantisedRise


def decide(found: QuantisationEvidence, asked: ClaimContext) -> Verdict:
    """Invariant and perplexity; the latter only where enough FLOPs are saved, and the share saved is listed."""
    claim, rise = asked.claim, found.rise
    reduction = count_leg(f"{rise.point}: reduction", rise.net_reduction, len(rise.tokens), "net FLOP reduction")
    invariant, smallest = _invariant(found), claim.thresholds["flop_reduction"]
    if rise.net_reduction < smallest:
        legs = [reduction, invariant]
        if invariant.outcome == "falsified":
            return combine_verdict(claim, asked.model, legs)
        saved = f"{rise.point}, calibrated on the copy, saves {100 * rise.net_reduction:.1f} %"
        return replace(asked.not_applicable(f"no point saves {100 * smallest:g} % of FLOPs: {saved}"), legs=tuple(legs))
    bound = claim.thresholds["perplexity_rise"]
    estimate = perplexity_rise(rise.nll_nats, rise.full_nll_nats, rise.tokens, threshold=bound, rng=asked.rng)
    test = leg_test(f"{rise.point}: perplexity", estimate, "above", bound, claim.minimum)
    return combine_verdict(claim, asked.model, [reduction, invariant, *decide_legs([test], asked.other_legs)])


def _invariant(found: QuantisationEvidence) -> Leg:
    moved, compared = float(found.differences.max()), len(found.differences)
    outcome: Outcome = "survived" if moved <= found.tolerance else "falsified"
    leg = count_leg("logits under drawn depths", moved, compared, "largest |difference| of a logit")
    return replace(leg, outcome=outcome, threshold=found.tolerance)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Decoded token by token; the reference is the copy's own full depth."""
    if reason := evidence.subject.without_quality:
        return Answer(asked.not_applicable(reason), evidence.corpus, evidence.fingerprint)
    try:
        int8 = int8_copy(evidence.loaded)
    except BadArgument as refusal:
        return Answer(asked.unmeasured(str(refusal)), evidence.corpus, evidence.fingerprint)
    point, texts, trace = read(evidence, int8)
    loss, full = loss_table(trace, int8.geometry, [point, evidence.subject.full])
    found = QuantisationEvidence(*invariant_differences(evidence, int8), rise_of(texts, trace, loss, full))
    return Answer(decide(found, asked), evidence.corpus, evidence.fingerprint)


def read(evidence: ModelMeasurements, int8: LoadedModel) -> tuple[OperatingPoint, list[TokenSequence], Trace]:
    """The copy's calibrated default, the windows it is judged on, and their trace."""
    subject = evidence.subject
    calibration = take_trace(int8.stepper, subject.sequences("calibrate", CALIBRATED))
    texts = subject.sequences("evaluate", EVALUATED[subject.budget.name])
    profile = profile_of(
        calibration,
        default_probes(int8.stepper.layers),
        model=int8.name,
        fingerprint=int8.fingerprint,
        corpus=evidence.corpus,
        dtype="int8",
    )
    return profile.point(0.0), texts, concatenate_traces([trace_stepwise(int8.stepper, text) for text in texts])


def rise_of(texts: Sequence[TokenSequence], trace: Trace, loss: PointLoss, full: PointLoss) -> QuantisedRise:
    """The losses of windows ``texts``, of which ``trace`` was taken, summed within the documents they were cut from."""
    document = documents_of(list(texts))
    sums = (ByDocument.summed(column, document) for column in (loss.nll_nats, full.nll_nats, trace.lengths))
    return QuantisedRise(loss.point.name, loss.net_reduction, *sums)


def invariant_differences(evidence: ModelMeasurements, int8: LoadedModel) -> tuple[Floats, float]:
    """[positions] largest |difference| of a logit between forced admissible depths and the copy's own full depth, and
    the largest honest one.

    Raises:
        Unsupported: the decoder under test declines full depth or a depth from outside.
    """
    rng = np.random.default_rng(evidence.study.seed)
    tokens = rng.integers(0, int8.stepper.vocabulary, PROMPT + FED)
    depths = np.sort(rng.integers(1, int8.stepper.layers + 1, FED))[::-1]
    reference = stepwise_logits(int8.stepper, tokens, PROMPT - 1)[1:]  # a prompt's last position is a step
    subject = evidence.of(int8).subject
    with subject.open(evidence.subject.full) as decoder:
        allowed = subject.allowed(decoder.capabilities)
        session, _ = decoder.start([Prompt(tokens[:PROMPT])])
        forced = zip(tokens[PROMPT:], depths, strict=True)
        steps = [session.feed(token[None, None], np.array([[depth]])) for token, depth in forced]
    seen = np.array([step.logits[0, 0] for step in steps])
    differences: Floats = np.abs(seen - reference[np.arange(FED), depths - 1]).max(axis=1)
    return differences, allowed


QUESTIONS = (Question("EMAD-E12", "model", answer, legs=lambda study, layers: 1, budget="standard", decide=decide),)
