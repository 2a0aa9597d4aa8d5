"""How weights lie in memory: along their longer side, which a CPU multiplies faster by a few tokens, on large pages.

A linear layer's weight [out, in] comes by rows. A product with n tokens reads it once at best, as fast as memory gives
it, and a processor fetches ahead the further the longer the runs are that it reads: so a weight with at least as many
outputs as inputs is laid out by columns (the same numbers under the same indices, other strides). Time by columns over
time by rows, in float32 on one thread, of weights that together exceed the cache:

    out × in       n = 1     2      4      16     64
    4096 × 1024     0.79    0.70   1.12   1.00   0.99
    1024 × 1024     1.05    0.95   1.45   1.22   1.13
    1024 × 4096     1.12    1.06   1.24   1.12   1.07
     512 × 128      0.67    0.67   0.68   0.78   0.89
     128 × 512      1.34    1.21   0.89   0.94   0.96

Processors differ: on another one 1024 × 1024 took 1.0, 0.55 and 0.65 for 1, 4 and 16 tokens.

Pages of 2 MB, which Linux gives for the asking, spare the processor looking up where 500 small ones lie: some 5 to 10 %
of a token's time at 1.4 GB of weights.

The model's own ``generate`` reads the same weights and gains alike, so that comparisons stay what they are. Sums are in
another order, so last bits differ from those by rows.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor, nn

PAGE = 2 << 20  # bytes of a large page on x86-64 and most of Arm
LARGE = 2 * PAGE  # from where on a weight gets pages of its own: less than a third of them lies idle
_ON_LARGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone


def laid_out(weight: Tensor) -> Tensor:
    """``weight`` [out, in] of a linear layer, by columns if out ≥ in, else by rows; float32 on a CPU, or as it is."""
    if not _can_move(weight):
        return weight
    out, wide = weight.shape
    return _moved(weight.t()).t() if out >= wide else _moved(weight)


@torch.no_grad()
def lay_out(model: nn.Module) -> None:
    """Lay the weights of all linear layers out, in place; those that embeddings share, read by rows, stay by rows."""
    embeddings = {id(each.weight): each for each in model.modules() if isinstance(each, nn.Embedding)}
    for embedding in embeddings.values():
        if _can_move(embedding.weight):
            embedding.weight.data = _moved(embedding.weight.data)
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in embeddings:
            module.weight.data = laid_out(module.weight.data)


def _can_move(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _moved(weight: Tensor) -> Tensor:
    """``weight`` contiguous, on large pages if it fills two; itself if it lies so already."""
    large = _ON_LARGE_PAGES is not None and weight.numel() * weight.element_size() >= LARGE
    if not large or (weight.is_contiguous() and weight.data_ptr() % PAGE == 0):
        return weight.contiguous()
    return _on_large_pages(weight.shape).copy_(weight)


def _on_large_pages(shape: torch.Size) -> Tensor:
    """An empty float32 tensor of ``shape`` in memory of its own that begins with a large page."""
    values = shape.numel()
    held = mmap.mmap(-1, values * 4 + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert _ON_LARGE_PAGES is not None
    held.madvise(_ON_LARGE_PAGES)
    first = -torch.frombuffer(held, dtype=torch.uint8, count=1).data_ptr() % PAGE
    return torch.frombuffer(held, dtype=torch.float32, count=values, offset=first).view(shape)  # it keeps ``held``
