"""Measures what the parts of a decoding step cost here and now (``meters.costs``), in one process, side by side.

A part is timed where it stands in a real pass: blocks as passes through all of them, so that each finds its weights
where a decoding step would (in memory, for a model that no cache holds); heads, lens, gate and fills right after. What
is left of a step is the decoder's own loop, over a stepper whose passes take no time (``hollow``); of a small model,
whose loop is as long as its passes and slower beside them, the loop with passes less those.

A *lap* times every part once, in random order. A machine that others use is now faster, now slower, for all parts
alike: each lap is divided by how long it took in all, relative to the median lap, and a part is its median over laps.
Laps go on until ``seconds`` are spent. ``Costs.whole`` is the self-check: full depth as our decoder runs it, timed in
the same laps, which ``predicted`` has to give back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from emad_ref.errors import BadArgument
from emad_ref.meters.costs import Costs
from emad_ref.models.stepper import Stepper
from emad_ref.readout.attached import raised_dtype
from emad_ref.readout.tuned import Translator
from emad_ref.record import Floats
from emad_ref.screening.laps import REPEATS, Course, Kind, Part

LENGTHS = (1, 2, 3, 4, 6, 8)  # tokens in one pass; kernels change between some of them
NEAR, FAR = 32, 256  # keys
FEWEST_LAPS, MOST_LAPS = 5, 40
SECONDS = 20
SHARES = (32, 8)  # of the vocabulary: one row in so many is read by a pruned head
DRAFT_LAYERS = (1, 2, 4)
RESAMPLES = 999
BRIEF = 0.02  # seconds of a pass that may find in a cache what the one before it read
TURNS = 4


def measure_costs(
    stepper: Stepper,
    *,
    lengths: Sequence[int] = LENGTHS,
    draft_layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    lens: Callable[[Tensor], Tensor] | None = None,
    translator: Callable[[Tensor], Tensor] | None = None,
    keys: tuple[int, int] | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: str | None = None,
    between: Callable[[int], None] | None = None,
) -> Costs:
    """Time the parts of a decoding step of one row on this machine.

    Args:
        stepper: of a decoder-only model.
        lengths: tokens in one pass, ascending from 1.
        draft_layers: layers to which shallow passes are timed in a row; by default of 1, 2, 4 those below the last.
        heads: rows of the vocabulary that pruned heads read; a 32nd and an 8th by default.
        lens: what stands in front of a head, [..., D] → [..., D]; a full matrix and bias by default.
        translator: of states, in front of K/V fills; not timed by default.
        keys: two numbers of keys that blocks attend to, the first of them those of all passes.
        seconds: to spend; no fewer than 5 laps all the same, and no more than 40.
        clock: in seconds.
        progress: names a bar; None shows none.
        between: called after each lap with its number from 0, untimed.

    Raises:
        BadArgument: lengths that do not ascend from 1, draft layers, heads or keys outside the model's; no seconds.
    """
    if not seconds > 0:
        raise BadArgument("seconds", seconds, "seconds to spend")
    if list(lengths[:1]) != [1] or list(lengths) != sorted(set(lengths)):
        raise BadArgument("lengths", list(lengths), "numbers of tokens, ascending from 1")
    room = stepper.max_positions - max(*lengths, REPEATS)
    keys = keys or (min(NEAR, room // 8), min(FAR, room))
    if not 1 <= keys[0] < keys[1] <= room:
        raise BadArgument("keys", keys, f"two numbers in 1–{room}, ascending", "the positions of this model")
    if draft_layers is None:
        draft_layers = [layer for layer in DRAFT_LAYERS if layer < stepper.layers]
    heads = [max(1, stepper.vocabulary // share) for share in SHARES] if heads is None else heads
    for name, numbers, end in (("draft_layers", draft_layers, stepper.layers), ("heads", heads, stepper.vocabulary)):
        if not all(1 <= number < end for number in numbers):
            raise BadArgument(name, list(numbers), f"numbers in 1–{end - 1}")
    lens = lens or _full_lens(stepper)
    course = Course(stepper, tuple(lengths), tuple(draft_layers), tuple(heads), lens, translator, keys, clock)
    laps: list[dict[Part, float]] = []
    spent: list[float] = []
    rng = np.random.default_rng(seed)
    tried = course.lap(rng)  # warms up
    if stepper.layers * tried[Part(Kind.BLOCK)] < BRIEF:
        course = replace(course, turns=TURNS)
    with tqdm(desc=progress, disable=progress is None, total=MOST_LAPS, unit="lap") as bar:
        while len(laps) < FEWEST_LAPS or (len(laps) < MOST_LAPS and sum(spent) < seconds):
            start = clock()
            laps.append(course.lap(rng))
            spent.append(clock() - start)
            bar.update()
            if between is not None:
                between(len(laps) - 1)
    return _costs(course, laps, np.array(spent), rng)


def _costs(course: Course, laps: Sequence[dict[Part, float]], spent: Floats, rng: np.random.Generator) -> Costs:
    """Medians over ``laps``, each as if it had been as fast as the median one; ``spent`` [laps] seconds of each."""
    parts, pace = list(laps[0]), spent / np.median(spent)
    seconds = np.array([[lap[part] for part in parts] for lap in laps]) / pace[:, None]
    medians = dict(zip(parts, np.median(seconds, axis=0).tolist(), strict=True))
    low, high = stats.bootstrap(
        (seconds,), np.median, axis=0, n_resamples=RESAMPLES, method="percentile", rng=rng
    ).confidence_interval
    one = {kind: medians[Part(kind)] for kind in Kind if Part(kind) in medians}
    probes, full = len(course.probes), one[Kind.HEAD]
    passes = course.stepper.layers * one[Kind.BLOCK] + full if course.brief else 0.0
    read = full if course.brief else 0.0
    near, far = course.keys

    def of(kind: Kind, sizes: Sequence[int]) -> dict[int, float]:
        return {size: medians[Part(kind, size)] for size in sizes}

    return Costs(
        layers=course.stepper.layers,
        vocabulary=course.stepper.vocabulary,
        threads=torch.get_num_threads(),
        keys=near,
        # differences may come out below what no part can cost less than
        step=max(one[Kind.TOKEN], one[Kind.LOOP] - passes),
        token=one[Kind.TOKEN],
        probe=max(0.0, (one[Kind.PROBING] - one[Kind.LOOP]) / probes - read),
        gate=max(one[Kind.GATE], (one[Kind.GATING] - one[Kind.LOOP]) / probes),
        lengths=np.array(course.lengths, dtype=np.int64),
        block=np.array(list(of(Kind.BLOCK, course.lengths).values())),
        head=np.array(list(of(Kind.HEAD, course.lengths).values())),
        per_key=max(0.0, (one[Kind.FAR_BLOCK] - one[Kind.BLOCK]) / (far - near)),
        again=of(Kind.AGAIN, course.draft_layers),
        pruned=of(Kind.PRUNED, course.heads),
        lens=one[Kind.LENS],
        fill=one[Kind.FILL],
        translator=one.get(Kind.TRANSLATOR),
        whole=one[Kind.WHOLE],
        intervals=dict(zip(map(str, parts), zip(low.tolist(), high.tolist(), strict=True), strict=True)),
    )


def _full_lens(stepper: Stepper) -> Translator:
    """A translator of full rank, of zeros: its values do not matter to time."""
    width = stepper.geometry.hidden
    matrix = torch.zeros(width, width, dtype=raised_dtype(stepper), device=stepper.device)
    return Translator((matrix,), matrix[0].clone())
