"""Hypothesis settings of the suites' properties.

A user's profile may set more examples, longer programs or more output. It cannot weaken a gate: the suites' properties
ignore fewer examples than the budget has, missing phases and deadlines. This module imports Hypothesis, so only runs of
the suites import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from emad_ref.protocol import Unsupported
from pytest_emad.audit.finding import AuditRefutedError
from pytest_emad.measurements.study import Budget

PROFILE = "emad"
BUILT_IN = ("default", "ci")  # profiles that Hypothesis loads itself
STEPS = 50  # Hypothesis's own default of operations per program of a state machine


def property_test_settings(budget: Budget, steps: int = STEPS) -> settings:
    """At least ``budget.examples`` examples in every phase, no limit of time, derandomised, no database.

    ``steps``: operations per program of a state machine.
    """
    user = settings()  # the profile in force
    chosen = settings.get_current_profile_name() not in (*BUILT_IN, PROFILE)
    return settings(
        max_examples=max(budget.examples, user.max_examples if chosen else 0),
        stateful_step_count=max(steps, user.stateful_step_count if chosen else 0),
        phases=tuple(Phase),
        deadline=None,  # a slow machine is not a decoder's bug
        suppress_health_check=tuple({*user.suppress_health_check, HealthCheck.too_slow}),
        derandomize=True,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,  # the first failure is shrunk; others have mostly the same cause
    )


class DecoderDeclined(BaseException):
    """Carries a decoder's ``refusal`` through Hypothesis, which handles only ``Exception``.

    Hypothesis would shrink an ``Exception`` as a counterexample and make the decoder decline again and again.
    """

    def __init__(self, refusal: Unsupported):
        super().__init__(str(refusal))
        self.refusal = refusal


@contextmanager
def stop_search_on_refusal() -> Iterator[None]:
    """Wrap one step of a property: a refusal of the decoder ends all examples."""
    try:
        yield
    except Unsupported as refusal:
        raise DecoderDeclined(refusal) from refusal


@contextmanager
def reraise_refusal() -> Iterator[None]:
    """Wrap the whole property. Raises Unsupported if the decoder declined a step."""
    try:
        yield
    except DecoderDeclined as declined:
        raise declined.refusal from None


@contextmanager
def keep_complaint(failing: list[str], steps: Sequence[str]) -> Iterator[None]:
    """Wrap one step of a state machine: a complaint is added to ``failing``, with the ``steps`` that led to it."""
    try:
        yield
    except AuditRefutedError as complaint:
        failing.append(f"{complaint}. Steps: {'; '.join(steps)}")
        raise


@contextmanager
def end_at_kept_failure(failing: Sequence[str]) -> Iterator[None]:
    """Wrap the whole property, whose steps add each failure to ``failing``; the last one is the simplest.

    ``Flaky``, which Hypothesis raises if a failure passes when it is repeated, ends the property like the failure
    itself. Any of these errors without a kept failure passes through. Raises as ``reraise_refusal``.
    """
    try:
        with reraise_refusal():
            yield
    except (AssertionError, AuditRefutedError, Flaky):
        if not failing:
            raise


def find_machine_complaint(machine: type[RuleBasedStateMachine], wanted: settings, **bound: Any) -> str:
    """The simplest complaint of ``machine`` with the class attributes ``bound``, and its steps; "" without one.

    The machine keeps complaints in its class attribute ``failing``. Raises as ``end_at_kept_failure``.
    """
    failing: list[str] = []
    with end_at_kept_failure(failing):
        run_state_machine_as_test(type("BoundMachine", (machine,), bound | {"failing": failing}), settings=wanted)
    return failing[-1] if failing else ""


def describe_weaker_profile(budget: Budget) -> str | None:
    """Text about weaker settings of the user's profile, which the suites ignore; None without any."""
    user, name = settings(), settings.get_current_profile_name()
    if name in (*BUILT_IN, PROFILE):
        return None
    lacking = [phase.name for phase in (Phase.explicit, Phase.generate) if phase not in user.phases]
    found = [f"max_examples={user.max_examples}"] if user.max_examples < budget.examples else []
    found += [f"phases without {', '.join(lacking)}"] if lacking else []
    if not found:
        return None
    return (
        f"Hypothesis profile {name!r} has {' and '.join(found)}; our suites run at least the {budget.examples} "
        f"examples of budget {budget.name}, in every phase"
    )
