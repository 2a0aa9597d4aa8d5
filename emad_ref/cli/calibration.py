"""``emad calibrate`` and ``emad merge``: entropy profiles of a model, on one corpus or on several.

``emad lens``: a tuned lens of a model, fitted on a corpus.

``emad train``: a bundled model from its recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.cli.arguments import add_examples, add_executor
from emad_ref.errors import BadArgument
from emad_ref.files import remove_file, require_writable
from emad_ref.models.tokenizers import require_decoder_only
from emad_ref.text.documents import DEFAULT_CORPUS, DEFAULT_DOCUMENTS

if TYPE_CHECKING:
    from emad_ref.calibration.profile import Profile
    from emad_ref.models.loading import LoadedModel


DECILES = tuple(tenth / 10 for tenth in range(1, 10))


def calibrate(args: argparse.Namespace) -> None:
    """Take the entropy profile of a model on one corpus or several and write it as JSON."""
    from emad_ref.calibration.entropy_statistics import require_quantile
    from emad_ref.calibration.profile import require_probes
    from emad_ref.calibration.run import CalibrationPlan, worker_statistics
    from emad_ref.calibration.run import calibrate as run
    from emad_ref.calibration.windows import window_size
    from emad_ref.exit_rules import default_probes
    from emad_ref.models.loading import load
    from emad_ref.models.model_spec import ModelSpec
    from emad_ref.workers.dispatch import open_workers

    require_writable(args.out, "out")  # bad input is refused before the long pass, not after it
    loaded = load(args.model)
    require_decoder_only(loaded)
    stepper = loaded.stepper
    dtype = str(stepper.dtype).removeprefix("torch.")
    probes = tuple(args.probes) if args.probes else strided_probes(args.stride, stepper.layers) if args.stride else None
    probes = default_probes(stepper.layers) if probes is None else probes
    require_probes(probes, stepper.layers)
    for quantile in args.quantiles or ():
        require_quantile(quantile)
    corpora = open_corpora(args, loaded)
    plan = CalibrationPlan(
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        dtype=dtype,
        window=window_size(stepper.max_positions),
        probes=probes,
        bins=requested_bins(args, loaded.fingerprint, dtype, corpora, stepper.vocabulary),
        tokens=args.tokens,
        documents=document_limit(args),
        every_layer=args.every_layer,
    )
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    names = ", ".join(corpora)
    label = f"{args.model}: {names}"
    with open_workers(args.executor) as crew:
        parts = None if crew is None else worker_statistics(crew, ModelSpec.of(loaded), plan)
        profile = run(stepper, plan, corpora, checkpoint=checkpoint, resume=args.resume, progress=label, parts=parts)
    profile.save(args.out)
    remove_file(checkpoint, "checkpoint")  # only now: until the profile is kept, it is all there is
    for name, tokens in profile.corpora.items():
        if args.tokens is not None and tokens < args.tokens:
            print(f"{name} ended after {tokens} of {args.tokens} tokens")
    print_profile(profile, DECILES if args.quantiles == [] else args.quantiles or ())
    print(f"{profile.tokens} tokens; written to {args.out}")


def strided_probes(stride: int, layers: int) -> tuple[int, ...]:
    """Every ``stride`` layers below the last."""
    if stride >= layers:
        raise BadArgument("stride", stride, f"less than {layers}, the layers of this model", "no layer would be probed")
    return tuple(range(stride, layers, stride))


def document_limit(args: argparse.Namespace) -> int | None:
    """Windows to read of each corpus: what was asked for; where nothing was, a few, for some corpora never end."""
    return DEFAULT_DOCUMENTS if args.documents is None and args.tokens is None else args.documents


def open_corpora(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Name → its windows, from the first at every call."""
    from emad_ref.tuning import windows_of

    names = args.corpus or [DEFAULT_CORPUS]
    if len(set(names)) < len(names):
        raise BadArgument("corpus", names, "each corpus once", "its tokens would count twice")
    reading = {"data": args.data, "limit": document_limit(args)}
    opened = {name: partial(windows_of, loaded, name, "calibrate", **reading) for name in names}
    for again in opened.values():
        again()  # a misspelled second corpus is no reason to lose the pass over the first
    return opened


def requested_bins(args: argparse.Namespace, fingerprint: str, dtype: str, corpora: Any, vocabulary: int) -> Any:
    """The bins asked for; frequency buckets come from the calibration text, in a first pass without the model."""
    from emad_ref.calibration.profile import load_profile
    from emad_ref.calibration.run import token_counts
    from emad_ref.exit_rules import frequency_buckets
    from emad_ref.point import BinSpec

    if args.bins_of is not None:
        given = load_profile(args.bins_of)
        given.require(fingerprint, dtype)
        return given.bins
    features = () if args.bins == "none" else tuple(args.bins.split(","))
    if "frequency" not in features:
        return BinSpec(features)
    BinSpec(features, frequency=b"\0")  # an unknown name beside it is refused before the pass
    return BinSpec(
        features, frequency=frequency_buckets(token_counts(corpora, vocabulary, args.tokens, "counting tokens"))
    )


def print_profile(profile: Profile, quantiles: Sequence[float]) -> None:
    """Print what was learnt of every layer read, and of every bin; a warning where entropy does not fall with depth."""
    from emad_ref.calibration.monotonicity import correction_text, profile_warnings

    together = profile.coarser(len(profile.bins.features))
    assert together.statistics is not None, "what was just calibrated or merged keeps its statistics"
    deviations = together.statistics.deviation_nats()[0]
    columns = [(quantile, together.quantile_nats(quantile)[0]) for quantile in quantiles]
    targets = dict(zip(profile.probes, profile.targets_nats, strict=True))
    for place, (layer, mean) in enumerate(zip(profile.read, profile.mean_nats, strict=True)):
        line = f"layer {layer:3d}  mean {mean:7.4f} nats  sd {deviations[place]:7.4f}"
        line += "".join(f"  q{quantile:g} {levels[place]:.4f}" for quantile, levels in columns)
        print(line + (f"  target {targets[layer]:7.4f} ({targets[layer] - mean:+.4f})" if layer in targets else ""))
    if profile.bins.features:
        print_bins(profile)
    if moved := correction_text(profile):
        print(moved)
    for said in profile_warnings(profile):
        print(f"warning: {said}")


def print_bins(profile: Profile) -> None:
    """Print each bin's tokens and targets, and whose targets they are where its tokens were too few."""
    from emad_ref.exit_rules import bin_names

    assert profile.statistics is not None, "see show"
    rows = zip(
        bin_names(profile.bins),
        profile.statistics.tokens,
        profile.bin_targets_nats,
        profile.fallbacks,
        strict=True,
    )
    features = profile.bins.features
    for name, tokens, targets, dropped in rows:
        line = f"{name}: {tokens} tokens, targets {' '.join(f'{target:.4f}' for target in targets)}"
        kept = " and ".join(features[: len(features) - dropped]) or "all tokens"
        print(line + (f" (too few tokens: from {kept})" if dropped else ""))


def merge(args: argparse.Namespace) -> None:
    """Add up profiles of one model on several corpora."""
    from emad_ref.calibration.profile import load_profile
    from emad_ref.calibration.profile import merge as merged

    require_writable(args.out, "out")
    profile = merged([load_profile(path) for path in args.profiles])
    profile.save(args.out)
    print_profile(profile, ())
    print(f"{profile.tokens} tokens of {profile.corpus}; written to {args.out}")


def calibrate_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="bundled name, folder or hub name of a decoder-only model")
    sub.add_argument("out", type=Path, metavar="OUT", help="the profile to write, JSON")
    sub.add_argument("--corpus", action="append", metavar="CORPUS",
                     help=f"as emad world takes it, or self; repeatable; default {DEFAULT_CORPUS}")  # fmt: skip
    sub.add_argument("--data", type=Path, metavar="DIR", help="folder with data sets, read before the hub")
    sub.add_argument("--tokens", type=int, metavar="N", help="decided positions to read of each corpus")
    sub.add_argument("--documents", type=int, metavar="N",
                     help=f"windows to read of each corpus; {DEFAULT_DOCUMENTS} without --tokens")  # fmt: skip
    read = sub.add_mutually_exclusive_group()
    read.add_argument("--probes", type=int, nargs="+", metavar="LAYER", help="layers to probe, ascending")
    read.add_argument("--stride", type=int, choices=(2, 4, 6, 8), help="probe every so many layers")
    sub.add_argument("--every-layer", action="store_true",
                     help="read entropies after every layer, not the probes and the last alone: a curve to choose "
                          "probes by; each layer takes a head more")  # fmt: skip
    sorted_by = sub.add_mutually_exclusive_group()
    sorted_by.add_argument("--bins", default="none", help="one or two of position,confidence,frequency")
    sorted_by.add_argument("--bins-of", type=Path, metavar="PROFILE", help="its bins, so that the two can be merged")
    sub.add_argument("--quantiles", type=float, nargs="*", metavar="Q",
                     help="to print beside the means; deciles if none is named")  # fmt: skip
    sub.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint, if an interrupted run left one")
    add_executor(sub)
    add_examples(
        sub,
        "emad calibrate emad-tiny profile.json",
        "emad calibrate emad-tiny profile.json --documents 20 --probes 4 8",
        "emad calibrate emad-tiny curve.json --documents 20 --every-layer",
        "emad calibrate ./llama profile.json --corpus wikitext --data ./data --tokens 100000 --stride 4 --resume",
        "emad calibrate emad-tiny a.json --corpus world:premise --corpus self --bins position,confidence",
        "emad calibrate emad-tiny b.json --corpus notes.txt --bins-of a.json --quantiles 0.25 0.5",
        "emad calibrate ./llama profile.json --corpus wikitext --data ./data --executor dask://10.0.0.1:8786 --resume",
    )


def merge_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("out", type=Path, metavar="OUT", help="the profile to write, JSON")
    sub.add_argument("profiles", type=Path, nargs="+", metavar="PROFILE", help="of one model, with the same probes")
    add_examples(sub, "emad merge both.json a.json b.json")


FULL_RANK = "full"


def lens(args: argparse.Namespace) -> None:
    """Fit a tuned lens: a translator per layer, so that a readout there says what the model says at its end."""
    from emad_ref.calibration.lens_files import save_lens
    from emad_ref.calibration.lens_fit import LensPlan, fit_lens, held_out_windows
    from emad_ref.calibration.linear_maps import fit_gate
    from emad_ref.calibration.windows import window_size
    from emad_ref.models.loading import load
    from emad_ref.models.tokenizers import require_decoder_only
    from emad_ref.probes.lens import attach_lens
    from emad_ref.tuning import windows_of

    require_writable(args.out, "out")  # bad input is refused before the long pass, not after it
    rank = parse_rank(args.rank)
    loaded = load(args.model)
    require_decoder_only(loaded)
    stepper = loaded.stepper
    plan = LensPlan(
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        dtype=str(stepper.dtype).removeprefix("torch."),
        corpus=args.corpus,
        window=window_size(stepper.max_positions),
        layers=tuple(args.layers or range(1, stepper.layers)),
        rank=rank,
        steps=args.steps,
        rate=args.rate,
        held_out_tokens=args.held_out,
        seed=args.seed,
    )
    read = partial(windows_of, loaded, args.corpus, "calibrate", data=args.data, limit=args.documents)
    read()  # a misspelled corpus is refused before anything is written
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    label = f"{args.model}: {args.corpus}"
    fitted = fit_lens(stepper, plan, read, checkpoint=checkpoint, resume=args.resume, progress=label)
    if args.gate:
        name, unseen = attach_lens(stepper, fitted.lens, loaded.fingerprint), held_out_windows(plan, read)
        gate = fit_gate(stepper, unseen, plan.layers, name, tokens=args.held_out, progress="gate")
        fitted = replace(fitted, gate=gate)
    save_lens(args.out, fitted)
    remove_file(checkpoint, "checkpoint")  # only now: until the lens is kept, it is all there is
    for layer in plan.layers:
        raw, tuned = fitted.raw_nats[layer], fitted.tuned_nats[layer]
        print(f"layer {layer:3d}  KL to the final distribution {tuned:7.4f} nats, of the model's own head {raw:7.4f}")
    print(f"{fitted.tokens} held-out tokens; lens {fitted.lens.digest[:12]} written to {args.out}")


def parse_rank(text: str) -> int | None:
    """Raises BadArgument for anything but ``full`` and a whole number."""
    if text == FULL_RANK:
        return None
    if not text.isdecimal():
        raise BadArgument("rank", text, f"{FULL_RANK}, or a rank ≥ 1")
    return int(text)


def lens_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="bundled name, folder or hub name")
    sub.add_argument("out", type=Path, metavar="OUT", help="a .safetensors file to write")
    sub.add_argument(
        "--corpus", default=DEFAULT_CORPUS, metavar="CORPUS", help=f"text to fit on; {DEFAULT_CORPUS} by default"
    )
    sub.add_argument("--data", type=Path, metavar="DIR", help="folder with data sets, read before the hub")
    sub.add_argument("--documents", type=int, metavar="N",
                     help="windows to read of the corpus, again and again; all by default")  # fmt: skip
    sub.add_argument("--layers", type=int, nargs="+", metavar="L", help="to translate; all below the last by default")
    sub.add_argument(
        "--rank", default=FULL_RANK, metavar="R", help=f"of the translators: {FULL_RANK}, the default, or a number"
    )
    sub.add_argument("--steps", type=int, default=800, metavar="N", help="of 512 tokens; 800 by default")
    sub.add_argument("--rate", type=float, default=2e-3, metavar="R", help="of Adam; 2e-3 by default")
    sub.add_argument("--held-out", type=int, default=20_000, metavar="TOKENS",
                     help="to measure on, of a fifth of the documents; 20,000 by default")  # fmt: skip
    sub.add_argument("--gate", action="store_true", help="fit a gate on the held-out text, too")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of low ranks, and of what is held out; 0")
    sub.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint, if an interrupted run left one")
    add_examples(
        sub,
        "emad lens emad-tiny-plain plain.safetensors --corpus world:mixed",
        "emad lens emad-tiny-plain low.safetensors --rank 16 --layers 4 8 --gate --steps 400 --rate 1e-3 --seed 1",
        "emad lens ./llama llama.safetensors --corpus wikitext --data ./data --documents 900 --held-out 50000 --resume",
    )


def train(args: argparse.Namespace) -> None:
    """Train a bundled model again from its recipe."""
    from emad_ref.training.loop import recipe_named
    from emad_ref.training.loop import train as run

    recipe = recipe_named(args.name)
    out = args.out or Path(str(files("emad_ref.models") / "weights")) / args.name
    loss = run(recipe, out, resume=args.resume)
    print(f"{args.name}: {loss:.4f} nats/token at the end of training; written to {out}")


def train_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", metavar="NAME", help="of the bundled model, e.g. emad-nano")
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder to write; the bundled one by default")
    sub.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint, if an interrupted run left one")
    add_examples(sub, "emad train emad-nano --out ./emad-nano", "emad train emad-nano --out ./emad-nano --resume")
