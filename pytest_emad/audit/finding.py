"""Result of a check (``Finding``), and its counts while it runs (``Tally``).

A check refutes a decoder at the first proven complaint: one wrong number is enough. With too few positions that could
show a defect it is inconclusive, never passed.

A *tie* is a difference that the tolerance excuses: another token if the reference's best logits lie within twice the
tolerance, each off by it, or another depth if a signal lies within it of its threshold. A share above ``TIE_LIMIT`` is
not noise. A decoder that declares more noise than its dtype's tolerance may decide differently at about half of the
positions with a possible tie.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from traceback import walk_tb
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from emad_ref.errors import EmadError
from emad_ref.record import Floats

TIE_LIMIT = 0.01
MIN_DISCRIMINATING = 5  # discriminating positions below which a check has no power


@dataclass(frozen=True)
class FirstDifference:
    """The first wrong greedy token: ``emitted`` after ``position`` of the row, where ``expected`` is the argmax.

    ``gap_nats``: by how much ``expected`` is likelier, the same in logits and in log-probabilities.
    """

    position: int
    emitted: int
    expected: int
    gap_nats: float

    @classmethod
    def from_logits(cls, position: int, one: int, other: int, logits: Floats) -> FirstDifference:
        """The difference of two tokens by ``logits`` [V] after ``position``: the likelier one is the expected one."""
        emitted, expected = sorted((one, other), key=lambda token: float(logits[token]))
        return cls(position, emitted, expected, float(logits[expected] - logits[emitted]))

    def __str__(self) -> str:
        tokens = f"token {self.emitted} where {self.expected} leads by {self.gap_nats:.2g} nats"
        return f"first difference: after position {self.position}, {tokens}"


@dataclass(frozen=True)
class LikelyCause:
    """A guess at the cause of a complaint, for its reader; no check depends on it.

    ``kind``: equal for failures of one cause. ``guess``: what it looks like. ``remedy``: what to do.
    """

    kind: str
    guess: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.guess}: {self.remedy}"


def add_likely_cause(complaint: str, cause: LikelyCause | None) -> str:
    """``complaint``, followed by its likely cause, if there is one."""
    return complaint if cause is None else f"{complaint}; {cause}"


@dataclass(frozen=True)
class Finding:
    """``passed`` None = inconclusive; ``n`` positions compared; ``ties`` differences excused among them.

    ``live``: counts of the decoder's answers for this check (``Tally.live``).
    ``sample``: the shortest history on which a failed check fails (``Trajectory.reproduction_json``), if it has one.
    ``complaint``: of a failed check, ``detail`` without the counts; "" if it has none. ``cause``: the place in the code
    that made the complaint, ``module:line``, equal for complaints of one requirement; "" unknown. ``difference`` and
    ``likely_cause``: of the complaint, if it has them.
    """

    check: str
    passed: bool | None
    detail: str
    n: int
    ties: int
    live: Mapping[str, int] = field(default_factory=dict, compare=False)
    sample: Mapping[str, Any] | None = None
    complaint: str = field(default="", compare=False)
    cause: str = field(default="", compare=False)
    difference: FirstDifference | None = field(default=None, compare=False)
    likely_cause: LikelyCause | None = field(default=None, compare=False)

    def require(self) -> None:
        """Raise AuditRefutedError if the check failed."""
        if self.passed is False:
            raise AuditRefutedError(self.detail, self)


def tie_share_limit_and_tolerance(tolerance: float, declared: float) -> tuple[float, float]:
    """(largest share of tokens that may be ties, tolerance) of two runs compared to their first difference.

    Noise that is ``declared`` beyond ``tolerance`` replaces it, and every row may then diverge at a tie.
    """
    return 1.0 if declared > tolerance else TIE_LIMIT, max(tolerance, declared)


class AuditRefutedError(EmadError):
    """A complaint that decides a check: ``Tally`` turns it into a failed Finding.

    ``Finding.require`` raises it with the finding, for code that depends on a check. ``step``: number of the step of a
    history that it is about; 0: unknown. ``difference`` and ``likely_cause``: of the complaint, of ``finding``, or of
    the one that it was raised from. The message ends with ``likely_cause``, as a finding's detail does.
    """

    def __init__(
        self,
        complaint: str,
        finding: Finding | None = None,
        step: int = 0,
        difference: FirstDifference | None = None,
        likely_cause: LikelyCause | None = None,
    ):
        self.finding, self.step = finding, step
        self.difference, self.likely_cause = difference, likely_cause
        if finding is not None:
            self.difference, self.likely_cause = finding.difference, finding.likely_cause
        super().__init__(add_likely_cause(complaint, likely_cause))

    @property
    def chain(self) -> list[AuditRefutedError]:
        """This complaint, and those that it was raised from, the first one last."""
        before = self.__cause__
        return [self, *(before.chain if isinstance(before, AuditRefutedError) else ())]


def place_of_complaint(error: BaseException) -> str:
    """``module:line`` of the requirement behind ``error``, which ``prefix_raised_complaints`` may have raised anew."""
    if isinstance(error, AuditRefutedError):
        error = next(each for each in reversed(error.chain) if each.__traceback__ is not None)
    frames = [(frame.f_globals["__name__"], line) for frame, line in walk_tb(error.__traceback__)]
    outside = [(module, line) for module, line in frames if module != __name__]
    return f"{outside[-1][0]}:{outside[-1][1]}" if outside else ""


def require_shape(what: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raise AuditRefutedError unless ``array``, named ``what``, has ``shape``."""
    if array.shape != shape:
        raise AuditRefutedError(
            f"{what} has shape {array.shape}, but {list(shape)} was expected; NaN stands for what was not read"
        )


@contextmanager
def prefix_raised_complaints(prefix: str, step: int = 0) -> Iterator[None]:
    """Put ``prefix`` before a complaint that is raised inside the block, which is about ``step`` of a history."""
    try:
        yield
    except AuditRefutedError as complaint:
        raise AuditRefutedError(f"{prefix}{complaint}", step=complaint.step or step) from complaint


@dataclass
class Tally:
    """Counts of one check in progress; as a context manager it ends the check at the first complaint.

    ``live`` counts the decoder's answers, by the names of ``report.tiers``. ``window``: positions of the model, 0 if
    unknown.
    """

    check: str
    needed: int = MIN_DISCRIMINATING
    excuses_ties: bool = False  # excuse every tie if positions are too few for a share
    n: int = 0
    ties: int = 0
    discriminating: int = 0
    near: int = 0  # positions with a possible tie
    noisy: bool = False
    complaint: str | None = None
    cause: str = ""  # of the complaint, as the next two
    difference: FirstDifference | None = None
    likely_cause: LikelyCause | None = None
    sample: Mapping[str, Any] | None = None  # of the complaint
    notes: list[str] = field(default_factory=list)
    window: int = 0
    live: Counter[str] = field(default_factory=Counter)
    roundings: list[float] = field(default_factory=list)  # tolerances at positions with larger measured rounding

    def count_new_tokens(self, emitted: Iterable[Sized], *, drawn: bool = False) -> None:
        """Count the rows ``emitted`` in one answer. ``drawn``: the tokens are samples."""
        new = sum(map(len, emitted))
        self.live["positions"] += new
        self.live["samples"] += new if drawn else 0

    def tolerance_at_least_noise(self, tolerance: float, declared: float) -> float:
        """``tolerance``, raised to the noise that the decoder has ``declared``."""
        self.noisy = declared > tolerance
        return max(tolerance, declared)

    @property
    def max_ties(self) -> float:
        """Largest number of ties from noise: four standard deviations above half of the possible ones."""
        room = self.near / 2 + 2 * math.sqrt(self.near) if self.noisy else 0.0
        return math.inf if self.excuses_ties else TIE_LIMIT * self.n + room

    def require(self, condition: bool, complaint: str) -> None:
        """End the check with ``complaint`` unless ``condition`` holds."""
        if not condition:
            raise AuditRefutedError(complaint)

    def __enter__(self) -> Tally:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, AuditRefutedError):
            self.complaint, self.cause = str(error), place_of_complaint(error)
            self.difference = next((each.difference for each in error.chain if each.difference), None)
            self.likely_cause = next((each.likely_cause for each in error.chain if each.likely_cause), None)
            return True
        return False  # a crash of the decoder or of the lens propagates

    def to_finding(self) -> Finding:
        return replace(self._outcome(), live={name: count for name, count in self.live.items() if count})

    def refuted_finding(self, detail: str, complaint: str) -> Finding:
        """The failed finding with ``complaint``, and what is known of its cause."""
        about = self.sample, complaint, self.cause, self.difference, self.likely_cause
        return Finding(self.check, False, detail, self.n, self.ties, {}, *about)

    def _outcome(self) -> Finding:
        counts = f"{self.n} positions compared, {self.discriminating} discriminating, {self.ties} ties"
        if self.roundings:
            counts += f"; rounding allows up to {max(self.roundings):.2g} at {len(self.roundings)} of the positions"
        if self.notes:
            counts += "; " + "; ".join(self.notes)
        if self.complaint is not None:
            detail = f"{self.complaint} ({counts})"
            return self.refuted_finding(detail, self.complaint)
        if self.ties > self.max_ties:
            where = f" and half of the {self.near} where one was possible" if self.noisy else ""
            detail = f"more than {TIE_LIMIT:.0%} of positions{where} are ties ({counts})"
            return Finding(self.check, False, detail, self.n, self.ties)
        if self.discriminating < self.needed:
            remedy = "judge a model whose answers vary more, e.g. emad-nano"
            detail = f"too few positions at which a defect would show: {self.needed} needed; {remedy} ({counts})"
            return Finding(self.check, None, detail, self.n, self.ties)
        return Finding(self.check, True, counts, self.n, self.ties)
