"""What is studied, and how much may be spent on it: plain settings, filled by pytest's options or a command line.

Standard library only: importing it loads neither NumPy nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from emad_ref.files import read_bytes


@dataclass(frozen=True)
class Budget:
    """How much one run may spend; larger budgets run more tests on more data.

    ``examples``       Hypothesis examples per property.
    ``calibrate``, ``validate``, ``evaluate``  documents per split; 30 evaluated documents are METHODS' minimum.
    ``items``          scored examples per task; 100 are METHODS' minimum.
    ``pairs``          timed pairs per batch size, warm-up not counted; 30 are METHODS' minimum.
    ``batch_sizes``    legs of the timing rows.
    ``prompt_tokens``, ``new_tokens``  length of a timed request; ``new_tokens`` also bounds generation elsewhere.
    ``processes``      fresh ones over which those pairs are divided: memory layout, allocator and kernels are drawn
                       once a process, so that these decide how sure a ratio is. Simulated with ratios that differ by
                       1 % between processes and 5 % between pairs (``tests/laws/test_fresh.py``), twenty and 120 pairs
                       show a speed-up of 1.15× at three batch sizes against two baselines in nine runs of ten. Each
                       costs a start and a warm-up, as much as three or four pairs of every batch size take on
                       ``emad-tiny``: ``smoke`` keeps one.
    """

    name: str
    examples: int
    calibrate: int
    validate: int
    evaluate: int
    items: int
    pairs: int
    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    processes: int

    @property
    def rank(self) -> int:
        """0 for the smallest budget; a test runs when its own budget's rank does not exceed the run's."""
        return list(BUDGETS).index(self.name)


BUDGETS: dict[str, Budget] = {
    budget.name: budget
    for budget in (
        Budget("smoke", 10, 100, 60, 200, 400, 30, (1, 4), 64, 32, 1),
        Budget("standard", 50, 300, 150, 400, 1000, 120, (1, 4, 16), 128, 128, 20),
        Budget("full", 200, 1000, 500, 2000, 2400, 200, (1, 8, 32), 256, 256, 20),
    )
}

START_S = 900.0  # that a fresh process may take beside what it times: a large model is read from disk or net again

FLOP_EVIDENCE = ("claimed", "timed", "witnessed")  # from least to most: ``evidence.witnessed`` says what they are


@dataclass(frozen=True)
class Study:
    """What evidence is gathered on and with. Equal studies of equal weights give equal evidence, times apart.

    ``corpus``   a name or path; None: chosen per model (METHODS, "Corpus").
    ``walk``     ``models.anatomy.BACKENDS``: by fused steps, captured or not, or by modules alone.
    ``profile``  a calibration profile to use instead of calibrating.
    ``margin``   nats; judged beside the calibrated default and the margin chosen on validation.
    ``exit``     an exit's file (``screening.exit_file``), in place of one that is found in the run.
    ``tasks``    lm-eval's, by name; ``limit``: documents of each, None for all; ``data``: a folder with local files.
    ``journal``  a folder in which lm-eval's results are kept for a run that goes on; None: nowhere.
    """

    corpus: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    walk: str = "fast"
    budget: Budget = BUDGETS["smoke"]
    seed: int = 0
    data: Path | None = None
    profile: Path | None = None
    margin: float | None = None
    exit: Path | None = None
    tasks: frozenset[str] = frozenset()
    limit: int | None = None
    allow_code_execution: bool = False
    journal: Path | None = None

    @property
    def departures(self) -> list[str]:
        """What this study asks beyond the usual, as far as it may change a verdict on the same text: ``NAME=VALUE``.

        Corpus, budget and seed are keys of their own; precision is in the fingerprint; a device should change nothing.
        """
        given: dict[str, object] = {
            "allow_code_execution": self.allow_code_execution or None,
            "exit": self.exit_digest,
            "limit": self.limit,
            "margin": self.margin,
            "profile": _digest(self.profile, "profile"),
            "tasks": "+".join(sorted(self.tasks)) or None,
        }
        return [f"{name}={value}" for name, value in given.items() if value is not None]

    @property
    def exit_digest(self) -> str | None:
        """Of the exit's file, None without one: which it was, wherever it lay. Raises BadFile."""
        return _digest(self.exit, "exit")


def _digest(path: Path | None, what: str) -> str | None:
    return None if path is None else sha256(read_bytes(path, what)).hexdigest()[:16]
