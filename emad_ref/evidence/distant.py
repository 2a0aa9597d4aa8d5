"""Decoders in another process, for models that this one has loaded: what a host offers in place of our own.

The other side is told where the model lies. One that lies nowhere as safetensors is saved once, in a temporary folder
that goes with the run.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from emad_ref.evidence.lending import judges_own
from emad_ref.models.loading import Loaded
from emad_ref.models.stored import save, stored_folder
from emad_ref.protocol import Decoder, Request
from emad_ref.wire.address import Address
from emad_ref.wire.messages import Model
from emad_ref.wire.remote import Remote


class Distant:
    """``make`` answers requests with the decoder at ``address``; ``seconds`` limit each call."""

    def __init__(self, address: Address, seconds: float):
        self._remote = Remote(address, seconds)
        self._saved: dict[str, TemporaryDirectory[str]] = {}  # by fingerprint

    def make(self, request: Request) -> Decoder:
        """Raises Unsupported, BadArgument, DecoderFailed: as ``wire.remote.Remote.open``."""
        loaded = judges_own() or request.model.load()  # only told where it lies: no copy is needed here
        model = Model(
            loaded.name,
            str(stored_folder(loaded) or self._save(loaded)),
            loaded.fingerprint,
            loaded.provenance["dtype"],
            loaded.provenance["device"],
        )
        return self._remote.open(request, model, loaded.geometry.vocabulary)

    def close(self) -> None:
        """End what is connected, remove what was saved. Idempotent."""
        self._remote.close()
        while self._saved:
            self._saved.popitem()[1].cleanup()

    def _save(self, loaded: Loaded) -> Path:
        if loaded.fingerprint not in self._saved:
            folder = TemporaryDirectory(prefix="emad-model-")
            self._saved[loaded.fingerprint] = folder
            save(loaded, Path(folder.name))
        return Path(self._saved[loaded.fingerprint].name)
