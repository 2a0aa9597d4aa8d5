"""Scores of tasks that lm-eval lacks or cannot load offline: a document and its results → one number per metric.

SQuAD v1.1 (Rajpurkar et al. 2016): exact match and token F1 of normalised texts (lower case, no punctuation, no
articles, single spaces), the best over all reference answers. SamSum (Gliwa et al. 2019): ROUGE F-measures in 0–1,
Porter-stemmed, from the package rouge-score. Functions have the shape that lm-eval calls: ``f(doc, results)``.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

from emad_ref.tasks.humaneval import ENDED, Problem, judged, pass_at_1
from emad_ref.tasks.scoring import runs
from emad_ref.text.documents import Example

Doc = dict[str, Any]
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def squad_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """``exact`` and ``f1``, the best over the reference answers."""
    answers = doc["answers"]["text"]
    return {
        "exact": max(float(normalised(results[0]) == normalised(answer)) for answer in answers),
        "f1": max(token_f1(results[0], answer) for answer in answers),
    }


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces, in this order."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the multiset of normalised words; two empty texts agree."""
    mine, theirs = normalised(prediction).split(), normalised(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    shared = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * shared / (len(mine) + len(theirs))


def samsum_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """``rouge1`` and ``rougeL``."""
    scores = _rouge().score(doc["summary"], results[0])
    return {name: float(score.fmeasure) for name, score in scores.items()}


@cache
def _rouge() -> Any:
    rouge = import_module("rouge_score.rouge_scorer")  # comes with lm-eval; without types
    return rouge.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)


def with_boxed_answers(rows: Any) -> Any:
    """MATH documents with the answer their solution boxes: lm-eval's function, which cannot take an empty part."""
    from lm_eval.tasks.hendrycks_math.utils import process_docs

    return process_docs(rows) if len(rows) else rows


def world_code_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Whether the generated line makes a function that passes its asserts; decided without running it."""
    example = Example("code", doc["prompt"], doc["answer"], "runs", check=doc["check"])
    return {"acc": float(runs(example, results[0]))}


def humaneval_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """``pass@1`` of one completion, run in the sandbox, and whether it was ended there, for want of time or memory.

    Raises:
        SandboxUnavailable: nothing is executed where it cannot be confined.
    """
    problem = Problem(**{name.name: doc[name.name] for name in fields(Problem)})
    (result,) = judged([problem], [results[0]])
    return {"pass@1": pass_at_1([result])} | {how: float(result.outcome == how) for how in ENDED}
