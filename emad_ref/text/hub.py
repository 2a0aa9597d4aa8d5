"""Whether the hub can be asked at all.

Its clients meet an unreachable host with five retries per file, some 23 seconds each time. One short request first;
where it fails, callers pass ``local_files_only``, or work inside ``offline()`` where a client has no such argument, and
get what the cache holds, or an error, at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

PATIENCE = 5.0  # seconds


def reachable() -> bool:
    """False in offline mode (``HF_HUB_OFFLINE``) and where the hub does not answer, which is tried once per process."""
    from huggingface_hub import constants  # not at import: this package is torch-free and quick

    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


@functools.cache
def _answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=PATIENCE)
    except Exception:  # whichever library the client uses for HTTP, whatever its error: there was no answer
        return False
    return True


@contextmanager
def offline() -> Iterator[None]:
    """Inside the block, ``huggingface_hub`` and ``datasets`` behave as under ``HF_HUB_OFFLINE=1``.

    They read that variable once, when imported, so the flags they keep are set, and put back.
    """
    import datasets.config
    from huggingface_hub import constants

    with ExitStack() as stack:
        for module in (constants, datasets.config):
            stack.enter_context(patch.object(module, "HF_HUB_OFFLINE", True))
        yield
