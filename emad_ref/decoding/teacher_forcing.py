"""Teacher forcing: the depth and the loss of every token of a given text.

``teacher_force`` feeds any decoder, token by token, through the protocol. ``teacher_force_texts`` feeds the reference
decoder in batches: token by token, or where K and V above an exit are copies of its state, layer by layer. Both serve
points that replay cannot decide, such as state copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.calibration.confidence_columns import FEWEST_TOKENS
from emad_ref.calibration.trace import iterate_head_slices, target_tokens
from emad_ref.calibration.windows import (
    TOKENS_PER_BATCH,
    TokenSequence,
    decided_positions,
    iterate_batches,
    padded_tokens_and_lengths,
)
from emad_ref.decoding.reference import WalkedDecoder, require_known_token_ids, require_within_max_positions
from emad_ref.decoding.step import StepOutput
from emad_ref.exit_rules import is_exit_rule_met
from emad_ref.models.stepper import make_source_cache_or_none
from emad_ref.models.threads import all_threads_for_batches
from emad_ref.point import OperatingPoint
from emad_ref.probes.probe import make_probe
from emad_ref.probes.tuned_lens import get_point_translators
from emad_ref.protocol import Decoder, Prompt, Step
from emad_ref.record import Bools, Floats, Ints, Work
from emad_ref.schedule.schedules import get_point_schedule
from emad_ref.signals import log_probabilities, require_finite, to_numpy_float64


@dataclass(frozen=True, eq=False)
class TeacherForcedText:
    """One fed text, [decided positions]: ``depth`` int64, ``nll_nats`` float64, ``wrong`` bool.

    ``signal`` float64 [decided positions, probes], NaN where unread. ``work`` None if uncounted.
    """

    depth: Ints
    nll_nats: Floats
    wrong: Bools
    signal: Floats
    work: Work | None


def teacher_force(decoder: Decoder, sequence: TokenSequence) -> TeacherForcedText:
    """Feed ``sequence`` token by token from its first decided position on; the last token is only predicted."""
    first, tokens = sequence.first_decided + 1, sequence.tokens
    session, step = decoder.start([Prompt(tokens[:first])])
    steps = [step, *(session.feed(token[None, None]) for token in tokens[first:-1])]
    work = session.work
    session.close()
    targets = tokens[first:].tolist()
    return TeacherForcedText(
        np.array([int(each.depth[0, 0]) for each in steps]),
        np.array([_nll_nats(each, target) for each, target in zip(steps, targets, strict=True)]),
        np.array([int(each.logits[0, 0].argmax()) != target for each, target in zip(steps, targets, strict=True)]),
        np.stack([each.signal[0, 0] for each in steps]),
        work,
    )


def _nll_nats(step: Step, target: int) -> float:
    z = step.logits[0, 0] - step.logits[0, 0].max()
    return float(np.log(np.exp(z).sum()) - z[target])


def sequence_nll_sums_and_counts(decoder: Decoder, sequences: Sequence[TokenSequence]) -> tuple[Floats, Ints]:
    """(NLL sums [sequences], decided tokens [sequences])."""
    forced = [teacher_force(decoder, sequence) for sequence in sequences]
    return np.array([each.nll_nats.sum() for each in forced]), np.array([len(each.depth) for each in forced])


BATCH_ROWS = 32  # rows per batch: a step of this many small rows costs twice a step of one
LOGITS_OF_BATCH = 2**25  # logits of all tokens that are fed layer by layer together


@dataclass(frozen=True)
class TeacherForcedStep:
    """Step ``at`` (from 0) of a batch. ``rows`` int64 [continuing]: its remaining rows.

    ``output``   of their latest tokens, in the last column.
    ``target``   int64 [continuing] the next tokens, on the decoder's device.
    ``work``     of decode steps so far, without that of prompt positions before the last.
    """

    at: int
    rows: Ints
    output: StepOutput
    target: Tensor
    work: Work


def batch_indices_by_length(sequences: Sequence[TokenSequence], rows: int = BATCH_ROWS) -> Iterator[list[int]]:
    """Indices of all ``sequences``, at most ``rows`` at a time, similar lengths together.

    Rows that start together share their masks; rows that end together stay together to the end.
    """
    order = iter(sorted(range(len(sequences)), key=lambda i: (sequences[i].first_decided, len(sequences[i].tokens))))
    while chosen := list(islice(order, rows)):
        yield chosen


def teacher_force_texts(
    decoder: WalkedDecoder, sequences: Sequence[TokenSequence], fed: Callable[[int], object] = lambda tokens: None
) -> list[TeacherForcedText]:
    """Feed ``sequences``, at most ``decoder.max_rows`` together. ``fed(n)`` is called after every n tokens.

    ``work`` is that of decode steps; None if several rows, or whole layers, were fed together. Each sequence needs a
    decided position.

    Raises:
        BadArgument: as the decoder raises for these texts.
        NotFinite: logits hold NaN or +inf.
    """
    texts: dict[int, TeacherForcedText] = {}
    at_once = min(TOKENS_PER_BATCH, max(FEWEST_TOKENS, LOGITS_OF_BATCH // decoder.stepper.vocabulary_size))
    layerwise = is_fed_layerwise(decoder.point)
    for chosen in batch_indices_by_length(sequences, decoder.max_rows):
        batch = [sequences[i] for i in chosen]
        if layerwise:
            with all_threads_for_batches(sum(text.n_forward_tokens for text in batch)):
                forced = [
                    text for some in iterate_batches(batch, at_once) for text in _force_layerwise(decoder, some, fed)
                ]
        else:
            forced = _force_by_token(decoder, batch, fed)
        texts |= dict(zip(chosen, forced, strict=True))
    return [texts[i] for i in range(len(sequences))]


def is_fed_layerwise(point: OperatingPoint) -> bool:
    """Whether ``teacher_force_texts`` feeds all tokens of a text together, layer by layer.

    Under copied or translated states a token's exit depends on earlier tokens only through K and V of the layers below
    it. Bins and interpolation need token-by-token decisions, and the work of a confidence rule is counted only token by
    token.
    """
    by_probe = point.bins.bin_count == 1 and not point.interpolate and point.confidence is None
    return get_point_schedule(point).resolve_depths is None and by_probe


class _DecidedColumns:
    """Columns of ``TeacherForcedText`` over decided positions of any shape, written as they become known."""

    def __init__(self, shape: tuple[int, ...], probes: int):
        self.depth, self.nll_nats = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        self.wrong, self.signal = np.zeros(shape, dtype=np.bool_), np.full((*shape, probes), np.nan)

    def predict(self, where: Any, logits: Tensor, target: Tensor) -> None:
        """Write the losses of the positions ``where``; ``logits`` [n, V], ``target`` int64 [n]."""
        log_p = log_probabilities(logits)
        self.nll_nats[where] = -to_numpy_float64(log_p.gather(-1, target[:, None])[:, 0])
        self.wrong[where] = (log_p.argmax(dim=-1) != target).cpu().numpy()

    def text(self, where: Any, work: Work | None) -> TeacherForcedText:
        return TeacherForcedText(self.depth[where], self.nll_nats[where], self.wrong[where], self.signal[where], work)


@torch.inference_mode()
def _force_layerwise(
    decoder: WalkedDecoder, batch: Sequence[TokenSequence], fed: Callable[[int], object]
) -> list[TeacherForcedText]:
    """Run all tokens of ``batch`` layer by layer, in the same arithmetic as a plain pass.

    A stopped token enters each layer above with the state from which its K and V there are computed; the block's output
    for it is dropped. Prompts run to the ceiling.
    """
    stepper, point = decoder.stepper, decoder.point
    probe = make_probe(stepper, point)
    translators = get_point_translators(stepper, point)
    work = Work.none(stepper.layers)

    def index(numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(stepper.device)

    run = [replace(text, tokens=text.tokens[:-1]) for text in batch]  # the last token is only predicted
    tokens, lengths = padded_tokens_and_lengths(run)
    require_known_token_ids(np.concatenate([text.tokens for text in batch]), stepper.vocabulary_size)
    require_within_max_positions(tokens.shape[1], stepper)
    cache = make_source_cache_or_none(stepper, [text.source for text in run], tokens.shape[1])
    inputs = stepper.prepare_forward(np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), cache, lengths=lengths)
    hidden = stepper.embed(index(tokens), inputs)
    counts = np.array([text.n_decided for text in batch])
    row, position = np.repeat(np.arange(len(batch)), counts), decided_positions(batch)
    decided = position - np.array([text.first_decided for text in batch])[row]
    rows, positions = index(row), index(position)
    target = target_tokens(stepper, batch)
    columns, running = _DecidedColumns(row.shape, len(point.probes)), np.arange(len(row))
    exits = torch.empty_like(hidden[rows, positions])  # [decided, D] the state that each token stopped with
    probe.begin_step()
    for layer in range(1, point.ceiling + 1):
        hidden = stepper.run_layers(hidden, layer - 1, layer, inputs)
        states, shown = hidden[rows, positions], None
        stops = np.full(len(running), layer == point.ceiling)
        if layer in point.probes and len(running):
            number = point.probes.index(layer)
            reading = probe.read(states[index(running)], number, work, running)
            shown, values = reading.logits, to_numpy_float64(reading.signal)
            columns.signal[running, number] = values
            stops |= is_exit_rule_met(point, number, values, None, decided[running])
        stopped, among = running[stops], np.flatnonzero(stops)
        columns.depth[stopped] = layer
        exits = exits.to(states.dtype)  # T5 in float16 has float32 states after its first block
        exits[index(stopped)] = states[index(stopped)]
        for some in iterate_head_slices(stepper, len(stopped)):
            here = index(stopped[some])
            logits = probe.emit_logits(states[here], layer, work) if shown is None else shown[index(among[some])]
            require_finite(logits.amax(dim=-1), "at the depth of emission")
            columns.predict(stopped[some], logits, target[here])
        running = running[~stops]
        if layer < point.ceiling and len(left := np.flatnonzero(columns.depth)):
            here = index(left)
            below = exits[here]
            if translators is not None:
                below = translators.estimate_layer_input_states(below[:, None], columns.depth[left], layer + 1, work)[
                    :, 0
                ]
            hidden[rows[here], positions[here]] = below
    fed(len(row))
    return [columns.text(slice(end - n, end), None) for n, end in zip(counts, np.cumsum(counts), strict=True)]


def _force_by_token(
    decoder: WalkedDecoder, batch: Sequence[TokenSequence], fed: Callable[[int], object]
) -> list[TeacherForcedText]:
    """Run ``batch`` token by token."""
    lengths = [text.n_decided for text in batch]
    columns = _DecidedColumns((len(batch), max(lengths)), len(decoder.point.probes))
    for forced in iterate_teacher_forced_steps(decoder, batch):
        here, output = (forced.rows, forced.at), forced.output
        columns.predict(here, output.logits[:, -1], forced.target)
        columns.depth[here], columns.signal[here] = output.depth[:, -1], output.signal[:, -1]
        fed(len(forced.rows))
    work = forced.work if len(batch) == 1 else None
    return [columns.text((row, slice(n)), work) for row, n in enumerate(lengths)]


@torch.inference_mode()
def iterate_teacher_forced_steps(decoder: WalkedDecoder, batch: Sequence[TokenSequence]) -> Iterator[TeacherForcedStep]:
    """The steps of feeding ``batch``, at most ``decoder.max_rows`` sequences.

    Each sequence has a decided position.

    Raises:
        BadArgument: as the decoder raises for these texts.
        NotFinite: logits hold NaN or +inf.
    """
    prompts = [Prompt(text.tokens[: text.first_decided + 1], text.source) for text in batch]
    following, lengths = padded_tokens_and_lengths(
        [TokenSequence(text.tokens[text.first_decided + 1 :]) for text in batch]
    )
    targets = torch.from_numpy(following).to(decoder.stepper.device)
    room = max(len(text.tokens) for text in batch) - max(len(prompt.tokens) for prompt in prompts)
    session, output = decoder.start_with_room(prompts, room)
    before = decoder.prompt_work(prompts)
    rows = np.arange(len(batch))
    for at in count():
        target = targets[torch.from_numpy(rows).to(targets.device), at]
        yield TeacherForcedStep(at, rows, output, target, session.work - before)
        going = at + 1 < lengths[rows]
        if not going.any():
            break
        if not going.all():
            session.drop(np.flatnonzero(~going))
            rows, target = rows[going], target[torch.from_numpy(going).to(target.device)]
        session.commit_all()
        output = session.process_tokens(target[:, None], None)
    session.close()
