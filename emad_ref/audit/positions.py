"""Every position of the window is written and read as it should be: by single steps, by feeds of any width, in prompts.

K/V live in blocks, pages and buffers of some size, and go wrong where one ends. Which size that is, an audit cannot
know, so it leaves no position out. All at full depth, over one text a row, which the model's own forward has read once:

steps    each row begins somewhere else and is fed token by token up to where the next one began: every position of the
         window is one step's in some row, and is read by the steps after it
widths   the same in feeds of drawn widths, up to the most that the decoder takes
prompts  prompts that end at, and one position beyond, the first and a drawn multiple of every usual size, fed two
         tokens more
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from emad_ref.audit.finding import Finding, Tally
from emad_ref.protocol import Decoder, Prompt, Step
from emad_ref.record import Floats, Ints

CHECK = "positions"
SIZES = (
    16,
    32,
    48,
    64,
    96,
    100,
    128,
    192,
    200,
    256,
    384,
    500,
    512,
)  # of blocks, pages and buffers as engines have them
OVERLAP = 4  # steps that read what the last of a row's own wrote
AFTER = 2  # tokens fed after a prompt that ends at an edge
WIDEST = 64  # tokens of a feed at most

# what of a text to ask: row, first position said, logits [n, V]
Said = tuple[int, int, Floats]


def everywhere(
    decoder: Decoder,
    own: Callable[[Ints], Floats],
    texts: Ints,
    depth: int,
    rng: np.random.Generator,
    tolerance: float,
) -> Finding:
    """Check a decoder at full ``depth`` on ``texts`` int64 [rows, window].

    ``own``: the model's own logits [window, V] after each token of a text. ``tolerance`` in logits, raised to the
    decoder's declared noise.
    """
    tally, rows = Tally(CHECK, needed=1), len(texts)
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    with tally:
        said = [*_stepped(decoder, texts, rng, 1)]
        if decoder.capabilities.max_feed > 1:
            said += _stepped(decoder, texts, rng, min(decoder.capabilities.max_feed, WIDEST))
        for lengths in _in_batches(ends(texts.shape[1] - AFTER, rng), rows):
            said += _read(decoder, texts, lengths)
        for row, text in enumerate(texts):
            right = own(text)
            for _, first, logits in (each for each in said if each[0] == row):
                _judge(tally, row, first, logits, right, depth, tolerance)
    return tally.finding()


def ends(room: int, rng: np.random.Generator) -> list[int]:
    """Lengths of prompts up to ``room``: at, and one beyond, the first and a drawn multiple of every size."""
    edges = {size * int(times) for size in SIZES if size <= room for times in (1, rng.integers(1, room // size + 1))}
    return sorted({n for edge in edges for n in (edge, edge + 1) if n <= room}) or [room]


def _stepped(decoder: Decoder, texts: Ints, rng: np.random.Generator, widest: int) -> Iterator[Said]:
    """Rows that begin evenly spread over the window, in drawn order, fed to beyond where the next one began."""
    rows, window = texts.shape
    stride = -(-(window - 1) // rows)
    starts = rng.permutation([min(1 + stride * row, window - 1) for row in range(rows)])
    session, step = decoder.start([Prompt(text[:start]) for text, start in zip(texts, starts, strict=True)])
    yield from _of(step, range(rows), starts - 1)
    alive, held, left = list(range(rows)), starts.copy(), min(stride + OVERLAP, window - 1)
    while left and alive:
        ended = [index for index, row in enumerate(alive) if held[row] >= window]
        if ended:  # the row at the end of the window has no more to read
            alive = [row for row in alive if held[row] < window]
            if not alive:
                break
            session.drop(np.array(ended))
        room = min(left, window - int(held[alive].max()))
        n = int(min(room, np.exp(rng.uniform(0, np.log(widest + 1))) if widest > 1 else 1))
        step = session.feed(np.stack([texts[row, held[row] : held[row] + n] for row in alive]))
        yield from _of(step, alive, held[alive])
        held[alive] += n
        left -= n
    session.close()


def _read(decoder: Decoder, texts: Ints, lengths: Sequence[int]) -> Iterator[Said]:
    session, step = decoder.start([Prompt(text[:n]) for text, n in zip(texts, lengths, strict=False)])
    held = np.array(lengths)
    yield from _of(step, range(len(lengths)), held - 1)
    for _ in range(AFTER):
        yield from _of(session.feed(np.stack([[texts[row, n]] for row, n in enumerate(held)])), range(len(held)), held)
        held += 1
    session.close()


def _in_batches(lengths: Sequence[int], rows: int) -> Iterator[Sequence[int]]:
    """``rows`` of them at once, those of about one length together: padding costs as much as text."""
    return (lengths[first : first + rows] for first in range(0, len(lengths), rows))


def _of(step: Step, rows: Sequence[int], first: Ints) -> Iterator[Said]:
    for index, row in enumerate(rows):
        yield int(row), int(first[index]), np.array(step.logits[index], dtype=np.float32)


def _judge(tally: Tally, row: int, first: int, logits: Floats, right: Floats, depth: int, tolerance: float) -> None:
    wanted = right[first : first + len(logits)]
    tally.require(
        logits.shape == wanted.shape,
        f"row {row}, position {first}: logits of shape {logits.shape}, but {wanted.shape} were asked for",
    )
    off = np.abs(logits - wanted).max(axis=-1)
    at = int(np.argmax(~(off <= tolerance)))
    tally.require(
        bool((off <= tolerance).all()),
        f"row {row}, position {first + at}, depth {depth}: logits off by {off[at]:.2g}, more than {tolerance:g}",
    )
    tally.n += len(logits)
    tally.discriminating += len(logits)
