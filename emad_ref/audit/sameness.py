"""Two decoders that should emit the same: their token sequences are compared up to ties.

A difference is a tie when the two best logits at that position lie within twice the tolerance, or a signal lies within
it of its threshold at that or an earlier position: both are honest answers to the same question. Ties are counted, and
more than 1 % of tokens tied is a failure (METHODS, "Tolerances").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.audit.finding import Finding, excused
from emad_ref.audit.lens import Lens, consult
from emad_ref.audit.rule import tied, tied_gap
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Floats

CHECK = "same tokens"

Tokens = Sequence[Sequence[int]]


def same_tokens(
    lens: Lens,
    tolerance: float,
    prompts: Sequence[Prompt],
    found: Tokens,
    wanted: Tokens,
    point: OperatingPoint | None = None,
    found_depths: Tokens | None = None,
    wanted_depths: Tokens | None = None,
    *,
    declared: float = 0.0,
    most_ties: float | None = None,
) -> Finding:
    """Whether each row's tokens (and depths) are equal to the end, or to a tie; it names the first that are not.

    ``point`` None means full depth: only logit ties exist. Depths, where given, stand beside the tokens they produced.
    ``declared``: noise that whoever made ``found`` declares; beyond ``tolerance`` it takes its place, and every row may
    then end in a tie: that tokens are the argmax within such noise, ``generation`` shows position by position.
    ``most_ties``: share of tokens that may be ties, in place of the limit that these imply.
    ``n`` of the finding counts the tokens of ``found``; where it passed with ties, ``detail`` says how many.
    """
    limit, tolerance = excused(tolerance, declared)
    limit = limit if most_ties is None else most_ties
    ties, total = 0, sum(map(len, found))
    for row, prompt in enumerate(prompts):
        at = _first_difference(found[row], wanted[row])
        if found_depths is not None and wanted_depths is not None:
            at = min(at, _first_difference(found_depths[row], wanted_depths[row]))
        if at == min(len(found[row]), len(wanted[row])):
            if len(found[row]) != len(wanted[row]):
                complaint = f"row {row}: {len(found[row])} tokens, but {len(wanted[row])} expected"
                return Finding(CHECK, False, complaint, total, ties)
            continue
        depth = None if wanted_depths is None else wanted_depths[row][at]
        if not _tied(lens, tolerance, prompt, wanted[row][:at], point, depth):
            complaint = (
                f"row {row}, new token {at}: {found[row][at]} (depth {_at(found_depths, row, at)}), but expected "
                f"{wanted[row][at]} (depth {_at(wanted_depths, row, at)}), and no tie excuses it"
            )
            return Finding(CHECK, False, complaint, total, ties)
        ties += 1
    if ties > limit * total:
        complaint = f"{ties} ties in {total} tokens: more than {limit:.0%} is no longer noise"
        return Finding(CHECK, False, complaint, total, ties)
    said = f"{ties} of {total} tokens stand after a tie's first difference" if ties else f"all {total} tokens"
    return Finding(CHECK, True, said, total, ties)


def _tied(
    lens: Lens,
    tolerance: float,
    prompt: Prompt,
    emitted: Sequence[int],
    point: OperatingPoint | None,
    depth: int | None,
) -> bool:
    history = np.concatenate([prompt.tokens, np.asarray(emitted, dtype=np.int64)])
    if point is None:
        return _gap(lens(history, len(history) - 1)[-1, (depth or 0) - 1]) < 2 * tolerance
    reference = consult(lens, history, point, len(prompt.tokens) - 1, tolerance)
    gap = _gap(reference.emitted[-1, (depth or point.layers) - 1])
    near = tied(point, reference.signal, reference.rows, tolerance)
    return gap < tied_gap(point, tolerance) or bool(near.any())


def _gap(logits: Floats) -> float:
    """The largest of ``logits`` [V] minus the second largest."""
    best = np.sort(logits)[-2:]
    return float(best[1] - best[0])


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)


def _at(depths: Tokens | None, row: int, at: int) -> int | str:
    return "full" if depths is None else depths[row][at]
