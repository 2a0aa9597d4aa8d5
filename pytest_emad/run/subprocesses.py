"""Pytest in separate processes: replicates of this run for timing, and whole suite runs for commands.

A timing run starts processes with its own command line plus ``--emad-afresh FILE`` and gives each a share of the timed
pairs. Such a process loads the same plugins, conftest files and decoder, collects nothing, runs the task in FILE and
ends. Commands that judge many models start one pytest per run, so a model that cannot be loaded stops no other run.
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

from emad_ref.absent import Absent
from emad_ref.errors import EmadError
from emad_ref.workers import child_process
from pytest_emad.remote.address import ServerAddress, UrlAddress
from pytest_emad.run import decoder_providers, terminal
from pytest_emad.run.options import get_run_settings

if TYPE_CHECKING:
    from pytest_emad.measurements.run_resources import SubprocessRunner


REPLICATE_FLAG = "--emad-afresh"
PROVIDERS_FILE = "providers"  # file next to the task: names of the decoder providers of the starting run

_INITIAL_PROVIDERS = pytest.StashKey[list[str]]()


def add_replicate_option(parser: pytest.Parser) -> None:
    parser.getgroup("emad").addoption(REPLICATE_FLAG, metavar="FILE", default=None, help=argparse.SUPPRESS)


def is_replicate_process(config: pytest.Config) -> bool:
    return getattr(config.known_args_namespace, "emad_afresh", None) is not None


def record_provider_names(config: pytest.Config) -> None:
    """Record the providers that exist before collection, as in any process with the same command line."""
    config.stash[_INITIAL_PROVIDERS] = _provider_names(config)


# ---------------------------------------------------------------- the timing run


def make_subprocess_runner(config: pytest.Config) -> SubprocessRunner:
    """Make a runner that starts replicates of this run in fresh processes, or has the reason why it cannot."""
    from pytest_emad.measurements.run_resources import SubprocessRunner

    if absent := _absent_process(config):
        return SubprocessRunner(absent)
    return SubprocessRunner(partial(_start_replicate, config), allowed_s=get_run_settings(config).process_timeout)


def _absent_process(config: pytest.Config) -> Absent | None:
    """Why a new process cannot have the same decoder; None if it can."""
    decoder = get_run_settings(config).decoder
    if hasattr(config, "workerinput"):
        return Absent("this is a worker of pytest-xdist; with -n 0 the run starts fresh processes")
    if isinstance(decoder, ServerAddress | UrlAddress):
        one = f"the decoder at {decoder} is one running process"
        return Absent(f"{one}; with exec: each fresh process starts its own")
    if any(not isinstance(plugin, str) for plugin in config.invocation_params.plugins or ()):
        return Absent("pytest was called with plugin objects, which cannot be passed to another process")
    if config.stash.get(_INITIAL_PROVIDERS, None) != _provider_names(config):
        return Absent("the decoder's provider is loaded during collection; load it by a root conftest.py or -p")
    return None


def _start_replicate(config: pytest.Config, task: Path, output: Path, seconds: float) -> int:
    """Run ``task`` in a new process with this run's command line and import path; its exit status."""
    task.with_name(PROVIDERS_FILE).write_text(json.dumps(_provider_names(config)), encoding="utf-8")
    given = config.invocation_params
    return child_process.run_module_for_status(
        "pytest",
        [
            f"{REPLICATE_FLAG}={task}",
            *(part for plugin in given.plugins or () for part in ("-p", str(plugin))),
            *map(os.fspath, given.args),
        ],
        output,
        seconds,
        folder=given.dir,
        environment={key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
        path=[entry or str(given.dir) for entry in sys.path],
    )


def _provider_names(config: pytest.Config) -> list[str]:
    """Names of the decoder providers; the class name in place of pytest's generated one, which differs by process."""
    known = decoder_providers.registered_providers_by_name(config).items()
    return [type(plugin).__qualname__ if name.isdecimal() else name for name, plugin in known]


# ---------------------------------------------------------------- the replicate


def run_replicate_task(config: pytest.Config) -> int:
    """Run the task of ``REPLICATE_FLAG`` and return the exit status. The caller shows standard error."""
    config._do_configure()  # pytest configures itself only in a session, which would write a report
    try:
        from pytest_emad.measurements.process_replicates import run_task_file
        from pytest_emad.measurements.run_resources import RunResources

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
            f"this process has the providers {', '.join(mine)}, but the run that started it has {', '.join(theirs)}; "
            "provide the decoder in a conftest.py of the root folder or in a plugin, so that every process loads it"
        )


def build_suite_path_arguments(suites: str, parts: Sequence[str] = ()) -> list[str]:
    """Pytest arguments for ``parts`` (folders) of ``suites``, a path or a package; all of it by default."""
    if Path(suites).exists():
        return [str(Path(suites, part)) for part in parts] or [suites]
    return ["--pyargs", *([f"{suites}.{part}" for part in parts] or [suites])]


def build_pytest_arguments(asked: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """Pytest arguments: ``asked``, then ``--emad-NAME=VALUE`` for each of ``options``.

    Name and value are one word, because pytest takes a folder in a word of its own for a test path.
    """
    return [*asked, *(f"--emad-{name}={value}" for name, value in options.items())]


def run_pytest(words: Sequence[str], log: Path, seconds: float | None = None) -> int:
    """Run pytest with the arguments ``words``, its output in ``log``; its exit status.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds`` and was stopped.
    """
    return child_process.run_module_for_status("pytest", words, log, seconds)
