"""A way to answer with two models, as tasks ask for it: texts to write, options to read. No model and no task here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emad_ref.decoding.branching import Wanted
from emad_ref.record import Floats, Ints

Continuations = Sequence[tuple[Ints, Ints]]  # each a prompt and a continuation, int64 [n]


@dataclass(frozen=True, eq=False)
class Written:
    """int64 [emitted] ``tokens`` of one text, and how many of them are the large model's.

    ``entropy_bits`` float64 [emitted], of whoever wrote each; None where the way does not tell.
    """

    tokens: Ints
    by_large: int
    entropy_bits: Floats | None = None


@dataclass(frozen=True, eq=False)
class Read:
    """A continuation as a way to answer sees it: Σ log p in nats, and whether it is what greedy decoding would write.

    ``written``: its tokens, by whoever is in charge of each.
    """

    log_p: float
    greedy: bool
    written: Written


@dataclass(frozen=True)
class Way:
    """``write``: texts, in the order asked for; ``read``: options likewise, None where the way ranks none."""

    write: Callable[[Sequence[Wanted]], list[Written]]
    read: Callable[[Continuations], list[Read]] | None
