"""The judge: decides the papers' claims about a model or a decoder, as a pytest plugin, a command and in Python.

Names below load on first use. Importing this package imports neither torch nor transformers, because pytest imports it
in every test run of every project with this package.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

_HOMES = {
    "TokenDecoder": "pytest_emad.remote.token_decoder",
    "Completion": "pytest_emad.remote.token_decoder",
    "load_exit": "pytest_emad.screening.exit",
    "BadReport": "pytest_emad.report.schema",
    "judge": "pytest_emad.notebook",
    "read_report": "pytest_emad.notebook",
    "RunResults": "pytest_emad.notebook",
    "plot_profile": "pytest_emad.notebook",
    "plot_depth_by_position": "pytest_emad.notebook",
    "plot_cost_against_quality": "pytest_emad.notebook",
    "plot_explorer": "pytest_emad.notebook",
}

__all__ = list(_HOMES)

# A wheel holds the suites inside this package; a checkout has them next to it. So that `--pyargs pytest_emad.suites`
# also finds them after `pip install -e .`, submodules are then looked up in the checkout too.
if not Path(__file__).with_name("suites").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
