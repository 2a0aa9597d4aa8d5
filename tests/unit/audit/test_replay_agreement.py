"""The bridge passes where decoder and replay agree, and otherwise says whether depth or NLL differs."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from pytest_emad.audit import Finding, ReplayedDocument, check_replay_agreement, tolerance
from pytest_emad.audit.reference_logits import compute_reference
from tests.decoders.audited_model import LAYERS, VOCABULARY, lens_of, spread_point, tiny_neox
from tests.decoders.cached_decoder import CachedDecoder
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.decoders.planted_defects import DEFECTS
from tests.plain_forms import monotone_depths_from_signal

POINT = spread_point()
TOLERANCE = tolerance("gpt_neox", "float64", "cpu")


@functools.cache
def replayed(first_decided: int, point: OperatingPoint = POINT) -> ReplayedDocument:
    """Replay on the lens: the running minimum of first fires, and −log p of the next token at that depth."""
    tokens = np.random.default_rng(7 + first_decided).integers(3, VOCABULARY, 16)
    reference = compute_reference(lens_of(tiny_neox()), tokens, point, first_decided)
    logits, signal = reference.logits[:-1], reference.signal[:-1]
    depth = monotone_depths_from_signal(signal, np.array(point.thresholds[0]), np.array(point.probes), LAYERS)
    shown = logits[np.arange(len(depth)), depth - 1]
    log_p = shown - np.log(np.exp(shown).sum(axis=-1, keepdims=True))
    nll = -log_p[np.arange(len(depth)), tokens[first_decided + 1 :]]
    return ReplayedDocument(tokens, depth, nll, signal, first_decided)


def crossed(decoder: type, *documents: ReplayedDocument) -> Finding:
    return check_replay_agreement(decoder(tiny_neox(), POINT), POINT, documents, TOLERANCE)


@pytest.mark.parametrize("decoder", [CachedDecoder, ForeignDecoder])
def test_an_honest_decoder_crosses(decoder: type) -> None:
    finding = crossed(decoder, replayed(0), replayed(4))
    assert finding.passed is True, finding.detail
    assert finding.n == 15 + 11


def test_another_depth_in_replay_is_found() -> None:
    document = replayed(0)
    finding = crossed(CachedDecoder, replace(document, depth=np.minimum(document.depth, 6)))
    assert finding.passed is False
    assert "replay gives depth 6" in finding.detail


@pytest.mark.parametrize(("noise", "slopes", "passes"), [(0.01, 3.0, True), (0.01, 1.0, False), (0.0, 3.0, False)])
def test_signals_that_move_faster_than_logits_may_be_off_by_more_under_declared_noise(
    noise: float, slopes: float, passes: bool
) -> None:
    document = replayed(0)
    moved = replace(document, signal=document.signal + 0.02, slopes=lambda: np.full(15, slopes))
    decoder = CachedDecoder(tiny_neox(), POINT)
    decoder.capabilities = replace(decoder.capabilities, logit_noise=noise)
    finding = check_replay_agreement(decoder, POINT, [moved], TOLERANCE, needed=0, excuses_ties=True)
    assert (finding.passed is True) is passes, finding.detail


def test_another_nll_in_replay_is_found() -> None:
    document = replayed(0)
    finding = crossed(CachedDecoder, replace(document, nll_nats=document.nll_nats + 1e-3 * (np.arange(15) == 9)))
    assert finding.passed is False
    assert "position 9" in finding.detail
    assert "NLL off by 0.001" in finding.detail


@pytest.mark.parametrize("defect", ["position off by one", "depth rises", "full-depth tokens under shallow depths"])
def test_a_defective_decoder_does_not_cross(defect: str) -> None:
    assert crossed(DEFECTS[defect][0], replayed(0), replayed(4)).passed is False


@pytest.mark.parametrize("excuses_ties", [False, True])
def test_a_tie_excuses_a_depth_and_what_follows_from_it(excuses_ties: bool) -> None:
    """The decoder reads the first signal just below the threshold, replay just above: counted as a tie, 1 in 15."""
    first = float(replayed(0).signal[0, 0])
    above, below = (replace(POINT, thresholds=((first + by, *POINT.thresholds[0][1:]),)) for by in (1e-7, -1e-7))
    decoder = CachedDecoder(tiny_neox(), above)
    finding = check_replay_agreement(
        decoder, below, [replayed(0, below)], TOLERANCE, needed=0, excuses_ties=excuses_ties
    )
    assert (finding.passed, finding.ties) == (excuses_ties, 1), finding.detail


def test_a_difference_beyond_the_tolerance_is_no_tie() -> None:
    first = float(replayed(0).signal[0, 0])
    above, below = (replace(POINT, thresholds=((first + by, *POINT.thresholds[0][1:]),)) for by in (1e-4, -1e-4))
    finding = check_replay_agreement(
        CachedDecoder(tiny_neox(), above), below, [replayed(0, below)], TOLERANCE, needed=0
    )
    assert finding.passed is False
    assert "position 0, depth 2: the rule gives depth" in finding.detail


def test_arrays_that_do_not_fit_the_document_are_refused() -> None:
    document = replayed(0)
    with pytest.raises(BadArgument, match="depth"):
        replace(document, depth=document.depth[:-1])
    with pytest.raises(BadArgument, match="tokens"):
        replace(document, tokens=document.tokens[:1])
