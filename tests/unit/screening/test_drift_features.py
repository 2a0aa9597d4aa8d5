"""Drift features of documents, computed by hand; a trace, a decoder fed with text and its record give the same."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from emad_ref.calibration.linear_maps import fit_gate
from emad_ref.calibration.trace import EmptyCorpus, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from pytest_emad.screening.drift import (
    DocumentFeatures,
    compute_document_features,
    decode_features,
    features_of_record,
    features_of_windows,
    possible_exit_layers,
)
from pytest_emad.statistics.units import ByDocument, DocumentMembership
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

PROBES = (2, 4)
PLAIN = OperatingPoint("entropy", "fixed_entropy", 6, 6, PROBES, ((1.0, 1.0),), "free_eager")


def test_shares_and_means_are_those_of_each_document() -> None:
    depth = np.array([2, 4, 6, 6, 2, 2])
    signal = np.array([[0.5, 9.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [0.1, np.nan], [0.3, np.nan]])
    found = compute_document_features(depth, signal, DocumentMembership(np.array([3, 3, 3, 3, 8, 8])), PLAIN, "a text")
    assert found.names == ("exits after 2", "exits after 4", "exits after 6", "signal at 2", "signal at 4")
    assert found.values.values[0].tolist() == [0.25, 0.25, 0.5, 2.375, 2.0]  # layers behind an exit are not read
    assert found.values.values[1, :4].tolist() == [1.0, 0.0, 0.0, 0.2]
    assert math.isnan(found.values.values[1, 4])
    assert found.values.number.tolist() == [3, 8]


def test_without_signals_shares_are_left() -> None:
    found = compute_document_features(np.array([2, 6]), None, DocumentMembership(np.array([0, 0])), PLAIN, "a record")
    assert found.names == ("exits after 2", "exits after 4", "exits after 6")


def test_exits_lie_between_probes_where_points_interpolate() -> None:
    point = OperatingPoint("p", "fixed_entropy", 6, 6, PROBES, ((1.0, 1.0),), interpolate=True)
    assert possible_exit_layers(point) == (2, 3, 4, 5, 6)
    assert possible_exit_layers(full_depth(6)) == (6,)


def test_they_are_stored_and_read_back() -> None:
    values = np.array([[0.25, 1e-5 / 3], [1.0, math.nan]])
    signs = DocumentFeatures(("a", "b"), ByDocument.from_whole_documents(values), "a text")
    again = DocumentFeatures.from_json(json.loads(json.dumps(signs.to_json(), allow_nan=False)))
    assert (again.names, again.text, len(again)) == (signs.names, signs.text, 2)
    assert again.values.values == pytest.approx(values, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(("names", "value"), [(("a",), 0.5), (("a", "a"), 0.5), (("a", "b"), math.inf)])
def test_what_are_no_signs_is_refused(names, value) -> None:
    with pytest.raises(BadArgument):
        DocumentFeatures(names, ByDocument.from_whole_documents(np.array([[value, 1.0]])), "a text")


@pytest.mark.parametrize(
    ("depth", "signal", "named"),
    [
        (np.array([], dtype=np.int64), None, "depth"),
        (np.array([2, 6, 6]), None, "depth"),
        (np.array([2, 7]), None, "depth"),
        (np.array([0, 6]), None, "depth"),
        (np.array([2, 6]), np.zeros((2, 3)), "signal"),
    ],
)
def test_columns_that_do_not_belong_together_are_refused(depth, signal, named) -> None:
    with pytest.raises(BadArgument, match=f"^{named}="):
        compute_document_features(depth, signal, DocumentMembership(np.zeros(2, dtype=np.int64)), PLAIN, "a text")


# ---------------------------------------------------------------- read from text


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox").double())


@pytest.fixture(scope="module")
def gated(stepper: Stepper) -> OperatingPoint:
    lens = attached(stepper, PROBES, 4, scale=0.1)
    gate = fit_gate(stepper, texts(40), PROBES, lens)
    trace = take_trace(stepper, texts(4), estimators={gate: PROBES}, lens=lens)
    levels = tuple(float(np.quantile(trace.estimates[gate][:, probe - 1], 0.3)) for probe in PROBES)
    return OperatingPoint("gate", "gate", 6, 6, PROBES, (levels,), "free_eager", gate, "divergence", lens=lens)


def texts(count: int, seed: int = 0) -> list[TokenSequence]:
    """Return windows of 9–30 tokens with prompts, two of them of one document."""
    rng = np.random.default_rng(seed)
    return [
        TokenSequence(rng.integers(0, VOCABULARY, 30 - i % 4 * 7), int(i % 3), document=max(i, 1)) for i in range(count)
    ]


@pytest.mark.parametrize("schedule", ["free_eager", "monotone", "free_deferred"])
def test_a_trace_and_a_decoder_fed_show_the_same(stepper: Stepper, gated: OperatingPoint, schedule: str) -> None:
    point = OperatingPoint(**{**vars(gated), "schedule": schedule})
    replayed = features_of_windows(stepper, point, texts(9), "a text")
    fed = decode_features(stepper, point, texts(9), "a text", rows=4)
    assert replayed.names == fed.names
    assert len(fed) == 8
    assert replayed.values.number.tolist() == fed.values.number.tolist()
    # depths are equal; a trace holds signals in float32
    assert replayed.values.values == pytest.approx(fed.values.values, rel=1e-5, abs=1e-6, nan_ok=True)
    assert 0 < fed.values.values[:, 0].mean() < 1


def test_copying_is_fed_and_shows_what_copies_change(stepper: Stepper, gated: OperatingPoint) -> None:
    point = OperatingPoint(**{**vars(gated), "schedule": "copying"})
    found, exact = (features_of_windows(stepper, each, texts(9), "a text") for each in (point, gated))
    assert np.nanmax(np.abs(found.values.values - exact.values.values)) > 1e-3
    again = decode_features(stepper, point, texts(9), "a text", rows=1)
    assert found.values.values == pytest.approx(again.values.values, abs=1e-9, nan_ok=True)


def test_a_record_shows_what_feeding_its_text_shows(stepper: Stepper, gated: OperatingPoint) -> None:
    prompts = [Prompt(np.array([5, 9, 3])), Prompt(np.array([7]))]
    record = WalkedDecoder(stepper, gated, max_rows=2).generate(prompts, 12)
    found = features_of_record(record, gated, "a record")
    written = [
        TokenSequence(np.concatenate([prompt.tokens, new]), len(prompt.tokens) - 1, document=row)
        for row, (prompt, new) in enumerate(zip(prompts, record.emitted, strict=True))
    ]
    fed = decode_features(stepper, gated, written, "its text")
    assert found.names == fed.names
    assert found.values.values == pytest.approx(fed.values.values, abs=1e-9, nan_ok=True)


def test_a_full_readout_is_watched_too(stepper: Stepper) -> None:
    point = OperatingPoint("entropy", "fixed_entropy", LAYERS, LAYERS, PROBES, ((4.3, 4.3),), "free_eager")
    replayed, fed = features_of_windows(stepper, point, texts(5), "t"), decode_features(stepper, point, texts(5), "t")
    assert replayed.values.values == pytest.approx(fed.values.values, rel=1e-5, abs=1e-6, nan_ok=True)


def test_no_text_is_refused(stepper: Stepper, gated: OperatingPoint) -> None:
    for read in (features_of_windows, decode_features):
        with pytest.raises(EmptyCorpus):
            read(stepper, gated, [], "a text")
