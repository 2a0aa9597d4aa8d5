"""Ways of a pair to answer, as arms of a race: one prompt and a number of new tokens, batch 1, no stop token.

What an arm made of a request comes back with its time (``Timed``), and whoever judges looks at it afterwards. An
``Arming`` opens the decoders that its arms need, in whichever process they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from emad_ref.decoding.acceptance import Speculated
from emad_ref.decoding.pair import Partner
from emad_ref.decoding.selfdraft import self_speculate
from emad_ref.decoding.speculative import speculate
from emad_ref.decoding.switching import SwitchingRule, switch
from emad_ref.evidence.pair.answered import Result, record_of
from emad_ref.evidence.pair.models import Models
from emad_ref.evidence.pair.speculation import DRAFTED
from emad_ref.meters.clock import paired
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints
from emad_ref.verdict.units import ByPair

WARM_UP = 2  # pairs that are not counted

Done = Result | Ints  # what an arm made of a request: tokens [new] where it keeps no record
Arm = Callable[[Prompt, int], Done]
# our own arms, open as long as the stack is; crosses by pickle, so no lambda
Arming = Callable[[Models, ExitStack], dict[str, Arm]]


@dataclass(frozen=True, eq=False)
class Drawn:
    """Requests before they are timed: ``prompts`` [warm-up + pairs], ``new`` tokens each, ``seed`` of their order."""

    prompts: Sequence[Prompt]
    new: int
    seed: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Timed:
    """Arm → [pairs]: wall-clock ``seconds``, and the ``results`` of the very same runs.

    ``new``: tokens that every request emitted; ``prompts`` [pairs].
    """

    seconds: Mapping[str, ByPair]
    results: Mapping[str, list[Done]]
    new: int
    prompts: Sequence[Prompt] = ()

    def recorded(self, arm: str) -> list[Result]:
        """Results of an arm that keeps records; none of one that keeps none."""
        return [done for done in self.results[arm] if not isinstance(done, np.ndarray)]

    def accepted(self, arm: str) -> list[float]:
        """Accepted over judged drafts, of each run that drafted."""
        rates = [done.acceptance for done in self.results[arm] if isinstance(done, Speculated)]
        return [rate for rate in rates if rate is not None]


def clocked(models: Models, arms: Mapping[str, Arm], drawn: Drawn) -> Timed:
    """Every arm on what is ``drawn``, in this process."""
    results: dict[str, list[Done]] = {name: [] for name in arms}

    def timed_arm(name: str) -> Callable[[int], None]:
        return lambda pair: results[name].append(arms[name](drawn.prompts[pair], drawn.new))

    large = models.large.subject
    with large.open(large.full) as decoder:
        timings = paired(
            {name: timed_arm(name) for name in arms},
            len(drawn.prompts) - WARM_UP,
            np.random.default_rng(drawn.seed),
            warm_up=WARM_UP,
            synchronize=decoder.synchronize,
        )
    seconds = {name: ByPair(column) for name, column in timings.seconds.items()}
    counted = {name: done[WARM_UP:] for name, done in results.items()}
    return Timed(seconds, counted, drawn.new, drawn.prompts[WARM_UP:])


def against_switching(rule: SwitchingRule, models: Models, stack: ExitStack) -> dict[str, Arm]:
    """``large``, ``speculative``, and ``EAD`` by ``rule``."""
    small, large = stack.enter_context(models.partners())
    return {
        "large": alone(large.decoder),
        "speculative": speculating(small, large),
        "EAD": switching(small, large, rule),
    }


def against_adaptive(point: OperatingPoint, models: Models, stack: ExitStack) -> dict[str, Arm]:
    """``large``, ``EMAD`` of it at ``point``, ``speculative``, and ``self-speculative`` after the first of
    ``exit_layers`` where there is one."""
    small, large = stack.enter_context(models.partners())
    emad = stack.enter_context(models.large.subject.open(point))
    arms: dict[str, Arm] = {
        "large": alone(large.decoder),
        "EMAD": alone(emad),
        "speculative": speculating(small, large),
    }
    if exit_layers := models.exit_layers:
        drafting = stack.enter_context(models.drafting())
        arms["self-speculative"] = self_speculating(drafting, exit_layers[0])
    return arms


def emitted_of(done: Done) -> Sequence[Ints]:
    """[rows] of new tokens: of one row where no record is kept."""
    return [done] if isinstance(done, np.ndarray) else record_of(done).emitted


def alone(decoder: Decoder) -> Arm:
    return lambda prompt, new: decoder.generate([prompt], new, frozenset())


def switching(small: Partner, large: Partner, rule: SwitchingRule) -> Arm:
    return lambda prompt, new: switch(small, large, rule, [prompt], new)


def speculating(draft: Partner, verifier: Partner, k: int = DRAFTED, gate_bits: float | None = None) -> Arm:
    return lambda prompt, new: speculate(draft, verifier, [prompt], new, k=k, gate_bits=gate_bits)


def self_speculating(model: Partner, exit_layer: int) -> Arm:
    return lambda prompt, new: self_speculate(model, exit_layer, [prompt], new, k=DRAFTED)
