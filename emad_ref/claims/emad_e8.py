"""EMAD-E8: does adaptive depth compose with speculative decoding? (EMAD, Discussion, Composability)

In the verifier only, and in draft and verifier: the output stays what the verifier emits alone at its own point, which
is the EMAD model's where EMAD decides its depth. That is compared token by token before anything is timed; a difference
that no tie excuses is a broken decoder and not a number: it raises. The row reports speed and acceptance. It does not
apply to weights without quality.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from emad_ref.audit.finding import Finding
from emad_ref.audit.token_comparison import same_tokens
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.pair_answers import TimedArm, acceptance_leg, pair_answer, speed_leg, timed_arms
from emad_ref.decoding.pair import Partner
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.measurements.pair_models import speculative_decoder
from emad_ref.measurements.pair_timing import speculative_arm
from emad_ref.statistics.legs import combine_verdict, count_leg, estimate_leg
from emad_ref.statistics.speedup import total_ratio
from emad_ref.statistics.verdicts import Leg, Verdict

CHECKED = 4  # prompts on which the output is compared token by token
NONE = "no EMAD"


@dataclass(frozen=True)
class ComposedSpeculationEvidence:
    """``arms``: where EMAD decides depth → speculation there, ``NONE`` among them, on requests of ``new`` tokens.

    ``same``: rows on which each of them was seen to emit its verifier's own output.
    """

    arms: Mapping[str, TimedArm]
    new: int
    same: int


def decide(found: ComposedSpeculationEvidence, asked: ClaimContext) -> Verdict:
    """Per place of EMAD: speed against none, tokens per second, acceptance, rows compared."""
    legs: list[Leg] = []
    for name in sorted(found.arms):  # adaptive depth first: the row quotes its first leg
        arm = found.arms[name]
        legs += [
            estimate_leg(f"{name}: speed against none", total_ratio(found.arms[NONE].seconds, arm.seconds)),
            speed_leg(name, found.new, arm.seconds),
            acceptance_leg(name, arm.accepted),
            count_leg(f"{name}: rows whose output is the verifier's own", found.same, found.same, "rows, up to ties"),
        ]
    return combine_verdict(asked.claim, asked.model, legs)


def answer(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Raises AuditRefutedError where speculation emits something else than its verifier does, ties excused."""
    if reason := pair.models.without_quality:
        return pair_answer(pair, asked.not_applicable(reason))
    full, emad = (pair.small.subject.full, pair.large.subject.full), pair.timing.emad_point
    depths = {
        NONE: full,
        "EMAD in the verifier": (full[0], emad),
        "EMAD in draft and verifier": (pair.small.traces.profile.point(0.0), emad),
    }
    with ExitStack() as stack:
        partners = {
            name: stack.enter_context(pair.models.partners(*points, rows=CHECKED)) for name, points in depths.items()
        }
        same = [same_output(pair, *both) for both in partners.values()]
        for finding in same:
            finding.require()
        timed = pair.timing.timed({name: speculative_arm(*both) for name, both in partners.items()}, pair.size.reported)
    verdict = decide(ComposedSpeculationEvidence(timed_arms(pair, timed, depths), pair.timing.new, CHECKED), asked)
    return pair_answer(pair, verdict, Attachments(notes=tuple(finding.detail for finding in same if finding.ties)))


def same_output(pair: PairMeasurements, draft: Partner, verifier: Partner) -> Finding:
    """Whether speculation emits what its verifier emits alone, up to ties of the large model's logits and signals."""
    prompts, new, large = pair.timing.prompts(CHECKED), pair.timing.new, pair.large.subject
    own = verifier.decoder.generate(prompts, new, frozenset())
    found = speculative_decoder(draft, verifier).generate(prompts, new, frozenset())
    theirs, mine = ([tokens.tolist() for tokens in record.emitted] for record in (found, own))
    declared = verifier.decoder.capabilities.logit_noise
    return same_tokens(large.lens, large.tolerance, prompts, theirs, mine, verifier.point, declared=declared)


QUESTIONS = (Question("EMAD-E8", "pair", answer, measures=True, budget="standard", decide=decide),)
