"""Location of bundled models: in a checkout, in a wheel that contains one of them, in pytest-emad-models."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from emad_ref.models import bundled
from emad_ref.models.loading import load
from emad_ref.models.names import ModelUnavailable, known_model_names, require_weights_available
from pytest_emad.measurements.study import resolve_pair_names_from_options

ROOT = Path(__file__).resolve().parents[3]
CHECKOUT = bundled.weights_folder()
COMMAND = "pip install pytest-emad-models==0.1.0"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the module in a package with emad-nano alone, like the plugin's wheel; return its folder of weights."""
    package = tmp_path / "package"
    shutil.copytree(CHECKOUT / "emad-nano", package / "weights" / "emad-nano")
    monkeypatch.setattr(bundled, "__file__", str(package / "bundled.py"))
    bundled._installed_folder.cache_clear()
    yield package / "weights"
    bundled._installed_folder.cache_clear()


def install(site: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install pytest-emad-models like pip, as links; return the folder of its models."""
    record = site / f"pytest_emad_models-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.4\nName: pytest-emad-models\nVersion: {version}\n")
    (site / "pytest_emad_models").mkdir()
    for name in bundled.BUNDLED:
        (site / "pytest_emad_models" / name).symlink_to(CHECKOUT / name)
    monkeypatch.syspath_prepend(str(site))
    return site / "pytest_emad_models"


def test_a_checkout_holds_them_all() -> None:
    assert Path(bundled.__file__).parent / "weights" == CHECKOUT
    assert bundled.bundled_model_names() == bundled.BUNDLED


def test_alone_the_wheel_has_the_smallest(bare: Path) -> None:
    assert (bundled.weights_folder(), bundled.bundled_model_names()) == (bare, ("emad-nano",))
    assert load("emad-nano").fingerprint == load(str(CHECKOUT / "emad-nano")).fingerprint
    assert load("control:identity-upper").tokenizer is not None
    assert resolve_pair_names_from_options(None, None, None, ["emad-nano"]) is None, (
        "one model of the bundled pair is no pair"
    )


@pytest.mark.parametrize("name", ["emad-tiny", "random:emad-t5-tiny"])
def test_a_model_that_is_not_installed_is_named_with_the_command(bare: Path, name: str) -> None:
    said = (
        f"={name!r}, but {name.removeprefix('random:')} comes with pytest-emad-models==0.1.0, and it is not installed; "
        f"run `{COMMAND}`, or name emad-nano or another model"
    )
    with pytest.raises(ModelUnavailable) as loading:
        load(name)
    with pytest.raises(ModelUnavailable) as asking:
        require_weights_available(name, "--emad-model")
    assert (str(loading.value), str(asking.value)) == (f"name{said}", f"--emad-model{said}")
    assert "emad-tiny" in known_model_names(), "the error for a misspelt name suggests the nearest"


def test_the_models_distribution_is_found_where_it_is_installed(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install(tmp_path / "site", bundled.VERSION, monkeypatch)
    assert (bundled.weights_folder(), bundled.bundled_model_names()) == (folder, bundled.BUNDLED)
    assert resolve_pair_names_from_options(None, None, None, ["emad-nano"]) == bundled.BUNDLED_PAIR
    require_weights_available("emad-tiny")


def test_other_weights_than_those_on_record_are_not_taken(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "0.2.0", monkeypatch)
    with pytest.raises(ModelUnavailable, match=f"and version 0.2.0 is installed; run `{COMMAND}`"):
        require_weights_available("emad-tiny")


def test_a_checkout_reads_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", bundled.VERSION, monkeypatch)
    assert bundled.weights_folder() == CHECKOUT


def test_both_projects_and_the_code_name_one_version() -> None:
    plugin, models = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in (ROOT, CHECKOUT)
    )
    assert (models["project"]["name"], models["project"]["version"]) == (bundled.DISTRIBUTION, bundled.VERSION)
    assert plugin["project"]["optional-dependencies"]["models"] == [bundled.REQUIREMENT]
    assert models["tool"]["hatch"]["build"]["only-include"] == list(bundled.BUNDLED)
    assert (CHECKOUT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
