"""Speculative decoding that is not its verifier's: drafts that nobody verifies, and wrong tokens in their places.

The round is ours, whoever's decoders draft and verify in it; so what is planted here stands in the reference itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.decoding import speculation
from emad_ref.mutants.base import MutantDecoder, decoder_factory
from emad_ref.mutants.mutant import Mutant, MutantFactory
from emad_ref.protocol import Decoder, Request
from emad_ref.record import Floats

SPECULATION = "invariants/test_speculative.py::test_speculation_emits_what_its_verifier_would"
SAYS = r"row \d, new token \d+|row \d, position \d+"


def accepts_everything(p: Floats, q: Floats, token: int, rng: np.random.Generator) -> bool:
    return True


def the_drafts_again(p: Floats, q: Floats) -> Floats:
    return q


def one_too_early(self: speculation.SpeculativeSequence, logits: Floats) -> None:
    """The token that follows accepted drafts is read where the last of them was."""
    VERIFY(self, np.concatenate([logits[: len(self.drafts)], logits[len(self.drafts) - 1 :]]))


VERIFY = speculation.SpeculativeSequence.verify


def in_the_reference(change: Callable[[], None]) -> MutantFactory:
    """An honest decoder, beside a reference that ``change`` has been done to."""

    def make(request: Request) -> Decoder:
        change()
        return decoder_factory(MutantDecoder)(request)

    return make


def unverified() -> None:
    speculation.is_accepted = accepts_everything


def residual_of_the_draft() -> None:
    speculation.residual = the_drafts_again


def bonus_too_early() -> None:
    speculation.SpeculativeSequence.verify = one_too_early  # type: ignore[method-assign]  # that is what is wrong


PLANTED = (
    Mutant(
        "speculation-unverified",
        "speculation",
        "every draft is accepted",
        in_the_reference(unverified),
        SPECULATION,
        SAYS,
    ),
    Mutant(
        "speculation-residual",
        "speculation",
        "a refused draft is drawn again from the draft's own distribution",
        in_the_reference(residual_of_the_draft),
        SPECULATION,
        SAYS,
    ),
    Mutant(
        "speculation-bonus",
        "speculation",
        "the token after accepted drafts is read a position too early",
        in_the_reference(bonus_too_early),
        SPECULATION,
        SAYS,
    ),
)
