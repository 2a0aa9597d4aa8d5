"""Conditioning: do thresholds per bin of one or two features of a token serve better? (EMAD, "Ablations")"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from emad_ref.calibration.profile import Profile
from emad_ref.evidence.ablations.rows import Row, Rows, points, require_quality, tried
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.point import FEATURES
from emad_ref.policy.bins import bin_names

CONDITIONINGS = [features for count in (0, 1, 2) for features in combinations(FEATURES, count)]


def ablation(evidence: Evidence, rng: np.random.Generator) -> Exhibits:
    """Every feature and pair of features; notes name the bins that were seen too rarely.

    Raises:
        Unsupported: as ``require_quality``.
    """
    require_quality(evidence.subject, evidence.bridging)
    rows = Rows(evidence, rng)
    shown, notes = [rows.full({"features": "–", "bins": 0, "fallen back": 0})], []
    for features in CONDITIONINGS:
        profile = evidence.traces.calibrated(features=features)
        require_bins(profile, len(evidence.traces.calibration))
        shown += rows.at(points(profile, tried(evidence)), described(profile))
        if note := fallback_note(profile):
            notes.append(f"{evidence.name}: {note}")
    return Exhibits((Table(f"ablation, conditioning on {evidence.corpus}", shown),), tuple(notes))


def require_bins(profile: Profile, tokens: int) -> None:
    """Every calibration token is in a bin; a bin keeps its own thresholds exactly where it was seen often enough."""
    seen, fallen = profile.statistics, np.array(profile.fallbacks, dtype=int) > 0
    assert seen is not None
    assert seen.tokens.sum() == tokens, "a calibration token is in no bin"
    few = seen.tokens < profile.minimum_tokens
    assert not profile.bins.features or (fallen == few).all(), "a bin seen too rarely keeps its own, or another fell"
    assert all(len(point.thresholds) == profile.bins.count for point in points(profile, [0.0]))


def described(profile: Profile) -> Row:
    """Leading columns: features, how many bins they make, and how many of those took their parent's thresholds."""
    fallen = sum(dropped > 0 for dropped in profile.fallbacks)
    return {"features": profile.bins.name, "bins": profile.bins.count, "fallen back": fallen}


def fallback_note(profile: Profile) -> str:
    """Which bins took the thresholds of an ancestor; empty for none."""
    names = zip(bin_names(profile.bins), profile.fallbacks, strict=False)  # a profile without bins has no fallbacks
    fell = [name for name, dropped in names if dropped]
    few = f"fewer than {profile.minimum_tokens} calibration tokens"
    return f"{profile.bins.name}: {few} in {'; '.join(fell)}: thresholds of the parent bin" if fell else ""
