"""Shares of verdicts on simulated evaluations of known drops, beside McNemar's test.

    python -m pytest_emad.accuracy.simulation --items 1319 14042 --draws 1000

Each draw is a pair of evaluations of n right-or-wrong items: a share (s + d) / 2 is lost and (s − d) / 2 gained, where
d is the true drop and s the discordance, the share of items that differ. The verdict is that of ``emad accuracy`` with
one task. McNemar's exact one-sided test (McNemar 1947, Psychometrika 12:153–157; for language models arXiv:2602.10144)
asks whether any drop is there at all: it has no margin, and no verdict that a model kept its accuracy.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats
from tabulate import tabulate

from emad_ref.console import run_cli_command
from pytest_emad.accuracy.decision import UNIT, accuracy_claim
from pytest_emad.measurements.option_values import parse_number
from pytest_emad.statistics.accuracy import accuracy_drop_pvalues
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import LEVEL, judge_against_threshold
from pytest_emad.statistics.verdicts import Outcome

DROPS = (0.0, 0.003, 0.01, 0.03)
DISCORDANCES = (0.02, 0.05, 0.1, 0.2)
ITEMS = (1_319, 14_042)  # of gsm8k and of MMLU


@dataclass(frozen=True)
class VerdictShares:
    """Shares of draws at one true ``drop``; ``mcnemar``: draws in which McNemar's test rejects."""

    items: int
    discordance: float
    drop: float
    falsified: float
    inconclusive: float
    survived: float
    mcnemar: float


def simulate_verdicts(
    items: int, discordance: float, drop: float, margin: float, draws: int, rng: np.random.Generator
) -> VerdictShares:
    """Shares of verdicts at one cell; ``drop`` is at most ``discordance``."""
    shares = [(discordance + drop) / 2, (discordance - drop) / 2, 1 - discordance]
    counts = rng.multinomial(items, shares, size=draws)
    outcomes = Counter(decide_counts(int(lost), int(gained), items, margin) for lost, gained, _ in counts)
    rejected = sum(mcnemar_pvalue(int(lost), int(gained)) <= LEVEL for lost, gained, _ in counts)
    return VerdictShares(
        items,
        discordance,
        drop,
        outcomes["falsified"] / draws,
        outcomes["inconclusive"] / draws,
        outcomes["survived"] / draws,
        rejected / draws,
    )


@cache
def decide_counts(lost: int, gained: int, items: int, margin: float) -> Outcome:
    """The verdict on one task of ``items`` with so many lost and gained; without the interval, which takes longest."""
    above, below = accuracy_drop_pvalues(lost / items, gained / items, items, threshold=margin)
    bounds = (-math.inf, math.inf)
    estimate = Estimate((lost - gained) / items, *bounds, items, above, below, UNIT, "without an interval", "items")
    return judge_against_threshold(accuracy_claim(margin), "candidate", {"task": estimate}, "above", margin).verdict


def mcnemar_pvalue(lost: int, gained: int) -> float:
    """Exact one-sided p-value of "no more items are lost than gained"."""
    return float(stats.binom.sf(lost - 1, lost + gained, 0.5))


def simulate_table(items: Sequence[int], margin: float, draws: int, seed: int) -> Iterator[VerdictShares]:
    """Every cell of drops and discordances; a drop above the discordance does not exist."""
    rng = np.random.default_rng(seed)
    for n in items:
        for discordance in DISCORDANCES:
            for drop in DROPS:
                if drop <= discordance:
                    yield simulate_verdicts(n, discordance, drop, margin, draws, rng)


def format_verdict_shares(cells: Sequence[VerdictShares]) -> str:
    """A table in Markdown, shares in percent."""
    rows = [
        {
            "items": f"{cell.items:,}",
            "discordance": f"{100 * cell.discordance:g} %",
            "true drop": f"{100 * cell.drop:g}",
            "falsified": f"{100 * cell.falsified:.1f}",
            "inconclusive": f"{100 * cell.inconclusive:.1f}",
            "survived": f"{100 * cell.survived:.1f}",
            "McNemar rejects": f"{100 * cell.mcnemar:.1f}",
        }
        for cell in cells
    ]
    table: str = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m pytest_emad.accuracy.simulation", description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=list(ITEMS), help="items of the task")
    parser.add_argument("--margin", type=parse_number, default=0.01, help="a fraction (default: 0.01)")
    parser.add_argument("--draws", type=int, default=1_000, help="of each cell (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(format_verdict_shares(list(simulate_table(args.items, args.margin, args.draws, args.seed))))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli_command(main))
