"""Claims about inference engines: same model, batch invariance, repeatability, stated precision,
accepted drafts, sampling, and stated speed.

Every request is at full depth, and the reference is the folder's own model. The rows apply to any decoder that answers
plain requests; ENG-1 and ENG-4 need log-probabilities (``protocol.TokenLogProbs``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.audit.tolerances import UNIT_ROUNDOFF
from pytest_emad.benchmark.arrivals import answer_latencies
from pytest_emad.claims.base import ClaimContext, make_model_question, make_unmet_causal_lm_verdict
from pytest_emad.measurements.acceptance_record import LENGTH
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.engine import (
    HEAD,
    REPORTED,
    TAIL,
    AcceptanceEvidence,
    DistributionEvidence,
    PartedRows,
    PrecisionEvidence,
    SamplingEvidence,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.stated_rule import OwnRuleSpeedupEvidence
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import (
    LEVEL,
    Side,
    build_leg_test,
    build_measured_estimate_leg,
    unmeasured_leg,
    verdict_from_errors_and_tolerance,
)
from pytest_emad.statistics.rates import estimate_perplexity_rise, estimate_ratio_to_sample, mean_rate
from pytest_emad.statistics.speedup import estimate_total_speedup
from pytest_emad.statistics.units import ByDocument, ByPair
from pytest_emad.statistics.verdicts import Leg, Verdict

AGREEMENT, GIVEN_TEXT = "top-1 agreement", "perplexity of given text"  # names of legs
SAMPLING_LEGS = 14
UNDER_LOAD = "Times under load"  # title of a table


def decide_same_model(found: DistributionEvidence, asked: ClaimContext) -> Verdict:
    """ENG-1: mean KL of the reference's next-token distribution from the engine's, and the rise of perplexity.

    The folder's own model shows on the same documents which KL the stated precision and other kernels cause. Tested is
    the mean difference by document of the engine's KL and twice theirs, against the rounding of what is reported; so
    a document that is hard for every run counts for none. Each mean KL is listed.

    The second is that of given text, and does not apply if the engine reports no log-probabilities of it. It allows for
    ruined documents outside the sample (``statistics.rates.estimate_perplexity_rise``), which would diverge too; so the
    first then allows only for skew. Top-1 agreement is attached.
    """
    rise = asked.claim.thresholds["perplexity_rise"]
    allowed = sum(2 * each.values for each in found.own.values())
    beyond = found.divergence.with_values(found.divergence.values - allowed)
    divergence = mean_rate(beyond, found.positions, threshold=REPORTED, rng=asked.rng, unit="nats", worst=0.0)
    tests = [asked.make_leg_test(f"KL at {found.dtype}, beyond twice its own", divergence, "above", REPORTED)]
    columns = {"KL": found.divergence, **{f"KL of {name}": each for name, each in found.own.items()}}
    beside = _list_means(columns, found.positions, asked)
    if isinstance(found.given, Absent):
        beside.append(Leg(GIVEN_TEXT, "not applicable", None, None, 0, None, "", found.given.reason))
    else:
        losses = found.given.loss, found.given.own_loss, found.given.tokens
        perplexity = estimate_perplexity_rise(*losses, threshold=rise, rng=asked.rng)
        tests.append(asked.make_leg_test(GIVEN_TEXT, perplexity, "above", rise))
    agreement = mean_rate(found.agreeing, found.positions, threshold=1.0, rng=asked.rng, unit="share")
    return asked.decide_tests(tests, [*beside, build_measured_estimate_leg(AGREEMENT, agreement)])


def decide_rows_match_reference(found: PartedRows, asked: ClaimContext) -> Verdict:
    """ENG-2 (up to ties) and ENG-3 (without ties): one row that differs from its reference falsifies."""
    return verdict_from_errors_and_tolerance(
        asked.claim, asked.model, {name: rows.astype(float) for name, rows in found.items()}, 0
    )


def decide_stated_precision(found: PrecisionEvidence, asked: ClaimContext) -> Verdict:
    """ENG-4: the mean error of log-probabilities against the middle between the stated and the next coarser precision.

    The folder's model runs in both on the same documents, and the mean difference by document is tested; the judge's
    own precision errs as the coarser one does times the ratio of roundings. With errors eᵢ of the engine, sᵢ and cᵢ of
    the twins and means S and C, the middle is M = √(S·C), and the difference eᵢ − M/2·(sᵢ/S + cᵢ/C), which has the mean
    E − M and to first order its spread. The row stays open unless it would tell the twins themselves apart.
    """
    coarse = next(name for name in found.twins if name != found.dtype)
    coarser, stated = found.twins[coarse], found.twins.get(found.dtype)
    if stated is None:
        stated = coarser.with_values(coarser.values * (UNIT_ROUNDOFF[found.dtype] / UNIT_ROUNDOFF[coarse]))
    total = math.sqrt(stated.values.sum() * coarser.values.sum())
    half = sum((total / 2 / each.values.sum()) * each.values for each in (stated, coarser)) if total else stated.values

    def compare(error: ByDocument) -> Estimate:
        beyond = error.with_values(error.values - half)
        return mean_rate(beyond, found.positions, threshold=0.0, rng=asked.rng, unit="nats", worst=0.0)

    name = f"{found.dtype}, not {coarse}"
    test = asked.make_leg_test(name, compare(found.error), "above", 0.0)
    apart = compare(stated).p_below <= LEVEL and compare(coarser).p_above <= LEVEL
    if test.leg.p_falsify is not None and not apart:
        reason = (
            f"the folder's own model is not shown to err more with {coarse} than with {found.dtype} on these documents"
        )
        test = replace(test, leg=replace(test.leg, p_falsify=None, p_survive=None, reason=reason, remedy=reason))
    columns = {"error": found.error, **{f"error of {twin}": each for twin, each in found.twins.items()}}
    return asked.decide_tests([test], _list_means(columns, found.positions, asked))


def _list_means(columns: Mapping[str, ByDocument], positions: ByDocument, asked: ClaimContext) -> list[Leg]:
    """A leg that decides nothing for the mean of each of ``columns`` [documents], nats per token."""
    return [
        build_measured_estimate_leg(name, mean_rate(each, positions, threshold=0.0, rng=asked.rng, unit="nats"))
        for name, each in columns.items()
    ]


def decide_acceptance(found: AcceptanceEvidence, asked: ClaimContext) -> Verdict:
    """ENG-5: whether the mean acceptance length, 1 + accepted / rounds, is at least a ``share`` of that on record.

    The record is that of ``--emad-acceptance-record``, else the register's ``length``. A curve and the register count
    as exact. An earlier run is a second sample, and the leg is the ratio of both lengths. The share of rounds that
    accept each drafted position is listed; without an exact record also the length.
    """
    record = found.record
    recorded = asked.claim.thresholds["length"] if record is None else record.length
    positions = sum(bool(each.values.any()) for each in found.accepted) if found.by_position else 0
    if record is not None and 0 < record.drafted < positions:
        return asked.not_applicable(f"the engine drafts {positions} tokens, but the record is of {record.source}")
    least = asked.claim.thresholds["share"] * recorded
    total = found.drafts.with_values(sum((each.values for each in found.accepted), found.drafts.values))
    length = mean_rate(total, found.drafts, threshold=least or 1.0, rng=asked.rng, unit="tokens")
    beside = [
        build_measured_estimate_leg(
            f"drafted position {at}",
            mean_rate(accepted, found.drafts, threshold=1.0, rng=asked.rng, unit="share"),
            on=str(at),
        )
        for at, accepted in enumerate(found.accepted if found.by_position else (), start=1)
    ]
    sample = None if record is None else record.interval
    if not recorded or sample is not None:
        beside.insert(0, build_measured_estimate_leg(LENGTH, length, on=LENGTH))
    if not recorded:
        return asked.decide_tests([], beside)
    if record is not None and sample is not None:
        share = asked.claim.thresholds["share"]
        ratio = estimate_ratio_to_sample(length, recorded, sample, record.documents, threshold=share)
        name = f"length over that on record, {recorded:.4g} ({record.source}, n = {record.documents})"
        return asked.decide_tests([asked.make_leg_test(name, ratio, "below", share)], beside)
    exact = "" if record is None else f" ({record.source} drafted; no n, so taken as exact)"
    name = f"{LENGTH}, {recorded:.4g} on record{exact}"
    return asked.decide_tests([asked.make_leg_test(name, length, "below", least, on=LENGTH)], beside)


def decide_sampling(found: SamplingEvidence, asked: ClaimContext) -> Verdict:
    """ENG-6: whether tokens are drawn from softmax(logits / T), head and tail, anew for each seed and row.

    At each temperature the likeliest half of the probability and the least likely tenth are drawn with these
    frequencies, up to a relative ``effect`` on either side. Of two draws of one prompt, under two seeds or in two rows
    of a request, at most a share ``copied`` repeats the first token beyond chance. All legs share Holm's correction.
    """
    effect, copied, tests = asked.claim.thresholds["effect"], asked.claim.thresholds["copied"], []
    parts = (("likeliest half", HEAD, found.head), (f"least likely {TAIL:.0%}", TAIL, found.tail))
    for part, share, counts in parts:
        for temperature, count in counts.items():
            sides: tuple[tuple[str, Side, float], ...]
            sides = ("often", "above", share * (1 + effect)), ("rarely", "below", share * (1 - effect))
            for how, bad, limit in sides:
                rate = mean_rate(count, found.tokens, threshold=limit, rng=asked.rng, unit="share")
                name = f"{part} at temperature {temperature:g}, too {how}"
                tests.append(asked.make_leg_test(name, rate, bad, limit))
    closed = []
    for name, shares in found.repeats.items():
        if not len(shares):
            closed.append(unmeasured_leg(f"two {name}", "the first token of each prompt is certain"))
            continue
        ones = shares.with_values(np.ones(len(shares)))
        repeated = mean_rate(shares, ones, threshold=copied, rng=asked.rng, unit="share")
        tests.append(asked.make_leg_test(f"two {name} draw the same", repeated, "above", copied))
    return asked.decide_tests(tests, closed)


def decide_stated_saving_and_speedup(found: OwnRuleSpeedupEvidence, asked: ClaimContext) -> Verdict:
    """ENG-7: a leg for each stated number, measured against it minus ``slack``, and one for the rise of perplexity.

    A speed-up that the executed blocks do not explain is no result: full depth was slowed, or other work omitted. If no
    block was observed, a full depth slower than the model's own ``generate`` leaves the row open. The row does not
    apply to a decoder that states neither number. The speed-up under load is listed by the number of requests at once.
    """
    stated, slack = found.stated, asked.claim.thresholds["slack"]
    rise = asked.claim.thresholds["perplexity_rise"]
    if stated.speedup is None and stated.saved_blocks is None:
        return asked.not_applicable(f"{stated.name!r} states neither a saving nor a speed-up")
    tests, beside = [], []
    if stated.speedup is not None:
        least = stated.speedup * (1 - slack)
        faster = estimate_total_speedup(found.full_s, found.rule_s, threshold=least)
        tests.append(asked.make_leg_test(f"speed-up, {stated.speedup:g}× stated", faster, "below", least))
        if found.explained is not None:
            beyond = estimate_total_speedup(found.full_s, found.rule_s, threshold=found.explained)
            tests.append(asked.make_leg_test("speed-up beyond what blocks explain", beyond, "above", found.explained))
        elif found.generate_s is not None:
            beside += _slow_full_depth(found.full_s, found.generate_s)
    if stated.saved_blocks is not None:
        name, least = f"blocks saved, {stated.saved_blocks:.0%} stated", stated.saved_blocks - slack
        if found.skipped is None or found.blocks is None:
            beside.append(unmeasured_leg(name, "the engine runs no module that it was lent: only its time is measured"))
        else:
            saved = mean_rate(found.skipped, found.blocks, threshold=least, rng=asked.rng, unit="share")
            tests.append(build_leg_test(name, saved, "below", least, {"documents": asked.claim.minimum["documents"]}))
    loss = found.loss, found.full_loss, found.tokens
    risen = estimate_perplexity_rise(*loss, threshold=rise, rng=asked.rng)
    tests.append(asked.make_leg_test("perplexity of emitted tokens", risen, "above", rise))
    for at_once, speedup in estimate_speedups_under_load(found).items():
        lost = "slower than without the rule" if speedup.high < 1 else ""
        beside.append(build_measured_estimate_leg(f"{at_once} in flight, speed-up", speedup, lost, threshold=1.0))
    return asked.decide_tests(tests, beside)


def estimate_speedups_under_load(found: OwnRuleSpeedupEvidence) -> dict[int, Estimate]:
    """Number of requests in flight → seconds without the rule over seconds under it; empty if there are no times."""
    by_requests = {} if isinstance(found.load, Absent) else found.load
    return {
        at_once: estimate_total_speedup(times.seconds["full"], times.seconds["rule"], threshold=1.0)
        for at_once, times in by_requests.items()
    }


def describe_loss_under_load(speedups: Mapping[int, Estimate]) -> str:
    """The least number of requests in flight at which the rule costs time, and how much; "" if it costs none."""
    losing = [at_once for at_once, speedup in speedups.items() if speedup.high < 1]
    if not losing:
        return ""
    first = speedups[losing[0]]
    saved = any(speedup.low > 1 for at_once, speedup in speedups.items() if at_once < losing[0])
    how = "turns to loss" if saved else "is a loss"
    return (
        f"the speed-up {how} at {losing[0]} requests in flight: {first.value:.2f}× [{first.low:.2f}, {first.high:.2f}]"
    )


def attach_times_under_load(evidence: ModelMeasurements) -> Attachments:
    """The table of times under load, and a note on a loss; or the reason for no times."""
    found = evidence.own_rule_evidence
    if isinstance(found.load, Absent):
        return Attachments(notes=(f"{evidence.name}: no times under load: {found.load.reason}",))
    rows, absent = list[dict[str, Any]](), dict[str, None]()
    for at_once, times in found.load.items():
        for arm in times.seconds:
            energy = times.energy[arm]
            row = {"requests in flight": at_once, "arm": arm, "tokens/s": times.tokens_per_s(arm)}
            row |= answer_latencies(times.answers[arm], streamed=times.is_streamed)
            if isinstance(energy, Absent):
                absent[f"{evidence.name}: no energy of {arm} under load: {energy.reason}"] = None
            else:
                row["J per output token"] = energy.energy_j / energy.generated
                row["J per input or output token"] = energy.energy_j / (energy.read + energy.generated)
            rows.append(row)
    columns = dict.fromkeys(column for row in rows for column in row)
    table = AttachedTable(UNDER_LOAD, [{column: row.get(column) for column in columns} for row in rows])
    loss = describe_loss_under_load(estimate_speedups_under_load(found))
    return Attachments((table,), (*([f"{evidence.name}: {loss}"] if loss else ()), *absent))


def _slow_full_depth(full_s: ByPair, generate_s: ByPair) -> list[Leg]:
    """An unmeasured leg if full depth is shown slower than the model's own ``generate``; else none."""
    ratio = estimate_total_speedup(ByPair(full_s.values[: len(generate_s)]), generate_s, threshold=1.0)
    if ratio.p_above > LEVEL:
        return []
    reason = (
        f"full depth takes {ratio.value:.2f} × the time of the model's own generate and may have been slowed; run the "
        "blocks of request.model.load(), which are counted, or a full depth as fast as generate"
    )
    return [unmeasured_leg("a full depth that was not slowed", reason)]


_engine_row = partial(make_model_question, premise=make_unmet_causal_lm_verdict, budget="full")

QUESTIONS = (
    _engine_row("ENG-1", lambda of: of.engine_answers.distributions, decide_same_model, legs=lambda study, layers: 2),
    _engine_row("ENG-2", lambda of: of.engine_answers.batch_invariance, decide_rows_match_reference),
    _engine_row("ENG-3", lambda of: of.engine_answers.repeatability, decide_rows_match_reference),
    _engine_row(
        "ENG-4", lambda of: of.engine_answers.precisions, decide_stated_precision, legs=lambda study, layers: 1
    ),
    _engine_row("ENG-5", lambda of: of.engine_answers.acceptance, decide_acceptance, legs=lambda study, layers: 1),
    _engine_row(
        "ENG-6", lambda of: of.engine_answers.sampling, decide_sampling, legs=lambda study, layers: SAMPLING_LEGS
    ),
    _engine_row(
        "ENG-7",
        lambda of: of.own_rule_evidence,
        decide_stated_saving_and_speedup,
        attach=attach_times_under_load,
        legs=lambda study, layers: 4,
        measures=True,
        suite="cost",
    ),
)
