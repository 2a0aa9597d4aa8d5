"""The corpus ``self``: text a model wrote itself, from a seed.

Where no text is at hand, the model's own samples at temperature 1 are the distribution it is calibrated for; entropy
profiles and losses on them are well defined, and say nothing about any other text. The header announces it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.models.stepper import Stepper
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import Ints
from emad_ref.text.documents import SPLITS, Split

ROWS = 16


def own_documents(stepper: Stepper, opening: int, tokens: int, split: Split, seed: int = 0) -> Iterator[Ints]:
    """Endless int64 [≤ tokens] samples, the opening token left out; a sample ends where the model ends it.

    Splits draw from seeds of their own, so they never share a sample.
    """
    batch = 0
    while True:
        decoder = WalkedDecoder(
            stepper,
            full_depth(stepper.layers),
            seed=(seed * len(SPLITS) + SPLITS.index(split)) * 100_003 + batch,
            max_rows=ROWS,
            temperature=1.0,
        )
        prompts = [Prompt(np.array([opening]))] * ROWS
        record = decoder.generate(prompts, max_new=tokens, stop=frozenset({opening}))
        for emitted in record.emitted:
            text = emitted[emitted != opening]
            if len(text) >= 2:
                yield text
        batch += 1
