"""Blockwise readout: logits in blocks of rows, every row once, no bit dependent on other rows."""

from __future__ import annotations

import pytest
import torch

from emad_ref.calibration.trace import readout_columns
from emad_ref.probes import signal_values as module
from emad_ref.probes.signal_values import apply_in_row_blocks, iterate_row_slices
from emad_ref.signals import ENTROPY, LAYERWISE, Signal

ROWS, VOCABULARY = 37, 300
ROW_BYTES = VOCABULARY * 4


@pytest.fixture
def logits() -> torch.Tensor:
    """Return certain and uncertain rows, ties, and one with masked tokens."""
    made = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    made *= torch.logspace(-1, 1.5, ROWS)[:, None]
    made[5] = 0.0
    made[7, ::3] = -torch.inf
    return made


@pytest.mark.parametrize("cached", [1, ROW_BYTES, 5 * ROW_BYTES, 37 * ROW_BYTES, 2**30])
def test_blocks_cut_rows_in_order_and_none_twice(logits: torch.Tensor, cached: int) -> None:
    cut = list(iterate_row_slices(logits, cached))
    assert torch.equal(torch.cat([logits[rows] for rows in cut]), logits)
    most = max(2, cached * torch.get_num_threads() // ROW_BYTES)
    assert all(2 <= len(logits[rows]) <= most + 1 for rows in cut)


def test_a_row_alone_is_a_block_only_where_there_is_no_other() -> None:
    assert list(iterate_row_slices(torch.zeros(1, VOCABULARY), 1)) == [slice(0, 1)]
    assert list(iterate_row_slices(torch.zeros(3, VOCABULARY), 1)) == [slice(0, 3)]


def test_threads_that_share_a_long_row_add_it_up_as_they_do_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        long = torch.randn(5, 100_000, generator=torch.Generator().manual_seed(0))
        whole = ENTROPY.compute_from_logits(long)
        monkeypatch.setattr(module, "CACHED_BYTES", 1)
        assert torch.equal(apply_in_row_blocks(long, ENTROPY.compute_from_logits), whole)
    finally:
        torch.set_num_threads(threads)


def test_other_devices_take_all_rows_at_once(logits: torch.Tensor) -> None:
    assert list(iterate_row_slices(logits.to("meta"), 1)) == [slice(0, ROWS)]


@pytest.mark.parametrize("signal", LAYERWISE.values(), ids=LAYERWISE)
def test_a_signal_read_in_blocks_is_the_signal_read_at_once(
    logits: torch.Tensor, signal: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = signal.compute_from_logits(logits)
    for rows in (1, 4, 36):
        monkeypatch.setattr(module, "CACHED_BYTES", rows * ROW_BYTES)
        assert torch.equal(apply_in_row_blocks(logits, signal.compute_from_logits), whole)


def test_a_traces_columns_do_not_depend_on_blocks(logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.arange(ROWS)
    at_once = readout_columns(logits, target, "here")
    monkeypatch.setattr(module, "CACHED_BYTES", 3 * ROW_BYTES)
    assert len(list(iterate_row_slices(logits))) > 3
    in_parts = readout_columns(logits, target, "here")
    assert in_parts.keys() == at_once.keys()
    assert all(torch.equal(in_parts[name], at_once[name]) for name in at_once)
