"""Confident Decoding (arXiv:2606.21906): a near-final layer, found by a backward search over entropy (EMAD-X7).

From the last layer L back, a token takes the layer above the first rise of its entropy, the valley closest to L:

    while ℓ > L − window and H_{ℓ−1} < H_ℓ:  ℓ ← ℓ − 1                        ``find_confident_layers``

All layers run, so K and V are those of full depth, and one trace decides. The paper's claim is about aligned models,
whose last layers it finds to perturb the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.trace import Trace
from emad_ref.record import Ints
from pytest_emad.claims.base import ClaimContext, make_model_question
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.statistics.accuracy import TaskAccuracy, estimate_accuracy_drop
from pytest_emad.statistics.legs import build_measured_estimate_leg
from pytest_emad.statistics.rates import estimate_perplexity_rise
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Leg, Verdict

NEAR_FINAL = 4  # the window is a quarter of the depth; the authors' code leaves its length to the user


@dataclass(frozen=True)
class ConfidentLayerEvidence:
    """[documents] ``nll`` in nats after the layers found, ``full`` after the last one, and ``tokens``.

    ``moved``: share of tokens with another layer than the last. ``tasks``: answers at the layers found.
    """

    nll: ByDocument
    full: ByDocument
    tokens: ByDocument
    moved: float
    tasks: Mapping[str, TaskAccuracy]


def decide_confident_layers(found: ConfidentLayerEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-X7: perplexity after the layers found is no higher than after the last; the loss of each task is measured.

    Where entropy falls into the last layer at every token, no other layer is found, and the claim does not apply.
    """
    if not found.moved:
        return asked.not_applicable("entropy falls into the last layer at every token: no other layer is found")
    most = asked.claim.thresholds["perplexity_rise"]
    rise = estimate_perplexity_rise(found.nll, found.full, found.tokens, threshold=most, rng=asked.rng)
    beside: list[Leg] = []
    for task, accuracy in found.tasks.items():
        drop = estimate_accuracy_drop(accuracy.full, accuracy.adaptive, threshold=0.0)
        said = "" if accuracy.is_above_guessing else "not solved at full depth"
        beside.append(build_measured_estimate_leg(f"{task}: accuracy lost", drop, said))
    name = f"perplexity, {found.moved:.1%} of tokens before the last layer"
    return asked.judge_against_threshold({name: rise}, "above", most, beside)


def find_confident_layers(entropy_nats: NDArray[np.floating], window: int) -> Ints:
    """int64 [tokens] the layer, from 1, of the entropy valley closest to the last of ``entropy_nats`` [tokens, L].

    It lies at most ``window`` layers before the last. Equal entropies are no step down.
    """
    last = entropy_nats.shape[1]
    falls = entropy_nats[:, last - window - 1 : -1] < entropy_nats[:, last - window :]  # by going one layer back
    found: Ints = last - np.logical_and.accumulate(falls[:, ::-1], axis=1).sum(axis=1)
    return found


def gather_confident_layers(evidence: ModelMeasurements) -> ConfidentLayerEvidence:
    """From the evaluation trace, where every layer was read, and the traces of all replayed tasks."""
    traces, scores, layers = evidence.traces, evidence.task_scores, evidence.subject.stepper.layers
    window = max(1, layers // NEAR_FINAL)

    def choose(trace: Trace) -> Ints:
        return find_confident_layers(trace.entropy_nats, window)

    trace = traces.evaluation.fully_read_trace
    nll, chosen = trace.nll_nats, choose(trace)
    found, last = nll[np.arange(len(trace)), chosen - 1], nll[:, -1]
    at_found, at_last = (traces.sum_by_document(trace.token_positions.sum_by_sequence(each)) for each in (found, last))
    tokens = traces.sum_by_document(trace.n_decided_by_sequence)
    read = tokens.values > 0  # of a short document no position may have been sampled
    full = evidence.subject.full_depth_point
    tasks = {
        task: TaskAccuracy(
            scores.correctness_by_item(task, full),
            scores.correctness_at_chosen_layers(task, tuple(range(layers - window, layers + 1)), choose),
            scores.compute_chance_or_majority_accuracy(task),
            saving=0.0,
        )
        for task in scores.replayed_task_names
    }
    moved = float((chosen < layers).mean())
    return ConfidentLayerEvidence(at_found.select(read), at_last.select(read), tokens.select(read), moved, tasks)


QUESTIONS = (
    make_model_question(
        "EMAD-X7", gather_confident_layers, decide_confident_layers, legs=lambda study, layers: 1, budget="standard"
    ),
)
