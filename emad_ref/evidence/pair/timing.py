"""How long the ways to answer take: paired requests at batch 1, and the FLOPs and acceptance of the very same runs.

The same fresh prompts for all arms of a pair, the same number of new tokens, no stop token. Beside our own arms stand
those that a user of transformers would take for the same output (``library``). What was emitted while the clock ran is
looked at afterwards: its length, that what promises to lose nothing emitted the large model's tokens, and that EMAD's
are the argmax at the depths it claims. A decoder that fails there has no time worth telling: it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from emad_ref.audit.sameness import same_tokens
from emad_ref.audit.timed import TimedRequest, lengths, requests
from emad_ref.decoding.acceptance import Speculated
from emad_ref.decoding.pair import Partner
from emad_ref.decoding.selfdraft import self_speculate
from emad_ref.decoding.speculative import speculate
from emad_ref.decoding.switching import LARGE, SwitchingRule, switch
from emad_ref.evidence.pair.answered import Result, record_of
from emad_ref.evidence.pair.library import LIBRARY, Library, library
from emad_ref.evidence.pair.rules import Rules
from emad_ref.evidence.pair.speculation import DRAFTED
from emad_ref.meters.clock import paired
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, Decoder, Prompt
from emad_ref.record import Ints
from emad_ref.verdict.units import ByPair

WARM_UP = 2
AUDITED = 4  # pairs whose records are looked at after the clock
LOSSLESS = ("speculative", "self-speculative", *LIBRARY)  # arms that promise the large model's tokens

Done = Result | Ints  # what an arm made of a request: tokens [new] where it keeps no record
Arm = Callable[[Prompt, int], Done]


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


class Timing:
    """Requests of one task's judged items, timed when first asked for. ``pairs``: of rows that decide; ``seed``: of the
    order of arms."""

    def __init__(self, rules: Rules, pairs: int, seed: int):
        self._rules, self._pairs, self._seed = rules, pairs, seed
        self._answers, self._models = rules.answers, rules.answers.models

    @property
    def task(self) -> str:
        """What is timed: the task most worth routing, else the first whose answers are written, else plain texts."""
        return self._rules.writable[0]

    @cached_property
    def rule(self) -> SwitchingRule:
        """How EAD switches while it is timed: as put forward where there is something to route, else as comes nearest
        to the first of the paper's savings."""
        if self._rules.written:
            return self._rules.put_forward(self.task)
        return self._rules.nearest(self.task, self._rules.savings[0])

    @cached_property
    def new(self) -> int:
        """New tokens of a timed request, no stop token: as many as the large model's answers take on average."""
        return round(float(self._rules.judged_alone(LARGE, self.task).emitted.mean()))

    def prompts(self, count: int) -> list[Prompt]:
        """Prompts of judged items of ``task``; where a file has fewer, its own come round again."""
        prompts = self._answers.prompts(self.task, "evaluate", max(self._rules.size.judged, count))
        return [prompts[at % len(prompts)] for at in range(count)]

    @cached_property
    def library(self) -> Library:
        """Transformers' own ways to the large model's output, and why those are absent that do not run."""
        small, large = (evidence.loaded for evidence in self._models.both)
        (prompt,) = self.prompts(1)
        return library(small, large, prompt)

    def timed(self, arms: Mapping[str, Arm], pairs: int) -> Timed:
        """``arms`` on the same fresh prompts; each takes a prompt and a number of new tokens, and stops at none."""
        prompts = self.prompts(pairs + WARM_UP)
        results: dict[str, list[Done]] = {name: [] for name in arms}

        def timed_arm(name: str) -> Callable[[int], None]:
            return lambda pair: results[name].append(arms[name](prompts[pair], self.new))

        large = self._models.large.subject
        with large.open(large.full) as decoder:
            timings = paired(
                {name: timed_arm(name) for name in arms},
                pairs,
                np.random.default_rng(self._seed),
                warm_up=WARM_UP,
                synchronize=decoder.synchronize,
            )
        seconds = {name: ByPair(column) for name, column in timings.seconds.items()}
        counted = {name: done[WARM_UP:] for name, done in results.items()}
        emitted = {name: [emitted_of(one) for one in done] for name, done in counted.items()}
        lengths(emitted, 1, self.new).require()
        return Timed(seconds, counted, self.new, prompts[WARM_UP:])

    @cached_property
    def rivals(self) -> Timed:
        """``large``, ``speculative``, ``EAD`` by ``rule``, and those of ``library``.

        Raises:
            Refuted: speculation that emitted other tokens than the large model, and no tie excuses it.
        """
        with self._models.partners() as (small, large):
            arms: dict[str, Arm] = {
                "large": alone(large.decoder),
                "speculative": speculating(small, large),
                "EAD": switching(small, large, self.rule),
                **self.library.arms,
            }
            timed = self.timed(arms, self._pairs)
            self.require_lossless(timed, large.decoder)
        return timed

    def emad_rivals(self, point: OperatingPoint) -> Timed:
        """``large``, ``EMAD`` of it at ``point``, ``speculative``, and ``self-speculative`` after the first of
        ``exit_layers`` where there is one, and those of ``library``.

        Raises:
            Refuted: as ``rivals``; or EMAD's tokens, depths or work are not what its record says.
        """
        with ExitStack() as stack:
            small, large = stack.enter_context(self._models.partners())
            emad = stack.enter_context(self._models.large.subject.open(point))
            arms: dict[str, Arm] = {
                "large": alone(large.decoder),
                "EMAD": alone(emad),
                "speculative": speculating(small, large),
                **self.library.arms,
            }
            if exit_layers := self._models.exit_layers:
                drafting = stack.enter_context(self._models.drafting())
                arms["self-speculative"] = self_speculating(drafting, exit_layers[0])
            timed = self.timed(arms, self._pairs)
            self.require_lossless(timed, large.decoder)
            self._require_claimed(timed, point, emad.capabilities)
            return timed

    def require_lossless(self, timed: Timed, verifier: Decoder, alone: str = "large") -> None:
        """Every arm of ``LOSSLESS`` emitted what ``alone`` did, in every pair, up to ties within the noise that
        ``verifier``, the large model's decoder, declares.

        Raises:
            Refuted: one that did not.
        """
        large = self._models.large.subject
        wanted, *others = (
            [emitted_of(one)[0].tolist() for one in timed.results[name]]
            for name in (alone, *LOSSLESS)
            if name in timed.results
        )
        for found in others:
            declared = large.allowed(verifier.capabilities)
            same_tokens(large.lens, large.tolerance, timed.prompts, found, wanted, declared=declared).require()

    def _require_claimed(self, timed: Timed, point: OperatingPoint, capabilities: Capabilities) -> None:
        """EMAD's records, of a random few pairs, are true."""
        large, pairs = self._models.large.subject, len(timed.prompts)
        looked_at = np.random.default_rng([self._seed, pairs]).choice(pairs, min(pairs, AUDITED), False)
        records = [record_of(timed.recorded("EMAD")[pair]) for pair in looked_at]
        chosen = [
            TimedRequest([timed.prompts[pair]], {"EMAD": record}, {})
            for pair, record in zip(looked_at, records, strict=True)
        ]
        noise = {"EMAD": max(large.tolerance, capabilities.logit_noise)}
        requests(chosen, {"EMAD": point}, timed.new, large.lens, noise, counted=capabilities.counted).require()

    @cached_property
    def emad_point(self) -> OperatingPoint:
        """EMAD of the large model at its calibrated default."""
        return self._models.large.traces.profile.point(0.0)


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
