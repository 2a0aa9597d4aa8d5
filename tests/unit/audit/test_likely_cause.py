"""A complaint names its likely cause as data: another prompt, rounding, another request's stops or temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.point import full_depth
from emad_ref.protocol import ModelRef, Request
from emad_ref.record import Ints
from pytest_emad.audit.decoding_checks import check_generation
from pytest_emad.audit.finding import AuditRefutedError, Finding
from pytest_emad.audit.likely_cause import likely_cause, likely_precision, likely_stops
from pytest_emad.audit.sampling import SampledRow, require_temperatures
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


def refuted(reads: Callable[[Ints], Ints]) -> Finding:
    decoder = Greedy(reads, tiny_neox())
    finding = check_generation(
        DecoderUnderTest(decoder, lens_of(tiny_neox()), full_depth(LAYERS), TOLERANCE), PROMPTS, NEW
    )
    assert finding.passed is False
    return finding


@pytest.mark.parametrize(
    ("reads", "kind"),
    [
        (lambda prompt: prompt[1:], "prompt without its first token"),
        (lambda prompt: prompt[-16:], "prompt cut to 16 tokens"),
        (lambda prompt: np.append(prompt[:1] ^ 1, prompt[1:]), None),  # another prompt, which has no name
    ],
)
def test_a_row_that_fits_another_prompt_says_which(reads: Callable[[Ints], Ints], kind: str | None) -> None:
    finding = refuted(reads)
    assert "but the argmax at that depth is" in finding.complaint
    assert (finding.likely_cause and finding.likely_cause.kind) == kind
    assert ("it looks like a prompt" in finding.complaint) is bool(kind)
    difference = finding.difference
    assert difference is not None
    assert f"emitted {difference.emitted}, but the argmax at that depth is {difference.expected}" in finding.complaint
    assert f"position {difference.position}," in finding.complaint
    row = int(finding.complaint.removeprefix("row ")[0])
    said = lens_of(tiny_neox())(PROMPTS[row].tokens).last_layer[-1]
    if difference.position == len(PROMPTS[row].tokens) - 1:
        assert difference.gap_nats == pytest.approx(said[difference.expected] - said[difference.emitted])
        assert difference.expected == said.argmax()
    assert difference.gap_nats > 0


@pytest.mark.parametrize(("gap", "named"), [(0.05, True), (0.2, False)])
def test_a_gap_as_small_as_rounding_names_the_precision(gap: float, named: bool) -> None:
    """Bfloat16 rounds a logit of 10 by 0.04, and each of two by as much."""
    logits = np.full(VOCABULARY, -5.0)
    logits[[7, 9]] = 10.0, 10.0 - gap
    for cause in (
        likely_cause(lens_of(tiny_neox()), PROMPTS[1].tokens, np.array([9, 3, 4]), logits, 0),
        likely_precision(gap, logits),
    ):
        assert bool(cause) is named
        if cause:
            assert cause.kind == "bfloat16"
            assert str(cause).startswith(f"a gap of {gap} looks like bfloat16: compute in float32, or declare it by")


@pytest.mark.parametrize(("lead", "kind"), [(0.01, "bfloat16"), (0.2, "prompt without its first token")])
def test_rounding_comes_before_a_prompt_that_explains_no_more(lead: float, kind: str) -> None:
    """Without its first token the prompt makes 9 the argmax, which is behind by ``lead``."""

    def lens(history: Ints) -> Any:
        best, second = (7, 9) if history[0] == 1 else (9, 7)
        logits = np.full((len(history), VOCABULARY), -5.0)
        logits[:, best], logits[:, second] = 10.0, 10.0 - lead
        return SimpleNamespace(last_layer=logits)

    prompt, emitted = np.array([1, 2, 3]), np.array([9, 9, 9])
    cause = likely_cause(lens, prompt, emitted, lens(prompt).last_layer[-1], 0)  # type: ignore[arg-type]
    assert cause is not None
    assert cause.kind == kind


@pytest.mark.parametrize(
    ("emitted", "stop", "reason", "kind"),
    [
        ([5, 6, 7], {9}, "stop token", "stops of another request"),
        ([5, 6, 7], set(), "stop token", "stops of another request"),
        ([5, 6, 7], {6}, "length", "stop ids dropped"),
        ([5, 6, 7], {6}, "stop token", "stop ids dropped"),
        ([5, 6, 7], {9}, "length", None),  # a limit has many causes
        ([5, 6, 7], {7}, "length", None),  # ended in the right place, for the wrong reason
        ([], {9}, "stop token", None),
    ],
)
def test_an_end_in_a_wrong_place_says_whose_stops_it_looks_like(
    emitted: list[int], stop: set[int], reason: str, kind: str | None
) -> None:
    cause = likely_stops(np.array(emitted, dtype=np.int64), frozenset(stop), reason, 8)
    assert (cause and cause.kind) == kind


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda asked: round(asked, 1), "temperature rounded to tenths"),
        (lambda asked: 1.0, "temperature ignored, and 1 taken"),
        (lambda asked: asked / 3, None),
    ],
)
def test_draws_that_a_rounded_temperature_explains_say_so(change: Callable[[float], float], kind: str | None) -> None:
    rng = np.random.default_rng(3)
    drawn = {}
    for asked in (0.251, 0.165):  # both are rounded up
        logits = rng.normal(size=(4000, 12))
        noise = rng.gumbel(size=logits.shape)
        emitted = (logits / change(asked) + noise).argmax(axis=-1)
        drawn[asked] = [SampledRow(0, 0, emitted, logits)]
    with pytest.raises(AuditRefutedError) as complaint:
        require_temperatures(drawn, 0.0)
    cause = complaint.value.likely_cause
    assert (cause and cause.kind) == kind
    assert (str(cause) in str(complaint.value)) is bool(kind)
