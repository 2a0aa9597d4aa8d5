"""A model spread over devices decodes as on one, and only ``models.placement.to_device`` moves tensors.

Every law runs on named tensors (``tests.devices``), where any operation across devices is an error, and again on real
devices where a machine has them. ``accelerate`` spreads the models, as in ``load(device="auto")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models import causal, placement
from emad_ref.models.causal import CausalStepper
from emad_ref.models.families import anatomy_of
from emad_ref.models.placement import copy_without_hooks
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.schedule.schedules import SCHEDULES
from tests.devices import FIRST, SECOND, MixedDevices, two_devices
from tests.random_translators import attached_translators
from tests.small_models import FAMILIES, LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5, some_sources

accelerate = pytest.importorskip("accelerate", reason="it spreads the models: pip install accelerate")
hooks = pytest.importorskip("accelerate.hooks", reason="it spreads the models: pip install accelerate")

ON_FIRST = (1, 2, 6)  # layers on the first device, the others on the second: depth crosses twice, and back at the end
LENGTHS, FED = (5, 3, 7), 4
REAL = 1e-9  # float64 with other kernels on another device; the largest logits are about 10


@dataclass(frozen=True)
class Machine:
    """Two devices, what makes them available, and the allowed difference from results on one."""

    first: torch.device
    second: torch.device
    apart: float
    open: Callable[[], AbstractContextManager[Any]] = nullcontext


def named() -> Machine:
    return Machine(FIRST, SECOND, 0.0, two_devices)  # the same kernels on the same values


def named_and_host() -> Machine:
    return Machine(torch.device("cpu"), SECOND, 0.0, two_devices)


def accelerators() -> Machine:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two accelerators, this machine has {torch.cuda.device_count()}")
    return Machine(torch.device("cuda:0"), torch.device("cuda:1"), REAL)


def accelerator_and_host() -> Machine:
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator beside the CPU")
    return Machine(torch.device("cpu"), torch.device("cuda:0"), REAL)


MACHINES = (named, named_and_host, accelerators, accelerator_and_host)
# A CPU beside an accelerator changes only how accelerate lays its hooks, for every family alike; the other machines
# test each family's blocks across devices. These have a head of their own, a tied one, and projections.
BESIDE_THE_CPU = ("gpt_neox", "llama3", "opt_350m")


def placed(family: str, kind: Callable[[], Machine]) -> Any:
    slow = "host" in kind.__name__ and family not in BESIDE_THE_CPU
    return pytest.param(family, kind, id=f"{kind.__name__}-{family}", marks=[pytest.mark.slow] if slow else [])


@pytest.fixture(params=MACHINES, ids=lambda kind: kind.__name__)
def machine(request: pytest.FixtureRequest) -> Machine:
    made: Machine = request.param()
    return made


def plan_of(model: Any, blocks: str, first: torch.device, second: torch.device) -> dict[str, str]:
    """Map modules to devices: ``ON_FIRST`` and all parts but blocks on the first, an untied head on the second."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    plan = {name: second for name, child in model.named_children() if decoder not in child.modules()}
    if tied or "encoder" in plan:
        plan = dict.fromkeys(plan, first)
    plan |= {f"{prefix}.{name}": first for name, _ in decoder.named_children() if name != blocks}
    for number, _ in enumerate(getattr(decoder, blocks), start=1):
        plan[f"{prefix}.{blocks}.{number - 1}"] = first if number in ON_FIRST else second
    return {name: str(device) for name, device in plan.items()}


def spread(model: Any, machine: Machine, blocks: str | None = None) -> Any:
    plan = plan_of(model, blocks or anatomy_of(model.config).blocks, machine.first, machine.second)
    if "cpu" not in plan.values():
        return accelerate.dispatch_model(model, plan, skip_keys=model._skip_keys_device_placement)
    tied = accelerate.utils.find_tied_parameters(model)
    # with an accelerator, dispatch_model would offload what the plan puts on the CPU instead of running it there
    hooks.attach_align_device_hook_on_blocks(
        model,
        execution_device=plan | {"": "cpu"},
        offload=dict.fromkeys(plan, False),
        skip_keys=model._skip_keys_device_placement,
        tied_params_map={},
    )
    accelerate.utils.retie_parameters(model, tied)
    return model


def prompts(seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [Prompt(rng.integers(0, VOCABULARY, n)) for n in LENGTHS]


def fed(walked: Stepper, given: list[Prompt]) -> Iterator[np.ndarray]:
    """Return logits of a ragged batch at forced depths that differ by row, with a rollback and a dropped row."""
    session, step = WalkedDecoder(walked, full_depth(LAYERS), max_rows=len(given)).start(given)
    yield step.logits
    rng = np.random.default_rng(1)
    for depths in ([6, 3, 5], [4, 3, 2], [3, 3, 1]):
        yield session.feed(rng.integers(0, VOCABULARY, (3, 1)), np.array(depths)[:, None]).logits
    session.rollback(session.length - 2)
    yield session.feed(rng.integers(0, VOCABULARY, (3, 2)), np.array([[4, 4], [3, 3], [5, 5]])).logits
    session.drop(np.array([1]))
    yield session.feed(rng.integers(0, VOCABULARY, (2, 1)), np.array([[2], [4]])).logits


def require_same(mine: list[np.ndarray], theirs: list[np.ndarray], apart: float) -> None:
    for here, there in zip(mine, theirs, strict=True):
        assert np.abs(here - there).max() <= apart


@cache
def on_one_device(family: str) -> list[np.ndarray]:
    return list(fed(CausalStepper(small_model(family)), prompts()))


@pytest.mark.values("gpt_neox", "opt_350m", "gemma2", "mixtral", "stablelm_parallel")
@pytest.mark.parametrize(("family", "kind"), [placed(family, kind) for kind in MACHINES for family in FAMILIES])
def test_a_spread_model_gives_the_logits_of_one_device(family: str, kind: Callable[[], Machine]) -> None:
    """Ragged batches, depths by row, rollback, dropped rows; the constructor compares with the model's own forward."""
    machine, expected = kind(), on_one_device(family)
    with machine.open():
        walked = CausalStepper(spread(small_model(family), machine))
        assert {placement.device for placement in walked.placements} == {machine.first, machine.second}
        require_same(list(fed(walked, prompts())), expected, machine.apart)


@pytest.mark.parametrize("kind", ["t5", "t5_v1_1"])
def test_a_spread_encoder_decoder_gives_the_logits_of_one_device(kind: str, machine: Machine) -> None:
    given = [Prompt(p.tokens, source) for p, source in zip(prompts(), some_sources(7, 4, 9), strict=True)]
    expected = list(fed(Seq2SeqStepper(small_t5(kind)), given))
    with machine.open():
        walked = Seq2SeqStepper(spread(small_t5(kind), machine, "block"))
        assert set(walked.devices) == {machine.first, machine.second}
        require_same(list(fed(walked, given)), expected, machine.apart)


def some_point(walked: Stepper, schedule: str) -> OperatingPoint:
    """Return thresholds that about a third of the tokens pass at each probe; the positional schedule has no rule."""
    if schedule == "positional":
        return OperatingPoint("fall", "positional", LAYERS, LAYERS, schedule=schedule, period=4, floor=2)
    entropy, probes = take_trace(walked, [TokenSequence(p.tokens) for p in prompts()]).entropy_nats, (1, 3, 5)
    thresholds = tuple(float(np.quantile(entropy[:, probe - 1], 0.3)) for probe in probes)
    more: dict[str, Any] = {"period": 3} if schedule == "chunked" else {}
    if schedule == "translated":
        more = {"translators": attached_translators(walked, (1, 3))}
    return OperatingPoint("some", "quantile", LAYERS, LAYERS, probes, (thresholds,), schedule, **more)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_decodes_as_on_one_device(schedule: str, machine: Machine) -> None:
    """Early exits, K/V-only passes and deferred states cross devices, too."""
    family = "opt_350m" if schedule in ("copying", "translated") else "gpt_neox"
    alone = CausalStepper(small_model(family))
    point = some_point(alone, schedule)
    expected = WalkedDecoder(alone, point, max_rows=3).generate(prompts(), 8)
    with machine.open():
        walked = CausalStepper(spread(small_model(family), machine))
        if point.translators is not None:
            assert attached_translators(walked, (1, 3)) == point.translators
        found = WalkedDecoder(walked, point, max_rows=3).generate(prompts(), 8)
    assert len(set(expected.tokens.depth.tolist())) > 1, "every token ran to the same depth: nothing was tested"
    assert (found.tokens.depth == expected.tokens.depth).all()
    for mine, theirs in zip(found.emitted, expected.emitted, strict=True):
        assert mine.tolist() == theirs.tolist()
    np.testing.assert_allclose(found.signal, expected.signal, rtol=0, atol=machine.apart)


def test_a_trace_and_its_estimates_are_those_of_one_device(machine: Machine) -> None:
    """Reads of states by host arrays and of the unembedding happen on one device."""
    sequences = [TokenSequence(p.tokens, first_decided=1) for p in prompts()]
    estimators = {EntropyEstimator("topk", k=20): (2, 4), EntropyEstimator("lowrank", k=20, rank=8): (3,)}
    expected = take_trace(CausalStepper(small_model("gpt_neox")), sequences, estimators=estimators)
    with machine.open():
        found = take_trace(CausalStepper(spread(small_model("gpt_neox"), machine)), sequences, estimators=estimators)
    # kept in float32: the last bit of float64 may decide its rounding
    apart = 0.0 if machine.apart == 0.0 else 1e-6
    np.testing.assert_allclose(found.entropy_nats, expected.entropy_nats, rtol=apart)
    assert (found.top1 == expected.top1).all()
    for estimator in estimators:
        np.testing.assert_allclose(found.estimates[estimator], expected.estimates[estimator], rtol=10 * apart)


def test_keys_and_values_stay_with_their_layer(machine: Machine) -> None:
    with machine.open():
        walked = CausalStepper(spread(small_model("llama"), machine))
        session, _ = WalkedDecoder(walked, full_depth(LAYERS), max_rows=3).start(prompts())
        for number, layer in enumerate(session._store.cache.layers, start=1):
            place = machine.first if number in ON_FIRST else machine.second
            assert [tensor.device for tensor in layer.row_kv(0)] == [place, place], f"layer {number}"


def test_only_to_device_moves_and_only_where_the_device_changes() -> None:
    machine = named()
    with machine.open() as devices:
        walked = CausalStepper(spread(small_model("llama"), machine))
        session, _ = WalkedDecoder(walked, full_depth(LAYERS), max_rows=3).start(prompts())
        devices.crossings.clear()
        session.feed(np.array([[1], [2], [3]]))
    there, back = (machine.second, machine.first, True), (machine.first, machine.second, True)
    # ids to the embedding and states back; layers 1–2, 3–5 and 6; then the final norm, on the first device
    assert devices.crossings == [there, back, there, back, there, back, there, back]


def test_a_move_left_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named devices detect errors: without ``to_device`` the forward fails after its first block."""
    machine = named()
    with machine.open():
        model = spread(small_model("llama"), machine)
        monkeypatch.setattr(causal, "to_device", lambda tensor, device: tensor)
        with pytest.raises(MixedDevices):
            CausalStepper(model)


def test_hooks_stay_on_the_model_and_off_the_walk() -> None:
    """accelerate's own path on one machine: a hand-written map, hooks on every module, everything on the CPU."""
    model = small_model("gpt_neox")
    plan = dict.fromkeys(plan_of(model, "layers", FIRST, SECOND), "cpu")
    accelerate.dispatch_model(model, plan, force_hooks=True)
    walked, plain = CausalStepper(model), CausalStepper(small_model("gpt_neox"))
    require_same(list(fed(walked, prompts())), list(fed(plain, prompts())), 0.0)
    assert all(hasattr(module, "_hf_hook") for module in model.gpt_neox.layers)
    for (block, _), own, step in zip(walked._blocks, model.gpt_neox.layers, walked._steps, strict=True):
        assert not any(hasattr(module, "_hf_hook") for module in block.modules())
        assert step is not None, "fused steps serve spread models too"
        weights = zip(block.parameters(), own.parameters(), strict=True)
        assert all(mine is theirs for mine, theirs in weights), "a copy of the weights would take their memory twice"


def test_foreign_hooks_are_left_alone() -> None:
    class Heard(hooks.ModelHook):
        """A user's hook."""

    for hook in (Heard(), hooks.SequentialHook(hooks.AlignDevicesHook("cpu"), Heard())):
        layer = hooks.add_hook_to_module(nn.Linear(2, 2), hook)
        assert copy_without_hooks(layer) is layer
    patched = nn.Linear(2, 2)
    patched.forward = lambda given: given  # type: ignore[method-assign]
    assert copy_without_hooks(hooks.add_hook_to_module(patched, hooks.AlignDevicesHook("cpu"))) is patched
    plain = nn.Linear(2, 2)
    assert copy_without_hooks(plain) is plain


def test_offloaded_weights_are_refused() -> None:
    model = accelerate.cpu_offload(small_model("llama"), execution_device="cpu")
    with pytest.raises(BadArgument, match=r"layer 1='weights that are offloaded', but expected weights in memory"):
        CausalStepper(model)


def test_a_block_across_devices_is_refused_by_its_number() -> None:
    with two_devices():
        model = small_model("llama")
        plan = plan_of(model, "layers", FIRST, SECOND)
        torn = {f"model.layers.2.{name}": plan.pop("model.layers.2") and str(FIRST) for name in ("mlp",)}
        rest = {f"model.layers.2.{n}": str(SECOND) for n, _ in model.model.layers[2].named_children() if n != "mlp"}
        accelerate.dispatch_model(model, plan | torn | rest)
        with pytest.raises(BadArgument, match=r"layer 3=\['meta:0', 'meta:1'\].*no_split_module_classes"):
            CausalStepper(model)


def test_to_device_keeps_what_is_there() -> None:
    tensor = torch.zeros(2)
    assert placement.to_device(tensor, torch.device("cpu")) is tensor


def test_synchronize_waits_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V-only passes may still run on a device that returned nothing."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    walked = CausalStepper(small_model("llama"))
    walked.device, walked.devices = torch.device("cuda:1"), (torch.device("cuda:0"), torch.device("cuda:1"))
    WalkedDecoder(walked, full_depth(LAYERS)).synchronize()
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]
