"""Extensions: what other distributions add, found by entry points. The reference takes corpora and model families.

A distribution names an ``Extension`` in its metadata, and this project finds it::

    [project.entry-points."emad_ref.extensions"]
    mine = "mine.emad:EXTENSION"

    EXTENSION = Extension(
        corpora={"mine:logs": "mine.text:documents"},   # documents(split, seed, data) → texts
        families={"my_decoder": "mine.family:FAMILY"},  # models.families.ModelFamily, by the config's model_type
    )

``ExtensionGroup`` is the mechanism: it finds the extensions of one group of entry points and loads their parts. A
package above makes a group of its own for other parts. Parts are named, not imported, so that finding an extension
loads neither torch nor SciPy. This module does not know what a part is used for. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from emad_ref.errors import BadArgument

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

E = TypeVar("E")


@dataclass(frozen=True)
class ExtensionGroup(Generic[E]):
    """The installed extensions of one group of entry points.

    Attributes
    ----------
    name : str
        Name of the group.
    kind : type
        The class of its extensions.
    parts : tuple of str
        Attributes of ``kind`` that map an added name to its place: ``module``, or ``module:attribute``. No two
        extensions may add the same name.
    """

    name: str
    kind: type[E]
    parts: tuple[str, ...]

    @cached_property
    def installed(self) -> dict[str, E]:
        """Every installed extension by the name of its entry point.

        Raises:
            BadArgument: one that cannot be imported, is not of ``kind``, or adds the same name as another.
        """
        from importlib.metadata import entry_points  # as slow as the whole of `emad --help`, which needs no extension

        found = {
            point.name: self._load(point)
            for point in sorted(entry_points(group=self.name), key=lambda point: point.name)
        }
        for part in self.parts:
            owners: dict[str, str] = {}
            for name, extension in found.items():
                for added in getattr(extension, part):
                    if added in owners:
                        where = f"{self.name}: {name}: {part}"
                        raise BadArgument(where, added, "a name of its own", f"{owners[added]} adds it too; remove one")
                    owners[added] = name
        return found

    def places(self, part: str) -> dict[str, str]:
        """Name → ``module``, or ``module:attribute``, of each ``part`` (one of ``parts``) that an extension adds."""
        return {
            name: place for extension in self.installed.values() for name, place in getattr(extension, part).items()
        }

    def load_part(self, part: str, name: str) -> Any:
        """The object at the place of ``name`` in ``places(part)``. Raises as ``import_module_or_attribute``."""
        return import_module_or_attribute(self.places(part)[name], f"{self.name}: {part}: {name}")

    def _load(self, point: EntryPoint) -> E:
        where, kind = f"{self.name}: {point.name}", f"{self.kind.__module__}.{self.kind.__name__}"
        try:
            extension = point.load()
        except (ImportError, AttributeError, TypeError) as error:  # TypeError: an argument that ``kind`` does not take
            remedy = f"uninstall {point.dist.name if point.dist else 'it'} or mend it: {error}"
            raise BadArgument(where, point.value, f"an importable {kind}", remedy) from error
        if not isinstance(extension, self.kind):
            raise BadArgument(where, type(extension).__name__, f"an object of {kind}", f"see {point.value}")
        return extension


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


@dataclass(frozen=True)
class Extension:
    """Corpora and model families that a distribution adds: each maps names to ``module:attribute``."""

    corpora: Mapping[str, str] = field(default_factory=dict)
    families: Mapping[str, str] = field(default_factory=dict)


EXTENSIONS = ExtensionGroup("emad_ref.extensions", Extension, ("corpora", "families"))
