"""The corpus ``self``: text that a model samples itself, from a seed.

Without other text, a model's own samples at temperature 1 are the distribution that it is calibrated for. Entropy
profiles and losses on them say nothing about any other text; the report's header names the corpus.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from emad_ref.calibration.trace import EmptyCorpus
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.models.tokenizers import special_tokens_of
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import Ints
from emad_ref.text.documents import SPLITS, Split

SAMPLE_ROWS = 16
DRY_BATCHES = 8  # after so many consecutive batches without a sample of two tokens: the model writes nothing


def iterate_sampled_documents(
    stepper: Stepper,
    opening: int | None,
    tokens: int,
    split: Split,
    seed: int = 0,
    ends: Collection[int] | None = None,
) -> Iterator[Ints]:
    """Endless int64 [≤ tokens] samples without opening and end; a sample stops at an end or a further opening.

    ``ends``: ids that end a text; None: those that the stepper's model declares. Each split has its own seed, so splits
    never share a draw.

    Raises:
        BadArgument: no opening token, fewer than two tokens, an unknown split.
        EmptyCorpus: the model keeps ending its samples at once.
    """
    if tokens < 2:
        raise BadArgument("tokens", tokens, "at least 2", "one to see and one to predict")
    if split not in SPLITS:
        raise BadArgument("split", split, f"one of {', '.join(SPLITS)}")
    if opening is None:
        raise BadArgument(
            "corpus",
            "self",
            "a model that declares which token opens a text",
            "add bos_token_id to generation_config.json, or name a corpus of real text",
        )
    if ends is None:
        ends = special_tokens_of(getattr(stepper, "model", None)).ends
    return _samples(stepper, opening, tokens, seed * len(SPLITS) + SPLITS.index(split), frozenset({opening, *ends}))


def _samples(stepper: Stepper, opening: int, tokens: int, stream: int, stop: frozenset[int]) -> Iterator[Ints]:
    batch = dry = 0
    while True:
        decoder = WalkedDecoder(
            stepper,
            full_depth(stepper.layers),
            seed=stream * 100_003 + batch,
            max_rows=SAMPLE_ROWS,
            temperature=1.0,
        )
        prompts = [Prompt(np.array([opening]))] * SAMPLE_ROWS
        record = decoder.generate(prompts, max_new=tokens, stop=stop)
        texts = [emitted[~np.isin(emitted, list(stop))] for emitted in record.emitted]
        texts = [text for text in texts if len(text) >= 2]
        batch, dry = batch + 1, 0 if texts else dry + 1
        if dry == DRY_BATCHES:
            raise EmptyCorpus(
                f"corpus='self', but {dry * SAMPLE_ROWS} samples of this model ended within a token and at least "
                "two tokens are expected; name a corpus of real text"
            )
        yield from texts
