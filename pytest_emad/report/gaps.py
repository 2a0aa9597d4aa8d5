"""Gaps of a report: undecided tests and claims that fail a run although each of its tests may have passed.

This module reads only the report (``report.schema``), so a run and any later reader get the same result.

``find_gaps`` checks the shipped tests that the run selected. Each test must be present, and must have passed, failed or
found its premise absent. A test of ``suites/invariants`` or ``suites/fidelity`` that the decoder declined is a gap. So
is a test of ``DECIDING_TESTS`` that was refused or not asked for one of the models. A waiver names a gap and gives a
reason, and the report records it.

Under ``--emad-gate decoder`` a decoder is judged by the rows that it can change and the features that it offers. Rows
about the method may stay open. A request feature (exits, sampling, a schedule, a field of points) counts as not offered
if its provider always declines it. Tests that need such a feature may stay open; a request without one must not be
declined. Without exits, a call may be declined in every test except those of tier ``tokens`` (``report.tiers``).
No gate requires streaming and simultaneous requests: a decoder that always declines them does not offer them.

``--emad-tier`` requires only the tests of the tier, and fails on less than the tier promises. A run for which the user
typed a part of the suites (``-k``, a file) is no proof: its gaps fail it only under ``--emad-tier`` or
``--emad-expect-decoder``.

A gating claim that the run selected must be decided under any gate and by any decoder: a mark or a hook that skips its
test, or keeps it from running, fails the run (``find_gating_claim_gaps``).

``find_missing`` is the one list of what a run lacks: tests and claims that are not decided, the decoder and the tier
that were demanded, and what options require of the whole run (a kind of claim decided, a gate evaluated, a verdict
compared, no new golden). ``unexcused_gaps`` are those that fail it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emad_ref.absent import Absent
from pytest_emad.report.deselection import ABOVE_BUDGET, LEFT_OUT, NO_EXIT, NO_PAIR, NOT_OF_TIER, is_in_selection
from pytest_emad.report.provenance import CONCURRENCY, EXITS, STREAMING, declined_features
from pytest_emad.report.schema import Report
from pytest_emad.report.tiers import (
    OPTIONAL,
    find_tier_shortfalls,
    is_tier_test,
    required_tier_test_cases,
    test_parameters_without_models,
)
from pytest_emad.statistics.gate import METHOD_ROWS, UNDECIDED
from pytest_emad.statistics.goldens import absent_comparison
from pytest_emad.statistics.verdicts import Claim

# rows that must be decided for a decoder, and the shipped test that decides each
DECIDING_TESTS = {
    "EMAD-E2": "suites/invariants/test_kv_consistency.py::test_logits_at_any_admissible_depth_are_the_full_models",
    "EMAD-E5": "suites/cost/test_claims.py::test_claim",
    "EMAD-F1": "suites/claims/test_model.py::test_claim",
    "EMAD-F2": "suites/cost/test_claims.py::test_claim",
}
MUST_ANSWER = ("suites/invariants", "suites/fidelity")  # suites in which a decoder must not decline
NOT_COLLECTED = "no test of it was collected"
MAX_ALIKE = 3  # most gaps of one cause with separate lines
DECODER = "decoder"  # name of a waiver for the decoder's origin


@dataclass(frozen=True)
class ReportGap:
    """A gap: ``of`` names a claim, a shipped test, ``DECODER``, or the option that asks for ``what`` is missing.

    ``remedy``: closes it, as a waiver does; "" of an option, which no waiver excuses. ``cause``: reason why tests did
    not run, equal for all that one option excluded; ``tests``: their number, with parameters. ``of_proof``: a run of a
    part that the user typed may leave it open.
    """

    of: str
    what: str
    remedy: str = ""
    cause: str = ""
    tests: int = 1
    of_proof: bool = False

    def __str__(self) -> str:
        waiver = f"; {self.remedy}, or --emad-waive '{self.of}=REASON'" if self.remedy else ""
        return f"{self.of}: {self.what}{waiver}"


def format_gaps(gaps: Iterable[ReportGap]) -> list[str]:
    """One line for each gap, and one with a count for more than ``MAX_ALIKE`` of the same cause."""
    alike: dict[str, list[ReportGap]] = {}
    for number, gap in enumerate(gaps):
        alike.setdefault(gap.cause or str(number), []).append(gap)
    return [line for part in alike.values() for line in ([_counted(part)] if len(part) > MAX_ALIKE else map(str, part))]


def _counted(gaps: Sequence[ReportGap]) -> str:
    tests, cause = sum(gap.tests for gap in gaps), gaps[0].cause
    counted = f"{tests} tests of {len(gaps)} functions: {cause}"
    if cause == NOT_COLLECTED:
        counted = f"{len(gaps)} test functions: no test of them was collected"
    names = ", ".join(gap.of for gap in gaps[:MAX_ALIKE])
    remedy = "let them run, or --emad-waive FILE=REASON for each file"
    return f"{counted} ({names} and {len(gaps) - MAX_ALIKE} more); {remedy}"


def find_gaps(
    report: Report, selection: Iterable[str], shipped: Sequence[str], *, always: bool = False, tier: str | None = None
) -> list[ReportGap]:
    """All gaps of ``report`` among ``selection``: files and folders of ``shipped`` tests.

    ``always`` applies the strict rules: the reference decoder has no exemptions, and tests excluded on request count as
    missing. A run may select a part of the suites; a proof may not. ``tier``: only its tests are required.
    """
    required = (
        [name for name in shipped if is_in_selection(name, selection)] if always or report["decoder"]["foreign"] else []
    )
    excused = [ABOVE_BUDGET, NO_EXIT, NO_PAIR] if always else [ABOVE_BUDGET, NO_EXIT, NO_PAIR, LEFT_OUT]
    if tier is not None:
        files = [name for name, _ in required_tier_test_cases(tier)]
        required, excused = [name for name in required if is_in_selection(name, files)], [*excused, NOT_OF_TIER]
    return [*_decoder_gaps(report), *_test_gaps(report, required, excused), *_claim_gaps(report, required, excused)]


def excused_declined_test_entries(report: Report) -> list[Mapping[str, Any]]:
    """Tests that the decoder may decline and did: those for ``excused_features``."""
    refused = [entry for entry in report["tests"] if entry["outcome"] == "skipped" and entry["kind"] == "refused"]
    if not refused:
        return []
    missing_features, models = excused_features(report), report["settings"]["models"]
    return [entry for entry in refused if _may_decline(entry, missing_features, models)]


def excused_features(report: Report) -> frozenset[str]:
    """Features that the decoder never offers and need not: under gate ``decoder`` any, else optional ones."""
    never_owed = declined_features(report["decoder"]["providers"]) & {STREAMING, CONCURRENCY}
    return _features_not_offered(report) | never_owed


def _features_not_offered(report: Report) -> frozenset[str]:
    return declined_features(report["decoder"]["providers"]) if report["settings"]["gate"] == "decoder" else frozenset()


def _may_decline(entry: Mapping[str, Any], missing_features: frozenset[str], models: Sequence[str]) -> bool:
    if entry["shipped"] and is_tier_test(
        "tokens", entry["shipped"], test_parameters_without_models(entry["nodeid"], models)
    ):
        missing_features &= OPTIONAL.keys()  # a plain request may decline no other feature
    if "features" in entry:  # the decoder declined a whole request, or a counted call
        return not missing_features.isdisjoint(entry["features"])
    # it declined another call: without exits, calls with skip counts may be declined as well
    return EXITS in missing_features


def find_wrong_decoder(report: Report, expected: str | None, option: str) -> list[ReportGap]:
    """The gap of a decoder other than ``expected`` by ``option``: ``foreign``, ``ours``, or the name of a provider.

    None expects none.
    """
    if expected is None:
        return []
    queried = [provider for provider in report["decoder"]["providers"] if provider["answered"] or provider["declined"]]
    if not queried:
        return [ReportGap(f"{option} {expected}", "no decoder was asked for anything")]
    wrong = [provider["name"] for provider in queried if not _is_wanted_provider(provider, expected)]
    return [ReportGap(f"{option} {expected}", f"{' and '.join(wrong)} was judged")] if wrong else []


def find_tier_gaps(report: Report, tier: str | None) -> list[ReportGap]:
    """Gaps of ``report`` at ``tier``; None asks for none."""
    return [] if tier is None else [ReportGap(f"tier {tier}", what) for what in find_tier_shortfalls(report, tier)]


def _is_wanted_provider(provider: Mapping[str, Any], expected: str) -> bool:
    kinds = {"foreign": provider["foreign"], "ours": not provider["foreign"]}
    return bool(kinds.get(expected, expected in (provider["plugin"], provider["name"])))


def is_waived(gap: ReportGap, waivers: Iterable[str]) -> bool:
    """Whether one of ``waivers`` names ``gap`` or its file."""
    return is_in_selection(gap.of, waivers)


def waivable_names(shipped: Sequence[str]) -> list[str]:
    """Every name that a waiver may have, except folders."""
    files = dict.fromkeys(name.partition("::")[0] for name in shipped)
    return [*DECIDING_TESTS, DECODER, *files, *shipped]


def _decoder_gaps(report: Report) -> list[ReportGap]:
    decoder = report["decoder"]
    requests = sum(provider["answered"] + provider["declined"] for provider in decoder["providers"])
    ours = sum(provider["answered"] for provider in decoder["providers"] if not provider["foreign"])
    if not ours:
        return []
    if decoder["foreign"]:
        what = f"ours answered {ours} of {requests} requests, for which {_foreign_names(decoder)} returned None"
        return [ReportGap(DECODER, what, "return a decoder, or raise Unsupported(reason)")]
    if decoder["overlooked"]:
        what = f"ours was judged, although {' and '.join(decoder['overlooked'])} offers one and was not loaded"
        return [ReportGap(DECODER, what, "load it (-p NAME, or a path beside it), or say --emad-backend emad-walked")]
    return []


def _foreign_names(decoder: Mapping[str, Any]) -> str:
    return " and ".join(provider["name"] for provider in decoder["providers"] if provider["foreign"])


def _test_gaps(report: Report, required: Sequence[str], excused: Sequence[str]) -> list[ReportGap]:
    """Gaps of tests that did not run, or ran without deciding. One line for each function and reason."""
    lost: dict[tuple[str, str], list[str]] = {}
    collected = {entry["shipped"] for entry in (*report["tests"], *report["deselected"])}
    for name in required:
        if not collected & {name, name.partition("::")[0]}:
            lost[name, NOT_COLLECTED] = []
    for entry in report["deselected"]:
        if entry["shipped"] in required and entry["why"] not in excused:
            lost.setdefault((entry["shipped"], entry["why"]), []).append(entry["nodeid"])
    free = {entry["nodeid"] for entry in excused_declined_test_entries(report)}
    for entry in report["tests"]:
        absent = None if entry["nodeid"] in free else _absent_decision(entry)
        if absent and any(is_in_selection(name, [entry["shipped"]]) for name in required):
            lost.setdefault((entry["shipped"], absent.reason), []).append(entry["nodeid"])
    left_out = {NOT_COLLECTED, *(entry["why"] for entry in report["deselected"])}
    return [
        ReportGap(
            name,
            f"{why}{_parameters_text(nodeids)}",
            "let it run",
            why if why in left_out else "",
            len(nodeids) or 1,
            of_proof=True,
        )
        for (name, why), nodeids in lost.items()
    ]


def _absent_decision(entry: Mapping[str, Any]) -> Absent | None:
    """Why a test did not decide; None if it passed, failed, or found its premise absent."""
    if entry["shipped"] is None:
        return None
    if entry["outcome"] == "not reported":
        return Absent("collected, but never run")
    if entry["outcome"] == "xfailed" and not _ran_and_failed(entry):
        return Absent(f"marked as an expected failure ({entry['reason'] or 'no reason'})")
    if entry["outcome"] != "skipped" or entry["kind"] == "not applicable":
        return None
    if entry["kind"] == "left out":
        return Absent(f"skipped by a mark, a fixture or a hook ({entry['reason'] or 'no reason'})")
    must_answer = is_in_selection(entry["shipped"], MUST_ANSWER)
    return Absent(f"the decoder declined ({entry['reason']})") if must_answer else None


def _ran_and_failed(entry: Mapping[str, Any]) -> bool:
    """Whether the test ran and failed, which is an outcome, not a gap."""
    return any(attempt["outcome"] in ("failed", "error") for attempt in entry.get("attempts", ())[:1])


def _parameters_text(nodeids: Sequence[str]) -> str:
    """The parameters of the given tests, if any."""
    parameters = [nodeid.partition("[")[2].removesuffix("]") for nodeid in nodeids]
    named = [name for name in parameters if name]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return f": {', '.join(named[:3])}{more}" if named else ""


def _claim_gaps(report: Report, required: Sequence[str], excused: Sequence[str]) -> list[ReportGap]:
    """Gaps of rows of ``DECIDING_TESTS``: selected, but without a verdict that decides, for each model of the run."""
    gaps = []
    not_asked = {entry.get("claim") for entry in report["deselected"] if entry["why"] in excused}
    if report["settings"]["gate"] == "decoder":
        not_asked |= DECIDING_TESTS.keys() if EXITS in _features_not_offered(report) else METHOD_ROWS
    for claim, test in DECIDING_TESTS.items():
        if claim in not_asked:
            continue
        for model in report["settings"]["models"] if test in required else ():
            verdicts = [v for v in report["claims"] if (v["id"], v["model"]) == (claim, model)]
            if absent := _absent_verdict(verdicts):
                what = f"not decided for {model}: {absent.reason}"
                gaps.append(ReportGap(claim, what, "let the decoder answer", of_proof=True))
    return gaps


def _absent_verdict(verdicts: Sequence[Mapping[str, Any]]) -> Absent | None:
    """Why none of ``verdicts`` decides; None if one does."""
    if not verdicts:
        return Absent("no verdict was given")
    open_ones = [verdict for verdict in verdicts if _is_open(verdict)]
    if len(open_ones) < len(verdicts):
        return None
    return Absent(f"{open_ones[0]['verdict']} ({open_ones[0].get('refused') or open_ones[0]['reason']})")


def _is_open(verdict: Mapping[str, Any]) -> bool:
    """Whether a verdict is unmeasured, or not applicable because the decoder gave no answer."""
    refused = verdict["verdict"] in UNDECIDED and bool(verdict.get("refused"))
    return refused or verdict["verdict"] == "unmeasured"


def _unmet_requirements(report: Report, register: Mapping[str, Claim]) -> Iterator[ReportGap]:
    """What options require of the whole run, and it lacks."""
    settings = report["settings"]
    if any(entry["outcome"] in ("added", "changed") for entry in report["goldens"]):
        yield ReportGap("goldens updated", "read the diff and run again")
    decided = {register[claim["id"]].requires for claim in report["claims"] if claim["verdict"] not in UNDECIDED}
    compared = any(entry["expected"] is not None for entry in report["known"])
    if compared or any(entry["outcome"] == "read" for entry in report["goldens"]):
        decided |= {"golden"}  # type: ignore[arg-type]  # a word of --emad-require, of no claim
    for word in sorted(set(settings["require"]) - decided):
        yield ReportGap(f"--emad-require {word}", "no claim that needs it was decided in this run")
    if settings["gate"] == "known" and not settings["update_golden"] and (absent := absent_comparison(report["known"])):
        yield ReportGap("gate known", absent.reason)
    left = dict.fromkeys(entry["claim"] for entry in report["deselected"] if entry["why"] == LEFT_OUT)
    for name in left:
        row = register.get(name)
        if row is not None and row.requires in settings["require"] and row.is_gating(settings["gate_claims"]):
            yield ReportGap(f"--emad-require {row.requires}", f"{name} gates, and was {LEFT_OUT}")


def is_partial_run(report: Report) -> bool:
    """Whether the user typed a part of the suites, without asking for a proof."""
    demanded = report["settings"]["tier"] or report["settings"]["expect_decoder"]
    return bool(report["run"]["partial"]) and not demanded


def find_gating_claim_gaps(report: Report, register: Mapping[str, Claim]) -> list[ReportGap]:
    """Gaps of selected gating claims with an undecided test: skipped by a mark, or never run.

    They count for every decoder, the reference included, and in every run, since a requested gate has not held.
    """
    chosen, gaps = report["settings"]["gate_claims"], {}
    for entry in report["tests"]:
        row = register.get(entry.get("claim", ""))
        if row is not None and row.is_gating(chosen) and (absent := _absent_decision(entry)):
            name = row.id if row.id in DECIDING_TESTS else entry["shipped"]
            what = f"{row.id} gates, and is not decided: {absent.reason}{_parameters_text([entry['nodeid']])}"
            gaps[name, absent] = ReportGap(name, what, "let it run")
    return list(gaps.values())


def find_missing(report: Report, shipped: Sequence[str], register: Mapping[str, Claim]) -> list[ReportGap]:
    """Everything that the run lacks, waived gaps included; of an unfinished run, only what options require.

    ``shipped``: names of the tests that this version ships. ``register``: of the run, for its gates.
    """
    missing = list(_unmet_requirements(report, register))
    if report["state"] != "complete":
        return missing
    settings = report["settings"]
    missing += find_gaps(report, report["run"]["asked"], shipped, tier=settings["tier"])
    if is_partial_run(report) or not report["decoder"]["foreign"]:  # otherwise the test is a gap already
        missing += find_gating_claim_gaps(report, register)
    missing += find_tier_gaps(report, settings["tier"])
    return missing + find_wrong_decoder(report, settings["expect_decoder"], "--emad-expect-decoder")


def unexcused_gaps(report: Report, gaps: Iterable[ReportGap]) -> list[ReportGap]:
    """Those of ``gaps`` that fail the run: not waived, and none that only a proof must close in a typed part."""
    waivers, partial = [waiver["of"] for waiver in report["waivers"]], is_partial_run(report)
    return [gap for gap in gaps if not is_waived(gap, waivers) and not (partial and gap.of_proof)]
