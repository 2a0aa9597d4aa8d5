"""Decoders that refuse, exit, or change the judge: its model, or the run."""

from __future__ import annotations

import gc
import os
import sys
import unittest
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from torch import nn

from emad_ref.decoding import speculation
from emad_ref.protocol import Decoder, Request, Unsupported
from emad_ref.record import Floats, Record
from tests.mutants.decision_defects import DECISIONS
from tests.mutants.mutant import (
    HONEST_FACTORY,
    RUN,
    VERIFY,
    Mutant,
    MutantFactory,
    declare_capabilities,
    make_mutants_for_test,
    mutate,
)
from tests.mutants.request_defects import TIMED

ALONE = "invariants/test_apart.py::test_the_judges_model_is_left_alone"
SPECULATION = "invariants/test_speculative.py::test_speculation_emits_what_its_verifier_would"
NOISE = "fidelity/test_full_depth.py::test_declared_noise_is_what_rounding_can_honestly_need"
KV = "invariants/test_kv_consistency.py::test_logits_at_any_admissible_depth_are_the_full_models"
MODEL = r"the judge's own model was changed: .*"


# ---------------------------------------------------------------- refusals and exits


def raise_in_factory(error: Callable[[], BaseException]) -> MutantFactory:
    def make(request: Request) -> NoReturn:
        raise error()

    return make


def refuse_sessions(start: Any, decoder: Any, *arguments: Any) -> NoReturn:
    raise Unsupported("no sessions")


def exit_on_session_start(leave: Callable[[], Any]) -> MutantFactory:
    """Ends the process, or the run, as soon as a session is opened."""

    def start(original: Any, decoder: Any, *arguments: Any) -> NoReturn:
        leave()
        raise AssertionError("gone by now")

    return mutate(start=start)


def drop_work_counts(generate: Any, decoder: Any, *arguments: Any) -> Record:
    record: Record = generate(*arguments)
    return replace(record, work=None, prompt_work=None)


NOISE_DECLARED = mutate(prepare=declare_capabilities(logit_noise=1e6))


# ---------------------------------------------------------------- the judge's model


def find_other_models(mine: nn.Module) -> list[Any]:
    """Every model of the process except the decoder's own; the protocol does not expose them."""
    return [each for each in gc.get_objects() if type(each) is type(mine) and each is not mine]


def change_other_models(change: Callable[[Any], None]) -> MutantFactory:
    """An honest decoder that applies ``change`` once to every model of the process except its own."""
    done: set[int] = set()

    def make(request: Request) -> Decoder:
        for model in find_other_models(request.model.load().model):
            if id(model) not in done:
                done.add(id(model))
                change(model)
        return HONEST_FACTORY(request)

    return make


def change_process_state(change: Callable[[], None]) -> MutantFactory:
    """An honest decoder that runs ``change`` each time it is made."""

    def make(request: Request) -> Decoder:
        change()
        return HONEST_FACTORY(request)

    return make


def weight_matrices(model: Any) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.ndim == 2]


def change_one_weight(model: Any) -> None:
    weights = weight_matrices(model)
    weights[len(weights) // 2].data[0, 0] += 1


def zero_upper_weights(model: Any) -> None:
    weights = weight_matrices(model)
    for weight in weights[len(weights) // 2 :]:
        weight.data.zero_()


# ---------------------------------------------------------------- speculative decoding of the reference

VERIFY_ROUND = speculation.SpeculativeSequence.verify_drafts


def accept_all_drafts() -> None:
    speculation.is_accepted = lambda p, q, token, rng: True


def resample_from_draft() -> None:
    speculation.residual_distribution = lambda p, q: q


def read_bonus_token_early() -> None:
    """Reads the token after accepted drafts at the position of the last of them."""

    def verify(self: speculation.SpeculativeSequence, logits: Sequence[Floats]) -> None:
        drafts = len(self.drafts)
        VERIFY_ROUND(self, [*logits[:drafts], *logits[drafts - 1 :]])

    speculation.SpeculativeSequence.verify_drafts = verify  # type: ignore[method-assign]  # that is what is wrong


MUTANTS = (
    *make_mutants_for_test("speculation", SPECULATION, r"row \d, new token \d+|row \d, position \d+",
        ("speculation-unverified", "every draft is accepted", change_process_state(accept_all_drafts)),
        ("speculation-residual", "a refused draft is drawn again from the draft's own distribution",
         change_process_state(resample_from_draft)),
        ("speculation-bonus", "the token after accepted drafts is read a position too early",
         change_process_state(read_bonus_token_early))),
    Mutant("refuses-everything", "refusal", "every request is declined", raise_in_factory(lambda: Unsupported("busy")),
           DECISIONS, r"the decoder declined .*busy", by=RUN),
    Mutant("refuses-sessions", "refusal", "there are no sessions", mutate(start=refuse_sessions), KV,
           r"EMAD-E2: not decided .*no sessions", by=RUN),
    Mutant("refuses-to-count", "refusal", "work is not counted",
           mutate(generate=drop_work_counts, prepare=declare_capabilities(counted=False)), TIMED,
           r"EMAD-E5: not decided", case="EMAD-E5",
           by=RUN),
    Mutant("skips", "refusal", "pytest.skip inside the decoder",
           raise_in_factory(lambda: pytest.skip.Exception("not today")),
           DECISIONS, r"skipped this test\. Only"),
    Mutant("skips-as-unittest", "refusal", "unittest's SkipTest inside the decoder",
           raise_in_factory(lambda: unittest.SkipTest("not today")), DECISIONS, r"skipped this test\. Only"),
    Mutant("answers-nothing", "refusal", "the hook returns None", lambda request: None,  # type: ignore[arg-type,return-value]  # that is what is wrong
           DECISIONS, r"returned no decoder|returned None"),
    Mutant("noise-declared", "noise", "noise of a million logits is declared", NOISE_DECLARED, NOISE,
           r"logit_noise=1e\+06, but"),
    Mutant("exits-process", "exits", "os._exit(0)", exit_on_session_start(lambda: os._exit(0)), DECISIONS,
    r"state='running'",
           by=VERIFY),
    Mutant("exits-pytest", "exits", "pytest.exit(returncode=0)",
           exit_on_session_start(lambda: pytest.exit("enough", returncode=0)),
           DECISIONS, r"state='interrupted'", by=VERIFY),
    Mutant("exits-system", "exits", "sys.exit(0)", exit_on_session_start(lambda: sys.exit(0)), DECISIONS,
    r"SystemExit|state="), Mutant("forges-by-xfail", "forged", "a conftest marks every test as an expected failure",
    NOISE_DECLARED, NOISE,
           r"xfailed, although audit noise refuted", by=RUN, bystander="xfail"),
    Mutant("forges-by-skip", "forged", "a conftest marks every test to be skipped", NOISE_DECLARED, NOISE,
           r"skipped by a mark", by=RUN, bystander="skip"),
    Mutant("forges-by-deselection", "forged", "a conftest leaves tests out", NOISE_DECLARED, NOISE,
           r"collected, but never run", by=RUN, bystander="deselect"),
    Mutant("forges-outcomes", "forged", "a conftest turns failures into passes", NOISE_DECLARED, NOISE,
           r"passed, although audit noise refuted", by=RUN, bystander="outcomes"),
    Mutant("judge-weight", "judge's model", "a weight of the judge's model is changed in place",
           change_other_models(change_one_weight), ALONE, MODEL + r"\w+\.weight"),
    Mutant("judge-upper-layers", "judge's model", "the upper layers of the judge's model are zeroed",
           change_other_models(zero_upper_weights), ALONE, MODEL + r"\w+\.weight"),
)  # fmt: skip
