"""A profile and a margin in two calls: the same profile as ``emad calibrate``, a margin chosen on other text."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref import adaptive, stream, tuning, weights_folder
from emad_ref.calibration.profile import BadProfile, load_profile, merge
from emad_ref.errors import BadArgument
from emad_ref.models.loading import load
from emad_ref.replay.losses import mark_within_margin_bounds
from emad_ref.tuning import NoMargin, choose_margin, take_profile
from pytest_emad import cli, read_report

FEW = 12


@pytest.fixture(scope="module")
def nano():
    return load("emad-nano")


@pytest.fixture(scope="module")
def profile(nano):
    return take_profile(nano, documents=FEW)


def test_the_profile_is_that_of_emad_calibrate(profile, tmp_path):
    out = tmp_path / "profile.json"
    assert cli.main(["calibrate", "emad-nano", str(out), "--documents", str(FEW)]) == 0
    assert load_profile(out) == profile


def test_the_margin_is_chosen_on_text_that_calibration_did_not_see(monkeypatch):
    tiny = load("emad-tiny")
    profile = take_profile(tiny, documents=FEW)
    read, tables = [], []
    documents_of, replay_losses = tuning.iterate_corpus_documents, tuning.replay_losses
    monkeypatch.setattr(
        tuning, "iterate_corpus_documents", lambda c, split, **o: read.append(split) or documents_of(c, split, **o)
    )
    monkeypatch.setattr(tuning, "replay_losses", lambda *given: tables.append(replay_losses(*given)) or tables[-1])
    chosen = choose_margin(tiny, profile, documents=FEW)
    assert read == ["validate"]
    (table,) = tables
    allowed = table.means("depth")[mark_within_margin_bounds(table)]
    assert chosen.mean_depth == allowed.min() < table[0].mean_depth
    assert chosen.point.margin_nats is not None


def test_where_no_margin_will_do_full_depth_is_named(nano, profile):
    with pytest.raises(NoMargin, match="full depth is what this model needs"):
        choose_margin(nano, profile, documents=FEW)


def test_the_profile_of_another_model_is_refused(profile):
    with pytest.raises(BadProfile, match=r"profile\.fingerprint"):
        choose_margin(load("emad-tiny"), profile, documents=FEW)


def test_an_encoder_decoder_continues_no_documents():
    with pytest.raises(BadArgument, match="expected a decoder-only model"):
        take_profile(load("emad-t5-tiny"), documents=FEW)


@pytest.mark.parametrize("documents", [None, 0, -1, 1.5, True, "3"])
def test_what_is_no_count_of_documents_is_refused(nano, profile, documents):
    """Without a count the generated corpora never end."""
    with pytest.raises(BadArgument, match=r"^documents=.*a whole number from 1"):
        take_profile(nano, "world:premise", documents=documents)
    with pytest.raises(BadArgument, match=r"^documents=.*a whole number from 1"):
        choose_margin(nano, profile, "world:premise", documents=documents)


def test_what_is_none_of_our_objects_is_refused(nano, profile):
    for call, said in (
        (lambda: choose_margin(nano, {}, "world:premise", 2), "profile={}, but expected an instance of Profile"),
        (lambda: merge([profile, 3]), "profiles=3, but expected an instance of Profile"),
        (lambda: list(stream(nano, "Kai", profile)), "point=.*an instance of OperatingPoint"),
        (lambda: list(stream(nano, [1, 2])), r"prompt=\[1, 2\], but expected an instance of str"),
        (lambda: list(stream(nano, "Kai", tokens=1.5)), "max_new=1.5, but expected at least one new token"),
        (lambda: list(stream(nano, "Kai", seed=1.5)), "seed=1.5, but expected a whole number"),
        (lambda: list(stream(nano, "Kai", temperature=None)), "temperature=None, but expected a finite number"),
        (lambda: profile.point("x"), "margin_nats='x', but expected a number of nats"),
        (lambda: adaptive(profile), "point=.*an instance of OperatingPoint"),
        (lambda: load(3), "name=3, but expected an instance of str or PathLike"),
        (lambda: load("emad-nano", dtype="float32"), "dtype='float32', but expected an instance of dtype"),
        (lambda: load("emad-nano", device=None), "device=None, but expected an instance of str or device"),
        (lambda: load_profile(0), "profile=0, but expected a path"),
        (lambda: read_report(None), "place=None, but expected an instance of str or Path"),
    ):
        with pytest.raises(BadArgument, match=said):
            call()


def test_a_folder_may_be_a_path_and_a_seed_of_numpy(nano):
    assert load(weights_folder() / "emad-nano").fingerprint == nano.fingerprint
    (piece,) = stream(nano, "Kai", tokens=1, temperature=1.0, seed=np.int64(3))
    assert piece == next(stream(nano, "Kai", tokens=1, temperature=1.0, seed=3))
