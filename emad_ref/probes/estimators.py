"""Entropy estimators of a probe (EMAD, "Entropy estimation at inference"): full softmax, top-K, low-rank, linear.

    Ĥ_ℓ = slope_ℓ·estimate(norm(h_ℓ)) + intercept_ℓ

The decode loop and the lens trace use the same ``EntropyReader``, so replay and decoding compare the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument, require_extra
from emad_ref.models.fast.fused_blocks import multiply_by_weight
from emad_ref.models.geometry import Geometry
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator
from emad_ref.probes.signal_values import entropy_nats
from emad_ref.record import Ints


def entropy_and_top1(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy in nats, top-1 token int64, top-1 probability), each [...], of ``logits`` [..., V].

    The probability is the exponential of log_softmax, as in the lens trace: conditioning bins from either are
    bit-equal.
    """
    best = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1).max(dim=-1)
    return entropy_nats(logits), best.indices, best.values.exp()


SHARE_SEARCHED = 1 / 8  # default share of lists to search
ROWS_PER_K = 2  # rows read per returned row, at least


class RowIndex(Protocol):
    """Rows of an unembedding, searchable."""

    def macs_per_row(self, k: int) -> int:
        """Multiply-adds per state of a search for ``k`` rows."""

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(values, ids int64), each [rows, k], by falling value, for ``states`` [rows, E]."""


@dataclass(frozen=True, eq=False)
class ExactIndex:
    """All rows [V, E], bias [V] or None."""

    rows: Tensor
    bias: Tensor | None = None

    def macs_per_row(self, k: int) -> int:
        return self.rows.numel()

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        best = multiply_by_weight(states, self.rows, self.bias).topk(k, dim=-1)
        return best.values, best.indices


class FaissIndex:
    """Inverted lists of FAISS over float32 copies of ``rows`` [V, E], with ``bias`` [V] or None.

    ``lists``: √V by default; ``lists_searched``: per state at least, an eighth of them by default; ``seed``: of
    k-means. A search reads more lists if it needs them for 2·K rows. ``macs_per_row`` is an upper bound: it charges the
    largest lists that a search can read. States are copied to the CPU and back.

    Raises:
        BadArgument: more lists than rows, or a number of lists searched outside 1…lists.
        MissingExtra: the extra is not installed.
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
        self._faiss = faiss = _import_faiss()
        lists = round(math.sqrt(len(rows))) if lists is None else lists
        if not 1 <= lists <= len(rows):
            raise BadArgument("lists", lists, f"1–{len(rows)}, the rows of the unembedding")
        self._least = max(1, round(SHARE_SEARCHED * lists)) if lists_searched is None else lists_searched
        if not 1 <= self._least <= lists:
            raise BadArgument("lists_searched", self._least, f"1–{lists}, all lists")
        keys = _float32(rows if bias is None else torch.cat([rows, bias[:, None]], dim=1))
        # the index does not own its quantizer in Python: without this reference it would be collected
        self._quantizer = faiss.IndexFlatIP(keys.shape[1])
        self._index = faiss.IndexIVFFlat(self._quantizer, keys.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        self._index.cp.seed = seed
        self._index.train(keys)
        self._index.add(keys)
        list_sizes = np.sort([self._index.invlists.list_size(number) for number in range(lists)])
        self._fewest: Ints = list_sizes.cumsum()  # rows in the n smallest lists
        self._most: Ints = list_sizes[::-1].cumsum()  # rows in the n largest
        self._biased = bias is not None

    def count_lists_to_search(self, k: int) -> int:
        """Number of lists for a search of ``k`` rows, such that even the smallest hold 2·K rows; at most all lists."""
        needed = np.searchsorted(self._fewest, min(ROWS_PER_K * k, self._fewest[-1])) + 1
        return max(self._least, int(needed))

    def macs_per_row(self, k: int) -> int:
        width: int = self._index.d
        return (len(self._most) + int(self._most[self.count_lists_to_search(k) - 1])) * width

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self._biased:  # an input of 1 for the bias
            states = torch.cat([states, torch.ones_like(states[:, :1])], dim=1)
        how = self._faiss.SearchParametersIVF(nprobe=self.count_lists_to_search(k))
        values, ids = self._index.search(_float32(states), k, params=how)
        return torch.from_numpy(values).to(states), torch.from_numpy(ids).to(states.device)


def recall_at_k_by_row(retrieved: Tensor, exact: Tensor) -> Tensor:
    """recall@K, float64 [rows]: share of ``exact`` ids [rows, K] that are among ``retrieved`` [rows, K]."""
    if retrieved.shape != exact.shape or retrieved.ndim != 2:
        raise BadArgument("retrieved", tuple(retrieved.shape), f"the shape of the exact ids, {tuple(exact.shape)}")
    both = torch.cat([retrieved, exact], dim=1).sort(dim=1).values  # ids are distinct in each, so a pair is a hit
    return (both[:, 1:] == both[:, :-1]).sum(dim=1).double() / exact.shape[1]


def _float32(tensor: Tensor) -> Any:
    """A contiguous float32 array on the CPU."""
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def _import_faiss() -> Any:
    require_extra("estimator.search='faiss'", "faiss", alternative="search='lowrank', which needs PyTorch only")
    import faiss

    return faiss


def estimate_entropy_and_top1_p(values: Tensor, n_unseen: int) -> tuple[Tensor, Tensor]:
    """(Ĥ in nats, top-1 probability), each [...], from retrieved logits [..., K], descending, and V − K = ``n_unseen``.

    The V − K other logits are bounded by the K-th, z_K, and counted as equal to it (EMAD, "Entropy estimation at
    inference"). float32, or float64 for float64 logits. A NaN logit gives a NaN entropy.
    """
    z = values if values.dtype == torch.float64 else values.float()
    if n_unseen == 0:
        return entropy_nats(z), torch.softmax(z, dim=-1)[..., 0]
    groups = torch.cat([z, z[..., -1:] + math.log(n_unseen)], dim=-1)
    p = torch.softmax(groups, dim=-1)
    return entropy_nats(groups) + math.log(n_unseen) * p[..., -1], p[..., 0]


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """c·tanh(z/c), or z itself without a cap c."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@dataclass(frozen=True, eq=False)
class TopKEntropy:
    """Ĥ from the ``k`` largest logits that ``index`` finds among ``vocabulary`` rows.

    Raises:
        BadArgument: k outside 1…V.
    """

    index: RowIndex
    k: int
    vocabulary: int
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.vocabulary:
            raise BadArgument("estimator.k", self.k, f"1–{self.vocabulary}, the size of the vocabulary")

    @property
    def macs_per_row(self) -> int:
        """Multiply-adds of one search, which computes the logits that it returns."""
        return self.index.macs_per_row(self.k)

    def __call__(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(Ĥ in nats, top-1 token, top-1 probability), each [rows], of the head's input [rows, E]."""
        values, ids = self.index.search(normed, self.k)
        return self._of_largest(apply_softcap(values, self.softcap), ids)

    def from_logits(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Result of a call with the exact index, from known logits [rows, V]; a cap keeps their order."""
        return self._of_largest(*logits.topk(self.k, dim=-1))

    def _of_largest(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entropy, probability = estimate_entropy_and_top1_p(values, self.vocabulary - self.k)
        return entropy, ids[:, 0], probability


CHUNK = 8192  # rows converted to float64 at a time: all of a Llama's would take 4 GB
GATHERED_ENTRIES = 2**24  # entries of gathered rows at a time


@dataclass(frozen=True, eq=False)
class LowRankFactors:
    """``a`` A [E, r], ``b`` B [r, V] contiguous, ``mean`` μ [E], in the unembedding's dtype."""

    a: Tensor
    b: Tensor
    mean: Tensor


@dataclass(frozen=True, eq=False)
class PrincipalAxes:
    """``mean`` μ [E] of an unembedding's rows, and ``axes`` [E, E] of the rows less μ, the longest first; float64."""

    mean: Tensor
    axes: Tensor


def principal_axes(unembedding: Tensor) -> PrincipalAxes:
    """Principal axes of ``unembedding`` [V, E], for factors of every rank."""
    width, mean = unembedding.shape[1], unembedding.mean(dim=0, dtype=torch.float64)
    gram = torch.zeros(width, width, dtype=torch.float64, device=unembedding.device)
    for rows in torch.split(unembedding, CHUNK):
        gram += (rows - mean).T @ (rows - mean)
    return PrincipalAxes(mean, torch.linalg.eigh(gram).eigenvectors.flip(-1))


def low_rank_factors(unembedding: Tensor, rank: int, principal: PrincipalAxes | None = None) -> LowRankFactors:
    """The best rank-``rank`` factors of ``unembedding`` [V, E] less its mean row, in least squares.

    ``principal``: its principal axes, if known.

    Raises:
        BadArgument: a rank outside 1…E.
    """
    width = unembedding.shape[1]
    if not 1 <= rank <= width:
        raise BadArgument("estimator.rank", rank, f"1–{width}, the width of the unembedding")
    principal = principal_axes(unembedding) if principal is None else principal
    mean, a = principal.mean, principal.axes[:, :rank]
    b = torch.cat([((rows - mean) @ a).T.to(rows.dtype) for rows in torch.split(unembedding, CHUNK)], dim=1)
    return LowRankFactors(a.to(unembedding.dtype).contiguous(), b, mean.to(unembedding.dtype))


def approximate_logits(factors: LowRankFactors, normed: Tensor, bias: Tensor | None) -> Tensor:
    """(x·A)·B + b, [rows, V]: the approximate logits minus x·μ, which is equal for all tokens."""
    logits = (normed @ factors.a) @ factors.b
    return logits if bias is None else logits + bias


@dataclass(frozen=True, eq=False)
class LowRankIndex:
    """Index of exact logits of rows with the largest approximate logits; ``rows`` [V, E], ``bias`` [V] or None."""

    rows: Tensor
    factors: LowRankFactors
    bias: Tensor | None = None

    def macs_per_row(self, k: int) -> int:
        """E·r + r·V for the retrieval, K·E for the logits."""
        return self.factors.a.numel() + self.factors.b.numel() + k * self.rows.shape[1]

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = approximate_logits(self.factors, states, self.bias).topk(k, dim=-1).indices
        share = max(1, GATHERED_ENTRIES // (k * self.rows.shape[1]))
        pairs = zip(torch.split(states, share), torch.split(ids, share), strict=True)
        values = torch.cat([(self.rows[nearest] @ x[:, :, None])[..., 0] for x, nearest in pairs])
        best = (values if self.bias is None else values + self.bias[ids]).sort(dim=1, descending=True)
        return best.values, ids.gather(1, best.indices)


@dataclass(frozen=True, eq=False)
class LowRankEntropy:
    """Ĥ from the ``k`` largest approximate logits; ``bias`` [V] or None.

    Raises:
        BadArgument: k outside 1…V.
    """

    factors: LowRankFactors
    k: int
    bias: Tensor | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        vocabulary = self.factors.b.shape[1]
        if not 1 <= self.k <= vocabulary:
            raise BadArgument("estimator.k", self.k, f"1–{vocabulary}, the size of the vocabulary")

    @property
    def macs_per_row(self) -> int:
        """E·r + r·V for the factors, E for the mean row."""
        return self.factors.a.numel() + self.factors.b.numel() + self.factors.mean.numel()

    def __call__(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(Ĥ in nats, top-1 token, top-1 probability), each [rows], of the head's input [rows, E]."""
        logits = approximate_logits(self.factors, normed, self.bias)
        best = logits.topk(self.k, dim=-1)
        values = apply_softcap(best.values + (normed @ self.factors.mean)[:, None], self.softcap)
        entropy, probability = estimate_entropy_and_top1_p(values, logits.shape[-1] - self.k)
        return entropy, best.indices[:, 0], probability


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A linear probe: ``weights`` [E] and ``intercepts`` per probe."""

    weights: tuple[Tensor, ...]
    intercepts: tuple[float, ...]

    @property
    def macs_per_row(self) -> int:
        return self.weights[0].shape[0]

    def __call__(self, normed: Tensor, column: int) -> Tensor:
        """Ĥ in nats [rows] of the head's input [rows, E] at the probe ``column``, counted from 0."""
        weights = self.weights[column]
        states = normed if normed.dtype == weights.dtype else normed.to(weights.dtype)
        return torch.mv(states, weights) + self.intercepts[column]


def build_linear_probe(weights: Sequence[Sequence[float]], probes: int, like: Tensor) -> LinearProbe:
    """The probe with ``weights`` [probes][E + 1], the intercept last, on the device of the unembedding ``like`` [V, E].

    float32, or float64 for float64 models: a sum of E terms in half precision loses the second digit.

    Raises:
        BadArgument: another number of probes or of weights.
    """
    width = like.shape[1]
    if [len(row) for row in weights] != [width + 1] * probes:
        raise BadArgument(
            "estimator.weights",
            [len(row) for row in weights],
            f"for each of {probes} probes {width} weights and an intercept",
            "fit them for this model and these probes",
        )
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    table = torch.tensor([list(row) for row in weights], dtype=dtype, device=like.device)
    intercepts = table[:, -1].tolist()  # rounded like the weights; a one-element tensor costs a lookup per probe
    return LinearProbe(table[:, :-1].contiguous().unbind(), tuple(intercepts))


UNKNOWN_TOKEN = -1
INDEX_BUILDERS: dict[str, Callable[[Stepper, Tensor, int], RowIndex]] = {  # key: a model's unembedding and a rank
    "exact": lambda stepper, rows, _: ExactIndex(rows, _bias(stepper)),
    "faiss": lambda stepper, rows, _: FaissIndex(rows, _bias(stepper)),
    "lowrank": lambda stepper, rows, rank: LowRankIndex(rows, _factors(stepper, rank), _bias(stepper)),
}

Built = TypeVar("Built")


@dataclass(frozen=True, eq=False)
class EntropyReading:
    """Reading of one probe for each row.

    ``entropy_nats``      [rows] the estimate, corrected if the estimator has a correction for the probe.
    ``top1``              int64 [rows] the predicted token of the estimator; −1 without one.
    ``top1_probability``  [rows], NaN if unknown.
    ``logits``            [rows, V] of the full readout, which is also the output distribution; None for the others.
    """

    entropy_nats: Tensor
    top1: Tensor
    top1_probability: Tensor
    logits: Tensor | None = None


class EntropyReader(Protocol):
    """One estimator on one model, at the probes of one point."""

    @property
    def kind(self) -> str:
        """Row of ``record.READOUTS``."""

    @property
    def macs_per_row(self) -> int:
        """Multiply-adds per row, retrieval included; 0 for ``full``, which the geometry charges as a head."""

    def read(self, hidden: Tensor, column: int, logits: Tensor | None = None) -> EntropyReading:
        """Read states [rows, D] after the probe ``column``, counted from 0.

        ``logits`` [rows, V]: those of the model's own head for ``hidden``, if known.
        """

    def entropy_nats(self, hidden: Tensor, column: int) -> Tensor:
        """Only the entropy of ``read`` [rows], sufficient for a decision."""

    def read_uncorrected(self, hidden: Tensor) -> EntropyReading:
        """Read states [rows, D] after any layer, without correction.

        Raises:
            BadArgument: a linear estimator, whose weights belong to a probe.
        """


@dataclass(frozen=True, eq=False)
class FullSoftmaxReader:
    """Reads all logits; needs no correction."""

    stepper: Stepper
    kind: str = "full"
    macs_per_row: int = 0

    def read(self, hidden: Tensor, column: int, logits: Tensor | None = None) -> EntropyReading:
        return self.read_uncorrected(hidden) if logits is None else EntropyReading(*entropy_and_top1(logits), logits)

    def entropy_nats(self, hidden: Tensor, column: int) -> Tensor:
        return self.read(hidden, column).entropy_nats

    def read_uncorrected(self, hidden: Tensor) -> EntropyReading:
        logits = self.stepper.logits(hidden)
        return EntropyReading(*entropy_and_top1(logits), logits)


@dataclass(frozen=True, eq=False)
class LogitEstimateReader:
    """Reads some logits, or approximate ones: top-K and low-rank."""

    stepper: Stepper
    kind: str
    estimate: TopKEntropy | LowRankEntropy
    macs_per_row: int
    correction: tuple[tuple[float, float], ...]

    def read(self, hidden: Tensor, column: int, logits: Tensor | None = None) -> EntropyReading:
        estimate = self.estimate
        if logits is not None and isinstance(estimate, TopKEntropy) and isinstance(estimate.index, ExactIndex):
            raw = EntropyReading(*estimate.from_logits(logits))
        else:
            raw = self.read_uncorrected(hidden)
        return replace(raw, entropy_nats=apply_correction(raw.entropy_nats, self.correction, column))

    def entropy_nats(self, hidden: Tensor, column: int) -> Tensor:
        return self.read(hidden, column).entropy_nats

    def read_uncorrected(self, hidden: Tensor) -> EntropyReading:
        return EntropyReading(*self.estimate(self.stepper.apply_final_norm(hidden)))


@dataclass(frozen=True, eq=False)
class LinearProbeReader:
    """Reads no logits."""

    stepper: Stepper
    estimate: LinearProbe
    macs_per_row: int
    correction: tuple[tuple[float, float], ...]
    kind: str = "linear"

    def read(self, hidden: Tensor, column: int, logits: Tensor | None = None) -> EntropyReading:
        entropy = self.entropy_nats(hidden, column)
        token = torch.full(entropy.shape, UNKNOWN_TOKEN, device=entropy.device)
        return EntropyReading(entropy, token, torch.full_like(entropy, torch.nan))

    def entropy_nats(self, hidden: Tensor, column: int) -> Tensor:
        return apply_correction(self.estimate(self.stepper.apply_final_norm(hidden), column), self.correction, column)

    def read_uncorrected(self, hidden: Tensor) -> EntropyReading:
        raise BadArgument("estimator.kind", "linear", "an estimator that reads any layer", "read it at its probes")


def apply_correction(entropy: Tensor, correction: Sequence[tuple[float, float]], column: int) -> Tensor:
    """``entropy`` with the line of probe ``column`` applied; unchanged without one."""
    if not correction:
        return entropy
    slope, intercept = correction[column]
    return slope * entropy + intercept


def make_entropy_reader(stepper: Stepper, estimator: EntropyEstimator, probes: Sequence[int]) -> EntropyReader:
    """The reader of ``estimator`` on this model; ``probes``: the layers its corrections and weights belong to.

    Raises:
        BadArgument: k or rank beyond the model's sizes, corrections or weights for other probes or another width.
        MissingExtra: ``search="faiss"`` without the extra.
    """
    if estimator.correction and (estimator.kind == "full" or len(estimator.correction) != len(probes)):
        expected = "none for the full softmax" if estimator.kind == "full" else f"one per probe ({len(probes)})"
        raise BadArgument("estimator.correction", estimator.correction, expected)
    return READERS[estimator.kind](stepper, estimator, len(probes))


def layers_and_reader_by_estimator(
    stepper: Stepper, estimators: Mapping[EntropyEstimator, Sequence[int]]
) -> dict[EntropyEstimator, tuple[Sequence[int], EntropyReader]]:
    """Each estimator's layers and reader. Raises as ``make_entropy_reader``."""
    return {each: (tuple(layers), make_entropy_reader(stepper, each, layers)) for each, layers in estimators.items()}


def _full_reader(stepper: Stepper, estimator: EntropyEstimator, probes: int) -> EntropyReader:
    return FullSoftmaxReader(stepper)


def _topk_reader(stepper: Stepper, estimator: EntropyEstimator, probes: int) -> EntropyReader:
    search = INDEX_BUILDERS[estimator.search]
    key = ("index", estimator.search, estimator.rank)
    index = _cached(stepper, key, lambda rows: search(stepper, rows, estimator.rank))
    estimate = TopKEntropy(index, estimator.k, len(stepper.unembedding), stepper.logit_softcap)
    return LogitEstimateReader(
        stepper, "topk", estimate, _with_projection(stepper, estimate.macs_per_row), estimator.correction
    )


def _lowrank_reader(stepper: Stepper, estimator: EntropyEstimator, probes: int) -> EntropyReader:
    estimate = LowRankEntropy(_factors(stepper, estimator.rank), estimator.k, _bias(stepper), stepper.logit_softcap)
    return LogitEstimateReader(
        stepper, "lowrank", estimate, _with_projection(stepper, estimate.macs_per_row), estimator.correction
    )


def _linear_reader(stepper: Stepper, estimator: EntropyEstimator, probes: int) -> EntropyReader:
    estimate = build_linear_probe(estimator.weights, probes, stepper.unembedding)
    return LinearProbeReader(stepper, estimate, _with_projection(stepper, estimate.macs_per_row), estimator.correction)


READERS: dict[str, Callable[[Stepper, EntropyEstimator, int], EntropyReader]] = {
    "full": _full_reader,
    "topk": _topk_reader,
    "lowrank": _lowrank_reader,
    "linear": _linear_reader,
}

_CACHE: WeakKeyDictionary[Stepper, dict[Hashable, Any]] = WeakKeyDictionary()


def _cached(stepper: Stepper, key: Hashable, build: Callable[[Tensor], Built]) -> Built:
    """``build`` of the unembedding, once per stepper; assumes constant weights."""
    cache = _CACHE.setdefault(stepper, {})
    if key not in cache:
        # as in the stepper's tables: inference-mode tensors could not be used outside of it
        with torch.inference_mode(False), torch.no_grad():
            cache[key] = build(stepper.unembedding.detach())
    built: Built = cache[key]
    return built


def _factors(stepper: Stepper, rank: int) -> LowRankFactors:
    principal = _cached(stepper, "principal axes", principal_axes)
    return _cached(stepper, ("factors", rank), lambda rows: low_rank_factors(rows, rank, principal))


def _bias(stepper: Stepper) -> Tensor | None:
    return None if stepper.unembedding_bias is None else stepper.unembedding_bias.detach()


def _with_projection(stepper: Stepper, macs: int) -> int:
    """``macs`` plus those of the projection in front of the head, which every readout runs if D ≠ E (OPT-350m)."""
    hidden, width = stepper.geometry.hidden, stepper.geometry.embedding_width
    return macs + (hidden * width if hidden != width else 0)


def probe_flops(geometry: Geometry, estimator: EntropyEstimator) -> int:
    """FLOPs of reading one row by ``estimator``.

    Raises:
        BadArgument: a search whose cost depends on the distribution of rows over lists.
    """
    width, vocabulary = geometry.embedding_width, geometry.vocabulary
    low = width * estimator.rank + estimator.rank * vocabulary
    projected = geometry.hidden * width if geometry.hidden != width else 0
    macs = {
        ("full", "exact"): geometry.head_flops() // 2 - projected,
        ("topk", "exact"): vocabulary * width,
        ("topk", "lowrank"): low + estimator.k * width,
        ("lowrank", "exact"): low + width,
        ("linear", "exact"): width,
    }
    kind_and_search = (estimator.kind, estimator.search)
    if kind_and_search not in macs:
        raise BadArgument("estimator.search", estimator.search, "exact or lowrank", "build the index to know its cost")
    return 2 * (macs[kind_and_search] + projected)
