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

Large weights that are multiplied with the same states (queries, keys and values; gate and up) lie side by side, and
large ones by columns with gaps between their runs (``models.beside``).

Pages of 2 MB, which Linux gives for the asking, spare the processor looking up where 500 small ones lie: some 5 to 10 %
of a token's time at 1.4 GB of weights.

The model's own ``generate`` reads the same weights and gains alike from columns, gaps and pages, so that comparisons
stay what they are. Sums are in another order, so last bits differ from those by rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from emad_ref.models.beside import by_columns, lay_beside, siblings
from emad_ref.models.pages import is_large, memory_for, starts_right


def laid_out(weight: Tensor) -> Tensor:
    """``weight`` [out, in] of a linear layer, by columns if out ≥ in, else by rows; float32 on a CPU, or as it is."""
    if not _can_move(weight):
        return weight
    return by_columns([weight])[0] if _is_tall([weight]) else _by_rows(weight)


@torch.no_grad()
def lay_out(model: nn.Module) -> None:
    """Lay the weights of all linear layers out, in place; those that embeddings share, read by rows, stay by rows."""
    embeddings = {id(each.weight): each for each in model.modules() if isinstance(each, nn.Embedding)}
    for embedding in embeddings.values():
        if _can_move(embedding.weight):
            embedding.weight.data = _by_rows(embedding.weight.data)
    done = set(embeddings)
    for layers in siblings(model):
        weights = [layer.weight for layer in layers]
        large = is_large(sum(weight.numel() for weight in weights))
        if large and _is_tall(weights) and all(map(_can_move, weights)) and done.isdisjoint(map(id, weights)):
            lay_beside(layers)
            done |= set(map(id, weights))
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in done:
            module.weight.data = laid_out(module.weight.data)


def _is_tall(weights: Sequence[Tensor]) -> bool:
    """Whether weights that lie side by side have at least as many outputs as inputs."""
    return sum(map(len, weights)) >= weights[0].shape[1]


def _can_move(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _by_rows(weight: Tensor) -> Tensor:
    """``weight`` contiguous, on large pages if it fills two; itself if it lies so already."""
    if weight.is_contiguous() and starts_right(weight):
        return weight
    return memory_for(weight.numel())(0, weight.numel()).view(weight.shape).copy_(weight)
