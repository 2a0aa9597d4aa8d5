"""EMAD-X5: what could leaving early save at all on this model?

A report. An oracle knows every layer's divergence from the final distribution, leaves at the first that is small
enough, and pays for nothing: neither probes nor heads nor K/V. No criterion knows more. What it saves at losses of
0.1, 1 and 5 % is the slack that criteria share out among themselves (``sweep.oracles``): read through the model's own
head and through a tuned lens, with depth that may rise again and with EMAD's that may not. How small is small enough is
set on the text judged itself: a ceiling, and not what anybody would find on other text. It does not apply to weights
without quality; no decoder is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import exit_premise
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.learned_exit import ExitEvaluation
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.screening.ranking import savings_figure
from emad_ref.statistics.legs import combine_verdict, estimate_leg
from emad_ref.statistics.rates import DocumentCosts, FullDepthBaseline
from emad_ref.statistics.verdicts import Verdict


@dataclass(frozen=True)
class OracleCeiling:
    """What an oracle spends at ``loss``, a rise of perplexity, and how it is told."""

    loss: float
    spent: DocumentCosts


@dataclass(frozen=True)
class OracleEvidence:
    """``full``: full depth, blocks as its work. ``ceilings``: the one that the row is read by first."""

    full: FullDepthBaseline
    ceilings: Sequence[OracleCeiling]


def decide(found: OracleEvidence, asked: ClaimContext) -> Verdict:
    """Shares of blocks, as measured, each with what it lost."""
    if not found.ceilings:
        return asked.unmeasured("no oracle was asked")
    legs = []
    for each in found.ceilings:
        saving = found.full.saving(each.spent, 0.0, asked.rng, unit=asked.claim.unit)
        rise = found.full.rise(each.spent, each.loss, asked.rng)
        said = f"perplexity rises by {100 * rise.value:.2f} % here"
        legs.append(estimate_leg(f"{each.spent.name}, at {100 * each.loss:g} %", saving, said))
    return combine_verdict(asked.claim, asked.model, legs)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From traces of the evaluated text, through the exit's lens and by the model's own head."""
    verdict, shown = exit_premise(evidence, asked), Attachments()
    if verdict is None:
        beyond = evidence.learned_exit
        ceilings = [
            OracleCeiling(loss, beyond.at_loss(curve, loss)) for loss in beyond.losses for curve in beyond.curves
        ]
        verdict, shown = decide(OracleEvidence(beyond.in_blocks, ceilings), asked), _exhibits(beyond, asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint, shown)


def _exhibits(beyond: ExitEvaluation, asked: ClaimContext) -> Attachments:
    """Criteria on the exit's lens below the ceilings, as a figure and at exactly the same losses."""
    geometry = beyond.subject.loaded.geometry
    found = savings_figure(beyond.validated, beyond.evaluated, beyond.exit.fitted, geometry, asked.rng)
    where = f"on {beyond.subject.corpus}"
    return Attachments(
        (
            AttachedTable(
                f"saving against loss {where}: criteria below those who know", found.figure, "saving against loss"
            ),
            AttachedTable(f"what they save at exactly the same loss {where}", found.table),
        )
    )


QUESTIONS = (Question("EMAD-X5", "model", answer, budget="standard", decide=decide),)
