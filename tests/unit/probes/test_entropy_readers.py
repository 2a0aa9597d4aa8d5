"""Entropy readers: the model's norm before, the correction after, factors kept as long as the stepper."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator
from emad_ref.probes import estimators
from emad_ref.probes.estimators import READERS, make_entropy_reader
from emad_ref.probes.signal_values import entropy_nats
from emad_ref.record import READOUTS
from tests.small_models import VOCABULARY, small_model

PROBES, HIDDEN = (2, 4), 32
LINES = ((2.0, -1.0), (0.5, 3.0))
WEIGHTS = tuple(tuple(0.01 * (i + j) for j in range(HIDDEN + 1)) for i in range(2))
EVERY = (
    EntropyEstimator(),
    EntropyEstimator("topk", k=8),
    EntropyEstimator("topk", k=8, search="faiss"),
    EntropyEstimator("lowrank", k=8, rank=4),
    EntropyEstimator("linear", weights=WEIGHTS),
)


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture(scope="module")
def hidden():
    return torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("estimator", EVERY, ids=lambda e: e.name)
def test_a_reading_has_one_value_per_row_and_names_its_kind(stepper, hidden, estimator):
    reader = make_entropy_reader(stepper, estimator, PROBES)
    with torch.inference_mode():
        reading = reader.read(hidden, 1)
    assert reader.kind == estimator.kind
    assert reader.kind in READOUTS
    for part in (reading.entropy_nats, reading.top1, reading.top1_probability):
        assert part.shape == (9,)
    assert reading.top1.dtype == torch.int64
    assert (reading.logits is not None) == (estimator.kind == "full")
    assert (reader.macs_per_row == 0) == (estimator.kind == "full"), "a full head is charged by the geometry"


@torch.inference_mode()
def test_the_full_readers_logits_are_the_output_distribution(stepper, hidden):
    reading = make_entropy_reader(stepper, EntropyEstimator(), PROBES).read(hidden, 0)
    assert torch.equal(reading.logits, stepper.logits(hidden))
    assert torch.equal(reading.entropy_nats, entropy_nats(reading.logits))
    assert torch.equal(reading.top1, reading.logits.argmax(dim=1))


@pytest.mark.parametrize("estimator", EVERY[1:4], ids=lambda e: e.name)
@torch.inference_mode()
def test_a_correction_moves_the_entropy_of_its_probe_and_nothing_else(stepper, hidden, estimator):
    parameters = {name: getattr(estimator, name) for name in ("kind", "k", "rank", "search")}
    reader = make_entropy_reader(stepper, EntropyEstimator(**parameters, correction=LINES), PROBES)
    raw = reader.read_uncorrected(hidden)
    for probe, (slope, intercept) in enumerate(LINES):
        reading = reader.read(hidden, probe)
        assert torch.allclose(reading.entropy_nats, slope * raw.entropy_nats + intercept)
        assert torch.equal(reading.top1, raw.top1)
        assert torch.equal(reading.top1_probability, raw.top1_probability)
    uncorrected = make_entropy_reader(stepper, estimator, PROBES)
    assert torch.equal(uncorrected.read(hidden, 1).entropy_nats, raw.entropy_nats)


@pytest.mark.parametrize("estimator", EVERY, ids=lambda e: e.name)
@torch.inference_mode()
def test_a_decision_takes_the_entropy_that_a_trace_records(stepper, hidden, estimator):
    reader = make_entropy_reader(stepper, estimator, PROBES)
    for probe in range(len(PROBES)):
        assert torch.equal(reader.entropy_nats(hidden, probe), reader.read(hidden, probe).entropy_nats)


@pytest.mark.parametrize("estimator", EVERY, ids=lambda e: e.name)
@torch.inference_mode()
def test_known_logits_are_read_instead_of_computed_again(stepper, hidden, estimator):
    """By readers of all exact logits; the others read less than a head computes."""
    reader, own = make_entropy_reader(stepper, estimator, PROBES), stepper.logits(hidden)
    alone, known, others = (reader.read(hidden, 0, logits) for logits in (None, own, 0.5 * own))
    assert torch.allclose(known.entropy_nats, alone.entropy_nats, rtol=1e-12)
    assert torch.equal(known.top1, alone.top1)
    whole = estimator.kind in ("full", "topk") and estimator.search == "exact"
    assert torch.equal(others.entropy_nats, alone.entropy_nats) != whole


@torch.inference_mode()
def test_the_linear_probe_reads_the_normed_state_and_knows_no_token(stepper, hidden):
    reader = make_entropy_reader(stepper, EVERY[-1], PROBES)
    reading = reader.read(hidden, 1)
    weights = torch.tensor(WEIGHTS[1], dtype=torch.float64)
    assert torch.allclose(reading.entropy_nats, stepper.apply_final_norm(hidden) @ weights[:-1] + weights[-1])
    lined = make_entropy_reader(stepper, replace(EVERY[-1], correction=LINES), PROBES)
    assert torch.allclose(lined.entropy_nats(hidden, 1), 0.5 * reading.entropy_nats + 3.0)
    assert (reading.top1 == -1).all()
    assert torch.isnan(reading.top1_probability).all()
    with pytest.raises(BadArgument, match="an estimator that reads any layer; read it at its probes"):
        reader.read_uncorrected(hidden)


@pytest.mark.parametrize("family", ["gemma2", "phi"])
@torch.inference_mode()
def test_a_softcap_and_a_bias_of_the_head_are_seen(family):
    """Gemma 2 caps its logits, Phi has a bias; K = V of each must give the model's own entropy."""
    model = small_model(family)
    if family == "gemma2":
        model.config.final_logit_softcapping = 2.0
    stepper = CausalStepper(model)
    assert (stepper.logit_softcap if family == "gemma2" else stepper.unembedding_bias) is not None
    states = 3 * torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = make_entropy_reader(stepper, EntropyEstimator(), PROBES).read_uncorrected(states)
    for estimator, logits in (
        (EntropyEstimator("topk", k=VOCABULARY), None),
        (EntropyEstimator("topk", k=VOCABULARY), whole.logits),
        (EntropyEstimator("topk", k=VOCABULARY, search="lowrank", rank=HIDDEN), None),
        (EntropyEstimator("lowrank", k=VOCABULARY, rank=HIDDEN), None),
    ):
        reading = make_entropy_reader(stepper, estimator, PROBES).read(states, 0, logits)
        # Gemma's norm computes in float32 also for float64 models, and batches differ
        assert torch.allclose(reading.entropy_nats, whole.entropy_nats, atol=1e-6), estimator.name
        assert torch.equal(reading.top1, whole.top1), estimator.name


def test_the_projection_in_front_of_the_head_is_charged(stepper):
    """OPT-350m's head is narrower than its states, so every readout projects first."""
    narrow = CausalStepper(small_model("opt_350m"))
    width = narrow.unembedding.shape[1]
    assert width < HIDDEN
    assert (
        make_entropy_reader(narrow, EntropyEstimator("topk", k=8), PROBES).macs_per_row
        == VOCABULARY * width + HIDDEN * width
    )
    assert make_entropy_reader(stepper, EntropyEstimator("topk", k=8), PROBES).macs_per_row == VOCABULARY * HIDDEN


def test_factors_are_built_once_per_stepper_and_freed_with_it(monkeypatch):
    built = []
    for name in ("low_rank_factors", "principal_axes"):
        compute = getattr(estimators, name)
        monkeypatch.setattr(estimators, name, lambda *given, of=compute: built.append(given[1:2]) or of(*given))
    stepper = CausalStepper(small_model("gpt_neox"))
    for rank, k in ((4, 8), (4, 16), (6, 8), (4, 8)):
        make_entropy_reader(stepper, EntropyEstimator("lowrank", k=k, rank=rank), PROBES)
        make_entropy_reader(stepper, EntropyEstimator("topk", k=k, rank=rank, search="lowrank"), PROBES)
    assert built == [(), (4,), (6,)], "the axes once, and the factors of each rank once"
    alive = weakref.ref(stepper)
    del stepper
    gc.collect()
    assert alive() is None, "the cache keeps no stepper alive"


def test_factors_built_in_inference_mode_serve_outside_it(hidden):
    stepper = CausalStepper(small_model("gpt_neox"))
    with torch.inference_mode():
        reader = make_entropy_reader(stepper, EntropyEstimator("lowrank", k=8, rank=4), PROBES)
    assert torch.isfinite(reader.read_uncorrected(hidden).entropy_nats).all()


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (EntropyEstimator("topk", k=VOCABULARY + 1), "estimator.k=102, but expected 1–101"),
        (EntropyEstimator("lowrank", k=8, rank=HIDDEN + 1), "estimator.rank=33, but expected 1–32"),
        (EntropyEstimator("topk", k=8, correction=LINES[:1]), r"one per probe \(2\)"),
        (EntropyEstimator(correction=LINES), "none for the full softmax"),
        (EntropyEstimator("linear", weights=WEIGHTS[:1]), "for each of 2 probes 32 weights"),
        (EntropyEstimator("linear"), "for each of 2 probes 32 weights"),
    ],
    ids=lambda value: value.name if isinstance(value, EntropyEstimator) else "",
)
def test_what_does_not_fit_the_model_or_the_probes_is_refused(stepper, estimator, message):
    with pytest.raises(BadArgument, match=message):
        make_entropy_reader(stepper, estimator, PROBES)


def test_every_kind_of_estimator_has_a_reader():
    from emad_ref.point import ESTIMATORS, SEARCHES

    assert set(READERS) == set(ESTIMATORS)
    assert set(estimators.INDEX_BUILDERS) >= set(SEARCHES)
