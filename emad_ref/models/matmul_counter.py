"""Observed matrix products with a model's weights: rows through every matrix of every block, and through the head.

PyTorch passes every operation of a module, a hook or a hand-written step to a dispatch mode first. If one operand of a
matrix product is inside the memory of a watched model's weight, it is that weight (or a slice or transpose), and the
other operand holds the rows. A product with a slice counts by the slice's share, so Q, K and V taken one by one from a
packed matrix are one row each. A product with several adjacent weights is a row through each. The counter watches only
matrices that every token of a block passes: no experts, and no K and V of a source.

The counter cannot observe weights that were copied, packed or quantised, other processes, kernels outside PyTorch,
replayed graphs, and other threads. So an unobserved product may still have run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emad_ref.models.families import anatomy_of
from emad_ref.models.stepper import get_decoder_submodule_by_name
from emad_ref.record import HEAD

MATRIX_PRODUCTS = {  # operation → indices of its factors; the inner size is the last of the first one's
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "blas_matmul"), (0, 1)),  # the last: fast.blas_operator
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), (1, 2)),
}
WEIGHTED_SUMS = ("_embedding_bag", "_embedding_bag_forward_only")  # most rows: a product with a column-major weight
CROSS_ATTENTION_KV = (".EncDecAttention.k.", ".EncDecAttention.v.")


@dataclass(frozen=True)
class WatchedMatrix:
    """A weight of block ``layer`` (``HEAD``: of the head), [out, in], and the addresses of its bytes.

    From ``start_address`` on, outputs are ``out_step`` bytes apart, inputs ``in_step``.
    """

    layer: int
    name: str
    start: int
    shape: tuple[int, int]
    out_step: int
    in_step: int

    @property
    def element_count(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def end_address(self) -> int:
        """Address after the last output."""
        return self.start + self.shape[0] * self.out_step

    def is_followed_by(self, other: WatchedMatrix) -> bool:
        """Whether ``other``'s outputs continue this one's, so that one operand may span both."""
        alike = (self.out_step, self.in_step, self.shape[1]) == (other.out_step, other.in_step, other.shape[1])
        return alike and other.start == self.end_address


@dataclass(frozen=True)
class AdjacentMatrices:
    """Weights side by side, each starting where the previous one ends."""

    matrices: tuple[WatchedMatrix, ...]

    @property
    def start_address(self) -> int:
        return self.matrices[0].start

    def covered_shares(self, operand: Tensor) -> dict[WatchedMatrix, float]:
        """Share of each weight that ``operand`` covers; empty if it begins elsewhere."""
        first = self.matrices[0]
        at, item = operand.data_ptr() - self.start_address, operand.element_size()
        last = (
            self.matrices[-1].end_address - self.start_address - first.out_step + (first.shape[1] - 1) * first.in_step
        )
        if at > last:
            return {}
        columns = first.out_step < first.in_step
        begun = (at % first.in_step if columns else at) // first.out_step
        steps = [(size, stride * item) for size, stride in zip(operand.shape, operand.stride(), strict=True)]
        along = [(size, step) for size, step in steps if (step < first.in_step if columns else step >= first.out_step)]
        ended = begun + 1 + sum((size - 1) * (step // first.out_step) for size, step in along)
        shares, done = {}, 0
        for matrix in self.matrices:
            outputs = min(ended, done + matrix.shape[0]) - max(begun, done)
            if outputs > 0:
                shares[matrix] = outputs
            done += matrix.shape[0]
        return {matrix: outputs / sum(shares.values()) for matrix, outputs in shares.items()}


class MatmulCounter(TorchDispatchMode):
    """Context that counts products with the weights of ``models``, transformers LMs of our families, on this thread."""

    def __init__(self, *models: Any):
        super().__init__()
        self._matrices = sorted((each for model in models for each in _matrices(model)), key=lambda each: each.start)
        self._chains = list(_chains(self._matrices))
        self._starts = [chain.start_address for chain in self._chains]
        self._met: dict[tuple[int, str], float] = defaultdict(float)  # multiply-adds

    def rows_by_matrix(self) -> dict[tuple[int, str], float]:
        """(layer, name of the matrix within its block) → rows multiplied with it."""
        return {
            (each.layer, each.name): self._met[each.layer, each.name] / each.element_count for each in self._matrices
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in WEIGHTED_SUMS:
            for matrix in self._weights_in(args[0]):
                self._met[matrix.layer, matrix.name] += len(args[1]) / len(args[0]) * matrix.element_count
            return func(*args, **(kwargs or {}))
        operands = MATRIX_PRODUCTS.get(name)
        if operands is None:
            with self:  # a composite operation may contain products
                result = func.decompose(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {})) if result is NotImplemented else result
        product = func(*args, **(kwargs or {}))
        weight_shares = [shares for at in operands if (shares := self._weights_in(args[at]))]
        if len(weight_shares) == 1:  # a product of two weights has no token
            for matrix, share in weight_shares[0].items():
                self._met[matrix.layer, matrix.name] += share * product.numel() * args[operands[0]].shape[-1]
        return product

    def _weights_in(self, operand: Tensor) -> dict[WatchedMatrix, float]:
        at = bisect_right(self._starts, operand.data_ptr()) - 1
        return self._chains[at].covered_shares(operand) if at >= 0 else {}


def _chains(matrices: Iterable[WatchedMatrix]) -> Iterator[AdjacentMatrices]:
    """Group ``matrices``, sorted by start, into runs of adjacent ones."""
    chain: tuple[WatchedMatrix, ...] = ()
    for matrix in matrices:
        if chain and not chain[-1].is_followed_by(matrix):
            yield AdjacentMatrices(chain)
            chain = ()
        chain += (matrix,)
    if chain:
        yield AdjacentMatrices(chain)


def _matrices(model: Any) -> Iterator[WatchedMatrix]:
    config = model.config.get_text_config()
    blocks: Any = get_decoder_submodule_by_name(config.model_type, model.get_decoder(), anatomy_of(config).blocks)
    parts = [(HEAD, model.get_output_embeddings()), *enumerate(blocks, start=1)]
    for layer, part in parts:
        for name, weight in part.named_parameters():
            if weight.ndim == 2 and not any(source in f".{name}" for source in CROSS_ATTENTION_KV):
                steps = [stride * weight.element_size() for stride in weight.stride()]
                yield WatchedMatrix(layer, name, weight.data_ptr(), tuple(weight.shape), *steps)
