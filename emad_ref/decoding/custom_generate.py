"""``model.generate(**inputs, custom_generate=adaptive(point))``: a Transformers user's own call, at adaptive depth.

``generate`` prepares everything as it does for its own methods (logits processors, stopping criteria, lengths, ids of
special tokens) and hands the loop over; this one differs from ``GenerationMixin._sample`` in where logits come from.
What is drawn, and in which order, is the same: at full depth the tokens are Transformers' own, a sampled one included,
seed by seed. Rows decide on their own and padding, on the left as Transformers wants it, is never seen by a rule.

Refused, each with its name: beams, continued caches, embeddings as inputs, attentions and hidden states. ``generate``
(5.23) keeps ``streamer`` and ``assistant_model`` from every callable, so a streamer is an argument of ``adaptive``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.loading import Loaded
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt

PREPARED = frozenset(  # what `generate` itself puts beside the tokens, and what this loop makes of its own
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "encoder_outputs"}
)
UNSHOWN = ("output_attentions", "output_hidden_states")


@dataclass
class AdaptiveOutput(GenerateDecoderOnlyOutput):
    """As Transformers', and ``depths`` int64 [rows, new tokens]: blocks run for each token, 0 for padding."""

    depths: Tensor | None = None


@dataclass
class AdaptiveSeq2SeqOutput(GenerateEncoderDecoderOutput):
    """As Transformers', and ``depths`` as in ``AdaptiveOutput``: blocks of the decoder."""

    depths: Tensor | None = None


def adaptive(
    point: OperatingPoint, *, loaded: Loaded | None = None, streamer: BaseStreamer | None = None
) -> Callable[..., Any]:
    """What to pass as ``custom_generate``. The model is checked once, when it is first generated with.

    ``point``: of the model's number of layers, e.g. ``load_profile("profile.json").point(0.2)``. ``loaded``: what
    will be generated with, where the point names a lens attached to its stepper. ``streamer``: as ``generate`` takes
    one, for a single row.

    Calls raise:
        BadArgument: a model that cannot be walked or is not that of ``loaded``, a point for another number of layers,
            an option that means nothing here, a mask with holes, more positions than the model has.
        NotFinite: logits hold NaN or +inf.
    """
    walked: list[tuple[Any, Stepper]] = []  # the model last generated with
    if loaded is not None:
        walked.append((loaded.model, loaded.stepper))

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Callable[[Tensor, Tensor], Tensor],
        stopping_criteria: Callable[[Tensor, Any], Tensor],
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        _require_supported(generation_config, model_kwargs)
        if loaded is not None and loaded.model is not model:
            raise BadArgument("loaded", loaded.name, "the very model that generates", "call its own model.generate")
        if not walked or walked[0][0] is not model:
            walked[:] = [(model, Seq2SeqStepper(model) if model.config.is_encoder_decoder else CausalStepper(model))]
        prompts = _prompts(model, input_ids, inputs_tensor, model_kwargs.get("attention_mask"))
        decoder = WalkedDecoder(walked[0][1], point, max_rows=len(prompts))
        loop = _Loop(decoder, prompts, generation_config, streamer)
        return loop.run(input_ids, logits_processor, stopping_criteria)

    return generate


class _Loop:
    def __init__(
        self, decoder: WalkedDecoder, prompts: list[Prompt], config: Any, streamer: BaseStreamer | None
    ) -> None:
        self.decoder, self.prompts, self.config, self.streamer = decoder, prompts, config, streamer
        kept = config.return_dict_in_generate
        self.scores: list[Tensor] | None = [] if kept and config.output_scores else None
        self.logits: list[Tensor] | None = [] if kept and config.output_logits else None

    def run(self, ids: Tensor, processors: Callable[..., Tensor], criteria: Callable[..., Tensor]) -> Any:
        """``ids`` [rows, prompt + new], or the output with depths where the configuration asks for one."""
        self._show(ids)
        depths: list[Tensor] = []
        alive = np.arange(len(ids))
        running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        session, arrival = self.decoder.begin(self.prompts, int(self.config.max_length) - ids.shape[1])
        # of all rows, also of those that have ended: processors and draws are of the whole batch, as Transformers' are
        latest = torch.zeros(len(ids), arrival.logits.shape[-1], device=ids.device)
        try:
            while True:
                latest[torch.from_numpy(alive).to(ids.device)] = arrival.logits[:, -1].to(ids.device, torch.float32)
                depth = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
                depth[torch.from_numpy(alive).to(ids.device)] = torch.from_numpy(arrival.depth[:, -1]).to(ids.device)
                depths.append(depth)
                token = self._pick(ids, latest.clone(), processors, running)
                ids = torch.cat([ids, token[:, None]], dim=-1)
                self._show(token)
                running = running & ~criteria(ids, None if self.scores is None else tuple(self.scores))
                ended = np.flatnonzero(~running.cpu().numpy()[alive])
                if len(ended) == len(alive):
                    break
                if len(ended):
                    session.drop(ended)
                    alive = np.delete(alive, ended)
                session.commit(session.length)
                fed = token[torch.from_numpy(alive).to(ids.device), None].to(self.decoder.stepper.device)
                with torch.inference_mode():
                    arrival = session.advance(fed, None)
        finally:
            session.close()
        if self.streamer is not None:
            self.streamer.end()
        return self._output(ids, torch.stack(depths, dim=1)) if self.config.return_dict_in_generate else ids

    def _pick(self, ids: Tensor, logits: Tensor, processors: Callable[..., Tensor], running: Tensor) -> Tensor:
        """int64 [rows]; padding where a row has ended."""
        if self.logits is not None:
            self.logits.append(logits.clone())  # processors may write into theirs
        scores = processors(ids, logits)
        if self.scores is not None:
            self.scores.append(scores)
        if self.config.do_sample:
            token = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            token = scores.argmax(dim=-1)
        padding = self.config._pad_token_tensor
        return token if padding is None else torch.where(running, token, padding.to(token.device))

    def _show(self, ids: Tensor) -> None:
        if self.streamer is not None:
            self.streamer.put(ids.cpu())

    def _output(self, ids: Tensor, depths: Tensor) -> Any:
        made = AdaptiveSeq2SeqOutput if self.prompts[0].source is not None else AdaptiveOutput
        scores, logits = (None if kept is None else tuple(kept) for kept in (self.scores, self.logits))
        return made(sequences=ids, scores=scores, logits=logits, depths=depths)  # type: ignore[arg-type]


def _require_supported(config: Any, model_kwargs: dict[str, Any]) -> None:
    if config.num_beams != 1:
        raise BadArgument("num_beams", config.num_beams, "1", "depth is decided token by token, not beam by beam")
    for name in UNSHOWN:
        if getattr(config, name):
            raise BadArgument(name, True, "False", "layers that a token did not run have none")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise BadArgument("past_key_values", f"{past.get_seq_length()} positions", "none", "pass the whole prompt")
    strange = sorted(name for name, value in model_kwargs.items() if value is not None and name not in PREPARED)
    if strange:
        raise BadArgument(strange[0], type(model_kwargs[strange[0]]).__name__, "nothing of that name", "leave it out")


def _prompts(model: Any, ids: Tensor, inputs: Tensor | None, mask: Tensor | None) -> list[Prompt]:
    """One per row, without padding. Of an encoder-decoder ``inputs`` and ``mask`` are the sources'."""
    if not model.config.is_encoder_decoder:
        return [Prompt(tokens) for tokens in _unpadded(ids, mask)]
    assert inputs is not None, "generate gives what it encodes to whoever names it"
    each = len(ids) // len(inputs)  # num_return_sequences: `generate` repeats the mask and the targets, not these
    sources = _unpadded(inputs.repeat_interleave(each, dim=0), mask)
    return [Prompt(tokens, source) for tokens, source in zip(_unpadded(ids, None), sources, strict=True)]


def _unpadded(ids: Tensor, mask: Tensor | None) -> list[Any]:
    rows = ids.cpu().numpy()
    if mask is None:
        return list(rows)
    seen = mask.cpu().numpy() != 0
    for row, one in enumerate(seen):
        if np.count_nonzero(np.diff(one)) > 1 or not one.any():
            raise BadArgument(f"attention_mask[{row}]", one.astype(int).tolist(), "one run of ones")
    return [row[one] for row, one in zip(rows, seen, strict=True)]
