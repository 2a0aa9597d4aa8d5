"""The teacher-forcing entropy profile: what calibration leaves behind, as a record with a fingerprint.

Raw means of every layer stand beside the isotonic targets of the probes. A profile belongs to one model, tokenizer and
dtype; ``require`` refuses any other, because τ of one model is a random number for another.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

import numpy as np

from emad_ref.calibration.fit import isotonic_targets
from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument, EmadError
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import entropy_matched

SCHEMA = 1


class BadProfile(EmadError):
    """A profile file that cannot be read, or that belongs to another model."""


@dataclass(frozen=True)
class Profile:
    """``mean_nats`` [L] raw means; ``targets_nats`` [probes] isotonic; ``tokens`` the number of positions averaged."""

    model: str
    fingerprint: str
    corpus: str
    dtype: str
    layers: int
    probes: tuple[int, ...]
    mean_nats: tuple[float, ...]
    targets_nats: tuple[float, ...]
    tokens: int
    sequences: int
    versions: dict[str, str]
    schema: int = SCHEMA

    def point(self, margin_nats: float = 0.0, schedule: str = "monotone") -> OperatingPoint:
        """The EMAD operating point τ = targets − margin.

        Raises:
            BadArgument: a margin that makes every threshold negative: such a point can never exit.
        """
        if self.probes and max(self.targets_nats) - margin_nats < 0:
            raise BadArgument(
                "margin_nats",
                margin_nats,
                f"at most {max(self.targets_nats):.4f}, the highest target of this profile",
                "a larger margin makes every threshold negative, and entropy never is: nothing would exit",
            )
        return entropy_matched(self.layers, self.probes, self.targets_nats, margin_nats, schedule)

    def require(self, fingerprint: str, dtype: str) -> None:
        """Refuse use with another model or dtype."""
        for name, mine, wanted in (("fingerprint", self.fingerprint, fingerprint), ("dtype", self.dtype, dtype)):
            if mine != wanted:
                raise BadProfile(
                    f"profile.{name}={mine!r}, but the model under test has {wanted!r}; "
                    f"calibrate this model itself (the profile was taken from {self.model!r} on {self.corpus!r})"
                )

    def save(self, path: Path) -> None:
        """Write as JSON; the file is complete or absent."""
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)


def profile_of(
    trace: Trace, probes: tuple[int, ...], *, model: str, fingerprint: str, corpus: str, dtype: str
) -> Profile:
    """Mean over all traced positions, isotonic over ``probes``."""
    for probe in probes:
        if not 1 <= probe < trace.layers:
            raise BadArgument("probes", probes, f"layers in 1–{trace.layers - 1} of this model")
    mean = trace.entropy_nats.astype(np.float64).mean(axis=0)
    at = np.array(probes, dtype=np.int64) - 1
    targets = isotonic_targets(probes, mean[at], np.full(len(probes), len(trace)))
    return Profile(
        model=model,
        fingerprint=fingerprint,
        corpus=corpus,
        dtype=dtype,
        layers=trace.layers,
        probes=tuple(probes),
        mean_nats=tuple(float(h) for h in mean),
        targets_nats=tuple(float(h) for h in targets),
        tokens=len(trace),
        sequences=trace.sequences,
        versions={name: version(name) for name in ("torch", "transformers", "numpy", "scikit-learn")},
    )


def load_profile(path: Path) -> Profile:
    """Read a profile written by ``save``.

    Raises:
        BadProfile: missing, not JSON, of another schema, with missing, unknown or impossible fields.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadProfile(f"profile={str(path)!r}, but expected a readable JSON file ({error}); calibrate again") from error
    known = {f.name for f in fields(Profile)}
    if not isinstance(data, dict) or set(data) != known:
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise BadProfile(f"profile={str(path)!r} has fields {found}, but expected {sorted(known)}; calibrate again")
    if data["schema"] != SCHEMA:
        raise BadProfile(f"profile={str(path)!r} has schema {data['schema']!r}, but expected {SCHEMA}; calibrate again")
    try:
        profile = Profile(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})
        entropies = (*profile.mean_nats, *profile.targets_nats)
        consistent = (
            len(profile.mean_nats) == profile.layers
            and len(profile.targets_nats) == len(profile.probes)
            and all(isinstance(h, float) and math.isfinite(h) and h >= 0 for h in entropies)
            and all(isinstance(p, int) and 1 <= p < profile.layers for p in profile.probes)
        )
    except TypeError as error:
        raise BadProfile(f"profile={str(path)!r} is corrupt ({error}); calibrate again") from error
    if not consistent:
        raise BadProfile(
            f"profile={str(path)!r} is corrupt: layers={profile.layers!r}, probes={profile.probes!r}, "
            f"mean_nats={profile.mean_nats!r}, targets_nats={profile.targets_nats!r}, but expected one finite entropy ≥ 0 "
            "per layer and per probe, and probes below the last layer; calibrate again"
        )
    return profile
