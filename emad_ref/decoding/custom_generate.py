"""Custom generation: ``model.generate(**inputs, custom_generate=adaptive(point))`` decodes at adaptive depth.

``generate`` prepares everything as for its own methods (logits processors, stopping criteria, lengths, ids of special
tokens) and calls this loop, which differs from ``GenerationMixin._sample`` in the source of logits. Draws and their
order are the same: at full depth the tokens are Transformers' own, sampled ones included, seed by seed. Rows decide
independently, and left padding, as Transformers requires it, is invisible to rules.

This module lists every argument of ``generate`` and every setting of its configuration. ``TAKEN`` keep their usual
meaning, ``IDLE`` have no effect without beams, an assistant or a named cache, ``REFUSED`` raise an error. Streamer,
assistant, ``synced_gpus`` and tokenizers never arrive: ``generate`` (5.23) passes them to no callable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import METADATA_FIELDS
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument, is_number, require_instance
from emad_ref.models.causal import CausalStepper
from emad_ref.models.loading import LoadedModel
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt

PREPARED = frozenset(  # added by `generate` itself besides the tokens, or created by this loop
    {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "encoder_outputs"}
)
CACHE_NAMES = ("cache", "past_key_values")  # of transformers since and before 5.24
TAKEN = frozenset({
    "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate", "kwargs", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample", "temperature",
    "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "guidance_scale", "watermarking_config", "num_return_sequences", "output_scores", "output_logits",
    "return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
})  # fmt: skip
IDLE = frozenset({
    "early_stopping", "length_penalty", "use_cache", "cache_config", "max_cache_len", "compile_config",
    "disable_compile", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
})  # fmt: skip
BY_BEAMS = "depth is decided token by token, not beam by beam"
UNSHOWN = "layers that a token did not run have none"
BY_DRAFTS = "a point drafts nothing; emad_ref's DraftingDecoder does"
ELSEWHERE = "this loop picks one token after the other from the readout at its depth"
OF_ITS_OWN = "the decoder keeps K and V of its own, as with cache_implementation='dynamic'"
REFUSED: dict[str, str] = {
    "num_beams": BY_BEAMS,
    "num_beam_groups": BY_BEAMS,
    "diversity_penalty": BY_BEAMS,
    "constraints": BY_BEAMS,
    "force_words_ids": BY_BEAMS,
    "output_attentions": UNSHOWN,
    "output_hidden_states": UNSHOWN,
    "use_mtp": BY_DRAFTS,
    "prompt_lookup_num_tokens": BY_DRAFTS,
    "assistant_early_exit": BY_DRAFTS,
    "speculation_type": BY_DRAFTS,
    "is_assistant": BY_DRAFTS,
    "penalty_alpha": ELSEWHERE,
    "dola_layers": ELSEWHERE,
    "low_memory": ELSEWHERE,
    "token_healing": "generate keeps the tokenizer that it needs from every callable",
    "cache_implementation": OF_ITS_OWN,
    "prefill_chunk_size": OF_ITS_OWN,
    "continuous_batching_config": OF_ITS_OWN,
}
PLAIN_CACHE = "dynamic"  # generate's value without a cache_implementation


@dataclass
class AdaptiveOutput(GenerateDecoderOnlyOutput):
    """Transformers' output with ``depths`` int64 [rows, new tokens]: blocks run for each token, 0 for padding."""

    depths: Tensor | None = None


@dataclass
class AdaptiveSeq2SeqOutput(GenerateEncoderDecoderOutput):
    """Transformers' output with ``depths`` as in ``AdaptiveOutput``: blocks of the decoder."""

    depths: Tensor | None = None


def adaptive(
    point: OperatingPoint,
    *,
    loaded: LoadedModel | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: Any | None = None,
) -> Callable[..., Any]:
    """Make the ``custom_generate`` argument of ``model.generate`` for decoding at an operating point.

    Parameters
    ----------
    point : OperatingPoint
        For the model's number of layers, e.g. ``load_profile("profile.json").point(0.2)``.
    loaded : LoadedModel or None
        The model to generate with, needed if the point names a lens attached to its stepper.
    streamer : transformers streamer or None
        As in ``generate``, for a single row.
    tokenizer : transformers tokenizer or None
        For ``stop_strings``, as in ``generate``; by default that of ``loaded``.

    Returns
    -------
    callable
        The decoding loop. It checks the model once, at its first call. With ``return_dict_in_generate`` the output also
        has ``depths`` int64 [rows, new tokens].

    Raises
    ------
    BadArgument
        From the call: an unsupported model or another one than ``loaded``, a point for another number of layers, an
        unsupported option, stop strings without a tokenizer, a mask with holes, positions that do not count the tokens
        of a row, more positions than the model has.
    NotFinite
        From the call: logits hold NaN or +inf.

    References
    ----------
    EMAD, "Algorithm (per token)".
    """
    require_instance("point", point, OperatingPoint, "full_depth(layers), or profile.point(margin)")
    walked: list[tuple[Any, Stepper]] = []  # the model of the last call
    if loaded is not None:
        walked.append((loaded.model, loaded.stepper))

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Callable[[Tensor, Tensor], Tensor],
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        stop_strings: str | list[str] | None = None,  # named here, so it reaches this loop and not generate's criteria
        token_healing: bool | None = None,  # likewise: generate would require a tokenizer
        **model_kwargs: Any,
    ) -> Any:
        _require_supported({**vars(generation_config), "token_healing": token_healing}, model_kwargs)
        if loaded is not None and loaded.model is not model:
            raise BadArgument("loaded", loaded.name, "the very model that generates", "call its own model.generate")
        if not walked or walked[0][0] is not model:
            walked[:] = [(model, Seq2SeqStepper(model) if model.config.is_encoder_decoder else CausalStepper(model))]
        prompts = _prompts(model, input_ids, inputs_tensor, model_kwargs.get("attention_mask"))
        decoder = WalkedDecoder(walked[0][1], point, max_rows=len(prompts))
        loop = _GenerationLoop(decoder, prompts, generation_config, streamer)
        criteria = stopping_criteria
        if stop_strings is not None:
            words = tokenizer if tokenizer is not None or loaded is None else loaded.tokenizer
            criteria = StoppingCriteriaList([*criteria, _stop_string_criterion(stop_strings, words)])
        return loop.run(input_ids, logits_processor, criteria)

    return generate


class _GenerationLoop:
    def __init__(
        self, decoder: WalkedDecoder, prompts: list[Prompt], config: Any, streamer: BaseStreamer | None
    ) -> None:
        self.decoder, self.prompts, self.config, self.streamer = decoder, prompts, config, streamer
        keeps_output = config.return_dict_in_generate
        self.scores: list[Tensor] | None = [] if keeps_output and config.output_scores else None
        self.logits: list[Tensor] | None = [] if keeps_output and config.output_logits else None

    def run(self, ids: Tensor, processors: Callable[..., Tensor], criteria: StoppingCriteriaList) -> Any:
        """``ids`` [rows, prompt + new], or the output with depths if the configuration requests one.

        As in Transformers, an ended row is padded if the configuration has an end token. If only strings, lengths or
        the caller's criterion end rows, it continues until all rows have ended.
        """
        self._show(ids)
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        depths: list[Tensor] = []
        alive = np.arange(len(ids))
        running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        most = self.config.max_length  # max_new_tokens is in it
        if not is_number(most) or not float(most).is_integer():
            raise BadArgument("max_length", most, "a whole number, and max_new_tokens likewise", "pass an int")
        session, output = self.decoder.start_with_room(self.prompts, int(most) - ids.shape[1])
        # of all rows, ended ones included: processors and draws cover the whole batch, as in Transformers
        latest = torch.zeros(len(ids), output.logits.shape[-1], device=ids.device)
        try:
            while True:
                latest[torch.from_numpy(alive).to(ids.device)] = output.logits[:, -1].to(ids.device, torch.float32)
                depth = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
                depth[torch.from_numpy(alive).to(ids.device)] = torch.from_numpy(output.depth[:, -1]).to(ids.device)
                depths.append(depth)
                token = self._pick(ids, latest.clone(), processors, running if pads else torch.ones_like(running))
                ids = torch.cat([ids, token[:, None]], dim=-1)
                self._show(token)
                running = running & ~criteria(ids, None if self.scores is None else tuple(self.scores))
                ended = np.flatnonzero(~running.cpu().numpy()[alive])
                if len(ended) == len(alive):
                    break
                if pads and len(ended):
                    session.drop(ended)
                    alive = np.delete(alive, ended)
                session.commit(session.length)
                fed = token[torch.from_numpy(alive).to(ids.device), None].to(self.decoder.stepper.device)
                with torch.inference_mode():
                    output = session.process_tokens(fed, None)
        finally:
            session.close()
        if self.streamer is not None:
            self.streamer.end()
        return self._output(ids, torch.stack(depths, dim=1)) if self.config.return_dict_in_generate else ids

    def _pick(self, ids: Tensor, logits: Tensor, processors: Callable[..., Tensor], running: Tensor) -> Tensor:
        """int64 [rows] next tokens; padding for an ended row."""
        if self.logits is not None:
            self.logits.append(logits.clone())  # processors may modify theirs in place
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
        output_class = AdaptiveSeq2SeqOutput if self.prompts[0].source is not None else AdaptiveOutput
        scores, logits = (None if entries is None else tuple(entries) for entries in (self.scores, self.logits))
        return output_class(sequences=ids, scores=scores, logits=logits, depths=depths)  # type: ignore[arg-type]


def _stop_string_criterion(strings: str | list[str], tokenizer: Any) -> StopStringCriteria:
    """Criterion that ends a row once its text holds one of ``strings``."""
    if tokenizer is None:
        raise BadArgument(
            "stop_strings",
            strings,
            "a tokenizer beside it",
            "generate keeps its own tokenizer= from every callable: pass adaptive(point, tokenizer=…)",
        )
    listed = [strings] if isinstance(strings, str) else strings
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(each, str) and each for each in listed):
        raise BadArgument("stop_strings", strings, "a text, or a list of texts, none of them empty")
    return StopStringCriteria(tokenizer, strings)


def _require_supported(settings: dict[str, Any], model_kwargs: dict[str, Any]) -> None:
    """Raise BadArgument for settings that differ from transformers' default and are unsupported here."""
    defaults, standard = GenerationConfig._get_default_generation_params(), vars(GenerationConfig())
    for name, value in settings.items():
        plain = (defaults.get(name), PLAIN_CACHE if name == "cache_implementation" else None)
        if (
            name in TAKEN | IDLE
            or name not in standard
            or name in METADATA_FIELDS
            or value is None
            or value is False
            or any(type(value) is type(each) and value == each for each in plain)
        ):
            continue
        expected = repr(defaults.get(name, False if value is True else None))
        raise BadArgument(
            name, value, expected, REFUSED.get(name, "this version of transformers is newer than adaptive")
        )
    for name in CACHE_NAMES:
        past = model_kwargs.get(name)
        if past is not None and past.get_seq_length():
            raise BadArgument(name, f"{past.get_seq_length()} positions", "none", "pass the whole prompt")
    strange = sorted(name for name, value in model_kwargs.items() if value is not None and name not in PREPARED)
    if strange:
        raise BadArgument(strange[0], type(model_kwargs[strange[0]]).__name__, "nothing of that name", "leave it out")
    _require_plain_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))


def _require_plain_positions(positions: Tensor | None, mask: Tensor | None) -> None:
    """Raise BadArgument for positions other than 0, 1, … of every row's own tokens."""
    if positions is None:
        return
    visible = torch.ones_like(positions) if mask is None else mask
    counted = visible.long().cumsum(-1) - 1
    if positions.shape[-1:] != visible.shape[-1:] or not (positions == counted)[visible.expand_as(counted) != 0].all():
        raise BadArgument("position_ids", positions.tolist(), "0, 1, … of each row's tokens", "leave them out")


def _prompts(model: Any, ids: Tensor, inputs: Tensor | None, mask: Tensor | None) -> list[Prompt]:
    """One prompt per row, without padding. For an encoder-decoder ``inputs`` and ``mask`` are the sources'."""
    if not model.config.is_encoder_decoder:
        return [Prompt(tokens) for tokens in _unpadded(ids, mask)]
    assert inputs is not None, "generate passes its encoder inputs to a callable that names them"
    each = len(ids) // len(
        inputs
    )  # num_return_sequences: `generate` repeats the mask and the targets, but not the inputs
    sources = _unpadded(inputs.repeat_interleave(each, dim=0), mask)
    return [Prompt(tokens, source) for tokens, source in zip(_unpadded(ids, None), sources, strict=True)]


def _unpadded(ids: Tensor, mask: Tensor | None) -> list[Any]:
    rows = ids.cpu().numpy()
    if mask is None:
        return list(rows)
    visible = mask.cpu().numpy() != 0
    for row, one in enumerate(visible):
        if np.count_nonzero(np.diff(one)) > 1 or not one.any():
            raise BadArgument(f"attention_mask[{row}]", one.astype(int).tolist(), "one run of ones")
    return [row[one] for row, one in zip(rows, visible, strict=True)]
