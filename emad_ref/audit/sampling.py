"""Does a decoder that is asked to sample draw from softmax(logits / T) at the depths it claims, by row and by seed?

Where a token is drawn from p = softmax(z / T), z the lens' logits at its depth, the place it takes in p is uniform:

    u = Σ_{p_i > p_token} p_i + v·p_token        v ~ U(0, 1)

whatever the history was; so all tokens of all rows count in one test, χ² over ``BINS`` equal bins. Greedy decoding
crowds towards 0, a temperature above the one asked towards 1. Noise of at most ε in a logit changes the density of u by
a factor within e^(±2ε/T): the statistic is taken at the nearest frequencies in that range.

Before that, what a histogram does not show: a decoder that repeats itself where chance would have to, and one that does
not where it must. What repeats by chance is told by its probability, at most ``CHANCE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from emad_ref.audit.finding import NEEDED, Finding, Tally
from emad_ref.audit.generation import read_record
from emad_ref.audit.lens import Lens
from emad_ref.audit.rule import emission_noise
from emad_ref.audit.trajectory import emitted_at, hold_against
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, Prompt
from emad_ref.record import Floats, Ints, Record

CHECK = "sampling"
BINS = 10
CHANCE = 1e-6  # probability below which a coincidence is none
LEVEL = 1e-4  # at which χ² refutes: an honest decoder fails once in ten thousand runs, and always the same run
OPEN = 0.9  # a token whose likeliest alternative has more than this shows little of how it was drawn
TEMPERATURES = np.geomspace(0.2, 5.0, 60)  # among which the one that fits best is looked for


@dataclass(frozen=True)
class Drawn:
    """What one ``generate`` under ``seed`` recorded; decoders of the same seed are expected to repeat it."""

    seed: int
    record: Record


@dataclass(frozen=True)
class _Row:
    """One row of one record: its tokens [m] and the logits [m, V] they were drawn from."""

    seed: int
    row: int
    emitted: Ints
    logits: Floats

    def log_p(self, temperature: float) -> Floats:
        """[m, V] log softmax(logits / temperature)."""
        z = self.logits / temperature
        z = z - z.max(axis=-1, keepdims=True)
        log_p: Floats = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
        return log_p

    def likelihood(self, temperature: float) -> float:
        """log-probability of all its tokens, in nats."""
        return float(self.log_p(temperature)[np.arange(len(self.emitted)), self.emitted].sum())


def sampling(
    drawn: Sequence[Drawn],
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    max_new: int,
    temperature: float,
    capabilities: Capabilities,
    rng: np.random.Generator,
    tolerance: float,
    *,
    needed: int = 20 * NEEDED,
) -> Finding:
    """Check records that decoders at ``temperature`` > 0 made of ``prompts``, no stop token; ``rng`` draws v.

    Rows of equal prompts must differ from one another, records of different seeds too, those of one seed must not.
    Discriminating are tokens whose likeliest alternative has a probability of at most ``OPEN``. ``tolerance`` in
    logits, raised to the noise in ``capabilities``.
    """
    tally = Tally(CHECK, needed)
    tolerance = tally.allow(tolerance, capabilities.logit_noise)
    with tally:
        rows = [row for one in drawn for row in _rows(tally, one, lens, point, prompts, max_new, tolerance)]
        _require_drawn(tally, rows, temperature)
        _require_seeded(tally, rows, prompts, temperature)
        tally.discriminating = sum(int((np.exp(r.log_p(temperature).max(axis=-1)) <= OPEN).sum()) for r in rows)
        _require_distributed(tally, rows, temperature, rng, tolerance * emission_noise(point))
    return tally.finding()


def _rows(
    tally: Tally,
    drawn: Drawn,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    max_new: int,
    tolerance: float,
) -> list[_Row]:
    """The rows of one record, their depths held against the rule."""
    trajectories = read_record(tally, drawn.record, prompts, max_new, frozenset(), point)
    found = []
    for row, (trajectory, emitted) in enumerate(zip(trajectories, drawn.record.emitted, strict=True)):
        reference = hold_against(tally, trajectory, lens, point, tolerance)
        found.append(_Row(drawn.seed, row, emitted, emitted_at(reference, trajectory)))
    return found


def _require_drawn(tally: Tally, rows: Sequence[_Row], temperature: float) -> None:
    """Not every token is the likeliest one, where that is no chance."""
    likeliest = sum(float(row.log_p(temperature).max(axis=-1).sum()) for row in rows)
    greedy = all(np.array_equal(row.logits.argmax(axis=-1), row.emitted) for row in rows)
    tokens = sum(len(row.emitted) for row in rows)
    tally.require(
        not greedy or likeliest > np.log(CHANCE),
        f"temperature {temperature:.2f} was asked for, but each of {tokens} tokens is the argmax: it decodes greedily",
    )


def _require_seeded(tally: Tally, rows: Sequence[_Row], prompts: Sequence[Prompt], temperature: float) -> None:
    """Equal seeds repeat a row, different seeds and rows of equal prompts do not."""
    first: dict[tuple[int, int], _Row] = {}
    for row in rows:
        before = first.setdefault((row.seed, row.row), row)
        tally.require(
            np.array_equal(before.emitted, row.emitted),
            f"row {row.row}: seed {row.seed} drew other tokens the second time: {_parting(before, row)}",
        )
    for one, other in combinations(first.values(), 2):
        if one.row != other.row and (
            one.seed != other.seed or not np.array_equal(prompts[one.row].tokens, prompts[other.row].tokens)
        ):
            continue
        chance = one.likelihood(temperature)
        same = np.array_equal(one.emitted, other.emitted) and chance < np.log(CHANCE)
        said = (
            f"rows {one.row} and {other.row} of one batch drew the same {len(one.emitted)} tokens after the same prompt"
            if one.seed == other.seed
            else f"row {one.row}: seeds {one.seed} and {other.seed} drew the same {len(one.emitted)} tokens"
        )
        tally.require(not same, f"{said}, which chance does once in {np.exp(-chance):.0e} times")


def _parting(one: _Row, other: _Row) -> str:
    shared = min(len(one.emitted), len(other.emitted))
    at = int(np.argmax(one.emitted[:shared] != other.emitted[:shared]))
    return f"new token {at} is {one.emitted[at]}, then {other.emitted[at]}"


def _require_distributed(
    tally: Tally, rows: Sequence[_Row], temperature: float, rng: np.random.Generator, noise: float
) -> None:
    """χ² of the places that all tokens took; records that repeat a seed count once."""
    once = list({(row.seed, row.row): row for row in rows}.values())
    places = np.concatenate([_places(row, temperature, rng) for row in once])
    found = np.bincount((places * BINS).astype(int).clip(0, BINS - 1), minlength=BINS)
    even = len(places) / BINS
    factor = np.exp(2 * noise / temperature)
    nearest = np.clip(found, even / factor, even * factor)
    p = float(stats.chi2.sf(((found - nearest) ** 2 / even).sum(), BINS - 1))
    fits = TEMPERATURES[int(np.argmax([sum(row.likelihood(t) for row in once) for t in TEMPERATURES]))]
    tally.require(
        p >= LEVEL,
        f"{len(places)} tokens are not drawn from softmax(logits / {temperature:.2f}): p = {p:.1g} by χ² of the places "
        f"they take in it, {found.tolist()} in {BINS} equal parts; of all temperatures {fits:.2f} fits them best",
    )


def _places(row: _Row, temperature: float, rng: np.random.Generator) -> Floats:
    """[m] u of each token."""
    p = np.exp(row.log_p(temperature))
    own = p[np.arange(len(p)), row.emitted]
    above = np.where(p > own[:, None], p, 0.0).sum(axis=-1)
    ties = np.where(p == own[:, None], p, 0.0).sum(axis=-1)  # equal probabilities share one interval
    places: Floats = above + rng.uniform(size=len(p)) * ties
    return places
