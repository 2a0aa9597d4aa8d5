"""``emad sweep``: every family of rules on one model and corpus, by replay: the plugin's Pareto tables.

calibrate on one split → choose the front of each family on a second → show it on a third
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.cli.parsing import examples, executor_argument
from emad_ref.errors import BadArgument
from emad_ref.evidence.study import BUDGETS, Budget, Study
from emad_ref.files import require_writable, write_atomically
from emad_ref.models.required import require_documents

if TYPE_CHECKING:  # it brings torch, which bad arguments need not wait for
    from emad_ref.evidence.gathered import Evidence

FORMATS = (".csv", ".json")


def sweep(args: argparse.Namespace) -> None:
    """Print what every family does at the same net FLOPs, by replay: chosen on one split, judged on another."""
    from emad_ref.evidence.gathered import Evidence
    from emad_ref.evidence.host import Host
    from emad_ref.evidence.subject import open_model
    from emad_ref.report.tables import WIDE, plain_table
    from emad_ref.workers.address import workers_at

    if args.out is not None and args.out.suffix not in FORMATS:  # refused before the long passes, not after them
        raise BadArgument("out", str(args.out), f"a file name that ends in {' or '.join(FORMATS)}")
    if args.out is not None:
        require_writable(args.out, "out")
    study = Study(corpus=args.corpus, data=args.data, budget=budget_of(args))
    with open_model(args.model, study) as loaded, workers_at(args.executor) as crew:
        if not loaded.trained:
            raise BadArgument("model", loaded.name, "trained weights", "perplexity of noise says nothing")
        require_documents(loaded)
        evidence = Evidence(loaded, study, Host(crew=crew))
        evidence.check()
        found = swept(evidence)
    for title in dict.fromkeys(row["table"] for row in found["rows"]):
        print(title)
        width = shutil.get_terminal_size((WIDE, 24)).columns
        print(plain_table([_shown(row) for row in found["rows"] if row["table"] == title], width))
    for note in found["notes"]:
        print(note)
    tokens = found["tokens"]["evaluate"]
    print(f"full depth: perplexity {found['full depth perplexity']:.4g} on {tokens:,} tokens of {found['corpus']}")
    if args.out is not None:
        write_atomically(args.out, WRITERS[args.out.suffix](found), "out")
        print(f"written to {args.out}")


def budget_of(args: argparse.Namespace) -> Budget:
    """The budget named, its splits cut to ``--documents`` windows each where that is given.

    Raises:
        BadArgument: no window at all.
    """
    budget, count = BUDGETS[args.budget], args.documents
    if count is None:
        return budget
    if count < 1:
        raise BadArgument("documents", count, "at least one window of each split")
    return replace(budget, calibrate=count, validate=count, evaluate=count)


def swept(evidence: Evidence) -> dict[str, Any]:
    """The Pareto tables, their notes, and what they were made from. JSON values only; ``table`` names each row's."""
    from emad_ref import __version__

    shown, traces = evidence.rivals.exhibits(), evidence.traces
    splits = {"calibrate": traces.calibration, "validate": traces.validation, "evaluate": traces.evaluation}
    return {
        "model": evidence.name,
        "fingerprint": evidence.fingerprint,
        "corpus": evidence.corpus,
        "dtype": evidence.subject.dtype,
        "version": __version__,
        "window": evidence.subject.window,
        "tokens": {split: len(trace) for split, trace in splits.items()},
        "full depth perplexity": evidence.points.full_loss.perplexity,
        "rows": [{"table": table.title, **row} for table in shown.tables for row in table.rows],
        "notes": list(shown.notes),
    }


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {column: value for column, value in row.items() if column != "table"}


def as_json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def as_csv(found: Mapping[str, Any]) -> str:
    """The rows alone; shares are fractions, as everywhere in data."""
    file = io.StringIO()
    rows = found["rows"]
    columns = dict.fromkeys(column for row in rows for column in row)  # tables may differ in what they have no use for
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


WRITERS = {".csv": as_csv, ".json": as_json}


def sweep_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="bundled name, folder or hub name of a decoder-only model")
    sub.add_argument("--corpus", metavar="CORPUS", help="as emad world takes it; chosen by model by default")
    sub.add_argument("--data", type=Path, metavar="DIR", help="folder with data sets, read before the hub")
    sub.add_argument("--budget", choices=tuple(BUDGETS), default="smoke", help="how much text; smoke by default")
    sub.add_argument(
        "--documents", type=int, metavar="N", help="windows to read of each split; the budget's by default"
    )
    sub.add_argument("--out", type=Path, metavar="FILE", help="FILE.json or FILE.csv")
    executor_argument(sub)
    examples(
        sub,
        "emad sweep emad-tiny --documents 40",
        "emad sweep ./llama --corpus wikitext --data ./data --budget standard --out sweep.csv",
        "emad sweep ./llama --corpus wikitext --data ./data --executor processes:4x2",
    )
