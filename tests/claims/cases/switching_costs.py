"""Token shares and work of a pair with savings that follow by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pytest_emad.claims.switching_costs import PAPER, Headline, SwitchingRuleCosts
from tests.claims.simulation import Case

# ---------------------------------------------------------------- EAD-H1
#
# Savings computed token by token, and claims that round them, miss them, or miss them by exactly the threshold.

THRESHOLD = 0.005


def claimed(off: float):
    """A thousand tokens, some from a large model; the claimed saving differs by ``off``."""

    def found(rng: np.random.Generator) -> list[Headline]:
        headlines = []
        for name in ("a", "b"):
            small, large = rng.uniform(1, 4), rng.uniform(5, 20)
            tokens = rng.random(1000) < rng.uniform(0.1, 0.9)
            spent = np.where(tokens, large, small).sum() / (large * len(tokens))
            headlines.append((name, float(tokens.mean()), small, large, round(1 - spent, 3) + off))
        return headlines

    return found


def alone(off: float):
    """The large model alone saves exactly nothing, whatever saving is claimed."""
    return lambda rng: [("alone", 1.0, 1.0, 2.0, off)]


def survives(verdict) -> None:
    assert (verdict.verdict, verdict.estimate) == ("survived", THRESHOLD)


EAD_H1 = [
    Case("the paper's own", "holds", lambda rng: PAPER),
    Case("claimed to three digits", "holds", claimed(0.0), draws=20),
    Case("claimed one point too high", "fails", claimed(0.01), draws=20),
    Case("claimed one point too low", "fails", claimed(-0.01), draws=20),
    Case("off by exactly the threshold, which is still honest", "holds", alone(THRESHOLD), check=survives),
    Case("off by a hair more", "fails", alone(np.nextafter(THRESHOLD, 1))),
]


# ---------------------------------------------------------------- EAD-H2
#
# Texts that two models write token by token: each reads all tokens that it has not seen before it writes.

SMALL, LARGE = 0, 1
PARAMETERS = (1.0, 4.0)  # a parameter costs one FLOP per token


def written(items: Sequence[tuple[int, Sequence[int]]], rule: str = "rule") -> SwitchingRuleCosts:
    """``items``: prompt tokens, and the model that wrote each token of the answer."""
    processed, caught_up, opening = [0, 0], [0, 0], [0, 0]
    for prompt, models in items:
        seen = [0, 0]
        for at, model in enumerate(models):
            unseen = prompt + at - seen[model]
            opening[model] += prompt if not seen[model] else 0
            caught_up[model] += unseen - 1 if at else 0
            processed[model] += unseen
            seen[model] = prompt + at
    emitted = sum(len(models) for _, models in items)
    by_large = sum(sum(models) for _, models in items)
    read_alone = sum(prompt + len(models) - 1 for prompt, models in items)

    def flops(tokens: Sequence[int]) -> int:
        return int(sum(count * each for count, each in zip(tokens, PARAMETERS, strict=True)))

    return SwitchingRuleCosts(
        rule, len(items), emitted, by_large / emitted, (processed[0], processed[1]), read_alone,
        (caught_up[0], caught_up[1]), flops(processed), flops(opening), flops((0, read_alone)),
    )  # fmt: skip


HALF_WAY = [(11, [SMALL] * 10 + [LARGE] * 10)] * 3  # the large model reads 11 + 10, then writes nine more from there
LONG_AND_SHORT = [(101, [SMALL] * 10), (11, [LARGE] * 10)]  # the small model reads most of the prompts' tokens
NEVER = [(11, [SMALL] * 20)]


def of(*rules: SwitchingRuleCosts):
    return lambda rng: ({"task": rules}, PARAMETERS)


def lost(first: str, value: float, n: int, **others: float):
    """Check: the row's number is ``value``; ``others``: the values of the legs whose names contain these words."""

    def check(verdict) -> None:
        assert verdict.legs[0].name.endswith(first)
        assert (verdict.estimate, verdict.n) == (pytest.approx(value, abs=1e-12), n)  # float64 arithmetic
        for words, number in others.items():
            (leg,) = [leg for leg in verdict.legs if words.replace("_", " ") in leg.name]
            assert leg.estimate == pytest.approx(number, abs=1e-12)

    return check


FLOPS, TOKENS = "token share less FLOPs executed", "token share less tokens processed"
uncounted = replace(written(HALF_WAY), flops=None, opening_flops=None)
# by token share 3/8; executed (20 · 1 + 30 · 4) of 30 · 4
half_way = lost(
    FLOPS, 3 / 8 + 1 / 6, 3, by_token_share=3 / 8, the_large_model_catches=1.0, the_small_model_catches=0.0,
    by_FLOPs_executed=-1 / 6, spent_on_opening=(11 + 4 * 11) / 140,
)  # fmt: skip
EAD_H2 = [
    Case("one takeover half way", "value", of(written(HALF_WAY)), check=half_way),
    Case("nobody counts FLOPs: tokens processed stand in", "value", of(uncounted), check=lost(TOKENS, 13 / 24, 3)),
    Case("the headline understates", "value", of(written(LONG_AND_SHORT)), check=lost(FLOPS, 3 / 8 - 330 / 520, 2)),
    Case("no takeover, nothing left out", "value", of(written(NEVER)), check=lost(FLOPS, 0.0, 1)),
]


CASES = {
    "EAD-H1": EAD_H1,
    "EAD-H2": EAD_H2,
}
