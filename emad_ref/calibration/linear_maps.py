"""Ridge fits on hidden states: an exit gate, and state translators.

    gate         √KL(p_L ‖ q_ℓ) ≈ w_ℓ·x_ℓ + c_ℓ,  x_ℓ = norm(h_ℓ) [E],  q_ℓ the distribution emitted after ℓ
    translators  minimise over U, V [D, r], b:  Σ_tokens |h_e + U·Vᵀ·h_e + b − h_ℓ|² + n·λ·|U·Vᵀ|²  per pair e < ℓ < L

Translators come by reduced-rank regression: the ridge solution of h_ℓ − h_e on h_e, projected onto the r directions in
which its predictions vary most (Izenman 1975; exact, since the penalty is part of the metric). The gate's root keeps a
few outlying tokens from dominating the fit. Both read text once, as sums; use text that neither the lens nor the
thresholds saw (``lens_fit.held_out_windows``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tqdm import tqdm

from emad_ref.calibration.calibration_run import limit_tokens
from emad_ref.calibration.lens_fit import states_and_final_log_probs
from emad_ref.calibration.profile import require_probes
from emad_ref.calibration.regression import (
    RIDGE_PENALTY,
    RegressionMoments,
    fit_ridge,
    reduced_rank_factors,
    ridge_covariance_matrix,
)
from emad_ref.calibration.trace import EmptyCorpus, iterate_states_after
from emad_ref.calibration.windows import TokenSequence, iterate_batches
from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator
from emad_ref.probes.signal_values import kl_divergence_nats
from emad_ref.probes.tuned_lens import (
    Pair,
    StateTranslators,
    Translator,
    at_least_float32_dtype,
    get_attached_lens,
    list_exit_layer_pairs,
    weight_dtype_name,
)
from emad_ref.record import Floats
from emad_ref.signals import to_numpy_float64

GATE_TOKENS = 20_000


def fit_gate(
    stepper: Stepper,
    windows: Iterable[TokenSequence],
    probes: Sequence[int],
    lens: str | None = None,
    *,
    tokens: int = GATE_TOKENS,
    penalty: float = RIDGE_PENALTY,
    progress: str | None = None,
) -> EntropyEstimator:
    """Fit an exit gate: a linear estimator of √KL(p_L ‖ q_ℓ) at each probe.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    windows : iterable of TokenSequence
        Text that neither lens nor thresholds used (``lens_fit.held_out_windows``).
    probes : sequence of int
        Ascending layers below the last.
    lens : str or None
        Digest of an attached lens that tokens exit through; None: the model's own head.
    tokens : int
        Number of positions to read.
    penalty : float
        Ridge penalty, relative to the mean variance of an input.
    progress : str or None
        Name of the progress bar; None shows none.

    Returns
    -------
    EntropyEstimator
        The linear estimator of the signal ``divergence``, in √nats.

    Raises
    ------
    BadArgument
        Invalid probes, a lens that is not attached, no tokens; as ``fit_ridge``.
    EmptyCorpus
        No windows.
    """
    require_probes(probes, stepper.layers)
    tuned = get_attached_lens(stepper, lens)
    moments = {probe: RegressionMoments.empty(stepper.unembedding.shape[1]) for probe in probes}
    read = 0
    with tqdm(desc=progress, disable=progress is None, total=tokens, unit="tok", unit_scale=True) as bar:
        for batch in iterate_batches(limit_tokens(windows, tokens)):
            states, final = states_and_final_log_probs(stepper, probes, batch)
            with torch.inference_mode():
                for probe, hidden in states.items():
                    logits = stepper.logits(hidden if tuned is None else tuned(hidden, probe))
                    pair = stepper.apply_final_norm(hidden), kl_divergence_nats(final, logits).sqrt()
                    moments[probe] += RegressionMoments.from_pairs(*map(to_numpy_float64, pair))
            read += len(final)
            bar.update(len(final))
    if read == 0:
        raise EmptyCorpus("windows=[], but expected at least one; give text that the lens did not see")
    return EntropyEstimator(
        "linear", weights=tuple(tuple(fit_ridge(sums, penalty).tolist()) for sums in moments.values())
    )


TRANSLATOR_TOKENS = 20_000
TRANSLATOR_RANK = 16


def fit_translators(
    stepper: Stepper,
    fingerprint: str,
    windows: Iterable[TokenSequence],
    exits: Sequence[int],
    rank: int | None = TRANSLATOR_RANK,
    *,
    tokens: int = TRANSLATOR_TOKENS,
    penalty: float = RIDGE_PENALTY,
    progress: str | None = None,
) -> StateTranslators:
    """Fit state translators of every pair above ``exits``, by reduced-rank regression.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    fingerprint : str
        Fingerprint of that model.
    windows : iterable of TokenSequence
        Text that neither lens nor thresholds used.
    exits : sequence of int
        Ascending layers below the last but one.
    rank : int or None
        0 fits biases alone, None full matrices.
    tokens : int
        Number of positions to read.
    penalty : float
        Ridge penalty, relative to the mean variance of an input.
    progress : str or None
        Name of the progress bar; None shows none.

    Returns
    -------
    StateTranslators
        One translator h_e → h_ℓ per pair e < ℓ < L.

    Raises
    ------
    BadArgument
        Invalid exits, a rank outside 0…D, no tokens; as ``fit_ridge``.
    EmptyCorpus
        No windows.

    References
    ----------
    Izenman 1975, "Reduced-rank regression for the multivariate linear model".
    """
    width, layers = stepper.geometry.hidden, stepper.layers
    require_probes(exits, layers)
    if not exits or exits[-1] > layers - 2:
        expected = f"some layers in 1–{layers - 2}"
        raise BadArgument("exits", list(exits), expected, "the last layer reads the state of an exit below it as it is")
    if rank is not None and not 0 <= rank <= width:
        raise BadArgument("rank", rank, f"a rank in 0–{width}, the width of this model, or None for full matrices")
    moments = {exit_: RegressionMoments.empty(width, width * (layers - 1 - exit_)) for exit_ in exits}
    read = 0
    with tqdm(desc=progress, disable=progress is None, total=tokens, unit="tok", unit_scale=True) as bar:
        for batch in iterate_batches(limit_tokens(windows, tokens)):
            with torch.inference_mode():
                states = np.stack([to_numpy_float64(state) for state in iterate_states_after(stepper, batch)])
            for exit_ in exits:
                left, above = states[exit_ - 1], states[exit_ : layers - 1]
                moments[exit_] += RegressionMoments.from_pairs(left, np.concatenate(list(above - left), axis=1))
            read += states.shape[1]
            bar.update(states.shape[1])
    if read == 0:
        raise EmptyCorpus("windows=[], but expected at least one; give text that the lens did not see")
    pairs: dict[Pair, Translator] = {}
    for exit_ in exits:
        pairs |= _solve_translators(
            moments[exit_], list_exit_layer_pairs((exit_,), layers), rank, penalty, at_least_float32_dtype(stepper)
        )
    return StateTranslators(fingerprint, weight_dtype_name(stepper), layers, pairs)


def _solve_translators(
    moments: RegressionMoments, pairs: Sequence[Pair], rank: int | None, penalty: float, dtype: torch.dtype
) -> dict[Pair, Translator]:
    """Translators of the pairs of one exit, whose outputs are side by side in ``moments``."""
    width = len(moments.x)
    system, fitted = ridge_covariance_matrix(moments, penalty), fit_ridge(moments, penalty)[:-1]
    mean_x, mean_y = moments.x / moments.tokens, moments.y / moments.tokens
    translators = {}
    for number, pair in enumerate(pairs):
        mine = slice(number * width, (number + 1) * width)
        slopes, factors = fitted[:, mine], tuple[Floats, ...]()
        if rank is None:
            factors = (slopes.T,)
        elif rank == 0:
            slopes = np.zeros((width, width))
        else:
            factors = reduced_rank_factors(slopes, system, rank)
            slopes = factors[1] @ factors[0].T
        parts = (*factors, mean_y[mine] - mean_x @ slopes)
        *tensors, bias = (torch.from_numpy(np.ascontiguousarray(part)).to(dtype) for part in parts)
        translators[pair] = Translator(tuple(tensors), bias)
    return translators
