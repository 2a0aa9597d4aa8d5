"""Executed work is witnessed: what was seen to run is held against what the decoder's record says it ran.

``seen`` counts the rows that met each matrix of each block, and the head, during one ``generate``
(``models.executed``). Of a layer ℓ that the record says ran for tokens[ℓ] and only stored K and V for fills[ℓ]:

refuted    a matrix met more rows than tokens[ℓ] + fills[ℓ], or each of them more than tokens[ℓ]: blocks ran unsaid, as
           where all layers run at every step and a router chooses among them afterwards
refuted    the head met more than two rows for each readout, besides the prompt's: readouts ran unsaid. Two, for one
           that decides may be made anew to be shown; the prompt, whose logits a plain forward gives unasked
witnessed  the busiest matrix of every layer met tokens[ℓ] + fills[ℓ] rows, in every request
neither    less was seen: the rest ran where nobody looked (kernels of its own, another process)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emad_ref.audit.finding import Finding, Tally
from emad_ref.protocol import Prompt
from emad_ref.record import HEAD, READOUTS, Work

CHECK = "witness"
ROUNDING = 0.01  # rows; shares of sliced matrices are no exact binary fractions
FULL = READOUTS.index("full")

Rows = Mapping[tuple[int, str], float]  # (layer, matrix) → rows that met it


@dataclass(frozen=True, eq=False)
class Seen:
    """One ``generate`` of ``prompts``: the ``rows`` that were seen, and the ``work`` that its record says."""

    prompts: Sequence[Prompt]
    rows: Rows
    work: Work


def witness(requests: Sequence[Seen]) -> Finding:
    """Whether what was seen of ``requests`` is what they say of themselves; None where too little was seen."""
    tally, unseen = Tally(CHECK, needed=0), []
    with tally:
        for number, request in enumerate(requests):
            who = f"request {number}"
            _judge_head(tally, who, request)
            for layer in range(1, request.work.layers + 1):
                said, most = _judge_layer(tally, who, request, layer)
                tally.n += said
                if most < said - ROUNDING:
                    unseen.append(f"{who}: of {said} runs of layer {layer}, {most:g} were seen")
    if tally.complaint is not None:
        return Finding(CHECK, False, tally.complaint, tally.n, 0)
    if unseen:
        return Finding(CHECK, None, f"it runs where nobody looks ({unseen[0]})", tally.n, 0)
    return Finding(CHECK, True, f"{tally.n} runs of blocks seen, as many as were counted", tally.n, 0)


def _judge_layer(tally: Tally, who: str, request: Seen, layer: int) -> tuple[int, float]:
    """(runs and fills that the record says, rows through the busiest matrix)."""
    rows = {matrix: met for (where, matrix), met in request.rows.items() if where == layer}
    ran, filled = int(request.work.tokens[layer - 1]), int(request.work.fills[:, layer - 1].sum())
    busiest = max(rows, key=lambda matrix: rows[matrix])
    stored = f" and {filled} fills" if filled else ""
    for met, most, where in (
        (rows[busiest], ran + filled, f"through {busiest}"),
        (min(rows.values()), ran, "through every matrix"),
    ):
        complaint = f"{who}: layer {layer} ran for {met:g} tokens ({where}), but its record counts {ran}{stored}"
        tally.require(met <= most + ROUNDING, complaint)
    return ran + filled, rows[busiest]


def _judge_head(tally: Tally, who: str, request: Seen) -> None:
    read = int(request.work.readout_rows[FULL].sum())
    prompt = sum(len(prompt.tokens) for prompt in request.prompts)
    met = max(rows for (layer, _), rows in request.rows.items() if layer == HEAD)
    tally.require(
        met <= 2 * read + prompt + ROUNDING,
        f"{who}: the head ran for {met:g} rows, but its record counts {read} readouts (of {prompt} prompt tokens "
        "besides, at most)",
    )
