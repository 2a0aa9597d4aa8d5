"""Reasons why a model's files cannot be loaded: file, fault and remedy, found by looking after an error.

A library that fails on a file seldom names the file, and does not see that it is of another kind, such as a saved web
page. After an error this module inspects the files that loading reads:

    each file     a broken link, no permission, nothing in it, a pointer of git-lfs, Xet or git-annex, a saved web page
    all together  no config.json, no weights, weights of another format, a shard or the index missing, a subfolder
    a tokenizer   a vocabulary that needs a package which is not installed, or has no counterpart in Transformers
    hub's cache   snapshots without a name, a name without a snapshot, links without their content

Functions return one sentence "fault: remedy", or "" if they find none. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from emad_ref.errors import suggest_nearest
from emad_ref.files import describe_pointer

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
INDEX = ".index.json"
# Vocabularies, the complete one first, and files that describe one: without any of them a folder has no tokenizer.
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
TEKKEN, TIKTOKEN = "tekken.json", "tiktoken.model"
TOKENIZER_FILE = "tokenizer.json"
VOCABULARIES = (TOKENIZER_FILE, *SENTENCEPIECE, "vocab.json", TEKKEN, TIKTOKEN)
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", *VOCABULARIES[1:])
SETTINGS = (CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
ADD_TOKENIZER = "add the tokenizer.json of the same model"
# Transformers 5 converts some SentencePiece files to other ids; version 4 does not.
MAKE_TOKENIZER = (
    f"{ADD_TOKENIZER}, or write it in an environment with `pip install 'transformers<5' sentencepiece protobuf`: "
    "AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
)
SHOWN = 3  # names in one sentence
HEAD = 256  # bytes that show what a file is
TORCH_SAVED = (b"PK\x03\x04", b"\x80")  # how a zip archive and a pickle begin

WEB_PAGE = re.compile(rb"\s*<(!doctype html|html|\?xml|head)", re.I)  # of a log-in or an error, saved under this name
# Files of other formats, what they are, and what makes them readable; the first match counts.
OTHER_VERSION = "name the version of the model for Transformers, which has a config.json"
CONVERT = "convert them by Transformers 4: from_pretrained(DIR, from_{}=True).save_pretrained(OUT)"
EXPORTED = "name the model that was exported"
FROM_TORCH = "load its tensors with torch.load and write them with safetensors.torch.save_file to model.safetensors"
FORMATS: tuple[tuple[str, str, str], ...] = (
    (r"model_index\.json", "is of a pipeline of diffusers", "name the folder of a language model"),
    (r".*\.dvc", "is a pointer of DVC", "run `dvc pull` in the folder"),
    (r".*\.gguf", "is a model of llama.cpp", "name the file itself, {folder}/{file}"),
    (r"consolidated.*|params\.json", "is in the format of the model's authors", OTHER_VERSION),
    (r"zero_to_fp32\.py", "belongs to a training state of DeepSpeed", "run `python zero_to_fp32.py . .` in the folder"),
    (r"pytorch_model_fsdp.*", "is a training state of FSDP", "run `accelerate merge-weights {folder}/{file} {folder}`"),
    (r".*\.distcp", "is part of a distributed training state", "run `accelerate merge-weights {folder} OUT`"),
    (r"tf_model.*\.h5", "holds weights of TensorFlow", CONVERT.format("tf")),
    (r"flax_model.*\.msgpack", "holds weights of Flax", CONVERT.format("flax")),
    (r"rust_model\.ot|.*\.npz|.*\.nemo", "is of another library", OTHER_VERSION),
    (r"onnx|.*\.onnx|openvino_model.*|.*\.mlpackage", "is an export to another runtime", EXPORTED),
)
# Weights that Transformers would read under another name, beside a config.json.
OTHER_NAMES: tuple[tuple[str, str, str], ...] = (
    (r"model.*-of-\d+\.safetensors", "is a shard, and its index model.safetensors.index.json is missing", "{fetch}"),
    (r"pytorch_model.*-of-\d+\.bin", "is a shard, and its index pytorch_model.bin.index.json is missing", "{fetch}"),
    (r".*\.safetensors", "is not the name that Transformers reads", "rename it to model.safetensors"),
    (r"(?!optimizer|scheduler|rng_state|scaler).*\.(pt|pth|ckpt)", "is a file of torch.save", FROM_TORCH),
)
UNFINISHED = r".*\.(incomplete|part|partial|aria2|crdownload|download)"
HUB_DOWNLOADS = ".cache/huggingface/download"  # in a folder that `hf download --local-dir` fills
PACKAGES = {"google.protobuf": "protobuf", "mistral_common": "mistral-common"}  # module → name for pip


def describe_damaged_file(folder: Path, fetch: str) -> str:
    """The first file that loading would read and that is not what its name says.

    Parameters
    ----------
    folder : Path
        The model's folder.
    fetch : str
        What brings a file again: "fetch it again", or a command.

    Returns
    -------
    str
        File, fault and remedy; "" if every file begins as its kind does.
    """
    return next(filter(None, (describe_file_fault(path, fetch) for path in _files_read(folder))), "")


def describe_missing_file(folder: Path, fetch: str) -> str:
    """What stands in the folder in place of config.json or weights, and what to do; "" if both are there.

    Raises nothing for a folder that cannot be listed: it has a fault of its own, which is returned.
    """
    try:
        held = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return f"the folder cannot be listed ({error.strerror}): {_permit(folder)}"
    if not held:
        return f"the folder is empty: {fetch}"
    if CONFIG in held:
        first = next((name for name in WEIGHTS if name in held), None)
        if first is not None:
            return _missing_shards(folder, first, fetch) if first.endswith(INDEX) else ""
    lack = "weights (model.safetensors or its shards) are" if CONFIG in held else f"{CONFIG} is"
    if below := _folders_below(folder, CONFIG):
        return f"{lack} not in this folder but below it: name {_listed(f'{folder}/{each}' for each in below)}"
    if CONFIG in held and (below := [each for name in WEIGHTS for each in _folders_below(folder, name)]):
        return f"{lack} in {_listed(below)}: move them beside {CONFIG}"
    unfinished = _first_match(held, UNFINISHED) or _first_match(_names(folder / HUB_DOWNLOADS), UNFINISHED)
    if unfinished:
        return f"{lack} missing, and {unfinished} is a download that did not end: {fetch}"
    for pattern, what, remedy in (*FORMATS, *(OTHER_NAMES if CONFIG in held else ())):
        if found := _first_match(held, pattern):
            return f"{lack} missing; {found} {what}: {remedy.format(folder=folder, file=found, fetch=fetch)}"
    return f"{lack} missing: {fetch}"


def describe_unreadable_tokenizer(folder: Path, fetch: str) -> str:
    """Why the folder's tokenizer cannot be read: a damaged file, or one that needs a package; "" if neither shows."""
    broken = next((fault for name in (VOCABULARIES[0], *SETTINGS) if (fault := _json_fault(folder / name, fetch))), "")
    if broken or (folder / VOCABULARIES[0]).is_file():
        return broken
    vocabulary = next((name for name in VOCABULARIES[1:] if (folder / name).is_file()), None)
    if vocabulary is None:
        return f"tokenizer.json is missing{_code_needed(folder)}: {fetch}"
    if vocabulary == "vocab.json" and not (folder / "merges.txt").is_file():
        return f"vocab.json is half of a vocabulary, merges.txt is missing: {fetch}"
    kind, packages = _vocabulary_kind(folder / vocabulary)
    missing = [PACKAGES.get(module, module) for module in packages if not _is_installed(module)]
    if not missing:
        return ""
    remedy = MAKE_TOKENIZER.format(folder=folder) if vocabulary in SENTENCEPIECE else ADD_TOKENIZER
    return f"{vocabulary} is {kind}, without a tokenizer.json: `pip install {' '.join(missing)}`, or {remedy}"


def describe_unread_vocabulary(folder: Path, class_name: str, read: Iterable[str]) -> str:
    """Why a loaded tokenizer is empty: no file that its class reads is in the folder; "" if one is, or it needs none.

    Parameters
    ----------
    folder : Path
        The model's folder.
    class_name : str
        Class of the tokenizer.
    read : iterable of str
        Files that the class reads (``vocab_files_names``).
    """
    own = sorted(set(read))
    also = (TOKENIZER_FILE, SENTENCEPIECE[0], TEKKEN, TIKTOKEN)  # read for any class
    if not own or any((folder / name).is_file() for name in (*own, *also)):
        return ""
    other = next((name for name in VOCABULARIES if (folder / name).is_file()), None)
    remedy = ADD_TOKENIZER
    if other is not None:
        remedy = f"state the tokenizer_class that reads {other} in tokenizer_config.json, or {remedy}"
    return f"{class_name} reads {', '.join(own)}, and none of them is there{_code_needed(folder)}: {remedy}"


def describe_unknown_family(settings: Mapping[str, Any], known: Iterable[str]) -> str:
    """Why Transformers, which knows the model types ``known``, has no class for a config.json; "" if it has one."""
    kind = settings.get("model_type")
    if kind is None:
        return f"{CONFIG} has no model_type: add it (for example llama), or take the {CONFIG} of the model's repository"
    if not isinstance(kind, str) or kind in known:
        return ""
    if settings.get("auto_map"):
        return (
            f"{CONFIG} has auto_map: the code of {kind!r:.60} comes with its repository, and is never run; choose a "
            "version of the model for a family of Transformers"
        )
    near = suggest_nearest(kind, known)
    return (
        f"correct model_type={kind!r:.60} in {CONFIG}{f' ({near})' if near else ''}, or `pip install -U transformers` "
        "if the family is newer"
    )


def describe_other_task(architectures: object) -> str:
    """What a model is if ``architectures`` of its config names no class that generates text; "" if one does."""
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    generating = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "DoubleHeadsModel", "ForSeq2SeqLM")
    if not names or any(name.endswith(generating) for name in names):
        return ""
    return (
        f"config.architectures says {names[0]!r:.80}, which has no head over the vocabulary: name a model that "
        "generates text (…ForCausalLM)"
    )


def describe_other_names(missing: Iterable[str], left_over: Iterable[str]) -> str:
    """The prefix under which most ``missing`` tensors of a model stand in its files, and its remedy; "" if none."""
    lacking, held = set(missing), list(left_over)
    parts = held[0].split(".") if held else []
    for at in range(1, len(parts)):
        prefix = ".".join(parts[:at]) + "."
        found = lacking & {each.removeprefix(prefix) for each in held if each.startswith(prefix)}
        if 2 * len(found) > len(lacking):  # a few may have been renamed since
            return f"names have the prefix {prefix!r} of a wrapper: save the model inside it, or drop the prefix"
    return ""


def describe_dequantisation(method: object) -> str:
    """How to get weights in floating point in place of those that ``quant_method`` of a config names."""
    loads = {
        "bitsandbytes": "load it with bitsandbytes, then model.dequantize().save_pretrained(OUT)",
        "fp8": "from_pretrained(DIR, quantization_config=FineGrainedFP8Config(dequantize=True)).save_pretrained(OUT)",
        "mxfp4": "from_pretrained(DIR, quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(OUT)",
    }
    source = "the weights that it was quantised from, base_model on its card"
    how = loads.get(method) if isinstance(method, str) else None
    return f"save a dequantised copy and name its folder ({how}), or name {source}" if how else f"name {source}"


def describe_cached_snapshots(hub_id: str, cache: Path) -> str:
    """What the hub's cache holds of a repository although no file of the wanted revision is in it; "" for nothing.

    Parameters
    ----------
    hub_id : str
        OWNER/NAME.
    cache : Path
        The hub's cache, ``huggingface_hub.constants.HF_HUB_CACHE``.
    """
    home = cache / f"models--{hub_id.replace('/', '--')}"
    snapshots = sorted(each.name for each in _subfolders(home / "snapshots"))
    refs = {each.name: each.read_text(errors="replace") for each in _plain_files(home / "refs")}
    fetch = f"`hf download {hub_id}` where the hub is in reach, then copy the whole cache (cp -a)"
    usable = [commit for commit in snapshots if (home / "snapshots" / commit / CONFIG).is_file()]
    if usable:
        named = {name: commit for name, commit in refs.items() if commit in usable}
        offered = [*named, *(commit for commit in usable if commit not in named.values())]
        faults = [_describe_ref(name, commit, snapshots) for name, commit in refs.items() if name not in named]
        told = "; ".join(["its cache has no such revision", *faults])
        return f"{told}: name {_listed(f'{hub_id}@{revision}' for revision in offered)}"
    if snapshots:
        path = home / "snapshots" / snapshots[-1] / CONFIG
        lack = f"{CONFIG} is a link without its content" if path.is_symlink() else f"{CONFIG} is missing"
        return f"its cache holds the commit {snapshots[-1]}, but {lack}: {fetch}"
    if home.is_dir():
        unfinished = len(list(home.glob("blobs/*.incomplete")))
        lack = f"{unfinished} downloads that did not end" if unfinished else "no snapshot"
        return f"its cache {home} holds {lack}: {fetch}"
    return ""


# ---------------------------------------------------------------- one file


def _files_read(folder: Path) -> Iterator[Path]:
    """Files that loading reads, present or linked: settings, the chosen weights, the tokenizer's vocabulary."""
    for name in SETTINGS:
        yield folder / name
    first = next((name for name in WEIGHTS if os.path.lexists(folder / name)), None)
    if first is not None:
        yield folder / first
        if first.endswith(INDEX):
            yield from (folder / shard for shard in _shards(folder / first))
    vocabulary = next((name for name in VOCABULARIES if os.path.lexists(folder / name)), None)
    if vocabulary is not None:
        yield folder / vocabulary
    if vocabulary == "vocab.json":
        yield folder / "merges.txt"


def describe_file_fault(path: Path, fetch: str) -> str:
    """Why the file is not what its name says, with a remedy; "" if it begins as its kind does, or is no file."""
    try:
        if not path.is_file():  # a pipe would wait for ever; other kinds are refused elsewhere
            return _link_fault(path, fetch) if path.is_symlink() and not path.exists() else ""
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror}): {_permit(path)}"
    if not head:
        return f"{path.name} is empty: {fetch}"
    if pointer := describe_pointer(head, path.name):
        return f"{path.name} is {pointer}, or {fetch}"
    if WEB_PAGE.match(head):
        return f"{path.name} is a web page, such as one to log in, not the file: {fetch}"
    if path.suffix in (".safetensors", ".bin") and head.isascii() and head.decode().isprintable():
        return f"{path.name} holds text ({head[:40].decode()!r}), no weights: {fetch}"
    if path.suffix == ".safetensors" and head.startswith(b"PK"):
        return f"{path.name} is a file of torch.save: rename it to pytorch_model.bin, or write it with safetensors"
    if path.suffix == ".bin" and head[8:9] == b"{":
        return f"{path.name} is a safetensors file: rename it to model.safetensors"
    if path.suffix in (".safetensors", ".bin") and head.startswith(b"GGUF"):
        return f"{path.name} is a model of llama.cpp: rename it to end in .gguf, and name the file itself"
    if path.suffix == ".bin" and not head.startswith(TORCH_SAVED):
        return f"{path.name} is no file of torch.save: {fetch}"
    return ""


def _link_fault(path: Path, fetch: str) -> str:
    """What a link that leads nowhere stands for, and the remedy."""
    target = os.readlink(path)
    if "annex/objects" in target:
        return f"{path.name} is a git-annex link without its content: run `git annex get {path.name}`, or {fetch}"
    return f"{path.name} is a link that leads nowhere ({target}): {fetch}, or copy folders with linked files (cp -rL)"


def _json_fault(path: Path, fetch: str) -> str:
    try:
        json.loads(path.read_bytes()) if path.is_file() else None  # numbers of any size: a model_max_length is 10³⁰
    except (ValueError, OSError, RecursionError) as error:
        return f"{path.name} is no JSON ({' '.join(str(error).split())[:120]}): {fetch}"
    return ""


def _permit(path: Path) -> str:
    return f"run `chmod -R u+rX {path}`, or as a user who may read it"


# ---------------------------------------------------------------- several files


def _missing_shards(folder: Path, index: str, fetch: str) -> str:
    missing = [shard for shard in _shards(folder / index) if not (folder / shard).is_file()]
    if not missing:
        return ""
    return f"{index} names {_listed(missing)}, not in the folder ({len(missing)} missing): {fetch}"


def _shards(index: Path) -> list[str]:
    """Names in an index, sorted; none if it cannot be read, which is an error of its own."""
    try:
        places = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({each for each in places if isinstance(each, str) and "/" not in each and "\0" not in each})
    except (ValueError, OSError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def _folders_below(folder: Path, file: str) -> list[str]:
    """Subfolders, up to two levels down, with ``file``; the last training step first."""
    paths = [path for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/{file}"))]
    found = [str(path.parent.relative_to(folder)) for path in paths]
    return sorted(found, key=lambda name: [-int(number) for number in re.findall(r"\d{1,18}", name)])


def _code_needed(folder: Path) -> str:
    other = next((path.name for path in sorted(folder.glob("*.tiktoken"))), None)
    return f"; {other} needs code of its repository, which is never run" if other else ""


def _vocabulary_kind(path: Path) -> tuple[str, tuple[str, ...]]:
    """What a vocabulary without tokenizer.json is, and the modules that Transformers needs for it."""
    if path.name == TEKKEN:
        return "a vocabulary of mistral-common", ("mistral_common",)
    if path.name == TIKTOKEN or (path.suffix == ".model" and _is_tiktoken(path)):
        return "a vocabulary of tiktoken", ("tiktoken",)
    if path.suffix == ".model":
        return "a SentencePiece file", ("sentencepiece", "google.protobuf")
    return "a vocabulary", ()


def _is_tiktoken(path: Path) -> bool:
    """Lines of a token in base64 and its rank."""
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", file.readline(HEAD)) is not None


def _is_installed(module: str) -> bool:
    try:
        return module in sys.modules or find_spec(module) is not None
    except ModuleNotFoundError:  # its parent, such as google, is missing
        return False


# ---------------------------------------------------------------- the hub's cache


def _describe_ref(name: str, commit: str, snapshots: list[str]) -> str:
    """What is wrong with a ref that names no usable snapshot."""
    if commit.strip() in snapshots and commit != commit.strip():
        return f"refs/{name} holds {commit!r:.60}, and must hold the commit alone, without a line end"
    return f"refs/{name} names {commit!r:.60}, which has no snapshot with {CONFIG}"


# ---------------------------------------------------------------- words and folders


def _first_match(names: Iterable[str], pattern: str) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name)), None)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _plain_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _listed(names: Iterable[str]) -> str:
    held = list(names)
    return ", ".join([*held[:SHOWN], *(["…"] if len(held) > SHOWN else [])])
