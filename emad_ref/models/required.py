"""What some uses need of a model and not every model has, refused in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emad_ref.errors import BadArgument

if TYPE_CHECKING:  # it brings torch, which bad arguments need not wait for
    from emad_ref.models.loading import Loaded


def require_documents(loaded: Loaded) -> None:
    """Raises BadArgument for an encoder-decoder, which does not continue documents."""
    if loaded.model.config.is_encoder_decoder:
        raise BadArgument("model", loaded.name, "a decoder-only model", "an encoder-decoder reads a source, not a text")


def tokenizer_of(loaded: Loaded) -> Any:
    """Raises BadArgument where the model came without one."""
    if loaded.tokenizer is None:
        raise BadArgument("model", loaded.name, "a model with a tokenizer", "pass the folder that holds tokenizer.json")
    return loaded.tokenizer
