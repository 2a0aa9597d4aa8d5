"""How long the exit's lossless mode takes: paired requests beside EMAD-F2's baselines, and other lossless ways.

A model that drafts for itself is our own decoder's matter (``decoding.drafted``): it walks the judge's model, whoever's
decoder is under test. Whether what it emitted while the clock ran is the model's own at full depth is looked at
afterwards (``audit.timed``).

One row at a time decides, and has all pairs of the budget, in fresh processes where others have. What decides nothing
has ``swept.PAIRS``, in the run's own process: larger batches, and in a race of their own other lossless ways of one
row: either half of the exit's way alone, drafts by the model's own head at the same layer (neither lens nor gate),
transformers' prompt lookup, and its assisted generation by the smallest bundled model that reads the same ids, where
there is one.
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
from emad_ref.evidence.swept import PAIRS, beside
from emad_ref.protocol import Prompt
from emad_ref.record import VERIFY, Record
from emad_ref.screening.after_prompts import AfterPrompt, nearest, read_after_prompts
from emad_ref.screening.lossless import (
    ASSISTED,
    LOOKUP,
    Arm,
    assistant_of,
    by_assistant,
    by_drafting,
    by_lookup,
    by_parts,
)


class Drafted:
    """Of one subject and its exit, timed when first asked for and kept."""

    def __init__(self, beyond: Beyond, stopwatch: Stopwatch):
        self._beyond, self._stopwatch, self._subject = beyond, stopwatch, beyond.subject

    @property
    def drafting(self) -> Drafting | None:
        """How the model drafts for itself; None where the exit says that it does not pay."""
        return self._beyond.exit.drafting

    @property
    def predicted(self) -> AfterPrompt | None:
        """What screening predicted after prompts most like those timed here; None where its exit does not say."""
        return nearest(read_after_prompts(self._beyond.exit.screened), self._stopwatch.request_shape[0])

    @cached_property
    def timed(self) -> dict[int, Requests]:
        """Batch size → arms ``full``, ``adaptive`` (drafting), and the baselines."""
        racing, alone = partial(race, self._way), min(self._subject.budget.batch_sizes)
        watch, few = self._stopwatch, min(PAIRS, self._subject.budget.pairs)
        return watch.races(racing, drawn={alone: watch.drawn(alone)}) | {
            rows: racing(self._subject, watch, rows, watch.drawn(rows, few)) for rows in self._larger(alone)
        }

    def _larger(self, alone: int) -> list[int]:
        budget = self._subject.budget
        return sorted({*budget.batch_sizes, *beside(budget)} - {alone})

    @cached_property
    def beside(self) -> Requests:
        """Of one row: arms ``adaptive`` and each other way that there is."""
        loaded, watch, few = self._subject.loaded, self._stopwatch, min(PAIRS, self._subject.budget.pairs)
        new = watch.request_shape[1]
        ways = {ADAPTIVE: by_drafting(loaded, self._way), LOOKUP: by_lookup(loaded), **by_parts(loaded, self._way)}
        if (assistant := assistant_of(loaded)) is not None:
            ways[ASSISTED] = by_assistant(loaded, assistant)
        alone = {name: _alone(way, new) for name, way in ways.items()}
        clocked = WalkedDecoder(self._subject.stepper, self._subject.full)
        return watch.clocked(alone, watch.drawn(1, few), clocked)

    @property
    def _way(self) -> Drafting:
        assert self.drafting is not None, "whoever asks has asked whether there is one"
        return self.drafting

    def checked(self, rows: int) -> Finding:
        """Whether every arm emitted what the model itself would at full depth, in the requests that are looked at."""
        full = {FULL: self._subject.full}
        found = self._stopwatch.held(self.timed[rows], full, rows)
        if rows != min(self.timed) or found.passed is False:
            return found
        others = self._stopwatch.held(self.beside, full, 1)
        return others if others.passed is False else found

    def stood(self, rows: int) -> float:
        """Share of verified tokens that stand, in the requests that are looked at: 1 where no draft was ever wrong."""
        timed = self.timed[rows]
        records = [timed.done[ADAPTIVE][pair] for pair in timed.audited]
        verified = [each.tokens.kept[each.tokens.phase == VERIFY] for each in records if isinstance(each, Record)]
        return float(np.concatenate(verified).mean())


def race(drafting: Drafting, subject: Subject, stopwatch: Stopwatch, rows: int, drawn: Drawn) -> Requests:
    """Full depth, drafting and the baselines on what is drawn of so many rows, in this process."""
    new = stopwatch.request_shape[1]
    drafter = DraftingDecoder(subject.stepper, drafting, max_rows=rows)
    full = WalkedDecoder(subject.stepper, subject.full, max_rows=rows)
    arms: dict[str, Callable[[list[Prompt]], Done]] = {
        FULL: lambda prompts: full.generate(prompts, new, frozenset()),
        ADAPTIVE: lambda prompts: drafter.generate(prompts, new, frozenset()),
        **stopwatch.baselines,
    }
    return stopwatch.clocked(arms, drawn, full)


def _alone(way: Arm, new: int) -> Callable[[list[Prompt]], Done]:
    """As an arm of the stopwatch, of one row: tokens [1, new]."""
    return lambda prompts: way(prompts[0], new)[None]
