"""The distributions: sdist → wheels → fresh environment → the suites inside the wheel. ``tox -e wheel`` runs this file.

Slow, and it needs an index or a folder of wheels: the fresh environment installs all dependencies of constraints.txt.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "emad_ref/models/weights"  # also the project whose wheel holds all of them
LARGEST = 3_000_000  # bytes of the plugin's wheel

pytestmark = pytest.mark.slow


def description_of(archive: Path) -> str:
    """Return the long description in the metadata of a wheel or an sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return wheel.read(name).decode().partition("\n\n")[2]
    with tarfile.open(archive) as sdist:
        name = next(name for name in sdist.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        member = sdist.extractfile(name)
        assert member is not None
        return member.read().decode().partition("\n\n")[2]


def check(*command: object, cwd: Path, status: int = 0, **settings: str) -> str:
    """Run a command with ``settings``, not the outer run's Python settings; return its output, also in the error."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "TOX"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | settings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == status, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    check(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked sdist, from which both wheels are built, so that a file missing there is noticed here."""
    source = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (folder,) = source.iterdir()
    return folder


def build_wheel(project: Path, out: Path) -> Path:
    check(sys.executable, "-m", "build", "--wheel", "--outdir", out, project, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def models_wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(unpacked / WEIGHTS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the wheel, its dependencies and pytest-xdist."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    check(interpreter, "-m", "pip", "install", "-c", constraints, f"pytest-emad[test] @ {wheel.as_uri()}", cwd=folder)
    return interpreter


@pytest.fixture(scope="session")
def missing(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the wheel's message about its default model if pytest-emad-models is not installed."""
    suites = ("-p", "no:cacheprovider", "--pyargs", "pytest_emad.suites")
    return check(bare, "-m", "pytest", *suites, cwd=tmp_path_factory.mktemp("run"), status=4)


@pytest.fixture(scope="session")
def python(bare: Path, missing: str, models_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment over ``bare`` in which the command of ``missing`` was run."""
    folder = tmp_path_factory.mktemp("with_models")
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    places = "import sysconfig; print(sysconfig.get_path('purelib'))"
    below, own = (Path(check(each, "-c", places, cwd=folder).strip()) for each in (bare, interpreter))
    (own / "below.pth").write_text(f"{below}\n")
    (command,) = re.findall(r"`pip (install [^`]+)`", missing)
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(models_wheel.parent)}
    check(interpreter, "-m", "pip", *command.split(), cwd=folder, **index)
    return interpreter


def tracked(folder: str) -> set[str]:
    """Return the files of ``folder`` that belong in a distribution."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_sdist_has_all_that_the_wheel_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    expected = {"hatch_build.py", "pyproject.toml", "LICENSE", "README.md", "constraints.txt"}
    for folder in ("emad_ref", "pytest_emad", "suites", "golden", "tests", "examples"):
        expected |= tracked(folder)
    expected -= {"examples/cpp/decoder"}  # in a folder that was used for a build
    assert expected <= names, sorted(expected - names)


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= LARGEST


def test_an_index_would_take_and_show_both_projects(sdist: Path, wheel: Path, models_wheel: Path) -> None:
    check(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, models_wheel, cwd=wheel.parent)


def test_no_link_of_a_long_description_leads_nowhere(sdist: Path, wheel: Path, models_wheel: Path) -> None:
    for archive in (sdist, wheel, models_wheel):
        links = re.findall(r"\]\(([^)]+)\)", description_of(archive))
        assert [link for link in links if not link.startswith("https://")] == []
    assert "Install (docs/install.md)" in description_of(wheel)


def test_the_wheel_holds_every_page_that_its_description_and_messages_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        sources = [archive.read(name).decode() for name in names if name.endswith(".py")]
    named = {page for text in (*sources, description_of(wheel)) for page in re.findall(r"docs/[\w-]+\.\w+", text)}
    assert len(named) > 20
    assert [page for page in sorted(named) if f"pytest_emad/{page}" not in names] == []


def test_the_wheel_carries_suites_goldens_and_the_smallest_model_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    expected = tracked("emad_ref") | tracked("pytest_emad")
    expected -= tracked(WEIGHTS) - tracked(f"{WEIGHTS}/emad-nano")
    expected |= {f"pytest_emad/{name}" for name in tracked("suites") | tracked("golden")}
    expected |= {f"pytest_emad/{name}" for name in tracked("docs") if name.endswith((".md", ".ipynb"))}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == expected, sorted(packaged ^ expected)
    assert len(names) == len(set(names))


def test_the_models_wheel_carries_every_model(models_wheel: Path) -> None:
    with zipfile.ZipFile(models_wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
    models = {name for name in tracked(WEIGHTS) if name.count("/") > WEIGHTS.count("/") + 1}
    assert packaged == {name.replace(WEIGHTS, "pytest_emad_models", 1) for name in models}


def test_without_the_models_the_wheel_names_the_command(missing: str) -> None:
    (line,) = missing.strip().splitlines()
    assert line.startswith("ERROR: --emad-model='emad-tiny', but emad-tiny comes with pytest-emad-models")


def test_without_the_models_the_wheel_judges_its_own(bare: Path, tmp_path: Path) -> None:
    suites = ("--pyargs", "pytest_emad.suites.invariants", "pytest_emad.suites.fidelity", "--emad-model", "emad-nano")
    text = check(bare, "-m", "pytest", "-p", "no:cacheprovider", *suites, "--emad-gate", "known", cwd=tmp_path)
    assert "PASSED" in text


def test_the_installed_suites_pass(python: Path, tmp_path: Path) -> None:
    """The sources are out of reach, so that a file missing in the wheel is noticed here."""
    text = check(
        python, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "pytest_emad.suites.invariants", cwd=tmp_path
    )
    assert "passed" in text
    assert str(ROOT) not in text


def test_the_installed_suites_pass_under_xdist(python: Path, tmp_path: Path) -> None:
    suites = "pytest_emad.suites.invariants"
    text = check(python, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--pyargs", suites, cwd=tmp_path)
    assert "gates: " in text


def test_the_gate_as_readme_gives_it_is_green_for_its_decoder(python: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, decoder = readme.partition("<!-- file: conftest.py -->\n```python\n")
    (tmp_path / "conftest.py").write_text(decoder.partition("```")[0])
    gate, verify = (
        next(line.split()[1:] for line in readme.splitlines() if line.startswith(start))
        for start in ("pytest --pyargs pytest_emad.suites --emad-gate", "emad verify report/")
    )
    check(python, "-m", "pytest", "-p", "no:cacheprovider", *gate, "--emad-model", "emad-nano", cwd=tmp_path)
    assert "complete" in check(python, "-m", "pytest_emad", *verify, cwd=tmp_path)


def test_an_editable_build_leaves_no_copies(tmp_path: Path) -> None:
    """A static force-include would: old copies of the suites next to the current ones."""
    script = "from hatchling.build import build_editable; import sys; build_editable(sys.argv[1])"
    check(sys.executable, "-c", script, tmp_path, cwd=ROOT)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if "suites" in name or "golden" in name]
