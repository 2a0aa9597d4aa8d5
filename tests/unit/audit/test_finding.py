"""Findings and their counts, and tolerances; the audit imports neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.models.families import FAMILIES
from pytest_emad.audit.finding import (
    AuditRefutedError,
    Finding,
    FirstDifference,
    LikelyCause,
    Tally,
    prefix_raised_complaints,
    require_shape,
)
from pytest_emad.audit.tolerances import BACKENDS, DTYPES, tolerance


def test_the_first_complaint_ends_the_check() -> None:
    tally, reached = Tally("forced", needed=0), False
    with tally:
        tally.n = 3
        tally.require(True, "fine")
        tally.require(False, "row 1: logits off")
        reached = True
    finding = tally.to_finding()
    assert not reached
    assert (finding.check, finding.passed, finding.n) == ("forced", False, 3)
    assert finding.detail.startswith("row 1: logits off")


def test_a_crash_of_the_decoder_is_not_a_finding() -> None:
    with pytest.raises(RuntimeError, match="cache"), Tally("forced"):
        raise RuntimeError("cache")


@pytest.mark.parametrize(("discriminating", "passed"), [(4, None), (5, True)])
def test_too_few_discriminating_positions_are_inconclusive(discriminating: int, passed: bool | None) -> None:
    finding = Tally("generation", needed=5, n=50, discriminating=discriminating).to_finding()
    assert finding.passed is passed


def test_a_complaint_outweighs_missing_power() -> None:
    with Tally("generation", needed=5) as tally:
        tally.require(False, "wrong")
    assert tally.to_finding().passed is False


@pytest.mark.parametrize(("ties", "passed"), [(2, True), (3, False)])
def test_more_than_one_percent_of_ties_fails(ties: int, passed: bool) -> None:
    finding = Tally("rows", needed=0, n=200, ties=ties).to_finding()
    assert finding.passed is passed
    assert finding.ties == ties


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_every_combination_has_a_value(family: str, dtype: str, backend: str) -> None:
    assert tolerance(family, dtype, backend) >= tolerance(family, dtype, "cpu") > 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_that_can_be_walked_has_a_tolerance(family: str) -> None:
    assert tolerance(family, "float32", "cpu") == 2e-4


def test_float32_inside_sets_a_floor_in_float64() -> None:
    assert tolerance("gpt_neox", "float64", "cpu") == 1e-9
    assert tolerance("gemma2", "float64", "cpu") >= 1e-6


def test_eager_attention_has_float32_inside_which_half_the_bits_do_not_notice() -> None:
    assert tolerance("gpt_neox", "float64", "cpu", "eager") == tolerance("llama", "float64", "cpu")
    for dtype in ("float32", "float16", "bfloat16"):
        assert tolerance("gpt_neox", dtype, "cpu", "eager") == tolerance("gpt_neox", dtype, "cpu")


@pytest.mark.parametrize("family", ["smollm2", "mamba"])
def test_a_family_that_cannot_be_loaded_has_no_tolerance(family: str) -> None:
    with pytest.raises(BadArgument, match=rf"model_type='{family}', but expected one of .*gpt_neox.*families\.py"):
        tolerance(family, "float32", "cpu")


def test_fewer_bits_never_tolerate_less() -> None:
    for family in ("gpt_neox", "llama"):
        for backend in ("cpu", "cuda"):
            values = [tolerance(family, dtype, backend) for dtype in DTYPES]
            assert values == sorted(values)


@pytest.mark.parametrize("wrong", [("t6", "float32", "cpu"), ("llama", "int8", "cpu"), ("llama", "float32", "abacus")])
def test_an_unknown_name_is_refused(wrong: tuple[str, str, str]) -> None:
    with pytest.raises(BadArgument, match="expected one of"):
        tolerance(*wrong)


def test_the_audit_imports_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "hypothesis")
    code = f"import sys, pytest_emad.audit; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def complain(prefix: str = "") -> Finding:
    with (tally := Tally("forced")), prefix_raised_complaints(prefix):
        tally.require(prefix == "shape", "row 1: logits off")
        require_shape("step.logits", np.zeros(2), (3,))
    return tally.to_finding()


def test_what_is_known_of_a_complaint_survives_its_words() -> None:
    likely, difference = LikelyCause("bfloat16", "a gap", "declare it"), FirstDifference(4, 5, 6, 0.1)
    with (tally := Tally("forced")), prefix_raised_complaints("step 1: "):
        try:
            raise AuditRefutedError("row 1", difference=difference)
        except AuditRefutedError as first:
            raise AuditRefutedError("row 1 again", likely_cause=likely) from first
    finding = tally.to_finding()
    assert finding.complaint == "step 1: row 1 again; a gap: declare it"
    assert (finding.difference, finding.likely_cause) == (difference, likely)
    with (again := Tally("again")), prefix_raised_complaints("row 2: "):
        finding.require()
    assert (again.complaint or "").count("a gap: declare it") == 1
    assert (again.difference, again.likely_cause) == (difference, likely)


@pytest.mark.parametrize("tokens", [(1, 2), (2, 1)])
def test_a_difference_expects_the_likelier_token(tokens: tuple[int, int]) -> None:
    """Two answers that part say nothing of which one is wrong."""
    assert FirstDifference.from_logits(4, *tokens, np.array([0.0, 1.5, 3.0])) == FirstDifference(4, 1, 2, 1.5)


def test_complaints_of_one_requirement_have_one_cause_whatever_their_words() -> None:
    """A prefix raises a complaint anew, and a helper may raise it: its cause is the line that required it."""
    one, other, shape = complain("one: "), complain("another: "), complain("shape")
    assert (one.complaint, other.complaint) == ("one: row 1: logits off", "another: row 1: logits off")
    assert one.cause == other.cause != shape.cause
    assert {finding.cause.partition(":")[0] for finding in (one, other, shape)} == {__name__}
