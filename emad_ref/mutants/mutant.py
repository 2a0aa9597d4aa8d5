"""A mutant: a decoder with one known defect, and the check that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emad_ref.errors import EmadError
from emad_ref.protocol import Decoder, Request

MutantFactory = Callable[[Request], Decoder]

# what catches a mutant besides a shipped test
RUN = "the run as a whole"
VERIFY = "emad verify"


class NotPlantable(EmadError):
    """The defect makes no sense on this model; the message says why."""


@dataclass(frozen=True)
class Mutant:
    """One row of the catalogue.

    ``does``: what is wrong, in a sentence. ``make``: makes the decoder, or raises NotPlantable.

    ``test``: the shipped test that must catch it, by file and function below ``suites``; ``case``: which parameters.
    ``says``: a pattern of the complaint; "" for an honest decoder, whose ``test`` lists folders that it must pass.
    ``by``: what catches it instead of the test, RUN or VERIFY. ``bystander``: the name of a plugin that interferes with
    the run instead of the decoder (``pytest_emad.mutants``).
    """

    name: str
    kind: str
    does: str
    make: MutantFactory
    test: str
    says: str = ""
    case: str = ""
    by: str = ""
    bystander: str = ""

    @property
    def honest(self) -> bool:
        return not self.says

    @property
    def meant(self) -> str:
        """The name of the shipped test whose complaint counts, or RUN or VERIFY."""
        return self.by or f"suites/{self.test}"


def group(kind: str, test: str, says: str, *rows: tuple[str, str, MutantFactory]) -> tuple[Mutant, ...]:
    """Mutants that the same test must catch in the same words: (name, does, make) of each."""
    return tuple(Mutant(name, kind, does, make, test, says) for name, does, make in rows)
