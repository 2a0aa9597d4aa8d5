"""Reference implementation of adaptive-depth decoding.

Names below load on first use: importing this package imports neither torch nor transformers, because the pytest plugin
imports it in every test run of every project that has it installed.
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
    "InadmissibleDepth": "emad_ref.protocol",
    "Record": "emad_ref.record",
    "Work": "emad_ref.record",
    "take_trace": "emad_ref.calibration.trace",
    "profile_of": "emad_ref.calibration.profile",
    "load_profile": "emad_ref.calibration.profile",
    "calibrate": "emad_ref.calibration.resume",
    "merge": "emad_ref.calibration.profile",
    "take_profile": "emad_ref.tuning",
    "choose_margin": "emad_ref.tuning",
    "stream": "emad_ref.decoding.streaming",
    "stream_pair": "emad_ref.decoding.streaming",
    "fit_lens": "emad_ref.calibration.tuning",
    "load_lens": "emad_ref.calibration.lens_file",
    "attach_lens": "emad_ref.readout.tuned",
    "fit_gate": "emad_ref.calibration.gate",
    "load_exit": "emad_ref.screening.exit_file",
    "fit_translators": "emad_ref.calibration.translating",
    "attach_translators": "emad_ref.readout.states",
    "decoded_columns": "emad_ref.sweep.decoded",
    "Partner": "emad_ref.decoding.pair",
    "SwitchingRule": "emad_ref.decoding.switching",
    "switch": "emad_ref.decoding.switching",
    "speculate": "emad_ref.decoding.speculative",
    "adaptive": "emad_ref.decoding.custom_generate",
    "self_speculate": "emad_ref.decoding.selfdraft",
    "Drafting": "emad_ref.decoding.drafting",
    "drafting_point": "emad_ref.decoding.drafting",
    "draft": "emad_ref.decoding.drafting",
    "DraftingDecoder": "emad_ref.decoding.drafted",
    "WalkedDecoder": "emad_ref.decoding.walked",
    "flops": "emad_ref.meters.flops",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
