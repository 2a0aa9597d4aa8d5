"""A profile: its averages, its file, and the refusal to use it with another model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.entropy_statistics import EntropyStatistics
from emad_ref.calibration.profile import (
    MINIMUM_TOKENS,
    BadProfile,
    Profile,
    load_profile,
    merge,
    profile_from_statistics,
    profile_of,
)
from emad_ref.calibration.trace import Trace, concatenate_traces
from emad_ref.errors import BadArgument
from emad_ref.point import ThresholdBinSpec
from tests.handmade_traces import layerwise

PROFILE = Profile(
    model="emad-tiny",
    fingerprint="f00d",
    corpus="world:premise",
    dtype="float32",
    layers=4,
    probes=(1, 3),
    read=(1, 2, 3, 4),
    mean_nats=(2.0, 2.5, 1.0, 0.25),
    targets_nats=(2.0, 1.0),
    tokens=100,
    sequences=4,
    versions={"torch": "2"},
)
OWNER = {"model": "m", "fingerprint": "f", "corpus": "c", "dtype": "float32"}


GRID = ThresholdBinSpec(("position", "top1_probability"), position_edges=(300,))


def trace_with(entropy, probability=None, top1=0):
    """Return one sequence of these entropies [tokens][L]; a token's top-1 probability is the same after every layer."""
    entropy = np.array(entropy, dtype=np.float32)
    number = np.arange(len(entropy))
    if probability is None:
        probability = np.full(len(entropy), 0.5)
    return Trace(
        signals=layerwise(entropy, np.zeros_like(entropy)),
        nll_nats=entropy,
        top1=np.full(entropy.shape, top1, dtype=np.int32),
        top1_probability=np.tile(np.float32(probability)[:, None], entropy.shape[1]),
        token=number,
        target=number,
        position=number,
        starts=np.array([0, len(entropy)]),
        first_decided=np.array([0]),
    )


def test_a_profile_averages_every_layer_and_fits_the_probes_alone():
    profile = profile_of(trace_with([[4, 9, 1, 2], [2, 9, 3, 0]]), (1, 2), **OWNER)
    assert profile.mean_nats == (3.0, 9.0, 2.0, 1.0)
    assert profile.targets_nats == (6.0, 6.0)  # the rise from 3 to 9 is pooled, without layers 3 and 4
    assert (profile.tokens, profile.sequences, profile.layers) == (2, 1, 4)
    assert set(profile.versions) >= {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("probes", [(0,), (4,), (2, 1), (1, 1)])
def test_probes_that_no_point_could_use_are_refused_before_the_profile_is_kept(probes):
    with pytest.raises(BadArgument, match="ascending layers in 1–3 of this model; the last layer is always read"):
        profile_of(trace_with([[4, 3, 2, 1]]), probes, **OWNER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probes": (1, 4)}, "ascending layers below 4"),
        ({"probes": (3, 1)}, "ascending layers below 4"),
        ({"read": (1, 2, 2, 3)}, "ascending layers below 5"),
        ({"read": (1, 2, 4), "mean_nats": (2.0, 2.5, 0.25)}, "probes are among the layers read"),
        ({"mean_nats": (2.0, 2.5, 1.0)}, "one mean per layer read"),
        ({"mean_nats": (2.0, 2.5, 1.0, math.nan)}, "means of tokens"),
        ({"targets_nats": (2.0,)}, "one target per probe"),
        ({"targets_nats": (1.0, 2.0)}, "targets never rise"),
        ({"bin_targets_nats": ((2.0, 1.0),)}, "one row of targets per bin"),
        (
            {"bins": GRID, "bin_targets_nats": ((2.0, 1.0),) * 6, "dropped_features": (0,) * 5},
            "one row of targets per bin",
        ),
        ({"bins": GRID, "bin_targets_nats": ((1.0, 2.0),) * 6, "dropped_features": (0,) * 6}, "targets never rise"),
        ({"corpora": {"a": 60, "b": 39}}, "all tokens are of its corpora"),
        ({"statistics": EntropyStatistics.empty(2, 4)}, "statistics by bin and layer read"),
        ({"statistics": EntropyStatistics.empty(1, 4)}, "statistics of its tokens"),
    ],
)
def test_a_profile_is_complete_when_it_is_made(change, message):
    with pytest.raises(AssertionError, match=message):
        replace(PROFILE, **change)


def test_a_margin_lowers_the_targets():
    assert PROFILE.point(0.5).thresholds == ((1.5, 0.5),)
    assert PROFILE.point(0.5, "free_eager").schedule == "free_eager"
    assert replace(PROFILE, probes=(), targets_nats=()).point(9.0).probes == ()


@pytest.mark.parametrize("margin", [2.0, 2.0001, math.inf])
def test_a_margin_under_which_nothing_can_exit_is_refused(margin):
    if margin == 2.0:
        assert max(PROFILE.point(margin).thresholds[0]) == 0.0
        return
    with pytest.raises(BadArgument, match=r"at most 2\.0000, .* a larger margin makes every threshold negative"):
        PROFILE.point(margin)


def test_a_profile_survives_its_file(tmp_path):
    path = tmp_path / "new folder" / "profile.json"
    PROFILE.save(path)
    assert load_profile(path) == PROFILE
    PROFILE.save(str(path))
    assert load_profile(str(path)) == PROFILE, "a path may be a string"
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def test_saving_again_replaces_the_file(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    replace(PROFILE, tokens=7).save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").tokens == 7


def test_a_profile_serves_its_own_model_and_no_other():
    PROFILE.require("f00d", "float32")
    for fingerprint, dtype, named in (
        ("beef", "float32", "fingerprint='f00d'"),
        ("f00d", "float64", "dtype='float32'"),
    ):
        with pytest.raises(BadProfile, match=rf"profile\.{named}, but the model under test has") as refused:
            PROFILE.require(fingerprint, dtype)
        assert "calibrate this model itself" in str(refused.value)
        assert "'emad-tiny' on 'world:premise'" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"schema": 5', '"schema": 4'), "has schema=4, but this version reads 5 alone"),
        (lambda text: text.replace('"tokens": 100', '"tokens": 101'), "was changed or cut after it was written"),
        (lambda text: text[:-9], "cannot be read"),
        (lambda text: "[1]", "has format=None, but expected 'profile'"),
    ],
)
def test_another_file_is_refused_with_the_remedy(tmp_path, change, message):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(change(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    with pytest.raises(BadProfile, match=rf"^profile='.*/profile\.json' .*{message}.*; calibrate again with `emad"):
        load_profile(path)


def test_a_profile_is_changed_in_python(binned, tmp_path):
    """docs/python.md says so: its file refuses an edit."""
    binned.save(tmp_path / "p.json")
    lower = tuple(value - 0.1 for value in binned.targets_nats)
    replace(load_profile(tmp_path / "p.json"), targets_nats=lower, statistics=None).save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").targets_nats == lower


# ---------------------------------------------------------------- bins


def binned_trace(tokens=3000, seed=0):
    """Return tokens whose entropies fall with confidence, with hardly any in the middle confidence bucket."""
    rng = np.random.default_rng(seed)
    probability = np.where(rng.random(tokens) < 0.5, rng.uniform(0, 0.4, tokens), rng.uniform(0.7, 1, tokens))
    probability[:40] = 0.5
    level = 4 * (1 - probability)[:, None] + np.array([1.0, 0.5, 0.6, 0.1])
    return trace_with(level * rng.uniform(0.5, 1.5, (tokens, 4)), probability)


@pytest.fixture(scope="module")
def binned():
    return profile_of(binned_trace(), (1, 2, 3), **OWNER, bins=GRID)


def test_each_bin_has_targets_of_its_own_tokens(binned):
    trace = binned_trace()
    # positions 301 and on, confidence from 0.7: the last of 2 × 3 bins
    mine = (np.arange(3000) >= 300) & (trace.top1_probability[:, 0] >= np.float32(0.7))
    means = trace.entropy_nats[mine].astype(np.float64).mean(axis=0)
    pooled = (means[1] + means[2]) / 2  # layers 2 and 3 rise
    assert binned.bin_targets_nats[5] == pytest.approx((means[0], pooled, pooled))
    assert binned.statistics.tokens[5] == mine.sum() >= MINIMUM_TOKENS
    assert binned.dropped_features[5] == 0


def test_a_bin_with_too_few_tokens_takes_the_targets_of_its_parent_and_says_so(binned):
    tokens = binned.statistics.tokens
    # the first 300 positions are too few together; of the others, the middle confidence bucket is
    assert tokens[:3].sum() == 300
    assert tokens[4] < MINIMUM_TOKENS < tokens[3]
    assert binned.dropped_features == (2, 2, 2, 0, 1, 0)
    late = profile_of(binned_trace(), (1, 2, 3), **OWNER, bins=replace(GRID, features=("position",)))
    assert binned.bin_targets_nats[4] == pytest.approx(late.bin_targets_nats[1])
    for row in binned.bin_targets_nats[:3]:
        assert row == pytest.approx(binned.targets_nats)


def test_conditioning_leaves_the_means_of_all_tokens_as_they_are(binned):
    plain = profile_of(binned_trace(), (1, 2, 3), **OWNER)
    assert binned.mean_nats == pytest.approx(plain.mean_nats, rel=1e-12)
    assert binned.targets_nats == pytest.approx(plain.targets_nats, rel=1e-12)
    assert (plain.bin_targets_nats, plain.dropped_features, plain.bins) == ((), (), ThresholdBinSpec())


def test_a_conditioned_point_has_a_row_of_thresholds_per_bin(binned):
    point = binned.point(0.1)
    assert point.bins == GRID
    assert np.array(point.thresholds) == pytest.approx(np.array(binned.bin_targets_nats) - 0.1)
    assert (point.name, point.family, point.margin_nats) == ("emad m=0.10 by position×top1_probability", "emad", 0.1)


def test_the_largest_margin_is_that_of_the_highest_bin(binned):
    highest = max(max(row) for row in binned.bin_targets_nats)
    assert highest > max(binned.targets_nats)
    assert max(map(max, binned.point(highest - 1e-9).thresholds)) >= 0
    with pytest.raises(BadArgument, match=f"at most {highest:.4f}, the highest target"):
        binned.point(highest + 1e-3)


def test_frequency_is_that_of_the_token_predicted_at_the_first_probe():
    frequency = ThresholdBinSpec(("frequency",), frequency=bytes([0, 2, 1]))
    trace = trace_with([[4, 3, 2, 1], [2, 1, 1, 0]])
    trace.top1[:] = [[1, 0, 0, 0], [0, 1, 1, 1]]
    profile = profile_of(trace, (1, 2), **OWNER, bins=frequency, minimum_tokens=1)
    assert profile.statistics.tokens.tolist() == [1, 0, 1]
    assert profile.bin_targets_nats == ((2.0, 1.0), (3.0, 2.0), (4.0, 3.0))
    assert profile.dropped_features == (0, 1, 0)
    with pytest.raises(BadArgument, match="first_probe=None"):
        profile_of(trace, (), **OWNER, bins=frequency)


def test_a_coarser_profile_is_the_one_calibrated_without_the_last_feature(binned):
    late = profile_of(binned_trace(), (1, 2, 3), **OWNER, bins=replace(GRID, features=("position",)))
    coarser = binned.drop_last_bin_features()
    assert np.array(coarser.bin_targets_nats) == pytest.approx(np.array(late.bin_targets_nats))
    assert (coarser.bins, coarser.dropped_features) == (late.bins, late.dropped_features)
    assert binned.drop_last_bin_features(2).point(0.2).thresholds[0] == pytest.approx(
        profile_of(binned_trace(), (1, 2, 3), **OWNER).point(0.2).thresholds[0]
    )
    by_frequency = ThresholdBinSpec(("position", "frequency"), frequency=bytes(9))
    assert profile_of(
        binned_trace(), (1,), **OWNER, bins=by_frequency
    ).drop_last_bin_features().bins == ThresholdBinSpec(("position",))


# ---------------------------------------------------------------- quantiles


def test_quantile_thresholds_let_their_share_of_tokens_pass_at_each_probe():
    trace = binned_trace()
    point = profile_of(trace, (1, 3), **OWNER).point(quantile=0.3)
    for probe, threshold in zip(point.probes, point.thresholds[0], strict=True):
        share = (trace.entropy_nats[:, probe - 1] <= threshold).mean()
        assert share == pytest.approx(0.3, abs=0.005)  # a bucket of 0.41 % of these entropies holds less than that
    assert (point.name, point.family, point.margin_nats) == ("quantile q=0.3", "quantile", None)


def test_quantile_thresholds_are_conditioned_and_fall_back_as_targets_do(binned):
    point = binned.point(quantile=0.5, schedule="free_eager")
    assert point.bins == GRID
    assert point.name == "quantile q=0.5 free_eager by position×top1_probability"
    rows = np.array(point.thresholds)
    own, all_tokens = binned.quantile_nats(0.5), binned.drop_last_bin_features(2).quantile_nats(0.5)
    assert rows[[3, 5]].tolist() == own[[3, 5], :3].tolist()
    assert rows[[0, 1, 2]].tolist() == [all_tokens[0, :3].tolist()] * 3
    assert rows[4].tolist() == binned.drop_last_bin_features(1).quantile_nats(0.5)[1, :3].tolist()


def test_a_quantile_takes_no_margin_and_needs_statistics(binned):
    with pytest.raises(BadArgument, match=r"margin_nats=0\.1, but expected 0 beside a quantile"):
        binned.point(0.1, quantile=0.5)
    with pytest.raises(BadArgument, match=r"quantile=1\.0, but expected a share between 0 and 1"):
        binned.point(quantile=1.0)
    with pytest.raises(
        BadArgument, match=r"profile\.statistics=None, but expected running statistics; calibrate again"
    ):
        PROFILE.point(quantile=0.5)


# ---------------------------------------------------------------- files and merging, with statistics


def test_statistics_and_bins_survive_the_file_to_the_last_bit(binned, tmp_path):
    frequency = ThresholdBinSpec(("frequency", "position"), frequency=bytes([0, 2, 1] * 20))
    for profile in (
        binned,
        profile_of(binned_trace(), (), **OWNER),
        profile_of(binned_trace(), (1,), **OWNER, bins=frequency),
    ):
        profile.save(tmp_path / "p.json")
        assert load_profile(tmp_path / "p.json") == profile


def parts(**changes):
    """Return profiles of the same model on two corpora."""
    owner = {key: value for key, value in OWNER.items() if key != "corpus"} | changes
    traces = binned_trace(2000, 1), binned_trace(900, 2)
    return [
        profile_of(trace, (1, 2, 3), **owner, corpus=name, bins=GRID) for trace, name in zip(traces, "ab", strict=True)
    ]


def test_merged_profiles_are_the_profile_of_all_their_tokens():
    merged = merge(parts())
    both = concatenate_traces([binned_trace(2000, 1), binned_trace(900, 2)])
    whole = profile_of(both, (1, 2, 3), **OWNER | {"corpus": "a + b"}, bins=GRID)
    assert np.array(merged.bin_targets_nats) == pytest.approx(np.array(whole.bin_targets_nats), rel=1e-12)
    assert merged.mean_nats == pytest.approx(whole.mean_nats, rel=1e-12)
    assert np.array_equal(merged.statistics.histogram, whole.statistics.histogram)
    assert (merged.corpora, merged.corpus) == ({"a": 2000, "b": 900}, "a + b")
    assert (merged.tokens, merged.sequences, merged.dropped_features) == (2900, 2, whole.dropped_features)


def test_merging_goes_on_from_files_and_one_profile_is_itself(tmp_path):
    first, second = parts()
    first.save(tmp_path / "p.json")
    assert merge([load_profile(tmp_path / "p.json"), second]) == merge([first, second])
    assert merge([first]) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, r"profile\.model='other', but expected 'm' as in the first"),
        ({"fingerprint": "beef"}, r"profile\.fingerprint="),
        ({"dtype": "float64"}, r"profile\.dtype="),
        ({"probes": (1, 2), "targets_nats": (2.0, 1.0), "bin_targets_nats": ((2.0, 1.0),) * 6}, r"profile\.probes="),
        ({"minimum_tokens": 9}, r"profile\.minimum_tokens="),
        ({"statistics": None}, r"profile\.statistics=None"),
        ({"corpora": {"a": 900}}, r"profile\.corpora=\['a'\], but expected each corpus in one profile"),
    ],
)
def test_profiles_that_do_not_add_up_are_refused_by_field(change, message):
    first, second = parts()
    with pytest.raises(BadArgument, match=message):
        merge([first, replace(second, **change)])
    with pytest.raises(BadArgument, match=r"profile\.bins=.*calibrate alike, with --bins-of for the same bins"):
        merge([first, second.drop_last_bin_features()])
    with pytest.raises(BadArgument, match="at least one profile"):
        merge([])


def test_versions_that_differ_are_all_kept():
    first, second = parts()
    merged = merge([first, replace(second, versions={**second.versions, "torch": "9"})])
    assert merged.versions["torch"] == f"{first.versions['torch']}, 9"
    assert merged.versions["numpy"] == first.versions["numpy"]


@pytest.mark.parametrize(
    ("probes", "read", "message"),
    [
        ((3,), (1, 2, 3), "ascending layers in 1–2 of this model"),
        ((2,), (1, 3, 4), r"read=\(1, 3, 4\), but expected the probes \(2,\) among 3 layers"),
        ((2,), (1, 2), r"read=\(1, 2\), but expected the probes \(2,\) among 3 layers"),
    ],
)
def test_a_profile_of_statistics_is_of_the_layers_read(probes, read, message):
    statistics = EntropyStatistics.empty(1, 3)
    with pytest.raises(BadArgument, match=message):
        profile_from_statistics(
            statistics, probes, layers=3, read=read, model="m", fingerprint="f", corpora={"c": 1}, dtype="float32"
        )


def test_a_profile_of_its_probes_alone_is_that_of_all_layers_there(tmp_path):
    whole = profile_of(binned_trace(), (1, 3), **OWNER, bins=GRID)
    held = whole.statistics
    columns = [0, 2]
    fewer = EntropyStatistics(
        held.tokens,
        held.sums[:, columns],
        held.squares[:, columns],
        held.histogram[:, columns],
        held.sequences,
    )
    owner = {name: OWNER[name] for name in ("model", "fingerprint", "dtype")}
    profile = profile_from_statistics(
        fewer, (1, 3), layers=whole.layers, read=(1, 3), corpora={"c": whole.tokens}, bins=GRID, **owner
    )
    assert (profile.layers, profile.read) == (whole.layers, (1, 3))
    assert profile.mean_nats == (whole.mean_nats[0], whole.mean_nats[2])
    assert profile.bin_targets_nats == whole.bin_targets_nats
    for point in ({"margin_nats": 0.1}, {"quantile": 0.3}):
        assert profile.point(**point) == whole.point(**point)
    assert profile.drop_last_bin_features().bin_targets_nats == whole.drop_last_bin_features().bin_targets_nats
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    with pytest.raises(BadArgument, match=r"profile\.read"):
        merge([profile, replace(whole, corpora={"other": whole.tokens})])
