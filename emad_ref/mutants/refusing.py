"""Decoders that decline, skip, leave, or declare more than is honest, in place of being judged."""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from emad_ref.mutants.base import MutantDecoder, decoder_factory
from emad_ref.mutants.depths import DECISIONS
from emad_ref.mutants.drawing import TIMED
from emad_ref.mutants.keys import FORCED
from emad_ref.mutants.mutant import RUN, VERIFY, Mutant, MutantFactory
from emad_ref.protocol import Decoder, Prompt, Request, Unsupported
from emad_ref.record import Record

NOISE = "fidelity/test_full_depth.py::test_declared_noise_is_what_rounding_can_honestly_need"
KV = "invariants/test_kv_consistency.py::test_logits_at_any_admissible_depth_are_the_full_models"


def raising(error: Callable[[], BaseException]) -> MutantFactory:
    def make(request: Request) -> NoReturn:
        raise error()

    return make


class NoSessions(MutantDecoder):
    def start(self, prompts: Sequence[Prompt]) -> NoReturn:
        raise Unsupported("no sessions")


class UncountedDecoder(MutantDecoder):
    def prepare(self) -> None:
        self.capabilities = replace(self.capabilities, counted=False)

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        return replace(super().generate(prompts, max_new, stop), work=None, prompt_work=None)


class DeclaresAnything(MutantDecoder):
    def prepare(self) -> None:
        self.capabilities = replace(self.capabilities, logit_noise=1e6)


class Leaves(MutantDecoder):
    """``leave`` ends the process, or the run, as soon as a session is opened."""

    leave: Callable[[], Any]

    def start(self, prompts: Sequence[Prompt]) -> NoReturn:
        type(self).leave()
        raise AssertionError("gone by now")


def leaving(leave: Callable[[], Any]) -> MutantFactory:
    return decoder_factory(type("Leaving", (Leaves,), {"leave": staticmethod(leave)}))


def nobody(request: Request) -> Decoder | None:
    """A hook that answers nothing."""
    return None


PLANTED = (
    Mutant(
        "refuses-everything",
        "refusal",
        "every request is declined",
        raising(lambda: Unsupported("busy")),
        FORCED,
        r"the decoder declined .*busy",
        by=RUN,
    ),
    Mutant(
        "refuses-sessions",
        "refusal",
        "there are no sessions",
        decoder_factory(NoSessions),
        KV,
        r"EMAD-E2: not decided .*no sessions",
        by=RUN,
    ),
    Mutant(
        "refuses-to-count",
        "refusal",
        "work is not counted",
        decoder_factory(UncountedDecoder),
        TIMED,
        r"EMAD-E5: not decided",
        case="EMAD-E5",
        by=RUN,
    ),
    Mutant(
        "skips",
        "refusal",
        "pytest.skip inside the decoder",
        raising(lambda: pytest.skip.Exception("not today")),
        DECISIONS,
        r"skipped this test: expected",
    ),
    Mutant(
        "skips-as-unittest",
        "refusal",
        "unittest's SkipTest inside the decoder",
        raising(lambda: unittest.SkipTest("not today")),
        DECISIONS,
        r"skipped this test: expected",
    ),
    Mutant(
        "answers-nothing",
        "refusal",
        "the hook returns None",
        nobody,  # type: ignore[arg-type]  # that is what is wrong
        FORCED,
        r"returned no decoder|returned None",
    ),
    Mutant(
        "noise-declared",
        "noise",
        "noise of a million logits is declared",
        decoder_factory(DeclaresAnything),
        NOISE,
        r"logit_noise=1e\+06, but",
    ),
    Mutant(
        "exits-process", "exits", "os._exit(0)", leaving(lambda: os._exit(0)), FORCED, r"state='running'", by=VERIFY
    ),
    Mutant(
        "exits-pytest",
        "exits",
        "pytest.exit(returncode=0)",
        leaving(lambda: pytest.exit("enough", returncode=0)),
        FORCED,
        r"state='interrupted'",
        by=VERIFY,
    ),
    Mutant(
        "exits-system",
        "exits",
        "sys.exit(0)",
        leaving(lambda: sys.exit(0)),
        FORCED,
        r"SystemExit|state=",
    ),
    Mutant(
        "forges-by-xfail",
        "forged",
        "a conftest marks every test as an expected failure",
        decoder_factory(DeclaresAnything),
        NOISE,
        r"xfailed, although audit noise refuted",
        by=RUN,
        bystander="xfail",
    ),
    Mutant(
        "forges-by-skip",
        "forged",
        "a conftest marks every test to be skipped",
        decoder_factory(DeclaresAnything),
        NOISE,
        r"skipped by a mark",
        by=RUN,
        bystander="skip",
    ),
    Mutant(
        "forges-by-deselection",
        "forged",
        "a conftest leaves tests out",
        decoder_factory(DeclaresAnything),
        NOISE,
        r"collected, but never run",
        by=RUN,
        bystander="deselect",
    ),
    Mutant(
        "forges-outcomes",
        "forged",
        "a conftest turns failures into passes",
        decoder_factory(DeclaresAnything),
        NOISE,
        r"passed, although audit noise refuted",
        by=RUN,
        bystander="outcomes",
    ),
)
