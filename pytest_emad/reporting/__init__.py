"""What becomes of results, on the one process that reports.

results   what tests put on record, gathered
run       the run as data: ``report.json``, and what was left undecided
hooks     when it is written, shown and failed
terminal  what is printed
junit     what JUnit keeps
"""

from __future__ import annotations

from pytest_emad.run_report import USAGE_ERROR_NODE, ReportPlugin
from pytest_emad.terminal import header

__all__ = ["USAGE_ERROR_NODE", "ReportPlugin", "header"]
