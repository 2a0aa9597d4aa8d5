"""What a report of a decoder leaves undecided: not decided is not green.

Read from the report alone, so that the run that wrote it and whoever looks at it later say the same. Asked is what the
run was told to run, no more: of those shipped tests each must be there, and have passed or found by itself that its
premise is absent. A test of ``suites/invariants`` or ``suites/fidelity`` that the decoder declined is not decided, and
neither is one of ``DECIDING_TESTS`` whose answer was refused, or never given, for one of the models. A waiver names
such a gap and a reason, and is on record.

Under ``--emad-gate decoder`` a decoder is judged by what it can help and by what it offers. Rows about the method may
stay open. A feature of requests (exits, sampling, a schedule, a field of points) that its provider declines whenever it
is asked is not offered, and tests that asked for it may stay open. A request for no such feature must not be declined.
Where exits are not offered, a call may decline in every test but those of ``FULL_DEPTH_TESTS``.

Why a run fails as a whole although each of its tests may have passed, read from what it found.

``unmet_requirements``  what options asked of the whole: a kind of claim decided, a gate asked, a verdict compared, no
golden new.
``decided``   what a decoder must not leave open, and whose it must have been.

Read from the report alone (``report.schema``), so that it can be asked of reports that were put together, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emad_ref.report.deselection import ABOVE_BUDGET, LEFT_OUT, NO_EXIT, NO_PAIR, is_below
from emad_ref.report.provenance import EXITS, not_offered
from emad_ref.report.schema import Report
from emad_ref.statistics.gate import METHOD_ROWS, UNDECIDED
from emad_ref.statistics.goldens import no_comparison_reason
from emad_ref.statistics.verdicts import Claim

# the rows without which nothing is known of a decoder, and the shipped test that asks each
DECIDING_TESTS = {
    "EMAD-E2": "suites/invariants/test_kv_consistency.py::test_logits_at_any_admissible_depth_are_the_full_models",
    "EMAD-E5": "suites/cost/test_claims.py::test_claim",
    "EMAD-F1": "suites/claims/test_model.py::test_claim",
    "EMAD-F2": "suites/cost/test_claims.py::test_claim",
}
# what a decoder that runs every layer for every token must answer: test → a part of its parameters, "" for all
FULL_DEPTH_TESTS = {
    "suites/fidelity/test_full_depth.py::test_without_exits_tokens_are_the_models_own_greedy_continuation": "",
    "suites/invariants/test_apart.py::test_the_judges_model_is_left_alone": "full depth",
    "suites/invariants/test_positions.py::test_generation_holds_far_into_the_window": "full",
}
MUST_ANSWER = ("suites/invariants", "suites/fidelity")  # where a decoder must not decline
DECODER = "decoder"  # what a waiver of the decoder's origin is called


@dataclass(frozen=True)
class Gap:
    """``of``: a claim, a shipped test or ``DECODER``; ``what`` of it is missing and why; ``remedy`` what to do."""

    of: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.of}: {self.what}; {self.remedy}, or --emad-waive '{self.of}=REASON'"


def find_gaps(report: Report, asked: Iterable[str], shipped: Sequence[str], *, always: bool = False) -> list[Gap]:
    """Everything that ``report`` (schema 2) leaves undecided of ``asked``: files and folders of ``shipped`` tests.

    ``always``: our own decoder may leave open no more than another's, and what was left out on request is missing: a
    run may ask for part of what there is, a proof may not.
    """
    wanted = [name for name in shipped if is_below(name, asked)] if always or report["decoder"]["foreign"] else []
    excused = [ABOVE_BUDGET, NO_EXIT, NO_PAIR] if always else [ABOVE_BUDGET, NO_EXIT, NO_PAIR, LEFT_OUT]
    return [*_decoder_gaps(report), *_test_gaps(report, wanted, excused), *_claim_gaps(report, wanted, excused)]


def declined_tests(report: Report) -> list[Mapping[str, Any]]:
    """Tests that the decoder declined and may: under gate ``decoder`` for features that it answers nowhere."""
    missing_features = _features_not_offered(report)
    refused = [entry for entry in report["tests"] if entry["outcome"] == "skipped" and entry["kind"] == "refused"]
    return [entry for entry in refused if _may_decline(entry, missing_features)]


def _features_not_offered(report: Report) -> frozenset[str]:
    return not_offered(report["decoder"]["providers"]) if report["settings"].get("gate") == "decoder" else frozenset()


def _may_decline(entry: Mapping[str, Any], missing_features: frozenset[str]) -> bool:
    if "features" in entry:  # a request was declined as a whole
        return not missing_features.isdisjoint(entry["features"])
    # a call was: without exits, forced depths, counts of skipped layers and the like have no place, either
    return EXITS in missing_features and not _is_full_depth_test(entry)


def _is_full_depth_test(entry: Mapping[str, Any]) -> bool:
    case = FULL_DEPTH_TESTS.get(entry["shipped"])
    return case is not None and case in entry["nodeid"].partition("[")[2]


def wrong_decoder(report: Report, wanted: str) -> str:
    """Who was judged where it was not ``wanted``: ``foreign``, ``ours``, or a provider by its name; "" where it was."""
    asked = [provider for provider in report["decoder"]["providers"] if provider["answered"] or provider["declined"]]
    if not asked:
        return "no decoder was asked for anything"
    wrong = [provider["name"] for provider in asked if not _is_wanted_provider(provider, wanted)]
    return f"{' and '.join(wrong)} was judged" if wrong else ""


def _is_wanted_provider(provider: Mapping[str, Any], wanted: str) -> bool:
    kinds = {"foreign": provider["foreign"], "ours": not provider["foreign"]}
    return bool(kinds.get(wanted, wanted in (provider["plugin"], provider["name"])))


def is_waived(gap: Gap, waivers: Iterable[str]) -> bool:
    """Whether one of ``waivers`` names ``gap``, or the file it lies in."""
    return is_below(gap.of, waivers)


def waivable_names(shipped: Sequence[str]) -> list[str]:
    """Every name that a waiver may have, but for folders of files."""
    files = dict.fromkeys(name.partition("::")[0] for name in shipped)
    return [*DECIDING_TESTS, DECODER, *files, *shipped]


def _decoder_gaps(report: Report) -> list[Gap]:
    decoder = report["decoder"]
    asked = sum(provider["answered"] + provider["declined"] for provider in decoder["providers"])
    ours = sum(provider["answered"] for provider in decoder["providers"] if not provider["foreign"])
    if not ours:
        return []
    if decoder["foreign"]:
        what = f"ours answered {ours} of {asked} requests, for which {_foreign_names(decoder)} returned None"
        return [Gap(DECODER, what, "return a decoder, or raise Unsupported(reason)")]
    if decoder["overlooked"]:
        what = f"ours was judged, although {' and '.join(decoder['overlooked'])} offers one and was not loaded"
        return [Gap(DECODER, what, "load it (-p NAME, or a path beside it), or say --emad-backend emad-walked")]
    return []


def _foreign_names(decoder: Mapping[str, Any]) -> str:
    return " and ".join(provider["name"] for provider in decoder["providers"] if provider["foreign"])


def _test_gaps(report: Report, wanted: Sequence[str], excused: Sequence[str]) -> list[Gap]:
    """Tests that did not run, or ran and decided nothing. One line for each function and reason."""
    lost: dict[tuple[str, str], list[str]] = {}
    seen = {entry["shipped"] for entry in (*report["tests"], *report["deselected"])}
    for name in wanted:
        if not seen & {name, name.partition("::")[0]}:
            lost[name, "no test of it was collected"] = []
    for entry in report["deselected"]:
        if entry["shipped"] in wanted and entry["why"] not in excused:
            lost.setdefault((entry["shipped"], entry["why"]), []).append(entry["nodeid"])
    free = {entry["nodeid"] for entry in declined_tests(report)}
    for entry in report["tests"]:
        why = "" if entry["nodeid"] in free else _why_test_undecided(entry)
        if why and any(is_below(name, [entry["shipped"]]) for name in wanted):
            lost.setdefault((entry["shipped"], why), []).append(entry["nodeid"])
    return [Gap(name, f"{why}{_parameters_text(nodeids)}", "let it run") for (name, why), nodeids in lost.items()]


def _why_test_undecided(entry: Mapping[str, Any]) -> str:
    """Why a test decided nothing; "" where it passed, failed, or found by itself that its premise is absent."""
    if entry["shipped"] is None:
        return ""
    if entry["outcome"] == "not reported":
        return "collected, but never run"
    if entry["outcome"] == "xfailed" and not _ran_and_failed(entry):
        return f"marked as an expected failure ({entry['reason'] or 'no reason'})"
    if entry["outcome"] != "skipped" or entry["kind"] == "not applicable":
        return ""
    if entry["kind"] == "left out":
        return f"skipped by a mark, a fixture or a hook ({entry['reason'] or 'no reason'})"
    return f"the decoder declined ({entry['reason']})" if is_below(entry["shipped"], MUST_ANSWER) else ""


def _ran_and_failed(entry: Mapping[str, Any]) -> bool:
    """Then it is decided, and what is wrong is its outcome (``consistency``)."""
    return any(attempt["outcome"] in ("failed", "error") for attempt in entry.get("attempts", ())[:1])


def _parameters_text(nodeids: Sequence[str]) -> str:
    """The parameters of the tests meant, as far as they have some."""
    parameters = [nodeid.partition("[")[2].removesuffix("]") for nodeid in nodeids]
    named = [name for name in parameters if name]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return f": {', '.join(named[:3])}{more}" if named else ""


def _claim_gaps(report: Report, wanted: Sequence[str], excused: Sequence[str]) -> list[Gap]:
    """Rows of ``DECIDING_TESTS`` that a wanted test asks and that no verdict decides, for each model of the run."""
    gaps = []
    not_asked = {entry.get("claim") for entry in report["deselected"] if entry["why"] in excused}
    if report["settings"].get("gate") == "decoder":
        not_asked |= DECIDING_TESTS.keys() if EXITS in _features_not_offered(report) else METHOD_ROWS
    for claim, test in DECIDING_TESTS.items():
        if claim in not_asked:
            continue
        for model in report["settings"].get("models", ()) if test in wanted else ():
            found = [v for v in report["claims"] if (v["id"], v["model"]) == (claim, model)]
            why = _why_claim_undecided(found)
            if why:
                gaps.append(Gap(claim, f"not decided for {model}: {why}", "let the decoder answer"))
    return gaps


def _why_claim_undecided(verdicts: Sequence[Mapping[str, Any]]) -> str:
    if not verdicts:
        return "no verdict was given"
    open_ones = [verdict for verdict in verdicts if _is_open(verdict)]
    if len(open_ones) < len(verdicts):
        return ""
    return f"{open_ones[0]['verdict']} ({open_ones[0].get('refused') or open_ones[0]['reason']})"


def _is_open(verdict: Mapping[str, Any]) -> bool:
    """Unmeasured; or not applicable because the decoder, and not the model or the text, gave no answer."""
    refused = verdict["verdict"] in UNDECIDED and bool(verdict.get("refused"))
    return refused or verdict["verdict"] == "unmeasured"


def unmet_requirements(report: Report, register: Mapping[str, Claim]) -> list[str]:
    """One reason each. ``register``: as the run had it."""
    settings, reasons = report["settings"], []
    if any(entry["outcome"] in ("added", "changed") for entry in report["goldens"]):
        reasons.append("goldens updated, read the diff and run again")
    decided = {register[claim["id"]].requires for claim in report["claims"] if claim["verdict"] not in UNDECIDED}
    compared = any(entry["expected"] is not None for entry in report["known"])
    if compared or any(entry["outcome"] == "read" for entry in report["goldens"]):
        decided |= {"golden"}  # type: ignore[arg-type]  # a word of --emad-require, of no claim
    for word in sorted(set(settings["require"]) - decided):
        reasons.append(f"--emad-require {word}: no claim that needs it was decided in this run")
    if (
        settings["gate"] == "known"
        and not settings["update_golden"]
        and (reason := no_comparison_reason(report["known"]))
    ):
        reasons.append(reason)
    return [*reasons, *_deselected_gates(report, register)]


def _deselected_gates(report: Report, register: Mapping[str, Claim]) -> Iterator[str]:
    """A gate that nobody asked is not green for ``--emad-require``: one reason each to fail the run."""
    settings = report["settings"]
    left = dict.fromkeys(entry["claim"] for entry in report["deselected"] if entry["why"] == LEFT_OUT)
    for name in left:
        row = register.get(name)
        if row is not None and row.requires in settings["require"] and row.gates(settings["gate_claims"]):
            yield f"--emad-require {row.requires}: {name} gates, and was {LEFT_OUT}"


def undecided_reasons(report: Report, shipped: Sequence[str]) -> tuple[list[str], list[Gap]]:
    """(reasons, gaps): not decided is not green. ``gaps``: all there are, waived or not.

    ``shipped``: names of the tests that this version ships.
    """
    waivers = [waiver["of"] for waiver in report["waivers"]]
    gaps = find_gaps(report, report["run"]["asked"], shipped)
    reasons = [str(gap) for gap in gaps if not is_waived(gap, waivers)]
    wanted = report["settings"]["expect_decoder"]
    if wanted is not None and (found := wrong_decoder(report, wanted)):
        reasons.append(f"--emad-expect-decoder {wanted}: {found}")
    return reasons, gaps
