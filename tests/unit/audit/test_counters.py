"""The same tokens cost the same at every point, whatever buffer a decoder attends over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from emad_ref.audit.work import counters
from emad_ref.protocol import Capabilities, Prompt
from emad_ref.record import Ints, Work

PROMPT, FED = Prompt(np.arange(60)), np.arange(20)
BUFFER = 4096


@dataclass
class Counting:
    """A decoder of two layers that counts ``keys`` of a step at some position; its prompt meets its own keys.

    ``apart``: positions of the prompt that are steps of their own.
    """

    keys: Any
    apart: int
    capabilities: ClassVar = Capabilities()

    def _work(self, steps: int) -> Work:
        prompt = len(PROMPT.tokens) - self.apart
        work = Work.none(2)
        work.tokens[:] = prompt + self.apart + steps
        work.context[:] = prompt**2 + sum(self.keys(prompt + at) for at in range(self.apart + steps))
        return work

    def start(self, prompts: Any) -> tuple[Any, None]:
        self.fed = 0
        return self, None

    def feed(self, tokens: Ints) -> None:
        self.fed += 1

    @property
    def work(self) -> Work:
        return self._work(self.fed)

    def close(self) -> None: ...

    def generate(self, prompts: Any, max_new: int, stop: Any) -> Any:
        return Record(self._work(max_new - 1))


@dataclass
class Record:
    only: Work

    @property
    def work(self) -> dict[int, Work]:
        return {0: self.only}


@pytest.mark.parametrize(
    "keys", [lambda at: at + 1, lambda at: 256, lambda at: BUFFER], ids=["causal", "doubling", "constant"]
)
def test_a_prompt_in_one_forward_or_but_its_last_position_costs_the_same(keys: Any) -> None:
    finding = counters(Counting(keys, 0), Counting(keys, 1), PROMPT, FED, 20, 0)
    assert finding.passed is True, finding.detail


def test_keys_that_are_counted_twice_at_full_depth_are_named() -> None:
    finding = counters(Counting(lambda at: 3 * at, 0), Counting(lambda at: at + 1, 1), PROMPT, FED, 20, 0)
    assert finding.passed is False
    assert "layer 1 counts" in finding.detail
