"""What a check found, and how it keeps count while it looks.

A check refutes a decoder at the first complaint it can prove: one wrong number is enough, and everything after it is
a consequence. Absent is not zero: a check that had too few positions at which a defect would have shown says
inconclusive, never passed.

A *tie* is a difference that the tolerance excuses: the decoder took another token where the reference's best logits
lie within the tolerance, or another depth where a signal lies within it of its threshold. More than ``TIE_LIMIT`` of
them is no longer noise (METHODS, "Tolerances").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

from emad_ref.errors import EmadError

TIE_LIMIT = 0.01
NEEDED = 5  # discriminating positions below which a check has no power (DESIGN, "Four black-box checks")


@dataclass(frozen=True)
class Finding:
    """``passed`` None = inconclusive; ``n`` positions compared; ``ties`` differences excused among them."""

    check: str
    passed: bool | None
    detail: str
    n: int
    ties: int

    def require(self) -> None:
        """Go on unless refuted. Raises Refuted."""
        if self.passed is False:
            raise Refuted(self.detail)


class Refuted(EmadError):
    """A complaint that decides a check: ``Tally`` turns it into a failed Finding.

    Who cannot go on without what a check promised raises it out of the finding (``Finding.require``).
    """


@dataclass
class Tally:
    """Counts of one check in progress; as a context manager it ends the check at the first complaint."""

    check: str
    needed: int = NEEDED
    n: int = 0
    ties: int = 0
    discriminating: int = 0
    complaint: str | None = None
    notes: list[str] = field(default_factory=list)

    def require(self, holds: bool, complaint: str) -> None:
        """Go on if ``holds``, else end the check with ``complaint``."""
        if not holds:
            raise Refuted(complaint)

    def __enter__(self) -> Tally:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Refuted):
            self.complaint = str(error)
            return True
        return False  # a crash of the decoder, or of the lens, is not ours to interpret

    def finding(self) -> Finding:
        seen = f"{self.n} positions compared, {self.discriminating} discriminating, {self.ties} ties"
        if self.notes:
            seen += "; " + "; ".join(self.notes)
        if self.complaint is not None:
            return Finding(self.check, False, f"{self.complaint} ({seen})", self.n, self.ties)
        if self.ties > TIE_LIMIT * self.n:
            detail = f"more than {TIE_LIMIT:.0%} of positions are ties ({seen})"
            return Finding(self.check, False, detail, self.n, self.ties)
        if self.discriminating < self.needed:
            detail = f"too few positions at which a defect would show: {self.needed} needed ({seen})"
            return Finding(self.check, None, detail, self.n, self.ties)
        return Finding(self.check, True, seen, self.n, self.ties)
