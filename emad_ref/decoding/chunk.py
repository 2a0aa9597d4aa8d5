"""The monotone rule over several tokens in one pass: what token-by-token decoding decides, read off layer by layer.

Under D_t ≤ D_{t−1} the tokens of a chunk that are still running after layer ℓ are a prefix of it. So at a probe

    f = the first token of the prefix whose rule fires there
    tokens f, f+1, … stop at ℓ (f by its own signal, the others by its depth), tokens before f go on

and at a row's cap the rest of its prefix stops. Verification of a draft is then one pass instead of one per token.
Exact: every state is the full model's, as in ``schedule.monotone``. Rows have prefixes of their own length; the chunk
is padded on the right to the longest, and the padding is counted, because it is executed.
"""

from __future__ import annotations

import numpy as np
import torch

from emad_ref.decoding.adaptive import Arrival, Feed, Walker
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import fires
from emad_ref.readout.signals import on_host
from emad_ref.schedule.flow import count_blocks
from emad_ref.schedule.table import schedule_of
from emad_ref.signals import PREVIOUS, SIGNALS


def decides_chunks(point: OperatingPoint) -> bool:
    """Whether a chunk's depths can be read off in one pass: by prefix, with one bin, and exits at probes only.

    Not where a watch remembers shallower layers, of rows that a chunk would drop behind its back, nor where thresholds
    fall with the decided tokens.
    """
    whole = point.bins.count == 1 and not point.interpolate and point.estimator.kind == "full"
    forgets = point.confidence is None and point.decay is None and SIGNALS[point.signal].needs is not PREVIOUS
    return whole and forgets and schedule_of(point).by_prefix


def decide_chunk(walker: Walker, feed: Feed) -> Arrival:
    """Process several tokens per row, from each row's cap down; the rule is asked about all of them."""
    stepper, point, watch, column = walker.stepper, walker.point, walker.watch, walker.column
    frame, cap, last, cache, work = feed.frame, feed.cap, feed.last, feed.store.cache, feed.store.work
    rows, queries = feed.tokens.shape
    depth = np.zeros((rows, queries), dtype=np.int64)
    signal = np.full((rows, queries, len(point.probes)), np.nan)
    left = np.full(rows, queries)  # length of each row's running prefix
    running = np.arange(rows)
    positions = np.array(frame.starts)[:, None] + np.arange(queries)
    hidden, at, logits = stepper.embed(feed.tokens, frame), 0, None
    watch.begin()
    while len(running):
        lowest = int(cap[running].min())
        layer = min([lowest, *(probe for probe in column if at < probe < lowest)])
        hidden = stepper.run(hidden, at, layer, frame, cache)
        count_blocks(work, at, layer, hidden.shape[0], hidden.shape[1], frame.executed)
        at, keep = layer, left[running].copy()
        inside = np.arange(hidden.shape[1]) < keep[:, None]  # [running, width] not padding
        if layer in column:
            read = watch.see(hidden[torch.from_numpy(inside).to(hidden.device)], column[layer], work)
            values = np.full(inside.shape, np.nan)
            values[inside] = on_host(read.signal)
            signal[running[:, None], np.arange(inside.shape[1]), column[layer]] = values
            fired = fires(point, column[layer], values.astype(np.float32)) & inside
            keep = np.where(fired.any(axis=1), fired.argmax(axis=1), keep)
        keep = np.where(cap[running] == layer, 0, keep)
        stopped = inside & (np.arange(inside.shape[1]) >= keep[:, None])
        if not stopped.any():
            continue
        shown = stopped & (np.arange(inside.shape[1]) >= queries - last)
        if layer in column:
            assert read.logits is not None, "a full probe is the output distribution"
            z = read.logits[torch.from_numpy(shown[inside]).to(hidden.device)]
        else:
            z = watch.emit(hidden[torch.from_numpy(shown).to(hidden.device)], layer, work)
        if logits is None:
            logits = z.new_empty(rows, last, z.shape[-1])
        which, place = np.nonzero(shown)
        logits[torch.from_numpy(running[which]), torch.from_numpy(place - (queries - last))] = z
        which, place = np.nonzero(stopped)
        depth[running[which], place] = layer
        left[running] = keep
        going = np.flatnonzero(keep > 0)
        running = running[going]
        if len(running):
            widest = int(left[running].max())
            hidden = hidden[torch.from_numpy(going).to(hidden.device), :widest]
            frame = stepper.frame(positions[running, :widest], cache, rows=running, lengths=left[running])
    assert logits is not None, "every token stops at its cap at the latest"
    return Arrival(logits, depth, signal, cap)
