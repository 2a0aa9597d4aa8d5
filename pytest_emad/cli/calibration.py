"""Verbs that fit or train something and write it to a file.

    emad calibrate    entropy profile of a model on one or more corpora
    emad merge        sum of profiles of one model
    emad lens         tuned lens of a model (Belrose et al., 2303.08112)
    emad train        weights of a bundled model, from its recipe

``emad calibrate``, ``emad lens`` and ``emad train`` write checkpoints, from which ``--resume`` continues.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.errors import BadArgument
from emad_ref.files import is_file, remove_file, require_replaceable_file, resolve_path
from emad_ref.models.bundled import weights_folder
from emad_ref.text.documents import DEFAULT_CORPUS, DEFAULT_DOCUMENTS
from pytest_emad.cli.arguments import (
    add_examples,
    add_resume_argument,
    add_suite_option,
    add_worker_executor_argument,
    parse_float_argument,
    parse_path,
    parse_whole_number,
)

if TYPE_CHECKING:
    from emad_ref.calibration.profile import Profile
    from emad_ref.models.loading import LoadedModel


DECILES = tuple(tenth / 10 for tenth in range(1, 10))
FULL_RANK = "full"
MERGE_FORM = "emad merge OUT PROFILE PROFILE"


def calibrate(args: argparse.Namespace) -> None:
    """Measure the entropy profile of a model on one or more corpora and write it as JSON."""
    from emad_ref.calibration.calibration_run import CalibrationPlan, worker_statistics_source
    from emad_ref.calibration.calibration_run import calibrate as run
    from emad_ref.calibration.entropy_statistics import require_quantile
    from emad_ref.calibration.profile import require_probes
    from emad_ref.calibration.windows import window_size
    from emad_ref.exit_rules import default_probes
    from emad_ref.models.fast.product_table import share_product_table
    from emad_ref.models.loading import load, require_decoder_only
    from emad_ref.models.model_spec import ModelSpec
    from emad_ref.workers.dispatch import open_workers

    require_replaceable_profile(args.out, [args.bins_of] if args.bins_of else [])  # before the long pass
    loaded = load(args.model)
    require_decoder_only(loaded)
    stepper = loaded.stepper
    dtype = str(stepper.dtype).removeprefix("torch.")
    if args.probes:
        probes = tuple(args.probes)
    else:
        probes = strided_probe_layers(args.stride, stepper.layers) if args.stride else default_probes(stepper.layers)
    require_probes(probes, stepper.layers)
    for quantile in args.quantiles or ():
        require_quantile(quantile)
    corpora = build_window_readers(args, loaded)
    plan = CalibrationPlan(
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        dtype=dtype,
        window=window_size(stepper.max_positions),
        probes=probes,
        bins=resolve_bin_spec(args, loaded.fingerprint, dtype, corpora, stepper.vocabulary_size),
        tokens=args.tokens,
        documents=windows_to_read_per_corpus(args),
        every_layer=args.every_layer,
    )
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    names = ", ".join(corpora)
    label = f"{args.model}: {names}"
    with share_product_table(), open_workers(args.executor) as workers:
        parts = None if workers is None else worker_statistics_source(workers, ModelSpec.from_loaded(loaded), plan)
        profile = run(stepper, plan, corpora, checkpoint=checkpoint, resume=args.resume, progress=label, parts=parts)
    profile.save(args.out)
    remove_file(checkpoint, "checkpoint")  # after the profile is saved, so that a crash in between loses nothing
    for name, tokens in profile.corpora.items():
        if args.tokens is not None and tokens < args.tokens:
            print(f"{name} ended after {tokens} of {args.tokens} tokens")
    print_profile(profile, DECILES if args.quantiles == [] else args.quantiles or ())
    print(f"{profile.tokens} tokens; written to {args.out}")


def strided_probe_layers(stride: int, layers: int) -> tuple[int, ...]:
    """Every ``stride``-th layer below the last of ``layers``.

    Raises:
        BadArgument: there is none.
    """
    if stride >= layers:
        raise BadArgument("stride", stride, f"less than {layers}, the layers of this model", "no layer would be probed")
    return tuple(range(stride, layers, stride))


def windows_to_read_per_corpus(args: argparse.Namespace) -> int | None:
    """Windows to read of each corpus, with a default if ``--tokens`` is missing too: some corpora are endless."""
    return DEFAULT_DOCUMENTS if args.documents is None and args.tokens is None else args.documents


def build_window_readers(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Name of each corpus → function that returns its windows from the first on.

    Raises:
        BadArgument: a corpus that is named twice or cannot be read.
    """
    from emad_ref.tuning import windows_of

    names = args.corpus or [DEFAULT_CORPUS]
    if len(set(names)) < len(names):
        raise BadArgument("corpus", names, "each corpus once", "its tokens would count twice")
    options = {"data": args.data, "limit": windows_to_read_per_corpus(args), "corpus_group": args.corpus_group}
    sources = {name: partial(windows_of, loaded, name, "calibrate", **options) for name in names}
    for open_windows in sources.values():
        open_windows()  # reject a misspelled corpus before the pass over the first
    return sources


def resolve_bin_spec(args: argparse.Namespace, fingerprint: str, dtype: str, corpora: Any, vocabulary: int) -> Any:
    """The ThresholdBinSpec of ``--bins`` or ``--bins-of``.

    Frequency buckets are counted on the calibration text, in a pass that does not run the model.
    """
    from emad_ref.calibration.calibration_run import count_targets_by_token
    from emad_ref.calibration.profile import load_profile
    from emad_ref.exit_rules import assign_frequency_buckets
    from emad_ref.point import ThresholdBinSpec

    if args.bins_of is not None:
        other = load_profile(args.bins_of)
        other.require(fingerprint, dtype)
        return other.bins
    features = () if args.bins == "none" else tuple(args.bins.split(","))
    if "frequency" not in features:
        return ThresholdBinSpec(features)
    ThresholdBinSpec(features, frequency=b"\0")  # rejects unknown features before the pass
    return ThresholdBinSpec(
        features,
        frequency=assign_frequency_buckets(count_targets_by_token(corpora, vocabulary, args.tokens, "counting tokens")),
    )


def print_profile(profile: Profile, quantiles: Sequence[float]) -> None:
    """Print mean entropy, deviation, quantiles and target of each layer, each bin, and warnings about the profile."""
    from emad_ref.calibration.monotonicity import describe_corrections, iterate_profile_warnings

    pooled = profile.drop_last_bin_features(len(profile.bins.features))  # without bins
    assert pooled.statistics is not None, "a new or merged profile has statistics"
    deviations = pooled.statistics.deviation_nats()[0]
    columns = [(quantile, pooled.quantile_nats(quantile)[0]) for quantile in quantiles]
    targets = dict(zip(profile.probes, profile.targets_nats, strict=True))
    for place, (layer, mean) in enumerate(zip(profile.read, profile.mean_nats, strict=True)):
        line = f"layer {layer:3d}  mean {mean:7.4f} nats  sd {deviations[place]:7.4f}"
        line += "".join(f"  q{quantile:g} {levels[place]:.4f}" for quantile, levels in columns)
        print(line + (f"  target {targets[layer]:7.4f} ({targets[layer] - mean:+.4f})" if layer in targets else ""))
    if profile.bins.features:
        print_bin_targets(profile)
    if correction := describe_corrections(profile):
        print(correction)
    for warning in iterate_profile_warnings(profile):
        print(f"warning: {warning}")


def print_bin_targets(profile: Profile) -> None:
    """Print tokens and targets of each bin; a bin with too few tokens names the coarser bin whose targets it takes."""
    from emad_ref.exit_rules import bin_names

    assert profile.statistics is not None, "a new or merged profile has statistics"
    rows = zip(
        bin_names(profile.bins),
        profile.statistics.tokens,
        profile.bin_targets_nats,
        profile.dropped_features,
        strict=True,
    )
    features = profile.bins.features
    for name, tokens, targets, dropped in rows:
        line = f"{name}: {tokens} tokens, targets {' '.join(f'{target:.4f}' for target in targets)}"
        parent = " and ".join(features[: len(features) - dropped]) or "all tokens"
        print(line + (f" (too few tokens: targets of {parent})" if dropped else ""))


def merge_profile_files(args: argparse.Namespace) -> None:
    """Merge profiles of one model, each on other corpora, into one."""
    from emad_ref.calibration.profile import load_profile
    from emad_ref.calibration.profile import merge as merge_profiles

    if len(args.profiles) < 2:
        raise BadArgument(
            "profiles", [str(path) for path in args.profiles], "at least two profiles after OUT", MERGE_FORM
        )
    require_replaceable_profile(args.out, args.profiles)
    profile = merge_profiles([load_profile(path) for path in args.profiles])
    if is_file(args.out) and set(load_profile(args.out).corpora) != set(profile.corpora):
        expected = f"a new file, or an earlier merge on {profile.corpus}"
        raise BadArgument("out", str(args.out), expected, f"OUT stands first: {MERGE_FORM}; or remove that file")
    profile.save(args.out)
    print_profile(profile, ())
    print(f"{profile.tokens} tokens of {profile.corpus}; written to {args.out}")


def require_replaceable_profile(out: Path, inputs: Sequence[Path]) -> None:
    """Refuse to write a profile to ``out`` where an input, or a file of another kind, would be lost."""
    if resolve_path(out) in [resolve_path(path) for path in inputs]:
        raise BadArgument("out", str(out), "another file than the profiles that are read", "it would be replaced")
    from emad_ref.calibration.profile import PROFILE

    require_replaceable_file(out, "out", "a profile", PROFILE.start)


def add_calibrate_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("model", metavar="MODEL", help="bundled name, folder or hub name of a decoder-only model")
    add("out", type=parse_path, metavar="OUT", help="JSON file to write the profile to")
    about = f"self is text by the model; repeatable (default: {DEFAULT_CORPUS})"
    add_suite_option(sub, "corpus", about, as_text=True, action="append", default=None)
    add_suite_option(sub, "corpus-group")
    add_suite_option(sub, "data")
    add("--tokens", type=parse_whole_number, metavar="N", help="predicted tokens to read of each corpus")
    add("--documents", type=parse_whole_number, metavar="N",
        help=f"how much text to read: windows of each corpus "
             f"(default without --tokens: {DEFAULT_DOCUMENTS})")  # fmt: skip
    probes = sub.add_mutually_exclusive_group()
    probes.add_argument(
        "--probes", type=parse_whole_number, nargs="+", metavar="LAYER", help="layers to probe, ascending"
    )
    probes.add_argument("--stride", type=parse_whole_number, choices=(2, 4, 6, 8), help="probe every STRIDE-th layer")
    add("--every-layer", action="store_true",
        help="measure entropy after every layer, not only after probes and the last layer; runs the language-model "
             "head once more per layer")  # fmt: skip
    bins = sub.add_mutually_exclusive_group()
    bins.add_argument(
        "--bins", default="none", help="one or two of position,top1_probability,frequency (default: none)"
    )
    bins.add_argument("--bins-of", type=parse_path, metavar="PROFILE", help="bins of this profile, for emad merge")
    add(
        "--quantiles",
        type=parse_float_argument,
        nargs="*",
        metavar="Q",
        help="entropy quantiles to print; without Q the deciles",
    )
    add_resume_argument(sub)
    add_worker_executor_argument(sub)
    add_examples(
        sub,
        "emad calibrate emad-tiny profile.json",
        "emad calibrate emad-tiny profile.json --documents 20 --probes 4 8",
        "emad calibrate emad-tiny curve.json --documents 20 --every-layer",
        "emad calibrate ./llama profile.json --corpus wikitext --data ./data --tokens 100000 --stride 4 --resume",
        "emad calibrate emad-tiny a.json --corpus world:premise --corpus self --bins position,top1_probability",
        "emad calibrate ./llama profile.json --corpus texts.jsonl --corpus-group author",
        "emad calibrate emad-tiny b.json --corpus notes.txt --bins-of a.json --quantiles 0.25 0.5",
        "emad calibrate ./llama profile.json --corpus wikitext --data ./data --executor dask://10.0.0.1:8786 --resume",
    )


def add_merge_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("out", type=parse_path, metavar="OUT", help="JSON file to write the profile to")
    add("profiles", type=parse_path, nargs="+", metavar="PROFILE", help="profiles of one model with the same probes")
    add_examples(sub, "emad merge both.json a.json b.json")


def fit_tuned_lens(args: argparse.Namespace) -> None:
    """Fit a tuned lens: per layer an affine map, after which the model's head predicts the final output."""
    from emad_ref.calibration.lens_files import LENS, save_lens
    from emad_ref.calibration.lens_fit import LensPlan, fit_lens, held_out_windows
    from emad_ref.calibration.linear_maps import fit_gate
    from emad_ref.calibration.windows import window_size
    from emad_ref.models.loading import load, require_decoder_only
    from emad_ref.probes.tuned_lens import attach_lens
    from emad_ref.tuning import windows_of

    require_replaceable_file(args.out, "out", "a lens", LENS.start)  # reject bad input before the long pass
    rank = parse_rank(args.rank)
    if args.exit_gate and args.held_out < 2:
        raise BadArgument("held_out", args.held_out, "at least 2 tokens with --exit-gate", "a gate is fitted to them")
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
    options = {"data": args.data, "limit": args.documents, "corpus_group": args.corpus_group}
    windows = partial(windows_of, loaded, args.corpus, "calibrate", **options)
    windows()  # reject a misspelled corpus before anything is written
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    label = f"{args.model}: {args.corpus}"
    fitted = fit_lens(stepper, plan, windows, checkpoint=checkpoint, resume=args.resume, progress=label)
    if args.exit_gate:
        name, held_out = attach_lens(stepper, fitted.lens, loaded.fingerprint), held_out_windows(plan, windows)
        gate = fit_gate(stepper, held_out, plan.layers, name, tokens=args.held_out, progress="gate")
        fitted = replace(fitted, gate=gate)
    save_lens(args.out, fitted)
    remove_file(checkpoint, "checkpoint")  # after the lens is saved, so that a crash in between loses nothing
    for layer in plan.layers:
        raw, tuned = fitted.raw_nats[layer], fitted.tuned_nats[layer]
        print(f"layer {layer:3d}  KL to the final distribution {tuned:7.4f} nats; without the lens {raw:7.4f} nats")
    print(f"{fitted.tokens} held-out tokens; lens {fitted.lens.digest[:12]} written to {args.out}")


def parse_rank(text: str) -> int | None:
    """A rank from its text, None for ``full``.

    Raises:
        BadArgument: neither ``full`` nor a whole number.
    """
    if text == FULL_RANK:
        return None
    if re.fullmatch("[0-9]{1,9}", text) is None:
        raise BadArgument("rank", text, f"{FULL_RANK}, or a rank ≥ 1")
    return int(text)


def add_lens_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("model", metavar="MODEL", help="bundled name, folder or hub name of a decoder-only model")
    add("out", type=parse_path, metavar="OUT", help=".safetensors file to write the lens to")
    add_suite_option(sub, "corpus", as_text=True, default=DEFAULT_CORPUS)
    add_suite_option(sub, "corpus-group")
    add_suite_option(sub, "data")
    add(
        "--documents",
        type=parse_whole_number,
        metavar="N",
        help="how much text to read: windows of the corpus, repeatedly (default: all)",
    )
    add(
        "--layers",
        type=parse_whole_number,
        nargs="+",
        metavar="L",
        help="layers that get a map (default: all below the last)",
    )
    add("--rank", default=FULL_RANK, metavar="R", help=f"rank of each map, or {FULL_RANK} (default: {FULL_RANK})")
    add(
        "--steps", type=parse_whole_number, default=800, metavar="N", help="training steps of 512 tokens (default: 800)"
    )
    add("--rate", type=parse_float_argument, default=2e-3, metavar="R", help="learning rate of Adam (default: 2e-3)")
    add("--held-out", type=parse_whole_number, default=20_000, metavar="TOKENS",
        help="tokens to measure on, from a held-out fifth of the documents (default: 20,000)")  # fmt: skip
    add("--exit-gate", action="store_true", help="also fit an exit gate, on the held-out text")
    add_suite_option(sub, "seed")
    add_resume_argument(sub)
    add_examples(
        sub,
        "emad lens emad-tiny-plain plain.safetensors --corpus world:mixed",
        "emad lens ./llama llama.safetensors --corpus texts.jsonl --corpus-group author",
        "emad lens emad-tiny-plain low.safetensors --rank 16 --layers 4 8 --exit-gate --steps 400 --rate 1e-3 --seed 1",
        "emad lens ./llama llama.safetensors --corpus wikitext --data ./data --documents 900 --held-out 50000 --resume",
    )


def train_bundled_model(args: argparse.Namespace) -> None:
    """Train a bundled model from its recipe."""
    from emad_ref.training.loop import get_recipe
    from emad_ref.training.loop import train as run

    recipe = get_recipe(args.name)
    out = args.out or weights_folder() / args.name
    loss = run(recipe, out, resume=args.resume)
    print(f"{args.name}: {loss:.4f} nats/token at the end of training; written to {out}")


def add_train_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("name", metavar="NAME", help="bundled model, e.g. emad-nano")
    add("--out", type=parse_path, metavar="PATH", help="where to write: a folder (default: the bundled one)")
    add_resume_argument(sub)
    add_examples(sub, "emad train emad-nano --out ./emad-nano", "emad train emad-nano --out ./emad-nano --resume")
