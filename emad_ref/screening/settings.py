"""What a screening is asked for, and how much of everything it reads: counted in documents, never in seconds.

One seed reads the same text on every machine, whatever else runs there. How long that takes here is predicted before it
starts (``screening.duration``), and nothing is cut to keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emad_ref.errors import BadArgument
from emad_ref.text.documents import DEFAULT_CORPUS

RISE_LEVELS = (0.001, 0.01, 0.05)  # rises of perplexity that tables are about
DOCUMENTS = 300
SETTLED_DOCUMENTS = 300  # documents whose lens, gate and drafts are fitted in as many steps as they settle in
WINDOWS_PER_DOCUMENT = 2  # windows to fit on for each one to choose or to judge on


@dataclass(frozen=True)
class ScreeningSettings:
    """``corpus``, ``data``: text and the folder it lies in. ``documents``: to choose on, and as many each to certify
    and to judge on; a screening takes about as long as it has documents.

    ``rise``: of perplexity that a recommendation may have at most, its upper bound. ``seed``: of what is held out and
    resampled.

    Raises:
        BadArgument: fewer than two documents, a rise that is no fraction in 0–1.
    """

    corpus: str = DEFAULT_CORPUS
    data: Path | None = None
    documents: int = DOCUMENTS
    rise: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.documents < 2:
            raise BadArgument("documents", self.documents, "at least 2", "one has no spread")
        if not 0 < self.rise < 1:
            raise BadArgument("rise", self.rise, "a fraction in 0–1, both excluded", "0.01 is 1 %")

    def part(self, whole: int) -> int:
        """Of ``whole``, which ``SETTLED_DOCUMENTS`` documents are given: in proportion on fewer, and no more on
        more."""
        return max(1, round(whole * min(1.0, self.documents / SETTLED_DOCUMENTS)))
