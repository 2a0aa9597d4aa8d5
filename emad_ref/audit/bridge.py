"""The bridge from replay to a decoder: its teacher-forced depths and NLL on sampled documents equal replay's.

Only behind it do replay's verdicts hold for that decoder (DESIGN, "Record and protocol"). Each document is opened at
its first decided position and fed its own tokens; nothing but the decoder's depths and logits is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.audit.finding import NEEDED, Finding, Tally
from emad_ref.audit.rule import emission_noise, tied
from emad_ref.audit.trajectory import Trajectory, discriminating, judge_depths
from emad_ref.audit.transcript import Transcript
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Floats, Ints

STORED = 1e-5  # traces hold float32: 6e-8 of values up to tens of nats, and room for the sum over the vocabulary


@dataclass(frozen=True)
class Replayed:
    """Replay's say on one document of ``tokens`` int64 [n], whose positions before ``adaptive_from`` are prompt.

    One entry per decided position p = adaptive_from … n − 2: ``depth`` int64 [m], ``nll_nats`` float64 [m] of token
    p + 1 at that depth, ``signal`` float64 [m, probes] at all probes. ``rows``: the row of the point's thresholds that
    each belongs to, int64 [m], and other rows that the tolerance allows; (): all belong to the first.

    Raises:
        BadArgument: arrays that do not fit the document.
    """

    tokens: Ints
    depth: Ints
    nll_nats: Floats
    signal: Floats
    adaptive_from: int = 0
    rows: tuple[Ints, ...] = ()

    def __post_init__(self) -> None:
        decided_positions = len(self.tokens) - 1 - self.adaptive_from
        if decided_positions < 1:
            raise BadArgument("tokens", len(self.tokens), "a document with a token to predict after adaptive_from")
        named = [(name, getattr(self, name)) for name in ("depth", "nll_nats", "signal")]
        for name, held in [*named, *(("rows", one) for one in self.rows)]:
            if len(held) != decided_positions:
                raise BadArgument(name, held.shape, f"{decided_positions} entries, one per decided position")


def bridge(
    decoder: Decoder,
    point: OperatingPoint,
    replayed: Sequence[Replayed],
    tolerance: float,
    *,
    needed: int = NEEDED,
    excuses_ties: bool = False,
) -> Finding:
    """Hold the decoder against ``replayed`` documents.

    ``tolerance`` in nats and logits, raised to the decoder's declared noise and to what float32 traces can hold; an
    NLL may be off by twice as much (its logit and the normaliser). Where a tie moved a depth, NLL is not compared.
    Discriminating are positions at which a probe lay below the cap. ``excuses_ties``: ties are counted, however many.
    """
    tally = Tally("bridge", needed if point.adaptive else 0, excuses_ties)
    tolerance = tally.allow(max(tolerance, STORED), decoder.capabilities.logit_noise)
    with tally:
        for number, document in enumerate(replayed):
            trajectory = _teacher_forced(tally, decoder, point, document, f"document {number}")
            tally.n += len(trajectory.depth)
            tally.discriminating += discriminating(trajectory, point)
            judge_depths(tally, trajectory, document.signal, point, tolerance, document.rows)
            _judge_replay(tally, trajectory, document, point, tolerance)
    return tally.finding()


def _teacher_forced(tally: Tally, decoder: Decoder, point: OperatingPoint, document: Replayed, name: str) -> Trajectory:
    opening = document.adaptive_from + 1
    with Transcript(tally, decoder, [Prompt(document.tokens[:opening])], point, [name]) as talk:
        for token in document.tokens[opening:-1]:
            talk.feed(np.array([[token]]))
        return talk.trajectories()[0]


def _judge_replay(
    tally: Tally, trajectory: Trajectory, document: Replayed, point: OperatingPoint, tolerance: float
) -> None:
    """Depths equal replay's up to the first threshold tie, NLL wherever depths are equal."""
    rows = document.rows or (np.zeros(len(document.depth), dtype=np.int64),)
    untied = ~np.logical_or.accumulate(tied(point, document.signal, rows, tolerance))
    same = trajectory.depth == document.depth
    if (untied & ~same).any():
        at = int(np.argmax(untied & ~same))
        gives = f"replay gives depth {document.depth[at]}, with no tie at or before it"
        tally.require(False, f"{trajectory.place(at)}: {gives}")
    assert trajectory.logits is not None, "a transcript shows its logits"
    target = document.tokens[document.adaptive_from + 1 :]
    found = _nll_nats(trajectory.logits, target)
    with np.errstate(invalid="ignore"):  # a next token that both have pruned is lost in both
        off = np.where(same & (found != document.nll_nats), np.abs(found - document.nll_nats), 0.0)
    allowed = 2 * tolerance * emission_noise(point)
    at = int(np.argmax(~(off <= allowed)))
    tally.require(
        bool((off <= allowed).all()),
        f"{trajectory.place(at)}: NLL off by {off[at]:.2g} nats from replay's, more than {allowed:g}",
    )


def _nll_nats(logits: Floats, target: Ints) -> Floats:
    """[m] −log softmax(logits [m, V])[target [m]]."""
    z = logits - logits.max(axis=-1, keepdims=True)
    nll: Floats = np.log(np.exp(z).sum(axis=-1)) - z[np.arange(len(target)), target]
    return nll
