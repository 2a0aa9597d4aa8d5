"""Work × geometry → FLOPs, for every FLOP claim; and the paper's cost of using two models.

All executed work is charged once: blocks; attention over executed keys (padding and masked keys included); the encoder
and the sources' K and V; every readout (a probe that also gives the output is one readout) with the translator of a
tuned lens in front of it; K/V-only passes with the state translators in front of them; input projections. A mixture of
experts is charged for the router and the experts that a token ran. Only matrix products and attention count, one
multiply-add as two; a law compares the counts with PyTorch's counter.

EAD weights tokens by parameters (abstract): cost = (n_S · P_S + n_L · P_L) / (n · P_L), with P parameters and n_S,
n_L tokens *processed* by the small and the large model, n tokens emitted. The headline counts one processed token per
emitted one, n_S + n_L = n: with the large model's share s it is s + (1 − s) · P_S / P_L. Tokens read to catch up make
n_S + n_L larger (EAD-H2). A count of parameters is no measurement of time.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.errors import BadArgument
from emad_ref.models.geometry import Geometry
from emad_ref.record import READOUTS, Work


@dataclass(frozen=True)
class Flops:
    """FLOPs of some Work. ``readouts``: FLOPs by kind of readout. ``inputs``: projections below the first block.

    ``fills``: K/V-only passes, with the state translators in front of them.

    ``translators`` of a tuned lens, in front of full heads.

    ``attention`` to a row's own positions and to its source; ``encoder``; ``cross_fills``: K and V of the sources.
    """

    blocks: int
    attention: int
    readouts: dict[str, int]
    fills: int
    inputs: int
    encoder: int = 0
    cross_fills: int = 0
    translators: int = 0

    @property
    def blocks_and_attention(self) -> int:
        """FLOPs of blocks and their attention, without the cost of probes; gross reductions are shares of this."""
        return self.blocks + self.attention

    @property
    def total(self) -> int:
        """All FLOPs; net reductions are shares of this."""
        read = sum(self.readouts.values()) + self.translators
        return self.blocks_and_attention + read + self.fills + self.inputs + self.encoder + self.cross_fills


def flops(work: Work, geometry: Geometry) -> Flops:
    """FLOPs of executed work, two per multiply-add.

    Parameters
    ----------
    work : Work
        From a record or a session.
    geometry : Geometry
        Of the model that executed it.

    Returns
    -------
    Flops
        FLOPs by part (blocks, attention, readouts, fills, …); ``total`` is their sum.

    Raises
    ------
    BadArgument
        Work of another number of layers, or of an encoder that the geometry lacks.
    """
    if work.layers != geometry.layers:
        raise BadArgument("work.layers", work.layers, f"{geometry.layers}, the layers of the geometry")
    if not geometry.encoder_layers and (work.encoder_tokens or work.cross_fills.any()):
        raise BadArgument(
            "work.encoder_tokens", work.encoder_tokens, "0, a decoder-only model", "its geometry has no encoder"
        )
    macs = work.readout_macs.sum(axis=1)
    return Flops(
        blocks=int(work.tokens.sum()) * geometry.block_flops(),
        attention=int(work.context.sum() + work.cross_context.sum()) * geometry.attention_flops(),
        readouts={
            kind: int(work.readout_rows[i].sum()) * geometry.head_flops() if kind == "full" else 2 * int(macs[i])
            for i, kind in enumerate(READOUTS)
        },
        fills=int(work.fills.sum()) * geometry.kv_fill_flops() + 2 * int(work.fill_macs.sum()),
        inputs=int(work.tokens[0]) * geometry.input_flops(),
        encoder=geometry.encoder_flops(work.encoder_tokens, work.encoder_context),
        cross_fills=int(work.cross_fills.sum()) * geometry.cross_fill_flops(),
        translators=2 * int(macs[READOUTS.index("full")]),
    )


def probes_to_blocks_flops_ratio(geometry: Geometry, probes: int, keys: int, probe_flops: int | None = None) -> float:
    """FLOPs of ``probes`` readouts per token over the FLOPs of all its blocks, attention over ``keys`` keys included.

    The claim "probe overhead < 5 % of block FLOPs" (EMAD, §"Cost") uses this number for a token that runs to the last
    layer; it needs no weights. ``probe_flops``: of one readout; a full head by default.
    """
    if probes < 0 or keys < 1:
        raise BadArgument("probes, keys", (probes, keys), "probes ≥ 0 and keys ≥ 1")
    each = geometry.head_flops() if probe_flops is None else probe_flops
    return probes * each / (geometry.layers * (geometry.block_flops() + geometry.attention_flops(keys)))


def two_model_relative_cost(
    small_tokens: float, large_tokens: float, emitted: float, *, small_parameters: float, large_parameters: float
) -> float:
    """Cost of a small and a large model over that of the large one alone, with tokens weighted by parameters.

    Raises:
        BadArgument: negative token counts, none emitted, parameters ≤ 0.
    """
    if min(small_tokens, large_tokens) < 0:
        raise BadArgument("small_tokens, large_tokens", (small_tokens, large_tokens), "token counts ≥ 0")
    if not emitted > 0:
        raise BadArgument("emitted", emitted, "at least one emitted token")
    if not min(small_parameters, large_parameters) > 0:
        raise BadArgument("parameters", (small_parameters, large_parameters), "parameter counts > 0")
    return (small_tokens * small_parameters + large_tokens * large_parameters) / (emitted * large_parameters)


def two_model_cost_at_large_share(large_share: float, *, small_parameters: float, large_parameters: float) -> float:
    """Cost if the large model emits a share s, over that of the large one alone: s + (1 − s) · P_S / P_L.

    >>> round(two_model_cost_at_large_share(0.43, small_parameters=3e9, large_parameters=11e9), 4)
    0.5855

    Raises:
        BadArgument: a share outside 0–1, parameters ≤ 0.
    """
    if not 0 <= large_share <= 1:
        raise BadArgument("large_share", large_share, "a share in 0–1", "43 % is 0.43")
    return two_model_relative_cost(
        1 - large_share, large_share, 1.0, small_parameters=small_parameters, large_parameters=large_parameters
    )
