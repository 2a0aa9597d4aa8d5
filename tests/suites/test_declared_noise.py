"""Every suite of invariants and fidelity accepts declared noise, and refuses a declaration beyond rounding."""

from __future__ import annotations

import re

import pytest

from tests.suites.conftest import Run, text_of

NOISY = """
from emad_ref.protocol import Unsupported
from tests.decoders.declared_noise import noisy
from tests.decoders.audited_model import require_entropy_thresholds

def pytest_emad_make_decoder(config, request):
    require_entropy_thresholds(request.point)
    if request.point.schedule != "monotone":
        raise Unsupported("depth that only falls")
    return noisy({noise}, {declared})(request.model.load().model, request.point, request.temperature, request.seed)
"""
# of one model; speculation of an unrelated pair is too slow
SUITES = ("invariants", "fidelity")
OF_A_PAIR = ("suites/invariants/test_speculative.py", "suites/fidelity/test_golden_pair.py")
WAIVED = [f"--emad-waive={file}=about a pair" for file in OF_A_PAIR]


def judged(pytester: pytest.Pytester, judge: Run, noise: float, declared: float, *suites: str) -> pytest.RunResult:
    pytester.makeconftest(NOISY.format(noise=noise, declared=declared))
    return judge(*suites, more=("-x", ".", *WAIVED), model="emad-tiny", corpus="world:premise")


@pytest.mark.slow  # every suite; an honest decoder with noise is also planted
def test_a_decoder_within_its_declared_noise_passes_every_suite(pytester: pytest.Pytester, judge: Run) -> None:
    """With more noise in every logit, half of all tokens would be ties, and that many are refuted."""
    result = judged(pytester, judge, 0.3, 0.4, *SUITES)
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    assert set(result.parseoutcomes()) <= {"passed", "skipped", "deselected", "warnings", "warning"}


def test_noise_above_its_declaration_fails(pytester: pytest.Pytester, judge: Run) -> None:
    result = judged(pytester, judge, 0.9, 0.3, "invariants/test_depth.py", "invariants/test_positions.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    complaint = re.search(r"signal off by ([\d.]+) nats, more than ([\d.]+)", text_of(result))
    assert complaint is not None, text_of(result)
    off, allowed = map(float, complaint.groups())
    assert 0.3 <= allowed < 2 * 0.3 < off, "an entropy moves a little faster than logits there"


def test_a_declaration_beyond_what_rounding_needs_is_refused(pytester: pytest.Pytester, judge: Run) -> None:
    result = judged(pytester, judge, 0.0, 100.0, "fidelity/test_full_depth.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    said = "audit noise: the decoder declares logit_noise=100, but bfloat16, the least precise dtype, honestly needs "
    assert said in text_of(result)
