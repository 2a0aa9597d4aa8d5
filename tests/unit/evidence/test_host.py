"""Our own decoder is made as it was asked for."""

from __future__ import annotations

from types import SimpleNamespace

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.measurements.run_resources import RunResources
from emad_ref.models.causal import CausalStepper
from emad_ref.point import truncated
from emad_ref.protocol import ModelRef, Request
from tests.small import LAYERS, small_model


def test_every_part_of_a_request_reaches_our_decoder() -> None:
    stepper = CausalStepper(small_model("gpt_neox"))
    model = ModelRef("small", lambda: SimpleNamespace(stepper=stepper))
    request = Request(model, truncated(LAYERS, 2), seed=3, max_rows=5, temperature=0.7)
    decoder = RunResources().make_decoder(request)
    assert isinstance(decoder, WalkedDecoder)
    assert (decoder.stepper, decoder.point) == (stepper, request.point)
    assert (decoder.seed, decoder.max_rows, decoder.temperature) == (3, 5, 0.7)
