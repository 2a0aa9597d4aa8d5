"""Right or wrong under adaptive depth: examples → token sequences → correctness at any depths.

``choice``  every option is teacher-forced after the prompt and decided under the rule from the prompt's last position
            on; the option of the highest summed log-likelihood is the answer.
``exact``   greedy decoding gives the answer if and only if, teacher-forced on it, the argmax at D_t is the next answer
            token at every position: as long as it has been right, the history is the same.
``runs``    needs real decoding: ``programs.passes`` on prompt + continuation + asserts.

So the first two are decided at every operating point from one trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from emad_ref.calibration.trace import TokenSequence, Trace
from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Ints
from emad_ref.replay import argmax_at, sums
from emad_ref.tasks.programs import passes
from emad_ref.text.documents import Example


class Encoder(Protocol):
    """The part of a tokenizer that scoring needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Item:
    """An example as tokens: ``prompt`` int64 [n], opening token included; ``continuations``, per option or answer."""

    example: Example
    prompt: Ints
    continuations: tuple[Ints, ...]


def item_of(example: Example, tokenizer: Encoder, opening: int | None) -> Item:
    """Encode an example; ``opening`` is the model's beginning-of-text id or None.

    Raises:
        BadArgument: nothing to start from, an answer without tokens, or one that is not among the options.
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
    return Item(example, np.array(prompt, dtype=np.int64), continuations)


def sequences_of(items: Sequence[Item]) -> list[TokenSequence]:
    """One sequence per continuation, in order of items and options."""
    return [
        TokenSequence(np.concatenate([item.prompt, continuation]), adaptive_from=len(item.prompt) - 1)
        for item in items
        for continuation in item.continuations
    ]


def clusters(items: Sequence[Item]) -> Ints:
    """int64 [items] the same number for items of one prompt and answer: a repeat tells nothing new."""
    asked = [f"{item.example.prompt}\0{item.example.answer}" for item in items]
    numbers: Ints = np.unique(asked, return_inverse=True)[1].astype(np.int64)
    return numbers


def majority(examples: Sequence[Example], elsewhere: Sequence[Example]) -> float:
    """Share of ``examples`` that the most frequent answer ``elsewhere`` gets right; ties: the one that gets most right.

    Raises:
        BadArgument: no examples on either side.
    """
    if not examples or not elsewhere:
        raise BadArgument("examples", (len(examples), len(elsewhere)), "at least one on either side")
    counts = Counter(example.answer for example in elsewhere)
    most = max(counts.values())
    right = Counter(example.answer for example in examples)
    return max(right[answer] for answer, count in counts.items() if count == most) / len(examples)


def correct(items: Sequence[Item], trace: Trace, depth: Ints) -> Bools:
    """[items] correctness when every position of ``trace``, of ``sequences_of(items)``, has ``depth`` [tokens].

    Raises:
        BadArgument: a trace or depths of something else, or an item whose program has to be generated.
    """
    expected = sum(len(item.continuations) for item in items)
    if trace.sequences != expected:
        raise BadArgument(
            "trace.sequences", trace.sequences, f"{expected}, one per continuation", "trace sequences_of()"
        )
    if np.shape(depth) != (len(trace),):
        raise BadArgument(
            "depth", np.shape(depth), f"one depth per traced position, [{len(trace)}]", "replay this trace"
        )
    likelihood = -sums(trace, trace.nll_nats[np.arange(len(trace)), depth - 1])
    hit = sums(trace, argmax_at(trace, depth) == trace.target) == trace.lengths
    verdicts = np.zeros(len(items), dtype=bool)
    at = 0
    for i, item in enumerate(items):
        options = slice(at, at + len(item.continuations))
        if item.example.scoring == "choice":
            verdicts[i] = int(np.argmax(likelihood[options])) == item.example.answer_index
        elif item.example.scoring == "exact":
            verdicts[i] = bool(hit[options][0])
        else:
            raise BadArgument("scoring", item.example.scoring, "choice or exact", "a program is generated: use runs()")
        at = options.stop
    return verdicts


def runs(example: Example, continuation: str) -> bool:
    """Whether prompt + greedy ``continuation`` (cut after its first line) passes the example's asserts."""
    line, newline, _ = continuation.partition("\n")
    return bool(newline) and passes(example.prompt + line + "\n" + example.check)
