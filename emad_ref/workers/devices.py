"""Workers on a machine with several GPUs: each takes one, by its number, and sees no other.

Where the device is ``cuda`` it is so in every report: which GPU that is, is each process's own matter.
"""

from __future__ import annotations

import os

from emad_ref.errors import BadArgument

VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_one(worker: int) -> None:
    """Of the GPUs that this process sees the one of number ``worker``, counted round. Before anything starts CUDA.

    Raises:
        BadArgument: CUDA was started here before, and sees what it saw then.
    """
    import torch

    count = torch.cuda.device_count()  # by NVML, which leaves CUDA alone
    if count < 2:
        return
    given = os.environ.get(VISIBLE)
    names = given.split(",") if given else [str(number) for number in range(count)]
    os.environ[VISIBLE] = mine = names[worker % count].strip()
    if torch.cuda.device_count() != 1:
        remedy = "somebody started CUDA too early, say a conftest.py; leave that to the tests, or use one process"
        raise BadArgument("device", "cuda", f"that worker {worker} sees GPU {mine} alone, and not all {count}", remedy)
