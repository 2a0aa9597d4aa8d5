"""What a test does with an audit's finding, and how token sequences are compared up to ties.

A difference is a tie when the two best logits at that position lie within the tolerance, or a signal lies within it of
its threshold at that or an earlier position: both are honest answers to the same question. Ties are counted, and more
than 1 % of tokens tied is a failure (METHODS, "Tolerances").
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest

from emad_ref.audit.finding import TIE_LIMIT, Finding
from emad_ref.audit.lens import Lens, consult
from emad_ref.audit.rule import emission_noise, tied
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Floats
from pytest_emad.options import Settings
from pytest_emad.recording import EmadWarning, Recorder

Tokens = Sequence[Sequence[int]]


class Auditor:
    """The fixture ``emad_audit``: call it with a finding; it fails the test, warns, or puts the count on record."""

    def __init__(self, lens: Lens, tolerance: float, settings: Settings, record: Recorder) -> None:
        self._lens, self._tolerance, self._settings, self._record = lens, tolerance, settings, record

    def __call__(self, finding: Finding) -> None:
        if finding.passed:
            return
        said = f"audit {finding.check}: {finding.detail}"
        if finding.passed is False or self._settings.inconclusive == "fail":
            pytest.fail(said, pytrace=False)
        self._record.note(f"inconclusive {said}")
        warnings.warn(EmadWarning(f"inconclusive {said}"), stacklevel=2)

    def same_tokens(
        self,
        prompts: Sequence[Prompt],
        found: Tokens,
        wanted: Tokens,
        point: OperatingPoint | None = None,
        found_depths: Tokens | None = None,
        wanted_depths: Tokens | None = None,
    ) -> None:
        """Fail unless each row's tokens (and depths) are equal to the end, or to a tie.

        ``point`` None means full depth: only logit ties exist. Depths, where given, stand beside the tokens they
        produced.
        """
        ties = 0
        for row, prompt in enumerate(prompts):
            at = _first_difference(found[row], wanted[row])
            if found_depths is not None and wanted_depths is not None:
                at = min(at, _first_difference(found_depths[row], wanted_depths[row]))
            if at == min(len(found[row]), len(wanted[row])):
                if len(found[row]) != len(wanted[row]):
                    pytest.fail(f"row {row}: {len(found[row])} tokens, but {len(wanted[row])} expected", pytrace=False)
                continue
            depth = None if wanted_depths is None else wanted_depths[row][at]
            if not self._tied(prompt, wanted[row][:at], point, depth):
                pytest.fail(
                    f"row {row}, new token {at}: {found[row][at]} (depth {_at(found_depths, row, at)}), but expected "
                    f"{wanted[row][at]} (depth {_at(wanted_depths, row, at)}), and no tie excuses it",
                    pytrace=False,
                )
            ties += 1
        total = sum(map(len, found))
        if ties:
            self._record.note(f"{ties} of {total} tokens stand after a tie's first difference")
        if ties > TIE_LIMIT * total:
            pytest.fail(f"{ties} ties in {total} tokens: more than {TIE_LIMIT:.0%} is no longer noise", pytrace=False)

    def _tied(self, prompt: Prompt, emitted: Sequence[int], point: OperatingPoint | None, depth: int | None) -> bool:
        history = np.concatenate([prompt.tokens, np.asarray(emitted, dtype=np.int64)])
        if point is None:
            return _gap(self._lens(history)[-1, (depth or 0) - 1]) < self._tolerance
        reference = consult(self._lens, history, point, len(prompt.tokens) - 1, self._tolerance)
        gap = _gap(reference.emitted[-1, (depth or point.layers) - 1])
        near = tied(point, reference.signal, reference.rows, self._tolerance)
        return gap < self._tolerance * emission_noise(point) or bool(near.any())


def _gap(logits: Floats) -> float:
    """The largest of ``logits`` [V] minus the second largest."""
    best = np.sort(logits)[-2:]
    return float(best[1] - best[0])


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)


def _at(depths: Tokens | None, row: int, at: int) -> int | str:
    return "full" if depths is None else depths[row][at]
