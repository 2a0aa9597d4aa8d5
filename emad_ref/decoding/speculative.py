"""Speculative decoding: one model drafts k tokens, the other verifies them in one chunk (rule: ``acceptance``).

    draft    d_1 … d_k, one feed each                          the draft's session
    verify   one feed of (last token, d_1 … d_k)               the verifier's session
    accept, emit; take back in both sessions what does not stand

What is promised, and by whom. The output is the verifier's at its operating point. With EMAD in the verifier that is
the EMAD model's output, tokens and depths, not the full model's: a rolled-back token gives its depth back too. EMAD in
the draft changes the speed only. A chunk's logits differ from a single step's by rounding, so at a tie of the two
largest logits either may win.

An adaptive verifier decides depth token by token, so its chunk is as many forwards, unless its schedule lets depths be
read off one (``chunk``). Partners are the caller's choice: this module knows no model, no layer and no clock. A draft
that is the same model at a shallower point runs the layers below its exit twice; ``selfdraft`` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from emad_ref.decoding.acceptance import (
    Continuation,
    Ended,
    Options,
    Speculated,
    speculated,
    speculating,
    standing,
    unending,
)
from emad_ref.decoding.pair import Log, Partner, Seat, by_model, require_one_vocabulary, require_prompts
from emad_ref.protocol import Prompt
from emad_ref.record import CATCH_UP, DECODE, DRAFT, PROMPT, VERIFY

DRAFTER, VERIFIER = 0, 1


def speculate(
    draft: Partner,
    verifier: Partner,
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
    """Emit up to ``max_new`` tokens per prompt; a stop token is emitted and ends its row, and so does what
    ``ended`` says is over, of all the row has emitted.

    In the record model 0 is the draft, 1 the verifier, which emits the first token: it has just read the prompt. Rows
    share feeds and advance unevenly; a row's tokens do not depend on its neighbours. A row that needs fewer drafts than
    its neighbours is fed as many, the surplus rolled back: beside others a row needs up to k positions more than
    prompt + max_new.

    Raises:
        BadArgument: no prompt, max_new or k < 1, a temperature or gate below 0, vocabularies of different sizes, and
            what the decoders refuse.
        NotFinite: logits hold NaN or +inf.
    """
    options = Options(max_new, k, stop, temperature, seed, gate_bits, ended)
    require_prompts(prompts)
    log, numbers = Log(), range(len(prompts))
    with (
        closing(Seat(verifier, VERIFIER, log, numbers, prompts, PROMPT, DECODE)) as large,
        closing(Seat(draft, DRAFTER, log, numbers, prompts, PROMPT, DRAFT)) as small,
    ):
        require_one_vocabulary(small.logits, large.logits)
        rows = speculating(prompts, large.logits, options, (small, large), lambda alive: _round(alive, small, large))
        work, opening = by_model(small.work, large.work), by_model(small.opening_work, large.opening_work)
    return speculated(rows, log, work, opening)


def _round(rows: Sequence[Continuation], small: Seat, large: Seat) -> None:
    """Draft, verify, take back: afterwards the verifier holds all tokens of each row but the last."""
    width = max(row.width for row in rows)
    if width > 0:
        _propose(rows, small, width)
    chunk = np.array([row.padded(width) for row in rows], dtype=np.int64)
    for row, logits in zip(rows, large.feed(chunk, [VERIFY] * (width + 1)), strict=True):
        row.verify(logits)
    kept = standing(rows)
    large.keep(kept)
    small.rollback(np.minimum(small.length, kept))


def _propose(rows: Sequence[Continuation], small: Seat, width: int) -> None:
    """Let the draft read what it has not seen, then propose up to ``width`` tokens per row.

    Where all drafts of a row were accepted, it has not seen the last of them. A feed takes as many tokens of every
    row, so rows beside it take a token back and read it again.
    """
    lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    unseen = int((lengths - small.length).max())
    small.keep(lengths - unseen)
    tokens, phases = [row.tokens[-unseen:] for row in rows], [CATCH_UP] * (unseen - 1) + [DRAFT]
    for at in range(width):
        logits = small.feed(np.array(tokens, dtype=np.int64), phases, last=1)[:, -1]
        for row, z in zip(rows, logits, strict=True):
            if at < row.width:
                row.propose(z)
        tokens, phases = [[row.padded(at + 1)[-1]] for row in rows], [DRAFT]
