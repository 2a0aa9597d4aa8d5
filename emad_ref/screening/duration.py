"""How long a screening will take here, predicted before its long passes: a little of each is run, and timed.

    lens        a few steps; and for the gate, windows at the pace of traces
    traces      a few windows through all readouts
    decoding    a batch of windows fed token by token, a gate asked that never fires
    drafts      a few steps; and what the model writes, at the pace of decoding

Nothing is decided by it: what is read, fitted and tried is counted in documents. Whoever finds it too long asks for
fewer. Text has been read by then: where the model writes its own, the bar of that phase says how long that takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from emad_ref.calibration.lens_fit import LensPlan, fit_lens
from emad_ref.calibration.trace import take_trace
from emad_ref.models.loading import LoadedModel
from emad_ref.screening.drafts import DRAFT_LENS_STEPS, continuation_steps, draft_layers
from emad_ref.screening.prediction import SECONDS, idle_gate, never_left
from emad_ref.screening.selection import ROWS, STRICTNESS, decode_points
from emad_ref.screening.settings import ScreeningSettings
from emad_ref.screening.traces import ScreeningText, TextSplits, lens_plan

TRIED = 3  # steps
WINDOWS = 4  # traced
READ = 4  # times that as much text as is judged on is traced: two splits by two readouts
BESIDE = 3  # passes of decoding beside the thresholds: signs, and two points on evaluation text


def expected(model: LoadedModel, texts: TextSplits, settings: ScreeningSettings) -> dict[str, float]:
    """Phase → seconds that it will take, about; those of arithmetic alone are left out."""
    plan, text = lens_plan(model, settings), texts.evaluate
    shallow = replace(plan, layers=draft_layers(model.geometry.layers), steps=settings.part(DRAFT_LENS_STEPS))
    few = text.first(WINDOWS)
    token = _seconds(lambda: take_trace(model.stepper, few.windows, divergence=True)) / few.tokens
    fed = text.first(ROWS)  # whole: a step takes longer the more there is to look back on
    probes = tuple(plan.layers[::2])
    point = never_left("asked", model.stepper.layers, probes, idle_gate(model.stepper, len(probes)))
    step = _seconds(lambda: decode_points(model, fed, [point])) / fed.lengths.max()
    passes = math.ceil(len(text.windows) / ROWS) * (len(STRICTNESS) + BESIDE)
    found = {
        "lens": _fitting(model, plan, texts.calibrate) + plan.held_out * texts.calibrate.tokens * token,
        "traces": READ * text.tokens * token,
        "decoding": passes * text.lengths.mean() * step,
        "costs": settings.part(SECONDS),
        "drafts": _fitting(model, shallow, texts.calibrate) + continuation_steps(texts) * step,
    }
    return {phase: round(float(seconds), 2) for phase, seconds in found.items()}


def told(seconds: dict[str, float]) -> str:
    """The same in a sentence."""
    phases = ", ".join(f"{phase} {spent:.0f} s" for phase, spent in seconds.items())
    return f"predicted: about {sum(seconds.values()) / 60:.1f} minutes ({phases}); with fewer --documents less"


def _fitting(model: LoadedModel, plan: LensPlan, text: ScreeningText) -> float:
    """Seconds of all its steps."""

    def fit(steps: int) -> float:
        trial = replace(plan, steps=steps, held_out_tokens=1)
        return _seconds(lambda: fit_lens(model.stepper, trial, lambda: iter(text.windows)))

    once = fit(1)  # what the first step alone pays, and what is measured after the last
    return plan.steps * max(0.0, fit(1 + TRIED) - once) / TRIED


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
