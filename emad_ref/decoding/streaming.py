"""Streaming: text token by token with its depth, from one model at a point, or from a pair that switches.

``stream`` and ``stream_pair`` write the tokens of ``WalkedDecoder.generate`` and ``switch``,
``stream_self_speculation`` those of ``draft``.

The texts of all tokens join to what the tokenizer decodes of all ids. A token's text is what becomes final with it
(``detokenizer``): one character may take several tokens, of which the last has the text; the last token has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from emad_ref.decoding.detokenizer import IncrementalDetokenizer
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.reference import Sampler, WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, draft, drafting_point
from emad_ref.decoding.switching import LARGE, SwitchingRule, stream_tokens_and_models
from emad_ref.errors import require_instance
from emad_ref.models.loading import LoadedModel, get_required_tokenizer, shared_vocabulary_size
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.text.documents import normalize_newlines_and_bom


@dataclass(frozen=True)
class StreamedToken:
    """One new token: its ``text``, id, the blocks run for it, its model's number of blocks, and that model's name."""

    text: str
    token: int
    depth: int
    layers: int
    model: str


def stream(
    model: LoadedModel,
    text: str,
    point: OperatingPoint | None = None,
    tokens: int = 48,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[StreamedToken]:
    """Stream a continuation of ``text``, token by token with its depth.

    Parameters
    ----------
    model : LoadedModel
        An encoder-decoder reads ``text`` as its source.
    text : str
        The prompt.
    point : OperatingPoint or None
        Full depth by default.
    tokens : int
        Most new tokens.
    temperature : float
        0 is greedy.
    seed : int
        Seed of the draws.

    Yields
    ------
    StreamedToken
        Text, id and depth of each new token.

    Raises
    ------
    BadArgument
        A model without a tokenizer, no token to start from, and as the decoder raises.
    """
    point = full_depth(model.geometry.layers) if point is None else point
    decoder = WalkedDecoder(model.stepper, point, seed=seed, temperature=temperature)
    prompt = make_prompt_from_text(model, text)
    steps = stream_tokens_and_depths(decoder, prompt, tokens, model.end_token_ids)
    read = prompt.tokens if prompt.source is None else np.array([], dtype=np.int64)
    layers = model.geometry.layers
    yield from _detokenized(model, read, ((token, depth, layers, model.name) for token, depth in steps))


def stream_self_speculation(
    model: LoadedModel, text: str, drafting: Drafting, tokens: int = 48, *, temperature: float = 0.0, seed: int = 0
) -> Iterator[StreamedToken]:
    """Stream up to ``tokens`` tokens after ``text``, the model's own at full depth, by self-speculation (``drafting``).

    They come at the end, since a round may take several tokens back.

    Raises:
        BadArgument: as ``stream``; a draft of another model, a lens that is not attached.
    """
    point = drafting_point(model.geometry.layers, drafting)
    partner = Partner(WalkedDecoder(model.stepper, point, seed=seed, temperature=temperature), point)
    prompt = make_prompt_from_text(model, text)
    result = draft(partner, drafting, [prompt], tokens, stop=model.end_token_ids, temperature=temperature, seed=seed)
    layers = model.geometry.layers
    read = prompt.tokens if prompt.source is None else np.array([], dtype=np.int64)
    yield from _detokenized(
        model, read, ((token, layers, layers, model.name) for token in result.record.emitted[0].tolist())
    )


def stream_tokens_and_depths(
    decoder: WalkedDecoder, prompt: Prompt, tokens: int, stop: frozenset[int] = frozenset()
) -> Iterator[tuple[int, int]]:
    """(token, depth) as the decoder's ``generate`` emits them, each as soon as it is known."""
    sampler = Sampler(1, decoder.temperature, decoder.seed)
    session, output = decoder.start_with_room([prompt], tokens)
    with closing(session):
        for left in range(tokens, 0, -1):
            picked = sampler.pick_next_tokens(output.logits[:, -1], [0])
            yield int(picked), int(output.depth[0, -1])
            if int(picked) in stop or left == 1:
                return
            session.commit(session.length)
            with torch.inference_mode():
                output = session.process_tokens(picked[:, None], None)


def stream_pair(
    small: LoadedModel,
    large: LoadedModel,
    text: str,
    rule: SwitchingRule,
    tokens: int = 48,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[StreamedToken]:
    """Stream a continuation of ``text`` by two models that switch (EAD), each at full depth.

    Parameters
    ----------
    small, large : LoadedModel
        Models with the same token ids.
    text : str
        The prompt.
    rule : SwitchingRule
        Threshold in bits, window, shortest run and first model.
    tokens : int
        Most new tokens.
    temperature : float
        0 is greedy.
    seed : int
        Seed of the draws.

    Yields
    ------
    StreamedToken
        Text, id and model of each new token.

    Raises
    ------
    BadArgument
        Models with different ids, and as ``stream``.

    References
    ----------
    EAD, "Dynamic Switching Mechanism".
    """
    require_instance("rule", rule, SwitchingRule, "SwitchingRule(threshold_bits)")
    shared, models = shared_vocabulary_size(small, large), (small, large)
    points = [full_depth(model.geometry.layers) for model in models]
    first, second = (
        Partner(WalkedDecoder(model.stepper, point), point, shared) for model, point in zip(models, points, strict=True)
    )
    prompt = make_prompt_from_text(large, text)
    steps = stream_tokens_and_models(
        first, second, rule, prompt, tokens, stop=large.end_token_ids, temperature=temperature, seed=seed
    )
    by = ((token, points[model].ceiling, points[model].layers, models[model].name) for token, model in steps)
    yield from _detokenized(models[LARGE], prompt.tokens, by)


def make_prompt_from_text(model: LoadedModel, text: str) -> Prompt:
    """``text`` behind the model's opening token, or as the source of an encoder-decoder.

    Raises:
        BadArgument: a model without a tokenizer, a prompt with NUL or bytes that are not UTF-8.
    """
    require_instance("prompt", text, str, "pass a text, not tokens")
    tokenizer, text = get_required_tokenizer(model), normalize_newlines_and_bom(text, "prompt")
    opening = [] if model.opening_token_id is None else [model.opening_token_id]
    if model.model.config.is_encoder_decoder:
        return Prompt(np.array(opening), np.array(tokenizer.encode(text), dtype=np.int64))
    return Prompt(np.array(opening + tokenizer.encode(text, add_special_tokens=False), dtype=np.int64))


def _detokenized(
    model: LoadedModel, read: Iterable[int], steps: Iterable[tuple[int, int, int, str]]
) -> Iterator[StreamedToken]:
    """Pieces of (token, depth, layers, model's name), one token behind, so that the last is known."""
    words = IncrementalDetokenizer(get_required_tokenizer(model), read)
    last: StreamedToken | None = None
    for token, depth, layers, name in steps:
        if last is not None:
            yield last
        last = StreamedToken(words.add_token(token), token, depth, layers, name)
    if last is not None:
        yield StreamedToken(last.text + words.flush(), last.token, last.depth, last.layers, last.model)
