"""Preconditions of a run: one installation, collected suites, caches, one GPU per process, a valid command line.

A run without tests must not look like a run without failures: with a user's ``python_files`` the suites may collect no
test, and pytest then exits with status 0. pytest determines its root folder before plugins add options, so it takes the
value of ``--emad-data DIR``, and the installed suites, for test paths. It would then put its caches there and ignore
the configuration of the user's project.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

import emad_ref
import pytest_emad
from emad_ref.errors import BadArgument, call_all, escape_unsafe, nearest_names
from emad_ref.files import resolve_path
from pytest_emad.report import deselection as suites_source
from pytest_emad.report.deselection import path_below_suites
from pytest_emad.report.provenance import DISTRIBUTION, installed_version
from pytest_emad.run.option_table import OPTION_FLAGS
from pytest_emad.run.options import REPLAY, get_run_settings
from pytest_emad.statistics.verdicts import DASH_VARIANTS, load_register

if TYPE_CHECKING:
    from packaging.requirements import Requirement


EXTRA = "suites"  # the extra whose packages the suites need

SOURCE_ROOT = Path(pytest_emad.__file__).resolve().parents[1]
SUITES = suites_source.SUITES
INSTALLED_SUITES = SOURCE_ROOT / "pytest_emad" / "suites"


def require_same_source_tree() -> None:
    """Require that ``pytest_emad`` and ``emad_ref`` come from one tree, so that versions cannot mix.

    Raises:
        pytest.UsageError: they come from two places.
    """
    reference = Path(emad_ref.__file__).resolve().parents[1]
    if reference != SOURCE_ROOT:
        raise pytest.UsageError(
            f"pytest_emad comes from {SOURCE_ROOT}, but emad_ref from {reference}; "
            "uninstall one of them, or run from the checkout after `pip install -e .`"
        )


def require_compatible_versions() -> None:
    """Compare the metadata with the code, and installed versions with their bounds, which ``--no-deps`` bypasses.

    Raises:
        pytest.UsageError: metadata of another version; a dependency that is missing or outside its bounds.
    """
    from packaging.requirements import Requirement  # only for the suites

    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return  # a tree that is not installed declares no bounds
    if (there := installed_version(DISTRIBUTION)) != emad_ref.__version__:
        raise pytest.UsageError(
            f"{DISTRIBUTION}={there} is installed, but the code in {SOURCE_ROOT} is {emad_ref.__version__}; "
            "reinstall: pip install -e ."
        )
    needed = [(requirement, who) for requirement in map(Requirement, declared) if (who := _requirer(requirement))]
    unfit = [(requirement, who) for requirement, who in needed if not _is_satisfied(requirement)]
    if unfit:
        (first, needs), *_ = unfit
        bounds = [f"{requirement.name}{requirement.specifier}" for requirement, _ in unfit]
        raise pytest.UsageError(
            f"{first.name}={installed_version(first.name)}, but {needs} {bounds[0]}; "
            f"pip install {' '.join(repr(one) for one in bounds)}"
        )


def _is_satisfied(requirement: Requirement) -> bool:
    found = installed_version(requirement.name)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _requirer(requirement: Requirement) -> str:
    """Name of the part of this project that needs ``requirement``; "" if none does here."""
    needs = {"": f"{DISTRIBUTION} needs", EXTRA: f"{DISTRIBUTION}[{EXTRA}], which the suites need, needs"}
    marker = requirement.marker
    return next((words for extra, words in needs.items() if marker is None or marker.evaluate({"extra": extra})), "")


def requested_suite_arguments(config: pytest.Config) -> list[str]:
    """Command-line arguments that name the suites, as paths or as ``pytest_emad.suites…`` with ``--pyargs``."""
    return [argument for argument in config.args if _suite_path(argument, config) is not None]


def _suite_path(argument: str, config: pytest.Config) -> Path | None:
    return resolve_suite_path(argument, config.invocation_params.dir, config.getoption("pyargs"))


def resolve_suite_path(argument: str, folder: Path, pyargs: bool) -> Path | None:
    """The file or folder of the suites that ``argument``, typed in ``folder``, names; None: another path."""
    name = argument.split("::")[0]
    if pyargs and name.split(".")[:2] == ["pytest_emad", "suites"]:
        inside = SOURCE_ROOT.joinpath("pytest_emad", "suites")
        path = (inside if inside.is_dir() else SOURCE_ROOT / "suites").joinpath(*name.split(".")[2:])
        return path if path.is_dir() else path.with_suffix(".py")
    path = resolve_path(folder / name)
    return path if any(path.is_relative_to(suites) for suites in SUITES) else None


def is_shipped_test(item: pytest.Item) -> bool:
    return shipped_file_name(item.path) is not None


def shipped_file_name(path: Path) -> str | None:
    """``suites/…`` for a shipped file, else None."""
    return _shipped_name(path, SUITES)


@cache
def _shipped_name(path: Path, suites: tuple[Path, ...]) -> str | None:
    """As ``shipped_file_name``, cached, because every phase of every test of any run needs it."""
    return path_below_suites(path.resolve(), suites)


def shipped_test_name(item: pytest.Item) -> str | None:
    """``suites/…/test_x.py::test_y`` for a shipped test, without its parameters."""
    file = shipped_file_name(item.path)
    return None if file is None else f"{file}::{getattr(item, 'originalname', None) or item.name}"


def all_shipped_test_names() -> list[str]:
    """Every shipped test, collected or not."""
    return suites_source.list_shipped_tests(SUITES)


def require_valid_waivers(config: pytest.Config) -> None:
    """Require that every waiver names a claim, decoder or shipped test that can stay undecided.

    Raises:
        BadArgument: a waiver with another name.
    """
    if not (waivers := get_run_settings(config).waive):
        return
    from pytest_emad.report.gaps import DECIDING_TESTS, DECODER, waivable_names  # only on demand

    known = waivable_names(all_shipped_test_names())
    for of, _ in waivers:
        if of not in known:
            claims = ", ".join(DECIDING_TESTS)
            expected = f"{claims}, {DECODER}, or a shipped test or its file, e.g. {known[-1]}"
            raise BadArgument("--emad-waive", of, f"one of {expected}")


# options of other plugins that contradict a run of the suites: (name, value, as typed, reason, remedy)
CONTRADICTIONS = (
    (
        "dist",
        "each",
        "--dist each",
        "pytest-xdist runs every test in each process, but a test has one verdict; write --dist load",
    ),
    (
        "testmon",
        True,
        "--testmon",
        "pytest-testmon leaves out tests whose code did not change, but a gate needs all; run without --testmon",
    ),
)


def require_compatible_plugin_options(config: pytest.Config) -> None:
    """Refuse options of other plugins under which no run of the suites can pass.

    Raises:
        pytest.UsageError: one of ``CONTRADICTIONS``.
    """
    if hasattr(config, "workerinput") or not requested_suite_arguments(config):
        return
    for name, value, typed, why in CONTRADICTIONS:
        if config.getoption(name, None) == value:
            raise pytest.UsageError(f"{typed}: {why}")


def require_available_models(config: pytest.Config) -> None:
    """Refuse models that cannot be loaded, before collection or imports for loading.

    Under xdist only the controller checks it.

    Raises:
        EmadError: unknown names, models that are not installed or were not fetched, or of a hub that is out of reach.
    """
    if hasattr(config, "workerinput") or config.option.collectonly or not requested_suite_arguments(config):
        return
    from emad_ref.models.names import require_weights_available  # imports NumPy, so only on demand

    given = get_run_settings(config)
    names = [("--emad-model", name) for name in given.models]
    names += [("--emad-pair", name) for name in given.pair or () if given.pair_named]
    call_all(partial(require_weights_available, name, option) for option, name in names)


def require_installed_extras(config: pytest.Config) -> None:
    """Require the extras that the options need, before collection. Raises MissingExtra."""
    get_run_settings(config).study.require_extras()


def require_known_tasks(config: pytest.Config) -> None:
    """Refuse names of tasks that lm-eval does not have, before collection; under xdist only the controller.

    Raises:
        BadArgument: an unknown name.
    """
    if hasattr(config, "workerinput") or config.option.collectonly or not requested_suite_arguments(config):
        return
    get_run_settings(config).study.require_known_tasks()


def share_products_with_workers(config: pytest.Config) -> None:
    """Let xdist's workers and the processes of a run of suites take one table of matrix products, to its end.

    Other runs of pytest import and write nothing; ``emad_model`` shares the table with processes that it starts.
    """
    if not requested_suite_arguments(config) and not config.getoption("numprocesses", None):
        return
    from emad_ref.models.fast.product_table import share_product_table

    shared = ExitStack()
    shared.enter_context(share_product_table())
    config.add_cleanup(shared.close)


DEALT = pytest.StashKey[str]()  # how documents are dealt, a line of the header


def require_readable_corpus(config: pytest.Config) -> None:
    """Read a corpus that is a file, or one that ``--emad-corpus-group`` groups, once for ``DEALT``.

    Raises:
        BadArgument: a file that cannot be read; groups of no .jsonl file, or a line without its group.
    """
    study = get_run_settings(config).study
    if (study.corpus is None and study.corpus_group is None) or hasattr(config, "workerinput"):
        return
    if study.corpus_group is None and not requested_suite_arguments(config):
        return
    from emad_ref.text.corpora import describe_dealt_documents, describe_dealt_groups  # import NumPy, so only on demand

    if study.corpus_group is not None:
        dealt = describe_dealt_groups(study.corpus or "a corpus by model", study.corpus_group)
    else:
        assert study.corpus is not None
        dealt = describe_dealt_documents(study.corpus, load_register()["EMAD-F1"].minimum["documents_to_survive"])
    config.stash[DEALT] = escape_unsafe(f"emad: {dealt}") if dealt else ""


def requested_suite_parts(config: pytest.Config) -> list[str]:
    """The parts of the suites on the command line: ``suites``, ``suites/fidelity`` … ``…/test_x.py::test_y``."""
    asked = []
    for argument in config.args:
        home = _suite_path(argument, config)
        name = None if home is None else path_below_suites(home, SUITES)
        if name is not None:
            asked.append("::".join([name, *(part.partition("[")[0] for part in argument.split("::")[1:])]))
    return list(dict.fromkeys(asked))


def describe_typed_selection(config: pytest.Config) -> str:
    """The command line's selection below whole folders of the suites, as typed; "" without one.

    A selection in an ini file or an environment variable does not count, because the command does not show it.
    """
    words = [str(word) for word in config.invocation_params.args]
    flags = ("-k", "-m", "--deselect", REPLAY)
    typed = [flag for flag in flags if any(word.split("=")[0] == flag or _is_joined(word, flag) for word in words)]
    return " and ".join([*typed, *(name for name in requested_suite_parts(config) if ".py" in name)])


def _is_joined(word: str, flag: str) -> bool:
    """Whether ``word`` is a short ``flag`` with its value, such as ``-kname``."""
    return len(flag) == 2 and word.startswith(flag) and len(word) > 2


def is_cost_test(item: pytest.Item) -> bool:
    """Whether ``item`` is a shipped test of ``suites/cost``."""
    return (shipped_file_name(item.path) or "").startswith(f"{suites_source.PREFIX}/cost/")


def require_collected_tests(session: pytest.Session, items: Sequence[pytest.Item]) -> None:
    """Require at least one collected test per argument that names the suites; call it before deselection.

    Raises:
        pytest.UsageError: an argument gave no test although every module was imported; tests of two files share one id.
    """
    _require_valid_node_ids(session.config, items)
    if session.testsfailed:  # pytest reports the broken module itself
        return
    if not (asked := requested_suite_arguments(session.config)):
        return
    found = {item.path.resolve() for item in items}
    for argument in asked:
        home = _suite_path(argument, session.config)
        if home is not None and not any(path.is_relative_to(home) for path in found):
            files, functions = (session.config.getini(name) for name in ("python_files", "python_functions"))
            raise pytest.UsageError(
                f"{argument}: pytest collected none of its tests: python_files={files} and "
                f"python_functions={functions} must match test_*.py and test_*; add "
                "-o python_files='test_*.py' -o python_functions='test_*'"
            )


def _require_valid_node_ids(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Refuse tests of two files with the same node id, which selections and reports would confuse.

    pytest omits the file from a test's id if the file is an argument outside the root folder.
    """
    paths: dict[str, Path] = {}
    for item in items:
        other = paths.setdefault(item.nodeid, item.path)
        if other != item.path and is_shipped_test(item):
            raise pytest.UsageError(
                f"{other} and {item.path} both hold the test {item.nodeid}: pytest leaves the file out of ids outside "
                f"rootdir={config.rootpath}; name their folder and choose by -k, or run one file at a time"
            )


STORAGE = "HYPOTHESIS_STORAGE_DIRECTORY"
BENCHMARKS = "file://./.benchmarks"  # pytest-benchmark's default storage


def has_pytest_benchmark(config: pytest.Config) -> bool:
    """Whether pytest-benchmark is active in this run, under any plugin name."""
    return hasattr(config.option, "benchmark_skip")


def redirect_plugin_caches(config: pytest.Config) -> None:
    """Point pytest-benchmark and Hypothesis to pytest's cache, unless the user chose folders.

    Call it before pytest-benchmark is configured and before Hypothesis is imported.
    """
    options = config.option
    stores = any(getattr(options, f"benchmark_{name}", None) for name in ("save", "autosave", "compare"))
    if getattr(options, "benchmark_storage", None) == BENCHMARKS and not stores:
        options.benchmark_storage = f"file://{_cache_folder(config, 'benchmarks')}"
    if not os.environ.get(STORAGE):
        os.environ[STORAGE] = str(_cache_folder(config, "hypothesis"))
        config.add_cleanup(partial(_unset, STORAGE))


def _unset(variable: str) -> None:
    os.environ.pop(variable, None)


def _cache_folder(config: pytest.Config, name: str) -> Path:
    cache = getattr(config, "cache", None)
    if cache is not None and os.access(config.rootpath, os.W_OK):
        found: Path = cache.mkdir(f"emad-{name}")
        return found
    temporary = TemporaryDirectory(prefix=f"emad-{name}-", ignore_cleanup_errors=True)
    config.add_cleanup(temporary.cleanup)
    return Path(temporary.name)


WAIT_POLICY = "OMP_WAIT_POLICY"


def let_waiting_threads_sleep_if_busy(config: pytest.Config) -> str:
    """Set OMP_WAIT_POLICY if the load average exceeds the cores; returns a header line, "" if nothing was set.

    By default threads of a CPU kernel spin while they wait for each other. Beside other processes a run then takes ten
    times as long. Kernels read the variable when torch is imported: nothing is set afterwards, or where the user chose.
    """
    chosen = {WAIT_POLICY, "OMP_NUM_THREADS"} & os.environ.keys()
    if chosen or "torch" in sys.modules or not hasattr(os, "getloadavg"):
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return ""
    os.environ[WAIT_POLICY] = "PASSIVE"
    config.add_cleanup(partial(_unset, WAIT_POLICY))
    return (
        f"emad: busy machine, load average {load:.1f} on {cores} cores: set {WAIT_POLICY}=PASSIVE, so waiting threads "
        "sleep; measured times are unsteady"
    )


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def select_gpu(worker: int) -> None:
    """Make only one GPU visible, number ``worker`` modulo their count. Call it before CUDA starts.

    Raises:
        BadArgument: CUDA runs already in this process, and its list of devices is fixed.
    """
    import torch

    count = torch.cuda.device_count()  # by NVML, which does not start CUDA
    if count < 2:
        return
    given = os.environ.get(VISIBLE_DEVICES)
    names = given.split(",") if given else [str(number) for number in range(count)]
    os.environ[VISIBLE_DEVICES] = mine = names[worker % count].strip()
    if torch.cuda.device_count() != 1:
        remedy = "a conftest.py or plugin started CUDA; let the tests start it, or use one process"
        raise BadArgument("device", "cuda", f"that worker {worker} sees GPU {mine} alone, and not all {count}", remedy)


# ---------------------------------------------------------------- the command line, before options are registered


def require_valid_command_line(config: pytest.Config, arguments: Sequence[str]) -> None:
    """Check the command line before pytest searches conftest files.

    ``arguments`` includes those of the ini file and of the environment.

    Raises:
        pytest.UsageError: pytest misread an argument.
    """
    _require_valid_dashes(arguments)
    given, folder = config.known_args_namespace, config.invocation_params.dir
    ours = any(resolve_suite_path(name, folder, given.pyargs) is not None for name in given.file_or_dir)
    if ours or any(argument.startswith("--emad-") for argument in arguments):
        _require_valid_workers(config, arguments)
        _keep_root(config, arguments)


def require_known_option_names(parser: pytest.Parser, arguments: Sequence[str]) -> None:
    """Refuse a misspelt ``--emad-…`` option and name the nearest one, which pytest does not.

    Raises:
        pytest.UsageError: ``arguments`` have an option ``--emad-…`` that no plugin and no conftest has.
    """
    if not any(argument.startswith("--emad-") for argument in arguments):
        return
    _, unknown = parser.parse_known_and_unknown_args(arguments)
    for argument in unknown:
        option = argument.partition("=")[0]
        if option.startswith("--emad-"):
            names = [flag.removeprefix("--emad-") for flag in OPTION_FLAGS]  # the common prefix would make all similar
            near = [f"--emad-{name}" for name in nearest_names(option.removeprefix("--emad-"), names)]
            remedy = f"nearest: {', '.join(near)}" if near else "pytest --help lists them"
            raise pytest.UsageError(f"unrecognized arguments: {option}; {remedy}")


def _require_valid_dashes(arguments: Sequence[str]) -> None:
    """Refuse typographic dashes: pytest takes such an option for a test path and does not find it."""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        name = option.translate(DASH_VARIANTS).replace("—", "-").lstrip("-")
        dashed = option.translate(DASH_VARIANTS).replace("—", "-").startswith("-")
        if dashed and name.startswith("emad-") and not option.isascii():
            raise pytest.UsageError(
                f"{argument}: its dashes are typographic, as in copied text; write --{name}{equals}{value}"
            )


def _require_valid_workers(config: pytest.Config, arguments: Sequence[str]) -> None:
    wanted = [one for one in arguments if one in ("-n", "--numprocesses") or one.startswith("--numprocesses=")]
    wanted += [one for one in arguments if one.startswith("-n") and one[2:].isdecimal()]
    if wanted and not hasattr(config.known_args_namespace, "numprocesses"):  # xdist's plugin may have another name
        raise pytest.UsageError(
            f"{wanted[0]}: pytest-xdist, which runs tests in several processes, is not installed; "
            f"leave {wanted[0]} out, or pip install pytest-xdist"
        )


def _keep_root(config: pytest.Config, arguments: Sequence[str]) -> None:
    """Set pytest's root folder as found without values of ``--emad-…`` options and the installed suites."""
    from _pytest.config.findpaths import determine_setup  # not public in pytest

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
        if config.rootpath != root:  # a pytest version with another place for it
            raise pytest.UsageError(
                _misread_message(arguments, folder, f"its root is {config.rootpath} and not {root}")
            )


def _is_installed_suite(path: Path) -> bool:
    return path.resolve().is_relative_to(INSTALLED_SUITES)


def _misread_message(arguments: Sequence[str], folder: Path, so: str) -> str:
    """Message with the option whose value pytest took for a test path, and the working spelling."""
    for option, value in pairwise(arguments):
        if option.startswith("--emad-") and "=" not in option and (folder / value).exists():
            return f"{option} {value}: pytest took {value} for a test path, and {so}; write {option}={value}"
    return f"pytest took a path for the tests of a project, and {so}; name the suites as --pyargs pytest_emad.suites"
