"""EMAD-F2 (falsifier): does wall-clock improve by at least 10 % at equal batch size and prompt length?"""

from __future__ import annotations

import pytest

from emad_ref.verdict.judge import judge_f2
from pytest_emad.family import other_legs
from pytest_emad.replayclock import CLOCK, record_samples


@pytest.mark.emad(claim="EMAD-F2", measures=True)
def test_wall_clock_improves(emad_evidence, emad_record, emad_register, emad_settings):
    evidence = emad_evidence
    with emad_record.unless_unsupported("EMAD-F2", evidence.name):
        timings = evidence.stopwatch.timings
        pairs = {rows: (t.seconds["full"], t.seconds["adaptive"]) for rows, t in timings.items()}
        baselines = {rows: (t.seconds["full"], t.seconds["generate"]) for rows, t in timings.items()}
        emad_record.note(evidence.stopwatch.note)
        emad_record.point(evidence.stopwatch.row)
        others = other_legs("EMAD-F2", emad_settings, emad_register, evidence.stepper.layers)
        verdict = judge_f2(pairs, baselines, emad_register["EMAD-F2"], evidence.name, other_legs=others)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


@pytest.mark.emad(measures=True)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("arm", ["full", "adaptive", "generate"])
def test_samples_are_recorded_as_benchmarks(emad_evidence, benchmark, arm):
    """pytest-benchmark's tables and JSON hold the samples of the paired run: replayed, not timed again."""
    rows = min(emad_evidence.stopwatch.timings)
    record_samples(benchmark, emad_evidence.stopwatch.timings[rows].seconds[arm], f"{emad_evidence.name}, batch {rows}")
