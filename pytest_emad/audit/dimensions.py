"""The dimensions of requests and of sessions, and covering arrays over them.

A defect that shows only for two values together, such as a stream at an exit point, is silent in lists of checks that
vary one dimension each. A *covering array* (Kuhn, Wallace and Gallo 2004) is a short list of *cases*, one value of
every dimension each, in which every pair of values occurs. Every run decodes such an array of requests and one of
sessions (``request_cases``, ``session_cases``).

The values of a dimension begin with the simplest one: a failing case is reduced towards it. A constraint excludes
values that have no meaning together. What the decoder does not offer is settled before (``covering.settle_offers``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, product

import numpy as np
from covertable import make, sorters

Case = Mapping[str, str]  # dimension → value
Pair = tuple[tuple[str, str], tuple[str, str]]  # two of (dimension, value), by name


@dataclass(frozen=True)
class Dimension:
    """``values`` of one property of a request or session, the simplest first; ``about``: what they are."""

    about: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Constraint:
    """``holds(*values)``: whether values of ``fields`` have a meaning together; ``because``: why others have none."""

    fields: tuple[str, ...]
    holds: Callable[..., bool]
    because: str


SIMPLEST_WEIGHT = 1.5  # how much more often the simplest value of a dimension is drawn than each other
COSTLY_WEIGHTS = {("rows", "17"): 0.7, ("rows", "33"): 0.4}  # values that are drawn less often
FEW_ROWS, FEW_TOKENS = 9, 8  # many of both at once are asked for plainly
ANY_PLACE = ("strided", "equal", "prefix", "across a block")  # kinds of prompts of any length
FULL_PROMPTS = ("window − 1", "window")

_SHARED = {
    "point": Dimension(
        "the operating point: full depth; entropy exits; exits that are watched and never taken; the first layers "
        "alone; thresholds by position; free depth with eager and with deferred K/V; copied states; another signal",
        ("full", "probing", "watching", "truncated", "binned", "eager", "deferred", "copying", "top2_gap"),
    ),
    "ceiling": Dimension("whether the point's ceiling is the last layer", ("L", "below")),
    "rows": Dimension("rows of the batch", ("1", "2", "5", "9", "17", "33")),
    "prompt": Dimension(
        "the longest prompt: its length against K/V blocks of 16 and against the window, of which new tokens need the "
        "rest; a strided array; equal to another row's and an earlier request's, or sharing a beginning with theirs",
        ("within a block", "one token", "across a block", "strided", "equal", "prefix", "window − 1", "window"),
    ),
    "place": Dimension("where the first decided tokens lie", ("start", "position 96", "window's end")),
    "neighbours": Dimension(
        "what else the decoder holds or has done: another open session, another open decoder, one that was closed, a "
        "request that raised, 64 open sessions, 256 answered requests",
        ("none", "session", "decoder", "closed", "raised", "65th session", "257th request"),
    ),
    "arrays": Dimension("what the caller does with its arrays afterwards", ("kept", "overwritten")),
}

REQUESTS: dict[str, Dimension] = {
    "call": Dimension("how the request is sent", ("generate", "stream", "at once")),
    **_SHARED,
    "new": Dimension("new tokens", ("8", "1", "33", "70")),
    "temperature": Dimension("temperature of the draw", ("0", "2", "1", "just off 1", "0.07")),
    "seed": Dimension(
        "what a second decoder is opened with: the same seed, one apart by 2³⁰, or by 1, which answers in between; or "
        "both with seed 0",
        ("equal", "apart", "between", "zero"),
    ),
    "stops": Dimension(
        "the stop set: none, one id that ends a row, the first new token, an id of the prompt, 21 ids, some of which "
        "agree in their low 8 or 16 bits with an emitted one",
        ("none", "one", "first", "in the prompt", "21"),
    ),
}

SESSIONS: dict[str, Dimension] = {
    **_SHARED,
    "feed": Dimension("tokens a feed", ("1", "3", "8", "20")),
    "new": Dimension("tokens fed", ("8", "1", "0", "33", "70")),
    "rollback": Dimension(
        "tokens rolled back, after which other tokens follow",
        ("none", "1–8", "more than 16", "into the prompt", "all but one"),
    ),
    "depths": Dimension(
        "forced depths: none, falling, all at the ceiling, and refused ones of one row: outside 1 … cap, or rising "
        "within a feed",
        ("none", "falling", "ceiling", "above", "rising"),
    ),
    "shown": Dimension("tokens of a feed whose logits are asked for", ("all", "last", "none")),
    "commit": Dimension(
        "tokens committed before more are fed; after a part of them a rollback to it follows", ("none", "all", "some")
    ),
    "drop": Dimension("rows dropped half-way", ("none", "no row", "some")),
    "temperature": Dimension("temperature of the decoder's draws, which its sessions do not make", ("0", "2")),
}

# forced depths at points under which a later token may run deeper
_ADMISSIBLE = {
    "eager": ("none", "falling", "ceiling", "above"),
    "deferred": ("none", "falling", "ceiling", "above"),
    "copying": ("none", "ceiling", "above"),
}
_COUNTED = ("65th session", "257th request")  # neighbours of which there are many
_COUNTED_AT = ("full", "probing", "deferred")  # points under which many are held

_SHARED_CONSTRAINTS = (
    Constraint(
        ("neighbours", "rows"),
        lambda neighbours, rows: neighbours not in _COUNTED or int(rows) <= 5,
        "what a decoder counts does not depend on the rows that follow",
    ),
    Constraint(
        ("neighbours", "new"),
        lambda neighbours, new: neighbours not in _COUNTED or int(new) <= 8,
        "what a decoder counts does not depend on the tokens that follow",
    ),
    Constraint(
        ("neighbours", "place"),
        lambda neighbours, place: neighbours not in _COUNTED or place == "start",
        "what a decoder counts does not depend on the length of the prompt that follows",
    ),
    Constraint(
        ("neighbours", "point"),
        lambda neighbours, point: neighbours not in _COUNTED or point in _COUNTED_AT,
        "what a decoder counts depends on the states that it holds, not on the rule",
    ),
    Constraint(
        ("point", "ceiling"),
        lambda point, ceiling: {"full": ceiling == "L", "truncated": ceiling == "below"}.get(point, True),
        "full depth with a lower ceiling is truncation",
    ),
    Constraint(
        ("prompt", "place"),
        lambda prompt, place: (
            (place == "window's end") if prompt in FULL_PROMPTS else prompt in ANY_PLACE or place == "start"
        ),
        "a short prompt begins the window, a full one ends it",
    ),
    Constraint(
        ("rows", "new", "neighbours"),
        lambda rows, new, neighbours: int(rows) <= FEW_ROWS or int(new) <= FEW_TOKENS or neighbours == "none",
        "many rows with many tokens cost more than they show",
    ),
    Constraint(
        ("prompt", "rows"),
        lambda prompt, rows: prompt not in FULL_PROMPTS or int(rows) <= 9,
        "many full windows cost more than they show",
    ),
)

REQUEST_CONSTRAINTS: tuple[Constraint, ...] = (
    *_SHARED_CONSTRAINTS,
    Constraint(
        ("prompt", "new"),
        lambda prompt, new: prompt not in FULL_PROMPTS or new == "1",
        "a full window has room for one",
    ),
    Constraint(
        ("rows", "new", "stops", "seed"),
        lambda rows, new, stops, seed: (
            int(rows) <= FEW_ROWS or int(new) <= FEW_TOKENS or (stops in ("none", "one") and seed == "equal")
        ),
        "many rows with many tokens cost more than they show",
    ),
    Constraint(
        ("temperature", "seed"),
        lambda temperature, seed: temperature != "0" or seed == "equal",
        "greedy tokens need no seed",
    ),
)

SESSION_CONSTRAINTS: tuple[Constraint, ...] = (
    *_SHARED_CONSTRAINTS,
    Constraint(
        ("prompt", "new"),
        lambda prompt, new: int(new) <= {"window": 0, "window − 1": 1}.get(prompt, int(new)),
        "a full window has no room",
    ),
    Constraint(
        ("point", "depths"),
        lambda point, depths: depths in _ADMISSIBLE.get(point, SESSIONS["depths"].values),
        "where depth may rise, every depth up to the ceiling is admissible, and copies of forced depths have no oracle",
    ),
    Constraint(("feed", "depths"), lambda feed, depths: depths != "rising" or feed != "1", "one token cannot rise"),
    Constraint(
        ("new", "depths"),
        lambda new, depths: int(new) >= {"none": 0, "rising": 2}.get(depths, 1),
        "a depth belongs to a token, a rise to two",
    ),
    Constraint(
        ("new", "feed"), lambda new, feed: int(feed) <= max(1, int(new)), "a feed holds no more than all tokens"
    ),
    Constraint(
        ("new", "rollback"),
        lambda new, rollback: int(new) >= {"1–8": 1, "more than 16": 17}.get(rollback, 0),
        "no more tokens can be rolled back than were fed",
    ),
    Constraint(
        ("prompt", "rollback"),
        lambda prompt, rollback: prompt != "one token" or rollback != "into the prompt",
        "one token has no inside",
    ),
    Constraint(("rows", "drop"), lambda rows, drop: drop != "some" or rows != "1", "the last row cannot be dropped"),
    Constraint(("new", "shown"), lambda new, shown: shown == "all" or new != "0", "nothing is fed"),
)


def make_covering_cases(
    values: Mapping[str, Sequence[str]], constraints: Sequence[Constraint], seed: int, strength: int = 2
) -> list[dict[str, str]]:
    """Cases in which every possible pair of ``values`` occurs (every triple, if ``strength`` is 3); seeded.

    Values that no pair needs are drawn, the rarest first: then many triples occur, too. ``covertable`` leaves the first
    value of the dimension there.
    """
    held = tuple((name, tuple(each)) for name, each in values.items())
    cases = [dict(case) for case in _make_array(held, tuple(constraints), seed, strength)]
    _draw_free_values(cases, values, constraints, np.random.default_rng(seed), strength)
    return cases


def _draw_free_values(
    cases: list[dict[str, str]],
    values: Mapping[str, Sequence[str]],
    constraints: Sequence[Constraint],
    rng: np.random.Generator,
    strength: int,
) -> None:
    """Replace values of ``cases`` whose pairs (or triples) all occur in other cases, too, by rarer possible ones."""
    covered = Counter(group for case in cases for group in combinations(sorted(case.items()), strength))
    held = Counter(item for case in cases for item in case.items())

    def groups_of(case: Case, name: str) -> list[tuple[tuple[str, str], ...]]:
        return [group for group in combinations(sorted(case.items()), strength) if (name, case[name]) in group]

    def share(name: str, value: str) -> float:
        simplest = SIMPLEST_WEIGHT if value == values[name][0] else 1
        return held[name, value] / COSTLY_WEIGHTS.get((name, value), simplest)

    for at in rng.permutation(len(cases)).tolist():
        for name in rng.permutation(list(values)).tolist():
            case = cases[at]
            groups = groups_of(case, name)
            if min(covered[group] for group in groups) == 1:
                continue
            covered.subtract(groups)
            held[name, case[name]] -= 1
            drawn = [values[name][place] for place in rng.permutation(len(values[name])).tolist()]
            possible = [value for value in drawn if is_possible({**case, name: value}, constraints)]
            cases[at] = {**case, name: min(possible, key=partial(share, name))}
            covered.update(groups_of(cases[at], name))
            held[name, cases[at][name]] += 1


@cache  # a run asks for one array, tests ask for the same one many times
def _make_array(
    values: tuple[tuple[str, tuple[str, ...]], ...], constraints: tuple[Constraint, ...], seed: int, strength: int
) -> list[dict[str, str]]:
    """The array of ``covertable``, which is asked with numbers of dimensions: it takes names apart at each look."""
    names = [name for name, _ in values]
    limits = []
    for one in constraints:
        at = [names.index(name) for name in one.fields]
        held = {group: bool(one.holds(*group)) for group in product(*(values[place][1] for place in at))}
        limits.append({"operator": "fn", "requires": at, "evaluate": _lookup(held, at)})
    factors = {number: list(each) for number, (_, each) in enumerate(values)}
    cases = make(factors, strength=strength, sorter=sorters.hash, salt=str(seed), constraints=limits)
    return [{name: case[number] for number, name in enumerate(names)} for case in cases]


def _lookup(held: Mapping[tuple[str, ...], bool], at: Sequence[int]) -> Callable[[Mapping[int, str]], bool]:
    return lambda row: held[tuple(row[place] for place in at)]


def is_possible(case: Case, constraints: Sequence[Constraint]) -> bool:
    """Whether every constraint holds for ``case``."""
    return all(one.holds(*(case[field] for field in one.fields)) for one in constraints)


def iterate_pairs(case: Case) -> Iterator[Pair]:
    """Every pair of (dimension, value) of ``case``."""
    return combinations(sorted(case.items()), 2)


def reduce_case(
    case: Case,
    values: Mapping[str, Sequence[str]],
    constraints: Sequence[Constraint],
    fails: Callable[[Case], bool],
) -> dict[str, str]:
    """The simplest case near ``case`` that still ``fails``: no single dimension of it can be simpler.

    Hypothesis does not shrink explicit examples, so this reduces a case of the array: delta debugging (Zeller 2002)
    over values in place of characters. Each pass gives every dimension its simplest value that still fails; no case is
    tried twice.
    """
    reduced, tried = dict(case), set[tuple[str, ...]]()
    while True:
        before = dict(reduced)
        for name, each in values.items():
            for value in each[: each.index(reduced[name])]:
                simpler = {**reduced, name: value}
                key = tuple(simpler.values())
                if key in tried or not is_possible(simpler, constraints):
                    continue
                tried.add(key)
                if fails(simpler):
                    reduced = simpler
                    break
        if reduced == before:
            return reduced
