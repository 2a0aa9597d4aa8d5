"""Counters of drafts in the Prometheus text of ``/metrics``.

vLLM and llama.cpp export, under their own prefix, for each engine of the server:

    spec_decode_num_drafts_total                                verifications
    spec_decode_num_accepted_tokens_per_pos_total{position="k"}   those that accepted drafted token k
    spec_decode_num_accepted_tokens_total                       accepted tokens

A llama.cpp that counts accepted tokens and no verifications also exports ``tokens_predicted_total``. Each verification
emits one token besides those that it accepts, so there are new − accepted of them, and the acceptance length is
new / (new − accepted). Rounds without drafts count as verifications there.
"""

from __future__ import annotations

import math
import re

import numpy as np

from emad_ref.protocol import DraftCounts, Unsupported

SAMPLE = re.compile(
    r"^(?:vllm|llamacpp):(?P<name>spec_decode_num_\w+?|tokens_predicted)(?:_total)?(?:\{(?P<labels>[^}]*)\})? "
    r"(?P<value>\S+)(?: -?\d+)?$",
    re.MULTILINE,
)
POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
DRAFTS, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_accepted_tokens"
BY_POSITION, NEW = f"{ACCEPTED}_per_pos", "tokens_predicted"


class BadCounter(ValueError):
    """Raised for a counter that is no whole number ≥ 0."""


def parse_draft_counts(metrics: str) -> DraftCounts:
    """The counters of ``metrics``, summed over the engines of the server.

    Raises:
        Unsupported: the server counts neither verifications, nor accepted and new tokens.
        BadCounter: a value that no counter has.
    """
    totals, positions = dict[str, int](), dict[int, int]()
    for sample in SAMPLE.finditer(metrics):
        name, value = sample["name"], _count(sample["name"], sample["value"])
        place = POSITION.search(sample["labels"] or "")
        if name == BY_POSITION and place:
            positions[int(place[1])] = positions.get(int(place[1]), 0) + value
        else:
            totals[name] = totals.get(name, 0) + value
    if DRAFTS in totals:
        by_position = bool(positions) or not totals.get(ACCEPTED, 0)
        accepted = [positions.get(at, 0) for at in range(1 + max(positions, default=-1))]
        counts = accepted if by_position else [totals[ACCEPTED]]
        return DraftCounts(totals[DRAFTS], np.array(counts, dtype=np.int64), by_position)
    if {ACCEPTED, NEW} <= totals.keys():
        rounds = totals[NEW] - totals[ACCEPTED]
        if rounds < 0:
            raise BadCounter(f"{ACCEPTED} is {totals[ACCEPTED]}, more than {NEW}, {totals[NEW]}")
        return DraftCounts(rounds, np.array([totals[ACCEPTED]], dtype=np.int64), by_position=False)
    raise Unsupported(
        f"the server counts no drafts: /metrics has no {DRAFTS} (vLLM; llama.cpp with --metrics), and not both "
        f"{ACCEPTED} and {NEW}"
    )


def _count(name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise BadCounter(f"{name} of /metrics is {text!r:.40}, but expected a whole number ≥ 0")
    return int(value)
