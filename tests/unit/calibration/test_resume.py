"""A calibration that is interrupted and resumed equals an uninterrupted run and needs no more memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emad_ref.calibration import calibration_run as resumable
from emad_ref.calibration.calibration_run import (
    BadCheckpoint,
    CalibrationPlan,
    calibrate,
    count_targets_by_token,
    limit_tokens,
)
from emad_ref.calibration.entropy_statistics import measure_batch_statistics
from emad_ref.calibration.profile import profile_of
from emad_ref.calibration.trace import EmptyCorpus, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import ThresholdBinSpec
from tests.small_models import LAYERS, VOCABULARY, small_model

WINDOW, BATCH = 20, 60
GRID = ThresholdBinSpec(("position", "top1_probability"), position_edges=(4, 10), top1_probability_edges=(0.05, 0.1))
PLAN = CalibrationPlan(
    model="small",
    fingerprint="f00d",
    dtype="float64",
    window=WINDOW,
    probes=(2, 4),
    bins=GRID,
    minimum_tokens=20,
    tokens_per_batch=BATCH,
)


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


def corpus(windows, seed=0):
    """Return a function that yields the same windows of 3–20 tokens at every call."""

    def read():
        rng = np.random.default_rng(seed)
        for number in range(windows):
            yield TokenSequence(rng.integers(0, VOCABULARY, rng.integers(3, WINDOW + 1)), document=number)

    return read


CORPORA = {"a": corpus(14, 1), "b": corpus(9, 2)}


class PowerCut(Exception):
    """An exception that no code catches; a KeyboardInterrupt would end pytest if a test expects another error."""


class Batches:
    """``measure_batch_statistics`` that logs its arguments and raises at a given call."""

    def __init__(self, breaks_at=None):
        self.seen, self.breaks_at = [], breaks_at

    def __call__(self, stepper, batch, spec, first_probe, layers):
        if len(self.seen) == self.breaks_at:
            raise PowerCut
        self.seen.append([window.tokens.tolist() for window in batch])
        return measure_batch_statistics(stepper, batch, spec, first_probe, layers)


@pytest.fixture
def batches(monkeypatch):
    """Install a fresh ``Batches``."""

    def set_up(breaks_at=None):
        counted = Batches(breaks_at)
        monkeypatch.setattr(resumable, "measure_batch_statistics", counted)
        return counted

    return set_up


@pytest.fixture(scope="module")
def uninterrupted(stepper):
    return calibrate(stepper, PLAN, CORPORA)


def test_the_profile_is_that_of_the_whole_trace(stepper, uninterrupted):
    trace = take_trace(stepper, [window for read in CORPORA.values() for window in read()])
    whole = profile_of(
        trace, (2, 4), model="small", fingerprint="f00d", corpus="a + b", dtype="float64", bins=GRID, minimum_tokens=20
    )
    assert uninterrupted.read == (2, 4, 6)
    assert whole.read == tuple(range(1, stepper.layers + 1))
    # the same sums in a different order
    assert uninterrupted.mean_nats == pytest.approx([whole.mean_nats[layer - 1] for layer in (2, 4, 6)], rel=1e-12)
    assert uninterrupted.targets_nats == pytest.approx(whole.targets_nats, rel=1e-12)
    assert uninterrupted.bin_targets_nats == pytest.approx(np.array(whole.bin_targets_nats), rel=1e-12)
    assert uninterrupted.dropped_features == whole.dropped_features
    assert np.array_equal(uninterrupted.statistics.histogram, whole.statistics.histogram[:, [1, 3, 5]])
    assert (uninterrupted.tokens, uninterrupted.sequences) == (whole.tokens, whole.sequences) == (len(trace), 23)
    assert uninterrupted.corpora == {
        name: sum(len(window.tokens) - 1 for window in read()) for name, read in CORPORA.items()
    }


@pytest.mark.parametrize("breaks_at", [0, 1, 4, 5, 6])
def test_a_resumed_run_ends_with_the_same_bits_and_repeats_no_finished_batch(
    stepper, uninterrupted, batches, tmp_path, breaks_at
):
    whole = batches()
    calibrate(stepper, PLAN, CORPORA)
    assert len(whole.seen) > 6
    checkpoint = tmp_path / "new folder" / "p.checkpoint"
    before = batches(breaks_at)
    with pytest.raises(PowerCut):
        calibrate(stepper, PLAN, CORPORA, checkpoint=checkpoint)
    after = batches()
    profile = calibrate(stepper, PLAN, CORPORA, checkpoint=checkpoint, resume=True)
    assert before.seen + after.seen == whole.seen  # only the batch in flight starts twice
    assert profile == uninterrupted
    assert [path.name for path in tmp_path.rglob("*.part")] == []


def test_a_run_may_be_interrupted_again_and_again(stepper, uninterrupted, batches, tmp_path):
    checkpoint = tmp_path / "p.checkpoint"
    for _ in range(3):
        batches(breaks_at=2)
        with pytest.raises(PowerCut):
            calibrate(stepper, PLAN, CORPORA, checkpoint=checkpoint, resume=True)
    batches()
    assert calibrate(stepper, PLAN, CORPORA, checkpoint=checkpoint, resume=True) == uninterrupted


def test_a_checkpoint_every_few_batches_costs_as_many(stepper, uninterrupted, batches, tmp_path):
    batches(breaks_at=5)
    with pytest.raises(PowerCut):
        calibrate(stepper, PLAN, CORPORA, checkpoint=tmp_path / "c", every=2)
    after = batches()
    assert calibrate(stepper, PLAN, CORPORA, checkpoint=tmp_path / "c", every=2, resume=True) == uninterrupted
    whole = batches()
    calibrate(stepper, PLAN, CORPORA)
    assert len(after.seen) == len(whole.seen) - 4


def test_a_finished_run_resumed_reads_nothing_again(stepper, uninterrupted, batches, tmp_path):
    calibrate(stepper, PLAN, CORPORA, checkpoint=tmp_path / "c")
    idle = batches()
    assert calibrate(stepper, PLAN, CORPORA, checkpoint=tmp_path / "c", resume=True) == uninterrupted
    assert idle.seen == []


# ---------------------------------------------------------------- refusals


@pytest.fixture
def checkpoint(stepper, batches, tmp_path):
    """Return the checkpoint of a run that broke after three batches."""
    batches(breaks_at=3)
    with pytest.raises(PowerCut):
        calibrate(stepper, PLAN, CORPORA, checkpoint=tmp_path / "c")
    return tmp_path / "c"


OTHERS = [
    ({"fingerprint": "beef"}, "fingerprint='f00d', but expected 'beef' as in this run"),
    ({"dtype": "float32"}, "dtype='float64', but expected 'float32'"),
    ({"window": 21}, "window=20, but expected 21"),
    ({"probes": (2, 3)}, r"probes=\[2, 4\], but expected \[2, 3\]"),
    ({"bins": ThresholdBinSpec(("position",))}, "bins=.*, but expected .*'features': \\['position'\\]"),
    ({"tokens": 40}, "tokens=None, but expected 40"),
    ({"documents": 7}, "documents=None, but expected 7"),
    ({"tokens_per_batch": 61}, "tokens_per_batch=60, but expected 61"),
]


@pytest.mark.parametrize(("change", "message"), OTHERS, ids=[next(iter(change)) for change, _ in OTHERS])
def test_a_checkpoint_of_another_configuration_is_refused_by_field(stepper, batches, checkpoint, change, message):
    idle = batches()
    with pytest.raises(BadCheckpoint, match=f"{message}.*delete it to start anew"):
        calibrate(stepper, replace(PLAN, **change), CORPORA, checkpoint=checkpoint, resume=True)
    assert idle.seen == []


def test_a_checkpoint_taken_with_other_libraries_is_refused(stepper, checkpoint, monkeypatch):
    monkeypatch.setattr(resumable, "library_versions", lambda: {"torch": "0.1"})
    with pytest.raises(BadCheckpoint, match=r"versions=.*but expected {'torch': '0\.1'}"):
        calibrate(stepper, PLAN, CORPORA, checkpoint=checkpoint, resume=True)


def test_a_checkpoint_on_another_text_is_refused(stepper, checkpoint):
    with pytest.raises(BadCheckpoint, match=r"corpus='a': its first .* windows are another text"):
        calibrate(stepper, PLAN, {"a": corpus(14, 3), "b": CORPORA["b"]}, checkpoint=checkpoint, resume=True)
    with pytest.raises(BadCheckpoint, match=r"has read corpora \['a'\], but expected the first of \['b', 'a'\]"):
        calibrate(stepper, PLAN, dict(reversed(CORPORA.items())), checkpoint=checkpoint, resume=True)


def test_a_checkpoint_is_not_overwritten_unasked(stepper, checkpoint):
    before = checkpoint.read_bytes()
    with pytest.raises(BadCheckpoint, match="holds an unfinished calibration, but expected none; pass resume"):
        calibrate(stepper, PLAN, CORPORA, checkpoint=checkpoint)
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda b: b"", "cannot be read"),
        (lambda b: b[:-500], "cannot be read"),
        (lambda b: b[:-8] + b"\1" * 8, "was changed or cut"),
        (lambda b: b.replace(b"f00d", b"f00e"), "was changed or"),
    ],
)
def test_a_damaged_checkpoint_is_refused(stepper, checkpoint, damage, said):
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    with pytest.raises(BadCheckpoint, match=rf"^checkpoint='.*' .*{said}.*; delete it to start anew$"):
        calibrate(stepper, PLAN, CORPORA, checkpoint=checkpoint, resume=True)


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null/c", "."])
def test_a_checkpoint_that_cannot_be_written_is_refused_before_the_pass(stepper, batches, place):
    idle = batches()
    with pytest.raises(BadArgument, match=r"^checkpoint='"):
        calibrate(stepper, PLAN, CORPORA, checkpoint=Path(place))
    assert idle.seen == []


@pytest.mark.parametrize(
    ("change", "corpora", "message"),
    [
        ({"probes": (4, 2)}, CORPORA, r"probes=\(4, 2\), but expected ascending"),
        ({"probes": (LAYERS,)}, CORPORA, r"probes=\(6,\), but expected ascending layers in 1–5"),
        ({"probes": ()}, CORPORA, "first_probe=None, but expected the layer that shows position×top1_probability"),
        ({"tokens": 0}, CORPORA, "tokens=0, but expected a count ≥ 1"),
        ({}, {}, r"corpora=\[\], but expected at least one corpus"),
    ],
)
def test_impossible_plans_are_refused(stepper, change, corpora, message):
    with pytest.raises(BadArgument, match=message):
        calibrate(stepper, replace(PLAN, **change), corpora)
    with pytest.raises(BadArgument, match="every=0"):
        calibrate(stepper, PLAN, CORPORA, every=0)


def test_a_corpus_without_text_is_named(stepper):
    with pytest.raises(EmptyCorpus, match="corpus='none' has no window"):
        calibrate(stepper, PLAN, {**CORPORA, "none": corpus(0)})


# ---------------------------------------------------------------- limits, counts, memory


def test_a_limit_in_tokens_is_met_exactly(stepper):
    windows = [TokenSequence(np.arange(10)), TokenSequence(np.arange(8), 3), TokenSequence(np.arange(5))]
    assert [len(w.tokens) for w in limit_tokens(windows, None)] == [10, 8, 5]
    assert [len(w.tokens) for w in limit_tokens(windows, 11)] == [
        10,
        6,
    ]  # 9 decided, then positions 3 and 4 of the second
    assert [len(w.tokens) for w in limit_tokens(windows, 9)] == [10]
    assert [len(w.tokens) for w in limit_tokens(windows, 99)] == [10, 8, 5]
    with pytest.raises(BadArgument, match="tokens=0, but expected a count"):
        list(limit_tokens(windows, 0))
    profile = calibrate(stepper, replace(PLAN, tokens=33), CORPORA)
    assert profile.corpora == {"a": 33, "b": 33}


def test_a_limit_reads_no_further_than_it_must(stepper):
    def endless():
        while True:
            yield TokenSequence(np.arange(12))

    assert calibrate(stepper, replace(PLAN, tokens=100), {"endless": endless}).tokens == 100


def test_token_counts_are_of_the_targets_that_calibration_reads():
    read = [TokenSequence(np.array([0, 3, 3, 5])), TokenSequence(np.array([0, 5, 6, 7]), 1)]
    corpora = {"x": lambda: read}
    assert count_targets_by_token(corpora, 8, None).tolist() == [0, 0, 0, 2, 0, 1, 1, 1]
    assert count_targets_by_token(corpora, 8, 4).tolist() == [0, 0, 0, 2, 0, 1, 1, 0]
    with pytest.raises(EmptyCorpus, match="at least one document of two tokens"):
        count_targets_by_token({"x": list}, 8, None)


def test_memory_does_not_grow_with_the_corpus(stepper):
    def peak(windows):
        tracemalloc.start()
        calibrate(stepper, replace(PLAN, tokens_per_batch=200), {"a": corpus(windows)})
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(20)  # allocated once and kept
    # 300 windows hold 3,300 tokens × 6 layers × 20 bytes of trace: 0.4 MB more than 20 do
    assert peak(300) < peak(20) + 100_000


@pytest.mark.parametrize(
    ("every", "probes", "read"),
    [(False, (2, 4), (2, 4, 5)), (True, (2, 4), (1, 2, 3, 4, 5)), (False, (), (1, 2, 3, 4, 5))],
)
def test_entropies_are_read_at_the_probes_and_the_last_or_without_a_probe_after_every_layer(
    every, probes, read
) -> None:
    assert replace(PLAN, probes=probes, every_layer=every).layers_to_read(5) == read
