"""How long the ways to answer take: paired requests at batch 1, and the FLOPs and acceptance of the very same runs.

The same fresh prompts for all arms of a pair, the same number of new tokens, no stop token. Beside our own arms stand
those that a user of transformers would take for the same output (``library``). Races that decide are divided over fresh
processes where a run has them (``evidence.fresh``). What was emitted while the clock ran is looked at afterwards: its
length, that what promises to lose nothing emitted the large model's tokens, and that EMAD's are the argmax at the
depths it claims. A decoder that fails there has no time worth telling: it raises.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property, partial

import numpy as np

from emad_ref.audit.sameness import same_tokens
from emad_ref.audit.timed import TimedRequest, lengths, requests
from emad_ref.decoding.switching import LARGE, SwitchingRule
from emad_ref.evidence.fresh import Fresh
from emad_ref.evidence.pair.answered import record_of
from emad_ref.evidence.pair.arms import (
    WARM_UP,
    Arm,
    Arming,
    Drawn,
    Timed,
    against_adaptive,
    against_switching,
    clocked,
    emitted_of,
)
from emad_ref.evidence.pair.library import LIBRARY, Library, library
from emad_ref.evidence.pair.names import PairNames
from emad_ref.evidence.pair.rules import Rules
from emad_ref.evidence.pair.shares import Share, joined, share_of
from emad_ref.evidence.stopwatch import where
from emad_ref.evidence.study import Study
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, Prompt
from emad_ref.readout.attached import attached_to
from emad_ref.record import Ints

AUDITED = 4  # pairs whose records are looked at after the clock
LOSSLESS = ("speculative", "self-speculative", *LIBRARY)  # arms that promise the large model's tokens


class Timing:
    """Requests of one task's judged items, timed when first asked for, of the models ``names`` under ``study``."""

    def __init__(self, rules: Rules, names: PairNames, study: Study):
        self._rules, self._names, self._study = rules, names, study
        self._pairs, self._seed = study.budget.pairs, study.seed  # pairs of rows that decide
        self._answers, self._models = rules.answers, rules.answers.models
        large = self._models.large
        self._fresh = Fresh(large.host.afresh, large.subject)

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

    def _drawn(self, pairs: int) -> Drawn:
        return Drawn(self.prompts(pairs + WARM_UP), self.new, (self._seed,))

    def timed(self, arms: Mapping[str, Arm], pairs: int) -> Timed:
        """``arms`` on the same fresh prompts, in this process; each takes a prompt and a number of new tokens, and
        stops at none."""
        return self._of_one_length(clocked(self._models, arms, self._drawn(pairs)))

    def _of_one_length(self, timed: Timed) -> Timed:
        emitted = {name: [emitted_of(one) for one in done] for name, done in timed.results.items()}
        lengths(emitted, 1, self.new).require()
        return timed

    def _raced(self, arming: Arming) -> Timed:
        """What decides: our own arms and transformers', in this process or divided over fresh ones.

        Raises:
            Unsupported: a decoder under test declines what an arm asks.
            AfreshFailed: a fresh process ended without its times.
        """
        with ExitStack() as stack:
            arms = {**arming(self._models, stack), **self.library.arms}
            if self._fresh.without:
                return self.timed(arms, self._pairs)
            request_s = self._seconds(arms)
        whole, models = self._drawn(self._pairs), self._models
        small, large = (attached_to(evidence.subject.stepper) for evidence in models.both)

        def share(number: int, pairs: Ints) -> Share:
            drawn = share_of(whole, pairs, number)
            names = (self._names.small, self._names.large)
            return Share(names, models.fingerprint, self._study, self._rules.size, arming, (small, large), drawn)

        parts = self._fresh.shared(self._pairs, share, lambda pairs: (WARM_UP + pairs) * request_s)
        return self._of_one_length(joined(parts))

    def _seconds(self, arms: Mapping[str, Arm]) -> float:
        """Of one request by each of ``arms``, after another that warms them up."""
        (prompt,) = self.prompts(1)
        for _ in range(2):
            start = time.perf_counter()
            for arm in arms.values():
                arm(prompt, self.new)
        return time.perf_counter() - start

    def told(self, timed: Timed) -> str:
        """One sentence: what was timed, on which requests, and where."""
        seconds = next(iter(timed.seconds.values()))
        return (
            f"{self._names.name}: timed {', '.join(timed.seconds)}, {timed.new} new tokens after prompts of "
            f"{self.task}, {len(seconds)} pairs {where(seconds.process, self._fresh.without)}"
        )

    @cached_property
    def rivals(self) -> Timed:
        """``large``, ``speculative``, ``EAD`` by ``rule``, and those of ``library``.

        Raises:
            Refuted: speculation that emitted other tokens than the large model, and no tie excuses it.
            AfreshFailed: as ``Fresh.shared``.
        """
        timed, large = self._raced(partial(against_switching, self.rule)), self._models.large.subject
        with large.open(large.full) as verifier:
            self.require_lossless(timed, verifier.capabilities)
        return timed

    def emad_rivals(self, point: OperatingPoint) -> Timed:
        """``large``, ``EMAD`` of it at ``point``, ``speculative``, and ``self-speculative`` after the first of
        ``exit_layers`` where there is one, and those of ``library``.

        Raises:
            Refuted: as ``rivals``; or EMAD's tokens, depths or work are not what its record says.
            AfreshFailed: as ``rivals``.
        """
        timed, large = self._raced(partial(against_adaptive, point)), self._models.large.subject
        with large.open(large.full) as verifier, large.open(point) as emad:
            self.require_lossless(timed, verifier.capabilities)
            self._require_claimed(timed, point, emad.capabilities)
        return timed

    def require_lossless(self, timed: Timed, verifier: Capabilities, alone: str = "large") -> None:
        """Every arm of ``LOSSLESS`` emitted what ``alone`` did, in every pair, up to ties within the noise that
        ``verifier``, capabilities of the large model's decoder, declare.

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
            declared = large.allowed(verifier)
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
