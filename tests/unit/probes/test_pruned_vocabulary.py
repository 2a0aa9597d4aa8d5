"""Pruned vocabularies keep the best tokens, return the full head's logits for them, and charge what they run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import full_depth
from emad_ref.probes import pruned_vocabulary
from emad_ref.probes.probe import BaseProbe
from emad_ref.probes.pruned_vocabulary import (
    CachedFullLogitHeads,
    CandidateTokens,
    UncachedHeads,
    vocabulary_size_at_confidence,
)
from emad_ref.record import READOUTS, Work
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5

FULL, SUBSET = READOUTS.index("full"), READOUTS.index("subset")
SIZES = {"mixed": (3, VOCABULARY, 40), "some alike": (40, 3, 40), "alike": (7, 7, 7), "two": (2, 2, 2)}
FAMILIES = ["gpt_neox", "phi", "gemma2", "opt_350m", "t5", "t5_v1_1"]


@pytest.fixture(scope="module", params=FAMILIES)
def stepper(request: pytest.FixtureRequest) -> Stepper:
    """Return steppers with a head bias (Phi), a softcap (Gemma 2), a narrow head (OPT-350m), a scaled one (T5)."""
    if request.param.startswith("t5"):
        return Seq2SeqStepper(small_t5(request.param))
    model = small_model(request.param)
    if request.param == "gemma2":
        model.config.final_logit_softcapping = 2.0
    return CausalStepper(model)


@pytest.fixture
def hidden(stepper: Stepper) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, stepper.geometry.hidden, generator=generator, dtype=torch.float64)


def some_race(sizes: tuple[int, ...]) -> CandidateTokens:
    """Draw tokens for each row; nothing has been read for them yet."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.full((len(sizes), max(sizes)), VOCABULARY)
    for row, size in enumerate(sizes):
        ids[row, :size] = torch.randperm(VOCABULARY, generator=generator)[:size]
    return CandidateTokens(VOCABULARY, ids, sizes, {})


@pytest.mark.parametrize("heads", [UncachedHeads, CachedFullLogitHeads])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@torch.inference_mode()
def test_each_rows_tokens_have_the_full_heads_logits(
    stepper: Stepper, hidden: torch.Tensor, sizes: tuple[int, ...], heads: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of rows of W gathered at a time. 1e-6: Gemma's and T5's norms take their mean in float32."""
    whole, race = stepper.logits(hidden), some_race(sizes)
    for most in (pruned_vocabulary.GATHERED_ENTRIES, 1):
        monkeypatch.setattr(pruned_vocabulary, "GATHERED_ENTRIES", most)
        read = race.add_logits_of_layer(heads(stepper), hidden, 2, Work.none(LAYERS))
        for row, size in enumerate(sizes):
            logits = read.logits[2][row]
            assert torch.allclose(logits[:size], whole[row, race.ids[row, :size]], atol=1e-6, rtol=0)
            assert (logits[size:] == -torch.inf).all()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_pytorch_counts_what_is_charged(stepper: Stepper, hidden: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Rows of different sizes: no row pays for another's."""
    work, race = Work.none(LAYERS), some_race(sizes)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        race.add_logits_of_layer(UncachedHeads(stepper), hidden, 2, work)
    assert flops(work, stepper.geometry).total == counter.get_total_flops() > 0
    assert work.readout_rows[SUBSET].tolist() == [0, 3, 0, 0, 0, 0]
    assert work.readout_rows[FULL].sum() == 0
    width, states = stepper.geometry.embedding_width, stepper.geometry.hidden
    each = [size * width + (states * width if states != width else 0) for size in sizes]
    assert race.macs_per_row(stepper.geometry).tolist() == each
    assert work.readout_macs[SUBSET, 1] == sum(each)


def test_what_is_picked_from_a_shared_head_is_charged_as_if_gathered(stepper: Stepper, hidden: torch.Tensor) -> None:
    race, one, other = some_race(SIZES["mixed"]), Work.none(LAYERS), Work.none(LAYERS)
    with torch.inference_mode():
        race.add_logits_of_layer(UncachedHeads(stepper), hidden, 2, one)
        race.add_logits_of_layer(CachedFullLogitHeads(stepper), hidden, 2, other)
    assert one == other


def test_a_full_head_is_charged_as_one(stepper: Stepper, hidden: torch.Tensor) -> None:
    work, probe = Work.none(LAYERS), BaseProbe(stepper, full_depth(LAYERS))
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        logits = probe.emit_logits(hidden[:, None], 4, work)
    assert logits.shape == (3, 1, VOCABULARY)
    assert flops(work, stepper.geometry).total == counter.get_total_flops() > 0
    assert work.readout_rows[FULL].tolist() == [0, 0, 0, 3, 0, 0]


def held(race: CandidateTokens, row: int) -> dict[int, list[float]]:
    """Return id → logits by layer, of one row."""
    size, layers = race.sizes[row], sorted(race.logits)
    return {
        token: [float(race.logits[layer][row, place]) for layer in layers]
        for place, token in enumerate(race.ids[row, :size].tolist())
    }


Z = torch.tensor([[0.0, -1.0, 5.0, 3.0, 4.0, -2.0], [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]])


def test_the_best_are_best_by_logit_not_by_id() -> None:
    """An earlier implementation sorted ids before it cut, and so kept the lowest ids."""
    race = CandidateTokens.start_with_all_tokens(2, Z)
    assert [set(held(race.narrow_to((3, 3)), row)) for row in (0, 1)] == [{2, 3, 4}, {0, 1, 2}]
    assert [set(held(race.narrow_to((2, 4)), row)) for row in (0, 1)] == [{2, 4}, {0, 1, 2, 3}]


def test_narrowing_is_nested_and_goes_by_the_deepest_layer() -> None:
    second = CandidateTokens.start_with_all_tokens(2, Z).narrow_to((4, 3))
    assert held(second, 0) == {2: [5.0], 4: [4.0], 3: [3.0], 0: [0.0]}
    read = torch.tensor([[7.0, -3.0, 8.0, 9.0], [1.0, 3.0, 2.0, -torch.inf]])
    third = replace(second, logits={**second.logits, 3: read}).narrow_to((2, 2))
    assert held(third, 0) == {0: [0.0, 9.0], 3: [3.0, 8.0]}
    assert held(third, 1) == {1: [8.0, 3.0], 2: [7.0, 2.0]}
    assert third.narrow_to((5, 5)) is third, "pruned tokens are not read again"


def test_a_row_that_has_fewer_keeps_them_while_another_is_narrowed() -> None:
    race = CandidateTokens.start_with_all_tokens(2, Z).narrow_to((2, 6)).narrow_to((4, 3))
    assert race.sizes == (2, 3)
    assert [set(held(race, row)) for row in (0, 1)] == [{2, 4}, {0, 1, 2}]
    assert race.ids[0, 2] == 6, "a row has no further tokens"
    assert race.logits[2][0, 2] == -torch.inf


def test_narrowing_to_everything_changes_nothing() -> None:
    race = CandidateTokens.start_with_all_tokens(2, Z)
    assert race.narrow_to((6, 6)) is race.narrow_to((10, 6)) is race


def test_rows_that_go_on_take_no_more_room_than_they_need() -> None:
    race = CandidateTokens.start_with_all_tokens(2, Z).narrow_to((2, 6)).keep_rows(torch.tensor([0]))
    assert race.ids.shape == race.logits[2].shape == (1, 2)
    assert held(race, 0) == {2: [5.0], 4: [4.0]}


def test_emitted_ids_are_those_of_the_full_vocabulary() -> None:
    race = CandidateTokens.start_with_all_tokens(2, Z).narrow_to((2, 3))
    whole = race.scatter_to_vocabulary(torch.tensor([[1.5, -0.5, -torch.inf], [3.0, 2.0, 1.0]]))
    no = -np.inf
    assert whole.tolist() == [[no, no, 1.5, no, -0.5, no], [3.0, 2.0, 1.0, no, no, no]]
    assert whole.argmax(dim=1).tolist() == [2, 0]


@pytest.mark.parametrize(("confidence", "k"), [(0.0, 32128), (0.5, 17670), (0.9, 6104), (1.0, 3212)])
def test_the_adaptive_size_falls_with_confidence(confidence: float, k: int) -> None:
    """3212 is the minimum on T5's vocabulary, above every fixed k* from layer 2 of 24 on."""
    assert vocabulary_size_at_confidence(32128, 0.9, confidence) == k
    assert vocabulary_size_at_confidence(32128, 0.0, confidence) == 32128
