"""Timed pairs divided over fresh processes: the same requests, results joined again, failed processes.

The shares run in this process, through the same files; ``tests/plugin/test_subprocesses.py`` starts processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emad_ref.absent import Absent
from emad_ref.decoding.self_speculation import Drafting
from emad_ref.decoding.switching import SMALL, SwitchingRule
from emad_ref.models.generation import LOOKUP
from emad_ref.models.loading import load
from emad_ref.models.model_spec import FingerprintMismatch
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Unsupported
from emad_ref.record import Record
from pytest_emad.measurements.latency import ADAPTIVE, COMPILED, FULL, GENERATE, WARM_UP, LatencyBenchmark
from pytest_emad.measurements.learned_exit import time_self_speculation
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.pair_timing import (
    TRANSFORMERS_NAMES,
    time_pair_as_subprocess_task,
)
from pytest_emad.measurements.process_replicates import (
    ProcessReplicates,
    SubprocessFailed,
    join_timings,
    run_in_subprocess,
    run_task_file,
    time_model_as_subprocess_task,
)
from pytest_emad.measurements.run_resources import RunResources, SubprocessRunner, make_decoder_on_judge_model
from pytest_emad.measurements.study import BUDGETS, Study
from tests.random_lenses import attached

PAIRS, PROCESSES, SHAPE = 7, 3, (8, 4)
BUDGET = replace(
    BUDGETS["smoke"], pairs=PAIRS, processes=PROCESSES, batch_sizes=(1, 2), prompt_tokens=SHAPE[0], new_tokens=SHAPE[1]
)


class Number:
    """A task that any process can run."""

    def __call__(self, host: RunResources) -> int:
        return os.getpid()


class Here:
    """Starts no process, but does its work here and keeps the tasks."""

    def __init__(self) -> None:
        self.started = 0
        self.limits: list[float] = []

    def __call__(self, task: Path, output: Path, seconds: float) -> int:
        self.started += 1
        self.limits.append(seconds)
        run_task_file(task, RunResources())
        return 0


def evidence(host: RunResources, budget=BUDGET) -> ModelMeasurements:
    made = ModelMeasurements(load("emad-nano"), Study(corpus="world:premise", budget=budget), host)
    made.latency._shape = SHAPE
    return made


def point_of(made: ModelMeasurements) -> OperatingPoint:
    layers = made.subject.stepper.layers
    return OperatingPoint("fixed", "fixed_entropy", layers, layers, (2,), ((1.0,),))


@pytest.fixture(scope="module")
def divided():
    here = Here()
    made = evidence(RunResources(runner=SubprocessRunner(here)))
    return made, made.latency.time_point_by_batch_size(point_of(made)), here


def test_every_pair_is_timed_once_in_one_of_the_processes(divided):
    _, timed, here = divided
    assert here.started == PROCESSES
    for rows, found in timed.items():
        assert {len(column) for column in found.seconds.values()} == {PAIRS}
        assert all((column > 0).all() for column in found.seconds.values())
        assert found.process.tolist() == [0, 0, 0, 1, 1, 2, 2]
        assert found.paired_seconds_by_arm()["full"].process_count == PROCESSES
        assert [len(prompts) for prompts in found.prompts] == [rows] * PAIRS
        assert {len(done) for done in found.outputs.values()} == {PAIRS}
        assert len(found.timings.first) == PAIRS


def test_together_the_shares_are_the_requests_of_one_process(divided):
    _, timed, _ = divided
    alone = evidence(RunResources(), replace(BUDGET, processes=1))
    whole = alone.latency.time_point_by_batch_size(point_of(alone))
    for rows, found in timed.items():
        for mine, theirs in zip(found.prompts, whole[rows].prompts, strict=True):
            assert [each.tokens.tolist() for each in mine] == [each.tokens.tolist() for each in theirs]
        assert len(found.audited) == len(whole[rows].audited)
        assert found.entropy != whole[rows].entropy, "the checked requests are drawn after all timing"
        assert all(isinstance(found.outputs[ADAPTIVE][pair], Record) for pair in found.audited)
        for arm, done in found.outputs.items():
            emitted = [[tokens.tolist() for tokens in _emitted(each)] for each in done]
            assert emitted == [[tokens.tolist() for tokens in _emitted(each)] for each in whole[rows].outputs[arm]]


def _emitted(done):
    return done.emitted if isinstance(done, Record) else done


def test_the_time_that_a_process_is_given_grows_with_what_it_is_to_time():
    def limit(pairs, new):
        here = Here()
        made = evidence(
            RunResources(runner=SubprocessRunner(here, allowed_s=7.0)), replace(BUDGET, pairs=pairs, processes=2)
        )
        made.latency._shape = SHAPE[0], new
        made.latency._trial_seconds = lambda length: (length / 8, 0.5)  # a second a prompt, half a second a token
        made.latency.time_point_by_batch_size(point_of(made))
        assert len(set(here.limits)) == 1
        return here.limits[0]

    # four arms (prompt lookup for two rows, too), one row and two, pairs of a share, warm-up and those
    # with a separately timed first token
    assert limit(4, 4) == 7 + 10 * 4 * 3 * (2 + 2 + 6) * (1 + 4 * 0.5)
    assert limit(4, 8) == 7 + 10 * 4 * 3 * (2 + 2 + 6) * (1 + 8 * 0.5)
    assert limit(8, 4) == 7 + 10 * 4 * 3 * (4 + 2 + 6) * (1 + 4 * 0.5)


def test_what_was_emitted_while_the_clock_ran_is_looked_at(divided):
    made, timed, _ = divided
    for rows, found in timed.items():
        finding = made.latency.check_point_outputs(found, point_of(made))
        assert finding.passed is True, finding.detail
        assert finding.n == len(found.seconds) * rows * len(found.audited) * SHAPE[1]
    lying = timed[1]
    record = lying.outputs["adaptive"][lying.audited[0]]
    record.emitted[0][-1] ^= 1
    assert made.latency.check_point_outputs(lying, point_of(made)).passed is False
    record.emitted[0][-1] ^= 1


def test_the_note_says_where_pairs_were_timed(divided):
    made, _, _ = divided
    assert "7 pairs in 3 fresh processes of 2–3 pairs each" in made.latency.format_timing_note(point_of(made), 1.1, 4)


@pytest.mark.parametrize(
    ("processes", "afresh", "said"),
    [
        (1, SubprocessRunner(Here()), "in this process alone (the budget smoke starts no others)"),
        (3, SubprocessRunner(Absent("no runner here")), "in this process alone (no runner here)"),
    ],
)
def test_a_race_that_stays_in_one_process_says_why(processes, afresh, said):
    made = evidence(RunResources(runner=afresh), replace(BUDGET, processes=processes, batch_sizes=(1,)))
    assert made.latency.time_point_by_batch_size(point_of(made))[1].process is None
    assert said in made.latency.format_timing_note(point_of(made), 1.1, 4)


def test_each_share_has_its_own_order_of_arms_and_the_same_warm_up(divided, monkeypatch):
    made, _, _ = divided
    shares: list[partial] = []
    monkeypatch.setattr(
        "pytest_emad.measurements.process_replicates.run_in_subprocess",
        lambda afresh, share, expected_s: shares.append(share) or {},
    )
    monkeypatch.setattr("pytest_emad.measurements.process_replicates.join_timings", lambda parts: None)
    with pytest.raises(KeyError):
        ProcessReplicates(SubprocessRunner(Here()), made.subject).time_batch_sizes_over_processes(
            made.latency,
            partial(LatencyBenchmark.time_point, point=point_of(made)),
            (),
            {1: made.latency.make_requests(1)},
        )
    drawn = [share.keywords["requests"][1] for share in shares]
    assert len({each.seed for each in drawn}) == PROCESSES
    warming = [[batch[0].tokens.tolist() for batch in each.batches[:WARM_UP]] for each in drawn]
    assert warming == [warming[0]] * PROCESSES


def test_what_points_name_goes_with_them():
    """A process that has read no lens times a point that reads through a tuned lens, at the same depths."""
    made = evidence(RunResources(runner=SubprocessRunner(Here())), replace(BUDGET, batch_sizes=(1,), pairs=3))
    point = replace(point_of(made), lens=attached(made.subject.stepper, [2]))
    timed = made.latency.time_point_by_batch_size(point)[1]
    assert timed.process.tolist() == [0, 1, 2]
    finding = made.latency.check_point_outputs(timed, point)
    assert finding.passed is True, finding.detail


def test_points_beside_full_depth_are_timed_in_processes_where_a_verdict_rests_on_it():
    """Every record returns, so that the work left out is known."""
    here = Here()
    made = evidence(RunResources(runner=SubprocessRunner(here)), replace(BUDGET, pairs=4, processes=2))
    points = {"eager": replace(point_of(made), schedule="free_eager"), "monotone": point_of(made)}
    alone = made.latency.time_against_full_depth(points)
    assert (alone.process, here.started) == (None, 0)
    timed = made.latency.time_against_full_depth(points, decides=True)
    assert (timed.process.tolist(), here.started) == ([0, 0, 1, 1], 2)
    assert set(timed.seconds) == {FULL, *points}
    layers = made.subject.stepper.layers
    for arm in points:
        assert all(isinstance(done, Record) for done in timed.outputs[arm])
        assert timed.compute_skipped_share(arm, layers) == alone.compute_skipped_share(arm, layers) > 0


def test_drafts_are_timed_in_processes_too():
    made = evidence(RunResources(runner=SubprocessRunner(Here())), replace(BUDGET, pairs=4, processes=2))
    lens = attached(made.subject.stepper, [2], scale=0.0)
    timed = made.latency.run_timing_by_batch_size(partial(time_self_speculation, drafting=Drafting(2, 3, lens=lens)))
    assert set(timed[1].seconds) == {FULL, ADAPTIVE, GENERATE, LOOKUP}
    assert [found.process.tolist() for found in timed.values()] == [[0, 0, 1, 1]] * 2
    for found in timed.values():
        finding = made.latency.check_outputs(found, {"full": made.subject.full_depth_point})
        assert finding.passed is True, finding.detail


def test_what_the_decoder_declines_is_declined_here_and_no_process_is_started():
    here = Here()

    def make(request):
        if request.point.probes:
            raise Unsupported("full depth alone")
        return RunResources().make_decoder(request)

    made = evidence(RunResources(make, runner=SubprocessRunner(here)))
    with pytest.raises(Unsupported, match="full depth alone"):
        made.latency.time_point_by_batch_size(point_of(made))
    assert here.started == 0


def test_a_model_that_has_changed_is_refused(divided):
    made, _, _ = divided
    timing = partial(LatencyBenchmark.time_point, point=point_of(made))
    given = {"study": made.study, "time_requests": timing, "shape": SHAPE, "attached": {}, "requests": {}}
    with pytest.raises(FingerprintMismatch, match="not the model any more"):
        time_model_as_subprocess_task(RunResources(), name="emad-nano", fingerprint="f" * 64, **given)


def test_shares_that_timed_other_arms_are_not_put_together(divided):
    _, timed, _ = divided
    fewer = replace(timed[1].timings, seconds={"full": timed[1].seconds["full"]})
    with pytest.raises(
        SubprocessFailed, match="one process timed full, adaptive, generate, prompt lookup, another full"
    ):
        join_timings([timed[1], replace(timed[1], timings=fewer)])


# ------------------------------------------------------------ failed processes


ANSWERS = """import sys
from pathlib import Path
from pytest_emad.measurements.process_replicates import run_task_file
from pytest_emad.measurements.run_resources import RunResources
run_task_file(Path(sys.argv[1]), RunResources())"""


@pytest.mark.slow  # compiles once, and loads torch twice more
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_processes_race_a_compiled_baseline_from_code_that_was_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    kept: list[set[Path]] = []

    def start(task: Path, output: Path, seconds: float) -> int:
        with open(output, "wb") as file:
            command = [sys.executable, "-c", ANSWERS, str(task)]
            status = subprocess.run(command, stdout=file, stderr=file, check=False, timeout=seconds).returncode
        kept.append(built(tmp_path))
        return status

    largest = replace(BUDGETS["full"], pairs=4, processes=2, batch_sizes=(1, 2), prompt_tokens=8, new_tokens=4)
    made = evidence(RunResources(runner=SubprocessRunner(start)), largest)
    timed = made.latency.time_point_by_batch_size(point_of(made))
    assert set() < kept[0] == kept[1]
    for found in timed.values():
        assert list(found.seconds)[:4] == [FULL, ADAPTIVE, GENERATE, COMPILED]
        assert found.process.tolist() == [0, 0, 1, 1]
        assert made.latency.check_point_outputs(found, point_of(made)).passed is True


def built(folder: Path) -> set[Path]:
    """Return the kernels that Inductor has built there."""
    return {path.relative_to(folder) for path in folder.rglob("*.so")}


def running(program: str) -> SubprocessRunner:
    def start(task: Path, output: Path, seconds: float) -> int:
        command = [sys.executable, "-c", program]
        with open(output, "wb") as file:
            return subprocess.run(command, stdout=file, stderr=file, check=False, timeout=seconds).returncode

    return SubprocessRunner(start, allowed_s=2.0)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "import sys; print('warming', flush=True); sys.exit('no such decoder')",
            "ended with status 1.*warming / no such decoder",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL.*printed last: nothing"),
        ("print('all well')", "ended without a result.*all well"),
        (
            "import time; print('warming', flush=True); time.sleep(60)",
            "was ended after 3 s: 2 s to start in, and 10 times the 0.1 s.*warming;.*mend what hangs, raise --emad-pro",
        ),
    ],
)
def test_a_process_that_fails_names_what_it_printed(program, said, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(SubprocessFailed, match=said) as failed:
        run_in_subprocess(running(program), Number(), 0.1)
    (kept,) = tmp_path.glob("emad-afresh-*/output")
    assert str(kept) in str(failed.value)


def test_nothing_is_left_of_one_that_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_in_subprocess(SubprocessRunner(Here()), Number(), 0.1) == os.getpid()
    assert list(tmp_path.iterdir()) == []


NAMES, TASK, NEW = ("emad-nano", "emad-tiny"), "inventory", 6
PAIR_REQUESTS, PAIR_PROCESSES = 5, 2
RULE = SwitchingRule(0.5, 2, 1, SMALL)
PAIR_BUDGET = replace(BUDGETS["smoke"], pairs=PAIR_REQUESTS, processes=PAIR_PROCESSES)


def pair_of(here: Here | None, make=make_decoder_on_judge_model, budget=PAIR_BUDGET) -> PairMeasurements:
    afresh = SubprocessRunner(here) if here else SubprocessRunner(Absent("no runner here"))
    made = PairMeasurements(
        *map(load, NAMES), Study(budget=budget), RunResources(make, runner=afresh), names=NAMES, savings=(0.415,)
    )
    made.routing_rules.comparisons = {TASK: SimpleNamespace(gap=SimpleNamespace(value=0.5), is_worth_routing=True)}
    made.latency.timed_switching_rule, made.latency.n_new_tokens = RULE, NEW
    return made


def pair_point(made: PairMeasurements, **more) -> OperatingPoint:
    layers = made.large.subject.stepper.layers
    return OperatingPoint("fixed", "fixed_entropy", layers, layers, (2,), ((1.0,),), **more)


@pytest.fixture(scope="module")
def divided_pair():
    here = Here()
    made = pair_of(here)
    return made, made.latency.switching_timings, here


def test_every_request_of_a_pair_is_timed_once_in_one_of_the_processes(divided_pair):
    made, timed, here = divided_pair
    assert here.started == PAIR_PROCESSES
    assert set(timed.seconds) == set(timed.outputs) == {"large", "speculative", "EAD", *TRANSFORMERS_NAMES}
    assert timed.process.tolist() == [0, 0, 0, 1, 1]
    assert all((seconds > 0).all() for seconds in timed.seconds.values())
    assert {len(done) for done in timed.outputs.values()} == {len(timed.prompts)} == {PAIR_REQUESTS}
    said = made.latency.describe_timing(timed)
    assert "emad-nano + emad-tiny: timed large, speculative, EAD, assisted, prompt lookup, 6 new tokens" in said
    assert "5 pairs in 2 fresh processes of 2–3 pairs each" in said


def test_together_the_shares_of_a_pair_are_the_requests_of_one_process(divided_pair):
    _, timed, _ = divided_pair
    alone = pair_of(None)
    whole = alone.latency.switching_timings
    assert "5 pairs in this process alone (no runner here)" in alone.latency.describe_timing(whole)
    assert whole.process is None
    prompts = [prompt.tokens.tolist() for prompt in alone.latency.make_prompts(PAIR_REQUESTS + WARM_UP)[WARM_UP:]]
    for found in (timed, whole):
        assert [prompt.tokens.tolist() for (prompt,) in found.prompts] == prompts
    for arm, each in timed.emitted_token_ids_by_arm().items():
        assert [rows[0].tolist() for rows in each] == [
            rows[0].tolist() for rows in whole.emitted_token_ids_by_arm()[arm]
        ]
    spent = [
        made.models.compute_flops_per_decoding(found.audited_decodings("EAD")).tolist()
        for made, found in ((alone, timed), (alone, whole))
    ]
    assert spent[0] == spent[1]


def test_adaptive_depth_is_timed_there_too_with_what_its_point_names():
    made = pair_of(Here())
    point = pair_point(made, lens=attached(made.large.subject.stepper, [2]))
    timed = made.latency.time_emad_arms(point)
    assert {"large", "EAD"} & set(timed.seconds) == {"large"}
    assert timed.process.tolist() == [0, 0, 0, 1, 1]
    assert {depth for done in timed.audited_decodings("EMAD") for depth in done.tokens.depth.tolist()} != {point.layers}


def test_what_a_decoder_of_a_pair_declines_is_declined_here_and_no_process_is_started():
    def make(request):
        if request.point.probes:
            raise Unsupported("full depth alone")
        return make_decoder_on_judge_model(request)

    here = Here()
    made = pair_of(here, make)
    with pytest.raises(Unsupported, match="full depth alone"):
        made.latency.time_emad_arms(pair_point(made))
    assert here.started == 0


def test_models_that_have_changed_are_refused(divided_pair):
    made, _, _ = divided_pair
    given = {"study": made.study, "size": made.size, "factory": None, "attached": ({}, {}), "requests": None}
    with pytest.raises(FingerprintMismatch, match="emad-nano \\+ emad-tiny are not the models any more"):
        time_pair_as_subprocess_task(RunResources(), names=NAMES, fingerprint="f" * 64, new=NEW, **given)
