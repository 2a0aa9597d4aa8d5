"""Origin of a model: how another process loads the same weights again, and the folder of its safetensors."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Lock

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from emad_ref.errors import EmadError
from emad_ref.models.bundled import weights_folder
from emad_ref.models.downloads import dequantised_folder, model_cache_path
from emad_ref.models.loading import LoadedModel, load


class FingerprintMismatch(EmadError):
    """Raised if a model loaded again differs from the first."""


@dataclass(frozen=True)
class ModelSpec:
    """Origin, settings and fingerprint of a model, without tensors, so that it can be pickled."""

    name: str
    device: str
    dtype: str
    revision: str | None
    seed: int
    fingerprint: str
    backend: str

    @staticmethod
    def from_loaded(loaded: LoadedModel) -> ModelSpec:
        provenance = loaded.provenance
        settings = {key: provenance[key] for key in ("device", "dtype", "revision", "backend")}
        return ModelSpec(loaded.name, seed=provenance["seed"] or 0, fingerprint=loaded.fingerprint, **settings)

    def load(self) -> LoadedModel:
        """Load the same model from the same place, with the same precision, backend and kind of device.

        Raises:
            FingerprintMismatch: its fingerprint has changed.
        """
        dtype = getattr(torch, self.dtype)
        again = load(
            self.name,
            device=self.device,
            dtype=dtype,
            revision=self.revision,
            seed=self.seed,
            backend=self.backend,
        )
        if again.fingerprint != self.fingerprint:
            raise FingerprintMismatch(
                f"name={self.name!r}, but loaded a second time it has the fingerprint {again.fingerprint[:16]}… and "
                f"the first time {self.fingerprint[:16]}…; leave its files alone while it is in use, and give every "
                "machine the same"
            )
        return again


_LOAD_LOCK, _SAVE_LOCK = Lock(), Lock()
_SAVED: dict[str, Path] = {}  # folders by fingerprint


def load_cached(spec: ModelSpec) -> LoadedModel:
    """Load a model on first use and cache the last one, with which a worker reads unit after unit.

    One thread at a time: transformers patches its classes while it loads, and two simultaneous loads leave them
    patched.
    """
    with _LOAD_LOCK:
        return _load_last(spec)


@lru_cache(maxsize=1)
def _load_last(spec: ModelSpec) -> LoadedModel:
    return spec.load()


SAFETENSORS_FILES = ("model.safetensors", "model.safetensors.index.json")


def find_safetensors_source_folder(loaded: LoadedModel) -> Path | None:
    """The absolute folder of the model, if it holds config.json and safetensors; else None."""
    folder = _source_folder(loaded)
    if (
        folder is None
        or not (folder / "config.json").is_file()
        or not any((folder / name).is_file() for name in SAFETENSORS_FILES)
    ):
        return None
    return folder.resolve()


def find_or_save_folder(loaded: LoadedModel) -> Path:
    """The absolute folder of the model; one without safetensors files is saved once, until this process ends.

    Raises:
        OSError: the model could not be saved.
    """
    return find_safetensors_source_folder(loaded) or _saved_folder(loaded)


def _saved_folder(loaded: LoadedModel) -> Path:
    with _SAVE_LOCK:
        if loaded.fingerprint not in _SAVED:
            folder = Path(mkdtemp(prefix="emad-model-"))
            atexit.register(rmtree, folder, ignore_errors=True)
            save_model(loaded, folder)
            _SAVED[loaded.fingerprint] = folder
        return _SAVED[loaded.fingerprint]


def save_model(loaded: LoadedModel, folder: Path) -> None:
    """Write the model, in its own precision, and its tokenizer to ``folder``. Raises OSError."""
    loaded.model.save_pretrained(folder)
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(folder)


def _source_folder(loaded: LoadedModel) -> Path | None:
    source = loaded.provenance["source"]
    if source == "bundled":
        return weights_folder() / loaded.name
    if source == "fetched":
        return model_cache_path(loaded.name)
    if source == "gguf":
        return dequantised_folder(loaded.provenance["origin"]["weights_sha256"])
    if source == "folder":
        return Path(loaded.name)
    if source == "hub":
        where = {"revision": loaded.provenance["commit"], "local_files_only": True}
        try:
            return Path(hf_hub_download(loaded.provenance["hub_id"], "config.json", **where)).parent
        except LocalEntryNotFoundError:  # the cache has been emptied since
            return None
    return None
