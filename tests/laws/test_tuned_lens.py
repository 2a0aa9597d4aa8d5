"""Laws of the tuned lens: identity is the raw lens, the last layer stays, decoding equals replay, FLOPs are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import drafting_point, self_speculate
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import early_exit_point
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec, full_depth, truncated
from emad_ref.probes.probe import make_probe
from emad_ref.probes.tuned_lens import Translator, TunedLens, attach_lens, get_attached_lens
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, DRAFT, READOUTS, Ints, Work
from emad_ref.replay.replay import compute_decode_flops_by_sequence, compute_decode_work, replay
from emad_ref.signals import SIGNALS
from tests.plain_forms import decode_and_prompt_work
from tests.random_lenses import FINGERPRINT, attached, drawn_lens
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5, some_sources

PROBES = (1, 3, 4)
BELOW = tuple(range(1, LAYERS))
FULL = READOUTS.index("full")
STORED = 1e-5  # traces hold float32
WEIGHTS = np.random.default_rng(3).normal(0, 0.3, (3, 33)).tolist()
GATE = EntropyEstimator("linear", weights=tuple(tuple(row) for row in WEIGHTS))


@cache
def stepper_of(family: str = "gpt_neox", dtype: torch.dtype = torch.float64) -> Stepper:
    return CausalStepper(small_model(family, dtype))


@cache
def texts() -> tuple[TokenSequence, ...]:
    rng = np.random.default_rng(1)
    return tuple(TokenSequence(rng.integers(0, VOCABULARY, n), at) for n, at in ((30, 0), (24, 5), (17, 3)))


@cache
def digest(rank: int | None = 5) -> str:
    return attached(stepper_of(), BELOW, rank)


SATURATED = early_exit_point("saturation", LAYERS, VOCABULARY, 2, schedule="monotone")


@cache
def traced(lens: str | None) -> Trace:
    rules = [replace(SATURATED, lens=lens)]
    return take_trace(stepper_of(), texts(), estimators={GATE: PROBES}, rules=rules, lens=lens)


def point_of(trace: Trace, share: float = 0.25, **change: object) -> OperatingPoint:
    """Return thresholds that a share of tokens pass at each probe, as read through the trace's lens."""
    plain = OperatingPoint("tuned", "quantile", LAYERS, LAYERS, PROBES, ((0.0,) * 3,), lens=trace.lens)
    asked = replace(plain, **change)  # type: ignore[arg-type]
    level = share if SIGNALS[asked.signal].sense == "falls" else 1 - share
    seen = trace.rule_signal(replace(asked, bins=ThresholdBinSpec(), thresholds=((0.0,) * 3,)))
    thresholds = tuple(float(np.quantile(seen[:, probe - 1], level)) for probe in PROBES)
    return replace(asked, thresholds=(thresholds,) * asked.bins.bin_count)


def saturated(**change: object) -> OperatingPoint:
    """Return cosines that a quarter of all tokens reach at each layer that has a layer below."""
    point = replace(SATURATED, lens=digest(), **change)  # type: ignore[arg-type]
    seen = traced(point.lens).rule_signal(point)
    levels = tuple(float(np.quantile(seen[:, probe - 1], 0.75)) for probe in point.probes[1:])
    return replace(point, thresholds=((np.inf, *levels),))


def agreeing(**change: object) -> OperatingPoint:
    """Exit wherever two probes agree; random readouts seldom agree."""
    return replace(point_of(traced(digest()), signal="agreement", **change), thresholds=((1e-6,) * 3,))


CONFIDENT = ThresholdBinSpec(("top1_probability",), top1_probability_edges=(0.1, 0.2))
POINTS: dict[str, Callable[[], OperatingPoint]] = {
    "monotone": lambda: point_of(traced(digest())),
    "full rank": lambda: point_of(traced(digest(None))),
    "response": lambda: point_of(traced(digest()), signal="softmax_response"),
    "free": lambda: point_of(traced(digest()), schedule="free_eager"),
    "deferred": lambda: point_of(traced(digest()), schedule="free_deferred"),
    "chunked": lambda: point_of(traced(digest()), schedule="chunked", period=4),
    "between probes": lambda: point_of(traced(digest()), interpolate=True),
    "bins": lambda: replace(
        point_of(traced(digest())), bins=CONFIDENT, thresholds=((-1.0,) * 3, (0.5, 3.0, 4.0), (9.0, 9.0, 9.0))
    ),
    "linear probe": lambda: point_of(traced(digest()), estimator=GATE),
    "gate": lambda: point_of(traced(digest()), estimator=GATE, signal="divergence", schedule="free_eager"),
    "agreement": lambda: agreeing(schedule="free_eager"),
    "monotone agreement": agreeing,
    "saturation": saturated,
    "free saturation": lambda: saturated(schedule="free_eager"),
    "truncated": lambda: replace(truncated(LAYERS, 3), lens=digest()),
    "positional": lambda: OperatingPoint(
        "falls", "positional", LAYERS, LAYERS, schedule="positional", period=12, floor=2, lens=digest()
    ),
}


@pytest.fixture(params=POINTS)
def point(request: pytest.FixtureRequest) -> OperatingPoint:
    return POINTS[request.param]()


def decoded(point: OperatingPoint, text: TokenSequence, stepper: Stepper) -> tuple[list[int], np.ndarray, Work]:
    """Return (depths, logits [n, V], work) of one text fed token by token."""
    start = text.first_decided
    session, step = WalkedDecoder(stepper, point).start([Prompt(text.tokens[: start + 1])])
    depths, logits = [int(step.depth[0, 0])], [step.logits[0, 0]]
    for token in text.tokens[start + 1 : -1]:
        step = session.feed(np.array([[token]]))
        depths.append(int(step.depth[0, 0]))
        logits.append(step.logits[0, 0])
    return depths, np.stack(logits), session.work


# ---------------------------------------------------------------- definition


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_identity_is_the_raw_lens_bit_for_bit(dtype: torch.dtype, rank: int | None) -> None:
    stepper = stepper_of("llama", dtype)
    same = attached(stepper, BELOW, rank, scale=0.0)
    raw, tuned = take_trace(stepper, texts()), take_trace(stepper, texts(), lens=same)
    for name in ("nll_nats", "top1", "top1_probability"):
        assert np.array_equal(getattr(raw, name), getattr(tuned, name)), name
    assert all(
        np.array_equal(raw.signal_at_every_layer(name), tuned.signal_at_every_layer(name)) for name in raw.signals
    )
    plain = point_of(raw)
    for text in texts():
        depths, logits, _ = decoded(plain, text, stepper)
        theirs, others, _ = decoded(replace(plain, lens=same), text, stepper)
        assert depths == theirs
        assert np.array_equal(logits, others)


def test_a_drawn_lens_changes_every_layer_but_the_last() -> None:
    raw, tuned = traced(None), traced(digest())
    differ = [not np.array_equal(raw.nll_nats[:, at], tuned.nll_nats[:, at]) for at in range(LAYERS)]
    assert differ == [True] * (LAYERS - 1) + [False]
    assert np.array_equal(raw.entropy_nats[:, -1], tuned.entropy_nats[:, -1])


def test_at_the_last_layer_nothing_changes() -> None:
    """A point at full depth, and one whose rule never fires: the model's own head's logits, bit for bit."""
    never = replace(point_of(traced(digest())), thresholds=((-np.inf,) * 3,))
    for text in texts():
        _, plain, work = decoded(full_depth(LAYERS), text, stepper_of())
        _, full, same_work = decoded(replace(full_depth(LAYERS), lens=digest()), text, stepper_of())
        depths, asked, _ = decoded(never, text, stepper_of())
        assert set(depths) == {LAYERS}
        assert np.array_equal(full, plain)
        assert np.array_equal(asked, plain)
        assert same_work == work


def test_low_rank_at_full_rank_is_full() -> None:
    stepper = stepper_of()
    full = drawn_lens(stepper, BELOW)
    left, right = {}, {}
    for layer, each in full.translators.items():
        u, s, v = torch.linalg.svd(each.factors[0])
        left[layer] = Translator((u * s, v.T.contiguous()), each.bias)
        right[layer] = Translator((each.factors[0], torch.eye(len(each.bias), dtype=torch.float64)), each.bias)
    hidden = torch.randn(7, stepper.geometry.hidden, dtype=torch.float64)
    for layer in BELOW:
        expected = full(hidden, layer)
        assert torch.allclose(left[layer](hidden), expected, rtol=0, atol=1e-12)  # float64 sums in another order
        assert torch.equal(right[layer](hidden), expected)
    assert TunedLens("f", "float64", LAYERS, left).rank == stepper.geometry.hidden


def test_it_is_the_formula() -> None:
    lens, hidden = drawn_lens(stepper_of(), BELOW, 3), np.random.default_rng(0).normal(size=(4, 32))
    for layer, each in lens.translators.items():
        u, v = (factor.numpy() for factor in each.factors)
        expected = hidden + hidden @ (u @ v.T).T + each.bias.numpy()
        assert np.abs(lens(torch.from_numpy(hidden), layer).numpy() - expected).max() < 1e-12


# ---------------------------------------------------------------- decoding equals replay


def test_points_reach_several_depths(point: OperatingPoint) -> None:
    reached = set(replay(traced(point.lens), point).depth.tolist())
    assert len(reached) > 1 or point.family == "truncation"
    assert reached != {LAYERS}


def test_decoding_is_replay_token_by_token(point: OperatingPoint) -> None:
    trace = traced(point.lens)
    expected = replay(trace, point)
    for number, text in enumerate(texts()):
        rows = slice(trace.starts[number], trace.starts[number + 1])
        depths, logits, _ = decoded(point, text, stepper_of())
        assert depths == expected.depth[rows].tolist()
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        losses = -log_p[np.arange(len(log_p)), text.tokens[text.first_decided + 1 :]]
        assert np.abs(losses - expected.nll_nats[rows]).max() < STORED


def test_derived_work_is_counted_work_and_its_flops(point: OperatingPoint) -> None:
    trace, geometry = traced(point.lens), stepper_of().geometry
    expected = replay(trace, point)
    decode, prompt = decode_and_prompt_work(trace, point, expected.depth, expected.macs_per_row)
    counted = Work.none(LAYERS)
    for text in texts():
        counted = counted + decoded(point, text, stepper_of())[2]
    assert counted == decode + prompt, counted.describe_difference(decode + prompt)
    assert compute_decode_flops_by_sequence(trace, expected, geometry).sum() == flops(decode, geometry).total


def test_generate_emits_through_the_lens(point: OperatingPoint) -> None:
    prompt = np.array([5, 9, 2, 44])
    record = WalkedDecoder(stepper_of(), point, max_rows=2).generate([Prompt(prompt), Prompt(prompt[:2])], 20)
    for row, asked in enumerate((prompt, prompt[:2])):
        history = np.concatenate([asked, record.emitted[row]])
        seen = take_trace(
            stepper_of(),
            [TokenSequence(history, len(asked) - 1)],
            estimators={GATE: PROBES},
            rules=[] if point.confidence is None else [point],
            lens=point.lens,
        )
        expected = replay(seen, point)
        assert record.tokens.select_sequence(row, DECODE).depth.tolist() == expected.depth.tolist()
        assert expected.top1.tolist() == record.emitted[row].tolist()


@pytest.mark.parametrize("exit_layer", [1, 3])
def test_drafts_through_a_lens_leave_the_models_own_output(exit_layer: int) -> None:
    """Drafts come from the lens, output from the model; the head of a draft row is charged for the translator."""
    stepper, prompts = stepper_of(), [Prompt(np.array([5, 9, 2, 44])), Prompt(np.array([7]))]
    own = WalkedDecoder(stepper, full_depth(LAYERS), max_rows=2).generate(prompts, 15)
    drafted = []
    for name in (None, digest()):
        point = replace(drafting_point(LAYERS), lens=name)
        done = self_speculate(
            Partner(WalkedDecoder(stepper, point, max_rows=2), point), exit_layer, prompts, 15, k=3
        ).record
        assert [row.tolist() for row in done.emitted] == [row.tolist() for row in own.emitted]
        assert done.work is not None
        drafted.append(done.tokens.token[done.tokens.phase == DRAFT].tolist())
        rows, macs = (part[FULL, exit_layer - 1] for part in (done.work[0].readout_rows, done.work[0].readout_macs))
        assert macs == rows * (0 if name is None else 2 * 32 * 5)
        assert done.work[0].readout_macs.sum() == macs
    assert drafted[0] != drafted[1]


def test_an_encoder_decoder_reads_through_a_lens_too() -> None:
    stepper = Seq2SeqStepper(small_t5())
    layers, rng = stepper.layers, np.random.default_rng(1)
    seen = [TokenSequence(rng.integers(2, VOCABULARY, 12), 2, source=source) for source in some_sources(9, 5)]
    name = attached(stepper, tuple(range(1, layers)), 3)
    trace = take_trace(stepper, seen, lens=name)
    levels = tuple(float(np.quantile(trace.entropy_nats[:, probe - 1], 0.3)) for probe in (1, 2))
    point = OperatingPoint("t5", "f", layers, layers, (1, 2), (levels,), "free_eager", lens=name)
    expected, counted = replay(trace, point), Work.none(layers)
    assert len(set(expected.depth.tolist())) > 1
    for number, text in enumerate(seen):
        rows = slice(trace.starts[number], trace.starts[number + 1])
        session, step = WalkedDecoder(stepper, point).start([Prompt(text.tokens[:3], text.source)])
        depths, losses = [], []
        for following in text.tokens[3:]:
            logits = step.logits[0, 0]
            depths.append(int(step.depth[0, 0]))
            losses.append(float(np.log(np.exp(logits).sum()) - logits[following]))
            if len(depths) < 9:
                step = session.feed(np.array([[following]]))
        counted = counted + session.work
        assert depths == expected.depth[rows].tolist()
        assert np.abs(np.array(losses) - expected.nll_nats[rows]).max() < STORED
    derived = compute_decode_work(trace, expected.depth, point)
    assert counted.readout_macs.tolist() == derived.readout_macs.tolist()
    assert counted.readout_macs.sum() > 0


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("family", ["gpt_neox", "opt_350m"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("rank", [None, 3])
def test_the_ledger_charges_what_pytorch_counts(family: str, rows: int, rank: int | None) -> None:
    stepper = stepper_of(family)
    width = stepper.geometry.hidden
    point = OperatingPoint("p", "f", LAYERS, LAYERS, PROBES, ((0.0,) * 3,), lens=attached(stepper, PROBES, rank))
    watch, work, hidden = make_probe(stepper, point), Work.none(LAYERS), torch.ones(rows, width, dtype=torch.float64)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        watch.read(hidden, 1, work)
    assert work.readout_macs[FULL].tolist() == [0, 0, rows * (width**2 if rank is None else 2 * width * rank), 0, 0, 0]
    assert flops(work, stepper.geometry).total == counter.get_total_flops()
    assert flops(work, stepper.geometry).translators == 2 * int(work.readout_macs.sum()) > 0


def test_a_linear_probe_reads_the_state_and_pays_for_the_lens_at_its_exit_alone() -> None:
    point = POINTS["linear probe"]()
    trace = traced(point.lens)
    depth = replay(trace, point).depth
    work = compute_decode_work(trace, depth, point, 32)
    exits: Ints = np.array([int((depth == layer).sum()) for layer in range(1, LAYERS + 1)])
    assert work.readout_rows[FULL].tolist() == exits.tolist()
    assert work.readout_macs[FULL].tolist() == [*(exits[:-1] * 2 * 32 * 5).tolist(), 0]
    assert np.array_equal(trace.estimates[GATE], traced(None).estimates[GATE], equal_nan=True)


# ---------------------------------------------------------------- layers without a translator


def test_layers_without_a_translator_are_read_by_the_models_own_head() -> None:
    some = attached(stepper_of(), (3,), 4)
    trace, raw = take_trace(stepper_of(), texts(), lens=some), traced(None)
    assert [np.array_equal(trace.nll_nats[:, at], raw.nll_nats[:, at]) for at in range(LAYERS)] == [
        True, True, False, True, True, True,
    ]  # fmt: skip
    assert trace.lens_macs_by_layer.tolist() == [0, 0, 2 * 32 * 4, 0, 0, 0]


def test_a_lens_lives_as_long_as_the_model_it_is_attached_to() -> None:
    stepper = CausalStepper(small_model("gpt_neox"))
    lens = drawn_lens(stepper, BELOW)
    name = attach_lens(stepper, lens, FINGERPRINT)
    assert name == lens.digest
    assert get_attached_lens(stepper, name) is not None
    assert get_attached_lens(stepper, None) is None


def test_rules_are_traced_through_their_own_lens() -> None:
    """An exiting token emits through the trace's lens; saturation reads no lens."""
    point, raw = replace(SATURATED, lens=digest()), SATURATED
    for rule, lens in ((raw, digest()), (point, None)):
        with pytest.raises(BadArgument, match=r"rules=\['saturation.*the lens .* of this trace"):
            take_trace(stepper_of(), texts(), rules=[rule], lens=lens)
    tuned, plain = traced(digest()).confidence_rule_columns(point), traced(None).confidence_rule_columns(raw)
    assert np.array_equal(tuned.signal, plain.signal, equal_nan=True)
    assert np.array_equal(tuned.nll_nats, traced(digest()).nll_nats)
