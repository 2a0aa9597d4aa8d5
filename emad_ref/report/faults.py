"""What keeps a report from being proof that everything was judged, and passed: one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emad_ref.report.consistency import contradictions
from emad_ref.report.missing import another, missing, waived
from emad_ref.report.reading import Report


def faults(report: Report, asked: Sequence[str], shipped: Sequence[str], decoder: str | None) -> Iterator[str]:
    """One sentence for each thing that keeps ``report`` from being proof; none where it is.

    Args:
        report: of schema 2.
        asked: suites that must have run; what the run itself was told to run must have run in any case.
        shipped: names of the tests that this version ships.
        decoder: whose decoder must have been judged, None: anybody's.
    """
    if report["state"] != "complete":
        yield f"state={report['state']!r}, but expected 'complete': the run did not come to its end"
    run = report["run"]
    if run["exit_status"] != 0:
        yield f"exit_status={run['exit_status']!r}, but expected 0"
    yield from (f"the run failed as a whole: {failure}" for failure in run["failures"])
    for entry in report["tests"]:
        if entry["outcome"] in ("failed", "error"):
            yield f"{entry['nodeid']}: {entry['outcome']} ({entry['reason'].partition(chr(10))[0]})"
    yield from (said for said in contradictions(report) if said not in run["failures"])
    if decoder is not None and (judged := another(report, decoder)):
        yield f"decoder={decoder!r} was required, but {judged}"
    waivers = [waiver["of"] for waiver in report["waivers"]]
    wanted = list(dict.fromkeys([*run["asked"], *asked]))
    # whoever's decoder it was: a run of ours may leave tests out, a proof may not
    yield from (str(gap) for gap in missing(report, wanted, shipped, always=True) if not waived(gap, waivers))
