"""Captured steps decide, emit and count as the same steps run one by one.

``tests.cpu_graphs`` captures operations on the CPU. A capture fixes all Python numbers of the step, so a number that
the step should have read from a tensor keeps its old value and the test fails.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fast import graph_buffers, graph_capture
from emad_ref.models.fast.graph_buffers import bucket_size
from emad_ref.models.fast.graph_capture import GraphCaptureWarning
from emad_ref.models.kv_cache import KVCache, LayerKVCache, MissingEntryError
from emad_ref.models.loading import load
from emad_ref.models.matmul_counter import MatmulCounter
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.signals import NotFinite, require_finite_cpu_float64
from pytest_emad.audit.tolerances import tolerance
from tests.cpu_graphs import TapeEngine, capturing
from tests.devices import FIRST, Placed, two_devices
from tests.random_translators import attached_translators
from tests.small_models import LAYERS, VOCABULARY, small_model

pytestmark = pytest.mark.each_value

KINDS = ("gpt_neox", "llama", "opt", "gemma3")  # one key per head; several; learned positions; windows and two tables
OTHERS = (
    "llama",
    "opt",
    "gpt_neox_sequential",
    "opt_350m",
    "qwen3",
    "mistral_window",
    "smollm3_window",
    "olmo2",
    "granite",
)
PROBES = (1, 3, 5)
PROMPTS = [Prompt(np.arange(1, 1 + length)) for length in (7, 1, 5)]
FULL = full_depth(LAYERS)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[TapeEngine]:
    """Capture all steps from now on, over buckets that small texts outgrow; return the list of engines."""
    monkeypatch.setattr(graph_buffers, "SMALLEST_BUCKET", 8)
    return capturing(monkeypatch)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable garbage collection: unused objects must be freed at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pair(family: str = "llama") -> tuple[CausalStepper, CausalStepper]:
    """Return (captured, uncaptured) steppers of one model."""
    model = small_model(family)
    captured, eager = CausalStepper(model), CausalStepper(model, backend="eager")
    assert (captured.backend, eager.backend) == ("fast, captured graphs", "eager")
    return captured, eager


def ruled(thresholds: tuple[float, ...]) -> OperatingPoint:
    return OperatingPoint("ruled", "quantile", LAYERS, LAYERS, PROBES, (thresholds,), "monotone")


def generated(stepper: CausalStepper, point: OperatingPoint, rows: int = 3, new: int = 14) -> Any:
    return WalkedDecoder(stepper, point, max_rows=rows).generate(PROMPTS[:rows], new)


def acting(stepper: CausalStepper) -> tuple[float, ...]:
    """Return thresholds at which some tokens exit."""
    signal = generated(stepper, ruled((-1.0, -1.0, -1.0))).signal
    return tuple(float(value) for value in np.nanquantile(signal, 0.4, axis=0))


def alike(ours: Any, theirs: Any, most: float) -> None:
    """Compare decisions, tokens and counts exactly except the keys of padded buckets, signals up to rounding."""
    for name in ("sequence", "position", "token", "depth", "cap", "phase"):
        assert np.array_equal(getattr(ours.tokens, name), getattr(theirs.tokens, name)), name
    assert np.array_equal(np.isnan(ours.signal), np.isnan(theirs.signal))
    if ours.signal.size:
        assert np.nanmax(abs(ours.signal - theirs.signal), initial=0.0) <= most
    for field in fields(ours.work[0]):
        mine, other = getattr(ours.work[0], field.name), getattr(theirs.work[0], field.name)
        assert (mine >= other).all() if field.name == "context" else np.array_equal(mine, other), field.name
    assert ours.prompt_work == theirs.prompt_work


def most(stepper: CausalStepper) -> float:
    return tolerance(stepper.config.model_type, "float64", "cpu")


# ---------------------------------------------------------------- the same decoding


@pytest.mark.parametrize("family", OTHERS)
def test_decisions_tokens_and_counted_work_are_those_of_steps_one_by_one(family, engines):
    """Rows of unequal prompts exit at any layer and outgrow their buckets."""
    captured, eager = pair(family)
    point = ruled(acting(eager))
    ours, theirs = generated(captured, point), generated(eager, point)
    assert len(set(theirs.tokens.depth.tolist())) > 1, "the rule must fire"
    alike(ours, theirs, most(eager))
    assert engines[0].replays > 14


@pytest.mark.parametrize(("family", "rows"), [("gpt_neox", 1), ("gemma3", 3)])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("monotone", {}),
        ("free_eager", {}),
        ("free_deferred", {}),
        ("copying", {}),
        ("translated", {}),
        ("chunked", {"period": 3}),
        ("positional", {"period": 5, "floor": 2}),
    ],
)
def test_under_every_schedule(schedule, options, family, rows, engines):
    captured, eager = pair(family)
    thresholds, records = acting(eager), []
    for stepper in (captured, eager):
        given = dict(options)
        if schedule == "translated":
            given["translators"] = attached_translators(stepper, PROBES)
        probes = () if schedule == "positional" else PROBES
        at = OperatingPoint(schedule, "q", LAYERS, LAYERS, probes, (thresholds[: len(probes)],), schedule, **given)
        records.append(generated(stepper, at, rows))
    alike(*records, most(eager))
    assert engines[0].replays > 14


def test_keys_are_counted_as_they_are_executed(engines):
    """Every layer that a token ran counts a whole bucket of keys."""
    captured, eager = pair()
    record = generated(captured, ruled(acting(eager)), rows=1)
    tokens = record.tokens.select_sequence(0, phase=1)
    for layer in range(1, LAYERS + 1):
        executed = [bucket_size(position + 1) for position in tokens.position[tokens.depth >= layer].tolist()]
        decoded = record.work[0].context - record.prompt_work[0].context
        assert decoded[layer - 1] == sum(executed)


# ---------------------------------------------------------------- sessions


def drawn(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (3, count))


def same(one: Any, other: Any, stepper: CausalStepper) -> None:
    assert np.array_equal(one.depth, other.depth)
    assert abs(one.logits - other.logits).max() <= most(stepper)


class Both:
    """Two sessions with the same calls, one on captured steps, one without capture."""

    def __init__(self, steppers: tuple[CausalStepper, CausalStepper], point: OperatingPoint = FULL, rows: int = 3):
        self.stepper = steppers[1]
        opened = [WalkedDecoder(stepper, point, max_rows=rows).start(PROMPTS[:rows]) for stepper in steppers]
        self.sessions = [session for session, _ in opened]
        same(opened[0][1], opened[1][1], self.stepper)

    def feed(self, *given: Any) -> None:
        same(*(session.feed(*given) for session in self.sessions), self.stepper)

    def do(self, what: str, *given: Any) -> None:
        for session in self.sessions:
            getattr(session, what)(*given)

    def entries_are_the_same(self, rows: int) -> None:
        caches = [session.state.cache for session in self.sessions]
        for layers in zip(*(cache.layers for cache in caches), strict=True):
            assert layers[0].row_ids.tolist() == layers[1].row_ids.tolist()
            for row in layers[1].row_ids.tolist():
                for mine, other in zip(layers[0].row_kv(row), layers[1].row_kv(row), strict=True):
                    assert mine.shape == other.shape
                    assert (mine - other).abs().max() <= most(self.stepper)
        assert caches[1].rows == rows


@pytest.mark.parametrize("family", KINDS)
def test_rollback_commit_chunks_and_rows_that_leave(family, engines):
    """Rows at unequal depths, tokens one by one and in chunks, past the end of a bucket and back."""
    both, fed = Both(pair(family)), drawn(24)
    for at in range(4):
        both.feed(fed[:, [at]], np.array([[6 - at], [6], [5]]))
    both.do("rollback", both.sessions[1].length - 3)
    both.entries_are_the_same(3)
    both.feed(fed[:, 4:7])
    both.feed(fed[:, [7]], np.array([[4], [6], [5]]))
    both.do("commit", both.sessions[1].length)
    both.feed(fed[:, [8]])
    both.do("drop", np.array([1]))
    for at in range(9, 20):
        both.feed(fed[[0, 2], at : at + 1])
    both.entries_are_the_same(2)
    assert engines[0].captures > 3


def test_sessions_side_by_side_have_buffers_of_their_own(engines, uncollected):
    steppers = pair()
    Both(steppers).do("close")  # buffers in the pool that only one of the two sessions can lease
    assert len(steppers[0]._graphs.pool._idle) > 1
    one, other, fed = Both(steppers), Both(steppers), drawn(20)
    for at in range(6):
        one.feed(fed[:, [at]])
        other.feed(fed[:, [-at]])
    for both in (one, other):
        both.entries_are_the_same(3)


def test_the_next_session_finds_the_graphs_of_the_last_and_nothing_it_held(engines, uncollected):
    """No NaN remains, which a mask would not hide: 0 × NaN is NaN. Buffers do not wait for the garbage collector."""
    steppers = pair()
    fed, captures = drawn(12), []
    for close in (True, False, True):
        both = Both(steppers)
        for at in range(12):
            both.feed(fed[:, [at]])
        captures.append(engines[0].captures)
        if close:
            both.do("close")
        del both
        idle = steppers[0]._graphs.pool._idle
        assert idle
        for each in idle:
            each._all.fill_(torch.nan)
    assert captures[0] == captures[1] == captures[2]


def test_what_waits_makes_room_for_a_session_that_finds_none(engines, monkeypatch):
    captured, _ = pair()
    pool, made, free = captured._graphs.pool, graph_buffers.KVBuffers, 1
    first = pool.lend_buffers(1, 8)
    pool.take_back(first)

    def short(*given: Any) -> graph_buffers.KVBuffers:
        if len(pool._idle) >= free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(*given)

    monkeypatch.setattr(graph_buffers, "KVBuffers", short)
    assert pool.lend_buffers(2, 8).rows == 2
    assert pool._idle == []
    free = 0
    with pytest.raises(torch.OutOfMemoryError):
        pool.lend_buffers(2, 8)


@torch.inference_mode()
def test_a_layer_that_lacks_entries_refuses_a_captured_step(engines):
    captured, _ = pair()
    cache = captured.new_cache(1)
    for position, depth in ((0, LAYERS), (1, 2)):
        inputs = captured.prepare_forward(np.array([[position]]), cache)
        captured.run_layers(captured.embed(torch.tensor([[5]]), inputs), 0, depth, inputs)
    inputs = captured.prepare_forward(np.array([[2]]), cache)
    replays = engines[0].replays
    with pytest.raises(MissingEntryError, match="layer=3, but for position 2 of row 0"):
        captured.run_layers(captured.embed(torch.tensor([[5]]), inputs), 0, LAYERS, inputs)
    assert engines[0].replays == replays


@torch.inference_mode()
def test_rows_that_leave_wait_for_no_capture(engines):
    captured, eager = pair()
    states = []
    for stepper in (captured, eager):
        cache = stepper.new_cache(3)
        inputs = stepper.prepare_forward(np.zeros((3, 1), dtype=int), cache)
        hidden = stepper.run_layers(stepper.embed(torch.tensor([[5], [6], [7]]), inputs), 0, 2, inputs)
        hidden = stepper.run_layers(hidden, 2, 4, inputs)
        before = engines[0].captures
        for keep in ([0, 2], [1]):
            chosen = np.array(keep)
            below = stepper.embed(torch.tensor([[3], [4], [8]]), inputs)[chosen]
            next_frame = stepper.prepare_forward(np.ones((len(keep), 1), dtype=int), cache, rows=chosen)
            states.append(stepper.run_layers(below, 0, 2, next_frame))
        assert engines[0].captures == before
    for mine, other in zip(states[:2], states[2:], strict=True):
        assert (mine - other).abs().max() <= most(eager)


@torch.inference_mode()
def test_a_result_outlives_the_next_replay(engines):
    captured, _ = pair()
    cache = captured.new_cache(1)
    inputs = captured.prepare_forward(np.array([[0]]), cache)
    below = captured.run_layers(captured.embed(torch.tensor([[5]]), inputs), 0, 2, inputs)
    kept = below.clone()
    captured.run_layers(below, 2, LAYERS, inputs)
    assert torch.equal(below, kept)


# ---------------------------------------------------------------- weights


def first_weight(stepper: CausalStepper) -> tuple[torch.nn.Module, torch.nn.Parameter]:
    layer = stepper.blocks[2].mlp.down_proj
    return layer, layer.weight


def head_weight(stepper: CausalStepper) -> tuple[torch.nn.Module, torch.nn.Parameter]:
    return stepper.head_modules[-1], stepper.head_modules[-1].weight


def put_in_its_place(layer: torch.nn.Module, weight: torch.nn.Parameter) -> None:
    layer.weight = torch.nn.Parameter(weight * 2)


def other_data(layer: torch.nn.Module, weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 2


def in_place(layer: torch.nn.Module, weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


@pytest.mark.parametrize("weight_of", [first_weight, head_weight])
@pytest.mark.parametrize("change", [put_in_its_place, other_data, in_place])
def test_weights_that_change_count_from_the_next_token_on(change, weight_of, engines):
    both, fed = Both(pair(), rows=1), drawn(6)
    for at in range(3):
        both.feed(fed[:1, [at]])
    change(*weight_of(both.stepper))
    captures = engines[0].captures
    for at in range(3, 6):
        both.feed(fed[:1, [at]])
    assert engines[0].captures == captures + (change is not in_place)


# ---------------------------------------------------------------- decisions


class Waits(TorchDispatchMode):
    """Count waits for the device: reads of its numbers, and copies of its tensors to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        away = function.overloadpacket.__name__ == "_to_copy" and given.get("device", FIRST) != FIRST
        number = function.overloadpacket.__name__ == "_local_scalar_dense"
        self.count += (away or number) and isinstance(args[0], Placed)
        return function(*args, **given)


def test_a_decision_costs_one_transfer():
    with two_devices(), Waits() as waits:
        signal = Placed(torch.tensor([1.5, 2.5]), FIRST)
        values = require_finite_cpu_float64(signal, "after layer 3")
        assert values.double().cpu().numpy().tolist() == [1.5, 2.5]
        assert waits.count == 1
        with pytest.raises(NotFinite, match=r"after layer 3: 1 of 2 rows"):
            require_finite_cpu_float64(Placed(torch.tensor([1.5, torch.nan]), FIRST), "after layer 3")


# ---------------------------------------------------------------- steps that are not captured


def replays_of(stepper: CausalStepper, engines: list[TapeEngine], backend_says: str) -> int:
    assert stepper.backend == backend_says
    generated(stepper, FULL)
    return sum(engine.replays for engine in engines)


@pytest.mark.parametrize("backend", ["eager", "walked"])
def test_other_backends_capture_nothing(backend, engines):
    stepper = CausalStepper(small_model("llama"), backend=backend)
    assert replays_of(stepper, engines, backend) == 0
    assert all((step is None) == (backend == "walked") for step, _ in stepper.fused_steps_and_placements(0, LAYERS))


def test_a_device_without_an_engine_has_caches_of_its_own():
    stepper = CausalStepper(small_model("llama"))
    assert stepper.backend == "fast"
    assert type(stepper.new_cache(1)) is KVCache
    assert {type(layer) for layer in stepper.new_cache(1).layers} == {LayerKVCache}


def test_a_family_without_fused_steps_says_so(engines):
    stepper = CausalStepper(small_model("gpt2"))
    assert replays_of(stepper, engines, "fast, nothing captured: some block has no fused step") == 0


def test_what_is_watched_runs_where_it_is_seen(engines):
    """A dispatch mode sees no operations that a graph replays."""
    captured, _ = pair()
    generated(captured, FULL, rows=1)
    before = engines[0].replays
    with MatmulCounter(captured.model) as executed:
        record = generated(captured, FULL, rows=1)
    assert engines[0].replays == before
    for (layer, _), rows in executed.rows_by_matrix().items():
        if layer:
            assert rows == pytest.approx(record.work[0].tokens[layer - 1])


def test_a_refusal_is_said_once_recorded_and_changes_nothing(engines, recwarn):
    captured, eager = pair()
    point = ruled(acting(eager))
    engines[0].refuses = "CUDA error: operation not permitted when stream is capturing"
    for _ in range(2):
        alike(generated(captured, point), generated(eager, point), most(eager))
    said = [each for each in recwarn if issubclass(each.category, GraphCaptureWarning)]
    assert [str(each.message).partition(": ")[2] for each in said] == [engines[0].refuses]
    assert captured.backend == f"fast, nothing captured: {engines[0].refuses}"


def test_a_head_on_which_something_hangs_is_not_captured(engines):
    model, seen = small_model("llama"), []
    model.lm_head.register_forward_hook(lambda *given: seen.append(len(given[1][0])))
    captured = CausalStepper(model)
    assert captured.backend == "fast, captured graphs"
    seen.clear()
    record = generated(captured, FULL, rows=1)
    assert len(seen) == len(record.emitted[0])


def test_batches_of_more_rows_than_are_captured_go_one_by_one_until_rows_leave(engines, monkeypatch):
    """Captured and other steps alternate over the same buffers, within one token too."""
    monkeypatch.setattr(graph_capture, "MAX_CAPTURED_ROWS", 2)
    captured, eager = pair("gemma3")
    point = ruled(acting(eager))
    before = engines[0].replays
    alike(generated(captured, point), generated(eager, point), most(eager))
    runs = [key for each in captured._graphs.pool._idle for key in each.graphs]
    assert {rows for _, _, rows, _ in runs} == {1, 2}
    assert engines[0].replays > before


def test_graphs_are_let_go_of_where_there_are_too_many(engines, monkeypatch):
    monkeypatch.setattr(graph_buffers, "MAX_GRAPHS", 3)
    captured, eager = pair()
    point = ruled(acting(eager))
    alike(generated(captured, point), generated(eager, point), most(eager))
    assert [len(each.graphs) for each in captured._graphs.pool._idle if each.rows == 3] == [3]
    assert engines[0].captures > 12


@torch.inference_mode()
def test_another_steppers_cache_is_used_as_it_is(engines):
    captured, eager = pair()
    states = []
    for stepper, made_by in ((captured, eager), (eager, captured)):
        cache, replays = made_by.new_cache(1), engines[0].replays
        for position in range(3):
            inputs = stepper.prepare_forward(np.array([[position]]), cache)
            hidden = stepper.run_layers(stepper.embed(torch.tensor([[5]]), inputs), 0, LAYERS, inputs)
            assert inputs.executed == position + 1
        states.append(hidden)
        assert engines[0].replays == replays
    assert (states[0] - states[1]).abs().max() <= most(eager)


@torch.inference_mode()
def test_readouts_are_captured_by_how_many_states_they_read(engines):
    captured, eager = pair()
    states, replays, captures = torch.randn(3, 2, 32, dtype=torch.float64), engines[0].replays, engines[0].captures
    for shape in ((3, 2), (6,), (2, 3)):
        found, expected = (one.logits(states.view(*shape, -1)) for one in (captured, eager))
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=0, atol=most(eager))
    assert (engines[0].replays, engines[0].captures) == (replays + 3, captures + 1)
    kept = captured.logits(states)
    for read in (captured.logits(states.flip(0)).flip(0), kept):
        assert torch.allclose(read, eager.logits(states), rtol=0, atol=most(eager))
    many = torch.randn(graph_capture.MAX_CAPTURED_ROWS + 1, 32, dtype=torch.float64)
    assert torch.equal(captured.logits(many), eager.logits(many))
    assert captured.logits(many[:0]).shape == (0, VOCABULARY)
    assert engines[0].replays == replays + 5


def test_a_copy_of_a_stepper_runs_by_itself(engines):
    """Planted steppers are such copies: graphs have the tables and blocks of the captured stepper."""
    captured, _ = pair()
    moved = copy.copy(captured)
    moved.rotary_table = lambda *given: tuple(table.roll(1, 1) for table in captured.rotary_table(*given))
    replays = engines[0].replays
    record = generated(moved, FULL)
    assert engines[0].replays == replays
    assert not np.array_equal(record.tokens.token, generated(captured, FULL).tokens.token)


def test_layers_that_a_decoder_put_in_are_used(engines):
    captured, _ = pair()
    written: list[int] = []

    class Noted(LayerKVCache):
        def write(self, *given: Any) -> Any:
            written.append(self._number)
            return super().write(*given)

    session, _ = WalkedDecoder(captured, FULL).start(PROMPTS[:1])
    session.close()
    session, _ = WalkedDecoder(captured, FULL).start([Prompt(np.array([3]))])
    session.state.cache.layers[:] = [Noted(layer, 1, 8) for layer in range(1, LAYERS + 1)]
    session.state.cache.truncate(np.array([0]))
    session._trail[0].clear()
    session.feed(np.array([[4]]))
    assert written == [*range(1, LAYERS + 1)]


@torch.inference_mode()
def test_prompts_and_chunks_are_not_captured_and_count_their_own_keys(engines):
    captured, _ = pair()
    replays = engines[0].replays
    cache = captured.new_cache(1)
    inputs = captured.prepare_forward(np.array([[0]]), cache, lengths=np.array([1]))  # a prompt of one token
    captured.run_layers(captured.embed(torch.tensor([[5]]), inputs), 0, LAYERS, inputs)
    assert (inputs.executed, engines[0].replays) == (1, replays)
    inputs = captured.prepare_forward(np.array([[1, 2]]), cache)
    captured.run_layers(captured.embed(torch.tensor([[5, 6]]), inputs), 0, LAYERS, inputs)
    assert (inputs.executed, engines[0].replays) == (3, replays)
    inputs = captured.prepare_forward(np.array([[3]]), cache)
    captured.run_layers(captured.embed(torch.tensor([[7]]), inputs), 0, LAYERS, inputs)
    assert (inputs.executed, engines[0].replays) == (8, replays + 1)


def test_the_record_says_what_ran(engines):
    loaded = load("emad-nano")
    assert "ran" not in loaded.facts
    assert loaded.stepper.backend == loaded.facts["ran"] == "fast, captured graphs"
    engines[0].refuses = "no"
    with pytest.warns(GraphCaptureWarning):
        WalkedDecoder(loaded.stepper, full_depth(loaded.geometry.layers)).generate(PROMPTS[:1], 12)
    assert loaded.facts["ran"] == "fast, nothing captured: no"
    assert loaded.facts["backend"] == loaded.provenance["backend"] == "fast"
