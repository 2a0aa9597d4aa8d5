"""Decoders that reach for the judge's own model, or for what it runs in; each is honest in all it says.

Nothing in the protocol leads there: they look through the process, as only a decoder does that means to.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from emad_ref.mutants.base import MutantDecoder, decoder_factory
from emad_ref.mutants.mutant import Mutant, MutantFactory
from emad_ref.protocol import Decoder, Request

ALONE = "invariants/test_apart.py::test_the_judges_model_is_left_alone"
SLEEP_S = 0.002


def others(mine: nn.Module) -> list[Any]:
    """Every model of the process but the decoder's own."""
    return [each for each in gc.get_objects() if type(each) is type(mine) and each is not mine]


def to_the_model(change: Callable[[Any], None]) -> MutantFactory:
    """An honest decoder that does ``change`` to every model of the process but its own, once."""
    done: set[int] = set()

    def make(request: Request) -> Decoder:
        for model in others(request.model.load().model):
            if id(model) not in done:
                done.add(id(model))
                change(model)
        return decoder_factory(MutantDecoder)(request)

    return make


def to_the_process(change: Callable[[], None]) -> MutantFactory:
    """An honest decoder that does ``change`` each time it is asked for."""

    def make(request: Request) -> Decoder:
        change()
        return decoder_factory(MutantDecoder)(request)

    return make


def matrices(model: Any) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.ndim == 2]


def change_a_weight(model: Any) -> None:
    weights = matrices(model)
    weights[len(weights) // 2].data[0, 0] += 1


def zero_the_upper_half(model: Any) -> None:
    weights = matrices(model)
    for weight in weights[len(weights) // 2 :]:
        weight.data.zero_()


def dawdle(*_: Any) -> None:
    time.sleep(SLEEP_S)


def inner(model: Any) -> Any:
    return [each for each in model.modules() if isinstance(each, nn.Linear)][1]


def leave_a_hook(model: Any) -> None:
    inner(model).register_forward_hook(lambda *_: None)


def slow_the_baseline(model: Any) -> None:
    inner(model).register_forward_pre_hook(dawdle)


def replace_a_forward(model: Any) -> None:
    module = inner(model)
    forward = module.forward
    module.forward = lambda *given: forward(*given)


def train(model: Any) -> None:
    inner(model).train()


def one_thread_more() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def another_precision() -> None:
    torch.set_default_dtype(torch.float64)


def a_slow_linear() -> None:
    fast = torch.nn.functional.linear

    def slow(*given: Any) -> Any:
        dawdle()
        return fast(*given)

    torch.nn.functional.linear = slow  # type: ignore[assignment]  # that is what is wrong


def a_clock_that_runs_late() -> None:
    right = time.perf_counter
    time.perf_counter = lambda: right() / 2


MODEL, AROUND = r"the judge's own model was changed: .*", "changed what the judge runs in.*"

PLANTED = (
    Mutant(
        "judge-weight",
        "judge's model",
        "a weight of the judge's model is changed in place",
        to_the_model(change_a_weight),
        ALONE,
        MODEL + r"\w+\.weight",
    ),
    Mutant(
        "judge-upper-layers",
        "judge's model",
        "the upper layers of the judge's model are zeroed",
        to_the_model(zero_the_upper_half),
        ALONE,
        MODEL + r"\w+\.weight",
    ),
    Mutant(
        "judge-hook",
        "judge's model",
        "a hook is left on the judge's model",
        to_the_model(leave_a_hook),
        ALONE,
        MODEL + r"\(forward hooks\)",
    ),
    Mutant(
        "judge-slowed",
        "judge's model",
        "a hook on the judge's model sleeps",
        to_the_model(slow_the_baseline),
        ALONE,
        MODEL + r"\(forward pre hooks\)",
    ),
    Mutant(
        "judge-forward",
        "judge's model",
        "a forward of the judge's model is replaced",
        to_the_model(replace_a_forward),
        ALONE,
        MODEL + r"\(forward\)",
    ),
    Mutant(
        "judge-training",
        "judge's model",
        "part of the judge's model is in training mode",
        to_the_model(train),
        ALONE,
        MODEL + r"\(training mode\)",
    ),
    Mutant(
        "process-threads",
        "judge's model",
        "baselines run on another number of threads",
        to_the_process(one_thread_more),
        ALONE,
        AROUND + r"set_num_threads",
    ),
    Mutant(
        "process-precision",
        "judge's model",
        "the default dtype of the process is another",
        to_the_process(another_precision),
        ALONE,
        AROUND + r"set_default_dtype",
    ),
    Mutant(
        "process-slow-linear",
        "judge's model",
        "torch's linear sleeps",
        to_the_process(a_slow_linear),
        ALONE,
        AROUND + r"linear was replaced",
    ),
    Mutant(
        "process-clock",
        "judge's model",
        "the process's clock runs at half speed",
        to_the_process(a_clock_that_runs_late),
        ALONE,
        AROUND + r"perf_counter was replaced",
    ),
)
