"""A profile and a margin in two calls: the same profile as ``emad calibrate``, a margin chosen on other text."""

from __future__ import annotations

import pytest

from emad_ref import cli, tuning
from emad_ref.calibration.profile import BadProfile, load_profile
from emad_ref.errors import BadArgument
from emad_ref.models.loading import load
from emad_ref.sweep.losses import is_within_bounds
from emad_ref.tuning import NoMargin, choose_margin, take_profile

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
    documents_of, loss_table = tuning.corpus_documents, tuning.loss_table
    monkeypatch.setattr(
        tuning, "corpus_documents", lambda c, split, **o: read.append(split) or documents_of(c, split, **o)
    )
    monkeypatch.setattr(tuning, "loss_table", lambda *given: tables.append(loss_table(*given)) or tables[-1])
    chosen = choose_margin(tiny, profile, documents=FEW)
    assert read == ["validate"]
    (reference,), margins = tables
    assert reference.net_reduction == 0
    allowed = [row for row in margins if is_within_bounds(row, reference.perplexity)]
    assert chosen.mean_depth == min(row.mean_depth for row in allowed) < reference.mean_depth
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
