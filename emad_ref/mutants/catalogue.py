"""All planted decoders, by name."""

from __future__ import annotations

from collections.abc import Iterable

from emad_ref.errors import BadArgument
from emad_ref.mutants import (
    depths,
    drawing,
    fields,
    honest,
    keys,
    ledgers,
    meddling,
    pages,
    refusing,
    requests,
    sessions,
    speculating,
)
from emad_ref.mutants.mutant import Mutant

CATALOGUE: dict[str, Mutant] = {
    planted.name: planted
    for module in (
        honest,
        keys,
        depths,
        sessions,
        ledgers,
        drawing,
        speculating,
        refusing,
        meddling,
        fields,
        pages,
        requests,
    )
    for planted in module.PLANTED
}


def select_mutants(names: Iterable[str]) -> list[Mutant]:
    """Those of ``names``, in the catalogue's order.

    Raises:
        BadArgument: a name that is not there.
    """
    wanted = list(names)
    for name in wanted:
        if name not in CATALOGUE:
            raise BadArgument(
                "--emad-selfcheck",
                name,
                f"meant, all, kinds, or names of planted decoders: {', '.join(CATALOGUE)}",
                "write --emad-selfcheck=NAME,NAME, with the equals sign",
            )
    return [planted for planted in CATALOGUE.values() if planted.name in wanted]


def one_of_each_kind() -> list[Mutant]:
    """The first of each kind."""
    return list({planted.kind: planted for planted in reversed(CATALOGUE.values())}.values())[::-1]
