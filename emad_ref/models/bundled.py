"""Bundled models by name and folder. Nothing is loaded: no torch, no transformers."""

from __future__ import annotations

from pathlib import Path

BUNDLED_PAIR = ("emad-nano", "emad-tiny")  # small, large


def weights_folder() -> Path:
    """Folder of the bundled models.

    Returns
    -------
    Path
        It has one subfolder per name of ``bundled_names()``.
    """
    return Path(__file__).parent / "weights"


def bundled_names() -> tuple[str, ...]:
    """Names of the bundled models, sorted."""
    folder = weights_folder()
    if not folder.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in folder.iterdir() if (entry / "config.json").is_file()))
