"""Check log-probabilities that a decoder reports, in log-softmax space, against the model's own.

An engine reports the k likeliest tokens at each new position, and perhaps every prompt token's own log-probability. An
error ε of logits moves a log-probability by at most 2ε: its own error, and the normaliser's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.special import log_softmax

from emad_ref.protocol import Decoder, Prompt, TokenLogProbs
from emad_ref.record import Floats, Ints
from pytest_emad.audit.finding import AuditRefutedError, Finding, prefix_raised_complaints
from pytest_emad.audit.likely_cause import likely_precision
from pytest_emad.audit.tolerances import find_first_excess, max_log_prob_error
from pytest_emad.audit.trajectory import DecoderUnderTest, Judge


def generate_greedy_log_probs(
    decoder: Decoder, prompts: Sequence[Prompt], max_new: int, top: int
) -> Sequence[TokenLogProbs]:
    """Log-probabilities from ``decoder.log_probs``, else from the decoder's sessions. Raises Unsupported."""
    ask = getattr(decoder, "log_probs", None)
    return greedy_session_log_probs(decoder, prompts, max_new, top) if ask is None else ask(prompts, max_new, top)


def greedy_session_log_probs(
    decoder: Decoder, prompts: Sequence[Prompt], max_new: int, top: int
) -> list[TokenLogProbs]:
    """Log-probabilities of a greedy continuation in one session over ``prompts``."""
    session, step = decoder.start(prompts)
    columns = []
    try:
        while True:
            logits = np.asarray(step.logits[:, -1], dtype=np.float64)
            columns.append(logits)
            if len(columns) == max_new:
                break
            step = session.feed(logits.argmax(axis=-1)[:, None])
    finally:
        session.close()
    return [TokenLogProbs.of_logits(row.argmax(axis=-1), row, top) for row in np.stack(columns, axis=1)]


def session_prompt_log_probs(decoder: Decoder, prompt: Prompt) -> Floats:
    """float64 [n − 1] log-probability of each token of ``prompt`` after its first, nats, from a session of its own."""
    if len(prompt.tokens) == 1:
        return np.zeros(0)
    session, step = decoder.start([replace(prompt, tokens=prompt.tokens[:1])])
    try:
        fed = session.feed(prompt.tokens[None, 1:])
    finally:
        session.close()
    return own_log_probs(np.concatenate([step.logits[0], fed.logits[0, :-1]]), prompt.tokens[1:])


def own_log_probs(logits: Floats, tokens: Ints) -> Floats:
    """float64 [m] log-probability, nats, of ``tokens`` [m] under ``logits`` [m, V]."""
    own: Floats = log_softmax(np.asarray(logits, dtype=np.float64), axis=-1)[np.arange(len(tokens)), tokens]
    return own


def check_log_probs(under_test: DecoderUnderTest, prompts: Sequence[Prompt], max_new: int, top: int) -> Finding:
    """Check ``max_new`` greedy tokens of each prompt: the ``top`` likeliest ids, and their log-probabilities.

    The check includes prompt tokens if the decoder reports them. Discriminating positions are those with a larger gap
    between the likeliest and least likely reported token than the allowed difference: they reveal other ids or another
    history.
    """
    judge = Judge.for_check("log-probabilities", under_test)
    tally, allowed = judge.tally, max_log_prob_error(None, judge.tolerance)
    with tally:
        rows = generate_greedy_log_probs(under_test.decoder, prompts, max_new, top)
        tally.require(len(rows) == len(prompts), f"{len(rows)} rows for {len(prompts)} prompts")
        divergence, agreeing = [], 0
        for row, (prompt, shown) in enumerate(zip(prompts, rows, strict=True)):
            history = np.concatenate([prompt.tokens, shown.tokens[:-1]]).astype(np.int64)
            expected = log_softmax(under_test.lens(history).last_layer, axis=-1)
            new = expected[len(prompt.tokens) - 1 :]
            with prefix_raised_complaints(f"row {row}: "):
                require_greedy_log_probs(shown, max_new, top, allowed)
            known = np.take_along_axis(new, shown.ids, axis=-1)
            started = len(prompt.tokens) - 1
            _require_close(judge, f"row {row}, new token", shown.log_probs, known, history, started)
            kth = -np.partition(-new, top - 1, axis=-1)[:, top - 1]
            missing = np.flatnonzero(known.min(axis=-1) < kth - 2 * allowed)
            tally.require(
                not len(missing), f"row {row}, new token {missing[:1]}: not the {top} likeliest ids by the model"
            )
            own = new[np.arange(max_new), shown.tokens]
            behind = new.max(axis=-1) - own
            at = int(np.argmax(behind))
            tally.require(
                bool(behind[at] <= allowed),
                f"row {row}, new token {at}: {shown.tokens[at]} lies {behind[at]:.2g} nats behind the likeliest",
            )
            if shown.prompt is not None and len(prompt.tokens) > 1:
                told = expected[np.arange(len(prompt.tokens) - 1), prompt.tokens[1:]]
                tally.require(
                    shown.prompt.shape == told.shape,
                    f"row {row}: {shown.prompt.shape} log-probabilities of a prompt of {len(prompt.tokens)} tokens",
                )
                _require_close(judge, f"row {row}, prompt token", shown.prompt[:, None], told[:, None], history)
                tally.live["prompt_log_probs"] += len(told)
            tally.live["log_probs"] += shown.log_probs.size
            tally.discriminating += int((known.max(axis=-1) - known.min(axis=-1) > allowed).sum())
            divergence.append(truncated_divergence(known, shown.log_probs))
            agreeing += int((shown.ids[:, 0] == new.argmax(axis=-1)).sum())
        every = np.concatenate(divergence)
        tally.notes.append(f"KL {every.mean():.1e} nats, {every.max():.1e} at most; top-1 {agreeing} of {len(every)}")
        tally.count_new_tokens(shown.tokens for shown in rows)
    return tally.to_finding()


def truncated_divergence(expected: Floats, reported: Floats) -> Floats:
    """[m] KL in nats of ``expected`` from ``reported`` [m, k] log-probabilities, all other tokens as one.

    Merging tokens lowers KL, so this is a lower bound of the divergence of the whole distributions.
    """
    p, q = np.exp(expected), np.exp(reported)
    rest_p, rest_q = np.clip(1 - p.sum(axis=-1), 1e-12, None), np.clip(1 - q.sum(axis=-1), 1e-12, None)
    total: Floats = (p * (expected - reported)).sum(axis=-1) + rest_p * np.log(rest_p / rest_q)
    return total


def require_greedy_log_probs(shown: TokenLogProbs, max_new: int, top: int, allowed: float) -> None:
    """Raise AuditRefutedError unless ``shown`` is ``max_new`` greedy tokens among ``top`` different ids each.

    A greedy token is at most ``allowed`` nats behind the likeliest one that the decoder itself reports.
    """
    shapes = shown.tokens.shape, shown.ids.shape, shown.log_probs.shape
    wanted = (max_new,), (max_new, top), (max_new, top)
    if shapes != wanted:
        raise AuditRefutedError(f"arrays of shapes {shapes}, but {wanted} were asked for")
    if (np.diff(np.sort(shown.ids, axis=-1), axis=-1) == 0).any():
        raise AuditRefutedError(f"one id stands twice among the {top} likeliest")
    places = shown.ids == shown.tokens[:, None]
    if not places.any(axis=-1).all():
        raise AuditRefutedError(f"an emitted token is not among the {top} likeliest")
    behind = shown.log_probs.max(axis=-1) - shown.log_probs[places]
    if (behind > allowed).any():
        at = int(behind.argmax())
        far = f"{shown.tokens[at]} lies {behind[at]:.2g} nats behind the likeliest that is reported"
        raise AuditRefutedError(f"new token {at}: {far}")


def _require_close(judge: Judge, where: str, shown: Floats, expected: Floats, tokens: Ints, first: int = 0) -> None:
    """Compare ``shown`` [m, k] after the positions ``first`` … of ``tokens``, with errors of logit and normaliser."""
    assert judge.lens is not None, "only replay is judged without a lens"
    off = np.abs(shown - expected).max(axis=-1)
    excess = find_first_excess(judge.lens, tokens, first, off / 2, [judge.point.layers], judge.tolerance)
    if excess is not None:
        at, allowed = excess
        cause = likely_precision(float(off[at]), judge.lens(tokens).last_layer[first + at])
        complaint = f"{where} {at}: a log-probability is off by {off[at]:.2g} nats, more than {2 * allowed:g}"
        raise AuditRefutedError(complaint, likely_cause=cause)
    judge.tally.n += shown.size
