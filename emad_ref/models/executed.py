"""What was really multiplied with a model's weights: rows through every matrix of every block, and through the head.

PyTorch hands every operation to a dispatch mode before it runs, whoever asks for it: a module, a hook, a hand-written
step. One operand of a matrix product that lies inside a weight of a watched model is that weight (or a slice or
transpose of it), the other holds the rows. A product with a slice counts by the slice's share, so that Q, K and V taken
one by one from a packed matrix are one row each. Only matrices that every token of a block passes are watched: no
experts, which see some tokens, and no K and V of a source, which see none.

It cannot see weights that were copied, packed or quantised, other processes, kernels that are not PyTorch's, replayed
graphs, other threads. What it has not seen was not shown to be absent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emad_ref.models.agreement import part_named
from emad_ref.models.anatomy import anatomy_of
from emad_ref.record import HEAD

PRODUCTS = {  # operation → which of its arguments are multiplied; the inner size is the last of the first one's
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), (1, 2)),
}
OF_A_SOURCE = (".EncDecAttention.k.", ".EncDecAttention.v.")


@dataclass(frozen=True)
class Matrix:
    """A weight of block ``layer`` (``HEAD``: of the head), and where its bytes lie: from ``start`` up to ``end``."""

    layer: int
    name: str
    start: int
    end: int
    elements: int


class Executed(TorchDispatchMode):
    """As a context: counts what meets the weights of ``models``, transformers LMs of our families, on this thread."""

    def __init__(self, *models: Any):
        super().__init__()
        self._matrices = sorted((each for model in models for each in _matrices(model)), key=lambda each: each.start)
        self._starts = [each.start for each in self._matrices]
        self._met: Counter[tuple[int, str]] = Counter()  # multiply-adds

    def rows(self) -> dict[tuple[int, str], float]:
        """(layer, name of the matrix within its block) → rows that were multiplied with it."""
        return {(each.layer, each.name): self._met[each.layer, each.name] / each.elements for each in self._matrices}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = PRODUCTS.get(func.overloadpacket.__name__)
        if operands is None:
            with self:  # a composite operation may hold products
                made = func.decompose(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {})) if made is NotImplemented else made
        product = func(*args, **(kwargs or {}))
        met = [matrix for at in operands if (matrix := self._matrix_of(args[at])) is not None]
        if len(met) == 1:  # two weights multiplied with each other are no token's
            (matrix,) = met
            self._met[matrix.layer, matrix.name] += product.numel() * args[operands[0]].shape[-1]
        return product

    def _matrix_of(self, operand: Tensor) -> Matrix | None:
        at = bisect_right(self._starts, address := operand.data_ptr()) - 1
        return self._matrices[at] if at >= 0 and address < self._matrices[at].end else None


def _matrices(model: Any) -> Iterator[Matrix]:
    config = model.config.get_text_config()
    blocks: Any = part_named(config.model_type, model.get_decoder(), anatomy_of(config).blocks)
    parts = [(HEAD, model.get_output_embeddings()), *enumerate(blocks, start=1)]
    for layer, part in parts:
        for name, weight in part.named_parameters():
            if weight.ndim == 2 and not any(source in f".{name}" for source in OF_A_SOURCE):
                start = weight.data_ptr()
                yield Matrix(layer, name, start, start + weight.numel() * weight.element_size(), weight.numel())
