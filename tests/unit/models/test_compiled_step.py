"""A step reported as compiled is compiled, or the report gives the reason."""

from __future__ import annotations

import pytest
import torch

from emad_ref.models.generation import count_traced_graphs, fail_on_recompile_limit


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_more_shapes_than_the_limit_raise_where_the_plain_step_would_have_gone_on():
    from torch._dynamo import config

    step = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with config.patch(recompile_limit=1):
        step(torch.ones(2))
        assert step(torch.ones(3)).sum() == 6, "uncompiled without a report"
        other = torch.compile(lambda x: x * 3, backend="eager", dynamic=False)
        with fail_on_recompile_limit():
            other(torch.ones(2))
            with (
                pytest.raises(RuntimeError, match="more shapes than TorchDynamo compiles a step for"),
                fail_on_recompile_limit(),
            ):
                other(torch.ones(3))
    assert not config.fail_on_recompile_limit_hit, "the process keeps its own setting"


def test_graphs_that_were_traced_are_counted():
    before = count_traced_graphs()
    step = torch.compile(lambda x: x + 1, backend="eager")
    assert count_traced_graphs() == before, "nothing ran yet"
    step(torch.ones(2))
    assert count_traced_graphs() == before + 1
