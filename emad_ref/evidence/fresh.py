"""Races divided over fresh processes: the level at which times vary (Kalibera and Jones 2013).

Where memory lies, what the allocator finds, which kernels are chosen and on which core a process starts is drawn once a
process and shared by all its pairs: more pairs of one process say no more of it. So the pairs of a race are dealt to K
processes, each with its warm-up. Prompts and numbers of pairs are those of one process: the seed fixes them here, and
together the shares are the same set of requests. What was emitted while the clock ran comes back with the times, and is
looked at here.

Each process times all batch sizes that are asked for: it loads the model once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from tqdm import tqdm

from emad_ref.evidence.afresh import AfreshFailed, Task, carried_out
from emad_ref.evidence.bridging import Bridging
from emad_ref.evidence.host import Afresh, Host
from emad_ref.evidence.points import Points
from emad_ref.evidence.scored import Scored
from emad_ref.evidence.stopwatch import WARM_UP, Drawn, Racing, Requests, Stopwatch
from emad_ref.evidence.study import Study
from emad_ref.evidence.subject import Subject, open_model
from emad_ref.evidence.traces import Traces
from emad_ref.evidence.witnessed import Witnessed
from emad_ref.meters.clock import Timings
from emad_ref.models.again import OtherWeights
from emad_ref.point import OperatingPoint
from emad_ref.readout.attached import attach_all, attached_to
from emad_ref.record import Floats, Ints


@dataclass(frozen=True, eq=False)
class Share:
    """What one process times: the model ``name`` under ``study``, by ``racing`` what is drawn of each batch size.

    ``shape``     (prompt, new) tokens of a request.
    ``attached``  what points of this model name by digest: lenses, state translators.
    """

    name: str
    fingerprint: str
    study: Study
    racing: Racing
    shape: tuple[int, int]
    attached: Mapping[str, Mapping[str, Any]]
    drawn: Mapping[int, Drawn]

    def run(self, host: Host) -> dict[int, Requests]:
        """Batch size → this share's pairs, timed.

        Raises:
            OtherWeights: the model has changed since the run began.
            Unsupported, BadArgument, DecoderFailed: as the decoder under test raises them.
        """
        with open_model(self.name, self.study) as loaded:
            if loaded.fingerprint != self.fingerprint:
                raise OtherWeights(f"{self.name!r} is not the model any more with which the run began")
            attach_all(loaded.stepper, self.attached)
            subject = Subject(loaded, self.study, host)
            points = Points(Traces(subject), Scored(subject), Witnessed(Bridging(subject)))
            stopwatch = Stopwatch(points, shape=self.shape)
            return {rows: self.racing(subject, stopwatch, rows, drawn) for rows, drawn in self.drawn.items()}


class Fresh:
    """Of one run: ``without`` says why its races stay in its own process, "" where they are divided."""

    def __init__(self, afresh: Afresh, subject: Subject):
        self._afresh, self._subject, budget = afresh, subject, subject.budget
        self.without = f"the budget {budget.name} starts no others" if budget.processes == 1 else afresh.without
        if budget.processes > 1 and afresh.start is not None:
            self.without = ""

    def races(
        self, stopwatch: Stopwatch, racing: Racing, points: Collection[OperatingPoint], drawn: Mapping[int, Drawn]
    ) -> dict[int, Requests]:
        """Batch size of ``drawn`` → what ``racing`` gives of all pairs, ``process`` told.

        Raises:
            Unsupported: the decoder under test declines one of ``points``.
            AfreshFailed: a process ended without its times, or timed other arms than another.
        """
        subject = self._subject
        for rows in drawn:
            for each in points:
                with subject.open(each, max_rows=rows):
                    pass  # what is declined is declined here, by name
        attached, shape = attached_to(subject.stepper), stopwatch.request_shape

        def share(number: int, pairs: Ints) -> Share:
            dealt = {rows: share_of(whole, pairs, number) for rows, whole in drawn.items()}
            return Share(subject.name, subject.fingerprint, subject.study, racing, shape, attached, dealt)

        parts = self.shared(subject.budget.pairs, share, partial(stopwatch.expected_s, drawn))
        return {rows: joined([part[rows] for part in parts]).looked_at_afterwards(rows) for rows in drawn}

    def shared(self, pairs: int, share: Callable[[int, Ints], Task], expected_s: Callable[[int], float]) -> list[Any]:
        """What each process brings back of its ``share(number, pairs)``, in their order.

        ``expected_s``: seconds that so many pairs are expected to take.

        Raises:
            AfreshFailed: a process ended without a result.
        """
        dealt = np.array_split(np.arange(pairs), self._subject.budget.processes)
        longest = expected_s(max(map(len, dealt)))
        named = f"{self._subject.name}: fresh processes"
        bar = tqdm(dealt, desc=named, file=self._subject.bars(), leave=False)
        return [carried_out(self._afresh, share(number, each), longest) for number, each in enumerate(bar)]


def share_of(drawn: Drawn, pairs: Ints, number: int) -> Drawn:
    """``pairs`` of all that is drawn, behind the same warm-up, in an order of arms that ``number`` draws."""
    batches = [*drawn.batches[:WARM_UP], *(drawn.batches[WARM_UP + pair] for pair in pairs)]
    audited = None
    if drawn.audited is not None:
        audited = [place for place, pair in enumerate(pairs) if pair in drawn.audited]
    return replace(drawn, batches=batches, audited=audited, seed=(*drawn.seed, number))


def require_same_arms(timed: Sequence[list[str]]) -> list[str]:
    """What each process timed, which must be the same. Raises AfreshFailed where it is not."""
    arms = timed[0]
    if others := next((other for other in timed if other != arms), None):
        raise AfreshFailed(f"one process timed {', '.join(arms)}, another {', '.join(others)}; run it again")
    return arms


def joined(parts: Sequence[Requests]) -> Requests:
    """All pairs of one batch size, in the order of ``parts``, one of each process.

    Raises:
        AfreshFailed: they timed different arms.
    """
    arms = require_same_arms([list(part.seconds) for part in parts])
    counts = [len(part.prompts) for part in parts]
    starts = np.cumsum([0, *counts[:-1]]).tolist()

    def columns(which: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
        return {arm: np.concatenate([each[arm] for each in which]) for arm in which[0]}

    return Requests(
        Timings(
            columns([part.timings.seconds for part in parts]),
            columns([part.timings.process_seconds for part in parts]),
            tuple(chain.from_iterable(part.timings.first for part in parts)),
        ),
        list(chain.from_iterable(part.prompts for part in parts)),
        {arm: list(chain.from_iterable(part.done[arm] for part in parts)) for arm in arms},
        [start + pair for start, part in zip(starts, parts, strict=True) for pair in part.audited],
        np.repeat(np.arange(len(parts)), counts),
        columns([part.opening for part in parts]),
        columns([part.executed for part in parts]),
        parts[0].entropy,
    )
