"""``python -m tests.pages.record [--slow] [PAGE …]``: run pages and write the printed outputs into them.

By default it runs the fast blocks of every page. ``--slow`` also runs the suites with recorded ends, README's first
command among them (without its installation), which takes minutes each. Read the diff: ``tests/test_docs.py`` compares
verdicts with the record, and a block that ends with another status than its page states stops the recording.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.pages import claims
from tests.pages.blocks import ROOT, Block, blocks, pages
from tests.pages.runner import checkout, lay_down, run, run_main_job, summary_of


def recorded(page: str, folder: Path, slow: bool) -> str:
    """Return ``page`` with its current outputs."""
    outputs: list[tuple[Block, str]] = []
    listed = blocks(page)
    for block, following in zip(listed, [*listed, None][1:], strict=True):
        if block.mark.startswith("file: "):
            lay_down(block, folder)
        main_job = block.mark == "main-job"
        if not (block.runs or main_job) or ((block.slow or main_job) and not slow):
            continue
        print(f"line {block.line}: {block.text.splitlines()[0]}", flush=True)
        status, printed = run_main_job(block, folder) if main_job else run(block, folder)
        if status != block.status:
            sys.exit(f"exit status {status}, but the page says {block.status}:\n{printed[-3000:]}")
        if following is not None and following.mark[:6] == "output":
            end = summary_of(printed) if following.mark[:7] == "output:" else printed.rstrip()
            outputs.append((following, end))
    for block, text in reversed(outputs):
        start, end = block.span
        parted = "" if page[end] == "\n" else "\n"  # an empty block has no line
        page = f"{page[:start]}{text}{parted}{page[end:]}"
    return page


def main(arguments: list[str]) -> None:
    reader = argparse.ArgumentParser(prog="python -m tests.pages.record", description=__doc__)
    reader.add_argument("--slow", action="store_true", help="suites too")
    reader.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="e.g. README.md; all by default")
    asked = reader.parse_args(arguments)
    for path in asked.pages or pages():
        print(path, flush=True)
        with tempfile.TemporaryDirectory(prefix="emad-page-") as folder:
            before = path.read_text(encoding="utf-8")
            now = recorded(claims.written(before), checkout(Path(folder)), asked.slow)
            path.write_text(now, encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
