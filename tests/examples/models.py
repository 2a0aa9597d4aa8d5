"""Models for tests of the examples: bundled models, and small random ones saved to a folder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPTNeoXConfig

from emad_ref.models.bundled import weights_folder
from emad_ref.models.loading import load
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, ModelRef, Request
from pytest_emad.audit.reference_logits import Lens
from pytest_emad.remote.client import DecoderClient
from pytest_emad.remote.messages import RequestedModel
from tests.decoders.audited_model import entropy_nats, lens_of
from tests.small_models import small_model

BUNDLED = ("emad-tiny", "emad-tiny-plain")


def lens_of_bundled(name: str) -> Lens:
    return lens_of(_bundled(name))


@functools.cache
def _bundled(name: str) -> Any:
    return load(name).model


def spread(lens: Lens, layers: int, vocabulary: int, quantile: float = 0.06) -> OperatingPoint:
    """Return a point with a probe after every layer but the last, at low entropy quantiles: depth falls by steps."""
    tokens = np.random.default_rng(7).integers(0, vocabulary, 120)
    entropy, probes = entropy_nats(lens(tokens)), tuple(range(1, layers))
    thresholds = tuple(float(np.quantile(entropy[:, probe - 1], quantile)) for probe in probes)
    return OperatingPoint("spread", "emad", layers, layers, probes, (thresholds,))


def save_odd(folder: Path, **changes: Any) -> Any:
    """Save a float32 random GPT-NeoX in ``folder``, with sizes that no vector width divides."""
    sizes: dict[str, Any] = {
        "hidden_size": 36, "num_hidden_layers": 5, "num_attention_heads": 3, "intermediate_size": 50,
        "vocab_size": 101, "max_position_embeddings": 64, "layer_norm_eps": 1e-4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    model = small_model("gpt_neox", torch.float32, config=GPTNeoXConfig(**sizes | changes))
    model.save_pretrained(folder)
    return model


def opened(
    remote: DecoderClient, folder: Path, point: OperatingPoint, *, dtype: str = "float32", **asked: Any
) -> Decoder:
    """Return the remote decoder for the model in ``folder``, which the judge runs in ``dtype``."""
    model = RequestedModel(folder.name, str(folder), "f00d", dtype, "cpu")
    vocabulary = int(asked.pop("vocabulary", 101))
    return remote.open_decoder(Request(ModelRef(model.name, lambda: model), point, **asked), model, vocabulary)


def folder_of(name: str) -> Path:
    return Path(weights_folder()) / name
