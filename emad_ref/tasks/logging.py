"""Keep lm-eval's log quiet while it serves as a library. Imports nothing of lm-eval, so it works without that extra.

lm-eval logs a warning for every task definition and data folder that it is given. Errors come through.
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
