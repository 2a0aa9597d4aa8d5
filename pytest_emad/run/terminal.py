"""Terminal output of a run: header, a line per decided claim, progress bars, threads that keep the process alive.

pytest captures standard error while tests run. If standard error is a terminal, a second descriptor, opened before
capture starts, shows progress bars live. Elsewhere bars stay in the captured output.
"""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

import pytest

from emad_ref.console import print_error
from emad_ref.errors import escape_unsafe
from pytest_emad.report.provenance import describe_untested_versions
from pytest_emad.run.options import RunSettings
from pytest_emad.run.recorder import EmadWarning
from pytest_emad.statistics.gate import UNDECIDED

MAX_WAIVER_LENGTH = 300  # most characters of a waiver in the header; report.json has the whole
COLOURS: dict[str, dict[str, bool]] = {"good": {"green": True}, "bad": {"red": True}, "open": {"yellow": True}}
TONES = (("falsified", "bad"), ("inconclusive", "open"), ("survived", "good"))  # the worst first


def format_header(settings: RunSettings, decoder: str) -> list[str]:
    """Header lines: ``emad: model …; corpus …; device …; dtype …; budget …; gate …`` and other non-default options.

    Then a line for the decoder under test, one for libraries newer than the tested ones, and a line per waiver.
    """
    parts = [
        f"model{'s' if len(settings.models) > 1 else ''} {', '.join(settings.models)}",
        f"corpus {settings.study.corpus or 'by model'}",
        f"device {settings.study.device}",
        f"dtype {settings.study.dtype}",
        f"budget {settings.budget.name}",
        f"gate {settings.gating.gate}",
    ]
    if settings.study.seed:
        parts.append(f"seed {settings.study.seed}")
    if settings.backend:
        parts.append(f"backend {settings.backend}")
    if settings.decoder:
        parts.append(f"decoder {settings.decoder}")
    if settings.tier:
        parts.append(f"tier {settings.tier}")
    if settings.gating.require:
        parts.append(f"require {', '.join(sorted(settings.gating.require))}")
    if settings.update_golden:
        parts.append(f"UPDATING goldens in {settings.golden}")
    waived = [f"emad: waived {of}: {escape_unsafe(reason, MAX_WAIVER_LENGTH)}" for of, reason in settings.waive]
    untested = [f"emad: newer than tested: {newer}"] if (newer := describe_untested_versions()) else []
    lines = (f"emad: {'; '.join(parts)}", f"emad: decoder: {decoder}", *untested, *waived)
    return [escape_unsafe(line) for line in lines]


def drop_own_warnings(terminal: pytest.TerminalReporter) -> None:
    """Drop warnings that the summary repeats in its own line; ``-v`` keeps them with their places."""
    warnings = terminal.stats.pop("warnings", [])
    others = [warning for warning in warnings if f"{EmadWarning.__name__}: " not in warning.message]
    if others:
        terminal.stats["warnings"] = others


def format_claims(claims: Sequence[Mapping[str, Any]], width: int) -> str:
    """Lines of ``width`` characters for the claims that a test decided: id, claim, verdict, estimate; "" if none.

    Claims without a verdict (``not applicable``, ``unmeasured``) get no line.
    """
    from pytest_emad.statistics.number_format import format_quantity

    lines = []
    for claim in claims:
        if claim["verdict"] not in UNDECIDED:
            found = format_quantity(claim["estimate"], claim["unit"], claim["interval"])
            pair = f" ({claim['model']})" if " + " in claim["model"] else ""
            text = escape_unsafe(f"  {claim['id']:8}  {claim['title']}: {claim['verdict']}, {found}{pair}")
            lines += textwrap.wrap(text, max(width, 40), subsequent_indent=" " * 12, break_on_hyphens=False)
    return "\n".join(lines)


def worst_verdict_markup(claims: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """The colour of the worst verdict among ``claims``."""
    found = {claim["verdict"] for claim in claims}
    return next((COLOURS[tone] for verdict, tone in TONES if verdict in found), {})


_streams: list[tuple[TextIO, bool]] = []  # a stack: pytester runs a pytest inside a pytest


def open_stderr_copy(worker: bool) -> None:
    """Open a copy of standard error at ``pytest_configure``, while capture is suspended; hidden in xdist workers."""
    stream = open(os.dup(2), "w", encoding="utf-8", errors="replace")  # noqa: SIM115  # close_stderr_copy
    _streams.append((stream, not worker and os.isatty(2)))


def close_stderr_copy() -> None:
    """Close the copy of standard error at ``pytest_unconfigure``."""
    if _streams:
        _streams.pop()[0].close()


def uncaptured_stderr() -> TextIO | None:
    """Standard error as it was before capture started; None outside of a run."""
    return _streams[-1][0] if _streams else None


def progress_stream() -> TextIO | None:
    """Stream for progress bars, at the start of a line; None: standard error as it is."""
    stream, visible = _streams[-1] if _streams else (None, False)
    return cast(TextIO, _NewLineStream(stream)) if stream is not None and visible else None


class _NewLineStream:
    """``stream`` with a line break before its first text, because pytest has just printed a file's name.

    A bar that is never drawn leaves no empty line.
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


# ---------------------------------------------------------------- after the run

THREAD_WAIT_S = 3.0  # threads of pools end with the main thread


def report_remaining_threads() -> None:
    """Print the threads that keep the process alive after the run, without stopping them.

    Python waits for every non-daemon thread, so a decoder that leaves one keeps a finished run from ending.
    """
    if _remaining_threads():
        threading.Thread(target=_name_after_main, name="emad: remaining threads", daemon=True).start()


def _name_after_main() -> None:
    threading.main_thread().join()
    time.sleep(THREAD_WAIT_S)
    for thread in _remaining_threads():
        remedy = "end it in the decoder's close(), or make it a daemon thread"
        print_error(f"the run is over, but thread {thread.name!r} keeps its process alive{_place(thread)}; {remedy}")


def _remaining_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]


def _place(thread: threading.Thread) -> str:
    """Text with the current line of the function of ``thread``; "" once it has ended."""
    frame, place = sys._current_frames().get(thread.ident or 0), ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            place = f", at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return place
