"""Text coloured by depth: which colours a terminal has, which of them a depth gets, and a line that says so.

From shallow to deep the scale goes blue, green, yellow, orange, red: near Solarized's accents, made to be read on light
ground and on dark. NO_COLOR (no-color.org) and TERM=dumb are obeyed; COLORTERM says whether there is true colour, else
the 216 of a 256-colour terminal are used.

``emad generate`` and ``emad world``: text, a model's own and that of a corpus.

What ``generate`` writes depends on who reads it. A terminal sees the text as it grows, each token in the colour of its
depth. A pipe gets JSON lines, one object per token, as it grows:

    {"text": " Ben", "token": 477, "depth": 4, "layers": 12, "model": "emad-tiny"}

``text`` is escaped as JSON is, to ASCII. The parts of a character that takes several tokens have an empty ``text`` but
the last; all texts together are what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from emad_ref.cli.arguments import add_examples
from emad_ref.errors import BadArgument
from emad_ref.text.documents import DEFAULT_CORPUS, SPLITS

if TYPE_CHECKING:
    from emad_ref.decoding.streaming import StreamedToken
    from emad_ref.models.loading import LoadedModel
    from emad_ref.point import OperatingPoint


Colours = Literal["none", "256", "true"]

COLOUR_SCALE = ((38, 139, 210), (42, 161, 152), (133, 153, 0), (181, 137, 0), (203, 75, 22), (220, 40, 47))
CUBE_LEVELS = (0, 95, 135, 175, 215, 255)  # levels of each primary in a 256-colour terminal
SWATCH = "█"
DEFAULT_FOREGROUND = "\x1b[39m"  # the terminal's own foreground


def terminal_colours(environment: Mapping[str, str], terminal: bool) -> Colours:
    """What may be written to a stream that is a ``terminal``, or is not."""
    if not terminal or environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return "none"
    return "true" if environment.get("COLORTERM") in ("truecolor", "24bit") else "256"


def paint(text: str, depth: int, layers: int, colours: Colours) -> str:
    """``text`` in the colour of ``depth`` among 1…``layers``."""
    if colours == "none" or not text:
        return text
    red, green, blue = _rgb((depth - 1) / max(layers - 1, 1))
    if colours == "true":
        return f"\x1b[38;2;{red};{green};{blue}m{text}{DEFAULT_FOREGROUND}"
    r, g, b = (min(range(6), key=lambda i, level=level: abs(CUBE_LEVELS[i] - level)) for level in (red, green, blue))  # type: ignore[misc]
    return f"\x1b[38;5;{16 + 36 * r + 6 * g + b}m{text}{DEFAULT_FOREGROUND}"


def _rgb(share: float) -> tuple[int, int, int]:
    """The scale at ``share`` in 0–1, linear between its colours."""
    at = share * (len(COLOUR_SCALE) - 1)
    below = min(int(at), len(COLOUR_SCALE) - 2)
    low, high = COLOUR_SCALE[below], COLOUR_SCALE[below + 1]
    red, green, blue = (round(a + (b - a) * (at - below)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def depth_legend(layers: int, colours: Colours, width: int) -> str:
    """The scale with its ends, at most ``width`` columns; a swatch for each layer where there is room."""
    first, last = "depth 1 ", f" {layers} layers"
    swatches = max(1, min(layers, width - len(first) - len(last)))
    shown = (1 + round(i * (layers - 1) / max(swatches - 1, 1)) for i in range(swatches))
    return first + "".join(paint(SWATCH, depth, layers, colours) for depth in shown) + last


def pair_legend(names: tuple[str, str], colours: Colours, width: int) -> str:
    """The small and the large model of a pair, each behind its colour; cut to ``width`` columns."""
    room = max(1, (width - 2 * len(SWATCH) - 4) // 2)
    return "  ".join(f"{paint(SWATCH, at, 2, colours)} {name[:room]}" for at, name in enumerate(names, start=1))


def visible_text(text: str) -> str:
    """``text`` with control characters spelled out: what a model writes must not command a terminal."""
    return "".join(_spell_out(c) if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _spell_out(character: str) -> str:
    return f"\\x{ord(character):02x}"


FORMATS = ("auto", "text", "jsonl")
COLOUR_CHOICES = ("auto", "always", "never")
THRESHOLD_BITS = 1.0
REQUIRED_OPTION = {"margin": "profile", "entropy": "lens", "divergence": "lens", "lossless": "exit"} | dict.fromkeys(
    ("threshold", "window", "least_run"), "small_model"
)


def generate(args: argparse.Namespace) -> None:
    """Continue a prompt, or answer a source, and show the depth of every token."""
    from emad_ref.models.loading import load

    for name, other in REQUIRED_OPTION.items():
        if getattr(args, name) is not None and getattr(args, other) is None:
            raise BadArgument(name, getattr(args, name), f"--{other.replace('_', '-')} beside it", "it is about that")
    loaded = load(args.model)
    small = None if args.small_model is None else load(args.small_model)
    pieces = _pieces(args, loaded, small)
    pieces = chain([next(pieces)], pieces)  # what is refused is refused before a line is written
    if args.format == "jsonl" or (args.format == "auto" and not sys.stdout.isatty()):
        for piece in pieces:
            print(json.dumps(asdict(piece)), flush=True)
        return
    between = "\n" if loaded.model.config.is_encoder_decoder else ""
    names = None if small is None else (small.name, loaded.name)
    _print_pieces(pieces, args.prompt + between, names, _colours(args.color))


def _colours(when: str) -> Colours:
    if when == "always":
        return terminal_colours({**os.environ, "NO_COLOR": ""}, terminal=True)
    return terminal_colours(os.environ, when == "auto" and sys.stdout.isatty())


def _pieces(args: argparse.Namespace, loaded: LoadedModel, small: LoadedModel | None) -> Iterator[StreamedToken]:
    from emad_ref.decoding.streaming import stream, stream_pair
    from emad_ref.decoding.switching import SwitchingRule

    if args.exit is not None:
        return _exit_pieces(args, loaded)
    if small is None:
        point = _operating_point(args, loaded)
        return stream(loaded, args.prompt, point, args.tokens, temperature=args.temperature, seed=args.seed)
    given = {"window": args.window, "least_run": args.least_run}
    rule = SwitchingRule(
        THRESHOLD_BITS if args.threshold is None else args.threshold,
        **{name: value for name, value in given.items() if value is not None},
    )
    return stream_pair(small, loaded, args.prompt, rule, args.tokens, temperature=args.temperature, seed=args.seed)


def _exit_pieces(args: argparse.Namespace, loaded: LoadedModel) -> Iterator[StreamedToken]:
    """By the lossy point of an exit; drafted by itself where there is none, or where nothing may be lost; else in full.

    Raises:
        BadArgument: an exit of another model; drafts that are asked for, of an exit that has none.
    """
    from emad_ref.decoding.streaming import stream, stream_drafted
    from emad_ref.screening.exit import load_exit

    found = load_exit(args.exit).attach(loaded)
    drawn = {"temperature": args.temperature, "seed": args.seed}
    if args.lossless and found.drafting is None:
        raise BadArgument("lossless", True, "an exit that says how to draft", "screen found no way that pays")
    if found.drafting is not None and (args.lossless or found.lossy is None):
        return stream_drafted(loaded, args.prompt, found.drafting, args.tokens, **drawn)
    return stream(loaded, args.prompt, found.point, args.tokens, **drawn)


def _operating_point(args: argparse.Namespace, loaded: LoadedModel) -> OperatingPoint:
    """EMAD from a profile, softmax response from a confidence, else full depth."""
    from emad_ref.calibration.profile import load_profile
    from emad_ref.exit_rules import early_exit_point
    from emad_ref.point import full_depth

    stepper = loaded.stepper
    if args.profile is not None:
        profile = load_profile(args.profile)
        profile.require(loaded.fingerprint, str(stepper.dtype).removeprefix("torch."))
        return profile.point(args.margin or 0.0)
    if args.lens is not None:
        return _lens_point(args, loaded)
    if args.confidence is not None:
        return early_exit_point("softmax_response", stepper.layers, stepper.vocabulary, 1, args.confidence)
    return full_depth(stepper.layers)


def _print_pieces(pieces: Iterator[StreamedToken], prompt: str, pair: tuple[str, str] | None, colours: Colours) -> None:
    """The legend, the text as it grows, and how deep it went; token by token where colours cannot say so.

    ``pair``: names of the small and the large model, whose tokens then get the two ends of the scale.
    """
    width = shutil.get_terminal_size().columns
    shown: list[StreamedToken] = []
    for piece in pieces:
        if not shown:
            if colours != "none":
                print(depth_legend(piece.layers, colours, width) if pair is None else pair_legend(pair, colours, width))
            print(visible_text(prompt), end="")
        shown.append(piece)
        at, of = (piece.depth, piece.layers) if pair is None else (1 + pair.index(piece.model), 2)
        print(paint(visible_text(piece.text), at, of, colours), end="", flush=True)
    print()
    for line in _depth_summary(shown, pair, by_token=colours == "none"):
        print(textwrap.fill(line, width))


def _depth_summary(shown: list[StreamedToken], pair: tuple[str, str] | None, by_token: bool) -> Iterator[str]:
    count = f"{len(shown)} token{'s' * (len(shown) != 1)}"
    if pair is None:
        if by_token:
            yield f"depths: {' '.join(str(piece.depth) for piece in shown)}"
        yield f"{count}, mean depth {sum(piece.depth for piece in shown) / len(shown):.2f} of {shown[0].layers}"
        return
    models = [piece.model for piece in shown]
    if by_token:
        yield f"models: {', '.join(f'{name} × {len(list(run))}' for name, run in groupby(models))}"
    yield f"{count}, {models.count(pair[1])} of them by {pair[1]}"


def _lens_point(args: argparse.Namespace, loaded: LoadedModel) -> OperatingPoint:
    """Free depth, K and V above an exit copied: a token leaves at the first layer whose entropy, read by the lens, is
    low enough, or whose divergence from the last layer, as the lens' gate expects it.

    Raises:
        BadArgument: none of the two thresholds, or both; a lens of another model; a gate that was not fitted.
    """
    from emad_ref.calibration.lens_files import load_lens
    from emad_ref.point import OperatingPoint
    from emad_ref.probes.lens import attach_lens

    if (args.entropy is None) == (args.divergence is None):
        raise BadArgument("lens", str(args.lens), "beside it either --entropy NATS or --divergence ROOT")
    fitted, gated = load_lens(args.lens), args.entropy is None
    if gated and fitted.gate is None:
        raise BadArgument("divergence", args.divergence, "a lens with a gate", "fit one: emad lens --gate")
    probes, layers = tuple(fitted.lens.translators), loaded.stepper.layers
    digest = attach_lens(loaded.stepper, fitted.lens, loaded.fingerprint)
    thresholds = ((args.divergence if gated else args.entropy,) * len(probes),)
    point = OperatingPoint("tuned lens", "fixed_entropy", layers, layers, probes, thresholds, "copying", lens=digest)
    if not gated or fitted.gate is None:
        return point
    return replace(point, name="tuned lens, gated", family="gate", estimator=fitted.gate, signal="divergence")


def world(args: argparse.Namespace) -> None:
    """Print documents of a corpus."""
    from emad_ref.text.corpora import corpus_documents

    for text in islice(corpus_documents(args.corpus, args.split), max(args.documents, 0)):
        print(text)


def generate_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="bundled name, folder or hub name; of a pair the large one")
    sub.add_argument("prompt", metavar="PROMPT", help="what to continue; the source of an encoder-decoder such as T5")
    rule = sub.add_mutually_exclusive_group()
    rule.add_argument("--profile", type=Path, metavar="FILE",
                      help="exit by EMAD: a profile written by emad calibrate; without a rule, full depth")  # fmt: skip
    rule.add_argument("--confidence", type=float, metavar="P",
                      help="exit early as CALM does, once the top-1 probability is at least P")  # fmt: skip
    rule.add_argument("--lens", type=Path, metavar="FILE",
                      help="exit by entropy as a tuned lens reads it, written by emad lens")  # fmt: skip
    rule.add_argument("--exit", type=Path, metavar="FILE",
                      help="exit or draft as emad screen found, which wrote it; full depth else")  # fmt: skip
    rule.add_argument("--small-model", metavar="MODEL", help="take turns with this one by entropy (EAD)")
    sub.add_argument("--lossless", action="store_true", default=None,
                     help="with --exit: draft, so that the output is the model's own")  # fmt: skip
    sub.add_argument(
        "--margin", type=float, metavar="NATS", help="with --profile: how far below it to exit; 0 by default"
    )
    sub.add_argument("--entropy", type=float, metavar="NATS", help="with --lens: at which a token may leave")
    sub.add_argument("--divergence", type=float, metavar="ROOT",
                     help="with --lens: the same, of the root of nats that its gate expects")  # fmt: skip
    sub.add_argument("--threshold", type=float, metavar="BITS",
                     help=f"with --small-model: what calls the large one; {THRESHOLD_BITS:g} by default")  # fmt: skip
    sub.add_argument("--window", type=int, metavar="TOKENS", help="with --small-model: of that mean; 5 by default")
    sub.add_argument("--least-run", type=int, metavar="TOKENS",
                     help="with --small-model: before the next change; 10 by default")  # fmt: skip
    sub.add_argument("--tokens", type=int, default=48, metavar="N", help="new tokens at most; 48 by default")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of what --temperature draws; 0 by default")
    sub.add_argument("--format", choices=FORMATS, default="auto",
                     help="text, or one JSON object per token; auto: text in a terminal, jsonl in a pipe")  # fmt: skip
    sub.add_argument("--color", choices=COLOUR_CHOICES, default="auto",
                     help="auto: in a terminal without NO_COLOR; always: in a pipe, too")  # fmt: skip
    add_examples(
        sub,
        'emad generate emad-tiny "In the morning Kai went to the"',
        'emad generate emad-tiny "Ben has 4 pens." --profile profile.json --margin 0.2 --tokens 24',
        'emad generate emad-t5-tiny "question: where is Mia? context: Mia is in the barn." --confidence 0.9',
        'emad generate emad-tiny "Ben has" --small-model emad-nano --threshold 0.5 --window 5 --least-run 4',
        'emad generate emad-tiny-plain "Ben has" --lens lens.safetensors --entropy 0.5',
        'emad generate emad-tiny-plain "Ben has" --lens lens.safetensors --divergence 0.2',
        'emad generate emad-tiny-plain "Ben has" --exit exit.safetensors --lossless',
        'emad generate emad-tiny "Ben has" --temperature 0.8 --seed 1 --format jsonl',
        'emad generate emad-tiny "Ben has" --color always --format text | less -R',
    )


def world_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "corpus", metavar="CORPUS", help=f"{DEFAULT_CORPUS}, world:mixed, wikitext, pile, or a file or folder"
    )
    sub.add_argument("--split", default="evaluate", metavar="SPLIT", help=f"{', '.join(SPLITS)}; evaluate by default")
    sub.add_argument("--documents", type=int, default=3, metavar="N", help="how many; 3 by default")
    add_examples(sub, "emad world world:premise", "emad world world:mixed --split validate --documents 1")
