"""Input → output pairs of a small world, for encoder-decoders.

``qa``        a question and a passage of four events (SQuAD in small). Every person, thing and place of the question
              has rivals of its kind in the passage, so the span must be chosen. Three kinds of question need more: two
              sentences joined (box and place), a fact outside the passage (``HOMETOWN``), or a sum. Then no word of the
              passage is the answer, and an early layer that only copies is wrong.
``summary``   two exchanges between two people; the target is their outcomes (SamSum in small), some with a sum.
``count``     two people whose things come and go; the target is a worked chain of sums for one of them.
``generate_corrupted_pairs``: span corruption (Raffel et al. 2020, §3.1.4) over the texts of the pairs and over facts.

Early exits prune a vocabulary to a few dozen tokens, so there are two hundred names, as many things and nearly as many
towns, each a single token (``training.seq2seq``). A split is a generator seeded with (task, split, seed). In addition
the checksum of every text fixes its split. This module is independent of tokens and models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Literal

from emad_ref.errors import BadArgument
from emad_ref.text.documents import SPLITS, Split, split_by_checksum


def _compounds(first: str, second: str) -> tuple[str, ...]:
    """Every word of ``first`` joined to every one of ``second``."""
    return tuple(a + b for a, b in product(first.split(), second.split()))


NAMES = _compounds(
    "Al Bel Cor Dan El Far Gal Hel Il Jor Kal Lor Mar Nor Ol Per Quin Ral Sel Tor Ul Val Wil Yor Zel",
    "a an en ia in is o us",
)
THINGS = _compounds(
    "oak pine tin brass clay glass silk wool stone steel horn ivory paper copper amber wax reed cane",
    "boxes bowls combs cups dolls drums flutes forks keys lamps masks rings",
)
TOWNS = _compounds(
    "Ash Birch Bridge Cold Crow East Elm Fern Fox Long Moor North",
    "bury dale field ford gate ham hill ley mere mill ton wick",
)
PLACES = (
    "attic", "barn", "cellar", "chapel", "dairy", "forge", "garden", "hall", "harbour", "inn", "kitchen", "library",
    "market", "meadow", "office", "orchard", "pantry", "quarry", "school", "shed", "stable", "tower", "vault", "yard",
)  # fmt: skip
COLOURS = (
    "amber", "black", "blue", "brown", "cream", "crimson", "gold", "green", "grey", "indigo", "lilac", "olive",
    "orange", "pink", "purple", "red", "rust", "scarlet", "silver", "teal", "umber", "violet", "white", "yellow",
)  # fmt: skip
LARGEST_NUMBER = 99  # the largest number that is a word

_home_rng = random.Random("homes")
HOMETOWN: dict[str, str] = {name: _home_rng.choice(TOWNS) for name in NAMES}


TextTask = Literal["qa", "summary", "count"]

SENTINELS = tuple(f"<extra_id_{i}>" for i in range(15))
CORRUPTED_SHARE = 0.25  # share of words; T5 has 0.15, but short texts leave too little to learn from
SPAN_MEAN = 2.5  # words per span
WINDOW = 48  # words of a text per pair
FACTS_SHARE = 0.3  # share of facts (home towns) among corrupted texts; the rest are texts of the pairs
FACTS = 6  # people in one text of facts

TIMES = ("In the morning", "In the evening", "On that day")
CONTAINERS = ("box", "bag")
STEPS = (2, 4)  # least and most sums of one person's chain
STEP, LEAST_HELD, MOST_HELD = 9, 10, 60  # largest change at once; range of the first amount
ORDER = ("First", "Then", "Next", "Last")  # words that identify the steps of a chain
SUMS_SHARE = 0.3  # share of sums among questions; with equally likely kinds it would be one in ten


@dataclass(frozen=True)
class SourceTarget:
    """Input of a model, its training target, and the right answers (``target`` is one of them).

    ``text``: the passage, dialogue or story alone. Pairs about one text are not independent of one another.
    """

    task: str
    source: str
    target: str
    answers: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class _PairText:
    """A text, a question about it (empty where the task itself is the question) and what to write."""

    text: str
    question: str
    target: str


# ---------------------------------------------------------------- question → answer

# Kinds of event: sentence, (question, answer) pairs, and those with a sum as answer. The question about the place of a
# stored thing needs two sentences.
_EVENTS = (
    (
        "{time} {name} went to the {place}.",
        (
            ("Where did {name} go?", "the {place}"),
            ("Who went to the {place}?", "{name}"),
            ("When did {name} go?", "{time}"),
            ("Where is the one who went to the {place} from?", "{home}"),
        ),
        (),
    ),
    (
        "{name} found {held} {colour} {thing} in the {place} and {step} more.",
        (
            ("What did {name} find?", "{held} {colour} {thing}"),
            ("Where were the {colour} {thing}?", "the {place}"),
            ("Who found some {thing}?", "{name}"),
            ("Where is the one who found some {thing} from?", "{home}"),
        ),
        (("How many {thing} did {name} find?", "{more}"),),
    ),
    (
        "{name} had {held} {colour} {thing} and gave {other} {step}.",
        (
            ("What had {name}?", "{held} {colour} {thing}"),
            ("Who gave the {thing}?", "{name}"),
            ("Who took the {colour} {thing}?", "{other}"),
            ("Where is the one who gave the {thing} from?", "{home}"),
            ("Where is the one who took the {thing} from?", "{other_home}"),
        ),
        (("How many {thing} has {name} now?", "{left}"),),
    ),
    (
        "{name} put the {thing} in the {colour} {container}. The {colour} {container} is in the {place}.",
        (
            ("What did {name} put?", "the {thing}"),
            ("Where did {name} put the {thing}?", "the {colour} {container}"),
            ("In what place are the {thing}?", "the {place}"),
            ("Where is the one who put the {thing} from?", "{home}"),
        ),
        (),
    ),
)


def _question(rng: random.Random) -> _PairText:
    """Each kind of event once, in any order, and one question about one of them.

    No two events of a passage share a person, thing, colour or place, except the person who receives something.
    """
    kinds = rng.sample(_EVENTS, len(_EVENTS))
    people = rng.sample(NAMES, 4)
    subjects = zip(people, rng.sample(THINGS, 4), rng.sample(COLOURS, 4), rng.sample(PLACES, 4), strict=True)
    sentences, plain, sums = [], [], []
    for (sentence, questions, added), (name, thing, colour, place) in zip(kinds, subjects, strict=True):
        other = rng.choice([other for other in people if other != name])
        roles: dict[str, Any] = {"name": name, "other": other, "thing": thing, "colour": colour, "place": place}
        roles |= {"time": rng.choice(TIMES), "container": rng.choice(CONTAINERS)}
        roles |= {"home": HOMETOWN[name], "other_home": HOMETOWN[other], **_amounts(rng)}
        sentences.append(sentence.format_map(roles))
        plain.append([(question.format_map(roles), answer.format_map(roles)) for question, answer in questions])
        if added:
            sums.append([(question.format_map(roles), answer.format_map(roles)) for question, answer in added])
    question, answer = rng.choice(rng.choice(sums if rng.random() < SUMS_SHARE else plain))
    return _PairText(" ".join(sentences), question, answer)


def _amounts(rng: random.Random) -> dict[str, int]:
    """The number of things at first, the change, and the number afterwards."""
    at_first, step = rng.randint(LEAST_HELD, MOST_HELD), rng.randint(1, STEP)
    return {"held": at_first, "step": step, "more": at_first + step, "left": at_first - step}


# ---------------------------------------------------------------- dialogue → summary

# Kinds of exchange: turns, spoken in alternation, the first by ``name``, each in one of several wordings; the outcome.
_DIALOGUES = (
    (
        (
            (
                "Can you take {held} {thing} to the {place}, and {step} more?",
                "Take {held} {thing} and {step} more to the {place} for me.",
            ),
            ("Sure, {time}.", "I will, {time}."),
        ),
        "{name} asked {other} to take {more} {thing} to the {place}. {other} will, {time}.",
    ),
    (
        (
            ("Can you take the {thing} to the {place}?", "Take the {thing} to the {place} for me."),
            ("No, I am cleaning the {instead}.", "Not now, I am in the {instead}."),
        ),
        "{name} asked {other} to take the {thing} to the {place}. {other} is in the {instead}.",
    ),
    (
        (
            ("Can we meet in the {place}?", "Will you go to the {place} with me?"),
            ("No, in the {instead}.", "The {place} is not clean. In the {instead}?"),
            ("Sure, {time}.", "Good, {time} in the {instead}."),
            ("Good.",),
        ),
        "{name} and {other} will meet in the {instead} {time}.",
    ),
    (
        (
            ("I lost the {colour} {thing}.", "Where are the {colour} {thing}? I lost them."),
            ("Look in the {place}.", "I found some {thing} in the {place}."),
            ("Thank you, {other}!",),
            ("Sure.",),
        ),
        "{name} lost the {colour} {thing}. {other} said that the {thing} were in the {place}.",
    ),
    (
        (
            ("I have {held} {thing}. Can I give you {step}?", "Take {step} of my {held} {thing}."),
            ("Thank you! Then take the {colour} bag.", "Sure, for the {colour} bag."),
        ),
        "{name} gave {other} {step} {thing} for the {colour} bag and has {left} now.",
    ),
)


def _small_talk(rng: random.Random) -> list[str]:
    """Turns about the same kinds of things that a summary omits."""
    return [
        f"{rng.choice(TIMES)} I was in the {rng.choice(PLACES)}.",
        rng.choice(("I was cleaning.", f"I put some {rng.choice(THINGS)} in a {rng.choice(CONTAINERS)}.")),
    ]


def _dialogue(rng: random.Random) -> _PairText:
    """Two different exchanges, each opened by the same person: every exchange has an even number of turns."""
    name, other = rng.sample(NAMES, 2)
    exchanged, outcomes = (_small_talk(rng) if rng.random() < 0.5 else []), []
    for turns, outcome in rng.sample(_DIALOGUES, 2):
        place, instead = rng.sample(PLACES, 2)
        roles: dict[str, Any] = {"name": name, "other": other, "place": place, "instead": instead}
        roles["time"] = rng.choice(TIMES).replace("In", "in").replace("On", "on")
        roles |= _amounts(rng) | {"thing": rng.choice(THINGS), "colour": rng.choice(COLOURS)}
        worded = (rng.choice(wordings) if len(wordings) > 1 else wordings[0] for wordings in turns)
        exchanged += [turn.format_map(roles) for turn in worded]
        outcomes.append(outcome.format_map(roles))
    spoken = (f"{(name, other)[i % 2]}: {turn}" for i, turn in enumerate(exchanged))
    return _PairText(" ".join(spoken), "", " ".join(outcomes))


# ---------------------------------------------------------------- story → worked chain


def _chain(rng: random.Random, name: str, thing: str, ordered: bool) -> tuple[list[str], str]:
    """(sentences about one person's things in their order; the first of them, the sums and the last number)."""
    amount = rng.randint(LEAST_HELD, MOST_HELD)
    sentences, sums = [f"{name} has {amount} {thing}."], []
    for when in ORDER[: rng.randint(*STEPS)]:
        step = rng.randint(1, STEP)
        gains = amount - step < 0 or (rng.random() < 0.5 and amount + step <= LARGEST_NUMBER)
        after = amount + step if gains else amount - step
        sentences.append(f"{f'{when} ' if ordered else ''}{name} {'finds' if gains else 'loses'} {step}.")
        sums.append(f"{when} {amount} {'+' if gains else '-'} {step} = {after}.")
        amount = after
    return sentences, f"{sentences[0]} {' '.join(sums)} So {name} has {amount} {thing}."


def _story(rng: random.Random) -> _PairText:
    """Two interleaved chains, and the question about the one whose steps are in order."""
    people, things = rng.sample(NAMES, 2), rng.sample(THINGS, 2)
    main, other = (
        _chain(rng, name, thing, ordered) for name, thing, ordered in zip(people, things, (True, False), strict=True)
    )
    whose = [number for number, (sentences, _) in enumerate((main, other)) for _ in sentences]
    rng.shuffle(whose)
    left = [iter(sentences) for sentences, _ in (main, other)]
    question = f"How many {things[0]} has {people[0]} now?"
    return _PairText(" ".join(next(left[number]) for number in whose), question, main[1])


# ---------------------------------------------------------------- splits


_ITEMS: dict[TextTask, Callable[[random.Random], _PairText]] = {"qa": _question, "summary": _dialogue, "count": _story}
_SOURCES: dict[TextTask, str] = {
    "qa": "question: {question} context: {text}",
    "summary": "summarize: {text}",
    "count": "count: {question} context: {text}",
}


def format_source(task: TextTask, text: str, question: str = "") -> str:
    """The model's input: T5's text-to-text form of a task (Raffel et al. 2020, appendix D).

    Raises:
        BadArgument: unknown task.
    """
    if task not in _SOURCES:
        raise BadArgument("task", task, f"one of {', '.join(_SOURCES)}")
    return _SOURCES[task].format(question=question, text=text)


def _stream(kind: str, split: Split, seed: int) -> random.Random:
    if split not in SPLITS:
        raise BadArgument("split", split, f"one of {', '.join(SPLITS)}")
    return random.Random(f"pairs:{kind}/{split}/{seed}")


def _items(task: TextTask, split: Split, rng: random.Random) -> Iterator[_PairText]:
    while True:
        item = _ITEMS[task](rng)
        if split_by_checksum(item.text) == split:
            yield item


def _pair(task: TextTask, item: _PairText) -> SourceTarget:
    return SourceTarget(task, format_source(task, item.text, item.question), item.target, (item.target,), item.text)


def generate_source_target_pairs(
    task: TextTask, split: Split, limit: int | None, seed: int = 0
) -> Iterator[SourceTarget]:
    """``limit`` pairs of a task, endless for None; the same (task, split, seed) gives the same pairs.

    Raises:
        BadArgument: unknown task or split.
    """
    if task not in _ITEMS:
        raise BadArgument("task", task, f"one of {', '.join(_ITEMS)}")
    rng = _stream(task, split, seed)
    return islice((_pair(task, item) for item in _items(task, split, rng)), limit)


# ---------------------------------------------------------------- span corruption


def _texts(split: Split, rng: random.Random) -> Iterator[str]:
    """Texts: facts, which have no split, and the pairs' texts with question and answer as running text."""
    items = {task: _items(task, split, rng) for task in _ITEMS}
    while True:
        if rng.random() < FACTS_SHARE:
            yield " ".join(f"{name} is from {HOMETOWN[name]}." for name in rng.sample(NAMES, FACTS))
        else:
            item = next(items[rng.choice(list(items))])
            yield " ".join(part for part in (item.text, item.question, item.target) if part)


def _spans(rng: random.Random, words: int) -> list[tuple[int, int]]:
    """(first, end) of the hidden spans: apart from one another, in order, about ``CORRUPTED_SHARE`` of the words."""
    hidden = max(1, round(CORRUPTED_SHARE * words))
    count = max(1, min(len(SENTINELS), round(hidden / SPAN_MEAN)))
    lengths = _parts(rng, hidden, count)
    gaps = _parts(rng, words - hidden + 2, count + 1)
    spans, at = [], -1  # the first and the last gap may be empty: each is drawn one too long
    for gap, length in zip(gaps, lengths, strict=False):
        spans.append((at + gap, at + gap + length))
        at += gap + length
    return spans


def _parts(rng: random.Random, total: int, count: int) -> list[int]:
    """``total`` cut into ``count`` positive whole parts, every cut equally likely."""
    cuts = sorted(rng.sample(range(1, total), count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def corrupt_text(text: str, rng: random.Random) -> SourceTarget:
    """One text with spans of its words hidden behind sentinels; at most ``WINDOW`` words of it, from anywhere.

    Raises:
        BadArgument: fewer than four words, too few for hidden spans.
    """
    words = text.split()
    if len(words) < 4:
        raise BadArgument("text", text, "at least four words")
    start = rng.randint(0, max(0, len(words) - WINDOW))
    words = words[start : start + WINDOW]
    source, answer, at = [], [], 0
    for sentinel, (first, last) in zip(SENTINELS, _spans(rng, len(words)), strict=False):
        source += [*words[at:first], sentinel]
        answer += [sentinel, *words[first:last]]
        at = last
    target = " ".join(answer)
    return SourceTarget("corrupted", " ".join([*source, *words[at:]]), target, (target,), text)


def generate_corrupted_pairs(split: Split, limit: int | None, seed: int = 0) -> Iterator[SourceTarget]:
    """``limit`` pairs of span corruption, endless for None; the same (split, seed) gives the same pairs.

    Raises:
        BadArgument: unknown split.
    """
    rng = _stream("corrupted", split, seed)
    return islice((corrupt_text(text, rng) for text in _texts(split, rng)), limit)
