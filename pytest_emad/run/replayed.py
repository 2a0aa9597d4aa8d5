"""One test of an earlier run, alone again: what a report keeps for it, and the run that ``emad replay`` starts.

A report keeps the arguments that decide a test, and no others. ``DECIDING`` lists those of pytest; ours are kept, and
those that a conftest.py or the decoder's plugin adds. What writes, selects, repeats or prints is in no list, so it is
left out. Values are those that pytest parsed, so options of ``PYTEST_ADDOPTS`` and of ``addopts`` are among them.

The run gets the recorded report by ``--emad-replay FILE``. Before its first test it compares root folder, settings and
decoder with the record, and refuses to run under others.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_emad.run.decoder_providers import HOOK, provider_answer_counts, registered_providers_by_name
from pytest_emad.run.option_table import OPTIONS
from pytest_emad.run.options import DEMANDS, REPLAY, get_run_settings

# pytest's options that decide what is collected under which node id, which plugins are loaded, and how a test ends
DECIDING = {
    "-p": "plugins",
    "-c": "inifilename",
    "-W": "pythonwarnings",
    "--rootdir": "rootdir",
    "--confcutdir": "confcutdir",
    "--import-mode": "importmode",
    "--assert": "assertmode",
    "--ignore": "ignore",
    "--ignore-glob": "ignore_glob",
    "--pyargs": "pyargs",
    "--noconftest": "noconftest",
    "--runxfail": "runxfail",
    "--collect-in-virtualenv": "collect_in_virtualenv",
    "--continue-on-collection-errors": "continue_on_collection_errors",
    "--disable-plugin-autoload": "disable_plugin_autoload",
}
SPELLINGS = {"--config-file": "-c", "--pythonwarnings": "-W", "--override-ini": "-o"}  # other names of the same options
# ini values of ``-o`` that do the same, beside ours
DECIDING_INI = frozenset(
    {
        *("python_files", "python_classes", "python_functions", "pythonpath", "testpaths", "norecursedirs", "markers"),
        *("filterwarnings", "usefixtures", "collect_imported_tests", "consider_namespace_packages", "strict"),
        *("xfail_strict", "strict_xfail", "empty_parameter_set_mark", "required_plugins", "minversion"),
    }
)
OWN_OUTPUTS = frozenset({"report", "update-golden"})
ADDED_OPTION = re.compile(r"addoption\((\s*(?:[\"'][^\"']*[\"']\s*,?\s*)+)")  # the names in a call of ``addoption``
QUOTED_FLAG = re.compile(r"[\"'](--?[^\"']+)[\"']")
PACKAGE = Path(__file__).parents[1]  # whose providers are ours
VARIABLES = ("PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")  # of the environment; they choose plugins


def build_replay_entry(config: pytest.Config) -> dict[str, Any]:
    """The entry ``run.replay`` of a report: how to run one of its tests again.

    Returns
    -------
    dict
        ``folder`` of the call, ``arguments`` of pytest that decide its tests, ``left_out`` arguments, and the
        ``environment`` variables that choose plugins, null if unset.
    """
    paths = list(config.args) if config.args_source is pytest.Config.ArgsSource.ARGS else []
    groups = list(_grouped(_typed_words(config), paths))
    flags = _flags_of_decoder(config, [flag for flag, _ in groups])
    kept = [*_deciding_arguments(config), *(word for flag, words in groups if flag in flags for word in words)]
    known = {*DECIDING, *flags, *(option.flag for option in OPTIONS if option.name not in OWN_OUTPUTS)}
    left_out = [words for flag, words in groups if flag not in known and not (flag == "-o" and _is_deciding_ini(words))]
    return {
        "folder": str(config.invocation_params.dir),
        "arguments": [*kept, *paths],
        "left_out": [shlex.join(words) for words in left_out],
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }


def _typed_words(config: pytest.Config) -> list[str]:
    return [
        *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
        *config.getini("addopts"),
        *map(str, config.invocation_params.args),
    ]


def _grouped(words: Sequence[str], paths: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(Flag, its words) of each typed option; a word that is no option and no test path is the value before it."""
    group: list[str] = []
    for word in words:
        if word.startswith("-") and word != "-":
            if group:
                yield _flag(group[0]), group
            group = [word]
        elif group and word not in paths:
            group.append(word)
    if group:
        yield _flag(group[0]), group


def _flag(word: str) -> str:
    name = word.partition("=")[0] if word.startswith("--") else word[:2]
    return SPELLINGS.get(name, name)


def _deciding_arguments(config: pytest.Config) -> Iterator[str]:
    named = [str(plugin) for plugin in config.invocation_params.plugins or () if isinstance(plugin, str)]
    for flag, dest in DECIDING.items():
        value = config.getoption(dest, None)
        if value is True:
            yield flag
        for each in (value if isinstance(value, list) else [value]) if value not in (None, False) else ():
            if each is not True:
                yield from ((flag, str(each)) if len(flag) == 2 else (f"{flag}={each}",))
        yield from (word for plugin in (named if flag == "-p" else ()) for word in ("-p", plugin))
    for override in config.getoption("override_ini", None) or ():
        if _is_deciding_ini([override]):
            yield from ("-o", override)
    for option in OPTIONS:
        value = None if option.name in OWN_OUTPUTS else config.getoption(option.flag)
        if value is not None and option.switch:
            yield option.flag
        elif value is not None:
            yield from (f"{option.flag}={each}" for each in (value if option.many else [value]))


def _is_deciding_ini(words: Sequence[str]) -> bool:
    name = words[-1].removeprefix("--override-ini=").removeprefix("-o").partition("=")[0].strip()
    return name in DECIDING_INI or (name.startswith("emad_") and name != "emad_report")


def _flags_of_decoder(config: pytest.Config, typed: Iterable[str]) -> set[str]:
    """Those of the options ``typed`` that a conftest.py or the package of the decoder's plugin adds to pytest."""
    text = "\n".join(_source(file) for file in sorted(_files_of_decoder(config)))
    added = {flag for call in ADDED_OPTION.findall(text) for flag in QUOTED_FLAG.findall(call)}
    return added.intersection(typed) - {option.flag for option in OPTIONS}


def _files_of_decoder(config: pytest.Config) -> Iterator[Path]:
    providers = list(registered_providers_by_name(config).values())
    for plugin in config.pluginmanager.get_plugins():
        module = plugin if isinstance(plugin, ModuleType) else sys.modules.get(type(plugin).__module__)
        file = Path(getattr(module, "__file__", None) or "")
        if file.name == "conftest.py":
            yield file
        elif plugin in providers and file.suffix == ".py" and PACKAGE not in file.parents:
            yield from file.parent.glob("*.py") if getattr(module, "__package__", "") else (file,)


@cache
def _source(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


# ---------------------------------------------------------------- the run


@cache
def _read_recorded(path: str) -> tuple[str, Mapping[str, Any]]:
    """(Node id of the test, report of the run that is repeated)."""
    recorded = json.loads(Path(path).read_text(encoding="utf-8"))
    return recorded["test"], recorded["report"]


def require_recorded_settings(config: pytest.Config) -> None:
    """Refuse a replay in another root folder, or with other settings, before anything is collected.

    Raises:
        pytest.UsageError: it names the recorded and the present value.
    """
    if (path := config.getoption(REPLAY)) is None:
        return
    _, report = _read_recorded(path)
    root, here = report["run"]["project"]["root"], str(config.rootpath)
    if root != here:
        raise pytest.UsageError(
            f"{REPLAY}: the recorded root folder is {root}, but here it is {here}; restore pytest's ini file there, or "
            "record the run again"
        )
    now = json.loads(json.dumps(get_run_settings(config).to_json()))
    for name, recorded in report["settings"].items():
        if name not in DEMANDS and now.get(name, recorded) != recorded:
            raise pytest.UsageError(
                f"{REPLAY}: the recorded run had {name}={recorded!r}, but now it is {now[name]!r}; restore its ini "
                "file, or record the run again"
            )


def select_recorded_test(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the recorded test, under the recorded decoder.

    Raises:
        pytest.UsageError: the test does not exist; the decoder comes from another plugin or conftest.py.
    """
    if (path := config.getoption(REPLAY)) is None:
        return
    test, report = _read_recorded(path)
    chosen = [item for item in items if item.nodeid == test]
    if not chosen:
        raise pytest.UsageError(
            f"{REPLAY}: pytest collected {len(items)} tests here and not {test}; restore its file, or record the run "
            "again"
        )
    recorded, here = (
        {provider["plugin"]: provider["name"] for provider in providers}
        for providers in (report["decoder"]["providers"], provider_answer_counts(config))
    )
    if recorded.keys() != here.keys():
        raise pytest.UsageError(
            f"{REPLAY}: the recorded decoder is {_names(recorded)}, but here it is {_names(here)}; restore the plugin "
            f"or conftest.py with {HOOK}, or record the run again"
        )
    if others := [item for item in items if item.nodeid != test]:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def _names(providers: Mapping[str, str]) -> str:
    return ", ".join(providers.values()) or "none"
