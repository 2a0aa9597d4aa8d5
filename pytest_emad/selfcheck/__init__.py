"""``--emad-selfcheck``: do the shipped suites, in this user's configuration, catch what is planted?

For every planted decoder of ``emad_ref.mutants`` a pytest of its own runs the test that is meant for it, with the
options of this run, and writes its report; a defect is caught where that test complains of it in the words it is meant
to (``emad_ref.report.mutation_results``). ``all`` runs the invariants and fidelity suites beside it. Honest decoders
must pass all of them in any case.

catalogue  the planted decoders, one by one, and what is said of them
process    one run, in a process that a defect may change or end as it likes

Here stands the option alone, because every run of pytest reads it.
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
    """As ``runner.run_selfcheck``, which is imported here: it takes long, and other runs do without it."""
    from pytest_emad.selfcheck import runner

    return runner.run_selfcheck(config)
