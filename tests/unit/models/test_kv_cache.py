"""The K/V cache per layer and row: entries held, released, truncated and renumbered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.kv_cache import KVCache, MissingEntryError
from emad_ref.models.stepper import Stepper
from tests.small_models import LAYERS, VOCABULARY, small_model


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


def filled(stepper: Stepper, rows: int = 3, length: int = 6) -> tuple[KVCache, torch.Tensor]:
    """Return a cache with ``length`` tokens of every row in every layer, and the tokens."""
    ids = torch.randint(0, VOCABULARY, (rows, 12), generator=torch.Generator().manual_seed(1))
    cache = stepper.new_cache(rows, 4)
    step(stepper, cache, ids[:, :length], [0] * rows, LAYERS)
    return cache, ids


def step(
    stepper: Stepper, cache: KVCache, ids: torch.Tensor, first: list[int], depth: int, rows: Any = None
) -> torch.Tensor:
    with torch.inference_mode():
        inputs = stepper.prepare_forward(np.array(first)[:, None] + np.arange(ids.shape[1]), cache, rows=rows)
        return stepper.logits(stepper.run_layers(stepper.embed(ids, inputs), 0, depth, inputs))


def held(cache: KVCache) -> list[dict[int, int]]:
    """Return, per layer, session row → length."""
    return [dict(zip(layer.row_ids.tolist(), layer.row_lengths.tolist(), strict=True)) for layer in cache.layers]


def test_the_rows_that_still_run_are_told_in_one_place(stepper: Stepper) -> None:
    """Those that stop leave all columns; when all have stopped, none is left."""
    caps, by_rule = np.array([6, 4, 5]), np.array([True, False, True])
    cache = stepper.new_cache(3)
    running = stepper.prepare_forward(np.array([[3], [0], [5]]), cache, caps=caps, by_rule=by_rule).running
    assert (running.row_ids.tolist(), running.lowest_cap, running.reads_rule, running.start) == (
        [0, 1, 2],
        4,
        True,
        None,
    )
    kept = running.keep(np.array([0, 2]))
    assert (kept.rows, kept.starts, kept.ends, kept.keys) == ((0, 2), (3, 5), (4, 6), 6)
    assert (kept.caps.tolist(), kept.by_rule.tolist(), kept.lowest_cap) == ([6, 5], [True, True], 5)
    alone = running.keep(np.array([1]))
    assert (alone.start, alone.keys, alone.reads_rule) == (0, 1, False)
    assert kept.lower_caps(np.array([2, 5])).lowest_cap == 2
    assert not running.keep(np.array([], dtype=np.int64))
    assert running.keep(np.arange(3)) is running


def test_rows_may_take_every_layer_unless_a_step_caps_them(stepper: Stepper) -> None:
    running = stepper.prepare_forward(np.zeros((2, 1), dtype=int), stepper.new_cache(2)).running
    assert (running.caps.tolist(), running.reads_rule) == ([LAYERS] * 2, False)


def test_free_gives_up_rows_above_their_caps_for_good(stepper: Stepper) -> None:
    cache, ids = filled(stepper)
    cache.free_layers_above(np.array([2, 6, 4]))
    assert held(cache) == [{0: 6, 1: 6, 2: 6}] * 2 + [{1: 6, 2: 6}] * 2 + [{1: 6}] * 2
    assert [len(layer._keys) for layer in cache.layers] == [3, 3, 2, 2, 1, 1], "memory is freed"
    cache.free_layers_above(np.array([6, 6, 6]))
    assert held(cache)[5] == {1: 6}, "freed rows do not return"
    with pytest.raises(MissingEntryError, match=r"layer=3.*row 0.*gave this row up") as caught:
        step(stepper, cache, ids[:, 6:7], [6, 6, 6], 3)
    assert caught.value.held is None


def test_free_again_after_depth_fell_further(stepper: Stepper) -> None:
    cache, _ = filled(stepper)
    for caps in ([6, 6, 6], [6, 5, 6], [6, 5, 1], [6, 5, 1]):
        cache.free_layers_above(np.array(caps))
        assert [len(layer) for layer in held(cache)] == [sum(cap > i for cap in caps) for i in range(LAYERS)]


def test_a_layer_that_serves_no_row_holds_no_memory(stepper: Stepper) -> None:
    cache, _ = filled(stepper)
    cache.free_layers_above(np.array([3, 3, 3]))
    assert cache.layers[4]._keys is None
    assert held(cache)[4] == {}


def test_dropped_rows_are_renumbered_and_the_others_go_on(stepper: Stepper) -> None:
    cache, ids = filled(stepper)
    cache.free_layers_above(np.array([6, 4, 6]))
    cache.drop_rows(np.array([0]))
    assert cache.rows == 2
    assert held(cache) == [{0: 6, 1: 6}] * 4 + [{1: 6}] * 2
    other, _ = filled(stepper)
    expected = step(stepper, other, ids[:, 6:7], [6, 6, 6], 4)[1:]
    assert torch.allclose(step(stepper, cache, ids[1:, 6:7], [6, 6], 4), expected, atol=1e-10)


def test_the_same_caps_after_a_drop_belong_to_other_rows(stepper: Stepper) -> None:
    cache, _ = filled(stepper)
    cache.free_layers_above(np.array([6, 6, 6]))
    cache.drop_rows(np.array([2]))
    cache.free_layers_above(np.array([6, 2]))
    cache.drop_rows(np.array([1]))
    cache.free_layers_above(np.array([2]))
    assert held(cache)[2:] == [{}] * 4
    again, _ = filled(stepper, rows=2)
    again.free_layers_above(np.array([6]).repeat(2))
    again.drop_rows(np.array([0]))
    again.truncate(np.array([3]))
    assert held(again) == [{0: 3}] * LAYERS


def test_truncate_is_absolute_and_leaves_shorter_layers(stepper: Stepper) -> None:
    cache, ids = filled(stepper)
    step(stepper, cache, ids[:, 6:8], [6, 6, 6], 2)
    cache.truncate(np.array([7, 8, 3]))
    assert held(cache) == [{0: 7, 1: 8, 2: 3}] * 2 + [{0: 6, 1: 6, 2: 3}] * 4


def test_truncate_takes_lengths_by_session_row_where_layers_serve_some_rows(stepper: Stepper) -> None:
    cache, _ = filled(stepper)
    cache.free_layers_above(np.array([2, 6, 4]))
    cache.truncate(np.array([1, 5, 3]))
    assert held(cache) == [{0: 1, 1: 5, 2: 3}] * 2 + [{1: 5, 2: 3}] * 2 + [{1: 5}] * 2


def test_entries_are_what_the_block_wrote(stepper: Stepper) -> None:
    """Writes of a whole batch, of a subset and of ragged rows put the same keys in the same slots."""
    whole, ids = filled(stepper)
    parts = stepper.new_cache(3, 2)
    step(stepper, parts, ids[[0, 2], :2], [0, 0], LAYERS, rows=np.array([0, 2]))
    step(stepper, parts, ids[1:2, :6], [0], LAYERS, rows=np.array([1]))
    for t in range(2, 6):
        step(stepper, parts, ids[[0, 2], t : t + 1], [t, t], LAYERS, rows=np.array([0, 2]))
    for mine, theirs in zip(parts.layers, whole.layers, strict=True):
        for row in range(3):
            for a, b in zip(mine.row_kv(row), theirs.row_kv(row), strict=True):
                assert a.shape == (4, 6, 8)
                assert torch.allclose(a, b, atol=1e-10)


def test_entries_of_a_layer_that_never_ran() -> None:
    with pytest.raises(BadArgument, match="nothing ran here yet"):
        KVCache(2, 1).layers[1].row_kv(0)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda cache: cache.truncate(np.array([1, 2])), "length=.*3 values"),
        (lambda cache: cache.truncate(np.array([1, 2, -1])), "length="),
        (lambda cache: cache.free_layers_above(np.array([1])), "caps="),
        (lambda cache: cache.drop_rows(np.array([3])), "rows="),
        (lambda cache: cache.drop_rows(np.array([0, 1, 2])), "some, not all"),
        (lambda cache: KVCache(2, 0), "rows=0"),
        (lambda cache: KVCache(0, 1), "layers=0"),
        (lambda cache: KVCache(1, 1, capacity=0), "capacity=0"),
    ],
)
def test_misuse_is_refused(stepper: Stepper, action: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        action(filled(stepper)[0])


@settings(max_examples=25, derandomize=True, database=None)
@given(data=st.data())
def test_any_history_of_steps_rollbacks_frees_and_drops_is_a_fresh_one(stepper: Stepper, data: st.DataObject) -> None:
    """After any earlier steps, each row's logits are those of its own tokens at their own depths."""
    rows = data.draw(st.integers(1, 3))
    cache = stepper.new_cache(rows, 2)
    histories: list[list[tuple[int, int]]] = [[] for _ in range(rows)]  # (token, depth)
    floors, caps = [0] * rows, [LAYERS] * rows  # committed lengths, and their caps
    for _ in range(data.draw(st.integers(1, 10))):
        move = data.draw(st.sampled_from(["step", "step", "step", "rollback", "commit", "drop"]))
        if move == "step":
            tokens = [data.draw(st.integers(0, VOCABULARY - 1)) for _ in histories]
            tops = [h[-1][1] if h else LAYERS for h in histories]
            depth = data.draw(st.integers(1, min(tops)))
            logits = step(stepper, cache, torch.tensor(tokens)[:, None], [len(h) for h in histories], depth)
            for row, (history, token) in enumerate(zip(histories, tokens, strict=True)):
                history.append((token, depth))
                alone = step(stepper, stepper.new_cache(1), torch.tensor([[t for t, _ in history]]), [0], depth)
                assert torch.allclose(logits[row, -1], alone[0, -1], atol=1e-9)
        elif move == "rollback":
            for row, history in enumerate(histories):
                del history[data.draw(st.integers(floors[row], len(history))) :]
            cache.truncate(np.array([len(h) for h in histories]))
        elif move == "commit":
            floors = [len(h) for h in histories]
            caps = [h[-1][1] if h else LAYERS for h in histories]
            cache.free_layers_above(np.array(caps))
        elif len(histories) > 1:
            gone = data.draw(st.integers(0, len(histories) - 1))
            cache.drop_rows(np.array([gone]))
            for column in (histories, floors, caps):
                del column[gone]
