"""What a decoder elsewhere is told of the model: a folder that it can read by itself, for every kind of model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emad_ref.measurements.run_resources import RemoteDecoders
from emad_ref.models.bundled import weights_folder
from emad_ref.models.loading import load
from emad_ref.models.model_spec import stored_folder
from emad_ref.point import full_depth
from emad_ref.protocol import ModelRef, Request
from tests.unit.wire.fake import listening


def told_of(distant, asked, loaded):
    """The model as the other side heard of it."""
    distant.make(Request(ModelRef(loaded.name, lambda: loaded), full_depth(loaded.geometry.layers)))
    return asked[-1].header["model"]


def test_a_bundled_model_lies_where_it_is():
    loaded = load("emad-nano", dtype=torch.float64)
    with listening() as (where, asked):
        distant = RemoteDecoders(where, 10)
        assert told_of(distant, asked, loaded) == {
            "name": "emad-nano",
            "folder": str(weights_folder() / "emad-nano"),
            "fingerprint": loaded.fingerprint,
            "dtype": "float64",
            "device": "cpu",
        }
        distant.close()


def test_a_folder_is_named_absolutely(tmp_path, monkeypatch):
    load("random:emad-nano").model.save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert stored_folder(load("mine")) == tmp_path / "mine"
    monkeypatch.chdir("/")


@pytest.mark.parametrize("name", ["random:emad-nano", "control:identity-upper"])
def test_a_model_that_lies_nowhere_is_saved_once_and_goes_with_the_run(name):
    loaded = load(name, seed=3)
    with listening() as (where, asked):
        distant = RemoteDecoders(where, 10)
        folder = Path(told_of(distant, asked, loaded)["folder"])
        saved = load(str(folder))
        weights, found = loaded.model.state_dict(), saved.model.state_dict()
        assert weights.keys() == found.keys()
        assert all(torch.equal(weights[key], found[key]) for key in weights)
        assert told_of(distant, asked, loaded)["folder"] == str(folder)
        other = Path(told_of(distant, asked, load(name, seed=4))["folder"])
        assert other != folder
        distant.close()
        assert not folder.exists()
        assert not other.exists()
        distant.close()


def test_a_checkpoint_of_another_format_is_saved_again(tmp_path):
    """Weights in a pickle are no file that a plain reader knows."""
    loaded = load("random:emad-nano")
    loaded.model.config.save_pretrained(tmp_path)
    torch.save(loaded.model.state_dict(), tmp_path / "pytorch_model.bin")
    assert stored_folder(load(str(tmp_path))) is None
