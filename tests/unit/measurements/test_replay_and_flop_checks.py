"""Verification of FLOP counts: observed, confirmed by time, or only claimed by the decoder, and refuted counts."""

from __future__ import annotations

import copy
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.flop_ledger import flops
from emad_ref.models.geometry import published_geometry
from emad_ref.models.loading import LoadedModel, load
from emad_ref.protocol import Unsupported
from pytest_emad.benchmark.clock import WARM_UP, OwnSeconds
from pytest_emad.claims.base import ClaimContext, make_context_with_flop_evidence
from pytest_emad.measurements import replay_and_flop_checks as module
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.replay_and_flop_checks import (
    DENIED_SHARE,
    PAIRS,
    SHOWN_SHARE,
    FlopVerification,
    judge_speedup,
    work_of_token_exiting_at_depth,
)
from pytest_emad.measurements.run_resources import RunResources, make_reference_decoder
from pytest_emad.measurements.study import FLOP_EVIDENCE, Study
from pytest_emad.statistics.speedup import estimate_total_speedup
from pytest_emad.statistics.units import ByPair
from pytest_emad.statistics.verdicts import Leg, load_register
from tests.decoders.cached_decoder import CachedDecoder
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.decoders.planted_defects import AllLayersThenRoute, ReadsEveryLayer


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


@pytest.fixture(scope="module")
def elsewhere(nano) -> type:
    """An honest decoder on its own weights, which cannot be observed."""
    kept = copy.deepcopy(nano.model)

    class Elsewhere(CachedDecoder):
        def __init__(self, model, point):
            super().__init__(kept, point)

    return Elsewhere


def of(loaded: LoadedModel, decoder: type | None = None) -> FlopVerification:
    def make(request):
        return decoder(request.model.load().model, request.point)

    return ModelMeasurements(
        loaded, Study(corpus="world:premise"), RunResources() if decoder is None else RunResources(make)
    ).flop_verification


def timed_as(monkeypatch: pytest.MonkeyPatch, seconds) -> None:
    """Make tokens at a depth take ``seconds(depth)``, ± 2 %, without feeding."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        module, "time_fed_tokens", lambda decoder, tokens, depth: OwnSeconds(seconds(depth) * (1 + 0.02 * rng.random()))
    )


# ------------------------------------------------------------ observed


def test_ours_is_witnessed_fused_steps_and_all(nano):
    witnessed = of(nano)
    assert witnessed.evidence_grade == "witnessed"
    assert witnessed.finding is witnessed.observed_finding
    assert witnessed.observed_finding.n > 100


def test_ours_over_a_copy_is_watched_there(nano):
    witnessed = ModelMeasurements(
        nano, Study(corpus="world:premise"), RunResources(make_reference_decoder)
    ).flop_verification
    assert witnessed.evidence_grade == "witnessed"


def test_an_honest_foreign_decoder_is_witnessed_where_it_uses_what_it_was_lent(nano):
    assert of(nano, CachedDecoder).evidence_grade == "witnessed"


@pytest.mark.parametrize(
    ("decoder", "said"), [(AllLayersThenRoute, r"layer \d ran for \d+ tokens"), (ReadsEveryLayer, "the head ran for")]
)
def test_what_runs_unsaid_is_refuted_and_its_count_is_a_claim(nano, decoder, said):
    witnessed = of(nano, decoder)
    assert witnessed.finding.passed is False
    assert re.search(said, witnessed.finding.detail)
    assert witnessed.evidence_grade == "claimed"


def test_who_counts_nothing_claims_and_is_not_refuted(nano):
    witnessed = of(nano, ForeignDecoder)
    assert (witnessed.finding.passed, witnessed.evidence_grade) == (None, "claimed")
    assert "does not count its work" in witnessed.finding.detail


def test_who_cannot_be_watched_is_timed_and_not_accused(nano, monkeypatch):
    class Shy(CachedDecoder):
        def generate(self, *given):
            raise RuntimeError("no dispatch mode here")

    timed_as(monkeypatch, lambda depth: depth)
    witnessed = of(nano, Shy)
    assert "no dispatch mode here" in witnessed.observed_finding.detail
    assert witnessed.evidence_grade == "timed"


# ------------------------------------------------------------ timed


def test_weights_of_its_own_show_in_time(nano, elsewhere, monkeypatch):
    timed_as(monkeypatch, lambda depth: 0.2 + depth)
    witnessed = of(nano, elsewhere)
    assert witnessed.observed_finding.passed is None
    assert (witnessed.finding.check, witnessed.evidence_grade) == ("witness by time", "timed")
    assert "tokens forced to 1 layers take 0.2" in witnessed.finding.detail


def test_beside_a_tracer_nothing_is_timed_and_the_count_is_a_claim(nano, elsewhere):
    """A verdict on quality reports the evidence for its FLOPs; running under coverage is no reason to fail it."""
    kept = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        witnessed = of(nano, elsewhere)
        assert (witnessed.finding.passed, witnessed.evidence_grade) == (None, "claimed")
    finally:
        sys.settrace(kept)
    assert "not timed beside trace function" in witnessed.finding.detail


def test_a_quarter_of_the_layers_in_the_time_of_all_of_them_is_refuted(nano, elsewhere, monkeypatch):
    timed_as(monkeypatch, lambda depth: 1.0)
    witnessed = of(nano, elsewhere)
    assert (witnessed.finding.passed, witnessed.evidence_grade) == (False, "claimed")
    assert "said to be left out cost as much" in witnessed.finding.detail


def test_the_overhead_of_a_step_is_neither_shown_nor_refuted(nano, elsewhere, monkeypatch):
    timed_as(monkeypatch, lambda depth: 6.0 + depth)
    witnessed = of(nano, elsewhere)
    assert (witnessed.finding.passed, witnessed.evidence_grade) == (None, "claimed")


def test_sessions_are_really_fed_at_both_depths(nano, elsewhere):
    """Independent of this machine's clock."""
    fed = []

    class Logged(elsewhere):
        def start(self, prompts, *more):
            session, step = super().start(prompts, *more)
            feed = session.feed
            session.feed = lambda tokens, depth=None, last=None: fed.append(int(depth[0, 0])) or feed(tokens, depth)
            return session, step

    assert of(nano, Logged).timing_finding.n == PAIRS
    assert {depth: fed.count(depth) for depth in set(fed)} == {1: 8 * (WARM_UP + PAIRS), 4: 8 * (WARM_UP + PAIRS)}


def test_who_declines_the_points_that_would_be_watched_is_timed(nano, elsewhere, monkeypatch):
    class Declining(elsewhere):
        def __init__(self, model, point):
            if point.probes:
                raise Unsupported("full depth only")
            super().__init__(model, point)

    timed_as(monkeypatch, lambda depth: depth)
    witnessed = of(nano, Declining)
    assert "full depth only" in witnessed.observed_finding.detail
    assert witnessed.evidence_grade == "timed"


def test_depths_that_cannot_be_forced_are_a_claim(nano, elsewhere):
    class Deaf(elsewhere):
        def start(self, prompts, generating=False):
            if not generating:
                raise Unsupported("no sessions yet")
            return super().start(prompts, generating)

    witnessed = of(nano, Deaf)
    assert witnessed.evidence_grade == "claimed"
    assert "no sessions yet" in witnessed.finding.detail


# ------------------------------------------------------------ speedup and its meaning


def speedup(quarter: float, spread: float = 0.03, seed: int = 0):
    full, less = np.exp(spread * np.random.default_rng(seed).standard_normal((2, PAIRS)))
    return estimate_total_speedup(ByPair(full), ByPair(quarter * less))


@pytest.mark.parametrize("share", [0.25, 0.6])
@pytest.mark.parametrize(("saved", "passed"), [(1.0, True), (0.7, True), (0.35, None), (0.0, False), (-0.5, False)])
def test_it_is_judged_by_how_much_of_the_promised_time_is_saved(share, saved, passed):
    assert judge_speedup(speedup(1 - saved * (1 - share)), share, 3).passed is passed


def test_noise_decides_no_more_often_than_it_may():
    found = [judge_speedup(speedup(1 - 0.35 * 0.75, 0.5, seed), 0.25, 3).passed for seed in range(200)]
    assert found.count(None) >= 180


def test_errors_at_either_bound_are_rare():
    """Of 400, 2.5 % by the interval; 5 % is three standard errors more."""
    for saved, wrong in ((SHOWN_SHARE, True), (DENIED_SHARE, False)):
        found = [judge_speedup(speedup(1 - saved * 0.75, 0.1, seed), 0.25, 3).passed for seed in range(400)]
        assert found.count(wrong) <= 20


def test_a_token_costs_what_its_layers_and_its_readout_cost():
    geometry = published_geometry("pythia-410m")
    shallow, deep = (flops(work_of_token_exiting_at_depth(depth, 24, 16), geometry) for depth in (6, 24))
    assert shallow.blocks * 4 == deep.blocks
    assert shallow.readouts == deep.readouts


# ------------------------------------------------------------ words of verdicts


def test_a_verdict_says_on_what_it_stands(nano):
    row = load_register()["EMAD-E5"]
    evidence = SimpleNamespace(flop_verification=of(nano))
    asked = make_context_with_flop_evidence(evidence, ClaimContext(row, "m", np.random.default_rng(0)))
    survived, absent = (Leg("blocks", outcome, 1.0, None, 1, 0.0, "") for outcome in ("survived", "not applicable"))
    said = asked.combine_legs([survived])
    assert [leg.name for leg in said.legs] == ["blocks", "evidence: witnessed"]
    assert said.legs[1].outcome == "measured"
    assert said.legs[said.deciding] is survived
    assert asked.combine_legs([absent]).legs == (absent,), "no number, so no evidence for one"
    assert asked.not_applicable("no exit").legs == ()
    assert FLOP_EVIDENCE == ("claimed", "timed", "witnessed")
