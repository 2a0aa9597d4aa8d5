"""What a test does with an audit's finding: fail, warn, or put a count of ties on record."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import metadata

import pytest

from emad_ref.audit.finding import Finding
from emad_ref.audit.golden import Taken, key_of, moved, same_as, thresholds_of
from emad_ref.audit.lens import Lens
from emad_ref.audit.sameness import Tokens, same_tokens
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from pytest_emad.options import Settings
from pytest_emad.recording import EmadWarning, Recorder


class Auditor:
    """The fixture ``emad_audit``: call it with a finding; it fails the test, warns, or puts the count on record."""

    def __init__(self, lens: Lens, tolerance: float, settings: Settings, record: Recorder) -> None:
        self._lens, self._tolerance, self._settings, self._record = lens, tolerance, settings, record

    def __call__(self, finding: Finding) -> None:
        self._record.audit(finding)
        if finding.passed:
            return
        said = f"audit {finding.check}: {finding.detail}"
        if finding.passed is False or self._settings.gating.inconclusive == "fail":
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
        *,
        declared: float = 0.0,
    ) -> None:
        """Fail unless each row's tokens (and depths) are equal to the end, or to a tie (``audit.sameness``)."""
        given = (self._tolerance, prompts, found, wanted, point, found_depths, wanted_depths)
        finding = same_tokens(self._lens, *given, declared=declared)
        self._record.audit(finding)
        if not finding.passed:
            pytest.fail(finding.detail, pytrace=False)
        if finding.ties:
            self._record.note(finding.detail)

    def golden(
        self,
        about: tuple[str, str, str, int, str],
        taken: Taken,
        prompts: Sequence[Prompt],
        noise: float,
        *,
        declared: float,
        point: OperatingPoint | None = None,
        drawn: bool = False,
    ) -> bool:
        """Hold ``taken`` of ``prompts`` against the golden on record; False, and a note, where there is none.

        Args:
            about: fingerprint, dtype, corpus, seed and kind, by which it is on record.
            noise: of a signal, in multiples of a logit's; ``declared``: a logit's, by the decoder.
            point: what decided depths; its thresholds must be those on record, up to the noise of a signal.
            drawn: whether tokens were drawn: they follow the generator of the installed torch.
        """
        release = metadata.version("torch").split(".")[:2]
        key = key_of(*about, drawn_by=f"torch-{'.'.join(release)}" if drawn else "")
        asked = {"prompts": [prompt.tokens.tolist() for prompt in prompts]}
        decided = {} if point is None else {"point": thresholds_of(point)}
        golden = self._record.golden(key, asked | decided | taken.to_json())
        if golden is None:
            self._record.note("golden rows not applicable (no golden recorded)")
            return False
        # a threshold that lies elsewhere by so much decides as a signal that does
        shift = moved(golden.get("point"), decided["point"]) if decided else 0.0
        others = [name for name, value in asked.items() if golden.get(name) != value]
        if shift > noise * self._tolerance:
            others.append("point")
        for name in others:
            pytest.fail(f"golden {key} was recorded for another {name}: record it again", pytrace=False)
        noise += shift / self._tolerance if shift else 0.0
        self(same_as(Taken.from_json(golden), taken, self._tolerance, noise, declared=declared))
        return True
