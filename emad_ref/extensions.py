"""Extensions by other distributions: claims, corpora, tables, provenance, model families.

A distribution names an ``Extension`` in its metadata, and every command and suite of this project finds it::

    [project.entry-points."emad_ref.extensions"]
    mine = "mine.emad:EXTENSION"

    EXTENSION = Extension(
        register=Path(__file__).with_name("claims.toml"),
        questions={"MY-1": "mine.questions.my_1"},          # a module with QUESTION, a pytest_emad.claims.base.Question
        corpora={"mine:logs": "mine.text:documents"},       # documents(split, seed, data) → texts
        tables={"tokens by layer": "mine.tables:by_layer"}, # by_layer(evidence) → Attachments
        provenance="mine.emad:facts",                       # facts() → built-in values
        families={"my_decoder": "mine.family:FAMILY"},      # models.families.ModelFamily, by the config's model_type
    )

Parts are named, not imported, so that finding an extension loads neither torch nor SciPy. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.errors import BadArgument

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "emad_ref.extensions"
PARTS = ("questions", "corpora", "tables", "families")


@dataclass(frozen=True)
class Extension:
    """``register``: a TOML file of claims. The others map added names to modules, or ``module:attribute``.

    Raises:
        BadArgument: a question without a row to decide, or a missing file.
    """

    register: Path | None = None
    questions: Mapping[str, str] = field(default_factory=dict)
    corpora: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    provenance: str | None = None
    families: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.register is not None and not self.register.is_file():
            raise BadArgument("register", str(self.register), "an existing TOML file", "ship it with the package")
        if self.questions and self.register is None:
            raise BadArgument("questions", sorted(self.questions), "rows of a register", "name the TOML file with them")


@cache
def load_installed_extensions() -> dict[str, Extension]:
    """Every installed extension by the name of its entry point.

    Raises:
        BadArgument: one that cannot be imported, is no ``Extension``, or adds the same name as another.
    """
    from importlib.metadata import entry_points  # as slow as the whole of `emad --help`, which needs no extension

    found = {
        point.name: _load_extension(point) for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)
    }
    for part in PARTS:
        owners: dict[str, str] = {}
        for name, extension in found.items():
            for added in getattr(extension, part):
                if added in owners:
                    where = f"{GROUP}: {name}: {part}"
                    raise BadArgument(where, added, "a name of its own", f"{owners[added]} adds it too; remove one")
                owners[added] = name
    return found


def added_part_import_paths(part: str) -> dict[str, str]:
    """Name → module, or ``module:attribute``, of each ``part`` (one of ``PARTS``) that an extension adds."""
    return {
        name: place
        for extension in load_installed_extensions().values()
        for name, place in getattr(extension, part).items()
    }


def import_module_or_attribute(place: str, where: str) -> Any:
    """The module or attribute that ``place`` names.

    Raises:
        BadArgument: it is missing; ``where`` names the source of the name.
    """
    module, _, attribute = place.partition(":")
    try:
        found = import_module(module)
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:
        raise BadArgument(where, place, "a module, or module:attribute", str(error)) from error


def list_claim_register_paths() -> list[Path]:
    """Paths of the claim registers (TOML) of all extensions."""
    return [extension.register for extension in load_installed_extensions().values() if extension.register is not None]


def collect_extension_reported_provenance() -> dict[str, Any]:
    """Provenance that each extension reports, by the extension's name."""
    facts: dict[str, Any] = {}
    for name, extension in load_installed_extensions().items():
        if extension.provenance is not None:
            facts[name] = import_module_or_attribute(extension.provenance, f"{GROUP}: {name}: provenance")()
    return facts


def load_added_part(part: str, name: str) -> Any:
    """The extension's object ``name`` of ``added_part_import_paths(part)``.

    Raises as ``import_module_or_attribute``.
    """
    return import_module_or_attribute(added_part_import_paths(part)[name], f"{GROUP}: {part}: {name}")


def _load_extension(point: EntryPoint) -> Extension:
    try:
        extension = point.load()
    except (ImportError, AttributeError) as error:
        remedy = f"uninstall {point.dist.name if point.dist else 'it'} or mend it: {error}"
        raise BadArgument(f"{GROUP}: {point.name}", point.value, "an importable Extension", remedy) from error
    if not isinstance(extension, Extension):
        kind = type(extension).__name__
        raise BadArgument(f"{GROUP}: {point.name}", kind, "an emad_ref.extensions.Extension", f"see {point.value}")
    return extension
