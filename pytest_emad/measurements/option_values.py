"""Parsers of the values of options and arguments.

Each reader takes (text, base, where) and raises BadArgument that names ``where``; ``base`` is the folder of relative
paths. Standard library only: readers look things up and load nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from emad_ref.errors import BadArgument, suggest_nearest
from emad_ref.extensions import EXTENSIONS
from emad_ref.files import is_file, is_folder, require_replaceable_file, require_writable_folder

LEAVE_OUT = "leave the option out to ask for none"
DTYPES: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
LARGEST_SEED = 2**32 - 1  # the largest that NumPy, torch and Hypothesis all take
MOST = 10**9  # largest count (documents, tokens, seconds): above any data set's, and far from overflow
MOST_NATS = 1e6  # far above ln V of any vocabulary
# files of a report, and their first characters
REPORTED = {
    "report.json": rb'^\{\s*"format": "report"',
    "report.md": rb"^# Verdicts on ",
    "index.html": rb"<title>Verdicts on ",
}
CORPORA: tuple[str, ...] = ("world:premise", "world:mixed", "wikitext", "pile", "gsm8k", "self")


def parse_name(text: str, base: Path, where: str) -> str:
    if not text.strip():
        raise BadArgument(where, text, "a name", "leave the option out to get its default")
    return text.strip()


def parse_model_name(text: str, base: Path, where: str) -> str:
    """A name as ``models.loading`` reads it; loading checks that it exists."""
    model_name = parse_name(text, base, where)
    if model_name.startswith("@") or model_name.endswith("@"):
        raise BadArgument(where, text, "NAME or NAME@REVISION", "e.g. pythia-410m@step3000")
    return model_name


def parse_model_pair(text: str, base: Path, where: str) -> tuple[str, str]:
    """``SMALL,LARGE`` as a pair."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        remedy = "e.g. pythia-70m,pythia-410m; where a name has a comma, the options for small and large model take it"
        raise BadArgument(where, text, "SMALL,LARGE: two models", remedy)
    small, large = (parse_model_name(part, base, where) for part in parts)
    return small, large


def make_unicode_minus_parser(read: Callable[[str, Path, str], float]) -> Callable[[str, Path, str], float]:
    """A reader of numbers that also accepts the minus sign of typeset text, U+2212."""
    return lambda text, base, where: read(text.replace("−", "-"), base, where)


def parse_name_and_reason(text: str, base: Path, where: str) -> tuple[str, str]:
    """``NAME=REASON`` as a pair; the caller checks the name."""
    key, _, reason = (part.strip() for part in text.partition("="))
    if not key or not reason:
        raise BadArgument(where, text, "NAME=REASON", "e.g. EMAD-F2='no sessions yet'")
    return key, reason


def make_choice_parser(allowed: tuple[str, ...]) -> Callable[[str, Path, str], str]:
    def read(text: str, base: Path, where: str) -> str:
        if text not in allowed:
            raise BadArgument(where, text, f"one of {', '.join(allowed)}", suggest_nearest(text, allowed))
        return text

    return read


def make_subset_parser(allowed: tuple[str, ...]) -> Callable[[str, Path, str], frozenset[str]]:
    def read(text: str, base: Path, where: str) -> frozenset[str]:
        chosen = _some_words(text, where, f"a comma list of {', '.join(allowed)}", LEAVE_OUT)
        for word in sorted(chosen):
            if word not in allowed:
                raise BadArgument(where, word, f"a comma list of {', '.join(allowed)}", suggest_nearest(word, allowed))
        return chosen

    return read


def split_comma_separated_set(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",") if word.strip())


def _some_words(text: str, where: str, expected: str, remedy: str) -> frozenset[str]:
    """``split_comma_separated_set`` with at least one entry: a blank text (an unset variable) would select none."""
    chosen = split_comma_separated_set(text)
    if not chosen:
        raise BadArgument(where, text, expected, remedy)
    return chosen


def parse_device_name(text: str, base: Path, where: str) -> str:
    kind, _, index = text.partition(":")
    numbered = index.isascii() and index.isdecimal() and len(index) < 4
    is_absent = kind == "meta" or (kind == "cpu" and numbered and int(index) > 0)  # only one cpu exists
    if not kind.isidentifier() or (":" in text and not numbered) or is_absent:
        raise BadArgument(where, text[:40], "a torch device that computes, such as cpu, cuda, cuda:1, mps")
    return text


def parse_nats(text: str, base: Path, where: str) -> float:
    example = "e.g. 0.2"
    value = _number(text, where, "a number of nats", example)
    if not abs(value) <= MOST_NATS:
        raise BadArgument(where, text, f"a finite number of nats, at most {MOST_NATS:,.0f} in size", example)
    return value


def parse_seconds(text: str, base: Path, where: str) -> float:
    example = "e.g. 30"
    value = _number(text, where, "a number of seconds", example)
    if not 0 < value <= MOST:
        raise BadArgument(where, text, f"a number of seconds above 0, at most {MOST:,}", example)
    return value


def _number(text: str, where: str, expected: str, example: str) -> float:
    try:
        return parse_number(text)
    except ValueError:
        raise BadArgument(where, text[:40], expected, example) from None


def parse_number(text: str) -> float:
    """A number in plain digits. Python's ``float`` also reads 1_0 as ten, and the digits of any script.

    Raises:
        ValueError: anything else.
    """
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r:.40} is no number in plain digits")
    return float(text)


def parse_seed(text: str, base: Path, where: str) -> int:
    return _whole(text, where, 0, LARGEST_SEED)


def parse_boolean(text: str, base: Path, where: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.strip().lower() not in values:
        raise BadArgument(where, text, "true or false")
    return values[text.strip().lower()]


def parse_existing_file(text: str, base: Path, where: str) -> Path:
    path = base / parse_name(text, base, where)
    if not is_file(path):
        raise BadArgument(where, text, "an existing file", f"looked at {path}")
    return path


def parse_existing_folder(text: str, base: Path, where: str) -> Path:
    path = base / parse_name(text, base, where)
    if not is_folder(path):
        raise BadArgument(where, text, "an existing folder", f"looked at {path}")
    return path


def prepare_report_folder(text: str, base: Path, where: str) -> Path:
    """Make a report folder and check that it is writable: access bits do not show a full or read-only file system.

    A folder in place of a page would otherwise fail only at the end of the run, and a page of the user's own be lost.
    """
    path = base / parse_name(text, base, where)
    require_writable_folder(path, where, Path(text))
    for page, start in REPORTED.items():
        require_replaceable_file(path / page, where, "one of a report", start)
    return path


def parse_corpus(text: str, base: Path, where: str) -> str:
    names = (*CORPORA, *EXTENSIONS.places("corpora"))
    if text in names:
        return text
    path = base / parse_name(text, base, where)
    if not is_file(path) and not is_folder(path):
        raise BadArgument(where, text, f"one of {', '.join(names)}, or an existing file", f"looked at {path}")
    return str(path)


def split_claim_ids(text: str, base: Path, where: str) -> frozenset[str]:
    # ``settings`` checks them, since the ids depend on --emad-register
    return _some_words(text, where, "a comma list of claims", LEAVE_OUT)


def parse_claim_patterns(text: str, base: Path, where: str) -> frozenset[str]:
    return _some_words(text, where, "claims by id or pattern", "e.g. EMAD-F1,EMAD-R*")  # as ``split_claim_ids``


def parse_task_names(text: str, base: Path, where: str) -> frozenset[str]:
    # lm-eval, an extra, checks them on first use
    return _some_words(text, where, "a comma list of task names", "leave the option out to score none")


def parse_count(text: str, base: Path, where: str) -> int:
    return _whole(text, where, 1, MOST)


def _whole(text: str, where: str, least: int, most: int) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20 and least <= int(digits) <= most):
        raise BadArgument(where, text[:40], f"a whole number ≥ {least}, and at most {most}")
    return int(digits)
