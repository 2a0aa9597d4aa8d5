"""One seed reaches all that a run draws, and nothing is drawn from anything else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import emad_ref
from emad_ref.claims.base import RunPlan
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.run_resources import RunResources
from emad_ref.measurements.study import BUDGETS, Study
from emad_ref.models.loading import load
from emad_ref.statistics.verdicts import load_register

SOURCE = Path(emad_ref.__file__).parent
SPLITS = ("calibrate", "validate", "evaluate")
GENERATORS = ("default_rng", "Random", "manual_seed", "RandomState", "SeedSequence")
NAMES = (ast.Name, ast.Attribute)
DRAWN_BY_SEED = (
    "examples",
    "generate_pairs",
    "load_pairs",
    "sampled_documents",
)  # where items and texts of a run come from


@pytest.fixture(scope="module")
def loaded():
    return load("emad-nano")


def drawn(loaded, corpus: str, seed: int) -> dict[str, object]:
    """What a run of ``seed`` reads and draws, by what it is for."""
    run = ModelMeasurements(loaded, Study(corpus=corpus, seed=seed), RunResources())
    asked = RunPlan(load_register(), run.study).asked("EMAD-R1", "m", 12)
    texts = {split: [text.tolist() for text in islice(run.subject.documents(split), 3)] for split in SPLITS}
    prompts = [prompt.tokens.tolist() for prompt in run.subject.prompts(3, 8)]
    return texts | {"prompts": prompts, "resamples": asked.rng.integers(0, 1000, 5).tolist()}


@pytest.mark.parametrize("corpus", ["world:premise", "world:mixed", "self"])
def test_everything_a_run_draws_follows_its_seed(loaded, corpus) -> None:
    first, again, other = (drawn(loaded, corpus, seed) for seed in (0, 0, 1))
    assert first == again
    assert [name for name in first if first[name] == other[name]] == []
    texts = [str(text) for split in SPLITS for text in first[split]]
    assert len(set(texts)) == len(texts), "splits share a document"


def test_a_decoder_is_made_with_the_runs_seed(loaded) -> None:
    requests = []

    def make(request):
        requests.append(request)
        raise LookupError

    for seed in (0, 5):
        run = ModelMeasurements(loaded, Study(corpus="world:premise", seed=seed), RunResources(make))
        with pytest.raises(LookupError):
            run.subject.decoder(run.subject.full, seed=2)
    assert [request.seed for request in requests] == [2, 7]


@pytest.mark.parametrize("split", SPLITS)
def test_what_random_documents_open_with_does_not_depend_on_the_budget(split) -> None:
    """A golden of an encoder-decoder that one budget recorded is that of every other."""
    loaded = load("random:emad-nano")
    short, long = (
        list(islice(ModelMeasurements(loaded, Study(budget=BUDGETS[name]), RunResources()).subject.documents(split), 4))
        for name in ("smoke", "full")
    )
    assert [len(text) for text in short] != [len(text) for text in long]
    assert all(np.array_equal(few, many[: len(few)]) for few, many in zip(short, long, strict=True))
    assert not np.array_equal(short[0], short[1])


def calls() -> Iterator[tuple[Path, str, ast.Call]]:
    """(file, name, call) of every call in the package but training, whose recipes have seeds of their own."""
    for path in SOURCE.rglob("*.py"):
        if "training" in path.relative_to(SOURCE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                yield path, name, node


def names_in(call: ast.Call) -> set[str]:
    """Names and attributes that the arguments of a call are made of."""
    parts = [part for given in (*call.args, *call.keywords) for part in ast.walk(given)]
    return {part.id if isinstance(part, ast.Name) else part.attr for part in parts if isinstance(part, NAMES)}


def test_no_generator_is_seeded_with_nothing_or_with_a_number_that_the_source_names() -> None:
    constant = [
        f"{path.name}: {ast.unparse(call)}"
        for path, name, call in calls()
        if (name in GENERATORS and not names_in(call))
        or any(word.arg in ("seed", "random_state") and isinstance(word.value, ast.Constant) for word in call.keywords)
    ]
    # facts of the world, which the weights of bundled models remember
    assert constant == ["seq2seq_pairs.py: random.Random('homes')"]


def test_what_a_run_reads_is_drawn_with_the_seed_it_was_given() -> None:
    unseeded = [
        f"{path.name}: {ast.unparse(call)}"
        for path, name, call in calls()
        if name in DRAWN_BY_SEED and path.parent.name in ("measurements", "claims")
        if not {"seed", "_seed"} & names_in(call)
    ]
    assert unseeded == []
