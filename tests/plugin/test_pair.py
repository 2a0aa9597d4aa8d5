"""A pair that cannot be: it ends the run before any question is asked."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Run


def test_a_refused_pair_ends_the_run_before_any_question(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test_pair(emad_pair):\n    assert False, 'never asked'\n")
    result = run("--emad-pair", "emad-tiny,emad-nano")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = result.stdout.str() + result.stderr.str()
    assert "--emad-pair='emad-tiny (" in said
    assert "never asked" not in said
