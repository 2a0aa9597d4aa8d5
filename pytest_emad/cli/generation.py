"""``emad generate`` prints text of a model with the depth of each token; ``emad world`` prints documents of a corpus.

In a terminal ``generate`` streams the text and colours each token by its depth, from blue (shallow) over green, yellow
and orange to red (deep). The colours are close to Solarized's accents, which are legible on light and dark backgrounds.
NO_COLOR (no-color.org) and TERM=dumb switch colours off. COLORTERM announces true colour; without it the 216 colours of
a 256-colour terminal are used.

In a pipe ``generate`` streams JSON lines, one ASCII object per token:

    {"text": " Ben", "token": 477, "depth": 4, "layers": 12, "model": "emad-tiny"}

If a character takes several tokens, all but the last have an empty ``text``. The concatenated texts are the output.
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
from typing import TYPE_CHECKING, Literal

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from emad_ref.text.documents import SPLITS
from pytest_emad.cli.arguments import (
    add_examples,
    add_suite_option,
    parse_float_argument,
    parse_path,
    parse_whole_number,
)
from pytest_emad.measurements.option_values import CORPORA

if TYPE_CHECKING:
    from emad_ref.decoding.streaming import StreamedToken
    from emad_ref.models.loading import LoadedModel
    from emad_ref.point import OperatingPoint


Colours = Literal["none", "256", "true"]

COLOUR_SCALE = ((38, 139, 210), (42, 161, 152), (133, 153, 0), (181, 137, 0), (203, 75, 22), (220, 40, 47))
CUBE_LEVELS = (0, 95, 135, 175, 215, 255)  # levels of each primary in a 256-colour terminal
SWATCH = "█"
DEFAULT_FOREGROUND = "\x1b[39m"
FORMATS = ("auto", "text", "jsonl")
COLOUR_CHOICES = ("auto", "always", "never")
THRESHOLD_BITS = 1.0
# option → the option that it depends on
REQUIRED_OPTION = {
    "margin": "profile",
    "entropy": "lens",
    "divergence": "lens",
    "lossless": "exit",
    "lossy": "exit",
} | dict.fromkeys(("threshold", "entropy_window", "least_run"), "small_model")


def detect_colour_mode(environment: Mapping[str, str], is_terminal: bool) -> Colours:
    """Colours that the output stream supports, by the environment's NO_COLOR, TERM and COLORTERM."""
    if not is_terminal or environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return "none"
    return "true" if environment.get("COLORTERM") in ("truecolor", "24bit") else "256"


def colour_by_depth(text: str, depth: int, layers: int, colours: Colours) -> str:
    """``text`` with the escape sequences of the colour of ``depth``, 1…``layers``."""
    if colours == "none" or not text:
        return text
    red, green, blue = _scale_colour((depth - 1) / max(layers - 1, 1))
    if colours == "true":
        return f"\x1b[38;2;{red};{green};{blue}m{text}{DEFAULT_FOREGROUND}"
    r, g, b = (min(range(6), key=lambda i, level=level: abs(CUBE_LEVELS[i] - level)) for level in (red, green, blue))  # type: ignore[misc]
    return f"\x1b[38;5;{16 + 36 * r + 6 * g + b}m{text}{DEFAULT_FOREGROUND}"


def _scale_colour(position: float) -> tuple[int, int, int]:
    """RGB colour of the scale at ``position`` in 0–1, interpolated linearly."""
    at = position * (len(COLOUR_SCALE) - 1)
    below = min(int(at), len(COLOUR_SCALE) - 2)
    low, high = COLOUR_SCALE[below], COLOUR_SCALE[below + 1]
    red, green, blue = (round(a + (b - a) * (at - below)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def format_depth_legend(layers: int, colours: Colours, width: int) -> str:
    """Legend of the colour scale in at most ``width`` columns, with a swatch per layer if they fit."""
    first, last = "depth 1 ", f" {layers} layers"
    swatches = max(1, min(layers, width - len(first) - len(last)))
    shown = (1 + round(i * (layers - 1) / max(swatches - 1, 1)) for i in range(swatches))
    return first + "".join(colour_by_depth(SWATCH, depth, layers, colours) for depth in shown) + last


def format_pair_legend(names: tuple[str, str], colours: Colours, width: int) -> str:
    """Legend of a pair, small model first: each name after its colour, cut to ``width`` columns in total."""
    room = max(1, (width - 2 * len(SWATCH) - 4) // 2)
    return "  ".join(
        f"{colour_by_depth(SWATCH, at, 2, colours)} {name[:room]}" for at, name in enumerate(names, start=1)
    )


def escape_control_characters(text: str) -> str:
    """``text`` with control characters escaped, so that a model cannot send commands to the terminal."""
    return "".join(f"\\x{ord(c):02x}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def generate(args: argparse.Namespace) -> None:
    """Continue a prompt, or answer the source of an encoder-decoder, and show the depth of each token."""
    from emad_ref.models.loading import load

    for name, required in REQUIRED_OPTION.items():
        if getattr(args, name) is not None and getattr(args, required) is None:
            flag, required_flag = (f"--{option.replace('_', '-')}" for option in (name, required))
            raise BadArgument(flag, getattr(args, name), f"{required_flag} too", f"add it or leave out {flag}")
    loaded = load(args.model)
    small = None if args.small_model is None else load(args.small_model)
    tokens = _stream_tokens(args, loaded, small)
    tokens = chain([next(tokens)], tokens)  # bad arguments raise here, before any output
    if args.format == "jsonl" or (args.format == "auto" and not sys.stdout.isatty()):
        for token in tokens:
            print(json.dumps(asdict(token)), flush=True)
        return
    separator = "\n" if loaded.model.config.is_encoder_decoder else ""
    names = None if small is None else (small.name, loaded.name)
    _print_text(tokens, args.prompt + separator, names, _output_colours(args.color))


def _output_colours(when: str) -> Colours:
    if when == "always":
        return detect_colour_mode({**os.environ, "NO_COLOR": ""}, is_terminal=True)
    return detect_colour_mode(os.environ, when == "auto" and sys.stdout.isatty())


def _stream_tokens(args: argparse.Namespace, loaded: LoadedModel, small: LoadedModel | None) -> Iterator[StreamedToken]:
    from emad_ref.decoding.streaming import stream, stream_pair
    from emad_ref.decoding.switching import SwitchingRule

    if args.exit is not None:
        return _stream_with_exit(args, loaded)
    if small is None:
        point = _operating_point(args, loaded)
        return stream(loaded, args.prompt, point, args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    options = {"window": args.entropy_window, "least_run": args.least_run}
    rule = SwitchingRule(
        THRESHOLD_BITS if args.threshold is None else args.threshold,
        **{name: value for name, value in options.items() if value is not None},
    )
    return stream_pair(
        small, loaded, args.prompt, rule, args.max_new_tokens, temperature=args.temperature, seed=args.seed
    )


def _stream_with_exit(args: argparse.Namespace, loaded: LoadedModel) -> Iterator[StreamedToken]:
    """Decode as ``--exit`` advises: leave early at its lossy point, else draft, else full depth.

    Raises:
        BadArgument: an exit of another model, ``--lossless`` with an exit that has no drafts, or ``--lossy`` with one
            that has no lossy point.
    """
    from emad_ref.decoding.streaming import stream, stream_self_speculation
    from emad_ref.point import full_depth
    from pytest_emad.screening.exit import load_exit

    exit = load_exit(args.exit).attach(loaded)
    sampling = {"temperature": args.temperature, "seed": args.seed}
    if args.lossless and exit.drafting is None:
        remedy = "emad screen found none that is faster; leave out --lossless"
        raise BadArgument("lossless", True, "an exit with drafts", remedy)
    if args.lossy and isinstance(exit.lossy, Absent):
        raise BadArgument("lossy", True, "an exit with a lossy point", f"this one has none: {exit.lossy.reason}")
    leave_early = args.lossy or (exit.leave_early and not args.lossless)
    if exit.drafting is not None and not leave_early:
        return stream_self_speculation(loaded, args.prompt, exit.drafting, args.max_new_tokens, **sampling)
    point = exit.point if leave_early else full_depth(loaded.stepper.layers)
    return stream(loaded, args.prompt, point, args.max_new_tokens, **sampling)


def _operating_point(args: argparse.Namespace, loaded: LoadedModel) -> OperatingPoint:
    """The point of ``--profile`` (EMAD), ``--lens`` or ``--confidence`` (CALM's softmax response); else full depth."""
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
        return early_exit_point("softmax_response", stepper.layers, stepper.vocabulary_size, 1, args.confidence)
    return full_depth(stepper.layers)


def _print_text(tokens: Iterator[StreamedToken], prompt: str, pair: tuple[str, str] | None, colours: Colours) -> None:
    """Print a legend, the text as it grows, and a summary of depths, which lists every token if there are no colours.

    ``pair``: names of the small and the large model; a token then has the colour of its model, not of its depth.
    """
    width = shutil.get_terminal_size().columns
    printed: list[StreamedToken] = []
    for token in tokens:
        if not printed:
            if colours != "none":
                print(
                    format_depth_legend(token.layers, colours, width)
                    if pair is None
                    else format_pair_legend(pair, colours, width)
                )
            print(escape_control_characters(prompt), end="")
        printed.append(token)
        depth, layers = (token.depth, token.layers) if pair is None else (1 + pair.index(token.model), 2)
        print(colour_by_depth(escape_control_characters(token.text), depth, layers, colours), end="", flush=True)
    print()
    for line in _depth_summary(printed, pair, by_token=colours == "none"):
        print(textwrap.fill(line, width))


def _depth_summary(tokens: list[StreamedToken], pair: tuple[str, str] | None, by_token: bool) -> Iterator[str]:
    count = f"{len(tokens)} token{'s' * (len(tokens) != 1)}"
    if pair is None:
        if by_token:
            yield f"depths: {' '.join(str(token.depth) for token in tokens)}"
        yield f"{count}, mean depth {sum(token.depth for token in tokens) / len(tokens):.2f} of {tokens[0].layers}"
        return
    models = [token.model for token in tokens]
    if by_token:
        yield f"models: {', '.join(f'{name} × {len(list(run))}' for name, run in groupby(models))}"
    yield f"{count}, {models.count(pair[1])} of them by {pair[1]}"


def _lens_point(args: argparse.Namespace, loaded: LoadedModel) -> OperatingPoint:
    """Operating point of ``--lens``: free depth, K and V above an exit copied.

    A token exits after the first layer whose lens entropy is at most ``--entropy``, or whose divergence from the final
    output, as estimated by the gate, is at most ``--divergence``.

    Raises:
        BadArgument: neither or both thresholds; a lens of another model; ``--divergence`` with a lens without a gate.
    """
    from emad_ref.calibration.lens_files import load_lens
    from emad_ref.point import OperatingPoint
    from emad_ref.probes.tuned_lens import attach_lens

    if (args.entropy is None) == (args.divergence is None):
        raise BadArgument("lens", str(args.lens), "either --entropy NATS or --divergence ROOT too", "add one of them")
    fitted, is_gated = load_lens(args.lens), args.entropy is None
    if is_gated and fitted.gate is None:
        raise BadArgument("divergence", args.divergence, "a lens with a gate", "fit one: emad lens --exit-gate")
    probes, layers = tuple(fitted.lens.translators), loaded.stepper.layers
    digest = attach_lens(loaded.stepper, fitted.lens, loaded.fingerprint)
    thresholds = ((args.divergence if is_gated else args.entropy,) * len(probes),)
    point = OperatingPoint("tuned lens", "fixed_entropy", layers, layers, probes, thresholds, "copying", lens=digest)
    if not is_gated or fitted.gate is None:
        return point
    return replace(point, name="tuned lens, gated", family="gate", estimator=fitted.gate, signal="divergence")


def print_corpus_documents(args: argparse.Namespace) -> None:
    """Print the first documents of a corpus."""
    from emad_ref.text.corpora import iterate_corpus_documents

    texts = islice(iterate_corpus_documents(args.corpus, args.split, data=args.data), args.documents)
    first = next(texts, None)
    if first is None:
        raise BadArgument(
            "corpus", args.corpus, f"a document of split {args.split}", "choose another --split, or a larger corpus"
        )
    for text in chain([first], texts):
        print(text)


def add_generate_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("model", metavar="MODEL", help="bundled name, folder or hub name; with --small-model the large model")
    add("prompt", metavar="PROMPT", help="text to continue; for an encoder-decoder such as T5 the source")
    rule = sub.add_mutually_exclusive_group()
    profile = "calibration profile of emad calibrate: exit by EMAD with it; without a rule: full depth"
    add_suite_option(rule, "profile", help=profile)
    rule.add_argument("--confidence", type=parse_float_argument, metavar="P",
                      help="exit as in CALM, when the top-1 probability is at least P")  # fmt: skip
    rule.add_argument("--lens", type=parse_path, metavar="FILE",
                      help="tuned lens of emad lens: exit by it; needs --entropy or --divergence")  # fmt: skip
    exit = "exit of emad screen: exit, or draft, as in this file; full depth if neither pays"
    add_suite_option(rule, "exit", help=exit)
    small_model = "small model of a pair: it takes turns with MODEL by entropy (EAD)"
    add_suite_option(rule, "small-model", help=small_model)
    way = sub.add_mutually_exclusive_group()
    way.add_argument("--lossless", action="store_true", default=None,
                     help="only draft, so the output equals that of full depth; with --exit")  # fmt: skip
    way.add_argument("--lossy", action="store_true", default=None,
                     help="leave early even where emad screen advises not to; with --exit")  # fmt: skip
    margin = "margin of EMAD in nats: with --profile, exit this far below its targets (default: 0)"
    add_suite_option(sub, "margin", help=margin)
    add("--entropy", type=parse_float_argument, metavar="NATS", help="exit at this entropy or less; with --lens")
    add("--divergence", type=parse_float_argument, metavar="ROOT",
        help="exit if the exit gate's estimate, a square root of nats, is at most ROOT; with --lens")  # fmt: skip
    add("--threshold", type=parse_float_argument, metavar="BITS",
        help=f"mean entropy that calls the large model; with --small-model (default: {THRESHOLD_BITS:g})")  # fmt: skip
    add(
        "--entropy-window",
        type=parse_whole_number,
        metavar="TOKENS",
        help="window of the mean entropy; with --small-model (default: 5)",
    )
    add("--least-run", type=parse_whole_number, metavar="TOKENS",
        help="least number of tokens between two switches; with --small-model (default: 10)")  # fmt: skip
    add("--max-new-tokens", type=parse_whole_number, default=48, metavar="N",
        help="largest number of new tokens (default: 48)")  # fmt: skip
    add(
        "--temperature",
        type=parse_float_argument,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: 0)",
    )
    add_suite_option(sub, "seed")
    add("--format", choices=FORMATS, default="auto",
        help="text, or jsonl: one object per token; auto: text in a terminal, jsonl in a pipe")  # fmt: skip
    add("--color", choices=COLOUR_CHOICES, default="auto",
        help="auto: in a terminal unless NO_COLOR is set; always: also in a pipe")  # fmt: skip
    add_examples(
        sub,
        'emad generate emad-tiny "In the morning Kai went to the"',
        'emad generate emad-tiny "Ben has 4 pens." --profile profile.json --margin 0.2 --max-new-tokens 24',
        'emad generate emad-t5-tiny "question: where is Mia? context: Mia is in the barn." --confidence 0.9',
        'emad generate emad-tiny "Ben has" --small-model emad-nano --threshold 0.5 --entropy-window 5 --least-run 4',
        'emad generate emad-tiny-plain "Ben has" --lens lens.safetensors --entropy 0.5',
        'emad generate emad-tiny-plain "Ben has" --lens lens.safetensors --divergence 0.2',
        'emad generate emad-tiny-plain "Ben has" --exit exit.safetensors --lossless',
        'emad generate emad-tiny-plain "Ben has" --exit exit.safetensors --lossy',
        'emad generate emad-tiny "Ben has" --temperature 0.8 --seed 1 --format jsonl',
        'emad generate emad-tiny "Ben has" --color always --format text | less -R',
    )


def add_print_corpus_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    corpora = ", ".join(name for name in CORPORA if name != "self")
    add("corpus", metavar="CORPUS", help=f"{corpora}, or a file or folder")
    add_suite_option(sub, "data")
    add("--split", default="evaluate", metavar="SPLIT", help=f"one of {', '.join(SPLITS)} (default: evaluate)")
    add(
        "--documents",
        type=parse_whole_number,
        default=3,
        metavar="N",
        help="how much text to read: documents (default: 3)",
    )
    add_examples(
        sub,
        "emad world world:premise",
        "emad world world:mixed --split validate --documents 1",
        "emad world wikitext --data ./data",
    )
