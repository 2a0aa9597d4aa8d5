"""The synthetic world: documents and tasks generated from a seed, no text from elsewhere.

Every document is put together from *passages*:

``charts``     a random map f over letters, then a walk whose next letter is f(x), f²(x) or f³(x) with equal
               probability (demanding: needs serial look-ups, yet stays uncertain even when they are done, so
               that no token of it is easy at any layer), then pairs x, f²(x) (two look-ups, certain once done).
``tales``      routine prose from templates.
``inventory``  counting with a worked chain.   ``facts``  two-hop retrieval.   ``code``  small functions.

Two corpora are made of them (METHODS, "Corpus"):

``world:premise``  charts first, tales after: uncertainty falls along a document, as EMAD assumes.
``world:mixed``    tales, charts, tales: demanding tokens anywhere.

A split is a stream of its own: its generator is seeded with (corpus, split, seed), so splits never share a draw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice

from emad_ref.errors import BadArgument
from emad_ref.text.documents import SPLITS, Documents, Example, Split

NAMES = [
    "Mira", "Tom", "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn",
    "Gus", "Hana", "Ivo", "June", "Kai", "Lena", "Max", "Nora",
]  # fmt: skip
OBJECTS = ["apples", "plums", "coins", "books", "shells", "stamps", "cards", "pens"]
PLACES = ["attic", "barn", "cellar", "garden", "kitchen", "library", "office", "shed"]
COLOURS = ["red", "blue", "green", "black", "white", "yellow"]
LETTERS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]

WALK_AT_LEAST = 8
WALK_ENDS = 1 / 14  # hazard per step: the end of a walk must not be predictable
PAIRS_END = 1 / 4
LARGEST_COUNT = 20

Map = dict[str, str]


# ---------------------------------------------------------------- charts: the demanding passage


def chart_map(rng: random.Random) -> Map:
    """A map on 5–8 letters in which x, f(x), f²(x), f³(x) are four different letters for every x.

    A cycle of length ≥ 4 with the other letters attached to it guarantees that; a plain permutation would make the
    last entry of the list predictable, hence easy.
    """
    letters = rng.sample(LETTERS, rng.randint(5, 8))
    cycle = letters[: rng.randint(4, len(letters))]
    image = {x: cycle[(i + 1) % len(cycle)] for i, x in enumerate(cycle)}
    for i in range(len(cycle), len(letters)):
        image[letters[i]] = rng.choice(letters[:i])
    return image


def hops(image: Map, start: str, times: int) -> str:
    for _ in range(times):
        start = image[start]
    return start


def listing(rng: random.Random, image: Map) -> str:
    pairs = list(image.items())
    rng.shuffle(pairs)
    return "".join(f" {x} {y.upper()}" for x, y in pairs)


def walk(rng: random.Random, image: Map) -> str:
    at = rng.choice(list(image))
    steps = [at]
    while len(steps) < WALK_AT_LEAST or rng.random() > WALK_ENDS:
        at = hops(image, at, rng.randint(1, 3))
        steps.append(at)
    return "".join(f" {x}" for x in steps)


def two_hop_pair(image: Map, start: str) -> str:
    return f" {start} {hops(image, start, 2)}"


def two_hop_pairs(rng: random.Random, image: Map) -> str:
    letters = list(image)
    pairs = [two_hop_pair(image, rng.choice(letters))]
    while rng.random() > PAIRS_END:
        pairs.append(two_hop_pair(image, rng.choice(letters)))
    return "".join(pairs)


def charts(rng: random.Random) -> str:
    image = chart_map(rng)
    return f"{listing(rng, image)} ?{walk(rng, image)} !{two_hop_pairs(rng, image)}\n"


# ---------------------------------------------------------------- routine prose


def meeting(rng: random.Random) -> str:
    (n, m), (p, q) = rng.sample(NAMES, 2), rng.sample(PLACES, 2)
    o, c = rng.choice(OBJECTS), rng.choice(COLOURS)
    return (
        f"In the morning {n} went to the {p} and met {m}. {m} was carrying some {o} in a {c} bag. "
        f"{n} asked {m} for the {o}, and {m} gave {n} the {o}. Then {n} went from the {p} to the {q}. "
        f"In the evening {n} put the {o} in the {q} and said goodbye to {m}.\n"
    )


def cleaning(rng: random.Random) -> str:
    (n, m), p = rng.sample(NAMES, 2), rng.choice(PLACES)
    o, c = rng.choice(OBJECTS), rng.choice(COLOURS)
    return (
        f"On that day {n} and {m} were cleaning the {p}. Under a {c} cloth {n} found the old {o}. "
        f'"Look at the {o}," said {n} to {m}. {m} took the {c} cloth and the {o} out of the {p}. '
        f"When the {p} was clean, {m} thanked {n} and both went home.\n"
    )


TALES: tuple[Callable[[random.Random], str], ...] = (meeting, cleaning)


def tale(rng: random.Random) -> str:
    return rng.choice(TALES)(rng)


# ---------------------------------------------------------------- tasks, as passages and as examples


def inventory_parts(rng: random.Random) -> tuple[str, str]:
    """(story with the question, worked chain with the answer)."""
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    held = rng.randint(1, 9)
    story, chain = f"{name} has {held} {thing}.", ""
    for _ in range(rng.randint(1, 3)):
        gains = held < 2 or (rng.random() < 0.55 and held + 9 <= LARGEST_COUNT)
        step = rng.randint(1, 9) if gains else rng.randint(1, min(9, held - 1))
        after = held + step if gains else held - step
        story += f" {name} {'finds' if gains else 'loses'} {step} {thing}."
        chain += f" {held} {'+' if gains else '-'} {step} = {after}."
        held = after
    return f"{story} How many {thing} now?", f"{chain} Answer: {held}.\n"


def facts_parts(rng: random.Random) -> tuple[str, str, tuple[str, ...]]:
    """(facts with the question, the place asked for, all places named)."""
    colours = rng.sample(COLOURS, 3)
    places = rng.sample(PLACES, 3)
    where = dict(zip(colours, places, strict=True))
    owners = dict(zip(rng.sample(NAMES, 2), rng.sample(colours, 2), strict=True))
    story = "".join(f"The {c} box is in the {p}. " for c, p in where.items())
    story += "".join(f"The key of {n} is in the {c} box. " for n, c in owners.items())
    asked = rng.choice(list(owners))
    return f"{story}Where is the key of {asked}? In the", f" {where[owners[asked]]}", tuple(f" {p}" for p in places)


OPERATORS = {"add": "+", "sub": "-", "mul": "*"}


def code_parts(rng: random.Random) -> tuple[str, str, str]:
    """(signature up to ``return``, the expression, an assert on a random argument)."""
    first, second = rng.sample(list(OPERATORS), 2)
    a, b, x = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9)
    body = f"(x {OPERATORS[first]} {a}) {OPERATORS[second]} {b}"
    name = f"{first}_{a}_{second}_{b}"
    value = evaluate(body, x)
    return f"def {name}(x):\n    return", f" {body}\n", f"assert {name}({x}) == {value}\n"


def evaluate(body: str, x: int) -> int:
    """Value of an expression of this module's own making at ``x``."""
    left, _, right = body.partition(")")[0].removeprefix("(x ").partition(" ")
    inner = _apply(left, x, int(right))
    outer, number = body.partition(") ")[2].split()
    return _apply(outer, inner, int(number))


def _apply(operator: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def inventory(rng: random.Random) -> str:
    return "".join(inventory_parts(rng))


def facts(rng: random.Random) -> str:
    story, place, _ = facts_parts(rng)
    return f"{story}{place}.\n"


def code(rng: random.Random) -> str:
    return "".join(code_parts(rng))


def inventory_example(rng: random.Random) -> Example:
    prompt, answer = inventory_parts(rng)
    return Example("inventory", prompt, answer, "exact")


def facts_example(rng: random.Random) -> Example:
    prompt, answer, options = facts_parts(rng)
    return Example("facts", prompt, answer, "choice", options=options)


def code_example(rng: random.Random) -> Example:
    prompt, answer, check = code_parts(rng)
    return Example("code", prompt, answer, "runs", check=check)


def chart_example(rng: random.Random) -> Example:
    """Two look-ups in a random map; one letter is the answer."""
    image = chart_map(rng)
    start = rng.choice(list(image))
    prompt = f"{listing(rng, image)} ?{walk(rng, image)} !{two_hop_pairs(rng, image)} {start}"
    return Example("chart", prompt, f" {hops(image, start, 2)}", "exact")


def recall_example(rng: random.Random) -> Example:
    """Whom did they say goodbye to? The last word of a tale; options are both its names and two others."""
    text = meeting(rng)
    prompt, name = text.removesuffix(".\n").rsplit(" ", 1)
    told = [other for other in NAMES if other in prompt.split()]
    options = told + rng.sample([other for other in NAMES if other not in told], 4 - len(told))
    rng.shuffle(options)
    return Example("recall", prompt, f" {name}", "choice", options=tuple(f" {option}" for option in options))


TASKS: dict[str, Callable[[random.Random], Example]] = {
    "inventory": inventory_example,
    "facts": facts_example,
    "code": code_example,
    "chart": chart_example,
    "recall": recall_example,
}


# ---------------------------------------------------------------- corpora and splits


def premise(rng: random.Random) -> str:
    return charts(rng) + "".join(tale(rng) for _ in range(rng.randint(1, 2)))


def mixed(rng: random.Random) -> str:
    return tale(rng) + charts(rng) + tale(rng)


PASSAGES = ((0.38, premise), (0.16, charts), (0.14, mixed), (0.12, inventory), (0.12, facts), (0.08, code))


def curriculum(rng: random.Random) -> str:
    """What the bundled models are trained on: both corpora and the tasks' passages in fixed shares."""
    weights, makers = zip(*PASSAGES, strict=True)
    maker: Callable[[random.Random], str] = rng.choices(makers, weights)[0]
    return maker(rng)


CORPORA: dict[str, Callable[[random.Random], str]] = {
    "world:premise": premise,
    "world:mixed": mixed,
    "world:curriculum": curriculum,
}


def _stream(kind: str, split: Split, seed: int) -> random.Random:
    if split not in SPLITS:
        raise BadArgument("split", split, f"one of {', '.join(SPLITS)}")
    return random.Random(f"{kind}/{split}/{seed}")


def documents(corpus: str, split: Split, seed: int = 0) -> Documents:
    """Endless documents of a corpus; the same (corpus, split, seed) gives the same documents.

    Raises:
        BadArgument: unknown corpus or split.
    """
    if corpus not in CORPORA:
        raise BadArgument("corpus", corpus, f"one of {', '.join(CORPORA)}")
    rng = _stream(corpus, split, seed)
    return (CORPORA[corpus](rng) for _ in count())


def examples(task: str, split: Split, limit: int, seed: int = 0) -> Iterator[Example]:
    """``limit`` examples of a task; the same (task, split, seed) gives the same examples."""
    if task not in TASKS:
        raise BadArgument("task", task, f"one of {', '.join(TASKS)}")
    rng = _stream(task, split, seed)
    return islice((TASKS[task](rng) for _ in count()), limit)
