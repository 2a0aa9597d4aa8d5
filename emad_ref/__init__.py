"""The reference: early-exit decoding as the papers define it, for reading, checking and reuse in research.

    import emad_ref as emad

Load a model
    ``load`` takes a name or folder. A ``Stepper`` runs a model layer by layer: ``CausalStepper``, ``Seq2SeqStepper``.
    ``weights_folder`` returns the folder of the bundled models.
Calibrate when to exit
    Two calls suffice for most uses: ``take_profile`` measures mean entropies on one text, ``choose_margin`` chooses a
    margin on another. Their parts: ``take_trace`` records every layer's readout, ``profile_of`` makes a profile of it,
    and ``calibrate`` makes one from text of any length. ``load_profile`` reads a profile, ``merge`` adds several.
State when to exit
    ``OperatingPoint`` holds rule, thresholds and schedule as data; ``full_depth`` and ``truncated`` make points of
    fixed depth.
Decode
    ``stream`` writes text token by token with its depth. ``WalkedDecoder`` decodes batches of prompts, ``adaptive``
    goes into Transformers' ``model.generate``.
Draft with the same model
    ``draft`` and ``self_speculate`` verify drafts at full depth, by ``Drafting`` or by an exit layer.
    ``DraftingDecoder`` is the fast form, and ``drafting_point`` its point.
Decode with two models
    ``switch`` lets them take turns by a ``SwitchingRule`` (EAD), ``speculate`` lets one draft and the other verify.
    Each model is a ``Partner``. ``stream_pair`` streams the text of two models that switch.
Fit readouts of early layers
    ``fit_lens``, ``fit_gate`` and ``fit_translators`` fit them on text, ``load_lens`` reads a lens, ``attach_lens`` and
    ``attach_translators`` give them to a model. ``decode_losses`` gives the losses of points that replay cannot
    decide.
Count work
    ``Record`` holds a decoder's decisions, ``Work`` what it ran; ``flops`` turns work into FLOPs.
Write a decoder of your own
    It takes ``Prompt`` and ``Request`` and has ``Capabilities``. It raises ``Unsupported`` or ``InadmissibleDepth``,
    and may report ``StatedRule``, ``TokenLogProbs``, ``DraftCounts`` and ``TokenArrivals``.
Catch errors
    ``EmadError`` is the base; ``BadArgument`` and ``ModelUnavailable`` are the most frequent.

This package decides no claim, and knows no test run. Its names load on first use: importing it imports neither torch
nor transformers, because a pytest plugin imports it in every test run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {  # in the order of the docstring
    "load": "emad_ref.models.loading",
    "Stepper": "emad_ref.models.stepper",
    "CausalStepper": "emad_ref.models.causal",
    "Seq2SeqStepper": "emad_ref.models.seq2seq",
    "weights_folder": "emad_ref.models.bundled",
    "take_profile": "emad_ref.tuning",
    "choose_margin": "emad_ref.tuning",
    "take_trace": "emad_ref.calibration.trace",
    "profile_of": "emad_ref.calibration.profile",
    "calibrate": "emad_ref.calibration.calibration_run",
    "load_profile": "emad_ref.calibration.profile",
    "merge": "emad_ref.calibration.profile",
    "OperatingPoint": "emad_ref.point",
    "full_depth": "emad_ref.point",
    "truncated": "emad_ref.point",
    "stream": "emad_ref.decoding.streaming",
    "WalkedDecoder": "emad_ref.decoding.reference",
    "adaptive": "emad_ref.decoding.custom_generate",
    "draft": "emad_ref.decoding.self_speculation",
    "self_speculate": "emad_ref.decoding.self_speculation",
    "Drafting": "emad_ref.decoding.self_speculation",
    "DraftingDecoder": "emad_ref.decoding.self_speculation",
    "drafting_point": "emad_ref.decoding.self_speculation",
    "switch": "emad_ref.decoding.switching",
    "SwitchingRule": "emad_ref.decoding.switching",
    "speculate": "emad_ref.decoding.speculation",
    "Partner": "emad_ref.decoding.partner",
    "stream_pair": "emad_ref.decoding.streaming",
    "fit_lens": "emad_ref.calibration.lens_fit",
    "fit_gate": "emad_ref.calibration.linear_maps",
    "fit_translators": "emad_ref.calibration.linear_maps",
    "load_lens": "emad_ref.calibration.lens_files",
    "attach_lens": "emad_ref.probes.tuned_lens",
    "attach_translators": "emad_ref.probes.tuned_lens",
    "decode_losses": "emad_ref.replay.losses",
    "Record": "emad_ref.record",
    "Work": "emad_ref.record",
    "flops": "emad_ref.flop_ledger",
    "Prompt": "emad_ref.protocol",
    "Request": "emad_ref.protocol",
    "Capabilities": "emad_ref.protocol",
    "Unsupported": "emad_ref.protocol",
    "InadmissibleDepth": "emad_ref.protocol",
    "StatedRule": "emad_ref.protocol",
    "TokenLogProbs": "emad_ref.protocol",
    "DraftCounts": "emad_ref.protocol",
    "TokenArrivals": "emad_ref.protocol",
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
