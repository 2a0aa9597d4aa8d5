"""Check that every pair of values of the dimensions is answered rightly, by the cases of a covering array.

``settle_offers`` finds the values, and pairs of values, that the decoder declines; these drop out. Then the array is
decoded, and every history judged. The first failing case is reduced to the simplest one that still fails, and its
history is the finding's sample. A pair that no answered case holds is a gap: the finding is then inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Protocol

import numpy as np

from emad_ref.protocol import Unsupported
from pytest_emad.audit.dimensions import (
    Case,
    Constraint,
    Dimension,
    Pair,
    is_possible,
    iterate_pairs,
    make_covering_cases,
    reduce_case,
)
from pytest_emad.audit.finding import AuditRefutedError, Finding, Tally
from pytest_emad.audit.request_cases import History

MOST_FAILING = 3  # cases; once so many fail, no more are decoded
MOST_REDUCTIONS = 60  # cases decoded to reduce a failing one
ASCENDING = ("rows",)  # dimensions of which every value is offered, if a later one is
NEVER_DECLINED = ("257th request",)  # values that a decoder cannot tell from the requests before
SHOWN_GAPS = 4  # pairs named in a detail
LONGEST_COMMAND = 4000  # characters of a command in a complaint; `emad replay` prints all of them

Values = dict[str, tuple[str, ...]]


class CaseRunner(Protocol):
    """Decodes the case of a history with numbers drawn by a seed, fills the history, and judges it."""

    tally: Tally

    def decode(self, history: History, seed: int) -> None: ...

    def judge(self, history: History) -> None: ...


@dataclass(frozen=True)
class Offers:
    """``values`` of each dimension that the decoder offers, their ``constraints``, and why it ``declined`` others."""

    values: Values
    constraints: tuple[Constraint, ...]
    declined: Mapping[str, str]


@dataclass(frozen=True)
class NoneOf:
    """Whether two values are none of the ``excluded`` pairs. Equal ones are equal: arrays are kept by constraints."""

    excluded: frozenset[tuple[str, ...]]

    def __call__(self, *values: str) -> bool:
        return values not in self.excluded


def settle_offers(
    runner: CaseRunner,
    dimensions: Mapping[str, Dimension],
    constraints: Sequence[Constraint],
    left_out: Mapping[str, Iterable[str]],
    questions: Sequence[str],
    pairs: Sequence[tuple[str, str]],
) -> Offers:
    """Ask for each value of ``questions``, then for each of ``pairs`` of dimensions, near the simplest case.

    ``left_out``: values that this run does not ask for.

    Raises:
        Unsupported: the decoder declines the simplest case, and so all of them.
    """
    values: Values = {
        name: tuple(value for value in each.values if value not in left_out.get(name, ()))
        for name, each in dimensions.items()
    }
    simplest = {name: each[0] for name, each in values.items()}
    declined: dict[str, str] = {}
    with suppress(AuditRefutedError):  # the array shows what is wrong
        runner.decode(History(simplest), 0)

    def is_declined(chosen: Mapping[str, str]) -> bool:
        case = _complete(chosen, simplest, values, constraints)
        if case is None:
            return False
        try:
            runner.decode(History(case), 0)
        except Unsupported as refusal:
            declined[" with ".join(f"{name} {value}" for name, value in chosen.items())] = str(refusal)
            return True
        except Exception:  # the decoder offers it, and the array shows what is wrong
            return False
        return False

    for name in questions:
        refused = set[str]()
        for value in reversed(values[name]):
            if value == simplest[name] or value in NEVER_DECLINED:
                continue
            if is_declined({name: value}):
                refused.add(value)
            elif name in ASCENDING:  # fewer are offered, too
                break
        values[name] = tuple(value for value in values[name] if value not in refused)
    offered = list[Constraint]()
    for one, other in pairs:
        beside = product(values[one][1:], values[other][1:])
        if excluded := frozenset(each for each in beside if is_declined(dict(zip((one, other), each, strict=True)))):
            offered.append(Constraint((one, other), NoneOf(excluded), "the decoder declines it"))
    return Offers(values, (*constraints, *offered), declined)


def _complete(
    chosen: Mapping[str, str], simplest: Case, values: Values, constraints: Sequence[Constraint]
) -> dict[str, str] | None:
    """A possible case with the ``chosen`` values, as near to ``simplest`` as constraints allow; None without one."""
    case = {**simplest, **chosen}
    free = [name for name in values if name not in chosen]
    for changed in range(3):
        for names in combinations(free, changed):
            for others in product(*(values[name] for name in names)):
                found = {**case, **dict(zip(names, others, strict=True))}
                if is_possible(found, constraints):
                    return found
    return None


@dataclass(frozen=True)
class CoveringResult:
    """The finding, and for each dimension a row: its values, pairs asked and pairs answered."""

    finding: Finding
    rows: list[dict[str, Any]]


def check_covering_cases(
    runner: CaseRunner,
    offers: Offers,
    seed: int,
    *,
    strength: int = 2,
    share: float = 1.0,
    judge_all: Callable[[], None] | None = None,
) -> CoveringResult:
    """Decode and judge a covering array of what the decoder offers.

    ``strength`` 3 covers triples. ``share``: of the cases that are decoded; pairs outside them are no gap.
    ``judge_all`` judges what only all answers together show, after the cases. After ``MOST_FAILING`` failing cases no
    more are decoded.
    """
    cases = make_covering_cases(offers.values, offers.constraints, seed, strength)
    order = np.random.default_rng(seed).permutation(len(cases))[: max(1, round(share * len(cases)))]
    # a server counts the requests of all cases, so the last ones are far beyond the 257th
    chosen = sorted(
        ((int(at), cases[at]) for at in order), key=lambda each: each[1].get("neighbours") in NEVER_DECLINED
    )
    answered: set[Pair] = set()
    declined: dict[str, str] = {}
    failed: list[tuple[int, AuditRefutedError, History]] = []
    right: tuple[int, Case] | None = None  # the last case that was answered well before the first failure
    tally = runner.tally
    decoded: list[Case] = []
    for number, case in chosen:
        decoded.append(case)
        history = History(case)
        complaint = _find_complaint(runner, history, seed + number)
        if isinstance(complaint, Unsupported):
            declined[describe_case(case, offers.values)] = str(complaint)
            continue
        answered.update(iterate_pairs(case))
        if complaint is not None:
            failed.append((number, complaint, history))
        elif not failed:
            right = number, case
        if len(failed) == MOST_FAILING:
            break
    asked = {pair for case in decoded for pair in iterate_pairs(case)}
    gaps = sorted(asked - answered)
    rows = _rows_by_dimension(offers.values, asked, answered)
    tally.live["pairs"] += len(answered)
    if gaps:
        tally.live["unanswered_pairs"] += len(gaps)
    with tally:
        if failed:
            complaint, text, tally.sample = _reduce_failure(runner, offers, seed, failed, right)
            raise AuditRefutedError(f"{len(failed)} of {len(decoded)} cases fail. {text}") from complaint
        if judge_all is not None:
            judge_all()
    finding = tally.to_finding()
    if finding.passed and gaps:
        named = "; ".join(" with ".join(f"{name} {value}" for name, value in pair) for pair in gaps[:SHOWN_GAPS])
        reason = next(iter(declined.values()))
        detail = (
            f"{len(gaps)} of {len(asked)} pairs of values were never answered, {named}: {reason} ({finding.detail})"
        )
        finding = replace(finding, passed=None, detail=detail)
    elif finding.passed:
        detail = f"{len(chosen)} cases, {len(answered)} pairs of values; {finding.detail}"
        finding = replace(finding, detail=detail)
    return CoveringResult(finding, rows)


def _find_complaint(runner: CaseRunner, history: History, seed: int) -> Unsupported | AuditRefutedError | None:
    """What is wrong with the answers to the case of ``history``, or its refusal; None if they are right."""
    try:
        runner.decode(history, seed)
    except (Unsupported, AuditRefutedError) as complaint:
        return complaint
    except Exception as error:  # the decoder's own
        return AuditRefutedError(f"{type(error).__name__}: {error}")
    try:
        runner.judge(history)
    except AuditRefutedError as complaint:
        return complaint
    return None


def _reduce_failure(
    runner: CaseRunner,
    offers: Offers,
    seed: int,
    failed: Sequence[tuple[int, AuditRefutedError, History]],
    right: tuple[int, Case] | None,
) -> tuple[AuditRefutedError, str, Mapping[str, Any]]:
    """The complaint of the simplest failing case near the first one, its text with that case, and its history.

    ``right``: a case that was answered well before. If it fails now, the decoder has died, and every simpler case would
    fail too. Then the first failing case is returned, not the simplest.
    """
    number, complaint, simplest = failed[0]
    left, name = MOST_REDUCTIONS, "Simplest case"
    if right is not None and isinstance(_find_complaint(runner, History(right[1]), seed + right[0]), AuditRefutedError):
        left, name = (
            0,
            "The decoder answers no more as it did: a case that was right before fails now. First failing case",
        )

    def fails(simpler: Case) -> bool:
        nonlocal left, complaint, simplest
        left -= 1
        if left < 0:
            return False
        history = History(simpler)
        found = _find_complaint(runner, history, seed + number)
        if found is None or isinstance(found, Unsupported):
            return False
        complaint, simplest = found, history
        return True

    reduced = reduce_case(simplest.case, offers.values, offers.constraints, fails)
    steps = "; ".join(f"{number}. {step}" for number, step in enumerate(simplest.steps, start=1))
    # of the step that the complaint is about, or the last one
    asked = [each for each in simplest.requests if complaint.step in (0, each.get("step"))]
    command = "; ".join(asked[-1].get("curl", [])) if asked else ""
    by_hand = f". By hand: {command}" if 0 < len(command) <= LONGEST_COMMAND else ""
    text = f"{complaint}. {name}: {describe_case(reduced, offers.values)}. Steps: {steps}{by_hand}"
    return complaint, text, simplest.to_json()


def describe_case(case: Case, values: Values) -> str:
    """The values of ``case`` that are not the simplest ones, in words."""
    named = [f"{name} {value}" for name, value in case.items() if value != values[name][0]]
    return ", ".join(named) or "the simplest values"


def _rows_by_dimension(values: Values, asked: set[Pair], answered: set[Pair]) -> list[dict[str, Any]]:
    def count(pairs: set[Pair], dimension: str) -> int:
        return sum(dimension in (one[0], other[0]) for one, other in pairs)

    return [
        {
            "dimension": name,
            "values": ", ".join(each),
            "pairs asked": count(asked, name),
            "pairs answered": count(answered & asked, name),
        }
        for name, each in values.items()
    ]
