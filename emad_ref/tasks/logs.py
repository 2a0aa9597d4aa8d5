"""lm-eval's log while we use it as a library: a warning for every definition and data folder that it is given.

Nothing a user can act on, and nothing that is about their model. Errors come through.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lm_eval_quiet() -> Iterator[None]:
    """lm-eval logs errors only, for as long as the block lasts."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
