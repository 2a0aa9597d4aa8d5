"""Where a result comes from: versions, commit, platform, threads, device, dtype, seed. Standard library and plain data.

Torch is asked for its threads only where something else has imported it.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from emad_ref import extending
from emad_ref.evidence.study import Study
from emad_ref.report.shipped import HOME

DISTRIBUTION = "pytest-emad"
REPORTED = ("torch", "transformers", "numpy", "scipy", "scikit-learn", "hypothesis", "pytest")


def provenance(study: Study) -> dict[str, Any]:
    """Of a run of ``study`` in this process. Built-in types only."""
    return (
        {
            "versions": {name: installed_version(name) for name in (DISTRIBUTION, *REPORTED)}
            | {"python": platform.python_version()},
            "commit": commit(),
            "platform": platform.platform(),
            "machine": platform.processor() or platform.machine(),
            "torch_threads": torch_threads(),
            "device": study.device,
            "dtype": study.dtype,
            "seed": study.seed,
        }
        | ({} if study.exit is None else {"exit": study.exit_digest})
        | ({"extensions": added} if (added := extending.provenance()) else {})
    )


def project(root: Path) -> dict[str, Any]:
    """The tree that was tested with us: its root and, where it is a repository other than ours, its commit."""
    return {"root": str(root), "commit": None if root.resolve().is_relative_to(HOME) else described(root)}


def commit() -> str | None:
    """Ours, where this is a checkout."""
    return described(HOME) if (HOME / ".git").exists() else None


def torch_threads() -> int | None:
    """Intra-op threads of torch in this process; None where nothing has imported it, e.g. on an xdist controller."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def installed_version(distribution: str) -> str | None:
    """As its metadata says; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def described(folder: Path) -> str | None:
    """The commit of a checkout, ``-dirty`` when the tree differs from it; None where there is none, or no git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None
