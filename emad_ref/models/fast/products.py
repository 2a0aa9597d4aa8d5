"""Products of few tokens with a large weight: the fastest that the installed libraries offer, measured here.

For few tokens on a CPU, reading the weight takes all the time, and which product reads fastest depends on processor,
library, shape, layout and threads. On a CPU with AVX-512 the sum of embeddings was the fastest product with one token;
on one without, it took twice the time of NumPy's BLAS. So each class of products (rows to the next power of two, shape,
layout, threads) is measured when it is first needed, and stored with the run (``models.fast.product_table``).

    linear          PyTorch's own product: ``F.linear``, or ``mv`` of one token
    bmm_columns     tokens are the columns of one product; a single token is multiplied with both halves
    bmm_parts       threads divide the outputs
    embedding_bag   the columns of a column-major weight are summed, weighted by the token
    blas            NumPy's BLAS on the same memory, on one thread
    blas_columns    the same; tokens are the columns

``linear`` stays unless another takes ``ADVANTAGE`` less time. Products under autograd, with more rows, small weights,
other dtypes or devices are ``linear`` without a measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from emad_ref.models.fast.blas_operator import blas_matmul
from emad_ref.models.fast.product_table import choose_product
from emad_ref.models.fast.weight_layout import RUN_GAP, make_aligned_allocator

MOST_ROWS = 256  # of a measured product; with more, arithmetic takes the time, and libraries differ little
COLD_BYTES = 2**26  # of weights that a measurement goes through: more than a process's share of a last cache
MOST_ROUNDS, BUDGET_S = 13, 0.1  # of a measurement; two rounds at least
MOST_MULTIPLY_ADDS = 2**30  # of one measured product; more rows are measured by fewer of them
ADVANTAGE = 0.05  # share of the time of ``linear`` that another product must save
BAG_ROWS = 4  # most rows of ``embedding_bag``, which reads the weight once for each

LINEAR = "linear"
BY_ROWS, BY_COLUMNS, BETWEEN_COLUMNS = "by rows", "by columns", "by columns of a wider buffer"

Product = Callable[[Tensor, Tensor], Tensor]  # states [rows, in], weight [out, in] → [rows, out]


class ProductClass(NamedTuple):
    """Products that take the same time: up to ``rows`` tokens, of a weight [outputs, inputs] in this ``layout``."""

    rows: int
    outputs: int
    inputs: int
    layout: str
    threads: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.outputs} × {self.inputs} {self.layout}, threads {self.threads}"


def is_weight_bound(states: Tensor, weight: Tensor) -> bool:
    """Whether few tokens, ``states`` [..., in], meet a large ``weight`` [out, in] in float32 on a CPU.

    Callers ask for ``weight_layout.LARGE_WEIGHT`` numbers before: small weights are met at every product.
    """
    fits = weight.is_cpu and weight.dtype == torch.float32
    return fits and 0 < states.numel() <= MOST_ROWS * weight.shape[1]


def find_faster_product(states: Tensor, weight: Tensor) -> Product | None:
    """The product of ``states`` [..., in] with ``weight`` [out, in] that beats PyTorch's own; None without one.

    ``weight`` is a large one (``is_weight_bound``).
    """
    if not is_weight_bound(states, weight) or torch.is_grad_enabled() or (layout := _layout(weight)) is None:
        return None
    outputs, inputs = weight.shape
    rows = states.numel() // inputs
    kind = ProductClass(1 << (rows - 1).bit_length(), outputs, inputs, layout, torch.get_num_threads())
    name = _chosen.get(kind) or _choose(kind, weight)
    return None if name == LINEAR else PRODUCTS[name]


def _layout(weight: Tensor) -> str | None:
    """Layout of ``weight`` [out, in]; None for strides that no weight of ours has."""
    (outputs, inputs), (step, run) = weight.shape, weight.stride()
    if run == 1 and step == inputs:
        return BY_ROWS
    if step != 1 or run < outputs:
        return None
    held = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset()
    return BY_COLUMNS if run <= outputs + RUN_GAP and held >= run * inputs else BETWEEN_COLUMNS


# ---------------------------------------------------------------- the products


def _linear(states: Tensor, weight: Tensor) -> Tensor:
    return torch.mv(weight, states[0])[None] if len(states) == 1 else F.linear(states, weight)


def _bmm_columns(states: Tensor, weight: Tensor) -> Tensor:
    outputs, rows = len(weight), len(states)
    turned = states.contiguous().t()  # by columns: rows take five times as long
    pieces = math.gcd(outputs, max(2, torch.get_num_threads())) if rows == 1 else 1
    each = weight.unflatten(0, (pieces, -1))
    return torch.bmm(each, turned.expand(pieces, -1, -1)).reshape(outputs, rows).t()


def _bmm_parts(states: Tensor, weight: Tensor) -> Tensor:
    parts = math.gcd(len(weight), torch.get_num_threads())
    each = weight.unflatten(0, (parts, -1)).transpose(1, 2)
    return torch.bmm(states.expand(parts, -1, -1), each).transpose(0, 1).reshape(len(states), -1)


def _embedding_bag(states: Tensor, weight: Tensor) -> Tensor:
    (outputs, inputs), run = weight.shape, weight.stride(1)
    columns = weight.detach().as_strided((inputs, run), (run, 1))
    bags = _bags(len(states), inputs)
    return torch.embedding_bag(columns, *bags, per_sample_weights=states.reshape(-1))[0][:, :outputs]


@lru_cache(maxsize=64)
def _bags(rows: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Indices and offsets of ``rows`` sums over all columns of a weight with ``inputs`` inputs."""
    with torch.inference_mode(False):
        return torch.arange(inputs).repeat(rows), torch.arange(rows) * inputs


def _blas(states: Tensor, weight: Tensor) -> Tensor:
    return blas_matmul(weight, states[0])[None] if len(states) == 1 else blas_matmul(states, weight.t())


def _blas_columns(states: Tensor, weight: Tensor) -> Tensor:
    return blas_matmul(weight, states.t()).t()


PRODUCTS: dict[str, Product] = {
    LINEAR: _linear,
    "bmm_columns": _bmm_columns,
    "bmm_parts": _bmm_parts,
    "embedding_bag": _embedding_bag,
    "blas": _blas,
    "blas_columns": _blas_columns,
}


def _offered(kind: ProductClass) -> tuple[str, ...]:
    """Names of the products that the class can take, ``linear`` first."""
    unfit = {
        "bmm_columns": kind.layout != BY_ROWS,  # it would copy the weight
        "bmm_parts": math.gcd(kind.outputs, kind.threads) == 1,
        "embedding_bag": kind.layout != BY_COLUMNS or kind.rows > BAG_ROWS,
        "blas_columns": kind.rows == 1,  # as ``blas``
    }
    return tuple(name for name in PRODUCTS if not unfit.get(name))


# ---------------------------------------------------------------- the choice

_chosen: dict[ProductClass, str] = {}  # of this process; ``product_table`` has that of the run


def _choose(kind: ProductClass, weight: Tensor) -> str:
    names = _offered(kind)
    _chosen[kind] = choose_product(str(kind), names, lambda: _measure_fastest(kind, names, weight.stride(1)))
    return _chosen[kind]


def _measure_fastest(kind: ProductClass, names: tuple[str, ...], run: int) -> str:
    """The fastest of ``names``; ``linear`` unless another saves ``ADVANTAGE``. ``run``: the weight's second stride."""
    rows = max(1, min(kind.rows, MOST_MULTIPLY_ADDS // (kind.outputs * kind.inputs)))
    with _disable_current_modes(), torch.inference_mode():  # no counter counts these products
        states, weights = torch.ones(rows, kind.inputs), _make_cold_weights(kind, run)
        calls = [partial(PRODUCTS[name], states) for name in names]
        seconds = _typical_seconds(calls, weights)
    fastest = min(range(len(names)), key=seconds.__getitem__)
    return names[fastest] if seconds[fastest] < (1 - ADVANTAGE) * seconds[0] else LINEAR


def _make_cold_weights(kind: ProductClass, run: int) -> list[Tensor]:
    """Weights of this class, as many as no cache holds: those of a model's other layers evict each layer's."""
    outputs, inputs, by_rows = kind.outputs, kind.inputs, kind.layout == BY_ROWS
    size = outputs * inputs if by_rows else run * inputs
    count = -(-COLD_BYTES // (4 * size))
    memory = make_aligned_allocator(count * size)
    weights = []
    for number in range(count):
        held = memory(number * size, size).fill_(1)
        weights.append(held.view(outputs, inputs) if by_rows else held.as_strided((outputs, inputs), (1, run)))
    return weights


def _typical_seconds(calls: Sequence[Callable[[Tensor], Tensor]], weights: Sequence[Tensor]) -> list[float]:
    """Lower quartile of the seconds of each of ``calls``, in turns, each with the next weight, after a first round.

    The minimum would hide how often threads wait for each other on a busy machine, the median is that of neighbours.
    """
    rounds: list[list[float]] = []
    at, start = 0, time.perf_counter()
    while len(rounds) < 2 or (len(rounds) < MOST_ROUNDS and time.perf_counter() - start < BUDGET_S):
        rounds.append([])
        for call in calls:
            weight, at = weights[at % len(weights)], at + 1
            begun = time.perf_counter()
            call(weight).contiguous()
            rounds[-1].append(time.perf_counter() - begun)
    return [sorted(column)[(len(rounds) - 2) // 4] for column in zip(*rounds[1:], strict=True)]
