"""What the page moves through: margins with the text that they colour, and a text that two models wrote in turns.

From the ``EMBEDDED`` tables of a report, checked as a whole: a list that does not fit its table would colour the wrong
token. Nothing is computed but shades: texts are written here once, and the page's script only picks among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emad_ref.report import tables
from emad_ref.report.schema import Report
from emad_ref.report.tables import ABSENT

SHADES = 5  # of depth, the lightest the shallowest
STOP_NUMBERS = ("mean depth", "net FLOPs saved", "perplexity", "rise of perplexity", "95 % interval")
VISIBLE_SIGNS = {"\n": "↵\n", "\t": "→\t", "\r": "␍"}


@dataclass(frozen=True)
class MarginStop:
    """One place of the slider: a margin; ``dials`` one text for each of ``STOP_NUMBERS``."""

    name: str
    roles: str
    dials: list[str]


@dataclass(frozen=True)
class ExplorerToken:
    """``said``, ``depth`` and ``shade`` one for each stop, all empty in a prompt."""

    text: str
    prompt: bool
    depth: list[int]
    shade: list[int]
    said: list[str]


@dataclass(frozen=True)
class DepthExplorer:
    """``start``: the stop it opens with, that of a point put forward. ``levels``: (shade, depths it stands for)."""

    title: str
    model: str
    stops: list[MarginStop]
    tokens: list[ExplorerToken]
    levels: list[tuple[int, str]]
    start: int

    @property
    def embedded(self) -> dict[str, Any]:
        """What the script picks from."""
        return {
            "stops": [{"name": stop.name, "roles": stop.roles, "dials": stop.dials} for stop in self.stops],
            "tokens": [{"depth": one.depth, "shade": one.shade, "said": one.said} for one in self.tokens],
        }


@dataclass(frozen=True)
class PairToken:
    """One token of a text that a pair wrote; ``model`` ``small`` or ``large``."""

    text: str
    prompt: bool
    model: str
    said: str


@dataclass(frozen=True)
class PairText:
    title: str
    pair: str
    turns: list[PairToken]


def depth_explorers(report: Report) -> list[DepthExplorer]:
    """One for each model that has both tables; one whose lists do not fit is left out."""
    found = []
    for table in _tables_of(report, "depth by margin"):
        texts = [other for other in _tables_of(report, "depth by token") if other["model"] == table["model"]]
        if texts and has_matching_lists(table["rows"], texts[0]["rows"]):
            found.append(_depth_explorer(table, texts[0]["rows"]))
    return found


def pair_texts(report: Report) -> list[PairText]:
    """One for each table of a pair."""
    return [
        PairText(table["title"], table["model"], [_pair_token(row) for row in table["rows"]])
        for table in _tables_of(report, "model by token")
    ]


def has_matching_lists(margins: Sequence[Mapping[str, Any]], tokens: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every decided token has a depth for every margin, from 1 up, and an entropy for every probe."""
    probes = max(len(row["probes"]) for row in margins)
    decided = [row for row in tokens if row["depths"]]
    return (
        bool(decided)
        and all(
            len(row["depths"]) == len(row["instead"]) == len(margins)
            and len(row["entropy, nats"]) == probes
            and all(type(depth) is int and depth > 0 for depth in row["depths"])
            and all(other is None or isinstance(other, str) for other in row["instead"])
            and _are_numbers(row["entropy, nats"])
            for row in decided
        )
        and all(_are_numbers(row["thresholds, nats"]) for row in margins)
    )


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


def _tables_of(report: Report, figure: str) -> list[Mapping[str, Any]]:
    return [table for table in report["tables"] if table.get("figure") == figure]


def _depth_explorer(table: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]]) -> DepthExplorer:
    margins = table["rows"]
    deepest = max(depth for row in tokens for depth in row["depths"])
    roles = [at for at, row in enumerate(margins) if row["put forward as"]]
    chosen = [at for at in roles if "validation" in margins[at]["put forward as"]]
    return DepthExplorer(
        title=table["title"],
        model=table["model"],
        stops=[_margin_stop(row) for row in margins],
        tokens=[_explorer_token(row, margins, deepest) for row in tokens],
        levels=_shade_levels(deepest),
        start=(chosen or roles or [len(margins) // 2])[0],
    )


def _margin_stop(row: Mapping[str, Any]) -> MarginStop:
    dials = [
        f"{tables.depth_text(row['mean depth'])} layers",
        tables.percent_text(row["net reduction %"]),
        tables.number_text(row["perplexity"]),
        tables.rise_text(row["rise %"]),
        tables.interval_text(rise_bounds(row)),
    ]
    return MarginStop(row["point"], row["put forward as"], dials)


def rise_bounds(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Of the rise at one margin; None unless both ends are known."""
    low, high = row["rise low %"], row["rise high %"]
    return None if low is None or high is None else (low, high)


def _explorer_token(row: Mapping[str, Any], margins: Sequence[Mapping[str, Any]], deepest: int) -> ExplorerToken:
    return ExplorerToken(
        visible_token(row["token"]),
        row["part"] == "prompt",
        row["depths"],
        [shade(depth, deepest) for depth in row["depths"]],
        [_token_text(row, at, margin) for at, margin in enumerate(margins)] if row["depths"] else [],
    )


def _token_text(row: Mapping[str, Any], at: int, margin: Mapping[str, Any]) -> str:
    """A sentence on one token under one margin: depth, entropies beside thresholds, what would have been said."""
    compared = [
        f"layer {probe}: entropy {tables.number_text(entropy, 3)} against {tables.number_text(threshold, 3)} nats"
        for probe, entropy, threshold in zip(
            margin["probes"], row["entropy, nats"], margin["thresholds, nats"], strict=False
        )
    ]
    instead = row["instead"][at]
    other = "" if instead is None else f"likeliest there: “{visible_token(instead)}” instead"
    return "; ".join([f"depth {row['depths'][at]}", *(compared or ["no probe"]), *([other] if other else [])])


def _pair_token(row: Mapping[str, Any]) -> PairToken:
    entropy, rolling, threshold = (row[f"{name}, bits"] for name in ("entropy", "rolling", "threshold"))
    said = (
        f"read first by the {row['model']} model"
        if row["part"] == "prompt"
        else f"written by the {row['model']} model; entropy {tables.number_text(entropy, 3)} bits, "
        f"rolling mean {tables.number_text(rolling, 3)} against {tables.number_text(threshold, 3)} bits"
    )
    return PairToken(visible_token(row["token"]), row["part"] == "prompt", row["model"], said)


def shade(depth: int, deepest: int) -> int:
    """0 for the shallowest fifth of the layers … ``SHADES`` − 1 for the deepest."""
    return min(SHADES - 1, (depth - 1) * SHADES // deepest)


def _shade_levels(deepest: int) -> list[tuple[int, str]]:
    depths: dict[int, list[int]] = {}
    for depth in range(1, deepest + 1):
        depths.setdefault(shade(depth, deepest), []).append(depth)
    return [(level, str(own[0]) if len(own) == 1 else f"{own[0]}–{own[-1]}") for level, own in sorted(depths.items())]


def visible_token(piece: str) -> str:
    """A token with its line breaks to be seen; ``ABSENT`` for one without letters."""
    for letter, mark in VISIBLE_SIGNS.items():
        piece = piece.replace(letter, mark)
    return piece or ABSENT
