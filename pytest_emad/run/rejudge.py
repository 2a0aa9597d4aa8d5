"""Compare the verdicts of every bundled model and of the pair with the record, or record them.

    python -m pytest_emad.run.rejudge --out DIR            # exit status 0: every verdict is as recorded
    python -m pytest_emad.run.rejudge --out DIR --update   # writes golden/; read the diff before you commit it
    python -m pytest_emad.run.rejudge --out DIR smollm2-135m --data DATA

Start it in the root of a checkout. It runs pytest once per seed for each decoder-only model on both corpora of the
world, for each encoder-decoder, and for the pair. A downloaded model, which must be named, is judged on GSM8K and
WikiText-2 from the folder ``--data``. ``--seeds 1`` runs one seed; several commands may run at once. Claims about time
and energy are omitted, because they have no record. An update changes the existing record: if weights or rules have
changed, move golden/verdicts.json away first.

    DIR/<run>.log   output of the run     DIR/<run>.xml   its tests, as JUnit

Exit status: 0 every verdict is as recorded, 1 a verdict differs or a test failed, 4 a run was not possible.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from emad_ref.console import run_cli_command
from emad_ref.files import BadFile, read_json, require_replaceable_file, require_writable
from emad_ref.models.downloads import DOWNLOADS
from pytest_emad.report.suite_parts import DECIDED_STATUSES
from pytest_emad.run import subprocesses

SEEDS = (0, 1, 2)  # number of seeds that must agree
CORPORA = ("world:premise", "world:mixed")
NATURAL_CORPORA = ("gsm8k", "wikitext")  # corpora of downloaded models
JUDGED_FOLDERS = ("claims", "invariants", "cost", "fidelity")  # folders of the suites; ablations record no verdict
PAIR_SUITES = ("claims/test_pair.py", "invariants/test_speculative.py", "fidelity/test_golden_pair.py")
PAIR = "pair"
JUNIT_START = rb"<testsuite"


@dataclass(frozen=True)
class RejudgeRun:
    """``model``: a name, or ``PAIR``. ``corpus``: "" for a pair or an encoder-decoder, which read their own texts."""

    model: str
    corpus: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's files."""
        return "-".join(part.replace(":", "-") for part in (self.model, self.corpus, f"seed-{self.seed}") if part)


def build_argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pytest_emad.run.rejudge", description="Hold verdicts against record."
    )
    parser.add_argument("models", nargs="*", metavar="MODEL",
                        help=f"bundled or downloaded names, or {PAIR} (default: all but downloaded)")  # fmt: skip
    parser.add_argument("--data", type=Path, help="folder with gsm8k/ and wikitext-2/, for downloaded models")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs")
    parser.add_argument("--update", action="store_true", help="put verdicts and goldens on record instead")
    parser.add_argument("--golden", type=Path, default=Path("golden"), help="folder of the record")
    parser.add_argument("--suites", type=Path, default=Path("suites"), help="folder of the suites")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="N")
    return parser


def plan_runs(models: Sequence[str], seeds: Sequence[int]) -> Iterator[RejudgeRun]:
    """All runs, ordered by seed, so that a series that stops early has completed whole seeds."""
    for seed in seeds:
        for model in models:
            yield from (RejudgeRun(model, corpus, seed) for corpus in _corpora_of(model))


def _corpora_of(model: str) -> tuple[str, ...]:
    if model in DOWNLOADS:
        return NATURAL_CORPORA
    return ("",) if model == PAIR or _reads_pairs(model) else CORPORA


def _reads_pairs(model: str) -> bool:
    from emad_ref.models.bundled import weights_folder

    config = read_json(weights_folder() / model / "config.json", "config.json", dict)
    return bool(config.get("is_encoder_decoder", False))


def pytest_arguments(run: RejudgeRun, chosen: argparse.Namespace) -> list[str]:
    """The pytest command line of a run."""
    beside = [str(chosen.suites / file) for file in PAIR_SUITES]
    alone = [str(chosen.suites / folder) for folder in JUDGED_FOLDERS] + [f"--ignore={file}" for file in beside]
    options = {"gate": "known", "golden": chosen.golden, "seed": run.seed}
    options |= {} if run.model == PAIR else {"model": run.model}
    options |= {"corpus": run.corpus} if run.corpus else {}
    options |= {"data": chosen.data} if run.model in DOWNLOADS else {}
    flags = [] if run.model in DOWNLOADS else ["--emad-all-claims"]  # slow claims of a large model take hours
    flags += ["--emad-update-golden"] if chosen.update else []
    timed = ["-m", "not emad(measures=True)"]
    junit = [f"--junitxml={chosen.out / run.name}.xml"]
    return subprocesses.build_pytest_arguments(
        [*(beside if run.model == PAIR else alone), *timed, *flags, *junit], options
    )


def run_to_status_and_message(run: RejudgeRun, chosen: argparse.Namespace) -> tuple[int, str]:
    """(exit status, text of its line). An update fails by design if a verdict changed; a test must not fail."""
    log = chosen.out / f"{run.name}.log"
    status = subprocesses.run_pytest(pytest_arguments(run, chosen), log)
    if status not in DECIDED_STATUSES:
        return 4, f"status {status}, see {log}"
    if failed := list(failed_tests(chosen.out / f"{run.name}.xml")):
        return 1, f"{len(failed)} failed, see {log}: {', '.join(failed)}"
    if status and not chosen.update:
        return 1, f"the run as a whole failed, see {log}"
    return 0, "recorded" if chosen.update else "as recorded"


def failed_tests(junit: Path) -> Iterator[str]:
    """Names of the tests that failed or could not be set up."""
    for case in ElementTree.parse(junit).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            yield case.get("name", "")


def main(argv: Sequence[str] | None = None) -> int:
    from emad_ref.models.bundled import bundled_model_names

    parser = build_argument_parser()
    chosen = parser.parse_args(argv)
    known = (*bundled_model_names(), PAIR)
    if unknown := [name for name in chosen.models if name not in (*known, *DOWNLOADS)]:
        parser.error(f"MODEL={unknown[0]!r}, but expected one of {', '.join((*known, *DOWNLOADS))}")
    if chosen.data is None and set(chosen.models) & set(DOWNLOADS):
        parser.error("--data is missing, but a downloaded model reads gsm8k/ and wikitext-2/ there; name the folder")
    for folder in (chosen.suites, chosen.golden):
        if not folder.is_dir():
            parser.error(f"{folder} is no folder; start from the root of a checkout")
    wanted = list(plan_runs(chosen.models or known, chosen.seeds))
    try:
        for run in wanted:
            require_writable(chosen.out / f"{run.name}.log", "--out")
            require_replaceable_file(chosen.out / f"{run.name}.xml", "--out", "a run's tests as JUnit", JUNIT_START)
    except BadFile as error:
        parser.error(str(error))
    worst = 0
    for run in wanted:
        status, said = run_to_status_and_message(run, chosen)
        print(f"{run.name}: {said}", flush=True)
        worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(run_cli_command(main))
