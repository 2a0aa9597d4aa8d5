"""NumPy's matrix product on tensors' own memory, as the PyTorch operator ``emad::blas_matmul``.

PyTorch's and NumPy's wheels ship different BLAS libraries, and which one is faster depends on processor and shape. A
dispatch mode, such as ``models.matmul_counter`` or PyTorch's ``FlopCounterMode``, sees the operator. Without a mode
``blas_matmul`` calls the operator's kernel directly: PyTorch's dispatcher takes 20 µs for an operator in Python.

The product runs on one thread (``models.threads.one_blas_thread``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from emad_ref.models.threads import one_blas_thread


def blas_matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [m, k] by ``right`` [k, n] or [k], in new memory [m, n] or [m].

    Float32 on a CPU, any strides; neither operand is copied if one of its strides is 1.

    Raises:
        TypeError: another dtype or device.
        RuntimeError: an operand needs a gradient.
    """
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        raise RuntimeError("emad::blas_matmul has no gradient; call it under torch.no_grad(), or take F.linear")
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.emad.blas_matmul(left, right)
    return _multiply(left, right)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    for operand in (left, right):
        if operand.dtype != torch.float32 or not operand.is_cpu:
            said = f"an operand is {operand.dtype} on {operand.device}"
            raise TypeError(f"{said}, but emad::blas_matmul takes float32 on a CPU; take F.linear")
    with one_blas_thread:
        return torch.from_numpy(np.matmul(left.detach().numpy(), right.detach().numpy()))


# not ``torch.library.Library``, which refuses a second import of this module in one process
_OPERATOR = torch.library.custom_op("emad::blas_matmul", _multiply, mutates_args=(), device_types="cpu")
_OPERATOR.register_fake(lambda left, right: left.new_empty(*left.shape[:1], *right.shape[1:]))


def _count_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    """2·m·k·n, as PyTorch counts its own products."""
    return 2 * left[0] * left[1] * (right[1] if len(right) > 1 else 1)


if torch.ops.emad.blas_matmul not in flop_registry:  # it refuses a second formula
    register_flop_formula(torch.ops.emad.blas_matmul)(_count_flops)
