"""Interface of a decoder: what it is asked, what it answers, and which rules it follows.

A *decoder* has one model and one operating point. ``start`` opens a *session* over several prompts, each a row;
``feed`` advances all its rows; ``generate`` is the timed path. No padding crosses this boundary.

Rules that every decoder follows:

- The prompt but its last position runs at the point's ceiling; its last position is the first decoding step.
- Under the monotone schedule D_t ≤ D_{t-1}; the cap of a fresh row is the ceiling.
- ``feed`` with ``depth`` obeys it, or raises InadmissibleDepth and leaves the session as it was.
- Rows decide on their own: a row's tokens and depths do not depend on its neighbours.
- ``deepen`` exists if ``Capabilities.deepens`` is true: a token that stopped early keeps its state and can continue.

This module knows no model, and not how an answer is judged. NumPy and the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from emad_ref.errors import BadArgument, EmadError, is_number, is_whole
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints, Record, Work


class InadmissibleDepth(EmadError, ValueError):
    """A forced depth outside 1…cap of its row. The session's state is unchanged."""


class Unsupported(EmadError):
    """Raised by a decoder that declines a request or a call. The claim becomes ``not applicable`` with this reason.

    Parameters
    ----------
    reason : str
        What the decoder cannot do, as a phrase: ``"no sessions"``.

    Attributes
    ----------
    features : tuple of str or None
        Features of the request that was declined as a whole; None for a declined call.

    Raises
    ------
    BadArgument
        No reason.
    """

    features: tuple[str, ...] | None = None  # of the request that was declined as a whole; None for a declined call

    def __init__(self, reason: str):
        if not isinstance(reason, str) or not reason.strip():
            raise BadArgument(
                "reason", reason, "a sentence", "say what the decoder cannot do: Unsupported('no sessions')"
            )
        super().__init__(reason)


def as_int64(name: str, values: Any) -> Ints:
    """``values`` as int64. Raises BadArgument for floats and booleans, which a cast would change silently."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise BadArgument(name, array.dtype.name, "integers", "cast them if that is what they are")
    return array.astype(np.int64, copy=False)


@dataclass(frozen=True)
class Prompt:
    """One row's input.

    Attributes
    ----------
    tokens : int64 [n]
        Token ids, n ≥ 1.
    source : int64 [s] or None
        Token ids of the encoder's input, for encoder-decoder models.
    """

    tokens: Ints
    source: Ints | None = None


@dataclass(frozen=True)
class ModelRef:
    """Names a model without loading it: torch stays unimported until ``load`` is called.

    Attributes
    ----------
    name : str
        As the user typed it: a short name, a folder, a hub repository.
    load : callable
        Returns a copy that the decoder may change; the caller keeps another.
    locate : callable or None
        Returns the folder of ``folder``; None: the model lies in no folder.
    """

    name: str
    load: Callable[[], Any] = field(compare=False, repr=False)
    locate: Callable[[], Path] | None = field(default=None, compare=False, repr=False)

    @property
    def folder(self) -> str:
        """The absolute folder of config.json, safetensors and tokenizer, for engines that read files.

        It is the model's own folder where it has one, so no decoder may write there. Otherwise the model is saved once,
        in a folder that is removed with the process.

        Raises:
            BadArgument: the caller named a model without a folder.
            OSError: the model could not be saved.
        """
        if self.locate is None:
            raise BadArgument("request.model.folder", None, f"a folder of {self.name}", "use request.model.load()")
        return str(self.locate())


@dataclass(frozen=True)
class Request:
    """Request for a decoder: which model it decodes with, at which point, and how.

    Attributes
    ----------
    model : ModelRef
        The model under test, by name; ``model.load()`` returns a copy that the decoder may change.
    point : OperatingPoint
        The exits to decode with.
    seed : int
        Seed of sampled tokens.
    max_rows : int
        Most prompts of one call.
    temperature : float
        Divides the logits before sampling; 0 is greedy.
    own_rule : bool
        The decoder shall exit by its own rule, not at ``point``. It then describes the rule in ``stated``.
    """

    model: ModelRef
    point: OperatingPoint
    seed: int = 0
    max_rows: int = 1
    temperature: float = 0.0  # 0 = greedy
    own_rule: bool = False  # by the decoder's own exit rule, and not at ``point``; it then has ``stated``


@dataclass(frozen=True)
class StatedRule:
    """A decoder's own exit rule, described in the decoder's attribute ``stated``.

    Attributes
    ----------
    name : str
        Name of its operating point.
    saved_blocks : float or None
        Share of full depth's blocks that it skips while it generates; None: not stated.
    speedup : float or None
        Ratio of the time at full depth of the same decoder to its own; None: not stated.
    """

    name: str
    saved_blocks: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class Capabilities:
    """Features of a decoder's sessions and records.

    Attributes
    ----------
    max_feed : int
        Most tokens per row in one ``feed``.
    schedules : frozenset of str
        Schedules that the decoder can follow.
    counted : bool
        Whether records and sessions count the executed work.
    logit_noise : float
        Largest honest error of a logit against the reference.
    deepens : bool
        Whether sessions of this decoder, at its point, offer ``Session.deepen``.
    max_positions : int or None
        Most tokens that a row may hold; None: not stated. Speculation then feeds no row beyond its own request.

    Raises
    ------
    BadArgument
        A value of another type; ``max_feed`` or ``max_positions`` below 1; ``logit_noise`` that is negative or not
        finite.
    """

    max_feed: int = 1
    schedules: frozenset[str] = frozenset({"monotone"})
    counted: bool = True
    logit_noise: float = 0.0
    deepens: bool = False
    max_positions: int | None = None

    def __post_init__(self) -> None:
        whole, named, noise = is_whole(self.max_feed), self.schedules, self.logit_noise
        sound = {
            "max_feed": (whole and self.max_feed >= 1, "a whole number ≥ 1"),
            "schedules": (
                isinstance(named, frozenset | set | list | tuple) and all(isinstance(name, str) for name in named),
                "a frozenset of names",
            ),
            "counted": (isinstance(self.counted, bool | np.bool_), "True or False"),
            "logit_noise": (
                is_number(noise) and 0 <= noise < math.inf,
                "a finite number ≥ 0",
            ),
            "deepens": (isinstance(self.deepens, bool | np.bool_), "True or False"),
            "max_positions": (
                self.max_positions is None or (is_whole(self.max_positions) and self.max_positions >= 1),
                "a whole number ≥ 1, or None",
            ),
        }
        for name, (holds, expected) in sound.items():
            if not holds:
                raise BadArgument(f"Capabilities.{name}", getattr(self, name), expected, "see docs/protocol.md")


@dataclass(frozen=True)
class Step:
    """``logits`` [rows, n, V], each at its token's depth; ``depth`` [rows, n].

    ``signal`` [rows, n, probes], as compared; NaN = unread. After a feed with ``last``, ``logits`` are [rows, last, V].
    """

    logits: Floats
    depth: Ints
    signal: Floats


@dataclass(frozen=True)
class TokenLogProbs:
    """One row that a decoder completed greedily, with log-probabilities.

    Attributes
    ----------
    tokens : int64 [m]
        The new tokens.
    ids : int64 [m, k]
        The k likeliest tokens at each new position, the likeliest first.
    log_probs : float64 [m, k]
        Their log-probabilities under softmax(logits), nats.
    prompt : float64 [n − 1] or None
        Log-probability of each prompt token after those before it, nats; None: the decoder does not report it.
    """

    tokens: Ints
    ids: Ints
    log_probs: Floats
    prompt: Floats | None = None

    @classmethod
    def of_logits(cls, tokens: Ints, logits: Floats, top: int) -> TokenLogProbs:
        """The ``top`` likeliest tokens by ``logits`` [m, V] at each of ``tokens`` [m]; ids break ties."""
        shifted = np.asarray(logits, dtype=np.float64)
        shifted = shifted - shifted.max(axis=-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        ids = np.argsort(-log_p, axis=-1, kind="stable")[:, :top]
        return cls(tokens, ids, np.take_along_axis(log_p, ids, axis=-1))

    @classmethod
    def of_likeliest(
        cls, tokens: Ints, likeliest: Sequence[Mapping[int, float]], top: int, prompt: Floats | None = None
    ) -> TokenLogProbs:
        """The ``top`` likeliest entries of each of ``likeliest``, log-probabilities by id; ids break ties.

        Raises:
            ValueError: another number of mappings than ``tokens``, or fewer than ``top`` entries in one.
        """
        best = [sorted(each.items(), key=lambda entry: (-entry[1], entry[0]))[:top] for each in likeliest]
        if len(best) != len(tokens) or any(len(row) < top for row in best):
            raise ValueError(f"fewer than {top} log-probabilities for each of {len(tokens)} tokens")
        ids = np.array([[token for token, _ in row] for row in best], dtype=np.int64)
        return cls(tokens, ids, np.array([[value for _, value in row] for row in best]), prompt)


@dataclass(frozen=True)
class DraftCounts:
    """Counters of an engine that speculates, since it started.

    Attributes
    ----------
    drafts : int
        Verifications of drafted tokens.
    accepted : int64 [k]
        How many of them accepted the first, second, … k-th drafted token.
    by_position : bool
        False: the engine counts accepted tokens alone, and ``accepted`` [1] is their number.
    """

    drafts: int
    accepted: Ints
    by_position: bool = True


@dataclass(frozen=True)
class TokenArrivals:
    """One row that a decoder completed, and when its tokens arrived.

    Attributes
    ----------
    tokens : int64 [m]
        The new tokens, the stop token included.
    seconds : float64 [m]
        When each arrived, counted from sending the request. Tokens of one message arrive together.
    whole_s : float
        When the answer was complete.
    text : str or None
        The answer's text, its parts joined; None: the decoder provides none.
    """

    tokens: Ints
    seconds: Floats
    whole_s: float
    text: str | None = None

    @property
    def came_in_parts(self) -> bool:
        """Whether two tokens arrived at different times."""
        return len(np.unique(self.seconds)) > 1


GenerateArguments: TypeAlias = tuple[Sequence[Prompt], int, frozenset[int]]  # prompts, max_new, stop of ``generate``


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

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        """Process ``tokens`` [rows, n] (n ≤ max_feed) at ``depth`` [rows, n], or at depths that the rule decides.

        ``last``: number of tokens at the end of each row with logits, 0…n; all by default. The head does not run, and
        does not count, for other tokens unless a probe needs it. Depths and signals cover all tokens.
        """

    def deepen(self, length: Ints) -> Step:
        """Run all tokens from ``length`` [rows] on from the depth each stopped at to the point's ceiling.

        The number n of these tokens is the same for all rows and at least 1, and each of them stopped below the
        ceiling. The step holds their logits [rows, n, V] at the ceiling, which becomes their depth. Earlier tokens that
        stopped early run the missing layers too, without readout, since the layers above attend to their K and V.

        Raises:
            Unsupported: ``Capabilities.deepens`` is false.
            BadArgument: any other ``length``; the session's state is unchanged.
        """

    def rollback(self, length: Ints) -> None:
        """Forget all tokens from ``length`` [rows] on, and restore tokens, K/V and cap of that length."""

    def commit(self, length: Ints) -> None:
        """Promise never to roll back below ``length`` [rows]: K/V above the cap may be freed."""

    def drop(self, rows: Ints) -> None:
        """Remove rows (indices into the present rows); the others keep their order."""

    def close(self) -> None: ...


class Decoder(Protocol):
    """Interface of every decoder.

    A decoder without sessions that reports log-probabilities has ``log_probs(prompts, max_new, top)``, which returns a
    ``TokenLogProbs`` for each prompt, or raises Unsupported.

    A decoder that speculates may have ``draft_counts()``, which returns ``DraftCounts`` or raises Unsupported.

    A decoder that counts the energy of its device may have ``energy_j()``, which returns joules since a moment of its
    own, or raises Unsupported.

    A decoder that streams has ``token_arrivals(prompts, max_new, stop, stream)``, which sends one request per prompt,
    all at once, and returns ``TokenArrivals`` for each; ``stream`` False requests whole answers. It may have
    ``abort_stream(prompt, max_new, after)``, which begins a stream and aborts it after ``after`` tokens. A decoder that
    takes several calls at once, those of other decoders of its kind included, has ``generate_at_once(requests,
    at_once)``. It answers all ``requests`` (``GenerateArguments``), ``at_once`` at a time, with a ``Record`` each. Both
    may raise Unsupported.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        """Open a session; the step (n = 1) belongs to each prompt's last position."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record: ...

    def synchronize(self) -> None:
        """Return when all work handed to the device is done."""

    def close(self) -> None: ...
