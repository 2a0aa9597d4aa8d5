"""Rules for names that a machine can check: unique classes, no participles, verbs that say what a function returns."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from tokenize import COMMENT, STRING, generate_tokens

import pytest

import emad_ref

ROOT = Path(emad_ref.__file__).parents[1]
HOUSES = ("emad_ref", "pytest_emad")
PRODUCT = tuple(source for package in (*HOUSES, "suites") for source in sorted((ROOT / package).rglob("*.py")))

# A result type is named after its producer, so that a reader can tell one from another.
BANNED_CLASSES = frozenset({
    "Aside", "Asked", "Being", "Beside", "Drawn", "Either", "Found", "Given", "Heard", "Held", "Kept", "Known", "Made",
    "Meant", "Met", "Read", "Reached", "Said", "Seen", "Shown", "Stood", "Taken", "Thing", "Told", "Wanted", "Whence",
})  # fmt: skip
# A module is named by the noun of its content.
BANNED_MODULES = frozenset({
    "again", "apart", "asked", "asking", "begun", "beside", "beyond", "bounded", "bridging", "caught", "drafted",
    "exchanged", "expected", "found", "fresh", "gathered", "gathering", "handing", "helpers", "held", "here", "hollow",
    "missing", "misc", "moved", "pictured", "prepared", "reached", "recorded", "sourced", "swept", "tabled", "there",
    "traced", "unasked", "utils", "walked", "watching", "whence", "witnessed",
})  # fmt: skip


@cache
def text_of(source: Path) -> str:
    return source.read_text(encoding="utf-8")


@cache
def nodes_of(source: Path) -> tuple[ast.AST, ...]:
    """Every node of a module, parsed once for all tests."""
    return tuple(ast.walk(ast.parse(text_of(source))))


@cache
def classes() -> list[tuple[str, str]]:
    """Return name and place of every class of the product."""
    return [
        (node.name, f"{source.relative_to(ROOT).as_posix()}:{node.lineno}")
        for source in PRODUCT
        for node in nodes_of(source)
        if isinstance(node, ast.ClassDef)
    ]


def test_every_class_name_stands_once() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, place in classes():
        places[name].append(place)
    assert len(places) > 300, "the classes of the product were not found"
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_is_named_by_a_participle() -> None:
    assert not [(name, place) for name, place in classes() if name.lstrip("_") in BANNED_CLASSES]


def test_a_module_is_named_by_a_noun() -> None:
    tests = sorted(
        (ROOT / "tests").rglob("*.py")
    )  # none in an installed package; ids of the suites' files are contracts
    named = {source: source.stem for source in PRODUCT} | {test: test.stem.removeprefix("test_") for test in tests}
    assert not [source for source, name in named.items() if name in BANNED_MODULES]


# The first word of a function's name says what it returns.
RETURNED = {
    "check_": re.compile(r"(?!None$)"),  # a finding or a result; what raises is require_…
    "is_": re.compile(r"bool$|Bools$|Type(Guard|Is)\b"),
    "has_": re.compile(r"bool$|Bools$"),
    "can_": re.compile(r"bool$|Bools$"),
    "should_": re.compile(r"bool$|Bools$"),
}


def test_a_verb_says_what_a_function_returns() -> None:
    found = [
        (f"{source.relative_to(ROOT).as_posix()}:{node.lineno}", node.name, pattern, ast.unparse(node.returns))
        for source in PRODUCT
        for node in nodes_of(source)
        if isinstance(node, ast.FunctionDef) and node.returns is not None
        for prefix, pattern in RETURNED.items()
        if node.name.lstrip("_").startswith(prefix)
    ]
    assert len(found) > 100, "the functions were not found"
    assert not [(place, name, returns) for place, name, pattern, returns in found if not pattern.match(returns)]


def test_no_source_cites_a_document_that_is_not_here() -> None:
    cited = re.compile(r"\b(?:DESIGN|METHODS)\b")
    assert not [source for source in PRODUCT if cited.search(text_of(source))]


def test_no_module_is_longer_than_850_lines() -> None:
    """A longer module has more than one subject."""
    lines = {str(source): len(text_of(source).splitlines()) for source in PRODUCT}
    assert not {source: count for source, count in lines.items() if count > 850}


def test_what_a_number_is_stands_in_one_place() -> None:
    """A new check tends to forget that Python counts True among its integers."""
    own_check = re.compile(
        r"type\([^()]*\) (?:is|is not|in|not in) \(?(?:int|float)\b"
        r"|isinstance\([^()]*, (?:int|int \| float)\) and not isinstance\([^()]*, bool\)"
        r"|isinstance\([^()]*, bool\) or not isinstance\([^()]*, (?:int|float)"
    )
    assert not [source for source in PRODUCT if own_check.search(text_of(source))]


NO_MODULES = ("text.usetex", "text.parse_math", "run.begun", "run.replay")  # of matplotlib; a file, a field of a report


@cache
def _defined(source: Path) -> frozenset[str]:
    """Return the names of functions, classes, attributes and variables that a module defines or imports."""
    names: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return frozenset(names)


def _resolves(reference: str) -> bool:
    """Return whether a dotted ``reference`` leads to a module of the product, or to names in one."""
    first, _, rest = reference.partition(".")
    if first not in HOUSES:  # a reference inside the house may leave its name out
        return any(_resolves(f"{house}.{reference}") for house in HOUSES)
    place, parts = ROOT / first, rest.split(".")
    for number, part in enumerate(parts):
        if (place / f"{part}.py").is_file():
            return set(parts[number + 1 :]) <= _defined(place / f"{part}.py")
        if not (place / part / "__init__.py").is_file():
            return set(parts[number:]) <= _defined(place / "__init__.py")
        place /= part
    return True


OF_OTHERS = (
    "HF_HUB_OFFLINE",
    "Q4_1",
    "QUESTIONS",
)  # an environment variable, a GGUF format, what a claim's module defines


def test_a_constant_that_a_sentence_names_is_there() -> None:
    """In docstrings and comments: the module holds the constant, or the sentence names the module that does."""
    constant = re.compile(r"``([A-Z][A-Z_0-9]{3,})``")
    found = []
    for source in PRODUCT:
        text = text_of(source)
        known = set(re.findall(r"[A-Z_0-9]+", constant.sub("", text)))
        found += [(source.relative_to(ROOT).as_posix(), name, name in known) for name in constant.findall(text)]
    assert len(found) > 50, "the references were not found"
    assert not [(place, name) for place, name, known in found if not known and name not in OF_OTHERS]


def test_a_module_that_a_sentence_names_is_there() -> None:
    """In docstrings, comments and messages: a package of the product, a dot, and a module or a name of it."""
    folders = {path.parent.name for house in HOUSES for path in (ROOT / house).glob("*/__init__.py")}
    packages = "|".join([*sorted(folders), "exit_rules"])
    dotted = re.compile(rf"(?<![\w./])(?:(?:{'|'.join(HOUSES)})\.)?(?:{packages})(?:\.\w+)+(?![\w/])")
    found = [
        (source.relative_to(ROOT).as_posix(), reference)
        for source in PRODUCT
        for token in generate_tokens(source.open(encoding="utf-8").readline)
        if token.type in (STRING, COMMENT)
        for reference in dotted.findall(re.sub(r"\{[^{}]*\}", "", token.string))  # without an f-string's code
        if not reference.endswith((".json", ".md", ".csv", ".toml")) and reference not in NO_MODULES
    ]
    assert len(found) > 50, "the references were not found"
    assert not [(place, reference) for place, reference in found if not _resolves(reference)]


@pytest.mark.parametrize("house", HOUSES)
def test_the_docstring_of_a_house_groups_its_names(house: str) -> None:
    """Each exported name stands in it once, under what a user does with it, in the order of ``__all__``."""
    module = importlib.import_module(house)
    exported = [name for name in module.__all__ if name != "__version__"]
    assert [name for name in re.findall(r"``(\w+)``", module.__doc__ or "") if name in exported] == exported


def test_every_module_says_what_it_is() -> None:
    modules = [source for source in PRODUCT if source.relative_to(ROOT).parts[0] in HOUSES]
    silent = [source for source in modules if not ast.get_docstring(ast.parse(text_of(source)))]
    assert not [source.relative_to(ROOT).as_posix() for source in silent]


def test_each_parameter_of_a_docstring_begins_a_line() -> None:
    """A reflowed paragraph must not swallow the next entry of a NumPy-style section."""
    joined = re.compile(
        r"^ {8,}\S.*[.;)] ([a-z_]+ : (?:\(|[A-Z]|str|float|int|bool|object|tuple|torch|list|dict).*)$", re.M
    )
    found = {source.name: joined.findall(text_of(source)) for source in PRODUCT}
    assert not {name: entries for name, entries in found.items() if entries}
