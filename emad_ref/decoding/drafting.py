"""A model that drafts for itself: it leaves early, and goes on with the same tokens to verify them.

    copy     where the text's last three tokens stood before, d_1 … d_k are what followed there (``copying``); else
    feed     (last token, d_1 … d_k), one by one, to layer e
    gate     g_i = w·norm(h_e) + c, the expected √KL between what is read there and what the model says at its end
    draft    d_{i+1} from softmax(head_S(norm(T_e(h_e))))  while g_i ≤ τ and i < ``longest``
    verify   those k + 1 tokens run on in one pass, layers e + 1 … ceiling, over their states and K/V after layer e
    accept, emit (rule: ``acceptance``); take back what does not stand

Symbols: ``layer`` is e, ``threshold`` τ, ``lens`` T, ``vocabulary`` S; up to ``copied`` tokens are copied a round. One
session, one cache: K and V below e, and the states there, are written by the draft and reused by the verification, so
no token runs a layer twice. The point (``drafting_point``) is one of schedule ``free_deferred``, under which a token
that stopped early keeps its state (``schedule.free``) and ``Session.deepen`` takes it up.

What is promised: the model's own output at the point's ceiling, whatever ``Drafting`` says; it changes the cost only. A
token that S lacks has no probability under the draft, and the rule of acceptance is exact for such a draft as for any
other. In the record (model 0) every token of a round stands twice: as ``draft`` at depth e, not kept once it went on,
and as ``verify`` at the ceiling. With a gate so does each prompt's last position, as ``draft`` and ``decode``: it stops
where all others do. What a layer ran is therefore

    ℓ ≤ e   draft rows and the opening's        ℓ > e   verify rows and the opening's

and heads: one per verify row, one per draft row but the last of each round, whose proposal nobody would ask for; with a
gate that one's, too, where it is the gate that ends the round. Copies ask neither gate nor head: where no row drafts
otherwise, they are fed in one chunk. The protocol knows no pruned heads: a decoder reads all
of a draft's logits, and those outside S are left aside. Rows share feeds: one that has stopped drafting is fed along.

Any decoder whose capabilities say ``deepens`` will do; ``draft`` knows no model and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.decoding.acceptance import (
    Continuation,
    Ended,
    Options,
    Speculated,
    speculated,
    speculating,
    standing,
    unending,
)
from emad_ref.decoding.copying import Copies
from emad_ref.decoding.pair import Log, Partner, Seat, require_prompts
from emad_ref.errors import BadArgument
from emad_ref.point import Estimator, OperatingPoint, full_depth
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import DECODE, DRAFT, PROMPT, VERIFY, Ints

MODEL = 0


@dataclass(frozen=True, eq=False)  # holds an array: a way of drafting is itself, not its values
class Drafting:
    """How a model drafts for itself.

    ``layer``       e, 1…L − 1: drafted tokens run so far before they are verified.
    ``longest``     drafts a round at most that are read after ``layer``, ≥ 0.
    ``threshold``   √nats: drafting goes on while the gate's expected √KL is ≤ it; inf: always, and no gate is asked.
    ``lens``        digest of the attached lens that drafts are read through; None: the model's own head.
    ``gate``        a linear estimator of the signal ``divergence`` with one probe, ``layer``; None where it is not
                    asked.
    ``vocabulary``  int64 [k] ascending ids whose rows of the head a draft reads; None: all of them.
    ``copied``      tokens that a round copies at most in place of drafts, where the text repeats itself; 0: none.

    Raises:
        BadArgument: values outside these ranges, a threshold without a gate, another kind of gate.
    """

    layer: int
    longest: int
    threshold: float = math.inf
    lens: str | None = None
    gate: Estimator | None = None
    vocabulary: Ints | None = None
    copied: int = 0

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise BadArgument("drafting.layer", self.layer, "a layer ≥ 1, below the last")
        if self.copied < 0:
            raise BadArgument("drafting.copied", self.copied, "0 or more tokens a round", "0 copies none")
        if self.longest < (self.copied == 0):
            raise BadArgument("drafting.longest", self.longest, "at least one drafted token a round")
        if math.isnan(self.threshold):
            raise BadArgument("drafting.threshold", self.threshold, "√nats, or inf to draft on always")
        if self.lens == "":
            raise BadArgument(
                "drafting.lens", self.lens, "the digest of a tuned lens", "None reads by the model's head"
            )
        self._require_gate()
        self._require_vocabulary()

    @property
    def gated(self) -> bool:
        """Whether the gate is asked."""
        return self.threshold < math.inf

    @property
    def opened(self) -> Estimator | None:
        """The gate, where it is asked."""
        return self.gate if self.gated else None

    def require(self, ceiling: int, vocabulary: int | None = None) -> None:
        """Refuse a model whose tokens go no deeper than ``layer``, or that lacks an id.

        Raises:
            BadArgument: a layer outside 1 … ceiling − 1, an id outside 0 … vocabulary − 1.
        """
        if not 1 <= self.layer < ceiling:
            raise BadArgument(
                "drafting.layer",
                self.layer,
                f"a layer in 1–{ceiling - 1}",
                "at the ceiling nothing is left to verify",
            )
        if vocabulary is not None and self.vocabulary is not None and self.vocabulary[-1] >= vocabulary:
            expected = f"ids in 0–{vocabulary - 1} of this model"
            raise BadArgument(
                "drafting.vocabulary", int(self.vocabulary[-1]), expected, "choose them from its own text"
            )

    def _require_gate(self) -> None:
        if self.gate is None:
            if self.gated:
                raise BadArgument(
                    "drafting.gate", None, f"a gate for threshold {self.threshold:g}", "threshold inf asks none"
                )
            return
        if self.gate.kind != "linear" or len(self.gate.weights) != 1:
            found = f"{self.gate.name} with {len(self.gate.weights)} probes"
            raise BadArgument("drafting.gate", found, "linear with one probe, the layer", "see calibration.gate")

    def _require_vocabulary(self) -> None:
        ids = self.vocabulary
        if ids is None:
            return
        whole = isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1 and len(ids) > 0
        if not whole or ids[0] < 0 or (np.diff(ids) <= 0).any():
            expected = "ascending ids ≥ 0, int64 [k ≥ 1], each once"
            raise BadArgument("drafting.vocabulary", ids, expected, "np.unique sorts them; None reads all")


def drafting_point(layers: int, drafting: Drafting | None = None) -> OperatingPoint:
    """What to open a decoder at that is to draft: full depth for every token that is not told to stop early, and what
    is needed to take up those that are.

    With a gate every token that is not told its depth stops after ``drafting.layer``, where the gate is read: its
    value is the step's signal, and who feeds decides by it.
    """
    point = replace(full_depth(layers), name="self-drafting", schedule="free_deferred")
    if drafting is None:
        return point
    drafting.require(layers)
    gate = drafting.opened
    if gate is None:
        return replace(point, lens=drafting.lens)
    always = ((math.inf,),)
    return replace(
        point, lens=drafting.lens, probes=(drafting.layer,), thresholds=always, estimator=gate, signal="divergence"
    )


def draft(
    model: Partner,
    drafting: Drafting,
    prompts: Sequence[Prompt],
    max_new: int,
    *,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
    ended: Ended = unending,
) -> Speculated:
    """Emit up to ``max_new`` tokens per prompt; a stop token is emitted and ends its row.

    ``model``: a decoder opened at ``drafting_point(layers, drafting)``. Rows and room: as of ``speculative.speculate``.

    Raises:
        Unsupported: a decoder that cannot take a stopped token up again, or does not show the gate's value.
        BadArgument: a decoder at another point, a layer outside 1 … ceiling − 1, ids outside the vocabulary, and what
            ``speculate`` refuses.
        NotFinite: logits hold NaN or +inf.
    """
    options = Options(max_new, max(drafting.longest, drafting.copied), stop, temperature, seed, None, ended)
    require_prompts(prompts)
    require_deepening(model)
    drafting.require(model.point.ceiling)
    asked = replace(drafting_point(model.point.layers, drafting), name=model.point.name, ceiling=model.point.ceiling)
    if model.point != asked:
        raise BadArgument("model.point", model.point.name, "the point of this drafting", "see drafting_point")
    return drafted(model, drafting, prompts, options)


def require_deepening(model: Partner) -> None:
    """Raises Unsupported for a decoder that does not offer ``Session.deepen``."""
    if not model.decoder.capabilities.deepens:
        raise Unsupported(
            f"self-speculation with schedule={model.point.schedule!r}, but the decoder's capabilities do not say that "
            "it deepens; open it at drafting_point(layers) if it can under any schedule"
        )


def drafted(model: Partner, drafting: Drafting, prompts: Sequence[Prompt], options: Options) -> Speculated:
    """What ``draft`` does, of arguments that are known to fit."""
    log, opening = Log(), DRAFT if drafting.gated else DECODE
    with closing(Seat(model, MODEL, log, range(len(prompts)), prompts, PROMPT, opening)) as seat:
        drafting.require(model.point.ceiling, seat.logits.shape[-1])
        # under a gate's point the last position of a prompt stopped, too
        logits = seat.deepen(seat.length - 1, DECODE)[:, 0] if drafting.gated else seat.logits
        opened = seat.work
        texts = [Copies() for _ in prompts]
        rows = speculating(prompts, logits, options, (seat,), lambda alive: _round(alive, seat, drafting, texts))
        work = seat.work
    return speculated(rows, log, None if work is None else {MODEL: work}, None if opened is None else {MODEL: opened})


def _round(rows: Sequence[Continuation], seat: Seat, drafting: Drafting, texts: Sequence[Copies]) -> None:
    """Draft, go on, take back: afterwards the session holds all tokens of each row but the last, at the ceiling."""
    before, vocabulary = seat.length, seat.logits.shape[-1]
    copies = [texts[row.number].of(row.tokens, min(drafting.copied, row.room)) for row in rows]
    going = [not copied and min(drafting.longest, row.room) > 0 for row, copied in zip(rows, copies, strict=True)]
    if any(going):
        _drafts(rows, seat, drafting, copies, going)
    else:
        for row, copied in zip(rows, copies, strict=True):
            for token in copied:
                row.copy(token, vocabulary)
        count = max(map(len, copies))
        tokens = np.array([row.padded(count) for row in rows], dtype=np.int64)
        seat.feed(tokens, [DRAFT] * (count + 1), depth=drafting.layer, last=0)
    for row, logits_there in zip(rows, seat.deepen(before, VERIFY), strict=True):
        row.verify(logits_there)
    seat.keep(standing(rows))


def _drafts(
    rows: Sequence[Continuation], seat: Seat, drafting: Drafting, copies: Sequence[list[int]], going: list[bool]
) -> None:
    """Token by token: of the rows ``going`` what is read after the layer, of others the next of their copies."""
    at, vocabulary = 0, seat.logits.shape[-1]
    while True:
        tokens = np.array([[row.padded(at)[-1]] for row in rows], dtype=np.int64)
        if drafting.gated and any(going):
            logits = seat.feed(tokens, [DRAFT], last=1)
            going = [on and sure for on, sure in zip(going, _sure(seat, drafting), strict=True)]
        else:
            # the last draft of a round is only taken along: a head on it would propose what the verification emits
            logits = seat.feed(tokens, [DRAFT], depth=drafting.layer, last=int(any(going)))
        if not any(going) and at >= max(map(len, copies)):
            return
        for number, (row, on, copied) in enumerate(zip(rows, going, copies, strict=True)):
            if on:
                row.propose(logits[number, -1], drafting.vocabulary)
            elif at < len(copied):
                row.copy(copied[at], vocabulary)
        at += 1
        going = [on and at < min(drafting.longest, row.room) for on, row in zip(going, rows, strict=True)]


def _sure(seat: Seat, drafting: Drafting) -> list[bool]:
    """Of each row, whether the gate lets it draft on from the token that was just fed."""
    expected = seat.signal[:, -1, 0]
    if np.isnan(expected).any():
        raise Unsupported(
            f"drafting with a gate after layer {drafting.layer}, but the decoder's steps show no signal there"
        )
    return (expected <= drafting.threshold).tolist()
