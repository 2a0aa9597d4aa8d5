"""Fitting a tuned lens: it improves on held-out text, never reads that text, and a resumed fit loses nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.calibration import lens_fit
from emad_ref.calibration.calibration_run import BadCheckpoint
from emad_ref.calibration.lens_files import BadLens, load_lens, save_lens
from emad_ref.calibration.lens_fit import LensPlan, fit_lens
from emad_ref.calibration.trace import EmptyCorpus, iterate_states_after, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.probes.tuned_lens import attach_lens
from emad_ref.signals import SIGNALS
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5, some_sources

PLAN = LensPlan(
    model="small", fingerprint="f00d", dtype="float64", corpus="numbers", window=20, layers=(2, 4), rank=None,
    steps=9, tokens_per_step=40, rate=0.02, held_out=0.3, held_out_tokens=120, seed=3,
)  # fmt: skip
LEARNING = replace(PLAN, steps=150, tokens_per_step=120)


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


def text(documents, seed=0):
    """Return a function that yields the same documents of 3–20 tokens at every call."""

    def read():
        rng = np.random.default_rng(seed)
        for number in range(documents):
            yield TokenSequence(rng.integers(0, VOCABULARY, rng.integers(3, 21)), document=number)

    return read


TEXT = text(40)


def numbers(fitted):
    """Return all numbers of a fit, bit for bit."""
    return fitted.lens.digest, fitted.raw_nats, fitted.tuned_nats, fitted.tokens


@pytest.fixture(scope="module")
def uninterrupted(stepper):
    return fit_lens(stepper, PLAN, TEXT)


# ---------------------------------------------------------------- results of the fit


@pytest.mark.parametrize("rank", [None, 8])
def test_what_it_says_on_held_out_text_comes_nearer_to_the_end(stepper, rank):
    fitted = fit_lens(stepper, replace(LEARNING, rank=rank), text(400))
    for layer in PLAN.layers:
        assert fitted.tuned_nats[layer] < 0.8 * fitted.raw_nats[layer]


@torch.inference_mode()
def test_the_divergences_are_those_of_a_trace_of_the_held_out_text(stepper, uninterrupted):
    """−log q(next) averaged over p: the NLL that the final distribution itself expects, less its entropy."""
    held = [window for window in TEXT() if PLAN.is_held_out(window.document)]
    states = list(iterate_states_after(stepper, held))
    final = torch.log_softmax(stepper.logits(states[-1]), dim=-1)[: uninterrupted.tokens]
    entropy = SIGNALS["entropy_nats"].compute_from_logits(final)
    for layer in PLAN.layers:
        seen = {"raw": states[layer - 1], "tuned": uninterrupted.lens(states[layer - 1], layer)}
        for name, hidden in seen.items():
            log_q = torch.log_softmax(stepper.logits(hidden), dim=-1)[: uninterrupted.tokens]
            expected = float((-(final.exp() * log_q).sum(-1) - entropy).mean())
            assert getattr(uninterrupted, f"{name}_nats")[layer] == pytest.approx(expected, rel=1e-9)
    assert uninterrupted.tokens == 120


def test_nothing_is_fitted_on_what_is_held_out(stepper, uninterrupted):
    """With other tokens in held-out documents the lens is the same and the divergences differ."""

    def other():
        for window in TEXT():
            yield replace(window, tokens=window.tokens[::-1].copy()) if PLAN.is_held_out(window.document) else window

    changed = fit_lens(stepper, PLAN, other)
    assert changed.lens.digest == uninterrupted.lens.digest
    assert changed.tuned_nats != uninterrupted.tuned_nats
    held = [PLAN.is_held_out(number) for number in range(1000)]
    assert 250 < sum(held) < 350
    assert held != [replace(PLAN, seed=4).is_held_out(number) for number in range(1000)]


def test_an_encoder_decoder_can_be_given_a_lens():
    t5, rng = Seq2SeqStepper(small_t5()), np.random.default_rng(2)
    texts = [
        TokenSequence(rng.integers(2, VOCABULARY, 12), source=source, document=number)
        for number, source in enumerate(some_sources(*[7] * 60))
    ]
    fitted = fit_lens(t5, replace(LEARNING, layers=(1, 2), steps=60), lambda: texts)
    assert all(fitted.tuned_nats[layer] < 0.9 * fitted.raw_nats[layer] for layer in (1, 2))


def test_seeds_are_arguments(stepper):
    low = replace(PLAN, rank=4, steps=2)
    torch.manual_seed(1)
    first = fit_lens(stepper, low, TEXT)
    torch.manual_seed(2)
    assert numbers(fit_lens(stepper, low, TEXT)) == numbers(first)
    assert fit_lens(stepper, replace(low, seed=4), TEXT).lens.digest != first.lens.digest


def test_the_model_learns_nothing(stepper):
    before = [parameter.clone() for parameter in stepper.model.parameters()]
    fit_lens(stepper, replace(PLAN, steps=2), TEXT)
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in stepper.model.parameters())


# ---------------------------------------------------------------- streams and resumed fits


class PowerCut(Exception):
    """An exception that no code catches."""


@pytest.fixture
def batches(monkeypatch):
    """Count the batches that the model runs, and raise at a given one."""

    def set_up(breaks_at=None):
        seen = []

        def counted(stepper, batch):
            if len(seen) == breaks_at:
                raise PowerCut
            seen.append([window.tokens.tolist() for window in batch])
            return iterate_states_after(stepper, batch)

        monkeypatch.setattr(lens_fit, "iterate_states_after", counted)
        return seen

    return set_up


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("breaks_at", [0, 1, 5, 9, 10])
def test_a_resumed_fit_ends_with_the_same_bits_and_repeats_no_finished_batch(
    stepper, batches, tmp_path, breaks_at, rank
):
    plan, whole = replace(PLAN, rank=rank), batches()
    uninterrupted = fit_lens(stepper, plan, TEXT)
    assert len(whole) > 11, "some of it after the fit, on held-out text"
    before = batches(breaks_at)
    checkpoint = tmp_path / "new folder" / "l.checkpoint"
    with pytest.raises(PowerCut):
        fit_lens(stepper, plan, TEXT, checkpoint=checkpoint, every=1)
    after = batches()
    resumed = fit_lens(stepper, plan, TEXT, checkpoint=checkpoint, resume=True, every=1)
    assert before + after == whole
    assert numbers(resumed) == numbers(uninterrupted)


def test_an_interruption_costs_at_most_one_interval(stepper, uninterrupted, batches, tmp_path):
    batches(breaks_at=7)
    with pytest.raises(PowerCut):
        fit_lens(stepper, PLAN, TEXT, checkpoint=tmp_path / "c", every=3)
    after = batches()
    assert numbers(fit_lens(stepper, PLAN, TEXT, checkpoint=tmp_path / "c", every=3, resume=True)) == numbers(
        uninterrupted
    )
    whole = batches()
    fit_lens(stepper, PLAN, TEXT)
    assert after == whole[6:]


def test_killed_for_good_and_resumed_it_is_the_same(stepper, uninterrupted, tmp_path):
    """SIGKILL in a subprocess, which cannot clean up."""
    program = """
        import os, signal, sys
        from pathlib import Path
        from emad_ref.calibration import lens_fit
        from tests.unit.calibration.test_lens_fit import PLAN, TEXT, CausalStepper, small_model
        keep, calls = lens_fit._save_state, []
        def killed(*args):
            keep(*args)
            calls.append(args)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
        lens_fit._save_state = killed
        lens_fit.fit_lens(CausalStepper(small_model("gpt_neox")), PLAN, TEXT, checkpoint=Path(sys.argv[1]), every=1)
    """
    checkpoint = tmp_path / "c"
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(checkpoint)], env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == -signal.SIGKILL
    resumed = fit_lens(stepper, PLAN, TEXT, checkpoint=checkpoint, resume=True)
    assert resumed.tuned_nats == pytest.approx(uninterrupted.tuned_nats, rel=1e-12)  # another process and thread count


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate": 0.01}, "has rate=0.02, but expected 0.01 as in this run"),
        ({"rank": 4}, "has rank=None, but expected 4"),
        ({"seed": 4}, "has seed=3, but expected 4"),
        ({"fingerprint": "beef"}, "has fingerprint='f00d'"),
    ],
)
def test_a_checkpoint_of_another_plan_is_refused_by_field(stepper, batches, tmp_path, change, said):
    batches(breaks_at=3)
    with pytest.raises(PowerCut):
        fit_lens(stepper, PLAN, TEXT, checkpoint=tmp_path / "c", every=1)
    batches()
    with pytest.raises(BadCheckpoint, match=said):
        fit_lens(stepper, replace(PLAN, **change), TEXT, checkpoint=tmp_path / "c", resume=True)
    with pytest.raises(BadCheckpoint, match="pass resume"):
        fit_lens(stepper, PLAN, TEXT, checkpoint=tmp_path / "c")
    with pytest.raises(BadCheckpoint, match="another text than at the checkpoint"):
        fit_lens(stepper, PLAN, text(40, seed=9), checkpoint=tmp_path / "c", resume=True)


@pytest.mark.parametrize("damage", [b"", b"nothing", None])
def test_a_damaged_checkpoint_is_one_clear_error(stepper, batches, tmp_path, damage):
    batches(breaks_at=3)
    path = tmp_path / "c"
    with pytest.raises(PowerCut):
        fit_lens(stepper, PLAN, TEXT, checkpoint=path, every=1)
    path.write_bytes(path.read_bytes()[:1000] if damage is None else damage)
    with pytest.raises(BadCheckpoint, match=r"cannot be read .* delete it to start anew"):
        fit_lens(stepper, PLAN, TEXT, checkpoint=path, resume=True)


def test_memory_does_not_grow_with_the_text(stepper):
    """With ten times the text in the stream, the remaining memory is equal. Windows are counted, tensors are not.

    The first of three runs makes the one-time objects; 1,800 leaked windows would take more than 700 kB.
    """
    used = []
    for documents in (20, 200, 2000):
        plan = replace(PLAN, steps=8, held_out_tokens=10**6)
        gc.collect()
        tracemalloc.start()
        fit_lens(stepper, plan, text(documents))
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert used[2] < used[1] + 150_000, used


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": (2, LAYERS)}, r"^layers=\(2, 6\), but expected layers in 1–5 of this model"),
        ({"rank": 33}, r"^rank=33, but expected a rank of at most 32, the width"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(stepper, change, said):
    with pytest.raises(BadArgument, match=said):
        fit_lens(stepper, replace(PLAN, **change), TEXT)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"rank": 0}, "rank"),
        ({"layers": ()}, "layers"),
        ({"layers": (4, 2)}, "layers"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"held_out": 1.0}, "held_out"),
        ({"held_out_tokens": 0}, "held_out_tokens"),
    ],
)
def test_a_plan_that_means_nothing_is_refused_by_name(change, named):
    with pytest.raises(BadArgument, match=f"^{named}="):
        replace(PLAN, **change)


def test_text_that_is_all_held_out_or_none_is_too_little(stepper, tmp_path):
    """The error precedes the long fit, which would leave a checkpoint that obstructs the next attempt."""
    held = next(number for number in range(99) if PLAN.is_held_out(number))
    fitted = next(number for number in range(99) if not PLAN.is_held_out(number))
    for number, said in ((held, "no window to fit on"), (fitted, "no document to hold out")):
        text = [TokenSequence(np.arange(9), document=number)]
        with pytest.raises(EmptyCorpus, match=said):
            fit_lens(stepper, PLAN, lambda text=text: text, checkpoint=tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())


def test_a_lens_is_fitted_where_gradients_are_switched_off(stepper):
    """A decoder in the same process may do so, as inference code does."""
    with torch.no_grad():
        fitted = fit_lens(stepper, replace(PLAN, steps=2), TEXT)
    assert numbers(fitted) == numbers(fit_lens(stepper, replace(PLAN, steps=2), TEXT))


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("rank", [None, 4])
def test_a_saved_lens_comes_back_the_same(stepper, tmp_path, rank):
    fitted = fit_lens(stepper, replace(PLAN, rank=rank, steps=2), TEXT)
    save_lens(tmp_path / "l.safetensors", fitted)
    back = load_lens(tmp_path / "l.safetensors")
    assert numbers(back) == numbers(fitted)
    assert (back.plan["rank"], back.plan["model"], back.lens.rank) == (rank, "small", rank)
    name = attach_lens(stepper, back.lens, "f00d")
    assert take_trace(stepper, [TokenSequence(np.arange(9))], lens=name).lens == fitted.lens.digest


def test_another_file_is_one_clear_error(uninterrupted, tmp_path):
    path = tmp_path / "l.safetensors"
    save_lens(path, uninterrupted)
    whole = path.read_bytes()
    for damaged, said in (
        (whole[:-1], "cannot be read"),
        (whole.replace(b'\\"schema\\": 2', b'\\"schema\\": 1'), "has schema=1, but this version reads 2 alone"),
        (whole.replace(b'"4.bias"', b'"5.bias"'), "was changed or cut"),
        (whole[:-8] + np.array([np.nan]).tobytes(), "was changed or cut"),
    ):
        assert damaged != whole
        path.write_bytes(damaged)
        with pytest.raises(BadLens, match=rf"^lens='.*' .*{said}.*; fit it again with `emad lens`$"):
            load_lens(path)
