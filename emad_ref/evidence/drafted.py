"""How long the exit's lossless mode takes: paired requests beside EMAD-F2's baselines, and other lossless ways.

A model that drafts for itself is our own decoder's matter (``decoding.drafted``): it walks the judge's model, whoever's
decoder is under test. Whether what it emitted while the clock ran is the model's own at full depth is looked at
afterwards (``audit.timed``). Other lossless ways, of one row alone, stand beside: transformers' prompt lookup, its
assisted generation by the smallest bundled model that reads the same ids, where there is one, and drafts by the model's
own head at the same layer, neither lens nor gate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np

from emad_ref.audit.finding import Finding
from emad_ref.decoding.drafted import DraftingDecoder
from emad_ref.decoding.drafting import Drafting
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.evidence.beyond import Beyond
from emad_ref.evidence.stopwatch import ADAPTIVE, FULL, Done, Drawn, Requests, Stopwatch
from emad_ref.evidence.subject import Subject
from emad_ref.protocol import Prompt
from emad_ref.record import VERIFY, Record
from emad_ref.screening.lossless import ASSISTED, LOOKUP, SELF, Arm, assistant_of, by_assistant, by_drafting, by_lookup

WAYS = (LOOKUP, ASSISTED, SELF)  # that stand beside


class Drafted:
    """Of one subject and its exit, timed when first asked for and kept."""

    def __init__(self, beyond: Beyond, stopwatch: Stopwatch):
        self._beyond, self._stopwatch, self._subject = beyond, stopwatch, beyond.subject

    @property
    def drafting(self) -> Drafting | None:
        """How the model drafts for itself; None where the exit says that it does not pay."""
        return self._beyond.exit.drafting

    @cached_property
    def timed(self) -> dict[int, Requests]:
        """Batch size → arms ``full``, ``adaptive`` (drafting), the baselines, and ``WAYS`` for one row."""
        assert self.drafting is not None, "whoever asks has asked whether there is one"
        return self._stopwatch.races(partial(race, self.drafting))

    def checked(self, rows: int) -> Finding:
        """Whether every arm emitted what the model itself would at full depth, in the requests that are looked at."""
        return self._stopwatch.held(self.timed[rows], {FULL: self._subject.full}, rows)

    def stood(self, rows: int) -> float:
        """Share of verified tokens that stand, in the requests that are looked at: 1 where no draft was ever wrong."""
        timed = self.timed[rows]
        records = [timed.done[ADAPTIVE][pair] for pair in timed.audited]
        verified = [each.tokens.kept[each.tokens.phase == VERIFY] for each in records if isinstance(each, Record)]
        return float(np.concatenate(verified).mean())


def race(drafting: Drafting, subject: Subject, stopwatch: Stopwatch, rows: int, drawn: Drawn) -> Requests:
    """Full depth, drafting, the baselines and other ways on what is drawn of so many rows, in this process."""
    new = stopwatch.request_shape[1]
    drafter = DraftingDecoder(subject.stepper, drafting, max_rows=rows)
    full = WalkedDecoder(subject.stepper, subject.full, max_rows=rows)
    arms: dict[str, Callable[[list[Prompt]], Done]] = {
        FULL: lambda prompts: full.generate(prompts, new, frozenset()),
        ADAPTIVE: lambda prompts: drafter.generate(prompts, new, frozenset()),
        **stopwatch.baselines,
    }
    if rows == 1:
        raw = by_drafting(subject.loaded, Drafting(drafting.layer, drafting.longest))
        beside = {LOOKUP: by_lookup(subject.loaded), SELF: raw}
        if (assistant := assistant_of(subject.loaded)) is not None:
            beside[ASSISTED] = by_assistant(subject.loaded, assistant)
        arms |= {name: _alone(way, new) for name, way in beside.items()}
    return stopwatch.clocked(arms, drawn, full)


def _alone(way: Arm, new: int) -> Callable[[list[Prompt]], Done]:
    """As an arm of the stopwatch, of one row: tokens [1, new]."""
    return lambda prompts: way(prompts[0], new)[None]
