"""A small model's steps run on one CPU thread, its batches on all; the user's setting is restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.models.loading import load
from emad_ref.models.threads import BATCH, SINGLE_THREADED, all_threads_for_batches, one_thread_for_steps

SMALL = SINGLE_THREADED - 1


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_steps_have_one_thread_and_batches_all():
    with one_thread_for_steps(SMALL):
        assert torch.get_num_threads() == 1
        with all_threads_for_batches(BATCH):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
        with all_threads_for_batches(BATCH - 1):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_the_second_model_of_a_pair_has_as_many():
    with one_thread_for_steps(SMALL), one_thread_for_steps(SMALL), all_threads_for_batches(BATCH):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_an_error_inside_restores_both():
    with pytest.raises(ZeroDivisionError), one_thread_for_steps(SMALL), all_threads_for_batches(BATCH):
        _ = 1 / 0
    assert torch.get_num_threads() == 3


def test_a_large_model_and_a_set_variable_keep_their_threads(monkeypatch):
    with one_thread_for_steps(SINGLE_THREADED):
        assert torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with one_thread_for_steps(SMALL):
        assert torch.get_num_threads() == 3


def test_a_library_user_who_set_one_thread_keeps_it():
    torch.set_num_threads(1)
    with all_threads_for_batches(BATCH):
        assert torch.get_num_threads() == 1


def test_a_trace_is_the_same_on_one_thread_and_on_all():
    model = load("emad-nano")
    tokens = np.random.default_rng(0).integers(0, model.stepper.vocabulary_size, (9, 256))
    threads = []

    def note(layer, states, entropy):
        threads.append(torch.get_num_threads())

    def trace():
        return take_trace(model.stepper, [TokenSequence(row) for row in tokens], observe=note)

    with one_thread_for_steps(SMALL):
        many = trace()
    assert set(threads) == {3}
    torch.set_num_threads(1)
    one = trace()
    np.testing.assert_allclose(many.nll_nats, one.nll_nats, atol=1e-4)
    np.testing.assert_array_equal(many.top1, one.top1)
