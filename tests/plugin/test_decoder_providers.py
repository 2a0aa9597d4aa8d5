"""Providers of the decoder under test: conftest, entry points and the named backend."""

from __future__ import annotations

from typing import Any, ClassVar

import psutil
import pytest

from pytest_emad.run.decoder_providers import OUR_PROVIDER, requested_provider_name
from pytest_emad.run.options import get_run_settings
from tests.plugin.conftest import Run

ASK = """
from types import SimpleNamespace
import pytest
from emad_ref.point import full_depth
from emad_ref.protocol import ModelRef, Request, Unsupported
from pytest_emad.run.decoder_providers import make_decoder

REQUEST = Request(ModelRef("m", lambda: SimpleNamespace(stepper="weights")), full_depth(2))

@pytest.mark.emad
def test_decoder(request):
    assert make_decoder(request.config, REQUEST) == {expected!r}
"""


def provider(name: str, answer: str) -> dict[str, str]:
    return {name: f"from emad_ref.protocol import Unsupported\ndef pytest_emad_make_decoder(config, request): {answer}"}


def test_a_conftest_provides_the_decoder(project: pytest.Pytester, run: Run) -> None:
    project.makeconftest("def pytest_emad_make_decoder(config, request): return request.model.name")
    project.makepyfile(ASK.format(expected="m"))
    run().assert_outcomes(passed=1)


@pytest.mark.parametrize("end", ["pass", "assert False", "raise KeyboardInterrupt", "pytest.exit('over')"])
def test_what_all_decoders_of_a_run_share_is_closed_with_it(project: pytest.Pytester, run: Run, end: str) -> None:
    """A child process of an engine once kept a finished run alive for 40 minutes."""
    project.makeconftest("""
        import subprocess, sys
        from functools import cache
        from pathlib import Path

        @cache
        def engine(config):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path("child").write_text(str(child.pid))
            config.add_cleanup(child.wait)  # the last one added runs first
            config.add_cleanup(child.kill)
            return "mine"

        def pytest_emad_make_decoder(config, request):
            return engine(config)
        """)
    project.makepyfile(ASK.format(expected="mine") + f"    {end}\n")
    try:
        run()
    except KeyboardInterrupt:
        assert end == "raise KeyboardInterrupt"
    assert not psutil.pid_exists(int((project.path / "child").read_text()))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import functools\npytest_emad_make_decoder = functools.partial(print)", "partial"),
        ("class pytest_emad_make_decoder: pass", "type"),
        ("pytest_emad_make_decoder = 5", "int"),
    ],
)
def test_a_hook_that_is_no_function_is_a_usage_error(project: pytest.Pytester, run: Run, code: str, kind: str) -> None:
    """pytest ignores such a hook, and would judge the reference decoder instead."""
    project.makeconftest(code)
    project.makepyfile("def test(): pass")
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = f"conftest.py: pytest_emad_make_decoder is a {kind}, but expected a function"
    assert said in "\n".join([*result.outlines, *result.errlines])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("return int", "returned the class int, but expected a decoder, an instance of it"),
        ("return object()", "returned a object without start, generate, synchronize, close, but expected a decoder"),
        ("yield 1", "returned a generator without start, generate, synchronize"),
    ],
)
def test_what_is_no_decoder_is_named(project: pytest.Pytester, run: Run, answer: str, said: str) -> None:
    project.makeconftest(provider("x", answer)["x"])
    guarded = ASK.format(expected=1).replace("request.config,", "request.config, lambda: None,")
    project.makepyfile(guarded.replace("make_decoder", "make_guarded_decoder"))
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*MalformedAnswerError: pytest_emad_make_decoder {said}*"])


def test_a_misspelt_hook_is_a_usage_error_in_one_line(project: pytest.Pytester, run: Run) -> None:
    """pytest itself reports an internal error of sixty lines."""
    project.makeconftest("def pytest_emad_make_decodr(config, request): return 'mine'")
    project.makepyfile("def test(): pass")
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = "conftest.py: pytest_emad_make_decodr is no hook; the hooks of this plugin: pytest_emad_make_decoder"
    assert f"ERROR: {said}" in result.errlines
    assert "INTERNALERROR" not in result.stdout.str()


def test_two_foreign_providers_are_a_usage_error(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(**provider("one", "return 1"), **provider("two", "return 2"), test_it=ASK.format(expected=2))
    result = run("-p", "one", "-p", "two")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--emad-backend=None, but expected one of" in result.stderr.str()
    run("-p", "one", "-p", "two", "--emad-backend", "two").assert_outcomes(passed=1)


def test_only_the_named_backend_is_asked(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(**provider("one", "return 1"), **provider("two", "return None"), test_it=ASK.format(expected=1))
    result = run("-p", "one", "-p", "two", "--emad-backend", "two")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NoDecoderError: --emad-backend=two returned no decoder for m at 'full depth'*"])


def test_an_unknown_backend_is_a_usage_error(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(ASK.format(expected=1))
    result = run("--emad-backend", "three")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--emad-backend='three', but expected a plugin with pytest_emad_make_decoder: emad-walked*"]
    )


def test_ours_answers_last_and_can_be_named(
    project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub replaces the reference decoder: the test asks which provider is called, not what it decodes."""
    import sys
    import types

    stand_in = types.ModuleType("pytest_emad.measurements.run_resources")
    stand_in.make_decoder_on_judge_model = lambda request: [request.model.name, request.point.name]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytest_emad.measurements.run_resources", stand_in)
    ours = ["m", "full depth"]
    project.makepyfile(**provider("one", "return None"), test_it=ASK.format(expected=ours))
    run().assert_outcomes(passed=1)
    run("-p", "one").assert_outcomes(passed=1)
    project.makepyfile(**provider("one", "return 1"))
    run("-p", "one", "--emad-backend", "emad-walked").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("given", "walk"),
    [("fast", "fast"), ("eager", "eager"), ("walked", "walked"), ("one", "fast"), (None, "fast")],
)
def test_how_ours_walks_is_chosen_by_the_same_option(project: pytest.Pytester, given: str | None, walk: str) -> None:
    arguments = () if given is None else ("--emad-backend", given)
    config = project.parseconfig("-p", "no:cacheprovider", *arguments)
    assert get_run_settings(config).study.walk == walk
    assert requested_provider_name(config) == (OUR_PROVIDER if given in ("fast", "eager", "walked") else given)


def test_refusals_reach_the_test(project: pytest.Pytester, run: Run) -> None:
    project.makeconftest(provider("x", "raise Unsupported('only lowers depth')")["x"])
    project.makepyfile(
        ASK.format(expected=1).replace(
            "    assert", "    with pytest.raises(Unsupported, match='lowers'):\n        assert"
        )
    )
    run().assert_outcomes(passed=1)


def test_a_hook_that_makes_no_decoder_in_time_is_named(project: pytest.Pytester, run: Run) -> None:
    project.makeconftest("import time\ndef pytest_emad_make_decoder(config, request): time.sleep(20)")
    guarded = ASK.format(expected=1).replace("request.config,", "request.config, lambda: None,")
    project.makepyfile(guarded.replace("make_decoder", "make_guarded_decoder"))
    result = run("--emad-decoder-timeout", "0.3")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*pytest_emad_make_decoder of the plugin gave no answer within 0.3 s*"])


def test_the_example_of_the_hook_works_as_printed(project: pytest.Pytester, run: Run) -> None:
    """The docstring's own lines, with a stub for the library that they import."""
    from pytest_emad import hookspecs

    assert hookspecs.__doc__ is not None
    lines = hookspecs.__doc__.split("::\n\n")[1].split("\n\nA packaged")[0].splitlines()
    project.makeconftest("\n".join(line[4:] for line in lines))
    project.makepyfile(
        mylib="def MyDecoder(name, point, seed, max_rows): return [name, seed, max_rows]",
        test_it=ASK.format(expected=["m", 0, 1]),
    )
    run().assert_outcomes(passed=1)


def test_a_decoder_elsewhere_is_the_only_one_asked_and_ends_with_the_run(
    project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two more foreign providers change nothing. A stub replaces the connection: the test asks which one is called."""
    import sys
    import types

    told: list[object] = []

    class StandIn:
        request_counts: ClassVar[dict[str, int]] = {}

        def __init__(self, where: object, seconds: float, dtype: str | None, baseline: object) -> None:
            told.append((str(where), seconds, dtype, baseline))

        def make(self, request: Any) -> str:
            return f"elsewhere {request.model.name}"

        def close(self) -> None:
            told.append("closed")

    module = types.ModuleType("pytest_emad.measurements.run_resources")
    module.RemoteDecoders = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytest_emad.measurements.run_resources", module)
    ask = ASK.format(expected="elsewhere m")
    project.makepyfile(**provider("one", "return 1"), **provider("two", "return 2"), test_it=ask, test_again=ask)
    options = (
        "--emad-decoder",
        "tcp:127.0.0.1:7007",
        "--emad-decoder-timeout",
        "3",
        "--emad-decoder-dtype",
        "bfloat16",
    )
    run("-p", "one", "-p", "two", *options).assert_outcomes(passed=2)
    assert told == [("tcp:127.0.0.1:7007", 3.0, "bfloat16", None), "closed"]
