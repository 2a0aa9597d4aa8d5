"""The rule's own decisions on given tokens: signals, depths, logits and the ledger against the lens.

Fed with ``depth=None``, each row must read the lens' signal at its probes and no other, take the depth the rule gives
(never rising), show the logits that the rule emits there, and count the work its decisions imply. First every row
alone, where the ledger is exact; then all rows together, where a row that follows its neighbours gives itself away.
"""

from __future__ import annotations

from collections.abc import Sequence

from emad_ref.audit.finding import NEEDED, Finding, Tally
from emad_ref.audit.ledger import judge_ledger
from emad_ref.audit.lens import Lens
from emad_ref.audit.trajectory import discriminating, hold_against
from emad_ref.audit.transcript import WIDEST, Transcript, slices
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints


def decisions(
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    continuations: Ints,
    tolerance: float,
    *,
    needed: int = NEEDED,
    exact_context: bool = True,
) -> Finding:
    """Check the decisions on ``prompts`` followed by ``continuations`` int64 [rows, n].

    ``exact_context`` False asks of ``work.context`` only the causal minimum: for decoders that attend over padded
    keys, or run the prompt in other pieces, and count so. Discriminating are positions at which a probe lay below the
    cap; a point without probes has none to offer and needs none. ``tolerance`` in logits and nats, raised to the
    decoder's declared noise.
    """
    tally = Tally("decisions", needed if point.adaptive else 0)
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    if not decoder.capabilities.counted:
        tally.notes.append("ledger not checked: the decoder does not count its work")
    with tally:
        together = [list(range(len(prompts)))] if len(prompts) > 1 else []
        for chosen in (*([row] for row in range(len(prompts))), *together):
            judge_fed(
                tally, decoder, lens, point, [prompts[row] for row in chosen], continuations[chosen], tolerance,
                exact_context=exact_context,
            )  # fmt: skip
    return tally.finding()


def judge_fed(
    tally: Tally,
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    continuations: Ints,
    tolerance: float,
    *,
    exact_context: bool,
) -> None:
    """One session over all of ``prompts``, fed ``continuations`` int64 [rows, n] at depths of the rule's choosing.

    A row alone is fed token by token, several rows at once also by as many as a feed may hold.
    """
    widest = 1 if len(prompts) == 1 else decoder.capabilities.max_feed
    with Transcript(tally, decoder, prompts, point) as talk:
        for columns in slices(continuations.shape[1], widest):
            talk.feed(continuations[:, columns])
        trajectories = talk.trajectories()
        readouts = []
        for trajectory in trajectories:
            readouts.append(hold_against(tally, trajectory, lens, point, tolerance).readouts)
            tally.discriminating += discriminating(trajectory, point)
        if decoder.capabilities.counted:
            judge_ledger(
                tally, talk.session.work, trajectories, readouts, point, exact_context=exact_context,
                widest=min(widest, WIDEST),
            )  # fmt: skip
