"""What the page's explorer shows: every margin of the sweep, and one short text as each of them would read it.

    table 1   margin → thresholds τ_ℓ, mean depth, net saving, perplexity and its rise with an interval; from replay of
              the evaluation split
    table 2   a prompt of that split and the model's own greedy continuation at full depth, of ``TRIED`` the one on
              which depth differs most, token by token: H_ℓ at every probe, and for each row of table 1 the depth at
              which the token was said and, where it differs, what would have been said there instead

The text stays as it is, whatever the margin: depths are replayed over it, as over every text that is judged, and the
first row is full depth. Nothing here decides anything: intervals are those of one point looked at alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from emad_ref.calibration.trace import TokenSequence, Trace
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.points import Points
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import Ints
from emad_ref.replay import Replay, replay_all
from emad_ref.sweep.losses import Loss
from emad_ref.verdict.bootstrap import document_draws
from emad_ref.verdict.rates import perplexity_rise

MARGINS, TOKENS = "depth by margin", "depth by token"  # figures of ``report.figures``
PROMPT, CONTINUED = 16, 44  # tokens
TRIED = 12  # prompts, of which the text is shown on which depth differs most
RESAMPLES = 2000  # of the documents: bounds to two digits, which is what is shown


def explorer(points: Points) -> Exhibits:
    """Both tables.

    Raises:
        Unsupported: thresholds differ from token to token, or no document is as long as a prompt.
    """
    losses = swept(points)
    if any(len(loss.point.thresholds) > 1 for loss in losses):
        raise Unsupported("thresholds of this profile depend on the token: no margin has one per probe")
    margins = Table(f"margins on {points.subject.corpus}", margin_rows(points, losses), MARGINS)
    text = Table("a text at every margin", token_rows(points, [loss.point for loss in losses]), TOKENS)
    return Exhibits((margins, text))


def swept(points: Points) -> list[Loss]:
    """Full depth, then every margin of the sweep and of the points put forward, from those that save least."""
    at = {loss.point.margin_nats: loss for loss in (*points.emad_sweep, *points.losses)}
    return [points.full_loss, *sorted(at.values(), key=lambda loss: -(loss.point.margin_nats or 0.0))]


def margin_rows(points: Points, losses: Sequence[Loss]) -> list[dict[str, Any]]:
    """A row per loss. Columns that end in " %" are fractions; ``thresholds, nats`` one per probe, () at full depth."""
    draws = document_draws(len(points.traces.lengths), RESAMPLES, np.random.default_rng(points.subject.seed))
    return [_margin_row(points, loss, draws) for loss in losses]


def _margin_row(points: Points, loss: Loss, draws: Any) -> dict[str, Any]:
    nll, full, tokens = points.nll(loss)
    rise = perplexity_rise(
        nll, full, tokens, threshold=0.0, rng=np.random.default_rng(points.subject.seed), draws=draws
    )
    known = loss is not points.full_loss and np.isfinite([rise.low, rise.high]).all()
    return {
        "point": loss.point.name,
        "put forward as": ", ".join(points.roles.get(loss.point, ())),
        "margin, nats": loss.point.margin_nats,
        "mean depth": loss.mean_depth,
        "net reduction %": loss.net_reduction,
        "perplexity": loss.perplexity,
        "rise %": loss.perplexity_rise,
        "rise low %": rise.low if known else None,
        "rise high %": rise.high if known else None,
        "probes": list(loss.point.probes),
        "thresholds, nats": [float(np.float32(each)) for row in loss.point.thresholds for each in row],
    }


def token_rows(points: Points, compared: Sequence[OperatingPoint]) -> list[dict[str, Any]]:
    """A row per token; lists of a prompt's tokens are empty, for they are read at full depth and not decided.

    ``entropy, nats``  one per probe, of what the layer would say.
    ``depths``         one per point of ``compared``; ``instead`` what is likeliest there, None where it is the token.

    Raises:
        Unsupported: no document is as long as a prompt.
    """
    subject, probes = points.subject, max((point.probes for point in compared), key=len)
    read = min(PROMPT, subject.window // 2)
    windows = [window.tokens for window in subject.sequences("evaluate", TRIED)]
    opened = [Prompt(tokens[:read]) for tokens in windows if len(tokens) >= read]
    if not opened:
        raise Unsupported(f"corpus={subject.corpus!r} has no document of {read} tokens to open a text with")
    told = subject.own_greedy(opened, min(CONTINUED, subject.window - read))
    texts = [np.concatenate([prompt.tokens, emitted]) for prompt, emitted in zip(opened, told, strict=True)]
    trace = subject.trace([TokenSequence(text, adaptive_from=read - 1) for text in texts], "texts for the page")
    replays = list(replay_all(trace, compared))
    number, rows = _most_varied(trace, replays)
    words = pieces(subject.loaded.tokenizer, texts[number])
    said: list[dict[str, Any]] = [{"depths": [], "instead": [], "entropy, nats": []}] * read
    said += [_decided(points, trace, replays, probes, row) for row in rows]
    return [
        {"token": piece, "part": "prompt" if at < read else "continuation", **one}
        for at, (piece, one) in enumerate(zip(words, said, strict=True))
    ]


def _most_varied(trace: Trace, replays: Sequence[Replay]) -> tuple[int, range]:
    """The text on which depth differs most, from token to token and from point to point: its number and its rows."""
    depth = np.stack([each.depth for each in replays])
    rows = [range(*bounds) for bounds in itertools.pairwise(trace.starts.tolist())]
    number = int(np.argmax([depth[:, own].var() for own in rows]))
    return number, rows[number]


def _decided(
    points: Points, trace: Trace, replays: Sequence[Replay], probes: tuple[int, ...], row: int
) -> dict[str, Any]:
    columns, target = np.array(probes, dtype=np.int64) - 1, trace.target[row]
    others = [None if each.top1[row] == target else each.top1[row : row + 1].astype(np.int64) for each in replays]
    tokenizer = points.subject.loaded.tokenizer
    return {
        "depths": [int(each.depth[row]) for each in replays],
        "instead": [None if other is None else pieces(tokenizer, other)[0] for other in others],
        "entropy, nats": [float(value) for value in trace.entropy_nats[row, columns]],
    }


def pieces(tokenizer: Any, tokens: Ints) -> list[str]:
    """Each token as text by itself; its id where there is no tokenizer."""
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in tokens.tolist()]
    return [str(tokenizer.decode([token])) for token in tokens.tolist()]
