"""From a claim's id to its question. A module is imported when its claim is asked: SciPy and torch come with it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from emad_ref.errors import BadArgument
from emad_ref.extending import added
from emad_ref.questions.asking import Question
from emad_ref.verdict.claims import Claim


def module_of(claim: str) -> str:
    """``EMAD-F1-literal`` → ``emad_ref.questions.emad_f1_literal``; an extension's claim → the module it names."""
    return added("questions").get(claim) or f"{__package__}.{claim.lower().replace('-', '_')}"


def question_of(claim: str) -> Question[Any]:
    """The question that decides ``claim``.

    >>> question_of("EAD-H1").about
    'names'

    Raises:
        BadArgument: no module of this package is about it.
    """
    name = module_of(claim)
    try:
        question: Question[Any] = import_module(name).QUESTION
    except (ModuleNotFoundError, AttributeError) as error:
        expected = f"a row whose question is QUESTION of {name}"
        raise BadArgument("claim", claim, expected, f"{error}; see docs/own-claim.md") from error
    return question


def questions_of(register: Mapping[str, Claim]) -> dict[str, Question[Any]]:
    """Every row's question, in the register's order. Raises BadArgument as ``question_of``."""
    return {claim: question_of(claim) for claim in register}
