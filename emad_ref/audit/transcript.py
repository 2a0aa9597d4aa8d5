"""A conversation with one session, written down row by row, with the protocol's small print checked on the way.

The small print: shapes; ``length`` grows by what was fed; a forced depth is the depth taken; under the monotone
schedule ``cap`` is the last depth; what a call returned stays as it was, whatever is called afterwards. The transcript
keeps what the decoder said for the lens to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np

from emad_ref.audit.finding import Tally
from emad_ref.audit.trajectory import Trajectory
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, InadmissibleDepth, Prompt, Step
from emad_ref.record import Ints

WIDEST = 3  # tokens of a feed


class Transcript:
    """An open session, closed by leaving the context; ``rows`` are the indices of the prompts it still holds."""

    def __init__(
        self,
        tally: Tally,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        point: OperatingPoint,
        names: Sequence[str] | None = None,
    ):
        self.tally, self.point = tally, point
        self.names = names or [f"row {row}" for row in range(len(prompts))]
        self.rows = list(range(len(prompts)))
        self.tokens = [[int(token) for token in prompt.tokens] for prompt in prompts]
        self.first = [len(prompt.tokens) - 1 for prompt in prompts]
        self.steps: list[list[tuple[int, np.ndarray, np.ndarray, bool, str]]] = [[] for _ in prompts]
        self.stage = ""  # what has happened to the session, for complaints about what is fed from here on
        self._returned: list[tuple[str, np.ndarray, np.ndarray]] = []  # (what, as returned, a copy made at once)
        self._calls = 0
        self.session, step = decoder.start(prompts)
        self._write(step, 1, None)

    def __enter__(self) -> Transcript:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()

    def feed(self, tokens: Ints, depth: Ints | None = None) -> None:
        """Feed ``tokens`` [rows, n] at ``depth`` [rows, n], or at depths of the rule's choosing."""
        for row, fed in zip(self.rows, tokens, strict=True):
            self.tokens[row].extend(int(token) for token in fed)
        try:
            step = self.session.feed(tokens, depth)
        except InadmissibleDepth as refusal:
            self.tally.require(False, f"admissible depth {np.asarray(depth).tolist()} refused: {refusal}")
            raise
        self._write(step, tokens.shape[1], depth)

    def refuse(self, tokens: Ints, depth: Ints) -> None:
        """Require that inadmissible ``depth`` [rows, n] is refused and the state stays as it was."""
        length, cap = self.session.length.copy(), self.session.cap.copy()
        try:
            self.session.feed(tokens, depth)
        except InadmissibleDepth:
            same = np.array_equal(self.session.length, length) and np.array_equal(self.session.cap, cap)
            self.tally.require(same, f"depth {depth.tolist()} was refused, but length or cap changed")
        else:
            self.tally.require(False, f"depth {depth.tolist()} accepted under cap {cap.tolist()}")

    def rollback(self, length: Ints) -> None:
        """Roll back to ``length`` [rows], and require the lengths and caps of that time."""
        self.session.rollback(length)
        for row, held in zip(self.rows, length, strict=True):
            del self.tokens[row][held:], self.steps[row][held - self.first[row] :]
        self._require_state("after rollback")

    def drop(self, *indices: int) -> None:
        """Drop the rows at ``indices`` among the present ones, in one call and in that order."""
        self.session.drop(np.array(indices))
        self.rows = [row for index, row in enumerate(self.rows) if index not in indices]
        self._require_state("after drop")

    def trajectories(self) -> list[Trajectory]:
        """What every row did, dropped ones included, after requiring that no array returned so far has changed."""
        self.require_kept()
        return [self._trajectory(row) for row in range(len(self.tokens))]

    def require_kept(self) -> None:
        """Arrays that the session returned are their caller's: no later call may change them."""
        for what, returned, copied in self._returned:
            same = np.array_equal(returned, copied, equal_nan=True)
            self.tally.require(same, f"{what} has changed since it was returned: it is a view of state, or reused")

    def _trajectory(self, row: int) -> Trajectory:
        depth, signal, logits, chosen, stage = zip(*self.steps[row], strict=True)
        tokens = np.array(self.tokens[row], dtype=np.int64)
        return Trajectory(
            self.names[row],
            tokens,
            self.first[row],
            np.array(depth),
            np.array(signal),
            np.array(chosen),
            np.array(logits),
            stage,
        )

    def _write(self, step: Step, n: int, depth: Ints | None) -> None:
        rows, probes = len(self.rows), len(self.point.probes)
        self._calls += 1
        kept = {part: getattr(step, part) for part in ("logits", "depth", "signal")}
        step = Step(**{part: self._keep(f"step.{part} of call {self._calls}", array) for part, array in kept.items()})
        for name, shape, expected in (
            ("logits", step.logits.shape[:2], (rows, n)),
            ("depth", step.depth.shape, (rows, n)),
            ("signal", step.signal.shape, (rows, n, probes)),
        ):
            self.tally.require(
                shape == expected, f"step.{name} has shape {shape}, but {rows} rows × {n} tokens were fed"
            )
        if depth is not None:
            obeyed = np.array_equal(step.depth, depth)
            self.tally.require(
                obeyed, f"depth {np.asarray(depth).tolist()} was forced, but {step.depth.tolist()} taken"
            )
        for index, row in enumerate(self.rows):
            for at in range(n):
                said = (int(step.depth[index, at]), step.signal[index, at], step.logits[index, at])
                self.steps[row].append((*said, depth is None, self.stage))
        self._require_state("after a step")

    def _keep(self, what: str, returned: np.ndarray) -> np.ndarray:
        """Remember ``returned`` beside a copy made at once, and give the copy."""
        copied = np.array(returned)
        self._returned.append((what, returned, copied))
        return copied

    def _require_state(self, when: str) -> None:
        for part in ("length", "cap"):
            self._keep(f"session.{part} read {when} (call {self._calls})", getattr(self.session, part))
        length = [len(self.tokens[row]) for row in self.rows]
        held = self.session.length.tolist()
        self.tally.require(held == length, f"{when}: length {held}, but the rows hold {length} tokens")
        last = [self.steps[row][-1][0] for row in self.rows]
        cap = last if self.point.schedule == "monotone" else [self.point.ceiling] * len(last)
        held = self.session.cap.tolist()
        self.tally.require(held == cap, f"{when}: cap {held}, but the rows' last tokens allow {cap}")


def slices(tokens: int, widest: int) -> list[slice]:
    """``tokens`` columns cut into feeds of one token and of the widest allowed (``WIDEST`` at most), in turn."""
    cut: list[slice] = []
    start = 0
    while start < tokens:
        width = 1 if len(cut) % 2 == 0 else min(widest, WIDEST)
        cut.append(slice(start, min(start + width, tokens)))
        start += width
    return cut
