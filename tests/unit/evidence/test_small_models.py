"""Models of one layer and of few positions are judged like others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import transformers as hf

from emad_ref.audit.positions import MAX_SHORT_LENGTH
from emad_ref.calibration.trace import TokenSequence
from emad_ref.errors import EmadError
from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.measurements.verification import ReplayValidity
from emad_ref.models.causal import CausalStepper
from tests.small import small_model


def test_a_model_of_one_layer_has_a_probing_point_without_probes() -> None:
    config = hf.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    stepper = CausalStepper(small_model("llama", config=config))
    texts = [TokenSequence(np.arange(12), 0), TokenSequence(np.arange(20, 32), 1)]
    subject: Any = SimpleNamespace(stepper=stepper, tolerance=1e-6, sequences=lambda split, count: texts)
    point = ReplayValidity(subject).probing_point
    assert (point.layers, point.probes, point.thresholds) == (1, (), ((),))


def test_prompts_leave_room_for_what_is_fed_after_them() -> None:
    rng = np.random.default_rng(0)
    for window, fed in ((48, 24), (30, 29), (512, 24)):
        model = cast(ModelUnderTest, SimpleNamespace(window=window, name="m"))
        lengths = ModelUnderTest.brief(model, rng, 50, fed)
        assert 1 <= min(lengths) <= max(lengths) <= min(MAX_SHORT_LENGTH, window - fed)
    with pytest.raises(EmadError, match="holds 24 positions, but this audit feeds 24 tokens"):
        ModelUnderTest.brief(cast(ModelUnderTest, SimpleNamespace(window=24, name="m")), rng, 4, 24)
