"""``emad::blas_matmul`` has the numbers of PyTorch's product, is counted as one, and refuses what NumPy cannot do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from emad_ref.models.fast import blas_operator
from emad_ref.models.fast.blas_operator import blas_matmul
from emad_ref.models.matmul_counter import MatmulCounter
from emad_ref.models.threads import _blas_pools, one_blas_thread
from emad_ref.record import HEAD

SHAPES = [((7, 5), (5,)), ((7, 5), (5, 3)), ((1, 5), (5, 3)), ((7, 5), (5, 1))]


@pytest.fixture
def two_blas_threads() -> Iterator[None]:
    """Let every BLAS library of this process have two threads."""
    before = [pool.get_num_threads() for pool in _blas_pools()]
    for pool in _blas_pools():
        pool.set_num_threads(2)
    yield
    for pool, threads in zip(_blas_pools(), before, strict=True):
        pool.set_num_threads(threads)


@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("stride", ["rows", "columns", "wide"])
@torch.no_grad()
def test_numbers_and_flops_are_those_of_pytorch(left: tuple[int, ...], right: tuple[int, ...], stride: str) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(left, generator=generator), torch.randn(right, generator=generator)
    if stride == "columns":
        first = first.t().contiguous().t()
    if stride == "wide":
        first = torch.cat((first, first), dim=1)[:, : left[1]]
    found, expected = blas_matmul(first, second), first @ second
    torch.testing.assert_close(found, expected)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(blas_matmul(first, second), found)
    assert counter.get_total_flops() == 2 * first.numel() * second.shape[1:].numel()
    shape = torch.ops.emad.blas_matmul(first.to("meta"), second.to("meta")).shape
    assert shape == found.shape


@pytest.mark.parametrize("tied", [False, True])
def test_the_witness_counts_rows_through_a_weight_and_its_slices(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=24, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    head, down = model.lm_head.weight, model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad(), MatmulCounter(model) as counter:
        blas_matmul(head, torch.ones(8))
        blas_matmul(torch.ones(3, 8), head.t())
        blas_matmul(head[:12], torch.ones(8, 5))
        blas_matmul(torch.ones(2, 12), down.t())
    rows = counter.rows_by_matrix()
    assert rows[HEAD, "weight"] == pytest.approx(1 + 3 + 5 / 2)
    assert rows[1, "mlp.down_proj.weight"] == pytest.approx(2)


def test_gradients_other_dtypes_and_devices_are_refused() -> None:
    weight, state = torch.ones(3, 2, requires_grad=True), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"no gradient; call it under torch\.no_grad"):
        blas_matmul(weight, state)
    assert blas_matmul(weight.detach(), state).tolist() == [2, 2, 2]
    for call in (blas_matmul, torch.ops.emad.blas_matmul):
        with torch.no_grad(), pytest.raises(TypeError, match=r"torch.float64 on cpu, but .* takes float32 on a CPU"):
            call(weight.double(), state.double())
    with pytest.raises(TypeError, match="on meta, but"):
        blas_matmul(weight.detach().to("meta"), state)


def test_a_product_has_one_thread_and_numpy_gets_its_own_back(
    monkeypatch: pytest.MonkeyPatch, two_blas_threads: None
) -> None:
    numbers: list[list[int]] = []
    multiply = blas_operator.np.matmul

    def noted(*operands: object) -> object:
        numbers.append([pool.get_num_threads() for pool in _blas_pools()])
        return multiply(*operands)

    monkeypatch.setattr(blas_operator.np, "matmul", noted)
    assert _blas_pools(), "NumPy's wheels bring a BLAS whose threads can be set"
    with one_blas_thread:  # another thread's product is running
        blas_matmul(torch.ones(3, 2), torch.ones(2))
        assert {pool.get_num_threads() for pool in _blas_pools()} == {1}
    assert numbers == [[1] * len(_blas_pools())]
    assert {pool.get_num_threads() for pool in _blas_pools()} == {2}
    with pytest.raises(ZeroDivisionError), one_blas_thread:
        raise ZeroDivisionError
    assert {pool.get_num_threads() for pool in _blas_pools()} == {2}
