"""Pytest in processes of its own: replicates of this run for timing, and whole suite runs for commands.

A run that times hands shares of its pairs to processes started with the same command line plus ``--emad-afresh FILE``.
Such a process loads the same plugins, conftest files and decoder, collects nothing, carries out the task in FILE and
ends. Commands that judge many models start one pytest per run: a model that cannot be loaded stops no other run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emad_ref.errors import EmadError
from emad_ref.wire.address import ServerAddress, UrlAddress
from emad_ref.workers import child_process
from pytest_emad import decoder_providers, terminal
from pytest_emad.options import settings

if TYPE_CHECKING:
    from emad_ref.measurements.run_resources import SubprocessRunner


REPLICATE_FLAG = "--emad-afresh"
PROVIDERS_FILE = "providers"  # beside the task: who made decoders in the run that asks
RESTART_CODE = """import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
import pytest
raise SystemExit(pytest.main())"""

_INITIAL_PROVIDERS = pytest.StashKey[list[str]]()


def add_replicate_option(parser: pytest.Parser) -> None:
    parser.getgroup("emad").addoption(REPLICATE_FLAG, metavar="FILE", default=None, help=argparse.SUPPRESS)


def is_replicate(config: pytest.Config) -> bool:
    return getattr(config.known_args_namespace, "emad_afresh", None) is not None


def note_providers(config: pytest.Config) -> None:
    """Before anything is collected: whoever makes decoders by now is found by any process that starts as this one."""
    config.stash[_INITIAL_PROVIDERS] = _provider_names(config)


# ---------------------------------------------------------------- the run that asks


def subprocess_runner(config: pytest.Config) -> SubprocessRunner:
    """What this run can start."""
    from emad_ref.measurements.run_resources import SubprocessRunner

    if without := _obstacle(config):
        return SubprocessRunner(without=without)
    return SubprocessRunner(partial(_start_replicate, config), allowed_s=settings(config).process_timeout)


def _obstacle(config: pytest.Config) -> str:
    """Why no process can be started that has the same decoder; "" where one can."""
    decoder = settings(config).decoder
    if hasattr(config, "workerinput"):
        return "a worker of pytest-xdist; -n 0 starts others"
    if isinstance(decoder, ServerAddress | UrlAddress):
        return f"the decoder at {decoder} is one process, whoever asks it; exec: starts it anew"
    if any(not isinstance(plugin, str) for plugin in config.invocation_params.plugins or ()):
        return "pytest was handed plugins as objects, which reach no other process"
    if config.stash.get(_INITIAL_PROVIDERS, None) != _provider_names(config):
        return "the decoder's provider is found at collection; a conftest.py of the root folder, or -p, is found before"
    return ""


def _start_replicate(config: pytest.Config, task: Path, output: Path, seconds: float) -> int:
    """With this run's import path, whoever started it."""
    from emad_ref.workers.child_process import run_command  # of runs that race, not of every run's start

    task.with_name(PROVIDERS_FILE).write_text(json.dumps(_provider_names(config)), encoding="utf-8")
    given = config.invocation_params
    path = json.dumps([entry or str(given.dir) for entry in sys.path])
    named = [part for plugin in given.plugins or () for part in ("-p", str(plugin))]
    command = [
        sys.executable,
        "-c",
        RESTART_CODE,
        path,
        f"{REPLICATE_FLAG}={task}",
        *named,
        *map(os.fspath, given.args),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    return run_command(command, output, seconds, folder=given.dir, environment=environment)


def _provider_names(config: pytest.Config) -> list[str]:
    """Who makes decoders, by name; by class where pytest made up a name, which is another one in every process."""
    known = decoder_providers.providers(config).items()
    return [type(plugin).__qualname__ if name.isdecimal() else name for name, plugin in known]


# ---------------------------------------------------------------- the process that is asked


def run_replicate(config: pytest.Config) -> int:
    """Carry out the task of ``FLAG``; the exit status. An error is said on standard error, which its caller shows."""
    config._do_configure()  # no session, so that nobody writes a report: pytest configures itself only for one
    try:
        from emad_ref.measurements.process_replicates import run_task_file
        from emad_ref.measurements.run_resources import RunResources

        task = Path(config.getoption(REPLICATE_FLAG))
        _require_same_providers(config, json.loads(task.with_name(PROVIDERS_FILE).read_text(encoding="utf-8")))
        run_task_file(task, RunResources(partial(decoder_providers.make_decoder, config), terminal.progress_stream))
    except EmadError as error:
        print(error, file=sys.stderr)
        return int(pytest.ExitCode.INTERNAL_ERROR)
    finally:
        config._ensure_unconfigure()
    return int(pytest.ExitCode.OK)


def _require_same_providers(config: pytest.Config, theirs: list[str]) -> None:
    if (mine := _provider_names(config)) != theirs:
        raise EmadError(
            f"this process has the providers {', '.join(mine)}, and the run that started it {', '.join(theirs)}: "
            "provide the decoder in a conftest.py of the root folder or a plugin, for every process alike"
        )


def suite_arguments(suites: str, parts: Sequence[str] = ()) -> list[str]:
    """The words that name ``parts`` of ``suites``, folders of a path or of a package; all of it where none is named."""
    if Path(suites).exists():
        return [str(Path(suites, part)) for part in parts] or [suites]
    return ["--pyargs", *([f"{suites}.{part}" for part in parts] or [suites])]


def pytest_words(asked: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """The words of a pytest that is ``asked`` these, with ``--emad-NAME=VALUE`` for each of ``options``.

    One word each: pytest takes a folder that stands alone for a test path.
    """
    return [*asked, *(f"--emad-{name}={value}" for name, value in options.items())]


def run_pytest(words: Sequence[str], log: Path, seconds: float | None = None) -> int:
    """Exit status of a pytest of these ``words``; all that it says goes to ``log``.

    Raises:
        subprocess.TimeoutExpired: it was ended after ``seconds``.
    """
    return child_process.run_module("pytest", words, log, seconds)
