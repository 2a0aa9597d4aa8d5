"""Workers of xdist and GPUs: each takes one of those that it sees, counted round."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from emad_ref.errors import BadArgument
from pytest_emad.environment import VISIBLE_DEVICES, select_gpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str | None], None]:
    """``machine(GPUs, those that are visible by name)``."""

    def of(count: int, visible: str | None) -> None:
        def seen() -> int:
            names = os.environ.get(VISIBLE_DEVICES)
            return count if names is None else len(names.split(","))

        monkeypatch.setattr(torch.cuda, "device_count", seen)
        monkeypatch.setenv(VISIBLE_DEVICES, visible or "")  # put back afterwards, whatever the worker makes of it
        if visible is None:
            monkeypatch.delenv(VISIBLE_DEVICES)

    return of


@pytest.mark.parametrize(
    ("count", "visible", "worker", "taken"),
    [
        (4, None, 0, "0"),
        (4, None, 3, "3"),
        (4, None, 6, "2"),
        (8, "5, 7", 1, "7"),
        (8, "GPU-8932f937,MIG-0c757cd7", 2, "GPU-8932f937"),
        (1, None, 1, None),
        (0, None, 1, None),
        (4, "3", 1, "3"),
    ],
)
def test_a_worker_takes_the_gpu_of_its_number(
    machine: Callable[..., None], count: int, visible: str | None, worker: int, taken: str | None
) -> None:
    machine(count, visible)
    select_gpu(worker)
    assert os.environ.get(VISIBLE_DEVICES) == taken


def test_a_worker_whose_gpus_somebody_else_has_started_says_so(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(2, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadArgument, match="expected that worker 1 sees GPU 1 alone, and not all 2"):
        select_gpu(1)
