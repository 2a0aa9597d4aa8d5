"""Self-speculative decoding, k drafts a round by the point's own readout at one layer: ``drafting`` without a gate.

    draft    (last token, d_1 … d_k), one feed each, to layer e; d_i from the head there
    verify   those k + 1 tokens run on in one chunk, layers e + 1 … ceiling, over their states and K/V after layer e

Symbols: ``exit_layer`` is e. How, and what a record of it shows, is in ``drafting``. Here alone acceptance may be
lossy, by ``gate_bits``.
"""

from __future__ import annotations

from collections.abc import Sequence

from emad_ref.decoding.acceptance import Ended, Options, Speculated, unending
from emad_ref.decoding.drafting import Drafting, drafted, require_deepening
from emad_ref.decoding.pair import Partner, require_prompts
from emad_ref.errors import BadArgument
from emad_ref.protocol import Prompt


def self_speculate(
    model: Partner,
    exit_layer: int,
    prompts: Sequence[Prompt],
    max_new: int,
    *,
    k: int = 4,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
    gate_bits: float | None = None,
    ended: Ended = unending,
) -> Speculated:
    """Emit up to ``max_new`` tokens per prompt; a stop token is emitted and ends its row.

    Options, rows and room are those of ``speculative.speculate``, of which this is the case "itself, shallower".

    Raises:
        Unsupported: a decoder that cannot take a stopped token up again.
        BadArgument: an exit layer outside 1 … ceiling − 1, a point that decides depth by itself, and what ``speculate``
            refuses.
        NotFinite: logits hold NaN or +inf.
    """
    options = Options(max_new, k, stop, temperature, seed, gate_bits, ended)
    require_prompts(prompts)
    _require_drafting(model, exit_layer)
    return drafted(model, Drafting(exit_layer, k, lens=model.point.lens), prompts, options)


def _require_drafting(model: Partner, exit_layer: int) -> None:
    require_deepening(model)
    if model.undecided:
        raise BadArgument(
            "model.point", model.point.name, "a point under which no token leaves by itself", "see drafting_point"
        )
    if not 1 <= exit_layer < model.point.ceiling:
        raise BadArgument(
            "exit_layer",
            exit_layer,
            f"a layer in 1–{model.point.ceiling - 1}",
            "at the ceiling nothing is left to verify",
        )
