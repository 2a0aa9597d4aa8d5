"""Compares two finished evaluations: reads, pairs, decides, and gives the result as frames and as JSON.

result = pytest_emad.compare_accuracy("results/base", "results/candidate", margin=0.01)
result.verdict                       # "survived", "falsified" or "inconclusive"
result.tasks; result.items           # pandas frames
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.console import format_facts_html
from emad_ref.errors import require_extra, require_instance
from emad_ref.files import BadFile
from pytest_emad.accuracy.decision import ScoreTest, accuracy_claim, decide_accuracy, format_points
from pytest_emad.accuracy.differing_items import DifferingItem, list_differing_items
from pytest_emad.accuracy.items import Evaluation, Omission
from pytest_emad.accuracy.loading import read_evaluation
from pytest_emad.accuracy.pairing import BASE, CANDIDATE, PairingOptions, pair_evaluations
from pytest_emad.statistics.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    import pandas

FORMAT, SCHEMA = "accuracy", 1


@dataclass(frozen=True, repr=False, eq=False)
class AccuracyComparison:
    """Two evaluations compared item by item.

    Attributes
    ----------
    base, candidate : Evaluation
        What was read.
    margin : float
        The largest drop that is accepted, a fraction.
    whole : Verdict
        The verdict over all tests, with a leg for each.
    tests : tuple of ScoreTest
        A task or group each, in the order of the files.
    omissions : tuple of Omission
        Everything that no verdict uses, counted.
    notes : tuple of str
        What was assumed or chosen.
    """

    base: Evaluation
    candidate: Evaluation
    margin: float
    whole: Verdict
    tests: tuple[ScoreTest, ...]
    omissions: tuple[Omission, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Outcome:
        """``survived``: the drop stays below the margin; ``falsified``: it exceeds it; ``inconclusive``: neither."""
        return self.whole.verdict

    @property
    def headline(self) -> str:
        """The verdict with the margin and the deciding test."""
        return f"{self.verdict}: accuracy falls by at most {format_points(self.margin)}; {self.whole.reason}"

    @cached_property
    def differing_items(self) -> list[DifferingItem]:
        """Items that the candidate lost or gained, the most instructive first."""
        return list_differing_items(self.tests)

    @cached_property
    def tasks(self) -> pandas.DataFrame:
        """One row per test. Scores, drops and bounds are fractions; ``low`` and ``high`` bound the 95 % interval."""
        return _frame(map(score_test_entry, self.tests), TEST_COLUMNS)

    @cached_property
    def parts(self) -> pandas.DataFrame:
        """One row per task of a group, with the ``group``; parts have no verdict."""
        rows = [{"group": test.name, **score_test_entry(part)} for test in self.tests for part in test.parts]
        return _frame(rows, ("group", *TEST_COLUMNS))

    @cached_property
    def items(self) -> pandas.DataFrame:
        """One row per item that was lost or gained, the most instructive first, with texts of both sides."""
        return _frame(map(item_entry, self.differing_items), ITEM_COLUMNS)

    @cached_property
    def left_out(self) -> pandas.DataFrame:
        """One row per kind of thing that no verdict uses: ``subject``, ``count``, ``reason``."""
        return _frame(map(asdict, self.omissions), ("subject", "count", "reason"))

    def to_json(self, items: int = 10) -> dict[str, Any]:
        """Built-in types only; the first ``items`` of the differing items with their texts."""
        sides = {
            name: {"path": str(side.path), "form": side.form, "model": side.model, "run": side.run}
            for name, side in (("base", self.base), ("candidate", self.candidate))
        }
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            **sides,
            "margin": self.margin,
            "verdict": self.verdict,
            "reason": self.whole.reason,
            "tests": [
                score_test_entry(test) | {"parts": [score_test_entry(part) for part in test.parts]}
                for test in self.tests
            ],
            "left_out": [asdict(omission) for omission in self.omissions],
            "notes": list(self.notes),
            "differing_items": len(self.differing_items),
            "items": [item_entry(item) for item in self.differing_items[:items]],
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.headline})"

    def _repr_html_(self) -> str:
        return format_facts_html(self.headline, {test.name: test.leg.outcome for test in self.tests})


TEST_COLUMNS = (
    "test", "task", "metric", "filter", "verdict", "base", "candidate", "drop", "low", "high", "margin", "items",
    "independent", "lost", "gained", "falsifies_from", "survives_up_to", "items_to_decide", "p_falsify", "p_survive",
    "reason",
)  # fmt: skip
ITEM_COLUMNS = (
    "task", "metric", "filter", "id", "change", "base_score", "candidate_score", "prompt", "target", "base_answer",
    "candidate_answer", "base_response", "candidate_response", "lead_change",
)  # fmt: skip


def score_test_entry(test: ScoreTest) -> dict[str, Any]:
    """A test as built-in types, by the names of ``TEST_COLUMNS``; None for what is absent."""
    leg, detectable = test.leg, test.detectable
    low, high = leg.interval or (None, None)
    values = (
        test.name or test.task, test.task, test.metric, test.filter, leg.outcome, test.base, test.candidate,
        leg.estimate, low, high, leg.threshold, test.items, test.independent, test.lost, test.gained,
        detectable.falsified if detectable else None, detectable.survived if detectable else None, leg.enough,
        leg.p_falsify, leg.p_survive, leg.reason,
    )  # fmt: skip
    return {name: _builtin(value) for name, value in zip(TEST_COLUMNS, values, strict=True)}


def item_entry(item: DifferingItem) -> dict[str, Any]:
    """A differing item as built-in types, by the names of ``ITEM_COLUMNS``."""
    values = (
        item.task, item.metric, item.filter, item.id, item.change, item.base_score, item.candidate_score,
        item.candidate.prompt, item.candidate.target, item.base.answer, item.candidate.answer, item.base.response,
        item.candidate.response, item.lead_change,
    )  # fmt: skip
    return dict(zip(ITEM_COLUMNS, values, strict=True))


def _builtin(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _frame(rows: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pandas.DataFrame:
    require_extra("a frame of items", "pandas")
    import pandas

    return pandas.DataFrame([dict(row) for row in rows], columns=list(columns))


def compare_accuracy(
    base: str | Path,
    candidate: str | Path,
    margin: float = 0.01,
    *,
    tasks: Sequence[str] = (),
    metrics: Sequence[str] = (),
    cluster: str = "",
    common_items: bool = False,
    allow_changed_prompts: bool = False,
) -> AccuracyComparison:
    """Decide whether the accuracy of ``candidate`` falls by more than ``margin`` below that of ``base``.

    Parameters
    ----------
    base, candidate : str or Path
        Finished evaluations: a folder of ``lm_eval --log_samples``, logs of inspect_ai, or a .jsonl or .csv of task,
        id and score. Both of one form.
    margin : float
        The largest drop that is accepted, a fraction: 0.01 is one point.
    tasks, metrics : sequence of str
        Names or patterns to judge; empty: all that both sides have.
    cluster : str
        A field of the documents: items with one value of it depend on each other. Empty: repeats of one document do.
    common_items : bool
        Judge the items that both sides have, and count the others; otherwise these end the comparison.
    allow_changed_prompts : bool
        Pair items although their prompt or target changed; otherwise that ends the comparison.

    Returns
    -------
    AccuracyComparison

    Raises
    ------
    BadFile
        A file that is missing, damaged, truncated or of another kind; sides that do not match. The message names the
        file and the remedy.
    BadArgument
        A margin that is no fraction from 0 to one half, or a task or metric that neither side has.
    """
    accuracy_claim(margin)  # before files are read
    for name, value in (("base", base), ("candidate", candidate)):
        require_instance(name, value, (str, Path), "name a folder or file")
    sides = [
        read_evaluation(Path(path), argument, cluster) for argument, path in ((BASE, base), (CANDIDATE, candidate))
    ]
    options = PairingOptions(tuple(tasks), tuple(metrics), common_items, allow_changed_prompts)
    paired = pair_evaluations(sides[0], sides[1], options)
    if not paired.scores:
        reason = "no score is left to compare"
        raise BadFile(CANDIDATE, candidate, "a metric that both sides have", reason, "choose other tasks or metrics")
    verdict, tests, unused = decide_accuracy(paired, margin, sides[1].model or Path(candidate).name)
    notes = list(paired.notes)
    if all(test.lost == test.gained == 0 for test in tests):
        notes.append("every score is equal on both sides: two runs of one model, or one run twice")
    omissions = (*paired.omissions, *unused)
    return AccuracyComparison(sides[0], sides[1], margin, verdict, tuple(tests), omissions, tuple(notes))
