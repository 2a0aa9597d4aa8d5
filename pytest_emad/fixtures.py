"""Fixtures that tests ask for by name. The heavy ones live in ``session`` and are imported when first used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

from emad_ref.verdict.claims import Claim
from pytest_emad.backends import make_decoder
from pytest_emad.goldens import Goldens, KnownVerdicts, known_verdicts, shipped
from pytest_emad.options import Settings, register, settings
from pytest_emad.recording import Recorder
from pytest_emad.selfcheck import provenance
from pytest_emad.stopping import ends_the_run

if TYPE_CHECKING:
    import numpy as np

    from emad_ref.models.loading import Loaded
    from pytest_emad.auditing import Auditor
    from pytest_emad.pairing import Pair
    from pytest_emad.session import Evidence


@pytest.fixture(scope="session")
def emad_settings(pytestconfig: pytest.Config) -> Settings:
    """This run's validated options."""
    return settings(pytestconfig)


@pytest.fixture(scope="session")
def emad_goldens(emad_settings: Settings) -> Goldens:
    """Golden data: ``--emad-golden`` first, then the shipped folder."""
    folders = tuple(folder for folder in (emad_settings.golden, shipped()) if folder is not None)
    goldens = Goldens(folders, emad_settings.golden if emad_settings.update_golden else None)
    if goldens.target is None:  # an update may be the repair
        with ends_the_run():
            goldens.verify()
    return goldens


@pytest.fixture(scope="session")
def emad_known(emad_goldens: Goldens) -> KnownVerdicts:
    """Verdicts on record, from the same folders."""
    with ends_the_run():
        return known_verdicts(emad_goldens.folders)


@pytest.fixture
def emad_record(
    request: pytest.FixtureRequest, emad_settings: Settings, emad_goldens: Goldens, emad_known: KnownVerdicts
) -> Recorder:
    """Puts verdicts, operating points, goldens and notes on record; fails the test where a gate says so.

    Which models the test is about is on record from the start, and in the provenance of what it stores.
    """
    models = [loaded.facts for loaded in _models_of(request)]
    record = Recorder(
        request.node.user_properties,
        emad_settings,
        register(request.config),
        emad_goldens,
        emad_known,
        lambda: provenance(request.config) | {"models": models},
    )
    for facts in models:
        record.model(facts)
    return record


def _models_of(request: pytest.FixtureRequest) -> list[Loaded]:
    """The models that a test asks for by its other fixtures."""
    found = [request.getfixturevalue("emad_model")] if "emad_model" in request.fixturenames else []
    if "emad_pair" in request.fixturenames:
        pair = request.getfixturevalue("emad_pair")
        found += [pair.small.loaded, pair.large.loaded]
    return found


@pytest.fixture(scope="session")
def emad_model(request: pytest.FixtureRequest, emad_settings: Settings) -> Iterator[Loaded]:
    """The model under test, loaded; each of ``--emad-model`` in turn, one freed before the next."""
    from pytest_emad.subject import open_model

    with ExitStack() as stack:
        with ends_the_run():
            loaded = stack.enter_context(open_model(request.param, emad_settings))
        yield loaded


@pytest.fixture(scope="session")
def emad_evidence(emad_model: Loaded, emad_settings: Settings, pytestconfig: pytest.Config) -> Evidence:
    """Everything this run knows of the model under test (``session.Evidence``), gathered when first asked for."""
    from pytest_emad.session import Evidence

    with ends_the_run():
        evidence = Evidence(emad_model, emad_settings, partial(make_decoder, pytestconfig))
        evidence.check()
    return evidence


@pytest.fixture(scope="session")
def emad_pair(emad_settings: Settings, pytestconfig: pytest.Config) -> Iterator[Pair]:
    """Everything this run knows of its small and its large model (``pairing.Pair``): one pair for all models."""
    from pytest_emad.pairing import Pair
    from pytest_emad.subject import open_model

    with ExitStack() as stack:
        with ends_the_run():
            small, large = (
                stack.enter_context(open_model(name, emad_settings))
                for name in (emad_settings.small_model, emad_settings.large_model)
            )
            saving = register(pytestconfig)["EAD-F1"].thresholds["saving_llama"]
            pair = Pair(small, large, emad_settings, partial(make_decoder, pytestconfig), least_saving=saving)
        yield pair


@pytest.fixture(scope="session")
def emad_register(pytestconfig: pytest.Config) -> dict[str, Claim]:
    """The claims register, ``--emad-claims`` applied."""
    return register(pytestconfig)


@pytest.fixture
def emad_rng(emad_settings: Settings) -> np.random.Generator:
    """A NumPy generator seeded with ``--emad-seed``, fresh for every test."""
    import numpy as np

    return np.random.default_rng(emad_settings.seed)


@pytest.fixture
def emad_audit(emad_evidence: Evidence, emad_settings: Settings, emad_record: Recorder) -> Auditor:
    """Fails the test on an audit's complaint, warns where it had no power; compares tokens up to ties."""
    from pytest_emad.auditing import Auditor

    return Auditor(emad_evidence.lens, emad_evidence.tolerance, emad_settings, emad_record)
