"""Where a loaded model lies on disk as safetensors, for programs that read it by themselves.

Random weights and controls lie nowhere, and a checkpoint of another format is no file that a plain reader knows: those
are saved.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from emad_ref.models.bundled import weights_folder
from emad_ref.models.loading import Loaded

FILES = ("model.safetensors", "model.safetensors.index.json")


def stored_folder(loaded: Loaded) -> Path | None:
    """The absolute folder that the model was read from, where it holds config.json and safetensors; else None."""
    folder = _read_from(loaded)
    if folder is None or not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in FILES):
        return None
    return folder.resolve()


def save(loaded: Loaded, folder: Path) -> None:
    """Write the model, in its own precision, and its tokenizer to ``folder``. Raises OSError."""
    loaded.model.save_pretrained(folder)
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(folder)


def _read_from(loaded: Loaded) -> Path | None:
    source = loaded.provenance["source"]
    if source == "bundled":
        return weights_folder() / loaded.name
    if source == "folder":
        return Path(loaded.name)
    if source == "hub":
        where = {"revision": loaded.provenance["commit"], "local_files_only": True}
        try:
            return Path(hf_hub_download(loaded.provenance["hub_id"], "config.json", **where)).parent
        except LocalEntryNotFoundError:  # the cache was emptied since
            return None
    return None
