"""How long a token will take at a point, from what its parts cost: arithmetic on ``meters.costs``, nothing is run.

    a token   step + Σ_ℓ passes through layer ℓ + heads + readings at probes + fills

What each schedule runs is that of its flow (``schedule``): ``monotone`` and ``positional`` leave, ``free_eager`` runs
every block but the last, ``copying`` and ``translated`` fill K and V of the layers above an exit, ``free_deferred`` and
``chunked`` take waiting tokens along in one pass. One row; a mean number of keys.

Depths come as shares. How many tokens wait where a deferred layer runs depends on their order too: ``passes_of`` says
it of depths in order; without that exits are taken to be independent of one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.meters.costs import Costs
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints

LEAVING = ("monotone", "positional")
DEFERRING = ("free_deferred", "chunked")
FILLING = ("free_eager", "copying", "translated")
READ = ("full", "linear")  # estimators whose readings are costed
UNLIKELY = 1e-9  # share of passes that a tail of still longer ones may hold


def shares_of(depths: Ints, layers: int) -> Floats:
    """[L] share of tokens at each depth 1…L, of ``depths`` in any order."""
    shares: Floats = np.bincount(depths.ravel(), minlength=layers + 1)[1:] / depths.size
    return shares


def seconds_per_token(
    costs: Costs,
    point: OperatingPoint,
    depth_shares: Floats,
    *,
    keys: float | None = None,
    passes: Floats | None = None,
) -> float:
    """Seconds of one decoded token at ``point``: the sum of ``parts_of_token``, which says what it takes and raises."""
    return sum(parts_of_token(costs, point, depth_shares, keys=keys, passes=passes).values())


def parts_of_token(
    costs: Costs,
    point: OperatingPoint,
    depth_shares: Floats,
    *,
    keys: float | None = None,
    passes: Floats | None = None,
) -> dict[str, float]:
    """Seconds a decoded token spends in each part of a step.

    Args:
        depth_shares: [L] share of tokens at each depth 1…L (``shares_of``).
        keys: mean number of keys; those that blocks were timed at by default.
        passes: under a deferred schedule, [L, n] passes of 1, 2, … tokens through each layer, per token
            (``passes_of``); by default as if exits were independent of one another.

    Raises:
        BadArgument: shares of other layers, that do not sum to 1, or above the ceiling; a reading or a part whose cost
            was not measured.
    """
    _require_point(costs, point, depth_shares)
    token = _token(point, depth_shares)
    if point.estimator.kind == "full":
        # a probe reads by lens and head, and where a token leaves that reading is what it emits
        heads, translated, gates = token.reads + 1 - token.emitted, token.reads + token.below - token.emitted, 0.0
    else:
        heads, translated, gates = 1.0, token.below, token.reads
    if point.lens is None:
        translated = 0.0
    return {
        "step": costs.step,
        **_blocks(costs, point, token, keys, passes),
        "heads": heads * costs.heads(),
        "lens": translated * costs.of("lens") if translated else 0.0,
        "probes": token.reads * costs.probe,
        "gates": gates * costs.of("gate") if gates else 0.0,
    }


def passes_of(depths: Iterable[Ints], layers: int, ceiling: int | None = None) -> Floats:
    """[L, longest] passes of 1, 2, … tokens through each layer, per token, where exits are deferred.

    ``depths``: decided depths of each sequence, in order. A layer runs for a token that is as deep, with every token
    before it that has not run it yet.
    """
    sequences, last = list(depths), layers if ceiling is None else ceiling
    counted: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        for layer in range(1, last + 1):
            ran = np.flatnonzero(sequence >= layer)
            for size in np.diff(ran, prepend=-1).tolist():
                counted[layer, size] = counted.get((layer, size), 0) + 1
    longest = max(size for _, size in counted)
    passes = np.zeros((layers, longest))
    for (layer, size), times in counted.items():
        passes[layer - 1, size - 1] = times
    return passes / sum(len(sequence) for sequence in sequences)


def require_shares(name: str, shares: Floats) -> None:
    """Raises BadArgument where ``shares`` are none: below 0, or of another sum than 1."""
    if shares.ndim != 1 or not (shares >= 0).all() or not np.isclose(shares.sum(), 1):
        raise BadArgument(name, shares.tolist(), "shares ≥ 0 that sum to 1")


# ---------------------------------------------------------------- private


@dataclass(frozen=True, eq=False)
class _Token:
    """What a mean token does, each a number a token.

    ``runs``     [L] passes through each layer: the share of tokens that go as deep.
    ``reads``    readings at probes.
    ``emitted``  readings at probes that are emitted, since the token leaves there.
    ``below``    exits below the last layer; ``early`` below the ceiling.
    ``owed``     layers above exits, whose K and V are filled in; ``apart``: without those right above one, which are
                 given the exit's state itself.
    """

    runs: Floats
    reads: float
    emitted: float
    below: float
    early: float
    owed: float
    apart: float


def _token(point: OperatingPoint, depth_shares: Floats) -> _Token:
    # within a chunk the depth stands: its first token alone is asked
    asked = 1 / point.period if point.schedule == "chunked" and point.period else 1.0
    runs = depth_shares[::-1].cumsum()[::-1]
    at = np.array(point.probes, dtype=np.int64) - 1
    leaving, above = depth_shares[: point.ceiling - 1], point.ceiling - np.arange(1, point.ceiling)
    return _Token(
        runs,
        reads=asked * float(runs[at].sum()),
        emitted=asked * float(depth_shares[at].sum()),
        below=float(depth_shares[:-1].sum()),
        early=float(leaving.sum()),
        owed=float(leaving @ above),
        apart=float(leaving @ (above - 1)),
    )


def _blocks(
    costs: Costs, point: OperatingPoint, token: _Token, keys: float | None, passes: Floats | None
) -> dict[str, float]:
    """Seconds of blocks and of K/V fills."""
    schedule = point.schedule
    if schedule in DEFERRING:
        sizes = [_independent(float(share)) for share in token.runs] if passes is None else list(passes)
        return {"blocks": sum(float(row @ costs.passes(np.arange(1.0, len(row) + 1), keys)) for row in sizes)}
    if schedule == "free_eager":  # every block runs but the last above an exit, which fills K and V alone
        run, filled = point.ceiling - token.early, token.early
    else:
        run, filled = float(token.runs.sum()), 0.0 if schedule in LEAVING else token.owed
    translated = token.apart if schedule == "translated" else 0.0
    fills = filled * costs.of("fill") if filled else 0.0
    return {
        "blocks": costs.blocks(run, keys=keys),
        "fills": fills + (translated * costs.of("translator") if translated else 0.0),
    }


def _independent(share: float) -> Floats:
    """[n] passes of 1, 2, … tokens per token, where each token runs the layer with probability ``share``."""
    if share >= 1:
        return np.ones(1)
    if share <= 0:
        return np.zeros(1)
    longest = int(np.ceil(np.log(UNLIKELY) / np.log1p(-share)))
    return (share**2 * (1 - share) ** np.arange(longest)).astype(np.float64)


def _require_point(costs: Costs, point: OperatingPoint, depth_shares: Floats) -> None:
    if point.layers != costs.layers or depth_shares.shape != (costs.layers,):
        raise BadArgument("depth_shares", depth_shares.shape, f"shape [{costs.layers}], of the layers that were timed")
    require_shares("depth_shares", depth_shares)
    if depth_shares[point.ceiling :].any():
        deepest = int(np.flatnonzero(depth_shares)[-1]) + 1
        raise BadArgument("depth_shares", deepest, f"no depth above the ceiling {point.ceiling}")
    if point.schedule not in (*LEAVING, *DEFERRING, *FILLING):
        known = ", ".join((*LEAVING, *DEFERRING, *FILLING))
        raise BadArgument("point.schedule", point.schedule, f"one whose work is priced here ({known})")
    if point.probes and (point.estimator.kind not in READ or point.confidence is not None):
        found = "a confidence" if point.confidence is not None else point.estimator.name
        raise BadArgument("point.estimator", found, f"one whose cost is measured ({', '.join(READ)})")
