"""A lens fitted on cached states: the closed form, its refinement on a vocabulary sample, and the text it reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from emad_ref.calibration import cached_lens
from emad_ref.calibration.cached_lens import cache_states, fit_lens_from_cache
from emad_ref.calibration.lens_fit import LensPlan, fit_lens
from emad_ref.calibration.regression import RIDGE_PENALTY
from emad_ref.calibration.trace import EmptyCorpus
from emad_ref.models.causal import CausalStepper
from tests.small_models import VOCABULARY, small_model
from tests.unit.calibration.test_lens_fit import LEARNING, PLAN, numbers, text

TEXT = text(400)


@pytest.fixture(scope="module")
def stepper() -> CausalStepper:
    return CausalStepper(small_model("gpt_neox"))


def divergence(stepper: CausalStepper, plan: LensPlan, steps: int) -> dict[int, float]:
    return dict(fit_lens_from_cache(stepper, replace(plan, steps=steps), TEXT).tuned_nats)


@pytest.mark.parametrize("rank", [None, 8])
def test_the_closed_form_comes_nearer_to_the_end_and_refining_it_nearer_still(
    stepper: CausalStepper, rank: int | None
) -> None:
    plan = replace(LEARNING, rank=rank, rate=0.005)
    raw = fit_lens(stepper, replace(plan, steps=1), TEXT).raw_nats
    closed, refined = divergence(stepper, plan, 1), divergence(stepper, plan, 60)
    for layer in plan.layers:
        assert refined[layer] < closed[layer] < raw[layer]


def test_the_closed_form_is_a_ridge_regression_on_the_last_state(
    stepper: CausalStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_lens, "_refine", lambda *parts: iter(()))
    lens, cache = fit_lens_from_cache(stepper, PLAN, TEXT).lens, cache_states(stepper, PLAN, TEXT)
    for layer in PLAN.layers:
        here, end = cache.states[layer].numpy(), cache.final.numpy()
        penalty = len(here) * RIDGE_PENALTY * here.var(axis=0).mean()
        expected = here + Ridge(alpha=penalty).fit(here, end - here).predict(here)
        np.testing.assert_allclose(lens(cache.states[layer], layer).numpy(), expected, atol=1e-8)


def test_half_of_the_vocabulary_gives_more_than_half_of_what_refining_gains(
    stepper: CausalStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(LEARNING, rate=0.005)
    closed, whole = divergence(stepper, plan, 1), divergence(stepper, plan, 100)
    monkeypatch.setattr(cached_lens, "SAMPLED_TOKENS", VOCABULARY // 2)
    for layer, nats in divergence(stepper, plan, 100).items():
        assert nats < closed[layer] - 0.5 * (closed[layer] - whole[layer])


def test_the_sample_estimates_the_whole_divergence_without_bias(
    stepper: CausalStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drawn token stands for several: the mean over draws of Σ c·exp(z) is the sum over the vocabulary."""
    monkeypatch.setattr(cached_lens, "SAMPLED_TOKENS", VOCABULARY // 2)
    cache = cache_states(stepper, PLAN, TEXT)
    kept = set(cache.likeliest.tolist())
    assert len(kept) == VOCABULARY // 4
    others, draw = torch.tensor(sorted({*range(VOCABULARY)} - kept)), torch.Generator().manual_seed(0)
    with torch.inference_mode():
        z = stepper.logits(cache.states[2][:5])
    estimates = []
    for _ in range(4000):
        ids, log_c = cached_lens._sample(cache.likeliest, others, draw, torch.device("cpu"))
        assert len(set(ids.tolist())) == len(ids) == VOCABULARY // 2
        assert float(log_c.exp().sum()) == pytest.approx(VOCABULARY)
        estimates.append((z[:, ids] + log_c).exp().sum(dim=-1))
    drawn = torch.stack(estimates)
    error = drawn.std(dim=0) / len(drawn) ** 0.5
    assert bool(((drawn.mean(dim=0) - z.exp().sum(dim=-1)).abs() < 4 * error).all())


def test_text_is_read_once_up_to_the_room_for_its_states(
    stepper: CausalStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_states(stepper, PLAN, TEXT)
    training = [window for window in TEXT() if not PLAN.is_held_out(window.document)]
    assert len(cache.final) == sum(len(window.tokens) - 1 for window in training)
    with torch.inference_mode():
        assert torch.allclose(cache.log_z, stepper.logits(cache.final).logsumexp(dim=-1))
    size = 3 * stepper.geometry.hidden * cache.final.element_size()
    monkeypatch.setattr(cached_lens, "CACHED_BYTES", 50 * size)
    assert 40 <= len(cache_states(stepper, PLAN, TEXT).final) <= 70


def test_the_same_seed_gives_the_same_lens_and_another_another(stepper: CausalStepper) -> None:
    first = fit_lens_from_cache(stepper, PLAN, TEXT)
    assert numbers(fit_lens_from_cache(stepper, PLAN, TEXT)) == numbers(first)
    assert fit_lens_from_cache(stepper, replace(PLAN, seed=4), TEXT).lens.digest != first.lens.digest
    assert first.plan["steps"] == PLAN.steps


def test_without_a_window_to_fit_on_there_is_no_lens(stepper: CausalStepper) -> None:
    with pytest.raises(EmptyCorpus, match="no window to fit on"):
        fit_lens_from_cache(stepper, PLAN, lambda: iter(()))
