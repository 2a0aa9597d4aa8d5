"""Correctness of task items under adaptive depth: examples → token sequences → right or wrong at given depths.

``choice``       Every option is teacher-forced after the prompt; the rule decides from the prompt's last position on.
                 The answer is the option with the highest log-likelihood, summed over its tokens.
``mean_choice``  The same with the log-likelihood divided by the number of tokens.
``exact``        Greedy decoding writes the expected answer if and only if, under teacher forcing, the argmax at D_t is
                 the next answer token at every position.
``runs``         The program that greedy decoding writes must pass its asserts (``is_code_completion_correct``).

One trace decides all but ``runs`` at every operating point. ``has_true_asserts_when_interpreted`` never executes
generated text. It evaluates the syntax tree of a small language: functions of one argument that return an arithmetic
expression, and asserts that compare a call with an integer. Every other program fails. ``PairAnswerFunctions`` is the
interface through which a pair of models answers tasks.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.prefix_tree import TextGenerationRequest
from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats, Ints
from emad_ref.replay.replay import top1_tokens_at_depth
from emad_ref.text import world
from emad_ref.text.corpora import LazyDocumentTokens
from emad_ref.text.documents import Split, TaskExample
from pytest_emad.tasks.datasets import TaskDataUnavailable

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
LARGEST_VALUE = 10**12  # bounds the time and memory of generated arithmetic


class _NotInLanguage(Exception):
    """Raised for a program outside the small language of ``has_true_asserts_when_interpreted``."""


def has_true_asserts_when_interpreted(program: str) -> bool:
    """Whether ``program`` is in the small language, has at least one assert, and all its asserts are true."""
    try:
        statements = ast.parse(program).body
        functions = {s.name: s for s in statements if isinstance(s, ast.FunctionDef)}
        asserts = [s for s in statements if isinstance(s, ast.Assert)]
        if len(functions) + len(asserts) != len(statements) or not asserts:
            return False
        return all(_assert_holds(statement.test, functions) for statement in asserts)
    except (_NotInLanguage, SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # a program outside the language fails


def _assert_holds(test: ast.expr, functions: dict[str, ast.FunctionDef]) -> bool:
    match test:
        case ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[expected]):
            return _evaluate(call, {}, functions) == _evaluate(expected, {}, {})
    raise _NotInLanguage


def _evaluate(node: ast.expr, names: dict[str, int], functions: dict[str, ast.FunctionDef]) -> int:
    match node:
        case ast.Constant(value=bool()):
            raise _NotInLanguage
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_evaluate(left, names, functions), _evaluate(right, names, functions))
            if abs(value) > LARGEST_VALUE:
                raise _NotInLanguage
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, names, functions)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in functions and not names:
            return _evaluate_call(functions[name], _evaluate(argument, names, functions), functions)
    raise _NotInLanguage


def _evaluate_call(function: ast.FunctionDef, argument: int, functions: dict[str, ast.FunctionDef]) -> int:
    match function:
        case ast.FunctionDef(
            args=ast.arguments(
                posonlyargs=[], args=[ast.arg(arg=name)], vararg=None, kwonlyargs=[], kwarg=None, defaults=[]
            ),
            body=[ast.Return(value=ast.expr() as result)],
            decorator_list=[],
        ):
            return _evaluate(result, {name: argument}, functions)
    raise _NotInLanguage


class TextEncoder(Protocol):
    """The part of a tokenizer that scoring needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class EncodedTaskItem:
    """An example as tokens: ``prompt`` int64 [n] with opening token; ``continuations``, one per option or answer."""

    example: TaskExample
    prompt: Ints
    continuations: tuple[Ints, ...]


def encode_item(example: TaskExample, tokenizer: TextEncoder, opening: int | None) -> EncodedTaskItem:
    """Encode an example; ``opening`` is the model's beginning-of-text id or None.

    Raises:
        BadArgument: an empty prompt, an answer without tokens, or an answer that is not among the options.
    """
    if example.options and example.answer not in example.options:
        raise BadArgument("example.answer", example.answer, f"one of the options {example.options}", "mend the task")

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompt = ([] if opening is None else [opening]) + ids(example.prompt)
    texts = example.options or (example.answer,)
    continuations = tuple(np.array(ids(text), dtype=np.int64) for text in texts)
    if not prompt or any(len(c) == 0 for c in continuations):
        raise BadArgument("example", example, "a prompt and answers of at least one token", "leave the example out")
    return EncodedTaskItem(example, np.array(prompt, dtype=np.int64), continuations)


def make_world_items(
    split: Split, count: int, seed: int, tokenizer: TextEncoder, opening: int | None
) -> dict[str, list[EncodedTaskItem]]:
    """Task of the synthetic world → ``count`` items of ``split``; raises as ``encode_item``."""
    return {
        task: [
            encode_item(example, tokenizer, opening) for example in world.generate_examples(task, split, count, seed)
        ]
        for task in world.TASKS
    }


# ---------------------------------------------------------------- continuation choice: a task of any text

CONTINUATION_CHOICE = "continuation choice"
OPTIONS = 4  # the true continuation and three from other documents
CONTEXT_TOKENS, CONTINUATION_TOKENS = 32, 24
FEWEST_DOCUMENTS = 30  # a claim about documents needs at least this many
MOST_READ = 20  # documents read per item at most, so that a file of short documents is not read to its end


def make_continuation_items(
    documents: Iterable[Ints | LazyDocumentTokens],
    count: int,
    *,
    text: str,
    opening: int | None,
    rng: np.random.Generator,
    group_of: Callable[[int], int] | None = None,
) -> list[EncodedTaskItem]:
    """At most ``count`` items, one per document: which of ``OPTIONS`` pieces follows its first ``CONTEXT_TOKENS``?

    One option is the document's next ``CONTINUATION_TOKENS`` tokens. The other ``OPTIONS`` − 1 are the tokens at the
    same positions of other documents, so neither length nor position reveals the answer. The other documents are the
    next ones in a random ring of all documents, so each piece is right once and wrong in ``OPTIONS`` − 1 items. Pieces
    equal to an option are skipped.

    Args:
        documents: int64 [n] tokens each, without an opening token. Too short ones are skipped.
        text: name of the documents, for messages.
        opening: the model's beginning-of-text id, or None.
        rng: shuffles documents and options.
        group_of: as for ``cut_windows``; a group gives one item, of its first document that is long enough.

    Raises:
        TaskDataUnavailable: fewer than ``FEWEST_DOCUMENTS`` are long enough, or too few differ.
    """
    wanted, read, beginnings = CONTEXT_TOKENS + CONTINUATION_TOKENS, 0, dict[int, Ints]()
    for place, document in enumerate(documents):
        group = place if group_of is None else group_of(place)
        if group in beginnings:
            continue
        read += 1
        if len(beginning := np.asarray(document[:wanted], dtype=np.int64)) == wanted:
            beginnings[group] = beginning
        if len(beginnings) == count or read == MOST_READ * count:
            break
    cut = list(beginnings.values())
    if len(cut) < FEWEST_DOCUMENTS:
        raise TaskDataUnavailable(
            f"{text}: {len(cut)} of {read} documents read have {wanted} tokens, but {CONTINUATION_CHOICE} needs "
            f"{FEWEST_DOCUMENTS}; use a larger corpus, or one of longer documents"
        )
    pieces, ring = [_ids(beginning[CONTEXT_TOKENS:]) for beginning in cut], rng.permutation(len(cut))
    items: dict[int, EncodedTaskItem] = {}
    for place, number in enumerate(ring.tolist()):
        offered = _first_distinct((pieces[other] for other in np.roll(ring, -place)), OPTIONS)
        if len(offered) < OPTIONS:
            raise TaskDataUnavailable(
                f"{text}: {len(cut)} documents, but only {len(offered)} kinds of tokens after their first "
                f"{CONTEXT_TOKENS}; {CONTINUATION_CHOICE} needs {OPTIONS}: use another corpus"
            )
        options = tuple(offered[at] for at in rng.permutation(OPTIONS))
        prompt = cut[number][:CONTEXT_TOKENS]
        example = TaskExample(CONTINUATION_CHOICE, _ids(prompt), pieces[number], "mean_choice", options)
        opened = prompt if opening is None else np.concatenate([[opening], prompt])
        tokens = tuple(np.array(option.split(), dtype=np.int64) for option in options)
        items[number] = EncodedTaskItem(example, opened, tokens)
    return [items[number] for number in range(len(cut))]


def _first_distinct(pieces: Iterable[str], count: int) -> list[str]:
    firsts: dict[str, None] = {}
    for piece in pieces:
        firsts[piece] = None
        if len(firsts) == count:
            break
    return list(firsts)


def _ids(tokens: Ints) -> str:
    """Token ids as text. Decoded text would not do, because different pieces may decode to the same text."""
    return " ".join(map(str, tokens.tolist()))


# ---------------------------------------------------------------- correctness


def to_token_sequences(items: Sequence[EncodedTaskItem]) -> list[TokenSequence]:
    """One sequence per continuation, in order of items and options."""
    return [
        TokenSequence(np.concatenate([item.prompt, continuation]), first_decided=len(item.prompt) - 1)
        for item in items
        for continuation in item.continuations
    ]


def cluster_duplicate_items(items: Sequence[EncodedTaskItem]) -> Ints:
    """int64 [items] cluster numbers; items with equal prompt and answer share one, since they are dependent."""
    keys = [f"{item.example.prompt}\0{item.example.answer}" for item in items]
    numbers: Ints = np.unique(keys, return_inverse=True)[1].astype(np.int64)
    return numbers


def majority_accuracy(examples: Sequence[TaskExample], elsewhere: Sequence[TaskExample]) -> float:
    """Accuracy on ``examples`` of always giving the most frequent answer of ``elsewhere``; of ties the best one.

    Raises:
        BadArgument: no examples, or none ``elsewhere``.
    """
    if not examples or not elsewhere:
        raise BadArgument("examples", (len(examples), len(elsewhere)), "at least one on either side")
    counts = Counter(example.answer for example in elsewhere)
    most = max(counts.values())
    right = Counter(example.answer for example in examples)
    return max(right[answer] for answer, count in counts.items() if count == most) / len(examples)


def guess_accuracy(items: Sequence[EncodedTaskItem], elsewhere: Sequence[EncodedTaskItem]) -> float:
    """Accuracy of the better guess: from an input's own symbols, or the most frequent answer ``elsewhere``."""
    examples, others = ([item.example for item in side] for side in (items, elsewhere))
    return max(float(np.mean([example.chance_accuracy for example in examples])), majority_accuracy(examples, others))


def mark_correct_items_from_trace(items: Sequence[EncodedTaskItem], trace: Trace, depth: Ints) -> Bools:
    """Whether each item is right at ``depth`` [tokens], by a ``trace`` of ``to_token_sequences(items)``; bool [items].

    Raises:
        BadArgument: a trace or depths of other items, or an item scored by ``runs``.
    """
    expected = sum(len(item.continuations) for item in items)
    if trace.n_sequences != expected:
        raise BadArgument(
            "trace.sequences", trace.n_sequences, f"{expected}, one per continuation", "trace to_token_sequences(items)"
        )
    if np.shape(depth) != (len(trace),):
        raise BadArgument(
            "depth", np.shape(depth), f"one depth per traced position, [{len(trace)}]", "replay this trace"
        )
    likelihood = -trace.token_positions.sum_by_sequence(trace.nll_nats[np.arange(len(trace)), depth - 1])
    return mark_correct_items_from_scores(
        items,
        likelihood,
        trace.token_positions.sum_by_sequence(top1_tokens_at_depth(trace, depth) == trace.target)
        == trace.n_decided_by_sequence,
    )


def mark_correct_items_from_scores(items: Sequence[EncodedTaskItem], likelihood: Floats, greedy: Bools) -> Bools:
    """Whether each item is right; bool [items].

    ``likelihood``, ``greedy``: per continuation its log-likelihood in nats, and whether greedy decoding writes it.

    Raises:
        BadArgument: an item scored by ``runs``.
    """
    verdicts = np.zeros(len(items), dtype=bool)
    at = 0
    for i, item in enumerate(items):
        options = slice(at, at + len(item.continuations))
        if item.example.scoring == "choice":
            verdicts[i] = int(np.argmax(likelihood[options])) == item.example.answer_index
        elif item.example.scoring == "mean_choice":
            per_token = likelihood[options] / [len(continuation) for continuation in item.continuations]
            verdicts[i] = int(np.argmax(per_token)) == item.example.answer_index
        elif item.example.scoring == "exact":
            verdicts[i] = bool(greedy[options][0])
        else:
            remedy = "generate the program and use is_code_completion_correct()"
            raise BadArgument("scoring", item.example.scoring, "choice, mean_choice or exact", remedy)
        at = options.stop
    return verdicts


def is_code_completion_correct(example: TaskExample, continuation: str) -> bool:
    """Whether the prompt and the first line of the greedy ``continuation`` pass the example's asserts."""
    line, newline, _ = continuation.partition("\n")
    return bool(newline) and has_true_asserts_when_interpreted(example.prompt + line + "\n" + example.check)


Continuations = Sequence[tuple[Ints, Ints]]  # each a prompt and a continuation, int64 [n]


@dataclass(frozen=True, eq=False)
class PairAnswerTokens:
    """A text by a pair: ``tokens`` int64 [emitted], of which the large model wrote ``by_large``.

    ``entropy_bits`` float64 [emitted]: entropy of the model that wrote each token; None if it is not recorded.
    """

    tokens: Ints
    by_large: int
    entropy_bits: Floats | None = None


@dataclass(frozen=True, eq=False)
class OptionScore:
    """Score of an option: Σ log p in nats, and whether greedy decoding would write it.

    ``written``: its tokens, and which model was active for how many.
    """

    log_p: float
    greedy: bool
    written: PairAnswerTokens


@dataclass(frozen=True)
class PairAnswerFunctions:
    """How a pair answers tasks. ``write`` generates texts in order; ``read`` scores options, None if it cannot."""

    write: Callable[[Sequence[TextGenerationRequest]], list[PairAnswerTokens]]
    read: Callable[[Continuations], list[OptionScore]] | None
