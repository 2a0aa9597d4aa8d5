"""Reference implementation of adaptive-depth decoding.

Names below load on first use. Importing this package imports neither torch nor transformers, because the pytest plugin
imports it in every test run of every project with this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "load": "emad_ref.models.loading",
    "weights_folder": "emad_ref.models.bundled",
    "Stepper": "emad_ref.models.stepper",
    "CausalStepper": "emad_ref.models.causal",
    "Seq2SeqStepper": "emad_ref.models.seq2seq",
    "OperatingPoint": "emad_ref.point",
    "full_depth": "emad_ref.point",
    "truncated": "emad_ref.point",
    "Prompt": "emad_ref.protocol",
    "Request": "emad_ref.protocol",
    "Capabilities": "emad_ref.protocol",
    "Unsupported": "emad_ref.protocol",
    "StatedRule": "emad_ref.protocol",
    "TokenLogProbs": "emad_ref.protocol",
    "DraftCounts": "emad_ref.protocol",
    "TokenArrivals": "emad_ref.protocol",
    "InadmissibleDepth": "emad_ref.protocol",
    "Record": "emad_ref.record",
    "Work": "emad_ref.record",
    "take_trace": "emad_ref.calibration.trace",
    "profile_of": "emad_ref.calibration.profile",
    "load_profile": "emad_ref.calibration.profile",
    "calibrate": "emad_ref.calibration.calibration_run",
    "merge": "emad_ref.calibration.profile",
    "take_profile": "emad_ref.tuning",
    "choose_margin": "emad_ref.tuning",
    "stream": "emad_ref.decoding.streaming",
    "stream_pair": "emad_ref.decoding.streaming",
    "fit_lens": "emad_ref.calibration.lens_fit",
    "load_lens": "emad_ref.calibration.lens_files",
    "attach_lens": "emad_ref.probes.tuned_lens",
    "fit_gate": "emad_ref.calibration.linear_maps",
    "fit_translators": "emad_ref.calibration.linear_maps",
    "attach_translators": "emad_ref.probes.tuned_lens",
    "decoded_columns": "emad_ref.replay.losses",
    "Partner": "emad_ref.decoding.partner",
    "SwitchingRule": "emad_ref.decoding.switching",
    "switch": "emad_ref.decoding.switching",
    "speculate": "emad_ref.decoding.speculation",
    "adaptive": "emad_ref.decoding.custom_generate",
    "self_speculate": "emad_ref.decoding.self_speculation",
    "Drafting": "emad_ref.decoding.self_speculation",
    "drafting_point": "emad_ref.decoding.self_speculation",
    "draft": "emad_ref.decoding.self_speculation",
    "DraftingDecoder": "emad_ref.decoding.self_speculation",
    "WalkedDecoder": "emad_ref.decoding.reference",
    "flops": "emad_ref.flop_ledger",
    "EmadError": "emad_ref.errors",
    "BadArgument": "emad_ref.errors",
    "ModelUnavailable": "emad_ref.models.names",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
