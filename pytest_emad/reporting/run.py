"""The run as data: what is known of it at any moment, laid out as ``report.json``, and what it leaves undecided."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import pytest

from emad_ref.files import read_bytes
from emad_ref.report.provenance import project, provenance
from emad_ref.report.providers import ANSWERED, DECLINED, together, whose
from emad_ref.report.reading import State
from emad_ref.report.shipped import PREFIX
from emad_ref.report.unasked import told
from pytest_emad import attendance, installed, origins
from pytest_emad.options import settings
from pytest_emad.reporting.results import NEVER, Results


class Run:
    """One run, on the process that reports.

    ``results``   what its tests found. ``state``: how far it came.
    ``failures``  why it fails as a whole although no test may. ``waivers``: what may stay undecided, and was it needed.
    ``workers``   what each worker of xdist sent home when it ended.
    """

    def __init__(self, config: pytest.Config, attended: attendance.Attendance) -> None:
        self.config, self.settings = config, settings(config)
        self.results = Results()
        self.state: State = "running"
        self.failures: list[str] = []
        self.waivers: list[dict[str, Any]] = [
            {"of": of, "reason": reason, "needed": False} for of, reason in self.settings.waive
        ]
        self.workers: list[dict[str, Any]] = []
        self._attended = attended
        self._began, self._clock = datetime.now(UTC), time.monotonic()

    @property
    def judging(self) -> bool:
        """Whether this run judges anything with us: other test runs are none of our business."""
        return bool(self.results or self._decoding or self.settings.expect_decoder)

    @property
    def _decoding(self) -> bool:
        """Whether it judges a decoder: one was asked for, or a test of ours was."""
        return bool(self._tests_asked) or any(
            provider[what] for provider in self._asked for what in (ANSWERED, DECLINED)
        )

    @property
    def _tests_asked(self) -> list[str]:
        """Which of our tests were asked for; all of them where a folder around ours was."""
        return installed.asked_tests(self.config) or ([PREFIX] if self._collected else [])

    @property
    def _asked(self) -> list[dict[str, Any]]:
        """Who was asked for decoders, here and on workers."""
        return together(part["providers"] for part in self._attended_by())

    @property
    def _collected(self) -> dict[str, str]:
        return {nodeid: name for part in self._attended_by() for nodeid, name in part["collected"].items()}

    def _attended_by(self) -> list[dict[str, Any]]:
        """What each process of the run saw, this one first."""
        return [self._attended.to_json(), *self.workers]

    def require_consistency(self, exit_status: int) -> None:
        """Verdicts, audits and reported outcomes must agree, however far the run came."""
        from emad_ref.report.consistency import contradictions  # not at the start of every run

        self.failures += contradictions(self.described(exit_status))

    def require_decisions(self, exit_status: int) -> None:
        """Not decided is not green: what of the tests that were asked for the decoder under test left open."""
        from emad_ref.report.failing import decided  # not at the start of every run
        from emad_ref.report.missing import waived

        reasons, gaps = decided(self.described(exit_status), installed.shipped_tests())
        self.failures += reasons
        for waiver in self.waivers:
            waiver["needed"] = any(waived(gap, [waiver["of"]]) for gap in gaps)

    def described(self, exit_status: int | None) -> dict[str, Any]:
        """The report so far."""
        done = exit_status is not None
        around: dict[str, Any] = {
            "state": self.state,
            "run": {
                "started": self._began.isoformat(timespec="seconds"),
                "duration_s": round(time.monotonic() - self._clock, 3) if done else None,
                "command": ["pytest", *map(str, self.config.invocation_params.args)],
                "addopts": os.environ.get("PYTEST_ADDOPTS", ""),
                "exit_status": exit_status,
                "failures": self.failures,
                "asked": self._tests_asked,
                "claims_file": self._claims_file,
                "project": self._project,
            },
            "decoder": self._decoder(),
            "deselected": self.deselected(),
            "waivers": self.waivers,
        }
        report = self.results.report(self.settings, self._provenance, around)
        report["notes"] = [*report["notes"], *told(around["deselected"])]
        unseen = {} if not done else {n: name for n, name in self._collected.items() if n not in self.results.tests}
        left_out = {entry["nodeid"] for entry in around["deselected"]}
        report["tests"] += [
            {"nodeid": n, "shipped": name, "outcome": NEVER, "kind": "", "reason": "", "duration_s": 0.0}
            for n, name in unseen.items()
            if n not in left_out
        ]
        return report

    def _decoder(self) -> dict[str, Any]:
        asked = self._asked
        return {
            "name": whose(asked),
            "foreign": any(provider["foreign"] for provider in asked),
            "providers": asked,
            "overlooked": self._overlooked if self._tests_asked else [],
        }

    def deselected(self) -> list[dict[str, Any]]:
        """Workers deselect alike: each test once."""
        return list({entry["nodeid"]: entry for part in self._attended_by() for entry in part["deselected"]}.values())

    @cached_property
    def _provenance(self) -> dict[str, Any]:
        return provenance(self.settings.study)

    @cached_property
    def _project(self) -> dict[str, Any]:
        return project(self.config.rootpath)

    @cached_property
    def _claims_file(self) -> dict[str, str] | None:
        """The user's register as it was when the run began: what is changed since judged nothing."""
        path = self.settings.claims
        if path is None:
            return None
        return {"path": str(path), "sha256": hashlib.sha256(read_bytes(path, "--emad-claims")).hexdigest()}

    @cached_property
    def _overlooked(self) -> list[str]:
        return origins.overlooked(self.config)
