"""GGUF files of llama.cpp → folders in the format of Transformers, with dequantised weights and the file's tokenizer.

Transformers reads the config and the weights, and undoes llama.cpp's order of heads. The tokenizer is built here: a
byte-level BPE from the file's tokens and merges, cut into words as ``tokenizer.ggml.pre`` names it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from emad_ref.errors import BadArgument, convert_errors_to_bad_argument, is_whole
from emad_ref.models.checkpoint import (
    TensorDtypesAndElementCounts,
    require_all_weights_loaded,
    require_config_within_stored_size,
    require_positive_sizes,
)
from emad_ref.models.geometry import geometry_of

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # words as in GPT-2
PRE_TOKENIZERS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
}
CONTROL_TOKEN = 3  # values of tokenizer.ggml.token_type that never occur in text
PLAIN_TYPES = ("F32", "F16", "BF16")
CHECKED_TOKENS = 32  # of the text on which the written model is compared


def convert_gguf(path: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """Write the causal model of a GGUF file to ``folder``, in float32.

    Returns:
        The type of most of its quantised tensors, such as ``Q4_1``, or of all of them, and versions of the libraries.

    Raises:
        BadArgument: no GGUF file, an architecture, quantisation or tokenizer that cannot be read, tensors that are
            missing or do not fit its sizes, or different logits of the written model.
    """
    reader = _open(path)
    read = _read_model(path, reader)
    tokenizer = _tokenizer(path, reader)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)  # its weights are plain numbers by now
    model = type(read)(type(read.config).from_dict(settings))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    ids = torch.arange(min(CHECKED_TOKENS, read.config.vocab_size))[None]
    with _readable(path, "a model that runs on tokens"), torch.inference_mode():
        if not torch.equal(read.eval()(ids).logits, written.eval()(ids).logits):
            raise BadArgument("file", path.name, "a model that Transformers can write", "its logits change, or are NaN")
    return _quantisation(reader), {name: version(name) for name in ("gguf", "torch", "transformers")}


def _readable(path: Path, expected: str) -> AbstractContextManager[None]:
    """Turn any error of gguf, Transformers or tokenizers into BadArgument: damaged metadata may raise any of them."""
    return convert_errors_to_bad_argument("file", path.name, expected, "fetch or convert it again")


def _open(path: Path) -> Any:
    with _readable(path, "a GGUF file"):
        return import_module("gguf").GGUFReader(str(path))


def _read_model(path: Path, reader: Any) -> Any:
    """The model as Transformers dequantises it. Refuses missing tensors, which Transformers would draw at random."""
    stored = TensorDtypesAndElementCounts({}, {tensor.name: int(tensor.n_elements) for tensor in reader.tensors})
    with _readable(path, "a GGUF file that Transformers and gguf can dequantise"):
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        require_positive_sizes(config.get_text_config(), f"convert {path.name} again")
        require_config_within_stored_size(
            path.name, geometry_of(config), sum(stored.numbers.values()), stored.block_count
        )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, output_loading_info=True
        )
    model, filling = loaded
    require_all_weights_loaded(path.name, model, filling)
    return model


def _quantisation(reader: Any) -> str:
    """The quantisation type of most stored numbers."""
    stored: dict[str, int] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        stored[kind] = stored.get(kind, 0) + int(tensor.n_elements)
    quantised = {kind: count for kind, count in stored.items() if kind not in PLAIN_TYPES}
    held = quantised or stored
    return max(held, key=lambda kind: held[kind])


def _tokenizer(path: Path, reader: Any) -> PreTrainedTokenizerFast:
    """Raises BadArgument for a kind of tokenizer, or of words, that is not in ``PRE_TOKENIZERS``."""

    def field(name: str) -> Any:
        held = reader.fields.get(f"tokenizer.ggml.{name}")
        return None if held is None else held.contents()

    with _readable(path, "metadata tokenizer.ggml.… of a byte-level BPE"):
        kind, words = field("model"), field("pre")
        if kind != "gpt2" or words not in PRE_TOKENIZERS:
            expected = f"a tokenizer of the kind gpt2 with words of {', '.join(PRE_TOKENIZERS)}"
            raise BadArgument("file", path.name, expected, f"it has {kind!r} with words of {words!r}")
        tokens = field("tokens")
        merges = [tuple(merge.split(" ")) for merge in field("merges")]
        backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
        backend.pre_tokenizer = PRE_TOKENIZERS[words]
        backend.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(tokens, field("token_type"), strict=True) if kind == CONTROL_TOKEN]
        backend.add_special_tokens([AddedToken(token, special=True) for token in special])
        roles = {}
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            if (at := field(f"{name}_token_id")) is None:
                continue
            if not is_whole(at) or not 0 <= at < len(tokens):
                expected = f"an id of its {len(tokens)} tokens"
                raise BadArgument(f"tokenizer.ggml.{name}_token_id", at, expected, f"convert {path.name} again")
            roles[f"{role}_token"] = tokens[at]
        longest = reader.fields[f"{reader.fields['general.architecture'].contents()}.context_length"].contents()
        return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=int(longest), **roles)
