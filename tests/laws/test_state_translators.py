"""Laws of translated K/V: zero translators copy, the true states are exact, and the ledger charges what runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from emad_ref.calibration.linear_maps import fit_translators
from emad_ref.calibration.trace import compute_sequence_states, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.models.matmul_counter import MatmulCounter
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import StateTranslators, Translator, attach_translators
from emad_ref.protocol import Prompt, Step
from emad_ref.record import FILLS, Work
from emad_ref.replay.losses import decode_losses
from pytest_emad.audit.token_comparison import GoldenTokens, compare_golden, logit_margins, threshold_distances
from pytest_emad.audit.token_comparison import emitted_depths as golden_depths
from pytest_emad.audit.work import ObservedRequest, check_observed_work
from tests.random_translators import FINGERPRINT, attached_translators, drawn_translators
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5, some_sources

pytestmark = pytest.mark.each_value

PROBES, PROMPT, FED = (1, 2, 4), 5, 24
ROUNDING = 1e-9  # float64: the same numbers, computed in a different order
COPIED = FILLS.index("copied")


@cache
def stepper_of(family: str = "llama") -> Stepper:
    return CausalStepper(small_model(family, seed=3))


@cache
def text() -> np.ndarray:
    return np.random.default_rng(7).integers(0, VOCABULARY, PROMPT + FED)


@cache
def copying(family: str = "llama") -> OperatingPoint:
    """Return thresholds that three tokens in ten pass at each probe."""
    entropy = take_trace(stepper_of(family), [TokenSequence(text())]).entropy_nats
    levels = tuple(float(np.quantile(entropy[:, probe - 1], 0.3)) for probe in PROBES)
    return OperatingPoint("copied", "quantile", LAYERS, LAYERS, PROBES, (levels,), "copying")


def translated(digest: str, family: str = "llama") -> OperatingPoint:
    return replace(copying(family), name="translated", schedule="translated", translators=digest)


def fed(stepper: Stepper, point: OperatingPoint, tokens: np.ndarray) -> tuple[list[Step], Work, list[torch.Tensor]]:
    """Return (steps, work, K of every layer) of teacher-forcing all tokens but the last."""
    session, first = WalkedDecoder(stepper, point).start([Prompt(tokens[:PROMPT])])
    steps = [first, *(session.feed(token[None, None]) for token in tokens[PROMPT:-1])]
    keys = [layer.row_kv(0)[0].clone() for layer in session._store.cache.layers]
    return steps, session.work, keys


def depths(steps: list[Step]) -> list[int]:
    return [int(step.depth[0, 0]) for step in steps]


def logits(steps: list[Step]) -> np.ndarray:
    return np.array([step.logits[0, 0] for step in steps])


# ---------------------------------------------------------------- definition


@pytest.mark.parametrize("rank", [0, 4, None])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt_350m"])
def test_zeros_are_copying_bit_for_bit(family: str, rank: int | None) -> None:
    same = attached_translators(stepper_of(family), PROBES, rank, scale=0.0)
    (mine, work, keys), (theirs, others, copies) = (
        fed(stepper_of(family), point, text()) for point in (translated(same, family), copying(family))
    )
    assert depths(mine) == depths(theirs)
    assert len(set(depths(mine))) > 2
    assert np.array_equal(logits(mine), logits(theirs))
    assert all(torch.equal(one, other) for one, other in zip(keys, copies, strict=True))
    assert replace(work, fill_macs=others.fill_macs) == others
    assert work.fill_macs.any() == (rank != 0)


def test_drawn_translators_change_what_later_tokens_see() -> None:
    drawn = attached_translators(stepper_of(), PROBES, 4)
    mine, theirs = (fed(stepper_of(), point, text()) for point in (translated(drawn), copying()))
    first = next(at for at, depth in enumerate(depths(mine[0])) if depth < LAYERS - 1)
    assert np.array_equal(logits(mine[0])[: first + 1], logits(theirs[0])[: first + 1]), "the exit itself is unchanged"
    assert not np.array_equal(logits(mine[0])[first + 1 :], logits(theirs[0])[first + 1 :])


def test_where_nothing_leaves_nothing_is_translated() -> None:
    drawn = attached_translators(stepper_of(), PROBES, 4)
    never = replace(translated(drawn), thresholds=((-np.inf,) * 3,))
    steps, work, _ = fed(stepper_of(), never, text())
    plain, full, _ = fed(stepper_of(), replace(copying(), thresholds=never.thresholds), text())
    assert set(depths(steps)) == {LAYERS}
    assert np.array_equal(logits(steps), logits(plain))
    assert work == full
    assert not work.fill_macs.any()


def test_translators_that_know_the_true_states_are_exact() -> None:
    """One token exits after layer 1, and the biases are its missing change: later logits equal those of exact K/V."""
    stepper, tokens = stepper_of(), text()[: PROMPT + 6]
    states = [state[PROMPT - 1] for state in compute_sequence_states(stepper, tokens[:PROMPT])]
    pairs = {(1, layer): Translator((), states[layer - 1] - states[0]) for layer in range(2, LAYERS)}
    known = attach_translators(stepper, StateTranslators(FINGERPRINT, "float64", LAYERS, pairs), FINGERPRINT)
    forced = np.full((6, 1, 1), LAYERS)
    found = {}
    for name in ("free_eager", "translated", "copying"):
        digest = known if name == "translated" else None
        point = OperatingPoint(name, "test", LAYERS, LAYERS, (1,), ((-np.inf,),), name, translators=digest)  # type: ignore[arg-type]
        session = WalkedDecoder(stepper, point).session(
            WalkedDecoder(stepper, point)._forward, [Prompt(tokens[:1])], 64
        )
        session.feed(tokens[None, : PROMPT - 1], np.full((1, PROMPT - 1), LAYERS))
        session.feed(tokens[None, PROMPT - 1 : PROMPT], np.array([[1]]))
        found[name] = logits([session.feed(t[None, None], d) for t, d in zip(tokens[PROMPT:], forced, strict=True)])
    assert np.abs(found["translated"] - found["free_eager"]).max() < ROUNDING
    assert np.abs(found["copying"] - found["free_eager"]).max() > 1e-3


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("rank", [0, 3, None])
def test_counted_work_is_what_the_depths_imply(rank: int | None) -> None:
    """Each pass above an exit but the first runs its translator before it."""
    stepper, digest = stepper_of(), attached_translators(stepper_of(), PROBES, rank)
    steps, work, _ = fed(stepper, translated(digest), text())
    each = {0: 0, 3: 2 * 32 * 3, None: 32 * 32}[rank]
    expected, fills = np.zeros(LAYERS, dtype=np.int64), np.zeros(LAYERS, dtype=np.int64)
    for depth in depths(steps):
        fills[depth:] += 1
        if depth < LAYERS:
            expected[depth + 1 :] += each
    assert work.fills[COPIED].tolist() == fills.tolist()
    assert work.fill_macs.tolist() == expected.tolist()
    assert fills.any()


@pytest.mark.parametrize("rows", [1, 3])
def test_decoded_losses_charge_each_row_for_its_own(rows: int) -> None:
    stepper, digest = stepper_of(), attached_translators(stepper_of(), PROBES, 3)
    rng = np.random.default_rng(1)
    texts = [
        TokenSequence(rng.integers(0, VOCABULARY, n), at, number)
        for number, (n, at) in enumerate(((20, 4), (26, 0), (15, 4), (9, 2)))
    ]
    point = translated(digest)
    found = decode_losses(stepper, stepper.geometry, texts, [point], rows=rows)
    for row, each in enumerate(texts):
        prompts, decoder = [Prompt(each.tokens[: each.first_decided + 1])], WalkedDecoder(stepper, point)
        session, step = decoder.start(prompts)
        steps = [step, *(session.feed(token[None, None]) for token in each.tokens[each.first_decided + 1 : -1])]
        work = session.work - decoder.prompt_work(prompts)
        assert found.flops[0, row] == flops(work, stepper.geometry).total
        assert found.depth[0, row] == sum(depths(steps))
        targets = each.tokens[each.first_decided + 1 :]
        nll = sum(np.logaddexp.reduce(z) - z[target] for z, target in zip(logits(steps), targets, strict=True))
        assert found.nats[0, row] == pytest.approx(nll, abs=ROUNDING)
        assert work.fill_macs.any()


def test_the_ledger_is_what_torch_counts() -> None:
    """A step that exits after layer 1 under low-rank and full translators: all multiply-adds but attention's."""
    stepper = stepper_of()
    for rank in (3, None):
        point = translated(attached_translators(stepper, PROBES, rank))
        session, _ = WalkedDecoder(stepper, point).start([Prompt(text()[:PROMPT])])
        before = session.work
        with FlopCounterMode(display=False) as counter:
            session.feed(text()[None, PROMPT : PROMPT + 1], np.array([[1]]))
        spent = flops(session.work - before, stepper.geometry)
        assert spent.total - spent.attention == counter.get_total_flops()
        assert spent.fills > 5 * stepper.geometry.kv_fill_flops()


def test_what_is_counted_is_witnessed_and_a_golden_knows_it_again() -> None:
    """Two audits without a lens: observed matrix products, and tokens of an earlier run."""
    model = small_model("llama", seed=3)
    stepper = CausalStepper(model)
    point = translated(attached_translators(stepper, PROBES, 3))
    asked = [Prompt(text()[row : row + 6]) for row in range(3)]
    taken = {}
    for name, each in (("translated", point), ("again", point), ("copied", copying())):
        decoder = WalkedDecoder(stepper, each, max_rows=3)
        with MatmulCounter(model) as executed:
            record = decoder.generate(asked, 20, frozenset())
        assert record.work is not None
        assert check_observed_work([ObservedRequest(asked, executed.rows_by_matrix(), record.work[0])]).passed is True
        assert record.work[0].fills[COPIED].any()
        shown = logit_margins(decoder, asked, record.emitted)
        taken[name] = GoldenTokens(
            np.stack(record.emitted), golden_depths(record), shown, threshold_distances(record, each)
        )
    assert compare_golden(taken["translated"], taken["again"], ROUNDING).passed is True
    assert compare_golden(taken["translated"], taken["copied"], ROUNDING).passed is False


# ---------------------------------------------------------------- sessions, batches, encoder-decoders


def test_rollback_restores_and_rows_of_a_batch_are_the_rows_alone() -> None:
    stepper, point = stepper_of(), translated(attached_translators(stepper_of(), PROBES, 3))
    session, _ = WalkedDecoder(stepper, point).start([Prompt(text()[:PROMPT])])
    for token in text()[PROMPT:-6]:
        session.feed(token[None, None])
    length = session.length
    first = logits([session.feed(token[None, None]) for token in text()[-6:-1]])
    session.rollback(length)
    session.commit(session.length)
    assert np.array_equal(first, logits([session.feed(token[None, None]) for token in text()[-6:-1]]))
    prompts = [Prompt(np.array(p)) for p in ([5, 9, 2, 44], [7], [3, 1, 4, 1, 5, 9, 2], [8, 8])]
    together = WalkedDecoder(stepper, point, max_rows=4).generate(prompts, 20, frozenset({11}))
    for row, prompt in enumerate(prompts):
        alone = WalkedDecoder(stepper, point).generate([prompt], 20, frozenset({11}))
        assert together.emitted[row].tolist() == alone.emitted[0].tolist()
    assert len(set(together.tokens.depth.tolist())) > 2


def test_a_row_that_is_dropped_takes_nothing_with_it() -> None:
    stepper, point = stepper_of(), translated(attached_translators(stepper_of(), PROBES, 3))
    prompts = [Prompt(text()[:3]), Prompt(text()[3:9]), Prompt(text()[9:11])]
    deep = np.array([[1, 4, 2], [2, 6, 1], [6, 1, 6], [1, 6, 6]])
    session, _ = WalkedDecoder(stepper, point, max_rows=3).start(prompts)
    for step in range(2):
        session.feed(text()[None, step].repeat(3)[:, None], deep[step][:, None])
    session.drop(np.array([1]))
    seen = [session.feed(text()[None, step].repeat(2)[:, None], deep[step][[0, 2], None]) for step in (2, 3)]
    for row, original in enumerate((0, 2)):
        alone, _ = WalkedDecoder(stepper, point).start([prompts[original]])
        steps = [alone.feed(text()[None, [step]], deep[step][[original], None]) for step in range(4)]
        both = np.abs(np.array([step.logits[row] for step in seen]) - np.array([step.logits[0] for step in steps[2:]]))
        assert both.max() < ROUNDING


@contextmanager
def small_seq2seq() -> Iterator[tuple[Seq2SeqStepper, list[TokenSequence], OperatingPoint]]:
    stepper, rng = Seq2SeqStepper(small_t5()), np.random.default_rng(2)
    pairs = [
        TokenSequence(rng.integers(2, VOCABULARY, n), 0, source=source)
        for n, source in zip((12, 14), some_sources(5, 9), strict=True)
    ]
    trace, probes = take_trace(stepper, pairs), (1, 2)
    levels = tuple(float(np.quantile(trace.entropy_nats[:, probe - 1], 0.4)) for probe in probes)
    yield stepper, pairs, OperatingPoint("t5", "quantile", stepper.layers, stepper.layers, probes, (levels,), "copying")


def test_an_encoder_decoder_translates_its_own_positions_and_nothing_of_the_source() -> None:
    with small_seq2seq() as (stepper, pairs, copied):
        drawn = attached_translators(stepper, (1, 2), 3)
        zeros = attached_translators(stepper, (1, 2), 3, scale=0.0)
        points = [replace(copied, schedule="translated", translators=digest) for digest in (zeros, drawn)]
        losses = decode_losses(stepper, stepper.geometry, pairs, [copied, *points])
        assert np.array_equal(losses.nats[0], losses.nats[1])
        assert np.abs(losses.nats[0] - losses.nats[2]).max() > 1e-3
        counted = {}
        for name, point in (("copied", copied), ("zeros", points[0])):
            decoder = WalkedDecoder(stepper, point)
            session, step = decoder.start([Prompt(pairs[0].tokens[:1], pairs[0].source)])
            steps = [step, *(session.feed(token[None, None]) for token in pairs[0].tokens[1:-1])]
            counted[name] = session.work
        assert counted["zeros"].cross_fills.tolist() == counted["copied"].cross_fills.tolist()
        assert counted["zeros"].cross_context.tolist() == counted["copied"].cross_context.tolist()
        assert counted["zeros"].fill_macs.any()
        assert len(set(depths(steps))) > 1


# ---------------------------------------------------------------- fit


@pytest.mark.parametrize("rank", [0, 2, 32, None])
def test_a_fit_finds_what_is_there(rank: int | None) -> None:
    """On states of the decoded text itself: at each rank they come closer to the true ones, and so does the cache."""
    stepper = stepper_of()
    read = [TokenSequence(text())]
    fitted = fit_translators(stepper, FINGERPRINT, read, PROBES, rank, tokens=100, penalty=1e-9)
    states = [state[:-1] for state in compute_sequence_states(stepper, text())]
    for (exit_, layer), translator in fitted.pairs.items():
        left, true = states[exit_ - 1], states[layer - 1]
        error = float(((translator(left) - true) ** 2).sum())
        assert error < float(((left - true) ** 2).sum())
        if rank in (32, None):  # as many directions as there are, so that every token is exact
            assert error < 1e-6


def test_losses_fall_with_the_rank_on_the_text_that_was_fitted() -> None:
    stepper, read = stepper_of(), [TokenSequence(text())]
    full = decode_losses(stepper, stepper.geometry, read, [replace(copying(), schedule="free_eager")])
    keys = fed(stepper, replace(copying(), schedule="free_eager"), text())[2]
    gaps = []
    for rank in (0, 8, 32):
        fitted = fit_translators(stepper, FINGERPRINT, read, PROBES, rank, tokens=100, penalty=1e-9)
        digest = attach_translators(stepper, fitted, FINGERPRINT)
        mine = fed(stepper, translated(digest), text())[2]
        gaps.append(max(float((one - other).abs().max()) for one, other in zip(mine, keys, strict=True)))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-3
    found = decode_losses(stepper, stepper.geometry, read, [translated(digest)])
    assert found.nats == pytest.approx(full.nats, abs=1e-3)
    assert drawn_translators(stepper, PROBES, 32).rank == fitted.rank
