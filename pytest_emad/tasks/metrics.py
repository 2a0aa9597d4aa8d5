"""Scores of tasks that lm-eval lacks or cannot load offline: a document and its results → one number per metric.

SQuAD v1.1 (Rajpurkar et al. 2016): exact match and token F1 of normalised texts, the best over all reference answers.
SamSum (Gliwa et al. 2019): ROUGE F-measures in 0–1, Porter-stemmed, from the package rouge-score. HumanEval (Chen et
al. 2021): one greedy completion per task, cut at the first of ``STOPS``; the program runs in one limited process and
the task's own check in another (``sandbox.check_program``). lm-eval calls each function as ``f(doc, results)``.
"""

from __future__ import annotations

import ast
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from emad_ref.text.documents import TaskExample
from pytest_emad.tasks.sandbox import CodeExecution, FunctionCheckScript, check_program
from pytest_emad.tasks.scoring import is_code_completion_correct

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # unindented code after a function does not belong to it
ENDING_TEXT: dict[str, str] = {  # outcomes other than a wrong answer, in words
    "timeout": "ran out of time",
    "memory": "ran out of memory",
    "killed": "ended by a signal",
}
TaskRow = dict[str, Any]
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def compute_squad_metrics(doc: TaskRow, results: Sequence[str]) -> dict[str, float]:
    """``exact`` and ``f1``, the best over the reference answers."""
    answers = doc["answers"]["text"]
    return {
        "exact": max(float(normalize_answer(results[0]) == normalize_answer(answer)) for answer in answers),
        "f1": max(token_f1(results[0], answer) for answer in answers),
    }


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces, in this order."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the multiset of normalised words; two empty texts agree."""
    mine, theirs = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    shared = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * shared / (len(mine) + len(theirs))


def compute_samsum_metrics(doc: TaskRow, results: Sequence[str]) -> dict[str, float]:
    """``rouge1`` and ``rougeL``."""
    scores = _rouge().score(doc["summary"], results[0])
    return {name: float(score.fmeasure) for name, score in scores.items()}


@cache
def _rouge() -> Any:
    rouge = import_module("rouge_score.rouge_scorer")  # comes with lm-eval; without types
    return rouge.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)


def add_boxed_answers(rows: Any) -> Any:
    """MATH documents with the boxed answer of their solution, by lm-eval's function, which rejects an empty split."""
    from lm_eval.tasks.hendrycks_math.utils import process_docs

    return process_docs(rows) if len(rows) else rows


def compute_world_code_metrics(doc: TaskRow, results: Sequence[str]) -> dict[str, float]:
    """``acc``: whether the generated line completes a function that passes its asserts, without running it."""
    example = TaskExample("code", doc["prompt"], doc["answer"], "runs", check=doc["check"])
    return {"acc": float(is_code_completion_correct(example, results[0]))}


def truncate_completion(completion: str) -> str:
    """``completion`` up to the first stop sequence in it; one that begins in the prompt does not count."""
    return completion[: min(at for stop in STOPS if (at := (completion + stop).find(stop)) >= 0)]


def join_humaneval_prompt_completion(doc: TaskRow, completion: str) -> str:
    """The program to judge: prompt and truncated ``completion``."""
    return f"{doc['prompt']}{truncate_completion(completion)}\n"


def humaneval_check_script(doc: TaskRow) -> FunctionCheckScript:
    """The check, which may use the helpers that the prompt defines."""
    definitions = doc["prompt"]
    try:
        ast.parse(definitions)
    except SyntaxError:  # a prompt without a docstring ends at a colon
        definitions += doc["canonical_solution"]
    return FunctionCheckScript(doc["entry_point"], definitions, f"{doc['test']}\ncheck({doc['entry_point']})\n")


def compute_humaneval_metrics(
    doc: TaskRow, results: Sequence[str], *, execution: CodeExecution = "confined"
) -> dict[str, float]:
    """``pass@1`` of one completion, and whether time, memory or a signal ended it.

    Raises:
        SandboxUnavailable: this machine cannot run programs as ``execution`` says.
    """
    program = join_humaneval_prompt_completion(doc, results[0])
    outcome = check_program(humaneval_check_script(doc), program, execution=execution).outcome
    return {"pass@1": float(outcome == "passed")} | {how: float(outcome == how) for how in ENDING_TEXT}
