"""The synthetic world: reproducible, with disjoint splits and right answers."""

from __future__ import annotations

import hashlib
import random
import re
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.text import world
from emad_ref.text.documents import SPLITS
from pytest_emad.tasks.scoring import has_true_asserts_when_interpreted

SEEDS = st.integers(0, 2**32 - 1)
ARROW = {"+": int.__add__, "-": int.__sub__}


def taken(corpus, split="evaluate", count=50, seed=0):
    return list(islice(world.generate_documents(corpus, split, seed), count))


@pytest.mark.parametrize("corpus", world.CORPORA)
def test_the_same_seed_gives_the_same_documents(corpus):
    assert taken(corpus) == taken(corpus)
    assert taken(corpus, seed=1) != taken(corpus)


def test_what_the_bundled_models_were_trained_on_stays_what_it_was():
    """The weights were trained on this stream, the goldens read it: a changed draw would silently invalidate both."""
    digest = hashlib.sha256()
    for corpus in world.CORPORA:
        for split in SPLITS:
            digest.update("".join(taken(corpus, split)).encode())
    assert digest.hexdigest()[:16] == "77feeeff29005a0a"


@pytest.mark.parametrize("corpus", world.CORPORA)
def test_no_document_with_charts_stands_in_two_splits(corpus):
    """Routine passages have few variants and may recur; a random map may not."""
    splits = [{text for text in taken(corpus, split) if "?" in text and "!" in text} for split in SPLITS]
    for i, mine in enumerate(splits):
        for other in splits[i + 1 :]:
            assert not mine & other


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: world.generate_documents("world:none", "train"),
            "corpus='world:none', but expected one of world:premise",
        ),
        (lambda: world.generate_documents("world:mixed", "test"), "split='test', but expected one of train, calibrate"),
        (lambda: world.generate_examples("riddle", "train", 1), "task='riddle', but expected one of inventory"),
        (lambda: world.generate_examples("code", "test", 1), "split='test'"),
    ],
)
def test_unknown_names_are_refused_before_the_first_draw(call, message):
    with pytest.raises(BadArgument, match=re.escape(message)):
        call()


@given(SEEDS)
def test_three_hops_never_return_to_a_letter(seed):
    image = world.generate_chart_map(random.Random(seed))
    for x in image:
        assert len({world.follow_map(image, x, times) for times in range(4)}) == 4


@given(SEEDS)
def test_a_chart_lists_its_map_then_walks_it_then_pairs_two_hops(seed):
    text = world.generate_chart_passage(random.Random(seed))
    listed, walked, paired = re.fullmatch(r"(.*) \?(.*) !(.*)\n", text).groups()
    words = listed.split()
    image = {x: y.lower() for x, y in zip(words[::2], words[1::2], strict=True)}
    steps = walked.split()
    assert len(steps) >= world.WALK_AT_LEAST
    for here, there in pairwise(steps):
        assert there in {world.follow_map(image, here, times) for times in (1, 2, 3)}
    ends = paired.split()
    assert all(world.follow_map(image, x, 2) == y for x, y in zip(ends[::2], ends[1::2], strict=True))


@pytest.mark.parametrize(("corpus", "charts_first"), [("world:premise", True), ("world:mixed", False)])
def test_the_demanding_part_comes_first_exactly_where_the_premise_says(corpus, charts_first):
    for text in taken(corpus):
        assert ("?" in text.split("\n")[0]) == charts_first
        assert sum("?" in line and "!" in line for line in text.split("\n")) == 1


def in_task(maker, seed):
    return maker(random.Random(seed))


@given(SEEDS)
def test_every_step_of_an_inventory_is_right_and_follows_from_the_last(seed):
    item = in_task(world.generate_inventory_example, seed)
    held = int(re.search(r"has (\d+)", item.prompt).group(1))
    changes = [int(n) if verb == "finds" else -int(n) for verb, n in re.findall(r"(finds|loses) (\d+)", item.prompt)]
    steps = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)\.", item.answer)
    for change, (before, sign, step, after) in zip(changes, steps, strict=True):
        assert int(before) == held
        assert ARROW[sign](int(before), int(step)) == int(after) == held + change
        assert 1 <= int(after) <= world.LARGEST_COUNT
        held = int(after)
    assert item.answer.endswith(f" Answer: {held}.\n")


@given(SEEDS)
def test_the_places_asked_for_follow_from_two_facts_each(seed):
    item = in_task(world.generate_facts_example, seed)
    place_of = dict(re.findall(r"The (\w+) (\w+) box\.", item.prompt))
    box_of = dict(re.findall(r"The (\w+) (\w+) key\.", item.prompt))
    asked = re.search(r"Where are (.*)\?", item.prompt).group(1).split(", ")
    assert sorted(asked) == sorted(box_of)
    told = re.findall(r" The (\w+) (\w+) key is in the (\w+) (\w+) box\.", item.answer)
    assert told == [(name, box_of[name], box_of[name], place_of[box_of[name]]) for name in asked]


@given(SEEDS)
def test_a_chart_is_worked_by_two_hops_for_each_of_its_letters(seed):
    item = in_task(world.generate_chart_example, seed)
    listed, asked = item.prompt.removesuffix(":").split(" = ")
    words = listed.split()
    image = {x: y.lower() for x, y in zip(words[::2], words[1::2], strict=True)}
    assert sorted(asked.split()) == sorted(image)
    worked = [step.split() for step in item.answer.strip().removesuffix(".").split(".")]
    for x, (start, first, again, second) in zip(asked.split(), worked, strict=True):
        assert (start, first.lower(), again, second.lower()) == (x, image[x], image[x], world.follow_map(image, x, 2))


@given(SEEDS)
def test_code_passes_its_own_check_and_another_body_does_not(seed):
    item = in_task(world.generate_code_example, seed)
    assert has_true_asserts_when_interpreted(item.prompt + item.answer + item.check)
    assert not has_true_asserts_when_interpreted(item.prompt + " 0 - 99999\n" + item.check)


@given(SEEDS)
def test_a_tale_told_again_differs_in_one_person_and_one_thing(seed):
    item = in_task(world.generate_tale_retelling_example, seed)
    tale, change = item.prompt.removesuffix(":").split(" Now ")
    thing, person = change.split(" and ")
    before, after = tale.split(), item.answer.split()
    changed = {(a.strip(".,"), b.strip(".,")) for a, b in zip(before, after, strict=True) if a != b}
    assert {b for _, b in changed} == {thing, person}
    assert len(changed) == 2


@pytest.mark.parametrize(
    ("task", "scoring"),
    [("inventory", "exact"), ("facts", "exact"), ("code", "runs"), ("chart", "exact"), ("recall", "exact")],
)
def test_examples_come_as_many_as_asked_for_and_know_how_they_are_scored(task, scoring):
    drawn = list(world.generate_examples(task, "evaluate", 7))
    assert len(drawn) == 7
    assert {(e.task, e.scoring) for e in drawn} == {(task, scoring)}
    assert drawn == list(world.generate_examples(task, "evaluate", 7))
    assert drawn != list(world.generate_examples(task, "validate", 7))


@pytest.mark.parametrize("task", world.TASKS)
def test_no_item_comes_twice_or_stands_in_two_splits(task):
    """At two seeds: no item of one run's calibration is in another run's evaluation."""
    prompts = {
        split: [item.prompt for seed in (0, 1) for item in world.generate_examples(task, split, 400, seed)]
        for split in SPLITS
    }
    for split, mine in prompts.items():
        assert len(set(mine[:400])) == 400
        for other in SPLITS:
            assert other == split or not set(mine) & set(prompts[other])


def test_the_curriculum_trains_on_no_item_of_another_split():
    held_out = {item.prompt for task in world.TASKS for item in world.generate_examples(task, "evaluate", 200)}
    read = "".join(taken("world:curriculum", "train", 2000))
    assert not any(prompt in read for prompt in held_out)
