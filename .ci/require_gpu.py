"""Exit with a message unless CUDA's first device carries the name in ``EMAD_GPU``: ``EMAD_GPU=A100``."""

from __future__ import annotations

import os
import sys

import torch


def main(wanted: str) -> None:
    found = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    if wanted.lower() not in found.lower():
        sys.exit(f"this environment needs an NVIDIA {wanted}, found: {found}")


if __name__ == "__main__":
    main(os.environ["EMAD_GPU"])
