"""FLOPs of one reading by an estimator, from sizes alone: what a probe would cost on a model nobody has to load.

    full        one head                             topk, exact  the same products, fewer of them kept: one head
    lowrank     2·(E·r + r·V + E)                    topk over low-rank search  2·(E·r + r·V + K·E)
    linear      2·E

A law holds these to what readers execute and charge. An inverted index has no cost without its lists.
"""

from __future__ import annotations

from emad_ref.errors import BadArgument
from emad_ref.models.geometry import Geometry
from emad_ref.point import Estimator


def reading_flops(geometry: Geometry, estimator: Estimator) -> int:
    """FLOPs of one row read by ``estimator``.

    Raises:
        BadArgument: a search whose cost depends on how the rows fall into lists.
    """
    width, vocabulary = geometry.embedding_width, geometry.vocabulary
    low = width * estimator.rank + estimator.rank * vocabulary
    projected = geometry.hidden * width if geometry.hidden != width else 0
    macs = {
        ("full", "exact"): geometry.head_flops() // 2 - projected,
        ("topk", "exact"): vocabulary * width,
        ("topk", "lowrank"): low + estimator.k * width,
        ("lowrank", "exact"): low + width,
        ("linear", "exact"): width,
    }
    asked = (estimator.kind, estimator.search)
    if asked not in macs:
        raise BadArgument("estimator.search", estimator.search, "exact or lowrank", "build the index to know its cost")
    return 2 * (macs[asked] + projected)
