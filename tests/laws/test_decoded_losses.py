"""Decoded columns equal replayed ones where replay is exact; elsewhere they equal a session of each row alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.teacher_forcing import is_fed_layerwise, teacher_force, teacher_force_texts
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import early_exit_point
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec, full_depth, truncated
from emad_ref.protocol import Prompt
from emad_ref.replay.losses import Losses, decode_losses, replay_losses
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model
from tests.unit.models.test_seq2seq import small_t5, some_sources

PROBES = (1, 3, 4)
STORED = 1e-4  # nats a sequence: traces hold float32
ROUNDING = 1e-9  # float64: the same arithmetic, in batches with other rows
WEIGHTS = np.random.default_rng(3).normal(0, 0.3, (3, 33)).tolist()
GATE = EntropyEstimator("linear", weights=tuple(tuple(row) for row in WEIGHTS))
TOPK = EntropyEstimator("topk", k=12)


@cache
def stepper_of() -> Stepper:
    return CausalStepper(small_model("gpt_neox", seed=3))


@cache
def texts() -> tuple[TokenSequence, ...]:
    """Prompts of several lengths, one length twice; rows end at different times."""
    rng = np.random.default_rng(1)
    sizes = ((30, 0), (24, 5), (17, 3), (30, 0), (9, 5), (12, 0), (2, 0))
    return tuple(TokenSequence(rng.integers(0, VOCABULARY, n), at, number) for number, (n, at) in enumerate(sizes))


@cache
def traced(lens: str | None) -> Trace:
    return take_trace(stepper_of(), texts(), estimators={GATE: PROBES, TOPK: PROBES}, lens=lens)


@cache
def digest() -> str:
    return attached(stepper_of(), range(1, LAYERS), 5)


def point(
    schedule: str = "free_eager", lens: str | None = None, below: float = 0.25, **change: object
) -> OperatingPoint:
    """Return thresholds above the signals of a quarter of the tokens at each probe, or of a share ``below``."""
    asked = OperatingPoint(
        schedule,
        "quantile",
        LAYERS,
        LAYERS,
        PROBES,
        ((0.0,) * 3,),
        schedule,
        lens=lens,
        **change,  # type: ignore[arg-type]
    )
    seen = traced(lens).rule_signal(asked)
    thresholds = tuple(float(np.quantile(seen[:, probe - 1], below)) for probe in PROBES)
    return replace(asked, thresholds=(thresholds,))


EXACT: dict[str, Callable[[], OperatingPoint]] = {
    "full depth": lambda: full_depth(LAYERS),
    "truncated": lambda: truncated(LAYERS, 3),
    "monotone": lambda: point("monotone"),
    "free eager": lambda: point("free_eager"),
    "free deferred": lambda: point("free_deferred"),
    "chunked": lambda: point("chunked", period=4),
    "positional": lambda: OperatingPoint(
        "falls", "positional", LAYERS, LAYERS, schedule="positional", period=12, floor=2
    ),
    "through a lens": lambda: point("free_eager", digest()),
    "gate": lambda: point("free_eager", digest(), estimator=GATE, signal="divergence"),
    "topk": lambda: point("monotone", estimator=TOPK),
    "below the last layer": lambda: replace(point("free_eager"), ceiling=5),
    "bins": lambda: replace(
        point("free_eager"), bins=ThresholdBinSpec(("position",), position_edges=(8, 20)),
        thresholds=((9.0,) * 3, point().thresholds[0], (-1.0,) * 3),
    ),
}  # fmt: skip
DECODED: dict[str, Callable[[], OperatingPoint]] = {
    "copying": lambda: point("copying"),
    "copying through a lens": lambda: point("copying", digest()),
    "copying with a gate": lambda: point("copying", digest(), estimator=GATE, signal="divergence"),
    "copying below the last layer": lambda: replace(point("copying"), ceiling=5),
    "copying with an estimate": lambda: point("copying", estimator=TOPK),
    "agreement with the probe before": lambda: OperatingPoint(
        "agrees", "agreement", LAYERS, LAYERS, PROBES, ((2.0, 0.02, 0.02),), "copying", signal="agreement"
    ),
    "thresholds that decay": lambda: point("copying", below=0.7, signal="softmax_response", decay=(3.0, 10.0)),
    "copying by bins": lambda: replace(EXACT["bins"](), schedule="copying"),
    "a rule with a memory": lambda: early_exit_point("jsd_contrast", LAYERS, VOCABULARY, 2, 0.1, schedule="copying"),
    "a pruned vocabulary": lambda: early_exit_point("softmax_response", LAYERS, VOCABULARY, 1, 0.1, pruning="adaptive"),
}


@pytest.mark.parametrize("name", DECODED)
def test_a_rule_that_decides_by_probe_alone_is_fed_layer_by_layer(name: str) -> None:
    by_token = {"copying by bins", "a rule with a memory", "a pruned vocabulary"}
    assert is_fed_layerwise(DECODED[name]()) == (name not in by_token)
    assert not is_fed_layerwise(replace(DECODED["copying"](), schedule="free_eager"))


def same(found: Losses, expected: Losses, nats: float) -> None:
    assert np.abs(found.nats - expected.nats).max() < nats
    for name in ("cluster", "tokens", "wrong", "flops", "depth"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("name", EXACT)
def test_where_replay_is_exact_the_losses_are_replays(name: str) -> None:
    asked = EXACT[name]()
    expected = replay_losses(traced(asked.lens), stepper_of().geometry, [asked]).select([1])
    found = decode_losses(stepper_of(), stepper_of().geometry, texts(), [asked], rows=4)
    same(found, expected, STORED)
    assert (
        asked.has_fixed_depth
        or asked.schedule == "positional"
        or expected.depth.sum() < len(traced(None)) * asked.ceiling
    )


def alone(stepper: Stepper, asked: OperatingPoint, text: TokenSequence) -> tuple[float, int, float, int]:
    """Return (nll, wrong, decode FLOPs, depth) of one session of one row, counted during its run."""
    decoder = WalkedDecoder(stepper, asked)
    prompts = [Prompt(text.tokens[: text.first_decided + 1], text.source)]
    session, step = decoder.start(prompts)
    nll, wrong, depth = 0.0, 0, 0
    for at in range(text.first_decided, len(text.tokens) - 1):
        logits, target = step.logits[0, 0], text.tokens[at + 1]
        nll += float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target])
        wrong += int(logits.argmax() != target)
        depth += int(step.depth[0, 0])
        if at + 2 < len(text.tokens):
            step = session.feed(np.array([[target]]))
    return nll, wrong, flops(session.work - decoder.prompt_work(prompts), stepper.geometry).total, depth


@pytest.mark.values("copying", "copying by bins", "copying through a lens", "thresholds that decay")
@pytest.mark.parametrize("name", DECODED)
def test_what_only_decoding_knows_is_what_each_row_alone_loses_and_costs(name: str) -> None:
    asked, geometry = DECODED[name](), stepper_of().geometry
    found = decode_losses(stepper_of(), geometry, texts(), [full_depth(LAYERS), asked], rows=3)
    expected = np.array([alone(stepper_of(), asked, text) for text in texts()])
    mine = np.stack([found.nats, found.wrong, found.flops, found.depth], axis=2)[1]
    assert np.abs(mine[:, 0] - expected[:, 0]).max() < ROUNDING
    assert mine[:, 1:].tolist() == expected[:, 1:].tolist()
    assert found.depth[1].sum() < found.depth[0].sum(), "nothing exits: the comparison has no power"
    eager = decode_losses(stepper_of(), geometry, texts(), [replace(asked, schedule="free_eager")])
    assert np.abs(eager.nats[0] - found.nats[1]).max() > 1e-3, "copies changed nothing"


@pytest.mark.values("opt", "falcon")
@pytest.mark.parametrize("family", ["opt", "falcon", "gemma2", "mixtral"])
def test_feeding_layer_by_layer_is_feeding_token_by_token(family: str) -> None:
    """Families with learned positions, parallel blocks, windows and soft caps, experts."""
    stepper = CausalStepper(small_model(family, seed=3))
    trace = take_trace(stepper, texts())
    levels = tuple(float(np.quantile(trace.entropy_nats[:, probe - 1], 0.3)) for probe in (1, 3))
    asked = OperatingPoint("p", "quantile", stepper.layers, stepper.layers, (1, 3), (levels,), "copying")
    decoder = WalkedDecoder(stepper, asked, max_rows=len(texts()))
    for found, text in zip(teacher_force_texts(decoder, texts()), texts(), strict=True):
        expected = teacher_force(decoder, text)
        assert found.depth.tolist() == expected.depth.tolist()
        assert found.wrong.tolist() == expected.wrong.tolist()
        assert found.nll_nats == pytest.approx(expected.nll_nats, abs=1e-5)
        assert found.signal == pytest.approx(expected.signal, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("schedule", ["copying", "free_eager", "monotone"])
def test_an_encoder_decoders_rows_are_charged_for_their_own_sources(schedule: str) -> None:
    stepper = Seq2SeqStepper(small_t5())
    rng = np.random.default_rng(2)
    pairs = [
        TokenSequence(rng.integers(2, VOCABULARY, n), at, number, source)
        for number, (n, at, source) in enumerate(zip((8, 14, 6), (0, 0, 2), some_sources(5, 9, 3), strict=True))
    ]
    trace = take_trace(stepper, pairs)
    probes = (1, 2)
    levels = tuple(float(np.quantile(trace.entropy_nats[:, probe - 1], 0.4)) for probe in probes)
    asked = OperatingPoint("t5", "quantile", stepper.layers, stepper.layers, probes, (levels,), schedule)  # type: ignore[arg-type]
    found = decode_losses(stepper, stepper.geometry, pairs, [asked])
    expected = np.array([alone(stepper, asked, pair) for pair in pairs])
    mine = np.stack([found.nats, found.wrong, found.flops, found.depth], axis=2)[0]
    assert np.abs(mine[:, 0] - expected[:, 0]).max() < ROUNDING
    assert mine[:, 1:].tolist() == expected[:, 1:].tolist()
    assert 0 < mine[:, 3].sum() < len(trace) * stepper.layers


def test_batches_and_the_order_of_sequences_do_not_show() -> None:
    asked, geometry = point("copying"), stepper_of().geometry
    one, many = (decode_losses(stepper_of(), geometry, texts(), [asked], rows=rows) for rows in (1, 5))
    same(many, one, ROUNDING)
    back = decode_losses(stepper_of(), geometry, texts()[::-1], [asked], rows=5)
    same(back, one, ROUNDING)


def test_windows_of_one_document_are_one_column() -> None:
    asked, geometry = point("copying"), stepper_of().geometry
    apart = decode_losses(stepper_of(), geometry, texts(), [asked])
    document = np.array([7, 3, 7, 3, 3, 7, 3])
    cut = [replace(text, document=int(number)) for text, number in zip(texts(), document, strict=True)]
    found = decode_losses(stepper_of(), geometry, cut, [asked])
    assert found.cluster.tolist() == [3, 7]
    for name in ("nats", "wrong", "flops", "depth"):
        each = getattr(apart, name)[0]
        assert getattr(found, name)[0] == pytest.approx([each[document == 3].sum(), each[document == 7].sum()])


def test_a_long_prompt_beside_a_long_text_asks_for_no_more_positions_than_there_are() -> None:
    rng = np.random.default_rng(5)
    long = [TokenSequence(rng.integers(0, VOCABULARY, 128), at, number) for number, at in enumerate((0, 120))]
    found = decode_losses(stepper_of(), stepper_of().geometry, long, [full_depth(LAYERS)])
    assert found.depth[0].tolist() == [127 * LAYERS, 7 * LAYERS]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("points", {"points": []}),
        ("sequences", {"sequences": []}),
        ("rows", {"rows": 0}),
        ("sequence", {"sequences": [TokenSequence(np.array([1]))]}),
        ("first_decided", {"sequences": [TokenSequence(np.array([1, 2]), 1)]}),
        ("point.layers", {"points": [full_depth(LAYERS + 1)]}),
    ],
)
def test_what_cannot_be_decoded_is_refused(name: str, change: dict[str, object]) -> None:
    given: dict[str, object] = {"sequences": texts(), "points": [full_depth(LAYERS)], "rows": 4} | change
    with pytest.raises(BadArgument, match=f"^{name}="):
        decode_losses(stepper_of(), stepper_of().geometry, **given)  # type: ignore[arg-type]
