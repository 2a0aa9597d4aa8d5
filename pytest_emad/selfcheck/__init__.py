"""``--emad-selfcheck``: judge the suites with mutants, decoders with one known defect, in place of a decoder.

For every mutant of ``emad_ref.mutants`` a pytest of its own runs the test that must catch it, with the options of this
run, and writes its report. A defect is caught where that test complains of it in the expected words
(``emad_ref.report.mutation_results``). ``all`` runs the invariants and fidelity suites as well; honest decoders must
pass them in any case.

Only the option is here, because every run of pytest reads it; ``runner`` does the work.
"""

from __future__ import annotations

import pytest

FLAG = "--emad-selfcheck"
MEANT, ALL, KINDS = "meant", "all", "kinds"  # whole catalogue, against the tests meant; against more; one of each kind


def add_option(parser: pytest.Parser) -> None:
    parser.getgroup("emad").addoption(
        FLAG,
        nargs="?",
        const=MEANT,
        metavar="NAMES",
        help=f"judge the suites in place of a decoder, by planted ones; ={ALL}, ={KINDS}, or ={'NAME,NAME'} "
        "(docs/selfcheck.md)",
    )


def is_requested(config: pytest.Config) -> bool:
    return config.getoption(FLAG) is not None


def run_selfcheck(config: pytest.Config) -> int:
    """As ``runner.run_selfcheck``, which is imported here: the import is slow, and other runs do not need it."""
    from pytest_emad.selfcheck import runner

    return runner.run_selfcheck(config)
