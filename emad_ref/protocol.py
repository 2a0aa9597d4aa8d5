"""What any decoder must offer so that the suites can judge it. NumPy and the standard library only.

A *decoder* belongs to one model and one operating point. ``start`` opens a *session* over several prompts, each a
row; ``feed`` advances all its rows; ``generate`` is the path that is timed. No padding crosses this boundary.

The rules a decoder signs (METHODS, "Depth and documents"):

- The prompt but its last position runs at the point's ceiling; its last position is the first decoding step.
- Under the monotone schedule D_t ≤ D_{t-1}; the cap of a fresh row is the ceiling.
- ``feed`` with ``depth`` obeys it, or raises InadmissibleDepth and leaves the session as it was.
- Rows decide on their own: a row's tokens and depths do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from emad_ref.errors import EmadError
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints, Record, Work


class InadmissibleDepth(EmadError, ValueError):
    """A forced depth outside 1…cap of its row; the session's state is unchanged."""


class Unsupported(EmadError):
    """A decoder's honest refusal: the claim that asked becomes ``not applicable`` with this reason."""


@dataclass(frozen=True)
class Prompt:
    """One row's input: ``tokens`` int64 [n], n ≥ 1; ``source`` int64 [s] for encoder-decoder models."""

    tokens: Ints
    source: Ints | None = None


@dataclass(frozen=True)
class ModelRef:
    """Names a model without loading it: torch stays unimported until ``load`` is called."""

    name: str
    load: Callable[[], Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Request:
    """What a suite asks of ``pytest_emad_make_decoder``."""

    model: ModelRef
    point: OperatingPoint
    seed: int = 0
    max_rows: int = 1
    temperature: float = 0.0  # 0 = greedy


@dataclass(frozen=True)
class Capabilities:
    """``max_feed``: tokens per row and feed. ``logit_noise``: largest honest error of a logit against the reference."""

    max_feed: int = 1
    schedules: frozenset[str] = frozenset({"monotone"})
    counted: bool = True
    logit_noise: float = 0.0


@dataclass(frozen=True)
class Step:
    """``logits`` [rows, n, V], each at its token's depth; ``depth`` [rows, n].

    ``signal`` [rows, n, probes], as compared; NaN = unread.
    """

    logits: Floats
    depth: Ints
    signal: Floats


class Session(Protocol):
    """Rows of one batch with their caches."""

    @property
    def length(self) -> Ints:
        """[rows] tokens held by each row, the prompt included."""

    @property
    def cap(self) -> Ints:
        """[rows] largest depth the next token of each row may take."""

    @property
    def work(self) -> Work | None:
        """Work executed since ``start``, rolled-back tokens included; None if the decoder does not count."""

    def feed(self, tokens: Ints, depth: Ints | None = None) -> Step:
        """Process ``tokens`` [rows, n] (n ≤ max_feed) at ``depth`` [rows, n], or at depths of the rule's choosing."""

    def rollback(self, length: Ints) -> None:
        """Forget all tokens from ``length`` [rows] on: tokens, K/V and cap are as they were then."""

    def commit(self, length: Ints) -> None:
        """Promise never to roll back below ``length`` [rows]: K/V above the cap may be freed."""

    def drop(self, rows: Ints) -> None:
        """Remove rows (indices into the present rows); the others keep their order."""

    def close(self) -> None: ...


class Decoder(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        """Open a session; the step (n = 1) belongs to each prompt's last position."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record: ...

    def synchronize(self) -> None:
        """Return when all work handed to the device is done."""

    def close(self) -> None: ...
