"""What decoding shows of a document without knowing its loss: how deep tokens went, and what probes read.

    exits after ℓ    share of a document's tokens that left after layer ℓ, the last one included
    signal at ℓ      mean of what the rule compared with its threshold there, over tokens that came so far

One row per document: tokens of one document depend on each other. A probe that no token of a document reached has NaN.
Where a text without signals is compared (a record of depths alone), shares are left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.record import DECODE, Floats, Ints, Record
from emad_ref.verdict.units import ByDocument, DocumentOf

DIGITS = 7  # that count, in a file: signals are float32


@dataclass(frozen=True, eq=False)
class Signs:
    """``values`` [documents, signs] under ``names``; ``text``: what they are documents of, in words.

    Raises:
        BadArgument: names that are not one per column, or twice the same; infinite values.
    """

    names: tuple[str, ...]
    values: ByDocument
    text: str

    def __post_init__(self) -> None:
        shape = np.shape(self.values.values)
        if len(shape) != 2 or shape[1] != len(self.names) or len(set(self.names)) < len(self.names):
            raise BadArgument("names", self.names, f"one for each column of {list(shape)}, each once")
        if np.isinf(self.values.values).any():
            raise BadArgument("values", "inf", "numbers, or NaN where no token came so far")

    def __len__(self) -> int:
        return len(self.values)

    def to_json(self) -> dict[str, Any]:
        """Built-in types, for a file; None where no token came so far."""
        rows = [
            [None if math.isnan(value) else float(f"{value:.{DIGITS}g}") for value in row]
            for row in self.values.values.tolist()
        ]
        return {"names": list(self.names), "values": rows, "text": self.text}

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> Signs:
        """What ``to_json`` gave, to ``DIGITS`` digits.

        Raises:
            BadArgument: fields that are missing or of other types or shapes.
        """
        try:
            names, text, rows = tuple(given["names"]), given["text"], given["values"]
            values = np.array(
                [[math.nan if value is None else value for value in row] for row in rows], dtype=np.float64
            )
            if not all(isinstance(name, str) for name in (*names, text)):
                raise TypeError("names are texts")
            return Signs(names, ByDocument.distinct(values), text)
        except (KeyError, TypeError, ValueError) as error:
            raise BadArgument(
                "signs", str(given)[:80], "names, values and text, as to_json gives them", str(error)
            ) from error


def signs_of(depth: Ints, signal: Floats | None, document: DocumentOf, point: OperatingPoint, text: str) -> Signs:
    """The signs of documents whose tokens ran to these depths.

    Args:
        depth: [tokens] under ``point``.
        signal: [tokens, probes] what was compared; whatever stands where a token did not come so far is left out. None:
            not known.
        document: [tokens] which document each is of.
        text: what they are documents of, in words.

    Raises:
        BadArgument: columns of other lengths, no token, a depth that the point does not have.
    """
    if len(depth) == 0 or len(depth) != len(document):
        raise BadArgument("depth", f"{len(depth)} tokens", f"the {len(document)} of the documents, at least one")
    if not ((depth >= 1) & (depth <= point.ceiling)).all():
        raise BadArgument("depth", f"{depth.min()}–{depth.max()}", f"layers in 1–{point.ceiling}", "see the point")
    tokens = document.sums(np.ones(len(depth)))
    exits = exits_of(point)
    columns = {f"exits after {layer}": document.sums(depth == layer) / tokens for layer in exits}
    if signal is not None:
        if signal.shape != (len(depth), len(point.probes)):
            raise BadArgument("signal", f"shape {signal.shape}", f"shape ({len(depth)}, {len(point.probes)})")
        for number, probe in enumerate(point.probes):
            read = (depth >= probe) & ~np.isnan(signal[:, number])
            total = document.sums(np.where(read, signal[:, number].astype(np.float64), 0.0))
            count = document.sums(read)
            columns[f"signal at {probe}"] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    values = ByDocument(np.stack(list(columns.values()), axis=1), np.unique(document.number))
    return Signs(tuple(columns), values, text)


def exits_of(point: OperatingPoint) -> tuple[int, ...]:
    """Layers that a token can leave after: probes, those between them where points interpolate, and the ceiling."""
    between = range(point.probes[0], point.ceiling) if point.interpolate and point.probes else point.probes
    return (*between, point.ceiling)


def signs_of_record(record: Record, point: OperatingPoint, text: str) -> Signs:
    """The signs of what one call of ``generate`` decoded: each sequence a document, prompts left out.

    Raises:
        BadArgument: nothing decoded, and as ``signs_of``.
    """
    tokens = record.tokens
    decided = (tokens.phase == DECODE) & tokens.kept
    return signs_of(tokens.depth[decided], record.signal[decided], DocumentOf(tokens.sequence[decided]), point, text)
