"""``load_cached`` loads a model once, in one thread at a time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock

import pytest

from emad_ref.models.model_spec import ModelSpec, load_cached

SOMEWHERE = ModelSpec("somewhere", "cpu", "float32", None, 0, "f00d", "fast")


def test_threads_of_a_worker_load_one_after_another_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simultaneous loads leave transformers' classes patched for loading: tied weights are then always missing."""
    alone, loads = Lock(), []

    def load(self: ModelSpec) -> object:
        assert alone.acquire(blocking=False), "another load is under way"
        time.sleep(0.05)
        alone.release()
        loads.append(self.name)
        return object()

    monkeypatch.setattr(ModelSpec, "load", load)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(load_cached, [SOMEWHERE] * 4))
        others = list(pool.map(load_cached, [replace(SOMEWHERE, name="elsewhere")] * 2))
    assert len(set(map(id, found))) == len(set(map(id, others))) == 1
    assert loads == ["somewhere", "elsewhere"]
