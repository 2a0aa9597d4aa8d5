"""Energy: EMAD-N1, joules per generated token.

The claim pairs windows of the device's own counter (``benchmark.energy``), with requests of the same shape as the timed
ones. The largest error by the counter's steps widens the interval. On a CPU it uses the energy of the packages, if the
system shows it (``benchmark.energy.RaplCounter``), including other programs' share.

All windows run in this process: a window that another process shares is invalid, and NVML's list of processes cannot
distinguish a helper process from a foreign one.

Random weights consume as much energy as trained ones, so quality is no premise. Without a counter, or with a counter of
one of several devices, the row is unmeasured, with the reason and no number. It does not apply to an encoder-decoder.

A decoder that counts its own joules (``energy_j``), such as a server, is measured by them. If it declines exits, the
claim does not apply, and the table shows full depth alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from emad_ref.absent import Absent
from emad_ref.models.stepper import Stepper
from emad_ref.protocol import Decoder, Unsupported
from pytest_emad.benchmark.energy import (
    DecoderEnergyCounter,
    EnergyCounter,
    EnergyResult,
    counter_to_power_ratio,
    measure_energy_pairs,
    measure_idle_watts,
    measure_refresh_seconds,
    open_decoder_counter,
    open_nvml_counter,
    open_rapl,
)
from pytest_emad.claims.base import Answer, ClaimContext, Question
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.statistics.speedup import estimate_ratio_with_meter_error
from pytest_emad.statistics.units import ByPair
from pytest_emad.statistics.verdicts import Verdict

SMOKE_PAIRS = 6  # pairs of five-second windows; thirty, which decide, take more minutes than the smallest budget has
HALF = 2  # pairs of requests per pair of windows, dozens of which take ``standard`` half an hour
ARMS = ("adaptive", "full")  # in the order of ``JoulesPerToken``
ALONE = "in this process alone (another on the device spoils a window)"
SHARED = "all work of its device counts"
ENERGY = "Energy of requests"


# joules per generated token [pairs] under the point and at full depth; relative error of each
JoulesPerToken = tuple[ByPair, ...]
# batch size → joules; or the reason why one is missing, so that none is judged
EnergyEvidence = Mapping[int, JoulesPerToken] | str


def decide_energy(found: EnergyEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-N1: a leg per batch size, the ratio of joules per token to full depth's.

    The ratio uses sums over windows, which together are one mix of requests.
    """
    if isinstance(found, str):
        return asked.unmeasured(found)
    claim, most = asked.claim, asked.claim.thresholds["energy_ratio"]
    legs = {
        f"batch {rows}": replace(
            estimate_ratio_with_meter_error(*joules, threshold=most),
            unit=claim.unit,
        )
        for rows, joules in found.items()
    }
    return asked.judge_against_threshold(legs, "above", most)


def answer_energy(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-N1 from the decoder's own counter, or from that of the model's device.

    The smallest budget is too short for a processor's counter.
    """
    with open_counter_of_run(evidence) as counter:
        refused = None if isinstance(counter, Absent) else absent_exits(evidence)
        arms = ARMS if refused is None else ARMS[1:]
        energies = measure_energy_by_batch_size(evidence, counter, arms)
    if refused is None:
        verdict = decide_energy(make_energy_evidence_from_results(energies), asked)
    else:
        verdict = asked.lacking(refused)
    measured = {rows: each for rows, each in energies.items() if isinstance(each, EnergyResult)}
    said = {rows: format_energy_note(each) for rows, each in measured.items()}
    if refused is not None:  # else the verdict has the reason
        said |= {rows: f"no number: {each.reason}" for rows, each in energies.items() if isinstance(each, Absent)}
    notes = tuple(f"{evidence.name}: energy at batch {rows}: {note}" for rows, note in said.items())
    table = [make_energy_row(rows, arm, each) for rows, each in measured.items() for arm in each.joules]
    attachments = Attachments((AttachedTable(ENERGY, table),) if table else (), notes)
    return Answer(verdict, evidence.corpus, evidence.fingerprint, attachments, refused)


def absent_exits(evidence: ModelMeasurements) -> Absent | None:
    """Why the decoder under test declines the timed point, and runs full depth alone; None if it takes it."""
    try:
        with evidence.subject.open_decoder(evidence.latency.most_saving_point):
            return None
    except Unsupported as refusal:
        return Absent(str(refusal), "premise")


def make_energy_row(rows: int, arm: str, found: EnergyResult) -> dict[str, Any]:
    """The table's row of ``arm`` in requests of ``rows`` rows; None for a number that is absent."""

    def known(value: float | Absent) -> float | None:
        return None if isinstance(value, Absent) else value

    before_c, after_c = (None, None) if isinstance(found.temperature_c, Absent) else found.temperature_c
    return {
        "batch": rows,
        "arm": arm,
        "J per output token": found.joules_per_token(arm),
        "J per input or output token": found.joules_per_token_read_or_generated(arm),
        "prefill, J per input token": known(found.joules_per_prompt_token(arm)),
        "decode, J per output token": known(found.joules_per_decoded_token(arm)),
        "idle, W": known(found.idle_w),
        "above idle, J per output token": known(found.joules_per_token_above_idle(arm)),
        "before, °C": before_c,
        "after, °C": after_c,
    }


def make_energy_evidence_from_results(energies: Mapping[int, EnergyResult | Absent]) -> EnergyEvidence:
    """Evidence for EMAD-N1 from energies by batch size: readings from a device, or replayed ones."""
    found = {}
    for rows, each in energies.items():
        if isinstance(each, Absent):
            return each.reason
        adaptive, full = (ByPair(each.joules_per_token_by_pair(arm)) for arm in ARMS)
        found[rows] = adaptive, full, *(ByPair(each.relative_resolution(arm)) for arm in ARMS)
    return found


def format_energy_note(energies: EnergyResult) -> str:
    """Text about the instrument, its refresh time, the checks, absent checks and numbers, and discarded windows."""
    moves = (f"moves every {1000 * energies.refresh_s:.3g} ms",) if energies.refresh_s else ()
    spoiled = f"{len(energies.spoiled)} windows spoiled"
    beside = {"prefill": energies.prefill, "idle": energies.idle_w, "temperature": energies.temperature_c}
    absent = [f"no {name}: {each.reason}" for name, each in beside.items() if isinstance(each, Absent)]
    decoded = {arm: energies.joules_per_decoded_token(arm) for arm in energies.joules}
    if not isinstance(energies.prefill, Absent):
        absent += [f"no decode of {arm}: {each.reason}" for arm, each in decoded.items() if isinstance(each, Absent)]
    company = SHARED if energies.source == DecoderEnergyCounter.source else ALONE
    return "; ".join((energies.source, company, *moves, *energies.caveats, *absent, spoiled))


@contextmanager
def open_counter_of_run(evidence: ModelMeasurements) -> Iterator[EnergyCounter | Absent]:
    """The counter of the decoder under test if it has one, else that of the model's device; or the reason for none."""
    subject = evidence.subject
    with subject.open_decoder(subject.full_depth_point) as decoder:
        if hasattr(decoder, "energy_j"):
            yield open_decoder_counter(decoder)
            return
    with open_energy_counter(subject.stepper, packages=evidence.study.budget.rank > 0) as counter:
        yield counter


def open_energy_counter(stepper: Stepper, packages: bool = False) -> AbstractContextManager[EnergyCounter | Absent]:
    """NVML's counter of the model's GPU, or the reason for none.

    ``packages``: the processor's counter (RAPL), for a model without GPU.
    """
    places = {stepper.device, *stepper.devices}
    if len(places) > 1:
        return nullcontext(Absent(f"the model lies on {len(places)} devices, and a counter sees one of them"))
    if stepper.device.type == "cpu" and packages:
        return nullcontext(open_rapl())
    return open_nvml_counter(find_device_uuid(stepper.device))


def find_device_uuid(device: torch.device) -> str | None:
    """NVML's UUID of the decoder's device; None unless it is a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def measure_energy_by_batch_size(
    evidence: ModelMeasurements, counter: EnergyCounter | Absent, arms: tuple[str, ...] = ARMS
) -> dict[int, EnergyResult | Absent]:
    """Batch size → its windows; stops at the first that cannot be measured."""
    energies: dict[int, EnergyResult | Absent] = {}
    for rows in evidence.study.budget.batch_sizes:
        energies[rows] = (
            counter if isinstance(counter, Absent) else measure_energy_of_arms(evidence, counter, rows, arms)
        )
        if isinstance(energies[rows], Absent):
            break
    return energies


def measure_energy_of_arms(
    evidence: ModelMeasurements, counter: EnergyCounter, rows: int, arms: tuple[str, ...] = ARMS
) -> EnergyResult | Absent:
    """Joules and tokens of ``arms``, full depth and the timed point, for requests of the shape of the timed ones.

    Also of their prefill, and of the idle device. Full depth alone, which no claim reads, has ``SMOKE_PAIRS`` windows.

    Raises:
        Unsupported: the decoder under test declines one of them.
    """
    subject, latency = evidence.subject, evidence.latency
    length, new = latency.request_shape
    few = subject.budget.rank == 0 or len(arms) == 1
    pairs = SMOKE_PAIRS if few else subject.budget.pairs // HALF
    points = {"full": subject.full_depth_point}
    points |= {"adaptive": latency.most_saving_point} if "adaptive" in arms else {}
    prompts = subject.make_equal_prompts(rows * (pairs + 1), length)

    def arm(decoder: Decoder, new: int) -> Callable[[int, int], int]:
        def run(pair: int, request: int) -> int:
            first = (pair + 1 + request) % (pairs + 1) * rows
            record = decoder.generate(prompts[first : first + rows], new, frozenset())
            return sum(len(emitted) for emitted in record.emitted)

        return run

    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(subject.open_audited_decoder(point, max_rows=rows))
            for name, point in points.items()
        }
        full = opened["full"]
        refresh = measure_refresh_seconds(counter)
        if isinstance(refresh, Absent):
            return refresh
        at_full, rng = arm(full, new), np.random.default_rng(subject.seed)
        agreement = counter_to_power_ratio(counter, lambda request: at_full(-1, request), synchronize=full.synchronize)
        idle_w = measure_idle_watts(counter)
        energies, prefill = (
            measure_energy_pairs(
                {name: arm(decoder, tokens) for name, decoder in opened.items()},
                windows,
                rng,
                counter,
                synchronize=full.synchronize,
            )
            for tokens, windows in ((new, pairs), (1, SMOKE_PAIRS))
        )
    if isinstance(energies, Absent):
        return energies
    energies = replace(energies, prompt_tokens=rows * length, prefill=prefill, idle_w=idle_w)
    return add_counter_checks_to_result(energies, refresh, agreement)


def add_counter_checks_to_result(energies: EnergyResult, refresh_s: float, agreement: float | Absent) -> EnergyResult:
    """``energies`` with the counter's refresh time and its agreement with the power readings."""
    if isinstance(agreement, Absent):
        said = [f"no self-check: {agreement.reason}"]
    else:
        said = [f"counted over integrated power: {agreement:.2f}"]
    return replace(energies, refresh_s=refresh_s, caveats=(*energies.caveats, *said))


QUESTIONS = (
    Question(
        "EMAD-N1",
        "model",
        answer_energy,
        legs=lambda study, layers: len(study.budget.batch_sizes),
        measures=True,
        suite="cost",
        decide=decide_energy,
    ),
)
