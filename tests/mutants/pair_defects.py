"""Defects of requests that show only for two values of their dimensions together (``audit.dimensions``).

Each is an ordinary mistake: a buffer of fixed length, a number kept in one byte, state of a batch in place of a row's,
a cache by part of its key, state that outlives its owner. ``pair_session_defects`` has those of sessions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.step import StepInput, StepOutput
from emad_ref.models.stepper import Stepper
from emad_ref.point import full_depth
from emad_ref.protocol import GenerateArguments, Prompt, TokenArrivals
from emad_ref.record import Ints, Record
from emad_ref.schedule.schedules import TokenDepthCap
from emad_ref.signals import SIGNALS
from tests.mutants.cache_defects import OF_PAIRS, PAIRS
from tests.mutants.decision_defects import exit_rows_together
from tests.mutants.mutant import (
    Mutant,
    MutantFactory,
    ServingDecoder,
    declare_capabilities,
    make_stepper_override,
    mutate,
    override_methods,
)
from tests.mutants.request_defects import NO_STOP, leaked_items, zero_row_kv


def serve(**parts: Any) -> MutantFactory:
    """A decoder that also streams, with parts overridden as in ``mutate``."""
    return mutate(base=ServingDecoder, **parts)


def make_pair_mutants(case: str, *rows: tuple[str, str, MutantFactory]) -> tuple[Mutant, ...]:
    """Mutants that cases of ``case`` must catch: (name, does, make) of each."""
    return tuple(Mutant(f"pair-{name}", "pairs", does, make, PAIRS, OF_PAIRS, case) for name, does, make in rows)


# ---------------------------------------------------------------- streams and requests at once


def stream_at_full_depth(original: Any, decoder: Any, prompts: Sequence[Prompt], *given: Any) -> list[TokenArrivals]:
    point = full_depth(decoder.stepper.layers)
    full = ServingDecoder(decoder.stepper, point, seed=decoder.seed, temperature=decoder.temperature)
    return full.token_arrivals(prompts, *given)


def change_streams(change: Callable[[TokenArrivals, frozenset[int]], TokenArrivals]) -> MutantFactory:
    """Each row arrives as ``change(arrivals, stop)``."""

    def arrivals(
        original: Any, decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
    ) -> list[TokenArrivals]:
        return [change(each, stop) for each in original(prompts, max_new, stop, stream)]

    return serve(token_arrivals=arrivals)


def repeat_33rd_token(found: TokenArrivals, stop: frozenset[int]) -> TokenArrivals:
    tokens = found.tokens.copy()
    tokens[32:33] = tokens[31:32]
    return replace(found, tokens=tokens)


def drop_stop_token(found: TokenArrivals, stop: frozenset[int]) -> TokenArrivals:
    kept = slice(0, len(found.tokens) - (len(found.tokens) > 1 and int(found.tokens[-1]) in stop))
    return replace(found, tokens=found.tokens[kept], seconds=found.seconds[kept])


def repeat_first_eight_streams(original: Any, decoder: Any, *arguments: Any) -> list[TokenArrivals]:
    found: list[TokenArrivals] = original(*arguments)
    return [found[number % 8] for number in range(len(found))]


def stream_draws_as_first_row(
    original: Any, decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
) -> list[TokenArrivals]:
    return [decoder.stream_row(0, prompt, max_new, stop, stream) for prompt in prompts]


def exit_requests_together(
    original: Any, decoder: Any, requests: Sequence[GenerateArguments], at_once: int
) -> list[Record]:
    """Requests with equal limits are one batch, whose rows exit together."""
    kind = type("Together", (type(decoder),), {"session": override_methods(decoder.session, exit_rows_together(2))})
    groups = defaultdict[tuple[int, frozenset[int]], list[int]](list)
    for number, (_, max_new, stop) in enumerate(requests):
        groups[max_new, stop].append(number)
    found: dict[int, Record] = {}
    for limits, numbers in groups.items():
        prompts = [prompt for number in numbers for prompt in requests[number][0]]
        batch: WalkedDecoder = kind(
            decoder.stepper, decoder.point, seed=decoder.seed, max_rows=len(prompts), temperature=decoder.temperature
        )
        record, first = batch.generate(prompts, *limits), 0
        for number in numbers:
            rows = range(first, first := first + len(requests[number][0]))
            found[number] = take_rows(record, rows)
    return [found[number] for number in range(len(requests))]


def take_rows(record: Record, rows: range) -> Record:
    """``rows`` of ``record`` as a record of their own, without work."""
    mine = np.isin(record.tokens.sequence, rows)
    columns = {name: column[mine] for name, column in vars(record.tokens).items()}
    columns["sequence"] = columns["sequence"] - rows.start
    emitted, stop = ([each[row] for row in rows] for each in (record.emitted, record.stop))
    return replace(record, tokens=replace(record.tokens, **columns), signal=record.signal[mine], emitted=emitted,
                   stop=stop, work=None, prompt_work=None)  # fmt: skip


def change_requests_at_once(
    change: Callable[[Sequence[GenerateArguments]], Sequence[GenerateArguments]],
) -> MutantFactory:
    """Requests at once are answered as ``change`` of them."""
    return serve(generate_at_once=lambda ask, decoder, requests, at_once: ask(change(requests), at_once))


def answer_fifth_as_first(ask: Any, decoder: Any, *arguments: Any) -> list[Record]:
    """The fifth request at once gets the answer of the first."""
    records: list[Record] = ask(*arguments)
    records[4:5] = records[:1] if len(records) > 4 else []
    return records


def seed_by_order(ask: Any, decoder: Any, requests: Sequence[GenerateArguments], at_once: int) -> list[Record]:
    """Requests at once draw by their place among them."""
    seed, records = decoder.seed, []
    for number, request in enumerate(requests):
        decoder.seed = seed + number
        records.append(decoder.generate(*request))
    decoder.seed = seed
    return records


# ---------------------------------------------------------------- prompts, limits, stop sets


def change_prompts(change: Callable[[Any, Sequence[Prompt]], Sequence[Prompt]], **parts: Any) -> MutantFactory:
    """Requests and sessions read ``change(decoder, prompts)``."""
    return serve(
        start_with_room=lambda start, decoder, prompts, max_new: start(change(decoder, prompts), max_new),
        start=lambda start, decoder, prompts: start(change(decoder, prompts)),
        **parts,
    )


def read_without_strides(decoder: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    def read(tokens: Ints) -> Ints:
        if tokens.strides[0] <= tokens.itemsize:
            return tokens
        flat: Ints = np.lib.stride_tricks.as_strided(tokens, strides=(tokens.itemsize,)).copy()
        return flat

    return [replace(prompt, tokens=read(prompt.tokens)) for prompt in prompts]


def take_padding_for_padding(decoder: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """In batches a prompt's last token is read as the one before it if it has the padding's id, 0."""
    if len(prompts) == 1:
        return list(prompts)
    ends = [np.concatenate([each.tokens[:-1], each.tokens[-2:-1]]) for each in prompts]
    return [
        replace(each, tokens=end) if each.tokens[-1] == 0 and len(each.tokens) > 1 else each
        for each, end in zip(prompts, ends, strict=True)
    ]


def change_limits(change: Callable[[int, frozenset[int]], tuple[int, frozenset[int]]]) -> MutantFactory:
    """``generate`` answers ``change(max_new, stop)`` in place of (max_new, stop)."""
    return serve(
        generate=lambda generate, decoder, prompts, max_new, stop=NO_STOP: generate(prompts, *change(max_new, stop))
    )


def pad_prompts_as_first(original: Any, session: Any, prefixes: Sequence[Ints], lengths: Ints) -> Tensor:
    """Prompts are read as far as the first one reaches; zeros stand for what is beyond."""
    longest = max(1, len(prefixes[0]))
    states: Tensor = original([np.where(np.arange(len(one)) < longest, one, 0) for one in prefixes], lengths)
    return states


def reuse_prompt_kv_by(key: Callable[[Ints], Any]) -> MutantFactory:
    """A prompt is read as the first one with an equal ``key``, as far as both reach."""

    def run_prompts(original: Any, session: Any, heads: Sequence[Ints], lengths: Ints) -> Tensor:
        known = vars(session._forward).setdefault("known", {})
        read = []
        for head in heads:
            first = known.setdefault(key(head), head.copy())
            read.append(np.concatenate([first[: len(head)], head[len(first) :]]))
        states: Tensor = original(read, lengths)
        return states

    return serve(session={"_run_prompts": run_prompts})


def share_prompts_between_decoders() -> MutantFactory:
    """Entries of prompts that begin alike belong to the process: a deeper decoder finds those of a shallow one."""
    ceilings: dict[bytes, int] = {}

    def run_prompts(original: Any, session: Any, heads: Sequence[Ints], lengths: Ints) -> Tensor:
        states: Tensor = original(heads, lengths)
        for row, head in enumerate(heads):
            ceiling = ceilings.setdefault(head[:5].tobytes(), session._point.ceiling)
            zero_row_kv(session._store.cache.layers[ceiling:], row)
        return states

    return serve(session={"_run_prompts": run_prompts})


def remember_answers(key: Callable[..., Any], *, of_process: bool = False) -> MutantFactory:
    """A request is answered by the record of the first one with an equal ``key(decoder, prompts, max_new, stop)``."""
    shared: dict[Any, Record] = {}

    def generate(
        original: Any, decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = NO_STOP
    ) -> Record:
        known = shared if of_process else vars(decoder).setdefault("answers", {})
        asked = (tuple(prompt.tokens.tobytes() for prompt in prompts), max_new, *key(decoder, stop))
        if asked not in known:
            known[asked] = original(prompts, max_new, stop)
        return known[asked]  # type: ignore[no-any-return]

    return serve(generate=generate)


def answer_equal_prompts_once(generate: Any, decoder: Any, prompts: Sequence[Prompt], *given: Any) -> Record:
    """Rows with equal prompts are decoded once."""
    record: Record = generate(prompts, *given)
    first = {prompt.tokens.tobytes(): row for row, prompt in reversed(list(enumerate(prompts)))}
    rows = [first[prompt.tokens.tobytes()] for prompt in prompts]
    parts = [take_rows(record, range(row, row + 1)) for row in rows]
    columns = {name: np.concatenate([getattr(part.tokens, name) for part in parts]) for name in vars(record.tokens)}
    columns["sequence"] = np.repeat(np.arange(len(parts)), [len(part.tokens) for part in parts])
    return replace(record, tokens=replace(record.tokens, **columns), work=None, prompt_work=None,
                   signal=np.concatenate([part.signal for part in parts]),
                   emitted=[record.emitted[row].copy() for row in rows],
                   stop=[record.stop[row] for row in rows])  # fmt: skip


def return_arrays_of_one_buffer(generate: Any, decoder: Any, *arguments: Any) -> Record:
    """The emitted tokens of every request are written into the same memory."""
    record: Record = generate(*arguments)
    buffers: list[Ints] = vars(decoder).setdefault("buffers", [])
    buffers += [np.zeros(256, dtype=np.int64) for _ in record.emitted[len(buffers) :]]
    emitted = [buffer[: len(tokens)] for buffer, tokens in zip(buffers, record.emitted, strict=False)]
    for array, tokens in zip(emitted, record.emitted, strict=True):
        array[...] = tokens
    return replace(record, emitted=emitted)


# ---------------------------------------------------------------- what was before, and beside


def end_prompts_in_zero_after_error(generate: Any, decoder: Any, prompts: Sequence[Prompt], *given: Any) -> Record:
    """The request after one that raised ends its prompts in the padding's id."""
    if vars(decoder).pop("poisoned", False):
        prompts = [replace(each, tokens=np.concatenate([each.tokens[:-1], [0]])) for each in prompts]
    try:
        record: Record = generate(prompts, *given)
    except Exception:
        decoder.poisoned = True
        raise
    return record


def keep_cap_of_aborted_request() -> MutantFactory:
    """A request that was left half-way lowers the first cap of the next."""

    def decode(original: Any, decoder: Any, session: Any, *given: Any) -> Record:
        try:
            record: Record = original(session, *given)
        except Exception:
            decoder.aborted = True
            raise
        return record

    def admissions(original: Any, session: Any, length: Ints | None = None) -> list[TokenDepthCap]:
        admitted: list[TokenDepthCap] = original(length)
        decoder = session._forward.decoder
        if vars(decoder).get("aborted") and all(len(trail) == first for trail, first in zip(
                session._trail, session._first_decided, strict=True)):  # fmt: skip
            decoder.aborted = False
            return [replace(one, cap=max(1, one.cap - 1)) for one in admitted]
        return admitted

    def prepare(decoder: Any) -> None:
        decoder._forward.decoder = decoder

    return serve(_decode=decode, session={"_admissions": admissions}, prepare=prepare)


def limit_257th_as_first(generate: Any, decoder: Any, prompts: Sequence[Prompt], max_new: int, *stop: Any) -> Record:
    """Requests are numbered in one byte: the 257th is as long as the first."""
    limits = leaked_items(decoder, "limits")
    limits.append(max_new)
    record: Record = generate(prompts, limits[-257] if len(limits) > 256 else max_new, *stop)
    return record


def use_newest_of_process(read: str, where: str) -> MutantFactory:
    """``read`` of a decoder is a variable of the process: that of the newest one, as method ``where`` begins."""
    newest: dict[str, Any] = {}

    def prepare(decoder: Any) -> None:
        newest[read] = getattr(decoder, read)

    def begin(original: Any, decoder: Any, *arguments: Any, **named: Any) -> Any:
        setattr(decoder, read, newest[read])
        return original(*arguments, **named)

    return serve(prepare=prepare, **{where: begin})


def begin_with_token_of_closed_decoder() -> MutantFactory:
    """What a closed decoder read last begins the next prompts."""
    left: list[int] = []

    def change(decoder: Any, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        decoder.last = int(prompts[0].tokens[-1])
        return [replace(each, tokens=np.concatenate([[left.pop()], each.tokens[1:]])) if left else each
                for each in prompts]  # fmt: skip

    def close(original: Any, decoder: Any) -> None:
        original()
        left[:] = [vars(decoder).get("last", 0)]

    return change_prompts(change, close=close)


def empty_open_sessions(generate: Any, decoder: Any, *arguments: Any) -> Record:
    """A request takes the buffers of open sessions."""
    record: Record = generate(*arguments)
    for session in leaked_items(decoder, "opened"):
        for row in range(len(session._trail)):
            zero_row_kv(session._store.cache.layers, row)
    return record


def remember_sessions(start: Any, decoder: Any, prompts: Sequence[Prompt]) -> Any:
    session, step = start(prompts)
    leaked_items(decoder, "opened").append(session)
    return session, step


# ---------------------------------------------------------------- exits


def bin_all_rows_as_first(decoder: Any) -> None:
    original = decoder._forward._bins

    def bins(running: Any, rows: int, logits: Tensor | None) -> Any:
        found = original(running, rows, logits)
        found[:] = found[running.row_ids[0]]
        return found

    decoder._forward._bins = bins


def shift_far_exits_of_batches(decoder: Any) -> None:
    """Signals are 0.3 too high from position 96 on, in batches of three rows and more."""
    forward, probe, started = decoder._forward, decoder._forward.probe, dict[str, Any]()
    run, read = forward.run_step, probe.read

    def run_step(step: StepInput) -> StepOutput:
        started["running"] = step.inputs.running
        output: StepOutput = run(step)
        return output

    def read_shifted(hidden: Tensor, column: int, work: Any, ids: Ints) -> Any:
        output, running = read(hidden, column, work, ids), started["running"]
        far = (np.array(running.starts)[ids // running.queries] >= 96) & (len(running) >= 3)
        return replace(output, signal=output.signal + 0.3 * torch.from_numpy(far))

    forward.run_step, probe.read = run_step, read_shifted


def read_signal_of_draws(decoder: Any) -> None:
    """At a temperature the exits read softmax(logits / T)."""
    read = decoder._forward.probe.read

    def changed(hidden: Tensor, column: int, work: Any, ids: Ints) -> Any:
        output = read(hidden, column, work, ids)
        if not decoder.temperature or output.logits is None:
            return output
        signal = SIGNALS[decoder.point.signal].compute_from_logits(output.logits / decoder.temperature)
        return replace(output, signal=signal.double().cpu())

    decoder._forward.probe.read = changed


def take_lowest_cap_of_nine(original: Any, session: Any, length: Ints | None = None) -> list[TokenDepthCap]:
    """The lowest cap of more than eight rows is that of all."""
    admitted: list[TokenDepthCap] = original(length)
    if len(admitted) <= 8 or session._point.schedule != "monotone":
        return admitted
    return [TokenDepthCap(min(one.cap for one in admitted))] * len(admitted)


def fill_states_of_first_row(fill: Any, stepper: Stepper, hidden: Tensor, *given: Any) -> None:
    """Entries above an exit are written from the first row's state."""
    fill(hidden[:1].expand_as(hidden), *given)


def forget_caps_beyond(positions: int) -> Callable[..., list[TokenDepthCap]]:
    """Caps are kept for so many positions; those behind have the ceiling."""

    def admissions(original: Any, session: Any, length: Ints | None = None) -> list[TokenDepthCap]:
        admitted, at = original(length), session.length if length is None else length
        return [replace(one, cap=session._point.ceiling) if held >= positions else one
                for one, held in zip(admitted, at, strict=True)]  # fmt: skip

    return admissions


# ---------------------------------------------------------------- draws


def change_seed(change: Callable[[float, int], tuple[float, int]]) -> MutantFactory:
    """Draws at ``change`` of the requested (temperature, seed)."""

    def init(original: Any, sampler: Any, rows: int, temperature: float = 0.0, seed: int = 0) -> None:
        original(rows, *change(temperature, seed))

    return serve(sampler={"__init__": init})


def restart_numbers(steps: int) -> MutantFactory:
    """A row's random numbers begin again after ``steps`` tokens."""

    def pick(original: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
        counts: defaultdict[int, int] = vars(sampler).setdefault("counts", defaultdict(int))
        for row in rows:
            if counts[row] % steps == 0:
                sampler._generators[row].manual_seed(sampler._generators[row].initial_seed())
            counts[row] += 1
        picked: Tensor = original(logits, rows)
        return picked

    return serve(sampler={"pick_next_tokens": pick})


def invert_distribution(number: Callable[[int, int, int], tuple[int, ...]]) -> MutantFactory:
    """Draws by inversion in the order of ids, by the random number with the key ``number(seed, row, step)``."""

    def init(original: Any, sampler: Any, rows: int, temperature: float = 0.0, seed: int = 0) -> None:
        original(rows, temperature, seed)
        sampler.seed, sampler.counts = seed, defaultdict(int)

    def pick(original: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
        if not sampler.temperature:
            greedy: Tensor = original(logits, rows)
            return greedy
        upto, drawn = torch.softmax(logits.double() / sampler.temperature, dim=-1).cumsum(dim=-1), []
        for row in rows:
            drawn.append(np.random.default_rng(number(sampler.seed, row, sampler.counts[row])).random())
            sampler.counts[row] += 1
        found = torch.searchsorted(upto, torch.tensor(drawn, dtype=torch.float64)[:, None])[:, 0]
        return found.clamp(max=logits.shape[-1] - 1)

    return serve(sampler={"__init__": init, "pick_next_tokens": pick})


def share_numbers_of_rows(apart: int) -> Callable[..., None]:
    """Row r draws by the numbers of row r − ``apart``."""

    def init(original: Any, sampler: Any, *arguments: Any) -> None:
        original(*arguments)
        for generator, other in zip(sampler._generators[apart:], sampler._generators, strict=False):
            generator.manual_seed(other.initial_seed())

    return init


def draw_by_place_beyond_eight(pick: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
    """More than eight rows draw by their place among those left."""
    picked: Tensor = pick(logits, list(range(len(rows))) if len(sampler._generators) > 8 else rows)
    return picked


def seed_first_row_alone(original: Any, sampler: Any, rows: int, temperature: float = 0.0, seed: int = 0) -> None:
    original(rows, temperature, seed)
    for generator in sampler._generators[1:]:
        generator.seed()


def begin_greedily_beyond_eight(pick: Any, sampler: Any, logits: Tensor, rows: list[int]) -> Tensor:
    """The first token of each of more than eight rows is the likeliest one."""
    seen = vars(sampler).setdefault("seen", set())
    greedy = torch.tensor([row not in seen and len(sampler._generators) > 8 for row in rows])
    seen.update(rows)
    return torch.where(greedy, logits.argmax(dim=-1), pick(logits, rows))


UNCOUNTED = declare_capabilities(counted=False)

MUTANTS = (
    *make_pair_mutants("requests",
        ("stream-at-full-depth", "a stream runs at full depth, whatever the point",
         serve(token_arrivals=stream_at_full_depth)),
        ("stream-of-33", "the 33rd token of a stream repeats the one before it", change_streams(repeat_33rd_token)),
        ("stream-without-its-end", "a stream does not show its stop token", change_streams(drop_stop_token)),
        ("stream-beyond-eight", "the ninth stream and later ones repeat the first eight",
         serve(token_arrivals=repeat_first_eight_streams)),
        ("stream-draws-as-first-row", "all rows of a stream draw by the first row's numbers",
         serve(token_arrivals=stream_draws_as_first_row)),
        ("at-once-lowest-cap", "requests at once share the lowest cap of all that run",
         serve(generate_at_once=exit_requests_together, prepare=UNCOUNTED)),
        ("at-once-draws-by-order", "requests at once draw by their order", serve(generate_at_once=seed_by_order)),
        ("raised-poisons", "a request that raises poisons the next", serve(generate=end_prompts_in_zero_after_error)),
        ("strides-ignored", "a prompt array with strides is read as if it had none",
         change_prompts(read_without_strides)),
        ("padding-in-batches", "in batches a prompt that ends in the padding's id is read without it",
         change_prompts(take_padding_for_padding)),
        ("padded-as-first", "prompts are read as far as the first one reaches",
         serve(session={"_run_prompts": pad_prompts_as_first})),
        ("prefix-of-16", "entries of an earlier prompt with the same first 16 tokens are used",
         reuse_prompt_kv_by(lambda head: head[:16].tobytes())),
        ("prefix-of-all-but-the-last", "entries of an earlier prompt of that length and first half are used",
         reuse_prompt_kv_by(lambda head: (len(head), head[: len(head) // 2].tobytes()))),
        ("prefix-of-other-decoders", "decoders of other ceilings share the entries of equal prompts",
         share_prompts_between_decoders()),
        ("closed-decoder's-state", "a decoder begins in the state of one that was closed",
         begin_with_token_of_closed_decoder()),
        ("newest-decoder's-seed", "decoders of one process draw by the seed of the newest",
         use_newest_of_process("seed", "_decode")),
        ("bin-of-first-row", "a batch takes the bin of its first row", serve(prepare=bin_all_rows_as_first)),
        ("far-exits-of-batches", "exits are read 0.3 too high from position 96 on, in batches of three and more",
         serve(prepare=shift_far_exits_of_batches)),
        ("signal-of-draws", "at a temperature the exits read the distribution that is drawn from",
         serve(prepare=read_signal_of_draws)),
        ("fills-of-first-row", "entries above an exit are those of the first row's state",
         serve(stepper=make_stepper_override(write_kv=fill_states_of_first_row))),
        ("noise-by-place", "more than eight rows draw by their place among those left",
         serve(sampler={"pick_next_tokens": draw_by_place_beyond_eight})),
        ("lowest-cap-of-nine", "more than eight rows have the lowest cap of all",
         serve(session={"_admissions": take_lowest_cap_of_nine})),
        ("caps-of-128", "caps are kept for 128 positions", serve(session={"_admissions": forget_caps_beyond(128)})),
        ("aborted-cap", "a request that was left half-way lowers the first cap of the next",
         keep_cap_of_aborted_request()),
        ("newest-decoder's-point", "decoders of one process decode at the point of the newest",
         use_newest_of_process("_forward", "_open")),
        ("stops-of-16", "a stop set keeps its 16 smallest ids",
         change_limits(lambda new, stop: (new, frozenset(sorted(stop)[:16])))),
        ("stops-of-16-largest", "a stop set keeps its 16 largest ids",
         change_limits(lambda new, stop: (new, frozenset(sorted(stop)[-16:])))),
        ("stops-in-a-byte", "stop ids are kept in one byte",
         change_limits(lambda new, stop: (new, frozenset(token % 256 for token in stop)))),
        ("at-once-stops", "requests at once share the first one's stop set",
         change_requests_at_once(lambda asked: [(rows, new, asked[0][2]) for rows, new, _ in asked])),
        ("at-once-limits", "requests at once are as long as the longest",
         change_requests_at_once(lambda asked: [(rows, max(each[1] for each in asked), stop)
                                                for rows, _, stop in asked])),
        ("at-once-fifth", "the fifth request at once gets the answer of the first",
         serve(generate_at_once=answer_fifth_as_first)),
        ("request-257", "requests are numbered in one byte", serve(generate=limit_257th_as_first)),
        ("answers-without-stops", "an answer is kept for its prompts, whatever the stop set",
         remember_answers(lambda decoder, stop: ())),
        ("seeds-of-16-bits", "seeds are folded to 16 bits", change_seed(lambda t, seed: (t, seed % 2**16))),
        ("seed-of-first-row", "rows after the first draw by the computer's own entropy",
         serve(sampler={"__init__": seed_first_row_alone})),
        ("seeds-of-float32", "seeds are kept as float32", change_seed(lambda t, seed: (t, int(np.float32(seed))))),
        ("answers-without-seeds", "an answer is kept for its prompts, whatever the seed",
         remember_answers(lambda decoder, stop: (stop, decoder.point.name, decoder.temperature), of_process=True)),
        ("temperature-of-one", "a temperature of exactly 1 is greedy",
         change_seed(lambda t, seed: (0.0 if t == 1 else t, seed))),
        ("temperatures-above-1.5", "temperatures above 1.5 are 1.5", change_seed(lambda t, seed: (min(t, 1.5), seed))),
        ("newest-decoder's-temperature", "decoders of one process draw at the temperature of the newest",
         use_newest_of_process("temperature", "_decode")),
        ("seed-zero", "seed 0 counts as none",
         change_seed(lambda t, seed: (t, seed or int(np.random.default_rng().integers(2**40))))),
        ("begins-greedily", "the first token of each of more than eight rows is the likeliest",
         serve(sampler={"pick_next_tokens": begin_greedily_beyond_eight})),
        ("equal-prompts-once", "rows with equal prompts are decoded once",
         serve(generate=answer_equal_prompts_once, prepare=UNCOUNTED)),
        ("noise-of-24", "a row's random numbers repeat after 24 steps", restart_numbers(24)),
        ("noise-of-24-inverted", "so do those of a decoder that inverts the distribution",
         invert_distribution(lambda seed, row, step: (seed, row, step % 24))),
        ("noise-of-16-rows", "row 16 draws by the numbers of row 0",
         serve(sampler={"__init__": share_numbers_of_rows(16)})),
        ("noise-of-16-rows-inverted", "so does that of a decoder that inverts the distribution",
         invert_distribution(lambda seed, row, step: (seed, row % 16, step))),
        ("emitted-in-one-buffer", "the tokens of every request are written into one buffer",
         serve(generate=return_arrays_of_one_buffer)),
        ("answers-by-reference", "an answer is kept in the arrays that the caller got",
         remember_answers(lambda decoder, stop: (stop,))),
        ("request-empties-sessions", "a request takes the buffers of open sessions",
         serve(generate=empty_open_sessions, start=remember_sessions))),
)  # fmt: skip
