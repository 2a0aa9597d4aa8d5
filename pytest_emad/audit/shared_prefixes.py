"""Check prompts that share a beginning, which a prefix cache may confuse.

Each check compares every row of every answer with the lens, as ``audit.requests`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints, Record
from pytest_emad.audit.finding import MIN_DISCRIMINATING, Finding
from pytest_emad.audit.requests import answer_request, require_answers_match_lens
from pytest_emad.audit.trajectory import CheckedSession, DecoderUnderTest, Judge, Trajectory

FED_TOKENS = 3  # tokens that a session is fed after a prompt, besides the requests of ``generate``
MIN_PROMPT = 8  # tokens of a prompt that the others vary
VARIATIONS = 23  # most variations of it, itself included
ASKED_AGAIN = 6  # variations between two requests for the text itself, which keep it in a cache
REPLACED = 4  # variations that replace the last token of a prefix cache's block, which its key may omit
INSIDE = (3, 7, 10, 13)  # tokens back from that one to others replaced: at even and odd places
LOW_BITS = 8  # least number of bits that agree in two ids: a key may hold a byte of each
NESTED = 16  # beginnings of one text in a request


def check_shared_prefixes(
    under_test: DecoderUnderTest,
    text: Ints,
    others: Ints,
    max_new: int,
    rng: np.random.Generator,
    *,
    sessions: bool = True,
    needed: int = MIN_DISCRIMINATING,
    variations: int = VARIATIONS,
    halves: bool = False,
) -> Finding:
    """Check prompts that vary ``text`` int64 [n], n ≥ 8, by tokens of ``others`` int64 [n].

    The prompts are the first ``variations`` of ``prompt_variations``, or those of ``swapped_half_variations``
    (``halves``). Each is requested alone, in random order, soon after a token of ``text``, from one array that is
    overwritten between requests. Then all are requested together, then by simultaneous sessions, unless ``sessions`` is
    False. Discriminating are variations with other signals or tokens than ``text``: for the rest a cached answer for
    ``text`` is right.

    Raises:
        BadArgument: too few tokens to vary.
    """
    decoder = under_test.decoder
    if min(len(text), len(others)) < MIN_PROMPT:
        raise BadArgument("text", (len(text), len(others)), f"at least {MIN_PROMPT} tokens of each")
    judge = Judge.for_check("prefixes", under_test, needed, judges_work=True)
    varied = swapped_half_variations(text, others) if halves else prompt_variations(text, others)[:variations]
    with judge.tally:
        answers, buffers = [], {len(each): np.empty(len(each), dtype=np.int64) for each in varied}
        order = [(index, max_new) for index in rng.permutation(len(varied)).tolist()]
        for at in reversed(range(0, len(order), ASKED_AGAIN)):
            order.insert(at, (0, 1))
        for index, new in order:
            tokens = varied[index]
            buffers[len(tokens)][:] = tokens
            answer = answer_request(decoder, [Prompt(buffers[len(tokens)])], new)
            answers.append(replace(answer, prompts=[Prompt(tokens)]))
        prompts = [Prompt(tokens) for tokens in varied]
        answers.append(answer_request(decoder, prompts, max_new))
        emitted = answers[-1].record.emitted
        session_rows = _in_open_sessions(judge, decoder, prompts, emitted) if sessions else []
        require_answers_match_lens(judge, answers, session_rows)
        judge.tally.discriminating += _count_distinct_rows(answers[-1].record, judge.tolerance)
    return judge.tally.to_finding()


def prompt_variations(text: Ints, others: Ints) -> list[Ints]:
    """Variations of ``text``: itself twice, ``others``, and edited copies.

    Edits replace the last, a middle or the first token. They exchange two distant tokens, or all adjacent ones in
    pairs, which have the same sum as a hash. They replace the last token of a block of 2ⁿ right before the end, or one
    inside the block (also by an id that agrees in its low bits). They shorten and continue the text. Two are shorter
    and longer than the text and diverge in its middle, which reveals prefixes cached only by their beginning. Two hold
    runs of one token, a third of the text and all of it, which reveals decoders that merge repeats.
    """
    n, middle = len(text), len(text) // 2
    varied = [text.copy(), text.copy(), others[:n].copy()]

    def replaced(length: int, at: int, token: int) -> Ints:
        changed = text[:length].copy()
        changed[at] = token
        return changed

    for at in (n - 1, middle, 0):
        varied.append(replaced(n, at, next((token for token in others if token != text[at]), text[at])))
    later = next((at for at in range(n - 2, 0, -1) if text[at] != text[1]), 1)
    pairs = np.arange(2, n - 2, 2)  # from even places, so that the tokens of a pair are in one block of any even size
    for one, other in ((np.array([1]), np.array([later])), (pairs, pairs + 1)):
        exchanged = text.copy()
        exchanged[one], exchanged[other] = text[other], text[one]
        varied.append(exchanged)
    block = 1 << (n - 1).bit_length() - 1  # below n; its last token is also that of all smaller blocks
    different = [token for token in dict.fromkeys(others.tolist()) if token != text[block - 1]]
    varied += [replaced(block + 1, block - 1, token) for token in different[:REPLACED]]
    for back in INSIDE:
        at = (block - 1 - back) % block
        token = next((token for token in others[back % n :] if token != text[at]), None)
        if token is not None:  # else the variation would be the same text
            varied.append(replaced(block + 1, at, token))
    if (alike := _same_low_bits(text[:block], np.concatenate([text, others]))) is not None:
        varied.append(replaced(block + 1, *alike))
    run = text.copy()
    run[n // 3 : 2 * n // 3] = text[n // 3]
    varied += [run, np.full(n, text[n // 3])]
    parted = np.concatenate([varied[4][: middle + 1], others[middle + 1 : n]])
    longer = [np.concatenate([each, others[:middle]]) for each in (text, parted)]
    return [*varied, text[:middle].copy(), parted[: n - 1].copy(), *longer]


def swapped_half_variations(text: Ints, others: Ints) -> list[Ints]:
    """``text``, ``others``, both with their beginnings exchanged, and each of these shortened by an eighth.

    The beginning ends at a block boundary of any usual prefix cache, half-way or before. Different blocks follow equal
    ones, and equal blocks follow different ones, which reveals blocks that are cached without their prefix.
    """
    n = len(text)
    at = 1 << (n // 2).bit_length() - 1
    varied = [text, others[:n], *(np.concatenate([a[:at], b[at:n]]) for a, b in ((text, others), (others, text)))]
    return [*varied, *(each[: n - n // 8] for each in varied)]


def check_nested_prompts(under_test: DecoderUnderTest, text: Ints, max_new: int, rng: np.random.Generator) -> Finding:
    """Check a request of ``NESTED`` beginnings of one text, of many lengths, for one new token, then for ``max_new``.

    A prefix cache may share blocks that another row of the same request has not filled yet. It does so only while they
    are new, and may recover with the next token. So no earlier prompt may begin as ``text`` int64 [n], whose beginnings
    are first asked for one token. Discriminating are beginnings with another next token than the next longer one.
    """
    judge = Judge.for_check("nested prompts", under_test, judges_work=True)
    with judge.tally:
        inner = rng.choice(np.arange(1, len(text)), min(NESTED, len(text)) - 1, replace=False)
        order = rng.permutation(np.append(inner, len(text)))
        prompts = [Prompt(text[:length]) for length in order.tolist()]
        answers = [answer_request(under_test.decoder, prompts, new) for new in (1, max_new)]
        first = {
            len(prompt.tokens): int(row[0]) for prompt, row in zip(prompts, answers[-1].record.emitted, strict=True)
        }
        judge.tally.discriminating += sum(first[one] != first[other] for one, other in pairwise(sorted(first)))
        require_answers_match_lens(judge, answers)
    return judge.tally.to_finding()


def _same_low_bits(text: Ints, tokens: Ints) -> tuple[int, int] | None:
    """A place of ``text`` and another id of ``tokens`` with the most equal low bits; None if fewer than eight."""
    differing = text[:, None] ^ tokens[None, :]
    lowest = differing & -differing  # the lowest bit in which two ids differ; 0 for equal ids
    at, which = np.unravel_index(np.argmax(lowest), lowest.shape)
    return (int(at), int(tokens[which])) if lowest[at, which] >= 1 << LOW_BITS else None


def _in_open_sessions(
    judge: Judge, decoder: Decoder, prompts: Sequence[Prompt], emitted: Sequence[Ints]
) -> list[Trajectory]:
    """A session for each prompt, all open at once and closed in opening order, fed the tokens of ``generate``."""
    transcripts = [
        CheckedSession(judge, decoder, [prompt], [f"session {index}"]) for index, prompt in enumerate(prompts)
    ]
    try:
        for transcript, tokens in zip(transcripts, emitted, strict=True):
            for token in tokens[: min(FED_TOKENS, len(tokens) - 1)]:
                transcript.feed(np.array([[token]]))
        return [trajectory for transcript in transcripts for trajectory in transcript.build_trajectories()]
    finally:
        for transcript in transcripts:
            transcript.session.close()


def _count_distinct_rows(record: Record, tolerance: float) -> int:
    """Rows after the first whose signals, depths or tokens differ from those of the first, all rows of one length."""
    decided = np.stack(
        [record.tokens.kept_row_indices(row)[-len(tokens) :] for row, tokens in enumerate(record.emitted)]
    )
    signal, depth, tokens = record.signal[decided], record.tokens.depth[decided], np.stack(record.emitted)
    off = (np.abs(signal - signal[0]) > tolerance) | (np.isnan(signal) != np.isnan(signal[0]))
    return int((off.any(axis=(1, 2)) | ((depth != depth[0]) | (tokens != tokens[0])).any(axis=1)).sum())
