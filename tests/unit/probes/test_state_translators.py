"""State translators: construction, refusals, digests, storage and lookup."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.calibration.lens_files import state_translators_from_tensors, state_translators_to_tensors
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import (
    StateTranslators,
    Translator,
    attach_translators,
    get_point_translators,
    list_exit_layer_pairs,
)
from emad_ref.record import Work
from tests.random_translators import FINGERPRINT, drawn_translators
from tests.small_models import LAYERS, small_model

WIDTH = 32


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture
def drawn(stepper):
    return drawn_translators(stepper, (1, 3), 4)


def asked(digest, probes=(1, 3)):
    thresholds = (tuple(0.5 for _ in probes),)
    return OperatingPoint(
        "asked", "test", LAYERS, LAYERS, probes, thresholds, schedule="translated", translators=digest
    )


def test_the_pairs_of_an_exit_are_the_layers_between_it_and_the_last():
    assert list_exit_layer_pairs((1, 4), 6) == [(1, 2), (1, 3), (1, 4), (1, 5), (4, 5)]
    assert list_exit_layer_pairs((5,), 6) == []


@pytest.mark.parametrize(
    "pairs",
    [[], [(1, 2)], [(4, 5), (3, 4), (3, 5)], [(3, 4), (3, 5), (3, 6)], [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]],
    ids=str,
)
def test_pairs_that_leave_a_layer_out_or_go_beyond_are_refused(pairs):
    with pytest.raises(BadArgument, match=r"^translators\.pairs=.* of each exit e in 1–4 all pairs"):
        StateTranslators("f", "float32", 6, dict.fromkeys(pairs, Translator((), torch.zeros(3))))


def test_pairs_of_two_kinds_are_refused():
    two = {(3, 4): Translator((), torch.zeros(3)), (3, 5): Translator((torch.zeros(3, 3),), torch.zeros(3))}
    with pytest.raises(BadArgument, match="one width, rank and dtype in all pairs"):
        StateTranslators("f", "float32", 6, two)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "beef"}, r"^translators\.fingerprint='beef', but expected f00d of this model; fit"),
        ({"dtype": "float32"}, r"^translators\.dtype='float32', but expected float64 of this model"),
    ],
)
def test_translators_of_another_model_are_refused(stepper, drawn, change, said):
    with pytest.raises(BadArgument, match=said):
        attach_translators(stepper, replace(drawn, **change), FINGERPRINT)


def test_every_number_and_the_model_are_in_the_name(stepper, drawn):
    again = drawn_translators(stepper, (1, 3), 4)
    assert again.digest == drawn.digest
    others = [
        drawn_translators(stepper, (1, 3), 4, seed=1), drawn_translators(stepper, (1, 3), 5),
        drawn_translators(stepper, (1,), 4), replace(drawn, fingerprint="beef"), replace(drawn, dtype="float32"),
    ]  # fmt: skip
    assert len({drawn.digest, *(other.digest for other in others)}) == 6


def test_a_point_finds_its_own_and_no_others(stepper, drawn):
    digest = attach_translators(stepper, drawn, FINGERPRINT)
    found = get_point_translators(stepper, asked(digest))
    assert (found.exit_layers, found.rank, found.width) == ((1, 3), 4, WIDTH)
    assert get_point_translators(stepper, replace(asked(digest), schedule="copying", translators=None)) is None
    with pytest.raises(BadArgument, match=r"^point\.translators='0123456789ab', .*attached to this model"):
        get_point_translators(stepper, asked("0123456789abcdef"))


def test_exits_must_be_known_but_for_one_that_needs_nothing(stepper, drawn):
    digest = attach_translators(stepper, drawn, FINGERPRINT)
    with pytest.raises(
        BadArgument, match=r"^point\.probes=\[2\], but expected exits that its translators know \(1, 3\)"
    ):
        get_point_translators(stepper, asked(digest, (1, 2)))
    assert get_point_translators(stepper, asked(digest, (1, LAYERS - 1))) is not None
    assert get_point_translators(stepper, replace(asked(digest, (1, 3, 4)), ceiling=5)) is not None


def test_states_are_translated_by_their_own_exit_and_charged(drawn):
    states, work = torch.randn(4, 2, WIDTH, dtype=torch.float64), Work.none(LAYERS)
    exits = np.array([3, 1, 2, 3])
    found = drawn.estimate_layer_input_states(states, exits, 5, work)
    for row, exit_ in enumerate(exits.tolist()):
        expected = drawn.pairs[exit_, 4](states[row]) if exit_ != 2 else states[row]
        torch.testing.assert_close(found[row], expected)
    assert torch.equal(found[2], states[2]), "an exit that is not known is copied"
    assert work.fill_macs.tolist() == [0, 0, 0, 0, 3 * 2 * 2 * WIDTH * 4, 0]
    work = Work.none(LAYERS)
    assert drawn.estimate_layer_input_states(states[:1], exits[:1], 4, work) is not None
    assert torch.equal(drawn.estimate_layer_input_states(states[:1], exits[:1], 4, work), states[:1]), (
        "directly above an exit no state is missing"
    )
    assert not work.fill_macs.any()


def test_multiply_adds_by_exit(drawn, stepper):
    assert drawn.macs_per_row_by_exit(5).tolist() == [256, 0, 256, 0, 0, 0]
    assert drawn.macs_per_row_by_exit(3).tolist() == [256, 0, 0, 0, 0, 0]
    assert drawn.macs_per_row_by_exit(2).tolist() == [0] * LAYERS
    assert drawn_translators(stepper, (1,), 0).macs_per_row_by_exit(5).tolist() == [0] * LAYERS
    assert drawn_translators(stepper, (1,), None).macs_per_row_by_exit(5).tolist() == [WIDTH**2, 0, 0, 0, 0, 0]


# ---------------------------------------------------------------- as tensors


@pytest.mark.parametrize(("rank", "parts"), [(0, ["bias"]), (2, ["bias", "down", "up"]), (None, ["bias", "full"])])
def test_tensors_and_back(stepper, rank, parts):
    translators = drawn_translators(stepper, (3, 4), rank)
    tensors = state_translators_to_tensors(translators)
    assert sorted(tensors) == [f"{pair}.{part}" for pair in ("3>4", "3>5", "4>5") for part in parts]
    back = state_translators_from_tensors(FINGERPRINT, "float64", LAYERS, tensors)
    assert back.digest == translators.digest
