"""A rival whose perplexity lies a known share above or below EMAD's: one rule for four rivals."""

from __future__ import annotations

from tests.questions.duelling import SHORT as CASES

__all__ = ["CASES"]
