"""A profile: what it averages, that it survives its file, and that no other model can use it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from emad_ref.calibration.profile import BadProfile, Profile, load_profile, profile_of
from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument

PROFILE = Profile(
    model="emad-tiny",
    fingerprint="f00d",
    corpus="world:premise",
    dtype="float32",
    layers=4,
    probes=(1, 3),
    mean_nats=(2.0, 2.5, 1.0, 0.25),
    targets_nats=(2.0, 1.0),
    tokens=100,
    sequences=4,
    versions={"torch": "2"},
)
OWNER = {"model": "m", "fingerprint": "f", "corpus": "c", "dtype": "float32"}


def trace_with(entropy):
    entropy = np.array(entropy, dtype=np.float32)
    number = np.arange(len(entropy))
    return Trace(
        entropy_nats=entropy,
        nll_nats=entropy,
        top1=np.zeros(entropy.shape, dtype=np.int32),
        top1_probability=entropy,
        token=number,
        target=number,
        position=number,
        starts=np.array([0, len(entropy)]),
        prompts=np.array([0]),
    )


def test_a_profile_averages_every_layer_and_fits_the_probes_alone():
    profile = profile_of(trace_with([[4, 9, 1, 2], [2, 9, 3, 0]]), (1, 2), **OWNER)
    assert profile.mean_nats == (3.0, 9.0, 2.0, 1.0)
    assert profile.targets_nats == (6.0, 6.0)  # the rise from 3 to 9 is pooled; layers 3 and 4 take no part
    assert (profile.tokens, profile.sequences, profile.layers) == (2, 1, 4)
    assert set(profile.versions) >= {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("probes", [(0,), (4,), (2, 1), (1, 1)])
def test_probes_that_no_point_could_use_are_refused_before_the_profile_is_kept(probes):
    with pytest.raises(BadArgument, match="ascending layers in 1–3 of this model; the last layer is always read"):
        profile_of(trace_with([[4, 3, 2, 1]]), probes, **OWNER)


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


CORRUPT = [
    ({"schema": 2}, "schema=2, but expected 1"),
    ({"model": ""}, "model='', but expected a name"),
    ({"model": None}, "model=None, but expected a name"),
    ({"fingerprint": 7}, "fingerprint=7, but expected a checksum"),
    ({"corpus": []}, r"corpus=\[\], but expected a name"),
    ({"dtype": None}, "dtype=None, but expected a name"),
    ({"layers": 0}, "layers=0, but expected a count"),
    ({"layers": "4"}, "layers='4', but expected a count"),
    ({"layers": True}, "layers=True, but expected a count"),
    ({"layers": 5}, "mean_nats=.*one finite entropy ≥ 0 per layer"),
    ({"probes": 4}, "probes=4, but expected ascending layers below the last"),
    ({"probes": [1, 4]}, r"probes=\[1, 4\], but expected ascending layers"),
    ({"probes": [3, 1]}, r"probes=\[3, 1\], but expected ascending layers"),
    ({"probes": [1, 1]}, r"probes=\[1, 1\], but expected ascending layers"),
    ({"probes": [0, 1]}, r"probes=\[0, 1\], but expected ascending layers"),
    ({"probes": ["1", 3]}, "probes=.*but expected ascending layers"),
    ({"probes": [1]}, "targets_nats=.*per probe"),
    ({"mean_nats": [2.0, 2.5, 1.0]}, "mean_nats=.*per layer"),
    ({"mean_nats": [2.0, 2.5, 1.0, -0.1]}, "mean_nats=.*per layer"),
    ({"mean_nats": [2.0, 2.5, 1.0, math.nan]}, "mean_nats=.*per layer"),
    ({"mean_nats": [2.0, 2.5, 1.0, math.inf]}, "mean_nats=.*per layer"),
    ({"mean_nats": [2.0, 2.5, 1.0, "low"]}, "mean_nats=.*per layer"),
    ({"mean_nats": None}, "mean_nats=None"),
    ({"targets_nats": [1.0, 2.0]}, r"targets_nats=\[1.0, 2.0\], but expected values that never rise"),
    ({"targets_nats": [math.nan, 1.0]}, "targets_nats=.*per probe"),
    ({"tokens": 0}, "tokens=0, but expected a count"),
    ({"sequences": 1.5}, "sequences=1.5, but expected a count"),
    ({"versions": "new"}, "versions='new', but expected versions by package name"),
    ({"mood": 1}, r"lacks fields \[\] and has unknown fields \['mood'\]"),
]


@pytest.mark.parametrize(
    ("change", "message"), CORRUPT, ids=[f"{i}-{next(iter(c))}" for i, (c, _) in enumerate(CORRUPT)]
)
def test_a_corrupt_file_is_refused_by_field_with_the_remedy(tmp_path, change, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(PROFILE) | change), encoding="utf-8")
    with pytest.raises(BadProfile, match=message) as refused:
        load_profile(path)
    assert "profile.json" in str(refused.value)
    assert "calibrate again" in str(refused.value)


@pytest.mark.parametrize("name", list(asdict(PROFILE)))
def test_a_missing_field_is_named(tmp_path, name):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({k: v for k, v in asdict(PROFILE).items() if k != name}), encoding="utf-8")
    with pytest.raises(BadProfile, match=rf"lacks fields \['{name}'\].*calibrate again"):
        load_profile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a readable JSON file"),
        (b"", "a readable JSON file"),
        (b"{", "a readable JSON file"),
        (b"\xff\xfe", "a readable JSON file"),
        (b"[1]", "holds a list, but expected an object"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, content, message):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadProfile, match=f"{message}.*calibrate again"):
        load_profile(path)
