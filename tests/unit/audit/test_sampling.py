"""Audit of sampling: honest draws pass at the stated error level, and each wrong distribution is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from emad_ref.protocol import Capabilities
from pytest_emad.audit import sampling as audited
from pytest_emad.audit.finding import Finding, Tally
from pytest_emad.audit.reference_logits import LogitLens
from pytest_emad.audit.requests import COOLER
from pytest_emad.audit.sampling import (
    SampledRow,
    check_sampling,
    choose_open_prompts,
    draw_temperature,
    require_not_greedy,
)
from pytest_emad.measurements.engine import TEMPERATURES as TEMPERATURES_OF_CLAIMS
from suites.fidelity import test_sampling
from suites.invariants import test_requests
from tests.decoders.audited_model import drawn, lens_of, spread_point, tiny_neox
from tests.decoders.cached_decoder import CachedDecoder

NEW, HOT, TOLERANCE = 12, 12.0, 1e-9  # the tiny model's logits are wide: only at this temperature do draws vary


class AnotherTemperature(CachedDecoder):
    """Samples at temperature 1 for every requested temperature."""

    def draw(self, scaled: torch.Tensor, generator: torch.Generator) -> int:
        return super().draw(scaled * self.temperature, generator)


def checked(
    decoder: type[CachedDecoder], seeds: tuple[int, ...] = (1, 2, 3, 4), noise: float = 0.0, temperature: float = HOT
) -> Finding:
    model, point = tiny_neox(), spread_point()
    prompts, _ = drawn((4, 5, 6), 1)
    records = [(seed, decoder(model, point, temperature, seed).generate(prompts, NEW, frozenset())) for seed in seeds]
    said, rng = Capabilities(logit_noise=noise), np.random.default_rng(0)
    return check_sampling(records, lens_of(model), point, prompts, NEW, temperature, said, rng, TOLERANCE, needed=50)


def test_honest_draws_pass() -> None:
    finding = checked(CachedDecoder)
    assert finding.passed is True, finding.detail


@pytest.mark.parametrize(("low", "high", "step"), [(1.6, 2.0, 0.1), (0.4, 0.7, 0.1), (0.0, 0.05, 0.05)])
def test_temperatures_are_within_their_limits_and_far_from_round_ones(low: float, high: float, step: float) -> None:
    rng = np.random.default_rng(0)
    found = np.array([draw_temperature(rng, low, high, step) for _ in range(200)])
    assert (found > low).all()
    assert (found < high).all()
    assert (np.abs(found / step - np.round(found / step)) > 0.34).all()
    assert len(np.unique(np.floor(found / step))) == round((high - low) / step)


def test_the_suites_ask_for_temperatures_that_servers_take() -> None:
    drawn = [*(each[:2] for each in test_sampling.TEMPERATURES.values()), test_requests.HOT]
    assert all(0 <= low < high <= 2 for low, high in drawn)
    assert min(COOLER, *TEMPERATURES_OF_CLAIMS) > 0
    assert max(TEMPERATURES_OF_CLAIMS) <= 2


def test_open_prompts_are_those_at_which_a_draw_tells_most_about_the_temperature() -> None:
    """Two tokens: the information is highest at a lead of 2.4 T, and 0 at a tie and at certainty."""
    leads = np.array([0.0, 0.24, 5.0, 0.001, 0.1, 1.0, 0.5])
    logits = np.stack([leads, np.zeros(7), np.full(7, -99.0)], axis=-1)[:, None]
    texts = [np.arange(7)]

    def lengths(count: int, temperature: float, tolerance: float, lens: LogitLens) -> list[int]:
        return [len(each.tokens) for each in choose_open_prompts(lens, texts, count, temperature, tolerance)]

    plain = LogitLens(lambda tokens: logits[: len(tokens)])
    assert lengths(2, 0.1, 0.0, plain) == [2, 5]
    assert lengths(3, 0.0, 0.01, plain) == [5, 2, 7], "ties within the tolerance are left out"
    assert lengths(9, 0.0, 2.0, plain) == []

    @dataclass(frozen=True)
    class Rounding(LogitLens):
        def max_rounding_error(self, tokens: np.ndarray, layers: Sequence[int]) -> float:
            return float(len(tokens) == 2)

    assert lengths(2, 0.1, 0.1, Rounding(plain.logits)) == [5, 7]


def test_noise_beyond_all_probabilities_explains_greedy_tokens() -> None:
    """e^(2ε/T) must stay finite: a stated bfloat16 at a low temperature."""
    logits = np.tile([1.0, *[0.0] * 24], (64, 1))
    tally = Tally("sampling", 0)
    with tally:
        require_not_greedy(tally, [SampledRow(1, 0, np.zeros(64, dtype=np.int64), logits)], 0.02, 10.0)
    assert tally.complaint is None


def test_noise_that_is_declared_widens_the_test_of_the_distribution() -> None:
    """Noise that changes the density by e^(±16) hides another temperature, so nothing is refuted."""
    assert checked(AnotherTemperature).passed is False
    assert checked(AnotherTemperature, noise=100.0).passed is not False


def test_tokens_that_leave_nothing_to_draw_are_inconclusive() -> None:
    finding = checked(CachedDecoder, temperature=0.05)
    assert finding.passed is None, finding.detail


@pytest.mark.slow
def test_the_error_level_is_the_one_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a level of 5 % about one in twenty honest runs is refuted: the places really are uniform."""
    monkeypatch.setattr(audited, "LEVEL", 0.05)
    refuted = sum(checked(CachedDecoder, (seed, seed + 100)).passed is False for seed in range(40))
    assert refuted <= 7  # P(more of 40 at 5 %) = 0.1 %


def test_first_tokens_at_another_temperature_are_named() -> None:
    """One token of sixteen: too few to be significant among all."""
    rng = np.random.default_rng(0)
    logits = np.log(rng.dirichlet(np.full(60, 0.3), (40, 16)))

    def drawn(first: float) -> str | None:
        powers = np.where(np.arange(16)[None, :, None], 1.0, 1 / first) * logits
        p = np.exp(powers - powers.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        rows = [
            audited.SampledRow(0, row, np.array([plainly(rng, each) for each in p[row]]), logits[row])
            for row in range(40)
        ]
        tally = Tally("sampling", 0)
        with tally:
            audited._require_distributed(tally, rows, 1.0, rng, 0.0)
        return tally.complaint

    assert drawn(1.0) is None
    complaint = drawn(0.3)
    assert complaint is not None
    assert complaint.startswith("40 first tokens of rows are not drawn from softmax")


def test_places_are_those_of_the_probabilities_in_order() -> None:
    row = audited.SampledRow(0, 0, np.array([1, 0]), np.log(np.array([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]])))
    places = audited.pit_values_in_rank_order(row, 1.0, np.random.default_rng(0))
    assert 0.7 <= places[0] <= 0.9
    assert 0.0 <= places[1] <= 0.7


REUSES: dict[str, tuple[Callable[[float], float], bool, str]] = {  # the second of two numbers, by rank, and words
    "twice, by id": (lambda u: u, False, "difference between the places of neighbours in the order of their id"),
    "twice, by rank": (lambda u: u, True, "difference between the places of neighbours in the order of their rank"),
    "mirrored, by id": (lambda u: 1 - u, False, "sum between the places of neighbours in the order of their id"),
}


def neighbours(reuse: Callable[[float], float] | None, by_rank: bool = False, seed: int = 0) -> str | None:
    """Return the complaint about tokens, each second one drawn by ``reuse`` of the previous number; None: anew."""
    rng = np.random.default_rng(seed)
    logits = np.log(rng.dirichlet(np.full(60, 0.3), (40, 16)))
    rows = []
    for row in range(40):
        emitted, u = [], 0.0
        for at in range(16):
            u = reuse(u) if reuse is not None and at % 2 else rng.uniform()
            p = np.exp(logits[row, at])
            order = (-p).argsort() if by_rank else np.arange(60)
            emitted.append(order[np.searchsorted(p[order].cumsum(), u).clip(0, 59)])
        rows.append(audited.SampledRow(0, row, np.array(emitted), logits[row]))
    tally = Tally("sampling", 0)
    with tally:
        audited._require_distributed(tally, rows, 1.0, rng, 0.0)
    return tally.complaint


@pytest.mark.parametrize("case", REUSES)
def test_a_number_that_draws_two_tokens_is_named(case: str) -> None:
    reuse, by_rank, words = REUSES[case]
    complaint = str(neighbours(reuse, by_rank))
    assert complaint.startswith("600 tokens are not drawn anew: p = ")
    assert words in complaint


def test_numbers_drawn_anew_are_rarely_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tests at 2 % each: about three of forty honest runs."""
    monkeypatch.setattr(audited, "LEVEL", 0.02)
    assert sum(neighbours(None, seed=seed) is not None for seed in range(40)) <= 9


# ---------------------------------------------------------------- rare tokens, and rows that end early


def rows_of(draw: Callable[[np.random.Generator, np.ndarray], int], seed: int = 0) -> list[audited.SampledRow]:
    """Return eight rows of a hundred tokens that ``draw`` draws from a long-tailed distribution over 400 tokens."""
    rng = np.random.default_rng(seed)
    logits = np.log(rng.dirichlet(np.full(400, 0.3), (8, 100)))
    p = np.exp(logits)
    return [
        audited.SampledRow(
            0, row, np.array([draw(rng, p[row, at] / p[row, at].sum()) for at in range(100)]), logits[row]
        )
        for row in range(8)
    ]


def plainly(rng: np.random.Generator, p: np.ndarray) -> int:
    return int(rng.choice(len(p), p=p))


def without(keep: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.random.Generator, np.ndarray], int]:
    """Draw among the tokens that ``keep`` selects by their probabilities [V]."""

    def draw(rng: np.random.Generator, p: np.ndarray) -> int:
        kept = np.where(keep(p), p, 0.0)
        return plainly(rng, kept / kept.sum())

    return draw


TRUNCATIONS = {
    "top-k": lambda p: p >= np.sort(p)[-60],
    "top-p": lambda p: np.array([p[p > one].sum() for one in p]) < 0.97,
    "min-p": lambda p: p >= 0.03 * p.max(),
}


def rare(rows: list[audited.SampledRow], noise: float = 0.0) -> str | None:
    tally = Tally("sampling", 0)
    with tally:
        audited._require_rare_tokens(tally, rows, 1.0, np.random.default_rng(0), noise)
    return tally.complaint


@pytest.mark.parametrize("cut", TRUNCATIONS)
def test_truncation_that_ten_bins_do_not_show_is_named(cut: str) -> None:
    complaint = rare(rows_of(without(TRUNCATIONS[cut])))
    assert complaint is not None
    assert "too rarely" in complaint
    assert rare(rows_of(without(TRUNCATIONS[cut])), noise=30.0) is None  # noise excuses this complaint


def repeating_rows(penalty: float) -> list[audited.SampledRow]:
    """Return 40 rows of 40 tokens after prompts of 40; tokens that the prompt or row has lose ``penalty`` logits."""
    rng = np.random.default_rng(0)
    logits = np.log(np.broadcast_to(rng.dirichlet(np.full(300, 0.3)), (40, 300)))
    rows = []
    for row in range(40):
        prompt = rng.choice(300, 40, p=np.exp(logits[0]))
        tokens = prompt.tolist()
        for _ in range(40):
            lowered = logits[0] - penalty * np.isin(np.arange(300), tokens)
            tokens.append(plainly(rng, np.exp(lowered) / np.exp(lowered).sum()))
        rows.append(audited.SampledRow(0, row, np.array(tokens[40:]), logits, prompt))
    return rows


def test_a_small_penalty_on_tokens_of_the_prompt_is_named() -> None:
    assert rare(repeating_rows(0.0)) is None
    assert "tokens that the prompt or the row holds are drawn too rarely" in str(rare(repeating_rows(0.4)))


def test_a_single_id_that_is_never_drawn_is_named() -> None:
    """An id of ordinary frequency, which no other event detects."""
    logits = np.zeros((40, 300))
    banned = np.where(np.arange(300) == 7, -np.inf, 0.0)

    def drawn(offset: np.ndarray) -> list[audited.SampledRow]:
        p = np.exp(offset) / np.exp(offset).sum()
        rng = np.random.default_rng(0)
        return [audited.SampledRow(0, row, rng.choice(300, 40, p=p), logits) for row in range(200)]

    assert rare(drawn(np.zeros(300))) is None
    complaint = rare(drawn(banned))
    assert complaint is not None
    assert complaint.startswith(
        "token 7 is not drawn from softmax(logits / 1.00): it is drawn too rarely, 0 times where 26"
    )
    assert rare(drawn(banned), noise=1.0) is None


def test_a_single_id_that_is_raised_by_a_logit_is_named() -> None:
    logits, raised = np.zeros((40, 300)), np.where(np.arange(300) == 7, 1.0, 0.0)
    p = np.exp(raised) / np.exp(raised).sum()
    rng = np.random.default_rng(0)
    rows = [audited.SampledRow(0, row, rng.choice(300, 40, p=p), logits) for row in range(200)]
    assert "token 7 is not drawn from softmax(logits / 1.00): it is drawn too often" in str(rare(rows))
    assert rare(rows, noise=1.0) is None


def at_temperature(rows: list[audited.SampledRow], noise: float = 0.0) -> str | None:
    tally = Tally("sampling", 0)
    with tally:
        audited.require_temperatures({1.0: rows}, noise)
    return tally.complaint


@pytest.mark.parametrize("factor", [0.92, 1.09])
def test_a_slightly_other_temperature_is_named(factor: float) -> None:
    def draw(rng: np.random.Generator, p: np.ndarray) -> int:
        tempered = p ** (1 / factor)
        return plainly(rng, tempered / tempered.sum())

    rows = [row for seed in range(6) for row in rows_of(draw, seed)]
    complaint = str(at_temperature(rows))
    assert complaint.startswith("4800 tokens are not drawn from softmax(logits / 1.00): temperature ")
    assert f"temperature {0.95 if factor < 1 else 1.05:.2f} explains them better" in complaint
    assert at_temperature(rows, noise=0.5) is None  # noise excuses this complaint


def test_one_factor_of_several_temperatures_is_tested_together() -> None:
    """At none of four temperatures there are tokens enough."""

    def draw(rng: np.random.Generator, p: np.ndarray) -> int:
        tempered = p ** (1 / 1.08)
        return plainly(rng, tempered / tempered.sum())

    tally, drawn = Tally("sampling", 0), {}
    for asked in (1.0, 1.25, 1.5, 2.0):
        rows = [row for seed in range(2) for row in rows_of(draw, 7 * seed + int(10 * asked))]
        drawn[asked] = [replace(row, logits=asked * row.logits) for row in rows]
    with tally:
        for asked, rows in drawn.items():
            audited.require_temperatures({asked: rows}, 0.0)
    assert tally.complaint is None
    with tally:
        audited.require_temperatures(drawn, 0.0)
    assert "softmax(logits / 1.00, 1.25, 1.50, 2.00): temperature 1.05, 1.31, 1.58, 2.10 explains" in str(
        tally.complaint
    )


def test_honest_draws_are_rarely_refuted_for_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited, "LEVEL", 0.05)
    assert sum(at_temperature(rows_of(plainly, seed)) is not None for seed in range(40)) <= 7


def test_noise_as_large_as_is_declared_refutes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits moved towards another temperature by up to ``noise``: at 5 % at most one refutation in twenty."""
    monkeypatch.setattr(audited, "LEVEL", 0.05)

    def draw(rng: np.random.Generator, p: np.ndarray) -> int:
        logits = np.log(p)
        moved = np.exp(logits + np.clip(0.1 * (logits - logits.mean()), -0.05, 0.05))
        return plainly(rng, moved / moved.sum())

    assert sum(at_temperature(rows_of(draw, seed), 0.05) is not None for seed in range(40)) <= 7


def test_honest_draws_are_rarely_refuted_for_what_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a level of 5 % at most one in twenty, for any tokens: Ville's inequality holds for all events together."""
    monkeypatch.setattr(audited, "LEVEL", 0.05)
    assert sum(rare(rows_of(plainly, seed)) is not None for seed in range(40)) <= 7


def test_probabilities_of_events_are_sums_of_tokens() -> None:
    (row, *_) = rows_of(plainly)
    p = np.exp(row.log_probabilities(1.0))
    for what, (happened, chance) in audited.rare_event_masks_and_probs(row, 1.0, np.random.default_rng(0)).items():
        assert ((happened == 0) | (happened == 1)).all()
        if what == "tokens beyond the 32 likeliest":
            np.testing.assert_allclose(chance, np.sort(p, axis=-1)[:, :-32].sum(axis=-1))
            edge = np.sort(p, axis=-1)[:, -32]
            assert happened.tolist() == (p[np.arange(100), row.emitted] < edge).astype(float).tolist()


# ------------------------------------------------------------ coincidences under noise


@pytest.mark.parametrize(("noise", "passes"), [(0.0, False), (0.4, True)])
def test_likeliest_tokens_alone_are_chance_as_far_as_noise_explains(noise: float, passes: bool) -> None:
    logits = 0.5 * np.log(np.tile([0.4, *[0.025] * 24], (16, 1)))
    tally = Tally("sampling", 0)
    with tally:
        require_not_greedy(tally, [SampledRow(1, 0, np.zeros(16, dtype=np.int64), logits)], 0.5, noise)
    assert (tally.to_finding().passed is not False) == passes
