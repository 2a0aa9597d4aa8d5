"""Decode and judge cases of a covering array of sessions (``dimensions.SESSIONS``).

A case is one session: a start, feeds, refused depths, a drop, a rollback with other tokens after it, a commit, more
feeds. ``SessionScript`` draws all of it before the decoder is asked, so the reference decoder can follow the same
script where the lens does not know the states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from emad_ref.point import ScheduleName
from emad_ref.protocol import Capabilities, Decoder, Prompt, Session
from emad_ref.record import Ints
from emad_ref.schedule.schedules import SCHEDULES
from pytest_emad.audit.dimensions import Case
from pytest_emad.audit.finding import Tally
from pytest_emad.audit.request_cases import (
    APPROXIMATE,
    TEMPERATURES,
    CaseBench,
    History,
    OpenedDecoder,
    RequestCases,
    make_neighbours,
    make_sent_prompts,
    overwrite_arrays,
)
from pytest_emad.audit.token_comparison import require_reference_step
from pytest_emad.audit.trajectory import CheckedSession, Judge, Trajectory

AFTER = 3  # tokens fed after a rollback, a commit and a drop, if the window has room
SHORTEST_ROLLBACK, LONGEST_ROLLBACK = 1, 8
LONG_ROLLBACK = 17
FED_TEXT = 1 / 2  # share of sessions that are fed text, others random tokens
FED_PADDING = 1 / 16  # share of fed tokens with the usual id of padding
FORCED = ("falling", "ceiling")  # values of ``depths`` that the session obeys
LEFT_TO_THE_RULE = 1 / 4  # share of the feeds of a session with forced depths
SHORTEST_COMMIT = 3  # tokens at the end of a row that a commit of a part may leave out, at least
UNBOUNDED = 10**6


@dataclass(frozen=True)
class SessionScript:
    """Everything that a case does with a session, drawn before the decoder is asked.

    ``tokens`` int64 [rows, n]: fed in this order; ``after`` int64 [4, rows, ``AFTER``]: fed after the rollback, after
    the commit, after a rollback to what was committed, and at the end. ``widest``: tokens of a feed at most. ``seed``
    draws depths and lengths.
    """

    case: Case
    prompts: list[Prompt]
    tokens: Ints
    after: Ints
    widest: int
    seed: int

    def run(
        self, transcript: CheckedSession, history: History, window: int, act: Callable[[], None]
    ) -> list[Trajectory]:
        """Do all of it with an open session; returns its trajectories, also of tokens that a rollback forgot.

        ``act``: lets the neighbours act, half-way.
        """
        case, rng, forgotten = self.case, np.random.default_rng(self.seed), list[Trajectory]()
        halves = case["drop"] != "none" or case["neighbours"] != "none"
        middle = self.tokens.shape[1] // 2 if halves else self.tokens.shape[1]
        self._refuse(transcript, history, rng, case["depths"], window)
        self._feed(transcript, history, self.tokens[:, :middle], rng)
        if case["depths"] in ("falling", "above"):  # caps may have fallen below the ceiling
            self._refuse(transcript, history, rng, "above", window)
        act()
        if case["drop"] != "none":
            rows = len(transcript.rows)
            count = int(rng.integers(1, rows)) if case["drop"] == "some" else 0
            gone = rng.permutation(rows)[:count].tolist()
            if min(gone, default=0) == rows - count:  # the last ones: no row that stays gets another number
                gone = list(range(count))
            history.steps.append(f"drop rows {gone}")
            transcript.drop(*gone)
        self._feed(transcript, history, self.tokens[transcript.rows, middle:], rng)
        if case["rollback"] != "none":
            lengths = np.array([self._rolled_back(row, transcript, rng) for row in transcript.rows])
            forgotten += self._roll_back(transcript, history, lengths)
            self._feed(transcript, history, self.after[0][transcript.rows], rng, window)
        if case["commit"] != "none":
            held = transcript.session.length
            # a part may end before depths fell, so that a rollback to it needs deeper entries again
            most = max(SHORTEST_COMMIT, self.tokens.shape[1])
            kept = held if case["commit"] == "all" else np.maximum(1, held - rng.integers(0, most + 1, len(held)))
            history.steps.append(f"commit {kept.tolist()} of {held.tolist()} tokens")
            sent = kept.copy()
            transcript.commit(sent)
            self._count_on(transcript, sent)
            if case["commit"] == "all" or case["rollback"] != "none":
                self._feed(transcript, history, self.after[1][transcript.rows], rng, window)
            if case["commit"] == "some":
                forgotten += self._roll_back(transcript, history, kept)
                self._feed(transcript, history, self.after[2][transcript.rows], rng, window)
        if case["shown"] == "none":  # entries of tokens without logits show in the logits of later ones
            self._feed(transcript, history, self.after[3][transcript.rows], rng, window, shown="all")
        return [*forgotten, *transcript.build_trajectories()]

    def _roll_back(self, transcript: CheckedSession, history: History, lengths: Ints) -> list[Trajectory]:
        """Roll back to ``lengths`` [rows], which lowers no work; returns the trajectories up to now."""
        history.steps.append(f"rollback to {lengths.tolist()} tokens")
        forgotten, sent = transcript.build_trajectories(), lengths.copy()
        spent = _tokens_by_layer(transcript.session)
        transcript.rollback(sent)
        now = _tokens_by_layer(transcript.session)
        fell = f"rolling back: work fell from {spent} to {now} tokens per layer"
        transcript.tally.require(all(each >= before for before, each in zip(spent, now, strict=True)), fell)
        self._count_on(transcript, sent)
        return forgotten

    def _count_on(self, transcript: CheckedSession, lengths: Ints) -> None:
        """Count on in an array of lengths that the session got, as a caller does that uses it again."""
        if self.case["arrays"] == "overwritten":
            lengths += 1
            transcript.require_state("after the caller changed its array of lengths")

    def _rolled_back(self, row: int, transcript: CheckedSession, rng: np.random.Generator) -> int:
        held, prompt, kind = len(transcript.tokens[row]), len(self.prompts[row].tokens), self.case["rollback"]
        fed = held - prompt
        if kind == "1–8":
            least = SHORTEST_ROLLBACK if row == transcript.rows[0] else 0  # other rows may stay as they are
            return held - int(rng.integers(least, min(LONGEST_ROLLBACK, fed) + 1))
        if kind == "more than 16":
            return held - int(rng.integers(LONG_ROLLBACK, fed + 1))
        return int(rng.integers(1, prompt)) if kind == "into the prompt" and prompt > 1 else 1

    def _refuse(
        self, transcript: CheckedSession, history: History, rng: np.random.Generator, kind: str, window: int
    ) -> None:
        """Ask for depths of one row, outside 1 … cap ("above") or "rising", which the session must refuse.

        A feed has the case's width, as far as ``window`` reaches.
        """
        caps, rows = transcript.session.cap, len(transcript.rows)
        room = min(self.tokens.shape[1], self.widest, window - int(transcript.session.length.max()))
        width = min(max(1 if kind == "above" else 2, int(self.case["feed"])), room)
        if kind not in ("above", "rising") or width < (1 if kind == "above" else 2):
            return
        ceiling = transcript.point.ceiling
        fallen = np.flatnonzero(caps < ceiling)  # where a depth above the cap is one that the model has
        depth, row = np.repeat(caps[:, None], width, axis=1), int(rng.choice(fallen if len(fallen) else rows))
        if kind == "above":
            depth[row] = (caps[row] + 1, caps[row] + 1, ceiling + 1, 0)[int(rng.integers(2 if len(fallen) else 4))]
        else:
            rises = int(rng.integers(1, width))
            lower = max(1, caps[row] - 1)
            depth[row, :rises], depth[row, rises:] = lower, lower + 1  # a cap of 1 cannot rise within itself
        history.steps.append(
            f"feed {rows} × {width} tokens at inadmissible depths {depth[row].tolist()} of row {row}, whose cap is "
            f"{caps[row]}"
        )
        transcript.require_inadmissible_depth_refused(np.array(self.tokens[:, :width]), depth)

    def _feed(
        self,
        transcript: CheckedSession,
        history: History,
        tokens: Ints,
        rng: np.random.Generator,
        window: int = UNBOUNDED,
        shown: str | None = None,
    ) -> None:
        """Feed ``tokens`` [rows, n] in feeds of the case's width, at its depths, as far as ``window`` reaches."""
        room, shown = window - int(transcript.session.length.max()), shown or self.case["shown"]
        tokens, width = tokens[:, : max(0, room)], min(int(self.case["feed"]), self.widest)
        if not tokens.shape[1]:
            return
        history.steps.append(
            f"feed {tokens.shape[1]} tokens to each of {len(tokens)} rows, {width} at once"
            + (f", forced depths {self.case['depths']}" if self.case["depths"] in FORCED else "")
            + (f", logits of {shown}" if shown != "all" else "")
        )
        transcript.stage = f"step {len(history.steps)}"
        for first in range(0, tokens.shape[1], width):
            fed = self._sent(tokens[:, first : first + width])
            depth = self._depths(transcript.point.schedule, transcript.session.cap, fed.shape[1], rng)
            depth = None if depth is None else self._sent(depth)
            last = {"all": None, "last": 1, "none": 0}[shown]
            transcript.feed(fed, depth, last)
            overwrite_arrays(self.case, [fed] if depth is None else [fed, depth])
            if self.case["arrays"] == "overwritten":
                transcript.require_state("after the caller wrote over its arrays")

    def _sent(self, array: Ints) -> Ints:
        """``array`` [rows, n] as the case's caller passes it: every second column of a larger one, if "strided"."""
        if self.case["prompt"] != "strided":
            return np.array(array)
        apart: Ints = np.stack([array, array[::-1, ::-1]], axis=-1).reshape(len(array), -1)[:, ::2]
        return apart

    def _depths(self, schedule: ScheduleName, cap: Ints, n: int, rng: np.random.Generator) -> Ints | None:
        kind = self.case["depths"]
        if kind not in FORCED or rng.random() < LEFT_TO_THE_RULE:
            return None
        if kind == "ceiling":
            return np.repeat(cap[:, None], n, axis=1)
        # slowly where depth never rises again, so that several depths are held for some tokens
        falls = rng.random((len(cap), n)) < (1 / 8 if SCHEDULES[schedule].never_rises else 1 / 2)
        depth: Ints = np.maximum(1, cap[:, None] - np.cumsum(falls, axis=1))
        return depth


def _tokens_by_layer(session: Session) -> list[int]:
    """Tokens that each layer ran; none for a decoder that does not count."""
    return [] if session.work is None else session.work.tokens.tolist()


class SessionCases:
    """Decodes cases of sessions and judges them."""

    def __init__(self, bench: CaseBench, tally: Tally, capabilities: Capabilities):
        self.bench, self.tally, self._widest = bench, tally, capabilities.max_feed

    def draw_script(self, case: Case, rng: np.random.Generator) -> SessionScript:
        """Draw everything that ``case`` does."""
        new, rows = int(case["new"]), int(case["rows"])
        prompts = self.bench.draw_prompts(case, rng, new)
        tokens = rng.integers(0, self.bench.vocabulary, (rows, new))
        if new and rng.random() < FED_TEXT:  # where the rule lets tokens exit that no depth is forced for
            tokens = np.stack(self.bench.draw_texts(rng, [new] * rows))
        tokens[rng.random(tokens.shape) < FED_PADDING] = 0
        after = rng.integers(0, self.bench.vocabulary, (4, rows, AFTER))
        return SessionScript(case, prompts, tokens, after, self._widest, int(rng.integers(2**32)))

    def decode(self, history: History, seed: int) -> None:
        """Decode the case of ``history`` with numbers drawn by ``seed``.

        Raises:
            Unsupported: the decoder declines a part of it.
            AuditRefutedError: an answer breaks the protocol's contract.
        """
        rng, case, bench = np.random.default_rng(seed), history.case, self.bench
        point, script = bench.point_of(case), self.draw_script(case, np.random.default_rng(seed))
        temperature = TEMPERATURES[case["temperature"]]
        history.steps.append(f"open {point.name}" + (f", temperature {temperature:g}" if temperature else ""))
        sampled = {"temperature": temperature} if temperature else {}
        with (
            bench.open_decoder(point, max_rows=bench.draw_most_rows(len(script.prompts), rng), **sampled) as decoder,
            make_neighbours(
                bench, self.tally, history, OpenedDecoder(decoder, point, temperature), script.prompts, rng
            ) as act,
        ):
            if case["prompt"] in ("equal", "prefix"):
                longest = max(script.prompts, key=lambda prompt: len(prompt.tokens))
                session, _ = decoder.start([longest])
                session.close()
            judge = bench.make_judge(self.tally, decoder, point)
            trajectories = self._run(script, judge, decoder, history, act)
        if point.schedule in APPROXIMATE:
            uncounted = bench.make_judge(Tally(self.tally.check), decoder, point)
            theirs = self._run(script, uncounted, bench.own(point), History(case), lambda: None)
            history.pairs += [(judge, *pair) for pair in zip(trajectories, theirs, strict=True)]
        else:
            history.trajectories += [(judge, trajectory) for trajectory in trajectories]

    def _run(
        self, script: SessionScript, judge: Judge, decoder: Decoder, history: History, act: Callable[[], None]
    ) -> list[Trajectory]:
        sent = make_sent_prompts(script.case, script.prompts)
        lengths = [len(prompt.tokens) for prompt in sent]
        history.steps.append(f"start a session over prompts of {lengths} tokens")
        history.requests.append({"call": "session", "prompts": [prompt.tokens.tolist() for prompt in sent],
                                 "fed": script.tokens.tolist()})  # fmt: skip
        with CheckedSession(judge, decoder, sent) as transcript:
            overwrite_arrays(script.case, (prompt.tokens for prompt in sent))
            return script.run(transcript, history, self.bench.window, act)

    def judge(self, history: History) -> None:
        """Judge every position of ``history``.

        Raises:
            AuditRefutedError: the first complaint.
        """
        RequestCases(self.bench, self.tally).judge(history)  # also of the answers of its neighbours
        for judge, found, wanted in history.pairs:
            require_same_trajectory(judge, found, wanted)


def require_same_trajectory(judge: Judge, found: Trajectory, wanted: Trajectory) -> None:
    """Require the depths and logits of ``wanted``, the reference decoder's, up to the first tie of a depth."""
    shown = iter(() if found.logits is None else found.logits)
    theirs = iter(() if wanted.logits is None else wanted.logits)
    for at in range(len(wanted.depth)):
        is_shown = found.shown is None or bool(found.shown[at])
        logits, reference = (next(shown), next(theirs)) if is_shown else (None, np.zeros(0))
        where, own = found.describe_position(at), (int(wanted.depth[at]), reference)
        if not require_reference_step(judge, where, wanted.signal[: at + 1], own, int(found.depth[at]), logits):
            return
