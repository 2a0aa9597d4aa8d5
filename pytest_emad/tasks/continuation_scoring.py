"""Scores and generates continuations at an operating point, by one forward pass and replay or by any decoder.

The state of token t after layer ℓ ≤ D_t is that of the full model (``calibration.trace``). So a batched teacher-forced
pass that reads the probes and the ceiling, followed by a replay of the point, gives the scores of token-by-token
decoding. A foreign decoder, or a point that cannot be replayed, is fed token by token through its Session. Padding is
to the right of every scored position, so no rule reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.calibration.trace import COLUMNS, Trace
from emad_ref.calibration.windows import TOKENS_PER_BATCH
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.stepper import LayerInputs, Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Session
from emad_ref.record import Bools, Ints
from emad_ref.replay.replay import replay, top1_tokens_at_depth
from emad_ref.schedule.schedules import get_point_schedule
from emad_ref.signals import SIGNALS, require_finite
from pytest_emad.tasks.scoring import EncodedTaskItem, mark_correct_items_from_scores, to_token_sequences

Answer = tuple[float, bool]  # log-likelihood in nats, whether greedy decoding gives the same tokens


@dataclass(frozen=True)
class ForcedInput:
    """One input sequence and the continuations that it scores.

    Continuations that differ only in their last token, such as options of one token, share an input.

    ``tokens``: context and continuation without the last token. ``first_decided``: the last context position.
    ``lasts``: the last token of each continuation.
    """

    tokens: tuple[int, ...]
    first_decided: int
    lasts: tuple[int, ...]

    def target_tokens(self, last: int) -> list[int]:
        """Tokens predicted from ``first_decided`` on."""
        return [*self.tokens[self.first_decided + 1 :], last]

    @property
    def decided_count(self) -> int:
        return len(self.tokens) - self.first_decided


# ---------------------------------------------------------------- scoring by one teacher-forced pass and replay


def is_replayable(point: OperatingPoint) -> bool:
    """Whether a trace of full readouts suffices for ``point``; otherwise it must be decoded."""
    recorded = (
        SIGNALS[point.signal].is_single_layer and point.estimator == EntropyEstimator() and point.confidence is None
    )
    return recorded and point.lens is None and get_point_schedule(point).resolve_depths is not None


def score_by_replay(stepper: Stepper, point: OperatingPoint, batch: Sequence[ForcedInput]) -> list[Answer]:
    """Answers of every input's continuations, in order, from one forward."""
    trace = trace_required_layers(stepper, point, batch)
    at = replay(trace, point)
    likelihood = -trace.token_positions.sum_by_sequence(at.nll_nats)
    hits = trace.token_positions.sum_by_sequence(top1_tokens_at_depth(trace, at.depth) == trace.target)
    return list(zip(likelihood.tolist(), (hits == trace.n_decided_by_sequence).tolist(), strict=True))


def required_layers(point: OperatingPoint) -> tuple[int, ...]:
    """Layers whose readout ``point`` may need: probes and ceiling; all, if tokens may stop between probes."""
    anywhere = get_point_schedule(point).ruleless or point.interpolate
    return tuple(range(1, point.ceiling + 1)) if anywhere else (*point.probes, point.ceiling)


@torch.inference_mode()
def trace_required_layers(stepper: Stepper, point: OperatingPoint, batch: Sequence[ForcedInput]) -> Trace:
    """A trace with one sequence per continuation; NaN (top-1: −1) at layers that ``point`` does not read.

    After the probes it has only the signal of the point.

    Raises:
        NotFinite: logits hold NaN or infinity.
    """
    hidden, inputs, decided = _embed_batch(stepper, batch)
    rows, target = _readout_rows(batch)
    empty = np.full((len(rows), point.layers), np.nan, dtype=np.float32)
    columns: dict[str, Any] = {name: empty.copy() for name in (*COLUMNS, point.signal)}
    columns["top1"] = np.full((len(rows), point.layers), -1, dtype=np.int32)
    at = 0
    for layer in required_layers(point):
        hidden = stepper.run_layers(hidden, at, layer, inputs)
        at = layer
        signal = point.signal if layer in point.probes else None
        for name, values in _read_columns(stepper, hidden[decided], rows, target, layer, signal).items():
            columns[name][:, layer - 1] = values
    sequences = [forced for forced in batch for _ in forced.lasts]
    return Trace(
        signals={point.signal: columns.pop(point.signal)},
        **columns,
        token=np.concatenate([forced.tokens[forced.first_decided :] for forced in sequences]),
        target=target,
        position=np.concatenate([np.arange(forced.first_decided, len(forced.tokens)) for forced in sequences]),
        starts=np.concatenate([[0], np.cumsum([forced.decided_count for forced in sequences])]),
        first_decided=np.array([forced.first_decided for forced in sequences]),
    )


def _embed_batch(stepper: Stepper, batch: Sequence[ForcedInput]) -> tuple[Tensor, LayerInputs, Tensor]:
    """(h_0 [inputs, widest, D] padded on the right, inputs of its layers, mask of decided positions)."""
    lengths = np.array([len(forced.tokens) for forced in batch])
    tokens = np.zeros((len(batch), lengths.max()), dtype=np.int64)
    decided = np.zeros(tokens.shape, dtype=bool)
    for row, forced in enumerate(batch):
        tokens[row, : len(forced.tokens)] = forced.tokens
        decided[row, forced.first_decided : len(forced.tokens)] = True
    inputs = stepper.prepare_forward(np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), None, lengths=lengths)
    hidden = stepper.embed(torch.from_numpy(tokens).to(stepper.device), inputs)
    return hidden, inputs, torch.from_numpy(decided).to(stepper.device)


def _readout_rows(batch: Sequence[ForcedInput]) -> tuple[Ints, Ints]:
    """Per target of each continuation: its row among the scored positions of all inputs, and its id."""
    rows, targets, start = [], [], 0
    for forced in batch:
        for last in forced.lasts:
            rows.append(np.arange(start, start + forced.decided_count))
            targets.append(np.array(forced.target_tokens(last), dtype=np.int64))
        start += forced.decided_count
    return np.concatenate(rows), np.concatenate(targets)


def _read_columns(
    stepper: Stepper, hidden: Tensor, rows: Ints, target: Ints, layer: int, signal: str | None
) -> dict[str, NDArray[Any]]:
    """Columns of a trace after ``layer``, one value per target; the head runs once per row of ``hidden`` [n, D].

    It works on slices of rows, since the logits of a whole batch of windows are large: 8 × 2048 × 50,304 floats are
    3 GB.
    """
    columns: dict[str, NDArray[Any]] = {}
    for start in range(0, len(hidden), TOKENS_PER_BATCH):
        logits = stepper.logits(hidden[start : start + TOKENS_PER_BATCH]).float()
        here = np.flatnonzero((rows >= start) & (rows < start + TOKENS_PER_BATCH))
        at = torch.from_numpy(rows[here] - start).to(logits.device)
        next_tokens = torch.from_numpy(target[here]).to(logits.device)
        for name, values in _readout_columns(logits, at, next_tokens, layer, signal).items():
            columns.setdefault(name, np.empty(len(rows), dtype=values.dtype))[here] = values
    return columns


def _readout_columns(
    logits: Tensor, at: Tensor, next_tokens: Tensor, layer: int, signal: str | None
) -> dict[str, NDArray[Any]]:
    """Columns of a trace for the rows ``at`` [targets] of ``logits`` [rows, V], with ``signal`` if it is not None."""
    scale = torch.logsumexp(logits, dim=-1)
    require_finite(scale, f"after layer {layer}")
    best = logits.max(dim=-1)
    columns = {
        "nll_nats": (scale[at] - logits[at, next_tokens]).cpu().numpy(),
        "top1": best.indices[at].int().cpu().numpy(),
        "top1_probability": (best.values - scale)[at].exp().cpu().numpy(),
    }
    if signal is not None:
        values = SIGNALS[signal].compute_from_logits(logits)
        require_finite(values, f"after layer {layer}")
        columns[signal] = values[at].float().cpu().numpy()
    return columns


# ---------------------------------------------------------------- scoring by any decoder, token by token


def score_by_decoding(decoder: Decoder, batch: Sequence[ForcedInput]) -> list[Answer]:
    """Answers of every input's continuations, in order, from one session fed token by token."""
    session, step = decoder.start([Prompt(np.array(f.tokens[: f.first_decided + 1], dtype=np.int64)) for f in batch])
    answers: list[list[Answer]] = [[] for _ in batch]
    so_far: list[Answer] = [(0.0, True)] * len(batch)
    alive = list(range(len(batch)))
    try:
        for offset in range(max(forced.decided_count for forced in batch)):
            ended = []
            for i, row in enumerate(alive):
                forced, logits = batch[row], step.logits[i, -1]
                if offset == forced.decided_count - 1:
                    answers[row] = [_extend_answer(so_far[row], logits, last) for last in forced.lasts]
                    ended.append(i)
                else:
                    so_far[row] = _extend_answer(so_far[row], logits, forced.tokens[forced.first_decided + offset + 1])
            if len(ended) == len(alive):
                break
            if ended:
                session.drop(np.array(ended))
                alive = [row for i, row in enumerate(alive) if i not in set(ended)]
            step = session.feed(np.array([[batch[row].tokens[batch[row].first_decided + offset + 1]] for row in alive]))
    finally:
        session.close()
    return [answer for per_input in answers for answer in per_input]


def mark_correct_items_by_decoding(decoder: Decoder, items: Sequence[EncodedTaskItem], rows: int) -> Bools:
    """Whether each item is right; bool [items]. ``decoder`` reads every option token by token, ``rows`` at once.

    Raises:
        BadArgument: an item that is a program (``answers.write_programs``).
    """
    inputs = [
        ForcedInput(tuple(each.tokens[:-1].tolist()), each.first_decided, (int(each.tokens[-1]),))
        for each in to_token_sequences(items)
    ]
    batches = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
    answers = [answer for batch in batches for answer in score_by_decoding(decoder, batch)]
    likelihood, greedy = (np.array(column) for column in zip(*answers, strict=True))
    return mark_correct_items_from_scores(items, likelihood, greedy)


def _extend_answer(so_far: Answer, logits: NDArray[np.float64], target: int) -> Answer:
    """``so_far`` extended by one target under ``logits`` [V]."""
    top = logits.max()
    log_p = logits[target] - top - np.log(np.exp(logits - top).sum())
    return so_far[0] + float(log_p), so_far[1] and int(logits.argmax()) == target


# ---------------------------------------------------------------- generation


NextTokens = Callable[[list[int]], list[int]]
"""Feeds one token to each row; returns the most likely next token of each."""

GenerationStart = tuple[Session, list[int], NextTokens]
"""A session, the most likely token after each prompt, and the function that continues."""


def start_generation(decoder: Decoder, prompts: Sequence[Prompt]) -> GenerationStart:
    """Start greedy generation with any decoder."""
    session, step = decoder.start(prompts)

    def follow(tokens: list[int]) -> list[int]:
        picked: list[int] = session.feed(np.array(tokens)[:, None]).logits[:, -1].argmax(axis=-1).tolist()
        return picked

    return session, step.logits[:, -1].argmax(axis=-1).tolist(), follow


def start_generation_on_device(decoder: WalkedDecoder, prompts: Sequence[Prompt], max_new: int) -> GenerationStart:
    """Start greedy generation with the reference decoder, copying one integer per row to the host instead of logits."""
    session, arrival = decoder.start_with_room(prompts, max_new)

    @torch.inference_mode()
    def follow(tokens: list[int]) -> list[int]:
        ids = torch.tensor(tokens, device=decoder.stepper.device)[:, None]
        picked: list[int] = session.process_tokens(ids, None).logits[:, -1].argmax(dim=-1).tolist()
        return picked

    return session, arrival.logits[:, -1].argmax(dim=-1).tolist(), follow


def generate_greedy(
    begun: GenerationStart, max_new: int, ends: Collection[int], stopped: Callable[[Sequence[int]], bool]
) -> list[list[int]]:
    """Greedy tokens of each prompt, up to one of ``ends`` (excluded), ``stopped``, or ``max_new`` tokens."""
    session, picked, follow = begun
    emitted: list[list[int]] = [[] for _ in picked]
    alive = list(range(len(picked)))
    try:
        while True:
            ended = []
            for i, (row, token) in enumerate(zip(alive, picked, strict=True)):
                if token in ends:
                    ended.append(i)
                    continue
                emitted[row].append(token)
                if len(emitted[row]) == max_new or stopped(emitted[row]):
                    ended.append(i)
            if len(ended) == len(alive):
                return emitted
            if ended:
                session.drop(np.array(ended))
                keep = sorted(set(range(len(alive))).difference(ended))
                alive, picked = [alive[i] for i in keep], [picked[i] for i in keep]
            session.commit(session.length)
            picked = follow(picked)
    finally:
        session.close()


def make_stop_string_check(
    text: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> Callable[[Sequence[int]], bool]:
    """Make a function, for calls after every token, that returns whether the tokens' ``text`` contains a stop string.

    It decodes only the last tokens first, because decoding all of them at every token took a fifth of the time of a
    small model. A stop string that the newest token completes spans at most as many tokens as it has bytes. Two more
    tokens allow for effects at the edge, such as a character cut in two or a missing leading space. A missed stop
    string costs only time, since ``generate_until`` cuts the whole text before its first stop string.
    """
    needed_stops = [stop for stop in stops if stop]
    reach = 2 + max((len(stop.encode()) for stop in needed_stops), default=0)

    def stopped(tokens: Sequence[int]) -> bool:
        return _contains_any(text(tokens[-reach:]), needed_stops) and _contains_any(text(tokens), needed_stops)

    return stopped


def _contains_any(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)
