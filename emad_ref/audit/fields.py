"""Every field of an operating point is honoured, or the decoder declines: no field may be ignored.

For each variant of ``audit.variants`` the decoder is opened at a point that uses the field. It may decline
(``Unsupported``). If it decodes, a session and a ``generate`` are held against the lens at that point, or, where the
lens does not know the states, against our own decoder. Thresholds are quantiles of the signals on the very tokens that
are fed, chosen so that a decoder that ignores the field decides otherwise somewhere. Where none are found the note
names the field: that is the model's and the text's doing. Discriminating are the variants with power, half of which
are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice

import numpy as np

from emad_ref.audit.comparisons import NOT_REACHED
from emad_ref.audit.decisions import judge_fed
from emad_ref.audit.finding import Finding, Refuted, Tally, prefix_complaints
from emad_ref.audit.generation import judge_record
from emad_ref.audit.lens import Lens, Reference, consult
from emad_ref.audit.rule import depths_of, emission_noise, headroom, noise_of
from emad_ref.audit.sameness import same_tokens
from emad_ref.audit.variants import VARIANTS, Sizes, Variant
from emad_ref.errors import EmadError
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import Floats, Ints
from emad_ref.signals import SIGNALS

CHECK = "fields"
SHARES = (0.5, 0.3, 0.15, 0.7, 0.05)  # of the tokens fed that a threshold lets go
DRAWN = 200  # further thresholds to try, drawn
TRIED = 12  # of them, where our own decoder has to decode at each
SMOOTH = 0.01  # logits: a tolerance beyond which ties are so many that a signal which jumps there is not compared
DRAWS = 3  # of a variant's own numbers, until ignoring it shows
ENOUGH = 3  # discriminating positions with which no better thresholds are looked for
CLEAR = 2  # tolerances that a signal must lie off a threshold: nearer ones decide by rounding

Opening = Callable[[OperatingPoint], AbstractContextManager[Decoder]]


def fields(
    opened: Opening,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    sizes: Sizes,
    prompt: Prompt,
    continuation: Ints,
    new: int,
    rng: np.random.Generator,
    tolerance: float,
    *,
    variants: dict[str, Variant] = VARIANTS,
) -> Finding:
    """Check every variant on ``prompt`` followed by ``continuation`` int64 [n], and on ``new`` tokens generated.

    Args:
        opened: opens the decoder under test at a point; it or its methods may raise Unsupported.
        own: our own decoder at a point whose states the lens does not know.
        tolerance: in logits and nats, raised to the decoder's declared noise.
    """
    tally, declined, power = Tally(CHECK, needed=0), [], []
    with tally:
        for name, variant in variants.items():
            if sizes.layers < variant.least:
                tally.notes.append(f"{name}: {variant.least} layers needed")
                continue
            texts = [(prompt, continuation), *([_reversed(prompt, continuation)] if variant.jumps else [])]
            try:
                with prefix_complaints(f"{name}: "):
                    differing = _tried(tally, variant, sizes, opened, own, lens, texts, new, rng, tolerance)
            except Unsupported as refusal:
                declined.append(f"{name} ({refusal})")
                continue
            except TooNoisy as reason:
                tally.notes.append(f"{name}: {reason}")
                continue
            power.append((differing, name))
        if declined:
            tally.notes.append(f"declined: {'; '.join(declined)}")
        powerless = [name for differing, name in power if differing == 0]
        tally.notes += [f"{name}: ignoring it would not show on these tokens" for name in powerless]
        tally.needed, tally.discriminating = len(power) // 2, len(power) - len(powerless)
    return tally.finding()


class TooNoisy(EmadError):
    """A variant whose signal jumps cannot be held to numbers that are so far off."""


def _tried(
    tally: Tally,
    variant: Variant,
    sizes: Sizes,
    opened: Opening,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    texts: Sequence[tuple[Prompt, Ints]],
    new: int,
    rng: np.random.Generator,
    tolerance: float,
) -> int:
    """Judge ``variant`` on the first of ``texts`` that it passes; positions at which ignoring it would show there.

    On one text two tokens may tie, and the signal jump; who ignores the field is wrong on the next one, too.

    Raises:
        Refuted: on the last of them.
        Unsupported, TooNoisy: nothing can be said.
    """
    for left, text in zip(reversed(range(len(texts))), texts, strict=True):
        for _ in range(DRAWS):
            point, differing = _with_thresholds(variant, sizes, own, lens, *text, new, rng, tolerance)
            if differing:
                break
        try:
            _judge(tally, variant, point, opened, own, lens, *text, new, tolerance)
        except Refuted:
            if left == 0:
                raise
            tally.ties += 1
        else:
            break
    return differing


def _reversed(prompt: Prompt, continuation: Ints) -> tuple[Prompt, Ints]:
    """Other tokens of the same lengths."""
    tokens = np.concatenate([prompt.tokens, continuation])[::-1].copy()
    return Prompt(tokens[: len(prompt.tokens)], prompt.source), tokens[len(prompt.tokens) :]


def _judge(
    tally: Tally,
    variant: Variant,
    point: OperatingPoint,
    opened: Opening,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    prompt: Prompt,
    continuation: Ints,
    new: int,
    tolerance: float,
) -> None:
    if variant.unservable:
        _require_refused(tally, opened, point, prompt)
        return
    with opened(point) as decoder:
        declared = decoder.capabilities.logit_noise
        if not variant.by_lens:
            found, wanted = (each.generate([prompt], new, frozenset()) for each in (decoder, own(point)))
            theirs, mine = ([emitted.tolist() for emitted in record.emitted] for record in (found, wanted))
            there, here = ([each.tokens.depth[each.tokens.kept_of(0)][-new:].tolist()] for each in (found, wanted))
            same = same_tokens(
                lens, tolerance, [prompt], theirs, mine, point, there, here, declared=declared, most_ties=1.0
            )  # one row: that it ends in a tie is no share of anything
            tally.n += same.n
            tally.require(same.passed is not False, same.detail)
            return
        allowed = tally.allow(tolerance, declared)
        if variant.jumps and allowed > SMOOTH:
            raise TooNoisy(f"its signal jumps where tokens tie, which {allowed:g} of a logit often decides")
        judge_fed(tally, decoder, lens, point, [prompt], continuation[None], allowed, exact_context=False)
        record = decoder.generate([prompt], new, frozenset())
        judge_record(
            tally, record, [prompt], new, frozenset(), point, lens, allowed,
            counted=decoder.capabilities.counted, exact_context=False,
        )  # fmt: skip


def _require_refused(tally: Tally, opened: Opening, point: OperatingPoint, prompt: Prompt) -> None:
    """A point that names a file that does not exist cannot be served: decoding at it ignores the field."""
    try:
        with opened(point) as decoder:
            decoder.generate([prompt], 1, frozenset())
    except EmadError:
        return
    tally.require(False, f"decoded at lens={point.lens!r}, translators={point.translators!r}, which do not exist")


# ---------------------------------------------------------------- thresholds under which ignoring shows


def _with_thresholds(
    variant: Variant,
    sizes: Sizes,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    prompt: Prompt,
    continuation: Ints,
    new: int,
    rng: np.random.Generator,
    tolerance: float,
) -> tuple[OperatingPoint, int]:
    """(the variant's point, positions where ignoring one of its fields changes decoding, the fewest of them)."""
    point, first = variant.made(sizes, rng), len(prompt.tokens) - 1
    tokens = np.concatenate([prompt.tokens, continuation])
    if variant.unservable:
        return point, ENOUGH
    if not variant.by_lens:
        return _decoding_otherwise(variant, point, own, lens, prompt, tokens, new, rng, tolerance)
    # what is read and emitted does not depend on thresholds: one pass each serves all that are tried
    mine = consult(lens, tokens, point, first, tolerance)
    theirs = [consult(lens, tokens, ignoring(point), first, tolerance) for ignoring in variant.ignored]
    best, chosen = -1, point
    for number, levels in enumerate(_levels(point, mine.signal, rng, tolerance)):
        candidate = _under(point, levels)
        honoured = _depths(candidate, mine)
        differing = min(
            _differing(candidate, mine, honoured, other, _depths(ignoring(candidate), other), tolerance)
            for ignoring, other in zip(variant.ignored, theirs, strict=True)
        )
        if differing > best:
            best, chosen = differing, candidate
        if number >= len(SHARES) and best >= ENOUGH:
            break
    return chosen, best


def _decoding_otherwise(
    variant: Variant,
    point: OperatingPoint,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    prompt: Prompt,
    tokens: Ints,
    new: int,
    rng: np.random.Generator,
    tolerance: float,
) -> tuple[OperatingPoint, int]:
    """The same by what our own decoder emits after ``prompt``, for points whose states the lens does not know."""

    def emitted(at: OperatingPoint) -> Ints:
        record = own(at).generate([prompt], new, frozenset())
        return np.stack([record.emitted[0], record.tokens.depth[record.tokens.kept_of(0)][-new:]])

    best, chosen = -1, point
    # the states that it copies change its signals; those of exact ones are near enough to choose thresholds by
    exact = replace(point, schedule="monotone", period=None, floor=None)
    signal = consult(lens, tokens, exact, len(prompt.tokens) - 1, tolerance).signal
    for levels in islice(_levels(point, signal, rng, tolerance), TRIED if point.probes else 1):
        candidate = _under(point, levels)
        mine = emitted(candidate)
        differing = min(int((mine != emitted(ignoring(candidate))).any(axis=0).sum()) for ignoring in variant.ignored)
        if differing > best:
            best, chosen = differing, candidate
        if best >= ENOUGH:
            break
    return chosen, best


def _levels(point: OperatingPoint, signal: Floats, rng: np.random.Generator, tolerance: float) -> Iterator[Floats]:
    """Thresholds [probes] to try: of a share at every probe, of one value at one probe, and drawn ones.

    Each lies half-way between two values of ``signal`` [m, probes] that are clearly apart.
    """
    sense, never = SIGNALS[point.signal].sense, SIGNALS[point.signal].never
    if point.interpolate:  # a line to an infinite threshold is none
        never = NOT_REACHED[sense]
    allowed = CLEAR * tolerance * noise_of(point)
    between = []
    for at, probe in enumerate(point.probes):
        values = np.sort(signal[~np.isnan(signal[:, at]), at])
        decided = point.confidence is None or probe >= point.confidence.minimum
        clear = np.flatnonzero(np.diff(values) > 2 * allowed) if decided else np.zeros(0, dtype=np.int64)
        between.append((values[clear] + values[clear + 1]) / 2)
    for share in SHARES:
        wanted = share if sense == "falls" else 1 - share
        yield np.array([each[int(wanted * (len(each) - 1))] if len(each) else never for each in between])
    for scale in (1.0,) if point.decay is None else (1.0, 1.05):  # what falls by a tenth lies between there
        for at, each in enumerate(between):
            for level in each:
                yield np.where(np.arange(len(between)) == at, scale * level, never)
    for _ in range(DRAWN):
        yield np.array([rng.choice(each) if len(each) else never for each in between])


def _under(point: OperatingPoint, levels: Floats) -> OperatingPoint:
    """``point`` with thresholds ``levels`` [probes], of bins in every second row: the others let nothing go."""
    never = SIGNALS[point.signal].never
    row: tuple[float, ...] = tuple(levels.astype(np.float32).tolist())
    rows = tuple(row if number % 2 else (never,) * len(row) for number in range(point.bins.count))
    return replace(point, thresholds=rows if point.bins.features else (row,))


def _depths(point: OperatingPoint, reference: Reference) -> Ints:
    """[m] that the rule of ``point`` gives."""
    room, _ = headroom(point, reference.signal, reference.rows[0])
    depth = depths_of(point, room, np.full(len(room), point.ceiling, dtype=np.int64))
    return np.minimum.accumulate(depth) if point.schedule == "monotone" else depth


def _differing(
    point: OperatingPoint, mine: Reference, depth: Ints, theirs: Reference, depth_there: Ints, tolerance: float
) -> int:
    """Positions at which depths differ, or signals that were read, or what is emitted, clearly beyond the tolerance."""
    differ = depth != depth_there
    if mine.signal.shape == theirs.signal.shape:
        read = np.asarray(point.probes, dtype=np.int64) <= depth[:, None]
        off = np.abs(mine.signal - theirs.signal) > CLEAR * tolerance * noise_of(point)
        differ |= (off & read).any(axis=1)
    at = np.arange(len(depth)), depth - 1
    with np.errstate(invalid="ignore"):  # −inf of a pruned token on both sides is no difference
        apart = np.abs(mine.emitted[at] - theirs.emitted[at]) > CLEAR * tolerance * emission_noise(point)
    differ |= apart.any(axis=-1)
    return int(differ.sum())
