"""What a screening leaves behind for one model: how it may leave early, how it drafts for itself, or why not.

An *exit* holds everything that decoding with it needs beside the model: the tuned lens and its gate, maps for K and V
above an exit, one lossy operating point with its guarantee, and a way to draft that changes nothing. What was measured
on the way, and on what, stands beside it as plain JSON. Any of the parts may be missing; no lossy point: it says why.

Points name lens and maps by digest; ``attach`` puts the tensors where the model that decodes finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.generation.streamers import BaseStreamer

from emad_ref.calibration.lens_file import FittedLens
from emad_ref.decoding.custom_generate import adaptive
from emad_ref.decoding.drafting import Drafting
from emad_ref.errors import BadArgument
from emad_ref.models.loading import Loaded
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.readout.states import StateTranslators, attach_translators
from emad_ref.readout.tuned import attach_lens
from emad_ref.screening.guarantee import Guarantee
from emad_ref.screening.signs import Signs


@dataclass(frozen=True, eq=False)
class Exit:
    """``fitted``: the lens and its gate. ``lossy``: the point that screening recommends, or None, and ``why_none``.

    ``guarantee``: what is promised of ``lossy``; None where nothing is. ``drafting``: how the model drafts for itself,
    its own output unchanged; None where that does not pay.
    ``screened``: tables and provenance, plain JSON, for the record: nothing is decided by them.
    ``translators``: of states above an exit, where ``lossy`` fills K and V in by them.
    ``signs``: of the documents that ``guarantee`` was certified on, at ``lossy``: what ``emad drift`` compares with.
    ``spoken``: a lens for drafts, fitted on what the model says by itself (``draft_lens``), where drafts read by one.

    Raises:
        BadArgument: neither or both of a point and a reason for none; a point or a draft of another model or lens; a
            promise about another point.
    """

    fitted: FittedLens
    lossy: OperatingPoint | None = None
    why_none: str = ""
    guarantee: Guarantee | None = None
    drafting: Drafting | None = None
    screened: Mapping[str, Any] = field(default_factory=dict)
    signs: Signs | None = None
    translators: StateTranslators | None = None
    spoken: FittedLens | None = None

    def __post_init__(self) -> None:
        if (self.lossy is None) != bool(self.why_none):
            expected = "a reason where there is no lossy point, and only there"
            raise BadArgument("exit.why_none", self.why_none, expected)
        if self.lossy is not None:
            self._require_own(self.lossy)
        named = None if self.guarantee is None else self.guarantee.chosen
        if named is not None and (self.lossy is None or named != self.lossy.name):
            found = None if self.lossy is None else self.lossy.name
            raise BadArgument("exit.guarantee.chosen", named, f"{found!r}, the point that is recommended")
        if self.drafting is not None:
            self.drafting.require(self.fitted.lens.layers)
            self._require_lens("drafting", self.drafting.lens, self.spoken)

    def _require_own(self, point: OperatingPoint) -> None:
        if point.layers != self.fitted.lens.layers:
            raise BadArgument("exit.lossy.layers", point.layers, f"{self.fitted.lens.layers}, the layers of its lens")
        self._require_lens("lossy", point.lens)
        own = None if self.translators is None else self.translators.digest
        if point.translators not in (None, own):
            raise BadArgument("exit.lossy.translators", point.translators, "None, or the digest of its own translators")

    def _require_lens(self, part: str, digest: str | None, other: FittedLens | None = None) -> None:
        own = {self.fitted.lens.digest} | ({other.lens.digest} if other is not None else set())
        if digest is not None and digest not in own:
            raise BadArgument(f"exit.{part}.lens", digest, "None, or the digest of its own lens")

    @property
    def fingerprint(self) -> str:
        """Of the model that it belongs to."""
        return self.fitted.lens.fingerprint

    @property
    def point(self) -> OperatingPoint:
        """What to decode at: the lossy point, or all layers where there is none."""
        return full_depth(self.fitted.lens.layers) if self.lossy is None else self.lossy

    def attach(self, model: Loaded) -> Exit:
        """Let ``model`` decode with what this holds, as long as its stepper lives; returns itself.

        Raises:
            BadArgument: another model, dtype, number of layers or width than it was made on.
        """
        attach_lens(model.stepper, self.fitted.lens, model.fingerprint)
        if self.spoken is not None:
            attach_lens(model.stepper, self.spoken.lens, model.fingerprint)
        if self.translators is not None:
            attach_translators(model.stepper, self.translators, model.fingerprint)
        return self

    def custom_generate(self, model: Loaded, *, streamer: BaseStreamer | None = None) -> Callable[..., Any]:
        """What ``model.model.generate`` takes under this name, to decode at ``point``.

        Raises:
            BadArgument: as ``attach``.
        """
        return adaptive(self.attach(model).point, loaded=model, streamer=streamer)
