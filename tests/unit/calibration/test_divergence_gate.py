"""The exit gate estimates a readout's divergence from the end: scikit-learn's ridge regression, as a stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from emad_ref.calibration.linear_maps import fit_gate
from emad_ref.calibration.trace import EmptyCorpus, compute_sequence_states, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import get_attached_lens
from emad_ref.record import READOUTS
from emad_ref.replay.replay import compute_decode_work, replay
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

PROBES = (2, 4)


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


def texts(count: int, seed: int = 0) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    return [TokenSequence(rng.integers(0, VOCABULARY, 40)) for _ in range(count)]


@torch.inference_mode()
def pairs(stepper: Stepper, some: list[TokenSequence], probe: int, tuned: object) -> tuple[np.ndarray, np.ndarray]:
    """Return (x [tokens, E], √KL [tokens]) by NumPy, one text at a time."""
    found_x, found_y = [], []
    for text in some:
        states = compute_sequence_states(stepper, text.tokens[:-1])
        final, here = stepper.logits(states[-1]), stepper.logits(states[probe - 1])
        if tuned is not None:
            here = stepper.logits(tuned(states[probe - 1], probe))  # type: ignore[operator]
        p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (final.numpy(), here.numpy()))
        found_x.append(stepper.apply_final_norm(states[probe - 1]).numpy())
        found_y.append(np.sqrt((p * np.log(p / q)).sum(-1)))
    return np.concatenate(found_x), np.concatenate(found_y)


@pytest.mark.parametrize("lensed", [False, True])
def test_it_is_scikit_learns_ridge_on_the_root_of_the_divergence(stepper: Stepper, lensed: bool) -> None:
    name = attached(stepper, PROBES, 4) if lensed else None
    gate = fit_gate(stepper, iter(texts(60)), PROBES, name, penalty=0.01)
    for probe, row in zip(PROBES, gate.weights, strict=True):
        x, y = pairs(stepper, texts(60), probe, get_attached_lens(stepper, name))
        fit = Ridge(alpha=0.01 * len(x) * x.var(axis=0).mean()).fit(x, y)
        assert row == pytest.approx([*fit.coef_, fit.intercept_], rel=1e-6, abs=1e-9)


def test_on_other_text_it_says_which_states_are_far_from_the_end(stepper: Stepper) -> None:
    gate = fit_gate(stepper, texts(200), PROBES)
    trace = take_trace(stepper, texts(30, seed=1), estimators={gate: PROBES})
    for probe in PROBES:
        _, y = pairs(stepper, texts(30, seed=1), probe, None)
        assert np.corrcoef(trace.estimates[gate][:, probe - 1], y)[0, 1] > 0.3


def test_a_point_behind_a_gate_reads_no_head_at_its_probes(stepper: Stepper) -> None:
    name = attached(stepper, PROBES, 4)
    gate = fit_gate(stepper, texts(60), PROBES, name)
    trace = take_trace(stepper, texts(5, seed=1), estimators={gate: PROBES}, lens=name)
    levels = tuple(float(np.quantile(trace.estimates[gate][:, probe - 1], 0.3)) for probe in PROBES)
    point = OperatingPoint(
        "gate", "gate", LAYERS, LAYERS, PROBES, (levels,), "free_eager", gate, "divergence", lens=name
    )
    depth = replay(trace, point).depth
    assert set(depth.tolist()) == {*PROBES, LAYERS}
    work = compute_decode_work(trace, depth, point, trace.macs_per_row[gate])
    assert work.readout_rows[READOUTS.index("full")].sum() == len(trace), "one head per token, at its exit"
    assert work.readout_macs[READOUTS.index("linear"), PROBES[0] - 1] == len(trace) * 32


def test_bad_input_is_refused(stepper: Stepper) -> None:
    with pytest.raises(EmptyCorpus, match="text that the lens did not see"):
        fit_gate(stepper, [], PROBES)
    with pytest.raises(BadArgument, match=r"^probes=\(2, 6\)"):
        fit_gate(stepper, texts(2), (2, LAYERS))
    with pytest.raises(BadArgument, match=r"^point\.lens='feed'"):
        fit_gate(stepper, texts(2), PROBES, "feed")
    with pytest.raises(BadArgument, match=r"^tokens=0"):
        fit_gate(stepper, texts(2), PROBES, tokens=0)
