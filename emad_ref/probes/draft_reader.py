"""The readout of drafted tokens: the likeliest token after a layer, and the gate's expected divergence.

    gate   w·norm(h) + c [rows], √nats, without translator
    token  S[argmax(W_S·norm(T(h)) + b_S)], T the lens' translator, S the pruned vocabulary

W_S is gathered once. A full T is one product, (I + A)·h + b. The softcap is omitted, because it keeps the order. So a
draft may differ from the lens's own readout where two tokens tie up to rounding. The work counts E multiply-adds for a
gate, D² or 2·D·r for a translator, and k·E for a pruned head (kind ``subset``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from emad_ref.errors import BadArgument
from emad_ref.models.fast.fused_blocks import multiply_by_weight
from emad_ref.models.fast.weight_layout import to_preferred_weight_layout
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator
from emad_ref.probes.estimators import build_linear_probe
from emad_ref.probes.tuned_lens import Translator, get_attached_lens
from emad_ref.record import Ints, Work
from emad_ref.signals import upcast_to_float32


class EarlyExitDraftReader:
    """Reads states [rows, D] after ``layer``.

    ``lens``: digest of an attached lens, or None. ``gate``: linear with one probe, or None. ``vocabulary``: int64 [k]
    ids, None for all.

    Raises:
        BadArgument: a lens that is not attached or does not translate ``layer``, a gate of another width.
    """

    def __init__(
        self, stepper: Stepper, layer: int, lens: str | None, gate: EntropyEstimator | None, vocabulary: Ints | None
    ):
        self._stepper, self._layer = stepper, layer
        tuned = get_attached_lens(stepper, lens)
        if tuned is not None and layer not in tuned.translators:
            has = ", ".join(map(str, tuned.translators))
            raise BadArgument("drafting.layer", layer, f"a layer that the lens translates ({has})", "fit it there too")
        self._translator = None if tuned is None else tuned.translators[layer]
        self._gate = None if gate is None else build_linear_probe(gate.weights, 1, stepper.unembedding)
        geometry = stepper.geometry
        projected = geometry.hidden * geometry.embedding_width if geometry.hidden != geometry.embedding_width else 0
        self._gate_macs = geometry.embedding_width + projected
        # gathered outside inference mode, since it outlives one forward
        with torch.inference_mode(False), torch.no_grad():
            self._moved = None if self._translator is None else _single_matrix(self._translator)
            self._ids = None if vocabulary is None else torch.from_numpy(vocabulary).to(stepper.device)
            self._rows, self._bias = _head_rows(stepper, self._ids)
        self._head_macs = 0 if self._ids is None else self._rows.numel() + projected

    def predict_sqrt_kl(self, hidden: Tensor, work: Work) -> Tensor:
        """The gate's expected √KL in √nats, float [rows], of states [rows, D]; may be non-finite."""
        assert self._gate is not None, "a drafting without a gate reads none"
        work.count_readout("linear", self._layer, len(hidden), len(hidden) * self._gate_macs)
        return self._gate(self._stepper.apply_final_norm(hidden), 0)

    def draft_tokens(self, hidden: Tensor, work: Work) -> Tensor:
        """The likeliest token of the vocabulary by each state [rows, D], int64 [rows]."""
        kind = "full" if self._ids is None else "subset"
        work.count_readout(kind, self._layer, len(hidden), len(hidden) * self._head_macs)
        if self._translator is not None:
            work.count_readout("full", self._layer, 0, len(hidden) * self._translator.macs_per_row)
            hidden = self._translated(hidden)
        best = multiply_by_weight(self._stepper.apply_final_norm(hidden), self._rows, self._bias).argmax(dim=-1)
        return best if self._ids is None else self._ids[best]

    def _translated(self, hidden: Tensor) -> Tensor:
        assert self._translator is not None
        if self._moved is None:
            return self._translator(hidden)
        return F.linear(upcast_to_float32(hidden), self._moved, self._translator.bias).to(hidden.dtype)


def _single_matrix(translator: Translator) -> Tensor | None:
    """I + A of a full translator; None for a low-rank one, since its two products are cheaper."""
    if translator.rank is not None:
        return None
    (matrix,) = translator.factors
    return to_preferred_weight_layout(matrix + torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))


def _head_rows(stepper: Stepper, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows of the head and its bias: of ``ids``, or all."""
    weight, bias = stepper.unembedding.detach(), stepper.unembedding_bias
    bias = None if bias is None else bias.detach()
    if ids is None:
        return weight, bias
    return to_preferred_weight_layout(weight.index_select(0, ids)), None if bias is None else bias.index_select(0, ids)
