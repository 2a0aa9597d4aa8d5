"""Every pair of values of the dimensions of requests and of sessions is asked for, and answered rightly.

``pytest_emad.audit.dimensions`` has the table. A covering array gives the cases; a failing one is reduced to the
simplest case that still fails. The report lists the pairs that were asked.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pytest_emad.audit.covering import CaseRunner, check_covering_cases, settle_offers
from pytest_emad.audit.dimensions import REQUEST_CONSTRAINTS, REQUESTS, SESSION_CONSTRAINTS, SESSIONS
from pytest_emad.audit.finding import Tally
from pytest_emad.audit.request_cases import POSITION, CaseBench, RequestCases
from pytest_emad.audit.session_cases import AFTER, SessionCases
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.run.options import RunSettings
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate

NARROW = {"rows": ("9", "17", "33"), "new": ("33", "70"), "neighbours": ("65th session", "257th request")}
OWN_CASES = 0.2  # share of the cases that our own decoder decodes under smoke: tests plant defects in all of them
FEWEST_CASES = 0.1  # the same with a large model, at least
ASKED_REQUESTS = ("point", "rows", "call", "temperature", "neighbours")
ASKED_SESSIONS = ("point", "rows", "neighbours", "depths", "rollback", "commit", "drop", "temperature")
REQUEST_PAIRS = (("point", "ceiling"), ("point", "call"), ("point", "temperature"), ("call", "temperature"))
SESSION_PAIRS = (("point", "ceiling"), ("point", "depths"), ("point", "temperature"))


def find_left_out_values(subject: ModelUnderTest, bench: CaseBench) -> dict[str, tuple[str, ...]]:
    """Values that this model has no room for, or that our own decoder is not asked for with a large model."""
    left_out: dict[str, list[str]] = {name: [] for name in ("place", "new", "ceiling", "point", "rows", "neighbours")}
    if bench.window < POSITION + max(map(int, REQUESTS["new"].values)) + AFTER:
        left_out["place"].append("position 96")
    left_out["new"] += [new for new in REQUESTS["new"].values if int(new) + 2 * AFTER + 40 > bench.window]
    if subject.stepper.layers < 3:
        left_out["ceiling"].append("below")
        left_out["point"].append("truncated")
    for name, values in NARROW.items() if subject.audit_share < 1 else ():
        left_out[name] += values
    return {name: tuple(values) for name, values in left_out.items()}


@pytest.mark.parametrize("case", ["requests", "sessions"])
def test_every_pair_of_values_is_asked_and_answered(
    emad_evidence: ModelMeasurements,
    emad_audit: AuditFindingGate,
    emad_record: Recorder,
    emad_settings: RunSettings,
    emad_rng: np.random.Generator,
    case: str,
) -> None:
    subject, bench = emad_evidence.subject, emad_evidence.replay_validity.case_bench
    left_out = find_left_out_values(subject, bench)
    tally = Tally(f"pairs of {case}", needed=0)
    judge_all = None
    if case == "requests":
        requests = RequestCases(bench, tally)
        runner: CaseRunner = requests
        offers = settle_offers(runner, REQUESTS, REQUEST_CONSTRAINTS, left_out, ASKED_REQUESTS, REQUEST_PAIRS)
        noise = subject.compute_allowed_difference(subject.capabilities)
        judge_all = partial(requests.judge_draws, emad_rng, noise)
    else:
        widest = subject.capabilities.max_feed
        left_out["feed"] = tuple(feed for feed in SESSIONS["feed"].values if int(feed) > widest)
        runner = SessionCases(bench, tally, subject.capabilities)
        offers = settle_offers(runner, SESSIONS, SESSION_CONSTRAINTS, left_out, ASKED_SESSIONS, SESSION_PAIRS)
    share = 1.0
    if subject.has_reference_decoder and not emad_settings.budget.rank:
        share = max(FEWEST_CASES, OWN_CASES * subject.audit_share)
        emad_record.record_note(
            f"{subject.name}: our own decoder decodes {share:.0%} of the cases of {case}; another decoder, and "
            "--emad-budget standard, all of them"
        )
    result = check_covering_cases(
        runner,
        offers,
        int(emad_rng.integers(2**16)),
        strength=3 if emad_settings.budget.rank else 2,
        share=share,
        judge_all=judge_all,
    )
    emad_record.record_table(f"Pairs of {case} asked", subject.name, result.rows)
    for what, reason in offers.declined.items():
        emad_record.record_note(f"{case} not asked for: {what} ({reason})")
    emad_audit(result.finding)
