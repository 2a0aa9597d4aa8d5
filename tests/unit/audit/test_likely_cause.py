"""A complaint about a wrong token names its likely cause: another prompt, or the rounding of bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.point import full_depth
from emad_ref.protocol import ModelRef, Request
from emad_ref.record import Ints
from pytest_emad.audit.decoding_checks import check_generation
from pytest_emad.audit.likely_cause import likely_cause
from pytest_emad.audit.trajectory import DecoderUnderTest
from pytest_emad.remote.token_decoder import Completion, TokenDecoder
from tests.decoders.audited_model import LAYERS, VOCABULARY, drawn, lens_of, tiny_neox

PROMPTS, _ = drawn((4, 30, 26, 12), 1)
NEW, TOLERANCE = 6, 1e-9


class Greedy(TokenDecoder):
    """The tiny model's own argmax after prompts that ``reads`` changes, by ``model``."""

    def __init__(self, reads: Callable[[Ints], Ints], model: Any) -> None:
        request = Request(ModelRef("m", lambda: None), full_depth(LAYERS), max_rows=len(PROMPTS))
        super().__init__(request)
        self.reads, self.model = reads, model

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        rows = []
        for prompt in prompts:
            history = self.reads(prompt).tolist()
            start = len(history)
            for _ in range(max_new):
                with torch.inference_mode():
                    history.append(int(self.model(torch.tensor([history])).logits[0, -1].argmax()))
            rows.append(Completion.cut_at_stop(np.array(history[start:]), stop))
        return rows


def complaint(reads: Callable[[Ints], Ints]) -> str:
    decoder = Greedy(reads, tiny_neox())
    finding = check_generation(
        DecoderUnderTest(decoder, lens_of(tiny_neox()), full_depth(LAYERS), TOLERANCE), PROMPTS, NEW
    )
    assert finding.passed is False
    return finding.detail


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        (lambda prompt: prompt[1:], "it looks like a prompt without its first token"),
        (lambda prompt: prompt[-16:], "it looks like a prompt cut to its last 16 tokens"),
        (lambda prompt: np.append(prompt[:1] ^ 1, prompt[1:]), None),  # another prompt, which has no name
    ],
)
def test_a_row_that_fits_another_prompt_says_which(reads: Callable[[Ints], Ints], said: str | None) -> None:
    detail = complaint(reads)
    assert "but the argmax at that depth is" in detail
    assert (said in detail) if said else ("looks like a prompt" not in detail)


@pytest.mark.parametrize(("gap", "named"), [(0.05, True), (0.2, False)])
def test_a_gap_as_small_as_rounding_names_the_precision(gap: float, named: bool) -> None:
    """Bfloat16 rounds a logit of 10 by 0.04, and each of two by as much."""
    logits = np.full(VOCABULARY, -5.0)
    logits[[7, 9]] = 10.0, 10.0 - gap
    cause = likely_cause(lens_of(tiny_neox()), PROMPTS[1].tokens, np.array([9, 3, 4]), logits, 0)
    assert cause.startswith(f"a gap of {gap} looks like bfloat16: compute in float32, or declare it by") is named
    assert bool(cause) is named
