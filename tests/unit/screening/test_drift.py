"""The drift test: false alarms, detected shifts, detectable shifts, and messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from emad_ref.errors import BadArgument
from pytest_emad.screening import drift as module
from pytest_emad.screening.drift import DocumentFeatures, detect_drift
from pytest_emad.statistics.units import ByDocument

NAMES = ("exits after 4", "exits after 8", "exits after 12", "signal at 4", "signal at 8")


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fewer permutations for a hundred calls within seconds: p to within 1/200 at best."""
    monkeypatch.setattr(module, "PERMUTATIONS", 199)
    monkeypatch.setattr(module, "DRAWS", 60)


def documents(rng: np.random.Generator, count: int, harder: float = 0.0, name: str = "a text") -> DocumentFeatures:
    """Return shares and signals that follow a difficulty per document; skewed, correlated, some probes unreached."""
    hardness = rng.gamma(4.0, 0.5, count) - 2.0 + harder  # one standard deviation: 1
    noise = rng.normal(0, 0.4, (count, 5))
    early = 1 / (1 + np.exp(hardness + noise[:, 0]))
    late = (1 - early) / (1 + np.exp(hardness + noise[:, 1]))
    signal = np.stack([hardness + noise[:, 3], 0.5 * hardness + noise[:, 4]], axis=1)
    signal[rng.random(count) < 0.1, 1] = math.nan
    values = np.column_stack([early, late, 1 - early - late, signal])
    return DocumentFeatures(NAMES, ByDocument.from_whole_documents(values), name)


@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize(("reference", "fresh"), [(40, 3), (60, 20), (30, 60)])
def test_text_like_the_calibration_text_is_seldom_called_moved(reference: int, fresh: int) -> None:
    """200 pairs: at most 5 % in the long run; 18 of 200 is more than 5 % gives in 99 of 100 runs."""
    rng = np.random.default_rng([7, reference])
    alarms = sum(detect_drift(documents(rng, reference), documents(rng, fresh)).state == "moved" for _ in range(200))
    assert alarms < 18


@pytest.mark.usefixtures("fewer")
def test_a_shift_is_found_and_named() -> None:
    rng = np.random.default_rng(0)
    found = [detect_drift(documents(rng, 60), documents(rng, 20, harder=1.2)) for _ in range(20)]
    assert sum(each.state == "moved" for each in found) >= 18
    first = found[0].shifts[0]
    assert first.p < 0.05
    assert first.deviations * (1 if first.name.startswith(("signal", "exits after 12")) else -1) > 0


@pytest.mark.usefixtures("fewer")
def test_a_change_of_spread_alone_is_found() -> None:
    """As many harder documents as easier ones, so no mean changes."""
    rng = np.random.default_rng(1)
    split = documents(rng, 40, harder=2.5).values.values, documents(rng, 40, harder=-2.5).values.values
    both = DocumentFeatures(NAMES, ByDocument.from_whole_documents(np.concatenate(split)), "two kinds")
    assert detect_drift(documents(rng, 60), both).state == "moved"


@pytest.mark.parametrize(("old", "new"), [(5, 4), (4, 5)])
def test_of_one_sign_it_is_scipys_energy_distance_over_every_permutation(old: int, new: int) -> None:
    """126 ways to choose documents, fewer than the draws of a sample, so all are enumerated."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        samples = rng.gamma(2.0, 1.0, old), rng.gamma(2.0, 1.5, new)
        expected = stats.permutation_test(samples, stats.energy_distance, n_resamples=999, alternative="greater").pvalue
        signs = [DocumentFeatures(("a",), ByDocument.from_whole_documents(sample[:, None]), "t") for sample in samples]
        assert detect_drift(*signs).p == pytest.approx(expected, rel=1e-9)
        assert round(126 * expected) == pytest.approx(126 * expected)


def test_what_could_have_been_seen_is_seen() -> None:
    """A shift of the stated size in the stated direction is detected in 80 % of draws or more."""
    rng = np.random.default_rng(2)
    reference = documents(rng, 400)
    said = detect_drift(
        DocumentFeatures(NAMES, ByDocument.from_whole_documents(reference.values.values[:100]), "x"), documents(rng, 25)
    ).smallest
    assert said is not None
    assert 0.3 < said < 1.5
    values = reference.values.values
    with np.errstate(invalid="ignore"):
        centre, spread = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    scaled = np.nan_to_num((values - centre) / spread)
    _, size, directions = np.linalg.svd(scaled, full_matrices=False)
    step = said * directions[0] * size[0] / math.sqrt(len(scaled)) * spread
    seen = 0
    for draw in range(40):
        drawn = np.random.default_rng(draw).permutation(len(values))
        old, new = (
            ByDocument.from_whole_documents(part) for part in (values[drawn[:100]], values[drawn[100:125]] + step)
        )
        seen += detect_drift(DocumentFeatures(NAMES, old, "old"), DocumentFeatures(NAMES, new, "new")).state == "moved"
    assert seen >= 0.7 * 40  # 80 % or more; 40 draws


@pytest.mark.usefixtures("fewer")
def test_more_text_sees_less_and_says_so() -> None:
    rng = np.random.default_rng(3)
    reference = documents(rng, 100)
    found = [detect_drift(reference, documents(rng, count)) for count in (2, 10, 50)]
    sizes = [math.inf if each.smallest is None else each.smallest for each in found]
    assert sizes[0] > sizes[1] > sizes[2]
    assert [each.state for each in found] == ["too little text", found[1].state, "speaks"]
    assert f"the smallest shift that would have been detected in 80% of draws is {sizes[0]:g}" in found[0].statement
    assert f"A shift of {sizes[2]:g} standard deviations" in found[2].statement
    assert "50 documents of a text beside 100 of a text" in found[2].statement


def test_one_document_says_nothing() -> None:
    rng = np.random.default_rng(4)
    found = detect_drift(documents(rng, 50), documents(rng, 1, harder=9.0))
    assert (found.state, found.p, found.smallest) == ("too little text", 1.0, None)
    assert "none up to 3" in found.statement


@pytest.mark.usefixtures("fewer")
def test_a_moved_text_is_named_with_what_moved_most() -> None:
    rng = np.random.default_rng(5)
    said = detect_drift(documents(rng, 60, name="old news"), documents(rng, 30, harder=3.0, name="new news")).statement
    assert "Drift detected" in said
    assert "30 documents of new news beside 60 of old news" in said
    assert "the guarantee does not apply" in said


@pytest.mark.usefixtures("fewer")
def test_signs_that_one_side_lacks_are_left_out() -> None:
    rng = np.random.default_rng(6)
    fresh = documents(rng, 30, harder=3.0)
    depths = DocumentFeatures(NAMES[:3], fresh.values.with_values(fresh.values.values[:, :3]), "a record")
    found = detect_drift(documents(rng, 60), depths)
    assert found.state == "moved"
    assert {shift.name for shift in found.shifts} == set(NAMES[:3])


@pytest.mark.usefixtures("fewer")
def test_signs_that_never_vary_say_nothing_and_break_nothing() -> None:
    still = DocumentFeatures(("a", "b"), ByDocument.from_whole_documents(np.tile([1.0, math.nan], (20, 1))), "still")
    found = detect_drift(still, still)
    assert (found.state, found.p) == ("too little text", 1.0)
    rng = np.random.default_rng(8)
    values = documents(rng, 40).values.values
    values[:, 2] = 0.0
    assert (
        detect_drift(
            *[
                DocumentFeatures(NAMES, ByDocument.from_whole_documents(part), "t")
                for part in (values[:20], values[20:])
            ]
        ).state
        != "moved"
    )


@pytest.mark.usefixtures("fewer")
def test_a_sign_that_never_varied_and_now_does_is_seen() -> None:
    old, new = np.zeros((40, 1)), np.ones((20, 1))
    found = detect_drift(
        *[DocumentFeatures(("exits after 2",), ByDocument.from_whole_documents(each), "t") for each in (old, new)]
    )
    assert found.state == "moved"
    assert math.isinf(found.shifts[0].deviations)


def test_the_same_seed_says_the_same() -> None:
    rng = np.random.default_rng(9)
    old, new = documents(rng, 40), documents(rng, 20)
    assert detect_drift(old, new, seed=3) == detect_drift(old, new, seed=3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"error": 0.0}, "error"),
        ({"reference": documents(np.random.default_rng(0), 3)}, "reference"),
        ({"fresh": DocumentFeatures(NAMES, ByDocument.from_whole_documents(np.zeros((0, 5))), "none")}, "fresh"),
        (
            {"fresh": DocumentFeatures(("another",), ByDocument.from_whole_documents(np.zeros((5, 1))), "t")},
            "fresh.names",
        ),
    ],
)
def test_misuse_is_refused_by_name(change, named) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(BadArgument, match=f"^{named}="):
        detect_drift(**{"reference": documents(rng, 10), "fresh": documents(rng, 10), **change})
