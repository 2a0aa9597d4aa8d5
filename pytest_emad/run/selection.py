"""Selection and order of the collected tests.

``--emad-only`` selects by claim. Tests about a pair or an exit need one. Tests with a larger budget are deselected
unless they gate or the user named them. Within each model gates that measure no time run first. The others follow by
folder, correctness before quality and quality before time: timing a decoder with a wrong K/V cache is useless. Tests
of other plugins keep their places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.report.deselection import ABOVE_BUDGET, LEFT_OUT, NO_EXIT, NO_PAIR, NOT_OF_TIER
from pytest_emad.report.known_gaps import require_tests_of_run
from pytest_emad.report.tiers import STATED_CLAIM, is_tier_test, test_parameters_without_models
from pytest_emad.run import environment
from pytest_emad.run.environment import is_shipped_test, shipped_file_name
from pytest_emad.run.options import RunSettings, get_run_settings
from pytest_emad.statistics.verdicts import EXIT_PREFIX, Claim, load_register

if TYPE_CHECKING:
    from pytest_emad.claims.base import About, Suite

EXIT_FIXTURE = "emad_exit"  # the fixture with the exit of --emad-exit
PAIR_FIXTURES = frozenset({"emad_pair", "emad_pair_names"})  # the fixtures with the pair of --emad-pair


def claim_pytest_params(suite: Suite, *about: About) -> list[Any]:
    """One parameter per claim of ``suite`` about such evidence, in the register's order, marked by its question."""
    from pytest_emad.claims.base import find_questions_by_claim  # brings SciPy: not at the start of every run

    return [
        pytest.param(claim, marks=pytest.mark.emad(claim=claim, budget=question.budget, measures=question.measures))
        for claim, question in find_questions_by_claim(load_register()).items()
        if question.suite == suite and question.about in about
    ]


def emad_marker_arguments(item: pytest.Item) -> dict[str, Any]:
    """The nearest ``emad`` marker's arguments with their defaults."""
    nearest = item.get_closest_marker("emad")
    return {"claim": None, "budget": "smoke", "measures": False} | (dict(nearest.kwargs) if nearest else {})


def is_timing_or_energy_test(item: pytest.Item) -> bool:
    """Whether ``item`` measures time or energy, so that no other test may run at the same time."""
    return bool(emad_marker_arguments(item)["measures"]) or environment.is_cost_test(item)


ACCURACY_FIXTURE = "emad_accuracy"


def is_plugin_test(item: pytest.Item) -> bool:
    """Whether ``item`` belongs to this plugin: a shipped test, a test of a claim, or a user of its fixtures.

    ``emad_accuracy`` does not count: it compares files, without a model or a device.
    """
    fixtures = set(getattr(item, "fixturenames", ())) - {ACCURACY_FIXTURE}
    marked = environment.is_shipped_test(item) or item.get_closest_marker("emad") is not None
    return marked or any(name.startswith("emad_") for name in fixtures)


def absent_from_run(item: pytest.Item, chosen: RunSettings, register: Mapping[str, Claim]) -> Absent | None:
    """Why the run leaves ``item`` out, a reason of ``report.deselection``; None if it runs."""
    arguments, ours = emad_marker_arguments(item), environment.is_shipped_test(item)
    claim, of_pair = arguments["claim"], not PAIR_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
    of_tier = chosen.tier == "claims" and claim == STATED_CLAIM
    requested = of_tier or _is_requested(claim, of_pair, chosen, register)
    if BUDGETS[arguments["budget"]].rank > chosen.budget.rank and not requested:
        return Absent(ABOVE_BUDGET)  # first, since such a test never belongs to this run's proof
    if chosen.only and claim not in chosen.only and (ours or claim is not None):
        return Absent(LEFT_OUT)
    name = environment.shipped_test_name(item)
    if (
        chosen.tier
        and name
        and not is_tier_test(chosen.tier, name, test_parameters_without_models(item.nodeid, chosen.models))
    ):
        return Absent(NOT_OF_TIER)
    if ours and EXIT_FIXTURE in getattr(item, "fixturenames", ()) and chosen.study.exit is None:
        return Absent(NO_EXIT)
    return Absent(NO_PAIR) if ours and of_pair and chosen.pair is None else None


def _is_requested(claim: str | None, of_pair: bool, chosen: RunSettings, register: Mapping[str, Claim]) -> bool:
    """Whether a claim runs at every budget, because it gates or the user named it."""
    if claim is None:
        return False
    wanted = claim in chosen.only or chosen.all_claims or (of_pair and chosen.pair_named)
    wanted = wanted or (chosen.study.exit is not None and claim.startswith(EXIT_PREFIX))
    return wanted or register[claim].is_gating(chosen.gate_claims)


def require_known_gaps_of_run(config: pytest.Config, collected: Mapping[str, str]) -> None:
    """Require that each test of ``--emad-known-gaps`` is one of this run. Call it after collection.

    ``collected``: node id → name of each shipped test, deselected ones included. Raises pytest.UsageError.
    """
    gaps = get_run_settings(config).known_gaps
    if not gaps or not collected:  # another run of the same project, with the option in its ini file
        return
    tests = [(name, nodeid) for nodeid, name in collected.items()]
    partial = bool(environment.describe_typed_selection(config))
    try:
        require_tests_of_run(gaps, tests, environment.all_shipped_test_names(), partial, "--emad-known-gaps")
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from error


FOLDERS = ("invariants", "fidelity", "claims", "cost", "ablations")


def sorted_by_suite_folder(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """``items`` with shipped tests ordered by folder of ``suites``, and within a folder as collected."""
    ours = {place: file for place, item in enumerate(items) if (file := shipped_file_name(item.path)) is not None}
    moved = iter(sorted(ours, key=lambda place: suite_folder_rank(ours[place].split("/")[1])))
    return [items[next(moved)] if place in ours else item for place, item in enumerate(items)]


def suite_folder_rank(folder: str) -> int:
    """The rank of a folder of ``suites`` in running order."""
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def sorted_gates_first_per_model(
    items: Sequence[pytest.Item], gating: Collection[str], exact: Collection[str]
) -> list[pytest.Item]:
    """``items`` with ``gating`` claims without a model first, then per model its gates, ``exact`` ones first.

    Tests that measure time keep their place behind those of correctness and quality. Models keep their order, so
    pytest frees one before it loads the next.
    """
    parts: list[list[pytest.Item]] = []
    model = None
    for item in items:
        asked = _model_name(item)
        if not parts or (asked is not None and model is not None and asked != model):
            parts.append([])
        model = asked or model
        parts[-1].append(item)

    def when(item: pytest.Item) -> int:
        asked = emad_marker_arguments(item)
        if asked["claim"] not in gating or asked["measures"] or not is_shipped_test(item):
            return 3
        return 0 if _model_name(item) is None else 1 if asked["claim"] in exact else 2

    first = [item for item in items if when(item) == 0]
    return [*first, *(item for part in parts for item in sorted(part, key=when) if when(item) > 0)]


def _model_name(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("emad_model")
