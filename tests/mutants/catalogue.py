"""All mutants, by name."""

from __future__ import annotations

from tests.decoders import honest_decoders
from tests.mutants import (
    cache_defects,
    decision_defects,
    environment_defects,
    pair_defects,
    pair_session_defects,
    request_defects,
)
from tests.mutants.mutant import HONEST, Mutant

CATALOGUE: dict[str, Mutant] = {
    mutant.name: mutant
    for mutant in (
        *HONEST,
        *honest_decoders.HONEST,
        *cache_defects.MUTANTS,
        *decision_defects.MUTANTS,
        *request_defects.MUTANTS,
        *pair_defects.MUTANTS,
        *pair_session_defects.MUTANTS,
        *environment_defects.MUTANTS,
    )
}
