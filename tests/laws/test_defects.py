"""The audit has power: an honest decoder passes every check, and every planted defect is caught by the check for it."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.audit import Finding, decisions, forced, generation, rollback, rows, sessions, tolerance
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Decoder
from tests.decoders.cached import CachedDecoder
from tests.decoders.defective import DEFECTS
from tests.decoders.foreign import ForeignDecoder
from tests.decoders.subject import LAYERS, drawn, lens_of, spread_point, tiny_neox

CHECKS = ("forced", "decisions", "rollback", "generation", "rows", "sessions")
TOLERANCE = tolerance("gpt_neox", "float64", "cpu")
MAX_NEW = 16


def run_check(name: str, decoder: type, point: OperatingPoint) -> Finding:
    """One check as a suite would call it; depth has most room where no rule takes it away."""
    model = tiny_neox()
    lens, roomy = lens_of(model), full_depth(LAYERS)
    prompts, continuation = drawn((5, 9, 1), 12)

    def made(at: OperatingPoint) -> Decoder:
        return decoder(model, at)

    if name in ("forced", "sessions"):
        check = {"forced": forced, "sessions": sessions}[name]
        return check(made(roomy), lens, roomy, prompts, continuation, np.random.default_rng(5), TOLERANCE)
    if name == "rollback":
        return rollback(made(roomy), lens, roomy, prompts, continuation, TOLERANCE)
    if name == "decisions":
        return decisions(made(point), lens, point, prompts, continuation, TOLERANCE)
    return {"generation": generation, "rows": rows}[name](made(point), lens, point, prompts, MAX_NEW, TOLERANCE)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("decoder", [CachedDecoder, ForeignDecoder])
def test_an_honest_decoder_passes(decoder: type, check: str) -> None:
    finding = run_check(check, decoder, spread_point())
    assert finding.passed is True, finding.detail
    assert finding.check == check
    assert finding.n > 0
    assert finding.ties == 0


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_caught_by_its_check(defect: str) -> None:
    decoder, check = DEFECTS[defect]
    finding = run_check(check, decoder, spread_point())
    assert finding.passed is False, finding.detail
