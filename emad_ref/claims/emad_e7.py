"""EMAD-E7: without the monotone constraint, does backfill leave no speed-up? (EMAD, Ablations: schedule constraint)

The same rule under three repairs, timed against full depth: the two exact ones decide, state copying, which is not, is
listed beside, and so is the same rule under the monotone schedule, which owes no repair. FLOPs and quality stand beside
only where weights mean something and replay speaks for the decoder under test; time needs neither.

It does not apply where the rule hardly leaves a block out: then nothing is owed, and nothing could be faster. Nor to a
decoder that declines a schedule. The time of a mix of requests is their total (``speedup.total_ratio``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.decoding.teacher_forcing import teacher_forced_sums
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.traces import documents_of
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.statistics.legs import count_leg, estimate_leg, judge_side
from emad_ref.statistics.rates import perplexity_rise
from emad_ref.statistics.speedup import total_ratio
from emad_ref.statistics.units import ByDocument, ByPair
from emad_ref.statistics.verdicts import Verdict
from emad_ref.sweep.losses import loss_table

EXACT: dict[str, ScheduleName] = {"eager backfill": "free_eager", "deferred fill": "free_deferred"}
COPYING, MONOTONE = "state copying", "monotone"
LEAST_SKIPPED = 0.05  # share of blocks that the rule must leave out for its repair to be a question
DECODED, DECODED_TOKENS = 32, 32  # documents, and tokens of each, on which state copying is scored


@dataclass(frozen=True)
class CopyingQuality:
    """NLL sums [documents] under copied states and under exact ones at the same rule, nats, and decided tokens."""

    copied: ByDocument
    exact: ByDocument
    tokens: ByDocument


@dataclass(frozen=True)
class BackfillEvidence:
    """Seconds [pairs] of full depth, of the rule under each exact repair, under state copying, and kept monotone.

    ``skipped``: share of blocks left out of decided tokens before anything is repaired.
    ``net_reductions``: share of FLOPs saved by exact repair, as replayed; empty where replay says nothing.
    """

    full: ByPair
    exact: Mapping[str, ByPair]
    copying: ByPair
    monotone: ByPair
    skipped: float
    net_reductions: Mapping[str, float] = field(default_factory=dict)
    quality: CopyingQuality | None = None


def decide(found: BackfillEvidence, asked: ClaimContext) -> Verdict:
    """A leg per exact repair: how many times faster than full depth it is."""
    threshold = asked.claim.thresholds["speedup_ratio"]
    ratios = {name: total_ratio(found.full, seconds, threshold=threshold) for name, seconds in found.exact.items()}
    beside = [
        estimate_leg(name, total_ratio(found.full, seconds, threshold=threshold))
        for name, seconds in ((COPYING, found.copying), (MONOTONE, found.monotone))
    ]
    beside.append(count_leg("blocks left out", found.skipped, len(found.full), "share of blocks"))
    beside += [
        count_leg(f"{name}: FLOPs", saved, 1, "net FLOP reduction") for name, saved in found.net_reductions.items()
    ]
    if found.quality is not None:
        sums = found.quality.copied, found.quality.exact, found.quality.tokens
        beside.append(estimate_leg(f"{COPYING}: perplexity", perplexity_rise(*sums, threshold=0.0, rng=asked.rng)))
    if found.skipped < LEAST_SKIPPED:
        reason = f"the rule leaves out {100 * found.skipped:.1f} % of blocks: there is next to nothing to repair"
        numbers = [estimate_leg(name, ratio) for name, ratio in ratios.items()]
        return replace(asked.not_applicable(reason), legs=(*numbers, *beside))
    return judge_side(asked.claim, asked.model, ratios, "above", threshold, other_legs=asked.other_legs, beside=beside)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Paired requests at batch 1, and behind a bridge that holds what replay and short openings say beside them."""
    rule = evidence.latency.point
    exact = {name: replace(rule, name=name, schedule=schedule) for name, schedule in EXACT.items()}
    copying = replace(rule, name=COPYING, schedule="copying")
    requests = evidence.latency.against_full(exact | {COPYING: copying, MONOTONE: rule}, decides=True)
    seconds = requests.by_pair()
    found = BackfillEvidence(
        seconds["full"],
        {name: seconds[name] for name in exact},
        seconds[COPYING],
        seconds[MONOTONE],
        requests.skipped(next(iter(exact)), evidence.subject.stepper.layers),
    )
    notes: tuple[str, ...] = (evidence.latency.description("repairs", {1: requests}),)
    if not evidence.subject.without_quality:
        if refusal := evidence.replay_validity.refusal:
            notes += (f"{evidence.name}: {asked.claim.id}: no FLOPs and no quality: {refusal}",)
        else:
            saved = loss_table(evidence.traces.evaluation, evidence.loaded.geometry, exact.values())
            reductions = {loss.point.name: loss.net_reduction for loss in saved}
            found = replace(found, net_reductions=reductions, quality=copied_quality(evidence, copying))
    return Answer(decide(found, asked), evidence.corpus, evidence.fingerprint, Attachments(notes=notes))


def copied_quality(evidence: ModelMeasurements, copying: OperatingPoint) -> CopyingQuality:
    """State copying against exact free depth on the openings of documents: copies are decoded."""
    windows = evidence.subject.sequences("evaluate", DECODED)
    texts = [replace(window, tokens=window.tokens[:DECODED_TOKENS]) for window in windows]
    with evidence.subject.open_audited(copying) as decoder:
        copied, tokens = teacher_forced_sums(decoder, texts)
    with evidence.subject.open_audited(replace(copying, schedule="free_eager")) as decoder:
        exact, _ = teacher_forced_sums(decoder, texts)
    document = documents_of(texts)
    return CopyingQuality(*(ByDocument.summed(column, document) for column in (copied, exact, tokens)))


QUESTIONS = (
    Question(
        "EMAD-E7",
        "model",
        answer,
        legs=lambda study, layers: len(EXACT),
        measures=True,
        suite="cost",
        budget="standard",
        decide=decide,
    ),
)
