"""A screening as plain JSON: what an exit carries, and what tables, pages and suites read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from emad_ref.calibration.profile import library_versions
from emad_ref.screening.reached import Reached, Row
from emad_ref.screening.recommending import Recommended
from emad_ref.screening.selfdrafts import SelfDrafting
from emad_ref.screening.timing import unsound
from emad_ref.signals import perplexity_of
from emad_ref.verdict.interval import Estimate

if TYPE_CHECKING:
    from emad_ref.screening.screen import Found

SCHEMA = 1
BY_CLOCK = ("time", "time_note", "threads", "drafts", "expected", "seconds")  # what belongs to the machine
NOTHING = {"how": "replayed"} | dict.fromkeys(("point", "probes", "net", "rise", "blocks"))  # of a row without a point


def screened_json(found: Found, said: Recommended) -> dict[str, Any]:
    """Provenance, sizes, and every table; shares are fractions, and intervals are [value, low, high].

    ``by_clock`` names what hangs on what was timed here. All else is the same wherever one seed screens one model, the
    last digits of its arithmetic apart.
    """
    own, proven = found.evaluated.own, found.certified
    settings = found.settings
    return {
        "schema": SCHEMA,
        "model": found.model.name,
        "fingerprint": found.model.fingerprint,
        "dtype": found.fitted.lens.dtype,
        "layers": own.layers,
        "corpus": settings.corpus,
        "seed": settings.seed,
        "rise": settings.rise,
        "versions": library_versions(),
        "documents": {name: text.count for name, text in vars(found.texts).items()},
        "near_duplicates": {name: text.near_duplicates for name, text in vars(found.texts).items()},
        "tokens": {name: text.tokens for name, text in vars(found.texts).items()},
        "perplexity": perplexity_of(float(own.nll_nats[:, -1].astype(np.float64).mean())),
        "lens": {
            "rank": found.fitted.lens.rank,
            "steps": found.fitted.plan["steps"],
            "raw_nats": {str(layer): nats for layer, nats in found.fitted.raw_nats.items()},
            "tuned_nats": {str(layer): nats for layer, nats in found.fitted.tuned_nats.items()},
        },
        "slack": [asdict(each) | _bounds(each.low, each.high) for each in found.slack],
        "reached": _rows(found.reached),
        "within_reach": _rows(found.within_reach),
        "decoded": _rows(found.decoded),
        "certified": None
        if proven is None
        else {
            "family": proven.family.name,
            "documents": proven.promise.documents,
            "tried": [
                {"point": point.name, "bound": float(bound), "net": float(net)}
                for point, bound, net in zip(proven.tried, proven.bounds, proven.saved, strict=True)
            ],
            "chosen": None if proven.chosen is None else proven.chosen.name,
            "promise": proven.promise.to_json(),
        },
        "time": [asdict(each) for each in found.timed.predicted],
        "drafts": _drafts(found.drafts),
        "time_note": unsound(found.timed.costs),
        "threads": found.timed.costs.threads,
        "expected": found.expected,
        "seconds": found.seconds,
        "by_clock": list(BY_CLOCK),
        "recommendation": said.sentence,
    }


def _drafts(found: SelfDrafting) -> dict[str, Any]:
    way = found.best
    return {
        "why_none": found.why_none,
        "layer": None if way is None else way.layer,
        "longest": None if way is None else way.longest,
        "gated": None if way is None else way.gated,
        "vocabulary": None if way is None or way.vocabulary is None else len(way.vocabulary),
        "agreement": found.agreement if found.after else None,
        "tokens": found.tokens if found.after else None,
        "seconds": found.seconds if found.after else None,
        "fast": found.fast if found.after else None,
        "after": [asdict(each) | {"fast": each.fast} for each in found.after],
        "sentence": found.said,
    }


def _rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {"family": row.family.name, "readout": row.family.readout, "depth": row.family.depth, "level": row.level}
        | (_found(row) if isinstance(row, Reached) else NOTHING)
        for row in rows
    ]


def _bounds(low: float, high: float) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in (("low", low), ("high", high))}


def _found(row: Reached) -> dict[str, Any]:
    return {
        "how": row.how,
        "point": row.point.name,
        "probes": list(row.point.probes),
        "net": _interval(row.net),
        "rise": _interval(row.rise),
        "blocks": _interval(row.blocks),
    }


def _interval(estimate: Estimate) -> list[float | None]:
    """None for a bound where the data bound nothing: JSON has no infinity."""
    return [number if math.isfinite(number) else None for number in (estimate.value, estimate.low, estimate.high)]
