"""Mutants: decoders with one known defect, made from the reference decoder by overriding parts.

These parts are its session, K/V cache, sampler, model, rule and counts.

An override is a function ``f(original, self, *arguments)``: ``original`` is the inherited method, bound to ``self``. So
the same function mutates any class with that method, the reference's or another decoder's (``override_methods``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.reference import ReferenceSession, Sampler, WalkedDecoder
from emad_ref.errors import EmadError
from emad_ref.models.kv_cache import LayerKVCache
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, GenerateArguments, Prompt, Request, TokenArrivals
from emad_ref.record import Ints, Record, Work

MutantFactory = Callable[[Request], Decoder]

# detectors of a mutant besides a shipped test
RUN = "the run as a whole"
VERIFY = "emad verify"


class MutantNotApplicable(EmadError):
    """Raised if the defect is meaningless on this model; the message holds the reason."""


@dataclass(frozen=True)
class Mutant:
    """One row of the catalogue.

    ``does``: a sentence about the defect. ``make``: makes the decoder, or raises MutantNotApplicable.

    ``test``: the shipped test that must catch it, by file and function below ``suites``; ``case``: its parameters.
    ``says``: a pattern of the complaint; "" for an honest decoder, whose ``test`` lists folders that it must pass.
    ``by``: its detector instead of the test, RUN or VERIFY. ``bystander``: the name of a plugin that interferes with
    the run instead of the decoder (``tests.mutants.provider``). ``model``: the smallest bundled one that has what the
    defect changes.
    """

    name: str
    kind: str
    does: str
    make: MutantFactory
    test: str
    says: str = ""
    case: str = ""
    by: str = ""
    bystander: str = ""
    model: str = "emad-nano"

    @property
    def is_honest(self) -> bool:
        return not self.says

    @property
    def expected_detector(self) -> str:
        """The name of the shipped test whose complaint counts, or RUN or VERIFY."""
        return self.by or f"suites/{self.test}"


def make_mutants_for_test(
    kind: str, test: str, says: str, *rows: tuple[str, str, MutantFactory], case: str = ""
) -> tuple[Mutant, ...]:
    """Mutants that the same test must catch in the same words: (name, does, make) of each."""
    return tuple(Mutant(name, kind, does, make, test, says, case) for name, does, make in rows)


Overrides = Mapping[str, Callable[..., Any]]


def override_methods(base: type, overrides: Overrides) -> type:
    """Subclass of ``base`` with methods and properties overridden; see the module's docstring."""

    def bind(name: str, override: Callable[..., Any]) -> Any:
        inherited = getattr(base, name)
        if isinstance(inherited, property):
            return property(lambda self: override(partial(inherited.__get__, self), self))

        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            return override(partial(inherited, self), self, *arguments, **named)

        return method

    return type("Mutant", (base,), {name: bind(name, override) for name, override in overrides.items()})


class MutantSession(ReferenceSession):
    """Each layer's cache is a ``cache_type`` and knows its session as ``owner``."""

    cache_type: ClassVar[type[LayerKVCache]] = LayerKVCache

    def __init__(self, walker: Any, prompts: Sequence[Prompt], capacity: int):
        super().__init__(walker, prompts, capacity)
        cache = self._store.cache
        cache.layers[:] = [self.cache_type(layer + 1, cache.rows, capacity) for layer in range(len(cache.layers))]
        for layer in cache.layers:
            vars(layer)["owner"] = self


class MutantDecoder(WalkedDecoder):
    """Applies ``change_stepper`` to the model, and ``prepare`` to the finished decoder."""

    session = MutantSession
    change_stepper: ClassVar[Callable[[Stepper], Stepper]] = staticmethod(lambda stepper: stepper)
    prepare: ClassVar[Callable[[Any], None]] = staticmethod(lambda decoder: None)

    def __init__(self, stepper: Stepper, point: OperatingPoint, **options: Any):
        super().__init__(type(self).change_stepper(stepper), point, **options)
        type(self).prepare(self)


class ServingDecoder(MutantDecoder):
    """Also streams, and answers several requests at once, as engines do: here one after the other."""

    def token_arrivals(
        self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
    ) -> list[TokenArrivals]:
        return [self.stream_row(row, prompt, max_new, stop, stream) for row, prompt in enumerate(prompts)]

    def stream_row(self, row: int, prompt: Prompt, max_new: int, stop: frozenset[int], stream: bool) -> TokenArrivals:
        """One row, its tokens timed one by one, or all at the end unless ``stream``."""
        began, sampler = time.perf_counter(), self.sampler(row + 1, self.temperature, self.seed)
        session, output = self.start_with_room([prompt], max_new)
        tokens, seconds = list[int](), list[float]()
        while True:
            picked = sampler.pick_next_tokens(output.logits[:, -1], [row])
            tokens.append(int(picked[0]))
            seconds.append(time.perf_counter() - began)
            if tokens[-1] in stop or len(tokens) == max_new:
                break
            with torch.inference_mode():
                output = session.process_tokens(picked[:, None], None)
        whole = time.perf_counter() - began
        arrived = np.array(seconds if stream else [whole] * len(tokens))
        return TokenArrivals(np.array(tokens, dtype=np.int64), arrived, whole)

    def generate_at_once(self, requests: Sequence[GenerateArguments], at_once: int) -> list[Record]:
        return [self.generate(*request) for request in requests]


def make_decoder(kind: type[WalkedDecoder], request: Request) -> Decoder:
    """A decoder of ``kind`` over the copy of the model that the request lends."""
    return kind(
        request.model.load().stepper,
        request.point,
        seed=request.seed,
        max_rows=request.max_rows,
        temperature=request.temperature,
    )


def mutate(
    *,
    session: Overrides | type[MutantSession] | None = None,
    cache: Overrides | None = None,
    sampler: Overrides | None = None,
    stepper: Callable[[Stepper], Stepper] | None = None,
    prepare: Callable[[Any], None] | None = None,
    base: type[MutantDecoder] = MutantDecoder,
    **methods: Callable[..., Any],
) -> MutantFactory:
    """The reference decoder (or another ``base``) with parts overridden; ``methods``: those of the decoder itself."""
    kind: Any = override_methods(base, methods)
    opened: Any = session if isinstance(session, type) else override_methods(MutantSession, session or {})
    if cache is not None:
        opened.cache_type = override_methods(LayerKVCache, cache)
    kind.session = opened
    if sampler is not None:
        kind.sampler = override_methods(Sampler, sampler)
    if stepper is not None:
        kind.change_stepper = staticmethod(stepper)
    if prepare is not None:
        kind.prepare = staticmethod(prepare)
    return partial(make_decoder, kind)


HONEST_FACTORY: MutantFactory = partial(make_decoder, MutantDecoder)


def make_stepper_override(**methods: Callable[..., Any]) -> Callable[[Stepper], Stepper]:
    """Copies a model and overrides methods of the copy: ``f(original, stepper, *arguments)``."""

    def change(stepper: Stepper) -> Stepper:
        changed = copy.copy(stepper)
        for name, override in methods.items():
            setattr(changed, name, partial(override, getattr(stepper, name), stepper))
        return changed

    return change


def declare_capabilities(**capabilities: Any) -> Callable[[Any], None]:
    """A function for ``prepare`` that declares other capabilities."""

    def prepare(decoder: Any) -> None:
        decoder.capabilities = replace(decoder.capabilities, **capabilities)

    return prepare


# ---------------------------------------------------------------- honest decoders that differ from the reference

ALL_SUITES = "invariants fidelity"
DECLARED_NOISE = 0.02  # logits
CHUNK = 16  # tokens


def add_deterministic_logit_noise(logits: Callable[[Tensor], Tensor], stepper: Stepper, hidden: Tensor) -> Tensor:
    """Changes logits by up to ``DECLARED_NOISE``, deterministically."""
    exact = logits(hidden)
    return exact + 0.9 * DECLARED_NOISE * torch.sin(1e5 * exact)  # leaves a tenth for true rounding


def iterate_prompt_chunk_ranges(lengths: Ints, chunk: int = CHUNK) -> Iterator[tuple[Ints, int, Ints]]:
    """(rows, first position, tokens of each) of prompts of ``lengths``, ``chunk`` positions at once."""
    for first in range(0, int(lengths.max(initial=0)), chunk):
        rows = np.flatnonzero(lengths > first)
        yield rows, first, np.minimum(lengths[rows] - first, chunk)


def run_prompts_in_chunks(original: Any, session: Any, heads: Any, lengths: Ints, chunk: int = CHUNK) -> Tensor:
    """Reads prompts in chunks, each over the K/V of the previous ones."""
    stepper, store, ceiling = session._stepper, session._store, session._point.ceiling
    present = np.flatnonzero(lengths > 0)
    states: Tensor | None = None
    for rows, first, held in iterate_prompt_chunk_ranges(lengths, chunk):
        tokens = np.zeros((len(rows), int(held.max())), dtype=np.int64)
        for i, (row, n) in enumerate(zip(rows.tolist(), held.tolist(), strict=True)):
            tokens[i, :n] = heads[row][first : first + n]
        positions = np.broadcast_to(first + np.arange(tokens.shape[1]), tokens.shape)
        inputs = stepper.prepare_forward(positions, store.cache, rows=rows, lengths=held)
        hidden = stepper.embed(torch.from_numpy(tokens).to(stepper.device), inputs)
        hidden = stepper.run_layers(hidden, 0, ceiling, inputs)
        store.work.count_blocks(0, ceiling, len(rows), tokens.shape[1], inputs.executed)
        if states is None:
            states = hidden.new_zeros(len(present), int(lengths.max()), hidden.shape[-1])
        places = torch.from_numpy(np.searchsorted(present, rows)).to(states.device)
        states[places, first : first + tokens.shape[1]] = hidden
    for row in present.tolist():
        session._trail[row].extend([ceiling] * int(lengths[row]))
    assert states is not None, "some prompt has a position before its last"
    return states


def count_chunked_prompt_work(original: Any, decoder: Any, prompts: Sequence[Prompt]) -> Work:
    work, before = Work.none(decoder.stepper.layers), np.array([len(prompt.tokens) - 1 for prompt in prompts])
    for rows, first, held in iterate_prompt_chunk_ranges(before):
        work.count_blocks(0, decoder.point.ceiling, len(rows), int(held.max()), first + int(held.max()))
    counted: Work = decoder._with_sources(work, prompts)
    return counted


HONEST = (
    Mutant("honest", "honest", "ours, over the copy of the model that decoders are lent", HONEST_FACTORY, ALL_SUITES),
    Mutant("honest-by-the-token", "honest", "one token a feed, and the monotone schedule alone",
           mutate(prepare=declare_capabilities(max_feed=1, schedules=frozenset({"monotone"}))), ALL_SUITES),
    Mutant("honest-in-chunks", "honest", "prompts are read in chunks of 16 tokens",
           mutate(session={"_run_prompts": run_prompts_in_chunks}, prompt_work=count_chunked_prompt_work), ALL_SUITES),
    Mutant("honest-noise", "honest", "logits are off by up to 0.02, which is declared",
           mutate(stepper=make_stepper_override(logits=add_deterministic_logit_noise),
           prepare=declare_capabilities(logit_noise=DECLARED_NOISE)),
           ALL_SUITES),
    Mutant("honest-serving", "honest", "it also streams, and answers several requests at once",
           mutate(base=ServingDecoder), ALL_SUITES),
)  # fmt: skip
