"""One planted decoder: what it does wrong, and who is there to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emad_ref.errors import EmadError
from emad_ref.protocol import Decoder, Request

MutantFactory = Callable[[Request], Decoder]

# what notices besides a shipped test
RUN = "the run as a whole"
VERIFY = "emad verify"


class NotPlantable(EmadError):
    """The defect makes no sense on this model; the message says why."""


@dataclass(frozen=True)
class Mutant:
    """``does``: what is wrong, in a sentence. ``make``: the decoder; NotPlantable where this model has no room for it.

    ``test``: the shipped test that is there for it, by file and function below ``suites``; ``case``: of its parameters
    the one meant. ``says``: a pattern in the complaint, "" for an honest decoder, of which nobody may complain: its
    ``test`` is a folder or several. ``by``: who complains, RUN or VERIFY; by default that test.
    ``bystander``: not the decoder does it but what stands around it, by name (``pytest_emad.mutants``).
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
        """Whose complaint counts: the name of a shipped test, RUN or VERIFY."""
        return self.by or f"suites/{self.test}"
