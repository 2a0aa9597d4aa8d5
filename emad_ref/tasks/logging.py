"""Quiet log of lm-eval while it serves as a library. Imports nothing of lm-eval, so it works without that extra.

lm-eval logs a warning for every task definition and data folder. Errors are still logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lm_eval_quiet() -> Iterator[None]:
    """Let lm-eval log only errors inside the block."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
