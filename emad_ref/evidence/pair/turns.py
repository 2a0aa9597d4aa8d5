"""One text as a pair writes it: which model wrote each token, and the entropies between which the rule decided.

Read off the walks that were judged: nothing is decoded for it.
"""

from __future__ import annotations

from typing import Any

from emad_ref.decoding.branching import Walk
from emad_ref.decoding.switching import MODELS
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.explorer import pieces
from emad_ref.evidence.pair.rules import Rules

TURNS = "model by token"  # a figure of ``report.figures``


def turns(rules: Rules, task: str) -> Exhibits:
    """A table of the first judged item of ``task`` that both models write on, else of the first; none where no text is
    written.

    Columns ``entropy, bits`` H_t and ``rolling, bits`` H̄_t, both None in the prompt; ``threshold, bits`` τ.
    """
    rule = rules.put_forward(task)
    walks = rules.judged(rule, task).walks
    if not walks:
        return Exhibits()
    number = next((at for at, walk in enumerate(walks) if 0 < walk.by_large < len(walk.tokens)), 0)
    prompt = rules.answers.prompts(task, "evaluate", len(walks))[number]
    tokenizer = rules.answers.models.large.subject.loaded.tokenizer
    read = [
        _row(piece, "prompt", MODELS[rule.start], None, None, rule.threshold_bits)
        for piece in pieces(tokenizer, prompt.tokens)
    ]
    return Exhibits(
        (
            Table(
                f"a text of {task}: {rules.called(rule)}",
                [*read, *_said(walks[number], tokenizer, rule.threshold_bits)],
                TURNS,
            ),
        )
    )


def _said(walk: Walk, tokenizer: Any, threshold: float) -> list[dict[str, Any]]:
    columns = (pieces(tokenizer, walk.tokens), walk.model, walk.entropy_bits, walk.rolling_bits)
    return [
        _row(piece, "continuation", MODELS[model], float(entropy), float(rolling), threshold)
        for piece, model, entropy, rolling in zip(*columns, strict=True)
    ]


def _row(
    piece: str, part: str, model: str, entropy: float | None, rolling: float | None, threshold: float
) -> dict[str, Any]:
    return {
        "token": piece,
        "part": part,
        "model": model,
        "entropy, bits": entropy,
        "rolling, bits": rolling,
        "threshold, bits": threshold,
    }
