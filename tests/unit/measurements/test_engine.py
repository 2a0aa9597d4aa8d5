"""Answers of an engine: an honest one keeps to the oracle; each planted fault falsifies the row that asks for it.

And of an exit rule of somebody else's: what it states is held against blocks that ran and requests that were timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from emad_ref.claims.base import question_of
from emad_ref.measurements.engine import EngineAnswers
from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.measurements.own_rule import OwnRuleAnswers
from emad_ref.measurements.run_resources import RunResources, make_reference_decoder
from emad_ref.measurements.study import Study
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.quantisation import int8_copy
from emad_ref.point import truncated
from emad_ref.protocol import Decoder, Prompt, Request, StatedRule, Unsupported
from emad_ref.record import Record
from tests.claims.simulation import asked

DOCUMENTS = 40
GATHER = {"ENG-1": "distributions", "ENG-2": "company", "ENG-3": "repeats", "ENG-4": "distributions"}
Make = Callable[[Request], Decoder]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("emad-nano")


def verdict(claim: str, loaded: LoadedModel, make: Make, dtype: str | None = None) -> Any:
    subject = ModelUnderTest(loaded, Study(decoder_dtype=dtype), RunResources(make))
    found = getattr(EngineAnswers(subject, DOCUMENTS), GATHER[claim])
    decide = question_of(claim).decide
    assert decide is not None
    return decide(found, asked(claim, np.random.default_rng(0)))


@pytest.mark.parametrize("claim", GATHER)
def test_an_honest_engine_is_not_falsified(claim: str, loaded: LoadedModel) -> None:
    """Of 40 documents a statistical row may say too few to survive; an exact one survives."""
    found = verdict(claim, loaded, make_reference_decoder)
    assert found.verdict == ("survived" if claim in ("ENG-2", "ENG-3") else "inconclusive"), found


def rounded(request: Request) -> Decoder:
    """Weights in half the bits, under the name of float32."""
    for weight in request.model.load().model.parameters():
        weight.data = weight.data.half().float()
    return make_reference_decoder(request)


def quantised(request: Request) -> Decoder:
    eight_bits = int8_copy(request.model.load())
    return make_reference_decoder(replace(request, model=replace(request.model, load=lambda: eight_bits)))


class Changing:
    """Changes the last token of ``row`` where ``when(rows, requests so far)`` says so."""

    def __init__(self, request: Request, when: Callable[[int, int], bool]):
        self._decoder, self._when, self._requests = make_reference_decoder(request), when, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        record = self._decoder.generate(prompts, max_new, stop)
        self._requests += 1
        if self._when(len(prompts), self._requests):
            record.emitted[-1][-1] = (record.emitted[-1][-1] + 7) % 64
        return record


FAULTS: dict[str, tuple[str, Make]] = {
    "int8 under the name of float32": ("ENG-1", quantised),
    "float16 weights under the name of float32": ("ENG-4", rounded),
    "the last of eight rows is another": ("ENG-2", lambda request: Changing(request, lambda rows, n: rows == 8)),
    "one token is another than in a longer answer": (
        "ENG-2",
        lambda request: Changing(request, lambda rows, n: rows == 1 and n % 5 == 0),
    ),
    "another answer the second time": ("ENG-3", lambda request: Changing(request, lambda rows, n: n == 2)),
    "another answer after other requests": ("ENG-3", lambda request: Changing(request, lambda rows, n: n > 9)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_falsifies_its_row(fault: str, loaded: LoadedModel) -> None:
    claim, make = FAULTS[fault]
    assert verdict(claim, loaded, make).verdict == "falsified"


def test_a_precision_that_is_stated_is_allowed(loaded: LoadedModel) -> None:
    """Rounded weights are no worse than float16, as the same engine says under its own name."""
    assert verdict("ENG-1", loaded, rounded, "float16").verdict != "falsified"
    assert verdict("ENG-4", loaded, rounded, "float16").verdict != "falsified"


TRIPLE = StatedRule("exits everywhere", saved_blocks=0.67, speedup=3.0)
HALF = StatedRule("half of the layers", saved_blocks=0.5)


class Stating(Changing):
    """The reference decoder at ``point``'s request, with a statement of its own."""

    def __init__(self, request: Request, stated: StatedRule):
        super().__init__(replace(request, own_rule=False), lambda rows, n: False)
        self.stated = stated


def runs_every_block(request: Request) -> Decoder:
    return Stating(request, TRIPLE)


def runs_half(request: Request) -> Decoder:
    layers = request.point.layers
    point = truncated(layers, layers // 2) if request.own_rule else request.point
    return Stating(replace(request, point=point), HALF)


def stated_legs(loaded: LoadedModel, make: Make) -> dict[str, Any]:
    subject = ModelUnderTest(loaded, Study(), RunResources(make))
    decide = question_of("ENG-7").decide
    assert decide is not None
    decided = decide(OwnRuleAnswers(subject, DOCUMENTS).evidence, asked("ENG-7", np.random.default_rng(0)))
    return {"": decided} | {leg.name.partition(",")[0]: leg for leg in decided.legs}


@pytest.fixture(scope="module")
def by_modules() -> LoadedModel:
    """Fused steps run no module, whose calls could be counted."""
    return load("emad-nano", backend="walked")


def test_a_stated_speed_up_that_is_none_is_falsified_by_time_and_by_blocks(by_modules: LoadedModel) -> None:
    legs = stated_legs(by_modules, runs_every_block)
    assert legs[""].verdict == "falsified"
    assert (legs["speed-up"].outcome, legs["blocks saved"].outcome) == ("falsified", "falsified")
    assert legs["blocks saved"].estimate == 0
    assert 0.5 < legs["speed-up"].estimate < 2
    assert legs["perplexity of emitted tokens"].estimate == 0


def test_blocks_that_are_saved_are_seen_and_quality_that_is_lost_as_well(by_modules: LoadedModel) -> None:
    legs = stated_legs(by_modules, runs_half)
    assert legs["blocks saved"].outcome == "survived"
    assert legs["blocks saved"].estimate == pytest.approx(0.5, abs=0.03)
    assert legs["perplexity of emitted tokens"].outcome == "falsified"
    assert legs[""].verdict == "falsified"


def test_a_decoder_that_states_nothing_is_not_asked(loaded: LoadedModel) -> None:
    for make in (
        make_reference_decoder,
        lambda request: Changing(replace(request, own_rule=False), lambda rows, n: False),
    ):
        with pytest.raises(Unsupported, match="rule of its own"):
            stated_legs(loaded, make)
