"""The judge: decides the papers' claims about a model or a decoder, for users of a test run, a command or a notebook.

Most users import nothing: ``pytest suites/`` and ``emad judge`` do the work. What Python offers beside:

Judge and read results
    ``judge`` decides claims in this process, ``read_report`` reads a run's report, or raises ``BadReport``. Both give
    ``RunResults``: claims, legs, points and tables as pandas frames.
Compare finished evaluations
    ``compare_accuracy`` decides whether accuracy fell between two evaluations of lm-eval, inspect_ai or a table. It
    returns an ``AccuracyComparison``: tasks and lost items as pandas frames.
Plot them
    ``plot_profile``, ``plot_depth_by_position``, ``plot_cost_against_quality`` and ``plot_explorer``.
Use an exit that ``emad screen`` found
    ``load_exit`` reads its file.
Judge an engine of your own
    ``TokenDecoder`` is the base of a decoder that takes and returns token ids alone; its ``complete`` returns a
    ``Completion`` for each prompt.

Everything that the papers compute is in ``emad_ref``. Names load on first use: importing this package imports neither
torch nor transformers, because pytest imports it in every test run of every project with this package.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

_HOMES = {  # in the order of the docstring
    "judge": "pytest_emad.notebook",
    "read_report": "pytest_emad.notebook",
    "BadReport": "pytest_emad.report.schema",
    "RunResults": "pytest_emad.notebook",
    "compare_accuracy": "pytest_emad.accuracy.comparison",
    "AccuracyComparison": "pytest_emad.accuracy.comparison",
    "plot_profile": "pytest_emad.notebook",
    "plot_depth_by_position": "pytest_emad.notebook",
    "plot_cost_against_quality": "pytest_emad.notebook",
    "plot_explorer": "pytest_emad.notebook",
    "load_exit": "pytest_emad.screening.exit",
    "TokenDecoder": "pytest_emad.remote.token_decoder",
    "Completion": "pytest_emad.remote.token_decoder",
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
