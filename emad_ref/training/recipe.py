"""Recipe of a bundled model, and the functions of its family that the training loop calls. A seed fixes all data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """All settings that determine a bundled model."""

    name: str
    layers: int = 12
    hidden: int = 128
    heads: int = 4
    early_exit: tuple[tuple[int, float], ...] = ()  # (layer counted from 1, loss weight)
    steps: int = 3000
    batch: int = 12
    window: int = 256
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 100
    seed: int = 0
    family: str = "causal"  # a key of loop.FAMILIES


@dataclass(frozen=True)
class TrainingFamily:
    """Functions of a model family for training; ``loss`` returns (to minimise, last layer's nats per token)."""

    tokenizer: Callable[[], PreTrainedTokenizerFast]
    model: Callable[[Any], Any]
    batches: Callable[[Any, PreTrainedTokenizerFast], Iterator[Any]]
    loss: Callable[[Any, Any, Any], tuple[Tensor, Tensor]]
    optimisers: Callable[[Any, Any], list[torch.optim.Optimizer]]
