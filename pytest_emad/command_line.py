"""What pytest makes of a command line before it knows our options, and of what was pasted from typeset text.

pytest looks for its root folder before plugins add options: the value of ``--emad-data DIR`` is a test path to it, and
so are our installed suites. Its caches would go there, and the configuration of the user's project would not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from emad_ref.statistics.verdicts import DASH_VARIANTS
from pytest_emad import environment


def check_command_line(config: pytest.Config, arguments: Sequence[str]) -> None:
    """Before conftest files are looked for; ``arguments`` as given, those of ini file and environment first.

    Raises:
        pytest.UsageError: pytest misunderstood them, and nobody but the user can say it better.
    """
    _check_dashes(arguments)
    given, folder = config.known_args_namespace, config.invocation_params.dir
    ours = any(environment.suite_path(name, folder, given.pyargs) is not None for name in given.file_or_dir)
    if ours or any(argument.startswith("--emad-") for argument in arguments):
        _check_workers(config, arguments)
        _keep_root(config, arguments)


def _check_dashes(arguments: Sequence[str]) -> None:
    """An option that starts with another dash than the keyboard's is a test path to pytest, and not found."""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        name = option.translate(DASH_VARIANTS).replace("—", "-").lstrip("-")
        dashed = option.translate(DASH_VARIANTS).replace("—", "-").startswith("-")
        if dashed and name.startswith("emad-") and not option.isascii():
            raise pytest.UsageError(
                f"{argument}: its dashes are not those of a keyboard, as text pasted from a page has them; "
                f"write --{name}{equals}{value}"
            )


def _check_workers(config: pytest.Config, arguments: Sequence[str]) -> None:
    wanted = [one for one in arguments if one in ("-n", "--numprocesses") or one.startswith("--numprocesses=")]
    wanted += [one for one in arguments if one.startswith("-n") and one[2:].isdecimal()]
    if wanted and not config.pluginmanager.has_plugin("xdist"):
        raise pytest.UsageError(
            f"{wanted[0]}: pytest-xdist, which runs tests in several processes, is not installed; "
            f"leave {wanted[0]} out, or pip install pytest-xdist"
        )


def _keep_root(config: pytest.Config, arguments: Sequence[str]) -> None:
    """pytest's root folder as it would be had it known our options, and without our installed suites."""
    from _pytest.config.findpaths import determine_setup  # pytest's own way, to which no public name leads

    given, folder = config.known_args_namespace, config.invocation_params.dir
    if given.inifilename or given.rootdir:
        return
    paths = [name for name in given.file_or_dir if not _is_installed_suite(folder / name.split("::")[0])]
    root, ini, *_ = determine_setup(
        inifile=None, override_ini=None, args=paths, rootdir_cmd_arg=None, invocation_dir=folder
    )
    if ini != config.inipath:
        raise pytest.UsageError(_misread_message(arguments, folder, f"the configuration in {ini or root} was not read"))
    if root != config.rootpath:
        if given.confcutdir == str(config.rootpath):
            given.confcutdir = str(root)
        config._rootpath = root
        if config.rootpath != root:  # a pytest that keeps it elsewhere
            raise pytest.UsageError(
                _misread_message(arguments, folder, f"its root is {config.rootpath} and not {root}")
            )


def _is_installed_suite(path: Path) -> bool:
    return path.resolve().is_relative_to(environment.INSTALLED_SUITES)


def _misread_message(arguments: Sequence[str], folder: Path, so: str) -> str:
    """The option whose value pytest took for a test path, and how to write it."""
    for option, value in pairwise(arguments):
        if option.startswith("--emad-") and "=" not in option and (folder / value).exists():
            return f"{option} {value}: pytest took {value} for a test path, and {so}; write {option}={value}"
    return f"pytest took a path for the tests of a project, and {so}; name the suites as --pyargs pytest_emad.suites"
