"""Records in JSON lines, one object per token, as ``emad generate --format jsonl`` writes them: their signs.

    {"depth": 4, "layers": 12, …}                                            depth shares alone
    {"depth": 4, "layers": 12, "document": 7, "signal": [0.3, 0.1, null]}    more, from whoever records it

``document``: which text a token is of, a whole number; without it a file is one text. ``signal``: what each probe of
the point compared, null where the token did not come so far; in every line or in none. Other fields are not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.files import parse_json, read_lines
from emad_ref.point import OperatingPoint
from emad_ref.screening.drift import DocumentFeatures, document_features
from emad_ref.statistics.units import DocumentOf


def signs_of_files(paths: Sequence[Path], point: OperatingPoint, text: str) -> DocumentFeatures:
    """The signs of the texts that these files record, decoded under ``point``.

    Raises:
        BadFile: one cannot be read.
        BadArgument: a line that is no such object, of another number of layers or probes; signals in some lines only;
            no line at all; as ``document_features``.
    """
    depth: list[int] = []
    signal: list[list[float]] = []
    numbers: dict[tuple[int, int | None], int] = {}
    document: list[int] = []
    for file, path in enumerate(paths):
        for number, line in enumerate(read_lines(path, "record"), start=1):
            if not line.strip():
                continue
            try:
                token = _token(parse_json(line), point)
            except (ValueError, KeyError, TypeError) as error:
                expected = "a JSON object with depth and layers of this exit's model, and signal of its probes or none"
                raise BadArgument(f"{path}, line {number}", line.strip()[:60], expected, str(error)) from error
            depth.append(token[0])
            signal += [token[2]] if token[2] is not None else []
            document.append(numbers.setdefault((file, token[1]), len(numbers)))
    if len(signal) not in (0, len(depth)):
        raise BadArgument("record", f"{len(signal)} of {len(depth)} tokens with a signal", "one in each or in none")
    columns = np.array(signal, dtype=np.float64).reshape(-1, len(point.probes)) if signal else None
    tokens = np.array(depth, dtype=np.int64)
    return document_features(tokens, columns, DocumentOf(np.array(document, dtype=np.int64)), point, text)


def _token(given: Any, point: OperatingPoint) -> tuple[int, int | None, list[float] | None]:
    """(depth, document, signal) of one line."""
    depth, document, signal = given["depth"], given.get("document"), given.get("signal")
    if type(depth) is not int or not (document is None or type(document) is int):
        raise ValueError("depth and document are whole numbers")
    if given["layers"] != point.layers:
        raise ValueError(f"layers={given['layers']!r}, not {point.layers}")
    if signal is None:
        return depth, document, None
    if not isinstance(signal, list) or len(signal) != len(point.probes):
        raise ValueError(f"signal has not one entry for each of {len(point.probes)} probes")
    values = [math.nan if value is None else value for value in signal]
    if not all(type(value) in (int, float) and not math.isinf(value) for value in values):
        raise ValueError("signal holds numbers, and null where there is none")
    return depth, document, [float(value) for value in values]
