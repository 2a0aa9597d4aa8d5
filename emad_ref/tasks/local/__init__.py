"""lm-eval task definitions that read a local data folder: YAML files, and the few functions they name.

Names, prompts, stop sequences, filters and metrics are lm-eval 0.4.13's own where it has the task; a test compares
every field with the stock definition. Only where documents come from differs (``emad_ref.tasks.datasets.splits``).

    lm-eval's TaskManager(include_path=FOLDER, include_defaults=False, metadata={"data": "DIR"})

Tasks that lm-eval lacks, or cannot load offline: ``wikitext_103``, ``squad`` (v1.1, with SQuAD v2's prompt),
``samsum``, ``humaneval`` (its stock version fetches and runs code at import), ``pile`` (the validation documents),
``world_inventory``, ``world_facts``, ``world_code``, ``world_chart``, ``world_recall``.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
