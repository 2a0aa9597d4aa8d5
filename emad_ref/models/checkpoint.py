"""Checks of a checkpoint: its folder before a weight file is opened, and the model that was filled from it.

Only plain files of the folder itself are read. A link to a plain file counts as one: the hub's cache keeps files as
links to blobs. Before loading only headers are read. After loading, tensors that are missing, left over or of another
shape are refused by name, except tables that are computed today.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from emad_ref.errors import BadArgument, is_whole
from emad_ref.files import (
    describe_file_kind,
    open_regular_file,
    parse_json,
    read_json,
)
from emad_ref.models.bundled import CONFIG
from emad_ref.models.diagnosis import describe_dequantisation, describe_other_names, describe_other_task
from emad_ref.models.families import ModelFamily, family_of_config
from emad_ref.models.geometry import Geometry

COMPUTED_TABLES = re.compile(
    r"(^|\.)(attn|attention|self_attn|self_attention)\.(masked_)?bias$"  # causal masks and their fill value
    r"|(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
    r"|(^|\.)embed_positions$"  # GPT-J's sines
    r"|(^|\.)position_ids$"
)
SHOWN_TENSORS = 3


def require_all_weights_loaded(name: str, model: Any, loading_info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that did not fill ``model``.

    ``loading_info`` is the output of ``from_pretrained(…, output_loading_info=True)``: sets ``missing_keys``,
    ``unexpected_keys``, and ``mismatched_keys`` of (name, shape in the file, shape in the model).

    Raises:
        BadArgument: tensors that are missing, left over, or of another shape, with their number and the first names; a
            head that differs from the embedding although the config ties them.
    """
    left_over = [key for key in loading_info["unexpected_keys"] if not COMPUTED_TABLES.search(key)]
    reshaped = [f"{key} {list(theirs)} for {list(ours)}" for key, theirs, ours in loading_info["mismatched_keys"]]
    problems = (
        ("missing", loading_info["missing_keys"]),
        ("that the config leaves no place for", left_over),
        ("of another shape than the config says", reshaped),
    )
    descriptions = [f"{len(keys)} {what} ({_first_names(keys)})" for what, keys in problems if keys]
    if descriptions:
        remedy = (
            describe_other_names(loading_info["missing_keys"], left_over)
            or describe_other_task(model.config.architectures)
            or f"{CONFIG} is of another model or version than the weights: take both from one place"
        )
        expected = "a checkpoint that fills the model of its config"
        raise BadArgument("name", name, expected, f"tensors: {'; '.join(descriptions)}; {remedy}")
    config = model.config.get_text_config()
    # every T5Config declares tied weights; unscaled logits reveal v1.1, which has its own head
    says_tied = config.tie_word_embeddings and getattr(model.config, "tie_word_embeddings", True)
    tied = says_tied and getattr(config, "scale_decoder_outputs", True)
    if tied and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise BadArgument(
            "name",
            name,
            "one tensor for embedding and head, as tie_word_embeddings says",
            f"the file holds two that differ: set tie_word_embeddings to false in {CONFIG} if both were trained",
        )


def require_finite_weights(name: str, model: Any) -> None:
    """Refuse weights, and tables stored beside them, that hold NaN or infinity.

    Raises:
        BadArgument: the first such tensor, by name. A mask may hold infinity, but no supported family stores one as a
            floating-point buffer.
    """
    for tensor, values in (*model.named_parameters(), *model.named_buffers()):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            # float16 ends at 65504
            narrow = "load it in float32 or bfloat16, or " if values.dtype == torch.float16 else ""
            problem = f"{tensor} holds NaN or infinity in {values.dtype}: {narrow}take an earlier checkpoint"
            raise BadArgument("name", name, "finite weights", problem)


def _first_names(keys: Collection[str]) -> str:
    """The first few names; layer 2 before layer 10."""
    by_number = sorted(keys, key=lambda key: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", key)])
    return ", ".join([*by_number[:SHOWN_TENSORS], *(["…"] if len(keys) > SHOWN_TENSORS else [])])


GENERATION_CONFIG = "generation_config.json"
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHTS = (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX)  # in transformers' order: the first existing one is read
ADAPTERS = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapters.safetensors",  # MLX
    "pytorch_adapter.bin",  # AdapterHub
)
MERGE_ADAPTER = (
    "merge it into the weights (peft: model.merge_and_unload().save_pretrained(DIR)) and name that folder, or move the "
    "adapter elsewhere to judge the weights without it"
)
# Files that hold or describe weights and change no result; others, such as optimizer.pt, belong to training.
UNREAD_FILES = re.compile(
    r"\.(safetensors|gguf|ot|h5|msgpack|onnx|pth)$|^pytorch_model.*\.bin$|\.index\.json$"
    r"|^(value_head|medusa|lm_head|pytorch_model_head).*|^modules\.json$|^quant.*config\.json$|^hf_quant_config\.json$"
)
READ_SUFFIXES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
CONFIG_PARTS = ("decoder", "generator", "encoder", "text_encoder")  # and keys that end in _config
FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
LARGEST_HEADER = 100_000_000  # bytes, by the format
LARGEST_SIZE = 2**40  # of a layer, a vocabulary, a window: far beyond any real one, and products of a few stay cheap
LARGEST_TABLE = 2**20  # positions of a family that computes a table for all of them at construction
SAMPLED = 64  # numbers per tensor that are compared if two files hold the same weights

_TORCH = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class TensorDtypesAndElementCounts:
    """Contents of headers: ``dtypes`` name → dtype as safetensors spells it, ``numbers`` name → element count."""

    dtypes: dict[str, str]
    numbers: dict[str, int]

    @property
    def block_count(self) -> int:
        """Layers of the deepest stack, by the first number in each name; 0 if no name has one."""
        numbered = (re.search(r"\.(\d+)\.", name) for name in self.numbers)
        return max((int(match[1]) + 1 for match in numbered if match), default=0)


# ---------------------------------------------------------------- files


def require_regular_files(name: str, folder: Path) -> None:
    """Refuse a folder with a pipe, socket, device or broken link: reading such a file blocks or fails.

    Raises:
        BadArgument: naming the file.
    """
    templates = folder / "additional_chat_templates"  # the one subfolder that transformers reads
    entries = [*os.scandir(folder), *(os.scandir(templates) if templates.is_dir() else ())]
    for entry in sorted(entries, key=lambda entry: entry.name):
        try:
            kind = describe_file_kind(entry.stat().st_mode)
        except OSError as error:  # a broken or circular link
            if not entry.name.endswith(READ_SUFFIXES):
                continue
            problem = f"{entry.name} is a link that leads nowhere ({error.strerror}): put its file there, or remove it"
            raise BadArgument("name", name, "a folder of plain files", problem) from error
        if kind == "a folder" and not entry.name.endswith(READ_SUFFIXES):  # transformers finds no file there
            continue
        if kind:
            raise BadArgument("name", name, "a folder of plain files", f"{entry.name} is {kind}: remove it")


def require_no_adapter(name: str, folder: Path) -> None:
    """Refuse a folder with an adapter, beside weights, alone, or in its own subfolder.

    Raises:
        BadArgument: naming the file. The weights without it are not the trained model.
    """
    subfolders = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    for place in (folder, *subfolders):
        adapter = next((file for file in ADAPTERS if os.path.exists(place / file)), None)  # False for a locked folder
        if adapter is not None:
            raise_adapter_error(name, (place / adapter).relative_to(folder).as_posix())


def raise_adapter_error(name: str, file: str) -> None:
    """Raise BadArgument, always."""
    raise BadArgument("name", name, "a whole model without an adapter", f"it holds {file}: {MERGE_ADAPTER}")


def _file_in_folder(name: str, folder: Path, file: Any, named_in: str) -> Path:
    """``folder/file`` for a name from a file of the folder, whether it exists or not.

    Raises:
        BadArgument: the name is not of a plain file in ``folder`` itself.
    """
    expected = f"names of plain files of its own folder in {named_in}"
    if not isinstance(file, str) or not file or file in (".", "..") or set(file) & {"/", "\\", "\0"}:
        raise BadArgument("name", name, expected, f"it names {file!r:.120}: correct the name")
    path = folder / file
    try:
        kind = describe_file_kind(path.stat().st_mode)
    except FileNotFoundError:
        return path  # transformers names the missing file
    except OSError as error:
        raise BadArgument("name", name, expected, f"{file}: {error.strerror}; correct the name") from error
    if kind:
        raise BadArgument("name", name, expected, f"{file} is {kind}: put the file in its place")
    return path


def read_config(name: str, folder: Path) -> dict[str, Any]:
    """config.json as transformers will read it.

    Raises:
        BadFile: no JSON object.
        BadArgument: a part that is no object, quantised weights, names of files outside of the folder.
    """
    config: dict[str, Any] = read_json(folder / CONFIG, CONFIG, dict, remedy="mend it, or fetch it from its source")
    for key, value in config.items():
        if (key in CONFIG_PARTS or key.endswith("_config")) and not isinstance(value, dict | None):
            raise BadArgument(f"config.{key}", _shorten(value), "an object, as a part of a config is", f"mend {CONFIG}")
    for part, settings in (("", config), *((f"{key}.", value) for key, value in config.items())):
        quantised = settings.get("quantization_config") if isinstance(settings, dict) else None
        if quantised is None:
            continue
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else quantised
        remedy = describe_dequantisation(method) if quantised else f"remove the key from {CONFIG}"
        problem = f"config.{part}quantization_config says {method!r:.60}: {remedy}"
        raise BadArgument("name", name, "weights that are not quantised", problem)
    listed = config.get("configuration_files")  # from which transformers chooses
    for each in listed if isinstance(listed, list) else [] if listed is None else [listed]:
        _file_in_folder(name, folder, each, f"{CONFIG}: configuration_files")
    return config


@dataclass(frozen=True)
class CheckpointWeightFiles:
    """Weight files of ``folder`` by name: ``read``, in order; ``beside`` are others, which are not read."""

    name: str
    folder: Path
    read: tuple[str, ...]
    beside: tuple[str, ...]

    @staticmethod
    def from_folder(name: str, folder: Path, config: Mapping[str, Any]) -> CheckpointWeightFiles | None:
        """The weight files of a folder, in transformers' order; None without a complete set.

        Raises:
            BadArgument, BadFile: an index that names anything but plain files of its folder; weights in one file and
                in shards at once; a .bin file beside safetensors whose numbers differ.
        """
        chosen = config.get("transformers_weights")
        first = next((file for file in WEIGHTS if (folder / file).is_file()), None) if chosen is None else chosen
        if first is None:
            return None
        read = _shards(name, folder, first)
        if first == SAFETENSORS and (folder / SAFETENSORS_INDEX).is_file():
            sharded = set(_shards(name, folder, SAFETENSORS_INDEX))
            if any(file != SAFETENSORS and (folder / file).is_file() for file in sharded):  # otherwise it is left over
                raise BadArgument(
                    "name",
                    name,
                    "one set of weights",
                    f"it holds {SAFETENSORS} and {len(sharded)} shards of {SAFETENSORS_INDEX}: remove those not meant",
                )
        if not all((folder / file).is_file() for file in read):
            return None
        files = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
        beside = tuple(file for file in files if UNREAD_FILES.search(file) and file not in (*read, first))
        checkpoint = CheckpointWeightFiles(name, folder, read, beside)
        if first in (SAFETENSORS, SAFETENSORS_INDEX):
            for file in beside:
                if re.fullmatch(r"pytorch_model.*\.bin", file):
                    checkpoint._require_same(file)
        return checkpoint

    def require_enough_float_tensors(self, geometry: Geometry) -> None:
        """Refuse stored tensors that are no floating-point numbers, or far too few for the sizes in the config.

        This check refuses a config with twice the stored numbers or layers before it takes memory and time. Smaller
        differences show by name once the model is built.

        Raises:
            BadArgument, BadFile: also a damaged header, and a tensor in two files.
        """
        stored = self.read_headers()
        for tensor, dtype in stored.dtypes.items():
            if dtype not in FLOATS and not COMPUTED_TABLES.search(tensor):
                raise BadArgument(
                    "name",
                    self.name,
                    "weights in floating point",
                    f"{tensor} is stored as {dtype}: {describe_dequantisation(None)}",
                )
        require_config_within_stored_size(self.name, geometry, sum(stored.numbers.values()), stored.block_count)

    def read_headers(self) -> TensorDtypesAndElementCounts:
        """The merged headers of all files.

        Raises:
            BadArgument, BadFile: a damaged header; a tensor in two files.
            UnpicklingError: a .bin file that holds more than tensors.
        """
        dtypes: dict[str, str] = {}
        numbers: dict[str, int] = {}
        for file in self.read:
            path = self.folder / file
            header = _bin_header(self.name, path) if path.suffix == ".bin" else _safetensors_header(self.name, path)
            twice = next((tensor for tensor in header if tensor in dtypes), None)
            if twice is not None:
                raise BadArgument(
                    "name", self.name, "each tensor in one file", f"{twice} stands in two: remove the one not meant"
                )
            dtypes |= {tensor: dtype for tensor, (dtype, _) in header.items()}
            numbers |= {tensor: count for tensor, (_, count) in header.items()}
        return TensorDtypesAndElementCounts(dtypes, numbers)

    def _require_same(self, other: str) -> None:
        """Refuse a .bin file whose tensors differ from the safetensors', in shape or in numbers sampled evenly."""
        try:
            theirs = torch.load(self.folder / other, map_location="cpu", weights_only=True, mmap=True)
        except Exception:  # damaged, old, or without weights: not read, and the report notes it
            return
        for file in self.read:
            with safe_open(self.folder / file, framework="pt") as ours:
                for tensor in ours.keys():  # noqa: SIM118  # it is no mapping
                    value = theirs.get(tensor)
                    if (
                        COMPUTED_TABLES.search(tensor)
                        or not isinstance(value, torch.Tensor)
                        or not value.is_floating_point()
                    ):
                        continue
                    mine = ours.get_tensor(tensor)
                    if mine.is_floating_point() and (mine.shape != value.shape or not _has_equal_samples(mine, value)):
                        raise BadArgument(
                            "name",
                            self.name,
                            "one set of weights",
                            f"{tensor} in {file} is not the one in {other}: remove the file that is not meant",
                        )


def require_config_within_stored_size(name: str, geometry: Geometry, numbers: int, blocks: int) -> None:
    """Refuse a config with twice the ``numbers`` or ``blocks`` of the files, before building it takes memory and time.

    Raises:
        BadArgument: both sizes, of the config and of the files.
    """
    parameters, layers = geometry.parameter_count(), max(geometry.layers, geometry.encoder_layers)
    if parameters > 2 * numbers or layers > 2 * blocks:
        raise BadArgument(
            "name",
            name,
            "a checkpoint that fills the model of its config",
            f"its config describes {parameters:,} parameters in {layers:,} layers of width {geometry.hidden:,} with "
            f"{geometry.vocabulary:,} tokens, its files hold {numbers:,} numbers in {blocks:,} layers: take config "
            "and weights from one place",
        )


def _has_equal_samples(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether evenly sampled numbers agree in the coarser of the two precisions."""
    step = max(1, first.numel() // SAMPLED)
    coarser = min(first.dtype, second.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    one, other = (values.flatten()[::step].to(coarser).double() for values in (first, second))
    tolerance = 0.0 if first.dtype == second.dtype else 1e-2  # both may be rounded from a third precision
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * 1e-4, equal_nan=True)


def _shards(name: str, folder: Path, first: Any) -> tuple[str, ...]:
    """``first`` itself, or the files listed in it if it is an index."""
    path = _file_in_folder(name, folder, first, CONFIG)
    if not path.name.endswith(".index.json"):
        return (path.name,)
    index = read_json(path, "name", dict, remedy="mend it, or fetch it from its source")
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise BadArgument("name", name, f"a weight_map of tensors and files in {path.name}", "fetch it from its source")
    strange = [file for file in places.values() if not isinstance(file, str)]
    return tuple(
        _file_in_folder(name, folder, file, path.name).name for file in strange[:1] or sorted(set(places.values()))
    )


def _safetensors_header(name: str, path: Path) -> dict[str, tuple[str, int]]:
    """Tensor → (dtype, element count)."""
    with open_regular_file(path, "name") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        text = file.read(min(length, LARGEST_HEADER))
    try:
        if len(text) != length or size < 8:
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        header = parse_json(text)
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if max(ends, default=0) != size - 8 - length:
            raise ValueError(f"tensors of {max(ends, default=0):,} bytes in {size - 8 - length:,}")
        return {tensor: (str(entry["dtype"]), _count_numbers(entry["shape"])) for tensor, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise BadArgument(
            "name",
            name,
            "a complete safetensors file",
            f"{path.name}: {type(error).__name__}: {error}: fetch or save the weights again",
        ) from error


def _count_numbers(shape: Sequence[int]) -> int:
    numbers = 1
    for size in shape:
        if not is_whole(size) or size < 0:
            raise ValueError(f"a shape of {list(shape)!r:.80}")
        numbers *= size
    return numbers


def _bin_header(name: str, path: Path) -> dict[str, tuple[str, int]]:
    try:
        stored = torch.load(path, map_location="meta", weights_only=True)
    except (RuntimeError, OSError, EOFError) as error:  # an archive that ends too early
        problem = f"{path.name} is cut off or damaged ({str(error).splitlines()[0][:200]}): fetch it from its source"
        raise BadArgument("name", name, "a complete file of torch.save", problem) from error
    entries = stored if isinstance(stored, dict) else {}
    tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        within = next((key for key, value in entries.items() if isinstance(value, dict)), None)
        where = "" if within is None else f", but below {within!r:.60}"
        problem = f"{path.name} holds no tensors at its top{where}: write that part alone to model.safetensors"
        raise BadArgument("name", name, "weights by name", problem)
    return {
        key: (_TORCH.get(value.dtype, str(value.dtype).removeprefix("torch.")), value.numel())
        for key, value in tensors.items()
    }


# ---------------------------------------------------------------- what a config says


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text part of a config.

    Raises:
        BadArgument: none of its parts is a config, or several are.
    """
    try:
        part: Any = config.get_text_config()
    except ValueError as error:
        raise BadArgument("config", config.model_type, "one part that is the text model", str(error)[:120]) from error
    if not isinstance(part, PreTrainedConfig):
        attribute = next(key for key in ("text_config", *CONFIG_PARTS) if getattr(config, key, None) is part)
        raise BadArgument(
            f"config.{attribute}", _shorten(part), f"none: {config.model_type} has no such part", f"mend {CONFIG}"
        )
    text: PreTrainedConfig = part
    return text


def require_positive_sizes(config: PreTrainedConfig, remedy: str = f"mend {CONFIG}") -> None:
    """Refuse a text config whose sizes are no whole numbers of at least 1.

    Raises:
        BadArgument: naming the field, with ``remedy``; a family without a row.
    """
    family = family_of_config(config)
    for key, may_be_empty in _size_keys(family):
        value = getattr(config, key, None)
        if value is None and may_be_empty:
            continue
        if not is_whole(value) or not 1 <= value <= LARGEST_SIZE:
            raise BadArgument(f"config.{key}", _shorten(value), "a whole number of at least 1", remedy)
    if bool(config.is_encoder_decoder) is not family.is_encoder_decoder:
        expected = f"{family.is_encoder_decoder}, as in every {config.model_type}"
        raise BadArgument("config.is_encoder_decoder", config.is_encoder_decoder, expected, remedy)
    positions = getattr(config, "max_position_embeddings", None)
    if family.anatomy.positions_inside and (positions or 0) > LARGEST_TABLE:
        expected = f"at most {LARGEST_TABLE:,}: this family computes a table of all positions"
        raise BadArgument("config.max_position_embeddings", positions, expected, remedy)


def describe_defaulted_heads(config: PreTrainedConfig, declared: Mapping[str, Any]) -> str:
    """A sentence if config.json leaves the number of heads to its family's default; "" if it gives the number.

    Weights fit the model for any number of heads; their shapes reveal every other size.
    """
    text = text_config(config)
    heads = family_of_config(text).sizes.heads
    names = {heads, text.attribute_map.get(heads, heads)}
    parts = [declared, *(declared.get(key) for key in ("text_config", *CONFIG_PARTS))]
    if any(name in part for part in parts if isinstance(part, Mapping) for name in names):
        return ""
    return f"{CONFIG} does not say {heads}: {getattr(text, heads)}, the default of {text.model_type}, is taken"


def _size_keys(family: ModelFamily) -> list[tuple[str, bool]]:
    """Config keys of sizes, and whether each may be empty or absent."""
    sizes = family.sizes
    needed = (sizes.layers, sizes.hidden, sizes.heads, "vocab_size", sizes.encoder_layers)
    optional = (
        sizes.head_dim,
        sizes.intermediate,
        sizes.experts_used,
        "num_key_value_heads",
        "max_position_embeddings",
        "n_positions",
        "sliding_window",
        "word_embed_proj_dim",
    )
    return [*((key, False) for key in needed if key), *((key, True) for key in optional if key)]


def _shorten(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 120 else f"{text[:100]}…"
