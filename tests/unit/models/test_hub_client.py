"""Loading from a hub: a local stand-in on the loopback interface, and a client process with ``HF_ENDPOINT`` set.

One process loads every repository in turn; a second works offline from the cache of the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from emad_ref.models.loading import load
from tests.hub import Hub, Repository
from tests.small_models import small_model

MAIN, EARLIER = "a" * 40, "b" * 40
ALWAYS = 10**6
LOADS = """
import json, sys, time, urllib.request
from huggingface_hub import constants
from emad_ref.errors import EmadError
from emad_ref.models.loading import load
constants.DOWNLOAD_CHUNK_SIZE = 4096  # so that files of 100 kB arrive in pieces as those of 10 GB do
time.sleep = lambda seconds: None  # between attempts at what breaks off
for name in sys.argv[1:]:
    if name.startswith("http"):
        urllib.request.urlopen(name).read()
        continue
    try:
        loaded = load(name)
        loaded.stepper
        said = loaded.facts | {"reads": loaded.tokenizer is not None}
    except EmadError as error:
        said = {"error": type(error).__name__, "said": str(error)}
    print("FOUND", json.dumps([name, said]), flush=True)
"""


def repository(folder: Path, seed: int, *, pickled: bool = False) -> Path:
    """Write a small GPT-NeoX in several shards with its tokenizer, or as one pickle."""
    model = small_model("gpt_neox", torch.float32, seed)
    model.save_pretrained(folder, max_shard_size="100KB")
    if pickled:
        for path in folder.glob("model*"):
            path.unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(100)} | {"<end>": 100}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


Found = dict[str, list[dict[str, Any]]]


def found_by(hub: Hub, home: Path, *names: str, **environment: str) -> tuple[Found, str]:
    """Return what a subprocess loads for every name, in order; and its standard error."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    own |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    words = [sys.executable, "-c", LOADS, *names]
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    found: Found = {}
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            name, said = json.loads(line.removeprefix("FOUND "))
            found.setdefault(name, []).append(said)
    return found, done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("repositories")
    return {
        "main": repository(base / "main", 0),
        "earlier": repository(base / "earlier", 1),
        "pickle": repository(base / "pickle", 2, pickled=True),
    }


@pytest.fixture(scope="module")
def hub(folders: dict[str, Path]) -> Iterator[Hub]:
    main = {"main": (MAIN, folders["main"])}
    repositories = {
        "EleutherAI/pythia-70m": Repository(main | {"step3000": (EARLIER, folders["earlier"])}),
        "mine/pickle": Repository({"main": (MAIN, folders["pickle"])}),
        "mine/gated": Repository(main, gated=True),
        "mine/stutters": Repository(main, cuts=1),
        "mine/breaks": Repository(main, cuts=ALWAYS),
    }
    with Hub(repositories).running() as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def online(hub: Hub, home: Path) -> tuple[Found, str]:
    """Return all results from a hub that answers."""
    return found_by(
        hub, home, "pythia-70m", "pythia-70m@step3000", "pythia-70m@nowhere", "mine/pickle", "mine/gated",
        "mine/absent", "mine/stutters", "mine/breaks", f"{hub.address}/mend", "mine/breaks",
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(online: tuple[Found, str]) -> Found:
    return online[0]


def test_a_sharded_model_is_downloaded_at_one_commit_and_is_the_one_in_the_folder(
    found: Found, folders: dict[str, Path]
) -> None:
    assert len(list(folders["main"].glob("model-*.safetensors"))) > 2
    (said,) = found["pythia-70m"]
    assert said["fingerprint"] == load(str(folders["main"])).fingerprint
    assert (said["source"], said["hub_id"], said["commit"]) == ("hub", "EleutherAI/pythia-70m", MAIN)
    assert said["reads"]
    assert said["trained"]


def test_a_revision_is_its_own_commit_and_weights(found: Found, folders: dict[str, Path]) -> None:
    (said,) = found["pythia-70m@step3000"]
    assert said["commit"] == EARLIER
    assert said["fingerprint"] == load(str(folders["earlier"])).fingerprint != found["pythia-70m"][0]["fingerprint"]


def test_a_repository_of_pickles_is_read_weights_only(found: Found, folders: dict[str, Path]) -> None:
    (said,) = found["mine/pickle"]
    assert said["fingerprint"] == load(str(folders["pickle"])).fingerprint


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pythia-70m@nowhere", "it has no such branch, tag or commit"),
        ("mine/gated", "it is gated: accept its terms on its page of the hub, then log in"),
        ("mine/absent", "the hub has no such repository, or it is private: check the name, or log in"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_error(found: Found, name: str, told: str) -> None:
    (said,) = found[name]
    assert said["error"] == "ModelUnavailable"
    assert f"name={name!r}, but its hub repository" in said["said"]
    assert f"could not be read: {told}" in said["said"]


def test_a_download_that_stutters_goes_on_where_it_was(found: Found, hub: Hub) -> None:
    assert found["mine/stutters"][0]["fingerprint"] == found["pythia-70m"][0]["fingerprint"]
    assert any(int(place.split()[1]) > 0 for place in hub.ranges)


def test_a_download_that_breaks_is_one_clear_error_and_the_next_call_completes_it(found: Found) -> None:
    broken, mended = found["mine/breaks"]
    assert broken["error"] == "ModelUnavailable", broken
    assert "name='mine/breaks', but its hub repository mine/breaks could not be read" in broken["said"]
    assert mended["fingerprint"] == found["pythia-70m"][0]["fingerprint"]


def test_nothing_is_a_traceback_and_downloads_show_progress(online: tuple[Found, str]) -> None:
    assert "Traceback" not in online[1]
    assert "model-00001-of" in online[1] or "Fetching" in online[1] or "Downloading" in online[1]


def test_offline_the_cache_is_enough_and_says_what_is_not_in_it(
    online: tuple[Found, str], hub: Hub, home: Path
) -> None:
    before = hub.asked.total()
    names = ("pythia-70m", "pythia-70m@step3000", "pythia-70m@nowhere", "mine/never-asked")
    found, _ = found_by(hub, home, *names, HF_HUB_OFFLINE="1")
    assert hub.asked.total() == before
    for name in names[:2]:
        (said,) = found[name]
        assert said["fingerprint"] == online[0][name][0]["fingerprint"]
        assert said["reads"]
    told = ("its cache has no such revision: name EleutherAI/pythia-70m@main", "it is not in the local cache")
    for name, reason in zip(names[2:], told, strict=True):
        (said,) = found[name]
        assert said["error"] == "ModelUnavailable"
        assert reason in said["said"]
