"""Memory layout of weights: column-major if that speeds up products with few tokens, packed, on large pages."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PAGE = 2 << 20  # bytes of a large page on x86-64 and most of Arm
LARGE_WEIGHT = 2**18  # elements: smaller weights stay in a cache, where the usual product is the fastest
LARGE = 2 * PAGE  # from this size on a weight gets its own pages, of which less than a third is unused
_ON_LARGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def fills_large_pages(values: int) -> bool:
    """Whether ``values`` float32 numbers fill two large pages."""
    return values * 4 >= LARGE


def make_aligned_allocator(values: int) -> Callable[[int, int], Tensor]:
    """A function (first number, count) → tensor over them, in fresh memory for ``values`` float32 numbers.

    The memory is aligned to a large page if they are many. Each tensor has its own storage and keeps the memory alive.
    """
    memory, first = (
        _allocate_large_pages(values)
        if fills_large_pages(values) and _ON_LARGE_PAGES
        else (np.empty(values, np.float32), 0)
    )
    return lambda at, count: torch.frombuffer(memory, dtype=torch.float32, count=count, offset=first + 4 * at)


def is_page_aligned(weight: Tensor) -> bool:
    """Whether a float32 ``weight`` starts where ``make_aligned_allocator`` would start it."""
    return _ON_LARGE_PAGES is None or not fills_large_pages(weight.numel()) or weight.data_ptr() % PAGE == 0


def _allocate_large_pages(values: int) -> tuple[Any, int]:
    """A buffer, and the offset in it at which a large page starts and ``values`` numbers fit."""
    assert _ON_LARGE_PAGES is not None
    memory = mmap.mmap(-1, values * 4 + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(_ON_LARGE_PAGES)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % PAGE


# children that a module applies to the same states, in every family of ours with these names
PACKED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
RUN_GAP = 64  # numbers
LONG_RUN, CACHE_STRIDE = (
    2048,
    512,
)  # numbers: from this size on a gap costs a single token no time; smaller runs share a cache line


def iterate_packable_layer_groups(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """Groups of linear layers of ``model`` over the same states, all with a bias or all without, none twice."""
    for module in model.modules():
        for names in PACKED_NAMES:
            linear_layers = [layer for name in names if type(layer := getattr(module, name, None)) is nn.Linear]
            if len(linear_layers) == len(names) and _has_equal_inputs(linear_layers):
                yield tuple(linear_layers)


def pack_linear_weights_in_place(layers: Sequence[nn.Linear]) -> None:
    """Lay weights and biases of ``iterate_packable_layer_groups`` side by side, in place."""
    for name in ("weight", "bias"):
        parts = [getattr(layer, name) for layer in layers]
        if parts[0] is not None:
            for part, moved in zip(parts, to_adjacent_column_major(parts), strict=True):
                part.data = moved


def to_adjacent_column_major(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same weights [out, in], or biases [out], side by side in their own memory; unchanged if they are already.

    Each has its own storage, which reaches to the end of all.
    """
    total, width = sum(map(len, parts)), parts[0].numel() // len(parts[0])  # 1 for biases
    run = (
        total + RUN_GAP
        if fills_large_pages(total * width) and total >= LONG_RUN and total % CACHE_STRIDE == 0
        else total
    )
    whole = packed_view(parts)
    if whole is not None and whole.stride() == (1, run)[: whole.dim()] and is_page_aligned(whole):
        return list(parts)
    memory, moved, at = make_aligned_allocator(run * width), [], 0
    for part in parts:
        own = memory(at, run * width - at).as_strided(part.shape, (1, run)[: part.dim()])
        moved.append(own.copy_(part.detach()))
        at += len(part)
    return moved


def packed_view(parts: Sequence[Tensor]) -> Tensor | None:
    """View [all outs, in] of adjacent weights [out, in], or [all outs] of adjacent biases [out]; else None."""
    first, total = parts[0], sum(map(len, parts))
    inputs, run = (first.shape[1], first.stride(1)) if first.dim() > 1 else (1, total)
    if first.stride(0) != 1 or run < total:
        return None
    address = first.data_ptr()
    for part in parts:
        if part.stride() != first.stride() or part.shape[1:] != first.shape[1:] or part.data_ptr() != address:
            return None
        address += len(part) * part.element_size()
    reach = first.storage_offset() + (inputs - 1) * run + total
    if reach * first.element_size() > first.untyped_storage().nbytes():
        return None  # neighbours by coincidence
    return first.detach().as_strided((total, *first.shape[1:]), first.stride())


def _has_equal_inputs(layers: Sequence[nn.Linear]) -> bool:
    different = len({id(layer.weight) for layer in layers}) == len(layers)
    return different and len({(layer.in_features, layer.bias is None) for layer in layers}) == 1


def to_preferred_weight_layout(weight: Tensor) -> Tensor:
    """``weight`` [out, in] of a linear layer, column-major if it is large or out ≥ in, else row-major.

    Unchanged unless it is float32 on a CPU.
    """
    if not _can_move(weight):
        return weight
    by_columns = weight.numel() >= LARGE_WEIGHT or len(weight) >= weight.shape[1]
    return to_adjacent_column_major([weight])[0] if by_columns else _row_major(weight)


@torch.no_grad()
def lay_out_weights(model: nn.Module) -> None:
    """Lay out the weights of all linear layers in place; those shared with embeddings stay row-major."""
    embeddings = {id(each.weight): each for each in model.modules() if isinstance(each, nn.Embedding)}
    for embedding in embeddings.values():
        if _can_move(embedding.weight):
            embedding.weight.data = _row_major(embedding.weight.data)
    done = set(embeddings)
    for layers in iterate_packable_layer_groups(model):
        weights = [layer.weight for layer in layers]
        large = sum(weight.numel() for weight in weights) >= LARGE_WEIGHT
        if large and all(map(_can_move, weights)) and done.isdisjoint(map(id, weights)):
            pack_linear_weights_in_place(layers)
            done |= set(map(id, weights))
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in done:
            module.weight.data = to_preferred_weight_layout(module.weight.data)


def _can_move(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _row_major(weight: Tensor) -> Tensor:
    """``weight`` contiguous, on large pages if it fills two; unchanged if it is already."""
    if weight.is_contiguous() and is_page_aligned(weight):
        return weight
    return make_aligned_allocator(weight.numel())(0, weight.numel()).view(weight.shape).copy_(weight)
