"""Products of few tokens with a large weight equal PyTorch's in every layout, and are counted for these tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fast import fused_blocks, product_table, products
from emad_ref.models.fast.fused_blocks import AttentionInputs, PackedLinear, apply_linear, multiply_by_weight
from emad_ref.models.fast.products import BAG_ROWS, LINEAR, MOST_ROWS, PRODUCTS, ProductClass
from emad_ref.models.fast.weight_layout import LARGE_WEIGHT, lay_out_weights, to_adjacent_column_major
from emad_ref.models.matmul_counter import MatmulCounter
from emad_ref.point import full_depth
from tests.decoders.audited_model import drawn

OUTPUTS, INPUTS = 960, 320  # more numbers than the limit


@pytest.fixture(params=[1, 2, 7])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set 7 threads, which divide no number of outputs here."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weight_of(layout: str) -> torch.Tensor:
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    assert weight.numel() >= LARGE_WEIGHT
    return {"rows": weight, "columns": to_adjacent_column_major([weight])[0]}[layout]


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[ProductClass]]:
    """Return a function that lets each class take the product of this name if it can; the classes that did."""

    def take(name: str) -> list[ProductClass]:
        took: list[ProductClass] = []

        def fastest(kind: ProductClass, names: tuple[str, ...], run: int) -> str:
            took.extend([kind] if name in names else [])
            return name if name in names else LINEAR

        monkeypatch.setattr(products, "_measure_fastest", fastest)
        monkeypatch.setattr(products, "_chosen", {})
        monkeypatch.setattr(product_table, "_known", {})
        monkeypatch.delenv(product_table.TABLE_VARIABLE, raising=False)
        return took

    return take


@pytest.mark.each_value
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, OUTPUTS)], ids=["plain", "biased"])
@pytest.mark.parametrize(("product", "layout"), list(itertools.product(PRODUCTS, ("rows", "columns"))))
@torch.inference_mode()
def test_a_product_is_that_of_linear(
    take: Callable[[str], list[ProductClass]], threads: int, product: str, layout: str, bias: torch.Tensor | None
) -> None:
    weight, own, took = weight_of(layout), torch.Generator().manual_seed(1), take(product)
    for shape in ((), (1,), (1, 1), (2,), (1, 3), (3, 1), (2, 2), (0,), (0, 4), (MOST_ROWS,), (MOST_ROWS + 1,)):
        states = torch.randn(*shape, INPUTS, generator=own)
        expected = F.linear(states.double(), weight.double(), None if bias is None else bias.double())
        found = multiply_by_weight(states, weight, bias)
        assert found.shape == expected.shape
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
        if 0 < len(shape) < 2 and shape[0]:
            wide = torch.full((*shape, OUTPUTS + 8), torch.nan)
            multiply_by_weight(states, weight, bias, wide[:, 4:-4])
            torch.testing.assert_close(wide[:, 4:-4].double(), expected, rtol=1e-5, atol=1e-4)
            assert wide.isnan().sum() == 8 * shape[0]
    unfit = {"bmm_columns": layout == "columns", "bmm_parts": threads != 2, "embedding_bag": layout == "rows"}
    most = {"embedding_bag": BAG_ROWS}.get(product, MOST_ROWS)
    assert sorted({kind.rows for kind in took}) == (
        []
        if unfit.get(product)
        else [n for n in (1, 2, 4, MOST_ROWS) if n <= most and (n, product) != (1, "blas_columns")]
    )


@torch.inference_mode()
def test_a_class_is_measured_once_and_keeps_its_product_and_its_bits(
    take: Callable[[str], list[ProductClass]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    weight, states, took = weight_of("rows"), torch.randn(3, INPUTS), take("blas")
    first = multiply_by_weight(states, weight)
    assert torch.equal(multiply_by_weight(states, weight.clone()), first)
    multiply_by_weight(states[:2], weight)
    multiply_by_weight(torch.randn(4, INPUTS), weight)
    assert [kind.rows for kind in took] == [4, 2]
    assert product_table.chosen_products() == {f"{n} rows, 960 × 320 by rows, threads 1": "blas" for n in (2, 4)}


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [((4, 2, 3), "bmm_columns"), ((4, 3, 1), "blas"), ((4, 3.9, 4), LINEAR), ((1, 2, 3), LINEAR)],
)
@torch.inference_mode()
def test_the_fastest_product_is_taken_unless_it_saves_too_little(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], fastest: str
) -> None:
    """Each product takes its time on a clock of the test, and a counter around the choice counts no measured one."""
    now = 0.0

    def taking(seconds: float) -> products.Product:
        def product(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += seconds
            return F.linear(states, weight)

        return product

    names, kind = (LINEAR, "bmm_columns", "blas"), ProductClass(2, OUTPUTS, INPUTS, "by rows", 1)
    monkeypatch.setattr(products, "time", SimpleNamespace(perf_counter=lambda: now))
    for name, each in zip(names, seconds, strict=True):
        monkeypatch.setitem(PRODUCTS, name, taking(each / 100))
    with FlopCounterMode(display=False) as counted:
        assert products._measure_fastest(kind, names, 1) == fastest
        assert now > sum(seconds) / 100
        assert counted.get_total_flops() == 0
        F.linear(torch.ones(2, 3), torch.ones(5, 3))
    assert counted.get_total_flops() == 60


@pytest.mark.parametrize("layout", ["rows", "columns"])
@torch.inference_mode()
def test_a_measurement_ends_on_two_threads_and_takes_an_offered_product(
    take: Callable[[str], list[ProductClass]], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    measure = products._measure_fastest
    take(LINEAR)
    monkeypatch.setattr(products, "_measure_fastest", measure)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows in (1, 4):
            states, weight = torch.randn(rows, INPUTS), weight_of(layout)
            torch.testing.assert_close(
                multiply_by_weight(states, weight), F.linear(states, weight), rtol=1e-4, atol=1e-3
            )
    finally:
        torch.set_num_threads(before)
    kinds = list(products._chosen)
    assert [(kind.rows, kind.threads) for kind in kinds] == [(1, 2), (4, 2)]
    assert all(name in products._offered(kind) for kind, name in products._chosen.items())


@pytest.mark.parametrize("inputs", [1536, 2048])
@pytest.mark.parametrize("product", PRODUCTS)
@torch.inference_mode()
def test_columns_between_which_others_lie_are_summed_without_them(
    take: Callable[[str], list[ProductClass]], product: str, inputs: int
) -> None:
    """A gap behind each column, neighbours in one buffer, and a part whose last column ends before its gap."""
    take(product)
    whole = torch.full((inputs, 2**11 + 8), torch.nan)
    weight = whole[:, : 2**11].t()
    weight.normal_(generator=torch.Generator().manual_seed(4))
    last = whole[:, 8:].t()
    last[-8:].zero_()
    state = torch.randn(inputs)
    for part in (weight, weight[:1024], last):
        expected = part.double() @ state.double()
        torch.testing.assert_close(multiply_by_weight(state, part).double(), expected, rtol=1e-4, atol=1e-3)


def test_a_gradient_passes(take: Callable[[str], list[ProductClass]], threads: int) -> None:
    took = take("blas")
    weight = weight_of("rows").requires_grad_()
    for rows in (1, 2, 4):
        states = torch.ones(rows, INPUTS, requires_grad=True)
        multiply_by_weight(states, weight, None).sum().backward()
        torch.testing.assert_close(states.grad, weight.detach().sum(0).expand(rows, -1), rtol=1e-4, atol=1e-3)
    assert not took


def test_a_hooked_or_patched_layer_runs_itself() -> None:
    layer, states = nn.Linear(INPUTS, OUTPUTS), torch.ones(2, INPUTS)
    plain = apply_linear(layer, states)
    torch.testing.assert_close(plain, layer(states))
    handle = layer.register_forward_hook(lambda module, inputs, output: output + 1)
    torch.testing.assert_close(apply_linear(layer, states), plain + 1)
    handle.remove()
    layer.forward = lambda states: torch.zeros(1)  # type: ignore[method-assign]
    assert apply_linear(layer, states).item() == 0


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(("product", "layout"), list(itertools.product(PRODUCTS, ("rows", "columns"))))
def test_a_decoder_of_large_weights_decodes_as_its_modules_and_is_counted(
    take: Callable[[str], list[ProductClass]], threads: int, product: str, rows: int, layout: str
) -> None:
    take(product)
    config = LlamaConfig(
        vocab_size=1200, hidden_size=320, intermediate_size=960, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model, full = LlamaForCausalLM(config).eval(), full_depth(2)
    if layout == "columns":
        lay_out_weights(model)
    prompts, _ = drawn((4,) * rows, 3)
    counted, emitted = [], []
    for backend in ("walked", "fast"):
        decoder = WalkedDecoder(CausalStepper(model, backend=backend), full, max_rows=rows)
        with MatmulCounter(model) as executed:
            emitted.append([tokens.tolist() for tokens in decoder.generate(prompts, 6).emitted])
        counted.append(executed.rows_by_matrix())
    assert emitted[0] == emitted[1]
    assert counted[1] == pytest.approx(counted[0])
    assert min(counted[0].values()) > 0


def test_a_few_tokens_take_weights_that_lie_side_by_side_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are multiplied one by one, with the bits of the modules; each parameter gets its own gradient."""
    sizes = (OUTPUTS, 64, 64)
    weights = to_adjacent_column_major([torch.randn(size, INPUTS) for size in sizes])
    layers = PackedLinear(*({"weight": nn.Parameter(weight), "bias": None} for weight in weights))
    asked: list[int] = []
    monkeypatch.setattr(
        fused_blocks, "multiply_by_weight", lambda *given, **how: asked.append(1) or multiply_by_weight(*given, **how)
    )
    inputs = AttentionInputs(None, None, None, several=True)  # type: ignore[arg-type]  # a cache is not asked
    for rows, at_once in ((2, True), (MOST_ROWS, True), (MOST_ROWS + 1, False)):
        asked.clear()
        states = torch.randn(rows, 1, INPUTS)
        with torch.no_grad():
            outputs = layers(states, inputs)
        for weight, found in zip(weights, outputs, strict=True):
            torch.testing.assert_close(found, F.linear(states, weight), rtol=1e-4, atol=1e-3)
        assert len(asked) == (1 if at_once else len(sizes))
    assert all(found.requires_grad for found in layers(torch.ones(2, 1, INPUTS), inputs))
