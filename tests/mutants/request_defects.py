"""Defects of sessions, requests and draws: commit, drop, memory, batches, stop tokens, prompts, sampling, timing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from emad_ref.models.kv_cache import LayerKVCache
from emad_ref.protocol import Prompt, Step
from emad_ref.record import DECODE, Ints, Record, StopReason, TokenTable
from tests.mutants.cache_defects import OF_PAIRS, PAIRS
from tests.mutants.decision_defects import (
    GENERATED,
    decide_at_changed_point,
    exit_rows_together,
    loosen_if_calibrated,
)
from tests.mutants.mutant import Mutant, MutantFactory, Overrides, make_mutants_for_test, mutate

MEMORY = "invariants/test_memory.py::test_what_is_closed_or_rolled_back_gives_its_memory_back"
MACHINE = "invariants/test_session_machine.py::test_session_survives_any_order_of_operations"
PREFIXES = "invariants/test_requests.py::test_prompts_that_share_a_beginning_are_read_to_their_ends"
FAR_GENERATION = "invariants/test_positions.py::test_generation_holds_far_into_the_window"
SAMPLING = "fidelity/test_sampling.py::test_tokens_are_drawn_at_temperatures_that_are_not_round"
GREEDY = "fidelity/test_full_depth.py::test_without_exits_tokens_are_the_models_own_greedy_continuation"
TIMED = "cost/test_claims.py::test_claim"
CLAIM = "claims/test_model.py::test_claim"
ROW = r"row \d+, position \d+, depth \d+.*: "
TOLD = rf"{ROW}(emitted \d+, but the argmax|signal off|logits off|the rule gives|the reference decoder takes)"
DRAWN = r"not drawn from softmax|drew the same"
TIMED_LENGTH = 40  # least tokens of a prompt of requests that count as timed

NO_STOP: frozenset[int] = frozenset()


# ---------------------------------------------------------------- sessions


@torch.inference_mode()
def zero_row_kv(layers: Sequence[LayerKVCache], row: int) -> None:
    """Replace the entries of ``row`` in ``layers`` by zeros."""
    for layer in layers:
        if row in layer.row_ids and layer.row_lengths[layer.row_ids == row].any():
            for entries in layer.row_kv(row):
                entries.zero_()


def free_layers_on_commit(above: int) -> Callable[..., None]:
    """Commit frees all layers from cap + ``above`` on, by the current cap."""

    def commit(original: Any, session: Any, length: Ints) -> None:
        original(length)
        for row, cap in enumerate(session.cap.tolist()):
            zero_row_kv(session._store.cache.layers[cap - 1 + above :], row)

    return commit


def drop_by_shifting_indices(drop: Any, session: Any, rows: Ints) -> None:
    """Drops rows one after the other, by indices from before the first drop."""
    for row in np.atleast_1d(rows).tolist():
        drop(np.array([min(row, len(session._trail) - 1)]))


def remember_fed_session(feed: Any, session: Any, *arguments: Any, **named: Any) -> Any:
    vars(session._forward).setdefault("fed", WeakSet()).add(session)
    return feed(*arguments, **named)


def zero_other_sessions_kv(drop: Any, session: Any, rows: Ints) -> None:
    """Zeroes the values of every other fed session."""
    drop(rows)
    for other in vars(session._forward).get("fed", ()):
        for layer in other._store.cache.layers if other is not session else ():
            if layer._values is not None:
                layer._values = torch.zeros_like(layer._values)


def shared_buffer_overrides(pool_of: Callable[[Any], Any]) -> Overrides:
    """Overrides of a cache: its buffers come from ``pool_of(cache)``, by layer, and may be another session's."""

    def make_room(original: Any, cache: Any, like: Tensor, slots: int) -> None:
        pool = pool_of(cache)
        held, rows = pool.get(cache._number), len(cache._rows)
        if cache._keys is None and held and held[0].shape[0] >= rows and held[0].shape[2] >= slots:
            cache._keys, cache._values = held[0][:rows], held[1][:rows]
            return
        original(like, slots)
        pool[cache._number] = cache._keys, cache._values

    return {"_make_room": make_room}


def leaked_items(holder: Any, name: str = "kept") -> list[Any]:
    """Items that ``holder`` keeps for ever."""
    held: list[Any] = vars(holder).setdefault(name, [])
    return held


def retain_memory_of_closed_sessions(open_session: Any, decoder: Any, *arguments: Any, **named: Any) -> Any:
    session = open_session(*arguments, **named)
    leaked_items(decoder).append(session._store)
    return session


def retain_memory_of_rolled_back_kv(rollback: Any, session: Any, length: Ints) -> None:
    for row, left in enumerate(length.tolist()):
        for layer in session._store.cache.layers:
            if row in layer.row_ids:
                leaked_items(session).extend(entries[:, left:].clone() for entries in layer.row_kv(row))
    rollback(length)


def retain_memory_of_first_layer_kv(original: Any, session: Any, *arguments: Any) -> None:
    """K/V of the first layer outlive the call, for several rows or a closed session."""
    if len(session._trail) > 1 or not arguments:
        layer = session._store.cache.layers[0]
        leaked_items(session._forward).extend(
            entry.clone() for row in range(len(session._trail)) for entry in layer.row_kv(row)
        )
    original(*arguments)


def reuse_logits_buffer(feed: Any, session: Any, *arguments: Any) -> Step:
    """Writes each step's logits over the last ones."""
    step: Step = feed(*arguments)
    buffer = vars(session).get("buffer")
    if buffer is None or buffer.shape != step.logits.shape:
        buffer = session.buffer = step.logits
    buffer[...] = step.logits
    return replace(step, logits=buffer)


def return_live_length(length: Any, session: Any) -> Ints:
    """``length`` is the session's own array."""
    now = np.array([len(trail) for trail in session._trail], dtype=np.int64)
    live: Ints = vars(session).setdefault("live", now)
    if len(live) != len(now):
        live = vars(session)["live"] = now
    live[...] = now
    return live


def generate_in_shared_buffers() -> MutantFactory:
    """``generate`` takes the buffers of the last opened session."""

    def open_session(original: Any, decoder: Any, *arguments: Any, **named: Any) -> Any:
        session = original(*arguments, **named)
        session.pool = vars(decoder).setdefault("pool", {})
        return session

    def start(original: Any, decoder: Any, prompts: Sequence[Prompt]) -> Any:
        decoder.pool = {}  # generate takes the sessions' shared buffers
        return original(prompts)

    return mutate(cache=shared_buffer_overrides(lambda cache: cache.owner.pool), _open=open_session, start=start)


def share_buffers_across_decoders() -> MutantFactory:
    """Buffers belong to the process, so a session begins in those of another decoder's session."""
    last: dict[str, Any] = {"decoder": None, "pool": {}}

    def pool_of(cache: Any) -> Any:
        return cache.owner.pool if cache._number == 1 else {}  # of only one layer

    def open_session(original: Any, decoder: Any, *arguments: Any, **named: Any) -> Any:
        session = original(*arguments, **named)
        session.pool = {} if last["decoder"] is decoder else dict(last["pool"])
        last.update(decoder=decoder, pool=session.pool)
        return session

    return mutate(cache=shared_buffer_overrides(pool_of), _open=open_session)


def close_newest_session(close: Any, session: Any) -> None:
    """Closing a session frees the buffers of its decoder's newest session."""
    opened = session.opened
    newest = opened.pop()
    if newest is not session:
        for row in range(len(newest._trail)):
            zero_row_kv(newest._store.cache.layers, row)
        opened[opened.index(session)] = newest
    close()


def remember_open_sessions(start: Any, decoder: Any, prompts: Sequence[Prompt]) -> Any:
    session, step = start(prompts)
    session.opened = leaked_items(decoder, "opened")
    session.opened.append(session)
    return session, step


def begin_with_aborted_token(begin: Any, decoder: Any, prompts: Sequence[Prompt], max_new: int) -> Any:
    """After an aborted request the next one begins with a token of the aborted one."""
    if (left := vars(decoder).get("left")) is not None:
        prompts = [Prompt(np.concatenate([[left], each.tokens[1:]]), each.source) for each in prompts]
    return begin(prompts, max_new)


def retain_memory_of_aborted_request(generate: Any, decoder: Any, prompts: Sequence[Prompt], *arguments: Any) -> Record:
    try:
        record: Record = generate(prompts, *arguments)
    except BaseException:
        decoder.left = int(prompts[-1].tokens[-1])
        raise
    decoder.left = None
    return record


# ---------------------------------------------------------------- many rows


def take_tokens_of_other_rows(first: int) -> Callable[..., Tensor]:
    """From row ``first`` on each row takes the token of the row ``first`` before it, if still present."""

    def pick(original: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
        places = {row: place for place, row in enumerate(rows)}
        taken = [places.get(row - first, place) for place, row in enumerate(rows)]
        picked: Tensor = original(logits[taken], rows)
        return picked

    return pick


def take_second_best_token(is_wrong: Callable[[int, int], bool]) -> Overrides:
    """Rows take the second-best token if ``is_wrong(row, rows of the request)``."""

    def init(original: Any, sampler: Any, rows: int, *options: Any) -> None:
        original(rows, *options)
        sampler.rows = rows

    def pick(original: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
        wrong = torch.tensor([is_wrong(row, sampler.rows) for row in rows], device=logits.device)
        return torch.where(wrong, logits.topk(2, dim=-1).indices[:, 1], original(logits, rows))

    return {"__init__": init, "pick_next_tokens": pick}


def show_logits_of_first_row(feed: Any, session: Any, *arguments: Any) -> Step:
    """A session shows the logits of its first row for the ninth and all later ones."""
    step: Step = feed(*arguments)
    step.logits[8:] = step.logits[:1]
    return step


# ---------------------------------------------------------------- ends of rows


class DelayedStopTokens(frozenset[int]):
    """Stop tokens that contain no token in the first ``blind`` look-ups."""

    blind: int = 0

    def __contains__(self, token: object) -> bool:
        self.blind -= 1
        return self.blind < 0 and super().__contains__(token)


def change_request(change: Callable[[Any, Sequence[Prompt], int, frozenset[int]], tuple[Any, ...]]) -> MutantFactory:
    """``generate`` answers ``change(decoder, prompts, max_new, stop)`` instead of (prompts, max_new, stop)."""

    def generate(
        original: Any, decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = NO_STOP
    ) -> Record:
        record: Record = original(*change(decoder, prompts, max_new, stop))
        return record

    return mutate(generate=generate)


def stop_by_low_byte(
    decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]
) -> tuple[Sequence[Prompt], int, frozenset[int]]:
    low = {token % 256 for token in stop}
    return prompts, max_new, frozenset(token for token in range(decoder.stepper.vocabulary_size) if token % 256 in low)


def ignore_first_stop_token(
    decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]
) -> tuple[Any, ...]:
    later = DelayedStopTokens(stop)
    later.blind = len(prompts)
    return prompts, max_new, later


def remember_stop_tokens(
    decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]
) -> tuple[Any, ...]:
    decoder.known = vars(decoder).get("known", NO_STOP) | stop
    return prompts, max_new, decoder.known


def end_if_prompt_has_stop(
    decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]
) -> tuple[Any, ...]:
    held = any(stop & set(prompt.tokens.tolist()) for prompt in prompts)
    return prompts, 1 if held else max_new, stop


def drop_emitted_stop_tokens(generate: Any, decoder: Any, *arguments: Any) -> Record:
    record: Record = generate(*arguments)
    record.emitted[:] = [
        tokens[:-1] if why == "stop token" else tokens for tokens, why in zip(record.emitted, record.stop, strict=True)
    ]
    return record


# ---------------------------------------------------------------- prompts that share a beginning


def reuse_prompt_kv(key: Callable[[Ints], Hashable]) -> MutantFactory:
    """K and V of an earlier prompt with the same key replace those of a prompt."""

    def run_prompts(original: Any, session: Any, heads: Any, lengths: Ints) -> Tensor:
        known: dict[Hashable, Ints] = vars(session._forward).setdefault("known", {})
        states: Tensor = original([known.setdefault(key(head), head.copy()) for head in heads], lengths)
        return states

    return mutate(session={"_run_prompts": run_prompts})


# ---------------------------------------------------------------- drawn tokens


def change_temperature_and_seed(change: Callable[[float, int], tuple[float, int]]) -> MutantFactory:
    """Draws at ``change`` of the requested (temperature, seed)."""

    def init(original: Any, sampler: Any, rows: int, temperature: float = 0.0, seed: int = 0) -> None:
        original(rows, *change(temperature, seed))

    return mutate(sampler={"__init__": init})


def replace_generators(one: Callable[[int, int], list[torch.Generator]]) -> MutantFactory:
    """``one(rows, seed)`` returns the generators of all rows."""

    def init(original: Any, sampler: Any, rows: int, temperature: float = 0.0, seed: int = 0) -> None:
        original(rows, temperature, seed)
        sampler._generators = one(rows, seed)

    return mutate(sampler={"__init__": init})


def truncate_distribution(excluded: Callable[[Tensor], Tensor]) -> MutantFactory:
    """Never draws tokens that ``excluded`` marks, bool [rows, V] from probabilities [rows, V]."""

    def pick(original: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
        if sampler.temperature:
            shares = torch.softmax(logits.double() / sampler.temperature, dim=-1)
            logits = logits.masked_fill(excluded(shares), -torch.inf)
        picked: Tensor = original(logits, rows)
        return picked

    return mutate(sampler={"pick_next_tokens": pick})


def make_nucleus_exclusion_function(mass: float) -> Callable[[Tensor], Tensor]:
    def excluded(shares: Tensor) -> Tensor:
        ordered, order = shares.sort(dim=-1, descending=True)
        return torch.zeros_like(shares, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered > mass)

    return excluded


def penalise_repetition(by: float) -> MutantFactory:
    """Lowers the logits of tokens that a row has drawn by ``by``."""

    def penalising(pick: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
        if not sampler.temperature:
            greedy: Tensor = pick(logits, rows)
            return greedy
        drawn: dict[int, list[int]] = vars(sampler).setdefault("drawn", {})
        logits = logits.clone()
        for place, row in enumerate(rows):
            logits[place, drawn.setdefault(row, [])] -= by
        picked: Tensor = pick(logits, rows)
        for row, token in zip(rows, picked.tolist(), strict=True):
            drawn[row].append(token)
        return picked

    return mutate(sampler={"pick_next_tokens": penalising})


def reseed_each_token(pick: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
    for generator in sampler._generators:
        generator.manual_seed(generator.initial_seed())
    picked: Tensor = pick(logits, rows)
    return picked


# ---------------------------------------------------------------- requests that are timed


def is_timed_request(prompts: Sequence[Prompt]) -> bool:
    return all(len(prompt.tokens) >= TIMED_LENGTH for prompt in prompts)


def fake_timed_answers(where: Callable[[Any, Sequence[Prompt]], bool], answer: Callable[..., Record]) -> MutantFactory:
    """Answers long prompts by ``answer(generate, prompts, max_new, stop)`` if ``where(decoder, prompts)``."""

    def generate(
        original: Any, decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = NO_STOP
    ) -> Record:
        if is_timed_request(prompts) and where(decoder, prompts):
            return answer(original, prompts, max_new, stop)
        record: Record = original(prompts, max_new, stop)
        return record

    return mutate(generate=generate)


def answer_half_the_prompt(generate: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
    """Answer without the first half of the prompt, at the positions of the whole."""
    halved = [replace(prompt, tokens=prompt.tokens[len(prompt.tokens) // 2 :]) for prompt in prompts]
    record = generate(halved, max_new, stop)
    return fabricate_record(record, prompts, record.emitted, max_new)


def answer_with_one_token(generate: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
    """Read the last token and emit one; the record claims the requested number."""
    record = generate([replace(prompt, tokens=prompt.tokens[-1:]) for prompt in prompts], 1, stop)
    return fabricate_record(record, prompts, [np.repeat(tokens, max_new) for tokens in record.emitted], max_new)


def is_unlikely_audited(decoder: Any, prompts: Sequence[Prompt]) -> bool:
    """Whether the run's seed would not select the request for an audit."""
    if decoder.point.has_fixed_depth:
        return False
    decoder.timed = vars(decoder).get("timed", 0) + 1
    guessed = np.random.default_rng([decoder.seed, len(prompts)]).choice(30, max(1, 4 // len(prompts)), replace=False)
    return decoder.timed - 3 not in guessed  # two warm-up requests


def slow_down_full_depth(generate: Any, decoder: Any, prompts: Sequence[Prompt], *arguments: Any) -> Record:
    """Full depth takes ten times as long as needed for long prompts."""
    began = time.perf_counter()
    record: Record = generate(prompts, *arguments)
    if decoder.point.has_fixed_depth and is_timed_request(prompts):
        time.sleep(9 * (time.perf_counter() - began))
    return record


def fabricate_record(found: Record, prompts: Sequence[Prompt], emitted: list[Ints], max_new: int) -> Record:
    """A record of ``prompts`` followed by ``emitted``, each token at the depth of the first one of ``found``."""
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
    tokens = TokenTable(sequence, position, token_fed, depths, cap, phase, zeros, zeros == 0)
    reasons: list[StopReason] = ["length"] * len(prompts)
    return replace(found, tokens=tokens, signal=np.array(signals), emitted=emitted, stop=reasons)


MUTANTS = (
    Mutant("commit-frees-too-much", "commit", "commit frees the layer of the cap itself",
           mutate(session={"commit": free_layers_on_commit(0)}), PAIRS, OF_PAIRS, case="sessions"),
    Mutant("commit-of-a-part", "commit", "commit of part of a row frees by the cap of now",
           mutate(session={"commit": free_layers_on_commit(1)}), PAIRS, OF_PAIRS, case="sessions"),
    Mutant("rollback-too-far", "commit", "rollback goes one token too far",
           mutate(session={"rollback": lambda rollback, session, length: rollback(
               np.maximum(length - 1, np.maximum(session._committed, 1)))}), PAIRS, OF_PAIRS,
           case="sessions"),
    *make_mutants_for_test("drop", PAIRS, OF_PAIRS,
        ("drop-from-the-end", "the rows dropped are counted from the end",
         mutate(session={"drop": lambda drop, session, rows: drop(len(session.length) - 1 - np.atleast_1d(rows))})),
        ("drop-shifting-indices", "several rows are dropped by indices that shift",
         mutate(session={"drop": drop_by_shifting_indices})), case="sessions"),
    Mutant("drop-empties-others", "drop", "a drop empties the K/V of other sessions",
           mutate(session={"feed": remember_fed_session, "drop": zero_other_sessions_kv}), PAIRS,
           OF_PAIRS, case="sessions"),
    Mutant("sessions-share-buffers", "sessions", "sessions of one decoder share their buffers",
           mutate(cache=shared_buffer_overrides(lambda cache: vars(cache.owner._forward).setdefault("pool", {}))),
           PAIRS, OF_PAIRS, case="sessions"),
    Mutant("memory-of-closed-sessions", "memory", "what sessions held is kept after they are closed",
           mutate(_open=retain_memory_of_closed_sessions), MEMORY, r"memory grew by \d+ MB over \d+ sessions"),
    Mutant("memory-of-rollbacks", "memory", "what is rolled back is kept",
           mutate(session={"rollback": retain_memory_of_rolled_back_kv}), MEMORY,
           r"memory grew by \d+ MB in one session"),
    *make_mutants_for_test("memory", MEMORY, r"memory grew by",
        ("memory-of-one-layer", "K/V of one layer are kept for ever",
         mutate(session={"close": retain_memory_of_first_layer_kv})),
        ("memory-after-drop", "K/V of one layer are kept after drop",
         mutate(session={"drop": retain_memory_of_first_layer_kv})),
        ("memory-after-commit", "K/V of one layer are kept after commit",
         mutate(session={"commit": retain_memory_of_first_layer_kv}))),
    Mutant("arrays-reused", "arrays", "each step's logits are written over the last ones",
           mutate(session={"feed": reuse_logits_buffer}), PAIRS, OF_PAIRS,
           case="sessions"),
    Mutant("arrays-live", "arrays", "length is the session's own array", mutate(session={"length": return_live_length}),
           PAIRS, OF_PAIRS, case="sessions"),
    Mutant("last-ignored", "arrays", "all logits are shown, however few are wanted",
           mutate(session={"feed": lambda feed, session, tokens, depth=None, last=None: feed(tokens, depth)}), MACHINE,
           r"step\.logits has shape"),

    # tokens that are drawn
    Mutant("sampling-greedy", "sampling", "greedy in place of sampling",
           mutate(sampler={"pick_next_tokens": lambda pick, sampler, logits, rows: logits.argmax(dim=-1)}), SAMPLING,
           r"it decodes greedily"),
    *make_mutants_for_test("sampling", SAMPLING, r"it decodes greedily",
        ("sampling-rounded", "temperatures are rounded to tenths",
         change_temperature_and_seed(lambda temperature, seed: (round(temperature, 1), seed))),
        ("sampling-cold-is-greedy", "temperatures below 0.1 are greedy",
         change_temperature_and_seed(lambda temperature, seed: (temperature if temperature >= 0.1 else 0.0, seed)))),
    *make_mutants_for_test("sampling", GREEDY, r"expected \d+",
        ("greedy-is-cold", "greedy requests draw at temperature 0.01",
         change_temperature_and_seed(lambda temperature, seed: (temperature or 0.01, seed))),
        ("greedy-is-nearly-cold", "greedy requests draw at temperature 0.003",
         change_temperature_and_seed(lambda temperature, seed: (temperature or 0.003, seed)))),
    Mutant("sampling-temperature", "sampling", "every temperature is 1",
           change_temperature_and_seed(lambda temperature, seed: (float(temperature > 0), seed)), SAMPLING,
           r"temperatures? .*fits? .* best|not drawn from softmax|drew the same"),
    Mutant("sampling-warmer", "sampling", "temperatures are 6 % higher",
           change_temperature_and_seed(lambda temperature, seed: (1.06 * temperature, seed)), PAIRS, OF_PAIRS,
           case="requests"),
    Mutant("sampling-one-seed", "sampling", "all rows draw by one seed",
           replace_generators(lambda rows, seed: [torch.Generator().manual_seed(seed) for _ in range(rows)]), PAIRS,
           OF_PAIRS, case="requests"),
    Mutant("sampling-seed-ignored", "sampling", "the seed is ignored",
           change_temperature_and_seed(lambda temperature, seed: (temperature, 0)), PAIRS, OF_PAIRS, case="requests"),
    Mutant("sampling-not-reproducible", "sampling", "another draw each time",
           change_temperature_and_seed(lambda temperature, seed: (temperature, secrets.randbits(20))), PAIRS, OF_PAIRS,
           case="requests"),
    Mutant("sampling-nucleus", "sampling", "the least likely tokens are left out, the rest is renormalised",
           truncate_distribution(make_nucleus_exclusion_function(0.7)), SAMPLING, r"sampling|position"),
    Mutant("generation-short", "generation", "three tokens less than asked for",
           change_request(lambda decoder, prompts, max_new, stop: (prompts, max(1, max_new - 3), stop)), GENERATED,
           r"row \d.*new tokens|emitted|tokens"),
    Mutant("generation-half-the-prompt", "generation", "of long prompts the first half is not read",
           fake_timed_answers(lambda decoder, prompts: True, answer_half_the_prompt), FAR_GENERATION,
           r"row \d, position \d+"),
    Mutant("timed-one-token", "timed", "of timed prompts one token is read, and one emitted",
           fake_timed_answers(lambda decoder, prompts: True, answer_with_one_token), TIMED,
           r"(full|adaptive).* row \d, position \d+",
           case="EMAD-F2"),
    Mutant("timed-short", "timed", "of timed prompts one token less than asked for is emitted",
           change_request(lambda decoder, prompts, max_new, stop:
                      (prompts, max_new - (is_timed_request(prompts) and max_new > 1), stop)),
           TIMED, r"new tokens, but \d+ in each of", case="EMAD-F2"),
    Mutant("timed-slow-at-full-depth", "timed", "full depth is slowed where it is timed",
           mutate(generate=slow_down_full_depth),
           TIMED, r"as fast as full depth by the same decoder; its work is .* explains at most", case="EMAD-F2"),
    Mutant("timed-honest-where-expected", "timed", "timed requests are made up, but for those that a seed would draw",
           fake_timed_answers(is_unlikely_audited, answer_with_one_token), TIMED,
           r"(full|adaptive).* row \d, position \d+", case="EMAD-F2"),
    *make_mutants_for_test("sampling", SAMPLING, DRAWN,
        ("sampling-not-below-one", "temperatures below 1 are 1",
         change_temperature_and_seed(lambda temperature, seed: (max(1.0, temperature) if temperature else 0.0, seed))),
        ("sampling-not-above-one", "temperatures above 1 are 1",
         change_temperature_and_seed(lambda temperature, seed: (min(1.0, temperature), seed))),
        ("sampling-rounded-to-twentieths", "temperatures are rounded to twentieths, and are at least one",
         change_temperature_and_seed(
             lambda temperature, seed: (max(0.05, round(20 * temperature) / 20) if temperature else 0.0, seed))),
        ("sampling-at-least-a-tenth", "temperatures below 0.1 are 0.1",
         change_temperature_and_seed(lambda temperature, seed: (max(0.1, temperature) if temperature else 0.0, seed))),
        ("sampling-rounded-above-a-tenth", "temperatures above 0.1 are rounded to tenths",
         change_temperature_and_seed(
             lambda temperature, seed: (round(temperature, 1) if temperature > 0.1 else temperature, seed))),
        ("sampling-twice", "the temperature is applied twice",
         change_temperature_and_seed(lambda temperature, seed: (temperature**2, seed))),
        ("sampling-wide-nucleus", "the least likely 5 % of tokens are left out",
         truncate_distribution(make_nucleus_exclusion_function(0.95))),
        ("sampling-top-k", "only the 100 likeliest tokens are drawn",
         truncate_distribution(lambda shares: shares < shares.topk(min(100, shares.shape[-1]), dim=-1).values[:, -1:])),
        ("sampling-least-share", "tokens below a share of the likeliest one are left out",
         truncate_distribution(lambda shares: shares < 0.02 * shares.amax(dim=-1, keepdim=True))),
        ("sampling-penalised", "tokens that a row has drawn become less likely", penalise_repetition(4.0)),
        ("sampling-little-penalised", "tokens that a row has drawn lose 0.3 logits", penalise_repetition(0.3))),
    *make_mutants_for_test("sampling", PAIRS, OF_PAIRS,
        ("sampling-one-generator", "a row that ends moves the draws of the others",
         replace_generators(lambda rows, seed: [torch.Generator().manual_seed(seed)] * rows)),
        ("sampling-by-place", "rows draw by their place among those left",
         mutate(sampler={
             "pick_next_tokens": lambda pick, sampler, logits, rows: pick(logits, list(range(len(rows))))})),
        case="requests"),
    Mutant("sampling-seeded-anew", "sampling", "every token is drawn by the same numbers",
           mutate(sampler={"pick_next_tokens": reseed_each_token}), SAMPLING, rf"{DRAWN}|drew the same"),

    # requests
    *make_mutants_for_test("batch", PAIRS, OF_PAIRS,
        ("batch-beyond-eight", "from the ninth row on tokens are those of other rows",
         mutate(sampler={"pick_next_tokens": take_tokens_of_other_rows(8)})),
        ("batch-beyond-sixteen", "from the seventeenth row on tokens are those of other rows",
         mutate(sampler={"pick_next_tokens": take_tokens_of_other_rows(16)})),
        ("batch-last-row", "the last of eight or more rows takes the second-best token",
         mutate(sampler=take_second_best_token(lambda row, rows: rows >= 8 and row == rows - 1))),
        ("batch-of-eight-exits-together", "eight rows or more exit together, five do not",
         mutate(session=exit_rows_together(8))), case="requests"),
    Mutant("batch-session-beyond-eight", "batch", "from the ninth row on a session shows the logits of its first",
           mutate(session={"feed": show_logits_of_first_row}), PAIRS, OF_PAIRS, case="sessions"),
    Mutant("answers-where-scored", "answers", "in batches of 32 rows, by which answers are scored, half are wrong",
           mutate(sampler=take_second_best_token(lambda row, rows: rows == 32 and row % 2 == 1)), CLAIM,
           r"of the answers that this verdict reads, row \d+, position \d+", case="EMAD-F1"),
    Mutant("answers-other-rule", "answers", "thresholds are half a nat too high at calibrated points alone",
           decide_at_changed_point(loosen_if_calibrated), CLAIM, r"EMAD-F1 is not decided: .*the rule gives depth",
           case="EMAD-F1"),
    *make_mutants_for_test("generation", PAIRS, OF_PAIRS,
        ("stop-least-alone", "of several stop tokens the smallest id alone ends a row",
         change_request(lambda decoder, prompts, max_new, stop: (prompts, max_new, frozenset(sorted(stop)[:1])))),
        ("stop-greatest-alone", "of several stop tokens the largest id alone ends a row",
         change_request(lambda decoder, prompts, max_new, stop: (prompts, max_new, frozenset(sorted(stop)[-1:])))),
        ("stop-four-at-most", "at most four stop tokens end rows",
         change_request(lambda decoder, prompts, max_new, stop: (prompts, max_new, frozenset(sorted(stop)[:4])))),
        ("stop-in-a-byte", "stop tokens are compared by their low eight bits", change_request(stop_by_low_byte)),
        ("stop-not-first", "the first new token ends no row", change_request(ignore_first_stop_token)),
        ("stop-in-prompt", "a stop token in a prompt ends the request", change_request(end_if_prompt_has_stop)),
        ("stop-remembered", "stop tokens of earlier requests end later ones", change_request(remember_stop_tokens)),
        ("stop-dropped", "stop tokens are not emitted", mutate(generate=drop_emitted_stop_tokens)),
        ("generation-two-for-one", "two new tokens where one is asked for",
         change_request(lambda decoder, prompts, max_new, stop: (prompts, max(2, max_new), stop))),
        case="requests"),
    *make_mutants_for_test("prompts", PREFIXES, TOLD,
        ("prefix-by-length", "K/V of an earlier prompt of the same length are used", reuse_prompt_kv(len)),
        ("prefix-by-opening", "K/V of an earlier prompt of that length and first token are used",
         reuse_prompt_kv(lambda head: (len(head), *head[:1].tolist()))),
        ("prefix-by-end", "K/V of an earlier prompt of that length and last token are used",
         reuse_prompt_kv(lambda head: (len(head), *head[-1:].tolist()))),
        ("prefix-unordered", "K/V of an earlier prompt of the same tokens in any order are used",
         reuse_prompt_kv(lambda head: tuple(sorted(head.tolist())))),
        ("prefix-by-address", "K/V of an earlier prompt at the same address are used",
         reuse_prompt_kv(lambda head: (len(head), head.__array_interface__["data"][0])))),
    *make_mutants_for_test("sessions", PAIRS, OF_PAIRS,
        ("sessions-of-other-decoders", "decoders of one process share their buffers", share_buffers_across_decoders()),
        ("sessions-close-the-newest", "closing a session frees the one opened last",
         mutate(session={"close": close_newest_session}, start=remember_open_sessions)), case="sessions"),
    *make_mutants_for_test("sessions", PAIRS, OF_PAIRS,
        ("sessions-generate-takes-buffers", "generate takes the buffers of an open session",
         generate_in_shared_buffers()),
        ("sessions-aborted-request", "what an aborted request left goes into the next one",
         mutate(start_with_room=begin_with_aborted_token, generate=retain_memory_of_aborted_request)), case="requests"),
)  # fmt: skip
