"""KnapSpec (arXiv:2602.20217): cosine similarity of hidden states stands in for the acceptance of a draft (EMAD-X8).

    cos(h_ℓ, h_L)   against   whether the greedy draft after layer ℓ, argmax p_ℓ, is the token that layer L verifies

h is the state after a layer, before the final norm. KnapSpec's drafts skip attention and MLP layers; here a draft stops
after layer ℓ, as self-speculation does (EMAD-X4), so that one pass over given text decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.models.stepper import Stepper
from emad_ref.record import Bools, Floats
from emad_ref.signals import to_numpy_float64
from pytest_emad.claims.base import ClaimContext, make_model_question
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.traces import READ, documents_of_windows
from pytest_emad.statistics.legs import build_measured_estimate_leg
from pytest_emad.statistics.rates import estimate_rank_correlation
from pytest_emad.statistics.units import DocumentMembership
from pytest_emad.statistics.verdicts import Leg, Verdict

LEAST_DOCUMENTS = 3  # of a jackknife


@dataclass(frozen=True)
class DraftSimilarityEvidence:
    """[tokens, L − 1] ``cosine`` of the states after each layer and the last, and whether the draft there is ``kept``.

    ``document`` [tokens].
    """

    cosine: Floats
    kept: Bools
    document: DocumentMembership


def decide_draft_similarity(found: DraftSimilarityEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-X8: a report of Spearman's ρ of cosine and acceptance, over positions and layers, and after each layer.

    Over all layers ρ also says that deeper states are closer and deeper drafts better; after one layer it does not.
    """
    if len(np.unique(found.document.number)) < LEAST_DOCUMENTS:
        return asked.unmeasured(f"fewer than {LEAST_DOCUMENTS} documents: no interval")
    layers = found.cosine.shape[1]
    every = DocumentMembership(np.repeat(found.document.number, layers))
    legs = [_correlation(f"layers 1–{layers}", found.cosine.ravel(), found.kept.ravel(), every, asked)]
    for layer in range(1, layers + 1):
        columns = found.cosine[:, layer - 1], found.kept[:, layer - 1]
        legs.append(_correlation(f"layer {layer}", *columns, found.document, asked))
    return asked.combine_legs(legs)


def _correlation(name: str, cosine: Floats, kept: Bools, document: DocumentMembership, asked: ClaimContext) -> Leg:
    if kept.all() or not kept.any():
        said = f"{'every' if kept.all() else 'no'} draft is kept: there is nothing to rank"
        return Leg(name, "not applicable", None, None, len(kept), None, "", said)
    rho = estimate_rank_correlation(cosine, kept.astype(np.float64), document, threshold=0.0, rng=asked.rng)
    return build_measured_estimate_leg(name, rho, f"{kept.mean():.1%} of drafts kept; {rho.method}")


def gather_draft_similarity(evidence: ModelMeasurements) -> DraftSimilarityEvidence:
    """From a pass over each of the first evaluation windows, as many as EMAD-E4 reads."""
    windows = evidence.subject.cut_windows("evaluate", READ)
    cosine, kept = zip(*(_read_window(evidence.subject.stepper, window) for window in windows), strict=True)
    document = np.repeat(documents_of_windows(windows).number, [len(each) for each in kept])
    return DraftSimilarityEvidence(np.concatenate(cosine), np.concatenate(kept), DocumentMembership(document))


def _read_window(stepper: Stepper, window: TokenSequence) -> tuple[Floats, Bools]:
    """Cosines and kept drafts [tokens, L − 1] of one text, whose tokens a trace of several would reorder."""
    states: list[Tensor] = []
    trace = take_trace(stepper, [window], observe=lambda layer, after, entropy: states.append(after))
    cosines = [cosine_similarity(each, states[-1], dim=-1) for each in states[:-1]]
    return to_numpy_float64(torch.stack(cosines, dim=1)), trace.top1[:, :-1] == trace.top1[:, -1:]


QUESTIONS = (make_model_question("EMAD-X8", gather_draft_similarity, decide_draft_similarity, budget="standard"),)
