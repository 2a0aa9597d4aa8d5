"""Lens traces of the splits: the layers at which calibration text is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.exit_rules import default_probes
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator
from pytest_emad.measurements import replay_and_flop_checks, traces
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.traces import LensTraces
from tests.small_measurements import PROBES, small_evidence
from tests.small_models import LAYERS, VOCABULARY, small_config, small_model

COSTLY = {"vocabulary": 100_000}  # of the geometry alone: a head of this many rows costs more than a block


def fresh_evidence(monkeypatch: pytest.MonkeyPatch, costly: bool, **study: Any) -> tuple[ModelMeasurements, list[int]]:
    """Return measurements that have read nothing yet, and a list of the rows of every later head."""
    made, rows, logits = small_evidence(**study), [], CausalStepper.logits
    made.loaded.geometry = replace(made.loaded.geometry, **(COSTLY if costly else {}))
    made.traces = LensTraces(made.subject)
    monkeypatch.setattr(CausalStepper, "logits", lambda self, hidden: rows.append(len(hidden)) or logits(self, hidden))
    return made, rows


@pytest.mark.parametrize("costly", [False, True])
def test_where_a_head_costs_more_than_a_block_calibration_reads_probes_and_the_end(
    monkeypatch: pytest.MonkeyPatch, costly: bool
) -> None:
    made, rows = fresh_evidence(monkeypatch, costly)
    expected = (*default_probes(LAYERS), LAYERS) if costly else tuple(range(1, LAYERS + 1))
    trace, profile = made.traces.calibration, made.traces.calibrate_profile()
    assert trace.layers_read == profile.read == expected
    assert sum(rows) == len(trace) * len(expected)


def test_thresholds_are_the_same_whichever_other_layers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (fresh_evidence(monkeypatch, costly)[0].traces.calibrate_profile() for costly in (True, False))
    for margin in (0.0, 0.1):
        assert few.point(margin) == many.point(margin)
    assert few.mean_nats == tuple(many.mean_nats[layer - 1] for layer in few.read)


def test_other_probes_take_a_trace_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = fresh_evidence(monkeypatch, costly=True)
    tokens, before = len(made.traces.calibration), sum(rows)
    other = next(layer for layer in range(1, LAYERS) if layer not in default_probes(LAYERS))
    profile = made.traces.calibrate_profile((other,))
    assert profile.read == tuple(range(1, LAYERS + 1))
    assert sum(rows) - before == tokens * LAYERS
    made.traces.calibrate_profile((other,), ("position",))
    assert sum(rows) - before == tokens * LAYERS, "one such trace serves every choice of probes"


def test_probes_of_a_given_profile_are_read_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = next(layer for layer in range(1, LAYERS) if layer not in default_probes(LAYERS))
    small_evidence().traces.calibrate_profile((other,)).save(tmp_path / "p.json")
    made, _ = fresh_evidence(monkeypatch, costly=True, profile=tmp_path / "p.json")
    assert made.traces.calibration.layers_read == tuple(sorted({other, *default_probes(LAYERS), LAYERS}))
    assert np.isfinite(made.traces.calibration.entropy_nats[:, other - 1]).all()


def deep_evidence() -> ModelMeasurements:
    """Return measurements of a model of 12 layers with a probing point that skips layers."""
    config = small_config("gpt_neox")
    config.num_hidden_layers = 2 * LAYERS
    return small_evidence(CausalStepper(small_model("gpt_neox", config=config)))


@pytest.mark.parametrize(
    ("read", "layers"),
    [
        (lambda made: made.entropy_estimators.linear_estimator, (*PROBES, 2 * LAYERS)),
        (
            lambda made: made.entropy_estimators.take_trace_with_estimates(
                "validate", 5, [EntropyEstimator("topk", k=4)]
            ),
            (*PROBES, 2 * LAYERS),
        ),
        (lambda made: made.replay_validity.probing_point, (1, 3, 5, 7, 9, 11, 2 * LAYERS)),
    ],
    ids=["linear probes", "estimators", "probing point"],
)
def test_what_compares_probes_alone_reads_heads_there_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[ModelMeasurements], Any], layers: tuple[int, ...]
) -> None:
    made, taken = deep_evidence(), []

    def recorded(*given: Any, **asked: Any) -> Trace:
        taken.append(take_trace(*given, **asked))
        return taken[-1]

    for module in (traces, replay_and_flop_checks):
        monkeypatch.setattr(module, "take_trace", recorded)
    read(made)
    assert [trace.layers_read for trace in taken] == [layers]


@pytest.mark.parametrize("costly", [False, True])
def test_estimators_read_beginnings_of_all_documents_shorter_ones_where_a_head_is_costly(
    monkeypatch: pytest.MonkeyPatch, costly: bool
) -> None:
    monkeypatch.setattr(traces, "COSTLY_TOKENS", 6)
    made, _ = fresh_evidence(monkeypatch, costly=costly)
    trace, document = made.entropy_estimators.take_trace_with_documents("evaluate", 20, [EntropyEstimator("topk", k=4)])
    whole = made.subject.cut_windows("evaluate", 20)
    lengths = np.array([len(each.tokens) - 1 for each in whole])
    longest = 6 if costly else round(traces.READ_SHARE * made.subject.window_size)
    assert longest < lengths.max(), "some windows are cut"
    assert trace.n_decided_by_sequence.tolist() == np.minimum(lengths, longest).tolist()
    assert set(document.number) == {each.document for each in whole}


def test_a_vocabulary_of_the_tests_is_cheap() -> None:
    geometry = small_evidence().loaded.geometry
    assert geometry.vocabulary == VOCABULARY
    assert geometry.head_flops() <= geometry.block_flops() < replace(geometry, **COSTLY).head_flops()


def test_a_document_between_two_positions_where_every_layer_is_read_counts_in_no_mean_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = fresh_evidence(monkeypatch, costly=True)
    longest = int(made.traces.document_lengths.values.max())
    monkeypatch.setattr(traces, "SAMPLE_EVERY", 2 * longest)
    made.traces = LensTraces(made.subject)
    sums, tokens = made.traces.entropy_sums
    assert tokens.values.min() >= 1
    assert 0 < len(tokens.values) < len(made.traces.document_lengths.values), "some documents have no such position"
    assert sums.number.tolist() == tokens.number.tolist()
    assert tokens.values.sum() == len(made.traces.evaluation.fully_read_trace)
