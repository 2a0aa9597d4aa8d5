"""Workers of pytest-xdist on a machine with several GPUs: each takes one, by its number, and sees no other.

Where the device is ``cuda`` it is so in every report: which GPU that is, is each process's own matter. ``cuda:1`` is
that one in all of them, and one process alone has the first, as ever.
"""

from __future__ import annotations

import os
import re

import pytest

from pytest_emad.options import settings

VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_one(config: pytest.Config) -> None:
    """Of the GPUs that this worker sees the one of its number, counted round. Before a model is loaded.

    Raises:
        pytest.UsageError: somebody has looked at the GPUs already, and they stay as they are for this process.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or settings(config).study.device != "cuda":
        return
    import torch

    count = torch.cuda.device_count()  # by NVML, which leaves CUDA alone
    if count < 2:
        return
    given = os.environ.get(VISIBLE)
    names = given.split(",") if given else [str(number) for number in range(count)]
    os.environ[VISIBLE] = mine = names[_number(worker["workerid"]) % count].strip()
    if torch.cuda.device_count() != 1:
        raise pytest.UsageError(
            f"--emad-device cuda under -n: this worker should see GPU {mine} alone, and sees {count}, for CUDA was "
            "started before its tests were collected; leave that to the tests, or use -n 0"
        )


def _number(worker: str) -> int:
    """``gw3`` is the fourth; one that was given a name has no number, and shares the first GPU."""
    found = re.fullmatch(r"gw(\d+)", worker)
    return int(found[1]) if found else 0
