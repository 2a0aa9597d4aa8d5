"""What a stepper holds against the model it walks when it is made: usable at all, of the row's size, the same logits.

A row of ``models.families`` that does not fit (another variant of the family, another version of transformers) fails
here, loudly and before anything is measured. Equal logits alone are not enough: they do not notice experts that a
dense row's FLOPs leave out, nor parameters that no layer of the walk reads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument, EmadError
from emad_ref.models.anatomy import ATTENTION_KERNELS, BACKENDS
from emad_ref.models.cache import Cache
from emad_ref.models.geometry import Geometry
from emad_ref.models.stepper import Stepper

CHECKED_ROWS, CHECKED_TOKENS = 2, 12
# largest |Δlogit| / max|logit| at construction: the same operations in the same order, except for masks given as
# numbers instead of flags; a wrong family is off by the order of 1
CHECK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class ModelMismatch(EmadError):
    """Walking the layers does not give the model's own logits; ``relative`` is max |Δ| / max |logit|."""

    def __init__(self, family: str, relative: float, tolerance: float):
        self.relative = relative
        super().__init__(
            f"model_type={family!r}, but its layers walked one by one give logits off by {relative:.2e} of the largest "
            f"logit (at most {tolerance:.0e} expected); its row in emad_ref/models/families.py does not fit this "
            "checkpoint or this version of transformers"
        )


class SizeMismatch(EmadError):
    """The row's sizes do not add up to the model's parameters: every FLOP count would be another model's.

    ``counted`` by the row, ``held`` by the model, tied ones once.
    """

    def __init__(self, family: str, counted: int, held: int):
        self.counted, self.held = counted, held
        super().__init__(
            f"model_type={family!r}, but the sizes in its config make {counted:,} parameters and the model holds "
            f"{held:,}; its row in emad_ref/models/families.py does not fit this checkpoint or this version of "
            "transformers, or something was added to the model: give its family a row of its own"
        )


def require_usable(model: Any, kernel: str) -> None:
    """Refuse training mode, and attention that takes no additive mask."""
    if model.training:
        raise BadArgument("model.training", True, "a model in eval mode", "call model.eval()")
    if kernel not in ATTENTION_KERNELS:
        raise BadArgument("attn_implementation", kernel, " or ".join(ATTENTION_KERNELS))


def require_backend(name: str) -> None:
    """Refuse a backend that is not in ``anatomy.BACKENDS``."""
    if name not in BACKENDS:
        raise BadArgument("backend", name, f"one of {', '.join(BACKENDS)}")


def require_size(model: Any, geometry: Geometry) -> None:
    """Raise SizeMismatch unless the model holds the parameters that its row counts; see ``parameters_held``."""
    held = parameters_held(model)
    if held is not None and held != geometry.parameters():
        raise SizeMismatch(geometry.family, geometry.parameters(), held)


def parameters_held(model: Any) -> int | None:
    """Parameters of ``model``, tied ones once, or of its text part where it also reads images or sound.

    None, for there is nothing to compare, where weights are quantised: then they lie packed in buffers or in objects
    of their own, not in parameters. Such a model is known by its config, or by modules whose ``weight`` is a method
    (PyTorch's own int8 layers).
    """
    config = model.config.get_text_config()
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    if any(callable(getattr(module, "weight", None)) for module in model.modules()):
        return None
    parts = (model,) if config is model.config else (model.get_decoder(), model.get_output_embeddings())
    return sum(one.numel() for one in {id(one): one for part in parts for one in part.parameters()}.values())


def require_agreement(
    stepper: Stepper, family: str, ids: Tensor, theirs: Tensor, whole: Cache | None, stepped: Cache
) -> None:
    """Raise ModelMismatch unless one pass, and a prompt, a chunk and a token on its cache, give the model's own logits.

    ``ids`` int64 [rows, n]; ``theirs`` [rows, n, V] the model's own; ``whole``, ``stepped``: the caches to walk with,
    empty; None is no cache.
    """
    most = CHECK_TOLERANCE[stepper.dtype]
    require_same(family, _full_depth(stepper, ids, 0, whole), theirs.double(), most)
    last = ids.shape[1] - 1
    for start, end in pairwise((0, last // 2, last, last + 1)):
        mine = _full_depth(stepper, ids[:, start:end], start, stepped)
        require_same(family, mine, theirs[:, start:end].double(), most)


def require_same(family: str, mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Raise ModelMismatch unless two float64 tensors of logits differ by ``tolerance`` of the largest at most."""
    same = mine.shape == theirs.shape
    relative = float((mine - theirs).abs().max() / theirs.abs().max()) if same else float("inf")
    if not relative <= tolerance:  # NaN too
        raise ModelMismatch(family, relative, tolerance)


def _full_depth(stepper: Stepper, ids: Tensor, start: int, cache: Cache | None) -> Tensor:
    frame = stepper.frame(np.tile(np.arange(start, start + ids.shape[1]), (len(ids), 1)), cache)
    return stepper.logits(stepper.run(stepper.embed(ids, frame), 0, stepper.layers, frame, cache)).double()


def part_named(family: str, decoder: Any, name: str | None) -> Any | None:
    """``decoder.name``; None where the family has no such part.

    Raises:
        BadArgument: a decoder without the part that the row names.
    """
    if name is None:
        return None
    if not hasattr(decoder, name):
        remedy = "its row in emad_ref/models/families.py does not fit this checkpoint or this version of transformers"
        raise BadArgument("model_type", family, f"a decoder with the part {name!r}", remedy)
    return getattr(decoder, name)
