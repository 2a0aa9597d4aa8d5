"""Provider of the decoder under test: its plugin, its number of answers, and its name in reports.

The provider is the reference one, the only foreign plugin, the one named by ``--emad-backend``, or the process of
``--emad-decoder``. A run that judged the reference decoder by mistake must not look like a run of the user's decoder.
So every answer and refusal is counted, and a run reports providers that are present but not loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib import metadata
from importlib.util import find_spec
from inspect import isroutine
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.models.families import BACKENDS
from pytest_emad.remote.address import UrlAddress
from pytest_emad.report.provenance import (
    ANSWERED,
    DECLINED,
    EXITS,
    FEATURES,
    NONE,
    OWN_RULE,
    PROVIDER_OUTCOMES,
    SAMPLING,
)
from pytest_emad.run.option_table import HOOK_TIMEOUT_S, REMOTE_TIMEOUT_S
from pytest_emad.run.options import get_run_settings

if TYPE_CHECKING:
    from emad_ref.protocol import Decoder, Request
    from pytest_emad.measurements.run_resources import RemoteDecoders
    from pytest_emad.remote.address import Address


HOOK = "pytest_emad_make_decoder"
OUR_PROVIDER = "emad-walked"
REMOTE_PROVIDER = "emad-distant"

# fields that every point with exits sets, or its schedule implies
PLAIN_FIELDS = frozenset({"probes", "thresholds", "schedule", "margin_nats", "period"})

COUNTS = pytest.StashKey[dict[str, dict[str, int]]]()
COUNTED_FEATURES = pytest.StashKey[dict[str, dict[str, list[int]]]]()  # provider → feature → [answered, declined]


class NoDecoderError(EmadError):
    """Raised if every called provider returned None."""


class ReferenceProvider:
    """Provider of the reference decoder, called last, over the judge's model, which it does not change."""

    emad_origin = "reference (ours)"

    @pytest.hookimpl(trylast=True)
    def pytest_emad_make_decoder(self, config: pytest.Config, request: Request) -> Decoder:
        from pytest_emad.measurements.run_resources import (
            make_decoder_on_judge_model,  # imports torch, so import it only for a request
        )

        return make_decoder_on_judge_model(request)


class RemoteProvider:
    """The provider of ``--emad-decoder``: one connection per run, opened at the first request."""

    def __init__(self, address: Address, seconds: float, dtype: str | None, baseline: UrlAddress | None) -> None:
        self._arguments = address, seconds, dtype, baseline
        without = "" if baseline is None else f", without its rule {baseline}"
        self.emad_origin = f"{'server' if isinstance(address, UrlAddress) else 'process'} {address}{without}"
        self._distant: RemoteDecoders | None = None

    def pytest_emad_make_decoder(self, config: pytest.Config, request: Request) -> Decoder:
        if self._distant is None:
            from pytest_emad.measurements.run_resources import (
                RemoteDecoders,  # imports torch, so import it only for a request
            )

            self._distant = RemoteDecoders(*self._arguments)
        return self._distant.make(request)

    @property
    def request_counts(self) -> dict[str, Any]:
        """Requests to a server, and repeated requests by reason."""
        return {} if self._distant is None else self._distant.request_counts

    def close(self) -> None:
        if self._distant is not None:
            self._distant.close()


def register_providers(config: pytest.Config) -> None:
    """Register the reference provider and, with ``--emad-decoder``, that of the process that ends with the run."""
    config.pluginmanager.register(ReferenceProvider(), OUR_PROVIDER)
    asked_for = get_run_settings(config)
    if asked_for.decoder is not None:
        distant = RemoteProvider(
            asked_for.decoder,
            asked_for.decoder_timeout or REMOTE_TIMEOUT_S,
            asked_for.study.decoder_dtype,
            asked_for.decoder_baseline,
        )
        config.pluginmanager.register(distant, REMOTE_PROVIDER)
        config.add_cleanup(distant.close)


def registered_providers_by_name(config: pytest.Config) -> dict[str, object]:
    """Every registered provider by plugin name, the reference one included, in calling order."""
    found = reversed(getattr(config.hook, HOOK).get_hookimpls())
    return {implementation.plugin_name: implementation.plugin for implementation in found}


def require_unambiguous_decoder(config: pytest.Config) -> None:
    """Refuse a run whose decoder is ambiguous or unknown.

    Raises:
        pytest.UsageError: ``--emad-backend`` names no provider; or several foreign ones and no ``--emad-backend``.
    """
    try:
        _sole_provider(config)
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from error


def require_known_hook_names(config: pytest.Config) -> None:
    """Refuse a misspelt ``pytest_emad_…`` hook in one line, before pytest reports an internal error.

    Raises:
        pytest.UsageError: a plugin has a function ``pytest_emad_…`` that is no hook, or the hook as another object: a
            class or a ``functools.partial``, in whose place the reference decoder would answer.
    """
    for module in config.pluginmanager.get_plugins():
        found = getattr(module, "__dict__", {}).get(HOOK)
        if isinstance(module, ModuleType) and found is not None and not isroutine(found):  # pytest ignores it
            place = describe_provider(config, module.__name__, module).removeprefix("hook of ")
            said = f"{HOOK} is a {type(found).__name__}, but expected a function"
            raise pytest.UsageError(f"{place}: {said}; pytest calls no other object: write def {HOOK}(config, request)")
    hooks = {name: caller for name, caller in vars(config.hook).items() if name.startswith("pytest_emad_")}
    known = [name for name, caller in hooks.items() if caller.has_spec()]
    for name in hooks.keys() - set(known):
        for implementation in hooks[name].get_hookimpls():
            if not implementation.optionalhook:
                place = describe_provider(config, implementation.plugin_name, implementation.plugin)
                found = place.removeprefix("hook of ")
                raise pytest.UsageError(f"{found}: {name} is no hook; the hooks of this plugin: {', '.join(known)}")


def requested_provider_name(config: pytest.Config) -> str | None:
    """The provider that the command line names by address, plugin or variant of the reference; None: calling order."""
    asked_for = get_run_settings(config)
    if asked_for.decoder is not None:
        return REMOTE_PROVIDER
    return OUR_PROVIDER if asked_for.backend in BACKENDS else asked_for.backend


def _sole_provider(config: pytest.Config) -> str | None:
    """The only provider to call, or None for calling order."""
    known, wanted = list(registered_providers_by_name(config)), requested_provider_name(config)
    if wanted == REMOTE_PROVIDER:
        return wanted
    foreign = [name for name in known if name != OUR_PROVIDER]
    if wanted is None and len(foreign) > 1:
        raise BadArgument(
            "--emad-backend", None, f"one of {', '.join(foreign)}", "several plugins provide a decoder: choose one"
        )
    if wanted is not None and wanted not in known:
        raise BadArgument("--emad-backend", wanted, f"a plugin with {HOOK}: {', '.join(known)}", "load it with -p NAME")
    return wanted


def features_required_by_request(request: Request) -> tuple[str, ...]:
    """Features that ``request`` needs beyond greedy full depth: exits, sampling, and fields of the point by name."""
    point = request.point
    if point.is_full_depth:
        exits: list[str] = []
    else:
        given = [field for field in fields(point) if field.default is not MISSING and field.name not in PLAIN_FIELDS]
        exits = [EXITS, *(field.name for field in given if getattr(point, field.name) != field.default)]
        exits += [f"schedule {point.schedule}"] if point.schedule != "monotone" else []
    return (*exits, *([SAMPLING] if request.temperature else []))


def _count_features(config: pytest.Config, name: str, request: Request, declined: bool) -> tuple[str, ...]:
    counted = config.stash.setdefault(COUNTED_FEATURES, {}).setdefault(name, {})
    for feature in (asked := features_required_by_request(request)):
        counted.setdefault(feature, [0, 0])[declined] += 1
    return asked


def make_guarded_decoder(config: pytest.Config, stream: Callable[[], TextIO | None], request: Request) -> Decoder:
    """``make_decoder``, with a time limit for calls of a foreign decoder. Raises as ``make_decoder``.

    ``stream`` returns uncaptured standard error, for the stack of a call that cannot be interrupted.
    """
    from pytest_emad.measurements.run_resources import get_judge_model  # imports torch
    from pytest_emad.run.guarded_decoder import CallTimeLimit, GuardedDecoder, require_decoder  # imports NumPy

    hook_seconds = get_run_settings(config).decoder_timeout or HOOK_TIMEOUT_S
    limited = requested_provider_name(config) != REMOTE_PROVIDER and set(registered_providers_by_name(config)) != {
        OUR_PROVIDER
    }
    with CallTimeLimit("the plugin", hook_seconds if limited else None, stream())(HOOK):
        name, decoder = _make_decoder(config, request)
    if name == OUR_PROVIDER:
        return decoder
    require_decoder(HOOK, decoder)
    counted = config.stash.setdefault(COUNTED_FEATURES, {}).setdefault(name, {})

    def count(feature: str, declined: bool) -> None:
        counted.setdefault(feature, [0, 0])[declined] += 1

    if request.own_rule:
        count(OWN_RULE, getattr(decoder, "stated", None) is None)
    seconds = None if name == REMOTE_PROVIDER else hook_seconds
    said = describe_provider(config, name, registered_providers_by_name(config)[name])
    judge = get_judge_model()
    vocabulary = None if judge is None else judge.geometry.vocabulary
    return GuardedDecoder(decoder, CallTimeLimit(said, seconds, stream()), count, vocabulary)


def make_decoder(config: pytest.Config, request: Request) -> Decoder:
    """Make the decoder under test for ``request``; the caller closes it.

    Raises:
        pytest.UsageError: as ``require_unambiguous_decoder``.
        emad_ref.protocol.Unsupported: the provider declines; record the claim as ``not applicable``.
        NoDecoderError: every called provider, that of ``--emad-backend`` or all, returned None.
    """
    return _make_decoder(config, request)[1]


def _make_decoder(config: pytest.Config, request: Request) -> tuple[str, Decoder]:
    """(Name of the answering provider, its decoder)."""
    from emad_ref.protocol import Unsupported

    require_unambiguous_decoder(config)
    wanted, known = _sole_provider(config), registered_providers_by_name(config)
    counts = config.stash.setdefault(COUNTS, {})
    for name in known if wanted is None else [wanted]:
        others = [plugin for other, plugin in known.items() if other != name]
        caller = config.pluginmanager.subset_hook_caller(HOOK, remove_plugins=others)
        count = counts.setdefault(name, dict.fromkeys(PROVIDER_OUTCOMES, 0))
        try:
            decoder: Decoder | None = caller(config=config, request=request)
        except Unsupported as refusal:
            count[DECLINED] += 1
            refusal.features = _count_features(config, name, request, declined=True)
            raise
        count[NONE if decoder is None else ANSWERED] += 1
        if decoder is not None:
            _count_features(config, name, request, declined=False)
            return name, decoder
    raise NoDecoderError(
        f"--emad-backend={wanted or ', '.join(known)} returned no decoder for {request.model.name} at "
        f"{request.point.name!r}; expected a Decoder or Unsupported(reason)"
    )


def provider_answer_counts(config: pytest.Config) -> list[dict[str, Any]]:
    """The callable providers of this process with their counts of answers and refusals: JSON values only."""
    counts = config.stash.get(COUNTS, {})
    offered = config.stash.get(COUNTED_FEATURES, {})
    wanted = requested_provider_name(config)
    return [
        {"name": describe_provider(config, name, plugin), "plugin": name, "foreign": name != OUR_PROVIDER}
        | {FEATURES: offered.get(name, {})}
        | counts.get(name, dict.fromkeys(PROVIDER_OUTCOMES, 0))
        | (plugin.request_counts if isinstance(plugin, RemoteProvider) else {})
        for name, plugin in registered_providers_by_name(config).items()
        if wanted in (None, name)
    ]


def describe_provider(config: pytest.Config, name: str, plugin: object) -> str:
    """``reference (ours)``, ``hook of plugin mylib (mylib.pytest_plugin, mylib 1.2)``, ``hook of conftest.py``."""
    named = getattr(plugin, "emad_origin", None)
    if named is not None:
        return str(named)
    file = getattr(plugin, "__file__", None)
    if file is not None and Path(file).name == "conftest.py":
        place = Path(file)
        return f"hook of {place.relative_to(config.rootpath) if place.is_relative_to(config.rootpath) else place}"
    module = getattr(plugin, "__name__", type(plugin).__module__)
    held = [dist for known, dist in config.pluginmanager.list_plugin_distinfo() if known is plugin]
    release = [f"{dist.metadata['Name']} {dist.version}" for dist in held]
    return f"hook of plugin {name} ({', '.join([module, *release])})"


def unloaded_providers(config: pytest.Config) -> list[str]:
    """Providers that exist but are not loaded: in conftest.py files of parent folders, and installed plugins.

    Empty if the user chose a decoder by name, or if a foreign provider is loaded. It imports no module.
    """
    if requested_provider_name(config) is not None or set(registered_providers_by_name(config)) != {OUR_PROVIDER}:
        return []
    plugins = config.pluginmanager.get_plugins()
    loaded = {Path(file).resolve() for plugin in plugins if (file := getattr(plugin, "__file__", None))}
    start, root = config.invocation_params.dir, config.rootpath
    way = [start, *(folder for folder in start.parents if folder.is_relative_to(root)), root]
    way += [root / folder for folder in config.getini("testpaths")]
    conftests = [(str(file), file) for file in dict.fromkeys(folder / "conftest.py" for folder in way)]
    installed = [
        (f"plugin {entry.name}", source)
        for entry in metadata.entry_points(group="pytest11")
        if not config.pluginmanager.has_plugin(entry.name) and (source := _module_source(entry.module))
    ]
    return [name for name, file in (*conftests, *installed) if file.resolve() not in loaded and _defines_hook(file)]


def _module_source(module: str) -> Path | None:
    """The source file of an installed module; only its outermost package is looked up."""
    first, *rest = module.split(".")
    spec = find_spec(first)
    if spec is None:
        return None
    if not rest and spec.origin is not None:
        return Path(spec.origin)
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def _defines_hook(file: Path) -> bool:
    """Whether source defines, imports or assigns the hook."""
    try:
        source = file.read_text(encoding="utf-8")
        if HOOK not in source:  # true of most files, which need no parsing
            return False
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):  # absent, or not loadable by pytest
        return False
    names = [
        getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "id", None)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.alias)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    return HOOK in names
