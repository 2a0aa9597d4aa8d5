"""Published tasks answered by a pair: halves by question, switching, speculation, options read in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")

from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule
from emad_ref.errors import BadArgument
from emad_ref.models.loading import load
from emad_ref.protocol import Unsupported
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import PairSampleSizes, Study
from pytest_emad.tasks.evaluation import evaluate_tasks
from pytest_emad.tasks.lm_eval_model import EmadLM
from pytest_emad.tasks.pair_lm_eval_model import PairLM, select_task_documents, split_of_question
from pytest_emad.tasks.scoring import PairAnswerFunctions
from tests.unit.tasks.test_datasets import write

NAMES = ("emad-nano", "emad-tiny")
FEW = PairSampleSizes(compared=6, tried=6, thresholds=15, judged=6, calibrate=4, reported=2)
WORDS = ("tea", "jar", "cup", "box", "bag", "hat", "key", "map", "pen", "pot", "cap", "can")


@pytest.fixture(scope="module")
def models():
    return tuple(load(name) for name in NAMES)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    choices = [
        {
            "id": str(n),
            "question": f"Where is the {word}?",
            "choices": {"text": ["in the barn", f"under the {word} and the red box"], "label": ["A", "B"]},
            "answerKey": "AB"[n % 2],
        }
        for n, word in enumerate([*WORDS, WORDS[0]])
    ]
    write(folder / "arc/ARC-Easy/test.jsonl", choices)
    sums = [{"question": f"{n} and {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(1, 13)]
    for split in ("train", "test"):
        write(folder / f"gsm8k/{split}.jsonl", sums)
    return folder


def paired(models, data, *tasks) -> PairMeasurements:
    study = Study(data=data, tasks=frozenset(tasks), corpus="self")
    return PairMeasurements(*models, study, RunResources(), names=NAMES, savings=(0.415,), size=FEW)


# ------------------------------------------------------------ halves


def test_a_question_lies_in_one_half_whatever_stands_beside_it(data) -> None:
    halves = {
        split: select_task_documents(["arc_easy"], split, 100, data=data, limit=None)
        for split in ("validate", "evaluate")
    }
    both = [document for half in halves.values() for document in half]
    assert sorted(document.index for document in both) == list(range(13)), "every document in one half"
    (repeated,) = [half for half, documents in halves.items() if any(d.index == 12 for d in documents)]
    assert any(document.index == 0 for document in halves[repeated]), "the same question, again"
    fewer = select_task_documents(["arc_easy"], "validate", 2, data=data, limit=None)
    assert fewer == halves["validate"][:2], "a smaller count takes the first of the same"
    assert {
        document.index for document in select_task_documents(["arc_easy"], "validate", 100, data=data, limit=4)
    } == {document.index for document in halves["validate"] if document.index < 4}


def test_halves_are_about_equal() -> None:
    validated = sum(split_of_question(f"question {n}") == "validate" for n in range(1000))
    assert 450 < validated < 550  # binomial: 3.2 standard deviations


def test_another_split_is_refused(data) -> None:
    with pytest.raises(BadArgument, match="dealt into two halves"):
        select_task_documents(["arc_easy"], "calibrate", 2, data=data, limit=None)


# ------------------------------------------------------------ either model alone equals lm-eval's result


@pytest.mark.parametrize("task", ["arc_easy", "gsm8k"])
def test_alone_each_model_scores_as_by_itself(models, data, task) -> None:
    pair = paired(models, data, task)
    documents = select_task_documents([task], "evaluate", FEW.judged, data=data, limit=None)
    for model in (SMALL, LARGE):
        done = pair.answers.answer_by_one_model(model, task, "evaluate", FEW.judged)
        own = evaluate_tasks(EmadLM(models[model]), [task], data=data)[task]
        assert done.right.values.tolist() == [own.scores[document.index] == 1 for document in documents]
        assert done.large_share == float(model)
        assert len(done.right) == len(documents)


def test_options_are_read_in_turns(models, data) -> None:
    """Switching on options lies between the models: tokens are counted, scores are lm-eval's."""
    pair = paired(models, data, "arc_easy")
    assert pair.corpus == "arc_easy"
    assert list(pair.answers.scorable_tasks) == ["arc_easy"]
    shares = [done.large_share for done in pair.routing_rules.try_rules("arc_easy").values()]
    assert {0.0, 1.0} < set(shares), "and some in between"
    constants = pair.routing_rules.scale_paper_constants("arc_easy")
    assert constants.window == constants.least_run < 5, "options are too short for the paper's"
    assert pair.routing_rules.written_tasks_worth_routing == []
    assert pair.routing_rules.decodable_tasks == ["plain documents"]


def test_switching_writes_the_users_task_and_stops_at_its_strings(models, data) -> None:
    pair = paired(models, data, "gsm8k")
    done = pair.answers.answer_by_switching(SwitchingRule(0.3, 5, 2, SMALL), "gsm8k", "evaluate", FEW.judged)
    assert 0 < done.large_share < 1
    assert len(done.walks) == len(done.right) == len(done.emitted)
    tokenizer = models[1].tokenizer
    for walk in done.walks:
        text = tokenizer.decode(walk.tokens[:-1].tolist(), skip_special_tokens=True)
        assert "Question:" not in text, "text after the stop is not written"
    assert done.flops > 0


def test_speculation_answers_the_users_task_as_the_large_model(models, data) -> None:
    pair = paired(models, data, "gsm8k")
    found = pair.answers.answer_by_speculation("gsm8k", "evaluate", 3)
    alone = pair.answers.answer_by_one_model(LARGE, "gsm8k", "evaluate", 3)
    assert found.right.values.tolist() == alone.right.values.tolist()
    assert found.emitted.tolist() == alone.emitted.tolist()
    assert 0 < found.large_share < 1


def test_validation_and_judged_documents_of_a_task_differ(models, data) -> None:
    pair = paired(models, data, "gsm8k")
    texts = {split: pair.answers.get_task("gsm8k").texts(split, 12) for split in ("validate", "evaluate")}
    prompts = {split: {tuple(text.prompt.tolist()) for text in many} for split, many in texts.items()}
    assert len(prompts["validate"] | prompts["evaluate"]) == 12
    assert not prompts["validate"] & prompts["evaluate"]


def test_repeated_questions_are_one_item(models, data) -> None:
    pair = paired(models, data, "arc_easy")
    split = split_of_question("Question: Where is the tea?\nAnswer:")
    right = pair.answers.answer_by_one_model(LARGE, "arc_easy", split, 13).right
    assert len(right.independent_values) == len(right) - 1


# ------------------------------------------------------------ refused requests


def test_a_gate_ranks_no_options(models, data) -> None:
    pair = paired(models, data, "arc_easy")
    with pytest.raises(Unsupported, match="this decoding strategy scores no options"):
        pair.answers.answer_by_speculation("arc_easy", "evaluate", 3, gate_bits=1.0)
    alone = pair.answers.answer_by_one_model(LARGE, "arc_easy", "evaluate", 3)
    assert pair.answers.answer_by_speculation("arc_easy", "evaluate", 3) is alone, (
        "lossless: the large model's own ranks"
    )
    with pytest.raises(Unsupported, match="no text is written"):
        pair.answers.make_prompts("arc_easy", "evaluate", 3)


def test_perplexity_is_nobodys_to_write(models) -> None:
    lm = PairLM(PairAnswerFunctions(lambda wanted: [], None), models)
    with pytest.raises(Unsupported, match="no token is written"):
        lm.loglikelihood_rolling([])


def test_a_half_without_documents_is_said(models, tmp_path) -> None:
    rows = [{"id": "1", "question": "What?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}]
    write(tmp_path / "arc/ARC-Easy/test.jsonl", rows)
    pair = paired(models, tmp_path, "arc_easy")
    other = {"validate": "evaluate", "evaluate": "validate"}[split_of_question("Question: What?\nAnswer:")]
    with pytest.raises(Unsupported, match=f"no document of {other} among 1"):
        pair.answers.answer_by_one_model(LARGE, "arc_easy", other, 5)
