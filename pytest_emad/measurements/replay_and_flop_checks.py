"""Checks of the decoder under test: whether replay predicts it, and whether the FLOPs it counts are executed.

A bridge teacher-forces the decoder on a few documents and compares its depths and losses with replay. FLOP evidence
is ``witnessed`` (matrix products were observed), ``timed`` (shallow tokens take less time) or ``claimed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from random import SystemRandom
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.flop_ledger import flops
from emad_ref.models.matmul_counter import MatmulCounter
from emad_ref.point import OperatingPoint, ThresholdBinSpec, truncated
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import READOUTS, Ints, Work
from emad_ref.replay.replay import replay_depths
from emad_ref.signals import SIGNALS
from pytest_emad.audit.decoding_checks import check_replay_agreement
from pytest_emad.audit.dimensions import REQUESTS
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.model_lens import replay_document
from pytest_emad.audit.request_cases import CaseBench
from pytest_emad.audit.threshold_comparisons import UNREACHED_THRESHOLD
from pytest_emad.audit.work import ObservedRequest, check_observed_work
from pytest_emad.benchmark.clock import WARM_UP, OwnSeconds, iterate_active_tracers, time_call, time_pairs
from pytest_emad.measurements.model_under_test import FixedEncoderInput, ModelUnderTest
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.speedup import estimate_total_speedup
from pytest_emad.statistics.units import ByPair

PROBED, PROBED_TOKENS = 12, 32
PROBING_QUANTILES = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005)
NEAR_TIES = 0.003  # share of positions within the tolerance of a threshold that is acceptable
BRIDGED = 3  # documents, of at most BRIDGED_TOKENS, for comparing replay with the decoder
BRIDGED_TOKENS = 64
SPOTS, SPOT_TOKENS = 6, 12  # sequences of each kind to check again, and their tokens: depth falls at once
LARGEST_NATS = float(np.finfo(np.float32).max)  # a threshold that every signal meets
NEVER_NATS = -1.0  # a threshold that no entropy meets


CASE_ROWS = max(map(int, REQUESTS["rows"].values))
POSITION_EDGES = (24, 100)  # rows of one batch lie on both sides
GAP_QUANTILE = 0.75


def _lower_ceiling(point: OperatingPoint, ceiling: int) -> OperatingPoint:
    """``point`` with the probes below ``ceiling``, its last layer."""
    probes = tuple(probe for probe in point.probes if probe < ceiling)
    thresholds = tuple(row[: len(probes)] for row in point.thresholds)
    return replace(point, name=f"{point.name} below {ceiling}", ceiling=ceiling, probes=probes, thresholds=thresholds)


class ReplayValidity:
    """Whether replay holds for the decoder under test, and points that probe a decoder."""

    def __init__(self, subject: ModelUnderTest):
        self.subject = subject
        self._checked: dict[OperatingPoint, Finding] = {}

    @cached_property
    def probing_point(self) -> OperatingPoint:
        """A point whose depth falls in many steps on this run's text: for invariants, not for quality.

        Thresholds are a quantile of the model's own entropies. At this quantile short documents use half the layers on
        average and rounding decides hardly any signal. Probes are shallow, where depth changes the emitted token.
        """
        short = [replace(s, tokens=s.tokens[:PROBED_TOKENS]) for s in self.subject.cut_windows("validate", PROBED)]
        layers = self.subject.stepper.layers
        probes = tuple(range(1, layers, max(1, layers // 6)))
        trace = take_trace(self.subject.stepper, short, layers=probes)
        entropy = trace.entropy_nats[:, np.array(probes, dtype=np.int64) - 1]
        candidates = []
        for quantile in PROBING_QUANTILES:
            thresholds = np.quantile(entropy, quantile, axis=0)
            # excludes layers with signals crowded at a low quantile (entropies near zero), which rounding decides
            crowded = (np.abs(entropy - thresholds) <= self.subject.tolerance).mean(axis=0) > NEAR_TIES
            thresholds = np.where(crowded, NEVER_NATS, thresholds)
            point = OperatingPoint("probing", "quantile", layers, layers, probes, (tuple(map(float, thresholds)),))
            near = float((np.abs(entropy - thresholds) <= self.subject.tolerance).any(axis=1).mean())
            away = abs(float(replay_depths(trace, point).mean()) - layers / 2)
            candidates.append((max(near, NEAR_TIES), away, quantile, point))
        return min(candidates)[-1]

    @cached_property
    def points_by_kind(self) -> dict[tuple[str, str], OperatingPoint]:
        """The operating point of each value of the dimensions ``point`` and ``ceiling`` (``audit.dimensions``).

        A ceiling below the last layer exists from three layers on.
        """
        probing, layers = self.probing_point, self.subject.stepper.layers
        below = max(2, 2 * layers // 3)
        rising = self._point_by_top2_gap(probing)
        unreached = ((UNREACHED_THRESHOLD["falls"],) * len(probing.probes),)
        bins = ThresholdBinSpec(("position",), position_edges=POSITION_EDGES)
        made = {
            "probing": probing,
            "watching": replace(probing, thresholds=unreached),
            "binned": replace(probing, bins=bins, thresholds=(*probing.thresholds, *unreached, *probing.thresholds)),
            "eager": replace(probing, schedule="free_eager"),
            "deferred": replace(probing, schedule="free_deferred"),
            "copying": replace(probing, schedule="copying"),
            "top2_gap": rising,
        }
        points = {("full", "L"): self.subject.full_depth_point}
        points |= {(kind, "L"): replace(point, name=kind) for kind, point in made.items()}
        if below < layers:
            points["truncated", "below"] = truncated(layers, below)
            points |= {(kind, "below"): _lower_ceiling(points[kind, "L"], below) for kind in made}
        return points

    @cached_property
    def case_bench(self) -> CaseBench:
        """Everything that decodes and judges cases of requests and sessions for the decoder under test."""
        subject = self.subject

        def own(point: OperatingPoint) -> Decoder:
            decoder = WalkedDecoder(subject.stepper, point, max_rows=CASE_ROWS)
            return decoder if subject.audit_source_ids is None else FixedEncoderInput(decoder, subject.audit_source_ids)

        def draw_texts(rng: np.random.Generator, lengths: Sequence[int]) -> list[Ints]:
            return [prompt.tokens.copy() for prompt in subject.draw_prompts_with_continuations(rng, lengths, 0)[0]]

        def open_decoder(point: OperatingPoint, *, seed: int = 0, **options: Any) -> AbstractContextManager[Decoder]:
            """A decoder that gets ``seed`` itself: the subject adds the run's."""
            return subject.open_decoder(point, seed=seed - subject.seed, **options)

        return CaseBench(
            open_decoder,
            own,
            subject.reference_lens,
            self.points_by_kind,
            draw_texts,
            subject.stepper.vocabulary_size,
            subject.audited_window_size,
            subject.tolerance,
            tuple(subject.special_tokens),
        )

    def _point_by_top2_gap(self, probing: OperatingPoint) -> OperatingPoint:
        """A point at the probes of ``probing`` that compares the two best probabilities, each at its upper quartile."""
        gap, lens = SIGNALS["top2_gap"].from_lens, self.subject.reference_lens
        assert gap is not None, "one readout shows it"
        texts = [each.tokens[:PROBED_TOKENS] for each in self.subject.cut_windows("validate", PROBED)]
        seen = [np.concatenate([gap(lens(text).after_layer(probe)) for text in texts]) for probe in probing.probes]
        thresholds = tuple(float(np.quantile(values, GAP_QUANTILE)) for values in seen)
        return replace(probing, signal="top2_gap", thresholds=(thresholds,))

    @cached_property
    def shallow_point(self) -> OperatingPoint:
        """A point at which every token exits after the first third of the layers, so that full-depth tokens show."""
        layers = self.subject.stepper.layers
        return OperatingPoint("shallow", "quantile", layers, layers, (max(1, layers // 3),), ((LARGEST_NATS,),))

    @cached_property
    def bridge_finding(self) -> Finding:
        return self.check_bridge(self.probing_point)

    def check_bridge(self, point: OperatingPoint) -> Finding:
        """Whether teacher-forced depths and losses of the decoder equal the replay of ``point``, on a few documents."""
        subject = self.subject
        whole = subject.cut_windows("evaluate", BRIDGED)[:BRIDGED]
        sequences = [replace(sequence, tokens=sequence.tokens[:BRIDGED_TOKENS]) for sequence in whole]
        replayed = [replay_document(subject.stepper, sequence, point, subject.tolerance) for sequence in sequences]
        with subject.open_decoder(point) as decoder:
            return check_replay_agreement(decoder, point, replayed, subject.tolerance)

    def spot_check_bridge(self, point: OperatingPoint, *sequences: Sequence[TokenSequence]) -> Finding:
        """The bridge at ``point`` on a few of each kind of ``sequences`` that a verdict replays.

        The operating system's entropy draws them and their first deciding token, once per point, so no seed predicts
        them. Ties are counted and excused, because the choice of the point does not avoid them.
        """
        if point not in self._checked:
            draw, subject = SystemRandom(), self.subject
            chosen = [
                _cut_sequence(draw, one) for kind in sequences for one in draw.sample(kind, min(SPOTS, len(kind)))
            ]
            replayed = [replay_document(subject.stepper, each, point, subject.tolerance) for each in chosen]
            with subject.open_decoder(point) as decoder:
                self._checked[point] = check_replay_agreement(
                    decoder, point, replayed, subject.tolerance, needed=0, excuses_ties=True
                )
        return self._checked[point]

    @property
    def absent_replay(self) -> Absent | None:
        """Why replay allows no conclusion about this decoder; None unless the bridge failed."""
        if self.bridge_finding.passed is not False:
            return None
        return Absent(f"replay does not predict this decoder: {self.bridge_finding.detail}", "premise")


def _cut_sequence(draw: SystemRandom, sequence: TokenSequence) -> TokenSequence:
    first, last = sequence.first_decided, len(sequence.tokens) - 1 - SPOT_TOKENS
    start = draw.randint(first, last) if first < last else first
    return replace(sequence, tokens=sequence.tokens[: start + SPOT_TOKENS + 1], first_decided=start)


SHORTEST, LONGEST = 6, 24  # tokens of an observed prompt, and new ones
ROWS = (1, 3, 2)  # rows of the observed requests: alone, and together
PAIRS, FED, OPENING = 16, 8, 8  # timed pairs, tokens fed in each, and of the prompt before them
SHOWN_SHARE, DENIED_SHARE = (
    0.5,
    0.2,
)  # share of the promised time that proves the saving, and share below which it is refuted
DEEP, SHALLOW = "full depth", "a quarter"


class FlopVerification:
    """Verification that the decoder under test executes the FLOPs that it counts.

    A quarter of the layers must take less time than all of them, by at least ``SHOWN_SHARE`` of what the skipped FLOPs
    promise. Less than ``DENIED_SHARE`` refutes a decoder that counts. Between them overhead may hide the saving, and
    the result is inconclusive. Observed requests have random lengths, so a decoder cannot recognise them.
    """

    def __init__(self, bridging: ReplayValidity):
        self._subject, self._bridging = bridging.subject, bridging

    @property
    def evidence_grade(self) -> str:
        """The value of ``study.FLOP_EVIDENCE`` for FLOP verdicts about this decoder."""
        if self.observed_finding.passed:
            return "witnessed"
        return "timed" if self._left_to_the_clock and self.timing_finding.passed else "claimed"

    @property
    def finding(self) -> Finding:
        """The finding that shows or refutes the count: observed, else timed."""
        return self.timing_finding if self._left_to_the_clock else self.observed_finding

    @property
    def _left_to_the_clock(self) -> bool:
        return self._subject.capabilities.counted and self.observed_finding.passed is None

    # ------------------------------------------------------------ watched

    @cached_property
    def observed_finding(self) -> Finding:
        """Observed matrix products against the record, at ``probing_point`` and at ``shallow_point``."""
        if not self._subject.capabilities.counted:
            return Finding(
                "witness", None, "the decoder does not count its work: nothing to hold what ran against", 0, 0
            )
        try:
            return check_observed_work(self._requests())
        except Unsupported as refusal:
            return Finding("witness", None, f"nothing was watched: {refusal}", 0, 0)
        except RuntimeError as error:  # some do not run under a dispatch mode; other audits run them
            return Finding("witness", None, f"it does not run while it is watched: {error}", 0, 0)

    def _requests(self) -> list[ObservedRequest]:
        rng = np.random.default_rng(self._subject.seed)
        longest = max(SHORTEST, min(LONGEST, self._subject.window_size // 2 - 1))
        requests = []
        for point in (self._bridging.probing_point, self._bridging.shallow_point):
            for rows in ROWS:
                length, new = rng.integers(SHORTEST, longest + 1, 2).tolist()
                with self._subject.open_decoder(point, max_rows=rows) as decoder:
                    requests.append(self._watched(decoder, self._subject.make_equal_prompts(rows, length), new))
        return requests

    def _watched(self, decoder: Decoder, prompts: list[Prompt], new: int) -> ObservedRequest:
        """Run observed requests. Raises RuntimeError if the decoder does not run under a dispatch mode."""
        models = [each.model for each in (self._subject.loaded, *self._subject.isolation.loaded_copies)]
        with MatmulCounter(*models) as executed:
            record = decoder.generate(prompts, new, frozenset())
            decoder.synchronize()
        assert record.work is not None, "a decoder that says it counts"
        return ObservedRequest(prompts, executed.rows_by_matrix(), record.work[0])

    # ------------------------------------------------------------ timed

    @cached_property
    def timing_finding(self) -> Finding:
        """Tokens forced to a quarter of the layers, timed beside the same tokens at full depth.

        Skipped under a tracer.
        """
        if active := list(iterate_active_tracers()):
            return Finding("witness by time", None, f"not timed beside {', '.join(active)}", 0, 0)
        try:
            ratio = self._speedup()
        except Unsupported as refusal:
            return Finding("witness by time", None, f"depths cannot be forced: {refusal}", 0, 0)
        return judge_speedup(ratio, self._share(), self._quarter)

    @property
    def _quarter(self) -> int:
        return max(1, self._subject.stepper.layers // 4)

    def _share(self) -> float:
        layers, geometry = self._subject.stepper.layers, self._subject.loaded.geometry
        shallow, deep = (
            flops(work_of_token_exiting_at_depth(depth, layers, OPENING + FED), geometry).total
            for depth in (self._quarter, layers)
        )
        return shallow / deep

    def _speedup(self) -> Estimate:
        subject, rng = self._subject, np.random.default_rng([self._subject.seed, PAIRS])
        tokens = rng.integers(0, subject.stepper.vocabulary_size, (WARM_UP + PAIRS, OPENING + FED))
        with subject.open_decoder(subject.full_depth_point) as decoder:

            def fed(depth: int, pair: int) -> OwnSeconds:
                return time_fed_tokens(decoder, tokens[pair], depth)

            arms = {DEEP: partial(fed, subject.stepper.layers), SHALLOW: partial(fed, self._quarter)}
            timings = time_pairs(arms, PAIRS, rng, synchronize=decoder.synchronize)
        return estimate_total_speedup(ByPair(timings.seconds[DEEP]), ByPair(timings.seconds[SHALLOW]))


def time_fed_tokens(decoder: Decoder, tokens: Ints, depth: int) -> OwnSeconds:
    """Seconds of a fresh session for all but the first ``OPENING`` of ``tokens``, one by one at ``depth``."""
    session, _ = decoder.start([Prompt(tokens[:OPENING])])

    def feed() -> None:
        for token in tokens[OPENING:]:
            session.feed(token[None, None], np.array([[depth]]))

    fed = time_call(feed, decoder.synchronize)
    session.close()
    return OwnSeconds(fed.seconds)


def work_of_token_exiting_at_depth(depth: int, layers: int, keys: int) -> Work:
    """Work of one token that attends to ``keys`` and exits after ``depth``, with its readout."""
    work = Work.none(layers)
    work.tokens[:depth], work.context[:depth] = 1, keys
    work.readout_rows[READOUTS.index("full"), depth - 1] = 1
    return work


def judge_speedup(speedup: Estimate, share: float, layers: int) -> Finding:
    """``speedup``: time at full depth over time at ``layers``, which execute ``share`` of the FLOPs."""
    took, low, high = 1 / speedup.value, 1 / speedup.high, 1 / speedup.low if speedup.low > 0 else np.inf
    text = (
        f"tokens forced to {layers} layers take {took:.2f} [{low:.2f}, {high:.2f}] of the time of full depth, and "
        f"execute {share:.2f} of its FLOPs ({speedup.n} pairs)"
    )
    finding = Finding("witness by time", None, text, speedup.n, 0)
    if low > 1 - DENIED_SHARE * (1 - share):
        return replace(finding, passed=False, detail=f"layers that are said to be left out cost as much: {text}")
    return replace(finding, passed=True) if high <= 1 - SHOWN_SHARE * (1 - share) else finding
