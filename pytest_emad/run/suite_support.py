"""Support for suite files: judging an audit's finding, and benchmark rows.

``AuditFindingGate`` fails the test on a finding, warns, or records a count of ties. ``CLOCK``
gives pytest-benchmark the durations of the paired clock, because its own loop times one arm after the other, which
drift makes incomparable.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from typing import Any

import pytest

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.reference_logits import Lens
from pytest_emad.audit.token_comparison import (
    GoldenTokens,
    TokenRows,
    check_same_tokens,
    compare_golden,
    golden_key,
    largest_threshold_change,
    thresholds_to_golden_json,
)
from pytest_emad.run.options import RunSettings
from pytest_emad.run.recorder import EmadWarning, Recorder

Ask = Callable[..., None]  # decides a claim, by id, on a fixture's evidence, and records the answer


class AuditFindingGate:
    """The fixture ``emad_audit``: called with a finding, it fails the test, warns, or records the count."""

    def __init__(self, lens: Lens, tolerance: float, settings: RunSettings, record: Recorder) -> None:
        self._lens, self._tolerance, self._settings, self._record = lens, tolerance, settings, record

    def __call__(self, finding: Finding) -> None:
        self._record.record_audit(finding)
        if finding.passed:
            return
        said = f"audit {finding.check}: {finding.detail}"
        if finding.passed is False or self._settings.gating.inconclusive == "fail":
            pytest.fail(said, pytrace=False)
        self._record.record_note(f"inconclusive {said}")
        warnings.warn(EmadWarning(f"inconclusive {said}"), stacklevel=2)

    def require_same_tokens(
        self,
        prompts: Sequence[Prompt],
        found: TokenRows,
        wanted: TokenRows,
        point: OperatingPoint | None = None,
        found_depths: TokenRows | None = None,
        wanted_depths: TokenRows | None = None,
        *,
        declared: float = 0.0,
    ) -> None:
        """Fail unless each row's tokens (and depths) are equal to the end, or to a tie (``audit.token_comparison``)."""
        given = (self._tolerance, prompts, found, wanted, point, found_depths, wanted_depths)
        finding = check_same_tokens(self._lens, *given, declared=declared)
        self._record.record_audit(finding)
        if not finding.passed:
            pytest.fail(finding.detail, pytrace=False)
        if finding.ties:
            self._record.record_note(finding.detail)

    def compare_with_golden(
        self,
        about: tuple[str, str, str, int, str],
        take: Callable[[], GoldenTokens],
        prompts: Sequence[Prompt],
        noise: float,
        *,
        declared: float,
        point: OperatingPoint | None = None,
        drawn: bool = False,
    ) -> bool:
        """Compare the tokens that ``take`` returns for ``prompts`` with the golden; False and a note without one.

        Args:
            about: fingerprint, dtype, corpus, seed and kind, the key of the record.
            noise: of a signal, in multiples of a logit's; ``declared``: a logit's, by the decoder.
            point: the operating point; its thresholds must equal the recorded ones, up to the noise of a signal.
            drawn: whether tokens were drawn, which depend on the generator of the installed torch.
        """
        release = metadata.version("torch").split(".")[:2]
        key = golden_key(*about, drawn_by=f"torch-{'.'.join(release)}" if drawn else "")
        asked = {"prompts": [prompt.tokens.tolist() for prompt in prompts]}
        decided = {} if point is None else {"point": thresholds_to_golden_json(point)}
        take = cache(take)  # decodes only if a golden exists, and only once
        golden = self._record.load_golden(key, lambda: asked | decided | take().to_json())
        if golden is None:
            self._record.record_note("golden rows not applicable (no golden recorded)")
            return False
        # a difference of a threshold acts like an equal difference of the signal
        shift = largest_threshold_change(golden.get("point"), decided["point"]) if decided else 0.0
        others = [name for name, value in asked.items() if golden.get(name) != value]
        if shift > noise * self._tolerance:
            others.append("point")
        for name in others:
            pytest.fail(f"golden {key} was recorded for another {name}: record it again", pytrace=False)
        noise += shift / self._tolerance if shift else 0.0
        self(compare_golden(GoldenTokens.from_json(golden), take(), self._tolerance, noise, declared=declared))
        return True


class ReplayClock:
    """A timer by whose readings round i lasts ``seconds[i]`` of the samples loaded last."""

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def __call__(self) -> float:
        return next(self._readings)

    def load_samples(self, seconds: Sequence[float]) -> None:
        self._readings = _clock_readings([float(duration) for duration in seconds])


def _clock_readings(seconds: Sequence[float]) -> Iterator[float]:
    now = 0.0
    for duration in seconds:
        yield now
        now += duration
        yield now


CLOCK = ReplayClock()


def record_benchmark_samples(benchmark: Any, seconds: Sequence[float], group: str) -> None:
    """Record ``seconds`` as the rounds of ``benchmark``, a fixture with the timer ``CLOCK``, in ``group``."""
    benchmark.group = group
    CLOCK.load_samples(seconds)
    benchmark.pedantic(_no_op, rounds=len(seconds), iterations=1, warmup_rounds=0)


def _no_op() -> None:
    """Do nothing: the body of a replayed round."""
