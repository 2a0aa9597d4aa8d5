"""Bundled models by name and folder. Loads no model, torch or transformers.

A checkout holds all of them beside this module. A wheel of this package holds ``emad-nano`` alone, and is small; the
wheel of the distribution ``pytest-emad-models`` holds all of them. It is built from the same folder
(``weights/pyproject.toml``), and found by its metadata.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

CONFIG = "config.json"
BUNDLED = ("emad-nano", "emad-t5-tiny", "emad-t5-tiny-tuned", "emad-tiny", "emad-tiny-plain")
BUNDLED_PAIR = ("emad-nano", "emad-tiny")  # small, large
DISTRIBUTION, VERSION = "pytest-emad-models", "0.1.0"  # the model whose weights the project's records concern
REQUIREMENT = f"{DISTRIBUTION}=={VERSION}"


def weights_folder() -> Path:
    """Folder of the bundled models: beside this module if it holds all, else that of ``pytest-emad-models``.

    Returns
    -------
    Path
        It has one subfolder per name of ``bundled_model_names()``.
    """
    own = Path(__file__).parent / "weights"
    if all(_is_model(own / name) for name in BUNDLED):
        return own
    return _installed_folder() or own


def bundled_model_names() -> tuple[str, ...]:
    """Names of the bundled models that are installed, sorted."""
    folder = weights_folder()
    if not folder.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in folder.iterdir() if _is_model(entry)))


def models_package_version() -> str | None:
    """The installed version of ``pytest-emad-models``; None without it."""
    from importlib import metadata  # slow, and `emad --help` needs no version

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


@cache
def _installed_folder() -> Path | None:
    if models_package_version() != VERSION:
        return None
    from importlib import metadata

    folder = Path(str(metadata.distribution(DISTRIBUTION).locate_file(DISTRIBUTION.replace("-", "_"))))
    return folder if folder.is_dir() else None


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file()
