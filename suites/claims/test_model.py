"""One test per claim about a model: decides the claim and records the verdict (``pytest_emad.claims``)."""

from __future__ import annotations

import pytest

from pytest_emad.run.selection import claim_pytest_params
from pytest_emad.run.suite_support import Ask


@pytest.mark.parametrize("claim", claim_pytest_params("claims", "model"))
def test_claim(emad_ask: Ask, claim: str) -> None:
    emad_ask(claim)
