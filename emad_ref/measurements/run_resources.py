"""What a run provides to measurements: decoders under test, an isolated copy of the model for them, worker processes
and progress bars.

The oracle, ``generate`` and every baseline run on the judge's model. ``request.model.load()`` gives any other decoder
a copy of its own, so that quantised weights, hooks or a compiled forward change nothing for the judge. When such a
decoder is closed, the judge's model is compared with its seal (``models.snapshots``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.measurements.study import START_S
from emad_ref.models.loading import LoadedModel
from emad_ref.models.model_spec import ModelSpec, save_model, stored_folder
from emad_ref.models.snapshots import ModelMutatedError, ModelSnapshot, ProcessSnapshot
from emad_ref.models.weight_layout import lay_out_weights
from emad_ref.probes.lens import copy_attachments
from emad_ref.protocol import Decoder, ModelRef, Request
from emad_ref.wire.address import Address
from emad_ref.wire.client import DecoderClient
from emad_ref.wire.messages import ServedModel
from emad_ref.workers.dispatch import WorkerPool

_JUDGE_MODEL: ContextVar[LoadedModel | None] = ContextVar(
    "the judge's model, while a host is asked for a decoder", default=None
)


class ModelIsolation:
    """What decoders of ``loaded`` are lent: ``ref``, whose ``load`` gives the copy, and never the judge's model.

    ``lend`` makes the copy, by default from where the judge's model came.
    """

    def __init__(self, loaded: LoadedModel, lend: Callable[[LoadedModel], LoadedModel] | None = None):
        self._own, self._lend, self._broken = loaded, lend or reload_model, ""
        self.ref = ModelRef(loaded.name, self._lent)

    @cached_property
    def copy(self) -> LoadedModel:
        """The decoder's own: equal to the judge's in everything, and nowhere the same object.

        Raises:
            FingerprintMismatch: the files have changed since the judge's model was read.
        """
        return self._lend(self._own)

    def _lent(self) -> LoadedModel:
        """The copy, with every lens and translator that points may name by now."""
        copy_attachments(self._own.stepper, self.copy.stepper)
        return self.copy

    @property
    def copies(self) -> tuple[LoadedModel, ...]:
        """The copy, where a decoder has asked for it."""
        return (self.copy,) if "copy" in vars(self) else ()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Inside the block, ``judge_model`` is the judge's model."""
        token = _JUDGE_MODEL.set(self._own)
        try:
            yield
        finally:
            _JUDGE_MODEL.reset(token)

    # ------------------------------------------------------------ afterwards

    def seal(self) -> None:
        """Before the first decoder: what the judge's model is now, once."""
        _ = self._seal

    @cached_property
    def _seal(self) -> ModelSnapshot:
        return ModelSnapshot(self._own.model)

    def look(self) -> None:
        """Hold the judge's model against its seal; what has changed is said by whoever requires it to be whole."""
        self._broken = self._broken or self._seal.broken()

    def require_untouched(self, before: ProcessSnapshot) -> None:
        """Put the process back. Raises ModelMutatedError: model or process are not as sealed, or as ``before``."""
        self.look()
        around = before.restored()
        self.require_whole()
        if around:
            raise ModelMutatedError(
                f"a decoder of {self._own.name} changed what the judge runs in, and every baseline with it: {around}; "
                "it was put back: set it where it is needed, and put it back there, or decode in another process"
            )

    def require_whole(self) -> None:
        """Raises ModelMutatedError: an earlier look found the model changed."""
        if self._broken:
            raise ModelMutatedError(
                f"the judge's own model was changed: {self._broken} of {self._own.name} differs since the first "
                "decoder was opened; a decoder has request.model.load() to itself, and must leave alone what else the "
                "process holds"
            )


def judge_model() -> LoadedModel | None:
    """The judge's model, for our own decoder alone; None where no subject is asking."""
    return _JUDGE_MODEL.get()


def reload_model(loaded: LoadedModel) -> LoadedModel:
    """The same model from where it came. Raises FingerprintMismatch."""
    return ModelSpec.of(loaded).load()


def copy_model(loaded: LoadedModel) -> LoadedModel:
    """A copy of a model that was made in memory, and that no name leads to.

    Its stepper is not checked again: the judge's was, or could not be (quantised weights).
    """
    again = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
    lay_out_weights(again.model)  # a copy has the strides, not the pages
    again.__dict__["stepper"] = type(loaded.stepper)(again.model, check=False)  # type: ignore[call-arg]  # both take it
    return again


def make_reference_decoder(request: Request) -> Decoder:
    """Our own decoder for a request, over what the request lends: what anybody may build on."""
    return _reference_decoder(request, request.model.load())


def make_judge_decoder(request: Request) -> Decoder:
    """The same over the judge's own model, where a subject is asking; it needs no copy."""
    return _reference_decoder(request, judge_model() or request.model.load())


def _reference_decoder(request: Request, loaded: LoadedModel) -> Decoder:
    return WalkedDecoder(
        loaded.stepper,
        request.point,
        seed=request.seed,
        max_rows=request.max_rows,
        temperature=request.temperature,
    )


def standard_error() -> TextIO | None:
    """Bars where standard error leads."""
    return None


@dataclass(frozen=True)
class SubprocessRunner:
    """A process like this one, for one task (``measurements.process_replicates``).

    ``start(task, output, seconds)`` runs a process that calls ``process_replicates.run_task_file`` for the file
    ``task``, and returns its exit status once it has ended, a signal as its negative; all that it prints goes to
    ``output``. After so many seconds it and all that it started are ended, and ``subprocess.TimeoutExpired`` is raised.
    None: ``without`` says why there is none.
    ``allowed_s``: seconds that it may take beside what it measures, to start, to import and to load the model.
    """

    start: Callable[[Path, Path, float], int] | None = None
    without: str = ""
    allowed_s: float = START_S


NO_SUBPROCESS = SubprocessRunner(without="whoever asks here starts no process like its own")


@dataclass(frozen=True)
class RunResources:
    """``make_decoder`` answers a request or raises Unsupported; ``bars`` gives the stream of a bar, None: stderr.

    ``crew``: workers that read text for lens traces; None: this process does.
    ``afresh``: how a process like this one is started anew, with the same decoder under test, to time a share of pairs.
    """

    make_decoder: Callable[[Request], Decoder] = make_judge_decoder
    bars: Callable[[], TextIO | None] = standard_error
    crew: WorkerPool | None = None
    afresh: SubprocessRunner = NO_SUBPROCESS


class RemoteDecoders:
    """``make`` answers requests with the decoder at ``address``; ``seconds`` limit each call."""

    def __init__(self, address: Address, seconds: float):
        self._remote = DecoderClient(address, seconds)
        self._saved: dict[str, TemporaryDirectory[str]] = {}  # by fingerprint

    def make(self, request: Request) -> Decoder:
        """Raises Unsupported, BadArgument, DecoderFailed: as ``wire.remote.Remote.open``."""
        loaded = judge_model() or request.model.load()  # only told where it lies: no copy is needed here
        model = ServedModel(
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

    def _save(self, loaded: LoadedModel) -> Path:
        if loaded.fingerprint not in self._saved:
            folder = TemporaryDirectory(prefix="emad-model-")
            self._saved[loaded.fingerprint] = folder
            save_model(loaded, Path(folder.name))
        return Path(self._saved[loaded.fingerprint].name)
