"""Likely cause of a wrong greedy token, with its remedy: the prompt that the row's tokens fit, or rounding.

A row whose every token is the argmax after another prompt was read so: without the prompt's first token, or with its
last tokens alone. Otherwise a small gap between the emitted token and the argmax looks like bfloat16, whose rounding
of a logit z is 2⁻⁸·|z|. These are guesses for the reader of a complaint; no check depends on them.
"""

from __future__ import annotations

import numpy as np

from emad_ref.record import Floats, Ints
from pytest_emad.audit.reference_logits import Lens
from pytest_emad.audit.tolerances import LEAST_PRECISE, UNIT_ROUNDOFF

CUTS = (8, 16, 32, 64, 128, 255, 256, 500, 512, 1000, 1024)  # limits on a prompt that servers have
MIN_TOKENS = 2  # fewer tokens must fit one prompt alone, since they fit some by chance


def likely_cause(lens: Lens, prompt: Ints, emitted: Ints, logits: Floats, at: int) -> str:
    """Guess why ``emitted[at]`` is not the argmax of ``logits`` [V]; "" without a guess.

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

    def fits(start: int) -> bool:
        history = np.concatenate([prompt[start:], emitted[:-1]]).astype(np.int64)
        said = lens(history).last_layer[len(prompt) - start - 1 :].argmax(axis=-1)
        return bool((said == emitted).all())

    kept = [len(prompt) - 1, *(length for length in reversed(CUTS) if length < len(prompt) - 1)]
    fitting = [length for length in kept if length and fits(len(prompt) - length)]
    if len(fitting) == 1 or (fitting and len(emitted) >= MIN_TOKENS):
        if fitting[0] == len(prompt) - 1:
            return "it looks like a prompt without its first token: the engine must read ids as they are sent"
        return f"it looks like a prompt cut to its last {fitting[0]} tokens: raise the engine's limit on a prompt"
    gap, largest = logits.max() - logits[emitted[at]], np.abs(logits).max()
    if gap <= 2 * UNIT_ROUNDOFF[LEAST_PRECISE] * largest:
        return (
            f"a gap of {gap:.2g} looks like {LEAST_PRECISE}: compute in float32, or declare it by "
            f"--emad-decoder-dtype {LEAST_PRECISE}, or by Capabilities.logit_noise in a class"
        )
    return ""
