"""Monotonicity of a profile, which EMAD assumes ("Teacher-forcing entropy profile"), and isotonic corrections.

Mean entropies mean H_ℓ = θ_ℓ = Σ_d x_d / Σ_d n_d are ratios over documents d; with z_d = x_d − θ n_d,

    Cov(θ) ≈ D / (D − 1) · Σ_d z_d z_dᵀ / (Σ_d n_d)²          (linearised ratio; documents are independent)

A rise θ_b − θ_a, a < b, is shown if its one-sided 95 % bound by Student's t is above zero, corrected for all pairs of
layers read (Bonferroni). Degrees of freedom count effective documents, (Σ n)² / Σ n² (Kish).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from emad_ref.calibration.profile import Profile
from emad_ref.record import Floats

LEVEL = 0.05
SHOWN_NATS = 5e-5  # a smaller correction does not change the four printed digits


@dataclass(frozen=True)
class EntropyRise:
    """Rise from layer ``start`` to the deeper ``end``: mean entropies, nats, and its lower bound.

    ``at_least_nats`` is None if the profile has too little document information for a bound.
    """

    start: int
    end: int
    start_nats: float
    end_nats: float
    at_least_nats: float | None

    @property
    def nats(self) -> float:
        return self.end_nats - self.start_nats


def largest_rise(profile: Profile) -> EntropyRise | None:
    """The largest shown rise between two layers read; None if the profile falls within its error.

    Without sums by document it is the largest rise of the raw means, without a bound.
    """
    means, pairs = profile.mean_nats, list(combinations(range(len(profile.read)), 2))
    bounds = rise_lower_bounds(profile)
    if bounds is not None:
        pairs = [(a, b) for a, b in pairs if bounds[a, b] > 0]
    a, b = max(pairs, key=lambda pair: means[pair[1]] - means[pair[0]], default=(0, 0))
    if means[b] <= means[a]:
        return None
    at_least = None if bounds is None else float(bounds[a, b])
    return EntropyRise(profile.read[a], profile.read[b], means[a], means[b], at_least)


def rise_lower_bounds(profile: Profile) -> Floats | None:
    """[read, read] lower bounds of θ_b − θ_a at (a, b), nats; None without the sums of two documents."""
    moments = None if profile.statistics is None else profile.statistics.documents
    layers = len(profile.read)
    if moments is None or moments.count < 2 or layers < 2:
        return None
    effective = profile.tokens**2 / moments.products[0, 0]
    if effective < 2:
        return None
    means = np.array(profile.mean_nats)
    away = np.concatenate([-means[:, None], np.eye(layers)], axis=1)  # z_d = away @ v_d
    covariance = away @ moments.products @ away.T * moments.count / (moments.count - 1) / profile.tokens**2
    variance = np.diag(covariance)[:, None] + np.diag(covariance) - 2 * covariance
    quantile = stats.t.ppf(1 - LEVEL / (layers * (layers - 1) / 2), effective - 1)
    bounds: Floats = means - means[:, None] - quantile * np.sqrt(np.maximum(variance, 0.0))
    return bounds


def most_corrected_probe_means(profile: Profile) -> tuple[int, float, float] | None:
    """(probe, raw mean, isotonic target), nats, with the largest correction by regression; None without one."""
    raw = dict(zip(profile.read, profile.mean_nats, strict=True))
    moved = [(layer, raw[layer], target) for layer, target in zip(profile.probes, profile.targets_nats, strict=True)]
    layer, mean, target = max(moved, key=lambda each: abs(each[2] - each[1]), default=(0, 0.0, 0.0))
    return (layer, mean, target) if abs(target - mean) > SHOWN_NATS else None


def describe_corrections(profile: Profile) -> str:
    """Description of the corrections by isotonic regression; empty if it moved no mean."""
    if (moved := most_corrected_probe_means(profile)) is None:
        return ""
    layer, mean, target = moved
    return (
        f"isotonic regression moves the mean of layer {layer} most, from {mean:.4f} to {target:.4f} nats "
        f"({target - mean:+.4f})"
    )


def iterate_profile_warnings(profile: Profile) -> Iterator[str]:
    """Sentences about entropy that rises with depth, and about missing information."""
    if rise := largest_rise(profile):
        bound = "how sure that is cannot be told without sums by document"
        if rise.at_least_nats is not None:
            bound = f"by {rise.at_least_nats:.2f} at least (95 %, by document)"
        yield (
            f"entropy does not fall with depth: it rises from {rise.start_nats:.2f} nats after layer {rise.start} to "
            f"{rise.end_nats:.2f} after layer {rise.end}, {bound}; thresholds on low entropy assume a falling profile"
        )
    if profile.layers not in profile.read:
        yield (
            f"the last layer was not read: whether entropy rises between layers {profile.read[-1]} and "
            f"{profile.layers} is not known; calibrate again to see"
        )
