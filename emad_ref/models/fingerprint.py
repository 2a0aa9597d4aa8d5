"""Fingerprint of a model: a digest of its weights and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from emad_ref.file_formats import update_digest_with_tensor
from emad_ref.models.tokenizers import tokenizer_identity_text


def fingerprint_of(model: Any, tokenizer: Any | None) -> str:
    """sha256, hex, over the config, every parameter's name, shape, dtype and bytes, and the tokenizer.

    About a second per GB. Paths, library versions and the device are not included.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype", "architectures"):
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        update_digest_with_tensor(digest, name, parameter)
    if tokenizer is not None:
        digest.update(tokenizer_identity_text(tokenizer).encode())
    return digest.hexdigest()


def hash_weights(model: torch.nn.Module) -> dict[str, str]:
    """sha256, hex, of each tensor of the model's state dict by name, over dtype, shape and bytes.

    About a second per GB. Buffers outside the state dict are left out, since some models rewrite theirs while they
    run: rotary frequencies that depend on the length.
    """
    digests = {}
    for name, tensor in model.state_dict().items():
        digest = hashlib.sha256()
        update_digest_with_tensor(digest, name, tensor)
        digests[name] = digest.hexdigest()
    return digests
