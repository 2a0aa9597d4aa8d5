"""The terminal summary: forty lines, none wider than the terminal, every falsified row shown."""

from __future__ import annotations

import pytest

from pytest_emad.cli import main
from pytest_emad.report.deselection import ABOVE_BUDGET
from pytest_emad.report.summary import build_run_summary
from pytest_emad.report.summary_layout import (
    SummaryOmission,
    format_ci_job_summary,
    format_id_ranges,
    format_summary_lines_with_tones,
)
from pytest_emad.statistics.verdicts import Leg, Verdict, load_register
from tests.unit.report.sample_report import RUN, passed, written
from tests.unit.report.sample_report import report as complete_report

REGISTER = load_register()
OPEN = "1 of 3 legs inconclusive; first: recall (about 887 items would decide it if the estimate stands)"
WIDTHS = pytest.mark.parametrize("width", [80, 120])


def claim(id, verdict="survived", reason="all 2 legs survived; nearest: x", model="m", why=None, **changes):
    undecided = verdict in ("not applicable", "unmeasured")
    numbers = (None, None, 0, None) if undecided else (0.535, (0.486, 0.583), 400, 0.01)
    legs = () if undecided else (Leg("batch 4", verdict, *numbers, "accuracy drop", good="lower"),)
    gate = REGISTER[id].gate
    row = Verdict(id, model, verdict, *numbers, "accuracy drop", reason, legs, "lower", deciding=0 if legs else None)
    facts = {"title": REGISTER[id].display_title, "gate": gate, "fails": gate and verdict == "falsified", "test": ""}
    return row.to_json() | {"why": reason if why is None else why} | facts | changes


def failed(nodeid, outcome="failed", reason=""):
    return passed(nodeid, nodeid=nodeid, outcome=outcome, reason=reason)


def report(claims, *, failures=(), exit_status=0, **changes):
    empty = {key: [] for key in ("points", "tables", "goldens", "notes", "models")}
    models = list(dict.fromkeys(entry["model"] for entry in claims))
    provider = {
        "name": "mine",
        "plugin": "mine",
        "foreign": True,
        "answered": 0,
        "declined": 3,
        "none": 0,
        "features": {},
    }
    decoder = {"name": "mine", "foreign": True, "providers": [provider], "overlooked": []}
    parts = {"run": RUN | {"failures": list(failures), "exit_status": exit_status}, "decoder": decoder}
    settings = {"models": models} | changes.pop("settings", {})
    return complete_report(**empty | parts | {"claims": claims, "settings": settings} | changes)


def text(found, width=80, most=40):
    return [
        line
        for line, _ in format_summary_lines_with_tones(
            build_run_summary(found), width, ["report written to out/report.json"], most
        )
    ]


def everything(verdict, models=("m",), reason="because " * 60):
    return [claim(id, verdict, reason, model) for model in models for id in REGISTER]


def test_a_gate_says_what_it_asks_what_was_found_what_it_needs_and_which_way_is_good():
    shown = text(report([claim("EMAD-F1", "falsified"), claim("EMAD-E2")]), 120)
    assert shown[:5] == [
        "FAILED: 1 of 2 gates does not hold",
        "gates: 1 of 2 hold, 1 falsified",
        "  EMAD-F1  Saving 15 % of FLOPs leaves quality as it was: falsified",
        "           found 53.5 % [48.6 %, 58.3 %] accuracy drop; needs at most 1.00 %; where: batch 4",
        "  EMAD-E2  An early exit gives the full model's logits there: survived",
    ]


KNOWN = {
    "claim": "EMAD-E1",
    "model": "m",
    "expected": "survived",
    "outcomes": ["survived"],
    "changed": False,
    "why": "",
}


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({}, "PASSED: 1 of 1 gate holds"),
        ({"settings": {"gate": "known"}, "known": [KNOWN]}, "PASSED: every verdict equals the record"),
        ({"state": "interrupted"}, "NOT FINISHED: the run was interrupted; what follows is what it reached"),
        ({"state": "usage error"}, "NOT FINISHED: the run ended with a usage error; what follows is what it reached"),
        ({"failures": ["speed is required"]}, "FAILED: 1 condition on the run is not met"),
        ({"tests": [failed("t", "error")]}, "FAILED: 1 test failed"),
        (
            {"state": "interrupted", "tests": [failed("t")]},
            "FAILED: 1 test failed; the run was interrupted; what follows is what it reached",
        ),
        (
            {"state": "interrupted", "failures": ["speed is required"]},
            "NOT FINISHED: the run was interrupted; what follows is what it reached",
        ),
        ({"exit_status": 2}, "FAILED: pytest ended with status 2"),
        ({"exit_status": 5}, "FAILED: no test was selected"),
    ],
)
def test_the_first_line_says_passed_or_failed_and_why(changes, headline):
    assert text(report([claim("EMAD-E2")], **changes))[0] == headline


COMPARED = "(4 positions compared, 0 ties)"


def test_failed_tests_are_told_by_their_cause_before_any_gate_with_the_command_that_repeats_one():
    tests = [
        failed(f"a.py::test_{name}", reason=reason)
        for name, reason in (("b[m]", "Failed: audit"), ("c[1]", ""), ("c[2]", ""), ("d", "OSError: 1 of 2\nand more"))
    ]
    complaints = {
        "b[m]": ("row 0, depth 2: the rule gives depth 1", "rules:7"),
        "c[1]": ("a ceiling: row 3, depth 4: the rule gives depth 12", "rules:7"),
        "c[2]": ("row 1: 3 tokens, not 4", "rules:9"),
    }
    audits = [
        {"test": f"a.py::test_{name}", "check": f"check {name[0]}", "passed": False, "complaint": complaint}
        | {"detail": f"{complaint} {COMPARED}", "cause": cause}
        for name, (complaint, cause) in complaints.items()
    ]
    found = report([claim("EMAD-E2")], tests=tests, audits=audits, settings={"report": "my out"})
    assert text(found, 120)[:7] == [
        "FAILED: 4 tests failed",
        "  2 tests (audits check b, check c): row 0, depth 2: the rule gives depth 1",
        "    also a.py::test_c[1]",
        "  1 test (audit check c): row 1: 3 tokens, not 4",
        "  1 test: OSError: 1 of 2",
        "  to repeat one test alone: emad replay 'my out' test_b",
        "gates: 1 of 1 hold",
    ]
    found["tests"] = tests[:1]
    assert "to repeat one test" not in " ".join(text(found, 120)), "it ran alone"
    found["tests"] = tests[1:]
    assert "  to repeat one test alone: emad replay 'my out' 'test_c[1]'" in text(found, 120)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"known": [KNOWN]}, "every verdict equals the record"), ({}, "1 of 1 gate holds")],
)
def test_a_known_gap_is_in_every_headline(changes, said):
    test = passed("suites/a.py::test_a", outcome="xfailed", known_gap="suites/a.py::test_a")
    settings = {"gate": "known" if changes else "paper", "known_gaps": {"suites/a.py::test_a": "later"}}
    found = report([claim("EMAD-E2")], tests=[test], settings=settings, **changes)
    assert text(found, 120)[0] == f"PASSED: {said}; 1 test was the gate: 1 failed as a known gap"
    assert "emad: known gap suites/a.py::test_a: later" in text(found, 120)


def test_failures_that_look_alike_are_one_cause_with_the_first_difference_and_a_remedy():
    """Whatever they say: a complaint is not parsed."""
    likely = {"kind": "bfloat16", "guess": "a gap of 0.05 looks like bfloat16", "remedy": "compute in float32"}
    difference = {"position": 14, "emitted": 5, "expected": 9, "gap_nats": 0.0534}
    tests = [failed(f"suites/a.py::test_{at}[m]") for at in range(40)]
    audits = [
        {
            "test": test["nodeid"],
            "check": f"check {at % 2}",
            "passed": False,
            "detail": f"words {at}",
            "cause": f"a:{at}",
        }
        for at, test in enumerate(tests)
    ]
    for audit in audits[:-1]:
        audit["likely_cause"] = likely
    for audit in audits[1:3]:
        audit["difference"] = difference | {"position": 13 + int(audit["detail"][-1])}
    cause = [
        "  39 tests (audits check 0, check 1): a gap of 0.05 looks like bfloat16: compute in float32",
        "    first difference: after position 14, token 5 where 9 leads by 0.053 nats",
    ]
    found = report([claim("EMAD-E2")], tests=tests, audits=audits)
    assert text(found, 120, most=80)[1:43] == [
        *cause,
        *(f"    also a.py::test_{at}[m]" for at in range(1, 39)),
        "  1 test (audit check 1): words 39",
        "gates: 1 of 1 hold",
    ]
    assert text(found, 120)[1:4] == [*cause, "  1 test (audit check 1): words 39"], "names give way"
    audits[0]["likely_cause"] = likely | {"kind": "prompt cut to 500 tokens"}
    assert text(found, 120)[1].startswith("  1 test (audit check 0): a gap")
    assert text(found, 120)[2] == "    words 0", "without a first difference"


@pytest.mark.parametrize(
    ("changes", "tier", "said"),
    [
        ([{}, {}], "tokens", "2 tests of tier tokens were the gate: all passed"),
        ([{}], None, "1 test was the gate: all passed"),
        (
            [{"kind": kind, "outcome": "skipped"} for kind in ("refused", "left out")] + [{}],
            "tokens",
            "3 tests of tier tokens were the gate: 1 did not apply, 1 not decided, 1 passed",
        ),
        ([{"claim": "EMAD-E1"}], None, "no claim and no test of this run is a gate"),
        ([{"shipped": None}], "tokens", "no claim and no test of this run is a gate"),
    ],
)
def test_a_green_run_says_which_tests_were_the_gate(changes, tier, said):
    tests = [passed(f"suites/a.py::test_{at}") | change for at, change in enumerate(changes)]
    found = report([claim("EMAD-E1")], tests=tests, settings={"tier": tier})
    assert text(found, 120)[0] == f"PASSED: {said}"
    gates = report([claim("EMAD-E2")], tests=tests, settings={"tier": tier})
    beside = f"; {said}" if tier and tests[0]["shipped"] else ""
    assert text(gates, 120)[0] == f"PASSED: 1 of 1 gate holds{beside}"


def test_the_decoders_audits_are_counted_where_it_is_judged():
    audits = [{"test": "t", "check": "rows", "passed": passed, "detail": ""} for passed in (True, True, None)]
    found = report([claim("EMAD-E2"), claim("EMAD-E5")], audits=audits, settings={"gate": "decoder"})
    assert text(found)[0] == "PASSED: 2 of 2 gates hold, and the decoder passed 2 audits"


def test_reasons_are_left_out_before_titles_are():
    """Ids alone are meaningless to a reader who does not know them."""
    names = ("EMAD-E3", "EMAD-E4", "EMAD-E9", "EMAD-E13", "EMAD-N1")
    rest = [claim(id, "unmeasured", f"{id} " + "because " * 30) for id in names]
    shown = " ".join(" ".join(text(report(rest), 80, 10)).split())
    assert "because" not in shown
    assert all(f" ({id})" in shown for id in names), "after its title"
    assert "Energy per token falls (EMAD-N1)" in shown


def test_a_verdict_that_differs_from_the_record_fails_the_run_whatever_it_is():
    known = [KNOWN, {**KNOWN, "claim": "EMAD-E2", "changed": True}]
    claims = [claim("EMAD-E1"), claim("EMAD-E2", fails=True, test="t")]
    found = report(claims, known=known, settings={"gate": "known"}, tests=[failed("t")])
    assert text(found)[0] == "FAILED: 1 of 2 verdicts differs from the record"


@pytest.mark.parametrize(("perplexity", "known"), [(30.0, True), (300.0, False)])
def test_a_model_that_does_not_know_the_text_is_said_before_any_gate(perplexity, known):
    point = {"model": "m", "name": "full depth", "corpus": "wikitext", "perplexity_reference": perplexity}
    found = report([claim("EMAD-F1")], points=[point], models=[{"name": "m", "vocabulary": 50_000}])
    second = text(found, 400)[1]
    said = "m does not know this text: full depth has perplexity 300 on wikitext, a guess among its 50,000 tokens"
    assert second.startswith("gates: ") if known else second.startswith(said)


def test_what_would_decide_a_claim_is_never_cut():
    remedy = "time it where nothing else runs, " * 12 + "and then once more"
    rest = [claim("EMAD-F2", "inconclusive", why=remedy), claim("EMAD-E10", "inconclusive", why=remedy)]
    assert " ".join(" ".join(text(report(rest))).split()).count(remedy) == 2


def test_reasons_are_cut_before_titles_are_left_out():
    rest = [claim("EMAD-E1", "falsified"), *(claim(id, "unmeasured", "because " * 30) for id in ("EMAD-N1", "EMAD-E4"))]
    whole, short = text(report(rest)), text(report(rest), most=len(text(report(rest))) - 2)
    assert len(short) < len(whole)
    assert "Energy per token falls (EMAD-N1): because" in " ".join(" ".join(short).split())


@pytest.mark.parametrize("width", range(40, 120, 3))
def test_a_value_and_its_unit_stay_on_one_line(width):
    lines = text(report([claim("EMAD-F1", "falsified"), claim("EMAD-E5", "falsified")]), width)
    assert [line for line in lines if line.strip().startswith("%")] == []
    assert "53.5 %" in " ".join(lines)


def test_the_rest_is_counted_and_named_with_what_would_decide_it():
    rest = [
        claim("EMAD-E1", "falsified"),
        claim("EMAD-E10", "inconclusive", OPEN, why="about 887 items would decide it", enough=887),
        claim("EMAD-E11", "measured"),
        *(claim(f"EE-{number}", "not applicable", "no encoder-decoder") for number in (1, 2, 3)),
        claim("EMAD-N1", "unmeasured", "no NVML device"),
    ]
    assert text(report(rest), 107) == [
        "PASSED: no claim and no test of this run is a gate",
        "7 claims: 1 falsified, 1 inconclusive, 1 measured, 4 not decided",
        "  falsified: Each layer is surer of the next token than the last (EMAD-E1)",
        "  inconclusive: A margin chosen on one text holds on another (EMAD-E10): about 887 items would decide it",
        "    more text may decide them: --emad-budget standard",
        "  not decided: 3 claims (EE-1 to EE-3): no encoder-decoder; Energy per token falls (EMAD-N1): no NVML",
        "    device",
        "  measured: A flatter entropy profile saves less (EMAD-E11)",
        "emad: decoder under test: mine",
        "emad: report written to out/report.json",
    ]


@pytest.mark.parametrize("remarks", [["texts open with 1", "num_beams=4: left out"], None, "nonsense"])
def test_what_is_remarked_of_a_models_files_is_said_once(remarks):
    found = report([claim("EMAD-E1")]) | {"models": [{"name": "m", "remarks": remarks}]}
    said = [line for line in text(found, 120) if line.startswith("emad: m: ")]
    assert said == ([f"emad: m: {remark}" for remark in remarks] if isinstance(remarks, list) else [])


def profile_table(entropies, rises=()):
    rows = [
        {
            "layer": layer,
            "mean entropy, nats": entropy,
            "target, nats": None,
            "echo %": 0.0,
            "agrees with last %": layer / len(entropies),
            "AUROC of low entropy for that": 0.5,
        }
        | {"shown rise, nats": dict(rises).get(layer)}
        for layer, entropy in enumerate(entropies, start=1)
    ]
    return {"title": "readouts", "model": "m", "rows": rows, "figure": "entropy profile"}


def test_a_profile_that_rises_is_named_with_its_largest_step_and_its_lowest_layer():
    rising = profile_table([1.5, 0.6, 1.1, 1.9], [(3, 0.5), (4, 0.8)])
    (said,) = [line for line in text(report([claim("EMAD-E1")], tables=[rising]), 400) if line.startswith("emad: m: ")]
    assert "entropy rises with depth (EMAD-E1), most from layer 3 → 4 by 0.80 nats" in said
    assert said.endswith("; is lowest after layer 2 of 4")


@pytest.mark.parametrize(
    ("table", "begins"),
    [
        (profile_table([2.0, 1.0, 0.5]), None),
        (profile_table([2.0, 0.5, 1.0]), "emad: m: entropy is lowest after layer 2 of 3"),
        (profile_table([2.0, 2.1, 1.0], [(2, 0.1)]), "emad: m: entropy rises with depth (EMAD-E1)"),
    ],
)
def test_a_falling_profile_is_not_mentioned_and_what_is_not_shown_is_not_called_a_rise(table, begins):
    said = [line for line in text(report([claim("EMAD-E1")], tables=[table]), 400) if line.startswith("emad: m: ")]
    assert [line[: len(begins or "")] for line in said] == ([begins] if begins else [])


@WIDTHS
@pytest.mark.parametrize("verdict", ["survived", "falsified", "inconclusive", "measured", "not applicable"])
def test_forty_lines_none_too_wide_whatever_came_out(width, verdict):
    points = [
        {
            "model": "m",
            "name": f"emad m={n}",
            "roles": ["chosen on validation"],
            "net_reduction": 0.1,
            "perplexity": 2.0,
        }
        for n in range(30)
    ]
    found = report(everything(verdict), points=points, failures=["something is missing " * 9] * 30)
    shown = text(found, width)
    assert len(shown) <= 40
    assert max(map(len, shown)) <= width
    assert shown[-1] == "emad: report written to out/report.json"


@WIDTHS
def test_everything_falsified_is_named_even_where_forty_lines_are_too_few(width):
    models = [f"a-model-of-somebody-{number}" for number in range(12)]
    shown = " ".join(" ".join(text(report(everything("falsified", models)), width, 4)).split())
    missing = [id for id in REGISTER if not REGISTER[id].gate and f"{id} of " not in shown]
    assert missing == []
    assert shown.count("leaves quality as it was: falsified (") == len(models)


def test_of_several_models_each_row_names_its_own():
    shown = text(report([claim(id, "falsified", model=model) for model in ("a", "b") for id in ("EMAD-F1", "EMAD-E1")]))
    assert "the last (EMAD-E1 of a); " in " ".join(" ".join(shown).split())
    assert [line for line in shown if line.endswith("leaves quality as it was: falsified (b)")]


def test_good_and_bad_news_are_set_alike():
    good, bad = (text(report([claim("EMAD-F1", verdict)])) for verdict in ("survived", "falsified"))
    assert [line.replace("falsified", "survived") for line in bad[2:]] == good[2:]


def test_held_against_the_record_the_gates_are_still_the_gates():
    """With that gate every recorded row gates: the summary would list only gates."""
    claims = [claim("EMAD-F1", gate=True), claim("EMAD-E1", gate=True)]
    shown = text(report(claims, known=[KNOWN], settings={"gate": "known"}))
    assert shown[1] == "gates: 1 of 1 hold"
    assert "1 verdicts compared with the record: 1 as recorded" in shown


def test_a_point_put_forward_shows_cost_and_quality_and_others_stay_in_their_table():
    point = {
        "model": "m",
        "name": "emad m=0.80",
        "roles": ["chosen on validation"],
        "net_reduction": 0.233,
        "perplexity_reference": 2.056,
        "perplexity": 2.057,
        "perplexity_rise": 0.0003,
        "interval": [0.0001, 0.0005],
        "accuracy": {"facts": [1.0, 0.9], "chart": [0.985, 0.985], "code": [1.0, 0.0]},
        "not_counted": {"code": "not exercised"},
        "time_ratio": {"1": 0.981},
        "tokens_per_s": {"1": [416.04, 407.9]},
        "peak_memory": {"bytes": 412_300_000, "of": "resident, this process"},
    }
    shown = " ".join(" ".join(text(report([claim("EMAD-F1")], points=[point, {"name": "full depth"}]))).split())
    assert (
        "emad m=0.80: chosen on validation; -23.3 % FLOPs net; speed 0.981× at batch 1 (408 tokens/s), peak memory "
        "412 MB (resident, this process); perplexity 2.056 → 2.057, +0.03 % [+0.01 %, +0.05 %]; "
        "worst of 2 tasks facts 1.000 → 0.900"
    ) in shown
    assert "full depth" not in shown


def test_ids_that_follow_one_another_are_a_range():
    assert format_id_ranges(["EE-1", "EE-2", "EE-4", "EE-5", "EE-6"]) == "EE-1, EE-2, EE-4 to EE-6"


def test_the_job_summary_is_a_table_of_gates_and_a_list():
    text = format_ci_job_summary(
        build_run_summary(report([claim("EMAD-F1", "falsified", model="a|b"), claim("EMAD-E1")])), ["here"]
    )
    assert text.startswith("## emad: a\\|b, m\n\n**FAILED: 1 of 1 gate does not hold**\n\n| gate")
    assert "| EMAD-F1 (a\\|b) | Saving 15 % of FLOPs leaves quality as it was | falsified |" in " ".join(text.split())
    assert "- 1 claim: 1 survived\n  - survived: Each layer is surer" in text
    for verdict in ("falsified", "inconclusive", "not applicable"):
        assert len(format_ci_job_summary(build_run_summary(report(everything(verdict)))).splitlines()) <= 40


def test_emad_report_prints_what_the_run_printed(tmp_path, capsys):
    legs = [Leg("x", "falsified", 0.5, None, 3, 0.1, "accuracy drop", good="lower").to_json()]
    found = report([claim("EMAD-F1", "falsified", legs=legs)], failures=["so it is"], exit_status=1)
    written(tmp_path, found)
    assert main(["report", str(tmp_path), "--text"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(text(found)) - 1] == text(found)[:-1]
    assert " ".join(" ".join(printed).split()).endswith(f"report read from {tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert main(["report", str(tmp_path), "--text", "--out", "elsewhere"]) == 4


def test_two_answers_that_the_point_loses_are_shown_of_the_task_that_loses_most():
    first = [
        {"prompt": "x" * 90 + " how many?", "full_depth": "7 pens", "at_point": "3 …", "depths": [12, 3]},
        {"prompt": "who?", "full_depth": "Mia", "at_point": "Kai", "depths": []},
        {"prompt": "never shown", "full_depth": "a", "at_point": "b", "depths": [1]},
    ]
    lost = {"facts": {"count": 2, "first": first[1:]}, "chart": {"count": 394, "first": first}}
    point = {"model": "m", "name": "emad m=0.00", "roles": ["calibrated default"], "lost_answers": lost}
    later = point | {"name": "later", "lost_answers": {"facts": {"count": 9, "first": first}}}
    printed = text(report([claim("EMAD-F1")], points=[{"name": "full depth"}, point, later]))
    assert "emad m=0.00 loses answers of full depth: chart 394, facts 2" in printed
    shown = " ".join(" ".join(printed).split())
    assert 'xx how many?" → "7 pens", now "3 …"' in shown
    assert 'chart: "who?" → "Mia", now "Kai"' in shown
    assert "never shown" not in shown
    assert "later loses" not in shown
    crowded = report(everything("falsified"), points=[point] * 9, failures=["something is missing " * 9] * 30)
    assert not any("loses answers" in line for line in text(crowded)), "claims are named before"


FORECASTS = {  # what would decide each claim that README's first run leaves open
    "EMAD-E10": "about 887 items would decide it in four of five samples",
    "EMAD-R1": "about 612 documents would decide it in four of five samples",
    "EMAD-R2": "too near the threshold for any number of documents",
    "EMAD-R3": "about 429 documents would decide it in four of five samples",
    "EMAD-R4": "about 3,120 documents would decide it in four of five samples",
}
NOT_DECIDED = {
    "EMAD-E6": "the foreign profile does no damage at 30.0% net: 0.0006 nats per token [-0.0003, inf]",
    "EMAD-N1": "no NVML device: the decoder runs on no GPU",
}


def first_run(gate):
    """Return a report in the shape of README's first run: 34 claims about emad-tiny, 31 of them on record."""
    lost = {"full_depth": "12 pens and 3 caps", "at_point": "12 pens and 3 pens", "depths": []}
    lost = {"count": 394, "first": [lost | {"prompt": f"{n} boxes hold 12 pens. How many pens?"} for n in (2, 3)]}
    facts = {"model": "emad-tiny", "perplexity_reference": 2.056, "interval": [0.0003, 0.0011]}
    first, chosen = (
        facts | {"name": name, "roles": [role], "net_reduction": saved, "perplexity": perplexity}
        for name, role, saved, perplexity in (
            ("emad m=0.00", "calibrated default", 0.443, 2.058),
            ("emad m=0.7958", "chosen on validation", 0.233, 2.057),
        )
    )
    first |= {"perplexity_rise": 0.0007, "accuracy": {task: [0.985, 0.0] for task in ("chart", *"abcd")}}
    first |= {"lost_answers": {"chart": lost, "facts": {"count": 97, "first": []}, "code": {"count": 12, "first": []}}}
    chosen |= {"perplexity_rise": 0.0003, "time_ratio": {"1": 0.956, "4": 0.7816}, "accuracy": {"recall": [1.0, 1.0]}}
    chosen |= {"tokens_per_s": {"1": [416.0, 398.0], "4": [1290.0, 1010.0]}}
    falsified = ("EMAD-F1-literal", "EMAD-E1", "EMAD-E3", "EMAD-E13", "EMAD-E4")
    claims = [
        *(claim(id, "falsified", model="emad-tiny") for id in ("EMAD-F1", "EMAD-F2")),
        *(claim(id, model="emad-tiny") for id in ("EMAD-E2", "EMAD-E5", "EMAD-E9")),
        claim("EAD-H1", model="emad-nano + emad-tiny"),
        *(claim(id, "falsified", model="emad-tiny") for id in falsified),
        *(claim(id, "inconclusive", model="emad-tiny", why=why, enough=9) for id, why in FORECASTS.items()),
        claim("EMAD-E11", "measured", model="emad-tiny"),
        *(claim(id, "not applicable", why, "emad-tiny") for id, why in NOT_DECIDED.items()),
        *(
            claim(f"EE-{n}", "not applicable", "the claim needs an encoder-decoder model, not a decoder-only model",
                  "emad-tiny")
            for n in range(1, 16)
        ),
    ]  # fmt: skip
    machine = "a verdict on time or energy belongs to the machine it was measured on"
    known = [
        KNOWN | {"claim": each["id"], "model": "emad-tiny", "outcomes": [each["verdict"]]}
        | ({"expected": None, "why": machine} if each["id"] in ("EE-14", "EMAD-F2", "EMAD-N1") else {})
        | ({"outcomes": ["survived", "inconclusive"]} if each["id"] == "EMAD-R1" else {})
        for each in claims
    ]  # fmt: skip
    skipped = [
        {"nodeid": f"t{n}", "shipped": f"suites/ablations/t.py::test_{n}", "why": ABOVE_BUDGET}
        | {"claim": f"EAD-{n}" if n < 24 else None}
        for n in range(34)
    ]
    found = report(claims, points=[first, chosen], known=known, deselected=skipped, settings={"gate": gate})
    found["decoder"] = complete_report()["decoder"]
    found["settings"]["models"] = ["emad-tiny"]
    for entry in claims:
        entry["fails"] &= gate == "paper"
    found["tables"] = [profile_table([1.5, 1.2, 0.9, 1.0, 1.9], [(4, 0.1), (5, 0.9)]) | {"model": "emad-tiny"}]
    return found


@pytest.mark.parametrize(("gate", "headline"), [("known", "PASSED: every verdict"), ("paper", "FAILED: 2 of 5 gates")])
def test_the_first_run_fits_with_titles_short_reasons_and_two_lost_answers(gate, headline):
    """Forecasts, and what the report or ``-v`` says as well, give way before them."""
    lines = text(first_run(gate))
    assert lines[0].startswith(headline)
    assert len(lines) <= 40
    shown = " ".join(" ".join(lines).split())
    for id in ("EMAD-E1", "EMAD-E4", *FORECASTS, *NOT_DECIDED):
        assert f"{REGISTER[id].display_title} ({id})" in shown
    for id, why in FORECASTS.items():
        assert f"({id}): {why.removesuffix(' would decide it in four of five samples')}" in shown
    assert "no NVML device: the decoder runs on no GPU" in shown
    assert "emad m=0.00 loses answers of full depth: chart 394, facts 97, code 12" in lines
    assert sum(line.startswith("  chart: ") for line in lines) == 2
    assert lines[3] == "           found 53.5 % [48.6 %, 58.3 %] accuracy drop; needs at most 1.00 %;"
    assert "what each id claims" not in shown


def test_what_gives_way_goes_by_the_order_of_omissions():
    """Though what still has room comes back."""
    signs = {
        SummaryOmission.FORECASTS: "about 887 items would decide it",
        SummaryOmission.SURVIVORS: "measured: A flatter",
        SummaryOmission.REMARKS: "emad: emad-tiny: entropy",
        SummaryOmission.LOST_ANSWERS: "loses answers of full depth",
        SummaryOmission.TITLES: "Better than exiting by top",
        SummaryOmission.FALSIFIED_TITLES: "The model ties its output",
    }
    longest = {}
    for most in range(60, 10, -1):
        shown = " ".join(" ".join(text(first_run("known"), 80, most)).split())
        longest |= {omission: most for omission, sign in signs.items() if sign not in shown and omission not in longest}
    assert list(longest) == list(signs)
    assert "about 887 items would decide it" in " ".join(text(first_run("known"), 400)), "long lines leave room"
