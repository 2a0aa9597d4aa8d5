"""An exit in a file: a tuned lens' safetensors, and what else screening found as JSON in its metadata.

    4.bias [D]   4.full [D, D]   4.gate [E + 1]   as in a lens' file (``calibration.lens_file``)

``emad screen`` writes it; ``emad generate --exit``, the suites and ``load_exit`` take it. What a file holds is judged
before anything is made of it: whatever is wrong with it is one BadExit. That it belongs to the model at hand is asked
where it is attached (``Exit.attach``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from emad_ref.calibration.lens_file import fitted_of, packed, parts_of, unpacked
from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import read_bytes, writing
from emad_ref.screening.exit import Exit
from emad_ref.wire import points

SCHEMA = 1


class BadExit(EmadError):
    """A file that is not an exit as ``save_exit`` wrote it."""


def save_exit(path: Path, found: Exit) -> None:
    """Write; the file is complete or as it was. Raises BadFile."""
    tensors, lens = parts_of(found.fitted)
    about = {
        "exit": SCHEMA,
        "lens": lens,
        "lossy": None if found.lossy is None else points.to_json(found.lossy),
        "why_none": found.why_none,
        "screened": dict(found.screened),
    }
    with writing(path, "exit") as file:
        file.write(packed(tensors, about))


def load_exit(path: Path | str) -> Exit:
    """What ``save_exit`` wrote.

    Raises:
        BadFile: it cannot be read.
        BadExit: it is no safetensors, no exit, of another schema, or holds impossible values.
    """
    data = read_bytes(path, "exit")
    try:
        return _exit(*unpacked(data))
    except BadArgument as error:  # parts that do not belong together
        raise BadExit(f"exit={str(path)!r}: {error}; screen the model again") from error
    except Exception as error:  # a damaged file raises whatever safetensors, JSON and torch raise
        raise BadExit(
            f"exit={str(path)!r} cannot be read ({type(error).__name__}: {str(error)[:200]}), but expected one that "
            "`emad screen` wrote; screen the model again"
        ) from error


def _exit(tensors: dict[str, Tensor], about: Mapping[str, Any]) -> Exit:
    if about.get("exit") != SCHEMA:
        raise ValueError(f"its schema is {about.get('exit')!r}, not {SCHEMA}")
    if not isinstance(about["why_none"], str) or not isinstance(about["screened"], dict):
        raise ValueError("its metadata holds values of other types")
    lossy = about["lossy"]
    return Exit(
        fitted_of(tensors, about["lens"]),
        None if lossy is None else points.from_json(lossy),
        about["why_none"],
        about["screened"],
    )
