"""Every schedule leaves exactly the K/V cache of its definition, and the ledger charges the repair.

Oracle of state copying: the input states of each layer, one list per layer, run through whole blocks without a cache.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import compute_layer_logits, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import InadmissibleDepth, Prompt
from emad_ref.record import FILLS, READOUTS
from tests.small_models import LAYERS, VOCABULARY, small_model

PROBES, PROMPT, FED = (2, 4), 5, 24
EXACT = 1e-9  # float64: the same states, keys and values, computed in a different order
COPIED, FULL = FILLS.index("copied"), READOUTS.index("full")


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("llama", seed=3))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(7).integers(0, VOCABULARY, PROMPT + FED)


@pytest.fixture(scope="module")
def thresholds(stepper, tokens):
    entropy = take_trace(stepper, [TokenSequence(tokens)]).entropy_nats
    return tuple(float(np.quantile(entropy[:, probe - 1], 0.4)) for probe in PROBES)


def point(thresholds, schedule, **options):
    return OperatingPoint(schedule, "quantile", LAYERS, LAYERS, PROBES, (thresholds,), schedule, **options)


def fed(stepper, chosen, tokens):
    """Return (session, steps) of teacher-forcing all tokens but the last."""
    session, first = WalkedDecoder(stepper, chosen).start([Prompt(tokens[:PROMPT])])
    return session, [first, *(session.feed(token[None, None]) for token in tokens[PROMPT:-1])]


@pytest.mark.parametrize(
    ("schedule", "options"), [("free_eager", {}), ("free_deferred", {}), ("chunked", {"period": 3})]
)
def test_exact_repair_leaves_the_full_models_cache(stepper, thresholds, tokens, schedule, options):
    """A last token at full depth attends to every layer's K/V, so its logits are the full model's at every depth."""
    session, steps = fed(stepper, point(thresholds, schedule, **options), tokens)
    depths = [int(step.depth[0, 0]) for step in steps]
    assert len(set(depths)) > 1
    assert any(a < b for a, b in pairwise(depths)), "depth never rose: nothing was repaired"
    while len(session._trail[0]) < len(tokens) - 1 or (options and (len(session._trail[0]) - PROMPT + 1) % 3):
        tokens = np.concatenate([tokens[:-1], tokens[:1], tokens[-1:]])
        session.feed(tokens[-2][None, None])
    last = session.feed(tokens[-1][None, None], np.array([[LAYERS]]))
    lens = compute_layer_logits(stepper, tokens)
    assert np.abs(last.logits[0, 0] - lens[-1, LAYERS - 1]).max() < EXACT


def test_deferred_fill_runs_what_eager_backfill_runs_but_for_the_tail(stepper, thresholds, tokens):
    eager, _ = fed(stepper, point(thresholds, "free_eager"), tokens)
    deferred, _ = fed(stepper, point(thresholds, "free_deferred"), tokens)
    missing = np.array([len(tokens) - 1 - int(layer.row_lengths[0]) for layer in deferred._store.cache.layers])
    ran = eager.work.tokens + eager.work.fills.sum(axis=0)
    assert (deferred.work.tokens == ran - missing).all()
    assert missing[-1] > 0 or deferred.work.tokens[-1] == ran[-1]
    assert deferred.work.fills.sum() == 0


@pytest.mark.parametrize("schedule", ["free_deferred", "copying", "free_eager"])
def test_rows_of_a_batch_are_the_rows_alone(stepper, thresholds, schedule):
    """Rows stop one after the other inside a step; K/V above an exit belong to the row that stopped."""
    chosen = point(thresholds, schedule)
    prompts = [Prompt(np.array(p)) for p in ([5, 9, 2, 44], [7], [3, 1, 4, 1, 5, 9, 2], [8, 8])]
    together = WalkedDecoder(stepper, chosen, max_rows=4).generate(prompts, 20, frozenset({11}))
    for row, prompt in enumerate(prompts):
        alone = WalkedDecoder(stepper, chosen).generate([prompt], 20, frozenset({11}))
        assert together.emitted[row].tolist() == alone.emitted[0].tolist()


@pytest.mark.parametrize("schedule", ["free_deferred", "copying", "free_eager"])
def test_rollback_restores_what_was_owed(stepper, thresholds, tokens, schedule):
    chosen = point(thresholds, schedule)
    session, _ = fed(stepper, chosen, tokens[:-6])
    length = session.length
    first = [session.feed(token[None, None]).logits for token in tokens[-6:-1]]
    session.rollback(length)
    second = [session.feed(token[None, None]).logits for token in tokens[-6:-1]]
    assert np.abs(np.array(first) - np.array(second)).max() < EXACT


ROWS_OF_DEPTHS = {  # per row, the depths of its last tokens; equally many for all rows of a session
    "one row, one depth": [[3, 3, 3]],
    "one row, falling and rising": [[4, 1, 2, 5, 1]],
    "rows part": [[1, 2, 5], [5, 5, 5], [2, 4, 1]],
}


def stopped_early(stepper, tokens, depths):
    """Return a session of unequal rows whose last tokens stopped at ``depths`` [rows, n], and its histories."""
    chosen, depths = point((-np.inf, -np.inf), "free_deferred"), np.array(depths)
    prompts = [Prompt(tokens[row : 2 * row + 3]) for row in range(len(depths))]
    session, _ = WalkedDecoder(stepper, chosen, max_rows=len(depths)).start(prompts)
    fed = np.array([tokens[-(row + 1) - depths.shape[1] :][: depths.shape[1]] for row in range(len(depths))])
    for column in range(depths.shape[1]):
        session.feed(fed[:, [column]], depths[:, [column]])
    return session, [np.concatenate([p.tokens, new]) for p, new in zip(prompts, fed, strict=True)]


@pytest.mark.parametrize("depths", ROWS_OF_DEPTHS.values(), ids=ROWS_OF_DEPTHS)
@pytest.mark.parametrize("asked", [1, 3])
def test_a_deepened_token_has_the_full_models_logits_and_cache(stepper, tokens, depths, asked):
    """For any depth of each token, and any deferred states before the first requested token."""
    session, histories = stopped_early(stepper, tokens, depths)
    step = session.deepen(session.length - asked)
    assert step.depth.tolist() == [[LAYERS] * asked] * len(depths)
    assert step.signal.shape == (len(depths), asked, len(PROBES))
    assert np.isnan(step.signal).all()
    assert session.cap.tolist() == [LAYERS] * len(depths)
    for row, history in enumerate(histories):
        lens = compute_layer_logits(stepper, history)
        assert np.abs(step.logits[row] - lens[-asked:, LAYERS - 1]).max() < EXACT
        fresh, _ = WalkedDecoder(stepper, full_depth(LAYERS)).start([Prompt(history)])
        for mine, theirs in zip(session._store.cache.layers, fresh._store.cache.layers, strict=True):
            for held, expected in zip(mine.row_kv(row), theirs.row_kv(0), strict=True):
                assert held.shape == expected.shape
                assert float((held - expected).abs().max()) < EXACT
        assert session._trail[row][-asked:] == [LAYERS] * asked
        assert session._trail[row][-len(depths[0]) : -asked] == depths[row][: len(depths[0]) - asked]
        assert not session._store.deferred.waiting[row]


@pytest.mark.parametrize("depths", ROWS_OF_DEPTHS.values(), ids=ROWS_OF_DEPTHS)
def test_deepening_runs_what_each_token_has_not_run_once(stepper, tokens, depths):
    """Padding is executed, so it counts: at a layer all rows with missing tokens are as wide as the widest."""
    session, histories = stopped_early(stepper, tokens, depths)
    before, depths = session.work, np.array(depths)
    session.deepen(session.length - depths.shape[1])
    spent = session.work - before
    for layer in range(1, LAYERS + 1):
        reached = [
            row[: max(np.flatnonzero(row >= layer) + 1, default=0)] for row in depths
        ]  # deepened together with a deeper one
        lacking = np.array([depths.shape[1] - len(run) for run in reached])
        padded = int((lacking > 0).sum() * lacking.max())
        keys = max((len(h) - n for h, n in zip(histories, lacking, strict=True) if n), default=0) + int(lacking.max())
        assert spent.tokens[layer - 1] == padded
        assert spent.context[layer - 1] == padded * keys
    assert spent.readout_rows[FULL].tolist() == [0] * (LAYERS - 1) + [depths.size]
    if len(depths) == 1:
        assert session.work.tokens.tolist() == [len(histories[0])] * LAYERS, "every token ran every layer, once"


def test_after_deepening_a_session_goes_on_as_if_nothing_had_stopped(stepper, tokens):
    session, histories = stopped_early(stepper, tokens, ROWS_OF_DEPTHS["rows part"])
    session.deepen(session.length - 3)
    session.rollback(session.length - np.array([2, 0, 1]))
    fed = np.array([[9, 8], [7, 6], [5, 4]])
    steps = [session.feed(fed[:, [0]], np.full((3, 1), 2)), session.feed(fed[:, [1]], np.full((3, 1), LAYERS))]
    for row, (history, back) in enumerate(zip(histories, (2, 0, 1), strict=True)):
        lens = compute_layer_logits(stepper, np.concatenate([history[: len(history) - back], fed[row]]))
        assert np.abs(steps[0].logits[row, 0] - lens[-2, 1]).max() < EXACT
        assert np.abs(steps[1].logits[row, 0] - lens[-1, LAYERS - 1]).max() < EXACT


def test_what_waits_is_forgotten_with_its_token(stepper, tokens):
    """No output shows a leftover state, because a later token overwrites it; it is a memory leak."""
    session, _ = stopped_early(stepper, tokens, ROWS_OF_DEPTHS["rows part"])
    kept = session.length - np.array([3, 1, 2])
    session.rollback(kept)
    assert [
        max(waiting, default=-1) < held for waiting, held in zip(session._store.deferred.waiting, kept, strict=True)
    ] == [True] * 3
    assert [len(waiting) for waiting in session._store.deferred.waiting] == [0, 2, 1]


def copied_by_hand(stepper, tokens, depths):
    """Return [n, V] logits of each token at its depth if the state at its exit replaces all states above."""
    positions = np.arange(len(tokens))[None]
    below = [[] for _ in range(stepper.layers + 1)]  # input states of each layer, by position
    logits = []
    with torch.inference_mode():
        for t, depth in enumerate(depths):
            inputs = stepper.prepare_forward(positions[:, : t + 1], None)
            embedded = stepper.embed(torch.from_numpy(tokens[None, : t + 1]), inputs)
            state = embedded[0, t]
            for layer in range(1, stepper.layers + 1):
                below[layer].append(state)
                if layer <= depth:
                    state = stepper.run_layers(torch.stack(below[layer])[None], layer - 1, layer, inputs)[0, t]
            logits.append(stepper.logits(state).numpy())
    return np.array(logits)


def test_state_copying_is_what_it_says(stepper, thresholds, tokens):
    session, steps = fed(stepper, point(thresholds, "copying"), tokens)
    depths = [LAYERS] * (PROMPT - 1) + [int(step.depth[0, 0]) for step in steps]
    assert len(set(depths)) > 1
    expected = copied_by_hand(stepper, tokens[:-1], depths)
    seen = np.array([step.logits[0, 0] for step in steps])
    assert np.abs(seen - expected[PROMPT - 1 :]).max() < EXACT
    lens = compute_layer_logits(stepper, tokens[:-1])[np.arange(len(depths)), np.array(depths) - 1]
    assert np.abs(expected - lens).max() > 1e-3, "copied states changed nothing: the oracle has no power here"
    copied = [(LAYERS - np.array(depths[PROMPT - 1 :]) >= LAYERS - layer + 1).sum() for layer in range(1, LAYERS + 1)]
    assert session.work.fills[COPIED].tolist() == copied


def test_state_copying_at_the_last_layer_does_nothing(stepper, tokens):
    never = point((-np.inf, -np.inf), "copying")
    session, steps = fed(stepper, never, tokens)
    lens = compute_layer_logits(stepper, tokens[:-1])
    seen = np.array([step.logits[0, 0] for step in steps])
    assert np.abs(seen - lens[PROMPT - 1 :, -1]).max() < EXACT
    assert session.work.fills.sum() == 0


def test_a_chunk_keeps_the_depth_of_its_first_token(stepper, thresholds, tokens):
    session, steps = fed(stepper, point(thresholds, "chunked", period=5), tokens)
    depths = [int(step.depth[0, 0]) for step in steps]
    assert all(len(set(depths[i : i + 5])) == 1 for i in range(0, len(depths), 5))
    assert len(set(depths)) > 1
    within = len(depths) % 5
    assert within
    held = depths[-within]
    with pytest.raises(InadmissibleDepth, match=f"admits {held} here; under the chunked schedule"):
        session.feed(tokens[:1][None], np.array([[held % LAYERS + 1]]))


def test_position_alone_decides_depth(stepper, tokens):
    falling = OperatingPoint("falls", "positional", LAYERS, LAYERS, (), ((),), "positional", period=10, floor=2)
    session, steps = fed(stepper, falling, tokens)
    depths = [int(step.depth[0, 0]) for step in steps]
    assert depths[:11] == [6, 6, 5, 5, 4, 4, 4, 3, 3, 2, 2]
    assert set(depths[11:]) == {2}
    with pytest.raises(InadmissibleDepth, match="admits 2 here; under the positional schedule"):
        session.feed(tokens[:1][None], np.array([[3]]))
