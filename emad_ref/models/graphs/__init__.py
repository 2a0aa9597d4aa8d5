"""Captured graphs: one decoding step of one token per row, replayed instead of launched kernel by kernel.

At batch 1 an accelerator waits for Python longer than it multiplies. So where fused steps run with a cache, one query
per row, the blocks between two halts are captured once and replayed from then on:

    one graph per   segment (first, last] × rows × bucket of keys × K/V buffers

``engine``   what captures and replays: CUDA's graphs, by device (``CAPTURE_ENGINES``)
``arena``    K/V and inputs that stay where they are, lent to a cache for as long as it lives
``static``   a cache over lent buffers; its lengths, rows and errors are any cache's
``segment``  what is captured: the fused steps themselves, positions read from a tensor
``heads``    readouts of a few states
``replayed`` which forwards are captured, and how one is run; ``weights`` where what they read lies

A graph repeats addresses and shapes, and whatever Python said while it was captured. So positions and rows are tensors,
and a query attends to a whole *bucket* of keys, a power of two, under a mask made from its position: keys past it are
executed and add nothing. They are counted (``Frame.executed``). Depths, tokens, rows, blocks and readouts are those of
the steps run one by one; sums over keys are in another order.
"""

from __future__ import annotations

from emad_ref.models.graphs.buffers import StaticKVCache
from emad_ref.models.graphs.capture import (
    CAPTURE_ENGINES,
    CaptureEngine,
    GraphCaptureError,
    GraphCaptureWarning,
    StepGraphs,
    make_graphs,
)

__all__ = [
    "CAPTURE_ENGINES",
    "CaptureEngine",
    "GraphCaptureError",
    "GraphCaptureWarning",
    "StaticKVCache",
    "StepGraphs",
    "make_graphs",
]
