"""Which tests of a run are asked at all: by claim, by pair, by budget. What is not asked is not missing, and told once.

``--emad-only`` chooses by claim: what else the suites hold, and tests marked with another claim, are left out on
request. Tests about a pair are asked where one was named, or where ours is meant (``emad_ref.evidence.pair.names``);
tests of an exit where one was brought. What is marked with a larger budget waits for it, unless it gates, was chosen,
or is about a pair that was named or an exit that was brought.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from emad_ref.evidence.study import BUDGETS
from emad_ref.report.unasked import ABOVE, LEFT_OUT, NO_EXIT, NO_PAIR
from emad_ref.verdict.choosing import OF_EXITS
from emad_ref.verdict.claims import Claim
from pytest_emad import installed
from pytest_emad.options import Settings

OF_EXIT = "emad_exit"  # the fixture that holds one
ABOUT_PAIR = frozenset({"emad_pair", "emad_pair_names"})  # the fixtures that know of one


def marker(item: pytest.Item) -> dict[str, Any]:
    """The nearest ``emad`` marker's arguments with their defaults."""
    nearest = item.get_closest_marker("emad")
    return {"claim": None, "budget": "smoke", "measures": False} | (dict(nearest.kwargs) if nearest else {})


def measures(item: pytest.Item) -> bool:
    """Whether ``item`` takes time or energy, and so needs the machine to itself."""
    return bool(marker(item)["measures"]) or installed.is_cost(item)


def judges(item: pytest.Item) -> bool:
    """Whether ``item`` has to do with us: one of our tests, or one that asks for a claim or a fixture of ours."""
    fixtures = getattr(item, "fixturenames", ())
    marked = installed.is_ours(item) or item.get_closest_marker("emad") is not None
    return marked or any(name.startswith("emad_") for name in fixtures)


def not_asked(item: pytest.Item, chosen: Settings, register: Mapping[str, Claim]) -> str:
    """Why ``item`` is not asked, in a word of ``report.missing``; "" where it is."""
    arguments, ours = marker(item), installed.is_ours(item)
    claim, of_pair = arguments["claim"], not ABOUT_PAIR.isdisjoint(getattr(item, "fixturenames", ()))
    if BUDGETS[arguments["budget"]].rank > chosen.budget.rank and not _asked_for(claim, of_pair, chosen, register):
        return ABOVE  # first: what belongs to a larger budget is no part of this run's proof either
    if chosen.only and claim not in chosen.only and (ours or claim is not None):
        return LEFT_OUT
    if ours and OF_EXIT in getattr(item, "fixturenames", ()) and chosen.study.exit is None:
        return NO_EXIT
    return NO_PAIR if ours and of_pair and chosen.pair is None else ""


def _asked_for(claim: str | None, of_pair: bool, chosen: Settings, register: Mapping[str, Claim]) -> bool:
    """Whether a claim is asked whatever it takes: it gates, or somebody wants to know."""
    if claim is None:
        return False
    wanted = claim in chosen.only or chosen.all_claims or (of_pair and chosen.pair_named)
    wanted = wanted or (chosen.study.exit is not None and claim.startswith(OF_EXITS))
    return wanted or register[claim].gates(chosen.gate_claims)
