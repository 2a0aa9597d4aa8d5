"""Check sampling: tokens come from softmax(logits / T) at the claimed depths, by row and by seed.

If a token is drawn from p = softmax(z / T), z the lens' logits at its depth, its place in p is uniform,

    u = Σ_{p_i > p_token} p_i + v·p_token        v ~ U(0, 1)

for any history. So one χ² test over ``BINS`` equal bins takes all tokens of all rows, and another takes first tokens,
which many engines draw in other code. Greedy decoding crowds u towards 0, too high a temperature towards 1. Noise of at
most ε in a logit changes the density of u by a factor within e^(±2ε/T), so the statistic uses the nearest frequencies
in that range.

A histogram does not show rare tokens either. Truncation or a penalty makes some ``events`` impossible or rare: a token
beyond rank k, beyond a mass of 1 − ε, below a share of the best token's probability, or present in the row's last
tokens, the row or its prompt. The check compares the tokens of each event with the probability m_t of each, given all
before it:

    E = mean over λ of exp(λ·Σ a_t − Σ log(1 + m_t·(e^λ − 1)))        a_t = 1 where token t is the event

has mean 1 under an honest decoder, for any dependence, so that E ≥ 1/p has probability p at most (Ville's inequality; λ
< 0 finds events that are too rare, λ > 0 those that are too frequent). For a penalty of δ on the tokens of an event,
exp of that exponent at λ = −δ/T is the likelihood ratio. The same method, at one λ each, finds single ids that are
drawn never or too often.

A histogram does not show a random number that draws two tokens either. So the check tests differences and sums of the
places of neighbours, modulo 1, in the same way. Many engines invert the distribution in the order of ids, and a number
used twice shows only in the order of its use, so both orders are tested.

Nor do neighbours show a number that a row uses again k tokens later, or that row r + d shares with row r. So two more
events are counted for each k and each d: the token equals the one drawn k tokens, or d rows, before it, which has
probability p_token; and the two places, in the order of ids, lie within ``NEAR`` of each other modulo 1, which has
probability 2·``NEAR``. The first shows numbers that perturb every logit (Gumbel), the second numbers that invert the
distribution.

A slightly different temperature T′ changes u too little for ten bins. The likelihood ratio Π p_T′(token)/p_T(token)
also has mean 1 under an honest decoder, and is the most powerful test of T against T′ (Neyman and Pearson). E is its
mean over a few T′, of one temperature or of several by one factor. Noise raises the mean of a factor to at most 1 +
(e^(2ε/T) − 1)·Σ|p_T′ − p_T|, by which it is divided.

Rows that are drawn again under one seed may diverge where rounding moved a probability; more diverging rows than that
explains are refuted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from scipy import stats
from scipy.special import log_softmax, logsumexp

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, Prompt
from emad_ref.record import Bools, Floats, Ints, Record
from pytest_emad.audit.decoding_checks import NO_STOP, extract_trajectories
from pytest_emad.audit.finding import MIN_DISCRIMINATING, AuditRefutedError, Finding, Tally
from pytest_emad.audit.likely_cause import likely_temperature
from pytest_emad.audit.reference_logits import Lens, PrefixCachingLens
from pytest_emad.audit.tolerances import FLOAT32_DRAW, max_logit_error
from pytest_emad.audit.trajectory import Judge, emitted_logits

BINS, EACH_BIN = 10, 8  # most bins of places, and least expected tokens in each
CHANCE = 1e-6  # a coincidence with a smaller probability is refuted
LEVEL = 1e-4  # level of each of eight tests, reproducible: one honest decoder in ten thousand fails
OPEN = 0.9  # tokens with a likelier alternative than this show little of their draw
FIRST_RANK, EACH_OCTAVE = 8, 4  # ranks beyond which tokens are counted: 8, 10, 11, 13, 16, …, below the vocabulary
MASSES = (0.2, 0.1, 0.05, 0.02, 0.01)  # mass of the least likely tokens, counted likewise
SHARES = (0.2, 0.05, 0.01)  # shares of the best token's probability; tokens below are counted
RECENT = 8  # last tokens of a row, whose repetitions are counted
WAGERS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # λ: small ones for small excesses, 4 for impossible events
EACH_ID = (-4.0, 1.0)  # λ for single ids: never drawn, and raised by a logit or two
NEAR = 1 / 32  # distance of two places that count as near each other
FACTORS = (0.85, 0.95, 1.05, 1.2)  # ratios of other tested temperatures to the temperature
SPREAD = 10  # factor by which a draw may amplify differences of probabilities, which it sums over the vocabulary
TEMPERATURES = np.geomspace(0.01, 5.0, 100)  # candidates for the best fit
FROM_STEPS = 0.35  # least distance of a drawn temperature to the round numbers around it, in their steps
SEARCHED = 4  # prompts whose rounding is measured, for each that is needed
CLEAR_LEAD = 4.0  # lead of a greedy token in tolerances: twice as much as rounding of both logits can take away
LARGEST_EXPONENT = 500.0  # of ratios of probabilities: noise beyond it explains everything, and exp stays finite


SampledRecord = tuple[int, Record]  # (seed, record of one ``generate`` under it)


def draw_temperature(rng: np.random.Generator, low: float, high: float, step: float = 0.1) -> float:
    """A temperature between two multiples of ``step``, far from every one: a decoder that rounds to them shows."""
    steps = int(rng.integers(round(low / step), round(high / step)))
    return step * float(steps + rng.uniform(FROM_STEPS, 1 - FROM_STEPS))


def choose_open_prompts(
    lens: Lens, texts: Sequence[Ints], count: int, temperature: float, tolerance: float
) -> list[Prompt]:
    """At most ``count`` beginnings of ``texts`` int64 [n] after which one token tells most about ``temperature``.

    One draw from p = softmax(z / T) has the Fisher information Var_p(z / T) on log T. A text leaves little to draw at a
    low T, so random prompts would show another one only after thousands of tokens. At temperature 0 the beginnings are
    those with the smallest lead of the likeliest token that rounding cannot reverse: a small temperature in place of 0
    shows there. ``tolerance`` in logits; positions with a larger measured rounding are left out.
    """
    found: dict[bytes, tuple[float, Ints]] = {}  # by tokens: texts may overlap
    for text in texts:
        logits = lens(text).last_layer
        if temperature:
            log_p = log_softmax(logits / temperature, axis=-1)
            p = np.exp(log_p)
            told = (p * log_p**2).sum(axis=-1) - (p * log_p).sum(axis=-1) ** 2
        else:
            second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
            told = np.where(first - second > CLEAR_LEAD * tolerance, second - first, -np.inf)
        for at in np.flatnonzero(np.isfinite(told)).tolist():
            found[text[: at + 1].tobytes()] = float(told[at]), text[: at + 1]
    chosen: list[Prompt] = []
    for _, tokens in sorted(found.values(), key=lambda each: -each[0])[: SEARCHED * count]:
        if len(chosen) == count:
            break
        if lens.max_rounding_error(tokens, [lens(tokens[:1]).layers]) <= tolerance:
            chosen.append(Prompt(tokens))
    return chosen


@dataclass(frozen=True)
class SampledRow:
    """One row of one record: its tokens [m], the logits [m, V] of their draws, and the ``prompt`` before them."""

    seed: int
    row: int
    emitted: Ints
    logits: Floats
    prompt: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _known: dict[float, Floats] = field(default_factory=dict, compare=False, repr=False)

    def log_probabilities(self, temperature: float) -> Floats:
        """[m, V] log softmax(logits / temperature), computed once."""
        if temperature not in self._known:
            self._known[temperature] = log_softmax(self.logits / temperature, axis=-1)
        return self._known[temperature]

    def all_and_own_probabilities(self, temperature: float) -> tuple[Floats, Floats]:
        """Probabilities [m, V], and those of its own tokens [m]."""
        p = np.exp(self.log_probabilities(temperature))
        return p, p[np.arange(len(p)), self.emitted]

    def log_likelihood(self, temperature: float) -> float:
        """log-probability of all its tokens, in nats."""
        scaled = self.logits / temperature
        own = scaled[np.arange(len(self.emitted)), self.emitted]
        return float((own - logsumexp(scaled, axis=-1)).sum())


def check_sampling(
    records: Sequence[SampledRecord],
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    max_new: int,
    temperature: float,
    capabilities: Capabilities,
    rng: np.random.Generator,
    tolerance: float,
    *,
    needed: int = 20 * MIN_DISCRIMINATING,
) -> Finding:
    """Check records of decoders at ``temperature`` > 0 on ``prompts``, each under another seed; ``rng`` draws v.

    Discriminating are tokens whose likeliest alternative has a probability of at most ``OPEN``. ``tolerance`` in
    logits, raised to the noise in ``capabilities``. ``request_cases`` compares seeds, and rows beside rows that end.
    """
    tally = Tally("sampling", needed)
    remembering = PrefixCachingLens(lens, kept=len(prompts))  # rows of all records begin alike
    judge = Judge(tally, remembering, point, tally.tolerance_at_least_noise(tolerance, capabilities.logit_noise))
    with tally:
        rows = [row for one in records for row in _rows(judge, one, prompts, max_new)]
        tally.discriminating = _count_open(rows, temperature)
        require_rows_drawn_at_temperature(tally, rows, temperature, rng, max_logit_error(point, judge.tolerance))
    return tally.to_finding()


def _rows(judge: Judge, sampled: SampledRecord, prompts: Sequence[Prompt], max_new: int) -> list[SampledRow]:
    """The rows of one record, with depths checked against the rule."""
    seed, record = sampled
    trajectories = extract_trajectories(judge.tally, record, prompts, max_new, NO_STOP, judge.point)
    judge.tally.count_new_tokens(record.emitted, drawn=True)
    judge = judge.with_lens_prefetch(trajectories)
    rows = []
    for row, (trajectory, emitted) in enumerate(zip(trajectories, record.emitted, strict=True)):
        logits = emitted_logits(judge.require_trajectory_matches_lens(trajectory), trajectory)
        rows.append(SampledRow(seed, row, emitted, logits, prompts[row].tokens))
    return rows


def _count_open(rows: Sequence[SampledRow], temperature: float) -> int:
    """Tokens whose likeliest alternative has a probability of at most ``OPEN``."""
    return sum(int((np.exp(row.log_probabilities(temperature).max(axis=-1)) <= OPEN).sum()) for row in rows)


def _raised(log_p: Floats, noise: float, temperature: float) -> Floats:
    """Log-probabilities, each raised by the largest effect of ``noise`` in every logit."""
    by = _noise_exponent(noise, temperature)
    raised: Floats = log_p + by - np.log1p(np.exp(log_p) * np.expm1(by))
    return raised


def _noise_exponent(noise: float, temperature: float) -> float:
    """2ε/T: the logarithm of the largest factor by which ``noise`` changes a ratio of probabilities."""
    return min(LARGEST_EXPONENT, 2 * noise / temperature)


def log_chance_of_drawing_again(row: SampledRow, temperature: float, noise: float) -> float:
    """At most the logarithm of the chance that other random numbers draw the tokens of ``row``."""
    own = row.log_probabilities(temperature)[np.arange(len(row.emitted)), row.emitted]
    return float(_raised(own, noise, temperature).sum())


def require_not_greedy(tally: Tally, rows: Sequence[SampledRow], temperature: float, noise: float) -> None:
    """Require that not every token is the likeliest one, unless by chance."""
    best = np.concatenate([row.log_probabilities(temperature).max(axis=-1) for row in rows])
    likeliest = float(_raised(best, noise, temperature).sum())
    greedy = all(np.array_equal(row.logits.argmax(axis=-1), row.emitted) for row in rows)
    tokens = sum(len(row.emitted) for row in rows)
    tally.require(
        not greedy or likeliest > np.log(CHANCE),
        f"temperature {temperature:.2f} was asked for, but each of {tokens} tokens is the argmax: it decodes greedily",
    )


def _require_distributed(
    tally: Tally, rows: Sequence[SampledRow], temperature: float, rng: np.random.Generator, noise: float
) -> None:
    """Test places of all tokens, first tokens and neighbours (χ²), and the temperature against others."""
    placed = [pit_values_in_rank_order(row, temperature, rng) for row in rows]
    _require_even(np.concatenate(placed), rows, temperature, noise, "tokens")
    firsts = [SampledRow(row.seed, row.row, row.emitted[:1], row.logits[:1]) for row in rows]
    _require_even(np.array([row[0] for row in placed]), firsts, temperature, noise, "first tokens of rows")
    _require_independent(tally, placed, temperature, noise, "rank")
    _require_independent(
        tally, [pit_values_in_id_order(row, temperature, rng) for row in rows], temperature, noise, "id"
    )
    require_temperatures({temperature: rows}, noise)


def _even_p_value(placed: Floats, noise: float, temperature: float) -> tuple[float, Ints]:
    """p by χ² that ``placed`` is uniform on [0, 1), up to ``noise``, and its counts in equal bins; 1 without any."""
    if not len(placed):
        return 1.0, np.zeros(0, dtype=np.int64)
    bins = min(BINS, max(2, len(placed) // EACH_BIN))
    counts = np.bincount((placed * bins).astype(int).clip(0, bins - 1), minlength=bins)
    even = len(placed) / bins
    factor = np.exp(_noise_exponent(noise, temperature))
    nearest = np.clip(counts, even / factor, even * factor)
    return float(stats.chi2.sf(((counts - nearest) ** 2 / even).sum(), bins - 1)), counts


def _require_even(placed: Floats, rows: Sequence[SampledRow], temperature: float, noise: float, what: str) -> None:
    p, counts = _even_p_value(placed, noise, temperature)
    if p >= LEVEL:
        return
    fits = TEMPERATURES[int(np.argmax([sum(row.log_likelihood(t) for row in rows) for t in TEMPERATURES]))]
    _refute_temperature(
        {temperature: rows},
        f"{len(placed)} {what} are not drawn from softmax(logits / {temperature:.2f}): p = {p:.1g} by χ² of the places "
        f"they take in it, {counts.tolist()} in {len(counts)} equal parts; of all temperatures {fits:.2f} fits them "
        "best",
    )


def _refute_temperature(drawn: Mapping[float, Sequence[SampledRow]], complaint: str) -> NoReturn:
    """Raise ``complaint`` about the rows ``drawn`` at each temperature, with what a server made of it."""

    def log_likelihood(change: Callable[[float], float]) -> float:
        pairs = [(change(asked), row) for asked, rows in drawn.items() for row in rows]
        return sum(row.log_likelihood(each) if each > 0 else -np.inf for each, row in pairs)

    cause = likely_temperature(log_likelihood)
    raise AuditRefutedError(complaint, likely_cause=cause)


def _require_independent(tally: Tally, placed: Sequence[Floats], temperature: float, noise: float, order: str) -> None:
    """Require independent places of neighbours: their difference and sum, modulo 1, are uniform."""
    one, other = (np.concatenate([row[part] for row in placed]) for part in (slice(None, -1), slice(1, None)))
    for what, pairs in {"difference": other - one, "sum": other + one}.items():
        p, counts = _even_p_value(pairs % 1.0, 2 * noise, temperature)  # both places of a pair carry noise
        tally.require(
            p >= LEVEL / 4,  # two tests in two orders count as one test
            f"{len(pairs)} tokens are not drawn anew: p = {p:.1g} by χ² of the {what} between the places of neighbours "
            f"in the order of their {order}, {counts.tolist()} in {len(counts)} equal parts",
        )


def _require_own_numbers(
    tally: Tally, rows: Sequence[SampledRow], temperature: float, rng: np.random.Generator, noise: float
) -> None:
    """Require that no row uses a number again k tokens later, and that no two rows of one seed share theirs."""
    gains, wagers, factor = dict[str, Floats](), np.array(WAGERS), float(np.exp(_noise_exponent(noise, temperature)))

    def count(what: str, happened: Bools, chance: Floats) -> None:
        """Add pairs to the events ``what``: whether each ``happened`` [pairs], and its probability [pairs]."""
        bound = np.minimum(1.0, factor * chance)
        gain = happened.sum() * wagers - np.log1p(bound[:, None] * np.expm1(wagers)).sum(axis=0)
        gains[what] = gains.get(what, np.zeros(len(wagers))) + gain

    seen = dict[int, list[tuple[SampledRow, Floats]]]()
    for row in sorted(rows, key=lambda each: each.row):
        p, places = row.all_and_own_probabilities(temperature)[0], pit_values_in_id_order(row, temperature, rng)
        for lag in range(1, len(row.emitted)):
            earlier, later = row.emitted[:-lag], row.emitted[lag:]
            count(f"as {lag} tokens before", earlier == later, p[np.arange(lag, len(p)), earlier])
            near = _are_near(places[lag:], places[:-lag])
            count(f"by the numbers of {lag} tokens before", near, np.full(len(near), 2 * NEAR))
        for other, theirs in seen.setdefault(row.seed, []):
            both = min(len(row.emitted), len(other.emitted))
            drawn, apart = other.emitted[:both], row.row - other.row
            count(f"as {apart} rows before", row.emitted[:both] == drawn, p[np.arange(both), drawn])
            near = _are_near(places[:both], theirs[:both])
            count(f"by the numbers of {apart} rows before", near, np.full(both, 2 * NEAR))
        seen[row.seed].append((row, places))
    if not gains:
        return
    what, gain = max(gains.items(), key=lambda each: float(each[1].max()))
    p_value = min(1.0, len(gains) * len(WAGERS) * float(np.exp(-gain.max())))
    tally.require(
        p_value >= LEVEL,
        f"tokens at temperature {temperature:.2f} are not drawn anew: too many are drawn {what}, p = {p_value:.1g}",
    )


def _are_near(places: Floats, others: Floats) -> Bools:
    """Whether places [m] lie within ``NEAR`` of others [m], modulo 1."""
    apart = np.abs(places - others)
    near: Bools = np.minimum(apart, 1 - apart) <= NEAR
    return near


def require_temperatures(drawn: Mapping[float, Sequence[SampledRow]], noise: float) -> None:
    """Require that temperatures near the requested ones do not explain the rows ``drawn`` at each far better.

    One factor of all temperatures is tested: several temperatures together show less of it than one alone needs.
    """
    gain = sum((_log_likelihood_gains(rows, asked, noise) for asked, rows in drawn.items()), np.zeros(len(FACTORS)))
    p_value = float(np.exp(-max(0.0, logsumexp(gain) - np.log(len(FACTORS)))))
    tokens, likelier = sum(len(row.emitted) for rows in drawn.values() for row in rows), FACTORS[int(gain.argmax())]
    asked, best = (", ".join(f"{factor * each:.2f}" for each in sorted(drawn)) for factor in (1.0, likelier))
    if p_value < LEVEL:
        said = f"temperature {best} explains them better, p = {p_value:.1g} by likelihood ratios"
        _refute_temperature(drawn, f"{tokens} tokens are not drawn from softmax(logits / {asked}): {said}")


def _log_likelihood_gains(rows: Sequence[SampledRow], temperature: float, noise: float) -> Floats:
    """[factors] log of the likelihood ratio of each factor of ``temperature``, lowered by what ``noise`` explains."""
    gain, spread = np.zeros(len(FACTORS)), np.expm1(_noise_exponent(noise, temperature))
    for row in rows:
        at, p = np.arange(len(row.emitted)), row.all_and_own_probabilities(temperature)[0]
        own = row.log_probabilities(temperature)[at, row.emitted]
        for index, factor in enumerate(FACTORS):
            other = log_softmax(row.logits / (factor * temperature), axis=-1)
            moved = np.abs(np.exp(other) - p).sum(axis=-1)
            gain[index] += (other[at, row.emitted] - own - np.log1p(spread * moved)).sum()
    return gain


def _require_rare_tokens(
    tally: Tally, rows: Sequence[SampledRow], temperature: float, rng: np.random.Generator, noise: float
) -> None:
    """Require every event of ``rare_event_masks_and_probs`` to be as frequent as its probability."""
    of_rows = [rare_event_masks_and_probs(row, temperature, rng) for row in rows]
    factor = float(np.exp(_noise_exponent(noise, temperature)))
    level = LEVEL / (2 * len(of_rows[0]))
    for what in of_rows[0]:
        happened, chance = (np.concatenate([events[what][part] for events in of_rows]) for part in (0, 1))
        wagers = {"rarely": -np.array(WAGERS), "often": np.array(WAGERS)}
        bounds = {"rarely": chance / factor, "often": np.minimum(1.0, chance * factor)}
        for how, bound in bounds.items():
            gain = happened.sum() * wagers[how] - np.log1p(bound[:, None] * np.expm1(wagers[how])).sum(axis=0)
            p = min(1.0, len(WAGERS) * float(np.exp(-gain.max())))
            tally.require(
                p >= level,
                f"{len(chance)} tokens are not drawn from softmax(logits / {temperature:.2f}): {what} are drawn too "
                f"{how}, {int(happened.sum())} times where {chance.sum():.1f} are expected, p = {p:.1g}",
            )
    _require_each_id(tally, rows, temperature, factor)


def _require_each_id(tally: Tally, rows: Sequence[SampledRow], temperature: float, factor: float) -> None:
    """Require that no id of the vocabulary is drawn far too rarely or too often.

    A ban or a bias of one id keeps the proportions of all others.
    """
    vocabulary = rows[0].logits.shape[1]
    drawn, expected, gains = np.zeros(vocabulary), np.zeros(vocabulary), np.zeros((len(EACH_ID), vocabulary))
    for row in rows:
        p = row.all_and_own_probabilities(temperature)[0]
        drawn += np.bincount(row.emitted, minlength=vocabulary)
        expected += p.sum(axis=0)
        for gain, wager in zip(gains, EACH_ID, strict=True):
            bound = np.minimum(1.0, p * factor) if wager > 0 else p / factor
            gain -= np.log1p(bound * np.expm1(wager)).sum(axis=0)
    gains += np.array(EACH_ID)[:, None] * drawn
    at, token = np.unravel_index(int(gains.argmax()), gains.shape)
    p_value = min(1.0, gains.size * float(np.exp(-gains[at, token])))
    tally.require(
        p_value >= LEVEL,
        f"token {token} is not drawn from softmax(logits / {temperature:.2f}): it is drawn too "
        f"{'often' if EACH_ID[at] > 0 else 'rarely'}, {int(drawn[token])} times where {expected[token]:.1f} are "
        f"expected, p = {p_value:.1g}",
    )


def rare_event_masks_and_probs(
    row: SampledRow, temperature: float, rng: np.random.Generator
) -> dict[str, tuple[Floats, Floats]]:
    """Event → whether each token [m] is one, and its probability [m]; ``rng`` decides at the edge of mass.

    Tokens of equal probability count as beyond a rank together.
    """
    p, own = row.all_and_own_probabilities(temperature)
    rising = np.sort(p, axis=-1)
    mass = np.concatenate([np.zeros((len(p), 1)), np.cumsum(rising, axis=-1)], axis=-1)
    vocabulary = p.shape[1]
    octaves = np.arange(0, np.log2(vocabulary / FIRST_RANK), 1 / EACH_OCTAVE)
    events: dict[str, tuple[Floats, Floats]] = {}

    def below(what: str, edge: Floats) -> None:
        """Tokens less likely than ``edge`` [m]."""
        left = [np.searchsorted(tokens, limit) for tokens, limit in zip(rising, edge, strict=True)]
        events[what] = (own < edge).astype(float), mass[np.arange(len(p)), left]

    for rank in np.unique((FIRST_RANK * 2**octaves).round().astype(int)).tolist():
        below(f"tokens beyond the {rank} likeliest", rising[:, vocabulary - rank])
    for share in SHARES:
        below(f"tokens of less than {share:g} of the likeliest token's probability", share * rising[:, -1])
    placed = pit_values_in_rank_order(row, temperature, rng)
    for share in MASSES:
        events[f"the least likely {100 * share:g} %"] = (placed > 1 - share).astype(float), np.full(len(p), share)
    history = np.concatenate([row.prompt, row.emitted])
    ends = len(row.prompt) + np.arange(len(row.emitted))
    for what, starts in {
        f"tokens of the row's last {RECENT}": np.maximum(len(row.prompt), ends - RECENT),
        "tokens that the row has drawn before": np.full(len(ends), len(row.prompt)),
        "tokens that the prompt or the row holds": np.zeros(len(ends), dtype=np.int64),
    }.items():
        known = [np.unique(history[start:end]) for start, end in zip(starts, ends, strict=True)]
        again = np.array([float(token in tokens) for token, tokens in zip(row.emitted, known, strict=True)])
        events[what] = again, np.array([p[at, tokens].sum() for at, tokens in enumerate(known)])
    return events


def rounding_chance(noise: float, length: int) -> float:
    """Largest probability that rounding changes a draw of a row; ``noise``: of a logit, at the temperature."""
    return min(1.0, SPREAD * 2 * noise * length)


def rounding_chance_of_draws(logits: Floats, temperature: float, noise: float) -> float:
    """As ``rounding_chance``, of draws from ``logits`` [m, V]: a token that is nearly certain hardly changes.

    A probability p moves by at most 2ε/T·p·(1 − p), and Σ p·(1 − p) ≤ 2·(1 − max p). ``noise`` ε: of a logit.
    """
    others = -np.expm1(log_softmax(logits / temperature, axis=-1).max(axis=-1, initial=-np.inf))
    return min(1.0, float((SPREAD * 2 * noise / temperature * np.minimum(1.0, 2 * others) + FLOAT32_DRAW).sum()))


def _parting_chance(parted: int, chances: Sequence[float]) -> float:
    """Probability that rounding changes draws of at least ``parted`` rows, each with its own largest chance.

    Equal chances with the same mean give the most (Hoeffding 1956), if ``parted`` exceeds their sum by one.
    """
    if not chances or parted < sum(chances) + 1:
        return 1.0
    return float(stats.binom.sf(parted - 1, len(chances), np.mean(chances)))


def require_rows_drawn_at_temperature(
    tally: Tally, rows: Sequence[SampledRow], temperature: float, rng: np.random.Generator, noise: float
) -> None:
    """Require that ``rows``, drawn by independent numbers, are draws from softmax(logits / temperature).

    ``noise``: the largest of a logit.
    """
    require_not_greedy(tally, rows, temperature, noise)
    _require_distributed(tally, rows, temperature, rng, noise)
    _require_rare_tokens(tally, rows, temperature, rng, noise)
    _require_own_numbers(tally, rows, temperature, rng, noise)


def require_rounding_explains_draw_changes(
    tally: Tally,
    parted: Sequence[str],
    chances: Sequence[float],
    temperature: float,
    what: str,
    other: str,
    level: float = LEVEL,
) -> None:
    """Require that rounding explains the ``parted`` ones among rows drawn twice under one seed.

    ``chances``: of each row, that rounding changes one of its draws (``rounding_chance``).
    """
    p = _parting_chance(len(parted), chances)
    tally.require(
        p >= level,
        f"{len(parted)} of {len(chances)} rows {what} draw other tokens than {other} under the same seed at "
        f"temperature {temperature:.2f}: p = {p:.1g} that rounding moved so many draws; {'; '.join(parted[:3])}",
    )


def pit_values_in_rank_order(row: SampledRow, temperature: float, rng: np.random.Generator) -> Floats:
    """u of each token [m], its place among all tokens, the likeliest first; uniform under the stated distribution."""
    p, own = row.all_and_own_probabilities(temperature)
    above = np.where(p > own[:, None], p, 0.0).sum(axis=-1)
    ties = np.where(p == own[:, None], p, 0.0).sum(axis=-1)  # equal probabilities share one interval
    placed: Floats = above + rng.uniform(size=len(p)) * ties
    return placed


def pit_values_in_id_order(row: SampledRow, temperature: float, rng: np.random.Generator) -> Floats:
    """As ``pit_values_in_rank_order``, but in the order of ids, in which many engines invert the distribution."""
    p, own = row.all_and_own_probabilities(temperature)
    upto = p.cumsum(axis=-1)[np.arange(len(p)), row.emitted]
    placed: Floats = (upto - rng.uniform(size=len(p)) * own).clip(0.0, 1.0)
    return placed
