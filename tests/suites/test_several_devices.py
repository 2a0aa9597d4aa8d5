"""Suites of a model on several devices: the energy of one device is not reported as that of all."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from emad_ref.absent import Absent
from pytest_emad.claims.energy import open_energy_counter

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def test_the_energy_of_one_device_is_not_taken_for_that_of_all() -> None:
    """For a model on two boards, half the joules per token would look like a saving."""
    with open_energy_counter(SimpleNamespace(device=SECOND, devices=(FIRST, SECOND))) as counter:
        assert counter == Absent("the model lies on 2 devices, and a counter sees one of them")
    with open_energy_counter(SimpleNamespace(device=torch.device("cpu"), devices=(torch.device("cpu"),))) as counter:
        assert isinstance(counter, Absent)
        assert "runs on no GPU" in counter.reason
