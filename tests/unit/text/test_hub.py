"""The hub is asked once and briefly; offline is a state of a block, not of the process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from emad_ref.text import corpora
from emad_ref.text.corpora import CorpusUnavailable, corpus_documents


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that refuses at once, in a client that is not offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def test_an_address_without_an_answer_is_out_of_reach(nowhere: None) -> None:
    assert not corpora.is_hub_reachable()


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(corpora, "_hub_answers", lambda endpoint: pytest.fail("asked"))
    assert not corpora.is_hub_reachable()


def test_an_answer_is_remembered(monkeypatch: pytest.MonkeyPatch, nowhere: None) -> None:
    asked = []
    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=lambda *a, **k: asked.append(a)))
    monkeypatch.setattr(constants, "ENDPOINT", "http://answers.invalid")
    assert corpora.is_hub_reachable()
    assert corpora.is_hub_reachable()
    assert asked == [("http://answers.invalid",)]


def test_without_the_hub_datasets_are_read_from_the_cache(monkeypatch: pytest.MonkeyPatch, nowhere: None) -> None:
    config = SimpleNamespace(HF_HUB_OFFLINE=False)
    seen = []

    def load_dataset(name: str, configuration: str, *, split: str, streaming: bool) -> list[dict[str, str]]:
        seen.append((streaming, config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        if split == "validation":
            raise ConnectionError("not in the cache")
        return [{"text": " = One = \n"}, {"text": "cached\n"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, config=config))
    monkeypatch.setitem(sys.modules, "datasets.config", config)
    assert list(corpus_documents("wikitext", "evaluate")) == [" = One = \ncached\n"]
    with pytest.raises(CorpusUnavailable, match="not in the cache"):
        corpus_documents("wikitext", "validate")
    assert seen == [(False, True, True)] * 2
    assert (config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE) == (False, False)
    assert corpora.is_hub_reachable is corpora.is_hub_reachable
