"""All mutants, by name: the catalogue of ``--emad-selfcheck``."""

from __future__ import annotations

from collections.abc import Iterable

from emad_ref.errors import BadArgument
from pytest_emad.mutants import cache_defects, decision_defects, environment_defects, request_defects
from pytest_emad.mutants.mutant import HONEST, Mutant

CATALOGUE: dict[str, Mutant] = {
    mutant.name: mutant
    for mutant in (
        *HONEST,
        *cache_defects.MUTANTS,
        *decision_defects.MUTANTS,
        *request_defects.MUTANTS,
        *environment_defects.MUTANTS,
    )
}


def select_mutants(names: Iterable[str]) -> list[Mutant]:
    """The mutants of ``names``, in the catalogue's order.

    Raises:
        BadArgument: an unknown name.
    """
    wanted = list(names)
    for name in wanted:
        if name not in CATALOGUE:
            raise BadArgument(
                "--emad-selfcheck", name, f"meant, all, kinds, or names of planted decoders: {', '.join(CATALOGUE)}",
                "write --emad-selfcheck=NAME,NAME, with the equals sign",
            )  # fmt: skip
    return [mutant for mutant in CATALOGUE.values() if mutant.name in wanted]


def select_one_of_each_kind() -> list[Mutant]:
    """The first mutant of each kind."""
    return list({mutant.kind: mutant for mutant in reversed(CATALOGUE.values())}.values())[::-1]
