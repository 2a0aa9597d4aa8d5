"""Captured graphs: one decoding step of one token per row, replayed instead of launched kernel by kernel.

At batch 1 an accelerator waits for Python longer than it multiplies. So where fused steps run with a cache, one query
per row, the blocks between two probes are captured once and replayed from then on:

    one graph per   segment (first, last] × rows × bucket of keys × K/V buffers

``buffers``  K/V and inputs at fixed addresses, leased to a cache for as long as it lives, and the cache over them
``capture``  what captures and replays (CUDA graphs), the captured blocks and readouts, and which forwards use them

A graph repeats addresses, shapes and every Python decision of its capture. So positions and rows are tensors, and a
query attends to a whole *bucket* of keys, a power of two, under a mask made from its position: keys past it are
executed, add nothing and are counted (``ForwardContext.executed``). Depths, tokens, blocks and readouts are those of
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
