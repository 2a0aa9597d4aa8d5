"""An operating point: everything that decides depth, as plain data.

A rule compares a signal Ĥ_ℓ with a threshold τ_ℓ at each probe ℓ; a schedule turns fires into depth. The same
point serves replay and decoding, and any decoder a user brings.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from emad_ref.errors import BadArgument

Schedule = Literal["monotone", "free_eager"]
SCHEDULES: tuple[Schedule, ...] = ("monotone", "free_eager")
ESTIMATORS: tuple[str, ...] = ("full",)
SIGNALS: tuple[str, ...] = ("entropy_nats",)


@dataclass(frozen=True)
class OperatingPoint:
    """One configuration of adaptive depth.

    ``name``        how reports call it, e.g. ``emad m=0.20``.
    ``family``      where the thresholds come from: ``full``, ``truncation``, ``emad`` (profile − margin),
                    ``fixed_entropy``.
    ``layers``      L of the model it belongs to.
    ``probes``      layers after which the signal is read, ascending, all < ``ceiling``.
    ``thresholds``  [bins][probes], in the unit of the signal; a token exits at ℓ when signal_ℓ ≤ τ_ℓ.
    ``ceiling``     depth of a token that never exits, and the cap at the start of a sequence.
    ``bins``        how tokens are sorted into the rows of ``thresholds``; ``none`` has one row.
    ``margin_nats`` m of the EMAD family, for reports.

    Raises:
        BadArgument: probes outside 1…ceiling−1 or not ascending, thresholds of another shape or not a number, ….
    """

    name: str
    family: str
    layers: int
    ceiling: int
    probes: tuple[int, ...] = ()
    thresholds: tuple[tuple[float, ...], ...] = ((),)
    schedule: Schedule = "monotone"
    estimator: str = "full"
    signal: str = "entropy_nats"
    bins: str = "none"
    margin_nats: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ceiling <= self.layers:
            raise BadArgument("ceiling", self.ceiling, f"a layer in 1–{self.layers}")
        for probe in self.probes:
            if not 1 <= probe < self.ceiling:
                raise BadArgument(
                    "probes", self.probes, f"layers in 1–{self.ceiling - 1}", "a probe at the ceiling decides nothing"
                )
        if list(self.probes) != sorted(set(self.probes)):
            raise BadArgument("probes", self.probes, "ascending layers, each once")
        if not self.thresholds or (self.bins == "none" and len(self.thresholds) != 1):
            raise BadArgument(
                "thresholds",
                self.thresholds,
                "one row per bin",
                f"bins={self.bins!r} takes one row; without probes, ((),)",
            )
        for row in self.thresholds:
            if len(row) != len(self.probes):
                raise BadArgument("thresholds", self.thresholds, f"{len(self.probes)} values per bin, one per probe")
            if any(math.isnan(value) for value in row):
                raise BadArgument(
                    "thresholds", self.thresholds, "numbers, not NaN", "-inf says never exit at this probe"
                )
        for name, value, known in (
            ("schedule", self.schedule, SCHEDULES),
            ("estimator", self.estimator, ESTIMATORS),
            ("signal", self.signal, SIGNALS),
        ):
            if value not in known:
                raise BadArgument(name, value, f"one of {', '.join(known)}")

    @property
    def adaptive(self) -> bool:
        """Whether any token can exit before ``ceiling``."""
        return any(value > -math.inf for row in self.thresholds for value in row)

    def to_json(self) -> dict[str, Any]:
        """Every field by name, as built-in types."""
        return asdict(self)


def full_depth(layers: int) -> OperatingPoint:
    """All ``layers`` layers for every token."""
    return OperatingPoint("full depth", "full", layers, layers)


def truncated(layers: int, depth: int) -> OperatingPoint:
    """Fixed truncation: the first ``depth`` layers for every token, the prompt included."""
    return OperatingPoint(f"first {depth} layers", "truncation", layers, depth)
