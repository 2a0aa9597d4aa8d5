"""Energy: EMAD-N1, joules per generated token.

Windows of the device's own counter in pairs (``benchmark.energy``), requests of the same shape as those timed. What the
counter's steps may add or leave out widens the interval at its worst. On a CPU it is the energy of its packages where
the system shows it (``benchmark.energy.RaplCounter``), including other programs' share.

All windows are this process's: NVML lists who is on a device, and a window that another process shared is spoiled, so
that one which measured for this one could not be told from a stranger's.

Random weights draw as much as trained ones: quality is no premise. Without a counter, or where it sees one of several
devices, the row is unmeasured, with the reason and no number. It does not apply to an encoder-decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from emad_ref.benchmark.energy import (
    EnergyCounter,
    EnergyResult,
    NoEnergyReason,
    counter_to_power_ratio,
    measure_energy_pairs,
    measure_refresh_seconds,
    open_nvml_counter,
    open_rapl,
)
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.model_measurements import ModelMeasurements
from emad_ref.models.stepper import Stepper
from emad_ref.protocol import Decoder
from emad_ref.statistics.speedup import estimate_ratio_with_meter_error
from emad_ref.statistics.units import ByPair
from emad_ref.statistics.verdicts import Verdict

SMOKE_PAIRS = 6  # of windows of five seconds; thirty, which decide, take minutes that the smallest budget has not
HALF = (
    2  # as many pairs of requests make a pair of windows, which holds dozens of them: ``standard`` takes half an hour
)
ARMS = ("adaptive", "full")  # in the order of ``JoulesPerToken``
ALONE = "in this process alone (another on the device spoils a window)"


# joules per generated token [pairs] under the point and at full depth; by what share each may be off
JoulesPerToken = tuple[ByPair, ...]
# batch size → joules; or why one could not be measured, so that none is judged
EnergyEvidence = Mapping[int, JoulesPerToken] | str


def decide_energy(found: EnergyEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-N1: a leg per batch size, how many times full depth's joules a token takes.

    It estimates the ratio of joules per token summed over windows, which together are one mix of requests.
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
    """From the counter of the device that the model lies on.

    The smallest budget has not the minutes for a processor's, and would decide nothing by them.
    """
    with open_energy_counter(evidence.subject.stepper, packages=evidence.study.budget.rank > 0) as counter:
        energies = measure_energy_by_batch_size(evidence, counter)
    verdict = decide_energy(gather_energy_evidence(energies), asked)
    notes = tuple(
        f"{evidence.name}: energy at batch {rows}: {format_energy_note(each)}"
        for rows, each in energies.items()
        if isinstance(each, EnergyResult)
    )
    return Answer(verdict, evidence.corpus, evidence.fingerprint, Attachments(notes=notes))


def gather_energy_evidence(energies: Mapping[int, EnergyResult | NoEnergyReason]) -> EnergyEvidence:
    """Evidence for EMAD-N1 from energies by batch size: readings from a device, or replayed ones."""
    found = {}
    for rows, each in energies.items():
        if isinstance(each, NoEnergyReason):
            return each.reason
        adaptive, full = (ByPair(each.joules_per_token(arm)) for arm in ARMS)
        found[rows] = adaptive, full, *(ByPair(each.relative_resolution(arm)) for arm in ARMS)
    return found


def format_energy_note(energies: EnergyResult) -> str:
    """Which instrument was read, how often it moves, what was and what could not be checked, what was thrown away."""
    moves = (f"moves every {1000 * energies.refresh_s:.3g} ms",) if energies.refresh_s else ()
    spoiled = f"{len(energies.spoiled)} windows spoiled"
    return "; ".join((energies.source, ALONE, *moves, *energies.caveats, spoiled))


def open_energy_counter(
    stepper: Stepper, packages: bool = False
) -> AbstractContextManager[EnergyCounter | NoEnergyReason]:
    """NVML's counter of the one GPU that the model lies on, or why there is none.

    ``packages``: that of the processor (RAPL), where the model lies on no GPU.
    """
    places = {stepper.device, *stepper.devices}
    if len(places) > 1:
        return nullcontext(NoEnergyReason(f"the model lies on {len(places)} devices, and a counter sees one of them"))
    if stepper.device.type == "cpu" and packages:
        return nullcontext(open_rapl())
    return open_nvml_counter(find_device_uuid(stepper.device))


def find_device_uuid(device: torch.device) -> str | None:
    """The UUID by which NVML knows the decoder's device; None where it is not a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def measure_energy_by_batch_size(
    evidence: ModelMeasurements, counter: EnergyCounter | NoEnergyReason
) -> dict[int, EnergyResult | NoEnergyReason]:
    """Batch size → windows of it; nothing is tried after the first that cannot be measured."""
    energies: dict[int, EnergyResult | NoEnergyReason] = {}
    for rows in evidence.study.budget.batch_sizes:
        energies[rows] = counter if isinstance(counter, NoEnergyReason) else measure_energy(evidence, counter, rows)
        if isinstance(energies[rows], NoEnergyReason):
            break
    return energies


def measure_energy(evidence: ModelMeasurements, counter: EnergyCounter, rows: int) -> EnergyResult | NoEnergyReason:
    """Joules and tokens of full depth and of the timed point, requests of the same shape as those timed.

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
        if isinstance(refresh, NoEnergyReason):
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
    return energies if isinstance(energies, NoEnergyReason) else with_counter_checks(energies, refresh, agreement)


def with_counter_checks(energies: EnergyResult, refresh_s: float, agreement: float | NoEnergyReason) -> EnergyResult:
    """``energies`` with the counter's refresh time and its agreement with the power readings."""
    if isinstance(agreement, NoEnergyReason):
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
