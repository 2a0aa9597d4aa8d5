"""Tracers, profilers and debuggers in this process. Each slows Python by a factor that differs between two arms.

A coverage tool may make a loop of small steps three times slower and leave one large matrix product as it is. Times
and joules taken beside one compare the instrument, so ``require_untraced`` refuses to measure and names it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

from emad_ref.errors import BadArgument

MONITORING_TOOLS = 6  # ids that sys.monitoring has (PEP 669)
ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "PYTHONMALLOC": ("debug", "malloc_debug", "pymalloc_debug"),
}


def tracers() -> Iterator[str]:
    """The name of every active instrument, in words."""
    hooks = {
        "trace function": (sys.gettrace(), threading.gettrace()),
        "profile function": (sys.getprofile(), threading.getprofile()),
    }
    for kind, functions in hooks.items():
        yield from dict.fromkeys(f"{kind} {_name(function)}" for function in functions if function is not None)
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12 and newer
    if monitoring is not None:
        tools = (monitoring.get_tool(number) for number in range(MONITORING_TOOLS))
        yield from (f"sys.monitoring tool {tool}" for tool in tools if tool is not None)
    if tracemalloc.is_tracing():
        yield "tracemalloc"
    if sys.flags.dev_mode:
        yield "Python's development mode (-X dev)"
    if gc.get_debug():
        yield "gc.set_debug"
    for name, values in ENVIRONMENT.items():
        if os.environ.get(name) in values:
            yield f"{name}={os.environ[name]}"
    torch: Any = sys.modules.get("torch")  # not imported for this question
    if torch is not None:
        if torch.is_anomaly_enabled():
            yield "torch.autograd.set_detect_anomaly"
        if torch.autograd._profiler_enabled():
            yield "torch.profiler"


def _name(function: Any) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def require_untraced() -> None:
    """Raises BadArgument where a tracer, profiler or debugger is active."""
    if found := list(tracers()):
        raise BadArgument(
            "timing", ", ".join(found), "no tracer, profiler or debugger beside it", "measure in a run without it"
        )
