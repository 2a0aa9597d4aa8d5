"""Records of one test, and its failure by a gate (``pytest_emad.statistics.gate``).

Records are JSON strings in ``item.user_properties``, which xdist sends to the controller; a NumPy scalar would crash
it. ``junit`` then keeps a short form of them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from emad_ref.absent import reason_if_absent
from emad_ref.errors import BadArgument
from pytest_emad.run.options import RunSettings
from pytest_emad.statistics.gate import build_gate_messages
from pytest_emad.statistics.goldens import (
    MACHINE_BOUND,
    AcceptedOutcomes,
    Change,
    KnownVerdicts,
    VerdictConditions,
    VerdictRecordComparison,
    compare_verdict_with_record,
    list_changes_from_shipped_register,
    verdict_key_fields,
)
from pytest_emad.statistics.verdicts import Claim, Verdict

if TYPE_CHECKING:
    from pytest_emad.audit.finding import Finding
    from pytest_emad.claims.base import ModelOrPairMeasurements, Question, RunPlan
    from pytest_emad.measurements.attachments import Attachments
    from pytest_emad.statistics.goldens import Goldens

KINDS = CLAIM, POINT, NOTE, MODEL, GOLDEN, KNOWN, TABLE, AUDIT, ATTEMPT, RAISED = tuple(
    f"emad.record.{kind}"
    for kind in (
        *("claim", "point", "note", "model", "golden", "known", "table", "audit"),
        *("attempt", "raised"),  # written by ``collection_log``
    )
)


class EmadWarning(pytest.PytestWarning):
    """A gating claim that this run could not decide."""


class Recorder:
    """The fixture ``emad_record``: records facts of a test and fails the test by a verdict's gate.

    ``properties`` is the test's ``user_properties``, to which this object only appends.
    """

    def __init__(
        self,
        properties: list[tuple[str, object]],
        settings: RunSettings,
        register: Mapping[str, Claim],
        goldens: Goldens,
        known: KnownVerdicts | None,
        provenance: Callable[[], dict[str, Any]],
    ) -> None:
        self._properties, self._settings, self._register = properties, settings, register
        self._goldens, self._known, self._provenance = goldens, known, provenance
        study = settings.study
        options = [
            *study.non_default_setting_lines,
            *list_changes_from_shipped_register(register, settings.gate_claims),
        ]
        self._model = ""  # the test's model: the first one recorded
        self._run = VerdictConditions(study.seed, study.budget.name, ", ".join(options))

    def record_claim(self, verdict: Verdict, corpus: str = "", fingerprint: str = "", refused: str = "") -> None:
        """Record a verdict, then fail or warn by ``statistics.gate``.

        Args:
            verdict: of a row of the register; register and options say whether it gates.
            corpus: name of the corpus; "" for claims that read no text.
            fingerprint: the model's, which identifies known verdicts instead of the name.
            refused: reason why the decoder under test left it undecided; "" for other causes.

        Raises:
            BadArgument: the register has no row ``verdict.id``.
        """
        row = self._row(verdict.id)
        key = verdict_key_fields(row.id, fingerprint or verdict.model, corpus, self._run)
        beside = self._compare_with_record(row, verdict, key)
        expected = None if beside is None else beside.expected
        is_gating = self._is_gating(row, expected)
        updating = self._settings.update_golden and row.requires not in MACHINE_BOUND
        if updating:
            expected = AcceptedOutcomes(
                frozenset({verdict.verdict}), verdict.verdict
            )  # accepted; the run fails as a whole
        found = build_gate_messages(verdict, row, is_gating, self._settings.gating, expected)
        told = verdict.to_json() | {"title": row.display_title, "gate": is_gating, "fails": bool(found.failure)}
        self._add(CLAIM, told | ({"refused": refused} if refused else {}))
        if beside is not None:
            self._add(KNOWN, beside.to_json())
        if updating:
            self._put_on_record(verdict, key)
        if found.warning:
            warnings.warn(EmadWarning(found.warning), stacklevel=2)
        if found.failure:
            pytest.fail(found.failure, pytrace=False)

    def record_tables_points_notes(self, model: str, shown: Attachments) -> None:
        """Record every table, note and point of ``shown``, about ``model``."""
        for point in shown.points:
            self.record_point(point)
        for table in shown.tables:
            self.record_table(table.title, model, table.rows, table.figure)
        for note in shown.notes:
            self.record_note(note)

    def record_point(self, values: Mapping[str, Any]) -> None:
        """Record an operating point for the summary; keys as ``report.tables.operating_point_rows`` reads them.

        Raises:
            BadArgument: no ``model``, ``name`` or ``digest``; or a value JSON cannot hold, NaN and infinity included.
        """
        for key in ("model", "name", "digest"):
            if not values.get(key):
                raise BadArgument(f"point[{key!r}]", values.get(key), "a text that is not empty")
        self._add(POINT, dict(values))

    def record_model(self, facts: Mapping[str, Any]) -> None:
        """Record facts about a model (``name`` and, say, fingerprint, layers) for ``report.json``."""
        if not facts.get("name"):
            raise BadArgument("model['name']", facts.get("name"), "the name it is reported under")
        self._model = self._model or str(facts["name"])
        self._add(MODEL, dict(facts))

    def record_table(self, title: str, model: str, rows: Sequence[Mapping[str, Any]], figure: str = "") -> None:
        """Record a table for the summary and ``report.json``: ``rows`` share their keys, which are its columns.

        Args:
            figure: a name of ``pytest_emad.report.figures.FIGURES`` for these rows, drawn by the writer of the
                report, in this run or later. "": none.

        Raises:
            BadArgument: no rows, rows with different keys, a value JSON cannot hold, rows the figure cannot draw.
        """
        if not rows:
            raise BadArgument(
                f"rows of {title!r}", rows, "at least one row", "record a note that says why there is none"
            )
        columns = list(rows[0])
        if any(list(row) != columns for row in rows):
            raise BadArgument(f"rows of {title!r}", "differing keys", f"{columns} in every row", "None marks absence")
        drawn = {"figure": figure} if figure else {}
        if figure:
            from pytest_emad.report.figures import require_drawable  # only on demand

            require_drawable(figure, rows)
        self._add(TABLE, {"title": title, "model": model, "rows": [dict(row) for row in rows]} | drawn)

    def record_audit(self, finding: Finding) -> None:
        """Record an audit's finding before any other use of it."""
        self._add(
            AUDIT,
            {
                "check": finding.check,
                "passed": None if finding.passed is None else bool(finding.passed),
                "detail": finding.detail,
                "n": int(finding.n),
                "ties": int(finding.ties),
            }
            | ({"model": self._model, "live": dict(finding.live)} if finding.live else {})
            | ({"complaint": finding.complaint} if finding.complaint else {})
            | ({"cause": finding.cause} if finding.cause else {})
            | ({} if finding.difference is None else {"difference": asdict(finding.difference)})
            | ({} if finding.likely_cause is None else {"likely_cause": asdict(finding.likely_cause)})
            | ({} if finding.sample is None else {"sample": dict(finding.sample)}),
        )

    def record_note(self, text: str) -> None:
        """Record a sentence that the reader of the summary needs."""
        self._add(NOTE, text)

    def load_golden(self, name: str, found: Any) -> Any | None:
        """The golden stored under ``name``, for comparison with ``found``; None if none is recorded.

        ``--emad-update-golden`` stores and returns ``found``, or its result if it is a function: JSON values.

        Raises:
            pytest_emad.statistics.goldens.DamagedGolden: listed in the index, but missing or altered.
            Failed: none is recorded, and ``--emad-require golden`` is set.
        """
        if self._settings.update_golden:
            stored = json.loads(_strict_json(f"golden {name}", found() if callable(found) else found))
            change = self._goldens.update(name, stored, self._provenance())
            self._changed(f"golden {name}", change)
            return stored
        stored = self._goldens.read(name)
        self._add(GOLDEN, {"id": name, "outcome": "absent" if stored is None else "read"})
        if stored is None and "golden" in self._settings.gating.require:
            pytest.fail(f"no golden recorded for {name}, and --emad-require golden asks for one", pytrace=False)
        return stored

    def _compare_with_record(
        self, row: Claim, verdict: Verdict, key: Mapping[str, str]
    ) -> VerdictRecordComparison | None:
        """The verdict beside its record; None in a run that does not compare."""
        if self._known is None:
            return None
        return compare_verdict_with_record(row, verdict, self._known.find_outcome(key, self._run.seed))

    def _is_gating(self, row: Claim, expected: AcceptedOutcomes | None) -> bool:
        """Whether a row gates: under ``known`` if a verdict is recorded, else by register and options."""
        if self._settings.gating.gate == "known":
            return expected is not None
        return row.is_gating(self._settings.gate_claims)

    def _row(self, claim: str) -> Claim:
        if claim not in self._register:
            raise BadArgument("claim", claim, f"a row of the register: {', '.join(self._register)}")
        return self._register[claim]

    def _put_on_record(self, verdict: Verdict, key: Mapping[str, str]) -> None:
        if self._goldens.target is None:  # settings() refuses this combination
            raise AssertionError("update without a target")
        from pytest_emad.statistics.goldens import record_verdict  # only on demand

        seed = self._run.seed
        change = record_verdict(self._goldens.target, key, verdict.model, seed, verdict.verdict)
        self._changed(f"verdict {verdict.id} of {verdict.model}, seed {seed}: {verdict.verdict}", change)

    def _changed(self, name: str, change: Change) -> None:
        self._add(GOLDEN, {"id": name, "outcome": change})

    def _add(self, kind: str, value: object) -> None:
        self._properties.append((kind, _strict_json(kind, value)))


def decide_and_record_claim(
    evidence: ModelOrPairMeasurements,
    layers: int,
    plan: RunPlan,
    record: Recorder,
    claim: str,
    question: Question[Any] | None = None,
) -> None:
    """Decide ``claim`` from ``evidence``; record its attachments, then its verdict, which may fail the test.

    ``question``: replaces the registered one, for a suite that draws its own evidence.

    If an audit refutes answers for the verdict, it is not decided: the finding is recorded, and the test fails.
    """
    from pytest_emad.audit.finding import AuditRefutedError  # only on demand

    refuted = None
    try:
        answer = plan.answer_claim(claim, evidence, layers, question)
    except AuditRefutedError as complaint:
        refuted = complaint
    if refuted is not None:  # outside of the handler, or pytest would print the complaint twice
        if refuted.finding is not None:
            record.record_audit(refuted.finding)
        asked = plan.make_context(claim, evidence.name, layers)
        record.record_claim(asked.unmeasured(f"not decided: {refuted}"), evidence.corpus, evidence.fingerprint)
        pytest.fail(f"{claim} is not decided: {refuted}", pytrace=False)
    record.record_tables_points_notes(evidence.name, answer.attachments)
    record.record_claim(answer.verdict, answer.corpus, answer.fingerprint, reason_if_absent(answer.refused))


def _strict_json(name: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadArgument(
            name, value, "built-in JSON values", f"{error}; leave absent numbers out, or give None"
        ) from error


def iterate_records(properties: Sequence[tuple[str, object]]) -> Iterator[tuple[str, Any]]:
    """(kind, value) of each plugin record among a report's ``user_properties``, in order."""
    for kind, value in filter(is_record, properties):
        yield kind, json.loads(str(value))


def first_attempt_records(properties: Sequence[tuple[str, object]]) -> Iterator[tuple[str, Any]]:
    """``iterate_records`` of only the first attempt, since later ones do not decide."""
    for kind, value in iterate_records(properties):
        if kind == ATTEMPT and value > 1:
            return
        yield kind, value


def is_record(entry: tuple[str, object]) -> bool:
    """Whether one of ``user_properties`` is a plugin record, not its short form or another plugin's."""
    return entry[0] in KINDS and isinstance(entry[1], str)
