"""The guarantee on a model: thresholds certified on some documents hold on others, and the drift test is calibrated.

The model is trained without early-exit losses on the endless text of the synthetic world; lens and gate are fitted here
briefly, on splits that nothing else reads. Depths and losses come from replays of a trace with exact K/V above an exit
(`free_eager`), so 200 divisions of the documents into certifying and fresh ones take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from emad_ref.calibration.learn_then_test import betting_pvalues
from emad_ref.calibration.lens_fit import LensPlan, fit_lens, held_out_windows
from emad_ref.calibration.linear_maps import fit_gate
from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import window_size
from emad_ref.models.loading import LoadedModel, load
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import attach_lens
from emad_ref.record import Floats
from emad_ref.replay.losses import replay_losses
from emad_ref.tuning import windows_of
from pytest_emad.screening import drift
from pytest_emad.screening.drift import DocumentFeatures, replay_features
from pytest_emad.screening.guarantee import ERROR, EXCESS, excess_loss, require_strict_to_loose
from pytest_emad.statistics.units import ByDocument, DocumentMembership

CORPORA = ("world:premise", "world:mixed")
PROBES = (4, 6, 8, 10)
GRID = np.geomspace(0.02, 0.5, 24)  # thresholds of the gate in √nats, strict to loose, fixed before any text is read
STEPS, FITTED = 150, 300  # of the lens; windows that fit lens and gate
DOCUMENTS, CERTIFYING, DRAWS = 800, 250, 200


@dataclass(frozen=True)
class Read:
    """``losses``, ``depths`` [documents, λ]; the ``trace`` and ``points`` of their replay."""

    losses: Floats
    depths: Floats
    trace: Trace
    points: list[OperatingPoint]

    def signs(self, chosen: int) -> DocumentFeatures:
        return replay_features(
            self.trace, self.points[chosen], DocumentMembership(np.arange(self.trace.n_sequences)), "a text"
        )


def points_of(model: LoadedModel, corpus: str) -> list[OperatingPoint]:
    """Return points with one gate at every probe, one for each level of the grid."""
    plan = LensPlan(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype="float32",
        corpus=corpus,
        window=window_size(model.stepper.max_positions),
        layers=PROBES,
        steps=STEPS,
        held_out=0.3,
        held_out_tokens=2000,
    )
    read = partial(windows_of, model, corpus, "calibrate", limit=FITTED)
    lens = attach_lens(model.stepper, fit_lens(model.stepper, plan, read).lens, model.fingerprint)
    gate = fit_gate(model.stepper, held_out_windows(plan, read), PROBES, lens)
    return [
        OperatingPoint(f"gate ≤ {level:.3g}", "gate", 12, 12, PROBES, ((float(level),) * len(PROBES),), "free_eager",
                       gate, "divergence", lens=lens)
        for level in GRID
    ]  # fmt: skip


def read(model: LoadedModel, points: list[OperatingPoint], corpus: str, documents: int) -> Read:
    windows = list(windows_of(model, corpus, "validate", limit=documents))
    assert len({window.document for window in windows}) == len(windows), "one window per document"
    trace = take_trace(model.stepper, windows, estimators={points[0].estimator: PROBES}, lens=points[0].lens)
    found = replay_losses(trace, model.geometry, points)
    each = ByDocument.from_whole_documents
    losses = excess_loss(each(found.nats[1:].T), each(found.nats[0]), each(found.tokens))
    return Read(losses.values, (found.depth[1:] / found.tokens).T, trace, points)


def certified(losses: Floats) -> int:
    """Return the index of the last threshold that passes ``certify_losses``, −1 for none; without its simulated
    power."""
    passed = betting_pvalues(losses / EXCESS.cap, EXCESS.risk / EXCESS.cap, ERROR) <= ERROR
    return int(np.argmin(np.append(passed, False))) - 1


@pytest.mark.slow
@pytest.mark.parametrize("corpus", CORPORA)
def test_fresh_documents_risk_no_more_than_was_promised(corpus, record_property, monkeypatch) -> None:
    """200 draws: the risk on fresh documents is at most δ in 95 % of them, and 80 % choose an exit."""
    monkeypatch.setattr(drift, "PERMUTATIONS", 199)
    monkeypatch.setattr(drift, "DRAWS", 60)
    model = load("emad-tiny-plain")
    points = points_of(model, corpus)
    require_strict_to_loose(points)
    here = read(model, points, corpus, DOCUMENTS)
    (other,) = (each for each in CORPORA if each != corpus)
    there = read(model, points, other, 60)
    rng = np.random.default_rng(0)
    kept = exiting = alarms = seen = 0
    depth = []
    for _ in range(DRAWS):
        order = rng.permutation(DOCUMENTS)
        mine, fresh = order[:CERTIFYING], order[CERTIFYING:]
        chosen = certified(here.losses[mine])
        kept += chosen < 0 or here.losses[fresh, chosen].mean() <= EXCESS.risk
        exiting += chosen >= 0
        depth.append(12.0 if chosen < 0 else here.depths[fresh, chosen].mean())
        reference = _some(here.signs(max(chosen, 0)), mine[:100])
        alarms += drift.detect_drift(reference, _some(here.signs(max(chosen, 0)), fresh[:20])).state == "moved"
        seen += (
            drift.detect_drift(reference, _some(there.signs(max(chosen, 0)), rng.permutation(60)[:20])).state == "moved"
        )
    record_property("kept, exiting, false alarms, drift seen", [int(count) for count in (kept, exiting, alarms, seen)])
    record_property("mean depth", float(np.mean(depth)))
    assert kept >= 0.95 * DRAWS
    assert exiting >= 0.8 * DRAWS
    assert np.mean(depth) < 11
    assert alarms <= 18  # 5 % of 200; 99 of 100 runs stay below
    assert seen >= 0.95 * DRAWS


def _some(signs: DocumentFeatures, documents: np.ndarray) -> DocumentFeatures:
    return DocumentFeatures(signs.names, ByDocument.from_whole_documents(signs.values.values[documents]), signs.text)


@pytest.mark.slow
def test_certifying_by_the_mean_alone_breaks_the_promise() -> None:
    """The check above can fail: without a margin the risk on fresh documents exceeds δ in far more than 5 %."""
    rng = np.random.default_rng(1)
    losses = np.clip(rng.normal(0.0, 0.006, (4000, 1)) + np.linspace(0.002, 0.012, 60), 0, EXCESS.cap)
    truth, broken, proper = losses.mean(axis=0), 0, 0
    for _ in range(DRAWS):
        drawn = losses[rng.integers(len(losses), size=CERTIFYING)]
        naive = int(np.argmin(np.append(drawn.mean(axis=0) <= EXCESS.risk, False))) - 1
        broken += truth[naive] > EXCESS.risk
        chosen = certified(drawn)
        proper += chosen >= 0 and truth[chosen] > EXCESS.risk
    assert proper <= 0.05 * DRAWS < 0.3 * DRAWS < broken
