"""All mutants, by name."""

from __future__ import annotations

from tests.mutants import cache_defects, decision_defects, environment_defects, request_defects
from tests.mutants.mutant import HONEST, Mutant

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
