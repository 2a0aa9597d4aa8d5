"""Settings of a run: the model's study and the budget, filled from pytest's options or a command line.

Standard library only: importing this module loads neither NumPy nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from emad_ref.errors import BadArgument, call_all, require_extra
from emad_ref.files import read_bytes
from emad_ref.models.bundled import BUNDLED_PAIR, bundled_model_names
from pytest_emad.measurements.acceptance_record import AcceptanceRecord
from pytest_emad.screening.settings import work_share_for_token_cost
from pytest_emad.tasks.sandbox import CodeExecution


@dataclass(frozen=True)
class Budget:
    """Amount of work of one run; larger budgets run more tests on more data.

    ``examples``: Hypothesis examples per property. ``calibrate``, ``validate``, ``evaluate``: windows per split, one
    per document if the corpus has enough (30 evaluated documents at least, to falsify). ``items``: scored examples per
    task (100). ``pairs``: timed pairs per batch size without warm-up (30). ``batch_sizes``: legs of the timing claims.
    ``prompt_tokens``, ``new_tokens``: of a timed request; ``new_tokens`` also bounds generation elsewhere.
    ``processes``: fresh ones over which the pairs are divided. With ratios that differ by 1 % between processes and 5
    % between pairs (``tests/laws/test_process_replicates.py``), 20 processes and 120 pairs show a speed-up of 1.15× at
    three batch sizes against two baselines in nine runs of ten.
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

    def reduce_for_token_cost(self, token_flops: float) -> Budget:
        """The budget for a model with this cost of a traced token: ``smoke`` has fewer documents for a large one.

        So it ends in minutes at every size. Larger budgets read all documents.
        """
        share = work_share_for_token_cost(token_flops)
        if self.rank or share == 1:
            return self
        amounts = {name: max(least, round(share * getattr(self, name))) for name, least in FEWEST.items()}
        return replace(self, **{name: min(amount, getattr(self, name)) for name, amount in amounts.items()})

    def describe_reductions(self, whole: Budget) -> str:
        """Text about the amounts that this budget reduces from ``whole``; empty if none."""
        parts = [
            f"{name} {getattr(self, name)} of {getattr(whole, name)}"
            for name in FEWEST
            if getattr(self, name) < getattr(whole, name)
        ]
        return ", ".join(parts)


# least documents of each split that decide claims; for evaluation twice the 30 that falsify
FEWEST = {"examples": 4, "calibrate": 30, "validate": 30, "evaluate": 60}

BUDGETS: dict[str, Budget] = {
    budget.name: budget
    for budget in (
        Budget("smoke", 10, 100, 60, 200, 400, 30, (1, 4), 64, 32, 1),
        Budget("standard", 50, 300, 150, 400, 1000, 120, (1, 4, 16), 128, 128, 20),
        Budget("full", 200, 1000, 500, 2000, 2400, 200, (1, 8, 32), 256, 256, 20),
    )
}

START_S = 900.0  # seconds besides the timed work: a process may read a large model from disk or network

FLOP_EVIDENCE = (
    "claimed",
    "timed",
    "witnessed",
)  # from weakest to strongest; see ``ModelMeasurements.flop_verification``


@dataclass(frozen=True)
class Study:
    """Settings of all measurements. Equal studies of equal weights give equal results, times excepted.

    ``corpus``   a name or path; None: chosen per model.
    ``corpus_group``  a field of its .jsonl lines: documents with one value of it count as one. None: each is its own.
    ``walk``     ``models.families.BACKENDS``: by fused steps, captured or not, or by modules alone.
    ``profile``  a calibration profile to use instead of calibrating.
    ``margin``   nats; judged beside the calibrated default and the margin chosen on validation.
    ``exit``     an exit's file (``screening.exit``), in place of screening one in the run.
    ``tasks``    lm-eval's, by name; ``task_path``: a folder of definitions of your own; ``limit``: documents of each,
                 None for all; ``data``: a folder with local files.
    ``allow_code_execution``  how tasks run generated programs (``tasks.sandbox``); None: not at all.
    ``decoder_dtype``  the decoder under test's stated precision; None: ``dtype``.
    ``acceptance_record``  the acceptance length that ENG-5 holds an engine against; None: that of the register.
    """

    corpus: str | None = None
    corpus_group: str | None = None
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
    task_path: Path | None = None
    limit: int | None = None
    allow_code_execution: CodeExecution | None = None
    decoder_dtype: str | None = None
    acceptance_record: AcceptanceRecord | None = None

    @property
    def non_default_setting_lines(self) -> list[str]:
        """Settings that differ from the defaults and may change a verdict on the same text, as ``NAME=VALUE``.

        Corpus, budget and seed have their own keys; precision is in the fingerprint; a device should change nothing.
        """
        values: dict[str, object] = {
            "acceptance_record": self.acceptance_record,
            "allow_code_execution": self.allow_code_execution,
            "corpus_group": self.corpus_group,
            "exit": self.exit_file_digest,
            "limit": self.limit,
            "margin": self.margin,
            "profile": _digest(self.profile, "profile"),
            "tasks": "+".join(sorted(self.tasks)) or None,
            "task_path": None if self.task_path is None else _digest_of_definitions(self.task_path),
        }
        return [f"{name}={value}" for name, value in values.items() if value is not None]

    def require_extras(self) -> None:
        """Raise MissingExtra if a setting needs a package that is not installed."""
        if self.tasks:
            names = ",".join(sorted(self.tasks))
            require_extra(f"--emad-tasks={names!r}", "lm_eval", alternative="leave the option out")

    def require_known_tasks(self) -> None:
        """Raise BadArgument for each name of ``tasks`` that lm-eval and ``task_path`` do not have.

        Finding lm-eval's own tasks takes 8 s; without lm-eval nothing is known of them.
        """
        if not self.tasks or find_spec("lm_eval") is None:
            return
        from pytest_emad.tasks.evaluation import make_task_manager, require_known_task

        names = sorted(self.tasks)
        manager = make_task_manager(None, self.task_path, names)
        call_all(partial(require_known_task, name, manager, "--emad-tasks") for name in names)

    @cached_property
    def lm_eval_task_count(self) -> int:
        """Number of requested lm-eval tasks, the members of a tag one by one; without lm-eval, of names."""
        if not self.tasks or find_spec("lm_eval") is None:
            return len(self.tasks)
        from pytest_emad.tasks.evaluation import expand_task_tags, make_task_manager

        return len(expand_task_tags(self.tasks, make_task_manager(None, self.task_path, self.tasks)))

    @property
    def exit_file_digest(self) -> str | None:
        """Digest of the exit's file, None without one. Raises BadFile."""
        return _digest(self.exit, "exit")


def _digest_of_definitions(folder: Path) -> str:
    """Digest of the names and contents of the task files in ``folder`` and below it."""
    files = sorted(path for path in folder.rglob("*.yaml") if path.is_file())
    parts = [f"{path.relative_to(folder)} {_digest(path, 'task-path')}" for path in files]
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


def _digest(path: Path | None, what: str) -> str | None:
    return None if path is None else sha256(read_bytes(path, what)).hexdigest()[:16]


@dataclass(frozen=True)
class PairNames:
    """``small``, ``large``: names as the user gave them."""

    small: str
    large: str

    @property
    def name(self) -> str:
        """Name of the pair in reports: both names, the small model first."""
        return f"{self.small} + {self.large}"

    @property
    def corpus(self) -> str:
        """Empty: the claim reads no corpus."""
        return ""

    @property
    def fingerprint(self) -> str:
        """Empty: the claim reads no weights, and names are the record's key."""
        return ""


def resolve_pair_names_from_options(
    pair: tuple[str, str] | None, small: str | None, large: str | None, models: Iterable[str]
) -> tuple[str, str] | None:
    """The pair named by the options; the bundled pair if all ``models`` are bundled; else None.

    ``pair``, ``small``, ``large``: values of the options of these names.

    Raises:
        BadArgument: the pair is named in two ways, or only half of it.
    """
    if pair is not None and (small or large):
        remedy = "leave --emad-small-model and --emad-large-model out"
        raise BadArgument("--emad-pair", ",".join(pair), "no other option that names the pair", remedy)
    if pair is not None:
        return pair
    if small and large:
        return small, large
    for flag, one, other in (("small", small, "large"), ("large", large, "small")):
        if one:
            remedy = "or name both: --emad-pair SMALL,LARGE"
            raise BadArgument(f"--emad-{flag}-model", one, f"--emad-{other}-model beside it", remedy)
    return BUNDLED_PAIR if {*models, *BUNDLED_PAIR} <= set(bundled_model_names()) else None


@dataclass(frozen=True)
class PairSampleSizes:
    """Items per task on which models are ``compared``, rules ``tried`` and verdicts ``judged``.

    Choosing a rule needs at least 60; falsifying needs at least 100 judged items. ``thresholds``: tried with either
    model first. ``calibrate``: documents of either model. ``reported``: timed pairs of a reporting row.
    """

    compared: int
    tried: int
    thresholds: int
    judged: int
    calibrate: int
    reported: int


PAIR_SIZES: dict[str, PairSampleSizes] = {
    "smoke": PairSampleSizes(60, 60, 7, 120, 30, 8),
    "standard": PairSampleSizes(200, 120, 15, 300, 100, 30),
    "full": PairSampleSizes(400, 150, 15, 800, 300, 60),
}
