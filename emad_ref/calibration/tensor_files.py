"""Tensors in a file: safetensors, with JSON in the metadata.

A file is checked before use: any fault in it is one error, of the class that its reader names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import open_for_atomic_write, parse_json, read_bytes

METADATA_KEY = "emad"  # key of the metadata, whose values are texts
T = TypeVar("T")


def save_tensors(path: Path, what: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors; the file is complete or unchanged. ``what`` names it in messages. Raises BadFile."""
    with open_for_atomic_write(path, what) as file:
        file.write(safetensors.torch.save(dict(tensors), metadata={METADATA_KEY: json.dumps(about)}))


def build_from_tensor_file(
    path: Path | str,
    what: str,
    make: Callable[[dict[str, Tensor], dict[str, Any]], T],
    bad: type[EmadError],
    *,
    writer: str,
    remedy: str,
) -> T:
    """Read a file of ``save_tensors`` and build its content with ``make`` from (tensors, about).

    Args:
        make: may raise any error for tensors that are missing, unknown or impossible.
        writer: the command that writes such files; ``remedy``: an alternative, in the imperative.

    Raises:
        BadFile: it cannot be read.
        bad: it is no safetensors, or ``make`` fails.
    """
    data = read_bytes(path, what)
    try:
        return make(*_unpack_tensors(data))
    except BadArgument as error:  # parts that do not belong together
        raise bad(f"{what}={str(path)!r}: {error}; {remedy}") from error
    except Exception as error:  # a damaged file raises any error of safetensors, JSON or torch
        reason = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {str(error)[:200]}"
        raise bad(
            f"{what}={str(path)!r} cannot be read ({reason}), but expected one that `{writer}` wrote; {remedy}"
        ) from error


def _unpack_tensors(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    # eight bytes of length, then a JSON header
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about: dict[str, Any] = parse_json(header["__metadata__"][METADATA_KEY])
    return safetensors.torch.load(data), about
