"""What the parts of a decoding step cost on one machine, in seconds, and what parts taken together cost.

    a step   = ``step`` + Σ blocks + Σ heads + Σ readings at probes + Σ fills
    n tokens = the same in one pass:  block(n), head(n)

A block and a head cost by how many tokens pass them at once; between counts that were measured the line through its
neighbours stands, beyond the largest the line from the first to the last goes on. Attention adds ``per_key`` seconds a
key and block.

One row at a time. Seconds are a machine's, at one number of threads, under what else ran there: they compare only with
what was timed beside them. Who measures is ``screening.costing``, who adds them up ``screening.predicted``. What was
not measured is None, and asking for it raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Floats, Ints


@dataclass(frozen=True, eq=False)  # holds arrays: a set of costs is itself, not its values
class Costs:
    """Seconds of the parts of a decoding step of one row.

    ``layers`` L and ``vocabulary`` V of the model, ``threads`` of the machine, ``keys`` that blocks were timed at.
    ``step``      a token's decoding without blocks, heads, probes and fills: embedding, frame, choosing, the record.
    ``token``     the part of it that is embedding and frame: what one more token of a step costs before block 1.
    ``probe``     a signal from the logits at a probe, and deciding by it; without head and lens.
    ``lengths``   int64 [N] tokens in one pass, ascending from 1; ``block`` and ``head`` [N] seconds of one block, and
                  of a full head, over so many.
    ``per_key``   more seconds of a block for each key that it attends to; ≥ 0.
    ``again``     layer e → seconds of a block for one token where only layers 1…e run, time and again, as in drafting.
    ``pruned``    rows of the head read → seconds of a head over them, for one token.
    ``lens``, ``gate``, ``fill``, ``translator``  one translator of a tuned lens; one linear gate with its norm, and
                  deciding by it; K and V of one layer from the state below it; one translator of states. None: not
                  measured.
    ``whole``     one token at full depth as our decoder runs it, for a check of the sum; None: not measured.
    ``intervals`` name of a part → 95 % interval of its median.

    Raises:
        BadArgument: lengths that do not ascend from 1, arrays of other sizes, seconds that are negative or not finite.
    """

    layers: int
    vocabulary: int
    threads: int
    keys: int
    step: float
    token: float
    probe: float
    lengths: Ints
    block: Floats
    head: Floats
    per_key: float
    again: Mapping[int, float] = field(default_factory=dict)
    pruned: Mapping[int, float] = field(default_factory=dict)
    lens: float | None = None
    gate: float | None = None
    fill: float | None = None
    translator: float | None = None
    whole: float | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if list(self.lengths) != sorted(set(self.lengths.tolist())) or len(self.lengths) < 1 or self.lengths[0] != 1:
            raise BadArgument("costs.lengths", self.lengths.tolist(), "numbers of tokens, ascending from 1")
        for name in ("block", "head"):
            shape = getattr(self, name).shape
            if shape != self.lengths.shape:
                raise BadArgument(f"costs.{name}", shape, f"shape {list(self.lengths.shape)}, one per length")
        optional = {name: getattr(self, name) for name in ("lens", "gate", "fill", "translator", "whole")}
        seconds = {
            **{name: getattr(self, name) for name in ("step", "token", "probe", "per_key")},
            **{name: value for name, value in optional.items() if value is not None},
            **{f"{name}[{i}]": value for name in ("block", "head") for i, value in enumerate(getattr(self, name))},
            **{f"again[{layer}]": value for layer, value in self.again.items()},
            **{f"pruned[{rows}]": value for rows, value in self.pruned.items()},
        }
        for name, value in seconds.items():
            if not (math.isfinite(value) and value >= 0):
                raise BadArgument(f"costs.{name}", float(value), "seconds ≥ 0", "measure again")

    def blocks(self, count: float, tokens: float = 1, keys: float | None = None) -> float:
        """Seconds of ``count`` blocks over ``tokens`` tokens in one pass, against ``keys`` keys (those timed at).

        Raises:
            BadArgument: fewer than one token.
        """
        return count * float(self.passes(np.array([tokens], dtype=np.float64), keys)[0])

    def passes(self, tokens: Floats, keys: float | None = None) -> Floats:
        """[m] seconds of one block over each of ``tokens`` [m]; ``keys`` as in ``blocks``, and what it raises."""
        more = 0.0 if keys is None else self.per_key * (keys - self.keys)
        return np.maximum(0.0, _along(self.lengths, self.block, tokens) + more)

    def shallow(self, layer: int, keys: float | None = None) -> float:
        """Seconds of layers 1…``layer`` for one token, right after the same for the token before it."""
        if layer not in self.again:
            return self.blocks(layer, keys=keys)
        more = 0.0 if keys is None else self.per_key * (keys - self.keys)
        return layer * max(0.0, self.again[layer] + more)

    def heads(self, tokens: float = 1) -> float:
        """Seconds of a full head over ``tokens`` tokens in one pass."""
        return 0.0 if tokens == 0 else float(_along(self.lengths, self.head, np.array([tokens], dtype=np.float64))[0])

    def pruned_head(self, rows: int) -> float:
        """Seconds of a head over ``rows`` of the vocabulary, for one token.

        Raises:
            BadArgument: fewer rows than one or more than there are; nothing but the full head was measured.
        """
        if not 1 <= rows <= self.vocabulary:
            raise BadArgument("rows", rows, f"1–{self.vocabulary} of the vocabulary")
        if rows == self.vocabulary:
            return self.heads()
        if not self.pruned:
            raise BadArgument("rows", rows, "a head that was measured", "measure one over so many rows")
        sizes = sorted(self.pruned)
        # below the fewest rows measured: no cheaper than those, which errs to the dear side
        return float(np.interp(rows, [*sizes, self.vocabulary], [*(self.pruned[k] for k in sizes), self.head[0]]))

    def of(self, part: str) -> float:
        """Seconds of ``lens``, ``gate``, ``fill``, ``translator`` or ``whole``.

        Raises:
            BadArgument: it was not measured.
        """
        seconds: float | None = getattr(self, part)
        if seconds is None:
            raise BadArgument(f"costs.{part}", None, "seconds that were measured", f"measure with a {part}")
        return seconds


def _along(lengths: Ints, seconds: Floats, tokens: Floats) -> Floats:
    """``seconds`` at ``tokens`` by the lines between measured lengths, and by their mean slope beyond them."""
    if (tokens < 1).any():
        raise BadArgument("tokens", float(tokens.min()), "at least 1")
    # of a single length nothing says what more tokens cost: in proportion errs to the dear side
    last, first = int(lengths[-1]), int(lengths[0])
    slope = max(0.0, float(seconds[-1] - seconds[0]) / (last - first)) if last > first else float(seconds[0])
    within: Floats = np.interp(tokens, lengths, seconds)
    return within + slope * np.maximum(0.0, tokens - last)
