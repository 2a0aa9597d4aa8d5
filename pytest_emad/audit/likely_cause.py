"""Likely cause of a complaint, with its remedy: another prompt, rounding, another request's stops or temperature.

A row whose every token is within rounding to bfloat16 of the argmax looks like bfloat16, whose rounding of a logit z
is 2⁻⁸·|z|. Otherwise, a row whose every token is the argmax after another prompt was read so: without the prompt's
first token, or with its last tokens alone. After a long prompt its first token changes little, so rounding comes
first. Drawn tokens that a rounded temperature explains far better look rounded. These are guesses
for the reader of a complaint; no check depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from emad_ref.record import Floats, Ints
from pytest_emad.audit.finding import LikelyCause
from pytest_emad.audit.reference_logits import Lens
from pytest_emad.audit.tolerances import LEAST_PRECISE, UNIT_ROUNDOFF

CUTS = (8, 16, 32, 64, 128, 255, 256, 500, 512, 1000, 1024)  # limits on a prompt that servers have
IN_PLACE = {  # what a server may make of a temperature
    "rounded to tenths": lambda temperature: round(temperature, 1),
    "ignored, and 1 taken": lambda temperature: 1.0,
}
CLEAR_GAIN = math.log(1e4)  # log-likelihood ratio from which another temperature explains tokens far better
MIN_TOKENS = 2  # fewer tokens must fit one prompt alone, since they fit some by chance


def likely_cause(lens: Lens, prompt: Ints, emitted: Ints, logits: Floats, at: int) -> LikelyCause | None:
    """Guess why ``emitted[at]`` is not the argmax of ``logits`` [V]; None without a guess.

    Parameters
    ----------
    lens : Lens
        Of the model at full depth.
    prompt : int64 [n]
        What the row was asked to read.
    emitted : int64 [m]
        Its new tokens.
    logits : float64 [V]
        The model's own before ``emitted[at]``.
    at : int
        The first wrong token.
    """

    def logits_after(start: int) -> Floats:
        history = np.concatenate([prompt[start:], emitted[:-1]]).astype(np.int64)
        return lens(history).last_layer[len(prompt) - start - 1 :]

    def fits(start: int) -> bool:
        return bool((logits_after(start).argmax(axis=-1) == emitted).all())

    precision = likely_precision(float(logits.max() - logits[emitted[at]]), logits)
    own = logits_after(0)
    gaps = own.max(axis=-1) - own[np.arange(len(emitted)), emitted]
    if precision is not None and all(likely_precision(gap, row) for gap, row in zip(gaps.tolist(), own, strict=True)):
        return precision

    kept = [len(prompt) - 1, *(length for length in reversed(CUTS) if length < len(prompt) - 1)]
    fitting = [length for length in kept if length and fits(len(prompt) - length)]
    if len(fitting) == 1 or (fitting and len(emitted) >= MIN_TOKENS):
        if fitting[0] == len(prompt) - 1:
            guess = "it looks like a prompt without its first token, such as a leading BOS"
            return LikelyCause("prompt without its first token", guess, "the engine must read ids as they are sent")
        guess = f"it looks like a prompt cut to its last {fitting[0]} tokens"
        return LikelyCause(f"prompt cut to {fitting[0]} tokens", guess, "raise the engine's limit on a prompt")
    return precision


def likely_precision(gap: float, logits: Floats) -> LikelyCause | None:
    """bfloat16, if its rounding of two of ``logits`` [V] can explain a ``gap`` in nats; else None."""
    if gap > 2 * UNIT_ROUNDOFF[LEAST_PRECISE] * float(np.abs(logits).max()):
        return None
    remedy = (
        f"compute in float32, or declare it by --emad-decoder-dtype {LEAST_PRECISE}, or by Capabilities.logit_noise in "
        "a class"
    )
    return LikelyCause(LEAST_PRECISE, f"a gap of {gap:.2g} looks like {LEAST_PRECISE}", remedy)


def likely_stops(emitted: Ints, stop: frozenset[int], reason: str, max_new: int) -> LikelyCause | None:
    """Why a row of a request with ``stop`` and ``max_new`` ended elsewhere with ``reason``; None without a guess."""
    has_stop = bool(stop & {*emitted.tolist()})
    if has_stop and emitted[-1] not in stop:
        guess = "it looks like a request whose stop ids were dropped"
        return LikelyCause("stop ids dropped", guess, "the engine must end a row at each id of its own request")
    if not has_stop and reason == "stop token" and 0 < len(emitted) < max_new:
        guess = (
            f"{emitted[-1]} is no stop id of this row: it looks like the stops of another request, or an end of text"
        )
        return LikelyCause("stops of another request", guess, "only the stop ids of its own request may end a row")
    return None


def likely_temperature(log_likelihood: Callable[[Callable[[float], float]], float]) -> LikelyCause | None:
    """What a server made of the temperature, if that explains the drawn tokens far better; None without a guess.

    ``log_likelihood(change)``: of all tokens in nats, each drawn at ``change`` of its temperature, which is above 0.
    """
    asked = log_likelihood(lambda temperature: temperature)
    gains = {what: log_likelihood(change) - asked for what, change in IN_PLACE.items()}
    what = max(gains, key=gains.__getitem__)
    if not gains[what] > CLEAR_GAIN:
        return None
    guess = f"it looks like a temperature that was {what}"
    return LikelyCause(f"temperature {what}", guess, "the engine must take the request's temperature as it is sent")
