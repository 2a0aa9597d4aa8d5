"""Two arms of an engine under load: with its exit rule and without it, at 1, 4 and 16 requests in flight (ENG-7).

A wave sends n requests at once, each with another prompt, and ends with the last answer. Both arms answer the prompts
of each wave, in random order; the speed-up at n is the ratio of the seconds of all waves. Times to the first token and
between tokens are by the arrival of tokens (``benchmark.arrivals``). An engine that does not stream is asked for whole
answers.

A rule that saves time alone may lose it among others, where batches share what it skips (vllm#49548).

The joules of a decoder that counts its own (``energy_j``) are those of one window for each arm, which sends the waves
again. A cache of prompts makes these cheaper, in both arms alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import numpy as np

from emad_ref.absent import Absent
from emad_ref.protocol import Decoder, Prompt, TokenArrivals, Unsupported
from pytest_emad.audit.finding import AuditRefutedError
from pytest_emad.benchmark.clock import collect_garbage, time_call
from pytest_emad.benchmark.energy import (
    CounterUnreadable,
    EnergyCounter,
    WindowSpoiled,
    measure_energy_window,
    open_decoder_counter,
)
from pytest_emad.statistics.units import ByPair

IN_FLIGHT = (1, 4, 16)
WAVES = 20  # of each number of requests in flight


@dataclass(frozen=True)
class ServedEnergy:
    """Joules of one window, and the tokens that its requests read and generated."""

    energy_j: float
    read: int
    generated: int


@dataclass(frozen=True)
class LoadEvidence:
    """Arm → ``seconds`` [waves] until the last answer, ``answers`` of all waves, and ``energy`` of further ones.

    ``is_streamed``: whether the answers have times of their tokens.
    """

    seconds: Mapping[str, ByPair]
    answers: Mapping[str, Sequence[TokenArrivals]]
    is_streamed: bool
    energy: Mapping[str, ServedEnergy | Absent]

    def tokens_per_s(self, arm: str) -> float:
        """Generated tokens of all waves by their seconds."""
        return sum(len(each.tokens) for each in self.answers[arm]) / float(self.seconds[arm].values.sum())


LoadByRequests = Mapping[int, LoadEvidence]  # number of requests in flight → times


def measure_load(
    decoders: Mapping[str, Decoder],
    draw_prompts: Callable[[int], Sequence[Prompt]],
    warm_up: Prompt,
    new: int,
    rng: np.random.Generator,
) -> LoadByRequests | Absent:
    """Times of each of ``IN_FLIGHT``; Absent: a decoder takes one request at a time.

    ``draw_prompts`` returns at most so many prompts, which are sent in turn. ``warm_up`` is sent first, for no time.

    Raises:
        AuditRefutedError: an answer has other than ``new`` tokens.
    """
    is_streamed = _find_streaming(decoders, warm_up, new)
    if isinstance(is_streamed, Absent):
        return is_streamed
    left, found = cycle(draw_prompts(WAVES * sum(IN_FLIGHT))), {}
    counters = {arm: _open_counter(decoder) for arm, decoder in decoders.items()}
    for at_once in IN_FLIGHT:
        waves = [list(islice(left, at_once)) for _ in range(WAVES)]
        seconds: dict[str, list[float]] = {arm: [] for arm in decoders}
        answers: dict[str, list[TokenArrivals]] = {arm: [] for arm in decoders}
        for wave in waves:
            for arm in rng.permutation(list(decoders)).tolist():
                taken = time_call(partial(_answer_wave, decoders[arm], wave, new, is_streamed))
                _require_lengths(f"{arm}, {at_once} in flight", taken.result, len(wave), new)
                seconds[arm].append(taken.seconds)
                answers[arm] += taken.result
            collect_garbage()
        times = {arm: ByPair(np.array(each)) for arm, each in seconds.items()}
        energy = {
            arm: _measure_energy(counters[arm], decoder, waves, new, is_streamed) for arm, decoder in decoders.items()
        }
        found[at_once] = LoadEvidence(times, answers, is_streamed, energy)
    return found


def _find_streaming(decoders: Mapping[str, Decoder], prompt: Prompt, new: int) -> bool | Absent:
    """Whether all ``decoders`` stream, or send whole answers at once; why one does neither."""
    refusals: list[str] = []
    for stream in (True, False):
        try:
            for decoder in decoders.values():
                _answer_wave(decoder, [prompt], new, stream)
        except Unsupported as refusal:
            refusals.append(str(refusal))
        else:
            return stream
    return Absent(refusals[-1], "premise")


def _answer_wave(decoder: Decoder, wave: Sequence[Prompt], new: int, stream: bool) -> list[TokenArrivals]:
    ask = getattr(decoder, "token_arrivals", None)
    if ask is None:
        raise Unsupported("the decoder takes one request at a time")
    return list(ask(wave, new, frozenset(), stream))


def _require_lengths(where: str, answers: Sequence[TokenArrivals], rows: int, new: int) -> None:
    lengths = [len(each.tokens) for each in answers]
    if lengths != [new] * rows:
        raise AuditRefutedError(f"{where}: {lengths} new tokens, where {new} in each of {rows} were asked for")


def _open_counter(decoder: Decoder) -> EnergyCounter | Absent:
    return open_decoder_counter(decoder) if hasattr(decoder, "energy_j") else Absent("the decoder counts no energy")


def _measure_energy(
    counter: EnergyCounter | Absent, decoder: Decoder, waves: Sequence[Sequence[Prompt]], new: int, stream: bool
) -> ServedEnergy | Absent:
    if isinstance(counter, Absent):
        return counter

    def send(number: int) -> int:
        return sum(len(each.tokens) for each in _answer_wave(decoder, waves[number % len(waves)], new, stream))

    try:
        window = measure_energy_window(counter, send, own=counter.process_ids())
    except (WindowSpoiled, CounterUnreadable) as why:
        return Absent(str(why))
    sent = (waves[number % len(waves)] for number in range(window.requests))
    read = sum(len(prompt.tokens) for wave in sent for prompt in wave)
    return ServedEnergy(window.energy_j, read, window.tokens)
