"""The entry point: pytest's hooks, each a few lines that call other modules.

Importing it imports neither torch nor hypothesis, so that the installed package does not slow down other test runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from emad_ref.errors import BadArgument, EmadError, call_all
from emad_ref.files import BadFile
from pytest_emad import hookspecs
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.report import schema
from pytest_emad.report.provenance import format_judged_decoder_names, torch_thread_count
from pytest_emad.report.tiers import model_names_for_test_ids
from pytest_emad.run import (
    collection_log,
    decoder_providers,
    environment,
    fixtures,
    replayed,
    selection,
    subprocesses,
    terminal,
)
from pytest_emad.run.options import add_options, get_run_settings, load_claims_register
from pytest_emad.run.run_report import USAGE_ERROR_NODE, ReportPlugin
from pytest_emad.run.terminal import format_header

MARKER = "emad(claim=None, budget='smoke', measures=False): the claim a test decides, the smallest budget it runs in, whether it measures time or energy"  # noqa: E501  # one line, because pytest --markers prints it unchanged
REPORTING = "emad-reporting"
OWN_PLUGINS = ("emad-fixtures", "emad-attendance", "emad-attempts", REPORTING)

_PREVIOUS_PROFILE = pytest.StashKey[str]()
_COLLECTION_LOG = pytest.StashKey[collection_log.CollectionLog]()
_REPORT_FOLDER = pytest.StashKey[Path]()
_BUSY = pytest.StashKey[str]()  # header line about a busy machine, or ""


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    subprocesses.add_replicate_option(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run only its task in a replicate process."""
    return subprocesses.run_replicate_task(config) if subprocesses.is_replicate_process(config) else None


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    try:
        _prepare(config)
    except pytest.UsageError:
        _settle_report(config)  # announced, so that an older report is not mistaken for this run's
        raise


def _prepare(config: pytest.Config) -> None:
    environment.require_same_source_tree()
    get_run_settings(config)
    replayed.require_recorded_settings(config)
    environment.require_compatible_plugin_options(config)
    try:
        checks = (
            environment.require_valid_waivers,
            environment.require_available_models,
            environment.require_installed_extras,
            environment.require_known_tasks,
            environment.require_readable_corpus,
        )
        call_all(partial(require, config) for require in checks)
    except EmadError as error:
        raise pytest.UsageError(str(error)) from error
    _prepare_benchmarks(config)
    terminal.open_stderr_copy(worker=hasattr(config, "workerinput"))
    config.add_cleanup(terminal.close_stderr_copy)
    environment.share_products_with_workers(config)
    _refuse_blocked_plugins(config)
    if environment.requested_suite_arguments(config):
        environment.redirect_plugin_caches(config)
        config.stash[_BUSY] = environment.let_waiting_threads_sleep_if_busy(config)
    config.stash[_COLLECTION_LOG] = attended = collection_log.CollectionLog(config)
    config.pluginmanager.register(attended, "emad-attendance")
    config.pluginmanager.register(collection_log.AttemptLog(), "emad-attempts")
    config.pluginmanager.register(fixtures, "emad-fixtures")
    decoder_providers.register_providers(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ReportPlugin(config, attended), REPORTING)


def _prepare_benchmarks(config: pytest.Config) -> None:
    """Hide the suites' benchmark table, which is wide and repeats the summary, without ``-v``.

    Without pytest-benchmark the suites' mark of that name is registered here; only its table is missing.
    """
    if not environment.has_pytest_benchmark(config):
        config.addinivalue_line("markers", "benchmark(timer): of pytest-benchmark, which is switched off")
    if environment.requested_suite_arguments(config) and config.get_verbosity() < 1:
        config.option.benchmark_quiet = True


def _refuse_blocked_plugins(config: pytest.Config) -> None:
    """Refuse a run with blocked parts of this plugin, because a missing gate would look like a pass."""
    for name in OWN_PLUGINS:
        if config.pluginmanager.is_blocked(name):
            raise pytest.UsageError(f"-p no:{name} leaves out a part of this plugin; -p no:emad leaves out all of it")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _settle_report_if_reporting(config)  # ``--help`` and similar options begin no session
        if _runs_suites(config):
            terminal.report_remaining_threads()
    if _PREVIOUS_PROFILE in config.stash:
        from hypothesis import settings as hypothesis_settings

        hypothesis_settings.load_profile(config.stash[_PREVIOUS_PROFILE])


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, args: list[str], parser: pytest.Parser
) -> Generator[None, None, None]:
    environment.require_valid_command_line(early_config, args)
    if not subprocesses.is_replicate_process(early_config):
        _announce_report(early_config)
    yield
    environment.require_known_option_names(parser, args)  # a conftest may have added options


def _announce_report(config: pytest.Config) -> None:
    """Begin the report before imports of foreign code, which may end the process. Options are not validated yet."""
    given = config.known_args_namespace.emad_report
    folder = given and config.invocation_params.dir / given
    if not given and config.inipath is not None and (written := config.getini("emad_report")):
        folder = config.inipath.parent / written
    if folder:
        with suppress(BadFile):  # option parsing refuses a folder that is not writable
            schema.mark_run_started(folder)
        config.stash[_REPORT_FOLDER] = folder


def _settle_report(config: pytest.Config) -> None:
    if (folder := config.stash.get(_REPORT_FOLDER, None)) is not None:
        schema.remove_run_start_mark(folder)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return _header(config) if environment.requested_suite_arguments(config) else []


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Header lines if the run includes the suites, or a user's test that uses the plugin."""
    if environment.requested_suite_arguments(config) or not any(selection.is_plugin_test(item) for item in items):
        return []
    return _header(config)


def _header(config: pytest.Config) -> list[str]:
    decoder = format_judged_decoder_names(decoder_providers.provider_answer_counts(config))
    further = [config.stash.get(key, "") for key in (environment.DEALT, _BUSY)]
    return [*format_header(get_run_settings(config), decoder), *filter(None, further)]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    subprocesses.record_provider_names(session.config)
    has_terminal = session.config.pluginmanager.has_plugin("terminalreporter")  # absent under -p no:terminal
    if has_terminal and environment.requested_suite_arguments(session.config):
        from emad_ref.console import set_stream_ascii_fallback

        # pytest itself would write its escapes as one line
        set_stream_ascii_fallback(session.config.get_terminal_writer()._file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Load the Hypothesis profile before any test module is imported, since ``@given`` binds the current settings."""
    decoder_providers.require_known_hook_names(session.config)
    if environment.requested_suite_arguments(session.config):
        environment.require_compatible_versions()
        _load_hypothesis_profile(session.config)


def _load_hypothesis_profile(config: pytest.Config) -> None:
    """Load the suites' Hypothesis profile, which a user's profile can only strengthen."""
    from hypothesis import settings as hypothesis_settings

    from pytest_emad.run.hypothesis_profile import PROFILE, describe_weaker_profile, property_test_settings

    config.stash[_PREVIOUS_PROFILE] = hypothesis_settings.get_current_profile_name()
    if weaker := describe_weaker_profile(get_run_settings(config).budget):
        try:
            warnings.warn(pytest.PytestConfigWarning(weaker), stacklevel=2)
        except pytest.PytestConfigWarning as error:  # the user's filters turn warnings into errors
            raise pytest.UsageError(f"{weaker}; load another, or -W ignore::pytest.PytestConfigWarning") from error
    hypothesis_settings.register_profile(PROFILE, property_test_settings(get_run_settings(config).budget))
    hypothesis_settings.load_profile(PROFILE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize model fixtures in session scope, so that pytest frees one model before it loads the next."""
    if "emad_model" in metafunc.fixturenames:
        names = get_run_settings(metafunc.config).models
        metafunc.parametrize("emad_model", names, indirect=True, scope="session", ids=model_names_for_test_ids(names))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        environment.require_collected_tests(session, items)
        marked = [item for item in items if item.get_closest_marker("emad") is not None]
        for item in marked:
            _require_valid_marker(item)
        if marked or any(environment.is_shipped_test(item) for item in items):
            decoder_providers.require_unambiguous_decoder(config)
        if any(selection.is_plugin_test(item) for item in items):
            _select_device(config)
        _deselect(config, items)
        items[:] = selection.sorted_by_suite_folder(items)
    except pytest.UsageError as error:
        _raise_usage_error(config, items, error)


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)
def pytest_gates_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort gates first, after pytest has grouped tests by model and applied ``-k`` and ``-m``."""
    try:
        replayed.select_recorded_test(config, items)
        _refuse_parallel_measuring(config, items)
        _refuse_traced_measuring(items)
        _refuse_forked(config, items)
        _refuse_optimized(items)
    except pytest.UsageError as error:
        _raise_usage_error(config, items, error)
    if not any(map(environment.is_shipped_test, items)):
        return
    gating = {
        name
        for name, row in load_claims_register(config).items()
        if row.is_gating(get_run_settings(config).gate_claims)
    }
    exact = {name for name, row in load_claims_register(config).items() if row.kind == "exact"}
    items[:] = selection.sorted_gates_first_per_model(items, gating, exact)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Turn a decoder's refusal into ``not applicable`` in a claim's test, and into a skip with the reason elsewhere."""
    try:
        return (yield)
    except EmadError as refusal:
        from emad_ref.protocol import Unsupported  # imports NumPy

        if not isinstance(refusal, Unsupported):
            raise
        collection_log.record_refusal(item, refusal.features)
        pytest.skip(f"not applicable ({refusal})")


def _select_device(config: pytest.Config) -> None:
    """Select a worker's GPU before a model is loaded; a single process keeps all."""
    worker = getattr(config, "workerinput", None)
    if worker is not None and get_run_settings(config).study.device == "cuda":
        number = worker["workerid"].removeprefix("gw")  # a custom name has no number: use the first GPU
        try:
            environment.select_gpu(int(number) if number.isdecimal() else 0)
        except BadArgument as error:
            raise pytest.UsageError(str(error)) from error


def _require_valid_marker(item: pytest.Item) -> None:
    marker = item.get_closest_marker("emad")
    arguments = selection.emad_marker_arguments(item)
    if (marker and marker.args) or set(arguments) != {"claim", "budget", "measures"}:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.emad takes the keywords claim, budget and measures")
    if arguments["budget"] not in BUDGETS:
        raise pytest.UsageError(
            f"{item.nodeid}: budget={arguments['budget']!r}, but expected one of {', '.join(BUDGETS)}"
        )
    known = load_claims_register(item.config)
    if arguments["claim"] is not None and arguments["claim"] not in known:
        raise pytest.UsageError(f"{item.nodeid}: claim={arguments['claim']!r}, but the register has {', '.join(known)}")


def _deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of this plugin; other tests are ignored, without reading any file for them."""
    concerned = [
        item for item in items if environment.is_shipped_test(item) or item.get_closest_marker("emad") is not None
    ]
    left_out = {
        item.nodeid: absent.reason
        for item in concerned
        if (absent := selection.absent_from_run(item, get_run_settings(config), load_claims_register(config)))
    }
    config.stash[_COLLECTION_LOG].log_items(items, left_out)
    selection.require_known_gaps_of_run(config, config.stash[_COLLECTION_LOG].collected)
    if left := [item for item in items if item.nodeid in left_out]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid not in left_out]


def _refuse_parallel_measuring(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse timing tests in parallel processes, which slow each other down."""
    workers = getattr(config, "workerinput", {}).get("workercount", 0)
    measuring = [item for item in items if selection.is_timing_or_energy_test(item)]
    if workers > 1 and measuring:
        raise pytest.UsageError(
            f"-n {workers}: {measuring[0].nodeid} measures time or energy, which needs the machine to itself; "
            f"use -n 0 or -n 1{_parallel_alternative(items)}"
        )


def _refuse_traced_measuring(items: list[pytest.Item]) -> None:
    """Refuse timing tests under a coverage tool, profiler or debugger, which slows one arm more than the other."""
    if not (measuring := [item for item in items if selection.is_timing_or_energy_test(item)]):
        return
    from pytest_emad.benchmark.clock import iterate_active_tracers

    if found := list(iterate_active_tracers()):
        raise pytest.UsageError(
            f"{', '.join(found)} is active, but {measuring[0].nodeid} measures time or energy; run it without, or "
            "leave out what measures: -m 'not emad(measures=True)'"
        )


def _refuse_forked(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse pytest-forked, since audits and verdicts recorded in its child processes never reach the report."""
    if (everything := config.getoption("forked", None)) is None:  # the plugin is not loaded
        return
    for item in filter(selection.is_plugin_test, items):
        if everything or item.get_closest_marker("forked") is not None:
            named = "--forked" if everything else "@pytest.mark.forked"
            raise pytest.UsageError(
                f"{named}: {item.nodeid} would run in a child process, and what it records would be lost there; run it "
                "in this one (-p no:pytest_forked), or in workers (-n)"
            )


def _refuse_optimized(items: list[pytest.Item]) -> None:
    """Refuse ``python -O``, which removes the assert statements in which audits compare."""
    if __debug__:
        return
    for item in filter(selection.is_plugin_test, items):
        raise pytest.UsageError(
            f"python -O, or PYTHONOPTIMIZE: {item.nodeid} would run without assert statements, and pass whatever they "
            "would find; run it without"
        )


def _parallel_alternative(items: list[pytest.Item]) -> str:
    """The suites' parts without timing: folders, or a part of a folder that also has timing tests."""
    ours = [(file.rpartition("/")[0], item) for item in items if (file := environment.shipped_file_name(item.path))]
    free, busy = (
        {folder for folder, item in ours if selection.is_timing_or_energy_test(item) is each} for each in (False, True)
    )
    words = [*sorted(free), *(["-m 'not emad(measures=True)'"] if free & busy else [])]
    return f", or ask in parallel for what measures nothing: {' '.join(words)}" if words else ""


def _raise_usage_error(config: pytest.Config, items: list[pytest.Item], error: pytest.UsageError) -> None:
    """Raise a usage error; in a worker as a failed collection, since xdist sends only these to the controller."""
    if not hasattr(config, "workerinput"):
        raise error
    items.clear()
    report = pytest.CollectReport(nodeid=USAGE_ERROR_NODE, outcome="failed", longrepr=str(error), result=[])
    config.hook.pytest_collectreport(report=report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's number of torch threads to the controller, which does not import torch."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["emad.torch_threads"] = torch_thread_count()
    else:
        _settle_report_if_reporting(session.config)


def _settle_report_if_reporting(config: pytest.Config) -> None:
    """Remove the start mark if this run could write a report; else ``emad verify`` finds an unfinished run."""
    if config.pluginmanager.has_plugin(REPORTING):
        _settle_report(config)


def _runs_suites(config: pytest.Config) -> bool:
    """Whether the command line names the suites, or the run collected a test of them."""
    return _COLLECTION_LOG in config.stash and bool(
        environment.requested_suite_arguments(config) or config.stash[_COLLECTION_LOG].collected
    )
