"""Energy: EMAD-N1, joules per generated token.

The claim pairs windows of the device's own counter (``benchmark.energy``), with requests of the same shape as the timed
ones. The largest error by the counter's steps widens the interval. On a CPU it uses the energy of the packages, if the
system shows it (``benchmark.energy.RaplCounter``), including other programs' share.

All windows run in this process: a window that another process shares is invalid, and NVML's list of processes cannot
distinguish a helper process from a foreign one.

Random weights consume as much energy as trained ones, so quality is no premise. Without a counter, or with a counter of
one of several devices, the row is unmeasured, with the reason and no number. It does not apply to an encoder-decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from emad_ref.absent import Absent
from emad_ref.models.stepper import Stepper
from emad_ref.protocol import Decoder
from pytest_emad.benchmark.energy import (
    EnergyCounter,
    EnergyResult,
    counter_to_power_ratio,
    measure_energy_pairs,
    measure_refresh_seconds,
    open_nvml_counter,
    open_rapl,
)
from pytest_emad.claims.base import Answer, ClaimContext, Question
from pytest_emad.measurements.attachments import Attachments
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.statistics.speedup import estimate_ratio_with_meter_error
from pytest_emad.statistics.units import ByPair
from pytest_emad.statistics.verdicts import Verdict

SMOKE_PAIRS = 6  # pairs of five-second windows; thirty, which decide, take more minutes than the smallest budget has
HALF = 2  # pairs of requests per pair of windows, dozens of which take ``standard`` half an hour
ARMS = ("adaptive", "full")  # in the order of ``JoulesPerToken``
ALONE = "in this process alone (another on the device spoils a window)"


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
    """Answer EMAD-N1 from the counter of the model's device.

    The smallest budget is too short for a processor's counter.
    """
    with open_energy_counter(evidence.subject.stepper, packages=evidence.study.budget.rank > 0) as counter:
        energies = measure_energy_by_batch_size(evidence, counter)
    verdict = decide_energy(make_energy_evidence_from_results(energies), asked)
    notes = tuple(
        f"{evidence.name}: energy at batch {rows}: {format_energy_note(each)}"
        for rows, each in energies.items()
        if isinstance(each, EnergyResult)
    )
    return Answer(verdict, evidence.corpus, evidence.fingerprint, Attachments(notes=notes))


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
    """Text about the instrument, its refresh time, the checks, unavailable checks, and discarded windows."""
    moves = (f"moves every {1000 * energies.refresh_s:.3g} ms",) if energies.refresh_s else ()
    spoiled = f"{len(energies.spoiled)} windows spoiled"
    return "; ".join((energies.source, ALONE, *moves, *energies.caveats, spoiled))


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
    evidence: ModelMeasurements, counter: EnergyCounter | Absent
) -> dict[int, EnergyResult | Absent]:
    """Batch size → its windows; stops at the first that cannot be measured."""
    energies: dict[int, EnergyResult | Absent] = {}
    for rows in evidence.study.budget.batch_sizes:
        energies[rows] = (
            counter if isinstance(counter, Absent) else measure_energy_against_full_depth(evidence, counter, rows)
        )
        if isinstance(energies[rows], Absent):
            break
    return energies


def measure_energy_against_full_depth(
    evidence: ModelMeasurements, counter: EnergyCounter, rows: int
) -> EnergyResult | Absent:
    """Joules and tokens of full depth and of the timed point, for requests of the same shape as the timed ones.

    Raises:
        Unsupported: the decoder under test declines one of them.
    """
    subject, latency = evidence.subject, evidence.latency
    length, new = latency.request_shape
    pairs = SMOKE_PAIRS if subject.budget.rank == 0 else subject.budget.pairs // HALF
    prompts = subject.make_equal_prompts(rows * (pairs + 1), length)

    def arm(decoder: Decoder) -> Callable[[int, int], int]:
        def run(pair: int, request: int) -> int:
            first = (pair + 1 + request) % (pairs + 1) * rows
            record = decoder.generate(prompts[first : first + rows], new, frozenset())
            return sum(len(emitted) for emitted in record.emitted)

        return run

    with (
        subject.open_audited_decoder(subject.full_depth_point, max_rows=rows) as full,
        subject.open_audited_decoder(latency.most_saving_point, max_rows=rows) as adaptive,
    ):
        refresh = measure_refresh_seconds(counter)
        if isinstance(refresh, Absent):
            return refresh
        at_full = arm(full)
        agreement = counter_to_power_ratio(counter, lambda request: at_full(-1, request), synchronize=full.synchronize)
        energies = measure_energy_pairs(
            {"full": at_full, "adaptive": arm(adaptive)},
            pairs,
            np.random.default_rng(subject.seed),
            counter,
            synchronize=full.synchronize,
        )
    return energies if isinstance(energies, Absent) else add_counter_checks_to_result(energies, refresh, agreement)


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
