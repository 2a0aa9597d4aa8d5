"""Early-exit rules as data: the probes, the layers at which a rule may fire, the kept share of the vocabulary."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.exit_rules import (
    CONFIDENCES,
    PRUNINGS,
    decayed_threshold,
    early_exit_point,
    fixed_entropy_point,
    is_exit_rule_met,
    kept_vocabulary_size,
    softmax_response_point,
)
from emad_ref.point import DECAY_FORMS, ConfidenceParameters, OperatingPoint
from emad_ref.signals import SIGNALS, required_layers

L, V = 24, 32_128  # T5-large


@pytest.mark.parametrize(("layer", "k"), [(2, 2781), (7, 842), (19, 315), (24, 250)])
def test_the_kept_tokens_are_the_published_ones_on_the_published_model(layer: int, k: int) -> None:
    assert kept_vocabulary_size(layer, L, V) == k


def test_elsewhere_the_kept_share_is_that_of_the_same_relative_depth() -> None:
    assert kept_vocabulary_size(4, 12, V) == kept_vocabulary_size(8, 24, V) == kept_vocabulary_size(16, 48, V)
    assert kept_vocabulary_size(2, L, 4 * V) == math.floor(4 * 35_000 / (1 + 139 * 2 / 24)) == 11_125
    assert kept_vocabulary_size(24, L, 2 * V) == 500, "the floor scales too"
    assert kept_vocabulary_size(8, 12, 512) == 5


@pytest.mark.parametrize(("layer", "vocabulary", "named"), [(0, V, "layer"), (25, V, "layer"), (24, 256, "vocabulary")])
def test_a_layer_that_is_none_and_a_vocabulary_too_small_are_refused(layer: int, vocabulary: int, named: str) -> None:
    with pytest.raises(BadArgument, match=f"^{named}="):
        kept_vocabulary_size(layer, L, vocabulary)


def test_257_tokens_are_the_least_that_leave_two() -> None:
    with pytest.raises(BadArgument, match="vocabulary=257, but expected 258 tokens"):
        kept_vocabulary_size(24, L, 257)
    assert kept_vocabulary_size(24, L, 258) == 2


def test_fixed_keeps_what_decaying_starts_from() -> None:
    fixed = early_exit_point("softmax_response", L, V, 7, pruning="fixed").confidence
    decaying = early_exit_point("softmax_response", L, V, 7, pruning="decaying").confidence
    adaptive = early_exit_point("softmax_response", L, V, 7, pruning="adaptive").confidence
    assert fixed is not None
    assert decaying is not None
    assert adaptive is not None
    assert fixed.kept == (842,) * 16  # layers 8 … 23
    assert decaying.kept == tuple(kept_vocabulary_size(layer, L, V) for layer in range(8, 24))
    assert (decaying.kept[0], decaying.kept[-1]) == (739, 260)
    assert (adaptive.kept, adaptive.shrink) == ((), 0.9)


@pytest.mark.parametrize(
    ("signal", "probes", "first"),
    [
        ("softmax_response", (8, 9, 10, 11), 8),
        ("saturation", (7, 8, 9, 10, 11), 8),
        ("weighted_contrast", (4, 5, 8, 9, 10, 11), 8),
        ("jsd_contrast", (8, 9, 10, 11), 9),
    ],
)
def test_only_what_a_rule_needs_is_probed_and_nothing_fires_before_it_may(
    signal: str, probes: tuple[int, ...], first: int
) -> None:
    point = early_exit_point(signal, 12, V, 8, 0.8)
    assert point.probes == probes
    assert point.thresholds == (tuple(0.8 if probe >= first else math.inf for probe in probes),)
    assert (point.signal, point.family, point.schedule, point.ceiling) == (signal, signal, "copying", 12)
    assert point.has_adaptive_depth


def test_every_rule_and_pruning_makes_a_point_of_its_own_or_is_refused() -> None:
    points = {}
    for signal, pruning in product(CONFIDENCES, PRUNINGS):
        if pruning != "none" and not SIGNALS[signal].prunable:
            with pytest.raises(BadArgument, match=f"no pruning for {signal}; for softmax_response and jsd_contrast"):
                early_exit_point(signal, L, V, 7, pruning=pruning)
            continue
        points[signal, pruning] = early_exit_point(signal, L, V, 7, pruning=pruning)
    assert len(points) == len({point.name for point in points.values()}) == len(set(points.values()))
    assert len({point.family for point in points.values()}) == len(points)
    assert {pruning for signal, pruning in points if SIGNALS[signal].prunable} == set(PRUNINGS)
    for point in points.values():
        assert json.loads(json.dumps(point.to_json()))["signal"] == point.signal


def test_names_tell_points_of_a_sweep_apart() -> None:
    changes: list[dict[str, object]] = [
        {}, {"alpha": 0.2}, {"alpha_decay": 0.5}, {"emit": "expert"}, {"rescale": True}, {"decay": (4.0, 64.0)},
        {"decay": (4.0, 64.0), "decay_form": "calm"},
        {"schedule": "monotone"}, {"threshold": 0.85}, {"minimum": 6},
    ]  # fmt: skip
    names = {early_exit_point("jsd_contrast", 12, V, **{"minimum": 4, **change}).name for change in changes}  # type: ignore[arg-type]
    assert len(names) == len(changes)
    assert "jsd contrast j=4 λ=0.90 α=0.10 copying" in names


def test_with_amateurs_below_the_minimum_layer_jsd_decides_at_that_layer_itself() -> None:
    """The authors' code; in the paper's reading the first contrast, and so the first decision, is one layer later."""
    paper, coded = (early_exit_point("jsd_contrast", 12, V, 4, amateurs_from=first) for first in (None, 2))
    for point, probes, first in ((paper, range(4, 12), 5), (coded, range(2, 12), 4)):
        assert point.probes == tuple(probes)
        assert min(layer for layer, least in zip(point.probes, point.thresholds[0], strict=True) if least < 1) == first
    assert (coded.confidence.minimum, paper.confidence.minimum) == (2, 4)
    assert coded.name == "jsd contrast j=4 λ=0.90 amateurs from 2 α=0.10 copying"
    assert early_exit_point("jsd_contrast", 12, V, 4, amateurs_from=4) == paper


@pytest.mark.parametrize(
    ("signal", "first", "pruning"),
    [
        ("jsd_contrast", 5, "none"),
        ("jsd_contrast", 0, "none"),
        ("jsd_contrast", 2, "fixed"),
        ("weighted_contrast", 2, "none"),
    ],
)
def test_amateurs_that_mean_nothing_are_refused(signal: str, first: int, pruning: str) -> None:
    with pytest.raises(BadArgument, match=r"^amateurs_from="):
        early_exit_point(signal, 12, V, 4, pruning=pruning, amateurs_from=first)


def test_the_combined_rule_is_the_contrast_among_the_kept_tokens() -> None:
    """Pruning changes only the readouts; the paper's wording, with the kept tokens as head set, is α = 0."""
    plain = early_exit_point("jsd_contrast", L, V, 7)
    for pruning in ("fixed", "decaying", "adaptive"):
        combined = early_exit_point("jsd_contrast", L, V, 7, pruning=pruning)
        assert combined.confidence is not None
        unpruned = replace(combined.confidence, kept=(), shrink=None)
        assert replace(combined, confidence=unpruned, name="", family="") == replace(plain, name="", family="")
    worded = early_exit_point("jsd_contrast", L, V, 7, pruning="adaptive", alpha=0.0).confidence
    assert worded is not None
    assert worded.alpha == 0


def test_the_plain_response_is_the_point_that_traces_replay() -> None:
    plain = early_exit_point("softmax_response", 12, V, 8, schedule="monotone")
    assert replace(plain, name="") == replace(softmax_response_point(12, (8, 9, 10, 11), 0.9), name="")


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        (("mood", 12, V, 4), "signal", "one of softmax_response, saturation"),
        (("saturation", 12, V, 1), "confidence.minimum", "a layer in 2–11 for saturation; layer 0"),
        (("weighted_contrast", 12, V, 1), "confidence.minimum", "a layer in 2–11"),
        (("jsd_contrast", 12, V, 12), "confidence.minimum", "a layer in 1–11"),
        (("softmax_response", 12, V, 0), "confidence.minimum", "a layer in 1–11"),
    ],
)
def test_a_rule_without_a_layer_to_decide_at_is_refused(
    arguments: tuple[str, int, int, int], named: str, message: str
) -> None:
    with pytest.raises(BadArgument, match=f"^{named}=") as refused:
        early_exit_point(*arguments)
    assert message in str(refused.value)


def test_an_unknown_pruning_and_one_without_a_layer_are_refused() -> None:
    with pytest.raises(BadArgument, match="pruning='some', but expected one of none, fixed"):
        early_exit_point("softmax_response", 12, V, 4, pruning="some")
    with pytest.raises(BadArgument, match="minimum=11, but expected a layer in 1–10; after it no layer"):
        early_exit_point("softmax_response", 12, V, 11, pruning="fixed")


@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        ({"minimum": 0}, "confidence.minimum", "a layer ≥ 1"),
        ({"alpha": -0.1}, "confidence.alpha", "a share in 0–1"),
        ({"alpha": 1.1}, "confidence.alpha", "a share in 0–1"),
        ({"alpha_decay": -1.0}, "confidence.alpha_decay", "a finite rate ≥ 0"),
        ({"alpha_decay": math.inf}, "confidence.alpha_decay", "a finite rate ≥ 0"),
        ({"emit": "amateur"}, "confidence.emit", "one of contrastive, expert"),
        ({"kept": (5, 1)}, "confidence.kept", "2 tokens or more"),
        ({"kept": (5, 6)}, "confidence.kept", "sizes that never rise"),
        ({"shrink": 1.0}, "confidence.shrink", "below 1"),
        ({"shrink": -0.1}, "confidence.shrink", "below 1"),
        ({"kept": (5,), "shrink": 0.9}, "confidence.shrink", "choose one of them"),
    ],
)
def test_a_confidence_that_means_nothing_is_refused(change: dict[str, object], named: str, message: str) -> None:
    with pytest.raises(BadArgument, match=f"^{named}=") as refused:
        ConfidenceParameters(**{"minimum": 4, **change})  # type: ignore[arg-type]
    assert message in str(refused.value)


JSD = early_exit_point("jsd_contrast", 8, V, 4)
PRUNED = early_exit_point("softmax_response", 8, V, 4, pruning="fixed")


@pytest.mark.parametrize(
    ("point", "change", "named", "message"),
    [
        (JSD, {"confidence": None}, "confidence", "the parameters of jsd_contrast; see exit_rules.early_exit_point"),
        (JSD, {"signal": "entropy_nats"}, "confidence", "None for entropy_nats of a full readout"),
        (JSD, {"signal": "softmax_response"}, "confidence", "None for softmax_response of a full readout"),
        (JSD, {"probes": (4, 6, 7)}, "thresholds", "3 values per bin"),
        (JSD, {"probes": (4, 6, 7), "thresholds": ((1.0,) * 3,)}, "probes", "(4, 5, 6, 7), the layers"),
        (JSD, {"schedule": "chunked", "period": 4}, "confidence", "a schedule of monotone, free_eager"),
        (JSD, {"interpolate": True}, "confidence", "exits at probes"),
        (PRUNED, {"confidence": ConfidenceParameters(4, kept=(9, 9))}, "confidence.kept", "after the minimum layer, 3"),
        (PRUNED, {"signal": "saturation"}, "confidence", "no pruning for saturation"),
        (PRUNED, {"confidence": ConfidenceParameters(3, kept=(9, 9, 9))}, "probes", "(3, 4, 5, 6, 7)"),
    ],
)  # fmt: skip
def test_a_point_and_its_confidence_must_fit(
    point: OperatingPoint, change: dict[str, object], named: str, message: str
) -> None:
    with pytest.raises(BadArgument, match=f"^{named}=") as refused:
        replace(point, **change)  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_nothing_may_fire_below_the_minimum_layer() -> None:
    point = early_exit_point("weighted_contrast", 8, V, 4)
    assert point.probes == required_layers("weighted_contrast", 4, 8) == (2, 3, 4, 5, 6, 7)
    with pytest.raises(BadArgument, match="inf below the minimum layer; nothing is decided there"):
        replace(point, thresholds=((math.inf, *(0.9,) * 5),))


# ---------------------------------------------------------------- decaying thresholds


def test_a_decaying_threshold_starts_whole_and_ends_at_nine_tenths() -> None:
    def factor(rate: float, decided: list[int]) -> list[float]:
        point = replace(softmax_response_point(12, (4,), 1.0), decay=(rate, 100))
        return decayed_threshold(point, point.threshold_table[0], np.array(decided)).tolist()

    assert factor(4.0, [0]) == [1.0]
    assert np.allclose(factor(4.0, [1, 50, 100]), [0.9 + 0.1 * math.exp(-4 * t / 100) for t in (1, 50, 100)])
    assert factor(1e3, [10**6]) == [0.9]
    assert factor(0.0, [7]) == [1.0]


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9, 1.0])
def test_the_form_of_calm_starts_nearer_to_one_and_ends_at_the_same_threshold(threshold: float) -> None:
    """0.9·λ + 0.1·exp(−rate·t/N) against λ·(0.9 + 0.1·exp(−rate·t/N)); CALM's clip to [0, 1] is never reached."""
    free = replace(softmax_response_point(12, (4,), threshold), decay=(4.0, 100))
    calm, decided = replace(free, decay_form="calm"), np.arange(0, 2000, 7)
    by_free, by_calm = (decayed_threshold(each, each.threshold_table[0], decided) for each in (free, calm))
    level = float(np.float32(threshold))
    assert np.allclose(by_calm, 0.9 * level + 0.1 * np.exp(-4.0 * decided / 100))
    assert np.allclose(by_calm - by_free, 0.1 * (1 - level) * np.exp(-4.0 * decided / 100))
    assert np.isclose(by_calm[-1], by_free[-1])
    assert by_calm.min() >= 0
    assert by_calm.max() <= 1


def test_the_rule_compares_by_the_form_that_the_point_names() -> None:
    """At t = 0 λ = 0.5 is 0.5 by FREE's form and 0.55 by CALM's; long after, 0.45 by both."""
    free = replace(softmax_response_point(12, (4,), 0.5), decay=(4.0, 10))
    signal, decided = np.array([0.52, 0.52, 0.46, 0.44], dtype=np.float32), np.array([0, 999, 999, 999])
    assert is_exit_rule_met(free, 0, signal, decided=decided).tolist() == [True, True, True, False]
    calm = replace(free, decay_form="calm")
    assert is_exit_rule_met(calm, 0, signal, decided=decided).tolist() == [False, True, True, False]


def test_later_tokens_fire_at_less_confidence() -> None:
    point = replace(softmax_response_point(12, (4,), 0.9), decay=(4.0, 10))
    signal = np.array([0.9, 0.89, 0.85, 0.85, 0.80, np.nan], dtype=np.float32)
    assert is_exit_rule_met(point, 0, signal, decided=np.array([0, 0, 0, 9, 99, 99])).tolist() == [
        True, False, False, True, False, False,
    ]  # fmt: skip
    grid = np.full((3, 2), 0.87, dtype=np.float32)
    assert is_exit_rule_met(point, 0, grid, decided=np.array([0, 2, 9])[:, None]).tolist() == [
        [False] * 2,
        [True] * 2,
        [True] * 2,
    ]


@pytest.mark.parametrize("form", DECAY_FORMS)
def test_a_threshold_that_never_fires_does_not_decay_into_one_that_does(form: str) -> None:
    point = replace(softmax_response_point(12, (4,), math.inf), decay=(4.0, 10), decay_form=form)
    assert not is_exit_rule_met(point, 0, np.ones(2, dtype=np.float32), decided=np.array([0, 10**6])).any()


def test_constant_thresholds_ask_for_no_index_and_decaying_ones_do() -> None:
    signal = np.array([0.95], dtype=np.float32)
    plain = softmax_response_point(12, (4,), 0.9)
    assert (
        is_exit_rule_met(plain, 0, signal, decided=np.array([3])).tolist()
        == is_exit_rule_met(plain, 0, signal).tolist()
        == [True]
    )
    with pytest.raises(BadArgument, match="decided=None, but expected the index of every decided token"):
        is_exit_rule_met(replace(plain, decay=(4.0, 10)), 0, signal)


@pytest.mark.parametrize("change", [{"decay_form": "calm"}, {"decay": (1.0, 10), "decay_form": "linear"}], ids=str)
def test_a_form_without_a_decay_or_without_a_source_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadArgument, match=r"^decay_form=.*, but expected one of free, calm; free without a decay"):
        replace(softmax_response_point(12, (4,), 0.9), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("point", "change", "message"),
    [
        (softmax_response_point(12, (4,), 0.9), {"decay": (-1.0, 10)}, "rate ≥ 0, tokens ≥ 1"),
        (softmax_response_point(12, (4,), 0.9), {"decay": (1.0, 0)}, "rate ≥ 0, tokens ≥ 1"),
        (softmax_response_point(12, (4,), 0.9), {"decay": (math.inf, 10)}, "both finite"),
        (softmax_response_point(12, (4,), 0.9), {"decay": (math.nan, 10)}, "both finite"),
        (fixed_entropy_point(12, (4,), 0.5), {"decay": (1.0, 10)}, "None for a signal that falls"),
        (
            softmax_response_point(12, (4, 6), 0.9),
            {"decay": (1.0, 10), "interpolate": True},
            "where exits lie between probes",
        ),
    ],
)
def test_a_decay_that_means_nothing_is_refused(point: OperatingPoint, change: dict[str, object], message: str) -> None:
    with pytest.raises(BadArgument, match=r"^decay=") as refused:
        replace(point, **change)  # type: ignore[arg-type]
    assert message in str(refused.value)
