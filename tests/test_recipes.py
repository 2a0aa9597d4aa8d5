"""CONTRIBUTING's recipes: the steps work on a copy of the checkout, and each is needed.

A step names the place of its block in words: "In `FILE`, above `LINE`:" (or below), with a line that the file has once,
or "Create `FILE`:". The block after "Check:" is commands: each must succeed, and each ``pytest`` must run at least one
test that passes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.forked_python import run_forked
from tests.pages.blocks import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
if not PAGE.is_file():
    pytest.skip("CONTRIBUTING.md is not part of an installed package", allow_module_level=True)
MARK = "<!-- run: by tests/test_recipes.py -->\n"
BLOCK = re.compile(
    r"(?:In `(?P<changed>[^`\n]+)`, (?P<side>above|below) `(?P<line>[^`\n]+)`|Create `(?P<created>[^`\n]+)`|Check)"
    rf":\n\n{MARK}```(?P<language>\w+)\n(?P<text>.*?)```",
    re.DOTALL,
)


MODULES = {"pytest": ["pytest", "-p", "no:cacheprovider"], "emad": ["pytest_emad"]}


@dataclass(frozen=True)
class Step:
    """``text`` goes into ``path``: as a new file, or above or below the only line that reads ``line``."""

    path: str
    text: str
    side: str = ""
    line: str = ""

    def apply(self, root: Path) -> None:
        target = root / self.path
        if not self.side:
            assert not target.exists(), f"{self.path} is there already"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.text, encoding="utf-8")
            return
        lines = target.read_text(encoding="utf-8").splitlines(keepends=True)
        (at,) = (number for number, line in enumerate(lines) if line.strip() == self.line)
        lines.insert(at + (self.side == "below"), self.text)
        target.write_text("".join(lines), encoding="utf-8")


@dataclass(frozen=True)
class Recipe:
    steps: tuple[Step, ...]
    commands: tuple[str, ...]


@cache
def recipes() -> dict[str, Recipe]:
    """Return the recipes by heading, in order."""
    _, _, chapter = PAGE.read_text(encoding="utf-8").partition("\n## Recipes\n")
    sections = chapter.partition("\n## ")[0].split("\n### ")[1:]
    return {section.partition("\n")[0].strip(): _recipe(section) for section in sections}


def _recipe(section: str) -> Recipe:
    found = list(BLOCK.finditer(section))
    assert len(found) == section.count("```") // 2, "a block has neither a place nor Check:"
    steps = [
        Step(each["changed"] or each["created"], each["text"], each["side"] or "", each["line"] or "")
        for each in found
        if each["language"] != "sh"
    ]
    commands = [
        line for each in found if each["language"] == "sh" for line in each["text"].replace("\\\n", "").splitlines()
    ]
    assert steps
    assert commands
    return Recipe(tuple(steps), tuple(commands))


def copied(folder: Path) -> Path:
    """Copy all files that git tracks from this checkout, or all files of a copy without history."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in listed.decode().split("\0")[:-1]:
            if (ROOT / name).is_file():  # git still lists a file that was removed but not yet committed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for made in [*folder.rglob("*/")]:  # the copies reuse bytecode of unchanged files, by time and size
            if (compiled := ROOT / made.relative_to(folder) / "__pycache__").is_dir():
                shutil.copytree(compiled, made / "__pycache__")
    else:
        ignored = shutil.ignore_patterns("__pycache__", ".*cache", ".venv", ".tox", ".hypothesis")
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=ignored)
    return folder


def check(recipe: Recipe, root: Path) -> str:
    """Return the output of the first command that fails; "" if all succeed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    for command in recipe.commands:
        program, *words = shlex.split(command)
        if program == "python":  # -m MODULE …
            program, *words = words[1:]
        done = run_forked([*MODULES.get(program, [program]), *words], cwd=root, env=environment)
        if done.returncode or (program == "pytest" and not re.search(r"\b[1-9]\d* passed", done.stdout)):
            return f"{command}\nexit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return ""


def tried(recipe: Recipe, steps: Sequence[Step], folder: Path) -> str:
    root = copied(folder)
    for step in steps:
        step.apply(root)
    return check(recipe, root)


@pytest.mark.parametrize("name", recipes())
def test_a_plugin_in_the_current_folder_is_loaded_by_python_m(name: str) -> None:
    """``pytest`` alone leaves the folder off ``sys.path``, which ``check`` and an editable install hide."""
    made = {step.path.removesuffix(".py") for step in recipes()[name].steps if not step.side}
    for words in map(shlex.split, recipes()[name].commands):
        assert words[:3] == ["python", "-m", "pytest"] or not made & {*words}, words


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_a_recipe_works_on_a_copy_of_the_checkout(name: str, tmp_path: Path) -> None:
    recipe = recipes()[name]
    assert not (complaint := tried(recipe, recipe.steps, tmp_path)), complaint


@pytest.mark.slow  # one run per step; the test above covers the whole recipe
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, recipe in recipes().items() for number in range(len(recipe.steps))]
)
def test_every_step_of_a_recipe_is_needed(name: str, number: int, tmp_path: Path) -> None:
    """Without one of the steps the check fails, because it reads the results of each."""
    recipe = recipes()[name]
    assert tried(recipe, [step for at, step in enumerate(recipe.steps) if at != number], tmp_path)


@pytest.mark.slow  # a module that the two above import
def test_a_check_that_runs_no_test_fails(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("import pytest\n\n@pytest.mark.skip\ndef test_one(): pass\n")
    for command in ("pytest -q -k two test_one.py", "pytest -q test_one.py"):
        assert check(Recipe((), (command,)), tmp_path), command
