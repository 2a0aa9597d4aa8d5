"""Learned exit of a model: read from a file or screened in this run, then evaluated, timed and ablated part by part.

Savings and losses use the run's evaluation split, which no fit or choice has used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from emad_ref.absent import Absent
from emad_ref.calibration.profile import profile_of
from emad_ref.calibration.trace import EmptyCorpus, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, DraftingDecoder
from emad_ref.decoding.teacher_forcing import TeacherForcedText
from emad_ref.errors import BadArgument
from emad_ref.models.generation import Generate, absent_drafting, make_transformers_generate
from emad_ref.point import OperatingPoint
from emad_ref.record import VERIFY, Floats
from emad_ref.replay.grids import evenly_spaced_points
from emad_ref.replay.losses import CostColumn, Losses, PointLoss, losses_of_texts, teacher_force_at_point
from pytest_emad.audit.finding import Finding
from pytest_emad.measurements.latency import (
    ADAPTIVE,
    FULL,
    SWEEP_PAIRS,
    Arm,
    LatencyBenchmark,
    RequestBatchesByPair,
    TimingResult,
    extra_batch_sizes,
    get_decoding_record,
    time_arms,
)
from pytest_emad.measurements.replay_and_flop_checks import ReplayValidity
from pytest_emad.measurements.traces import LensTraces
from pytest_emad.screening.drafts import ASSISTED, find_assistant_model, make_drafting_ablations, make_drafting_generate
from pytest_emad.screening.exit import Exit, load_exit
from pytest_emad.screening.exit_families import (
    OWN_HEAD,
    TUNED_LENS,
    ExitFamily,
    free_depth_families,
    published_families,
    tuned_lens_families,
)
from pytest_emad.screening.guarantee import excess_loss
from pytest_emad.screening.phases import PhaseRunner
from pytest_emad.screening.screen import screen
from pytest_emad.screening.selection import PointSelector, replay_losses_on_split
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.traces import ScreeningText, TextTracesByReadout, TooLittleText, take_text_traces_by_readout
from pytest_emad.statistics.units import ByDocument
from pytest_emad.sweep.components import (
    PUBLISHED,
    SingleReadoutTraces,
    TunedCombination,
    exchange_each_component,
    restrict_trace_gate_to_probes,
)
from pytest_emad.sweep.oracle_savings import FREE_DEPTH, RISE_LEVELS, oracle_losses, oracle_name

OPTION = "--emad-exit"
# documents per split for finding an exit, by budget; recommendations need 200 of full length
DOCUMENTS = {"smoke": 240, "standard": 300, "full": 600}
SETTINGS = 8  # settings of each sweep, spaced evenly by savings
REPLAYED = ("monotone", "free_eager", "free_deferred")  # schedules that a trace can replay
JUDGED = 0.01  # rise of perplexity at which oracle headroom is reported


class ExitEvaluation:
    """Evaluation of a learned exit and of oracles on this run's evaluation split.

    An exit is judged with the reference decoder, and K and V filled by its point's schedule. Another decoder is judged
    only if it opens the point and replay holds for it there: a point names its lens, which cannot be sent over the
    wire.

    Raises:
        BadArgument: the exit's file belongs to another model.
        Unsupported: an encoder-decoder model.
    """

    def __init__(self, traces: LensTraces, validity: ReplayValidity):
        self._traces, self._validity, self.subject = traces, validity, traces.subject

    # ------------------------------------------------------------ the exit

    @property
    def exit(self) -> Exit:
        """The exit, attached to the judge's model, from which decoders' copies take it."""
        assert not isinstance(self.exit_if_any, Absent), "the caller checks ``exit_if_any``"
        return self.exit_if_any

    @cached_property
    def exit_if_any(self) -> Exit | Absent:
        """The exit that was brought, or else the one that a screening finds."""
        subject, path = self.subject, self.subject.study.exit
        if path is not None:
            return self._brought(path)
        documents, seed = DOCUMENTS[subject.budget.name], subject.seed
        settings = ScreeningSettings(
            corpus=subject.corpus, data=subject.data, seed=seed, corpus_group=subject.corpus_group
        )
        settings = settings.for_model(subject.loaded.geometry, documents)
        try:
            return screen(subject.loaded, settings, PhaseRunner(progress=True)).attach(subject.loaded)
        except (TooLittleText, EmptyCorpus) as error:
            return Absent(f"no exit was brought ({OPTION} FILE), and none can be found here: {error}")

    def _brought(self, path: Path) -> Exit:
        loaded = self.subject.loaded
        loaded_exit = load_exit(path)
        if loaded_exit.fingerprint != loaded.fingerprint:
            expected = f"an exit of {loaded.name} ({loaded.fingerprint[:12]}…)"
            theirs = f"that one is of a model {loaded_exit.fingerprint[:12]}…: emad screen {loaded.name}"
            raise BadArgument(OPTION, str(path), expected, theirs)
        return loaded_exit.attach(loaded)

    @property
    def recommended_point(self) -> OperatingPoint | Absent:
        """The lossy point that screening recommends, or why it recommends none."""
        return self.exit.lossy

    @property
    def exact_kv_point(self) -> OperatingPoint | Absent:
        """``recommended_point`` with exact K and V above exits, for audits against the model."""
        point = self.recommended_point
        if isinstance(point, Absent) or point.schedule in REPLAYED:
            return point
        return replace(point, name=f"{point.name}, exact K and V", schedule=FREE_DEPTH, translators=None)

    @cached_property
    def absent_for_decoder(self) -> Absent | None:
        """Why the exit allows no conclusion about the decoder under test; None if it does.

        Raises:
            Unsupported: the decoder declines the exit's point.
        """
        point = self.recommended_point
        if isinstance(point, Absent) or self.subject.has_reference_decoder:
            return None
        with self.subject.open_decoder(point):
            pass  # raises if the decoder declines
        if point.schedule not in REPLAYED:
            return Absent(f"under the schedule {point.schedule} replay predicts only the reference decoder", "premise")
        finding = self._validity.check_bridge(point)
        if finding.passed is not False:
            return None
        return Absent(f"replay does not predict this decoder: {finding.detail}", "premise")

    @cached_property
    def evaluation_traces(self) -> TextTracesByReadout:
        """Traces of the evaluation split through the model's own head and the exit's lens, with divergences."""
        return self._read(self._traces.evaluation_windows, "evaluate")

    @cached_property
    def validation_traces(self) -> TextTracesByReadout:
        """The same traces of the validation split."""
        return self._read(self.subject.cut_windows("validate", self.subject.budget.validate), "validate")

    @cached_property
    def _layers_read(self) -> tuple[int, ...] | None:
        """Layers of the run's traces and of the exit's lens; None: every layer."""
        layers = self._traces.layers_read
        return None if layers is None else tuple(sorted({*layers, *self.exit.fitted.lens.translators}))

    def _read(self, sequences: Sequence[TokenSequence], split: str) -> TextTracesByReadout:
        return take_text_traces_by_readout(
            self.subject.stepper,
            ScreeningText(tuple(sequences)),
            self.exit.fitted,
            self._layers_read,
            progress=f"{self.subject.name}: {split}, {self.subject.corpus}, own head and lens",
            file=self.subject.get_progress_stream(),
        )

    @cached_property
    def full_depth_loss(self) -> PointLoss:
        """Full depth on the evaluated documents."""
        return replay_losses_on_split(self.evaluation_traces, [], self.subject.loaded.geometry)[0]

    @cached_property
    def recommended_point_loss(self) -> PointLoss | Absent:
        """Losses of the exit's own point as it decodes, everything charged."""
        if isinstance(self.recommended_point, Absent):
            return self.recommended_point
        stepper, geometry = self.subject.stepper, self.subject.loaded.geometry
        mine = losses_of_texts(stepper, geometry, self._traces.evaluation_windows, self.recommended_point, self._fed)
        return self.full_depth_loss.table.join(mine)[1]

    @cached_property
    def _fed(self) -> list[TeacherForcedText]:
        """The evaluated texts, decoded at the exit's point."""
        assert not isinstance(self.recommended_point, Absent), "an exit with a point"
        named = f"{self.subject.name}: decoding at {self.recommended_point.name}"
        return teacher_force_at_point(
            self.subject.stepper, self._traces.evaluation_windows, self.recommended_point, progress=named
        )

    @property
    def excess_nll_by_document(self) -> ByDocument:
        """NLL added by the exit's point [documents], nats per token, as in its guarantee.

        Each window counts with as many tokens as the windows of calibration had.
        """
        longest = self.exit.screened["window"]
        full = np.split(
            self.evaluation_traces.own.nll_nats[:, -1].astype(np.float64), self.evaluation_traces.own.starts[1:-1]
        )
        counted = [max(0, longest - 1 - each.first_decided) for each in self._traces.evaluation_windows]
        added, whole = (
            self._by(np.array([each[:n].sum() for each, n in zip(nll_nats, counted, strict=True)]))
            for nll_nats in ([text.nll_nats for text in self._fed], full)
        )
        tokens = self._by(np.array([len(each[:n]) for each, n in zip(full, counted, strict=True)], dtype=np.float64))
        excess = excess_loss(added.with_values(added.values[:, None]), whole, tokens)
        return excess.with_values(excess.values[:, 0])

    @cached_property
    def criterion_losses(self) -> list[PointLoss]:
        """Losses of every screened family at settings spaced evenly by savings on validation."""
        points = [
            replace(point, name=f"{family.readout}, {family.name}, {family.depth}, {point.name}")
            for family in self._families
            for point in self._spaced(family)
        ]
        return list(replay_losses_on_split(self.evaluation_traces, points, self.subject.loaded.geometry))[1:]

    @property
    def _families(self) -> list[ExitFamily]:
        fitted, vocabulary, layers = self.exit.fitted, self.subject.stepper.vocabulary_size, self.subject.stepper.layers
        own = published_families(self._traces.profile, vocabulary, self._layers_read)
        own += free_depth_families(layers, vocabulary, self._layers_read)
        return own + ([] if fitted.gate is None else tuned_lens_families(fitted, vocabulary))

    def _spaced(self, family: ExitFamily) -> list[OperatingPoint]:
        along = (evenly_spaced_points(dial, self.point_selector.net_saving, SETTINGS) for dial in family.dials)
        return [*family.points, *(point for points in along for point in points)]

    @cached_property
    def point_selector(self) -> PointSelector:
        return PointSelector(
            self.validation_traces, self.evaluation_traces.text.n_documents, self.subject.loaded.geometry
        )

    # ------------------------------------------------------------ ceilings

    @cached_property
    def oracle_losses(self) -> dict[str, Losses]:
        """Losses of oracles by readout and name: tuned lens before own head, free depth before monotone."""
        geometry, traces = self.subject.loaded.geometry, self.evaluation_traces
        return {
            f"{readout}, {oracle_name('threshold', monotone)}": oracle_losses(trace, geometry, monotone=monotone)
            for readout, trace in (("tuned lens", traces.tuned), ("own head", traces.own))
            for monotone in (False, True)
        }

    @staticmethod
    def choose_oracle_setting(losses: Losses, level: float, cost: CostColumn) -> PointLoss:
        """The setting that costs least at a rise of at most ``level``; full depth if no other stays within."""
        best = losses.choose(cost, losses.rises <= level)
        assert not isinstance(best, Absent), "full depth is within every level"
        return best

    @property
    def oracle_saving_bound(self) -> float:
        """Upper bound: the largest net share of FLOPs that an oracle with free readouts saves at ``JUDGED``."""
        every = self.oracle_losses.values()
        return max(self.choose_oracle_setting(losses, JUDGED, "flops").net_reduction for losses in every)

    @property
    def perplexity_rise_levels(self) -> tuple[float, ...]:
        """Rises of perplexity at which oracles are reported, ``JUDGED`` first."""
        return tuple(sorted(RISE_LEVELS, key=lambda level: (level != JUDGED, level)))

    def _by(self, values: Floats) -> ByDocument:
        return self._traces.sum_by_document(values)


class SelfSpeculationTiming:
    """Latency of the exit's lossless mode: the reference decoder drafts with it and verifies at full depth.

    Batch size 1 decides, with all pairs of the budget. Larger batches, and other lossless arms at batch size 1, do not
    decide and have ``SWEEP_PAIRS`` pairs.
    """

    def __init__(self, evaluation: ExitEvaluation, latency: LatencyBenchmark):
        self._exit, self._latency, self._subject = evaluation.exit, latency, evaluation.subject
        self._few = min(SWEEP_PAIRS, self._subject.budget.pairs)

    @property
    def drafting(self) -> Drafting | None:
        """The self-speculation setting; None if the exit predicts no gain."""
        return self._exit.drafting

    @cached_property
    def timings_by_batch_size(self) -> dict[int, TimingResult]:
        """Batch size → arms ``full``, ``adaptive`` (drafting), and the baselines."""
        latency, budget = self._latency, self._subject.budget
        time_requests, alone = partial(time_self_speculation, drafting=self._drafting), min(budget.batch_sizes)
        larger = sorted({*budget.batch_sizes, *extra_batch_sizes(budget)} - {alone})
        decisive = latency.run_timing_by_batch_size(time_requests, requests={alone: latency.make_requests(alone)})
        return decisive | {
            rows: time_requests(latency, rows, latency.make_requests(rows, self._few)) for rows in larger
        }

    @cached_property
    def lossless_arm_timings(self) -> TimingResult:
        """At batch size 1: arms ``adaptive`` and each other lossless arm that runs here."""
        loaded, new = self._subject.loaded, self._latency.request_shape[1]
        ways = {ADAPTIVE: make_drafting_generate(loaded, self._drafting)}
        ways |= make_drafting_ablations(loaded, self._drafting)
        assistant = None if absent_drafting(loaded.model) else find_assistant_model(loaded)
        if assistant is not None:
            ways[ASSISTED] = make_transformers_generate(loaded.model, loaded.stepper.device, assistant=assistant.model)

        def one_row(way: Generate) -> Arm:
            return lambda prompts: way(prompts[0], new)[None]

        own = WalkedDecoder(self._subject.stepper, self._subject.full_depth_point)
        arms = {name: one_row(way) for name, way in ways.items()}
        return time_arms(arms, self._latency.make_requests(1, self._few), own.synchronize)

    @property
    def _drafting(self) -> Drafting:
        assert self.drafting is not None, "the caller checks ``drafting``"
        return self.drafting

    def check_outputs(self, rows: int) -> Finding:
        """Check that every arm emitted the model's own full-depth tokens in the audited requests."""
        full = {FULL: self._subject.full_depth_point}
        finding = self._latency.check_outputs(self.timings_by_batch_size[rows], full)
        if rows != min(self.timings_by_batch_size) or finding.passed is False:
            return finding
        others = self._latency.check_outputs(self.lossless_arm_timings, full)
        return others if others.passed is False else finding

    def compute_accepted_share(self, rows: int) -> float:
        """Share of accepted tokens among verified ones in the audited requests; 1 if no draft was rejected."""
        tokens = [
            get_decoding_record(each).tokens for each in self.timings_by_batch_size[rows].audited_decodings(ADAPTIVE)
        ]
        verified = np.concatenate([each.kept[each.phase == VERIFY] for each in tokens])
        return float(verified.mean()) if len(verified) else 1.0  # with many rows the decoder may not draft


def time_self_speculation(
    latency: LatencyBenchmark, rows: int, requests: RequestBatchesByPair, *, drafting: Drafting
) -> TimingResult:
    """Time full depth, drafting and the baselines in this process."""
    subject, new = latency.subject, latency.request_shape[1]
    drafter = DraftingDecoder(subject.stepper, drafting, max_rows=rows)
    full = WalkedDecoder(subject.stepper, subject.full_depth_point, max_rows=rows)
    arms: dict[str, Arm] = {
        FULL: lambda prompts: full.generate(prompts, new, frozenset()),
        ADAPTIVE: lambda prompts: drafter.generate(prompts, new, frozenset()),
        **latency.make_baseline_arms(rows),
    }
    return time_arms(arms, requests, full.synchronize)


# (part, losses before, losses after exchanging only it)
ComponentExchange = tuple[str, PointLoss, PointLoss]


def iterate_method_component_exchanges(evaluation: ExitEvaluation, traces: LensTraces) -> Iterator[ComponentExchange]:
    """Ablation of EMAD: the published method against versions with one component exchanged (``sweep.components``).

    If two components fail together, neither exchange alone saves work. So each component of EMAD is exchanged alone,
    and each component of the best combination for EMAD's; then the exit's K/V for exact ones. Work is FLOPs.
    """
    geometry = traces.subject.loaded.geometry
    own = SingleReadoutTraces(
        OWN_HEAD, evaluation.validation_traces.own, evaluation.evaluation_traces.own, traces.profile
    )
    for each in exchange_each_component(own, _through_lens(evaluation, traces), geometry, level=JUDGED):
        before, after = (_named_combination_loss(one) for one in (each.before, each.after))
        if each.back:  # reported as a gain, like all others
            yield f"{each.part}, all others exchanged", after, before
        else:
            among = "alone" if each.before.way == PUBLISHED else "in place of the best combination's"
            yield f"{each.part} {among}", before, after
    exact, chosen = evaluation.exact_kv_point, evaluation.recommended_point_loss
    if isinstance(exact, Absent) or isinstance(chosen, Absent):
        return
    if exact is not evaluation.recommended_point:
        replayed = replay_losses_on_split(evaluation.evaluation_traces, [exact], geometry)[1]
        yield "K/V", chosen, replayed.named(f"the exit, {exact.name}")


def _through_lens(evaluation: ExitEvaluation, traces: LensTraces) -> SingleReadoutTraces:
    """Parts with the exit's lens and gate, and EMAD's profile of the same calibration text and probes."""
    fitted, subject = evaluation.exit.fitted, traces.subject
    if fitted.gate is None:
        raise BadArgument("exit.gate", None, "an exit with a gate", "screen the model again")
    layers = tuple(fitted.lens.translators)
    calibration = take_trace(
        subject.stepper,
        subject.cut_windows("calibrate", subject.budget.calibrate),
        lens=fitted.lens.digest,
        progress=f"{subject.name}: calibrate, {subject.corpus}, through the lens",
        file=subject.get_progress_stream(),
    )
    profile = profile_of(
        calibration,
        tuple(probe for probe in traces.profile.probes if probe in layers),
        model=subject.name,
        fingerprint=subject.fingerprint,
        corpus=subject.corpus,
        dtype=subject.dtype,
    )
    chosen, _ = restrict_trace_gate_to_probes(evaluation.validation_traces.tuned, fitted.gate, layers, profile.probes)
    judged, gate = restrict_trace_gate_to_probes(
        evaluation.evaluation_traces.tuned, fitted.gate, layers, profile.probes
    )
    return SingleReadoutTraces(TUNED_LENS, chosen, judged, profile, gate)


def _named_combination_loss(combination: TunedCombination) -> PointLoss:
    name = f"{combination.way.name}, {combination.point.name}"
    if combination.point.has_fixed_depth:
        name = f"{combination.way.name}, which no setting keeps within {JUDGED:.0%}"
    return combination.loss.named(name)
