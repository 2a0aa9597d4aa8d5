"""Input → output pairs: reproducible, disjoint splits, distinct texts, right answers, spans that need a choice."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.text import seq2seq_pairs
from emad_ref.text.documents import SPLITS, split_by_checksum
from emad_ref.text.seq2seq_pairs import (
    COLOURS,
    CORRUPTED_SHARE,
    HOMETOWN,
    LARGEST_NUMBER,
    NAMES,
    ORDER,
    PLACES,
    SENTINELS,
    THINGS,
    TOWNS,
    WINDOW,
    corrupt_text,
    generate_corrupted_pairs,
    generate_source_target_pairs,
)

SEEDS = st.integers(0, 2**32 - 1)
KINDS = ("qa", "summary", "count")
WORDS = (*NAMES, *THINGS, *PLACES, *COLOURS)


def parts(pair):
    """Return (question, passage) of a qa pair."""
    return re.fullmatch(r"question: (.+\?) context: (.+\.)", pair.source).groups()


def restored(pair):
    """Return the text that a span-corruption pair hides: each sentinel of the source is replaced by its words."""
    pieces = re.split(r"(<extra_id_\d+>)", pair.target)
    words = {sentinel: told.strip() for sentinel, told in zip(pieces[1::2], pieces[2::2], strict=True)}
    return re.sub(r"<extra_id_\d+>", lambda found: words[found.group()], pair.source)


# ---------------------------------------------------------------- streams and splits


@pytest.mark.parametrize("task", KINDS)
def test_the_same_seed_gives_the_same_pairs_as_many_as_asked_for(task):
    drawn = list(generate_source_target_pairs(task, "evaluate", 30))
    assert len(drawn) == 30
    assert drawn == list(generate_source_target_pairs(task, "evaluate", 30))
    assert drawn != list(generate_source_target_pairs(task, "evaluate", 30, seed=1))
    assert drawn == list(islice(generate_source_target_pairs(task, "evaluate", None), 30))
    assert {pair.task for pair in drawn} == {task}
    assert all(pair.answers == (pair.target,) for pair in drawn)
    assert all(pair.text in pair.source for pair in drawn)


def test_what_the_bundled_models_were_trained_on_stays_what_it_was():
    """emad-t5-tiny was trained on these streams: a changed draw would silently invalidate its weights."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for pair in (
            *(pair for kind in KINDS for pair in generate_source_target_pairs(kind, split, 40)),
            *generate_corrupted_pairs(split, 40),
        ):
            digest.update(f"{pair.source}\n{pair.target}\n".encode())
    assert digest.hexdigest()[:16] == "64056c15289796dd"


@pytest.mark.parametrize("task", KINDS)
def test_no_text_stands_in_two_splits_or_twice_in_one(task):
    """Intervals resample texts: a repeated text would count twice."""
    texts = {
        split: [pair.text for seed in (0, 1) for pair in generate_source_target_pairs(task, split, 600, seed)]
        for split in SPLITS
    }
    assert all(len(set(each)) == len(each) for each in texts.values())
    for i, mine in enumerate(SPLITS):
        for other in SPLITS[i + 1 :]:
            assert not set(texts[mine]) & set(texts[other]), (mine, other)


def test_without_the_rule_splits_would_meet(monkeypatch):
    """Power of the check above: streams with different seeds are not enough if texts have few variants."""
    from emad_ref.text import seq2seq_pairs as module

    for name in ("NAMES", "THINGS", "PLACES", "COLOURS"):
        monkeypatch.setattr(module, name, getattr(seq2seq_pairs, name)[:2])

    def met() -> bool:
        train, held_out = (
            {p.text for p in generate_source_target_pairs("summary", split, 2000)} for split in ("train", "evaluate")
        )
        return bool(train & held_out)

    assert not met()
    monkeypatch.setattr(module, "split_by_checksum", lambda text: Anything())
    assert met()


class Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


def test_five_texts_in_eight_are_trained_on_and_each_other_split_has_one():
    share = Counter(split_by_checksum(f"text {i}") for i in range(8000))
    # ±5 standard deviations of a binomial with 8,000 draws
    assert share["train"] == pytest.approx(5000, abs=220)
    assert all(share[split] == pytest.approx(1000, abs=150) for split in SPLITS[1:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: generate_source_target_pairs("riddle", "train", 1),
            "task='riddle', but expected one of qa, summary, count",
        ),
        (
            lambda: generate_source_target_pairs("qa", "test", 1),
            "split='test', but expected one of train, calibrate, validate, evaluate",
        ),
        (lambda: generate_corrupted_pairs("test", 1), "split='test'"),
        (
            lambda: corrupt_text("three short words", random.Random(0)),
            "text='three short words', but expected at least four",
        ),
    ],
)
def test_unknown_names_and_empty_texts_are_refused(call, message):
    with pytest.raises(BadArgument, match=re.escape(message)):
        call()


# ---------------------------------------------------------------- the lexicon


def test_words_are_many_and_none_stands_for_two_things():
    assert (len(NAMES), len(THINGS), len(TOWNS)) == (200, 216, 144)
    kinds = [*NAMES, *THINGS, *TOWNS, *PLACES]
    assert len(set(kinds)) == len(kinds)


def test_everybody_is_from_somewhere_that_no_rule_gives_away():
    assert set(HOMETOWN) == set(NAMES)
    assert set(HOMETOWN.values()) <= set(TOWNS)
    assert max(Counter(HOMETOWN.values()).values()) <= 6  # 200 draws from 144
    for part in (lambda name: name[:2], lambda name: name[-2:]):
        together = Counter((part(name), home) for name, home in HOMETOWN.items())
        assert max(together.values()) <= 3


# ---------------------------------------------------------------- question → answer

REMEMBERED = re.compile(r"Where is the one who (.+) from\?")
SUM = re.compile(r"How many (\w+) (did|has) (\w+) (find|now)\?")


def test_every_answer_is_a_span_of_its_passage_or_is_remembered_or_is_a_sum():
    seen = Counter()
    for pair in generate_source_target_pairs("qa", "validate", 600):
        question, passage = parts(pair)
        told = bool(re.search(rf"\b{pair.target}\b", passage))
        more = "remembered" if REMEMBERED.fullmatch(question) else "sum" if SUM.fullmatch(question) else ""
        assert told or more, pair
        assert not (told and more == "remembered"), pair
        seen[more] += 1
    assert min(seen.values()) > 80  # of 600: 0.3 are sums, 0.7 · 0.29 from memory, so 121; 4 standard deviations


def test_every_answer_has_a_rival_of_its_kind_in_the_passage():
    """A model that ignores the question is right at most half of the time."""
    lists = {"name": NAMES, "thing": THINGS, "place": PLACES, "colour": COLOURS}
    kinds = {word: kind for kind, words in lists.items() for word in words}
    for pair in generate_source_target_pairs("qa", "validate", 500):
        question, passage = parts(pair)
        if pair.target in ("In the morning", "In the evening", "On that day"):
            continue  # only one event has a time: the question's first word alone selects it
        if REMEMBERED.fullmatch(question) or SUM.fullmatch(question):
            continue
        last = pair.target.split()[-1]
        kind = kinds.get(last, "colour" if last in ("box", "bag") else None)
        assert kind is not None, pair
        assert len({word for word in re.findall(r"\w+", passage) if kinds.get(word) == kind}) >= 2, pair


def test_nineteen_kinds_of_question_are_asked_and_each_often():
    mask = "|".join(WORDS)
    asked = Counter(
        re.sub(rf"\b({mask})\b", "_", parts(pair)[0]) for pair in generate_source_target_pairs("qa", "train", 1700)
    )
    assert len(asked) == 19
    assert min(asked.values()) > 25  # 60 expected of the rarest, 0.7 / 4 / 5; 4.5 standard deviations


def test_the_answers_are_what_the_passage_says_what_the_world_knows_and_what_can_be_reckoned():
    """Patterns over the sentences read the answers independently."""
    checked = Counter()
    for pair in generate_source_target_pairs("qa", "evaluate", 850):
        question, passage = parts(pair)
        remembered = REMEMBERED.fullmatch(question)
        asked_for = f"Who {remembered.group(1)}?" if remembered else question
        for pattern, sentence in READ:
            if asked := re.fullmatch(pattern, asked_for):
                (answer,) = {found.group("answer") for found in re.finditer(sentence.format(*asked.groups()), passage)}
                assert (HOMETOWN[answer] if remembered else answer) == pair.target, pair
                checked[pattern, bool(remembered)] += 1
        if asked := re.fullmatch(r"In what place are the (\w+)\?", question):
            holder = re.search(rf"put the {asked.group(1)} in the (\w+ \w+)\.", passage).group(1)
            assert re.search(rf"The {holder} is in (the \w+)\.", passage).group(1) == pair.target
            checked["two sentences"] += 1
        if asked := SUM.fullmatch(question):
            thing, way, name, _ = asked.groups()
            if way == "did":
                found = re.search(rf"{name} found (\d+) \w+ {thing} in the \w+ and (\d+) more\.", passage)
                left = int(found.group(1)) + int(found.group(2))
            else:
                found = re.search(rf"{name} had (\d+) \w+ {thing} and gave \w+ (\d+)\.", passage)
                left = int(found.group(1)) - int(found.group(2))
            assert pair.target == str(left)
            checked["sum", way] += 1
    assert sum(checked.values()) == 850
    assert len(checked) == 19


READ = [
    (r"Where did (\w+) go\?", r"{0} went to (?P<answer>the \w+)\."),
    (r"Who went to the (\w+)\?", r"(?P<answer>\w+) went to the {0}\."),
    (r"When did (\w+) go\?", r"(?P<answer>\w+ \w+ \w+) {0} went"),
    (r"What did (\w+) find\?", r"{0} found (?P<answer>\d+ \w+ \w+) in"),
    (r"Where were the (\w+) (\w+)\?", r"found \d+ {0} {1} in (?P<answer>the \w+) and"),
    (r"Who found some (\w+)\?", r"(?P<answer>\w+) found \d+ \w+ {0} in"),
    (r"What had (\w+)\?", r"{0} had (?P<answer>\d+ \w+ \w+) and gave"),
    (r"Who gave the (\w+)\?", r"(?P<answer>\w+) had \d+ \w+ {0} and gave"),
    (r"Who took the (\w+) (\w+)\?", r"had \d+ {0} {1} and gave (?P<answer>\w+) \d"),
    (r"Who took the (\w+)\?", r"had \d+ \w+ {0} and gave (?P<answer>\w+) \d"),
    (r"Who put the (\w+)\?", r"(?P<answer>\w+) put the {0} in"),
    (r"What did (\w+) put\?", r"{0} put (?P<answer>the \w+) in"),
    (r"Where did (\w+) put the (\w+)\?", r"{0} put the {1} in (?P<answer>the \w+ \w+)\."),
]


# ---------------------------------------------------------------- dialogue → summary


def test_a_summary_names_both_speakers_and_only_what_was_said():
    content = {*WORDS}
    for pair in generate_source_target_pairs("summary", "validate", 500):
        speakers = set(re.findall(r"(\w+):", pair.source.removeprefix("summarize: ")))
        said = set(re.findall(r"\w+", pair.source))
        told = set(re.findall(r"\w+", pair.target))
        assert len(speakers) == 2
        assert speakers <= told, pair
        assert told & content <= said, pair


def test_a_summarys_sums_are_those_of_the_dialogue():
    checked = Counter()
    for pair in generate_source_target_pairs("summary", "validate", 400):
        if asked := re.search(r"(\d+) (\w+)(?: and (\d+) more)? to the \w+(?:, and (\d+) more\?| for me\.)", pair.text):
            held, thing, *steps = asked.groups()
            total = int(held) + int(next(filter(None, steps)))
            assert f"to take {total} {thing} to the" in pair.target
            checked["asked"] += 1
        for pattern in (r"I have (?P<held>\d+) (?P<thing>\w+)\. Can I give you (?P<step>\d+)\?",
                        r"Take (?P<step>\d+) of my (?P<held>\d+) (?P<thing>\w+)\."):  # fmt: skip
            if given := re.search(pattern, pair.text):
                step, left = given["step"], int(given["held"]) - int(given["step"])
                assert re.search(rf"gave \w+ {step} {given['thing']} for the \w+ bag and has {left} now\.", pair.target)
                checked["given"] += 1
    assert min(checked.values()) > 100  # two of five kinds each: 160


def test_the_same_outcome_is_told_in_different_words():
    """Two of five kinds of exchange, several wordings each, with and without small talk."""
    mask = "|".join(WORDS)
    drawn = list(generate_source_target_pairs("summary", "train", 2000))
    shapes = {re.sub(rf"\b({mask})\b", "_", pair.source) for pair in drawn}
    outcomes = {re.sub(rf"\b({mask}|\d+)\b|in the (morning|evening)|on that day", "_", pair.target) for pair in drawn}
    assert len(outcomes) == 5 * 4
    assert len(shapes) > 500


def test_small_talk_is_left_out_of_half_of_the_dialogues():
    drawn = list(generate_source_target_pairs("summary", "train", 1000))
    opened = sum("I was in the" in pair.source for pair in drawn)
    assert opened == pytest.approx(500, abs=80)  # 5 standard deviations


# ---------------------------------------------------------------- story → worked chain


def test_the_chain_is_the_sums_of_the_person_asked_about_and_ends_with_what_is_left():
    """Recomputed from the sentences."""
    lengths = Counter()
    for pair in generate_source_target_pairs("count", "evaluate", 400):
        thing, name, story = re.fullmatch(
            r"count: How many (\w+) has (\w+) now\? context: (.+\.)", pair.source
        ).groups()
        first = re.search(rf"{name} has (\d+) {thing}\.", story)
        held, sums = int(first.group(1)), []
        for when, verb, step in re.findall(rf"(\w+) {name} (finds|loses) (\d+)\.", story[first.end() :]):
            after = held + int(step) if verb == "finds" else held - int(step)
            sums.append(f"{when} {held} {'+' if verb == 'finds' else '-'} {step} = {after}.")
            held = after
            assert 0 <= held <= LARGEST_NUMBER
        assert pair.target == f"{first.group()} {' '.join(sums)} So {name} has {held} {thing}."
        assert tuple(step.split()[0] for step in sums) == ORDER[: len(sums)]
        lengths[len(sums)] += 1
    assert set(lengths) == {2, 3, 4}


def test_somebody_elses_things_come_and_go_in_every_story():
    for pair in generate_source_target_pairs("count", "evaluate", 200):
        names = re.findall(r"(\w+) (?:has|finds|loses) \d", pair.text)
        assert len(set(names)) == 2
        assert min(Counter(names).values()) >= 3


# ---------------------------------------------------------------- span corruption


@given(SEEDS)
def test_source_and_target_together_give_the_words_back(seed):
    rng = random.Random(seed)
    text = next(generate_source_target_pairs("summary", "train", None, seed)).text
    pair = corrupt_text(text, rng)
    words = restored(pair).split()
    original = text.split()
    starts = range(len(original) - len(words) + 1)
    assert any(original[start : start + len(words)] == words for start in starts)
    assert len(words) == min(WINDOW, len(original))


@given(SEEDS, st.integers(4, 60))
def test_sentinels_count_up_stand_apart_and_hide_their_share(seed, length):
    pair = corrupt_text(" ".join(f"w{i}" for i in range(length)), random.Random(seed))
    told = re.findall(r"<extra_id_\d+>", pair.target)
    assert told == re.findall(r"<extra_id_\d+>", pair.source) == list(SENTINELS[: len(told)])
    assert "> <" not in pair.source  # two adjacent spans would be one
    shown = min(length, WINDOW)
    assert len(pair.target.split()) - len(told) == max(1, round(CORRUPTED_SHARE * shown))


def test_any_word_may_be_hidden_the_first_and_the_last_too():
    """The answer ends a text of question and answer: hiding it teaches the look-up."""
    text = " ".join(f"w{i}" for i in range(12))
    hidden = Counter()
    for seed in range(400):
        hidden.update(re.findall(r"w\d+", corrupt_text(text, random.Random(seed)).target))
    assert set(hidden) == set(text.split())


def test_corrupted_texts_are_facts_and_the_pairs_of_the_same_split():
    drawn = list(generate_corrupted_pairs("train", 400))
    facts = sum("is from" in restored(pair) for pair in drawn)
    asked = [restored(pair) for pair in drawn if "?" in restored(pair)]
    assert facts == pytest.approx(120, abs=40)  # 3 in 10; 4 standard deviations
    assert any(re.search(r"\. (Where|Who|What|When|In) .*\? .", text) for text in asked)
    assert any(re.search(r"How many \w+ has (\w+) now\? \1 has \d+", text) for text in asked)
    assert drawn == list(generate_corrupted_pairs("train", 400))
    assert not {pair.source for pair in drawn} & {pair.source for pair in generate_corrupted_pairs("evaluate", 400)}


def test_where_people_are_from_can_be_read_in_the_corrupted_texts():
    told = [re.findall(r"(\w+) is from (\w+)\.", restored(pair)) for pair in generate_corrupted_pairs("train", 400)]
    told = [fact for each in told for fact in each if fact[0] in HOMETOWN]
    assert len({name for name, _ in told}) > 150
    assert all(HOMETOWN[name] == home for name, home in told)
