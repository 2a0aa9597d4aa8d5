"""``emad screen``: what would work on a model, and a file to decode with."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.cli.parsing import examples
from emad_ref.errors import BadArgument
from emad_ref.files import require_writable
from emad_ref.screening.settings import DOCUMENTS
from emad_ref.text.documents import CORPUS

if TYPE_CHECKING:  # it brings torch, which bad arguments need not wait for
    from collections.abc import Mapping, Sequence


SINGLE_THREADED = 50_000_000  # parameters: below, waking a second thread takes longer than it helps


def screen(args: argparse.Namespace) -> None:
    """Find out what would work on a model: how much any exit could save, what ours do, and what to decode with."""
    import torch

    from emad_ref.models.loading import load
    from emad_ref.report.tables import WIDE, plain_table
    from emad_ref.screening.exit_file import save_exit
    from emad_ref.screening.screen import screen as screened
    from emad_ref.screening.settings import Settings

    require_writable(args.out, "out")  # bad input is refused before the long passes, not after them
    settings = Settings(args.corpus, args.data, args.documents, args.rise, args.seed)
    loaded = load(args.model)
    if args.threads is not None:
        if args.threads < 1:
            raise BadArgument("threads", args.threads, "a whole number ≥ 1")
        torch.set_num_threads(args.threads)
    elif loaded.geometry.parameters() < SINGLE_THREADED and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    found = screened(loaded, settings, progress=True)
    save_exit(args.out, found)
    width = shutil.get_terminal_size((WIDE, 24)).columns
    for title, rows in tables(found.screened):
        print(title)
        print(plain_table(rows, width))
        print()
    for line in closing(found.screened):
        print(textwrap.fill(line, width, subsequent_indent="  "))
    print(f"written to {args.out}")


def tables(found: Mapping[str, Any]) -> list[tuple[str, Sequence[Mapping[str, str]]]]:
    """Titles and rows of a screening's record."""
    from emad_ref.report.tables import ABSENT

    def share(value: float | None) -> str:
        return ABSENT if value is None else f"{value:.1%}"

    def interval(value: list[float | None] | None, spelt: str) -> str:
        if value is None:
            return ABSENT
        number, low, high = (ABSENT if each is None else f"{each:{spelt}}" for each in value)
        return f"{number} [{low}, {high}]"

    levels = sorted({row["level"] for row in found["slack"]})
    kinds = list(dict.fromkeys((row["oracle"], row["readout"], row["depth"]) for row in found["slack"]))
    at = {(row["oracle"], row["readout"], row["depth"], row["level"]): row for row in found["slack"]}
    slack = [
        {"oracle": kind[0], "readout": kind[1], "depth": kind[2]}
        | {f"{level:.1%}: blocks": share(at[*kind, level]["blocks"]) for level in levels}
        | {f"{level:.1%}: net": share(at[*kind, level]["net"]) for level in levels}
        for kind in kinds
    ]
    reached = [
        {
            "rise ≤": share(row["level"]),
            "family": row["family"],
            "readout": row["readout"],
            "depth": row["depth"],
            "how": row["how"],
            "point": row["point"] or "none",
            "after": " ".join(map(str, row["probes"] or [])) or ABSENT,
            "blocks": share(row["blocks"][0] if row["blocks"] else None),
            "net [95 %]": interval(row["net"], ".1%"),
            "rise [95 %]": interval(row["rise"], "+.2%"),
        }
        for row in sorted([*found["reached"], *found["decoded"]], key=lambda row: row["level"])
    ]
    timed = [
        {"point": row["name"], "ms a token": f"{1000 * row['seconds']:.3g}", "as fast": f"{row['fast']:.2f}×"}
        for row in found["time"]
    ]
    after = [
        {
            "after a prompt of": f"{row['prompt']} tokens",
            "texts": str(row["texts"]),
            "drafts that agree": share(row["agreement"]),
            "tokens a round": f"{row['tokens']:.2f}",
            "ms a token": f"{1000 * row['seconds']:.3g}",
            "as fast": f"{row['fast']:.2f}×",
        }
        for row in found["drafts"]["after"]
    ]
    shown = [
        ("slack: the most that a rule could save which knew how far every readout is from the end", slack),
        ("what families reach net of everything: chosen on validation text, shown on evaluation text", reached),
        (f"time on this machine, predicted, batch 1, threads {found['threads']}", timed),
    ]
    drafts = ("drafting for itself on this machine, predicted, by the length of its prompt", after)
    return [*shown, *([drafts] if after else [])]


def closing(found: Mapping[str, Any]) -> list[str]:
    """What the tables stand on, and what to do."""
    documents, tokens = found["documents"], found["tokens"]
    alike = {name: count for name, count in found.get("near_duplicates", {}).items() if count}
    seconds = ", ".join(f"{name} {spent:.0f} s" for name, spent in found["seconds"].items())
    return [
        f"{found['model']} on {found['corpus']}: perplexity {found['perplexity']:.4g} at full depth on "
        f"{tokens['evaluate']:,} tokens of {documents['evaluate']} documents; replayed rows have exact K and V, and of "
        "free depth are charged for copies",
        *([f"near-duplicates left out, each for a document that was read: {_counts(alike)}"] if alike else []),
        f"lens of {'full rank' if found['lens']['rank'] is None else 'rank ' + str(found['lens']['rank'])}, "
        f"{found['lens']['steps']} steps; {seconds}",
        *([found["time_note"]] if found["time_note"] else []),
        found["recommendation"],
        found["drafts"]["sentence"],
        "times, and with them whether and how it should draft for itself, belong to this machine; all else is the same "
        f"wherever it is screened with seed {found['seed']}",
    ]


def _counts(found: Mapping[str, int]) -> str:
    """``12 to choose on, 9 to judge on``; choosing and certifying share a split."""
    words = {"calibrate": "to calibrate on", "choose": "to choose and certify on", "evaluate": "to judge on"}
    return ", ".join(f"{found[name]:,} {said}" for name, said in words.items() if name in found)


def screen_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="bundled name, folder or hub name")
    sub.add_argument("out", type=Path, metavar="OUT", help="a .safetensors file to write, for emad generate --exit")
    sub.add_argument("--corpus", default=CORPUS, metavar="CORPUS", help=f"text to screen on; {CORPUS} by default")
    sub.add_argument("--data", type=Path, metavar="DIR", help="folder with data sets, read before the hub")
    sub.add_argument("--documents", type=int, default=DOCUMENTS, metavar="N",
                     help=f"to choose on, to certify on and to judge on, each; {DOCUMENTS} by default; how long so "
                     "many take is predicted before they are read through")  # fmt: skip
    sub.add_argument("--rise", type=float, default=0.01, metavar="SHARE",
                     help="of perplexity that may be lost at most; 0.01 by default")  # fmt: skip
    sub.add_argument("--threads", type=int, metavar="N", help="of torch; default: one for small models")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of what is held out and resampled; 0 by default")
    examples(
        sub,
        "emad screen emad-tiny-plain exit.safetensors",
        "emad screen emad-tiny-plain exit.safetensors --corpus world:mixed --documents 400",
        "emad screen ./llama exit.safetensors --corpus wikitext --data ./data --rise 0.02 --threads 2 --seed 1",
    )
