"""Divergent tokens (R2R, arXiv:2505.21600): the large model writes only where the small one differs (EAD-A6).

If the large model writes exactly the tokens at which the greedy choices of both differ after the same history, the text
is the large model's own: so its text, read by the small model, decides share and score without a further decode. Who
knows where both differ is an oracle; R2R trains a router to guess it, and leaves differences without consequence to the
small model. The share here is therefore an upper bound of R2R's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from emad_ref.decoding.switching import LARGE, SMALL
from pytest_emad.claims.base import Answer, ClaimContext, Question
from pytest_emad.claims.pair_answers import answer_unmet_writing_premise, make_answer_from_pair_verdict
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.statistics.accuracy import estimate_score_difference
from pytest_emad.statistics.legs import build_measured_count_leg, build_measured_estimate_leg
from pytest_emad.statistics.rates import mean_rate
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import Verdict


@dataclass(frozen=True)
class DivergentTokenEvidence:
    """[items] of one task: ``divergent`` of the ``emitted`` tokens, ``written``: scores if the large model writes them.

    ``switched``: scores of EAD's ``rules`` in turns, at the same share of the large model.
    """

    task: str
    divergent: ByItem
    emitted: ByItem
    written: ByItem
    switched: ByItem
    rules: str

    @property
    def share(self) -> float:
        return float(self.divergent.values.sum() / self.emitted.values.sum())


def decide_divergent_tokens(found: DivergentTokenEvidence, asked: ClaimContext) -> Verdict:
    """EAD-A6: a report of the share of divergent tokens, their score, and what EAD loses against it at that share."""
    task, written = found.task, found.written
    share = mean_rate(found.divergent, found.emitted, threshold=0.0, rng=asked.rng, unit="share of tokens")
    lost = estimate_score_difference(written, found.switched, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
    name = f"{task}: score that EAD loses at a large-model share of {found.share:.1%}"
    legs = [
        build_measured_estimate_leg(
            name, lost, found.rules if math.isfinite(lost.low) else f"{found.rules}; {lost.method}"
        ),
        build_measured_estimate_leg(f"{task}: divergent tokens", share),
        build_measured_count_leg(
            f"{task}: score with them by the large model", float(written.values.mean()), len(written), "score"
        ),
    ]
    return asked.combine_legs(legs)


def answer_divergent_tokens(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Answer EAD-A6 on the written task most worth routing, from the large model's own answers to the judged items."""
    if absent := answer_unmet_writing_premise(pair, asked):
        return absent
    task = pair.routing_rules.written_tasks_worth_routing[0]
    done = pair.routing_rules.answer_judged_items_alone(LARGE, task)
    agrees = pair.answers.make_greedy_choice_masks(SMALL, done, task, "evaluate", pair.size.judged)
    divergent = done.right.with_values(np.array([int((~each).sum()) for each in agrees]))
    share = float(divergent.values.sum() / done.emitted.sum())
    switched = pair.routing_rules.evaluate_mixture_at_large_share(task, share)
    found = DivergentTokenEvidence(
        task,
        divergent,
        done.right.with_values(done.emitted),
        done.right.with_values(done.right.values.astype(np.float64)),
        switched.score,
        switched.name,
    )
    return make_answer_from_pair_verdict(pair, decide_divergent_tokens(found, asked))


QUESTIONS = (Question("EAD-A6", "pair", answer_divergent_tokens, budget="standard", decide=decide_divergent_tokens),)
