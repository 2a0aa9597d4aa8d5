"""The text that a verb reads: windows of one split of a corpus, as the model under test takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.errors import BadArgument

if TYPE_CHECKING:
    from emad_ref.calibration.trace import TokenSequence
    from emad_ref.models.loading import Loaded
    from emad_ref.models.stepper import Stepper
    from emad_ref.text.documents import Split

CORPUS = "world:premise"
DOCUMENTS = 200


def stepper_of(loaded: Loaded) -> Stepper:
    """What walks the model, checked against it.

    Raises:
        BadArgument: as ``require_documents``; a family that cannot be walked.
    """
    from emad_ref.models.causal import CausalStepper

    require_documents(loaded)
    return CausalStepper(loaded.model)


def require_documents(loaded: Loaded) -> None:
    """Raises BadArgument for an encoder-decoder, which does not continue documents."""
    if loaded.model.config.is_encoder_decoder:
        raise BadArgument("model", loaded.name, "a decoder-only model", "an encoder-decoder reads a source, not a text")


def windows_of(
    loaded: Loaded, stepper: Stepper, corpus: str, split: Split, *, data: Path | None, limit: int | None
) -> Iterator[TokenSequence]:
    """At most ``limit`` windows of ``corpus``, or of what the model writes itself where that is ``self``.

    Raises:
        BadArgument: a corpus or split that there is not; a corpus of text for a model without a tokenizer.
    """
    import numpy as np

    from emad_ref.calibration.trace import window_of, windows
    from emad_ref.decoding.selftext import own_documents
    from emad_ref.text.sources import documents_of

    window = window_of(stepper.max_positions)
    if corpus == "self":
        documents = own_documents(stepper, loaded.opening or 0, min(window, 256) - 1, split)
    else:
        tokenizer = tokenizer_of(loaded)
        texts = documents_of(corpus, split, data=data)
        documents = (np.array(tokenizer.encode(t, add_special_tokens=False), dtype=np.int64) for t in texts)
    return windows(documents, window, loaded.opening, limit)


def tokenizer_of(loaded: Loaded) -> Any:
    """Raises BadArgument where the model came without one."""
    if loaded.tokenizer is None:
        raise BadArgument("model", loaded.name, "a model with a tokenizer", "pass the folder that holds tokenizer.json")
    return loaded.tokenizer
