"""What a run lends to evidence: who makes the decoders under test, and where progress bars go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.protocol import Decoder, Request


def walked(request: Request) -> Decoder:
    """Our own decoder for a request, over the loaded model's stepper."""
    return WalkedDecoder(
        request.model.load().stepper,
        request.point,
        seed=request.seed,
        max_rows=request.max_rows,
        temperature=request.temperature,
    )


def standard_error() -> TextIO | None:
    """Bars where standard error leads."""
    return None


@dataclass(frozen=True)
class Host:
    """``make_decoder`` answers a request or raises Unsupported; ``bars`` gives the stream of a bar, None: stderr."""

    make_decoder: Callable[[Request], Decoder] = walked
    bars: Callable[[], TextIO | None] = standard_error
