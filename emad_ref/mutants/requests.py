"""What goes wrong in requests as users send them: many rows, stop tokens, shared beginnings, sessions in between."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.reference import Sampler
from emad_ref.decoding.step import StepOutput
from emad_ref.models.kv_cache import LayerKVCache
from emad_ref.mutants.base import MutantDecoder, MutantSession, decoder_factory, session_factory
from emad_ref.mutants.depths import ExitsTogether, Looser
from emad_ref.mutants.drawing import drawing
from emad_ref.mutants.mutant import Mutant, MutantFactory
from emad_ref.mutants.sessions import Pooled, blank
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt, Step
from emad_ref.record import Ints, Record

BATCHES = "invariants/test_requests.py::test_batches_as_large_as_verdicts_read_decide_row_by_row"
ENDINGS = "invariants/test_requests.py::test_rows_end_at_any_stop_token_and_at_no_other"
PREFIXES = "invariants/test_requests.py::test_prompts_that_share_a_beginning_are_read_to_their_ends"
BETWEEN = "invariants/test_requests.py::test_requests_between_the_steps_of_sessions_change_nothing"
CLAIM = "claims/test_model.py::test_claim"
ROW = r"row \d+( in a session)?, position \d+, depth \d+.*: "
TOLD = rf"{ROW}(emitted \d+, but the argmax|signal off|logits off|the rule gives)"
ENDED = r"row \d+: \d+ tokens and '(length|stop token)', but max_new"


# ---------------------------------------------------------------- many rows


class OtherRows(Sampler):
    """From row ``first`` on each row takes the token of the row ``first`` before it, where that is still there."""

    first: ClassVar[int] = 8

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        places = {row: place for place, row in enumerate(rows)}
        taken = [places.get(row - self.first, place) for place, row in enumerate(rows)]
        return super().pick(logits[taken], rows)


class OtherRowsFrom16(OtherRows):
    first = 16


class SecondBestInLastRow(Sampler):
    """The last row of a batch of at least eight takes the second-best token."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature, seed)
        self.last = rows - 1

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        picked = super().pick(logits, rows)
        if self.last >= 7 and rows[-1] == self.last:
            picked[-1] = logits[-1].topk(2).indices[1]
        return picked


class EightExitTogether(ExitsTogether):
    least = 8


class ShowsOtherRows(MutantSession):
    """A session shows of its ninth row and of all after it the logits of its first."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        step.logits[8:] = step.logits[:1]
        return step


class WrongWhereScored(Sampler):
    """In batches of exactly 32 rows, by which answers are scored, every other row takes the second-best token."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature, seed)
        self.scored = rows == 32

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        picked = super().pick(logits, rows)
        if self.scored:
            odd = torch.tensor(rows, device=picked.device) % 2 == 1
            picked = torch.where(odd, logits.topk(2, dim=-1).indices[:, 1], picked)
        return picked


class LooserWhereCalibrated(Looser):
    """Thresholds are half a nat too high at calibrated points alone, which are those that losses are read at."""

    def rule(self, point: OperatingPoint) -> OperatingPoint:
        return point if point.margin_nats is None else super().rule(point)


# ---------------------------------------------------------------- where rows end


class LeastStop(MutantDecoder):
    """Of several stop tokens only the smallest id ends a row."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        return super().generate(prompts, max_new, frozenset(sorted(stop)[:1]))


class GreatestStop(MutantDecoder):
    """Of several stop tokens only the largest id ends a row."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        return super().generate(prompts, max_new, frozenset(sorted(stop)[-1:]))


class FourStops(MutantDecoder):
    """Four stop tokens at most are looked at."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        return super().generate(prompts, max_new, frozenset(sorted(stop)[:4]))


class LaterStops(frozenset[int]):
    """Holds nothing for the first ``blind`` times that it is asked."""

    blind: int = 0

    def __contains__(self, token: object) -> bool:
        self.blind -= 1
        return self.blind < 0 and super().__contains__(token)


class FirstTokenNeverStops(MutantDecoder):
    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        later = LaterStops(stop)
        later.blind = len(prompts)
        return super().generate(prompts, max_new, later)


class StopsInPrompts(MutantDecoder):
    """A stop token that stands in a prompt ends the request after one new token."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        held = any(stop & set(prompt.tokens.tolist()) for prompt in prompts)
        return super().generate(prompts, 1 if held else max_new, stop)


class StopsRemembered(MutantDecoder):
    """Stop tokens of earlier requests end rows of later ones."""

    def prepare(self) -> None:
        self.known: frozenset[int] = frozenset()

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        self.known |= stop
        return super().generate(prompts, max_new, self.known)


class TwoForOne(MutantDecoder):
    """Asked for one new token, it gives two."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        return super().generate(prompts, max(2, max_new), stop)


class StopDropped(MutantDecoder):
    """Stop tokens are left out of what is emitted."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        record = super().generate(prompts, max_new, stop)
        record.emitted[:] = [
            tokens[:-1] if why == "stop token" else tokens
            for tokens, why in zip(record.emitted, record.stop, strict=True)
        ]
        return record


# ---------------------------------------------------------------- prompts that share a beginning


class PromptsRemembered(MutantSession):
    """K and V of an earlier prompt that has the same key stand in for those of a prompt."""

    @staticmethod
    def key(head: Ints) -> Hashable:
        return len(head)

    def _run_prompts(self, heads: Any, lengths: Ints) -> Tensor:
        known: dict[Hashable, Ints] = vars(self._walker).setdefault("known", {})
        remembered = [known.setdefault(self.key(head), head.copy()) for head in heads]
        return super()._run_prompts(remembered, lengths)


def remembering(key: Callable[[Ints], Hashable]) -> MutantFactory:
    """A decoder that remembers prompts by ``key``."""
    return session_factory(type("Remembers", (PromptsRemembered,), {"key": staticmethod(key)}))


# ---------------------------------------------------------------- sessions in between


class GeneratesInTheirBuffers(MutantDecoder):
    """``generate`` takes the buffers of whichever session was opened last."""

    def prepare(self) -> None:
        self.pool: dict[int, tuple[Tensor, Tensor]] = {}

    def _open(self, prompts: Sequence[Prompt], capacity: int) -> Any:
        session = super()._open(prompts, capacity)
        layers = session._store.cache.layers
        layers[:] = [Pooled(number, len(prompts), capacity, self.pool) for number in range(1, len(layers) + 1)]
        return session

    def start(self, prompts: Sequence[Prompt]) -> Any:
        self.pool = {}  # what sessions share is what generate takes
        return super().start(prompts)


SHARED_POOL: dict[str, Any] = {"owner": None, "pool": {}}


class SharesWithOthers(MutantSession):
    """Buffers belong to the process: a session begins where one of another decoder still is."""

    def keeper(self, number: int, rows: int, capacity: int) -> LayerKVCache:
        if SHARED_POOL["owner"] is self._walker or number == 1:
            own = SHARED_POOL["owner"] is self._walker
            pool = {} if own else dict(SHARED_POOL["pool"])
            self.__dict__["pool"] = pool
            if number == 1:
                SHARED_POOL["owner"], SHARED_POOL["pool"] = self._walker, pool
        return Pooled(number, rows, capacity, self.__dict__.setdefault("pool", {}))


class ClosesAnother(MutantSession):
    """Closing a session frees what the one opened last holds; ``opened``: those of one decoder, oldest first."""

    opened: list[MutantSession]

    def close(self) -> None:
        newest = self.opened.pop()
        if newest is not self:
            for row in range(len(newest._trail)):
                blank(newest._store.cache.layers, row)
            self.opened[self.opened.index(self)] = newest
        super().close()


class ClosesTheNewest(MutantDecoder):
    session = ClosesAnother

    def prepare(self) -> None:
        self.opened: list[MutantSession] = []

    def start(self, prompts: Sequence[Prompt]) -> Any:
        session, step = super().start(prompts)
        session.__dict__["opened"] = self.opened
        self.opened.append(session)  # type: ignore[arg-type]  # of the kind above
        return session, step


class LeavesWhatWasAborted(MutantDecoder):
    """After a request that was aborted the next one begins with a token of that one."""

    def prepare(self) -> None:
        self.left: int | None = None

    def begin(self, prompts: Sequence[Prompt], max_new: int) -> tuple[Any, StepOutput]:
        if self.left is None:
            return super().begin(prompts, max_new)
        begun = [Prompt(np.concatenate([[self.left], each.tokens[1:]]), each.source) for each in prompts]
        return super().begin(begun, max_new)

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        try:
            record = super().generate(prompts, max_new, stop)
        except BaseException:
            self.left = int(prompts[-1].tokens[-1])
            raise
        self.left = None
        return record


PLANTED = (
    Mutant(
        "batch-beyond-eight",
        "batch",
        "from the ninth row on tokens are those of other rows",
        drawing(OtherRows),
        BATCHES,
        TOLD,
    ),
    Mutant(
        "batch-beyond-sixteen",
        "batch",
        "from the seventeenth row on tokens are those of other rows",
        drawing(OtherRowsFrom16),
        BATCHES,
        TOLD,
    ),
    Mutant(
        "batch-last-row",
        "batch",
        "the last of eight or more rows takes the second-best token",
        drawing(SecondBestInLastRow),
        BATCHES,
        TOLD,
    ),
    Mutant(
        "batch-of-eight-exits-together",
        "batch",
        "eight rows or more exit together, five do not",
        session_factory(EightExitTogether),
        BATCHES,
        TOLD,
    ),
    Mutant(
        "batch-session-beyond-eight",
        "batch",
        "from the ninth row on a session shows the logits of its first",
        session_factory(ShowsOtherRows),
        BATCHES,
        TOLD,
    ),
    Mutant(
        "answers-where-scored",
        "answers",
        "in batches of 32 rows, by which answers are scored, half are wrong",
        drawing(WrongWhereScored),
        CLAIM,
        r"of the answers that this verdict reads, row \d+, position \d+",
        case="EMAD-F1",
    ),
    Mutant(
        "answers-other-rule",
        "answers",
        "thresholds are half a nat too high at calibrated points alone",
        decoder_factory(LooserWhereCalibrated),
        CLAIM,
        r"EMAD-F1 is not decided: .*the rule gives depth",
        case="EMAD-F1",
    ),
    Mutant(
        "stop-least-alone",
        "generation",
        "of several stop tokens the smallest id alone ends a row",
        decoder_factory(LeastStop),
        ENDINGS,
        ENDED,
    ),
    Mutant(
        "stop-greatest-alone",
        "generation",
        "of several stop tokens the largest id alone ends a row",
        decoder_factory(GreatestStop),
        ENDINGS,
        ENDED,
    ),
    Mutant(
        "stop-four-at-most",
        "generation",
        "at most four stop tokens end rows",
        decoder_factory(FourStops),
        ENDINGS,
        ENDED,
    ),
    Mutant(
        "stop-not-first",
        "generation",
        "the first new token ends no row",
        decoder_factory(FirstTokenNeverStops),
        ENDINGS,
        ENDED,
    ),
    Mutant(
        "stop-in-prompt",
        "generation",
        "a stop token in a prompt ends the request",
        decoder_factory(StopsInPrompts),
        ENDINGS,
        ENDED,
    ),
    Mutant(
        "stop-remembered",
        "generation",
        "stop tokens of earlier requests end later ones",
        decoder_factory(StopsRemembered),
        ENDINGS,
        ENDED,
    ),
    Mutant("stop-dropped", "generation", "stop tokens are not emitted", decoder_factory(StopDropped), ENDINGS, ENDED),
    Mutant(
        "generation-two-for-one",
        "generation",
        "two new tokens where one is asked for",
        decoder_factory(TwoForOne),
        ENDINGS,
        ENDED,
    ),
    Mutant(
        "prefix-by-length",
        "prompts",
        "K/V of an earlier prompt of the same length are used",
        remembering(len),
        PREFIXES,
        TOLD,
    ),
    Mutant(
        "prefix-by-opening",
        "prompts",
        "K/V of an earlier prompt of that length and first token are used",
        remembering(lambda head: (len(head), *head[:1].tolist())),
        PREFIXES,
        TOLD,
    ),
    Mutant(
        "prefix-by-end",
        "prompts",
        "K/V of an earlier prompt of that length and last token are used",
        remembering(lambda head: (len(head), *head[-1:].tolist())),
        PREFIXES,
        TOLD,
    ),
    Mutant(
        "prefix-unordered",
        "prompts",
        "K/V of an earlier prompt of the same tokens in any order are used",
        remembering(lambda head: tuple(sorted(head.tolist()))),
        PREFIXES,
        TOLD,
    ),
    Mutant(
        "prefix-by-address",
        "prompts",
        "K/V of an earlier prompt at the same address are used",
        remembering(lambda head: (len(head), head.__array_interface__["data"][0])),
        PREFIXES,
        TOLD,
    ),
    Mutant(
        "sessions-generate-takes-buffers",
        "sessions",
        "generate takes the buffers of an open session",
        decoder_factory(GeneratesInTheirBuffers),
        BETWEEN,
        TOLD,
    ),
    Mutant(
        "sessions-of-other-decoders",
        "sessions",
        "decoders of one process share their buffers",
        session_factory(SharesWithOthers),
        BETWEEN,
        TOLD,
    ),
    Mutant(
        "sessions-close-the-newest",
        "sessions",
        "closing a session frees the one opened last",
        decoder_factory(ClosesTheNewest),
        BETWEEN,
        TOLD,
    ),
    Mutant(
        "sessions-aborted-request",
        "sessions",
        "what an aborted request left goes into the next one",
        decoder_factory(LeavesWhatWasAborted),
        BETWEEN,
        TOLD,
    ),
)
