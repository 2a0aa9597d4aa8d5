"""Fits what a screening reads by: a tuned lens and its gate.

The lens is fitted on the training documents of split ``calibrate``, the gate on its others. Full matrices where they
cost little beside a block and the text has as many tokens as they have numbers, else a low rank; every layer below the
last, of a deep model every second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from emad_ref.calibration.gate import fit_gate
from emad_ref.calibration.lens_file import FittedLens
from emad_ref.calibration.trace import TokenSequence, window_of
from emad_ref.calibration.tuning import LensPlan, fit_lens, held_out
from emad_ref.models.loading import Loaded
from emad_ref.readout.tuned import attach_lens
from emad_ref.screening.settings import Settings
from emad_ref.screening.texts import Text

STEPS = 800  # where held-out divergences of small models have settled
SHARE_OF_BLOCK = 0.1  # that a full translator may cost
RANK_OF_WIDTH = 8  # D / 8: half of what a block's narrowest matrix would cost
DEEP = 16  # layers from which on every second one is translated


def fit_readout(model: Loaded, text: Text, settings: Settings, progress: str | None = None) -> FittedLens:
    """A lens with its gate, attached to the model's stepper.

    Raises:
        EmptyCorpus: too few documents to hold any out.
    """
    plan = lens_plan(model, settings)
    fitted = fit_lens(model.stepper, plan, lambda: iter(text.windows), progress=progress)
    name = attach_lens(model.stepper, fitted.lens, model.fingerprint)
    named = None if progress is None else f"{progress}, gate"
    gate = fit_gate(model.stepper, unseen(model, text, settings), plan.layers, name, progress=named)
    return replace(fitted, gate=gate)


def unseen(model: Loaded, text: Text, settings: Settings) -> Iterator[TokenSequence]:
    """Windows of ``text`` that its lens was not fitted on: for whatever is fitted on top of it."""
    return held_out(lens_plan(model, settings), lambda: iter(text.windows))


def lens_plan(model: Loaded, settings: Settings) -> LensPlan:
    """What the lens of this model is fitted on, and how."""
    stepper = model.stepper
    stride = 1 if stepper.layers <= DEEP else 2
    first = 1 if stride == 1 else stepper.layers % 2 or 2  # so that the last layer below the end is among them
    plan = LensPlan(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=str(stepper.dtype).removeprefix("torch."),
        corpus=settings.corpus,
        window=window_of(stepper.max_positions),
        layers=tuple(range(first, stepper.layers, stride)),
        held_out=0.3,
        seed=settings.seed,
        steps=settings.part(STEPS),
    )
    return replace(plan, rank=_rank(model, plan))


def _rank(model: Loaded, plan: LensPlan) -> int | None:
    width = model.geometry.hidden
    cheap = 2 * width**2 <= SHARE_OF_BLOCK * model.geometry.block_flops()
    taught = width**2 <= plan.steps * plan.tokens_per_step
    return None if cheap and taught else max(1, width // RANK_OF_WIDTH)
