"""Fit of a tuned lens from cached states: ridge regression in closed form, refined on a sample of the vocabulary.

    start    T(h_ℓ) = h_ℓ + A_ℓ·h_ℓ + b_ℓ ≈ h_L         ridge of h_L − h_ℓ on h_ℓ, exact from sums; rank r by projection
    refined  KL(p_L ‖ q_ℓ) over a sample S of the vocabulary, by Adam:
             −Σ_{v∈S} c_v·p_L(v)·z_v + (Σ_{v∈S} c_v·p_L(v))·log Σ_{v∈S} c_v·exp(z_v),  z = head(norm(T(h_ℓ)))

S holds the likeliest next tokens of the text (c = 1), and each step draws others at random, each with the weight c = (V
− K) / R (Jean et al., 1412.2007, "sampled softmax"). A vocabulary of at most ``SAMPLED_TOKENS`` is read completely,
with the objective of ``lens_fit``.

One pass over the text caches the states after the layers of the lens and after the last one, so no step runs the model
again. ``lens_fit`` reads the model and a whole head for every step: at a vocabulary of 49,152 that takes hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.lens_fit import (
    LensFitState,
    LensPlan,
    WindowSource,
    build_lens,
    fitted_lens_with_divergences,
    make_adam,
    require_plan_fits_model,
    take_adam_step,
    training_windows,
)
from emad_ref.calibration.regression import (
    RIDGE_PENALTY,
    RegressionMoments,
    fit_ridge,
    reduced_rank_factors,
    ridge_covariance_matrix,
)
from emad_ref.calibration.trace import iterate_head_slices, iterate_states_after
from emad_ref.calibration.windows import TokenSequence, iterate_batches
from emad_ref.models.fast.fused_blocks import multiply_by_weight
from emad_ref.models.stepper import Stepper
from emad_ref.probes.estimators import apply_softcap
from emad_ref.probes.tuned_lens import Translator, at_least_float32_dtype
from emad_ref.signals import exp_log_probabilities, to_numpy_float64, upcast_to_float32

CACHED_BYTES = 2**30  # most bytes of states; further text is not read
SAMPLED_TOKENS = 4096  # tokens of the vocabulary at a step, half of them the likeliest ones


@dataclass(frozen=True, eq=False)
class CachedStates:
    """States of training positions: ``states`` layer → [tokens, D], ``final`` [tokens, D] after the last layer.

    ``log_z`` [tokens]: the log normaliser of the final logits. ``likeliest`` int64 [K]: tokens by their summed final
    probability.
    """

    states: dict[int, Tensor]
    final: Tensor
    log_z: Tensor
    likeliest: Tensor


def fit_lens_from_cache(
    stepper: Stepper, plan: LensPlan, windows: WindowSource, *, progress: str | None = None
) -> FittedLens:
    """Fit a tuned lens from states that one pass over the text caches.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    plan : LensPlan
        Layers, rank, and ``steps`` of ``tokens_per_step`` positions that refine the closed form.
    windows : callable
        Returns an iterator over the same ``TokenSequence`` windows at every call.
    progress : str or None
        Name of the progress bars; None shows none.

    Returns
    -------
    FittedLens
        Lens, plan, and divergences on held-out documents in nats.

    Raises
    ------
    BadArgument
        Layers or a rank that this model lacks.
    EmptyCorpus
        No window to fit on, or none held out.
    NotFinite
        States or a divergence that are not numbers.

    References
    ----------
    Belrose et al., 2303.08112; Jean et al., 1412.2007, section 3.
    """
    require_plan_fits_model(stepper, plan)
    cache = cache_states(stepper, plan, windows, progress)
    state = LensFitState({layer: _closed_form(cache, layer, plan, stepper) for layer in plan.layers}, {})
    state.nats = np.zeros((2, len(plan.layers)))
    named = None if progress is None else f"{progress}, refined"
    with tqdm(desc=named, disable=progress is None, total=plan.steps, unit="step") as bar:
        for divergence in _refine(stepper, plan, cache, state):
            bar.set_postfix(nats=f"{divergence:.4f}", refresh=False)
            bar.update()
    lens = build_lens(stepper, plan, state)
    return fitted_lens_with_divergences(stepper, plan, windows, state, lens, progress)


@torch.inference_mode()
def cache_states(stepper: Stepper, plan: LensPlan, windows: WindowSource, progress: str | None = None) -> CachedStates:
    """The states of the training documents of ``plan``, as many as ``CACHED_BYTES`` hold.

    Raises:
        EmptyCorpus: no window to fit on.
    """
    layers = (*plan.layers, stepper.layers)
    room = CACHED_BYTES // (len(layers) * stepper.geometry.hidden * stepper.unembedding.element_size())
    kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    normalisers, mass = list[Tensor](), torch.zeros(stepper.vocabulary_size, device=stepper.device)
    read = list(_until_full(training_windows(plan, windows), room))
    total = sum(window.n_decided for window in read)
    with tqdm(desc=progress, disable=progress is None, total=total, unit="tok", unit_scale=True) as bar:
        for batch in iterate_batches(read):
            for layer, states in zip(layers, iterate_states_after(stepper, batch, layers), strict=True):
                kept[layer].append(states)
            final = kept[stepper.layers][-1]
            for rows in iterate_head_slices(stepper, len(final)):
                logits = upcast_to_float32(stepper.logits(final[rows]))
                normalisers.append(logits.logsumexp(dim=-1))
                mass += exp_log_probabilities(logits - normalisers[-1][:, None]).sum(dim=0)
            bar.update(len(final))
    small = stepper.vocabulary_size <= SAMPLED_TOKENS
    likeliest = mass.argsort(descending=True)[: stepper.vocabulary_size if small else SAMPLED_TOKENS // 2]
    whole_text = {layer: torch.cat(parts) for layer, parts in kept.items()}
    return CachedStates(whole_text, whole_text.pop(stepper.layers), torch.cat(normalisers), likeliest)


def _until_full(windows: Iterator[TokenSequence], room: int) -> Iterator[TokenSequence]:
    for window in windows:
        yield window
        room -= len(window.tokens)
        if room <= 0:
            return


def _closed_form(cache: CachedStates, layer: int, plan: LensPlan, stepper: Stepper) -> list[Tensor]:
    """Factors and bias of the ridge regression of h_L − h_ℓ on h_ℓ, of the plan's rank."""
    here, end = to_numpy_float64(cache.states[layer]), to_numpy_float64(cache.final)
    moments = RegressionMoments.from_pairs(here, end - here)
    fitted = fit_ridge(moments, RIDGE_PENALTY)
    slopes, bias = fitted[:-1], fitted[-1]
    factors: tuple[np.ndarray, ...] = (slopes.T,)
    if plan.rank is not None:
        factors = reduced_rank_factors(slopes, ridge_covariance_matrix(moments, RIDGE_PENALTY), plan.rank)
        bias = (moments.y - moments.x @ (factors[1] @ factors[0].T)) / moments.tokens
    dtype, device = at_least_float32_dtype(stepper), stepper.device
    return [
        torch.from_numpy(np.ascontiguousarray(part)).to(device, dtype).requires_grad_() for part in (*factors, bias)
    ]


def _refine(stepper: Stepper, plan: LensPlan, cache: CachedStates, state: LensFitState) -> Iterator[float]:
    """Yield the sampled divergence of each step, without its constant; update the factors in ``state``."""
    adam = make_adam(plan, state)
    draw = torch.Generator().manual_seed(plan.seed)
    weight, bias = stepper.unembedding.detach(), stepper.unembedding_bias
    others = torch.from_numpy(np.setdiff1d(np.arange(stepper.vocabulary_size), cache.likeliest.cpu().numpy()))
    tokens = len(cache.final)
    for step in range(plan.steps):
        rows = torch.randint(tokens, (min(plan.tokens_per_step, tokens),), generator=draw)
        ids, log_c = _sample(cache.likeliest, others, draw, stepper.device)
        head = weight[ids], None if bias is None else bias.detach()[ids]

        def logits(hidden: Tensor, head: tuple[Tensor, Tensor | None] = head) -> Tensor:
            return upcast_to_float32(
                apply_softcap(multiply_by_weight(stepper.apply_final_norm(hidden), *head), stepper.logit_softcap)
            )

        with torch.no_grad():
            p = exp_log_probabilities(logits(cache.final[rows]) - cache.log_z[rows, None] + log_c)
            mass = p.sum(dim=-1)

        def loss_of(
            layer: int,
            translator: Translator,
            rows: Tensor = rows,
            logits: Callable[[Tensor], Tensor] = logits,
            log_c: Tensor = log_c,
            sampled: tuple[Tensor, Tensor] = (p, mass),
        ) -> Tensor:
            z, (p, mass) = logits(translator(cache.states[layer][rows].clone())), sampled
            return (mass * (z + log_c).logsumexp(dim=-1) - (p * z).sum(dim=-1)).mean()

        yield take_adam_step(adam, plan, state, step, loss_of)


def _sample(likeliest: Tensor, others: Tensor, draw: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [S], log c [S]): the likeliest tokens, and as many of ``others`` drawn at random, weighted for all."""
    if not len(others):
        return likeliest, torch.zeros(len(likeliest), device=device)
    drawn = others[torch.randperm(len(others), generator=draw)[: SAMPLED_TOKENS - len(likeliest)]].to(device)
    log_c = torch.zeros(len(likeliest) + len(drawn), device=device)
    log_c[len(likeliest) :] = math.log(len(others) / len(drawn))
    return torch.cat([likeliest, drawn]), log_c
