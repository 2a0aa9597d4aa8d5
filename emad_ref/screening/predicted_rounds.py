"""How long a token will take where a model drafts for itself: arithmetic on ``meters.costs``, nothing is run.

    drafting   (k + 1 passes to layer e, k draft heads, gates, one pass of k + 1 tokens above e with its heads)
               / tokens emitted, a round; averaged over rounds by the number of their drafts k
    copying    one pass of k + 1 tokens through all layers, with its heads, in rounds that copy k

One row; a mean number of keys. What rounds there are is ``screening.drafts``' to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from emad_ref.decoding.drafting import Drafting
from emad_ref.errors import BadArgument
from emad_ref.meters.costs import Costs
from emad_ref.record import Floats
from emad_ref.screening.predicted import require_shares


@dataclass(frozen=True, eq=False)
class Rounds:
    """Rounds of drafting: share of rounds with 0, 1, … ``drafts`` read after the layer, and with so many ``copies`` in
    their place, the first of which is 0; all of them sum to 1. ``tokens`` emitted a round."""

    drafts: Floats
    tokens: float
    copies: Floats = field(default_factory=lambda: np.zeros(1))

    def __post_init__(self) -> None:
        require_shares("rounds.drafts and rounds.copies", np.concatenate([self.drafts, self.copies]))
        most = max(len(self.drafts), len(self.copies))
        if not 1 <= self.tokens <= most:
            raise BadArgument("rounds.tokens", self.tokens, f"1–{most}", "a round emits one more at most")
        if self.copies[0]:
            raise BadArgument("rounds.copies", float(self.copies[0]), "0 rounds that copy nothing", "they draft")


def seconds_per_token_drafting(costs: Costs, drafting: Drafting, rounds: Rounds, *, keys: float | None = None) -> float:
    """Seconds of one emitted token where a model drafts for itself (``decoding.drafting``).

    Raises:
        BadArgument: more drafts than ``drafting`` allows; a part whose cost was not measured.
    """
    if len(rounds.drafts) > drafting.longest + 1:
        raise BadArgument("rounds.drafts", len(rounds.drafts) - 1, f"at most {drafting.longest} drafts a round")
    if len(rounds.copies) > drafting.copied + 1:
        raise BadArgument("rounds.copies", len(rounds.copies) - 1, f"at most {drafting.copied} copies a round")
    drafting.require(costs.layers, costs.vocabulary)
    drafts, copies = (enumerate(shares.tolist()) for shares in (rounds.drafts, rounds.copies))
    seconds = sum(share * seconds_of_round(costs, drafting, count, keys=keys) for count, share in drafts if share)
    copying = sum(share * seconds_of_copies(costs, count, keys=keys) for count, share in copies if share)
    return float(seconds + copying) / rounds.tokens


def seconds_of_copies(costs: Costs, copies: int, *, keys: float | None = None) -> float:
    """Seconds of a round of so many ``copies``: one pass of them and the last token through all layers."""
    return costs.step + costs.blocks(costs.layers, copies + 1, keys) + costs.heads(copies + 1)


def seconds_of_round(costs: Costs, drafting: Drafting, drafts: int, *, keys: float | None = None) -> float:
    """Seconds of a round of so many ``drafts``: they and the last token go to the draft layer one by one, then on."""
    above = costs.layers - drafting.layer
    asked = 0 if drafting.gate is None or np.isinf(drafting.threshold) else min(drafts + 1, drafting.longest)
    ids = drafting.vocabulary
    drafted = costs.heads() if ids is None else costs.pruned_head(len(ids))
    lens = 0.0 if drafting.lens is None or not drafts else costs.of("lens")
    alone = costs.shallow(drafting.layer, keys) if drafts else costs.blocks(drafting.layer, keys=keys)
    return (
        costs.step
        + drafts * costs.token
        + (drafts + 1) * alone
        + drafts * (drafted + lens)
        + (asked * costs.of("gate") if asked else 0.0)
        + costs.blocks(above, drafts + 1, keys)
        + costs.heads(drafts + 1)
    )
