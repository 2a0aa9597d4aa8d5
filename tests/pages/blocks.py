"""Fenced blocks of a page, and the HTML comment before each that says how it is run.

A block in ``sh`` or ``python`` runs in a folder of its page, unless its comment says otherwise:

run: exit 1              it ends with that status
run: slow                only with --run-slow: suites, minutes
run: by PATH             the test at that path runs it; the path must exist
run: checked             it needs something absent (a hub, an accelerator, an hour): the parsers of its commands check
                         options and arguments
main-job, tests          README's own commands, which ``.ci/run`` calls
file: PATH               written to the folder, not run
output                   what the block before it prints
output: MODEL [on CORPUS] the end of a suite run: verdicts are compared with the record, numbers depend on the machine
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?^```(?P<language>[\w{}]*)\n(?P<text>.*?)\n?^```$", re.DOTALL | re.MULTILINE
)
RUN = ("sh", "python")


@dataclass(frozen=True)
class Block:
    """``line`` counts from 1; ``span``: the position of the text in the page."""

    language: str
    text: str
    mark: str
    line: int
    span: tuple[int, int]

    @property
    def words(self) -> list[str]:
        """Return the items after ``run:``, word by word."""
        return [word.strip() for word in self.mark.removeprefix("run:").split(",")] if self.mark[:4] == "run:" else []

    @property
    def runs(self) -> bool:
        """Return whether the tests run the block."""
        here = not self.mark or bool(self.words)
        return self.language in RUN and here and not self.by and "checked" not in self.words

    @property
    def slow(self) -> bool:
        return "slow" in self.words

    @property
    def by(self) -> str:
        """Return the test that runs it instead, or ""."""
        return next((word.removeprefix("by ") for word in self.words if word.startswith("by ")), "")

    @property
    def status(self) -> int:
        return next((int(word.removeprefix("exit ")) for word in self.words if word.startswith("exit ")), 0)


def pages() -> list[Path]:
    """Return README, CONTRIBUTING and every page of docs/; none in an installed package."""
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in named if page.is_file()]


def blocks(page: str) -> list[Block]:
    return [
        Block(
            found["language"],
            found["text"],
            found["mark"] or "",
            page.count("\n", 0, found.start("text")),
            found.span("text"),
        )
        for found in FENCE.finditer(page)
    ]


def shown(page: str) -> list[tuple[Block, Block]]:
    """Yield each block that is followed by its output, and that output."""
    listed = blocks(page)
    return [(before, after) for before, after in pairwise(listed) if after.mark[:6] == "output"]
