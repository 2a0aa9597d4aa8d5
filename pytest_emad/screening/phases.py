"""Phases of a screening: each is timed, and its result is kept until the exit is written.

A screening takes minutes to hours and may be interrupted. The same screening then reads what is finished from a folder
of the user's cache, named by a digest of all that results depend on: weights, text, settings, threads, machine and
versions. Anything else has another folder, so a changed argument starts anew.

Results are pickles, since only this user's cache holds them. A rule's family has functions, which cannot be pickled: it
stands in them by its names, and ``families`` are made again from the profile.
"""

from __future__ import annotations

import json
import pickle
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch

import emad_ref
from emad_ref.calibration.profile import library_versions
from emad_ref.console import print_error
from emad_ref.files import BadFile, open_for_atomic_write, read_bytes, require_writable_folder
from emad_ref.models.loading import LoadedModel
from pytest_emad.screening.exit_families import ExitFamily
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.traces import TextSplits

T = TypeVar("T")
PHASES = ("text", "lens", "traces", "slack", "families", "decoding", "own text", "tasks", "timing", "drafts")
DRAFTED_TEXTS = "texts of the model"  # the longest part of the last phase


def digest_of_screening(model: LoadedModel, settings: ScreeningSettings, texts: TextSplits) -> str:
    """Sixteen hexadecimal digits of all that the results of a screening depend on."""
    parts = {
        "fingerprint": model.fingerprint,
        "device": str(model.stepper.device),
        "dtype": str(model.stepper.dtype),
        "settings": {name: str(value) for name, value in asdict(settings).items()},
        "threads": torch.get_num_threads(),
        "machine": platform.node(),
        "versions": library_versions() | {"emad": emad_ref.__version__},
    }
    digest = sha256(json.dumps(parts, sort_keys=True).encode())
    for text in vars(texts).values():
        for window in text.windows:
            digest.update(b"%d:" % window.document + window.tokens.tobytes())
    return digest.hexdigest()[:16]


class PhaseRunner:
    """Runs phases in order; ``seconds``: phase → duration, of the run that finished it.

    ``kept_in``: folder of unfinished screenings, one folder each; None keeps nothing. ``progress``: bars and messages
    on standard error.
    """

    def __init__(self, *, progress: bool = False, kept_in: Path | None = None):
        self.progress, self._kept_in = progress, kept_in
        self._folder: Path | None = None
        self._families: dict[tuple[str, str, str], ExitFamily] = {}
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, work: Callable[[str | None], T]) -> T:
        """The result of ``work``, called with the name of the phase's progress bar, or the kept one."""
        name = f"{1 + PHASES.index(phase)}/{len(PHASES)} {phase}" if self.progress else None
        began = time.perf_counter()

        def timed() -> tuple[T, float]:
            return work(name), time.perf_counter() - began

        done, seconds = self.keep(phase, timed)
        self.seconds[phase] = round(seconds, 2)
        return done

    def keep(self, part: str, work: Callable[[], T]) -> T:
        """The kept result of a phase or of a part of one, else that of ``work``, which is kept."""
        if self._folder is None:
            return work()
        path = self._folder / f"{part}.pickle"
        if path.exists():
            kept: T = self._read(path)
            return kept
        done = work()
        self._folder.mkdir(parents=True, exist_ok=True)  # the same screening elsewhere removes it when it is done
        with open_for_atomic_write(path, "a kept phase") as file:
            _FamilyNamingPickler(file).dump(done)
        return done

    def resume(self, digest: str) -> None:
        """Keep phases from here on, and take those that an interrupted screening of this ``digest`` finished."""
        if self._kept_in is None:
            return
        folder = self._kept_in / digest
        try:
            require_writable_folder(folder, "kept phases")
        except BadFile as error:
            print_error(f"finished phases are not kept for an interrupted screening: {error}")
            return
        self._folder = folder
        if self.finished and self.progress:
            print_error(f"resumed: not measured again: {', '.join(self.finished)} (kept in {self._folder})")

    @property
    def finished(self) -> list[str]:
        """Phases, and parts of the last, that are kept."""
        parts = (*PHASES, DRAFTED_TEXTS)
        return [part for part in parts if self._folder is not None and (self._folder / f"{part}.pickle").exists()]

    def know_families(self, families: Sequence[ExitFamily]) -> None:
        """Families that kept results name."""
        self._families = {_names(family): family for family in families}

    def forget(self) -> None:
        """Remove what was kept, once all of it is written elsewhere."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, path: Path) -> Any:
        try:
            return _FamilyFindingUnpickler(read_bytes(path, "a kept phase"), self._families).load()
        except Exception as error:  # a damaged pickle may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise BadFile(
                "kept phase", path, "a phase that emad screen kept", reason, f"remove {path.parent}"
            ) from error


def _names(family: ExitFamily) -> tuple[str, str, str]:
    return family.readout, family.name, family.depth


class _FamilyNamingPickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[str, str, str] | None:
        return _names(obj) if isinstance(obj, ExitFamily) else None


class _FamilyFindingUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, families: dict[tuple[str, str, str], ExitFamily]):
        super().__init__(BytesIO(content))
        self._families = families

    def persistent_load(self, pid: tuple[str, str, str]) -> ExitFamily:
        return self._families[pid]
