"""Build hooks: what a wheel carries beside its packages, and the long description that an index page shows.

A static ``force-include`` would also act on editable installs and leave stale copies there; symbolic links drop
``golden/`` without a word.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SHIPPED = {"suites": "pytest_emad/suites", "golden": "pytest_emad/golden"}
PAGES = ("*.md", "results.ipynb")  # of docs/: messages and help name them
RELATIVE_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")
WHERE_PAGES_LIE = """
Files named in brackets are in the source distribution. The wheel has those of `docs/` as `pytest_emad/docs/`, and
`emad --help` prints where.
"""


class ShipSuites(BuildHookInterface):  # type: ignore[type-arg]  # the parameter is hatchling's own, of no use here
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add suites, golden data and pages unless this is an editable build; hatchling refuses an absent folder."""
        if version != "editable":
            pages = [page.name for pattern in PAGES for page in Path(self.root, "docs").glob(pattern)]
            build_data["force_include"].update(SHIPPED | {f"docs/{page}": f"pytest_emad/docs/{page}" for page in pages})


class LongDescription(MetadataHookInterface):
    """README as an index shows it: the project has no URL, so a link to a file would lead nowhere."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``: each relative link becomes its text and path; a last paragraph says where the files are."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = RELATIVE_LINK.sub(r"\1 (\2)", text) + WHERE_PAGES_LIE
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
