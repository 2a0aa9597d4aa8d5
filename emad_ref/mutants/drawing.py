"""Sampling that is none, at another temperature, from part of the distribution, by other seeds; and what is emitted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.reference import Sampler
from emad_ref.mutants.base import MutantDecoder, decoder_factory
from emad_ref.mutants.depths import GENERATED
from emad_ref.mutants.mutant import Mutant, MutantFactory
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, Ints, Record, StopReason, Tokens

SAMPLING = "fidelity/test_sampling.py::test_tokens_are_drawn_from_the_distribution_at_their_depths"
FULL = "fidelity/test_full_depth.py::test_without_exits_tokens_are_the_models_own_greedy_continuation"
FAR_GENERATION = "invariants/test_positions.py::test_generation_holds_far_into_the_window"
TIMED = "cost/test_claims.py::test_claim"
LONG = 40  # tokens of a prompt from which on a request is taken for a timed one
NUCLEUS = 0.7
WIDE = 0.95  # a nucleus that leaves little out
KEPT = 100  # likeliest tokens
FEWEST = 0.02  # of the likeliest token's probability
PENALTY = 4.0  # nats


class Greedy(Sampler):
    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        return logits.argmax(dim=-1)


class AtOne(Sampler):
    """Every temperature is 1."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, float(temperature > 0), seed)


class OneSeed(Sampler):
    """Every row draws what the first one draws."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature, seed)
        self._generators = [torch.Generator().manual_seed(seed) for _ in range(rows)]


class SeedIgnored(Sampler):
    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature, 0)


class NotReproducible(Sampler):
    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature, secrets.randbits(20))


class Nucleus(Sampler):
    """The least likely tokens are left out, and the others share what was theirs."""

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        if self.temperature == 0:
            return super().pick(logits, rows)
        shares, order = torch.softmax(logits.double() / self.temperature, dim=-1).sort(dim=-1, descending=True)
        tail = torch.zeros_like(shares, dtype=torch.bool).scatter(-1, order, shares.cumsum(-1) - shares > NUCLEUS)
        return super().pick(logits.masked_fill(tail, -torch.inf), rows)


class NotBelowOne(Sampler):
    """Temperatures below 1 are 1."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, max(1.0, temperature) if temperature else 0.0, seed)


class NotAboveOne(Sampler):
    """Temperatures above 1 are 1."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, min(1.0, temperature), seed)


class TemperatureTwiceSampler(Sampler):
    """Logits are divided by the temperature twice."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature**2, seed)


class Truncated(Sampler):
    """Tokens that ``leaves_out`` names are never drawn, and the others share what was theirs."""

    def leaves_out(self, shares: Tensor) -> Tensor:
        """[rows, V] bool, of probabilities [rows, V]."""
        raise NotImplementedError

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        if self.temperature == 0:
            return super().pick(logits, rows)
        shares = torch.softmax(logits.double() / self.temperature, dim=-1)
        return super().pick(logits.masked_fill(self.leaves_out(shares), -torch.inf), rows)


class WideNucleus(Truncated):
    def leaves_out(self, shares: Tensor) -> Tensor:
        ordered, order = shares.sort(dim=-1, descending=True)
        return torch.zeros_like(shares, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered > WIDE)


class TopKSampler(Truncated):
    def leaves_out(self, shares: Tensor) -> Tensor:
        return shares < shares.topk(min(KEPT, shares.shape[-1]), dim=-1).values[:, -1:]


class LeastShare(Truncated):
    def leaves_out(self, shares: Tensor) -> Tensor:
        return shares < FEWEST * shares.amax(dim=-1, keepdim=True)


class Penalised(Sampler):
    """A token that a row has drawn is less likely to be drawn again."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature, seed)
        self.drawn: list[list[int]] = [[] for _ in range(rows)]

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        if self.temperature == 0:
            return super().pick(logits, rows)
        lowered = logits.clone()
        for place, row in enumerate(rows):
            lowered[place, self.drawn[row]] -= PENALTY
        picked = super().pick(lowered, rows)
        for row, token in zip(rows, picked.tolist(), strict=True):
            self.drawn[row].append(token)
        return picked


class OneGenerator(Sampler):
    """All rows draw in turn by one generator, so that a row that ends moves the others on."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature, seed)
        self._generators = [torch.Generator().manual_seed(seed)] * rows


class ByPlace(Sampler):
    """Rows draw by the generator of their place among those that are left."""

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        return super().pick(logits, list(range(len(rows))))


class SeededAnew(Sampler):
    """Every token is drawn by the seed, as the first one was."""

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        for generator in self._generators:
            generator.manual_seed(generator.initial_seed())
        return super().pick(logits, rows)


DRAWN = r"not drawn from softmax"
EARLY = r"drew other tokens under the same seed once rows .* ended early"


def drawing(sampler: type[Sampler]) -> MutantFactory:
    return decoder_factory(type(sampler.__name__, (MutantDecoder,), {"sampler": sampler}))


class ThreeShort(MutantDecoder):
    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        return super().generate(prompts, max(1, max_new - 3), stop)


class OtherPrompts(MutantDecoder):
    """Long prompts are answered as if their first half were not there, under the positions of the whole."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        if any(len(prompt.tokens) < LONG for prompt in prompts):
            return super().generate(prompts, max_new, stop)
        kept = [replace(prompt, tokens=prompt.tokens[len(prompt.tokens) // 2 :]) for prompt in prompts]
        found = super().generate(kept, max_new, stop)
        return claimed(found, prompts, found.emitted, max_new)


class OneTokenWhereTimed(MutantDecoder):
    """Of long prompts the last token is read and one is emitted; the record tells of as many as were asked for."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        if any(len(prompt.tokens) < LONG for prompt in prompts):
            return super().generate(prompts, max_new, stop)
        brief = super().generate([replace(prompt, tokens=prompt.tokens[-1:]) for prompt in prompts], 1, stop)
        return claimed(brief, prompts, [np.repeat(tokens, max_new) for tokens in brief.emitted], max_new)


class OneShortWhereTimed(MutantDecoder):
    """Of long prompts one token less than asked for is emitted."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        long = all(len(prompt.tokens) >= LONG for prompt in prompts)
        return super().generate(prompts, max_new - (long and max_new > 1), stop)


class SlowAtFullDepth(MutantDecoder):
    """Of long prompts full depth takes ten times as long as it needs."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        began = time.perf_counter()
        found = super().generate(prompts, max_new, stop)
        if self.point.fixed and all(len(prompt.tokens) >= LONG for prompt in prompts):
            time.sleep(9 * (time.perf_counter() - began))
        return found


class HonestWhereLookedAt(MutantDecoder):
    """Emits a token over and over in every timed request but those that the run's seed would have looked at."""

    timed = 0

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        if self.point.fixed or any(len(prompt.tokens) < LONG for prompt in prompts):
            return super().generate(prompts, max_new, stop)
        self.timed += 1
        guessed = np.random.default_rng([self.seed, len(prompts)]).choice(30, max(1, 4 // len(prompts)), replace=False)
        if self.timed - 3 in guessed:  # two of warm-up
            return super().generate(prompts, max_new, stop)
        brief = super().generate([replace(prompt, tokens=prompt.tokens[-1:]) for prompt in prompts], 1, stop)
        return claimed(brief, prompts, [np.repeat(tokens, max_new) for tokens in brief.emitted], max_new)


def claimed(found: Record, prompts: Sequence[Prompt], emitted: list[Ints], max_new: int) -> Record:
    """A record of ``prompts`` that ``emitted`` followed, each token at the depth of the first one of ``found``."""
    rows: list[tuple[int, ...]] = []
    signals = []
    unread = np.full(found.signal.shape[1], np.nan)
    ceiling = int(found.tokens.cap[found.tokens.phase == DECODE][0])
    for row, prompt in enumerate(prompts):
        first = int(np.flatnonzero((found.tokens.sequence == row) & (found.tokens.phase == DECODE))[0])
        depth, before = int(found.tokens.depth[first]), len(prompt.tokens) - 1
        rows += [(row, at, int(token), ceiling, ceiling, 0) for at, token in enumerate(prompt.tokens[:-1])]
        signals += [unread] * before
        fed = [int(prompt.tokens[-1]), *emitted[row][:-1].tolist()]
        rows += [(row, before + at, token, depth, depth if at else ceiling, DECODE) for at, token in enumerate(fed)]
        signals += [found.signal[first]] * len(fed)
    sequence, position, token_fed, depths, cap, phase = np.array(rows, dtype=np.int64).T
    zeros = np.zeros(len(rows), dtype=np.int64)
    tokens = Tokens(sequence, position, token_fed, depths, cap, phase, zeros, zeros == 0)
    reasons: list[StopReason] = ["length"] * len(prompts)
    return replace(found, tokens=tokens, signal=np.array(signals), emitted=emitted, stop=reasons)


PLANTED = (
    Mutant(
        "sampling-greedy", "sampling", "greedy in place of sampling", drawing(Greedy), SAMPLING, r"it decodes greedily"
    ),
    Mutant(
        "sampling-temperature",
        "sampling",
        "every temperature is 1",
        drawing(AtOne),
        SAMPLING,
        r"temperatures? .*fits? .* best|not drawn from softmax|drew the same",
    ),
    Mutant(
        "sampling-one-seed",
        "sampling",
        "all rows draw by one seed",
        drawing(OneSeed),
        SAMPLING,
        r"rows 0 and 1 of one batch drew the same",
    ),
    Mutant(
        "sampling-seed-ignored",
        "sampling",
        "the seed is ignored",
        drawing(SeedIgnored),
        SAMPLING,
        r"seeds \d+ and \d+ drew the same",
    ),
    Mutant(
        "sampling-not-reproducible",
        "sampling",
        "another draw each time",
        drawing(NotReproducible),
        SAMPLING,
        r"seed \d+ drew other tokens the second time",
    ),
    Mutant(
        "sampling-nucleus",
        "sampling",
        "the least likely tokens are left out, the rest is renormalised",
        drawing(Nucleus),
        SAMPLING,
        r"sampling|position",
    ),
    Mutant(
        "generation-short",
        "generation",
        "three tokens less than asked for",
        decoder_factory(ThreeShort),
        GENERATED,
        r"row \d.*new tokens|emitted|tokens",
    ),
    Mutant(
        "generation-half-the-prompt",
        "generation",
        "of long prompts the first half is not read",
        decoder_factory(OtherPrompts),
        FAR_GENERATION,
        r"row \d, position \d+",
    ),
    Mutant(
        "timed-one-token",
        "timed",
        "of timed prompts one token is read, and one emitted",
        decoder_factory(OneTokenWhereTimed),
        TIMED,
        r"(full|adaptive).* row \d, position \d+",
        case="EMAD-F2",
    ),
    Mutant(
        "timed-short",
        "timed",
        "of timed prompts one token less than asked for is emitted",
        decoder_factory(OneShortWhereTimed),
        TIMED,
        r"new tokens, but \d+ in each of",
        case="EMAD-F2",
    ),
    Mutant(
        "timed-slow-at-full-depth",
        "timed",
        "full depth is slowed where it is timed",
        decoder_factory(SlowAtFullDepth),
        TIMED,
        r"as fast as full depth by the same decoder; its work is .* explains at most",
        case="EMAD-F2",
    ),
    Mutant(
        "timed-honest-where-expected",
        "timed",
        "timed requests are made up, but for those that a seed would draw",
        decoder_factory(HonestWhereLookedAt),
        TIMED,
        r"(full|adaptive).* row \d, position \d+",
        case="EMAD-F2",
    ),
    Mutant("sampling-not-below-one", "sampling", "temperatures below 1 are 1", drawing(NotBelowOne), SAMPLING, DRAWN),
    Mutant("sampling-not-above-one", "sampling", "temperatures above 1 are 1", drawing(NotAboveOne), SAMPLING, DRAWN),
    Mutant(
        "sampling-twice",
        "sampling",
        "the temperature is applied twice",
        drawing(TemperatureTwiceSampler),
        SAMPLING,
        DRAWN,
    ),
    Mutant(
        "sampling-wide-nucleus",
        "sampling",
        "the least likely 5 % of tokens are left out",
        drawing(WideNucleus),
        SAMPLING,
        DRAWN,
    ),
    Mutant(
        "sampling-top-k", "sampling", "only the 100 likeliest tokens are drawn", drawing(TopKSampler), SAMPLING, DRAWN
    ),
    Mutant(
        "sampling-least-share",
        "sampling",
        "tokens below a share of the likeliest one are left out",
        drawing(LeastShare),
        SAMPLING,
        DRAWN,
    ),
    Mutant(
        "sampling-penalised",
        "sampling",
        "tokens that a row has drawn become less likely",
        drawing(Penalised),
        SAMPLING,
        DRAWN,
    ),
    Mutant(
        "sampling-one-generator",
        "sampling",
        "a row that ends moves the draws of the others",
        drawing(OneGenerator),
        SAMPLING,
        EARLY,
    ),
    Mutant(
        "sampling-by-place", "sampling", "rows draw by their place among those left", drawing(ByPlace), SAMPLING, EARLY
    ),
    Mutant(
        "sampling-seeded-anew",
        "sampling",
        "every token is drawn by the same numbers",
        drawing(SeededAnew),
        SAMPLING,
        rf"{DRAWN}|drew the same",
    ),
)
