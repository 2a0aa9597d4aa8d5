"""Progress bars past pytest's capture: one stream to the terminal, opened before capture starts.

pytest captures standard error while tests run, so a bar written there is seen by nobody. Where standard error is a
terminal, a second descriptor of it shows bars as they move; anywhere else (a log, CI, a worker of xdist) bars stay in
the captured output, where a failing test shows them.
"""

from __future__ import annotations

import os
from typing import Any, TextIO, cast

_streams: list[TextIO | None] = []  # a stack: pytester runs a pytest inside a pytest


def open_stream(worker: bool) -> None:
    """Called at ``pytest_configure``, when capture is suspended; ``worker`` says that others share the terminal."""
    visible = not worker and os.isatty(2)
    _streams.append(
        open(os.dup(2), "w", encoding="utf-8", errors="replace") if visible else None  # noqa: SIM115  # close_stream
    )


def close_stream() -> None:
    """Called at ``pytest_unconfigure``."""
    stream = _streams.pop() if _streams else None
    if stream is not None:
        stream.close()


def stream() -> TextIO | None:
    """Where bars go, at the start of a line; None: wherever standard error leads."""
    current = _streams[-1] if _streams else None
    return None if current is None else cast(TextIO, _FreshLine(current))


class _FreshLine:
    """``stream``, on a new line from the first word on: pytest stands in the middle of one, behind a file's name.

    Bars of work that ends soon are never drawn, and leave no line behind.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._fresh = stream, False

    def write(self, text: str) -> int:
        if not self._fresh:
            self._stream.write("\n")
            self._fresh = True
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
