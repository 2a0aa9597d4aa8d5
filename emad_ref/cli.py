"""``emad``: train, calibrate, generate, world. One function per verb; each prints what it did; bad input exits 1."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument, EmadError
from emad_ref.record import DECODE

Verb = Callable[[argparse.Namespace], None]


def train(args: argparse.Namespace) -> None:
    """Train a bundled model again from its recipe."""
    from emad_ref.training.recipe import recipe_named
    from emad_ref.training.recipe import train as run

    recipe = recipe_named(args.name)
    out = args.out or Path(str(files("emad_ref.models") / "weights")) / args.name
    loss = run(recipe, out)
    print(f"{args.name}: {loss:.4f} nats/token at the end of training; written to {out}")


def calibrate(args: argparse.Namespace) -> None:
    """Take the entropy profile of a model on a corpus and write it as JSON."""
    import numpy as np

    from emad_ref.calibration.profile import profile_of
    from emad_ref.calibration.trace import take_trace, windows
    from emad_ref.decoding.selftext import own_documents
    from emad_ref.models.loading import load
    from emad_ref.models.stepper import Stepper
    from emad_ref.policy.thresholds import default_probes, fixed_entropy
    from emad_ref.text.sources import documents_of

    loaded = load(args.model)
    stepper = Stepper(loaded.model)
    probes = tuple(args.probes) if args.probes else default_probes(stepper.layers)
    fixed_entropy(stepper.layers, probes, 0.0)  # refuses impossible probes before the long pass, not after it
    window = min(stepper.max_positions, 512)
    if args.corpus == "self":
        documents = own_documents(stepper, loaded.opening or 0, min(window, 256) - 1, "calibrate")
    else:
        encode = tokenizer_of(loaded, args.model).encode
        texts = documents_of(args.corpus, "calibrate", data=args.data)
        documents = (np.array(encode(text, add_special_tokens=False), dtype=np.int64) for text in texts)
    sequences = windows(documents, window, loaded.opening, args.documents)
    trace = take_trace(stepper, sequences, progress=f"{args.model}: {args.corpus}")
    profile = profile_of(
        trace,
        probes,
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        corpus=args.corpus,
        dtype=str(stepper.dtype).removeprefix("torch."),
    )
    profile.save(args.out)
    for layer, mean in enumerate(profile.mean_nats, start=1):
        target = dict(zip(profile.probes, profile.targets_nats, strict=True)).get(layer)
        print(f"layer {layer:3d}  mean {mean:7.4f} nats" + ("" if target is None else f"  target {target:7.4f}"))
    print(f"{profile.tokens} tokens; written to {args.out}")


def generate(args: argparse.Namespace) -> None:
    """Continue a prompt at adaptive depth and show the depth of every token."""
    import numpy as np

    from emad_ref.calibration.profile import load_profile
    from emad_ref.decoding.walked import WalkedDecoder
    from emad_ref.models.loading import load
    from emad_ref.models.stepper import Stepper
    from emad_ref.point import full_depth
    from emad_ref.protocol import Prompt

    loaded = load(args.model)
    stepper = Stepper(loaded.model)
    point = full_depth(stepper.layers)
    if args.profile:
        profile = load_profile(args.profile)
        profile.require(loaded.fingerprint, str(stepper.dtype).removeprefix("torch."))
        point = profile.point(args.margin)
    opening = [] if loaded.opening is None else [loaded.opening]
    tokenizer = tokenizer_of(loaded, args.model)
    ids = opening + tokenizer.encode(args.prompt, add_special_tokens=False)
    decoder = WalkedDecoder(stepper, point, seed=args.seed, temperature=args.temperature)
    stop = frozenset() if loaded.opening is None else frozenset({loaded.opening})
    record = decoder.generate([Prompt(np.array(ids))], args.tokens, stop)
    depth = record.tokens.of(0, DECODE).depth
    print(args.prompt + tokenizer.decode(record.emitted[0].tolist()))
    print(f"depths: {' '.join(map(str, depth.tolist()))}  (mean {depth.mean():.2f} of {stepper.layers})")


def tokenizer_of(loaded: Any, name: str) -> Any:
    if loaded.tokenizer is None:
        raise BadArgument("model", name, "a model with a tokenizer", "pass the folder that holds tokenizer.json")
    return loaded.tokenizer


def world(args: argparse.Namespace) -> None:
    """Print documents of a corpus."""
    from emad_ref.text.sources import documents_of

    for text in islice(documents_of(args.corpus, args.split), max(args.documents, 0)):
        print(text)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="emad", description="Adaptive-depth decoding: train, calibrate, generate.")
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(run: Verb) -> argparse.ArgumentParser:
        sub = verbs.add_parser(run.__name__, help=run.__doc__)
        sub.set_defaults(run=run)
        return sub

    sub = verb(train)
    sub.add_argument("name")
    sub.add_argument("--out", type=Path, help="folder to write; the bundled one by default")

    sub = verb(calibrate)
    sub.add_argument("model")
    sub.add_argument("out", type=Path)
    sub.add_argument("--corpus", default="world:premise")
    sub.add_argument("--data", type=Path)
    sub.add_argument("--documents", type=int, default=200)
    sub.add_argument("--probes", type=int, nargs="+")

    sub = verb(generate)
    sub.add_argument("model")
    sub.add_argument("prompt")
    sub.add_argument("--profile", type=Path, help="written by emad calibrate; without it, full depth")
    sub.add_argument("--margin", type=float, default=0.0, help="nats")
    sub.add_argument("--tokens", type=int, default=48)
    sub.add_argument("--temperature", type=float, default=0.0)
    sub.add_argument("--seed", type=int, default=0)

    sub = verb(world)
    sub.add_argument("corpus")
    sub.add_argument("--split", default="evaluate")
    sub.add_argument("--documents", type=int, default=3)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        args.run(args)
    except EmadError as error:
        print(f"emad: {error}", file=sys.stderr)
        return 1
    return 0
