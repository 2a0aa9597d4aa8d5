"""Hypothesis settings under which our suites' properties run.

A profile that the user loaded may ask for more examples and longer programs, or print more. It cannot weaken a gate:
fewer examples than the budget has, phases left out, or a deadline that ends an example early do not apply to ours.
Imports Hypothesis, so only runs of our suites import this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import Phase, settings

from emad_ref.measurements.study import Budget
from emad_ref.protocol import Unsupported

PROFILE = "emad"
BUILT_IN = ("default", "ci")  # profiles that Hypothesis itself puts in force
STEPS = 50  # Hypothesis's own default of operations per program of a state machine


def property_settings(budget: Budget, steps: int = STEPS) -> settings:
    """At least ``budget.examples`` examples in every phase, no deadline, derandomised, no database.

    ``steps``: operations per program of a state machine.
    """
    user = settings()  # the profile in force
    chosen = settings.get_current_profile_name() not in (*BUILT_IN, PROFILE)
    return settings(
        max_examples=max(budget.examples, user.max_examples if chosen else 0),
        stateful_step_count=max(steps, user.stateful_step_count if chosen else 0),
        phases=tuple(Phase),
        deadline=None,  # a loaded machine is no bug in a decoder
        derandomize=True,
        database=None,
        print_blob=True,
    )


class DecoderDeclined(BaseException):
    """A decoder's ``refusal``, as no ``Exception``: Hypothesis lets it through at once.

    Any other it takes for a counterexample, looks for a smaller one, and has the decoder decline again and again.
    """

    def __init__(self, refusal: Unsupported):
        super().__init__(str(refusal))
        self.refusal = refusal


@contextmanager
def stop_search_on_refusal() -> Iterator[None]:
    """Around one step of a property: what the decoder declines ends all examples."""
    try:
        yield
    except Unsupported as refusal:
        raise DecoderDeclined(refusal) from refusal


@contextmanager
def raise_refusal() -> Iterator[None]:
    """Around the whole property. Raises Unsupported, where a step was declined."""
    try:
        yield
    except DecoderDeclined as declined:
        raise declined.refusal from None


def weaker_profile(budget: Budget) -> str | None:
    """What the user's profile asks for that does not apply to our suites, in words; None where it asks for no less."""
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
