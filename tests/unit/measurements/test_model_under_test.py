"""The model under test: its points, margins, windows and prompts; one seed determines every draw of a run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import transformers as hf

import emad_ref
import pytest_emad
from emad_ref.absent import Absent
from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import EmadError
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.loading import load
from emad_ref.models.stepper import Stepper
from emad_ref.replay.losses import MAX_ACCURACY_DROP
from emad_ref.text.documents import TaskExample
from pytest_emad.audit.positions import MAX_SHORT_LENGTH
from pytest_emad.claims.base import RunPlan
from pytest_emad.measurements import task_scores
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.measurements.replay_and_flop_checks import ReplayValidity
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import load_register
from tests.small_models import LAYERS, VOCABULARY, small_config, small_model

FEW = replace(BUDGETS["smoke"], items=8)
PROBES, TARGETS = (2, 4), (1.0, 0.5)


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


def evidence(stepper: Stepper, margin: float | None = None, corpus: str = "self") -> ModelMeasurements:
    study = Study(corpus=corpus, budget=FEW, margin=margin)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [len(text) % VOCABULARY, len(text) % 7])
    loaded = SimpleNamespace(
        geometry=geometry_of(small_config("gpt_neox")),
        name="small",
        stepper=stepper,
        trained=True,
        opening_token_id=0,
        end_token_ids=frozenset({0}),
        tokenizer=tokenizer,
        bundled=False,
        fingerprint="f",
    )
    made = ModelMeasurements(loaded, study, RunResources())
    made.traces.profile = Profile(
        "small", "f", "self", "float64", LAYERS, PROBES, PROBES, (1.0,) * len(PROBES), TARGETS, 100, 10, {}
    )
    return made


DEFAULT, NAMED, SELECTED = "calibrated default", "named by the user", "chosen on validation"


@pytest.mark.parametrize(
    ("named", "chosen", "names"),
    [
        (None, None, {"emad m=0.00": (DEFAULT,)}),
        (None, 0.0, {"emad m=0.00": (DEFAULT, SELECTED)}),
        (None, 0.004, {"emad m=0.00": (DEFAULT,), "emad m=0.004": (SELECTED,)}),
        (0.3, 0.2, {"emad m=0.00": (DEFAULT,), "emad m=0.30": (NAMED,), "emad m=0.20": (SELECTED,)}),
        (0.2, 0.2, {"emad m=0.00": (DEFAULT,), "emad m=0.20": (NAMED, SELECTED)}),
        (0.2, 0.20000001, {"emad m=0.00": (DEFAULT,), "emad m=0.20": (NAMED,), "emad m=0.20000001": (SELECTED,)}),
        (0.12345, 0.12346, {"emad m=0.00": (DEFAULT,), "emad m=0.12345": (NAMED,), "emad m=0.12346": (SELECTED,)}),
        (0.0, 0.2, {"emad m=0.00": (DEFAULT, NAMED), "emad m=0.20": (SELECTED,)}),
        (-0.0, 0.2, {"emad m=0.00": (DEFAULT, NAMED), "emad m=0.20": (SELECTED,)}),
        (1e-20, None, {"emad m=0.00": (DEFAULT,), "emad m=1e-20": (NAMED,)}),
    ],
)
def test_every_point_put_forward_has_its_own_identity(stepper, named, chosen, names) -> None:
    """The user's named margin is judged even if another prints alike; only equal points are one."""
    run = evidence(stepper, named)
    run.points.selected_margin_loss = (
        Absent("no margin") if chosen is None else SimpleNamespace(point=run.traces.profile.point(chosen))
    )
    assert {point.name: roles for point, roles in run.points.roles_by_point.items()} == names
    assert [point.name for point in run.points.selected_points] == list(names)
    wanted = {0.0, *(margin for margin in (named, chosen) if margin is not None)}
    assert {point.margin_nats for point in run.points.selected_points} == wanted


def test_a_margin_is_chosen_with_validation_accuracy_in_mind(stepper, monkeypatch) -> None:
    """Perplexity lets every margin pass; tasks on the validation split let only those pass that lose nothing."""
    run, drops = evidence(stepper, corpus="world:premise"), {}
    monkeypatch.setattr("emad_ref.replay.losses.mark_within_margin_bounds", lambda losses: np.arange(len(losses)) > 0)
    run.traces.validation = take_trace(stepper, [TokenSequence(np.arange(20))])
    monkeypatch.setattr(
        task_scores.TaskScores,
        "compute_validation_drop_by_task",
        lambda self, p: drops.setdefault(p.name, {"recall": 0.02}),
    )
    assert isinstance(run.points.selected_margin_loss, Absent)
    assert set(drops) == {point.name for point in run.points.margin_points}


class Told:
    """A task with known answers and savings at full depth and at any other point."""

    def __init__(self, right: int, kept: int, saving: float, guess: float = 0.0):
        self.rights = {True: np.arange(400) < right, False: np.arange(400) < kept}
        self.shares = {True: 0.0, False: saving}
        example = TaskExample("t", "p", "a", "exact", guess=guess)
        self.items = [SimpleNamespace(example=replace(example, answer=str(n))) for n in range(400)]

    def correctness_by_item(self, point):
        return ByItem.from_independent_items(self.rights[not point.probes])

    def compute_flop_saving(self, point):
        return self.shares[not point.probes]


def test_only_tasks_that_count_bound_a_margin_each_by_itself(stepper) -> None:
    run = evidence(stepper)
    run.task_scores._validated = {
        "falls": Told(390, 380, 0.2),
        "holds": Told(390, 390, 0.2),
        "idle": Told(390, 300, 0.01),
        "guessed": Told(101, 20, 0.2, guess=0.25),
    }
    drops = run.task_scores.compute_validation_drop_by_task(run.replay_validity.shallow_point)
    assert drops == {"falls": pytest.approx(0.025), "holds": 0.0}
    assert run.task_scores.compute_validation_drop_by_task(run.subject.full_depth_point) == {}, (
        "nothing is exercised at full depth"
    )


def test_validation_reads_four_hundred_items_of_a_task_and_never_evaluated_ones(stepper, monkeypatch) -> None:
    run, asked = evidence(stepper, corpus="world:premise"), []

    def examples(task, split, count, seed):
        asked.append((task, split, count))
        return [TaskExample("recall", "p" * n, str(n % 3), "exact") for n in range(1, count + 1)]

    monkeypatch.setattr(task_scores.world, "generate_examples", examples)
    monkeypatch.setattr(task_scores.world, "TASKS", {"recall": None})
    run.subject.budget = replace(FEW, items=500)
    assert run.task_scores.compute_chance_or_majority_accuracy("recall") == 167 / 500, (
        "validation's majority answer, on the evaluated items"
    )
    assert sorted(asked) == [("recall", "evaluate", 500), ("recall", "validate", task_scores.VALIDATED_ITEMS)]
    assert 1 / task_scores.VALIDATED_ITEMS <= MAX_ACCURACY_DROP / 2


def test_repeats_of_a_world_item_share_a_cluster(stepper, monkeypatch) -> None:
    run = evidence(stepper, corpus="world:premise")
    made = [TaskExample("recall", "p" * (n % 3 + 1), "a", "exact") for n in range(8)]
    monkeypatch.setattr(task_scores.world, "generate_examples", lambda *asked: made)
    monkeypatch.setattr(task_scores.world, "TASKS", {"recall": None})
    held = run.task_scores.measure_accuracy_against_full_depth("recall", run.replay_validity.shallow_point)
    assert len(held.full.independent_values) == len(held.adaptive.independent_values) == 3
    assert held.saving > 0.05


def test_windows_of_one_document_are_summed_before_anything_is_resampled(stepper) -> None:
    run = evidence(stepper)
    run.traces.evaluation_windows = [TokenSequence(np.arange(3), document=number) for number in (0, 0, 2, 5, 5, 5)]
    assert run.traces.sum_by_document(np.array([1, 2, 4, 8, 16, 32])).values.tolist() == [3, 4, 56]
    assert run.traces.sum_by_document(np.ones((6, 2))).values.tolist() == [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]]


def documents_of(monkeypatch, count: int, tokens: int = 5000) -> None:
    monkeypatch.setattr(
        ModelUnderTest,
        "iterate_documents",
        lambda self, split: (np.zeros(tokens, dtype=np.int64) for _ in range(count)),
    )


def test_windows_come_from_as_many_documents_as_there_are(stepper, monkeypatch) -> None:
    """A document gives a second window only after every one has given its first; ids tell them apart."""
    run = evidence(stepper)
    documents_of(monkeypatch, 80)
    for count in (30, 80, 200, 320):
        of = [window.document for window in run.subject.cut_windows("evaluate", count)]
        assert len(of) == count
        assert of == sorted(of)
        given = np.bincount(of)
        assert len(given) == min(count, 80)
        assert given.max() - given.min() <= 1


@pytest.mark.parametrize(("split", "most"), [("calibrate", 11), ("validate", 4), ("evaluate", 4)])
def test_no_document_that_is_judged_gives_more_than_four_windows(stepper, monkeypatch, split, most) -> None:
    """One long document among short ones used to give all remaining windows."""
    run = evidence(stepper)
    lengths = (40, 11 * (run.subject.window_size - 1), 30)
    monkeypatch.setattr(
        ModelUnderTest, "iterate_documents", lambda self, split: (np.zeros(n, dtype=np.int64) for n in lengths)
    )
    of = [window.document for window in run.subject.cut_windows(split, 400)]
    assert np.bincount(of).tolist() == [1, most, 1]


def test_a_corpus_that_is_too_small_gives_all_its_windows(stepper, monkeypatch) -> None:
    run = evidence(stepper)
    documents_of(monkeypatch, 3, tokens=2 * (run.subject.window_size - 1) + 5)
    of = [window.document for window in run.subject.cut_windows("evaluate", 400)]
    assert of == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("opening", [0, None])
def test_a_timed_prompt_fits_into_a_document_of_random_tokens(stepper, opening) -> None:
    run = evidence(stepper)
    run.loaded.trained, run.loaded.opening_token_id = False, opening
    run.subject.budget = replace(FEW, prompt_tokens=80)
    assert [len(prompt.tokens) for prompt in run.subject.make_equal_prompts(3, 80)] == [80, 80, 80]


SOURCES = tuple(Path(house.__file__).parent for house in (emad_ref, pytest_emad))
SPLITS = ("calibrate", "validate", "evaluate")
GENERATORS = ("default_rng", "Random", "manual_seed", "RandomState", "SeedSequence")
NAMES = (ast.Name, ast.Attribute)
DRAWN_BY_SEED = (
    "examples",
    "generate_source_target_pairs",
    "load_seq2seq_pairs",
    "sampled_documents",
)  # origin of the items and texts of a run


@pytest.fixture(scope="module")
def loaded():
    return load("emad-nano")


def drawn(loaded, corpus: str, seed: int) -> dict[str, object]:
    """Return everything that a run of ``seed`` reads and draws, by purpose."""
    run = ModelMeasurements(loaded, Study(corpus=corpus, seed=seed), RunResources())
    asked = RunPlan(load_register(), run.study).make_context("EMAD-R1", "m", 12)
    texts = {split: [text.tolist() for text in islice(run.subject.iterate_documents(split), 3)] for split in SPLITS}
    prompts = [prompt.tokens.tolist() for prompt in run.subject.make_equal_prompts(3, 8)]
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
        with pytest.raises(LookupError), run.subject.open_decoder(run.subject.full_depth_point, seed=2):
            pass
    assert [request.seed for request in requests] == [2, 7]


@pytest.mark.parametrize("split", SPLITS)
def test_what_random_documents_open_with_does_not_depend_on_the_budget(split) -> None:
    """One budget's golden of an encoder-decoder is that of every other."""
    loaded = load("random:emad-nano")
    short, long = (
        list(
            islice(
                ModelMeasurements(loaded, Study(budget=BUDGETS[name]), RunResources()).subject.iterate_documents(split),
                4,
            )
        )
        for name in ("smoke", "full")
    )
    assert [len(text) for text in short] != [len(text) for text in long]
    assert all(np.array_equal(few, many[: len(few)]) for few, many in zip(short, long, strict=True))
    assert not np.array_equal(short[0], short[1])


def calls() -> Iterator[tuple[Path, str, ast.Call]]:
    """Return (file, name, call) of every call in the product except training, whose recipes have their own seeds."""
    for path in (path for source in SOURCES for path in source.rglob("*.py")):
        if "training" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                yield path, name, node


def names_in(call: ast.Call) -> set[str]:
    """Return the names and attributes in the arguments of a call."""
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


def test_a_model_of_one_layer_has_a_probing_point_without_probes() -> None:
    config = hf.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    stepper = CausalStepper(small_model("llama", config=config))
    texts = [TokenSequence(np.arange(12), 0), TokenSequence(np.arange(20, 32), 1)]
    subject: Any = SimpleNamespace(stepper=stepper, tolerance=1e-6, cut_windows=lambda split, count: texts)
    point = ReplayValidity(subject).probing_point
    assert (point.layers, point.probes, point.thresholds) == (1, (), ((),))


def test_prompts_leave_room_for_what_is_fed_after_them() -> None:
    rng = np.random.default_rng(0)
    for window, fed in ((48, 24), (30, 29), (512, 24)):
        model = cast(ModelUnderTest, SimpleNamespace(window_size=window, name="m"))
        lengths = ModelUnderTest.draw_short_lengths(model, rng, 50, fed)
        assert 1 <= min(lengths) <= max(lengths) <= min(MAX_SHORT_LENGTH, window - fed)
    with pytest.raises(EmadError, match="holds 24 positions, but this audit feeds 24 tokens"):
        ModelUnderTest.draw_short_lengths(cast(ModelUnderTest, SimpleNamespace(window_size=24, name="m")), rng, 4, 24)
