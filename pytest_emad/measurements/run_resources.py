"""Resources of a run for measurements: decoders under test, an isolated model copy, worker processes, progress bars.

The lens, ``generate`` and every baseline run on the judge's model. ``request.model.load()`` gives any other decoder its
own copy, so that quantised weights, hooks or a compiled forward do not affect the judge. The reference decoder changes
nothing and shares the judge's model, which requests do not expose (``get_judge_model``). At the end of a run the
weights of the judge's model are hashed again (``require_unchanged_weights``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from emad_ref.absent import Absent
from emad_ref.calibration.windows import window_size
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import EmadError
from emad_ref.models.fast.weight_layout import lay_out_weights
from emad_ref.models.fingerprint import hash_weights
from emad_ref.models.loading import LoadedModel, shared_vocabulary_size
from emad_ref.models.model_spec import ModelSpec, find_or_save_folder
from emad_ref.point import full_depth
from emad_ref.probes.tuned_lens import copy_attachments
from emad_ref.protocol import Decoder, ModelRef, Request, StatedRule, Unsupported
from emad_ref.workers.dispatch import WorkerPool
from pytest_emad.audit.tolerances import tolerance
from pytest_emad.measurements.study import START_S
from pytest_emad.remote.address import Address, UrlAddress
from pytest_emad.remote.client import DecoderClient
from pytest_emad.remote.engine import EngineClient
from pytest_emad.remote.messages import RequestedModel

_JUDGE_MODEL: ContextVar[LoadedModel | None] = ContextVar("the judge's model, while a decoder is made", default=None)
_MAX_NOISE: ContextVar[Callable[[], float]] = ContextVar("the largest noise that a decoder may declare, then")


class ModelIsolation:
    """Isolates the judge's ``loaded`` from decoders: ``ref.load`` gives them a copy made on first use.

    ``make_copy`` makes it; by default the model is loaded again from its source.
    """

    def __init__(self, loaded: LoadedModel, make_copy: Callable[[LoadedModel], LoadedModel] | None = None):
        self._own, self._make_copy = loaded, make_copy or reload_model
        self.ref = ModelRef(loaded.name, self._load, lambda: find_or_save_folder(self._own))

    @cached_property
    def copied_model(self) -> LoadedModel:
        """A model equal to the judge's, without a shared object.

        Raises:
            FingerprintMismatch: the files have changed since the judge's model was read.
        """
        return self._make_copy(self._own)

    def _load(self) -> LoadedModel:
        copy_attachments(self._own.stepper, self.copied_model.stepper)  # lenses and translators that points name so far
        return self.copied_model

    @property
    def loaded_copies(self) -> tuple[LoadedModel, ...]:
        """The copy, if a decoder has loaded it."""
        return (self.copied_model,) if "copied_model" in vars(self) else ()

    @contextmanager
    def expose_judge_model(self, max_noise: Callable[[], float]) -> Iterator[None]:
        """Make ``get_judge_model`` return the judge's model inside the block.

        ``max_noise()``: the largest noise, in logits, that a decoder of it may declare.
        """
        tokens = _JUDGE_MODEL.set(self._own), _MAX_NOISE.set(max_noise)
        try:
            yield
        finally:
            _JUDGE_MODEL.reset(tokens[0])
            _MAX_NOISE.reset(tokens[1])


class ModelMutatedError(EmadError):
    """Raised if the weights of the judge's own model have changed."""


@contextmanager
def require_unchanged_weights(loaded: LoadedModel) -> Iterator[None]:
    """Hash the weights of the judge's model before and after the block.

    Raises:
        ModelMutatedError: they differ, so what was measured in between is of another model.
    """
    before = hash_weights(loaded.model)
    yield
    now = hash_weights(loaded.model)
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        more = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
        raise ModelMutatedError(
            f"the judge's own model was changed: {changed[0]}{more} of {loaded.name} no longer hash as before; "
            "a decoder may change the model that request.model.load() gives it, and no other"
        )


def get_judge_model() -> LoadedModel | None:
    """The judge's model, only for the reference decoder; None outside of ``ModelIsolation.expose_judge_model``."""
    return _JUDGE_MODEL.get()


def reload_model(loaded: LoadedModel) -> LoadedModel:
    """Load the same model again from its source. Raises FingerprintMismatch."""
    return ModelSpec.from_loaded(loaded).load()


def copy_model(loaded: LoadedModel) -> LoadedModel:
    """Copy a model made in memory, which has no source.

    Its stepper is not checked again, since the judge's was, or could not be (quantised weights).
    """
    again = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
    lay_out_weights(again.model)  # a copy keeps the strides but not the memory pages
    again.__dict__["stepper"] = type(loaded.stepper)(again.model, check=False)  # type: ignore[call-arg]  # both take it
    return again


def make_reference_decoder(request: Request) -> Decoder:
    """The reference decoder over the request's model, a base for other decoders."""
    return _reference_decoder(request, request.model.load())


def make_decoder_on_judge_model(request: Request) -> Decoder:
    """The reference decoder over the judge's model, without a copy."""
    return _reference_decoder(request, get_judge_model() or request.model.load())


def _reference_decoder(request: Request, loaded: LoadedModel) -> Decoder:
    if request.own_rule:
        raise Unsupported("the reference decoder has no exit rule of its own")
    seed, rows = request.seed, request.max_rows
    return WalkedDecoder(loaded.stepper, request.point, seed=seed, max_rows=rows, temperature=request.temperature)


def make_decoder_factory_over(other: LoadedModel) -> Callable[[Request], Decoder]:
    """Return a maker of decoders that run ``other`` at full depth in place of the model of a request.

    The maker raises BadArgument for models without shared ids, and Unsupported for a point with exits.
    """

    def make(request: Request) -> Decoder:
        shared_vocabulary_size(get_judge_model() or request.model.load(), other)
        if request.own_rule or not request.point.is_full_depth:
            raise Unsupported("another model is compared at full depth alone")
        at_full_depth = replace(request, point=full_depth(other.stepper.layers))
        return _reference_decoder(at_full_depth, other)

    return make


@dataclass(frozen=True)
class SubprocessRunner:
    """Starts processes like this one, each for one task (``process_replicates``).

    ``start(task, output, seconds)`` runs a process that calls ``run_task_file`` for the file ``task``, and returns its
    exit status, a signal as its negative; its output goes to ``output``. After ``seconds`` it kills the process and its
    children and raises ``subprocess.TimeoutExpired``. Absent: no process can be started.
    ``allowed_s``: seconds that a process may take to start, import and load the model.
    """

    start: Callable[[Path, Path, float], int] | Absent
    allowed_s: float = START_S


NO_SUBPROCESS = SubprocessRunner(Absent("this caller starts no process like its own"))


@dataclass(frozen=True)
class RunResources:
    """Resources of one run.

    ``make_decoder`` serves a request or raises Unsupported. ``progress_stream`` returns the stream of progress bars,
    None: stderr. ``workers`` read text for lens traces, None: this process. ``runner`` times shares of pairs.
    """

    make_decoder: Callable[[Request], Decoder] = make_decoder_on_judge_model
    progress_stream: Callable[[], TextIO | None] = lambda: None
    workers: WorkerPool | None = None
    runner: SubprocessRunner = NO_SUBPROCESS


NO_LOSS = 1.0  # speed-up that a server's rule states, which says nothing of it


class RemoteDecoders:
    """Decoders at ``address``, made by ``make``; ``seconds`` limit each call.

    A decoder of the wire protocol gets the folder of the model (``find_or_save_folder``). A server at a URL has its own
    copy of the model, in the precision ``dtype``; None: that of the judge. ``baseline``: the same engine without its
    exit rule, for requests at full depth; that at ``address`` then answers under its own rule.
    """

    def __init__(self, address: Address, seconds: float, dtype: str | None = None, baseline: UrlAddress | None = None):
        self._dtype = dtype
        self._engine = EngineClient(address, seconds) if isinstance(address, UrlAddress) else None
        self._rule: EngineClient | None = None
        if baseline is not None:
            self._rule, self._engine = self._engine, EngineClient(baseline, seconds)
        self._remote = None if isinstance(address, UrlAddress) else DecoderClient(address, seconds)

    def make(self, request: Request) -> Decoder:
        """Open a decoder. Raises as ``remote.client.DecoderClient.open_decoder``, and Unsupported."""
        if request.own_rule and self._rule is None:
            raise Unsupported(
                "a decoder in another process states no exit rule of its own; --emad-decoder-baseline names a server "
                "without its rule"
            )
        loaded = get_judge_model() or request.model.load()  # sends only its folder, so no copy is needed here
        if self._engine is not None:
            window = window_size(loaded.stepper.max_positions)
            engine = self._rule if request.own_rule and self._rule is not None else self._engine
            decoder = engine.open_decoder(request, loaded.geometry.vocabulary, window, self._noise(loaded))
            if engine is self._rule:
                decoder.stated = StatedRule(f"the rule of {engine.address}", speedup=NO_LOSS)
            return decoder
        assert self._remote is not None, "an address is a URL or speaks the wire protocol"
        folder = str(find_or_save_folder(loaded))
        facts = loaded.provenance
        model = RequestedModel(loaded.name, folder, loaded.fingerprint, facts["dtype"], facts["device"])
        return self._remote.open_decoder(request, model, loaded.geometry.vocabulary)

    @property
    def request_counts(self) -> dict[str, Any]:
        """Description of a server, requests to it, and repeated requests by reason; {} without a server."""
        if self._engine is None:
            return {}
        counts = [engine.counts for engine in (self._engine, self._rule) if engine is not None]
        retries, reasons = sum(each.retry_count for each in counts), sum((each.reasons for each in counts), Counter())
        again = {"retries": retries, "retry_reasons": dict(reasons)} if retries else {}
        interface = vars(self._engine).get("interface")  # after a request to the server
        facts = {name: getattr(interface, name, None) for name in ("path", "model", "window", "vocabulary")}
        served = {} if interface is None else {"served": {name: value for name, value in facts.items() if value}}
        return served | {"requests": sum(each.requests for each in counts)} | again

    def _noise(self, loaded: LoadedModel) -> float:
        """Noise of the server's precision. The table's row suits any logits; smaller ones may not declare as much."""
        if self._dtype is None:
            return 0.0
        by_table, most = tolerance(loaded.geometry.family, self._dtype, "cuda"), _MAX_NOISE.get(None)
        return by_table if most is None else min(by_table, most())

    def close(self) -> None:
        """Close connections. Idempotent."""
        if self._remote is not None:
            self._remote.close()
