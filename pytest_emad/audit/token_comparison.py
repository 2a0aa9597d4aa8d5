"""Compare emitted tokens and depths with another decoder's or with stored goldens, up to ties."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from emad_ref.errors import EmadError
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import PROMPT, Floats, Ints, Record
from pytest_emad.audit.finding import (
    AuditRefutedError,
    Finding,
    FirstDifference,
    add_likely_cause,
    require_shape,
    tie_share_limit_and_tolerance,
)
from pytest_emad.audit.likely_cause import likely_cause
from pytest_emad.audit.reference_logits import Lens, compute_reference, headroom_and_noise, is_tied
from pytest_emad.audit.tolerances import max_logit_error, max_tied_gap, measured_tolerance
from pytest_emad.audit.trajectory import Judge

TokenRows = Sequence[Sequence[int]]


def prompts_and_predicted_tokens(lens: Lens, texts: Sequence[Ints], most: int) -> tuple[list[Prompt], list[list[int]]]:
    """(Prompts, next tokens): one for every token that is the likeliest after a beginning of ``texts`` int64 [n].

    Among several beginnings it takes that with the largest lead over the second token; rarest tokens first, at most
    ``most``. A decoder that bans a token, or reads only a part of the head, fails at some of them.
    """
    found: dict[int, tuple[float, Ints]] = {}
    count: Counter[int] = Counter()
    for text in texts:
        last = lens(text).last_layer
        best = last.argmax(axis=-1)
        second, first = np.partition(last, -2, axis=-1)[:, -2:].T
        count.update(best.tolist())
        for at, (token, lead) in enumerate(zip(best.tolist(), (first - second).tolist(), strict=True)):
            if token not in found or lead > found[token][0]:
                found[token] = lead, text[: at + 1]
    chosen = sorted(found, key=lambda token: (count[token], token))[:most]
    return [Prompt(found[token][1]) for token in chosen], [[token] for token in chosen]


def check_same_tokens(
    lens: Lens,
    tolerance: float,
    prompts: Sequence[Prompt],
    actual: TokenRows,
    expected: TokenRows,
    point: OperatingPoint | None = None,
    found_depths: TokenRows | None = None,
    wanted_depths: TokenRows | None = None,
    *,
    declared: float = 0.0,
    most_ties: float | None = None,
    tied_when_decoded: Callable[[Prompt, Sequence[int], float], bool] | None = None,
) -> Finding:
    """Compare each row's tokens (and depths) to the end, or to a tie; the finding names the first difference.

    ``point`` None means full depth: only logit ties exist. Depths, if given, accompany the tokens they produced.
    ``declared``: noise that the decoder of ``actual`` declares; beyond ``tolerance`` it replaces it, and every row may
    then end in a tie, since ``check_generation`` checks each position within such noise. ``tied_when_decoded(prompt,
    emitted, tolerance)``: whether the next token is a tie under copied states, which the lens does not know.
    ``most_ties``: share of tokens that may be ties, in place of the limit that these imply. ``n`` of the finding counts
    the tokens of ``actual``; if it passed with ties, ``detail`` gives their number.
    """
    limit, tolerance = tie_share_limit_and_tolerance(tolerance, declared)
    limit = limit if most_ties is None else most_ties
    ties, total = 0, sum(map(len, actual))
    for row, prompt in enumerate(prompts):
        at = first_difference(actual[row], expected[row])
        if found_depths is not None and wanted_depths is not None:
            at = min(at, first_difference(found_depths[row], wanted_depths[row]))
        if at == min(len(actual[row]), len(expected[row])):
            if len(actual[row]) != len(expected[row]):
                complaint = f"row {row}: {len(actual[row])} tokens, but {len(expected[row])} expected"
                return Finding("same tokens", False, complaint, total, ties)
            continue
        depth = None if wanted_depths is None else wanted_depths[row][at]
        history = expected[row][:at]
        logits = None
        if tied_when_decoded is None or not tied_when_decoded(prompt, history, tolerance):
            logits = _untied_logits(lens, tolerance, prompt, history, point, depth)
        if logits is not None:
            here, there = ("full" if depths is None else depths[row][at] for depths in (found_depths, wanted_depths))
            complaint = (
                f"row {row}, new token {at}: {actual[row][at]} (depth {here}), but expected {expected[row][at]} "
                f"(depth {there}), and no tie excuses it: the two likeliest are {_gap(logits):.2g} nats apart"
            )
            tokens, difference, cause = (int(actual[row][at]), int(expected[row][at])), None, None
            if tokens[0] != tokens[1]:
                difference = FirstDifference.from_logits(len(prompt.tokens) + at - 1, *tokens, logits)
            if difference is not None and (point is None or point.is_full_depth):
                cause = likely_cause(lens, prompt.tokens, np.asarray(actual[row], dtype=np.int64), logits, at)
            finding = Finding("same tokens", False, add_likely_cause(complaint, cause), total, ties)
            return replace(finding, difference=difference, likely_cause=cause)
        ties += 1
    if ties > limit * total:
        complaint = f"{ties} ties in {total} tokens: more than {limit:.0%} is no longer noise"
        return Finding("same tokens", False, complaint, total, ties)
    detail = f"{ties} of {total} tokens stand after a tie's first difference" if ties else f"all {total} tokens"
    return Finding("same tokens", True, detail, total, ties)


def _untied_logits(
    lens: Lens,
    tolerance: float,
    prompt: Prompt,
    emitted: Sequence[int],
    point: OperatingPoint | None,
    depth: int | None,
) -> Floats | None:
    """Logits [V] of the token after ``emitted`` [m]; None at a tie, of the tolerance or of the rounding measured there,
    after which tokens may differ.
    """
    history = np.concatenate([prompt.tokens, np.asarray(emitted, dtype=np.int64)])
    if point is None:
        logits = lens(history, len(history) - 1)
        last = depth or logits.layers
        found: Floats = logits.after_layer(last)[-1]
        return None if _gap(found) < max_tied_gap(None, measured_tolerance(lens, history, [last], tolerance)) else found
    reference = compute_reference(lens, history, point, len(prompt.tokens) - 1, tolerance)
    last = depth or point.layers
    found = reference.emitted.after_layer(last)[-1]
    gap = _gap(found)
    if gap < max_tied_gap(point, tolerance) or is_tied(point, reference.signal, reference.rows, tolerance).any():
        return None
    allowed = measured_tolerance(lens, history, sorted({*point.readout_layers, last}), tolerance)
    rows, at = tuple(one[-1:] for one in reference.rows), len(reference.tolerance) - 1
    of_signal = reference.with_tolerance_at_position(point, len(prompt.tokens) - 1, at, allowed).signal_tolerance[-1:]
    tied = gap < max_tied_gap(point, allowed) or bool(is_tied(point, reference.signal[-1:], rows, of_signal).any())
    return None if tied else found


def is_next_token_tied(
    decoder: Decoder, point: OperatingPoint, prompt: Prompt, emitted: Sequence[int], tolerance: float
) -> bool:
    """Whether the token after ``emitted``, or its depth, is a tie of ``decoder`` at ``point``.

    ``tolerance``: of a logit, and of a signal that moves no faster.
    """
    session, step = decoder.start([prompt])
    for token in emitted:
        step = session.feed(np.array([[token]], dtype=np.int64))
    session.close()
    near = is_tied(point, step.signal[:, -1], (np.zeros(1, dtype=np.int64),), tolerance)
    return bool(near.any() or _gap(step.logits[0, -1]) < max_tied_gap(point, tolerance))


def require_reference_step(
    judge: Judge,
    where: str,
    signals: Floats,
    reference: tuple[int, Floats],
    depth: int,
    logits: Floats | None = None,
    emitted: int | None = None,
    position: int = 0,
) -> bool:
    """Whether a step is the reference decoder's after the same tokens; False at a tie of its depth.

    After such a tie the states differ, and the row is compared no further. The tally of ``judge`` counts the position,
    and ties.

    Args:
        signals: [m, probes] of the reference decoder at the row's decided positions, this one last; a threshold may
            depend on their number, and a decoder does not tell its bin.
        reference: depth and logits [V] of the reference decoder.
        depth, logits, emitted: of the decoder under test; logits and greedy token, if given, must be the reference's
            up to rounding and a tie.
        position: of the row, after which ``emitted`` follows.

    Raises:
        AuditRefutedError: another depth, or another greedy token, without a tie; logits further off.
    """
    tally, point, tolerance, (own, wanted) = judge.tally, judge.point, judge.tolerance, reference
    rows = [np.full(len(signals), row, dtype=np.int64) for row in range(len(point.thresholds))]
    near = any(is_tied(point, signals, (row,), tolerance)[-1] for row in rows)
    tally.n, tally.near = tally.n + 1, tally.near + near
    if depth != own:
        tally.require(
            near, f"{where}: depth {depth}, but the reference decoder takes depth {own}, and no tie excuses it"
        )
        tally.ties += 1
        return False
    if emitted is not None:
        best = int(wanted.argmax())
        difference = FirstDifference.from_logits(position, emitted, best, wanted)
        if difference.gap_nats >= max_tied_gap(point, tolerance):
            complaint = f"emitted {emitted}, but the reference decoder {best}"
            gap = f"which leads by {difference.gap_nats:.2g} logits"
            raise AuditRefutedError(f"{where}: {complaint}, {gap}", difference=difference)
        tally.ties += emitted != best
    if logits is not None:
        with np.errstate(invalid="ignore"):  # −inf of a pruned token on both sides is no difference
            off = float(np.where(logits == wanted, 0.0, np.abs(logits - wanted)).max())
        allowed = max_logit_error(point, tolerance)
        tally.require(off <= allowed, f"{where}: logits off by {off:.2g}, more than {allowed:g}")
    return True


def _gap(logits: Floats) -> float:
    """The largest of ``logits`` [V] minus the second largest."""
    best = np.sort(logits)[-2:]
    return float(best[1] - best[0])


def first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """Index of the first difference; the shorter length if one begins with the other."""
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)


DIGITS = 4  # significant digits of a distance, which is compared only with a tolerance


class BadGoldenError(EmadError):
    """Raised for a stored golden with missing parts."""


@dataclass(frozen=True, eq=False)
class GoldenTokens:
    """``token``, ``depth`` int64 [rows, new]; ``margin``, ``room`` float64 [rows, new], inf if there is none.

    ``depth`` is the other decision about the token: for a pair, the model that emitted it. ``margin``: logits between
    the two best shown; none for a sampled token. ``room``: distance of the nearest compared signal to its threshold.
    Machines sum in different orders, so a row may diverge from its golden at a margin or room within the tolerance. The
    different text after that is not compared.
    """

    token: Ints
    depth: Ints
    margin: Floats
    room: Floats

    def to_json(self) -> dict[str, Any]:
        return {
            "token": self.token.tolist(),
            "depth": self.depth.tolist(),
            "margin": [[_rounded(value) for value in row] for row in self.margin],
            "room": [[_rounded(value) for value in row] for row in self.room],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> GoldenTokens:
        """Read a stored golden. Raises BadGoldenError."""
        try:
            token, depth = (np.array(stored[name], dtype=np.int64) for name in ("token", "depth"))
            # None, which JSON has for infinity, reads as NaN
            margin, room = (np.array(stored[name], dtype=np.float64) for name in ("margin", "room"))
            golden = cls(token, depth, *(np.where(np.isnan(each), np.inf, each) for each in (margin, room)))
        except (KeyError, TypeError, ValueError) as error:
            raise BadGoldenError(
                f"a golden without token, depth, margin and room by row ({error}); record it anew"
            ) from None
        if len({part.shape for part in (golden.token, golden.depth, golden.margin, golden.room)}) > 1:
            raise BadGoldenError("parts of different sizes; record it anew")
        return golden


def golden_key(fingerprint: str, dtype: str, corpus: str, seed: int, kind: str, drawn_by: str = "") -> str:
    """The id of a golden; ``drawn_by``: the release whose generator drew its tokens."""
    return f"{fingerprint}-{dtype}-{corpus}-seed-{seed}-{kind}" + (f"-{drawn_by}" if drawn_by else "")


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


# ---------------------------------------------------------------- making goldens


def emitted_depths(record: Record) -> Ints:
    """Depth of each step that emitted a token, [rows, new]. Rows of equal length."""
    return np.stack([record.tokens.depth[_decided_positions(record, row)] for row in range(len(record.emitted))])


def threshold_distances(record: Record, point: OperatingPoint) -> Floats:
    """[rows, new] distance of the nearest read signal to its threshold; ``point`` has no bins.

    Raises:
        AuditRefutedError: the record has no signal for each token and probe.
    """
    require_shape("record.signal", record.signal, (len(record.tokens), len(point.probes)))
    distances = []
    for row in range(len(record.emitted)):
        signal = record.signal[_decided_positions(record, row)]
        room, _ = headroom_and_noise(point, signal, np.zeros(len(signal), dtype=np.int64))
        distances.append(np.abs(room).min(axis=1))  # −inf without a decision
    return np.stack(distances)


def _decided_positions(record: Record, row: int) -> Ints:
    places = record.tokens.kept_row_indices(row)
    decided: Ints = places[record.tokens.phase[places] != PROMPT]
    return decided


def logit_margins(decoder: Decoder, prompts: Sequence[Prompt], emitted: Sequence[Ints]) -> Floats:
    """Logit margin of the two best tokens that ``decoder`` shows at each of ``emitted``, [rows, new]."""
    session, step = decoder.start(prompts)
    steps = [step.logits[:, -1]]
    for column in np.stack(emitted)[:, :-1].T:
        steps.append(session.feed(column[:, None]).logits[:, -1])
    session.close()
    best = np.sort(np.stack(steps, axis=1), axis=-1)
    gap: Floats = best[..., -1] - best[..., -2]
    return gap


# ---------------------------------------------------------------- comparing goldens


def thresholds_to_golden_json(point: OperatingPoint) -> dict[str, Any]:
    """The part of ``point`` that decides depths, in the form of a golden."""
    return {"probes": list(point.probes), "thresholds": [list(row) for row in point.thresholds]}


def largest_threshold_change(golden: Any, actual: dict[str, Any]) -> float:
    """Largest difference between thresholds of ``actual`` and ``golden``; ∞ if they do not correspond.

    Thresholds that are quantiles of a model's own signals differ in the last bits between processors.
    """
    if not isinstance(golden, dict) or golden.keys() != actual.keys() or golden["probes"] != actual["probes"]:
        return math.inf
    before, now = ([value for row in each["thresholds"] for value in row] for each in (golden, actual))
    if len(before) != len(now):
        return math.inf
    # equal ones first, since two infinite ones do not differ
    return max((0.0 if a == b else abs(a - b) for a, b in zip(before, now, strict=True)), default=0.0)


def compare_golden(
    golden: GoldenTokens, actual: GoldenTokens, tolerance: float, noise: float = 1.0, *, declared: float = 0.0
) -> Finding:
    """Check that ``actual`` matches ``golden``, up to its ties.

    ``tolerance`` of a logit; ``noise`` of a signal, in multiples of it. ``declared``: noise that the decoder of
    ``actual`` declares; beyond ``tolerance`` it replaces it, and every row may diverge at a tie.
    """
    limit, tolerance = tie_share_limit_and_tolerance(tolerance, declared)
    if actual.token.shape != golden.token.shape:
        complaint = f"{actual.token.shape} rows and new tokens, but the golden holds {golden.token.shape}"
        return Finding("golden", False, complaint, 0, 0)
    differs, ties = (actual.token != golden.token) | (actual.depth != golden.depth), 0
    near = np.logical_or.accumulate(golden.room <= noise * tolerance, axis=1)
    for row in np.flatnonzero(differs.any(axis=1)).tolist():
        at = int(np.argmax(differs[row]))
        close = actual.depth[row, at] == golden.depth[row, at] and golden.margin[row, at] <= max_tied_gap(
            None, tolerance
        )
        if not (close or near[row, at]):
            return Finding("golden", False, _describe_difference(golden, actual, row, at), golden.token.size, ties)
        ties += 1
    if ties > max(1, limit * golden.token.size):
        complaint = f"{ties} of {len(differs)} rows part from the golden at a tie: that many are no longer rounding"
        return Finding("golden", False, complaint, golden.token.size, ties)
    detail = f"{ties} of {len(differs)} rows part from the golden at a tie" if ties else "token by token"
    return Finding("golden", True, detail, golden.token.size, ties)


def _describe_difference(golden: GoldenTokens, actual: GoldenTokens, row: int, at: int) -> str:
    near = golden.room[row, : at + 1].min()
    return (
        f"row {row}, new token {at}: {actual.token[row, at]} ({actual.depth[row, at]}), but the golden has "
        f"{golden.token[row, at]} ({golden.depth[row, at]}), by a margin of {golden.margin[row, at]:.2g} logits and "
        f"with no signal nearer to its threshold than {near:.2g}"
    )
