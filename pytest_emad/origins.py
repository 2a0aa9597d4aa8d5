"""Whose decoder a run judged: who was asked and answered, and who offers one that nobody loaded.

A run that judged our own decoder where another was meant must not pass for a run of that other one. A provider says in
``emad_origin`` how it wants to be called; else it is called after its plugin.
"""

from __future__ import annotations

import ast
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from emad_ref.report.providers import CAME_OF_IT, FEATURES
from pytest_emad.backends import COUNTED_FEATURES, COUNTS, HOOK, OURS, named, providers


def asked_so_far(config: pytest.Config) -> list[dict[str, Any]]:
    """The providers that may be asked in this process, each with what came of it so far: JSON values only."""
    counts, offered, wanted = config.stash.get(COUNTS, {}), config.stash.get(COUNTED_FEATURES, {}), named(config)
    return [
        {"name": origin(config, name, plugin), "plugin": name, "foreign": name != OURS}
        | {FEATURES: offered.get(name, {})}
        | counts.get(name, dict.fromkeys(CAME_OF_IT, 0))
        for name, plugin in providers(config).items()
        if wanted in (None, name)
    ]


def origin(config: pytest.Config, name: str, plugin: object) -> str:
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


def overlooked(config: pytest.Config) -> list[str]:
    """Who offers a decoder beside this run and was not loaded: a conftest.py on the way, an installed plugin.

    Nobody where a decoder was chosen by name, or a foreign one answers anyhow. Nothing is imported.
    """
    if named(config) is not None or set(providers(config)) != {OURS}:
        return []
    loaded = {Path(file).resolve() for plugin in config.pluginmanager.get_plugins() if (file := _file_of(plugin))}
    start, root = config.invocation_params.dir, config.rootpath
    way = [start, *(folder for folder in start.parents if folder.is_relative_to(root)), root]
    way += [root / folder for folder in config.getini("testpaths")]
    conftests = [(str(file), file) for file in dict.fromkeys(folder / "conftest.py" for folder in way)]
    installed = [
        (f"plugin {entry.name}", source)
        for entry in metadata.entry_points(group="pytest11")
        if not config.pluginmanager.has_plugin(entry.name) and (source := _source_of(entry.module))
    ]
    return [name for name, file in (*conftests, *installed) if file.resolve() not in loaded and _offers(file)]


def _file_of(plugin: object) -> str | None:
    return getattr(plugin, "__file__", None)


def _source_of(module: str) -> Path | None:
    """Where the source of an installed module lies; only its outermost package is looked up."""
    first, *rest = module.split(".")
    spec = find_spec(first)
    if spec is None:
        return None
    if not rest and spec.origin is not None:
        return Path(spec.origin)
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def _offers(file: Path) -> bool:
    """Whether source defines, imports or assigns the hook."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # not there, or nothing that pytest could have loaded
        return False
    names = [
        getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "id", None)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.alias) or (isinstance(node, ast.Name) and _assigned(node))
    ]
    return HOOK in names


def _assigned(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)
