"""Memory of tensors is counted to the byte for every kind of tensor."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_emad.benchmark.machine import live_tensor_bytes


class Wrapper(torch.Tensor):
    """Wraps a tensor without its own storage, as quantised and distributed tensors do. Every operation fails: the
    size in bytes must not need one."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)

    def __init__(self, wrapped: torch.Tensor):
        self.wrapped = wrapped

    @classmethod
    def __torch_dispatch__(cls, *given: Any, **named: Any) -> Any:
        raise NotImplementedError


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(1000)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.zeros(1000), 4000),
        (lambda: torch.zeros(1000)[10:], 4000),
        (lambda: Wrapper(torch.zeros(1000)), 4000),
        (lambda: torch.empty(1000, device="meta"), 0),
        (fake, 0),
        (torch.nn.parameter.UninitializedParameter, 0),
    ],
    ids=["plain", "view", "wrapper", "meta", "fake", "lazy"],
)
def test_each_kind_of_tensor_counts_its_own_memory(make: Any, expected: int) -> None:
    before = live_tensor_bytes()
    held = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert live_tensor_bytes() - before == expected
    del held
