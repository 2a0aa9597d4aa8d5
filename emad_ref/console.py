"""Safe text for a terminal of any encoding, and the exit status of a command.

``set_stream_ascii_fallback`` lets a stream take every character: a code page without ``×`` or ``→`` gets ``x`` or
``->`` instead of a UnicodeEncodeError. ``UnsafeTextEscapingStream`` escapes characters that move the cursor, or hide or
reorder text. ``run_cli_command`` runs the body of a command and turns its errors, a closed pipe and Ctrl-C into a line
and an exit status.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from typing import Any, TextIO

from emad_ref.errors import EmadError, escape_and_shorten, escape_unsafe

USAGE_ERROR = 4  # what was asked for could not be done; pytest's own status for it
INTERRUPTED = 128 + signal.SIGINT  # a shell's status of a command ended by SIGINT
ENCODING_ERRORS = "emad.ascii"

_COLOUR = re.compile(r"\x1b\[[0-9;]{0,16}m")

_ASCII = str.maketrans(
    {
        "×": "x", "→": "->", "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "·": ".", "≥": ">=", "≤": "<=",
        "±": "+-", "′": "'", "“": '"', "”": '"', "√": "sqrt", "∞": "inf", "≈": "~", "≠": "!=", "°": " deg",
        "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#", "█": "#",
        "ℓ": "l", "‖": "||", "↵": "\\n", "⁄": "/", "Σ": "sum",
    }
)  # fmt: skip


def to_ascii(text: str) -> str:
    """``text`` in ASCII: signs by name or similar sign, other characters as escapes.

    >>> to_ascii("τ ≤ 0.5 × ½")
    'tau <= 0.5 x 1/2'
    """
    return "".join(map(_ascii_of, text))


def _ascii_of(character: str) -> str:
    if "GREEK SMALL LETTER " in (name := unicodedata.name(character, "")):
        return name.removeprefix("GREEK SMALL LETTER ").lower().replace("lamda", "lambda")
    replaced = unicodedata.normalize("NFKD", character.translate(_ASCII)).translate(_ASCII)
    base = "".join(each for each in replaced if not unicodedata.combining(each))
    return base if base and base.isascii() else character.encode("ascii", "backslashreplace").decode()


def _encode_error(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return to_ascii(error.object[error.start : error.end]), error.end


codecs.register_error(ENCODING_ERRORS, _encode_error)


def set_stream_ascii_fallback(stream: Any) -> None:
    """Make ``stream`` accept characters that its encoding lacks; a stream without this setting stays unchanged."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors=ENCODING_ERRORS)


class UnsafeTextEscapingStream:
    """Stream that writes unsafe characters to ``stream`` as escapes. Colours (SGR sequences) pass."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        parts = _COLOUR.split(text)
        colours = [*_COLOUR.findall(text), ""]
        self._stream.write("".join(escape_unsafe(part) + colour for part, colour in zip(parts, colours, strict=True)))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def format_facts_html(title: str, facts: Mapping[str, object]) -> str:
    """HTML of a heading and a table of two columns, for notebooks. Names and values are escaped."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<b>{escape(title)}</b><table>{rows}</table>"


class NotebookReprMixin:
    """Short forms of a value: ``repr`` and a notebook's table.

    Every subclass has its own ``_notebook_title`` and ``_notebook_facts``; those of this class raise.
    """

    @property
    def _notebook_title(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} has no title")

    @property
    def _notebook_facts(self) -> dict[str, str]:
        raise NotImplementedError(f"{type(self).__name__} has no facts")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._notebook_title}: {', '.join(self._notebook_facts.values())})"

    def _repr_html_(self) -> str:
        return format_facts_html(self._notebook_title, self._notebook_facts)


def print_error(message: object) -> None:
    """Write one line about an error to standard error, prefixed with the command's name."""
    with suppress(OSError):  # standard error may be a closed pipe, too; then only the exit status shows it
        print(f"emad: {escape_and_shorten(message)}", file=sys.stderr, flush=True)


def run_cli_command(body: Callable[[], int | None]) -> int:
    """Run the body of a command.

    Returns:
        Its exit status, 0 for None; ``USAGE_ERROR`` after an ``EmadError``, 1 after an error of the output, of which it
        prints a line, and after a closed pipe; 130 after Ctrl-C.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        given = sys.stdout, sys.stderr  # None if the descriptor is closed
        sys.stdout, sys.stderr = (nowhere if stream is None else stream for stream in given)
        try:
            return _run_printing(body)
        finally:
            sys.stdout, sys.stderr = given


def _run_printing(body: Callable[[], int | None]) -> int:
    """``run_cli_command`` on two streams that are open."""
    for stream in (sys.stdout, sys.stderr):
        set_stream_ascii_fallback(stream)
    before = sys.stdout
    sys.stdout = UnsafeTextEscapingStream(before)  # has the methods of print, the rest by delegation
    try:
        try:
            return body() or 0
        finally:
            before.flush()
    except EmadError as error:
        print_error(error)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe
        _drop_output(before)
        return 1
    except OSError as error:  # of a stream if no file is named, since file errors are EmadErrors
        if error.strerror is None or error.filename is not None or isinstance(error, ConnectionError):
            print_error(f"{type(error).__name__}: {error}")
        else:
            _drop_output(before)
            print_error(f"output: {error.strerror}")
        return 1
    finally:
        sys.stdout = before


def _drop_output(stream: TextIO) -> None:
    """Discard the buffer, so that the interpreter does not write it at its end."""
    with suppress(io.UnsupportedOperation):  # a stream without a descriptor, as notebooks have
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
