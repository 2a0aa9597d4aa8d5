"""Screening of one model: from text to a learned exit, or to "leave it alone".

    text → lens and gate → traces → oracle headroom → families → decoding and guarantee → own text → tasks → timing →
    drafts → recommendation

Each phase reads a fixed number of documents (``settings``). Record and table give the reason for a phase that cannot
run. Rules are chosen, certified and judged on three texts; the guarantee's figures are of the certification text,
all other savings and losses of the evaluation text. Times, and drafts and advice that follow from them, depend on the
machine (``result.MACHINE_KEYS``).
"""

from __future__ import annotations

from emad_ref.absent import Absent
from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.profile import Profile, profile_of
from emad_ref.calibration.trace import take_trace
from emad_ref.console import print_error
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import default_probes
from emad_ref.models.loading import LoadedModel, require_decoder_only
from emad_ref.models.threads import all_threads_for_batches
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.probes.tuned_lens import StateTranslators, attach_lens, attach_translators
from pytest_emad.screening.drafts import choose_drafting, predict_drafting_seconds
from pytest_emad.screening.exit import Exit
from pytest_emad.screening.exit_families import free_depth_families, published_families, tuned_lens_families
from pytest_emad.screening.own_text import judge_own_text
from pytest_emad.screening.phases import PhaseRunner, digest_of_screening
from pytest_emad.screening.result import ScreeningResult, recommend, screening_to_json
from pytest_emad.screening.selection import (
    Certification,
    EvaluationIntervals,
    PointSelector,
    SelectedPoint,
    SelectionRow,
    candidate_points_up_to_best,
    certify_points,
    compute_oracle_headrooms,
    decode_losses_on_text,
    fit_state_translators,
    optimistic_savings,
    replay_losses_on_split,
    select_points,
)
from pytest_emad.screening.settings import RISE_LEVELS, ScreeningSettings
from pytest_emad.screening.task_losses import judge_tasks
from pytest_emad.screening.timing import (
    CandidateTime,
    choose_points_to_time,
    format_predicted_duration,
    measure_unit_costs,
    predict_phase_seconds,
    time_candidates,
)
from pytest_emad.screening.traces import (
    TextSplits,
    TextTracesByReadout,
    absent_text,
    fit_lens_and_gate,
    layers_to_read,
    read_text_splits,
    take_text_traces_by_readout,
)


def screen(model: LoadedModel, settings: ScreeningSettings, run: PhaseRunner | None = None) -> Exit:
    """Screen ``model``; attached lenses stay attached. ``run``: shows and keeps phases; None does neither.

    Raises:
        BadArgument: an encoder-decoder; random weights; an unknown corpus.
        TooLittleText, EmptyCorpus: a corpus too small to fit or judge a lens on.
    """
    require_decoder_only(model)
    if not model.trained:
        raise BadArgument("model", model.name, "trained weights", "perplexity of noise says nothing")
    if model.geometry.layers < 2:
        raise BadArgument("model", model.name, "a model of at least 2 layers", "there is nothing to leave before")
    result = run_screening_phases(model, settings, PhaseRunner() if run is None else run)
    few, documents = absent_text(result.texts), result.evaluated.text.n_documents
    recommendation = recommend(
        result.slack,
        result.certified,
        result.decoded,
        result.within_reach,
        settings.rise,
        few,
        documents,
        result.timed,
        result.own_text,
        result.tasks,
    )
    record = screening_to_json(result, recommendation)
    signs = result.certified.signs if result.certified is not None and recommendation.guarantee is not None else None
    lossy = recommendation.lossy
    named = None if isinstance(lossy, Absent) else lossy.translators
    drafting = None if isinstance(result.drafts.drafting, Absent) else result.drafts.drafting
    return Exit(
        result.fitted,
        lossy,
        recommendation.guarantee,
        drafting,
        record,
        signs,
        leave_early=recommendation.leave_early,
        translators=None if named is None else result.states,
        spoken=result.drafts.spoken if drafting is not None and drafting.lens is not None else None,
    )


def run_screening_phases(model: LoadedModel, settings: ScreeningSettings, run: PhaseRunner) -> ScreeningResult:
    """Every phase up to the recommendation; raises as ``screen``."""
    geometry = model.geometry
    texts = run("text", lambda name: read_text_splits(model, settings, name))
    run.resume(digest_of_screening(model, settings, texts))
    costs = measure_unit_costs(model, texts.choose)
    predicted = predict_phase_seconds(model, texts, settings, costs)
    predicted["drafts"] = predict_drafting_seconds(model, texts, settings, costs)
    if run.progress:
        ahead = {phase: seconds for phase, seconds in predicted.items() if phase not in run.finished}
        print_error(f"{model.name}: {format_predicted_duration(ahead)}")
    with all_threads_for_batches(texts.calibrate.n_tokens):
        fitted = run("lens", lambda name: fit_lens_and_gate(model, texts.calibrate, settings, name))
    attach_lens(model.stepper, fitted.lens, model.fingerprint)
    read = layers_to_read(model)

    def trace_both(name: str | None) -> tuple[TextTracesByReadout, TextTracesByReadout, Profile]:
        choose, evaluate = (
            take_text_traces_by_readout(model.stepper, each, fitted, read, name)
            for each in (texts.choose, texts.evaluate)
        )
        return choose, evaluate, _fit_profile(model, texts, fitted, settings, name)

    chosen_on, evaluated, profile = run("traces", trace_both)
    families = [
        *published_families(profile, geometry.vocabulary, read),
        *free_depth_families(geometry.layers, geometry.vocabulary, read),
        *tuned_lens_families(fitted, geometry.vocabulary),
    ]
    run.know_families(families)
    levels = sorted({*RISE_LEVELS, settings.rise})
    headroom = run("slack", lambda _: compute_oracle_headrooms(evaluated, geometry, levels, settings.seed))
    selector = PointSelector(chosen_on, evaluated.text.n_documents, geometry)

    def reach_both(_: str | None) -> tuple[list[SelectionRow], list[SelectionRow]]:
        rows = select_points(families, levels, selector, evaluated, geometry, settings.seed)
        return rows, optimistic_savings(families, settings.rise, evaluated, geometry, settings.seed)

    rows, reach = run("families", reach_both)
    states, certification, decoded = run(
        "decoding",
        lambda name: _decode_best(model, texts, rows, selector, evaluated, settings, name),
    )
    if states is not None:
        attach_translators(model.stepper, states, model.fingerprint)
    shown = [row.point for row in decoded]
    written = run("own text", lambda _: judge_own_text(model, shown, texts.evaluate, settings))
    solved = run("tasks", lambda _: judge_tasks(model, shown, texts.evaluate, settings))
    points = choose_points_to_time(rows, decoded, settings.rise)

    def time_points(_: str | None) -> dict[OperatingPoint, CandidateTime]:
        ways = {name: WalkedDecoder(model.stepper, point) for name, point in points.items()}
        timed = time_candidates(model, ways, texts.evaluate, settings)
        return dict(zip((full_depth(geometry.layers), *points.values()), timed, strict=True)) if timed else {}

    timed = run("timing", time_points)
    drafts = run("drafts", lambda name: choose_drafting(model, texts, fitted, settings, name, keep=run.keep))
    return ScreeningResult(
        model=model,
        settings=settings,
        texts=texts,
        fitted=fitted,
        evaluated=evaluated,
        slack=headroom,
        reached=rows,
        within_reach=reach,
        states=states,
        certified=certification,
        decoded=decoded,
        timed=timed,
        own_text=written,
        tasks=solved,
        drafts=drafts,
        seconds=run.seconds,
        predicted=predicted,
    )


def _fit_profile(
    model: LoadedModel, texts: TextSplits, fitted: FittedLens, settings: ScreeningSettings, progress: str | None
) -> Profile:
    named, read = None if progress is None else f"{progress}, profile", layers_to_read(model)
    windows = texts.calibrate.windows[: settings.n_profile_windows]
    return profile_of(
        take_trace(model.stepper, windows, layers=read, progress=named),
        read or default_probes(model.geometry.layers),
        model=model.name,
        fingerprint=model.fingerprint,
        corpus=settings.corpus,
        dtype=fitted.lens.dtype,
    )


def _decode_best(
    model: LoadedModel,
    texts: TextSplits,
    rows: list[SelectionRow],
    selector: PointSelector,
    evaluated: TextTracesByReadout,
    settings: ScreeningSettings,
    progress: str | None,
) -> tuple[StateTranslators | None, Certification | None, list[SelectedPoint]]:
    """(Translators, certification, decoded evaluation rows) of the best free rule of the selection text.

    (None, None, []) if no rule saves work. The certified point's row comes first, then that of the point within bound.
    """
    within = (row for row in rows if isinstance(row, SelectedPoint) and row.level == settings.rise)
    free = [row for row in within if row.family.depth == "free"]
    if not free:
        return None, None, []
    best = max(free, key=lambda row: selector.net_saving(row.point))
    named = None if progress is None else f"{progress}, states"
    states = fit_state_translators(model, best.point, texts.calibrate, settings, named)
    points = candidate_points_up_to_best(best.family, best.point, selector, settings.rise, states)
    if not points:
        return states, None, []
    count = evaluated.text.n_documents
    certification = certify_points(model, texts.certify, best.family, points, settings, count, progress)
    named_points = (certification.certified_point, certification.point_within_bound)
    shown_points = list(dict.fromkeys(point for point in named_points if point is not None))
    if not shown_points:
        return states, certification, []
    named = None if progress is None else f"{progress}, judged"
    text = evaluated.text
    full = replay_losses_on_split(evaluated, [], model.geometry)
    both = full.join(decode_losses_on_text(model, text, shown_points, named))
    judge = EvaluationIntervals(text, settings.seed)
    return (
        states,
        certification,
        [judge.estimate_point(best.family, settings.rise, loss, how="decoded") for loss in list(both)[1:]],
    )
