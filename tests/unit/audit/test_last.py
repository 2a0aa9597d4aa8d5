"""``last`` of ``feed`` is decided for a decoder of any width of feeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.audit.session_checks import WIDEST_PARTLY_SHOWN, last_logits, partly_shown_feeds
from emad_ref.point import full_depth
from tests.decoders.foreign import ForeignDecoder
from tests.decoders.subject import LAYERS, drawn, lens_of, tiny_neox

FED = sum(n for n, _ in partly_shown_feeds(WIDEST_PARTLY_SHOWN))


@pytest.mark.parametrize("widest", [1, 2, 3, 64])
def test_a_right_decoder_passes_however_wide_its_feeds_are(widest: int) -> None:
    prompts, continuation = drawn((4, 2), FED)
    decoder = ForeignDecoder(tiny_neox(), full_depth(LAYERS))
    decoder.capabilities = replace(decoder.capabilities, max_feed=widest)
    rng = np.random.default_rng(0)
    finding = last_logits(decoder, lens_of(tiny_neox()), full_depth(LAYERS), prompts, continuation, rng, 1e-9)
    assert finding.passed is True, finding.detail
