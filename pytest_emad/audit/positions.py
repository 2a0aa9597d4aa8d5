"""Check that every position of the window is written and read correctly, and draw prompt lengths that reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.protocol import Decoder, Prompt, Step
from emad_ref.record import Floats, Ints
from pytest_emad.audit.finding import Finding, Tally
from pytest_emad.audit.tolerances import find_first_excess
from pytest_emad.audit.trajectory import DecoderUnderTest

MAX_SHORT_LENGTH = 40  # tokens per row of a cheap audit of many rows
EDGE_MARGIN = 4  # positions at most before the end of a buffer of 2ⁿ
WINDOW_END = 8  # positions from the end of the window that still count as its end


def draw_short_lengths(rng: np.random.Generator, rows: int, longest: int = MAX_SHORT_LENGTH) -> list[int]:
    """``rows`` lengths from 1 to ``longest``, evenly on a logarithmic scale; one of several rows has a single token."""
    lengths = np.exp(rng.uniform(0, np.log(longest + 1), rows)).astype(int).tolist()
    if rows > 1:
        lengths[int(rng.integers(rows))] = 1
    return [min(max(1, int(n)), longest) for n in lengths]


def draw_long_lengths(rng: np.random.Generator, room: int) -> list[int]:
    """Three lengths in drawn order: up to a quarter, up to three quarters, and the last positions of ``room``.

    ``room``: positions left for prompts. With a window of 512 the lengths are below 128, above it, and near the end.

    Raises:
        BadArgument: a room too small to tell near from far.
    """
    _require_near_and_far(room)
    quarter = room // 4
    lengths = [rng.integers(quarter // 2, quarter) + 1, rng.integers(quarter, 3 * quarter) + 1]
    lengths.append(rng.integers(max(3 * quarter, room - WINDOW_END), room) + 1)
    return [int(n) for n in rng.permutation(lengths)]


def draw_buffer_edge_lengths(rng: np.random.Generator, room: int) -> list[int]:
    """Draw lengths one to ``EDGE_MARGIN`` positions below 64, 128 and 256, where buffers grow, within ``room``.

    Raises:
        BadArgument: as ``draw_long_lengths``.
    """
    _require_near_and_far(room)
    ends = [size for size in (64, 128, 256) if size <= room] or [room]
    return [max(1, int(size - rng.integers(1, EDGE_MARGIN + 1))) for size in ends]


def _require_near_and_far(room: int) -> None:
    if room < 4:
        raise BadArgument("room", room, "at least 4 positions", "this model's window is too short for audits")


# usual sizes of blocks, pages and buffers in engines
BLOCK_SIZES = (16, 32, 48, 64, 96, 100, 128, 192, 200, 256, 384, 500, 512)
OVERLAP = 4  # steps that read the last entries of the next row's steps
AFTER = 2  # tokens fed after a prompt that ends at an edge
WIDEST_FEED = 64  # tokens of a feed at most


def draw_block_end_lengths(rng: np.random.Generator, room: int) -> list[int]:
    """Lengths of prompts up to ``room``: at, and one beyond, the first and a random multiple of every size."""
    edges = {
        size * int(times) for size in BLOCK_SIZES if size <= room for times in (1, rng.integers(1, room // size + 1))
    }
    return sorted({n for edge in edges for n in (edge, edge + 1) if n <= room}) or [room]


# row, its first position, and the logits [n, V] shown from there on
PositionLogits = tuple[int, int, Floats]


def check_positions_in_window(
    under_test: DecoderUnderTest,
    own: Callable[[Ints], Floats],
    texts: Ints,
    rng: np.random.Generator,
    edges: Callable[[np.random.Generator, int], list[int]] = draw_block_end_lengths,
) -> Finding:
    """Check a decoder at full depth on ``texts`` int64 [rows, window], each read once by the model's own forward.

    Decoders keep K/V in blocks, pages and buffers, and errors occur at their ends. Their size is unknown, so the audit
    covers every position. First each row begins at another position and is fed token by token to the start of the next
    one; then in feeds of random widths. Then prompts end at, and one beyond, a random multiple of every usual size, or
    at ``edges(rng, room)``, the shortest first, and two more tokens are fed. ``own``: the model's own logits [window,
    V] after each token of a text.
    """
    tally, rows, decoder = Tally("positions", needed=1), len(texts), under_test.decoder
    tolerance = tally.tolerance_at_least_noise(under_test.tolerance, decoder.capabilities.logit_noise)
    with tally:
        readings = [*_step_through(decoder, texts, rng, 1)]
        if decoder.capabilities.max_feed > 1:
            readings += _step_through(decoder, texts, rng, min(decoder.capabilities.max_feed, WIDEST_FEED))
        ends = edges(rng, texts.shape[1] - AFTER)
        for place in range(0, len(ends), rows):  # similar lengths together, since padding costs as much as text
            readings += _read_prompts(decoder, texts, ends[place : place + rows])
        for row, text in enumerate(texts):
            right = own(text)
            for reading in (each for each in readings if each[0] == row):
                _compare_logits(tally, under_test, text, reading, right, tolerance)
    return tally.to_finding()


def _step_through(decoder: Decoder, texts: Ints, rng: np.random.Generator, widest: int) -> Iterator[PositionLogits]:
    """Rows that begin evenly spread over the window, in random order, fed to beyond the start of the next one."""
    rows, window = texts.shape
    stride = -(-(window - 1) // rows)
    starts = rng.permutation([min(1 + stride * row, window - 1) for row in range(rows)])
    session, step = decoder.start([Prompt(text[:start]) for text, start in zip(texts, starts, strict=True)])
    yield from _rows_of_step(step, range(rows), starts - 1)
    alive, ends, left = list(range(rows)), starts.copy(), min(stride + OVERLAP, window - 1)
    while left and alive:
        ended = [index for index, row in enumerate(alive) if ends[row] >= window]
        if ended:  # the row at the end of the window has no more tokens
            alive = [row for row in alive if ends[row] < window]
            if not alive:
                break
            session.drop(np.array(ended))
        room = min(left, window - int(ends[alive].max()))
        n = int(min(room, np.exp(rng.uniform(0, np.log(widest + 1))) if widest > 1 else 1))
        step = session.feed(np.stack([texts[row, ends[row] : ends[row] + n] for row in alive]))
        yield from _rows_of_step(step, alive, ends[alive])
        ends[alive] += n
        left -= n
    session.close()


def _read_prompts(decoder: Decoder, texts: Ints, lengths: Sequence[int]) -> Iterator[PositionLogits]:
    session, step = decoder.start([Prompt(text[:n]) for text, n in zip(texts, lengths, strict=False)])
    ends = np.array(lengths)
    yield from _rows_of_step(step, range(len(lengths)), ends - 1)
    for _ in range(AFTER):
        yield from _rows_of_step(
            session.feed(np.stack([[texts[row, n]] for row, n in enumerate(ends)])), range(len(ends)), ends
        )
        ends += 1
    session.close()


def _rows_of_step(step: Step, rows: Sequence[int], first: Ints) -> Iterator[PositionLogits]:
    for index, row in enumerate(rows):
        yield int(row), int(first[index]), np.array(step.logits[index], dtype=np.float32)


def _compare_logits(
    tally: Tally, under_test: DecoderUnderTest, text: Ints, reading: PositionLogits, right: Floats, tolerance: float
) -> None:
    (row, first, logits), depth = reading, under_test.point.ceiling
    expected = right[first : first + len(logits)]
    tally.require(
        logits.shape == expected.shape,
        f"row {row}, position {first}: logits of shape {logits.shape}, but {expected.shape} were asked for",
    )
    off = np.abs(logits - expected).max(axis=-1)
    excess = find_first_excess(under_test.lens, text, first, off, [depth], tolerance)
    at, allowed = excess or (0, tolerance)
    tally.require(
        excess is None,
        f"row {row}, position {first + at}, depth {depth}: logits off by {off[at]:.2g}, more than {allowed:g}",
    )
    tally.n += len(logits)
    tally.live["session_positions"] += len(logits)
    tally.discriminating += len(logits)
