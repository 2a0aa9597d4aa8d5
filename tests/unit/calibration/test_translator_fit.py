"""The fit of state translators: its input and its refusals. ``tests/laws/test_state_translators.py`` tests results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emad_ref.calibration.linear_maps import fit_translators
from emad_ref.calibration.trace import EmptyCorpus, iterate_states_after
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from tests.small_models import LAYERS, VOCABULARY, small_model

WIDTH = 32


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(4)
    return [TokenSequence(rng.integers(0, VOCABULARY, n), start) for n, start in ((40, 0), (30, 3), (64, 5))]


def test_rank_nothing_is_the_mean_change(stepper, texts):
    fitted = fit_translators(stepper, "f00d", texts, (2, 4), 0)
    with torch.inference_mode():
        states = [
            torch.cat([list(iterate_states_after(stepper, [text]))[layer] for text in texts]) for layer in range(LAYERS)
        ]
    assert list(fitted.pairs) == [(2, 3), (2, 4), (2, 5), (4, 5)]
    for (exit_, layer), translator in fitted.pairs.items():
        assert translator.macs_per_row == 0
        torch.testing.assert_close(translator.bias, (states[layer - 1] - states[exit_ - 1]).mean(0))


def test_all_directions_are_the_full_matrix_and_fewer_lose_least(stepper, texts):
    full, all_, few = (fit_translators(stepper, "f00d", texts, (2,), rank) for rank in (None, WIDTH, 3))
    with torch.inference_mode():
        states = [
            torch.cat([list(iterate_states_after(stepper, [text]))[layer] for text in texts]) for layer in range(LAYERS)
        ]
    left, above = states[1], states[4]
    torch.testing.assert_close(full.pairs[2, 5](left), all_.pairs[2, 5](left))

    def error(translator):
        return float(((translator(left) - above) ** 2).sum())

    assert error(full.pairs[2, 5]) < error(few.pairs[2, 5])
    generator = torch.Generator().manual_seed(0)
    best, (up, down) = few.pairs[2, 5], few.pairs[2, 5].factors
    for _ in range(20):  # no other map of that rank nearby predicts better
        other = type(best)(
            (
                up + 1e-3 * torch.randn(up.shape, generator=generator, dtype=up.dtype),
                down + 1e-3 * torch.randn(down.shape, generator=generator, dtype=down.dtype),
            ),
            best.bias,
        )
        assert error(other) > error(best)


def test_only_so_many_tokens_are_read(stepper, texts):
    short = fit_translators(stepper, "f00d", texts, (2,), 2, tokens=39)
    assert short.digest == fit_translators(stepper, "f00d", texts[:1], (2,), 2).digest
    assert short.digest != fit_translators(stepper, "f00d", texts, (2,), 2).digest


def test_windows_may_be_a_stream(stepper, texts):
    assert fit_translators(stepper, "f00d", iter(texts), (2,), 2).digest == (
        fit_translators(stepper, "f00d", texts, (2,), 2).digest
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"exits": ()}, "exits"),
        ({"exits": (2, LAYERS - 1)}, "exits"),
        ({"exits": (4, 2)}, "probes"),
        ({"rank": -1}, "rank"),
        ({"rank": WIDTH + 1}, "rank"),
        ({"tokens": 0}, "tokens"),
        ({"penalty": -1.0}, "penalty"),
    ],
    ids=str,
)
def test_what_cannot_be_fitted_is_refused(stepper, texts, change, named):
    options = {"exits": (2,), "rank": 2} | change
    with pytest.raises(BadArgument, match=f"^{named}="):
        fit_translators(stepper, "f00d", texts, options.pop("exits"), options.pop("rank"), **options)


def test_no_text_is_said(stepper):
    with pytest.raises(EmptyCorpus, match="did not see"):
        fit_translators(stepper, "f00d", [], (2,))
