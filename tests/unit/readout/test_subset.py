"""Pruned vocabularies keep the best tokens, give the full head's logits for them, and charge what they ran."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from emad_ref.meters.flops import flops
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.readout.subset import Candidates, adaptive_size, best, full_head, spread, subset_head
from emad_ref.record import READOUTS, Work
from tests.small import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5

FULL, SUBSET = READOUTS.index("full"), READOUTS.index("subset")
SIZES = (3, 40, VOCABULARY)
FAMILIES = ["gpt_neox", "phi", "gemma2", "opt_350m", "t5", "t5_v1_1"]


@pytest.fixture(scope="module", params=FAMILIES)
def stepper(request: pytest.FixtureRequest) -> Stepper:
    """A bias in the head (Phi), a softcap (Gemma 2), a narrow head (OPT-350m), a scaled one (T5)."""
    if request.param.startswith("t5"):
        return Seq2SeqStepper(small_t5(request.param))
    model = small_model(request.param)
    if request.param == "gemma2":
        model.config.final_logit_softcapping = 2.0
    return Stepper(model)


@pytest.fixture
def hidden(stepper: Stepper) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, stepper.geometry.hidden, generator=generator, dtype=torch.float64)


def some_tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(VOCABULARY, generator=generator)[:size].sort().values for size in SIZES]


@torch.inference_mode()
def test_each_rows_tokens_have_the_full_heads_logits(stepper: Stepper, hidden: torch.Tensor) -> None:
    """1e-6: Gemma's and T5's norms take their mean in float32, over batches of another shape."""
    whole = stepper.logits(hidden)
    read = subset_head(stepper, hidden, some_tokens(), 2, Work.none(LAYERS))
    for row, (logits, ids) in enumerate(zip(read, some_tokens(), strict=True)):
        assert torch.allclose(logits, whole[row, ids], atol=1e-6, rtol=0)


def test_pytorch_counts_what_is_charged(stepper: Stepper, hidden: torch.Tensor) -> None:
    """Rows of different sizes: no row pays for another's."""
    work = Work.none(LAYERS)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        subset_head(stepper, hidden, some_tokens(), 2, work)
    assert flops(work, stepper.geometry).total == counter.get_total_flops() > 0
    assert work.readout_rows[SUBSET].tolist() == [0, 3, 0, 0, 0, 0]
    assert work.readout_rows[FULL].sum() == 0
    width, states = stepper.geometry.embedding_width, stepper.geometry.hidden
    assert work.readout_macs[SUBSET, 1] == sum(SIZES) * width + (3 * states * width if states != width else 0)


def test_a_full_head_is_charged_as_one(stepper: Stepper, hidden: torch.Tensor) -> None:
    work = Work.none(LAYERS)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        logits = full_head(stepper, hidden[:, None], 4, work)
    assert logits.shape == (3, 1, VOCABULARY)
    assert flops(work, stepper.geometry).total == counter.get_total_flops() > 0
    assert work.readout_rows[FULL].tolist() == [0, 0, 0, 3, 0, 0]


def test_the_best_are_best_by_logit_not_by_id() -> None:
    """An earlier implementation sorted ids after the choice and cut then: it kept the lowest ids."""
    logits = torch.tensor([0.0, -1.0, 5.0, 3.0, 4.0, -2.0])
    assert best(logits, 3).tolist() == [2, 3, 4]
    assert best(logits, 2).tolist() == [2, 4]
    assert best(logits, 6).tolist() == best(logits, 99).tolist() == list(range(6))


def test_narrowing_is_nested_and_goes_by_the_deepest_layer() -> None:
    first = Candidates(torch.arange(6), {2: torch.tensor([0.0, 1.0, 5.0, 3.0, 4.0, 2.0])})
    second = first.narrowed(4)
    assert second.ids.tolist() == [2, 3, 4, 5]
    assert second.logits[2].tolist() == [5.0, 3.0, 4.0, 2.0]
    third = second.read(3, torch.tensor([-1.0, 7.0, 8.0, 9.0])).narrowed(2)
    assert third.ids.tolist() == [4, 5]
    assert {layer: z.tolist() for layer, z in third.logits.items()} == {2: [4.0, 2.0], 3: [8.0, 9.0]}
    assert third.narrowed(5) is third, "what was pruned is not read again"


def test_narrowing_to_everything_changes_nothing() -> None:
    row = Candidates(torch.arange(6), {2: torch.randn(6, generator=torch.Generator().manual_seed(0))})
    assert row.narrowed(6) is row.narrowed(10) is row
    assert replace(row).narrowed(5).ids.tolist() != row.ids.tolist()


def test_emitted_ids_are_those_of_the_full_vocabulary() -> None:
    whole = spread(torch.tensor([1.5, -0.5]), torch.tensor([7, 2]), 9)
    assert whole.tolist() == [-np.inf, -np.inf, -0.5, -np.inf, -np.inf, -np.inf, -np.inf, 1.5, -np.inf]
    assert int(whole.argmax()) == 7
    assert float(torch.softmax(whole, 0)[[7, 2]].sum()) == pytest.approx(1)


@pytest.mark.parametrize(("confidence", "k"), [(0.0, 32128), (0.5, 17670), (0.9, 6104), (1.0, 3212)])
def test_the_adaptive_size_falls_with_confidence(confidence: float, k: int) -> None:
    """3212 is the least there can be on T5's vocabulary, above every fixed k* from layer 2 of 24 on."""
    assert adaptive_size(32128, 0.9, confidence) == k
    assert adaptive_size(32128, 0.0, confidence) == 32128
