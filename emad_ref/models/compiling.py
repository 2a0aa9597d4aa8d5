"""``torch.compile`` that says so where it does not compile.

Transformers and TorchDynamo go on with the plain step wherever compiling fails them, and tell a log. A baseline that is
called compiled must not be that step: here TorchDynamo's limit of shapes raises, and graphs it traced are counted.

TorchDynamo is imported where it is used: that takes seconds, and most runs compile nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def compiling() -> Iterator[None]:
    """What runs inside is compiled, or raises.

    Raises:
        RuntimeError: more shapes than TorchDynamo compiles one function for.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        with config.patch(fail_on_recompile_limit_hit=True):
            yield
    except FailOnRecompileLimitHit as limit:
        raise RuntimeError(f"more shapes than TorchDynamo compiles a step for: {limit}") from limit


def graphs_traced() -> int:
    """Graphs that TorchDynamo has traced in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
