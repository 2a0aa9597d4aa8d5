"""Continuation choice on a run's own text, recomputed with a plain forward of transformers and float64 sums."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import take_trace
from emad_ref.exit_rules import default_probes, fixed_entropy_point
from emad_ref.models.loading import LoadedModel, load
from emad_ref.point import full_depth
from emad_ref.text import world
from pytest_emad.measurements import task_scores
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.tasks.scoring import (
    CONTEXT_TOKENS,
    CONTINUATION_CHOICE,
    CONTINUATION_TOKENS,
    FEWEST_DOCUMENTS,
    to_token_sequences,
)

LAYERS = 4
FULL, FIRST = full_depth(LAYERS), fixed_entropy_point(LAYERS, (1,), 1e9)  # every token exits after layer 1
COUNTS = {"evaluate": 40, "validate": 32}
BUDGET = replace(BUDGETS["smoke"], **COUNTS)
END = CONTEXT_TOKENS + CONTINUATION_TOKENS


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


def write(folder: Path, **documents: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for stem, texts in documents.items():
        (folder / f"{stem}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Write text of the world, which ``emad-nano`` can predict, as a user's text."""
    return {
        "test": list(islice(world.generate_documents("world:mixed", "evaluate", 0), 60)),
        "valid": list(islice(world.generate_documents("world:mixed", "validate", 0), 80)),
    }


@pytest.fixture(scope="module")
def run(nano: LoadedModel, texts: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> ModelMeasurements:
    return evidence(nano, write(tmp_path_factory.mktemp("data") / "text", **texts))


def evidence(loaded: LoadedModel, corpus: Path | str, **options) -> ModelMeasurements:
    return ModelMeasurements(loaded, Study(corpus=str(corpus), **{"budget": BUDGET, **options}), RunResources())


def reference(nano: LoadedModel, run: ModelMeasurements, depth: int) -> np.ndarray:
    """Return [items, options] mean log-likelihood per token by a plain float64 forward, read out after ``depth``."""
    model = copy.deepcopy(nano.model).double()
    found = []
    for item in run.task_scores._own[CONTINUATION_CHOICE]:
        rows = torch.from_numpy(np.stack([np.concatenate([item.prompt, piece]) for piece in item.continuations]))
        with torch.no_grad():
            states = model(rows, output_hidden_states=True).hidden_states[depth]
            # transformers has already normed the last state
            normed = states if depth == LAYERS else model.gpt_neox.final_layer_norm(states)
            log_p = model.get_output_embeddings()(normed).log_softmax(dim=-1)
        told = log_p[:, len(item.prompt) - 1 : -1].gather(2, rows[:, len(item.prompt) :, None])
        assert told.shape == (4, CONTINUATION_TOKENS, 1)
        found.append((told.sum(dim=(1, 2)) / CONTINUATION_TOKENS).numpy())
    return np.array(found)


@pytest.mark.parametrize("point", [FULL, FIRST], ids=lambda point: point.name)
def test_answers_and_likelihoods_are_those_of_a_plain_forward(nano: LoadedModel, run: ModelMeasurements, point) -> None:
    depth = point.ceiling if point is FULL else 1
    expected, items = reference(nano, run, depth), run.task_scores._own[CONTINUATION_CHOICE]
    trace = take_trace(nano.stepper, to_token_sequences(items))
    ours = (
        -trace.token_positions.sum_by_sequence(trace.nll_nats[:, depth - 1]).reshape(expected.shape)
        / CONTINUATION_TOKENS
    )
    np.testing.assert_allclose(ours, expected, atol=2e-4)  # float32 states against float64, 24 terms averaged
    answers = [item.example.answer_index for item in items]
    right = run.task_scores.correctness_by_item(CONTINUATION_CHOICE, point)
    assert right.values.tolist() == (expected.argmax(axis=1) == answers).tolist()
    spread = np.sort(expected, axis=1)
    assert (spread[:, -1] - spread[:, -2]).min() > 4e-4, "an answer depends on rounding"
    assert (right.values.mean() < 1) == (point is FIRST), "layer 1 cannot do what full depth does"


def test_items_are_of_evaluated_documents_alone_and_a_margin_is_chosen_on_others(
    nano: LoadedModel, run: ModelMeasurements, texts: dict[str, list[str]]
) -> None:
    def beginnings(stem: str) -> set[bytes]:
        ids = (nano.tokenizer.encode(text, add_special_tokens=False)[:END] for text in texts[stem])
        return {np.array(each, dtype=np.int64).tobytes() for each in ids if len(each) == END}

    def held(items) -> set[bytes]:
        opened = int(nano.opening_token_id is not None)
        return {
            np.concatenate([item.prompt[opened:], item.continuations[item.example.answer_index]]).tobytes()
            for item in items
        }

    judged, chosen = (held(items[CONTINUATION_CHOICE]) for items in (run.task_scores._own, run.task_scores._validation))
    assert (len(judged), len(chosen)) == (COUNTS["evaluate"], COUNTS["validate"])
    assert judged <= beginnings("test")
    assert chosen <= beginnings("valid")
    calibrated = {
        window.tokens[int(nano.opening_token_id is not None) :][:END].tobytes()
        for window in run.traces.calibration_windows
    }
    assert not (judged | chosen) & calibrated
    assert set(run.task_scores.compute_validation_drop_by_task(fixed_entropy_point(LAYERS, (2,), 1e9))) == {
        CONTINUATION_CHOICE
    }


def test_it_counts_like_every_task(run: ModelMeasurements) -> None:
    assert run.task_scores.accuracy_tasks == run.task_scores.replayed_task_names == [CONTINUATION_CHOICE]
    assert run.task_scores.compute_chance_or_majority_accuracy(CONTINUATION_CHOICE) == 0.25
    at = run.task_scores.measure_accuracy_against_full_depth(CONTINUATION_CHOICE, FIRST)
    assert at.full.has_only_independent_items, "the unit is the document"
    assert len(at.full) == COUNTS["evaluate"]
    assert at.is_above_guessing
    assert 0.4 < at.saving < 0.9
    assert (
        "not exercised"
        in run.task_scores.measure_accuracy_against_full_depth(CONTINUATION_CHOICE, FULL).exclusion.reason
    )
    assert f"{COUNTS['evaluate']} items, one per document" in run.task_scores.continuation_choice_note
    assert len(run.task_scores.replayed_task_reference_sequences) == 4 * COUNTS["evaluate"], "the bridge's documents"


@pytest.mark.parametrize("point", [FIRST, fixed_entropy_point(LAYERS, (1, 2), 1.0)], ids=lambda point: point.name)
def test_decoded_option_by_option_it_is_what_replay_says(
    run: ModelMeasurements, monkeypatch: pytest.MonkeyPatch, point
) -> None:
    monkeypatch.setattr(task_scores, "DECODED_ITEMS", 12)
    decoded = run.task_scores.decode_full_and_adaptive_correctness(CONTINUATION_CHOICE, point)
    for found, at in zip(decoded, (FULL, point), strict=True):
        assert (
            found.values.tolist() == run.task_scores.correctness_by_item(CONTINUATION_CHOICE, at).values[:12].tolist()
        )
    assert (decoded[0].values != decoded[1].values).any() or point is not FIRST, "layer 1 loses none of these"


def test_heads_are_read_where_a_point_asks(run: ModelMeasurements, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default probes and the end first; for another point, all earlier layers and those that it needs."""
    asked, trace = [], run.subject.take_lens_trace
    scored = ModelMeasurements(run.loaded, run.study, RunResources()).task_scores
    monkeypatch.setattr(
        scored._subject,
        "take_lens_trace",
        lambda sequences, what, layers: asked.append(layers) or trace(sequences, what, (), layers),
    )
    for point in (FULL, fixed_entropy_point(LAYERS, default_probes(LAYERS), 1.0), FIRST, FULL):
        assert scored.correctness_by_item(CONTINUATION_CHOICE, point).values.tolist() == (
            run.task_scores.correctness_by_item(CONTINUATION_CHOICE, point).values.tolist()
        )
    assert asked == [[2, 4], [1, 2, 4]]


def test_a_corpus_of_the_world_keeps_its_own_tasks(nano: LoadedModel) -> None:
    scored = evidence(nano, "world:mixed", budget=replace(BUDGET, items=2)).task_scores
    assert scored.accuracy_tasks == list(world.TASKS)
    assert (scored.absent_by_task, scored.continuation_choice_note) == ({}, "")


def test_random_weights_are_asked_nothing() -> None:
    scored = evidence(load("random:emad-nano"), "self").task_scores
    assert (scored.accuracy_tasks, scored.absent_by_task) == ([], {})


def test_text_that_makes_no_task_is_refused_by_name(nano: LoadedModel, texts: dict[str, list[str]], tmp_path) -> None:
    short = [text[:90] for text in texts["test"]]
    small = write(tmp_path / "few", test=texts["test"][:12], valid=texts["valid"])
    brief = write(tmp_path / "short", test=short, valid=short)
    for folder, said in (
        (small, f"few', evaluate: 12 of 12 documents read have {END}"),
        (brief, "short', evaluate: 0 of"),
    ):
        scored = evidence(nano, folder).task_scores
        assert scored.accuracy_tasks == scored.replayed_task_reference_sequences == []
        (absent,) = scored.absent_by_task.values()
        assert said in absent.reason
        assert f"but continuation choice needs {FEWEST_DOCUMENTS}; use a larger corpus" in absent.reason
    narrow = evidence(nano, small)
    narrow.subject.window_size = END
    assert (
        f"it reads {END + 1} tokens, and 'emad-nano' has {END} positions"
        in narrow.task_scores.absent_by_task[CONTINUATION_CHOICE].reason
    )
