"""What a run knows of a model: which points it puts forward, which margin it chooses, what counts as a document."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import TokenSequence, take_trace
from emad_ref.evidence import scored
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.host import Host
from emad_ref.evidence.study import BUDGETS, Study
from emad_ref.evidence.subject import Subject
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.stepper import Stepper
from emad_ref.text.documents import Example
from tests.small import LAYERS, VOCABULARY, small_config, small_model

FEW = replace(BUDGETS["smoke"], items=8)
PROBES, TARGETS = (2, 4), (1.0, 0.5)


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


def evidence(stepper: Stepper, margin: float | None = None, corpus: str = "self") -> Evidence:
    study = Study(corpus=corpus, budget=FEW, margin=margin)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [len(text) % VOCABULARY, len(text) % 7])
    loaded = SimpleNamespace(
        name="small", stepper=stepper, trained=True, opening=0, tokenizer=tokenizer, bundled=False, fingerprint="f"
    )
    made = Evidence(loaded, study, Host())
    made.traces.__dict__["profile"] = Profile(
        "small", "f", "self", "float64", LAYERS, PROBES, (1.0,) * LAYERS, TARGETS, 100, 10, {}
    )
    return made


@pytest.mark.parametrize(
    ("named", "chosen", "names"),
    [
        (None, None, ["emad m=0.00"]),
        (None, 0.0, ["emad m=0.00"]),
        (None, 0.004, ["emad m=0.00", "emad m=0.004"]),
        (0.3, 0.2, ["emad m=0.00", "emad m=0.30", "emad m=0.20"]),
        (0.2, 0.20000001, ["emad m=0.00", "emad m=0.20", "emad m=0.2"]),
        (0.2, 0.2, ["emad m=0.00", "emad m=0.20"]),
    ],
)
def test_points_put_forward_have_names_of_their_own(stepper, named, chosen, names) -> None:
    run = evidence(stepper, named)
    run.points.__dict__["selected"] = (
        None if chosen is None else SimpleNamespace(point=run.traces.profile.point(chosen))
    )
    assert [point.name for point in run.points.put_forward] == names


def test_a_margin_is_chosen_with_validation_accuracy_in_mind(stepper, monkeypatch) -> None:
    """Perplexity lets every margin pass; tasks on the validation split let only those pass that lose nothing."""
    run, asked = evidence(stepper, corpus="world:premise"), []

    def examples(task, split, count, seed):
        asked.append((task, split, count))
        return [Example("recall", "p" * n, "a", "exact") for n in range(1, count + 1)]

    monkeypatch.setattr(scored.world, "examples", examples)
    monkeypatch.setattr(scored.world, "TASKS", {"recall": None})
    monkeypatch.setattr("emad_ref.sweep.select.within_bounds", lambda row, reference: True)
    run.traces.__dict__["validation"] = take_trace(stepper, [TokenSequence(np.arange(20))])
    run.loaded.geometry = geometry_of(small_config("gpt_neox"))
    drops = {}
    monkeypatch.setattr(scored.Scored, "validation_drop", lambda self, point: drops.setdefault(point.name, 0.02))
    assert run.points.selected is None
    assert set(drops) == {point.name for point in run.points.margins}
    assert asked == [("recall", "validate", FEW.items)]


def test_validation_accuracy_is_lost_where_depth_is(stepper, monkeypatch) -> None:
    run = evidence(stepper)
    monkeypatch.setattr(scored, "correct", lambda items, trace, depth: np.asarray(depth) == LAYERS)
    trace = take_trace(stepper, [TokenSequence(np.arange(12)), TokenSequence(np.arange(9))])
    run.scored.__dict__["validated"] = [([], trace), ([], trace)]
    assert run.scored.validation_drop(run.subject.full) == 0.0
    assert run.scored.validation_drop(run.bridging.shallow_point) == 1.0


def test_windows_of_one_document_are_summed_before_anything_is_resampled(stepper) -> None:
    run = evidence(stepper)
    run.traces.__dict__["_evaluated"] = [TokenSequence(np.arange(3), document=number) for number in (0, 0, 2, 5, 5, 5)]
    assert run.traces.by_document(np.array([1, 2, 4, 8, 16, 32])).values.tolist() == [3, 4, 56]
    assert run.traces.by_document(np.ones((6, 2))).values.tolist() == [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]]


def test_thirty_documents_or_more_are_read_where_there_are_so_many(stepper, monkeypatch) -> None:
    run = evidence(stepper)
    monkeypatch.setattr(Subject, "documents", lambda self, split: (np.zeros(5000, dtype=np.int64) for _ in range(80)))
    for count in (30, 60, 100, 200, 1000):
        windows = run.subject.sequences("evaluate", count)
        assert len(windows) == count
        assert len({window.document for window in windows}) >= 30


@pytest.mark.parametrize("opening", [0, None])
def test_a_timed_prompt_fits_into_a_document_of_random_tokens(stepper, opening) -> None:
    run = evidence(stepper)
    run.loaded.trained, run.loaded.opening = False, opening
    run.subject.budget = replace(FEW, prompt_tokens=80)
    assert [len(prompt.tokens) for prompt in run.subject.prompts(3, 80)] == [80, 80, 80]
