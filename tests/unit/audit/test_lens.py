"""The lens' answer is checked before it is trusted; entropies are SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from emad_ref.audit.lens import consult, entropy_nats, signals
from emad_ref.errors import BadArgument
from emad_ref.point import BinSpec, OperatingPoint

TOKENS = np.arange(3)
POINT = OperatingPoint("p", "emad", 4, 4, (1, 3), ((0.5, 0.5),))


def test_entropy_is_that_of_the_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 20, (5, 7))
    np.testing.assert_allclose(
        entropy_nats(logits), stats.entropy(special.softmax(logits, axis=-1), axis=-1), atol=1e-12
    )


def test_entropy_of_even_logits_is_log_v_even_when_they_are_huge() -> None:
    assert entropy_nats(np.full(9, 1e5)) == pytest.approx(np.log(9))


def test_signals_are_taken_after_the_probes_layers() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 4, 6))
    np.testing.assert_array_equal(signals(logits, POINT), entropy_nats(logits[:, [0, 2]]))


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (np.zeros((3, 5, 6)), "shape"),
        (np.zeros((2, 4, 6)), "shape"),
        (np.zeros((3, 4, 6), dtype=np.float32), "float64"),
        (np.full((3, 4, 6), np.nan), "finite"),
    ],
)
def test_an_unusable_answer_is_refused(answer: np.ndarray, what: str) -> None:
    with pytest.raises(BadArgument, match=what):
        consult(lambda tokens: answer, TOKENS, 4)


def test_a_point_without_an_oracle_is_refused() -> None:
    binned = OperatingPoint("p", "emad", 4, 4, (1,), ((0.5,),) * 3, bins=BinSpec(("position",)))
    with pytest.raises(BadArgument, match="position"):
        signals(np.zeros((3, 4, 6)), binned)
