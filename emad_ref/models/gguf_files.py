"""GGUF files of llama.cpp → folders in the format of Transformers, with dequantised weights and the file's tokenizer.

Transformers reads the config and the weights, and undoes llama.cpp's order of heads. It skips keys and tensors that it
does not know, in silence. So every key must agree with what the model of the read config does (``_settings``), describe
the file, or be read here, and every tensor must fill a part of the model; anything else is refused by name.

The tokenizer is built here: a byte-level BPE from the file's tokens and merges, cut into words as
``tokenizer.ggml.pre`` names it. Each token is registered by its type in ``tokenizer.ggml.token_type``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from emad_ref.errors import BadArgument, convert_errors_to_bad_argument, is_number, is_whole
from emad_ref.models.checkpoint import (
    TensorDtypesAndElementCounts,
    require_all_weights_loaded,
    require_config_within_stored_size,
    require_positive_sizes,
)
from emad_ref.models.families import SLIDING_ATTENTION, family_of_config
from emad_ref.models.geometry import geometry_of

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # words as in GPT-2
PRE_TOKENIZERS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # tokenizer.ggml.token_type; 6 is a byte, of SentencePiece
REMEDY = "name the same model as a folder in the format of Transformers, whose config.json can say it"
MERGE_PARTS = "merge the parts of the file first: llama-gguf-split --merge"
DESCRIPTIVE = ("GGUF.", "general.", "quantize.imatrix.", "tokenizer.chat_template")  # beginnings of keys
ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unknown": "unk",
    "padding": "pad",
    "seperator": "sep",
    "cls": "cls",
    "mask": "mask",
}
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # llama.cpp ends a text at each
INFILLING = ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")  # places in a prompt: no text ends there
READ_BY_TOKENIZER = frozenset(
    f"tokenizer.ggml.{name}"
    for name in (
        "model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token", "add_eos_token",
        *(f"{role}_token_id" for role in (*ROLES, *ENDS, *INFILLING)),
    )
)  # fmt: skip
SINGLE_VALUES = {  # keys with one value that this reader follows
    "general.type": "model",
    "general.quantization_version": 2,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.remove_extra_whitespaces": False,
}
ANY = object()  # llama.cpp's value without a key depends on more than the config
PLAIN_TYPES = ("F32", "F16", "BF16")
CHECKED_TOKENS = 32  # of the text on which the written model is compared


def convert_gguf(path: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """Write the causal model of a GGUF file to ``folder``, in float32.

    Returns:
        The type of most of its quantised tensors, such as ``Q4_1``, or of all of them, and versions of the libraries.

    Raises:
        BadArgument: no GGUF file, an architecture, quantisation or tokenizer that cannot be read, tensors that are
            missing or do not fit its sizes, or different logits of the written model. Damaged metadata may raise any
            error of gguf, Transformers or tokenizers, which becomes this one.
    """
    expected = "a GGUF file that gguf and Transformers can read, with a byte-level BPE"
    remedy = "fetch it once more if it is cut off, else name the model's folder in the format of Transformers"
    with convert_errors_to_bad_argument("file", path.name, expected, remedy):
        reader = import_module("gguf").GGUFReader(str(path))
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        read = _read_model(path, reader, metadata)
        tokenizer = _tokenizer(path, metadata)
        ids = torch.arange(min(CHECKED_TOKENS, read.config.vocab_size))[None]
        logits = _compute_logits(read, ids)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)  # its weights are plain numbers by now
    model = type(read)(type(read.config).from_dict(settings))
    model.load_state_dict(read.state_dict())
    if ends := [metadata[key] for name in ENDS if (key := f"tokenizer.ggml.{name}_token_id") in metadata]:
        model.generation_config.eos_token_id = list(dict.fromkeys(ends))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    if not torch.equal(logits, _compute_logits(written, ids)):
        raise BadArgument("file", path.name, "a model that Transformers can write", "its logits change, or are NaN")
    return _quantisation(reader), {name: version(name) for name in ("gguf", "torch", "transformers")}


@torch.inference_mode()
def _compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(ids).logits
    return logits


def _read_model(path: Path, reader: Any, metadata: dict[str, Any]) -> Any:
    """The model as Transformers dequantises it. Refuses missing tensors, which Transformers would draw at random."""
    stored = TensorDtypesAndElementCounts({}, {tensor.name: int(tensor.n_elements) for tensor in reader.tensors})
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    require_positive_sizes(config.get_text_config(), f"convert {path.name} again")
    _require_metadata_read(path, metadata, config.get_text_config())
    require_config_within_stored_size(path.name, geometry_of(config), sum(stored.numbers.values()), stored.block_count)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, output_loading_info=True
    )
    model, filling = loaded
    require_all_weights_loaded(path.name, model, filling)
    _require_tensors_read(path, stored.numbers, model, metadata["general.architecture"])
    return model


def _settings(config: Any) -> dict[str, tuple[Any, Any]]:
    """Key without its architecture → (what the model of ``config`` does, what llama.cpp assumes without the key)."""
    sizes = geometry_of(config)
    rotary = getattr(config, "rope_parameters", None) or {}
    rotary = rotary.get("full_attention", rotary)
    width = int(sizes.head_dim * rotary.get("partial_rotary_factor", 1.0)) if rotary else None
    scaled = rotary.get("rope_type", "default") != "default"
    kinds, everywhere = getattr(config, "layer_types", None), family_of_config(config).anatomy.window_everywhere
    slides = everywhere if kinds is None else SLIDING_ATTENTION in kinds
    window = (slides and getattr(config, "sliding_window", None)) or 0
    norm = next(
        (getattr(config, key) for key in ("layer_norm_eps", "layer_norm_epsilon") if hasattr(config, key)), None
    )
    root_norm = getattr(config, "rms_norm_eps", None)
    plain_scale = sizes.head_dim**-0.5
    scale = getattr(config, "query_pre_attn_scalar", sizes.head_dim) ** -0.5
    dense = getattr(config, "intermediate_size", None) if sizes.experts else sizes.intermediate
    return {
        "block_count": (sizes.layers, None),
        "context_length": (config.max_position_embeddings, None),
        "embedding_length": (sizes.hidden, None),
        "feed_forward_length": (dense, None),
        "vocab_size": (sizes.vocabulary, ANY),
        "attention.head_count": (sizes.heads, None),
        "attention.head_count_kv": (sizes.kv_heads, sizes.heads),
        "attention.key_length": (sizes.head_dim, sizes.hidden // sizes.heads),
        "attention.value_length": (sizes.head_dim, sizes.hidden // sizes.heads),
        "attention.layer_norm_rms_epsilon": (root_norm, None),
        "attention.layer_norm_epsilon": (norm, None),
        "attention.scale": (scale, plain_scale),
        "attention.causal": (True, True),
        "attention.sliding_window": (window, 0),
        "rope.dimension_count": (width, sizes.head_dim if rotary else None),
        "rope.freq_base": (rotary.get("rope_theta"), 10000.0 if rotary else None),
        "rope.scaling.type": (rotary.get("rope_type") if scaled else "none", "none"),
        "rope.scaling.factor": (rotary.get("factor", 1.0), 1.0),
        "attn_logit_softcapping": (getattr(config, "attn_logit_softcapping", None), ANY),
        "final_logit_softcapping": (getattr(config, "final_logit_softcapping", None), ANY),
        "use_parallel_residual": (getattr(config, "use_parallel_residual", None), ANY),
        "expert_count": (sizes.experts, 0),
        "expert_used_count": (sizes.experts_used, 0),
        "expert_feed_forward_length": (sizes.intermediate if sizes.experts else None, ANY),
        "expert_weights_norm": (getattr(config, "norm_topk_prob", None), ANY),
    }


def _require_metadata_read(path: Path, metadata: dict[str, Any], config: Any) -> None:
    """Refuse the first key that the model of ``config`` does not follow.

    Raises:
        BadArgument: a key that nothing reads; a value that differs from what the model does; a missing key.
    """
    architecture = metadata["general.architecture"]
    settings = {f"{architecture}.{key}": pair for key, pair in _settings(config).items()}
    followed = SINGLE_VALUES | {key: does for key, (does, _) in settings.items()}
    for key, (does, assumed) in settings.items():  # first: other keys may differ because one is missing
        if key not in metadata and assumed is not ANY and not _is_same(assumed, does):
            expected = f"{does}: the model that Transformers makes of {path.name} has no other"
            known = "" if assumed is None else f"without the key llama.cpp takes {assumed}: "
            raise BadArgument(key, None, expected, known + REMEDY)
    for key, value in metadata.items():
        if key in followed:
            if not _is_same(value, followed[key]):
                expected = f"{followed[key]}: the model that Transformers makes of {path.name} has no other"
                raise BadArgument(key, value, expected, REMEDY)
        elif key not in READ_BY_TOKENIZER and not key.startswith(DESCRIPTIVE):
            expected = f"no key that nothing reads in {path.name}"
            raise BadArgument(key, value, expected, MERGE_PARTS if key.startswith("split.") else REMEDY)


def _is_same(stated: Any, does: Any) -> bool:
    """Whether a value of the file is ``does``; numbers as float32, as files hold them."""
    if isinstance(stated, bool) or isinstance(does, bool) or not (is_number(stated) and is_number(does)):
        return bool(stated == does)
    return bool(np.float32(stated) == np.float32(does))


def _require_tensors_read(path: Path, stored: dict[str, int], model: Any, architecture: str) -> None:
    """Refuse tensors that fill no part of ``model``, by name. ``stored``: tensor → element count."""
    if sum(stored.values()) == sum(parameter.numel() for parameter in model.parameters()):
        return
    gguf = import_module("gguf")
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    parts = ((name, *name.rpartition(".")[::2]) for name, _ in model.named_parameters())
    filled = {f"{known.get_name(stem)}.{last}" for _, stem, last in parts}
    unread = [name for name in stored if name not in filled and "_exps." not in name]
    raise BadArgument(
        "file", path.name, "tensors that fill its model", f"nothing reads {', '.join(unread[:3])}: {REMEDY}"
    )


def _quantisation(reader: Any) -> str:
    """The quantisation type of most stored numbers."""
    stored: dict[str, int] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        stored[kind] = stored.get(kind, 0) + int(tensor.n_elements)
    quantised = {kind: count for kind, count in stored.items() if kind not in PLAIN_TYPES}
    held = quantised or stored
    return max(held, key=lambda kind: held[kind])


def _tokenizer(path: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Raises BadArgument for a kind of tokenizer, of words or of tokens that is not read here."""

    def field(name: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}")

    kind, words = field("model"), field("pre")
    if kind != "gpt2" or words not in PRE_TOKENIZERS:
        expected = f"a tokenizer of the kind gpt2 with words of {', '.join(PRE_TOKENIZERS)}"
        raise BadArgument("file", path.name, expected, f"it has {kind!r} with words of {words!r}")
    tokens = field("tokens")
    ids = {name: _token_id(path, name, field(f"{name}_token_id"), len(tokens)) for name in (*ROLES, *ENDS)}
    roles = {f"{role}_token": tokens[at] for name, role in ROLES.items() if (at := ids[name]) is not None}
    used = dict(enumerate(tokens))
    for at, (token, kind) in enumerate(zip(tokens, field("token_type"), strict=True)):
        if kind == UNUSED and at not in ids.values():
            del used[at]  # no text has it, and it decodes to none
        elif kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED):
            expected = f"types {NORMAL}–{UNUSED} in {path.name}: a byte-level BPE has no others"
            raise BadArgument("tokenizer.ggml.token_type", kind, expected, f"{token!r} has it: {REMEDY}")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in used.items()}, merges=merges))
    backend.pre_tokenizer = PRE_TOKENIZERS[words]
    backend.decoder = decoders.ByteLevel()
    whole = [(token, kind) for token, kind in zip(tokens, field("token_type"), strict=True)]
    backend.add_special_tokens([AddedToken(t, special=True) for t, kind in whole if kind in (UNKNOWN, CONTROL)])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in whole if kind == USER_DEFINED])
    opens, ends = ([roles[f"{role}_token"]] if field(f"add_{role}_token") else [] for role in ("bos", "eos"))
    if opens or ends:
        named = [(token, tokens.index(token)) for token in {*opens, *ends}]
        backend.post_processor = processors.TemplateProcessing(single=[*opens, "$A", *ends], special_tokens=named)
    longest = metadata[f"{metadata['general.architecture']}.context_length"]
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=int(longest), chat_template=template, **roles
    )


def _token_id(path: Path, name: str, at: Any, tokens: int) -> int | None:
    """The id of a role, checked; None without one."""
    if at is None or (is_whole(at) and 0 <= at < tokens):
        return at
    expected = f"an id of its {tokens} tokens"
    raise BadArgument(f"tokenizer.ggml.{name}_token_id", at, expected, f"convert {path.name} again")
