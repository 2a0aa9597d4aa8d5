"""How a property ends: at a failure that its steps kept, or with the error itself."""

from __future__ import annotations

import pytest
from hypothesis.errors import Flaky

from emad_ref.protocol import Unsupported
from pytest_emad.audit.finding import AuditRefutedError
from pytest_emad.run.hypothesis_profile import end_at_kept_failure, keep_complaint, stop_search_on_refusal

ERRORS = [AssertionError, AuditRefutedError, Flaky]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_after_a_kept_failure_ends_the_property(error: type[Exception]) -> None:
    with end_at_kept_failure(["logits off"]):
        raise error("again")


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_without_a_kept_failure_is_no_pass(error: type[Exception]) -> None:
    """A decoder may raise once, and not when Hypothesis repeats the steps."""
    with pytest.raises(error, match="once"), end_at_kept_failure([]):
        raise error("once")


def test_a_complaint_is_kept_with_its_steps_and_raised() -> None:
    failing: list[str] = []
    with pytest.raises(AuditRefutedError), keep_complaint(failing, ["open", "feed"]):
        raise AuditRefutedError("logits off")
    assert failing == ["logits off. Steps: open; feed"]


def test_a_refusal_is_no_failure() -> None:
    failing: list[str] = []
    with (
        pytest.raises(Unsupported, match="no sessions"),
        end_at_kept_failure(failing),
        keep_complaint(failing, []),
        stop_search_on_refusal(),
    ):
        raise Unsupported("no sessions")
    assert not failing
