"""The teacher-forcing entropy profile: what calibration leaves behind, as a record with a fingerprint.

Raw means of every layer stand beside the isotonic targets of the probes. A profile belongs to one model, tokenizer and
dtype; ``require`` refuses any other, because τ of one model is a random number for another.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
        """Write as JSON, making its folder if need be; the file is complete or absent."""
        path.parent.mkdir(parents=True, exist_ok=True)  # a long calibration must not be lost to a missing folder
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)


def profile_of(
    trace: Trace, probes: tuple[int, ...], *, model: str, fingerprint: str, corpus: str, dtype: str
) -> Profile:
    """Mean over all traced positions, isotonic over ``probes``.

    Raises:
        BadArgument: probes that are not ascending layers below the last.
    """
    if not _are_probes(probes, trace.layers):
        raise BadArgument(
            "probes", probes, f"ascending layers in 1–{trace.layers - 1} of this model", "the last layer is always read"
        )
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


def _are_probes(value: Any, layers: int) -> bool:
    return all(type(p) is int and 1 <= p < layers for p in value) and list(value) == sorted(set(value))


def _are_entropies(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(h) in (int, float) and math.isfinite(h) and h >= 0 for h in value)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# field, whether its value is possible beside the fields above it, what is expected of it
_FIELDS: tuple[tuple[str, Callable[[Any, dict[str, Any]], bool], str], ...] = (
    ("model", lambda v, _: _is_name(v), "a name"),
    ("fingerprint", lambda v, _: _is_name(v), "a checksum"),
    ("corpus", lambda v, _: _is_name(v), "a name"),
    ("dtype", lambda v, _: _is_name(v), "a name"),
    ("layers", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("probes", lambda v, d: isinstance(v, list) and _are_probes(v, d["layers"]), "ascending layers below the last"),
    ("mean_nats", lambda v, d: _are_entropies(v, d["layers"]), "one finite entropy ≥ 0 per layer"),
    ("targets_nats", lambda v, d: _are_entropies(v, len(d["probes"])), "one finite entropy ≥ 0 per probe"),
    ("targets_nats", lambda v, _: v == sorted(v, reverse=True), "values that never rise"),
    ("tokens", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("sequences", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("versions", lambda v, _: isinstance(v, dict), "versions by package name"),
)


def load_profile(path: Path) -> Profile:
    """Read a profile written by ``save``.

    Raises:
        BadProfile: missing, not JSON, of another schema, with missing, unknown or impossible fields.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadProfile(
            f"profile={str(path)!r}, but expected a readable JSON file ({error}); calibrate again"
        ) from error
    if not isinstance(data, dict):
        raise BadProfile(
            f"profile={str(path)!r} holds a {type(data).__name__}, but expected an object; calibrate again"
        )
    if "schema" in data and data["schema"] != SCHEMA:  # first: another schema may have other fields
        raise BadProfile(f"profile={str(path)!r} has schema={data['schema']!r}, but expected {SCHEMA}; calibrate again")
    known = {f.name for f in fields(Profile)}
    if set(data) != known:
        raise BadProfile(
            f"profile={str(path)!r} lacks fields {sorted(known - set(data))} and has unknown fields "
            f"{sorted(set(data) - known)}, but expected exactly {sorted(known)}; calibrate again"
        )
    for name, possible, expected in _FIELDS:
        if not possible(data[name], data):
            raise BadProfile(
                f"profile={str(path)!r} has {name}={data[name]!r}, but expected {expected}; calibrate again"
            )
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Profile(**given)
