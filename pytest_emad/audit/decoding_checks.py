"""Check decoding: decisions on given tokens, ``generate``, and agreement with replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import log_softmax

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import PROMPT, Floats, Ints, Record
from pytest_emad.audit.finding import MIN_DISCRIMINATING, AuditRefutedError, Finding, Tally, require_shape
from pytest_emad.audit.likely_cause import likely_stops
from pytest_emad.audit.reference_logits import PrefixCachingLens, ProbeReadoutWork, is_decided_by_full_heads, is_tied
from pytest_emad.audit.tolerances import TRACE_ROUNDING, max_log_prob_error
from pytest_emad.audit.trajectory import (
    WIDEST_FEED,
    CheckedSession,
    DecoderUnderTest,
    Judge,
    Trajectory,
    count_exit_eligible_positions,
    count_tokens_unlike_full_depth,
    make_feed_slices,
)
from pytest_emad.audit.work import require_counted_work

NO_STOP: frozenset[int] = frozenset()


# ---------------------------------------------------------------- decisions on given tokens


def check_decisions(under_test: DecoderUnderTest, prompts: Sequence[Prompt], continuations: Ints) -> Finding:
    """Check signals, depths, logits and work on ``prompts`` followed by ``continuations`` int64 [rows, n].

    Each row must read the lens' signal at its probes and no other, take the depth that the rule gives, show the logits
    that the rule emits there, and count the work that its decisions imply. First every row is fed alone, where the
    ledger is exact; then all together, which reveals rows that follow their neighbours. Discriminating positions have a
    probe below the cap; a point without probes needs none.
    """
    decoder, point = under_test.decoder, under_test.point
    judge = Judge.for_check(
        "decisions", under_test, MIN_DISCRIMINATING if point.has_adaptive_depth else 0, judges_work=True
    )
    judge = replace(judge, lens=PrefixCachingLens(under_test.lens, kept=len(prompts)))  # every history occurs twice
    with judge.tally:
        together = [list(range(len(prompts)))] if len(prompts) > 1 else []
        for chosen in (*([row] for row in range(len(prompts))), *together):
            require_session_run_matches_lens(judge, decoder, [prompts[row] for row in chosen], continuations[chosen])
    return judge.tally.to_finding()


def require_session_run_matches_lens(
    judge: Judge, decoder: Decoder, prompts: Sequence[Prompt], continuations: Ints
) -> None:
    """Require right answers of a session over ``prompts``, fed ``continuations`` int64 [rows, n] at the rule's depths.

    A row alone is fed token by token; several rows also in the widest allowed feeds.
    """
    widest = 1 if len(prompts) == 1 else decoder.capabilities.max_feed
    with CheckedSession(judge, decoder, prompts) as transcript:
        for columns in make_feed_slices(continuations.shape[1], widest):
            transcript.feed(continuations[:, columns])
        trajectories = transcript.build_trajectories()
        ahead = judge.with_lens_prefetch(trajectories)
        readouts = [ahead.require_trajectory_matches_lens(trajectory).readouts for trajectory in trajectories]
        judge.tally.discriminating += sum(count_exit_eligible_positions(each, judge.point) for each in trajectories)
        if judge.counted:
            require_counted_work(
                judge, transcript.session.work, trajectories, readouts, widest=min(widest, WIDEST_FEED)
            )


# ---------------------------------------------------------------- generate


def check_generation(
    under_test: DecoderUnderTest,
    prompts: Sequence[Prompt],
    max_new: int,
    *,
    needed: int = MIN_DISCRIMINATING,
) -> Finding:
    """Check greedy ``generate`` on all ``prompts`` together, on the first alone, and with a stop token.

    A decoder may be honest in ``feed`` and emit full-depth tokens in ``generate``, so the check judges its record
    separately. The last run's stop token is one that the first row emitted half-way, which tests stopping.
    Discriminating are tokens that are not full depth's argmax: if depth makes no difference the check has no power.
    """
    decoder, point = under_test.decoder, under_test.point
    judge = Judge.for_check("generation", under_test, needed if point.has_adaptive_depth else 0, judges_work=True)
    judge = replace(judge, lens=PrefixCachingLens(under_test.lens, kept=len(prompts)))  # most histories occur again
    with judge.tally:
        together = decoder.generate(prompts, max_new, NO_STOP)
        halfway = frozenset(together.emitted[0][len(together.emitted[0]) // 2 :][:1].tolist())
        require_record_matches_lens(judge, together, prompts, max_new)
        require_record_matches_lens(judge, decoder.generate(prompts[:1], max_new, NO_STOP), prompts[:1], max_new)
        require_record_matches_lens(judge, decoder.generate(prompts, max_new, halfway), prompts, max_new, halfway)
    return judge.tally.to_finding()


def require_record_matches_lens(
    judge: Judge,
    record: Record,
    prompts: Sequence[Prompt],
    max_new: int,
    stop: frozenset[int] = NO_STOP,
    *,
    rows: Collection[int] | None = None,
) -> None:
    """Require that a record of ``generate`` is complete, depths by the rule, tokens the argmax there, work as implied.

    ``rows``: those compared with the lens, for a batch of many; None: all. All other requirements, the ledger included,
    cover every row.

    Raises:
        BadArgument: only some rows of a point whose readouts the lens has to count.
    """
    point = judge.point
    trajectories = extract_trajectories(judge.tally, record, prompts, max_new, stop, point)
    judge.tally.count_new_tokens(record.emitted)
    looked_at = range(len(prompts)) if rows is None else rows
    if len(looked_at) < len(prompts) and not is_decided_by_full_heads(point):
        raise BadArgument("rows", sorted(looked_at), "None", f"what {point.name!r} reads is counted by the lens alone")
    readouts = [
        ProbeReadoutWork.from_point_with_full_heads(point, len(trajectory.depth)) for trajectory in trajectories
    ]
    judge = judge.with_lens_prefetch(trajectories[row] for row in looked_at)
    for row in looked_at:
        reference = judge.require_trajectory_matches_lens(trajectories[row])
        judge.require_tokens_are_argmax(trajectories[row], record.emitted[row], reference)
        judge.tally.discriminating += count_tokens_unlike_full_depth(reference, trajectories[row])
        readouts[row] = reference.readouts
    if judge.counted:
        require_record_work(judge, record, trajectories, readouts)


def extract_trajectories(
    tally: Tally,
    record: Record,
    prompts: Sequence[Prompt],
    max_new: int,
    stop: frozenset[int],
    point: OperatingPoint,
) -> list[Trajectory]:
    """One trajectory per prompt, after requiring that the record is complete and consistent with itself."""
    tally.require(
        len(record.emitted) == len(record.stop) == len(prompts),
        f"{len(record.emitted)} rows emitted and {len(record.stop)} stop reasons for {len(prompts)} prompts",
    )
    require_shape("record.signal", record.signal, (len(record.tokens), len(point.probes)))
    rows = []
    for row, (prompt, emitted, reason) in enumerate(zip(prompts, record.emitted, record.stop, strict=True)):
        first = next((at for at, token in enumerate(emitted) if int(token) in stop), None)
        length, why = (max_new, "length") if first is None else (first + 1, "stop token")
        emission, expected = f"{len(emitted)} tokens and {reason!r}", f"{length} tokens and {why!r}"
        if emission != expected:
            cause = likely_stops(np.asarray(emitted), stop, reason, max_new)
            complaint = f"row {row}: {emission}, but max_new={max_new} and the stop tokens give {expected}"
            raise AuditRefutedError(complaint, likely_cause=cause)
        rows.append(_row_trajectory(tally, record, row, prompt.tokens, emitted, point))
    return rows


def _row_trajectory(
    tally: Tally, record: Record, row: int, prompt: Ints, emitted: Ints, point: OperatingPoint
) -> Trajectory:
    """The tokens of one row as a trajectory: the prompt, then every emitted token but the last, each fed once."""
    table = record.tokens
    mine = table.kept_row_indices(row)
    history = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(emitted[:-1], dtype=np.int64)])
    first = len(prompt) - 1
    tally.require(
        np.array_equal(table.position[mine], np.arange(len(history))) and np.array_equal(table.token[mine], history),
        f"row {row}: the record's kept tokens are not the prompt followed by all emitted tokens but the last",
    )
    before, decided = mine[:first], mine[first:]
    tally.require(
        bool((table.phase[before] == PROMPT).all() and (table.depth[before] == point.ceiling).all()),
        f"row {row}: prompt positions before the last must be recorded in phase prompt at depth {point.ceiling}",
    )
    tally.require(
        bool((table.phase[decided] != PROMPT).all()),
        f"row {row}: the prompt's last position is a decoding step, not prompt",
    )
    trajectory = Trajectory(
        f"row {row}", history, first, table.depth[decided], record.signal[decided], np.ones(len(decided), dtype=bool)
    )
    claimed, allowed = table.cap[decided].tolist(), trajectory.caps(point).tolist()
    tally.require(claimed == allowed, f"row {row}: caps {claimed}, but the depths before them allow {allowed}")
    return trajectory


def require_record_work(
    judge: Judge, record: Record, trajectories: list[Trajectory], readouts: Sequence[ProbeReadoutWork]
) -> None:
    """Require that the record's work matches its decisions, and its prompt part the prompts."""
    tally, point = judge.tally, judge.point
    tally.require(
        record.work is not None and set(record.work) == {0},
        f"work of models {sorted(record.work or {})}, but a decoder that counts reports model 0",
    )
    assert record.work is not None
    require_counted_work(judge, record.work[0], trajectories, readouts)
    tally.require(
        record.prompt_work is not None and set(record.prompt_work) == {0},
        f"prompt_work of models {sorted(record.prompt_work or {})}, but a decoder that counts reports model 0",
    )
    assert record.prompt_work is not None
    spent, expected = record.prompt_work[0].tokens, sum(trajectory.first for trajectory in trajectories)
    deepest = np.where(np.arange(point.layers) < point.ceiling, expected, 0)
    is_consistent = np.array_equal(spent, deepest) if len(trajectories) == 1 else bool((spent >= deepest).all())
    tally.require(
        is_consistent, f"prompt_work.tokens per layer {spent.tolist()}, but the prompts imply {deepest.tolist()}"
    )


# ---------------------------------------------------------------- replay


@dataclass(frozen=True)
class ReplayedDocument:
    """Replay of one document of ``tokens`` int64 [n], whose positions before ``first_decided`` are prompt.

    One entry per decided position p = first_decided … n − 2: ``depth`` int64 [m], ``nll_nats`` float64 [m] of token p +
    1 at that depth, ``signal`` float64 [m, probes] at all probes. ``rows``: the threshold row of each, int64 [m], and
    other rows that the tolerance allows; (): all use the first. ``slopes()`` float64 [m]: how fast each signal moves
    by logits, at least 1; None: no faster than they.

    Raises:
        BadArgument: arrays that do not fit the document.
    """

    tokens: Ints
    depth: Ints
    nll_nats: Floats
    signal: Floats
    first_decided: int = 0
    rows: tuple[Ints, ...] = ()
    slopes: Callable[[], Floats] | None = None

    def __post_init__(self) -> None:
        decided_positions = len(self.tokens) - 1 - self.first_decided
        if decided_positions < 1:
            raise BadArgument("tokens", len(self.tokens), "a document with a token to predict after first_decided")
        named = [(name, getattr(self, name)) for name in ("depth", "nll_nats", "signal")]
        for name, array in [*named, *(("rows", one) for one in self.rows)]:
            if len(array) != decided_positions:
                raise BadArgument(name, array.shape, f"{decided_positions} entries, one per decided position")


def check_replay_agreement(
    decoder: Decoder,
    point: OperatingPoint,
    replayed: Sequence[ReplayedDocument],
    tolerance: float,
    *,
    needed: int = MIN_DISCRIMINATING,
    excuses_ties: bool = False,
) -> Finding:
    """Check that teacher-forced depths and NLL on ``replayed`` documents equal replay's.

    Only then replay's verdicts hold for the decoder. Each document is opened at its first decided position and fed its
    own tokens. ``tolerance`` in nats and logits, raised to the decoder's declared noise and to the precision of float32
    traces. An NLL may differ by twice as much (its logit and the normaliser). If a tie moved a depth, NLL is not
    compared. Discriminating positions have a probe below the cap. ``excuses_ties``: any number of them.
    """
    tally = Tally("bridge", needed if point.has_adaptive_depth else 0, excuses_ties)
    allowed = tally.tolerance_at_least_noise(max(tolerance, TRACE_ROUNDING), decoder.capabilities.logit_noise)
    judge = Judge(tally, None, point, allowed)  # replay replaces the lens
    with tally:
        for number, document in enumerate(replayed):
            opening = document.first_decided + 1
            with CheckedSession(
                judge, decoder, [Prompt(document.tokens[:opening])], [f"document {number}"]
            ) as transcript:
                for token in document.tokens[opening:-1]:
                    transcript.feed(np.array([[token]]))
                (trajectory,) = transcript.build_trajectories()
            tally.n += len(trajectory.depth)
            tally.discriminating += count_exit_eligible_positions(trajectory, point)
            of_signal = np.full(len(trajectory.depth), allowed)
            if document.slopes is not None and decoder.capabilities.logit_noise:
                of_signal *= document.slopes()
            judge.require_depths_follow_rule(trajectory, document.signal, document.rows, of_signal)
            _judge_replay(judge, trajectory, document, of_signal)
    return tally.to_finding()


def _judge_replay(judge: Judge, trajectory: Trajectory, document: ReplayedDocument, of_signal: Floats) -> None:
    """Compare depths with replay's up to the first threshold tie, and NLL at equal depths."""
    tally, point, rows = judge.tally, judge.point, document.rows or (np.zeros(len(document.depth), dtype=np.int64),)
    untied = ~np.logical_or.accumulate(is_tied(point, document.signal, rows, of_signal))
    same = trajectory.depth == document.depth
    if (untied & ~same).any():
        at = int(np.argmax(untied & ~same))
        complaint = f"replay gives depth {document.depth[at]}, with no tie at or before it"
        tally.require(False, f"{trajectory.describe_position(at)}: {complaint}")
    assert trajectory.logits is not None, "a transcript shows its logits"
    target = document.tokens[document.first_decided + 1 :]
    nll = -log_softmax(trajectory.logits, axis=-1)[np.arange(len(target)), target]
    with np.errstate(invalid="ignore"):  # a next token pruned by both has infinite loss in both
        off = np.where(same & (nll != document.nll_nats), np.abs(nll - document.nll_nats), 0.0)
    allowed = max_log_prob_error(point, judge.tolerance)
    at = int(np.argmax(~(off <= allowed)))
    tally.require(
        bool((off <= allowed).all()),
        f"{trajectory.describe_position(at)}: NLL off by {off[at]:.2g} nats from replay's, more than {allowed:g}",
    )
