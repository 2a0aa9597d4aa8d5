"""Settings for lm-eval as a library: task definitions that read a local data folder, and a quiet log.

``TASK_FOLDER`` holds YAML files, for lm-eval's TaskManager(include_path=TASK_FOLDER, include_defaults=False,
metadata={"data": "DIR"}). Names, prompts, stop sequences, filters and metrics are lm-eval 0.4.13's own where it has the
task; a test compares every field with the stock definition. Only where documents come from differs
(``pytest_emad.tasks.datasets.load_task_splits``).

Tasks that lm-eval lacks, or cannot load offline: ``wikitext_103``, ``squad`` (v1.1, with SQuAD v2's prompt),
``samsum``, ``humaneval`` (its stock version fetches and runs code at import), ``pile`` (the validation documents),
``world_inventory``, ``world_facts``, ``world_code``, ``world_chart``, ``world_recall``.

Nothing of lm-eval is imported here, so the module works without that extra.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TASK_FOLDER = Path(__file__).parent / "local"


@contextmanager
def lm_eval_quiet() -> Iterator[None]:
    """Let lm-eval log only errors inside the block: it warns of every task definition and data folder."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
