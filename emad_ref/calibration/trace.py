"""The lens trace: what the model would say after every layer, taken once under teacher forcing.

Under a monotone schedule the hidden state of token t at layer ℓ ≤ D_t is the full model's, because layers ≤ ℓ of all
earlier tokens ran. So one full-depth pass that records, for every token and layer,

    H_ℓ (entropy, nats)   −log p_ℓ(next token) (nats)   argmax p_ℓ   max p_ℓ

decides quality at every operating point by array arithmetic (``emad_ref.replay``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from emad_ref.errors import BadArgument, EmadError
from emad_ref.models.stepper import Stepper
from emad_ref.readout.signals import entropy_nats, require_finite
from emad_ref.record import Floats, Ints

TOKENS_PER_BATCH = 2048  # bounds the logits of one layer: 2048 × 50,304 floats are 0.4 GB


class EmptyCorpus(EmadError):
    """No text to read: nothing can be calibrated or judged."""


@dataclass(frozen=True)
class TokenSequence:
    """``tokens`` int64 [n], opening token included; positions before ``adaptive_from`` are prompt, at full depth.

    ``document`` numbers the text it was cut from: windows of one document are not independent.
    """

    tokens: Ints
    adaptive_from: int = 0
    document: int = 0


@dataclass(frozen=True)
class Trace:
    """Per decided position p of every sequence (p ≥ adaptive_from, and a next token exists), in order.

    ``entropy_nats``, ``nll_nats``, ``top1_probability``: float32 [tokens, L]; ``top1`` int32 [tokens, L].
    ``token``, ``target``, ``position``: int64 [tokens]. ``starts``: int64 [sequences + 1] offsets into the rows.
    ``prompts``: int64 [sequences] positions before the first decided one.
    """

    entropy_nats: NDArray[np.float32]
    nll_nats: NDArray[np.float32]
    top1: NDArray[np.int32]
    top1_probability: NDArray[np.float32]
    token: Ints
    target: Ints
    position: Ints
    starts: Ints
    prompts: Ints

    def __len__(self) -> int:
        return len(self.token)

    @property
    def layers(self) -> int:
        return self.entropy_nats.shape[1]

    @property
    def sequences(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> Ints:
        """[sequences] decided positions of each."""
        return np.diff(self.starts)

    @property
    def sequence(self) -> Ints:
        """[tokens] index of the sequence each row belongs to."""
        return np.repeat(np.arange(self.sequences), self.lengths)


def joined(parts: Sequence[Trace]) -> Trace:
    """One trace of all parts, in order."""
    if not parts:
        raise EmptyCorpus("corpus=[], but expected at least one document of two tokens; check the source and the split")
    rows = ("entropy_nats", "nll_nats", "top1", "top1_probability", "token", "target", "position", "prompts")
    lengths = np.concatenate([part.lengths for part in parts])
    return Trace(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in rows},
        starts=np.concatenate([[0], np.cumsum(lengths)]),
    )


def batched(sequences: Iterable[TokenSequence], tokens: int = TOKENS_PER_BATCH) -> Iterator[list[TokenSequence]]:
    """Consecutive sequences whose padded size stays within ``tokens``."""
    batch: list[TokenSequence] = []
    for sequence in sequences:
        if len(sequence.tokens) < 2:
            raise BadArgument("sequence", sequence.tokens.tolist(), "at least two tokens", "nothing is predicted in it")
        last = len(sequence.tokens) - 2
        if not 0 <= sequence.adaptive_from <= last:
            raise BadArgument(
                "adaptive_from", sequence.adaptive_from, f"a position in 0–{last}", "nothing is decided in the sequence"
            )
        widest = max([len(sequence.tokens), *(len(s.tokens) for s in batch)])
        if batch and widest * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


def padded(batch: Sequence[TokenSequence]) -> tuple[Ints, Ints]:
    """(tokens int64 [rows, widest] padded on the right with 0, lengths int64 [rows])."""
    lengths = np.array([len(s.tokens) for s in batch])
    tokens = np.zeros((len(batch), lengths.max()), dtype=np.int64)
    for row, sequence in enumerate(batch):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
    return tokens, lengths


@torch.inference_mode()
def trace_batch(stepper: Stepper, batch: Sequence[TokenSequence]) -> Trace:
    """The trace of one batch in one forward.

    Raises:
        NotFinite: a layer's logits hold NaN.
    """
    tokens, lengths = padded(batch)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    frame = stepper.frame(positions, None, lengths=lengths)
    ids = torch.from_numpy(tokens).to(stepper.device)
    hidden = stepper.embed(ids, frame)
    decided = np.zeros(tokens.shape, dtype=bool)
    for row, sequence in enumerate(batch):
        decided[row, sequence.adaptive_from : len(sequence.tokens) - 1] = True
    chosen = torch.from_numpy(decided).to(stepper.device)
    target = torch.roll(ids, -1, dims=1)[chosen]
    columns: dict[str, list[NDArray[Any]]] = {"entropy_nats": [], "nll_nats": [], "top1": [], "top1_probability": []}
    for layer in range(1, stepper.layers + 1):
        hidden = stepper.run(hidden, layer - 1, layer, frame, None)
        logits = stepper.logits(hidden[chosen]).float()
        entropy = entropy_nats(logits)
        require_finite(entropy, f"after layer {layer}")
        log_p = torch.log_softmax(logits, dim=-1)
        best = log_p.max(dim=-1)
        columns["entropy_nats"].append(entropy.float().cpu().numpy())
        columns["nll_nats"].append(-log_p.gather(-1, target[:, None])[:, 0].cpu().numpy())
        columns["top1"].append(best.indices.int().cpu().numpy())
        columns["top1_probability"].append(best.values.exp().cpu().numpy())
    counts = decided.sum(axis=1)
    return Trace(
        **{name: np.stack(column, axis=1) for name, column in columns.items()},
        token=tokens[decided],
        target=target.cpu().numpy(),
        position=positions[decided],
        starts=np.concatenate([[0], np.cumsum(counts)]),
        prompts=np.array([s.adaptive_from for s in batch]),
    )


def stream(stepper: Stepper, sequences: Iterable[TokenSequence]) -> Iterator[Trace]:
    """Traces batch by batch: constant memory, whatever the length of the corpus."""
    for batch in batched(sequences):
        yield trace_batch(stepper, batch)


def take_trace(
    stepper: Stepper,
    sequences: Iterable[TokenSequence],
    *,
    progress: str | None = None,
    file: TextIO | None = None,
) -> Trace:
    """The whole trace in memory; ``progress`` names the bar, None shows none; it goes to ``file``, else to stderr.

    Raises:
        EmptyCorpus: no sequences.
    """
    bar = tqdm(stream(stepper, sequences), desc=progress, disable=progress is None, unit="batch", file=file)
    return joined(list(bar))


@torch.inference_mode()
def lens_logits(stepper: Stepper, tokens: Ints, first: int = 0) -> Floats:
    """Reference logits float64 [n − first, L, V] of one sequence after every layer, from position ``first`` on.

    One plain pass without a cache: the oracle of every audit.
    """
    positions = np.arange(len(tokens))[None]
    frame = stepper.frame(positions, None)
    hidden = stepper.embed(torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None].to(stepper.device), frame)
    layers = []
    for layer in range(1, stepper.layers + 1):
        hidden = stepper.run(hidden, layer - 1, layer, frame, None)
        layers.append(stepper.logits(hidden[:, first:])[0].double().cpu().numpy())
    return np.stack(layers, axis=1)


def windows(
    documents: Iterable[Ints],
    window: int,
    opening: int | None,
    limit: int | None = None,
    per_document: int | None = None,
) -> Iterator[TokenSequence]:
    """Token sequences to score: one document per window, longer ones cut into windows that each start at full depth.

    ``documents`` yields int64 [n] without an opening token; ``opening`` (the model's beginning-of-text id, or None)
    is put before each window, so that its first token is predicted too. ``limit`` counts windows; ``per_document``
    bounds how many of them one document may give, its first.

    Raises:
        BadArgument: a window that cannot hold two tokens, a negative limit, no window per document.
    """
    if window < 2:
        raise BadArgument("window", window, "at least 2 tokens", "one to see and one to predict")
    if limit is not None and limit < 0:
        raise BadArgument("limit", limit, "a count of windows ≥ 0", "None takes all")

    if per_document is not None and per_document < 1:
        raise BadArgument("per_document", per_document, "a count of windows ≥ 1", "None takes all")

    def cut() -> Iterator[TokenSequence]:
        room = window - (opening is not None)
        for number, document in enumerate(documents):
            for start in range(0, len(document), room)[:per_document]:
                piece = np.asarray(document[start : start + room], dtype=np.int64)
                tokens = piece if opening is None else np.concatenate([[opening], piece])
                if len(tokens) >= 2:
                    yield TokenSequence(tokens, document=number)

    return islice(cut(), limit)
