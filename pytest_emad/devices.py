"""Workers of pytest-xdist on a machine with several GPUs: each takes one, by its number, and sees no other.

Where the device is ``cuda`` it is so in every report: which GPU that is, is each process's own matter. ``cuda:1`` is
that one in all of them, and one process alone has the first, as ever.
"""

from __future__ import annotations

import os
import re

import pytest

VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_one(worker: str) -> None:
    """Of the GPUs that this process sees the one of ``worker``'s number, counted round.

    Raises:
        pytest.UsageError: CUDA was started here before, and sees what it saw then.
    """
    import torch

    count = torch.cuda.device_count()  # by NVML, which leaves CUDA alone
    if count < 2:
        return
    given = os.environ.get(VISIBLE)
    names = given.split(",") if given else [str(number) for number in range(count)]
    os.environ[VISIBLE] = mine = names[_number(worker) % count].strip()
    if torch.cuda.device_count() != 1:
        raise pytest.UsageError(
            f"--emad-device cuda under -n: this worker should see GPU {mine} alone, and sees {count}, for CUDA was "
            "started before its tests were collected; leave that to the tests, or use -n 0"
        )


def _number(worker: str) -> int:
    """``gw3`` is the fourth; one that was given a name has no number, and shares the first GPU."""
    found = re.fullmatch(r"gw(\d+)", worker)
    return int(found[1]) if found else 0
