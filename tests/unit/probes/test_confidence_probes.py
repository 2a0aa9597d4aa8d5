"""Probes of the confidence rules: state kept from probe to probe, its reset and removal, and the charged work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.errors import BadArgument
from emad_ref.exit_rules import early_exit_point, softmax_response_point
from emad_ref.models.causal import CausalStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import ConfidenceParameters, OperatingPoint
from emad_ref.probes.contrast import get_score_function
from emad_ref.probes.probe import ContrastProbe, FullSoftmaxProbe, Probe, PrunedProbe, SaturationProbe, make_probe
from emad_ref.probes.pruned_vocabulary import vocabulary_size_at_confidence
from emad_ref.probes.signal_values import hidden_state_cosine, softmax_response
from emad_ref.record import READOUTS, Work
from emad_ref.signals import NotFinite, ProbeOutput, log_probabilities
from tests.small_models import LAYERS, VOCABULARY, small_model

FULL, SUBSET = READOUTS.index("full"), READOUTS.index("subset")
HIDDEN, ROWS, MINIMUM = 32, 4, 2
EXACT = 1e-12  # float64 sums of 32 products in a different order


def point(signal: str, **changes: object) -> OperatingPoint:
    """Return a point with probes from layer 2 of 6 on; ``changes``: fields of its confidence."""
    plain = early_exit_point(signal, LAYERS, VOCABULARY, MINIMUM)
    return replace(plain, confidence=replace(plain.confidence or ConfidenceParameters(MINIMUM), **changes))


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture(scope="module")
def states() -> dict[int, torch.Tensor]:
    """Return a state [rows, D] after each layer for which the model's head gives peaked distributions."""
    generator = torch.Generator().manual_seed(0)
    return {
        layer: torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64) for layer in range(1, LAYERS + 1)
    }


@torch.inference_mode()
def climb(
    watch: Probe, point: OperatingPoint, states: dict[int, torch.Tensor], work: Work | None = None
) -> dict[int, ProbeOutput]:
    """Return every probe's output in one step in which no row stops."""
    counted = Work.none(LAYERS) if work is None else work
    watch.begin_step()
    return {probe: watch.read(states[probe], i, counted) for i, probe in enumerate(point.probes)}


POINTS = {
    "saturation": point("saturation"),
    "weighted": point("weighted_contrast"),
    "jsd": point("jsd_contrast", alpha_decay=0.5),
    "fixed": point("softmax_response", kept=(9, 9, 9)),
    "decaying": point("softmax_response", kept=(40, 9, 2)),
    "adaptive": point("softmax_response", shrink=0.9),
    "combined": point("jsd_contrast", alpha=0.0, shrink=0.9),
}
WATCHES = {"saturation": SaturationProbe, "weighted": ContrastProbe, "jsd": ContrastProbe}


@pytest.fixture(params=POINTS)
def named(request: pytest.FixtureRequest) -> tuple[str, OperatingPoint]:
    return request.param, POINTS[request.param]


def test_each_point_has_its_watch(stepper: Stepper, named: tuple[str, OperatingPoint]) -> None:
    name, point = named
    assert type(make_probe(stepper, point)) is WATCHES.get(name, PrunedProbe)
    assert type(make_probe(stepper, softmax_response_point(LAYERS, (2, 3), 0.9))) is FullSoftmaxProbe


def test_saturation_is_the_cosine_with_the_layer_below_and_runs_no_head(
    stepper: Stepper, states: dict[int, torch.Tensor]
) -> None:
    work, point = Work.none(LAYERS), POINTS["saturation"]
    seen = climb(make_probe(stepper, point), point, states, work)
    assert point.probes == (1, 2, 3, 4, 5)
    assert torch.isnan(seen[1].signal).all(), "there is no probe below the first"
    for layer in range(2, LAYERS):
        here, below = states[layer].numpy(), states[layer - 1].numpy()
        cosine = (here * below).sum(1) / np.sqrt((here**2).sum(1) * (below**2).sum(1))
        assert np.abs(seen[layer].signal.numpy() - cosine).max() < EXACT
        assert seen[layer].logits is None
    assert work.readout_rows.sum() == work.readout_macs.sum() == 0


def test_a_state_is_most_like_itself_and_nothing_is_like_no_state() -> None:
    h = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(hidden_state_cosine(h, 2 * h), torch.ones(3))
    assert torch.allclose(hidden_state_cosine(h, -h), -torch.ones(3))
    assert hidden_state_cosine(h.half(), h.half()).dtype == torch.float32
    assert hidden_state_cosine(h, 0 * h).tolist() == hidden_state_cosine(0 * h, 0 * h).tolist() == [0.0] * 3
    assert torch.isnan(hidden_state_cosine(h, torch.nan * h)).all()


def test_every_probe_of_a_contrast_is_a_full_head_below_the_minimum_layer_too(
    stepper: Stepper, states: dict[int, torch.Tensor]
) -> None:
    work, point = Work.none(LAYERS), POINTS["weighted"]
    seen = climb(make_probe(stepper, point), point, states, work)
    assert point.probes == (1, 2, 3, 4, 5)
    assert work.readout_rows[FULL].tolist() == [ROWS] * 5 + [0]
    assert work.readout_macs.sum() == 0
    assert torch.isnan(seen[1].signal).all()
    assert all(torch.isfinite(seen[layer].signal).all() for layer in (2, 3, 4, 5))


@torch.inference_mode()
def test_a_contrast_sees_the_logits_of_shallower_probes(stepper: Stepper, states: dict[int, torch.Tensor]) -> None:
    point = POINTS["jsd"]
    logits = {layer: stepper.logits(h) for layer, h in states.items()}
    seen = climb(make_probe(stepper, point), point, states)
    for layer in (3, 4, 5):
        log_probs = {m: log_probabilities(logits[m]) for m in range(2, layer + 1)}
        expected = get_score_function("jsd_contrast")(point.confidence, layer, logits[layer], log_probs)
        assert torch.equal(seen[layer].signal, expected.signal)
        assert torch.equal(seen[layer].logits, expected.logits)


@pytest.mark.parametrize(("name", "sizes"), [("fixed", (9, 9, 9)), ("decaying", (40, 9, 2))])
@torch.inference_mode()
def test_a_pruned_rule_runs_one_full_head_and_then_k_products(
    stepper: Stepper, states: dict[int, torch.Tensor], name: str, sizes: tuple[int, ...]
) -> None:
    work, point = Work.none(LAYERS), POINTS[name]
    seen = climb(make_probe(stepper, point), point, states, work)
    assert work.readout_rows[FULL].tolist() == [0, ROWS, 0, 0, 0, 0]
    assert work.readout_rows[SUBSET].tolist() == [0, 0, ROWS, ROWS, ROWS, 0]
    assert work.readout_macs[SUBSET].tolist() == [0, 0, *(ROWS * k * HIDDEN for k in sizes), 0]
    race = torch.ones(ROWS, VOCABULARY, dtype=torch.bool)
    for layer, k in zip((3, 4, 5), sizes, strict=True):
        last = stepper.logits(states[layer - 1]).masked_fill(~race, -torch.inf)
        race = torch.zeros_like(race).scatter(1, last.topk(k, dim=1).indices, True)
        expected = stepper.logits(states[layer]).masked_fill(~race, -torch.inf)
        assert torch.equal(torch.isfinite(seen[layer].logits), race), "only the best by the layer below"
        assert torch.allclose(seen[layer].logits, expected, atol=EXACT)
        assert torch.allclose(seen[layer].signal, softmax_response(expected), atol=EXACT)


def test_the_adaptive_rule_keeps_fewer_of_what_it_is_surer_of(
    stepper: Stepper, states: dict[int, torch.Tensor]
) -> None:
    work, point = Work.none(LAYERS), POINTS["adaptive"]
    peaked = {layer: h * torch.tensor([0.1, 1.0, 2.0, 4.0])[:, None] for layer, h in states.items()}
    wild = CausalStepper(small_model("opt_350m", dtype=torch.float64))  # no final norm: the length of a state matters
    seen = climb(make_probe(wild, point), point, peaked, work)
    size = torch.full((ROWS,), VOCABULARY)
    for layer in (3, 4, 5):
        wanted = [vocabulary_size_at_confidence(VOCABULARY, 0.9, float(c)) for c in seen[layer - 1].signal]
        size = torch.minimum(size, torch.tensor(wanted))
        assert torch.isfinite(seen[layer].logits).sum(dim=1).tolist() == size.tolist()
        assert work.readout_macs[SUBSET, layer - 1] == int(size.sum()) * 16 + ROWS * 32 * 16
    assert len(set(size.tolist())) > 1, "rows must differ in what they keep"


@torch.inference_mode()
def test_before_it_is_defined_the_jsd_score_adapts_by_the_readouts_own_response(
    stepper: Stepper, states: dict[int, torch.Tensor]
) -> None:
    point = POINTS["combined"]
    seen = climb(make_probe(stepper, point), point, states)
    assert torch.isnan(seen[2].signal).all()
    wanted = [
        vocabulary_size_at_confidence(VOCABULARY, 0.9, float(c)) for c in softmax_response(stepper.logits(states[2]))
    ]
    assert torch.isfinite(seen[3].logits).sum(dim=1).tolist() == wanted


@torch.inference_mode()
def test_rows_together_are_shown_what_each_is_shown_alone(
    stepper: Stepper, states: dict[int, torch.Tensor], named: tuple[str, OperatingPoint]
) -> None:
    """With any numbers of kept tokens, equal or not."""
    point, together, apart = named[1], Work.none(LAYERS), Work.none(LAYERS)
    whole = climb(make_probe(stepper, point), point, states, together)
    for row in range(ROWS):
        alone = climb(make_probe(stepper, point), point, {layer: h[[row]] for layer, h in states.items()}, apart)
        for probe in point.probes:
            mine, own = whole[probe], alone[probe]
            assert torch.allclose(mine.signal[[row]], own.signal, atol=EXACT, rtol=0, equal_nan=True)
            assert (mine.logits is None) == (own.logits is None)
            if mine.logits is not None and own.logits is not None:
                assert torch.equal(torch.isfinite(mine.logits[[row]]), torch.isfinite(own.logits))
                assert torch.allclose(mine.logits[[row]], own.logits, atol=EXACT, rtol=0)
            assert (None if mine.macs is None else mine.macs[row]) == (None if own.macs is None else own.macs[0])
    assert together == apart, together.describe_difference(apart)


@torch.inference_mode()
def test_rows_that_stop_take_what_is_remembered_of_them_along(
    stepper: Stepper, states: dict[int, torch.Tensor], named: tuple[str, OperatingPoint]
) -> None:
    """The other rows continue as if they were alone."""
    point, work, staying = named[1], Work.none(LAYERS), np.array([0, 3])
    whole = climb(make_probe(stepper, point), point, states)
    watch = make_probe(stepper, point)
    watch.begin_step()
    for i, probe in enumerate(point.probes):
        rows = staying if probe > 3 else np.arange(ROWS)
        seen = watch.read(states[probe][rows], i, work, rows)
        assert torch.allclose(seen.signal, whole[probe].signal[rows], atol=EXACT, equal_nan=True)


@torch.inference_mode()
def test_a_new_step_forgets_the_last_one(
    stepper: Stepper, states: dict[int, torch.Tensor], named: tuple[str, OperatingPoint]
) -> None:
    point = named[1]
    watch = make_probe(stepper, point)
    climb(watch, point, {layer: -h[:2] for layer, h in states.items()})
    again, fresh = climb(watch, point, states), climb(make_probe(stepper, point), point, states)
    for probe in point.probes:
        assert torch.equal(again[probe].signal.nan_to_num(), fresh[probe].signal.nan_to_num())


@torch.inference_mode()
def test_rows_out_of_step_with_the_memory_are_an_error(
    stepper: Stepper, states: dict[int, torch.Tensor], named: tuple[str, OperatingPoint]
) -> None:
    watch, work = make_probe(stepper, named[1]), Work.none(LAYERS)
    watch.begin_step()
    watch.read(states[2], 0, work)
    with pytest.raises(AssertionError, match="4 rows are remembered, 3 are shown"):
        watch.read(states[3][:3], 1, work)


@torch.inference_mode()
def test_states_that_are_no_numbers_are_refused(
    stepper: Stepper, states: dict[int, torch.Tensor], named: tuple[str, OperatingPoint]
) -> None:
    broken = {layer: h.clone() for layer, h in states.items()}
    broken[3][1] = torch.nan
    with pytest.raises(NotFinite, match="after layer 3"):
        climb(make_probe(stepper, named[1]), named[1], broken)


def test_rows_that_stop_elsewhere_emit_from_a_full_head(
    stepper: Stepper, states: dict[int, torch.Tensor], named: tuple[str, OperatingPoint]
) -> None:
    work = Work.none(LAYERS)
    with torch.inference_mode():
        logits = make_probe(stepper, named[1]).emit_logits(states[6][:3, None], 6, work)
        assert torch.equal(logits, stepper.logits(states[6][:3, None]))
    assert work.readout_rows[FULL].tolist() == [0, 0, 0, 0, 0, 3]


def test_a_vocabulary_too_small_to_be_pruned_by_the_rule_is_refused(stepper: Stepper) -> None:
    with pytest.raises(BadArgument, match="a share that leaves 2 of 101 tokens"):
        make_probe(stepper, point("softmax_response", shrink=0.99))
