"""What a run lends to evidence: who makes the decoders under test, who reads text, where progress bars go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.evidence.lending import judges_own
from emad_ref.evidence.study import START_S
from emad_ref.models.loading import Loaded
from emad_ref.protocol import Decoder, Request
from emad_ref.workers.handing import Crew


def walked(request: Request) -> Decoder:
    """Our own decoder for a request, over what the request lends: what anybody may build on."""
    return _walking(request, request.model.load())


def ours(request: Request) -> Decoder:
    """The same over the judge's own model, where a subject is asking; it needs no copy."""
    return _walking(request, judges_own() or request.model.load())


def _walking(request: Request, loaded: Loaded) -> Decoder:
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
class Afresh:
    """A process like this one, for one task (``evidence.afresh``).

    ``start(task, output, seconds)`` runs a process that calls ``afresh.answer`` for the file ``task``, and returns its
    exit status once it has ended, a signal as its negative; all that it prints goes to ``output``. After so many
    seconds it and all that it started are ended, and ``subprocess.TimeoutExpired`` is raised. None: ``without`` says
    why there is none.
    ``allowed_s``: seconds that it may take beside what it measures, to start, to import and to load the model.
    """

    start: Callable[[Path, Path, float], int] | None = None
    without: str = ""
    allowed_s: float = START_S


NOWHERE = Afresh(without="whoever asks here starts no process like its own")


@dataclass(frozen=True)
class Host:
    """``make_decoder`` answers a request or raises Unsupported; ``bars`` gives the stream of a bar, None: stderr.

    ``crew``: workers that read text for lens traces; None: this process does.
    ``afresh``: how a process like this one is started anew, with the same decoder under test, to time a share of pairs.
    """

    make_decoder: Callable[[Request], Decoder] = ours
    bars: Callable[[], TextIO | None] = standard_error
    crew: Crew | None = None
    afresh: Afresh = NOWHERE
