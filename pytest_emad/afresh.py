"""``--emad-afresh FILE``: this command line once more, in a fresh process, for one task and not for any test.

A run that times hands shares of its pairs to processes that were started as it was (``emad_ref.evidence.fresh``): the
same plugins, conftest files and options, so that the decoder under test is the same, whoever provides it. Such a
process configures itself, collects nothing, carries out the task in FILE and ends. The option is nobody's to type.

What cannot be started like that stays in the run's own process, and says why: a worker of xdist, a pytest that was
handed plugins as objects, a decoder that listens elsewhere and would not be another, a provider that no start finds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emad_ref.errors import EmadError
from emad_ref.wire.address import Server
from pytest_emad import backends, progress
from pytest_emad.options import settings

if TYPE_CHECKING:
    from emad_ref.evidence.host import Afresh

FLAG = "--emad-afresh"
PROVIDERS = "providers"  # beside the task: who made decoders in the run that asks
AGAIN = """import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
import pytest
raise SystemExit(pytest.main())"""

_AT_START = pytest.StashKey[list[str]]()


def add_option(parser: pytest.Parser) -> None:
    parser.getgroup("emad").addoption(FLAG, metavar="FILE", default=None, help=argparse.SUPPRESS)


def asked(config: pytest.Config) -> bool:
    return getattr(config.known_args_namespace, "emad_afresh", None) is not None


def remember(config: pytest.Config) -> None:
    """Before anything is collected: whoever makes decoders by now is found by any process that starts as this one."""
    config.stash[_AT_START] = _providers(config)


# ---------------------------------------------------------------- the run that asks


def afresh(config: pytest.Config) -> Afresh:
    """What this run can start."""
    from emad_ref.evidence.host import Afresh

    if without := _without(config):
        return Afresh(without=without)
    return Afresh(partial(_start, config), allowed_s=settings(config).process_timeout)


def _without(config: pytest.Config) -> str:
    """Why no process can be started that has the same decoder; "" where one can."""
    decoder = settings(config).decoder
    if hasattr(config, "workerinput"):
        return "a worker of pytest-xdist; -n 0 starts others"
    if isinstance(decoder, Server):
        return f"the decoder at {decoder} is one process, whoever asks it; exec: starts it anew"
    if any(not isinstance(plugin, str) for plugin in config.invocation_params.plugins or ()):
        return "pytest was handed plugins as objects, which reach no other process"
    if config.stash.get(_AT_START, None) != _providers(config):
        return "the decoder's provider is found at collection; a conftest.py of the root folder, or -p, is found before"
    return ""


def _start(config: pytest.Config, task: Path, output: Path, seconds: float) -> int:
    """With this run's import path, whoever started it."""
    from emad_ref.workers import bounded  # of runs that race, not of every run's start

    task.with_name(PROVIDERS).write_text(json.dumps(_providers(config)), encoding="utf-8")
    given = config.invocation_params
    path = json.dumps([entry or str(given.dir) for entry in sys.path])
    named = [part for plugin in given.plugins or () for part in ("-p", str(plugin))]
    command = [sys.executable, "-c", AGAIN, path, f"{FLAG}={task}", *named, *map(os.fspath, given.args)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    return bounded.status(command, output, seconds, folder=given.dir, environment=environment)


def _providers(config: pytest.Config) -> list[str]:
    """Who makes decoders, by name; by class where pytest made up a name, which is another one in every process."""
    known = backends.providers(config).items()
    return [type(plugin).__qualname__ if name.isdecimal() else name for name, plugin in known]


# ---------------------------------------------------------------- the process that is asked


def carry_out(config: pytest.Config) -> int:
    """Carry out the task of ``FLAG``; the exit status. An error is said on standard error, which its caller shows."""
    config._do_configure()  # no session, so that nobody writes a report: pytest configures itself only for one
    try:
        from emad_ref.evidence.afresh import answer
        from emad_ref.evidence.host import Host

        task = Path(config.getoption(FLAG))
        _require_same(config, json.loads(task.with_name(PROVIDERS).read_text(encoding="utf-8")))
        answer(task, Host(partial(backends.make_decoder, config), progress.stream))
    except EmadError as error:
        print(error, file=sys.stderr)
        return int(pytest.ExitCode.INTERNAL_ERROR)
    finally:
        config._ensure_unconfigure()
    return int(pytest.ExitCode.OK)


def _require_same(config: pytest.Config, theirs: list[str]) -> None:
    if (mine := _providers(config)) != theirs:
        raise EmadError(
            f"this process has the providers {', '.join(mine)}, and the run that started it {', '.join(theirs)}: "
            "provide the decoder in a conftest.py of the root folder or a plugin, for every process alike"
        )
