"""Model, lens and operating point for tests of the audit: a tiny random GPT-NeoX in float64, a point of many depths.

Weights are drawn wide (0.3 instead of 0.02), so that every layer changes the argmax and no defect stays hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import Floats, Ints
from emad_ref.signals import ENTROPY
from pytest_emad.audit.reference_logits import Lens, LogitLens
from pytest_emad.audit.trajectory import DecoderUnderTest

VOCABULARY, LAYERS, PROBES = 101, 8, (2, 4, 6)


@functools.cache
def tiny_neox(seed: int = 0) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=256,
    )
    model, rng = GPTNeoXForCausalLM(config).double().eval(), np.random.default_rng(seed)
    for weight in model.parameters():
        if weight.dim() > 1:  # not torch's generator, which the threads of a stand-in server share
            weight.data = torch.from_numpy(rng.normal(0, 0.3, weight.shape))
    return model


def readout(model: torch.nn.Module, tokens: Ints) -> torch.Tensor:
    """Return float64 logits [n, L, V] after every layer from one plain pass; the last state is already normed."""
    output = model(
        torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None], output_hidden_states=True, use_cache=False
    )
    decoder = model.get_decoder()
    norm = decoder.final_layer_norm if hasattr(decoder, "final_layer_norm") else decoder.norm
    states = [*(norm(state[0]) for state in output.hidden_states[1:-1]), output.hidden_states[-1][0]]
    return model.get_output_embeddings()(torch.stack(states, dim=1)).double()


def lens_of(model: torch.nn.Module) -> Lens:
    @torch.inference_mode()
    def lens(tokens: Ints) -> Floats:
        return readout(model, tokens).numpy()

    return LogitLens(lens)


def under_test(
    made: Callable[[Any, OperatingPoint], Decoder],
    point: OperatingPoint,
    tolerance: float = 1e-9,
    model: GPTNeoXForCausalLM | None = None,
) -> DecoderUnderTest:
    """Return a decoder that ``made`` builds from the tiny model, or from ``model``."""
    model = model or tiny_neox()
    return DecoderUnderTest(made(model, point), lens_of(model), point, tolerance, exact_context=True)


def entropy_nats(logits: Floats) -> Floats:
    """Return the entropy [...] of ``logits`` [..., V] in nats."""
    assert ENTROPY.from_lens is not None
    return ENTROPY.from_lens(np.asarray(logits))


def drawn(rows: tuple[int, ...], n: int, seed: int = 3) -> tuple[list[Prompt], Ints]:
    """Return ragged random prompts of the given lengths and a continuation int64 [rows, n]."""
    rng = np.random.default_rng(seed)
    return [Prompt(rng.integers(3, VOCABULARY, length)) for length in rows], rng.integers(3, VOCABULARY, (len(rows), n))


def require_entropy_thresholds(point: OperatingPoint) -> None:
    """Raise Unsupported for a point with fields that the decoders here do not implement."""
    others = point.interpolate, point.confidence, point.decay, point.lens, point.translators, point.period, point.floor
    if (
        any(others)
        or point.bins.bin_count > 1
        or (point.signal, point.estimator) != ("entropy_nats", EntropyEstimator())
    ):
        raise Unsupported("thresholds on the entropy of full heads alone")


@functools.cache
def spread_point(quantile: float = 0.12, schedule: str = "monotone") -> OperatingPoint:
    """Return a point with thresholds at a low quantile of each probe's entropy, so that rows fall probe by probe."""
    tokens = np.random.default_rng(1).integers(3, VOCABULARY, 200)
    entropy = entropy_nats(lens_of(tiny_neox())(tokens))
    thresholds = tuple(float(np.quantile(entropy[:, probe - 1], quantile)) for probe in PROBES)
    return OperatingPoint("spread", "emad", LAYERS, LAYERS, PROBES, (thresholds,), schedule=schedule)  # type: ignore[arg-type]  # validated by the point
