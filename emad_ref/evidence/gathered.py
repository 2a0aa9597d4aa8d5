"""All evidence about one model under one study: where the holders meet, and the models and corpora beside it.

Each holder takes what it needs and is made when a question first asks for it. None of them knows this module.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from emad_ref.calibration.trace import EmptyCorpus
from emad_ref.evidence.beyond import Beyond
from emad_ref.evidence.bridging import Bridging
from emad_ref.evidence.drafted import Drafted
from emad_ref.evidence.estimates import Estimates
from emad_ref.evidence.exchanged import Exchanged
from emad_ref.evidence.exits import Exits
from emad_ref.evidence.exits.answers import ROWS
from emad_ref.evidence.fresh import Fresh
from emad_ref.evidence.host import Afresh, Host
from emad_ref.evidence.lending import Lending, copied
from emad_ref.evidence.points import Points
from emad_ref.evidence.rivals import Rivals
from emad_ref.evidence.scored import Scored
from emad_ref.evidence.stopwatch import Stopwatch
from emad_ref.evidence.study import Study
from emad_ref.evidence.subject import Subject
from emad_ref.evidence.swept import Swept, beside
from emad_ref.evidence.traces import Traces
from emad_ref.evidence.witnessed import Witnessed
from emad_ref.models.loading import Loaded, load
from emad_ref.text.documents import Split

JUDGED: tuple[Split, ...] = ("calibrate", "validate", "evaluate")
SHIFTED = {"world:premise": "world:mixed", "world:mixed": "world:premise"}  # corpora at hand that differ most


class Evidence:
    """``subject``: model, text, decoders, oracles. The other members are derived from it, by kind of question."""

    def __init__(self, loaded: Loaded, study: Study, host: Host, lending: Lending | None = None):
        self.loaded, self.study, self.host = loaded, study, host
        self.subject = Subject(loaded, study, host, lending)

    def check(self) -> None:
        """What every question needs, tried before the first is asked, so that its absence is said once.

        Raises:
            EmadError: layers that do not walk as the model does, a family without a tolerance, a split without text,
                a profile or an exit that cannot be read or belongs to another model, a margin under which nothing
                exits.
        """
        assert self.subject.tolerance > 0  # asks for the stepper, which walks the model once and compares
        for split in JUDGED:
            if not self.subject.sequences(split, 1):
                raise EmptyCorpus(
                    f"corpus={self.corpus!r} has no document of two tokens for split {split!r}, but expected at least "
                    "one for each of calibrate, validate and evaluate; use a larger corpus"
                )
        if self.study.profile is not None or self.study.margin is not None:
            self.traces.profile.point(self.study.margin or 0.0)
        if self.study.exit is not None:
            assert self.beyond.exit  # read, and held against this model
        self.scored.published.check()

    # ------------------------------------------------------------ what reports say of it

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def corpus(self) -> str:
        return self.subject.corpus

    @property
    def fingerprint(self) -> str:
        return self.subject.fingerprint

    @property
    def most_rows(self) -> int:
        """The most rows that a verdict on this model reads from one request."""
        sizes = [*self.study.budget.batch_sizes, *beside(self.study.budget), self.scored.rows]
        return max(*sizes, ROWS if self.subject.seq2seq else 1)

    # ------------------------------------------------------------ holders

    @cached_property
    def bridging(self) -> Bridging:
        """Whether replay speaks for the decoder under test, and points that probe it."""
        return Bridging(self.subject)

    @cached_property
    def witnessed(self) -> Witnessed:
        """Whether the work that the decoder under test counts is what it executes."""
        return Witnessed(self.bridging)

    @cached_property
    def traces(self) -> Traces:
        """Lens traces of three splits, and the profile."""
        return Traces(self.subject)

    @cached_property
    def scored(self) -> Scored:
        """What this model answers on the tasks of its corpus, and on lm-eval's."""
        return Scored(self.subject)

    @cached_property
    def points(self) -> Points:
        """The operating points put forward, and what they lose and save."""
        return Points(self.traces, self.scored, self.witnessed)

    @cached_property
    def estimates(self) -> Estimates:
        """Cheaper readings of entropy than a full softmax."""
        return Estimates(self.traces)

    @cached_property
    def rivals(self) -> Rivals:
        """EMAD beside fixed truncation, fixed thresholds and other schedules."""
        return Rivals(self.traces)

    @cached_property
    def stopwatch(self) -> Stopwatch:
        """What the decoder under test takes in time."""
        fresh = Fresh(self.host.afresh, self.subject)
        return Stopwatch(self.points, None if fresh.without else fresh.races, fresh.without)

    @cached_property
    def swept(self) -> Swept:
        """The same at batch sizes that decide nothing."""
        return Swept(self.stopwatch, self.study.budget)

    @cached_property
    def beyond(self) -> Beyond:
        """What would work on this model instead: an exit, ceilings, and what of EMAD fails."""
        return Beyond(self.traces, self.bridging)

    @cached_property
    def drafted(self) -> Drafted:
        """What drafting for itself takes in time."""
        return Drafted(self.beyond, self.stopwatch)

    @cached_property
    def exchanged(self) -> Exchanged:
        """EMAD as published beside itself with one part exchanged."""
        return Exchanged(self.beyond, self.traces)

    @cached_property
    def exits(self) -> Exits:
        """What this encoder-decoder answers under early-exit rules, and what that cost."""
        return Exits(self.subject, lambda name: self.beside(name).exits)

    # ------------------------------------------------------------ other models and corpora

    def of(self, loaded: Loaded) -> Evidence:
        """Evidence about a model made in memory (a copy of this one) under the same study, from the same host.

        No name leads another process to it.
        """
        host = replace(self.host, afresh=Afresh(without="the model was made in this process"))
        return Evidence(loaded, self.study, host, Lending(loaded, copied))

    @cached_property
    def shifted(self) -> Evidence | None:
        """The same model on another corpus, whose profile is foreign here; None where there is no other."""
        other = SHIFTED.get(self.corpus, None if self.corpus == "self" else "self")
        if other is None or not self.loaded.trained:
            return None
        return Evidence(self.loaded, replace(self.study, corpus=other, profile=None), self.host, self.subject.lending)

    def beside(self, name: str) -> Evidence:
        """Evidence of another model under the same study."""
        study = self.study
        loaded = load(name, device=study.device, dtype=self.subject.stepper.dtype, seed=study.seed, backend=study.walk)
        return Evidence(loaded, self.study, self.host)
