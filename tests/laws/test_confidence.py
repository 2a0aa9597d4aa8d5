"""Laws of the confidence rules, on a decoder-only model and on T5's decoder.

The tests write the papers' formulas once more in NumPy, on the full model's own states. The reference decoder must take
the same depths and emit the same tokens, and PyTorch's FLOP counter must agree with its work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.teacher_forcing import teacher_force
from emad_ref.exit_rules import early_exit_point
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import DECAY_FORMS, OperatingPoint, ScheduleName, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, READOUTS, Floats, Ints, Record
from emad_ref.replay.replay import replay
from tests.flop_counter import counted
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5, some_sources

pytestmark = pytest.mark.each_value

FULL, SUBSET = READOUTS.index("full"), READOUTS.index("subset")
MINIMUM, NEW = 2, 10
ROUNDED = 1e-6  # T5's norm takes its mean in float32, over batches of another shape


def rule(signal: str, **changes: Any) -> OperatingPoint:
    """Return a rule that starts at layer 2 of 6 and never fires; ``changes``: fields of its confidence."""
    point = early_exit_point(
        signal, LAYERS, VOCABULARY, MINIMUM, 2.0, pruning="adaptive" if "shrink" in changes else "none"
    )
    if "kept" in changes:
        point = early_exit_point(signal, LAYERS, VOCABULARY, MINIMUM, 2.0, pruning="adaptive")
        changes = {"shrink": None, **changes}
    return replace(point, confidence=replace(point.confidence, **changes)) if changes else point


RULES: dict[str, OperatingPoint] = {
    "response": rule("softmax_response"),
    "saturation": rule("saturation"),
    "weighted": rule("weighted_contrast"),
    "jsd": rule("jsd_contrast"),
    "jsd decaying alpha": rule("jsd_contrast", alpha_decay=0.5),
    "jsd rescaled": rule("jsd_contrast", emit="expert", rescale=True),
    "fixed": rule("softmax_response", kept=(20, 20, 20)),
    "decaying": rule("softmax_response", kept=(40, 12, 3)),
    "adaptive": rule("softmax_response", shrink=0.9),
    "jsd fixed": rule("jsd_contrast", kept=(8, 8, 8), alpha=0.0),
    "jsd adaptive": rule("jsd_contrast", shrink=0.9),
}
STEPPERS: dict[str, Callable[[], Stepper]] = {
    "gpt_neox": lambda: CausalStepper(small_model("gpt_neox")),
    "t5": lambda: Seq2SeqStepper(small_t5()),
}


@pytest.fixture(scope="module", params=STEPPERS)
def stepper(request: pytest.FixtureRequest) -> Stepper:
    return STEPPERS[request.param]()


@pytest.fixture(params=RULES)
def named(request: pytest.FixtureRequest) -> str:
    return request.param


def prompts(stepper: Stepper) -> list[Prompt]:
    sources = some_sources(9, 4) if isinstance(stepper, Seq2SeqStepper) else [None] * 2
    tokens = ([5, 9, 2, 44], [7])
    return [Prompt(np.array(row), source) for row, source in zip(tokens, sources, strict=True)]


def generate(stepper: Stepper, point: OperatingPoint, given: list[Prompt] | None = None, new: int = NEW) -> Record:
    chosen = prompts(stepper) if given is None else given
    return WalkedDecoder(stepper, point, max_rows=len(chosen)).generate(chosen, new, frozenset())


@cache  # cached: several laws use the same points
def firing(stepper: Stepper, point: OperatingPoint, quantile: float = 0.7) -> OperatingPoint:
    """Return ``point`` with thresholds that about three in ten tokens pass at each probe."""
    signal = generate(stepper, replace(point, schedule="free_eager")).signal
    levels = [np.nanquantile(column, quantile) if np.isfinite(column).any() else np.inf for column in signal.T]
    row = tuple(
        float(level) if old < np.inf else np.inf for level, old in zip(levels, point.thresholds[0], strict=True)
    )
    return replace(point, thresholds=(row,))


# ---------------------------------------------------------------- the papers' formulas in NumPy


def softmax(z: Floats) -> Floats:
    e = np.exp(z - z.max())
    return e / e.sum()


def gap(p: Floats) -> float:
    return float(np.sort(p)[-1] - np.sort(p)[-2])


def divergence(p: Floats, q: Floats) -> float:
    m = (p + q) / 2
    return float((p * np.log(p / m)).sum() + (q * np.log(q / m)).sum()) / 2


def p_dcd(point: OperatingPoint, layer: int, p: Floats, q: Floats) -> Floats:
    """Return the contrastive score of expert p against amateur q."""
    said = point.confidence
    assert said is not None
    rate = said.alpha_decay
    alpha = said.alpha if rate is None else said.alpha / (1 + rate * layer) * (1 - gap(p))
    head, score = p >= alpha * p.max(), p.copy()
    ratio = p[head] / q[head]
    score[head] = ratio / ratio.sum() * (p[head].sum() if said.rescale else 1)
    return score


def written_out(
    point: OperatingPoint, z: Floats, h: Floats, cap: int, decided: int | None = None
) -> tuple[int, Floats, list[float]]:
    """Return (depth, emitted scores [V], signal per probe) of one token, from logits z [L, V] and states h [L, D].

    ``decided``: index of the token among the decided ones, by which thresholds fall; None: they do not.
    """
    said, signals = point.confidence, [np.nan] * len(point.probes)
    tokens, last = np.arange(z.shape[1]), np.nan
    for number, layer in enumerate(point.probes):
        if layer > cap:
            break
        if said is not None and said.prunes_vocabulary and layer > MINIMUM:
            k = said.kept[layer - MINIMUM - 1] if said.kept else int(np.floor(z.shape[1] * (1 - said.shrink * last)))
            tokens = tokens[np.argsort(-z[layer - 2, tokens], kind="stable")[:k]]
        p = {m: softmax(z[m - 1, tokens]) for m in range(1, layer + 1)}
        score = p[layer]
        if point.signal == "softmax_response":
            signals[number] = gap(score)
        elif point.signal == "saturation" and layer > 1:
            here, below = h[layer - 1], h[layer - 2]
            signals[number] = float(here @ below / np.sqrt((here @ here) * (below @ below)))
        elif point.signal == "weighted_contrast" and layer >= MINIMUM:
            score = p_dcd(point, layer, p[layer], p[layer // 2])
            signals[number] = gap(score)
        elif point.signal == "jsd_contrast" and layer > MINIMUM:
            m = max(range(MINIMUM, layer), key=lambda m: divergence(p[layer], p[m]) / (layer - m))
            score = p_dcd(point, layer, p[layer], p[m])
            signals[number] = gap(score)
        last = gap(p[layer]) if np.isnan(signals[number]) else signals[number]
        threshold = point.thresholds[0][number]
        if decided is not None and point.decay is not None:
            left = math.exp(-point.decay[0] * decided / point.decay[1])
            threshold = {"free": threshold * (0.9 + 0.1 * left), "calm": 0.9 * threshold + 0.1 * left}[point.decay_form]
        if signals[number] >= np.float32(threshold) or layer == cap:
            emitted = np.zeros(z.shape[1])
            emitted[tokens] = p[layer] if said is not None and said.emit == "expert" else score
            return layer, emitted, signals
    return cap, softmax(z[cap - 1]), signals


@torch.inference_mode()
def own_states(stepper: Stepper, prompt: Prompt, history: Ints) -> tuple[Floats, Floats]:
    """Return (logits [n, L, V], states [n, L, D]) of the full model after every layer, in one pass."""
    cache = stepper.open_cache([prompt.source])
    inputs = stepper.prepare_forward(np.arange(len(history))[None], cache)
    hidden, states = stepper.embed(torch.from_numpy(history)[None], inputs), []
    for layer in range(1, LAYERS + 1):
        hidden = stepper.run_layers(hidden, layer - 1, layer, inputs)
        states.append(hidden[0])
    stacked = torch.stack(states, dim=1)
    return stepper.logits(stacked).numpy(), stacked.numpy()


@pytest.mark.parametrize("schedule", ["monotone", "free_deferred"])
def test_our_decoder_does_what_the_papers_write(stepper: Stepper, named: str, schedule: ScheduleName) -> None:
    point = replace(firing(stepper, RULES[named]), schedule=schedule)
    record, given = generate(stepper, point), prompts(stepper)
    depths = set()
    for row, prompt in enumerate(given):
        decided = record.tokens.select_sequence(row, DECODE)
        signal = record.signal[(record.tokens.sequence == row) & (record.tokens.phase == DECODE)]
        history = np.concatenate([prompt.tokens, record.emitted[row][:-1]])
        logits, states = own_states(stepper, prompt, history)
        for at, token in enumerate(record.emitted[row]):
            position = len(prompt.tokens) - 1 + at
            cap = int(decided.cap[at])
            depth, emitted, signals = written_out(point, logits[position], states[position], cap)
            assert (int(decided.depth[at]), int(token)) == (depth, int(emitted.argmax()))
            assert np.allclose(signal[at], signals, atol=ROUNDED, equal_nan=True)
            depths.add(depth)
    assert min(depths) < LAYERS
    if schedule == "free_deferred":  # under the monotone schedule the first token may decide for all
        assert len(depths) > 1, "the point must discriminate"


def test_the_distribution_at_the_exit_is_the_rules_own(stepper: Stepper, named: str) -> None:
    """Not only the argmax: pruned tokens have no probability, and a contrast is emitted as compared."""
    point = replace(firing(stepper, RULES[named]), schedule="free_eager")
    prompt, history = prompts(stepper)[0], np.array([5, 9, 2, 44, 17, 3, 80, 61, 5, 33, 2, 90])
    logits, states = own_states(stepper, prompt, history)
    session, step = WalkedDecoder(stepper, point).start([prompt])
    shallow = 0
    for position in range(3, len(history)):
        depth, emitted, _ = written_out(point, logits[position], states[position], LAYERS)
        assert int(step.depth[0, 0]) == depth
        assert np.abs(softmax(step.logits[0, 0]) - emitted / emitted.sum()).max() < ROUNDED
        shallow += depth < LAYERS
        if position + 1 < len(history):
            step = session.feed(history[position + 1][None, None])
    assert shallow > 0


# ---------------------------------------------------------------- thresholds that decay


RATE = (50.0, 40)  # constant of the decay: nearly all of it falls within the first ten of forty tokens
OF_FIRST_SIGNAL = {"free": 1.05, "calm": 1.0}  # thresholds by the first token's signals: CALM's form starts above them


@pytest.mark.parametrize("form", DECAY_FORMS)
@pytest.mark.parametrize("name", ["response", "jsd", "fixed"])
def test_thresholds_decay_with_the_decided_tokens(stepper: Stepper, name: str, form: str) -> None:
    """The prompt's last position is the first decided one, with no decay for any prompt length.

    Its signals do not reach the thresholds there; later ones do, after some decay.
    """
    prompt = prompts(stepper)[0]
    first = len(prompt.tokens) - 1
    history = np.concatenate([prompt.tokens, np.random.default_rng(4).integers(2, VOCABULARY, 40)])
    logits, states = own_states(stepper, prompt, history)
    never = replace(RULES[name], schedule="free_eager")
    read = np.array([written_out(never, logits[at], states[at], LAYERS)[2] for at in range(first, len(history))])
    levels = tuple(np.inf if np.isnan(level) else OF_FIRST_SIGNAL[form] * float(level) for level in read[0])
    point, changed = replace(never, thresholds=(levels,), decay=RATE, decay_form=form), 0
    assert written_out(point, logits[first], states[first], LAYERS, 0)[0] == LAYERS
    session, step = WalkedDecoder(stepper, point).start([prompt])
    for decided, at in enumerate(range(first, len(history))):
        expected = written_out(point, logits[at], states[at], LAYERS, decided)[0]
        assert int(step.depth[0, 0]) == expected
        changed += expected != written_out(point, logits[at], states[at], LAYERS)[0]
        if at + 1 < len(history):
            step = session.feed(history[at + 1][None, None])
    assert changed > 0, "the decay must matter"


@pytest.mark.parametrize("form", DECAY_FORMS)
def test_replay_decays_thresholds_as_decoding_does(form: str) -> None:
    stepper = STEPPERS["gpt_neox"]()
    rng = np.random.default_rng(0)
    sequences = [TokenSequence(rng.integers(0, VOCABULARY, n), start) for n, start in ((24, 0), (30, 7))]
    decaying = replace(RULES["response"], schedule="free_eager", decay=RATE, decay_form=form)
    trace, never = take_trace(stepper, sequences), decaying
    first = trace.signals["softmax_response"][trace.starts[1], np.array(never.probes) - 1]  # as in the law above
    point = replace(never, thresholds=(tuple(1.05 * float(level) for level in first),))
    decoded = [teacher_force(WalkedDecoder(stepper, point), sequence).depth for sequence in sequences]
    assert replay(trace, point).depth.tolist() == np.concatenate(decoded).tolist()
    for other in (replace(point, decay=None, decay_form="free"), replace(point, decay_form=another_form(form))):
        assert replay(trace, other).depth.tolist() != replay(trace, point).depth.tolist(), other.decay_form


def another_form(form: str) -> str:
    return next(name for name in DECAY_FORMS if name != form)


# ---------------------------------------------------------------- rows of forced depth


def test_a_row_told_to_stop_where_nothing_is_read_takes_its_memory_along(stepper: Stepper) -> None:
    """The weighted rule from layer 4 on reads layers 2, 4 and 5; the row of cap 3 leaves in between."""
    point = early_exit_point("weighted_contrast", LAYERS, VOCABULARY, 4, 2.0, schedule="monotone")
    together, _ = WalkedDecoder(stepper, point, max_rows=2).start(prompts(stepper))
    together.feed(np.array([[8], [9]]), np.array([[3], [LAYERS]]))
    alone, _ = WalkedDecoder(stepper, point).start(prompts(stepper)[1:])
    alone.feed(np.array([[9]]))
    mine, theirs = together.feed(np.array([[6], [7]])), alone.feed(np.array([[7]]))
    assert mine.depth[:, 0].tolist() == [3, LAYERS]
    assert np.allclose(mine.signal[1], theirs.signal[0], atol=ROUNDED, equal_nan=True)


# ---------------------------------------------------------------- limits of the rules


def test_a_rule_that_never_fires_is_full_depth_token_for_token(stepper: Stepper, named: str) -> None:
    """The thresholds are 2.0; no confidence exceeds 1."""
    record, full = generate(stepper, RULES[named]), generate(stepper, full_depth(LAYERS))
    assert [tokens.tolist() for tokens in record.emitted] == [tokens.tolist() for tokens in full.emitted]
    assert set(record.tokens.depth.tolist()) == {LAYERS}


@pytest.mark.parametrize("signal", ["softmax_response", "jsd_contrast"])
@pytest.mark.parametrize("whole", [{"kept": (VOCABULARY,) * 3}, {"kept": (10**6,) * 3}, {"shrink": 0.0}], ids=str)
def test_keeping_every_token_is_not_pruning(stepper: Stepper, signal: str, whole: dict[str, Any]) -> None:
    unpruned = firing(stepper, rule(signal))
    pruned = replace(rule(signal, **whole), thresholds=unpruned.thresholds)
    mine, theirs = generate(stepper, pruned), generate(stepper, unpruned)
    assert [tokens.tolist() for tokens in mine.emitted] == [tokens.tolist() for tokens in theirs.emitted]
    assert mine.tokens.depth.tolist() == theirs.tokens.depth.tolist()
    assert len(set(mine.tokens.depth.tolist())) > 1
    assert flops(mine.work[0], stepper.geometry).total == flops(theirs.work[0], stepper.geometry).total


def test_rows_of_a_batch_are_the_rows_alone(stepper: Stepper, named: str) -> None:
    point = firing(stepper, RULES[named])
    together = generate(stepper, point)
    for row, prompt in enumerate(prompts(stepper)):
        alone = generate(stepper, point, [prompt])
        assert together.emitted[row].tolist() == alone.emitted[0].tolist()
        assert (
            together.tokens.select_sequence(row, DECODE).depth.tolist()
            == alone.tokens.select_sequence(0, DECODE).depth.tolist()
        )


# ---------------------------------------------------------------- the ledger


def test_everything_executed_is_charged_and_nothing_else(stepper: Stepper, named: str) -> None:
    point = firing(stepper, RULES[named])
    records: list[Record] = []
    theirs = counted(lambda: records.append(generate(stepper, point, new=4)))
    work = records[0].work[0]
    assert flops(work, stepper.geometry).total == theirs
    if point.confidence is not None and point.confidence.prunes_vocabulary:
        assert work.readout_rows[SUBSET, MINIMUM:-1].sum() == work.readout_rows[SUBSET].sum() > 0
        assert work.readout_rows[FULL, MINIMUM:-1].sum() == 0, "one full head after j, one at the top"


def test_full_heads_below_the_minimum_layer_are_charged(stepper: Stepper) -> None:
    """The weighted rule from layer 4 on must read layer 2: two in five of its heads decide nothing."""
    point = early_exit_point("weighted_contrast", LAYERS, VOCABULARY, 4, 2.0)
    record = generate(stepper, point)
    assert point.probes == (2, 4, 5)
    assert record.work[0].readout_rows[FULL].tolist() == [0, 2 * NEW, 0, 2 * NEW, 2 * NEW, 2 * NEW]


def test_pruning_pays_by_the_share_it_keeps(stepper: Stepper) -> None:
    """Heads of one token that never exits: one at j, three pruned, one at the top; unpruned, five full ones."""
    costs = {
        name: sum(flops(generate(stepper, RULES[name]).work[0], stepper.geometry).readouts.values())
        for name in ("response", "fixed")
    }
    assert costs["fixed"] / costs["response"] == pytest.approx((2 + 3 * 20 / VOCABULARY) / 5)
