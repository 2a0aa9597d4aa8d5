"""The same model once more, from where it came: for decoders that get a copy, and for workers that have none yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import torch

from emad_ref.errors import EmadError
from emad_ref.models.loading import Loaded, load


class OtherWeights(EmadError):
    """A model that was loaded a second time is not the one that was loaded first."""


@dataclass(frozen=True)
class Whence:
    """Where a model came from, what it was made to, and which it has to be: no tensor, so that it travels."""

    name: str
    device: str
    dtype: str
    revision: str | None
    seed: int
    fingerprint: str
    backend: str

    @staticmethod
    def of(loaded: Loaded) -> Whence:
        said = loaded.provenance
        made = {key: said[key] for key in ("device", "dtype", "revision", "backend")}
        return Whence(loaded.name, seed=said["seed"] or 0, fingerprint=loaded.fingerprint, **made)

    def load(self) -> Loaded:
        """The same model from the same place, in the same precision and backend, on the same kind of device.

        Raises:
            OtherWeights: its fingerprint is another by now.
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
            raise OtherWeights(
                f"name={self.name!r}, but loaded a second time it has the fingerprint {again.fingerprint[:16]}… and "
                f"the first time {self.fingerprint[:16]}…; leave its files alone while it is in use, and give every "
                "machine the same"
            )
        return again


_ONE_AT_A_TIME = Lock()


def at_hand(whence: Whence) -> Loaded:
    """The model, loaded when first asked for and kept until another one is: what a worker reads unit after unit by.

    By one thread at a time: transformers patches its classes while it loads, and two loads at once leave them patched.
    """
    with _ONE_AT_A_TIME:
        return _kept(whence)


@lru_cache(maxsize=1)
def _kept(whence: Whence) -> Loaded:
    return whence.load()
