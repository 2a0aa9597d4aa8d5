"""``emad sweep``: every family of rules on one model and corpus, by replay, on one table.

calibrate on one split → choose the best point of each family on a second → show it on a third
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.cli.texts import CORPUS, DOCUMENTS, stepper_of, window_of, windows_of
from emad_ref.errors import BadArgument

if TYPE_CHECKING:
    from emad_ref.calibration.trace import Trace
    from emad_ref.models.loading import Loaded
    from emad_ref.models.stepper import Stepper

SETTINGS = 33  # of each family's dial, as the suites sweep them
FORMATS = (".csv", ".json")


def sweep(args: argparse.Namespace) -> None:
    """Print the best point of every family at each net reduction, by replay, and what it costs on other text."""
    from emad_ref.models.loading import load
    from emad_ref.report.tables import plain_table

    if args.out is not None and args.out.suffix not in FORMATS:  # refused before the long passes, not after them
        raise BadArgument("out", str(args.out), f"a file name that ends in {' or '.join(FORMATS)}")
    loaded = load(args.model)
    if not loaded.trained:
        raise BadArgument("model", loaded.name, "trained weights", "perplexity of noise says nothing")
    stepper = stepper_of(loaded)
    found = swept(loaded, stepper, traces(args, loaded, stepper), args.corpus)
    rows, full = found["rows"], found["full depth perplexity"]
    print(plain_table(rows) or "no point of any family saves 15 % of FLOPs net")
    print(f"full depth: perplexity {full:.4g} on {found['tokens']['evaluate']:,} tokens of {args.corpus}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(WRITERS[args.out.suffix](found), encoding="utf-8")
        print(f"written to {args.out}")


def traces(args: argparse.Namespace, loaded: Loaded, stepper: Stepper) -> dict[str, Trace]:
    """Split → its trace: three passes of the model."""
    from emad_ref.calibration.trace import take_trace

    return {
        split: take_trace(
            stepper,
            windows_of(loaded, stepper, args.corpus, split, data=args.data, limit=args.documents),
            progress=f"{args.model}: {split}, {args.corpus}",
        )
        for split in ("calibrate", "validate", "evaluate")
    }


def swept(loaded: Loaded, stepper: Stepper, traces: Mapping[str, Trace], corpus: str) -> dict[str, Any]:
    """The table as ``families.pareto_rows`` gives it, and what it was made from. JSON values only."""
    from emad_ref import __version__
    from emad_ref.calibration.profile import profile_of
    from emad_ref.point import OperatingPoint, full_depth
    from emad_ref.policy.thresholds import default_probes
    from emad_ref.sweep.families import families, pareto_rows
    from emad_ref.sweep.losses import Loss, loss_table

    made_from: dict[str, Any] = {
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "corpus": corpus,
        "dtype": str(stepper.dtype).removeprefix("torch."),
    }
    profile = profile_of(traces["calibrate"], default_probes(stepper.layers), **made_from)

    def losses(split: str, points: Sequence[OperatingPoint]) -> list[Loss]:
        return loss_table(traces[split], stepper.geometry, points)

    sweeps = families(profile, traces["calibrate"], SETTINGS)
    validated = {name: losses("validate", points) for name, points in sweeps.items()}
    return {
        **made_from,
        "version": __version__,
        "window": window_of(stepper),
        "tokens": {split: len(trace) for split, trace in traces.items()},
        "full depth perplexity": losses("evaluate", [full_depth(stepper.layers)])[0].perplexity,
        "rows": pareto_rows(validated, lambda point: losses("evaluate", [point])[0]),
    }


def as_json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def as_csv(found: Mapping[str, Any]) -> str:
    """The rows alone; shares are fractions, as everywhere in data."""
    file = io.StringIO()
    rows = found["rows"]
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


WRITERS = {".csv": as_csv, ".json": as_json}


def sweep_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model")
    sub.add_argument("--corpus", default=CORPUS, help=f"{CORPUS} by default")
    sub.add_argument("--data", type=Path)
    sub.add_argument(
        "--documents", type=int, default=DOCUMENTS, help=f"windows to read of each split; {DOCUMENTS} by default"
    )
    sub.add_argument("--out", type=Path, metavar="FILE", help="FILE.json or FILE.csv")
