"""Maximum inner-product search over the unembedding: the K largest of z = U·x + b for each state x.

``Exact``  every row: costs a full head, V·E multiply-adds; the oracle of the others.
``Ivf``    rows in ~√V k-means lists; only the ``lists_searched`` lists whose centres score highest are read.
``Faiss``  the same structure in FAISS (extra ``faiss``), on the CPU.

A bias is one more coordinate of every row, against which a state has a 1. Approximate searches report no bound: what
they miss is measured by ``recall``, at K and at 1: one missed top token spoils an entropy more than many missed others.
Knows nothing of entropy, probes or softcaps (which keep the order).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from emad_ref.errors import BadArgument, EmadError
from emad_ref.record import Floats, Ints

SHARE_SEARCHED = 1 / 8  # of the lists, where the caller names no number
ROWS_PER_K = 2  # at least this many rows are read for each one returned


class FaissMissing(EmadError):
    """FAISS is asked for and not installed."""


class Index(Protocol):
    """Rows of an unembedding, searchable."""

    def macs_per_row(self, k: int) -> int:
        """Multiply-adds executed per state searched for, to return ``k`` rows."""

    @property
    def found(self) -> int:
        """Rows that every search is sure to find: the largest K."""

    def wide_enough(self, k: int) -> Index:
        """Itself, or the same rows searched in more lists, so that 2·K rows or all are read."""

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(values, ids int64), each [rows, k], by falling value, for ``states`` [rows, E]."""


@dataclass(frozen=True, eq=False)
class Exact:
    """All rows [V, E], bias [V] or None."""

    rows: Tensor
    bias: Tensor | None = None

    def macs_per_row(self, k: int) -> int:
        return self.rows.numel()

    @property
    def found(self) -> int:
        return len(self.rows)

    def wide_enough(self, k: int) -> Exact:
        return self

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        best = F.linear(states, self.rows, self.bias).topk(k, dim=-1)
        return best.values, best.indices


class Ivf:
    """Inverted lists of one size (the last rows padded), so that every state costs the same; a list is one block.

    Room for uneven lists did not pay for its padding: at equal cost recall was the same.
    Holds a copy of the unembedding, sorted by list.

    Args:
        rows: [V, E]; bias: [V] or None.
        lists_searched: per state; an eighth of all lists by default.
        lists: √V by default.
        seed: of k-means.

    Raises:
        BadArgument: more lists than rows, or a number of lists searched outside 1…lists.
    """

    def __init__(
        self,
        rows: Tensor,
        bias: Tensor | None = None,
        *,
        lists_searched: int | None = None,
        lists: int | None = None,
        seed: int = 0,
    ):
        lists, self.lists_searched = sizes(len(rows), lists, lists_searched)
        keys = with_bias(rows, bias)
        self._ids = equal_lists(keys, lists, math.ceil(len(rows) / lists), seed).to(rows.device)
        present = self._ids >= 0
        self._keys = keys[self._ids.clamp(min=0)].masked_fill_(~present[..., None], 0)  # [lists, size, E (+ 1)]
        held = present.sum(dim=1)
        self._centres = self._keys.sum(dim=1) / held.clamp(min=1)[:, None].to(rows.dtype)
        self._found: Ints = held.sort().values.cumsum(dim=0).cpu().numpy()  # by the smallest n lists
        self._padding = torch.zeros_like(present, dtype=rows.dtype).masked_fill_(~present, -torch.inf)
        self._biased = bias is not None

    def macs_per_row(self, k: int) -> int:
        lists, size, width = self._keys.shape
        return (lists + self.lists_searched * size) * width

    @property
    def found(self) -> int:
        return int(self._found[self.lists_searched - 1])

    def wide_enough(self, k: int) -> Ivf:
        wider = copy.copy(self)
        wider.lists_searched = max(self.lists_searched, needed(self._found, k))
        return wider

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        states = with_one(states, self._biased)
        searched = (states @ self._centres.T).topk(self.lists_searched, dim=-1).indices
        best = self._scores(states, searched).topk(k, dim=-1)
        return best.values, self._ids[searched].flatten(start_dim=1).gather(1, best.indices)

    def _scores(self, states: Tensor, searched: Tensor) -> Tensor:
        """[rows, lists searched · size]: one product per list that any state asks for, no gathered copy of rows."""
        asked, size = searched.flatten(), self._keys.shape[1]
        scores = states.new_empty(len(asked), size)
        order = asked.argsort()
        lists, counts = torch.unique_consecutive(asked[order], return_counts=True)
        for number, pairs in zip(lists.tolist(), torch.split(order, counts.tolist()), strict=True):
            scores[pairs] = torch.addmm(
                self._padding[number], states[pairs // self.lists_searched], self._keys[number].T
            )
        return scores.view(len(states), -1)


class Faiss:
    """Inverted lists of FAISS over float32 rows; arguments and errors as ``Ivf``. States travel to the CPU and back.

    Its lists differ in size: ``macs_per_row`` charges the largest that can be searched, an upper bound.

    Raises:
        FaissMissing: the extra is not installed.
    """

    def __init__(
        self,
        rows: Tensor,
        bias: Tensor | None = None,
        *,
        lists_searched: int | None = None,
        lists: int | None = None,
        seed: int = 0,
    ):
        faiss = _faiss()
        lists, self.lists_searched = sizes(len(rows), lists, lists_searched)
        keys = _float32(with_bias(rows, bias))
        width = keys.shape[1]
        # the index does not own its quantizer in Python: without this reference it would be collected
        self._quantizer = faiss.IndexFlatIP(width)
        self._index = faiss.IndexIVFFlat(self._quantizer, width, lists, faiss.METRIC_INNER_PRODUCT)
        self._index.cp.seed = seed
        self._index.train(keys)
        self._index.add(keys)
        held = np.sort([self._index.invlists.list_size(number) for number in range(lists)])
        self._found: Ints = held.cumsum()  # by the smallest n lists
        self._read: Ints = held[::-1].cumsum()  # by the largest n
        self._biased = bias is not None

    def macs_per_row(self, k: int) -> int:
        width: int = self._index.d
        return (len(self._read) + int(self._read[self.lists_searched - 1])) * width

    @property
    def found(self) -> int:
        return int(self._found[self.lists_searched - 1])

    def wide_enough(self, k: int) -> Faiss:
        wider = copy.copy(self)
        wider.lists_searched = max(self.lists_searched, needed(self._found, k))
        return wider

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        how = _faiss().SearchParametersIVF(nprobe=self.lists_searched)
        values, ids = self._index.search(_float32(with_one(states, self._biased)), k, params=how)
        return torch.from_numpy(values).to(states), torch.from_numpy(ids).to(states.device)


def recall(found: Tensor, exact: Tensor) -> Tensor:
    """Share of ``exact`` ids [rows, K] that are among ``found`` [rows, K]: recall@K, float64 [rows]."""
    if found.shape != exact.shape or found.ndim != 2:
        raise BadArgument("found", tuple(found.shape), f"the shape of the exact ids, {tuple(exact.shape)}")
    both = torch.cat([found, exact], dim=1).sort(dim=1).values  # ids are distinct in each: a pair is a hit
    return (both[:, 1:] == both[:, :-1]).sum(dim=1).double() / exact.shape[1]


def sizes(rows: int, lists: int | None, lists_searched: int | None) -> tuple[int, int]:
    """(lists, lists searched) with their defaults."""
    lists = round(math.sqrt(rows)) if lists is None else lists
    if not 1 <= lists <= rows:
        raise BadArgument("lists", lists, f"1–{rows}, the rows of the unembedding")
    searched = max(1, round(SHARE_SEARCHED * lists)) if lists_searched is None else lists_searched
    if not 1 <= searched <= lists:
        raise BadArgument("lists_searched", searched, f"1–{lists}, all lists")
    return lists, searched


def needed(found: Ints, k: int) -> int:
    """Lists to search for 2·K rows, or all; ``found`` [lists]: rows in the smallest n."""
    return int(np.searchsorted(found, min(ROWS_PER_K * k, found[-1]))) + 1


def with_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    """Rows [V, E], or [V, E + 1] with the bias as the last coordinate."""
    return rows if bias is None else torch.cat([rows, bias[:, None]], dim=1)


def with_one(states: Tensor, biased: bool) -> Tensor:
    """States [rows, E], or [rows, E + 1] with a 1 that meets the bias."""
    return torch.cat([states, torch.ones_like(states[:, :1])], dim=1) if biased else states


def equal_lists(keys: Tensor, lists: int, size: int, seed: int) -> Tensor:
    """int64 [lists, size] row numbers of each list, −1 for padding: every row once, near its k-means centre.

    Clustered are the directions of the rows from their mean: the common part moves no row up or down, and rows of
    unlike length that a state prefers together belong together. (On emad-tiny, a quarter of the lists searched, plain
    k-means lost the top token 15 times in 100 states, this 3 times.) Rows ask for the nearest list that has room, and
    a list takes the nearest of those who ask, until all are placed.
    """
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.preprocessing import normalize

    points = _float32(keys)
    points = normalize(points - points.mean(axis=0))
    means = MiniBatchKMeans(lists, random_state=seed, n_init=1, batch_size=4096, max_iter=20).fit(points)
    distance: Floats = torch.cdist(torch.from_numpy(points), torch.from_numpy(means.cluster_centers_)).numpy()
    members: Ints = np.full((lists, size), -1, dtype=np.int64)
    held = np.zeros(lists, dtype=np.int64)
    waiting = np.arange(len(points))
    while len(waiting):
        distance[:, held == size] = np.inf
        asked = distance[waiting].argmin(axis=1)
        order = np.lexsort((distance[waiting, asked], asked))
        asked, ordered = asked[order], waiting[order]
        place = held[asked] + np.arange(len(asked)) - np.searchsorted(asked, asked)
        placed = place < size
        members[asked[placed], place[placed]] = ordered[placed]
        held += np.bincount(asked[placed], minlength=lists)
        waiting = ordered[~placed]
    return torch.from_numpy(members)


def _float32(tensor: Tensor) -> Any:
    """A contiguous float32 array on the CPU."""
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as reason:
        raise FaissMissing(
            "estimator.search='faiss', but the module faiss is not installed; pip install 'pytest-emad[faiss]', or "
            "search='ivf', which needs PyTorch only"
        ) from reason
    return faiss
