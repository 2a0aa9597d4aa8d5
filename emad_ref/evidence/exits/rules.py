"""The rules that claims about early exits name, and the paper's minimum exit layers at another depth.

JSD has two readings. The paper's has nothing to contrast with at j and decides from j + 1 on; the authors' code, a rule
of its own here (``AS_CODED``), contrasts with layers below j too and decides from j on.

The paper's minimum layers 7 and 19 belong to 24 layers; here they stand at the same share of depth.
"""

from __future__ import annotations

from emad_ref.models.geometry import Geometry

# name → (signal, pruning), as ``policy.early_exit`` names them
RULES: dict[str, tuple[str, str]] = {
    "softmax": ("softmax_response", "none"),
    "softmax, fixed": ("softmax_response", "fixed"),
    "softmax, decaying": ("softmax_response", "decaying"),
    "weighted contrast": ("weighted_contrast", "none"),
    "JSD": ("jsd_contrast", "none"),
    "JSD, fixed": ("jsd_contrast", "fixed"),
    "JSD, decaying": ("jsd_contrast", "decaying"),
    "JSD, adaptive": ("jsd_contrast", "adaptive"),
}
AS_CODED = "JSD, as coded"
FIRST_AMATEUR = 2  # of the authors' code; 1 where j is 2, which else had nothing to contrast with
THRESHOLD = 0.9  # the paper's λ
PUBLISHED_MINIMA, PUBLISHED_LAYERS = (7, 19), 24
LEAST_LAYERS = 4  # fewer leave no room for two minimum layers and a pruned one
LEAST_VOCABULARY = 258  # of fewer tokens the published k*, scaled, keeps less than two


def first_amateur(minimum: int) -> int:
    """The first layer that JSD as coded contrasts with, for decisions from ``minimum`` ≥ 2 on."""
    return min(FIRST_AMATEUR, minimum - 1)


def minimum_layers(layers: int) -> tuple[int, ...]:
    """The paper's minimum layers 7 and 19 of 24, at the same share of ``layers`` ≥ 4."""
    scaled = (round(layers * minimum / PUBLISHED_LAYERS) for minimum in PUBLISHED_MINIMA)
    # contrasts need a layer below, pruning one above that is not the last
    return tuple(sorted({max(2, min(layers - 2, minimum)) for minimum in scaled}))


def has_room(geometry: Geometry) -> bool:
    """Whether the paper's minimum layers and pruned vocabularies exist at this size."""
    return geometry.layers >= LEAST_LAYERS and geometry.vocabulary >= LEAST_VOCABULARY
