"""A pair's race divided over processes: the same requests, dealt and put together, by models that are loaded again.

Shares are carried out in this process here, through the same files as between processes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from emad_ref.decoding.switching import SMALL, SwitchingRule
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.measurements.pair_timing import (
    TRANSFORMERS_NAMES,
    WARM_UP,
    PairTimingShare,
)
from emad_ref.measurements.process_replicates import SubprocessFailed, join_shares, run_task_file
from emad_ref.measurements.run_resources import RunResources, SubprocessRunner, make_judge_decoder
from emad_ref.measurements.study import BUDGETS, Study
from emad_ref.models.loading import load
from emad_ref.models.model_spec import FingerprintMismatch
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Unsupported
from tests.lenses import attached

NAMES, TASK, NEW = ("emad-nano", "emad-tiny"), "inventory", 6
PAIRS, PROCESSES = 5, 2
RULE = SwitchingRule(0.5, 2, 1, SMALL)
BUDGET = replace(BUDGETS["smoke"], pairs=PAIRS, processes=PROCESSES)


class Here:
    """Starts no process: does what one would."""

    def __init__(self) -> None:
        self.started = 0

    def __call__(self, task: Path, output: Path, seconds: float) -> int:
        self.started += 1
        run_task_file(task, RunResources())
        return 0


def pair_of(here: Here | None, make=make_judge_decoder, budget=BUDGET) -> PairMeasurements:
    afresh = SubprocessRunner(here) if here else SubprocessRunner(without="nobody can")
    made = PairMeasurements(
        *map(load, NAMES), Study(budget=budget), RunResources(make, runner=afresh), names=NAMES, savings=(0.415,)
    )
    made.rules.__dict__["compared"] = {TASK: SimpleNamespace(gap=SimpleNamespace(value=0.5), worth_routing=True)}
    made.timing.__dict__.update(rule=RULE, new=NEW)
    return made


def point_of(made: PairMeasurements, **more) -> OperatingPoint:
    layers = made.large.subject.stepper.layers
    return OperatingPoint("fixed", "fixed_entropy", layers, layers, (2,), ((1.0,),), **more)


@pytest.fixture(scope="module")
def divided():
    here = Here()
    made = pair_of(here)
    return made, made.timing.rivals, here


def test_every_pair_is_timed_once_in_one_of_the_processes(divided):
    made, timed, here = divided
    assert here.started == PROCESSES
    assert set(timed.seconds) == set(timed.outputs) == {"large", "speculative", "EAD", *TRANSFORMERS_NAMES}
    assert timed.process.tolist() == [0, 0, 0, 1, 1]
    assert all((seconds > 0).all() for seconds in timed.seconds.values())
    assert {len(done) for done in timed.outputs.values()} == {len(timed.prompts)} == {PAIRS}
    said = made.timing.description(timed)
    assert "emad-nano + emad-tiny: timed large, speculative, EAD, assisted, prompt lookup, 6 new tokens" in said
    assert "5 pairs in 2 fresh processes of 2–3 pairs each" in said


def test_together_the_shares_are_the_requests_of_one_process(divided):
    _, timed, _ = divided
    alone = pair_of(None)
    whole = alone.timing.rivals
    assert "5 pairs in this process alone (nobody can)" in alone.timing.description(whole)
    assert whole.process is None
    prompts = [prompt.tokens.tolist() for prompt in alone.timing.prompts(PAIRS + WARM_UP)[WARM_UP:]]
    for found in (timed, whole):
        assert [prompt.tokens.tolist() for (prompt,) in found.prompts] == prompts
    for arm, each in timed.emitted().items():
        assert [rows[0].tolist() for rows in each] == [rows[0].tolist() for rows in whole.emitted()[arm]]
    spent = [made.models.spent(found.recorded("EAD")).tolist() for made, found in ((alone, timed), (alone, whole))]
    assert spent[0] == spent[1]


def test_adaptive_depth_is_timed_there_too_with_what_its_point_names():
    made = pair_of(Here())
    point = point_of(made, lens=attached(made.large.subject.stepper, [2]))
    timed = made.timing.emad_rivals(point)
    assert {"large", "EAD"} & set(timed.seconds) == {"large"}
    assert timed.process.tolist() == [0, 0, 0, 1, 1]
    assert {depth for done in timed.recorded("EMAD") for depth in done.tokens.depth.tolist()} != {point.layers}


def test_what_a_decoder_declines_is_declined_here_and_no_process_is_started():
    def make(request):
        if request.point.probes:
            raise Unsupported("full depth alone")
        return make_judge_decoder(request)

    here = Here()
    made = pair_of(here, make)
    with pytest.raises(Unsupported, match="full depth alone"):
        made.timing.emad_rivals(point_of(made))
    assert here.started == 0


def test_models_that_have_changed_are_refused(divided):
    made, _, _ = divided
    share = PairTimingShare(NAMES, "f" * 64, made.study, made.size, None, ({}, {}), None, NEW)
    with pytest.raises(FingerprintMismatch, match="emad-nano \\+ emad-tiny are not the models any more"):
        share.run(RunResources())


def test_shares_that_timed_other_arms_are_not_put_together(divided):
    _, timed, _ = divided
    fewer = replace(timed, timings=replace(timed.timings, seconds={"large": timed.seconds["large"]}))
    with pytest.raises(SubprocessFailed, match=r"one process timed large, speculative, EAD, .* another large"):
        join_shares([timed, fewer])
