"""Tensors by name and plain JSON about them in one file: safetensors, the JSON in its metadata.

Whatever is wrong with what such a file holds is one error, of the class that its reader names. Knows nothing of what
the tensors are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import parsed_json, read_bytes, writing

KEY = "emad"  # of the metadata, whose values are texts
T = TypeVar("T")


def save_tensors(path: Path, what: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write; the file is complete or as it was. ``what`` it is, in messages. Raises BadFile."""
    with writing(path, what) as file:
        file.write(safetensors.torch.save(dict(tensors), metadata={KEY: json.dumps(about)}))


def load_tensors(
    path: Path | str,
    what: str,
    make: Callable[[dict[str, Tensor], dict[str, Any]], T],
    bad: type[EmadError],
    *,
    writer: str,
    remedy: str,
) -> T:
    """What ``make`` makes of (tensors, about) as ``save_tensors`` wrote them.

    Args:
        make: raises what it likes of tensors that are missing, unknown or impossible.
        writer: the command that writes such files; ``remedy``: what else to do, in an imperative.

    Raises:
        BadFile: it cannot be read.
        bad: it is no safetensors, or nothing that ``make`` can make something of.
    """
    data = read_bytes(path, what)
    try:
        return make(*_unpacked(data))
    except BadArgument as error:  # parts that do not belong together
        raise bad(f"{what}={str(path)!r}: {error}; {remedy}") from error
    except Exception as error:  # a damaged file raises whatever safetensors, JSON and torch raise
        raise bad(
            f"{what}={str(path)!r} cannot be read ({type(error).__name__}: {str(error)[:200]}), but expected one that "
            f"`{writer}` wrote; {remedy}"
        ) from error


def _unpacked(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    # eight bytes of length, then a JSON header
    header = parsed_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about: dict[str, Any] = parsed_json(header["__metadata__"][KEY])
    return safetensors.torch.load(data), about
