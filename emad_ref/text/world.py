"""Synthetic world: documents and tasks generated from a seed, without outside text.

Documents consist of *passages*:

``charts``  a random map f over letters, then a walk whose next letter is f(x), f²(x) or f³(x) with equal
            probability (demanding: needs serial look-ups, yet stays uncertain even when they are done, so
            that no token of it is easy at any layer), then pairs x, f²(x) (two look-ups, certain once done).
``tales``   routine prose from templates.

Two corpora consist of them:

``world:premise``  charts first, tales after: uncertainty falls along a document, as EMAD assumes.
``world:mixed``    tales, charts, tales: demanding tokens anywhere.

Five tasks have a prompt with a worked answer of many tokens, so that an error of an early exit propagates:
``inventory`` (counting), ``facts`` (two hops through boxes), ``chart`` (two hops through a map), ``code`` (three named
operations, then written) and ``recall`` (a tale retold with another thing and another person).

A split has its own stream: its generator is seeded with (corpus, split, seed), so splits never share a draw. The
checksum of a task item's prompt fixes its split, and no stream repeats an item, so scored items are distinct and occur
in no other split, for any seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice

from emad_ref.errors import BadArgument
from emad_ref.text.documents import SPLITS, Documents, Split, TaskExample, split_by_checksum

NAMES = [
    "Mira", "Tom", "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn",
    "Gus", "Hana", "Ivo", "June", "Kai", "Lena", "Max", "Nora",
]  # fmt: skip
OBJECTS = ["apples", "plums", "coins", "books", "shells", "stamps", "cards", "pens"]
PLACES = ["attic", "barn", "cellar", "garden", "kitchen", "library", "office", "shed"]
COLOURS = ["red", "blue", "green", "black", "white", "yellow"]
LETTERS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]

WALK_AT_LEAST = 8
WALK_ENDS = 1 / 14  # hazard per step, so that the end of a walk is unpredictable
PAIRS_END = 1 / 4
CHANGES = (9, 11)  # changes of an inventory, with six tokens of a worked answer each
LARGEST_COUNT = 20
BOXES, OWNERS = 4, 5  # owners of a task of facts, with a dozen tokens of a worked answer each
TASK_LETTERS = (12, 14)  # letters of a task's map, with five tokens of a worked answer each
CODE_CONSTANTS = 20

Map = dict[str, str]


# ---------------------------------------------------------------- charts: the demanding passage


def generate_chart_map(rng: random.Random, least: int = 5, most: int = 8) -> Map:
    """A map on ``least``–``most`` letters in which x, f(x), f²(x), f³(x) are four different letters for every x.

    A cycle of length ≥ 4 with the other letters attached to it guarantees that; a plain permutation would make the
    last entry of the list predictable, hence easy.
    """
    letters = rng.sample(LETTERS, rng.randint(least, most))
    cycle = letters[: rng.randint(4, len(letters))]
    image = {x: cycle[(i + 1) % len(cycle)] for i, x in enumerate(cycle)}
    for i in range(len(cycle), len(letters)):
        image[letters[i]] = rng.choice(letters[:i])
    return image


def follow_map(image: Map, start: str, times: int) -> str:
    for _ in range(times):
        start = image[start]
    return start


def format_map_entries(rng: random.Random, image: Map) -> str:
    pairs = list(image.items())
    rng.shuffle(pairs)
    return "".join(f" {x} {y.upper()}" for x, y in pairs)


def generate_walk_text(rng: random.Random, image: Map) -> str:
    at = rng.choice(list(image))
    steps = [at]
    while len(steps) < WALK_AT_LEAST or rng.random() > WALK_ENDS:
        at = follow_map(image, at, rng.randint(1, 3))
        steps.append(at)
    return "".join(f" {x}" for x in steps)


def format_two_hop_pair(image: Map, start: str) -> str:
    return f" {start} {follow_map(image, start, 2)}"


def generate_two_hop_text(rng: random.Random, image: Map) -> str:
    letters = list(image)
    pairs = [format_two_hop_pair(image, rng.choice(letters))]
    while rng.random() > PAIRS_END:
        pairs.append(format_two_hop_pair(image, rng.choice(letters)))
    return "".join(pairs)


def generate_chart_passage(rng: random.Random) -> str:
    image = generate_chart_map(rng)
    return f"{format_map_entries(rng, image)} ?{generate_walk_text(rng, image)} !{generate_two_hop_text(rng, image)}\n"


# ---------------------------------------------------------------- routine prose


def generate_meeting_tale(rng: random.Random) -> str:
    (n, m), (p, q) = rng.sample(NAMES, 2), rng.sample(PLACES, 2)
    return f"{format_meeting_tale(n, m, rng.choice(OBJECTS), rng.choice(COLOURS), p, q)}\n"


def format_meeting_tale(n: str, m: str, o: str, c: str, p: str, q: str) -> str:
    """A sentence: ``n`` met ``m`` in ``p``, got a thing ``o`` out of a bag of colour ``c``, and put it in ``q``."""
    return (
        f"In the morning {n} went to the {p} and met {m}. {m} was carrying some {o} in a {c} bag. "
        f"{n} asked {m} for the {o}, and {m} gave {n} the {o}. Then {n} went from the {p} to the {q}. "
        f"In the evening {n} put the {o} in the {q} and said goodbye to {m}."
    )


def generate_cleaning_tale(rng: random.Random) -> str:
    (n, m), p = rng.sample(NAMES, 2), rng.choice(PLACES)
    o, c = rng.choice(OBJECTS), rng.choice(COLOURS)
    return (
        f"On that day {n} and {m} were cleaning the {p}. Under a {c} cloth {n} found the old {o}. "
        f'"Look at the {o}," said {n} to {m}. {m} took the {c} cloth and the {o} out of the {p}. '
        f"When the {p} was clean, {m} thanked {n} and both went home.\n"
    )


TALES: tuple[Callable[[random.Random], str], ...] = (generate_meeting_tale, generate_cleaning_tale)


def generate_tale(rng: random.Random) -> str:
    return rng.choice(TALES)(rng)


# ---------------------------------------------------------------- tasks: a prompt and its worked answer
# ``guess`` is the accuracy of drawing every required symbol from the possible ones, with the form of the answer known;
# copied parts (names in a program, a tale) leave nothing to guess.


def generate_inventory_example(rng: random.Random) -> TaskExample:
    """An example with nine to eleven changes of a count; the answer works them one by one."""
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    amount, changes = rng.randint(1, 9), rng.randint(*CHANGES)
    story, chain = f"{name} has {amount} {thing}.", ""
    for _ in range(changes):
        gains = amount < 2 or (rng.random() < 0.55 and amount + 9 <= LARGEST_COUNT)
        step = rng.randint(1, 9) if gains else rng.randint(1, min(9, amount - 1))
        after = amount + step if gains else amount - step
        story += f" {name} {'finds' if gains else 'loses'} {step} {thing}."
        chain += f" {amount} {'+' if gains else '-'} {step} = {after}."
        amount = after
    answer = f"{chain} Answer: {amount}.\n"
    return TaskExample("inventory", f"{story} How many {thing} now?", answer, "exact", guess=LARGEST_COUNT**-changes)


def generate_facts_example(rng: random.Random) -> TaskExample:
    """An example with five keys, each in a box, and each box in a place; the answer gives both, key by key.

    Facts come in pairs, in the answer's order: with words between name and box, two hops stayed at guessing after an
    hour of training.
    """
    colours, places, names = rng.sample(COLOURS, BOXES), rng.sample(PLACES, BOXES), rng.sample(NAMES, OWNERS)
    place_of = dict(zip(colours, places, strict=True))
    box_of = {name: rng.choice(colours) for name in names}
    stated = [f"The {c} {p} box." for c, p in place_of.items()] + [f"The {n} {c} key." for n, c in box_of.items()]
    rng.shuffle(stated)
    owners = rng.sample(names, OWNERS)
    answer = "".join(f" The {n} {box_of[n]} key is in the {box_of[n]} {place_of[box_of[n]]} box." for n in owners)
    return TaskExample(
        "facts", f"{' '.join(stated)} Where are {', '.join(owners)}?", f"{answer}\n", "exact", guess=BOXES**-OWNERS
    )


def generate_chart_example(rng: random.Random) -> TaskExample:
    """An example with two look-ups in a random map for each of its letters in any order: x F, then f(x) and f(f(x))."""
    image = generate_chart_map(rng, *TASK_LETTERS)
    letters = rng.sample(list(image), len(image))
    worked = "".join(f" {x} {image[x].upper()} {image[x]} {follow_map(image, x, 2).upper()}." for x in letters)
    prompt = f"{format_map_entries(rng, image)} = {' '.join(letters)}:"
    return TaskExample("chart", prompt, f"{worked}\n", "exact", guess=len(image) ** (-2 * len(image)))


OPERATORS = {"add": "+", "sub": "-", "mul": "*"}


def generate_code_example(rng: random.Random) -> TaskExample:
    """An example with a function named after its three operations; the answer is the returned expression."""
    names = rng.sample(list(OPERATORS), len(OPERATORS))
    constants = [rng.randint(1, CODE_CONSTANTS) for _ in names]
    body, x = "x", rng.randint(1, 9)
    value = x
    for name, constant in zip(names, constants, strict=True):
        body = f"({body} {OPERATORS[name]} {constant})"
        value = {"add": value + constant, "sub": value - constant, "mul": value * constant}[name]
    function = "_".join(f"{name}_{constant}" for name, constant in zip(names, constants, strict=True))
    prompt, check = f"def {function}(x):\n    return", f"assert {function}({x}) == {value}\n"
    return TaskExample("code", prompt, f" {body}\n", "runs", check=check)


def generate_tale_retelling_example(rng: random.Random) -> TaskExample:
    """An example with a tale, to retell with another thing and another person."""
    (n, m, other), (p, q) = rng.sample(NAMES, 3), rng.sample(PLACES, 2)
    (o, instead), c = rng.sample(OBJECTS, 2), rng.choice(COLOURS)
    prompt = f"{format_meeting_tale(n, m, o, c, p, q)} Now {instead} and {other}:"
    return TaskExample("recall", prompt, f" {format_meeting_tale(n, other, instead, c, p, q)}\n", "exact")


TASKS: dict[str, Callable[[random.Random], TaskExample]] = {
    "inventory": generate_inventory_example,
    "facts": generate_facts_example,
    "chart": generate_chart_example,
    "code": generate_code_example,
    "recall": generate_tale_retelling_example,
}


# ---------------------------------------------------------------- corpora and splits


def generate_chart_then_tales_document(rng: random.Random) -> str:
    return generate_chart_passage(rng) + "".join(generate_tale(rng) for _ in range(rng.randint(1, 2)))


def generate_mixed_document(rng: random.Random) -> str:
    return generate_tale(rng) + generate_chart_passage(rng) + generate_tale(rng)


# Training text of the bundled models, in shares of documents: the first three of passages, the others of tasks.
PASSAGES = ((0.24, generate_chart_then_tales_document), (0.10, generate_chart_passage), (0.10, generate_mixed_document))
SHARES = {"inventory": 0.16, "facts": 0.14, "chart": 0.12, "code": 0.06, "recall": 0.08}


def generate_training_mixture(split: Split, rng: random.Random) -> Documents:
    """Training text of the bundled models: both corpora and the tasks in fixed shares."""
    passages = [_each(maker)(split, rng) for _, maker in PASSAGES]
    worked = [(item.prompt + item.answer for item in _items(task, split, rng)) for task in SHARES]
    weights = [*(share for share, _ in PASSAGES), *SHARES.values()]
    while True:
        yield next(rng.choices([*passages, *worked], weights)[0])


def _each(maker: Callable[[random.Random], str]) -> Callable[[Split, random.Random], Documents]:
    return lambda split, rng: (maker(rng) for _ in count())


CORPORA: dict[str, Callable[[Split, random.Random], Documents]] = {
    "world:premise": _each(generate_chart_then_tales_document),
    "world:mixed": _each(generate_mixed_document),
    "world:curriculum": generate_training_mixture,
}


def _stream(kind: str, split: Split, seed: int) -> random.Random:
    if split not in SPLITS:
        raise BadArgument("split", split, f"one of {', '.join(SPLITS)}")
    return random.Random(f"{kind}/{split}/{seed}")


def generate_documents(corpus: str, split: Split, seed: int = 0) -> Documents:
    """Endless documents of a corpus; the same (corpus, split, seed) gives the same documents.

    Raises:
        BadArgument: unknown corpus or split.
    """
    if corpus not in CORPORA:
        raise BadArgument("corpus", corpus, f"one of {', '.join(CORPORA)}")
    return CORPORA[corpus](split, _stream(corpus, split, seed))


def generate_examples(task: str, split: Split, limit: int, seed: int = 0) -> Iterator[TaskExample]:
    """``limit`` distinct examples of a task; the same (task, split, seed) gives the same examples."""
    if task not in TASKS:
        raise BadArgument("task", task, f"one of {', '.join(TASKS)}")
    return islice(_items(task, split, _stream(task, split, seed)), limit)


def _items(task: str, split: Split, rng: random.Random) -> Iterator[TaskExample]:
    """Endless distinct items of a split."""
    prompts: set[str] = set()
    while True:
        item = TASKS[task](rng)
        if split_by_checksum(item.prompt) == split and item.prompt not in prompts:
            prompts.add(item.prompt)
            yield item
