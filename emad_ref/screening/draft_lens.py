"""A lens and a gate for drafts: fitted on what the model says by itself, which is what drafts are about.

Greedy text is another text than the one a model was trained on: it repeats itself, and where the model hardly knows,
its argmax still stands. A lens fitted on given text agrees with it far less often than one fitted on the model's own
continuations of such text. Documents are dealt as everywhere: a share is held out, and the gate fitted on it.

An exit holds it beside its own lens: rules that leave early read given text, and keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from emad_ref.calibration.gate import fit_gate
from emad_ref.calibration.lens_file import FittedLens
from emad_ref.calibration.trace import TokenSequence
from emad_ref.calibration.tuning import LensPlan, fit_lens, held_out
from emad_ref.models.loading import Loaded
from emad_ref.readout.tuned import attach_lens

STEPS = 500  # of 512 tokens: held-out agreement of small models has settled


def draft_layers(layers: int) -> tuple[int, ...]:
    """Candidates: the first third of the layers, four at most. Each costs every drafted token its blocks."""
    return tuple(range(1, max(1, min(4, layers // 3)) + 1))


def fit_draft_lens(
    model: Loaded,
    texts: Sequence[TokenSequence],
    layers: Sequence[int],
    *,
    corpus: str,
    rank: int | None = None,
    steps: int = STEPS,
    seed: int = 0,
    progress: str | None = None,
) -> FittedLens:
    """A lens of ``layers`` with its gate, attached to the model's stepper.

    ``texts``: what the model says after text of split calibrate (``drafts.own_texts``); ``corpus``: that text's name,
    for the record.

    Raises:
        BadArgument: layers or a rank that the model has not.
        EmptyCorpus: no text, or too few documents to hold any out.
    """
    stepper = model.stepper
    plan = LensPlan(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=str(stepper.dtype).removeprefix("torch."),
        corpus=f"{corpus}, continued by the model",
        window=max((len(text.tokens) for text in texts), default=0),
        layers=tuple(layers),
        rank=rank,
        steps=steps,
        held_out=0.3,
        seed=seed,
    )
    fitted = fit_lens(stepper, plan, lambda: iter(texts), progress=progress)
    name = attach_lens(stepper, fitted.lens, model.fingerprint)
    named = None if progress is None else f"{progress}, gate"
    gate = fit_gate(stepper, held_out(plan, lambda: iter(texts)), plan.layers, name, progress=named)
    return replace(fitted, gate=gate)
