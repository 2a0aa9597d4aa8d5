"""FLOPs counted by PyTorch's ``FlopCounterMode``: the oracle for the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def counted(action: Callable[[], Any]) -> int:
    """Return PyTorch's FLOP count plus the CPU's attention kernel, which its table lacks and so counts as zero."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def of_shapes(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(q, k, v)

    counter = FlopCounterMode(display=False, custom_mapping={attention: of_shapes})
    with torch.inference_mode(), counter:
        action()
    return counter.get_total_flops()
