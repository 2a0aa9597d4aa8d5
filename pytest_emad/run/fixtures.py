"""Fixtures of the plugin. Measurements and questions are imported on first use, since they import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

from emad_ref.errors import BadArgument, stop_run_on_error
from pytest_emad.report.provenance import collect_provenance
from pytest_emad.run import subprocesses, terminal
from pytest_emad.run.accuracy_gate import AccuracyGate
from pytest_emad.run.decoder_providers import make_guarded_decoder
from pytest_emad.run.options import RunSettings, get_run_settings, load_claims_register
from pytest_emad.run.recorder import Recorder, decide_and_record_claim
from pytest_emad.statistics.goldens import (
    KnownVerdicts,
    find_golden_folder,
    load_known_verdicts_from_folders,
    require_known_verdicts_file,
)
from pytest_emad.statistics.verdicts import Claim

if TYPE_CHECKING:
    import numpy as np

    from emad_ref.models.loading import LoadedModel
    from pytest_emad.claims.base import RunPlan
    from pytest_emad.measurements.learned_exit import ExitEvaluation
    from pytest_emad.measurements.model_measurements import ModelMeasurements
    from pytest_emad.measurements.pair_measurements import PairMeasurements
    from pytest_emad.measurements.run_resources import RunResources
    from pytest_emad.measurements.study import PairNames
    from pytest_emad.run.suite_support import Ask, AuditFindingGate
    from pytest_emad.statistics.goldens import Goldens


@pytest.fixture(scope="session")
def emad_settings(pytestconfig: pytest.Config) -> RunSettings:
    """This run's validated options."""
    return get_run_settings(pytestconfig)


@pytest.fixture
def emad_accuracy(pytestconfig: pytest.Config) -> AccuracyGate:
    """Compares two finished evaluations: ``emad_accuracy(base, candidate, margin=0.01)`` fails the test by the verdict.

    It fails if accuracy fell by more than the margin, or if the evaluations cannot be compared. An inconclusive
    comparison warns, or fails under ``--emad-inconclusive fail``. It returns the ``AccuracyComparison``. Further
    arguments are those of ``pytest_emad.compare_accuracy``. No model is loaded.
    """
    return AccuracyGate(get_run_settings(pytestconfig).gating.inconclusive)


@pytest.fixture(scope="session")
def emad_goldens(emad_settings: RunSettings) -> Goldens:
    """Golden data: ``--emad-golden`` first, then the shipped folder."""
    from pytest_emad.statistics.goldens import Goldens

    folders = tuple(folder for folder in (emad_settings.golden, find_golden_folder()) if folder is not None)
    goldens = Goldens(folders, emad_settings.golden if emad_settings.update_golden else None)
    if goldens.target is None:  # an update may repair it
        with stop_run_on_error():
            goldens.verify_checksums()
    return goldens


@pytest.fixture(scope="session")
def emad_known(emad_settings: RunSettings, emad_goldens: Goldens) -> KnownVerdicts | None:
    """Verdicts on record, from the same folders; None under another gate than ``known``, which reads no record.

    A record that is damaged or of another schema ends a run that compares with it, and no other run.
    """
    if emad_settings.gating.gate != "known":
        return None
    with stop_run_on_error():
        if emad_goldens.target is None:
            require_known_verdicts_file(emad_goldens.folders)
        return load_known_verdicts_from_folders(emad_goldens.folders)


@pytest.fixture
def emad_record(
    request: pytest.FixtureRequest, emad_settings: RunSettings, emad_goldens: Goldens, emad_known: KnownVerdicts | None
) -> Iterator[Recorder]:
    """Records verdicts, operating points, goldens and notes; fails the test according to gates.

    It records the test's models at the start, and in the provenance of goldens; their running backend at the end.
    """
    asked_for = _requested_models(request)
    models = [loaded.facts for loaded in asked_for]
    record = Recorder(
        request.node.user_properties,
        emad_settings,
        load_claims_register(request.config),
        emad_goldens,
        emad_known,
        lambda: collect_provenance(emad_settings.study) | {"models": models},
    )
    for facts in models:
        record.record_model(facts)
        if facts.get("tokenizer_loses"):
            record.record_note(f"{facts['name']}: {facts['tokenizer_loses']}")
    yield record
    for loaded, facts in zip(asked_for, models, strict=True):
        if loaded.facts != facts:
            record.record_model(loaded.facts)


def _requested_models(request: pytest.FixtureRequest) -> list[LoadedModel]:
    """The models of a test's other fixtures."""
    found = [request.getfixturevalue("emad_model")] if "emad_model" in request.fixturenames else []
    if "emad_pair" in request.fixturenames:
        pair = request.getfixturevalue("emad_pair")
        found += [pair.small.loaded, pair.large.loaded]
    return found


@pytest.fixture(scope="session")
def emad_model(request: pytest.FixtureRequest, emad_settings: RunSettings) -> Iterator[LoadedModel]:
    """The model under test, loaded; each of ``--emad-model`` in turn, one freed before the next.

    At the end of its tests its weights must hash as at their start.
    """
    from emad_ref.models.fast.product_table import share_product_table
    from pytest_emad.measurements.model_under_test import open_model
    from pytest_emad.measurements.run_resources import require_unchanged_weights

    with ExitStack() as stack:
        stack.enter_context(share_product_table())
        with stop_run_on_error():
            loaded = stack.enter_context(open_model(request.param, emad_settings.study))
        with require_unchanged_weights(loaded):
            yield loaded


@pytest.fixture(scope="session")
def emad_host(pytestconfig: pytest.Config) -> RunResources:
    """Run resources: decoders from ``pytest_emad_make_decoder``, uncaptured progress bars, replicate processes."""
    from pytest_emad.measurements.run_resources import RunResources

    return RunResources(
        partial(make_guarded_decoder, pytestconfig, terminal.uncaptured_stderr),
        terminal.progress_stream,
        runner=subprocesses.make_subprocess_runner(pytestconfig),
    )


@pytest.fixture(scope="session")
def emad_evidence(
    emad_model: LoadedModel, emad_settings: RunSettings, emad_host: RunResources, emad_known: KnownVerdicts | None
) -> ModelMeasurements:
    """All measurements of the model under test, each made on first use.

    Under ``--emad-gate known`` a damaged record of verdicts ends the run here, before any judgment.
    """
    from pytest_emad.measurements.model_measurements import ModelMeasurements

    with stop_run_on_error():
        evidence = ModelMeasurements(emad_model, emad_settings.study, emad_host)
        evidence.require_prerequisites_of_all_claims()
    return evidence


@pytest.fixture
def emad_exit(emad_evidence: ModelMeasurements) -> ExitEvaluation:
    """The exit of ``--emad-exit`` with its points, attached to the model under test; its tests need one."""
    return emad_evidence.exit_evaluation


@pytest.fixture(scope="session")
def emad_pair_names(emad_settings: RunSettings) -> PairNames:
    """Names of the small and the large model, without loading them."""
    from pytest_emad.measurements.study import PairNames

    return PairNames(*_pair_names(emad_settings))


@pytest.fixture(scope="session")
def emad_pair(
    emad_settings: RunSettings, emad_host: RunResources, emad_register: dict[str, Claim]
) -> Iterator[PairMeasurements]:
    """All measurements of the run's small and large model: one pair for all models under test.

    At the end of its tests the weights of both must hash as at their start.
    """
    from pytest_emad.claims.switching import get_reported_savings
    from pytest_emad.measurements.model_under_test import open_model
    from pytest_emad.measurements.pair_measurements import PairMeasurements
    from pytest_emad.measurements.run_resources import require_unchanged_weights

    with ExitStack() as stack:
        with stop_run_on_error():
            names, study = _pair_names(emad_settings), emad_settings.study
            small, large = (stack.enter_context(open_model(name, study)) for name in names)
            wanted = get_reported_savings(emad_register["EAD-F1"])
            pair = PairMeasurements(small, large, study, emad_host, names=names, savings=wanted)
        with require_unchanged_weights(small), require_unchanged_weights(large):
            yield pair


def _pair_names(chosen: RunSettings) -> tuple[str, str]:
    """Names of the pair. Without a pair the suites' pair tests are deselected, but a user's test may request it."""
    if chosen.pair is None:
        raise BadArgument("--emad-pair", None, "SMALL,LARGE", "ours is judged beside bundled models alone")
    return chosen.pair


@pytest.fixture(scope="session")
def emad_docket(emad_settings: RunSettings, emad_register: dict[str, Claim]) -> RunPlan:
    """The plan of this run: the claims in force, which of them gate, and the number of models."""
    from pytest_emad.claims.base import RunPlan

    return RunPlan(emad_register, emad_settings.study, emad_settings.gate_claims, len(emad_settings.models))


@pytest.fixture
def emad_ask(emad_evidence: ModelMeasurements, emad_docket: RunPlan, emad_record: Recorder) -> Ask:
    """``emad_ask("EMAD-F1")`` decides a claim about the model under test and records the answer."""
    return partial(
        decide_and_record_claim, emad_evidence, emad_evidence.subject.stepper.layers, emad_docket, emad_record
    )


@pytest.fixture
def emad_ask_pair(emad_pair: PairMeasurements, emad_docket: RunPlan, emad_record: Recorder) -> Ask:
    """``emad_ask`` for claims about the pair."""
    return partial(decide_and_record_claim, emad_pair, emad_pair.large.subject.stepper.layers, emad_docket, emad_record)


@pytest.fixture
def emad_ask_names(emad_pair_names: PairNames, emad_docket: RunPlan, emad_record: Recorder) -> Ask:
    """``emad_ask`` for claims that read only the pair's names."""
    return partial(decide_and_record_claim, emad_pair_names, 0, emad_docket, emad_record)


@pytest.fixture(scope="session")
def emad_register(pytestconfig: pytest.Config) -> dict[str, Claim]:
    """The claims register with ``--emad-register`` applied."""
    return load_claims_register(pytestconfig)


@pytest.fixture
def emad_rng(emad_settings: RunSettings) -> np.random.Generator:
    """A NumPy generator seeded with ``--emad-seed``, fresh for every test."""
    import numpy as np

    return np.random.default_rng(emad_settings.study.seed)


@pytest.fixture
def emad_audit(emad_evidence: ModelMeasurements, emad_settings: RunSettings, emad_record: Recorder) -> AuditFindingGate:
    """Fails the test on an audit's complaint, warns if it had no power; compares tokens up to ties."""
    from pytest_emad.run.suite_support import AuditFindingGate

    return AuditFindingGate(
        emad_evidence.subject.reference_lens, emad_evidence.subject.tolerance, emad_settings, emad_record
    )
