"""Layer-by-layer interface of a model, and the self-check that compares it with the model's own forward.

    cache = stepper.open_cache(sources)                 # one row per source; None if the model reads none
    inputs = stepper.prepare_forward(positions, cache)  # rows, positions, masks and K/V of one forward
    hidden = stepper.embed(tokens, inputs)              # h_0 [rows, n, D]
    hidden = stepper.run_layers(hidden, 0, j, inputs)   # h_j: the state after j blocks
    logits = stepper.logits(hidden)                     # head(norm(h_j)), the readout at any depth

``models.causal`` implements ``Stepper`` for decoder-only families, ``models.seq2seq`` for T5. Tensors that cross the
interface lie on ``stepper.device``. Layers count from 1. Call under ``torch.inference_mode()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument, EmadError, convert_errors_to_bad_argument
from emad_ref.models.families import ATTENTION_KERNELS, BACKENDS
from emad_ref.models.geometry import Geometry
from emad_ref.models.kv_cache import KVCache, RunningRows
from emad_ref.models.placement import to_device
from emad_ref.record import Bools, Ints

FIRST_TABLE = 256  # initial positions of a table that a stepper keeps between forwards; it doubles


class LayerInputs(Protocol):
    """All that the layers of one forward take besides their states; ``Stepper.prepare_forward`` makes it.

    Attributes
    ----------
    running : RunningRows
        Rows and positions.
    cache : KVCache or None
        K and V that the layers read and write.
    executed : int
        Keys that every query was executed against in the last run, padding and masked ones included: ``running.keys``,
        or more where a captured graph fixes the number (``models.fast.graph_capture``).
    """

    @property
    def running(self) -> RunningRows: ...
    @property
    def cache(self) -> KVCache | None: ...
    @property
    def executed(self) -> int: ...

    def select_rows(self, running: RunningRows) -> Self:
        """The inputs of ``running``, some of these rows."""
        ...


class Stepper(Protocol):
    """One model, layer by layer.

    Attributes
    ----------
    device, dtype : torch.device, torch.dtype
        Those of the head: of token ids, states and logits.
    devices : tuple of torch.device
        Devices of the blocks.
    layers : int
        L, the decoder's blocks.
    vocabulary_size : int
        V.
    geometry : Geometry
        Sizes, for FLOPs.
    max_positions : int
        Number of supported positions.
    attention_kernel : str
        Attention kernel, ``sdpa`` or ``eager``.
    logit_softcap : float or None
        Cap c on logits, c·tanh(z/c).
    unembedding : Tensor [V, E]
        Rows of the head.
    unembedding_bias : Tensor [V] or None
        Logits are softcap(normed(h) · unembeddingᵀ + unembedding_bias).
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def devices(self) -> tuple[torch.device, ...]: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def layers(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def attention_kernel(self) -> str: ...
    @property
    def logit_softcap(self) -> float | None: ...
    @property
    def unembedding(self) -> Tensor: ...
    @property
    def unembedding_bias(self) -> Tensor | None: ...

    def open_cache(self, sources: Sequence[Ints | None], capacity: int = 256) -> KVCache:
        """An empty cache with one row per source, int64 [s ≥ 1], or None for a model without sources.

        Raises:
            BadArgument: a source that the model cannot read, or a missing one.
        """
        ...

    def new_cache(self, rows: int, capacity: int = 256) -> KVCache:
        """An empty cache for ``rows`` sequences without sources; ``capacity`` slots at first, more as needed."""
        ...

    def prepare_forward(
        self,
        positions: Ints,
        cache: KVCache | None,
        rows: Ints | None = None,
        lengths: Ints | None = None,
        caps: Ints | None = None,
        by_rule: Bools | None = None,
    ) -> LayerInputs:
        """Prepare one forward.

        ``positions`` int64 [rows, n], consecutive in each row; without a cache they start at 0.
        ``rows`` int64 [rows] session rows taking part, ascending; all by default.
        ``lengths`` int64 [rows] valid tokens of a chunk padded on the right, 1…n; n by default. Results of padding are
        meaningless and get overwritten.
        ``caps`` int64 [rows], ``by_rule`` bool [rows]: of a step at adaptive depth (``kv_cache.RunningRows``); L and
        False by default.

        Raises:
            BadArgument: other shapes or values, positions beyond a table of positions, a cache without the sources
                that the model reads.
        """
        ...

    def embed(self, tokens: Tensor, inputs: LayerInputs) -> Tensor:
        """h_0 [rows, n, D] of ``tokens`` int64 [rows, n], the input of the first block."""
        ...

    def run_layers(self, hidden: Tensor, first: int, last: int, inputs: LayerInputs) -> Tensor:
        """h_last from h_first, [rows, n, D]: executes layers first+1 … last and writes their K/V.

        Raises:
            BadArgument: not 0 ≤ first ≤ last ≤ L.
            MissingEntryError: a layer does not hold exactly the entries below a row's first position; nothing was
            written.
        """
        ...

    def write_kv(self, hidden: Tensor, layer: int, inputs: LayerInputs) -> None:
        """Write K and V of ``layer`` (1…L) from the state below it, ``hidden`` [rows, n, D]; no attention, no MLP.

        Raises:
            BadArgument: no such layer.
            MissingEntryError: as in ``run_layers``.
        """
        ...

    def apply_final_norm(self, hidden: Tensor) -> Tensor:
        """The head's input [..., E] of states [..., D] after any layer."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Readout [..., V] of states [..., D] after any layer."""
        ...


CHECKED_ROWS, CHECKED_TOKENS = 2, 12
# largest |Δlogit| / max|logit| at construction: the same operations in the same order, except for masks given as
# numbers instead of flags; a wrong family differs by about 1
CHECK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class ModelMismatch(EmadError):
    """Raised if the layers do not give the model's own logits; ``relative`` is max |Δ| / max |logit|."""

    def __init__(self, family: str, relative: float, tolerance: float):
        self.relative = relative
        super().__init__(
            f"model_type={family!r}, but its layers walked one by one give logits off by {relative:.2e} of the largest "
            f"logit (at most {tolerance:.0e} expected); its row in emad_ref/models/families.py does not fit this "
            "checkpoint or this version of transformers"
        )


class SizeMismatch(EmadError):
    """Raised if the row's sizes do not add up to the model's parameters: FLOP counts would be wrong.

    ``counted`` by the row, ``held`` by the model, tied ones once.
    """

    def __init__(self, family: str, counted: int, held: int):
        self.counted, self.held = counted, held
        super().__init__(
            f"model_type={family!r}, but the sizes in its config make {counted:,} parameters and the model holds "
            f"{held:,}; its row in emad_ref/models/families.py does not fit this checkpoint or this version of "
            "transformers, or something was added to the model: give its family a row of its own"
        )


def make_source_cache_or_none(stepper: Stepper, sources: Sequence[Ints | None], positions: int) -> KVCache | None:
    """The cache for one plain pass: None, or a cache with the encoded sources."""
    return None if all(source is None for source in sources) else stepper.open_cache(sources, positions)


def require_eval_mode_and_kernel(model: Any, kernel: str) -> None:
    """Raise BadArgument for training mode, and for attention without an additive mask."""
    if model.training:
        raise BadArgument("model.training", True, "a model in eval mode", "call model.eval()")
    if kernel not in ATTENTION_KERNELS:
        raise BadArgument("attn_implementation", kernel, " or ".join(ATTENTION_KERNELS))


def require_backend(name: str) -> None:
    if not isinstance(name, str) or name not in BACKENDS:
        raise BadArgument("backend", name, f"one of {', '.join(BACKENDS)}")


def require_parameters_match_geometry(model: Any, geometry: Geometry) -> None:
    """Raise SizeMismatch unless the model holds the parameters that its row counts; see ``count_parameters``."""
    parameters = count_parameters(model)
    if parameters is not None and parameters != geometry.parameter_count():
        raise SizeMismatch(geometry.family, geometry.parameter_count(), parameters)


def count_parameters(model: Any) -> int | None:
    """Parameters of ``model``, tied ones once, or of its text part if it also reads images or sound.

    None for quantised weights: they are packed in buffers or objects, not in parameters. Such a model declares it in
    its config, or has modules whose ``weight`` is a method (PyTorch's own int8 layers).
    """
    config = model.config.get_text_config()
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    if any(callable(getattr(module, "weight", None)) for module in model.modules()):
        return None
    parts = (model,) if config is model.config else (model.get_decoder(), model.get_output_embeddings())
    return sum(one.numel() for one in {id(one): one for part in parts for one in part.parameters()}.values())


def model_logits(model: Any, device: torch.device, **inputs: Any) -> Tensor:
    """The model's own logits on ``device``, without a cache unless ``inputs`` hold ``past_key_values``.

    Raises:
        BadArgument: its forward fails although shapes agree: no weight shows, for example, how much of a head is
            rotated.
    """
    with convert_errors_to_bad_argument(
        "model",
        model.name_or_path or model.config.model_type,
        "a config whose model runs on tokens",
        "mend config.json",
    ):
        try:
            logits: Tensor = model(**inputs, use_cache="past_key_values" in inputs).logits
        except torch.OutOfMemoryError as error:
            raise BadArgument("device", str(device), "memory for a pass over a few tokens", str(error)) from error
    return to_device(logits, device)


def require_stepper_matches_model(
    stepper: Stepper,
    family: str,
    ids: Tensor,
    theirs: Tensor,
    whole: KVCache | None,
    stepped: KVCache,
    theirs_stepped: Tensor | None = None,
) -> None:
    """Raise ModelMismatch unless one pass, and a prompt, a chunk and a token on its cache, give the model's own logits.

    ``ids`` int64 [rows, n]; ``theirs`` [rows, n, V] the model's own logits in one pass, ``theirs_stepped`` on its own
    cache, by ``checked_pieces``, if they may differ; ``whole``, ``stepped``: empty caches of the two runs; None: no
    cache.
    """
    most = CHECK_TOLERANCE[stepper.dtype]
    require_equal_logits(family, _full_depth_logits(stepper, ids, 0, whole), theirs.double(), most)
    own = theirs if theirs_stepped is None else theirs_stepped
    for start, end in checked_pieces(ids):
        mine = _full_depth_logits(stepper, ids[:, start:end], start, stepped)
        require_equal_logits(family, mine, own[:, start:end].double(), most)


def checked_pieces(ids: Tensor) -> list[tuple[int, int]]:
    """First and last position + 1 of a prompt, a chunk and a token of ``ids`` [rows, n]."""
    last = ids.shape[1] - 1
    return list(pairwise((0, last // 2, last, last + 1)))


def require_equal_logits(family: str, mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Raise ModelMismatch unless two float64 tensors of logits differ by at most ``tolerance`` of the largest."""
    same = mine.shape == theirs.shape
    relative = float((mine - theirs).abs().max() / theirs.abs().max()) if same else float("inf")
    if not relative <= tolerance:  # NaN too
        raise ModelMismatch(family, relative, tolerance)


def _full_depth_logits(stepper: Stepper, ids: Tensor, start: int, cache: KVCache | None) -> Tensor:
    inputs = stepper.prepare_forward(np.tile(np.arange(start, start + ids.shape[1]), (len(ids), 1)), cache)
    return stepper.logits(stepper.run_layers(stepper.embed(ids, inputs), 0, stepper.layers, inputs)).double()


CACHE_KEYWORDS = ("layer_past", "cache", "past_key_values")  # of blocks, by family and release of transformers


def find_cache_keyword(block: Any) -> str:
    """The block's keyword for its cache. Raises BadArgument for a block without one."""
    taken = inspect.signature(type(block).forward).parameters
    for keyword in CACHE_KEYWORDS:
        if keyword in taken:
            return keyword
    raise BadArgument("block", type(block).__name__, f"a forward that takes one of {', '.join(CACHE_KEYWORDS)}")


def get_decoder_submodule_by_name(family: str, decoder: Any, name: str | None) -> Any | None:
    """``decoder.name``; None if the family has no such part.

    Raises:
        BadArgument: a decoder without the part that the row names.
    """
    if name is None:
        return None
    if not hasattr(decoder, name):
        remedy = "its row in emad_ref/models/families.py does not fit this checkpoint or this version of transformers"
        raise BadArgument("model_type", family, f"a decoder with the part {name!r}", remedy)
    return getattr(decoder, name)
