"""The claims about one model, each a question of ``emad_ref.questions``: asked here, and its answer put on record."""

from __future__ import annotations

import pytest

from pytest_emad.asking import Ask, rows


@pytest.mark.parametrize("claim", rows("claims", "model"))
def test_claim(emad_ask: Ask, claim: str) -> None:
    emad_ask(claim)
