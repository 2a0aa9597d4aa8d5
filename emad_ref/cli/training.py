"""``emad train``: a bundled model from its recipe."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from emad_ref.cli.parsing import examples


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
    examples(sub, "emad train emad-nano --out ./emad-nano", "emad train emad-nano --out ./emad-nano --resume")
