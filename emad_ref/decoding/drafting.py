"""How a model drafts for itself: after which layer, by which readout, and for how long.

    feed     (last token, d_1 … d_k), one by one, to layer e
    gate     g_i = w·norm(h_e) + c, the expected √KL between what is read here and what the model says at its end
    draft    d_{i+1} from softmax(head_S(norm(T_e(h_e))))  while g_i ≤ τ and i < ``longest``
    verify   those k + 1 tokens run on in one pass, layers e + 1 … L, over their states and K/V after layer e

Symbols: ``layer`` is e, ``threshold`` τ, ``lens`` T, ``vocabulary`` S. What is drafted, and how much of it, changes the
cost only: the output is the model's own (``acceptance``). A token that S lacks has the probability 0 under the draft,
under which the rule of acceptance is exact as under any other distribution: such a token is never drafted, and comes
from the verification.

``draft`` (in ``selfdraft``) does this with any decoder that deepens, through the protocol; ``drafted`` is the timed path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.point import Estimator, OperatingPoint, full_depth
from emad_ref.record import Ints


@dataclass(frozen=True, eq=False)  # holds an array: a way of drafting is itself, not its values
class Drafting:
    """How a model drafts for itself.

    ``layer``       e, 1…L − 1: drafted tokens run so far before they are verified.
    ``longest``     drafts a round at most, ≥ 1.
    ``threshold``   √nats: drafting goes on while the gate's expected √KL is ≤ it; inf: always, and no gate is asked.
    ``lens``        digest of the attached lens that drafts are read through; None: the model's own head.
    ``gate``        a linear estimator of the signal ``divergence`` with one probe, ``layer``; None where it is not
                    asked.
    ``vocabulary``  int64 [k] ascending ids whose rows of the head a draft reads; None: all of them.

    Raises:
        BadArgument: values outside these ranges, a threshold without a gate, another kind of gate.
    """

    layer: int
    longest: int
    threshold: float = math.inf
    lens: str | None = None
    gate: Estimator | None = None
    vocabulary: Ints | None = None

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise BadArgument("drafting.layer", self.layer, "a layer ≥ 1, below the last")
        if self.longest < 1:
            raise BadArgument("drafting.longest", self.longest, "at least one drafted token a round")
        if math.isnan(self.threshold):
            raise BadArgument("drafting.threshold", self.threshold, "√nats, or inf to draft on always")
        if self.lens == "":
            raise BadArgument("drafting.lens", self.lens, "the digest of a tuned lens", "None reads by the model's head")
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
            raise BadArgument("drafting.vocabulary", int(self.vocabulary[-1]), expected, "choose them from its own text")

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
