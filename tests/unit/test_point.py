"""An operating point refuses fields that cannot decide depth, with a message."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.decoding.self_speculation import Drafting
from emad_ref.decoding.switching import SwitchingRule
from emad_ref.errors import BadArgument, EmadError
from emad_ref.exit_rules import early_exit_point
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec, full_depth, truncated

POINT = OperatingPoint("p", "emad", 12, 12, (4, 8), ((0.5, 0.2),))


@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        ({"ceiling": 0}, "ceiling", "a layer in 1–12"),
        ({"ceiling": 13}, "ceiling", "a layer in 1–12"),
        ({"probes": (0, 8)}, "probes", "layers in 1–11"),
        ({"probes": (4, 12)}, "probes", "a probe at the ceiling decides nothing"),
        ({"ceiling": 8}, "probes", "layers in 1–7"),
        ({"probes": (8, 4)}, "probes", "ascending layers, each once"),
        ({"probes": (4, 4)}, "probes", "ascending layers, each once"),
        ({"thresholds": ()}, "thresholds", "one row per bin"),
        ({"thresholds": ((0.5, 0.2), (0.4, 0.1))}, "thresholds", "one row per bin, 1 for bins none"),
        ({"thresholds": ((0.5,),)}, "thresholds", "2 values per bin, one per probe"),
        ({"thresholds": ((0.5, math.nan),)}, "thresholds", "-inf says never exit at this probe"),
        ({"schedule": "rising"}, "schedule", "one of monotone, free_eager"),
        ({"schedule": "chunked"}, "period", "tokens ≥ 1 for positional and chunked"),
        ({"period": 4}, "period", "None for other schedules"),
        ({"floor": 4}, "floor", "None for others"),
        ({"schedule": "translated"}, "translators", "the digest of state translators for translated"),
        ({"schedule": "translated", "translators": ""}, "translators", "the digest of state translators"),
        ({"translators": ""}, "translators", "None for other schedules"),
        ({"schedule": "copying", "translators": "ab"}, "translators", "None for other schedules"),
        ({"schedule": "positional", "period": 8, "floor": 4}, "probes", "it has no rule"),
        ({"bins": ThresholdBinSpec(("position",))}, "thresholds", "3 for bins position"),
        ({"signal": "mood"}, "signal", "one of entropy_nats"),
        ({"lens": ""}, "lens", "the digest of a tuned lens"),
        ({"lens": "ab", "estimator": EntropyEstimator("topk", k=8)}, "lens", "full heads, linear probes"),
    ],
)
def test_a_point_that_cannot_decide_is_refused_by_name_value_and_expectation(change, named, message):
    with pytest.raises(BadArgument, match=f"^{named}=") as refused:
        replace(POINT, **change)
    assert message in str(refused.value)
    assert refused.value.name == named


def test_bad_arguments_are_value_errors_of_this_package():
    with pytest.raises(ValueError, match="depth=13, but expected a layer; try 12") as refused:
        raise BadArgument("depth", 13, "a layer", "try 12")
    assert isinstance(refused.value, EmadError)
    assert str(BadArgument("depth", "x", "a layer")) == "depth='x', but expected a layer"
    assert str(BadArgument("map", np.eye(2), "a vector")) == "map=array([[1., 0.], [0., 1.]]), but expected a vector"


def test_adaptive_means_that_some_token_could_leave_early():
    assert POINT.has_adaptive_depth
    assert replace(POINT, thresholds=((-math.inf, 0.0),)).has_adaptive_depth
    assert not replace(POINT, thresholds=((-math.inf, -math.inf),)).has_adaptive_depth
    assert not full_depth(12).has_adaptive_depth
    assert not truncated(12, 3).has_adaptive_depth


def test_thresholds_are_compared_as_float32_and_nobody_writes_to_them():
    point = OperatingPoint("p", "quantile", 4, 4, (1, 3), ((0.1, 2.0),))
    assert point.threshold_table.tolist() == [[float(np.float32(0.1)), 2.0]]
    with pytest.raises(ValueError, match="read-only"):
        point.threshold_table[0, 0] = 1.0
    assert replace(point, thresholds=((0.5, 2.0),)).threshold_table[0, 0] == 0.5
    assert point == OperatingPoint("p", "quantile", 4, 4, (1, 3), ((0.1, 2.0),))
    assert full_depth(3).threshold_table.shape == (1, 0)


def test_full_depth_and_truncation_differ_in_their_ceiling_alone():
    assert (full_depth(12).ceiling, truncated(12, 3).ceiling, truncated(12, 3).layers) == (12, 3, 12)
    with pytest.raises(BadArgument, match="ceiling=13"):
        truncated(12, 13)


@pytest.mark.parametrize(
    ("make", "named", "message"),
    [
        (lambda: EntropyEstimator("guess"), "estimator.kind", "one of full, topk"),
        (lambda: EntropyEstimator("topk"), "estimator.k", "a count ≥ 1"),
        (lambda: EntropyEstimator("full", k=3), "estimator.k", "0 for the others"),
        (lambda: EntropyEstimator("lowrank", k=3), "estimator.rank", "a rank ≥ 1"),
        (lambda: EntropyEstimator("topk", k=3, rank=2), "estimator.rank", "0 for the others"),
        (lambda: EntropyEstimator("topk", k=3, search="near"), "estimator.search", "one of exact, faiss"),
        (lambda: ThresholdBinSpec(("mood",)), "bins.features", "at most two of position"),
        (lambda: ThresholdBinSpec(("position", "position")), "bins.features", "each once"),
        (lambda: ThresholdBinSpec(("frequency",)), "bins.frequency", "one byte per token id"),
        (lambda: ThresholdBinSpec((), frequency=b"01"), "bins.frequency", "where frequency is a feature"),
    ],
)
def test_an_estimator_or_binning_that_means_nothing_is_refused(make, named, message):
    with pytest.raises(BadArgument, match=f"^{named}=") as refused:
        make()
    assert message in str(refused.value)


def test_only_a_full_probe_knows_probability_and_frequency():
    rows = ((0.5, 0.2),) * 3
    replace(POINT, bins=ThresholdBinSpec(("top1_probability",)), thresholds=rows)
    replace(POINT, bins=ThresholdBinSpec(("position",)), thresholds=rows, estimator=EntropyEstimator("topk", k=8))
    with pytest.raises(BadArgument, match="a topk-8 probe knows no other"):
        replace(
            POINT,
            bins=ThresholdBinSpec(("top1_probability",)),
            thresholds=rows,
            estimator=EntropyEstimator("topk", k=8),
        )


def test_a_lens_serves_no_rule_that_contrasts_readouts():
    assert replace(early_exit_point("saturation", 12, 101, 4), lens="ab").lens == "ab"
    for signal, pruning in (("jsd_contrast", "none"), ("weighted_contrast", "none"), ("softmax_response", "fixed")):
        rule = early_exit_point(signal, 12, 1010, 4, pruning=pruning)
        with pytest.raises(
            BadArgument, match=rf"lens='ab', but expected None for {signal} with parameters; a lens serves"
        ):
            replace(rule, lens="ab")


def test_bins_multiply_and_are_named():
    both = ThresholdBinSpec(("frequency", "position"), frequency=bytes([0, 1, 2, 0]))
    assert (both.buckets_per_feature, both.bin_count, both.name) == ((3, 3), 9, "frequency×position")
    assert (ThresholdBinSpec().bin_count, ThresholdBinSpec().name) == (1, "none")
    assert [
        e.name
        for e in (
            EntropyEstimator(),
            EntropyEstimator("topk", k=8, search="faiss"),
            EntropyEstimator("lowrank", k=8, rank=4),
        )
    ] == [
        "full",
        "topk-8 faiss",
        "lowrank-4 top-8",
    ]


def test_a_signal_that_rises_never_fires_at_an_infinite_threshold():
    rising = replace(POINT, signal="softmax_response", thresholds=((math.inf, 0.9),))
    assert rising.has_adaptive_depth
    assert not replace(rising, thresholds=((math.inf, math.inf),)).has_adaptive_depth


def test_a_point_can_be_written_as_json_and_used_as_a_key():
    point = replace(POINT, thresholds=((0.5, -math.inf),), margin_nats=0.25, estimator=EntropyEstimator("linear"))
    data = json.loads(json.dumps(point.to_json()))
    assert (data["probes"], data["estimator"]["kind"], data["bins"]["features"]) == ([4, 8], "linear", [])
    assert {point: 1}[replace(point)] == 1


NO_COUNTS = [None, True, 0, -1, 1.5, float("nan"), "3", [], np.array([1, 2]), torch.tensor(1)]


@pytest.mark.parametrize("value", NO_COUNTS, ids=str)
def test_what_is_no_count_is_refused_by_name(value):
    for name, call in {
        "layers": lambda: full_depth(value),
        "drafting.longest": lambda: Drafting(1, value),
        "window": lambda: SwitchingRule(1.0, window=value),
    }.items():
        with pytest.raises(BadArgument, match=rf"^{name}=.*expected"):
            call()


FIELDS = {
    "layers": NO_COUNTS,
    "ceiling": [None, "x", 2.0, True, [3]],
    "probes": [None, 3, "ab", (1.5,), (True,), np.array([1]), {1}],
    "thresholds": [None, 1.0, "x", (1.0,), (("a",),), ((None,),), np.array([[1.0]])],
    "period": [0, -1, 1.5, "x", True],
    "floor": [0, -1, 1.5, "x", True],
    "decay": [1, (1.0,), ("a", 2), "ab"],
    "margin_nats": ["x", True],
    "interpolate": [0, 1, None, "no"],
    **{key: [None, 3, [], np.array([1, 2])] for key in ("schedule", "signal", "decay_form")},
    **{key: [None, "full", 3] for key in ("estimator", "bins")},
    **{key: [3, [], np.array([1, 2])] for key in ("lens", "translators")},
    "confidence": [0.5, "x", ()],
    "name": [None, 3],
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in FIELDS.items() for value in values], ids=str
)
def test_a_field_of_another_type_is_refused_by_name(field, value):
    point = OperatingPoint("p", "f", 12, 12, (4,), ((1.0,),))
    with pytest.raises(BadArgument, match=f"^{field}=.*expected"):
        replace(point, **{field: value})


def test_numbers_of_numpy_are_numbers():
    point = OperatingPoint("p", "f", np.int64(12), np.int32(12), (np.int64(4),), ((np.float32(1.0),),))
    assert (point.layers, point.threshold_table.tolist()) == (12, [[1.0]])


def test_a_point_is_its_fields_and_not_its_name():
    other = replace(POINT, name="the same under another name")
    assert other == POINT
    assert (hash(other), other.digest) == (hash(POINT), POINT.digest)
    changed = [
        replace(POINT, margin_nats=0.1),
        replace(POINT, thresholds=((0.5, math.nextafter(0.2, 1)),)),
        full_depth(12),
    ]
    assert len({each.digest for each in (POINT, *changed)}) == 4
    assert POINT not in changed


@pytest.mark.parametrize("levels", [(1, 0.0), (np.float32(1.0), -0.0), (np.int64(1), np.float64(0.0))], ids=str)
def test_equal_numbers_of_any_type_have_one_digest(levels):
    point = replace(POINT, thresholds=((1.0, 0.0),))
    assert replace(POINT, thresholds=(levels,)) == point
    assert replace(POINT, thresholds=(levels,)).digest == point.digest
