"""Sampling: honest draws pass at the stated error level, and each way to miss the distribution is told by its name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emad_ref.audit import sampling as audited
from emad_ref.audit.finding import Finding
from emad_ref.audit.sampling import Drawn, sampling
from emad_ref.protocol import Capabilities
from tests.decoders.cached import CachedDecoder
from tests.decoders.subject import drawn, lens_of, spread_point, tiny_neox

NEW, HOT, TOLERANCE = 12, 12.0, 1e-9  # the tiny model's logits are wide: only so hot does it leave something to draw


class AnotherTemperature(CachedDecoder):
    """Every temperature is 1."""

    def draw(self, scaled: torch.Tensor, generator: torch.Generator) -> int:
        return super().draw(scaled * self.temperature, generator)


def checked(
    decoder: type[CachedDecoder], seeds: tuple[int, ...] = (1, 2, 3, 1), noise: float = 0.0, temperature: float = HOT
) -> Finding:
    model, point = tiny_neox(), spread_point()
    (prompt, other), _ = drawn((4, 6), 1)
    prompts = [prompt, prompt, other]
    records = [
        Drawn(seed, decoder(model, point, temperature, seed).generate(prompts, NEW, frozenset())) for seed in seeds
    ]
    said, rng = Capabilities(logit_noise=noise), np.random.default_rng(0)
    return sampling(records, lens_of(model), point, prompts, NEW, temperature, said, rng, TOLERANCE, needed=50)


def test_honest_draws_pass() -> None:
    finding = checked(CachedDecoder)
    assert finding.passed is True, finding.detail


def test_noise_that_is_declared_widens_the_test_of_the_distribution() -> None:
    """What bends the density by e^(±16) hides another temperature, and is not refuted."""
    assert checked(AnotherTemperature).passed is False
    assert checked(AnotherTemperature, noise=100.0).passed is not False


def test_tokens_that_leave_nothing_to_draw_are_inconclusive() -> None:
    finding = checked(CachedDecoder, temperature=0.05)
    assert finding.passed is None, finding.detail


def test_the_error_level_is_the_one_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a level of 5 % about one in twenty honest runs is refuted: the places really are uniform."""
    monkeypatch.setattr(audited, "LEVEL", 0.05)
    refuted = sum(checked(CachedDecoder, (seed, seed + 100)).passed is False for seed in range(40))
    assert refuted <= 7  # P(more of 40 at 5 %) = 0.1 %


def test_places_are_those_of_the_probabilities_in_order() -> None:
    row = audited._Row(0, 0, np.array([1, 0]), np.log(np.array([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]])))
    places = audited._places(row, 1.0, np.random.default_rng(0))
    assert 0.7 <= places[0] <= 0.9
    assert 0.0 <= places[1] <= 0.7
