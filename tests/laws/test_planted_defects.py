"""Power of the audit: an honest decoder passes every check, and the check for a planted defect catches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint, full_depth
from pytest_emad.audit import Finding, check_decisions, check_generation, tolerance
from pytest_emad.audit.session_checks import check_feed_last_argument
from tests.decoders.audited_model import LAYERS, drawn, lens_of, spread_point, tiny_neox, under_test
from tests.decoders.cached_decoder import CachedDecoder
from tests.decoders.covering_cases import check_small_cases
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.decoders.planted_defects import DEFECTS
from tests.unit.audit.test_requests import DeclinesForcedDepth

pytestmark = pytest.mark.each_value

CHECKS = ("decisions", "generation", "sessions", "requests")
TOLERANCE = tolerance("gpt_neox", "float64", "cpu")
MAX_NEW = 16


# defects of sessions that are detected without forced depths, each by its check
AT_FULL_DEPTH = (
    *("stale K/V after rollback", "rolled-back work is forgotten", "position off by one", "wrong batch row"),
    *("drops the wrong row", "logits that are NaN", "depths of the last tokens alone"),
    "a drop empties the other sessions",
)


def run_check(name: str, decoder: type, point: OperatingPoint, *, forces: bool = True) -> Finding:
    """Run one check as a suite does; without forced depths, at full depth."""
    full = replace(under_test(decoder, full_depth(LAYERS), TOLERANCE), forces=forces)
    asked, rng = under_test(decoder, point, TOLERANCE), np.random.default_rng(5)
    prompts, continuation = drawn((5, 9, 1), 12)
    of_cases = {} if forces else {"point": ("full",), "depths": ("none",)}
    model = tiny_neox()
    cases = partial(
        check_small_cases, made=partial(decoder, model), lens=lens_of(model), exiting=point, tolerance=TOLERANCE
    )
    checks: dict[str, Callable[[], Finding]] = {
        "sessions": lambda: cases("sessions", **of_cases),
        "requests": lambda: cases("requests", **of_cases),
        "last": lambda: check_feed_last_argument(full, prompts, continuation, rng),
        "decisions": lambda: check_decisions(asked, prompts, continuation),
        "generation": lambda: check_generation(asked, prompts, MAX_NEW),
    }
    return checks[name]()


@pytest.mark.values("decisions", "generation")  # the suites pass on an honest decoder in the main job
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("decoder", [CachedDecoder, ForeignDecoder])
def test_an_honest_decoder_passes(decoder: type, check: str) -> None:
    finding = run_check(check, decoder, spread_point())
    assert finding.passed is True, finding.detail
    assert finding.check == check
    assert finding.n > 0


@pytest.mark.values("stale K/V after rollback", "wrong batch row", "logits that are NaN")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_caught_by_its_check(defect: str) -> None:
    decoder, check = DEFECTS[defect]
    finding = run_check(check, decoder, spread_point())
    assert finding.passed is False, finding.detail


def test_a_rollback_that_fails_ends_as_six_steps_at_most() -> None:
    finding = run_check("sessions", DEFECTS["stale K/V after rollback"][0], spread_point())
    assert finding.sample is not None
    steps = finding.sample["steps"]
    assert len(steps) <= 6, finding.detail
    assert any(step.startswith("rollback to") for step in steps)


@pytest.mark.parametrize("check", ["sessions", "last"])
def test_sessions_that_take_no_forced_depth_are_judged_at_full_depth(check: str) -> None:
    finding = run_check(check, DeclinesForcedDepth, spread_point(), forces=False)
    assert finding.passed is True, finding.detail
    assert finding.live["session_positions"] > 0
    assert not finding.live.get("forced_positions")


@pytest.mark.values("stale K/V after rollback", "depths of the last tokens alone")
@pytest.mark.parametrize("defect", AT_FULL_DEPTH)
def test_a_defect_of_sessions_shows_without_forced_depths(defect: str) -> None:
    decoder, check = DEFECTS[defect]
    finding = run_check(check, decoder, spread_point(), forces=False)
    assert finding.passed is False, finding.detail


def test_depths_are_left_out_at_full_depth_alone() -> None:
    with pytest.raises(BadArgument, match="forces"):
        replace(under_test(CachedDecoder, spread_point(), TOLERANCE), forces=False)
