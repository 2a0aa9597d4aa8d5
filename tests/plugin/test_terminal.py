"""Progress bars appear on a terminal despite pytest's capture, and nowhere else."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from tqdm import tqdm

from pytest_emad.run import terminal as terminal_module

SUITE = """
from tqdm import tqdm
from pytest_emad.run import terminal
def test():
    for _ in tqdm(range(3), desc="a long pass", file=terminal.progress_stream()):
        pass
    print("captured")
"""


def test_a_terminal_shows_bars_and_capture_keeps_the_rest(run_apart: object, project: pytest.Pytester) -> None:
    project.makepyfile(SUITE)
    terminal, theirs = os.openpty()
    plugins = [word for name in project.plugins for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugins, "-q"]
    done = subprocess.run(command, cwd=project.path, stdout=subprocess.PIPE, stderr=theirs, check=False, timeout=60)
    os.close(theirs)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert done.returncode == 0, done.stdout.decode()
    assert "a long pass: 100%" in shown
    assert "captured" not in shown + done.stdout.decode()


def test_work_that_ends_before_its_bar_is_drawn_leaves_no_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newline is written with the first text, not when the stream is opened."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(terminal_module, "_streams", [(terminal, True)])
    for _ in tqdm(range(3), desc="unseen", file=terminal_module.progress_stream(), delay=60):
        pass
    terminal.flush()
    assert terminal.buffer.getvalue() == b""  # type: ignore[attr-defined]
    for _ in tqdm(range(3), desc="seen", file=terminal_module.progress_stream()):
        pass
    terminal.flush()
    shown = terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert shown.startswith("\n")
    assert shown.count("\n") == 2, "one newline before the bar, one after it"
    assert "seen: 100%|██" in shown, "the stream declares UTF-8"


def test_where_standard_error_is_no_terminal_bars_stay_captured(run_apart: object, project: pytest.Pytester) -> None:
    project.makepyfile(SUITE)
    result = run_apart("-q")
    result.assert_outcomes(passed=1)
    assert "a long pass" not in result.stdout.str() + result.stderr.str()


def test_workers_of_xdist_share_a_terminal_and_so_leave_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    terminal_module.open_stderr_copy(worker=True)
    try:
        assert terminal_module.progress_stream() is None
    finally:
        terminal_module.close_stderr_copy()


def test_a_decided_claim_is_told_in_words_and_whole() -> None:
    claim = {"id": "EAD-H1", "verdict": "survived", "estimate": 0.0005, "interval": None, "unit": "saving"}
    claim |= {"model": "emad-nano + emad-tiny", "title": "The paper's token shares give the savings it states"}
    wide, narrow = (terminal_module.format_claims([claim], width) for width in (160, 50))
    told = "The paper's token shares give the savings it states: survived, 0.1 % saving (emad-nano + emad-tiny)"
    assert wide == f"  EAD-H1    {told}"
    assert " ".join(narrow.split()) == f"EAD-H1 {told}"
    assert max(map(len, narrow.split("\n"))) <= 50
