"""Claims about a small and a large model: switching, speculative decoding, and EMAD as their baseline."""

from __future__ import annotations

import pytest

from pytest_emad.run.selection import claim_pytest_params
from pytest_emad.run.suite_support import Ask


@pytest.mark.parametrize("claim", claim_pytest_params("claims", "names"))
def test_claim_of_names(emad_ask_names: Ask, claim: str) -> None:
    """Arithmetic: no model is loaded."""
    emad_ask_names(claim)


@pytest.mark.parametrize("claim", claim_pytest_params("claims", "pair"))
def test_claim(emad_ask_pair: Ask, claim: str) -> None:
    emad_ask_pair(claim)
