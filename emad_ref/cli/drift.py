"""``emad drift``: has the text moved so far that the guarantee of an exit no longer speaks?

    emad drift exit.safetensors mine.txt            # text, decoded at the exit's point as calibration text was
    emad drift exit.safetensors --record a.jsonl    # or what was decoded elsewhere, as emad generate writes it

The status is 0 where nothing is seen to have moved and a shift of one standard deviation would have been seen, 1 where
the text has moved, 2 where that cannot be said: too little text, or an exit without a guarantee.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from emad_ref.cli.arguments import add_examples
from emad_ref.console import print_error
from emad_ref.errors import BadArgument, EmadError
from emad_ref.text.documents import DEFAULT_DOCUMENTS, SPLITS

if TYPE_CHECKING:  # they bring torch or scipy, which bad arguments need not wait for
    from emad_ref.calibration.trace import TokenSequence
    from emad_ref.models.loading import LoadedModel
    from emad_ref.screening.drift import DocumentFeatures, DriftResult
    from emad_ref.screening.exit import Exit

STATUS = {"speaks": 0, "moved": 1, "too little text": 2}
UNDECIDED_STATUS = 2
WIDTH, MAX_SHIFTS = 80, 5  # columns; signs shown


def drift(args: argparse.Namespace) -> int:
    """Say whether text has moved so far that an exit's guarantee no longer speaks: exit status 1 where it has."""
    from emad_ref.screening.drift import detect_drift
    from emad_ref.screening.exit import load_exit

    try:
        if bool(args.texts) == bool(args.record):
            raise BadArgument("TEXT", args.texts, "a text to read, or --record FILE, and not both")
        found = load_exit(args.exit)
        reference = calibration_signs(found, args.exit)
        fresh = recorded_signs(args, found) if args.record else read_signs_of_text(args, found)
        verdict = detect_drift(reference, fresh, seed=args.seed)
    except EmadError as error:
        print_error(error)
        return UNDECIDED_STATUS
    assert found.guarantee is not None, "promised() has asked"
    print("\n".join([*drift_lines(verdict), "", *textwrap.wrap(f"Promised was: {found.guarantee.statement}", WIDTH)]))
    return STATUS[verdict.state]


def calibration_signs(found: Exit, path: Path) -> DocumentFeatures:
    """What the calibration documents of an exit's guarantee looked like.

    Raises:
        BadArgument: nothing is promised, or they were not kept.
    """
    if found.guarantee is None or found.guarantee.chosen is None:
        why = found.why_none or (found.guarantee.statement if found.guarantee else "its point was not certified")
        raise BadArgument("exit", str(path), "one with a guarantee, which could cease to speak", why)
    if found.signs is None:
        raise BadArgument("exit", str(path), "one that keeps signs of its calibration text", "screen the model again")
    return found.signs


def recorded_signs(args: argparse.Namespace, found: Exit) -> DocumentFeatures:
    from emad_ref.screening.record_files import signs_of_files

    return signs_of_files(args.record, found.point, ", ".join(path.name for path in args.record))


def read_signs_of_text(args: argparse.Namespace, found: Exit) -> DocumentFeatures:
    """Texts, at the exit's point, by the model that it was screened on or a copy of it."""
    from emad_ref.models.loading import load
    from emad_ref.screening.drift import read_features

    loaded = load(args.model or str(found.fitted.plan.get("model")))
    found.attach(loaded)
    windows = text_windows(args, loaded)
    name = ", ".join(args.texts)
    return read_features(loaded.stepper, found.point, windows, name, progress=f"{loaded.name}: {name}")


def text_windows(args: argparse.Namespace, loaded: LoadedModel) -> list[TokenSequence]:
    """At most ``--documents`` windows of each text, documents of different texts apart."""
    from emad_ref.tuning import windows_of

    windows: list[TokenSequence] = []
    for text in args.texts:
        first = 1 + max((window.document for window in windows), default=-1)
        part = windows_of(loaded, text, args.split, data=args.data, limit=args.documents, per_document=1)
        windows += [replace(window, document=first + window.document) for window in part]
    return windows


def drift_lines(verdict: DriftResult) -> list[str]:
    """The statement, and the signs that say most, one a line."""
    lines = [*textwrap.wrap(verdict.statement, WIDTH), ""]
    width = max(len(shift.name) for shift in verdict.shifts) if verdict.shifts else 0
    for shift in verdict.shifts[:MAX_SHIFTS]:
        gap = f"{shift.deviations:+.2f} deviations, p = {shift.p:.2g}"
        lines.append(f"{shift.name:{width}}  {shift.before:8.4f} → {shift.now:8.4f}  {gap}")
    return lines


def drift_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("exit", type=Path, metavar="EXIT", help="what emad screen wrote")
    sub.add_argument("texts", nargs="*", metavar="TEXT", help="corpora, files or folders, as emad world takes them")
    sub.add_argument("--record", type=Path, action="append", metavar="FILE",
                     help="in place of text: JSON lines of emad generate, each file one text; again: more")  # fmt: skip
    sub.add_argument("--model", metavar="MODEL", help="where the model lies now; as screened by default")
    sub.add_argument("--data", type=Path, metavar="DIR", help="folder with data sets, read before the hub")
    sub.add_argument("--split", choices=SPLITS[1:], default="evaluate", help="of each TEXT; evaluate by default")
    sub.add_argument("--documents", type=int, default=DEFAULT_DOCUMENTS, metavar="N",
                     help=f"to read of each TEXT; {DEFAULT_DOCUMENTS} by default")  # fmt: skip
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of permutations; 0 by default")
    add_examples(
        sub,
        "emad drift exit.safetensors world:mixed --documents 50",
        "emad drift exit.safetensors mine.txt yours.txt --split validate --model ./llama --data ./data --seed 1",
        "emad drift exit.safetensors --record a.jsonl --record b.jsonl",
    )
