"""Extensions of the judge: claims, tables and provenance that other distributions add, found by entry points.

A distribution names a ``JudgeExtension`` in its metadata, and every command and suite finds it::

    [project.entry-points."pytest_emad.extensions"]
    mine = "mine.judge:EXTENSION"

    EXTENSION = JudgeExtension(
        register=Path(__file__).with_name("claims.toml"),
        questions={"MY-1": "mine.questions.my_1"},          # a module with QUESTION, a claims.base.Question
        tables={"tokens by layer": "mine.tables:by_layer"}, # by_layer(evidence) → Attachments
        provenance="mine.judge:facts",                      # facts() → built-in values
    )

Corpora and model families are those of ``emad_ref.extensions``; a distribution may name both. This module knows no
claim and imports no part. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument
from emad_ref.extensions import ExtensionGroup, import_module_or_attribute


@dataclass(frozen=True)
class JudgeExtension:
    """What a distribution adds to the judge.

    Attributes
    ----------
    register : Path, optional
        A TOML file of claims.
    questions : mapping of str to str
        Claim id → module with its ``QUESTION``.
    tables : mapping of str to str
        Title → ``module:attribute`` of a function from measurements to ``Attachments``.
    provenance : str, optional
        ``module:attribute`` of a function that returns facts for every report.

    Raises
    ------
    BadArgument
        A question without a row to decide, or a missing file.
    """

    register: Path | None = None
    questions: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    provenance: str | None = None

    def __post_init__(self) -> None:
        if self.register is not None and not self.register.is_file():
            raise BadArgument("register", str(self.register), "an existing TOML file", "ship it with the package")
        if self.questions and self.register is None:
            raise BadArgument("questions", sorted(self.questions), "rows of a register", "name the TOML file with them")


JUDGE_EXTENSIONS = ExtensionGroup("pytest_emad.extensions", JudgeExtension, ("questions", "tables"))


def list_claim_register_paths() -> list[Path]:
    """Paths of the claim registers (TOML) of all extensions."""
    return [extension.register for extension in JUDGE_EXTENSIONS.installed.values() if extension.register is not None]


def collect_extension_reported_provenance() -> dict[str, Any]:
    """Provenance that each extension reports, by the extension's name."""
    return {
        name: import_module_or_attribute(extension.provenance, f"{JUDGE_EXTENSIONS.name}: {name}: provenance")()
        for name, extension in JUDGE_EXTENSIONS.installed.items()
        if extension.provenance is not None
    }
