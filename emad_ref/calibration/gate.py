"""Fits an exit gate: from the state at a probe to how far its readout is from what the model says at its end.

    √KL(p_L ‖ q_ℓ) ≈ w_ℓ·x_ℓ + c_ℓ,  x_ℓ = norm(h_ℓ) [E]

q_ℓ is what a token emits that leaves after ℓ, through a tuned lens or by the model's own head; w, c by ridge regression
(``calibration.fit``), on text that neither the lens nor the thresholds saw: ``tuning.held_out`` gives such text. The
root keeps a few far-off tokens from deciding the fit.

A point with signal ``divergence`` and the estimator found here reads no head at a probe, E multiply-adds instead: the
lens and the head run where the token leaves. Memory is E × E per probe, whatever the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tqdm import tqdm

from emad_ref.calibration.fit import PENALTY, Moments, ridge
from emad_ref.calibration.profile import require_probes
from emad_ref.calibration.resume import limited
from emad_ref.calibration.trace import EmptyCorpus, TokenSequence, batched
from emad_ref.calibration.tuning import states_and_final
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator
from emad_ref.readout.signals import divergence_nats, on_host
from emad_ref.readout.tuned import lens_named

TOKENS = 20_000


def fit_gate(
    stepper: Stepper,
    windows: Iterable[TokenSequence],
    probes: Sequence[int],
    lens: str | None = None,
    *,
    tokens: int = TOKENS,
    penalty: float = PENALTY,
    progress: str | None = None,
) -> Estimator:
    """The linear estimator of the signal ``divergence`` at ``probes``, from ``tokens`` positions of ``windows``.

    ``lens``: digest of an attached lens that tokens leave through; None: the model's own head. ``progress`` names the
    bar, None shows none.

    Raises:
        BadArgument: probes that are not ascending layers below the last, a lens that is not attached, no tokens asked
            for; as ``ridge``.
        EmptyCorpus: no windows.
    """
    require_probes(probes, stepper.layers)
    tuned = lens_named(stepper, lens)
    moments = {probe: Moments.none(stepper.unembedding.shape[1]) for probe in probes}
    read = 0
    with tqdm(desc=progress, disable=progress is None, total=tokens, unit="tok", unit_scale=True) as bar:
        for batch in batched(limited(windows, tokens)):
            states, final = states_and_final(stepper, probes, batch)
            with torch.inference_mode():
                for probe, hidden in states.items():
                    logits = stepper.logits(hidden if tuned is None else tuned(hidden, probe))
                    pair = stepper.normed(hidden), divergence_nats(final, logits).sqrt()
                    moments[probe] += Moments.of(*map(on_host, pair))
            read += len(final)
            bar.update(len(final))
    if read == 0:
        raise EmptyCorpus("windows=[], but expected at least one; give text that the lens did not see")
    return Estimator("linear", weights=tuple(tuple(ridge(sums, penalty).tolist()) for sums in moments.values()))
