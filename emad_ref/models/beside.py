"""Weights by columns, and those of several linear layers over the same states column beside column.

A processor fetches ahead the further the longer the runs are that it reads. Where a module asks several layers about
the same states, their weights [out, in] lie as the columns of one [in, all outs]: each run is as long as all of them
together. A token alone is multiplied with all at once (``fused.beside``); several tokens, and the modules, take one
after the other. Runs of whole pages meet in the same few places of the cache as soon as several tokens are multiplied:
``GAP`` numbers between them prevent it. Time over that of weights that lie apart without gaps, of two blocks' parts in
a Llama of Pythia-410M's size, on one thread (± 1 %):

    tokens                                  1      2      4      8     16     64
    queries, keys, values; gate, up      0.89   0.95   1.05   1.04   1.03   1.02
    the same with gaps                   0.90   0.96   0.91   0.91   0.93   0.97
    4096 × 1024 by itself, with gaps     0.99   1.01   0.92          0.93   0.94

Where a weight stays in the cache, a token alone gains nothing by either: only large ones are laid so.

Each weight has a storage of its own, from its first number on: what asks which tensors share one before it saves them
(safetensors, transformers' ``save_pretrained``) finds none that do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from emad_ref.models.pages import is_large, memory_for, starts_right

# children that one module asks about the same states, in every family of ours that names them so
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
GAP = 64  # numbers
LONG, PLACES = 2048, 512  # numbers: from where on a gap costs a token alone nothing; where runs meet in the cache


def siblings(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """Linear layers of ``model`` over the same states, all with a bias or all without, none twice."""
    for module in model.modules():
        for names in SIBLINGS:
            found = [layer for name in names if type(layer := getattr(module, name, None)) is nn.Linear]
            if len(found) == len(names) and _alike(found):
                yield tuple(found)


def lay_beside(layers: Sequence[nn.Linear]) -> None:
    """Lay weights and biases of ``siblings`` side by side, in place."""
    for name in ("weight", "bias"):
        parts = [getattr(layer, name) for layer in layers]
        if parts[0] is not None:
            for part, moved in zip(parts, by_columns(parts), strict=True):
                part.data = moved


def by_columns(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same weights [out, in], or biases [out], side by side in memory of their own; as they are if they lie so.

    Each is over a storage of its own, which reaches to the end of all.
    """
    total, width = sum(map(len, parts)), parts[0].numel() // len(parts[0])  # 1 of biases
    run = total + GAP if is_large(total * width) and total >= LONG and total % PLACES == 0 else total
    whole = joined(parts)
    if whole is not None and whole.stride() == (1, run)[: whole.dim()] and starts_right(whole):
        return list(parts)
    memory, moved, at = memory_for(run * width), [], 0
    for part in parts:
        own = memory(at, run * width - at).as_strided(part.shape, (1, run)[: part.dim()])
        moved.append(own.copy_(part.detach()))
        at += len(part)
    return moved


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """[all outs, in] over weights [out, in], or [all outs] over biases [out], that lie side by side; else None."""
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
        return None  # neighbours by chance
    return first.detach().as_strided((total, *first.shape[1:]), first.stride())


def _alike(layers: Sequence[nn.Linear]) -> bool:
    different = len({id(layer.weight) for layer in layers}) == len(layers)
    return different and len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
