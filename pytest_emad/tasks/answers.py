"""What a model answered at a point, as text, beside what full depth answered: the items that the point loses.

``tasks.scoring`` says whether an answer is right; a share of right answers does not show what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.models.tokenizers import decode_tokens
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import DECODE, Bools, Ints
from emad_ref.replay.replay import top1_tokens_at_depth
from pytest_emad.tasks.scoring import EncodedTaskItem, is_code_completion_correct

GENERATED_LINE = 24  # new tokens of a one-line program
SHOWN = 10  # lost items of a task and a point that a report shows
PROMPT_LETTERS = 400  # of a prompt's end
LEFT_THERE = " …"  # greedy decoding goes on in its own way, which a replay of the reference answer does not read

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TaskAnswer:
    """``text`` of an answer, and the depth of each of its tokens; empty where depths are not known."""

    text: str
    depths: tuple[int, ...] = ()


@dataclass(frozen=True)
class LostAnswer:
    """An item that full depth answers right and a point does not. ``prompt``: its end, at most ``PROMPT_LETTERS``."""

    prompt: str
    full_depth: str
    at_point: str
    depths: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"depths": list(self.depths)}


def answers_from_trace(items: Sequence[EncodedTaskItem], trace: Trace, depth: Ints, decode: Decode) -> list[TaskAnswer]:
    """The answer to each item at ``depth`` [tokens], by a ``trace`` of ``to_token_sequences(items)``.

    Of a choice: the likeliest option. Of an exact answer: its tokens up to the first that the point does not emit, then
    the token that it emits instead. Programs have no replayed answer, and no item of one may be asked for.
    """
    likelihood = -trace.token_positions.sum_by_sequence(trace.nll_nats[np.arange(len(trace)), depth - 1])
    emitted = top1_tokens_at_depth(trace, depth)
    answers, sequence = [], 0
    for item in items:
        lengths = np.array([len(continuation) for continuation in item.continuations])
        scores = likelihood[sequence : sequence + len(lengths)]
        best = int(np.argmax(scores / lengths if item.example.scoring == "mean_choice" else scores))
        positions = slice(trace.starts[sequence + best], trace.starts[sequence + best + 1])
        depths = tuple(depth[positions].tolist())
        if item.example.scoring == "exact":
            written, target = emitted[positions], trace.target[positions]
            wrong = np.flatnonzero(written != target)
            end = int(wrong[0]) + 1 if len(wrong) else len(written)
            answers.append(TaskAnswer(decode(written[:end].tolist()) + LEFT_THERE * bool(len(wrong)), depths[:end]))
        else:
            answers.append(TaskAnswer(decode(item.continuations[best].tolist()), depths))
        sequence += len(lengths)
    return answers


def write_programs(
    decoder: Decoder, items: Sequence[EncodedTaskItem], tokenizer: Any, rows: int
) -> list[tuple[TaskAnswer, bool]]:
    """What ``decoder`` writes for each program, ``rows`` at once, and whether it runs right."""
    newline = frozenset(tokenizer.encode("\n", add_special_tokens=False))
    found = []
    for start in range(0, len(items), rows):
        batch = items[start : start + rows]
        record = decoder.generate([Prompt(item.prompt) for item in batch], GENERATED_LINE, newline)
        for row, (item, emitted) in enumerate(zip(batch, record.emitted, strict=True)):
            text = decode_tokens(tokenizer, emitted.tolist())
            depths = tuple(record.tokens.select_sequence(row, DECODE).depth.tolist())
            found.append((TaskAnswer(text, depths), is_code_completion_correct(item.example, text)))
    return found


def lost_answers(
    prompts: Iterable[str], full: Sequence[TaskAnswer], at_point: Sequence[TaskAnswer], lost: Bools
) -> list[LostAnswer]:
    """Of ``lost`` [items] the first ``SHOWN``, in the order of the items."""
    return [
        LostAnswer(shorten_beginning(prompt), right.text, wrong.text, wrong.depths)
        for prompt, right, wrong, is_lost in zip(prompts, full, at_point, lost, strict=True)
        if is_lost
    ][:SHOWN]


def shorten_beginning(text: str, letters: int = PROMPT_LETTERS) -> str:
    """The end of ``text``, which holds the question."""
    return text if len(text) <= letters else f"… {text[-letters:].lstrip()}"
