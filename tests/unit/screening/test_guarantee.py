"""The guarantee of an exit: losses by hand, the chosen threshold, its statement, and coverage on simulated truth."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.learn_then_test import betting_pvalues
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint, full_depth
from pytest_emad.screening.guarantee import (
    BOUNDED_LOSSES,
    CHANGED,
    EXCESS,
    Guarantee,
    certify_losses,
    changed_share,
    excess_loss,
    require_strict_to_loose,
)
from pytest_emad.statistics.units import ByDocument, DocumentMembership

NAMES = ("strict", "middle", "loose")
whole = ByDocument.from_whole_documents


def drawn(rng: np.random.Generator, documents: int, means: tuple[float, ...], spread: float = 0.003) -> ByDocument:
    """Return nonnegative nats per token [documents, λ] about ``means``."""
    shared = rng.normal(0, spread, (documents, 1))
    return whole(np.clip(np.array(means) + shared, 0, EXCESS.cap))


def chosen(losses: ByDocument, **options) -> Guarantee:
    return certify_losses(losses, NAMES[: losses.values.shape[1]], text="a text", **options)


# ---------------------------------------------------------------- losses


def test_excess_is_what_a_token_costs_more_and_gains_are_nothing() -> None:
    nll = whole(np.array([[10.0, 11.0, 9.0], [20.0, 100.0, math.inf]]))
    found = excess_loss(nll, whole(np.array([10.0, 20.0])), whole(np.array([100, 200])))
    assert found.values == pytest.approx(np.array([[0, 0.01, 0], [0, EXCESS.cap, EXCESS.cap]]))


def test_windows_become_documents_before_they_are_divided() -> None:
    """One window lost 2 nats and the other gained 1: the document lost 1 over all its tokens."""
    of = DocumentMembership(np.array([7, 7, 9]))
    point, full, tokens = (
        ByDocument.from_summed_windows(np.array(values), of)
        for values in ([[12.0], [9.0], [5.0]], [10.0, 10.0, 5.0], [50, 50, 10])
    )
    assert excess_loss(point, full, tokens).values.tolist() == [[0.01], [0.0]]


def test_changed_is_a_share_of_tokens() -> None:
    assert changed_share(whole(np.array([[0.0, 5.0]])), whole(np.array([20]))).values.tolist() == [[0.0, 0.25]]


@pytest.mark.parametrize(
    ("nll", "full", "tokens", "named"),
    [
        (np.zeros((2, 1)), np.zeros(3), np.ones(2), "full_nats"),
        (np.zeros((2, 1)), np.zeros(2), np.ones(3), "tokens"),
        (np.zeros((2, 1)), np.zeros(2), np.array([3, 0]), "tokens"),
        (np.zeros((2, 1)), np.array([0.0, math.nan]), np.ones(2), "full_nats"),
        (np.full((2, 1), math.inf), np.array([0.0, math.inf]), np.ones(2), "full_nats"),
        (np.full((2, 1), math.nan), np.zeros(2), np.ones(2), "sums"),
    ],
)
def test_sums_that_make_no_loss_are_refused(nll, full, tokens, named) -> None:
    with pytest.raises(BadArgument, match=f"^{named}="):
        excess_loss(whole(nll), whole(full), whole(tokens))


def test_documents_in_another_order_are_refused() -> None:
    with pytest.raises(BadArgument, match="same 2 documents"):
        excess_loss(whole(np.zeros((2, 1))), whole(np.zeros(2)), ByDocument(np.ones(2), np.array([1, 0])))


# ---------------------------------------------------------------- the choice


def test_the_loosest_threshold_that_is_shown_is_chosen() -> None:
    losses = drawn(np.random.default_rng(0), 300, (0.001, 0.004, 0.011))
    found = chosen(losses)
    assert (found.chosen, len(found.tested), found.documents) == ("middle", 3, 300)
    assert [tried.loss for tried in found.tested] == pytest.approx(losses.values.mean(axis=0))
    shares = losses.values / EXCESS.cap
    assert [tried.p for tried in found.tested] == betting_pvalues(shares, EXCESS.risk / EXCESS.cap, 0.05).tolist()
    assert found.power > 0.95
    assert found.needed is not None
    assert 79 <= found.needed < 200


def test_a_pass_behind_a_failure_has_no_say() -> None:
    found = chosen(drawn(np.random.default_rng(0), 300, (0.02, 0.001)))
    assert (found.chosen, len(found.tested)) == (None, 1)
    assert found.tested[0].p > 0.05


def test_the_statement_says_what_is_promised_of_what_and_what_is_not() -> None:
    said = chosen(drawn(np.random.default_rng(0), 300, (0.001, 0.004, 0.011))).statement
    for part in (
        "95%",
        "300 calibration documents",
        "middle costs at most 0.00995 nats per token",
        "(perplexity +1.0%)",
        "mean over documents like those of a text",
        "gains counted as nothing and losses above 0.2 as 0.2",
        "nothing is promised of a single document",
        "write itself",
    ):
        assert part in said


def test_no_promise_says_why() -> None:
    few = chosen(drawn(np.random.default_rng(0), 58, (0.0,), 0.0))
    assert few.chosen is None
    assert "58 documents of a text certify nothing, 59 are the fewest that could" in few.statement
    bad = chosen(drawn(np.random.default_rng(0), 300, (0.02,), 0.0))
    assert "strict, the strictest, costs 0.02 nats per token above full depth on 300 documents" in bad.statement
    assert (bad.needed, bad.power) == (None, 0.0)
    assert bad.again is None


def test_power_is_that_of_any_exit_and_again_that_of_the_one_chosen() -> None:
    """Compared with 200 new sets of the same size from the documents of both estimates."""
    means = (0.0035, 0.0055)
    seen = drawn(np.random.default_rng(0), 130, means)
    found = chosen(seen)
    rng = np.random.default_rng(1)
    anew = [chosen_alone(whole(seen.values[rng.integers(130, size=130)])) for _ in range(200)]
    assert found.chosen == "strict"
    assert found.power == found.again == pytest.approx(np.mean([each is not None for each in anew]), abs=0.1)
    assert 0.5 < found.power < 1
    found = chosen(seen, risk=0.012)
    tolerance = {"tolerance": 0.012 / EXCESS.cap}
    anew = [chosen_alone(whole(seen.values[rng.integers(130, size=130)]), **tolerance) for _ in range(200)]
    assert found.chosen == "middle"
    assert found.again == pytest.approx(anew.count("middle") / 200, abs=0.1)
    assert 0.5 < found.again < found.power


def chosen_alone(losses: ByDocument, tolerance: float = EXCESS.risk / EXCESS.cap) -> str | None:
    """Return the choice without the simulation of its power."""
    passed = betting_pvalues(losses.values / EXCESS.cap, tolerance, 0.05) <= 0.05
    return NAMES[int(np.argmin(np.append(passed, False))) - 1] if passed[0] else None


def test_a_ruined_document_counts_as_the_cap_and_is_told() -> None:
    values = np.zeros((200, 1))
    values[:10] = EXCESS.cap  # one in twenty: a mean at δ, for any further loss
    found = chosen(whole(values))
    assert (found.chosen, found.capped) == (None, 0.05)


def test_a_share_of_changed_tokens_has_its_own_risk() -> None:
    values = np.random.default_rng(0).beta(2, 98, (300, 1))
    found = certify_losses(whole(values), ["gate"], CHANGED, text="a text")
    assert found.chosen == "gate"
    assert (found.cap, found.risk) == (1.0, CHANGED.risk)
    assert "costs at most 0.05 of tokens told otherwise" in found.statement
    assert "perplexity" not in found.statement


def test_a_stricter_risk_or_error_chooses_no_more() -> None:
    losses = drawn(np.random.default_rng(0), 300, (0.001, 0.004, 0.011))
    assert chosen(losses, risk=0.002).chosen in (None, "strict")
    assert chosen(losses, risk=0.02).chosen == "loose"
    assert chosen(losses, error=1e-9).chosen is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"losses": whole(np.zeros(4))}, "losses"),
        ({"losses": whole(np.zeros((4, 2)))}, "losses"),
        ({"losses": whole(np.full((4, 1), 0.21))}, "losses"),
        ({"losses": whole(np.full((4, 1), math.nan))}, "losses"),
        ({"losses": whole(np.zeros((4, 2))), "names": ["a", "a"]}, "names"),
        ({"risk": 0.0}, "risk"),
        ({"risk": 0.2}, "risk"),
        ({"error": 1.0}, "error"),
        ({"error": math.nan}, "error"),
    ],
)
def test_misuse_is_refused_by_name(change, named) -> None:
    with pytest.raises(BadArgument, match=f"^{named}="):
        certify_losses(**{"losses": whole(np.zeros((4, 1))), "names": ["a"], "text": "a text", **change})


# ---------------------------------------------------------------- coverage of the guarantee on known truth


@pytest.mark.parametrize("documents", [100, 200])
def test_the_promise_is_kept_over_calibration_sets(documents: int) -> None:
    """400 sets: heavy tails, capped; thresholds with a risk just above δ behind some with a risk below it."""
    scale = np.array([0.003, 0.006, 0.0103, 0.0106, 0.02])
    rng = np.random.default_rng(6)
    truth = np.minimum(rng.pareto(2.5, (400_000, 1)) * 1.5 * scale, EXCESS.cap).mean(axis=0)
    assert truth[1] < EXCESS.risk < truth[2]
    broken = exiting = 0
    for _ in range(400):
        losses = np.minimum(rng.pareto(2.5, (documents, 1)) * 1.5 * scale, EXCESS.cap)
        passed = betting_pvalues(losses / EXCESS.cap, EXCESS.risk / EXCESS.cap, 0.05) <= 0.05
        index = int(np.argmin(np.append(passed, False))) - 1
        exiting += index >= 0
        broken += index >= 0 and truth[index] > EXCESS.risk
    assert broken <= 0.05 * 400
    assert documents < 200 or exiting > 0.8 * 400


# ---------------------------------------------------------------- stored, ordered, light


def test_it_is_stored_and_read_back() -> None:
    for means in ((0.001, 0.004, 0.011), (0.02,)):
        found = chosen(drawn(np.random.default_rng(0), 100, means))
        assert Guarantee.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_points_are_ordered_before_losses_are_seen() -> None:
    point = OperatingPoint("a", "gate", 12, 12, (4, 8), ((0.1, 0.2),), "free_eager")
    looser = replace(point, name="b", thresholds=((0.2, 0.2),))
    require_strict_to_loose([point, looser, replace(looser, name="c", margin_nats=0.1)])
    closed = [replace(each, thresholds=((-math.inf, each.thresholds[0][1]),)) for each in (point, looser)]
    require_strict_to_loose(closed)  # a probe at which no token exits, under either
    for wrong in (
        [looser, point],
        [point, replace(looser, thresholds=((0.3, 0.1),))],
        [point, replace(looser, schedule="monotone")],
        [point, full_depth(12)],
    ):
        with pytest.raises(BadArgument, match=r"^points="):
            require_strict_to_loose(wrong)
    rising = [replace(each, signal="softmax_response") for each in (looser, point)]
    require_strict_to_loose(rising)
    with pytest.raises(BadArgument, match=r"^points="):
        require_strict_to_loose(rising[::-1])


def test_constants_leave_room_between_risk_and_cap() -> None:
    for loss in BOUNDED_LOSSES.values():
        assert 0 < 5 * loss.risk <= loss.cap


def test_nobody_who_reads_a_guarantee_waits_for_torch() -> None:
    program = "import sys, pytest_emad.screening.guarantee; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
