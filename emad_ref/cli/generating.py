"""``emad generate`` and ``emad world``: text, a model's own and that of a corpus."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from emad_ref.cli.texts import stepper_of, tokenizer_of
from emad_ref.record import DECODE


def generate(args: argparse.Namespace) -> None:
    """Continue a prompt at adaptive depth and show the depth of every token."""
    import numpy as np

    from emad_ref.calibration.profile import load_profile
    from emad_ref.decoding.walked import WalkedDecoder
    from emad_ref.models.loading import load
    from emad_ref.point import full_depth
    from emad_ref.protocol import Prompt

    loaded = load(args.model)
    stepper = stepper_of(loaded)
    point = full_depth(stepper.layers)
    if args.profile:
        profile = load_profile(args.profile)
        profile.require(loaded.fingerprint, str(stepper.dtype).removeprefix("torch."))
        point = profile.point(args.margin)
    opening = [] if loaded.opening is None else [loaded.opening]
    tokenizer = tokenizer_of(loaded)
    ids = opening + tokenizer.encode(args.prompt, add_special_tokens=False)
    decoder = WalkedDecoder(stepper, point, seed=args.seed, temperature=args.temperature)
    stop = frozenset() if loaded.opening is None else frozenset({loaded.opening})
    record = decoder.generate([Prompt(np.array(ids))], args.tokens, stop)
    depth = record.tokens.of(0, DECODE).depth
    print(args.prompt + tokenizer.decode(record.emitted[0].tolist()))
    print(f"depths: {' '.join(map(str, depth.tolist()))}  (mean {depth.mean():.2f} of {stepper.layers})")


def world(args: argparse.Namespace) -> None:
    """Print documents of a corpus."""
    from emad_ref.text.sources import documents_of

    for text in islice(documents_of(args.corpus, args.split), max(args.documents, 0)):
        print(text)


def generate_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model")
    sub.add_argument("prompt")
    sub.add_argument("--profile", type=Path, help="written by emad calibrate; without it, full depth")
    sub.add_argument("--margin", type=float, default=0.0, help="nats")
    sub.add_argument("--tokens", type=int, default=48)
    sub.add_argument("--temperature", type=float, default=0.0)
    sub.add_argument("--seed", type=int, default=0)


def world_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("corpus")
    sub.add_argument("--split", default="evaluate")
    sub.add_argument("--documents", type=int, default=3)
