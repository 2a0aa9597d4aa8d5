"""The shipped suites' own tests, called in this process with their parameters, name each planted defect.

``test_mutants.py`` runs them as a user would, in a process for each. Here a test is called as pytest calls it, and
only for defects that harm no process. The smallest bundled model suffices for nearly all of them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.loading import LoadedModel
from emad_ref.protocol import Prompt, Request, Unsupported
from emad_ref.record import Ints, Record
from pytest_emad.measurements.latency import ADAPTIVE, FULL, WARM_UP, draw_audited_pairs
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import open_model
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.remote.token_decoder import Completion, TokenDecoder
from pytest_emad.run.suite_support import AuditFindingGate
from tests.mutants.cache_defects import PAIRS
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.mutant import MutantFactory, mutate

STUDY = Study(corpus="world:premise")
FEW_PAIRS = replace(STUDY, budget=replace(BUDGETS["smoke"], pairs=2))  # the number of timed requests is not under test
# kinds of defects that need a whole run
APART = ("timed", "answers", "refusal", "noise", "exits", "forged", "judge's model", "speculation")
ELSEWHERE = ("test_golden", "test_session_machine")  # tests that read a record, or shrink their examples
PLANTED = {
    name: planted
    for name, planted in CATALOGUE.items()
    if not planted.is_honest and planted.kind not in APART and not any(test in planted.test for test in ELSEWHERE)
}
# Of these kinds, which take seconds each, one defect per distinct complaint stays in CI.
SECONDS_EACH = ("sampling", "memory", "pairs")
CALLED = sorted({planted.test for planted in PLANTED.values()})
HONEST = CATALOGUE["honest"].make


KnownModel = tuple[LoadedModel, dict[str, Any]]  # a model and the points that do not depend on the decoder


@pytest.fixture(scope="module")
def open_known_model() -> Iterator[Callable[[str], KnownModel]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:

        @cache
        def open_once(name: str) -> KnownModel:
            model = stack.enter_context(open_model(name, STUDY))
            bridging = ModelMeasurements(model, STUDY, RunResources()).replay_validity
            return model, {"probing_point": bridging.probing_point, "shallow_point": bridging.shallow_point}

        yield open_once


@pytest.fixture
def loaded(open_known_model: Callable[[str], KnownModel]) -> LoadedModel:
    return open_known_model("emad-nano")[0]


@pytest.fixture
def known(open_known_model: Callable[[str], KnownModel]) -> dict[str, Any]:
    return open_known_model("emad-nano")[1]


def judged(loaded: LoadedModel, known: dict[str, Any], make: MutantFactory, study: Study = STUDY) -> ModelMeasurements:
    """Return measurements of a decoder, as a run makes them from the hook."""
    evidence = ModelMeasurements(loaded, study, RunResources(make))
    for name, point in known.items():
        setattr(evidence.replay_validity, name, point)
    return evidence


def complaints(evidence: ModelMeasurements, test: str, case: str = "") -> Iterator[str]:
    """Yield the failures of one test of the suites, called for each of its parameters with the fixtures it names.

    ``case``: the only value of a parameter to call it with, if the test has that value.
    """
    path, _, name = test.partition("::")
    function: Any = getattr(importlib.import_module(f"suites.{path.removesuffix('.py').replace('/', '.')}"), name)
    settings = SimpleNamespace(gating=SimpleNamespace(inconclusive="fail"), budget=STUDY.budget)
    record = SimpleNamespace(
        record_audit=lambda finding: None, record_note=lambda text: None, record_table=lambda *_: None
    )
    audit = AuditFindingGate(evidence.subject.reference_lens, evidence.subject.tolerance, settings, record)  # type: ignore[arg-type]  # of a run
    marks = [mark.args for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    several = list(product(*(given for _, given in marks)))
    for values in [values for values in several if case in values] or several:
        rng = np.random.default_rng(evidence.study.seed)
        known = {
            "emad_evidence": evidence,
            "emad_audit": audit,
            "emad_rng": rng,
            "emad_record": record,
            "emad_settings": settings,
        }
        known |= dict(zip((argument for argument, _ in marks), values, strict=True))
        try:
            function(**{argument: known[argument] for argument in inspect.signature(function).parameters})
        except pytest.fail.Exception as failure:
            yield str(failure)


@pytest.fixture
def unreduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failing case ends a covering array, and stays as it is."""
    monkeypatch.setattr("pytest_emad.audit.covering.MOST_FAILING", 1)
    monkeypatch.setattr("pytest_emad.audit.covering.MOST_REDUCTIONS", 0)


@pytest.mark.parametrize(
    "test",
    [pytest.param(test, marks=[pytest.mark.slow] if test == PAIRS else []) for test in CALLED],
    ids=lambda test: test.partition("::")[2],
)
def test_the_honest_decoder_passes_what_is_called_here(loaded: LoadedModel, known: dict[str, Any], test: str) -> None:
    assert list(complaints(judged(loaded, known, HONEST), test)) == []


def test_a_prefix_cache_may_fill_up(loaded: LoadedModel, known: dict[str, Any]) -> None:
    """It keeps K/V of 64 prompts, and sessions of the audit repeat theirs."""
    test = "invariants/test_memory.py::test_what_is_closed_or_rolled_back_gives_its_memory_back"
    assert list(complaints(judged(loaded, known, CATALOGUE["honest-prefix-cache"].make), test)) == []


FIRST = {(planted.test, planted.says): name for name, planted in reversed(PLANTED.items())}
# a K/V cache, a rollback, a stop set, the window's end, seeds, a stream at an exit point
PAIRS_IN_CI = (
    "kv-stale-in-later-rows",
    "pair-rollback-beyond-16",
    "pair-stops-of-16",
    "pair-padded-as-first",
    "pair-seed-of-first-row",
    "pair-stream-at-full-depth",
)


def defect_parameter(name: str) -> Any:
    planted = PLANTED[name]
    often = planted.kind not in SECONDS_EACH or FIRST[planted.test, planted.says] == name
    often = name in PAIRS_IN_CI if planted.test == PAIRS else often
    return pytest.param(name, marks=[] if often else [pytest.mark.slow])


@pytest.mark.usefixtures("unreduced")
@pytest.mark.parametrize("defect", [defect_parameter(name) for name in PLANTED])
def test_a_planted_defect_is_named(open_known_model: Callable[[str], KnownModel], defect: str) -> None:
    """The first matching complaint ends the test; further parameters would only repeat the check."""
    planted, said = PLANTED[defect], []
    evidence = judged(*open_known_model(planted.model), planted.make)
    for complaint in complaints(evidence, planted.test, planted.case):
        if re.search(planted.says, complaint):
            return
        said.append(complaint)
    pytest.fail(f"{planted.says!r} in none of {said}")


@pytest.mark.parametrize("token", [18, 354])  # emad-nano emits the first rarely, the second often
def test_one_token_that_is_never_said_is_missed(loaded: LoadedModel, known: dict[str, Any], token: int) -> None:
    def ban(pick: Any, sampler: Any, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        found: torch.Tensor = pick(logits.index_fill(-1, torch.tensor([token]), -torch.inf), rows)
        return found

    test = "fidelity/test_full_depth.py::test_without_exits_tokens_are_the_models_own_greedy_continuation"
    (said,) = complaints(judged(loaded, known, mutate(sampler={"pick_next_tokens": ban})), test)
    assert f"expected {token} " in said


# ---------------------------------------------------------------- defects that inference engines had

POSITIONS = "invariants/test_positions.py::test_generation_holds_far_into_the_window"
PREFIXES = "invariants/test_requests.py::test_prompts_that_share_a_beginning_are_read_to_their_ends"
BLOCK, PADDING, MOST_DRAFTED = 16, 0, 16


class PlainEngine(TokenDecoder):
    """A correct greedy engine. ``read`` changes what it reads of a request, ``cut`` what it returns."""

    blocks: ClassVar[set[bytes]] = set()  # of all requests so far

    def __init__(self, request: Request):
        super().__init__(request)
        if request.temperature:
            raise Unsupported("it decodes greedily")
        stepper = request.model.load().stepper
        self.window = stepper.max_positions
        self.decoder = WalkedDecoder(stepper, request.point, max_rows=request.max_rows)

    def read(self, prompts: Sequence[Ints], max_new: int) -> Sequence[Ints]:
        return prompts

    def cut(self, prompt: Ints, tokens: Ints, max_new: int) -> Ints:
        return tokens

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        record = self.decoder.generate([Prompt(row) for row in self.read(prompts, max_new)], max_new, stop)
        rows = zip(prompts, record.emitted, record.stop, strict=True)
        return [Completion(self.cut(prompt, row, max_new), why == "stop token") for prompt, row, why in rows]


class SharesUnfilledBlocks(PlainEngine):
    """OpenVINO GenAI 2026.4.1: of 16 rows that ask for one token, a new block of another row is read unfilled."""

    def read(self, prompts: Sequence[Ints], max_new: int) -> Sequence[Ints]:
        rows, new = [], set[bytes]()
        for prompt in prompts:
            row = prompt.copy()
            for end in range(BLOCK, len(prompt), BLOCK):
                key = prompt[:end].tobytes()
                if key in new and max_new == 1 and len(prompts) >= 16:
                    row[end - 1] = PADDING
                elif key not in self.blocks:
                    new.add(key)
            rows.append(row)
        self.blocks.update(new)
        return rows


class EndsWithItsDraft(PlainEngine):
    """llama.cpp: a row of few tokens ends two tokens early where its draft passes the end of the window."""

    def cut(self, prompt: Ints, tokens: Ints, max_new: int) -> Ints:
        early = 2 < max_new <= MOST_DRAFTED and len(prompt) + max_new == self.window
        return tokens[:-2] if early else tokens


class MasksPadding(PlainEngine):
    """ONNX Runtime GenAI 0.18: a prompt's last tokens are masked if they equal the padding's id."""

    def read(self, prompts: Sequence[Ints], max_new: int) -> Sequence[Ints]:
        return [row[: max(1, 1 + int(np.flatnonzero(row != PADDING).max(initial=0)))] for row in prompts]


class StripsOpening(PlainEngine):
    """A prompt's own opening token is dropped."""

    def read(self, prompts: Sequence[Ints], max_new: int) -> Sequence[Ints]:
        return [row[1:] if len(row) > 1 and row[0] == PADDING else row for row in prompts]


@pytest.mark.usefixtures("unreduced")
@pytest.mark.parametrize(
    ("made", "test", "words"),
    [
        (PlainEngine, POSITIONS, ""),
        (PlainEngine, PREFIXES, ""),
        pytest.param(PlainEngine, PAIRS, "", marks=pytest.mark.slow),
        (SharesUnfilledBlocks, PREFIXES, "audit nested prompts: row .* emitted"),
        (EndsWithItsDraft, POSITIONS, r"but max_new=\d+ and the stop tokens give"),
        (MasksPadding, PAIRS, "audit pairs of requests: .*row .* emitted"),
        (StripsOpening, PAIRS, "audit pairs of requests: .*row .* emitted"),
    ],
)
def test_a_defect_of_an_engine_is_named(
    loaded: LoadedModel, known: dict[str, Any], made: type[PlainEngine], test: str, words: str
) -> None:
    said = ""
    with suppress(Unsupported):  # of exits and sessions, behind the case at full depth
        said = next(complaints(judged(loaded, known, made), test), "")
    assert bool(said) is bool(words), said
    assert re.search(words, said), said


DEFECT_ATTEMPTS = 3
TIMED = [name for name, planted in CATALOGUE.items() if planted.kind == "timed"]


@pytest.mark.parametrize(
    ("name", "rows", "passed"),
    [
        pytest.param(name, rows, name == "honest", marks=[pytest.mark.slow] if name != "honest" and at else [])
        for at, rows in enumerate(STUDY.budget.batch_sizes)  # defects in the smallest batches stay in CI
        for name in (*TIMED, "honest")
    ],
)
def test_what_is_timed_is_looked_at_afterwards(
    loaded: LoadedModel, known: dict[str, Any], name: str, rows: int, passed: bool
) -> None:
    """EMAD-F2 checks timed requests before it believes a clock: a decoder that reads one token and emits one is caught.

    Two pairs are few. On a busy machine, in some of thirty runs one pair times slowed full depth as fast as it should
    be, so a defect is timed again before it counts as missed; a correct decoder passes at once.
    """
    point = known["probing_point"]
    for _ in range(1 if passed else DEFECT_ATTEMPTS):
        stopwatch = judged(loaded, known, CATALOGUE[name].make, FEW_PAIRS).latency
        stopwatch.request_shape = STUDY.budget.prompt_tokens, STUDY.budget.new_tokens
        finding = stopwatch.check_point_outputs(stopwatch.time_point_by_batch_size(point)[rows], point)
        if finding.passed is passed:
            break
    assert finding.passed is passed, finding.detail
    if not passed:
        assert re.search(CATALOGUE[name].says, finding.detail)


# ---------------------------------------------------------------- records that are made late, declined steps


@dataclass(frozen=True)
class LateRecord(Record):
    """A record that is made when one of its columns is first read."""

    making: Callable[[], Record] | None = None

    def __getattribute__(self, name: str) -> Any:
        making = object.__getattribute__(self, "making")
        return getattr(making(), name) if name in COLUMNS else object.__getattribute__(self, name)


COLUMNS = {field.name for field in fields(Record)}


def decode_when_read(generate: Any, decoder: Any, *arguments: Any) -> LateRecord:
    """Return at once from ``generate``; ``SPENT``: seconds of decoding, request by request."""

    @cache
    def making() -> Record:
        began = time.perf_counter()
        found: Record = generate(*arguments)
        SPENT.append(time.perf_counter() - began)
        return found

    nothing: list[Any] = [None] * len(COLUMNS)
    return LateRecord(*nothing, making=making)


SPENT: list[float] = []


def test_a_record_that_is_decoded_when_it_is_read_wins_no_time(loaded: LoadedModel, known: dict[str, Any]) -> None:
    stopwatch = judged(loaded, known, mutate(generate=decode_when_read), FEW_PAIRS).latency
    stopwatch.request_shape = STUDY.budget.prompt_tokens, STUDY.budget.new_tokens
    drawn = stopwatch.make_requests(1)
    timed = stopwatch.time_point(1, drawn, point=known["probing_point"])
    decoded = SPENT[: 2 * len(drawn.batches)][2 * WARM_UP :]  # alternately at full depth and at the point
    assert sum(timed.seconds[FULL]) + sum(timed.seconds[ADAPTIVE]) >= sum(decoded)
    kept = timed.outputs[ADAPTIVE][next(iter(timed.audited))]
    assert type(kept) is Record, "arrays of the judge's own"


def test_what_is_looked_at_is_drawn_after_the_last_request(loaded: LoadedModel, known: dict[str, Any]) -> None:
    """The report names the entropy, which draws the same requests again."""
    study = replace(STUDY, budget=replace(BUDGETS["smoke"], pairs=12))
    stopwatch = judged(loaded, known, HONEST, study).latency
    stopwatch.request_shape = 8, 2
    assert stopwatch.make_requests(1).audited is None, "the audited requests must not be known before timing"
    found = [stopwatch.time_point(1, stopwatch.make_requests(1), point=known["probing_point"]) for _ in range(4)]
    assert len({timed.entropy for timed in found}) == 4
    assert len({tuple(timed.audited) for timed in found}) > 1
    for timed in found:
        assert timed.entropy is not None
        assert timed.audited == draw_audited_pairs(timed.entropy, 1, range(12))
    stopwatch._timed[known["probing_point"]] = {1: found[0]}
    assert f"{found[0].entropy:#x}" in stopwatch.format_timing_note(known["probing_point"], 1.0, 1)


def in_the_machine(evidence: ModelMeasurements, settings: Any) -> None:
    module: Any = importlib.import_module("suites.invariants.test_session_machine")
    module.test_session_survives_any_order_of_operations(evidence, lambda finding: None, settings, "exits")


def in_the_claim(evidence: ModelMeasurements, settings: Any) -> None:
    module: Any = importlib.import_module("suites.invariants.test_kv_consistency")
    module.test_logits_at_any_admissible_depth_are_the_full_models(
        evidence, settings, lambda claim, question: question.answer(evidence, None)
    )


@pytest.mark.parametrize("search", [in_the_machine, in_the_claim])
def test_a_step_that_is_declined_ends_the_search_at_once(
    loaded: LoadedModel, known: dict[str, Any], search: Callable[[ModelMeasurements, Any], None]
) -> None:
    asked = []

    def decline(feed: Any, session: Any, *arguments: Any) -> NoReturn:
        asked.append(arguments)
        raise Unsupported("no feeding")

    evidence = judged(loaded, known, mutate(session={"feed": decline}))
    with pytest.raises(Unsupported, match="no feeding"):
        search(evidence, SimpleNamespace(budget=STUDY.budget))
    assert len(asked) == 1
