"""Statistics that calibration reads from a batch equal those of its lens trace, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from emad_ref.calibration.entropy_statistics import (
    EntropyStatistics,
    compute_batch_entropies,
    compute_trace_statistics,
    fast_entropy_nats,
    measure_batch_statistics,
)
from emad_ref.calibration.trace import trace_batch
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import assign_frequency_buckets
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.stepper import Stepper
from emad_ref.point import ThresholdBinSpec
from emad_ref.probes.signal_values import entropy_nats
from emad_ref.signals import NotFinite

LENGTHS = (40, 7, 2, 23)
PROBE = 2


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


@pytest.fixture
def batch(nano: LoadedModel) -> Sequence[TokenSequence]:
    """Return windows of several lengths, some with a prompt."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, nano.stepper.vocabulary_size, length) for length in LENGTHS]
    return [TokenSequence(row, first_decided=len(row) // 3, document=at // 2) for at, row in enumerate(rows)]


@pytest.mark.parametrize("features", [(), ("position",), ("top1_probability",), ("position", "frequency")], ids=str)
@pytest.mark.parametrize("layers", [(PROBE,), (PROBE, 4), None], ids=str)
def test_statistics_of_a_batch_are_those_of_its_trace(
    nano: LoadedModel, batch: Sequence[TokenSequence], features: tuple[str, ...], layers: tuple[int, ...] | None
) -> None:
    layers = layers or tuple(range(1, nano.stepper.layers + 1))
    columns = [layer - 1 for layer in layers]
    counts = np.arange(nano.stepper.vocabulary_size)[::-1].astype(np.int64)
    table = assign_frequency_buckets(counts) if "frequency" in features else b""
    spec = ThresholdBinSpec(features, position_edges=(5, 20), frequency=table)
    found = measure_batch_statistics(nano.stepper, batch, spec, PROBE, layers)
    trace = trace_batch(nano.stepper, batch)
    document = np.array([sequence.document for sequence in batch])[trace.sequence_index]
    traced = compute_trace_statistics(trace, spec, PROBE, document)
    there = (each[:, columns] for each in (traced.sums, traced.squares, traced.histogram))
    assert replace(found, documents=None) == EntropyStatistics(traced.tokens, *there, traced.sequences)
    assert found.documents.count == traced.documents.count == len({sequence.document for sequence in batch})
    products = traced.documents.products[np.ix_([0, *layers], [0, *layers])]
    assert found.documents.products == pytest.approx(products, rel=1e-12)
    assert found.tokens.sum() == sum(length - 1 - length // 3 for length in LENGTHS)
    assert found.sequences == len(LENGTHS)
    assert found != EntropyStatistics.empty(spec.bin_count, len(layers))


def test_no_layer_runs_above_the_last_read_and_no_head_elsewhere(
    nano: LoadedModel, batch: Sequence[TokenSequence]
) -> None:
    class Counting:
        """The model, with a log of its calls."""

        ran: ClassVar[list[tuple[int, int]]] = []
        heads = 0

        def __getattr__(self, name: str) -> object:
            return getattr(nano.stepper, name)

        def run_layers(self, hidden: torch.Tensor, first: int, last: int, *rest: Any) -> torch.Tensor:
            self.ran.append((first, last))
            return nano.stepper.run_layers(hidden, first, last, *rest)

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            self.heads += 1
            return nano.stepper.logits(states)

    counting = Counting()
    measure_batch_statistics(cast(Stepper, counting), batch, ThresholdBinSpec(), None, (1, 3))
    assert counting.ran == [(0, 1), (1, 3)]
    assert counting.heads == 2
    assert nano.stepper.layers > 3


def test_what_no_bin_asks_for_is_not_read_and_no_bin_accepts_it(
    nano: LoadedModel, batch: Sequence[TokenSequence]
) -> None:
    read = compute_batch_entropies(nano.stepper, batch, None, (PROBE,))
    assert (read.top1 == -1).all()
    assert np.isnan(read.top1_probability).all()


def test_bins_that_need_a_probe_are_refused_without_one(nano: LoadedModel, batch: Sequence[TokenSequence]) -> None:
    with pytest.raises(BadArgument, match=r"^first_probe=None, but expected the layer that shows top1_probability"):
        measure_batch_statistics(nano.stepper, batch, ThresholdBinSpec(("top1_probability",)), None, (PROBE,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_fast_entropy_is_the_entropy(dtype: torch.dtype) -> None:
    logits = (torch.randn(9, 500, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    assert torch.equal(fast_entropy_nats(logits), entropy_nats(logits.float()))
    logits[1, ::2] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, 1:] = torch.finfo(dtype).min
    assert torch.equal(fast_entropy_nats(logits), entropy_nats(logits.float()))
    assert fast_entropy_nats(logits)[2] == 0
    logits[4, 7] = torch.nan
    assert math.isnan(float(fast_entropy_nats(logits)[4]))
    assert torch.isfinite(fast_entropy_nats(logits)).sum() == len(logits) - 1


def test_logits_that_are_no_numbers_name_their_layer(nano: LoadedModel, batch: Sequence[TokenSequence]) -> None:
    class Broken:
        """The model with a head that gives NaN after the second layer."""

        def __init__(self) -> None:
            self.heads = 0

        def __getattr__(self, name: str) -> object:
            return getattr(nano.stepper, name)

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            self.heads += 1
            logits = nano.stepper.logits(states)
            return logits * math.nan if self.heads == 2 else logits

    with pytest.raises(NotFinite, match="after layer 2"):
        compute_batch_entropies(cast(Stepper, Broken()), batch, None, (1, 2, 3))
