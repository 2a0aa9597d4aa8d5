"""Measure a new machine in minutes, with its installed packages and without a network.

    python -m pytest_emad.hardware --out golden/hardware/NAME [--device cuda] [--minutes 8] [MODEL …]

For every model, in float32 and bfloat16:

    tolerances, bandwidth   exactness and speed of full depth here (``pytest_emad.measurements.hardware``)
    graphs                  captured steps against eager ones and ``generate``, if the device can capture
    decoders                invariants and fidelity suites: every decoder, every schedule, on this device
    cost                    time (EMAD-F2) and energy (EMAD-N1)

Each is one step. The command writes the result of a step to OUT/record.json before the next begins, so an interrupted
command loses one step. The command stops a step that takes too long, and records that. Suites run as separate pytest
runs; their reports are next to the record.

Exit status: 0 if every step finished or does not apply to this device, and no suite failed; else 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from emad_ref.console import run_cli_command
from emad_ref.errors import EmadError
from emad_ref.files import require_replaceable_file, write_atomically
from emad_ref.protocol import Unsupported
from pytest_emad.report.schema import BadReport, read_report
from pytest_emad.run import subprocesses

MODELS = ("emad-tiny", "random:pythia-410m")
DTYPES = ("float32", "bfloat16")
SHARES = {"decoders": 0.3, "cost": 0.5}  # share of the remaining time for a suite run of one model and dtype
STEPS = (
    "tolerances",
    "bandwidth",
    "graphs",
    *SHARES,
)  # cheap ones first, so that an interrupted command has most steps
LEAST = 20.0  # seconds: a shorter run would end before it has loaded its model
FACTS, NOT_APPLICABLE = "machine", "not applicable"
RECORD_START = rb'^\{\s*"machine": *\{'


@dataclass(frozen=True)
class MachineMeasurement:
    """Measurement ``what`` of ``model`` in ``dtype``; ``measure(seconds left)`` returns plain JSON values."""

    what: str
    model: str
    dtype: str
    measure: Callable[[float], dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.what} {self.model} {self.dtype}"


def build_argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_emad.hardware", description="Measure this machine.")
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS, help=f"(default: {', '.join(MODELS)})")
    parser.add_argument("--out", type=Path, required=True, help="folder of record.json and reports")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtypes", nargs="+", choices=(*DTYPES, "float16"), default=DTYPES)
    parser.add_argument("--suites", default="pytest_emad.suites", help="package or path of the suites")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all steps together (default: 8)")
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, help="steps to run, in order (default: all)"
    )
    return parser


def plan_machine_measurements(chosen: argparse.Namespace) -> Iterator[MachineMeasurement]:
    """The chosen steps, in the chosen order."""
    of = [(model, dtype) for model in chosen.models for dtype in chosen.dtypes]
    from pytest_emad.measurements.hardware import (
        compare_cached_steps,
        compare_captured_steps,
        measure_relative_weight_bandwidth,
    )

    measured = {
        "tolerances": compare_cached_steps,
        "bandwidth": measure_relative_weight_bandwidth,
        "graphs": compare_captured_steps,
    }
    for what in chosen.steps:
        for model, dtype in of:
            if what in SHARES:
                yield MachineMeasurement(what, model, dtype, partial(run_suite_to_summary, what, model, dtype, chosen))
            else:
                yield MachineMeasurement(
                    what, model, dtype, partial(_measure_untimed, measured[what], model, dtype, chosen.device)
                )


def _measure_untimed(
    measure: Callable[..., dict[str, Any]], model: str, dtype: str, device: str, left: float
) -> dict[str, Any]:
    """Run a step that takes seconds, without a time limit."""
    return measure(model, dtype, device)


def run_and_record_measurements(
    chosen: argparse.Namespace, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """Run all steps and write the record after each."""
    from pytest_emad.benchmark.machine import machine_facts, measure_copy_bandwidth

    ends = clock() + 60 * chosen.minutes
    record: dict[str, Any] = {
        FACTS: machine_facts(chosen.device) | {"copied, bytes/s": measure_copy_bandwidth(chosen.device)}
    }
    for step in plan_machine_measurements(chosen):
        began = clock()
        print(f"{step.name} …", flush=True)
        if ends - began < LEAST and step.what in SHARES:
            found: dict[str, Any] = {"status": "not begun", "reason": f"the {chosen.minutes:g} minutes are used up"}
        else:
            try:
                found = {"status": "done", **step.measure(ends - began)}
            except Unsupported as error:
                found = {"status": NOT_APPLICABLE, "reason": str(error)}
            except EmadError as error:
                found = {"status": "refused", "reason": str(error)}
        record[step.name] = found | {"seconds": round(clock() - began, 1)}
        write_atomically(chosen.out / "record.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return record


# ---------------------------------------------------------------- suites, as runs of their own


def build_suite_command(what: str, model: str, dtype: str, chosen: argparse.Namespace, folder: Path) -> list[str]:
    """The pytest command line of one suite run."""
    decoders = what == "decoders"
    where = subprocesses.build_suite_path_arguments(
        chosen.suites, ("invariants", "fidelity") if decoders else ("cost",)
    )
    options = {"model": model, "dtype": dtype, "device": chosen.device, "report": folder}
    only = {} if decoders else {"only": "EMAD-F2,EMAD-N1"}
    return subprocesses.build_pytest_arguments(["-q", "-p", "no:cacheprovider", *where], options | only)


def run_suite_to_summary(what: str, model: str, dtype: str, chosen: argparse.Namespace, left: float) -> dict[str, Any]:
    """Run one suite, stopped after its share of the time ``left``, and return outcomes and verdicts of its report."""
    folder = chosen.out / f"{what}-{model.replace(':', '-')}-{dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    seconds = max(LEAST, SHARES[what] * left)
    try:
        ended = subprocesses.run_pytest(
            build_suite_command(what, model, dtype, chosen, folder), folder / "log.txt", seconds
        )
    except subprocess.TimeoutExpired:
        return {"status": "ended", "reason": f"not done after {seconds:.0f} s", **_report_summary(folder)}
    return {"exit status": ended, **_report_summary(folder)}


def _report_summary(folder: Path) -> dict[str, Any]:
    """Outcomes of tests, and verdicts, of a run's report."""
    try:
        report = read_report(folder)
    except BadReport as error:
        return {"report": str(error)}
    outcomes: dict[str, int] = {}
    for test in report["tests"]:
        outcomes[test["outcome"]] = outcomes.get(test["outcome"], 0) + 1
    kept = ("id", "verdict", "estimate", "interval", "unit", "reason")
    shown = ("name", "outcome", "estimate", "interval")
    claims = [
        {name: claim[name] for name in kept}
        | {"legs": [{name: leg[name] for name in shown} for leg in claim["legs"] if leg["estimate"] is not None]}
        for claim in report["claims"]
    ]
    return {"tests": outcomes, "claims": claims}


def failed_steps(record: dict[str, Any]) -> list[str]:
    """Steps that failed, were refused, were stopped or did not begin."""
    return [
        name
        for name, found in record.items()
        if name != FACTS
        and (found["status"] not in ("done", NOT_APPLICABLE) or found.get("exit status", 0) != 0
             or found.get("largest difference", 0.0) > found.get("bound", 0.0))
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_argument_parser()
    chosen = parser.parse_args(argv)
    if chosen.minutes <= 0:
        parser.error(f"--minutes={chosen.minutes}, but expected a number above 0")
    if chosen.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device=cuda, but torch sees no CUDA device; use --device cpu")
    try:
        require_replaceable_file(chosen.out / "record.json", "--out", "a record of this command", RECORD_START)
    except EmadError as error:
        parser.error(str(error))
    record = run_and_record_measurements(chosen)
    for name, found in record.items():
        if name != FACTS:
            said = {key: value for key, value in found.items() if key != "claims"}
            print(f"{name}: {', '.join(f'{key} {value}' for key, value in said.items())}")
            for claim in found.get("claims", ()):
                print(f"  {claim['id']} {claim['verdict']}: {claim['reason']}")
                for leg in claim["legs"]:
                    print(f"    {leg['name']}: {leg['estimate']:.3g}, {leg['outcome']}")
    bad = failed_steps(record)
    print(f"{len(record) - 1 - len(bad)} of {len(record) - 1} steps succeeded; see {chosen.out / 'record.json'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(run_cli_command(main))
