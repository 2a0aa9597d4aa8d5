"""On what a FLOP count stands: it was seen to be executed, it shows in time, or the decoder claims it.

witnessed  a few requests were watched (``models.executed``), and what ran is what their records say
timed      the decoder runs where nobody looks, but tokens forced to a quarter of the layers take less time than tokens
           at full depth: by half at least of what the FLOPs left out promise
claimed    neither; or it does not count its work, so that there is nothing to hold against what ran

A quarter of the layers in nearly the time of all of them, less than a fifth of what is promised, refutes a decoder that
counts. Between a fifth and a half the overhead of a step may be all that is seen, and nothing is concluded.

Lengths of the watched requests are drawn, so that none gives the watching away.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property

import numpy as np

from emad_ref.audit.finding import Finding
from emad_ref.audit.witness import Seen, witness
from emad_ref.evidence.bridging import Bridging
from emad_ref.meters.clock import paired
from emad_ref.meters.flops import flops
from emad_ref.meters.tracing import tracers
from emad_ref.models.executed import Executed
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import READOUTS, Ints, Work
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.times import total_ratio
from emad_ref.verdict.units import ByPair

SHORTEST, LONGEST = 6, 24  # tokens of a watched prompt, and new ones
ROWS = (1, 3, 2)  # of the watched requests: alone, and together
PAIRS, FED, OPENING = 16, 8, 8  # timed pairs, tokens fed in each, and of the prompt before them
SHOWN, DENIED = 0.5, 0.2  # of the time that the FLOPs left out promise: what shows them, and what refutes them
DEEP, SHALLOW = "full depth", "a quarter"


class Witnessed:
    """Of one subject, looked at when first asked and kept."""

    def __init__(self, bridging: Bridging):
        self._subject, self._bridging = bridging.subject, bridging

    @property
    def evidence(self) -> str:
        """The word of ``study.FLOP_EVIDENCE`` that a FLOP verdict about this decoder says."""
        if self.seen.passed:
            return "witnessed"
        return "timed" if self._left_to_the_clock and self.times.passed else "claimed"

    @property
    def finding(self) -> Finding:
        """What refutes or shows the count: what was seen, else what was timed."""
        return self.times if self._left_to_the_clock else self.seen

    @property
    def _left_to_the_clock(self) -> bool:
        return self._subject.capabilities.counted and self.seen.passed is None

    # ------------------------------------------------------------ watched

    @cached_property
    def seen(self) -> Finding:
        """Of requests at two points: where depth comes down step by step, and where it is shallow at once."""
        if not self._subject.capabilities.counted:
            return Finding(
                "witness", None, "the decoder does not count its work: nothing to hold what ran against", 0, 0
            )
        try:
            return witness(self._requests())
        except Unsupported as refusal:
            return Finding("witness", None, f"nothing was watched: {refusal}", 0, 0)
        except RuntimeError as error:  # some do not run under a dispatch mode; every other audit runs them as they are
            return Finding("witness", None, f"it does not run while it is watched: {error}", 0, 0)

    def _requests(self) -> list[Seen]:
        rng = np.random.default_rng(self._subject.seed)
        longest = max(SHORTEST, min(LONGEST, self._subject.window // 2 - 1))
        requests = []
        for point in (self._bridging.probing_point, self._bridging.shallow_point):
            for rows in ROWS:
                length, new = rng.integers(SHORTEST, longest + 1, 2).tolist()
                with self._subject.open(point, max_rows=rows) as decoder:
                    requests.append(self._watched(decoder, self._subject.prompts(rows, length), new))
        return requests

    def _watched(self, decoder: Decoder, prompts: list[Prompt], new: int) -> Seen:
        """Raises RuntimeError where the decoder does not run under a dispatch mode."""
        models = [each.model for each in (self._subject.loaded, *self._subject.lending.copies)]
        with Executed(*models) as executed:
            record = decoder.generate(prompts, new, frozenset())
            decoder.synchronize()
        assert record.work is not None, "a decoder that says it counts"
        return Seen(prompts, executed.rows(), record.work[0])

    # ------------------------------------------------------------ timed

    @cached_property
    def times(self) -> Finding:
        """Of tokens that are forced to a quarter of the layers, beside the same tokens at full depth.

        Verdicts that measure no time ask for it, too: they do without where a tracer or debugger is active.
        """
        if active := list(tracers()):
            return Finding("witness by time", None, f"not timed beside {', '.join(active)}", 0, 0)
        try:
            ratio = self._speedup()
        except Unsupported as refusal:
            return Finding("witness by time", None, f"depths cannot be forced: {refusal}", 0, 0)
        return judged(ratio, self._share(), self._quarter)

    @property
    def _quarter(self) -> int:
        return max(1, self._subject.stepper.layers // 4)

    def _share(self) -> float:
        """FLOPs of a token at a quarter of the layers, of those at full depth."""
        layers, geometry = self._subject.stepper.layers, self._subject.loaded.geometry
        shallow, deep = (
            flops(one_token(depth, layers, OPENING + FED), geometry).total for depth in (self._quarter, layers)
        )
        return shallow / deep

    def _speedup(self) -> Estimate:
        subject, rng = self._subject, np.random.default_rng([self._subject.seed, PAIRS])
        tokens = rng.integers(0, subject.stepper.vocabulary, (PAIRS + 1, OPENING + FED))
        with subject.open(subject.full) as decoder:
            arms = {DEEP: subject.stepper.layers, SHALLOW: self._quarter}

            def fed(depth: int, pair: int) -> float:
                return fed_seconds(decoder, tokens[pair], depth)

            timings = paired(
                {name: lambda pair, depth=depth: fed(depth, pair) for name, depth in arms.items()},  # type: ignore[misc]  # bound now
                PAIRS, rng, warm_up=1, synchronize=decoder.synchronize,
            )  # fmt: skip
        return total_ratio(ByPair(timings.seconds[DEEP]), ByPair(timings.seconds[SHALLOW]))


def fed_seconds(decoder: Decoder, tokens: Ints, depth: int) -> float:
    """Seconds that a fresh session takes for all but the first ``OPENING`` of ``tokens``, one by one at ``depth``."""
    session, _ = decoder.start([Prompt(tokens[:OPENING])])
    decoder.synchronize()
    start = time.perf_counter()
    for token in tokens[OPENING:]:
        session.feed(token[None, None], np.array([[depth]]))
    decoder.synchronize()
    elapsed = time.perf_counter() - start
    session.close()
    return elapsed


def one_token(depth: int, layers: int, keys: int) -> Work:
    """Work of one token that attends to ``keys`` and stops after ``depth``, its readout included."""
    work = Work.none(layers)
    work.tokens[:depth], work.context[:depth] = 1, keys
    work.readout_rows[READOUTS.index("full"), depth - 1] = 1
    return work


def judged(speedup: Estimate, share: float, layers: int) -> Finding:
    """``speedup``: time at full depth over time at ``layers``, which execute ``share`` of the FLOPs."""
    took, low, high = 1 / speedup.value, 1 / speedup.high, 1 / speedup.low if speedup.low > 0 else np.inf
    said = (
        f"tokens forced to {layers} layers take {took:.2f} [{low:.2f}, {high:.2f}] of the time of full depth, and "
        f"execute {share:.2f} of its FLOPs ({speedup.n} pairs)"
    )
    finding = Finding("witness by time", None, said, speedup.n, 0)
    if low > 1 - DENIED * (1 - share):
        return replace(finding, passed=False, detail=f"layers that are said to be left out cost as much: {said}")
    return replace(finding, passed=True) if high <= 1 - SHOWN * (1 - share) else finding
