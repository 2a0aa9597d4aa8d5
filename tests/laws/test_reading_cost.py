"""The cost of an estimator computed from sizes alone equals the charge of its reader with weights."""

from __future__ import annotations

import pytest

from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator
from emad_ref.probes.estimators import make_entropy_reader, probe_flops
from tests.small_models import VOCABULARY, small_model

ESTIMATORS = [
    EntropyEstimator("topk", k=8),
    EntropyEstimator("topk", k=8, rank=4, search="lowrank"),
    EntropyEstimator("lowrank", k=8, rank=4),
]


@pytest.mark.parametrize("family", ["gpt_neox", "opt_350m", "gemma2"])
def test_cost_from_sizes_is_the_readers_charge(family):
    stepper = CausalStepper(small_model(family, attention="eager" if family == "gemma2" else None))
    for estimator in ESTIMATORS:
        assert (
            probe_flops(stepper.geometry, estimator) == 2 * make_entropy_reader(stepper, estimator, (2, 4)).macs_per_row
        )
    width = stepper.unembedding.shape[1]
    linear = EntropyEstimator("linear", weights=((0.1,) * (width + 1),) * 2)
    assert probe_flops(stepper.geometry, linear) == 2 * make_entropy_reader(stepper, linear, (2, 4)).macs_per_row
    assert probe_flops(stepper.geometry, EntropyEstimator()) == stepper.geometry.head_flops()


def test_an_index_has_no_cost_without_its_lists():
    with pytest.raises(BadArgument, match="build the index to know its cost"):
        probe_flops(
            CausalStepper(small_model("gpt_neox")).geometry, EntropyEstimator("topk", k=VOCABULARY, search="faiss")
        )
