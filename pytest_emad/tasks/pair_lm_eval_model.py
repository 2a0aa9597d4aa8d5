"""Published tasks answered by two models: lm-eval over an ``PairAnswerFunctions`` (switching, speculation, one model).

Requests, tokens, truncation and stop strings are those of ``EmadLM``; the strategy decides which model writes a token:

``generate_until``   the strategy writes the text
``loglikelihood``    the strategy scores every option token by token (multiple choice)

Published tasks have one split for judging, and a rule must not be judged on documents that chose it. So a checksum of
the question puts each document into one of two halves (``split_of_question``): repeated questions always share a half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.utils import postprocess_generated_text

from emad_ref.decoding.prefix_tree import TextGenerationRequest
from emad_ref.errors import BadArgument
from emad_ref.models.loading import LoadedModel
from emad_ref.models.tokenizers import decode_tokens
from emad_ref.protocol import Unsupported
from emad_ref.record import Bools
from emad_ref.text.documents import Split
from pytest_emad.tasks.continuation_scoring import Answer, make_stop_string_check
from pytest_emad.tasks.evaluation import evaluate_tasks, load_tasks, make_task_manager
from pytest_emad.tasks.lm_eval_model import EmadLM
from pytest_emad.tasks.sandbox import CodeExecution
from pytest_emad.tasks.scoring import PairAnswerFunctions, PairAnswerTokens

HALVES: tuple[Split, Split] = ("validate", "evaluate")
ALL_REQUESTS = 1_000_000  # requests per call of the strategy, which makes its own batches


def split_of_question(question: str) -> Split:
    """The half of a question: the parity of its sha256.

    >>> split_of_question("Who put the tea in the red box?")
    'validate'
    """
    return HALVES[hashlib.sha256(question.encode()).digest()[0] % 2]


@dataclass(frozen=True)
class TaskDocument:
    """One document of a task: the ``member`` of the task's group, its ``index`` there, its question."""

    member: str
    index: int
    question: str


def select_task_documents(
    members: Sequence[str],
    split: Split,
    count: int,
    *,
    data: Path | None,
    limit: int | None,
    definitions: Path | None = None,
) -> list[TaskDocument]:
    """At most ``count`` documents of one half, in the order of their questions' checksums, so members are mixed.

    ``limit``: documents read of each member, from its first.

    Raises:
        BadArgument: a split other than the two halves, or invalid data.
    """
    if split not in HALVES:
        raise BadArgument("split", split, f"one of {', '.join(HALVES)}", "published tasks are dealt into two halves")
    tasks = load_tasks(make_task_manager(data, definitions, members), members)["tasks"]
    documents = [
        TaskDocument(member, index, str(task.doc_to_text(document)))
        for member, task in tasks.items()
        for index, document in enumerate(islice(task.eval_docs, limit))
    ]
    dealt = [document for document in documents if split_of_question(document.question) == split]
    return sorted(dealt, key=lambda document: hashlib.sha256(document.question.encode()).digest())[:count]


@dataclass(frozen=True, eq=False)
class PairTaskOutcome:
    """Outcome in the order of the documents.

    ``right``: bool [documents]. ``written``: the text of each, or all its options. ``wanted``: the request for each
    text; empty for multiple choice.
    """

    right: Bools
    written: list[list[PairAnswerTokens]]
    wanted: list[TextGenerationRequest]


def answer_documents(
    way: PairAnswerFunctions,
    documents: Sequence[TaskDocument],
    models: tuple[LoadedModel, LoadedModel],
    *,
    data: Path | None,
    run_code: CodeExecution | None,
    definitions: Path | None = None,
) -> PairTaskOutcome:
    """Let ``way`` answer ``documents`` and lm-eval score them. ``models``: small and large, with one tokenizer.

    Raises:
        Unsupported: multiple choice, and the strategy scores no options.
        BadArgument: as ``evaluate_tasks``.
    """
    members = list(dict.fromkeys(document.member for document in documents))
    chosen = {name: sorted(d.index for d in documents if d.member == name) for name in members}
    lm = PairLM(way, models)
    results = evaluate_tasks(lm, members, data=data, definitions=definitions, run_code=run_code, documents=chosen)
    # lm-eval numbers its documents in the order of the file
    order = [(document.member, chosen[document.member].index(document.index)) for document in documents]
    right = np.array([results[member].scores[place] == 1 for member, place in order], dtype=bool)
    text_requests = [lm.asked[key] for key in order if key in lm.asked]
    return PairTaskOutcome(right, [lm.written[key] for key in order], text_requests)


Key = tuple[str, int]  # member of a group, index among the requested documents


class PairLM(EmadLM):
    """lm-eval model that answers by the strategy ``way`` over two models, small and large.

    ``written``  (task, index of a document) → its text; ``asked`` → the request for its text.

    Raises:
        BadArgument: as ``EmadLM``.
    """

    def __init__(self, way: PairAnswerFunctions, models: tuple[LoadedModel, LoadedModel]):
        longest = min(model.stepper.max_positions for model in models)
        super().__init__(models[1], batch_size=ALL_REQUESTS, max_length=longest)
        self._way = way
        # requests and texts, until lm-eval's requests name their documents
        self._texts: dict[tuple[Any, ...], tuple[TextGenerationRequest, PairAnswerTokens]] = {}
        self._options: list[PairAnswerTokens] = []
        self.written: dict[Key, list[PairAnswerTokens]] = {}
        self.asked: dict[Key, TextGenerationRequest] = {}

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """[requests] texts, cut before their first stop string. Raises as ``EmadLM``."""
        texts = super().generate_until(requests, disable_tqdm=True)
        for request in requests:
            request_key, written = self._texts[self._generation(*request.args[:2])[0]]
            self.asked[_document_key(request)] = request_key
            self.written.setdefault(_document_key(request), []).append(written)
        return texts

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """[requests] log p of an option and whether greedy decoding gives it, token by token."""
        answers = super().loglikelihood(requests, disable_tqdm=True)
        for request, written in zip(requests, self._options, strict=True):
            self.written.setdefault(_document_key(request), []).append(written)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Raise Unsupported: EAD decides which model writes a token; a given text is not written."""
        raise Unsupported("perplexity of a given text: no token is written, so there is nothing to switch or speculate")

    def _generate(self, contexts: Sequence[Sequence[int]], stops: Sequence[str], max_new: int) -> list[str]:
        def text(tokens: Sequence[int]) -> str:
            return decode_tokens(self.tokenizer, tokens, skip_special_tokens=True)

        def written_text(tokens: list[int]) -> str:  # some ends of a text are not special tokens
            return text(tokens[:-1] if tokens and tokens[-1] in stop else tokens)

        ended, stop = make_stop_string_check(text, stops), self.loaded.end_token_ids
        text_requests = [
            TextGenerationRequest(np.array(context, dtype=np.int64), max_new, stop, ended) for context in contexts
        ]
        written = self._way.write(text_requests)
        for context, one, done in zip(contexts, text_requests, written, strict=True):
            self._texts[tuple(context), tuple(stops), max_new] = one, done
        return [postprocess_generated_text(written_text(done.tokens.tolist()), list(stops), None) for done in written]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **ignored: Any
    ) -> list[Answer]:
        if self._way.read is None:
            raise Unsupported("multiple choice: this decoding strategy scores no options")
        fitted = [self._fitted(context, continuation) for _, context, continuation in requests]
        self._shortened = [
            len(tokens) < len(context) + len(continuation)
            for (tokens, _), (_, context, continuation) in zip(fitted, requests, strict=True)
        ]
        split = [(np.array(tokens[: at + 1]), np.array(tokens[at + 1 :])) for tokens, at in fitted]
        read = self._way.read(split)
        self._options = [one.written for one in read]
        return [(one.log_p, one.greedy) for one in read]


def _document_key(request: Instance) -> Key:
    return str(request.task_name), int(request.doc_id)
