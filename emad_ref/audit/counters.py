"""The same tokens cost the same at every point where they run the same layers; unrequested work costs nothing.

Layer 1 runs for every token, whatever the rule says. So one row over given tokens, or of as many generated ones, must
count the same tokens there at full depth and at a point that exits, and as many keys: a higher count at full depth
would claim savings that were never spent. The prompt may run in one forward at full depth, and all but its last
position at a point: keys may differ by what two more rows of the prompt's attention take.
"""

from __future__ import annotations

import numpy as np

from emad_ref.audit.finding import Finding, Tally
from emad_ref.audit.ledger import constant_keys, most_keys
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints, Work

CHECK = "counters"
FULL, EXITING = "at full depth", "at a point with exits"


def counters(full: Decoder, exiting: Decoder, prompt: Prompt, continuation: Ints, new: int, source: int) -> Finding:
    """Compare what both count of ``prompt`` followed by ``continuation`` int64 [n], and of ``new`` tokens generated.

    ``source``: tokens that an encoder-decoder reads beside the prompt; 0: the model has no encoder.
    """
    tally = Tally(CHECK, needed=1)
    if not (full.capabilities.counted and exiting.capabilities.counted):
        return Finding(CHECK, True, "nothing to check: the decoder does not count its work", 0, 0)
    with tally:
        fed = {name: _fed(each, prompt, continuation) for name, each in ((FULL, full), (EXITING, exiting))}
        made = {name: _generated(each, prompt, new) for name, each in ((FULL, full), (EXITING, exiting))}
        ways = (f"fed {len(continuation)}", fed, len(continuation) + 1), (f"generated {new}", made, new)
        for how, works, steps in ways:
            for name, work in works.items():
                _judge_source(tally, f"{how} tokens {name}", work, source)
            one, other = works[FULL], works[EXITING]
            tally.require(
                one.tokens[0] == other.tokens[0],
                f"{how} tokens: layer 1 ran for {one.tokens[0]} tokens {FULL}, but for {other.tokens[0]} {EXITING}",
            )
            length = len(prompt.tokens) + steps
            prompts = {0, len(prompt.tokens), len(prompt.tokens) - 1}
            keys = max({most_keys(length)} | constant_keys(one, prompts) & constant_keys(other, prompts))
            apart, slack = abs(int(one.context[0] - other.context[0])), 2 * keys
            tally.require(
                apart <= slack,
                f"{how} tokens: layer 1 counts {one.context[0]} keys {FULL}, but {other.context[0]} {EXITING}",
            )
            tally.n += 2 * length
            tally.discriminating += int(one.context[0] > 2 * slack)
    return tally.finding()


def _fed(decoder: Decoder, prompt: Prompt, continuation: Ints) -> Work:
    session, _ = decoder.start([prompt])
    for token in continuation:
        session.feed(np.array([[token]]))
    work = session.work
    session.close()
    assert work is not None, "only of decoders that count"
    return work


def _generated(decoder: Decoder, prompt: Prompt, new: int) -> Work:
    work = decoder.generate([prompt], new, frozenset()).work
    assert work is not None, "only of decoders that count"
    return work[0]


def _judge_source(tally: Tally, what: str, work: Work, source: int) -> None:
    """Encoder and cross-attention: nothing without a source; with one, each of its states written once a layer."""
    ran = work.tokens > 0
    for name, counted, least, most in (
        ("encoder_tokens", work.encoder_tokens, source, source),
        ("encoder_context", work.encoder_context, source**2, source**2),
        ("cross_fills", work.cross_fills, source * ran, source * np.ones_like(ran)),
        ("cross_context", work.cross_context, work.tokens * source, work.tokens * source),
    ):
        holds = bool(np.all((counted >= least) & (counted <= most)))
        told, expected = np.asarray(counted).tolist(), np.asarray(most).tolist()
        tally.require(holds, f"{what}: work.{name} counts {told}, but a source of {source} tokens implies {expected}")
