"""Work × geometry → FLOPs: the ledger every FLOP claim is decided by.

Everything executed is charged, once: blocks, attention over the keys executed (padding and masked keys included),
every readout (a probe that doubles as the output distribution is one readout), K/V-only passes, input projections.
Only matrix products and attention count, one multiply-add as two; a law holds the ledger against PyTorch's counter.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.errors import BadArgument
from emad_ref.models.geometry import Geometry
from emad_ref.record import READOUTS, Work


@dataclass(frozen=True)
class Flops:
    """FLOPs of some Work. ``readouts``: FLOPs by kind of readout. ``inputs``: projections below the first block."""

    blocks: int
    attention: int
    readouts: dict[str, int]
    fills: int
    inputs: int

    @property
    def gross(self) -> int:
        """Blocks and their attention only: what a saving would be if deciding were free."""
        return self.blocks + self.attention

    @property
    def total(self) -> int:
        """Everything: net reductions are shares of this."""
        return self.gross + sum(self.readouts.values()) + self.fills + self.inputs


def readout_flops(geometry: Geometry) -> dict[str, int]:
    """FLOPs of one row of each kind of readout."""
    return {"full": geometry.head_flops()}


def flops(work: Work, geometry: Geometry) -> Flops:
    """FLOPs of ``work`` executed by a model of this geometry.

    Raises:
        BadArgument: work of another number of layers, or of an encoder, whose cost this geometry does not know.
    """
    if work.layers != geometry.layers:
        raise BadArgument("work.layers", work.layers, f"{geometry.layers}, the layers of the geometry")
    if work.encoder_tokens or work.cross_fills.any():
        raise BadArgument(
            "work.encoder_tokens", work.encoder_tokens, "0, a decoder-only model", "its geometry has no encoder"
        )
    each = readout_flops(geometry)
    return Flops(
        blocks=int(work.tokens.sum()) * geometry.block_flops(),
        attention=int(work.context.sum()) * geometry.attention_flops(),
        readouts={kind: int(work.readout_rows[i].sum()) * each[kind] for i, kind in enumerate(READOUTS)},
        fills=int(work.fills.sum()) * geometry.kv_fill_flops(),
        inputs=int(work.tokens[0]) * geometry.input_flops(),
    )


def probe_share(geometry: Geometry, probes: int, keys: int, kind: str = "full") -> float:
    """FLOPs of ``probes`` readouts per token over the FLOPs of all its blocks, attention over ``keys`` keys included.

    The claim "probe overhead < 5 % of block FLOPs" (EMAD, §"Cost") is about this number at a token that runs to the
    last layer; it needs no weights.
    """
    each = readout_flops(geometry)
    if kind not in each:
        raise BadArgument("kind", kind, f"one of {', '.join(each)}")
    if probes < 0 or keys < 1:
        raise BadArgument("probes, keys", (probes, keys), "probes ≥ 0 and keys ≥ 1")
    return probes * each[kind] / (geometry.layers * (geometry.block_flops() + geometry.attention_flops(keys)))
