"""Lens trace: the model's readout after every layer, taken once under teacher forcing.

Under a monotone schedule the state h_ℓ of token t at layer ℓ ≤ D_t is the full model's, because layers ≤ ℓ of all
earlier tokens ran (EMAD, "KV-consistent scheduling"). So one full-depth pass that records, for every token and layer,

    −log p_ℓ(next token) (nats)   argmax p_ℓ   max p_ℓ   every signal of a single layer's readout (H_ℓ, …)

determines quality at every point under an exact schedule by array arithmetic (``emad_ref.replay``). On request the
trace also holds estimates of H_ℓ, the true divergence KL(p_L ‖ p_ℓ), and the columns of confidence rules
(``calibration.confidence_columns``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from emad_ref.calibration import windows
from emad_ref.calibration.confidence_columns import (
    FEWEST_TOKENS,
    ConfidenceColumns,
    ConfidenceColumnsKey,
    compute_columns_by_confidence_rule,
    layers_read_by_rules,
)
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument, EmadError
from emad_ref.models.stepper import Stepper, make_source_cache_or_none
from emad_ref.models.threads import all_threads_for_batches
from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.probes.estimators import layers_and_reader_by_estimator
from emad_ref.probes.signal_values import iterate_row_slices, kl_from_log_probs
from emad_ref.probes.tuned_lens import get_attached_lens, lens_macs_by_layer
from emad_ref.record import Bools, Floats, Ints
from emad_ref.schedule.schedules import TokenPositions
from emad_ref.signals import (
    ENTROPY,
    LAYERWISE,
    PREVIOUS_PROBE,
    SIGNALS,
    LogitsReadout,
    log_probabilities,
    require_finite,
    to_numpy_float64,
)

LOGITS_IN_CACHE = 2**23  # logits of one layer read at a time; 32 MB of float32 fit a shared cache


COLUMNS = ("nll_nats", "top1", "top1_probability")  # per token and layer, besides the signals
DIVERGENCE_COLUMN = "divergence_nats"  # from the last layer, on request
NO_ESTIMATORS: Mapping[EntropyEstimator, Sequence[int]] = {}

Observer = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class TraceOptions:
    """What a trace holds besides the plain columns, and which heads it reads; ``take_trace`` explains each field."""

    estimators: Mapping[EntropyEstimator, Sequence[int]] = field(default_factory=dict)
    observe: Observer | None = None
    rules: tuple[OperatingPoint, ...] = ()
    lens: str | None = None
    divergence: bool = False
    layers: tuple[int, ...] | None = None
    sample_every: int | None = None


PLAIN_TRACE = TraceOptions()


class EmptyCorpus(EmadError):
    """Raised if there is no text for calibration or judging."""


@dataclass(frozen=True)
class Trace:
    """Columns over every decided position of every sequence: those from the first decided one on with a next token.

    ``signals``          float32 [tokens, L] by name, each of ``LAYERWISE`` in a complete trace.
    ``nll_nats``         float32 [tokens, L] loss of the next token.
    ``top1``, ``top1_probability``  int32, float32 [tokens, L] the likeliest token.
    ``token``, ``target``, ``position``  int64 [tokens].
    ``starts``           int64 [sequences + 1] offsets of sequences in these rows.
    ``first_decided``    int64 [sequences] first decided position, which is the number of positions before it.
    ``estimates``        float32 [tokens, L] by estimator, NaN at layers without it.
    ``macs_per_row``     multiply-adds of one reading, by estimator.
    ``rules``            columns of confidence rules.
    ``lens``             digest of the tuned lens of all readouts except estimates; None: the model's own head.
    ``lens_macs``        int64 [L] multiply-adds per row of that lens in front of a head after each layer.
    ``divergence_nats``  float32 [tokens, L] KL(p_L ‖ p_ℓ), 0 at L, for oracles; None: not recorded.
    ``read_layers``      layers whose heads were read, the last among them; others hold NaN (``top1``: −1). None: every.
    ``sampled``          bool [tokens] positions at which every layer's head was read nevertheless; None: nowhere.
    ``documents``        int64 [sequences] the document each was cut from; None: each is its own.
    """

    signals: dict[str, NDArray[np.float32]]
    nll_nats: NDArray[np.float32]
    top1: NDArray[np.int32]
    top1_probability: NDArray[np.float32]
    token: Ints
    target: Ints
    position: Ints
    starts: Ints
    first_decided: Ints
    estimates: dict[EntropyEstimator, NDArray[np.float32]] = field(default_factory=dict)
    macs_per_row: dict[EntropyEstimator, int] = field(default_factory=dict)
    rules: dict[ConfidenceColumnsKey, ConfidenceColumns] = field(default_factory=dict)
    lens: str | None = None
    lens_macs: Ints | None = None
    divergence_nats: NDArray[np.float32] | None = None
    read_layers: tuple[int, ...] | None = None
    sampled: Bools | None = None
    documents: Ints | None = None

    def __len__(self) -> int:
        return len(self.token)

    @property
    def layers(self) -> int:
        return self.nll_nats.shape[1]

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Layers after which a head was read, ascending."""
        return tuple(range(1, self.layers + 1)) if self.read_layers is None else self.read_layers

    @cached_property
    def target_int32(self) -> NDArray[np.int32]:
        """[tokens] ``target`` in the dtype of ``top1``, which compares in a fifth of the time."""
        return self.target.astype(np.int32)

    @cached_property
    def token_positions(self) -> TokenPositions:
        """Positions of its tokens, the input of schedules."""
        return TokenPositions(self.position, self.starts)

    @property
    def entropy_nats(self) -> NDArray[np.float32]:
        """[tokens, L] H_ℓ, for calibration and diagnostics."""
        return self.signal_at_every_layer(ENTROPY.name)

    def signal_at_every_layer(self, signal: str) -> NDArray[np.float32]:
        """[tokens, L] values of a signal of a single layer's readout.

        Raises:
            BadArgument: one that this trace does not hold.
        """
        if signal not in self.signals:
            raise BadArgument("signal", signal, f"one that this trace records ({', '.join(self.signals)})")
        return self.signals[signal]

    def divergence(self) -> NDArray[np.float32]:
        """[tokens, L] ``divergence_nats``.

        Raises:
            BadArgument: a trace without it.
        """
        if self.divergence_nats is None:
            expected = "one that records KL(p_L ‖ p_ℓ)"
            raise BadArgument("trace.divergence_nats", None, expected, "take one with it: take_trace(divergence=True)")
        return self.divergence_nats

    @property
    def lens_macs_by_layer(self) -> Ints:
        """int64 [L] multiply-adds per row of the lens in front of a head after each layer."""
        return np.zeros(self.layers, dtype=np.int64) if self.lens_macs is None else self.lens_macs

    def require_lens(self, point: OperatingPoint) -> None:
        """Refuse a point that reads below the last layer by another lens than this trace.

        Raises:
            BadArgument: such a point.
        """
        full = point.is_full_depth
        if point.lens != self.lens and not full:
            expected = f"{self.lens!r:.20}, the lens of this trace"
            raise BadArgument("point.lens", point.lens, expected, "take one through its lens: take_trace(lens=…)")

    def require_layers_read(self, point: OperatingPoint) -> None:
        """Refuse a point that compares or emits the readout of a layer that this trace has not read.

        Raises:
            BadArgument: such a point.
        """
        if lacking := self._unread(point):
            read = ", ".join(map(str, self.layers_read))
            raise BadArgument(
                "point", f"{point.name} (reads layers {lacking})", f"layers that this trace has read ({read})",
                "take one that reads them: take_trace(layers=…)",
            )  # fmt: skip

    def has_layers_for(self, point: OperatingPoint) -> bool:
        """Whether this trace has read every layer that ``point`` compares or emits."""
        return not self._unread(point)

    def _unread(self, point: OperatingPoint) -> list[int]:
        return sorted(set(point.readout_layers) - set(self.layers_read))

    def rule_signal(self, point: OperatingPoint) -> NDArray[np.float32]:
        """[tokens, L] the signal that ``point`` compares with its thresholds.

        Raises:
            BadArgument: a signal, an estimator or a rule that this trace does not record.
        """
        if point.confidence is not None:
            return self.confidence_rule_columns(point).signal
        if SIGNALS[point.signal].needs is PREVIOUS_PROBE:
            return self._agreement(point.probes)
        if point.estimator == EntropyEstimator():
            return self.signal_at_every_layer(point.signal)
        if point.estimator not in self.estimates:
            names = ", ".join(estimator.name for estimator in self.estimates) or "none"
            expected = f"full or one this trace records ({names})"
            raise BadArgument("point.estimator", point.estimator.name, expected, "trace it too")
        return self.estimates[point.estimator]

    def _agreement(self, probes: Sequence[int]) -> NDArray[np.float32]:
        """[tokens, L] top-1 probability if the previous probe has the same top-1 token, else 0; NaN between probes."""
        column = np.full(self.top1.shape, np.nan, dtype=np.float32)
        for before, probe in zip((None, *probes), probes, strict=False):
            same = before is not None and self.top1[:, probe - 1] == self.top1[:, before - 1]
            column[:, probe - 1] = np.where(same, self.top1_probability[:, probe - 1], 0.0)
        return column

    def confidence_rule_columns(self, point: OperatingPoint) -> ConfidenceColumns:
        """The columns of a point's confidence rule.

        Raises:
            BadArgument: a rule that this trace does not record.
        """
        if ConfidenceColumnsKey.from_point(point) not in self.rules:
            recorded = "; ".join(f"{rule.signal} {rule.confidence}" for rule in self.rules) or "none"
            expected = f"one that this trace records ({recorded})"
            raise BadArgument("point.confidence", point.confidence, expected, "trace it too: take_trace(rules=[point])")
        return self.rules[ConfidenceColumnsKey.from_point(point)]

    def emissions_by_exit_layer(self, point: OperatingPoint) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """(nll_nats, top1) [tokens, L] of the emission of a token that stops after each layer.

        Raises:
            BadArgument: as ``confidence_rule_columns``.
        """
        if point.confidence is None:
            return self.nll_nats, self.top1
        columns = self.confidence_rule_columns(point)
        return columns.nll_nats, columns.top1

    def reorder_sequences(self, order: Ints) -> Trace:
        """The sequences ``order`` [n] of this trace, in that order."""
        rows = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in order])
        starts = np.concatenate([[0], np.cumsum(self.n_decided_by_sequence[order])])
        return replace(
            self._select_rows(rows),
            starts=starts,
            first_decided=self.first_decided[order],
            documents=None if self.documents is None else self.documents[order],
        )

    @property
    def fully_read_trace(self) -> Trace:
        """The positions at which every layer's head was read, of all sequences; for means by layer, not for replay.

        Raises:
            BadArgument: there are none.
        """
        if self.read_layers is None:
            return self
        if self.sampled is None:
            expected = "a trace that has read every layer at some positions"
            raise BadArgument("trace.sampled", None, expected, "take one that does: take_trace(sample_every=…)")
        rows = np.flatnonzero(self.sampled)
        kept = self._select_rows(rows)
        starts = np.searchsorted(rows, self.starts)
        return replace(kept, starts=starts, read_layers=None, sampled=None)

    def _select_rows(self, rows: Ints) -> Trace:
        """Columns of these tokens; offsets of sequences are left as they are."""
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in (*COLUMNS, "token", "target", "position")},
            signals={signal: column[rows] for signal, column in self.signals.items()},
            estimates={estimator: column[rows] for estimator, column in self.estimates.items()},
            rules={rule: columns.select_tokens(rows) for rule, columns in self.rules.items()},
            divergence_nats=None if self.divergence_nats is None else self.divergence_nats[rows],
            sampled=None if self.sampled is None else self.sampled[rows],
        )

    @property
    def n_sequences(self) -> int:
        return len(self.first_decided)

    @property
    def document_of_sequence(self) -> Ints:
        """int64 [sequences] the document of each."""
        return np.arange(self.n_sequences) if self.documents is None else self.documents

    @property
    def n_decided_by_sequence(self) -> Ints:
        """[sequences] decided positions of each."""
        return np.diff(self.starts)

    @property
    def sequence_index(self) -> Ints:
        """[tokens] index of the sequence each row belongs to."""
        return np.repeat(np.arange(self.n_sequences), self.n_decided_by_sequence)


def concatenate_traces(parts: Sequence[Trace]) -> Trace:
    """One trace of all parts, in order."""
    if not parts:
        raise EmptyCorpus("corpus=[], but expected at least one document of two tokens; check the source and the split")
    rows = (*COLUMNS, "token", "target", "position", "first_decided")
    lengths = np.concatenate([part.n_decided_by_sequence for part in parts])
    has_divergence = any(part.divergence_nats is not None for part in parts)
    return Trace(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in rows},
        signals={signal: np.concatenate([part.signals[signal] for part in parts]) for signal in parts[0].signals},
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        estimates={
            estimator: np.concatenate([part.estimates[estimator] for part in parts]) for estimator in parts[0].estimates
        },
        macs_per_row=parts[0].macs_per_row,
        lens=parts[0].lens,
        lens_macs=parts[0].lens_macs,
        rules={rule: ConfidenceColumns.concatenate([part.rules[rule] for part in parts]) for rule in parts[0].rules},
        divergence_nats=np.concatenate([part.divergence() for part in parts]) if has_divergence else None,
        read_layers=parts[0].read_layers,
        sampled=None if (parts[0].sampled is None) else np.concatenate([part.sampled for part in parts]),
        documents=None if (parts[0].documents is None) else np.concatenate([part.documents for part in parts]),
    )


def readout_columns(logits: Tensor, target: Tensor, where: str, final_log_p: Tensor | None = None) -> dict[str, Tensor]:
    """``COLUMNS`` and ``LAYERWISE`` of logits [n, V] and the next tokens ``target`` [n], float32 or int32 [n] each.

    ``final_log_p`` [n, V]: of the last layer; then also ``DIVERGENCE_COLUMN`` from it.

    Raises:
        NotFinite: logits hold NaN; ``where`` names the place.
    """
    parts = [
        _block_columns(logits[rows], target[rows], None if final_log_p is None else final_log_p[rows])
        for rows in iterate_row_slices(logits)
    ]
    read = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    require_finite(read[ENTROPY.name], where)
    return read


def _block_columns(logits: Tensor, target: Tensor, final_log_p: Tensor | None) -> dict[str, Tensor]:
    readout = LogitsReadout(logits.float())
    signals = {name: signal.compute(readout) for name, signal in LAYERWISE.items()}
    log_p, best = readout.top2_log_probs_and_tokens
    nll = -readout.log_probs.gather(-1, target[:, None])[:, 0]
    read = dict(zip(COLUMNS, (nll, best[:, 0].int(), log_p[:, 0].exp()), strict=True)) | signals
    if final_log_p is not None:
        log_q = log_probabilities(logits) if logits.dtype == torch.float64 else readout.log_probs
        read[DIVERGENCE_COLUMN] = kl_from_log_probs(final_log_p, log_q).float()
    return read


def _trace_fields(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Fields of a trace from columns [tokens, L] as ``readout_columns`` names them."""
    return {**{name: columns[name] for name in COLUMNS}, "signals": {name: columns[name] for name in LAYERWISE}}


def _step_by_step(stepper: Stepper, tokens: Ints, start: int) -> Iterator[Tensor]:
    """Logits [L, V] after every layer of each position from ``start`` on, one position per forward, with a cache."""
    cache = stepper.new_cache(1, len(tokens))
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None].to(stepper.device)
    if start:
        inputs = stepper.prepare_forward(np.arange(start)[None], cache)
        stepper.run_layers(stepper.embed(ids[:, :start], inputs), 0, stepper.layers, inputs)
    for at in range(start, len(tokens)):
        inputs = stepper.prepare_forward(np.array([[at]]), cache)
        hidden, states = stepper.embed(ids[:, at : at + 1], inputs), []
        for layer in range(1, stepper.layers + 1):
            hidden = stepper.run_layers(hidden, layer - 1, layer, inputs)
            states.append(hidden[0])
        yield stepper.logits(torch.cat(states))


@torch.inference_mode()
def compute_stepwise_logits(stepper: Stepper, tokens: Ints, first: int) -> Floats:
    """Logits float64 [n − first, L, V] as ``compute_layer_logits``, but token by token; see ``trace_stepwise``."""
    return np.stack([to_numpy_float64(logits) for logits in _step_by_step(stepper, tokens, first)])


@torch.inference_mode()
def trace_stepwise(stepper: Stepper, sequence: TokenSequence) -> Trace:
    """The trace of one sequence, token by token with a cache, as in decoding with one row.

    For models with arithmetic that depends on the other tokens of the forward, such as dynamic quantisation with one
    scale per tensor, where decoding differs from one plain pass.
    """
    tokens, start = np.asarray(sequence.tokens, dtype=np.int64), sequence.first_decided
    targets = torch.from_numpy(tokens[start + 1 :]).to(stepper.device)
    rows = [
        readout_columns(logits, target.expand(len(logits)), f"{number} positions after the prompt")
        for number, (logits, target) in enumerate(zip(_step_by_step(stepper, tokens[:-1], start), targets, strict=True))
    ]
    decided = slice(start, len(tokens) - 1)
    return Trace(
        **_trace_fields({name: torch.stack([row[name] for row in rows]).cpu().numpy() for name in rows[0]}),
        token=tokens[decided],
        target=tokens[start + 1 :],
        position=np.arange(start, len(tokens) - 1),
        starts=np.array([0, len(rows)]),
        first_decided=np.array([start]),
        documents=np.array([sequence.document]),
    )


def iterate_states_after(
    stepper: Stepper, batch: Sequence[TokenSequence], layers: Sequence[int] | None = None
) -> Iterator[Tensor]:
    """States [tokens, D] of all decided positions of ``batch``, in order, after ``layers``, from one forward.

    ``layers``: ascending; None: 1 … L. Layers above the last of them are not run.
    """
    run, place = windows.deduplicate_inputs(batch)
    tokens, lengths = windows.padded_tokens_and_lengths(run)
    cache = make_source_cache_or_none(stepper, [sequence.source for sequence in run], tokens.shape[1])
    inputs = stepper.prepare_forward(np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), cache, lengths=lengths)
    hidden, below = stepper.embed(torch.from_numpy(tokens).to(stepper.device), inputs), 0
    row = np.repeat(place, [sequence.n_decided for sequence in batch])
    chosen = tuple(torch.from_numpy(index).to(stepper.device) for index in (row, windows.decided_positions(batch)))
    for layer in range(1, stepper.layers + 1) if layers is None else layers:
        hidden, below = stepper.run_layers(hidden, below, layer, inputs), layer
        yield hidden[chosen]


@dataclass(frozen=True, eq=False)
class StatesAndFinalReadout:
    """States [tokens, D] after every layer of a batch, and readouts of the last layer, which are equal for all lenses.

    ``log_p`` [tokens, V] of the last layer; ``columns`` [tokens] as ``readout_columns`` names them.
    """

    states: list[Tensor]
    log_p: Tensor
    columns: Mapping[str, NDArray[Any]]


@torch.inference_mode()
def compute_states_and_final_readout(stepper: Stepper, batch: Sequence[TokenSequence]) -> StatesAndFinalReadout:
    """Run one forward of ``batch`` and one head. It keeps states, of width D, in place of logits, of width V.

    Raises:
        NotFinite: the last layer's logits hold NaN.
    """
    states, target = list(iterate_states_after(stepper, batch)), target_tokens(stepper, batch)
    log_p, columns = [], []
    for rows in iterate_head_slices(stepper, len(target)):
        logits = stepper.logits(states[-1][rows])
        log_p.append(log_probabilities(logits))
        columns.append(readout_columns(logits, target[rows], f"after layer {stepper.layers}", log_p[-1]))
    joined = {name: torch.cat([each[name] for each in columns]).cpu().numpy() for name in columns[0]}
    return StatesAndFinalReadout(states, torch.cat(log_p), joined)


def target_tokens(stepper: Stepper, batch: Sequence[TokenSequence]) -> Tensor:
    """int64 [tokens] the token after every decided position."""
    return torch.from_numpy(np.concatenate([s.tokens[s.first_decided + 1 :] for s in batch])).to(stepper.device)


@torch.inference_mode()
def trace_batch(
    stepper: Stepper,
    batch: Sequence[TokenSequence],
    options: TraceOptions = PLAIN_TRACE,
    final: StatesAndFinalReadout | None = None,
) -> Trace:
    """The trace of one batch in one forward. ``final``: of this batch, if already read for its divergences.

    Raises:
        NotFinite: a layer's logits hold NaN.
        BadArgument: ``layers`` that the model lacks, or without one that a rule reads.
    """
    readers, observe = layers_and_reader_by_estimator(stepper, options.estimators), options.observe
    rules = {ConfidenceColumnsKey.from_point(point): point for point in options.rules}
    counts = np.array([sequence.n_decided for sequence in batch])
    target = target_tokens(stepper, batch)
    shape = (int(counts.sum()), stepper.layers)
    columns: dict[str, NDArray[Any]] = {
        name: np.full(shape, -1, dtype=np.int32) if name == "top1" else np.full(shape, np.nan, dtype=np.float32)
        for name in (*COLUMNS, *LAYERWISE, DIVERGENCE_COLUMN)
    }
    estimates = {estimator: np.full(shape, np.nan, dtype=np.float32) for estimator in readers}
    remembered: dict[int, Tensor] = {}
    compared, tuned = layers_read_by_rules(rules), get_attached_lens(stepper, options.lens)
    read, every = _layers_to_read(stepper.layers, options.layers, compared), options.sample_every
    sampled = None if read is None or every is None else _sample_positions(batch, every)
    sample = np.array([], dtype=np.int64) if sampled is None else np.flatnonzero(sampled)
    if options.divergence and final is None:
        final = compute_states_and_final_readout(stepper, batch)
    for layer, states in enumerate(iterate_states_after(stepper, batch) if final is None else final.states, start=1):
        if layer in compared:
            remembered[layer] = states
        whole = read is None or layer in read
        known = final if layer == stepper.layers else None
        asked = [
            (estimates[estimator][:, layer - 1], partial(reader.read, column=list(layers_asked).index(layer)))
            for estimator, (layers_asked, reader) in readers.items()
            if layer in layers_asked
        ]
        # if this loop does not read heads at every position, estimates are read separately
        for block in iterate_head_slices(stepper, len(target)) if not whole or known is not None else ():
            for column, read_estimate in asked:
                column[block] = read_estimate(states[block]).entropy_nats.float().cpu().numpy()
        if known is not None:
            for name, column in known.columns.items():
                columns[name][:, layer - 1] = column
        for block in () if known is not None else iterate_head_slices(stepper, len(target) if whole else len(sample)):
            rows = block if whole else sample[block]
            hidden = states[rows]
            logits = stepper.logits(hidden if tuned is None else tuned(hidden, layer))
            for column, read_estimate in asked if whole else ():
                reading = read_estimate(hidden, logits=logits if tuned is None else None)
                column[rows] = reading.entropy_nats.float().cpu().numpy()
            log_p = None if final is None else final.log_p[rows]
            for name, values in readout_columns(logits, target[rows], f"after layer {layer}", log_p).items():
                columns[name][rows, layer - 1] = values.cpu().numpy()
        if observe is not None and whole:
            observe(layer, states, torch.from_numpy(columns[ENTROPY.name][:, layer - 1]))
    trace = Trace(
        **_trace_fields(columns),
        token=np.concatenate([s.tokens[s.first_decided : -1] for s in batch]),
        target=target.cpu().numpy(),
        position=windows.decided_positions(batch),
        starts=np.concatenate([[0], np.cumsum(counts)]),
        first_decided=np.array([s.first_decided for s in batch]),
        estimates=estimates,
        macs_per_row={estimator: reader.macs_per_row for estimator, (_, reader) in readers.items()},
        rules={},
        lens=options.lens,
        lens_macs=None if tuned is None else lens_macs_by_layer(tuned, stepper.layers),
        divergence_nats=columns[DIVERGENCE_COLUMN] if options.divergence else None,
        read_layers=read,
        sampled=sampled,
        documents=np.array([s.document for s in batch]),
    )
    confidence = compute_columns_by_confidence_rule(stepper, rules, remembered, target, trace.nll_nats, trace.top1)
    return replace(trace, rules=confidence)


def _layers_to_read(total: int, layers: Sequence[int] | None, compared: Iterable[int]) -> tuple[int, ...] | None:
    """``layers`` and the last, ascending; None: every layer."""
    if layers is None:
        return None
    read = tuple(sorted({*layers, total}))
    if not 1 <= read[0] <= read[-1] <= total:
        raise BadArgument("layers", tuple(layers), f"layers in 1–{total} of this model")
    if lacking := sorted(set(compared) - set(read)):
        raise BadArgument("layers", tuple(layers), f"also layers {lacking}, which a rule reads")
    return read


def _sample_positions(batch: Sequence[TokenSequence], every: int) -> Bools:
    """bool [tokens] every ``every``-th position, with a different offset in each document."""
    documents = np.repeat([s.document for s in batch], [s.n_decided for s in batch])
    return (windows.decided_positions(batch) + documents) % every == 0


def iterate_head_slices(stepper: Stepper, rows: int) -> Iterator[slice]:
    """Slices of ``rows`` states with ``LOGITS_IN_CACHE`` logits each, read at a time."""
    at_once = max(FEWEST_TOKENS, LOGITS_IN_CACHE // stepper.vocabulary_size)
    return (slice(start, start + at_once) for start in range(0, rows, at_once))


def stream_traces(
    stepper: Stepper, sequences: Iterable[TokenSequence], options: TraceOptions = PLAIN_TRACE
) -> Iterator[Trace]:
    """Traces batch by batch, in constant memory for any length of the corpus."""
    for batch in windows.iterate_batches(sequences):
        yield trace_batch(stepper, batch, options)


def take_trace(
    stepper: Stepper,
    sequences: Iterable[TokenSequence],
    *,
    estimators: Mapping[EntropyEstimator, Sequence[int]] = NO_ESTIMATORS,
    observe: Observer | None = None,
    rules: Iterable[OperatingPoint] = (),
    lens: str | None = None,
    divergence: bool = False,
    layers: Sequence[int] | None = None,
    sample_every: int | None = None,
    progress: str | None = None,
    file: TextIO | None = None,
) -> Trace:
    """Take the lens trace of sequences: the model's readout after every layer under teacher forcing.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    sequences : iterable of TokenSequence
        The text; the whole trace is held in memory.
    estimators : mapping of EntropyEstimator to layers
        Estimates to record besides the full entropy, and their layers.
    observe : callable or None
        Called with (layer, states [tokens, D], entropy [tokens]) after every layer that is read at every position.
    rules : sequence of OperatingPoint
        Points whose confidence rules are recorded, each rule once for all thresholds. A rule takes more time than the
        plain columns, and four times [tokens, L] of memory.
    lens : str or None
        Digest of a tuned lens attached to ``stepper``, through which all but the last layer are read, for points with
        that lens (also among ``rules``). Estimates still read the states.
    divergence : bool
        Also record KL(p_L ‖ p_ℓ), nats: states after all layers, and the last layer's logits, of a batch in memory.
    layers : sequence of int or None
        Layers whose heads are read, besides the last; None: all. A large head costs as much as several blocks.
    sample_every : int or None
        With ``layers``: distance of positions at which all other heads are read too, for ``Trace.fully_read_trace``.
    progress : str or None
        Name of the progress bar; None shows none.
    file : TextIO or None
        Stream of the progress bar; None: stderr.

    Returns
    -------
    Trace
        float32 [tokens, L] columns over all decided positions.

    Raises
    ------
    EmptyCorpus
        No sequences.
    BadArgument
        A point without a confidence, or of another lens, among ``rules``; a lens not attached; ``layers`` beyond L.
    """
    options = TraceOptions(
        estimators=estimators,
        observe=observe,
        rules=tuple(rules),
        lens=lens,
        divergence=divergence,
        layers=None if layers is None else tuple(layers),
        sample_every=sample_every,
    )
    others = [point.name for point in options.rules if point.lens != lens]
    if others:
        expected = f"points with the lens {lens!r:.20} of this trace"
        raise BadArgument("rules", others, expected, "what a token emits is read through one lens or another")
    return trace_and_assemble_batches(
        sequences, lambda ordered: stream_traces(stepper, ordered, options), progress, file
    )


def trace_and_assemble_batches(
    sequences: Iterable[TokenSequence],
    traced: Callable[[list[TokenSequence]], Iterator[Trace]],
    progress: str | None = None,
    file: TextIO | None = None,
) -> Trace:
    """One trace of ``sequences`` in order; ``traced`` runs them batch by batch in another order. Bars need a terminal.

    Raises:
        EmptyCorpus: no sequences.
    """
    (trace,) = _assemble(sequences, lambda ordered: ((each,) for each in traced(ordered)), progress, file)
    return trace


def _assemble(
    sequences: Iterable[TokenSequence],
    traced: Callable[[list[TokenSequence]], Iterator[tuple[Trace, ...]]],
    progress: str | None,
    file: TextIO | None,
) -> tuple[Trace, ...]:
    """As ``trace_and_assemble_batches``, of several traces at once."""
    ordered = list(sequences)
    order = sorted(range(len(ordered)), key=lambda i: ordered[i].n_forward_tokens)  # by length, for less padding
    shown: dict[str, Any] = {"desc": progress, "disable": progress is None or None, "file": file}
    shown |= {"total": sum(each.n_decided for each in ordered), "unit": "tok", "unit_scale": True}
    back, batches = np.argsort(order), list[tuple[Trace, ...]]()
    with all_threads_for_batches(sum(each.n_forward_tokens for each in ordered)), tqdm(**shown) as bar:
        for batch in traced([ordered[i] for i in order]):
            batches.append(batch)
            bar.update(len(batch[0]))
    columns = list(zip(*batches, strict=True)) if batches else [()]
    return tuple(concatenate_traces(parts).reorder_sequences(back) for parts in columns)


def take_own_and_lens_traces(
    stepper: Stepper,
    sequences: Iterable[TokenSequence],
    lens: str,
    *,
    estimators: Mapping[EntropyEstimator, Sequence[int]] = NO_ESTIMATORS,
    layers: Sequence[int] | None = None,
    progress: str | None = None,
    file: TextIO | None = None,
) -> tuple[Trace, Trace]:
    """Two traces with divergences from one forward of each batch: by the model's own head, and through ``lens``.

    Equal to ``take_trace(divergence=True)`` without the lens, and with it and ``estimators``; arguments and exceptions
    as there. Both share the states and the head of the last layer.
    """

    def traced(ordered: list[TokenSequence]) -> Iterator[tuple[Trace, ...]]:
        plain = TraceOptions(divergence=True, layers=None if layers is None else tuple(layers))
        through_lens = replace(plain, estimators=estimators, lens=lens)
        for batch in windows.iterate_batches(ordered):
            final = compute_states_and_final_readout(stepper, batch)
            yield trace_batch(stepper, batch, plain, final), trace_batch(stepper, batch, through_lens, final)

    own, tuned = _assemble(sequences, traced, progress, file)
    return own, tuned


@torch.inference_mode()
def compute_layer_states(stepper: Stepper, sequences: Sequence[Ints], source: Ints | None = None) -> list[Tensor]:
    """States [rows, n, D] of ``sequences`` after every layer; n is the length of the longest.

    One plain pass without earlier K/V, the reference of every audit. Shorter rows are padded on the right, where no
    earlier position attends.
    """
    tokens = windows.pad_rows(sequences)
    rows, longest = tokens.shape
    cache = make_source_cache_or_none(stepper, [source] * rows, longest)
    inputs = stepper.prepare_forward(np.tile(np.arange(longest), (rows, 1)), cache)
    hidden, states = stepper.embed(torch.from_numpy(tokens).to(stepper.device), inputs), []
    for layer in range(1, stepper.layers + 1):
        hidden = stepper.run_layers(hidden, layer - 1, layer, inputs)
        states.append(hidden)
    return states


def compute_sequence_states(stepper: Stepper, tokens: Ints, first: int = 0, source: Ints | None = None) -> list[Tensor]:
    """States [n − first, D] of one sequence after every layer, from position ``first`` on: ``compute_layer_states``."""
    return [states[0, first:] for states in compute_layer_states(stepper, [tokens], source)]


@torch.inference_mode()
def compute_layer_logits(stepper: Stepper, tokens: Ints, first: int = 0, source: Ints | None = None) -> Floats:
    """Reference logits float64 [n − first, L, V] of ``compute_sequence_states``."""
    states = compute_sequence_states(stepper, tokens, first, source)
    return np.stack([to_numpy_float64(stepper.logits(hidden[None])[0]) for hidden in states], axis=1)
