"""Fits state translators: from the state at an exit e to the states that full depth would have had above it.

    minimise over U, V [D, r], b:  Σ_tokens |h_e + U·Vᵀ·h_e + b − h_ℓ|² + n·λ·|U·Vᵀ|²   for each pair (e, ℓ), e < ℓ < L

by reduced-rank regression: the ridge solution B of h_ℓ − h_e on h_e, projected onto the r directions in which its
predictions vary most (Izenman 1975; exact, for the penalty is part of the metric). All tokens count alike: fitted on
those alone that leave, their states came closer to the true ones, and losses did not fall.

Text comes once, as sums: memory is D × D per exit and per pair, whatever the text. Give text that neither the lens nor
the thresholds saw (``tuning.held_out``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tqdm import tqdm

from emad_ref.calibration.fit import PENALTY, Moments, ridge, ridge_system
from emad_ref.calibration.profile import require_probes
from emad_ref.calibration.resume import limited
from emad_ref.calibration.trace import EmptyCorpus, TokenSequence, batched, states_after
from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.readout.attached import dtype_of, raised_dtype
from emad_ref.readout.signals import on_host
from emad_ref.readout.states import Pair, StateTranslators, pairs_above
from emad_ref.readout.tuned import Translator
from emad_ref.record import Floats

TOKENS = 20_000
RANK = 16


def fit_translators(
    stepper: Stepper,
    fingerprint: str,
    windows: Iterable[TokenSequence],
    exits: Sequence[int],
    rank: int | None = RANK,
    *,
    tokens: int = TOKENS,
    penalty: float = PENALTY,
    progress: str | None = None,
) -> StateTranslators:
    """Translators of every pair above ``exits``, from ``tokens`` positions of ``windows``.

    ``fingerprint``: of the model that ``stepper`` walks. ``rank``: 0 fits biases alone, None full matrices.
    ``progress`` names the bar, None shows none.

    Raises:
        BadArgument: exits that are not ascending layers below the last but one, a rank outside 0…D, no tokens asked
            for; as ``ridge``.
        EmptyCorpus: no windows.
    """
    width, layers = stepper.geometry.hidden, stepper.layers
    require_probes(exits, layers)
    if not exits or exits[-1] > layers - 2:
        expected = f"some layers in 1–{layers - 2}"
        raise BadArgument("exits", list(exits), expected, "the last layer reads the state of an exit below it as it is")
    if rank is not None and not 0 <= rank <= width:
        raise BadArgument("rank", rank, f"a rank in 0–{width}, the width of this model, or None for full matrices")
    moments = {exit_: Moments.none(width, width * (layers - 1 - exit_)) for exit_ in exits}
    read = 0
    with tqdm(desc=progress, disable=progress is None, total=tokens, unit="tok", unit_scale=True) as bar:
        for batch in batched(limited(windows, tokens)):
            with torch.inference_mode():
                states = np.stack([on_host(state) for state in states_after(stepper, batch)])
            for exit_ in exits:
                left, above = states[exit_ - 1], states[exit_ : layers - 1]
                moments[exit_] += Moments.of(left, np.concatenate(list(above - left), axis=1))
            read += states.shape[1]
            bar.update(states.shape[1])
    if read == 0:
        raise EmptyCorpus("windows=[], but expected at least one; give text that the lens did not see")
    pairs: dict[Pair, Translator] = {}
    for exit_ in exits:
        pairs |= _solved(moments[exit_], pairs_above((exit_,), layers), rank, penalty, raised_dtype(stepper))
    return StateTranslators(fingerprint, dtype_of(stepper), layers, pairs)


def _solved(
    moments: Moments, pairs: Sequence[Pair], rank: int | None, penalty: float, dtype: torch.dtype
) -> dict[Pair, Translator]:
    """Translators of the pairs of one exit, whose outputs stand side by side in ``moments``."""
    width = len(moments.x)
    system, fitted = ridge_system(moments, penalty), ridge(moments, penalty)[:-1]
    mean_x, mean_y = moments.x / moments.tokens, moments.y / moments.tokens
    found = {}
    for number, pair in enumerate(pairs):
        mine = slice(number * width, (number + 1) * width)
        slopes, factors = fitted[:, mine], tuple[Floats, ...]()
        if rank is None:
            factors = (slopes.T,)
        elif rank == 0:
            slopes = np.zeros((width, width))
        else:
            factors = _reduced(slopes, system, rank)
            slopes = factors[1] @ factors[0].T
        parts = (*factors, mean_y[mine] - mean_x @ slopes)
        *tensors, bias = (torch.from_numpy(np.ascontiguousarray(part)).to(dtype) for part in parts)
        found[pair] = Translator(tuple(tensors), bias)
    return found


def _reduced(slopes: Floats, system: Floats, rank: int) -> tuple[Floats, Floats]:
    """(U, V), each [D, r], of the best x ↦ U·Vᵀ·x where x ↦ ``slopes``ᵀ·x is the best of all; ``system`` as solved."""
    _, directions = np.linalg.eigh(slopes.T @ system @ slopes)  # ascending
    up = directions[:, -rank:]
    return up, slopes @ up
