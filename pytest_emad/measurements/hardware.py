"""Checks of a machine's kernels on one model: exactness of cached steps, weight bandwidth, captured CUDA graphs.

Each check loads the model, takes seconds, and returns plain JSON values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from emad_ref.calibration.trace import compute_layer_logits, compute_stepwise_logits
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.families import EAGER
from emad_ref.models.generation import make_transformers_generate
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import Floats, Ints
from pytest_emad.audit.tolerances import tolerance
from pytest_emad.benchmark import machine
from pytest_emad.benchmark.clock import Arm, time_pairs
from pytest_emad.statistics.speedup import estimate_total_speedup
from pytest_emad.statistics.units import ByPair

CHECKED, TIMED, NEW = 96, 12, 32  # tokens compared; timed requests, and new tokens of each


def compare_cached_steps(model: str, dtype: str, device: str, seed: int = 0) -> dict[str, Any]:
    """Cached single steps against one pass: the largest difference of any logit after any layer, and its bound.

    Raises:
        EmadError: as ``models.loading.load``; a family without a bound.
    """
    loaded = load(model, device=device, dtype=getattr(torch, dtype))
    stepper = loaded.stepper
    length = min(CHECKED, stepper.max_positions)
    tokens = np.random.default_rng(seed).integers(0, stepper.vocabulary_size, length)
    difference = np.abs(compute_stepwise_logits(stepper, tokens, 0) - compute_layer_logits(stepper, tokens))
    return {
        "largest difference": float(difference.max()),
        "bound": tolerance(loaded.geometry.family, dtype, device, loaded.stepper.attention_kernel),
        "tokens": length,
        "layers": stepper.layers,
    }


def measure_relative_weight_bandwidth(model: str, dtype: str, device: str, seed: int = 0) -> dict[str, Any]:
    """Seconds of a full-depth token at batch 1, and the bandwidth of reading its weights relative to a copy."""
    loaded = load(model, device=device, dtype=getattr(torch, dtype))
    decoder = WalkedDecoder(loaded.stepper, full_depth(loaded.stepper.layers))
    prompt = [Prompt(np.arange(8, dtype=np.int64))]
    arms: dict[str, Arm] = {
        "few": partial(_decode, decoder, prompt, 1),
        "many": partial(_decode, decoder, prompt, 1 + NEW),
    }
    rng = np.random.default_rng(seed)
    seconds = time_pairs(arms, TIMED, rng, synchronize=decoder.synchronize).seconds
    each = float(np.median(seconds["many"] - seconds["few"])) / NEW
    geometry = loaded.geometry
    table = geometry.vocabulary * geometry.embedding_width  # read row by row, unless the head is the same table
    read = (geometry.parameter_count() - (0 if geometry.tied else table)) * loaded.stepper.unembedding.element_size()
    reached = machine.measure_copy_bandwidth(device)
    return {
        "seconds a token": each,
        "bytes a token": read,
        "bytes/s": read / each,
        "copied, bytes/s": reached,
        "share of bandwidth": read / each / reached,
    }


def compare_captured_steps(model: str, dtype: str, device: str, seed: int = 0) -> dict[str, Any]:
    """Captured against eager steps and ``generate`` at full depth, batch 1: logit differences and paired times.

    Ratios are [value, low, high] of total times at 95 %, above 1 where captured steps are faster.

    Raises:
        Unsupported: capture does not work here.
        EmadError: as ``models.loading.load``; a family without a bound.
    """
    loaded = load(model, device=device, dtype=getattr(torch, dtype))
    captured = loaded.stepper
    if not isinstance(captured, CausalStepper) or not captured.is_capturing_graphs:
        ran = captured.backend if isinstance(captured, CausalStepper) else loaded.provenance["backend"]
        raise Unsupported(f"no step of {model} is captured on {device}: it runs by {ran}")
    eager, full = CausalStepper(loaded.model, backend=EAGER), full_depth(captured.layers)
    decoders = {"captured": WalkedDecoder(captured, full), "eager": WalkedDecoder(eager, full)}
    rng, length = np.random.default_rng(seed), min(CHECKED, captured.max_positions)
    tokens = rng.integers(0, captured.vocabulary_size, length)
    difference = np.abs(np.subtract(*(_stepwise_logits(decoder, tokens) for decoder in decoders.values())))
    prompt = Prompt(np.arange(8, dtype=np.int64))
    generate = make_transformers_generate(loaded.model, loaded.stepper.device)
    arms: dict[str, Arm] = {"generate": lambda _: generate(prompt, NEW)}
    arms |= {name: partial(_decode, decoder, [prompt], NEW) for name, decoder in decoders.items()}
    seconds = time_pairs(arms, TIMED, rng, synchronize=decoders["captured"].synchronize).seconds
    if not captured.is_capturing_graphs:
        raise Unsupported(f"captures were given up on {device}: {captured.backend}")
    ratios = {
        name: estimate_total_speedup(ByPair(seconds[name]), ByPair(seconds["captured"]))
        for name in ("eager", "generate")
    }
    return {
        "largest difference": float(difference.max()),
        "bound": tolerance(loaded.geometry.family, dtype, device, loaded.stepper.attention_kernel),
        "tokens": length,
        "backend": captured.backend,
        **{f"{name}, seconds a token": float(np.median(each)) / NEW for name, each in seconds.items()},
        **{f"captured against {name}": [each.value, each.low, each.high] for name, each in ratios.items()},
        "pairs": TIMED,
    }


def _stepwise_logits(decoder: WalkedDecoder, tokens: Ints) -> Floats:
    session, _ = decoder.start([Prompt(tokens[:1])])
    return np.stack([session.feed(token[None, None]).logits[0, -1] for token in tokens[1:]])


def _decode(decoder: WalkedDecoder, prompt: list[Prompt], new: int, pair: int) -> None:
    decoder.generate(prompt, new, frozenset())
