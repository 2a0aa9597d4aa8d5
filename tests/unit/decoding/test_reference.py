"""The reference decoder: bad input is refused and leaves the session unchanged; records are consistent."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import compute_layer_logits
from emad_ref.decoding.reference import SessionClosed, WalkedDecoder
from emad_ref.decoding.step import AdaptiveForward, StepInput
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.protocol import InadmissibleDepth, Prompt, Unsupported
from emad_ref.record import DECODE, PROMPT, Work
from emad_ref.schedule.schedules import SCHEDULES
from emad_ref.signals import NotFinite
from tests.random_translators import attached_translators
from tests.small_models import LAYERS, VOCABULARY, small_model

POSITIONS = 128
HISTORY = np.array([5, 9, 2, 44])
EXACT = 1e-9  # float64: the same operations in different batch sizes


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture(scope="module")
def point(stepper):
    """Return a point that fires for about a third of random tokens at each probe."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 60)
    logits = torch.from_numpy(compute_layer_logits(stepper, tokens))
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).numpy()
    thresholds = tuple(float(np.quantile(entropy[:, probe - 1], 0.3)) for probe in (2, 4))
    return OperatingPoint("third", "quantile", LAYERS, LAYERS, (2, 4), (thresholds,))


def prompt(*tokens):
    return Prompt(np.array(tokens, dtype=np.int64))


def opened(stepper, point, *prompts):
    return WalkedDecoder(stepper, point, max_rows=8).start(prompts or [Prompt(HISTORY)])


def state(session):
    return session.length.tolist(), session.cap.tolist(), session.work


# ---------------------------------------------------------------- refusals of start and generate

BAD_PROMPTS = [
    ([], "prompts='0 prompts', but expected 1–2"),
    ([prompt(1)] * 3, "prompts='3 prompts', but expected 1–2; ask for a larger max_rows"),
    (
        [prompt(1), prompt()],
        r"prompts\[1\]=\[\], but expected at least one token; start with the model's opening token",
    ),
    ([prompt(VOCABULARY)], f"tokens={VOCABULARY}, but expected ids in 0–{VOCABULARY - 1}; is this the model's own"),
    ([prompt(3, -1)], "tokens=-1, but expected ids in 0–"),
    ([prompt(1), prompt(2, VOCABULARY, 3)], f"tokens={VOCABULARY}"),
    ([Prompt(np.array([1.5]))], r"prompts\[0\]='float64', but expected integers"),
    ([Prompt(np.array([True]))], r"prompts\[0\]='bool', but expected integers"),
    ([Prompt(np.array([[1, 2]]))], r"prompts\[0\]=\(1, 2\), but expected shape \[n\]"),
    ([Prompt(np.array([1]), source=np.array([1]))], r"prompts\[0\].source=.*no encoder to read it"),
    ([prompt(*[1] * (POSITIONS + 1))], f"positions={POSITIONS + 1}, but expected at most {POSITIONS}"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS)
def test_prompts_that_cannot_be_read_are_refused(stepper, point, prompts, message):
    decoder = WalkedDecoder(stepper, point, max_rows=2)
    with pytest.raises(BadArgument, match=message):
        decoder.start(prompts)
    with pytest.raises(BadArgument, match=message):
        decoder.generate(prompts, 1)


def test_a_prompt_may_fill_every_position_and_generation_may_end_at_the_last(stepper, point):
    decoder = WalkedDecoder(stepper, point)
    decoder.start([prompt(*[1] * POSITIONS)])
    assert len(decoder.generate([prompt(*[1] * (POSITIONS - 2))], 3).emitted[0]) == 3
    with pytest.raises(BadArgument, match=f"positions={POSITIONS + 1}.*ask for fewer tokens"):
        decoder.generate([prompt(*[1] * (POSITIONS - 2))], 4)


@pytest.mark.parametrize("max_new", [0, -1])
def test_nothing_to_generate_is_refused(stepper, point, max_new):
    with pytest.raises(BadArgument, match=f"max_new={max_new}, but expected at least one new token"):
        WalkedDecoder(stepper, point).generate([Prompt(HISTORY)], max_new)


def test_a_point_of_another_model_is_refused(stepper, point):
    with pytest.raises(BadArgument, match=r"point\.layers=7, but expected 6, the layers of this model"):
        WalkedDecoder(stepper, full_depth(LAYERS + 1))


# ---------------------------------------------------------------- refusals that leave a session unchanged


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[VOCABULARY]], f"tokens={VOCABULARY}, but expected ids in 0–{VOCABULARY - 1}"),
        ([[-1]], "tokens=-1"),
        ([[1], [2]], r"tokens=\(2, 1\), but expected shape \[1, n ≥ 1\]"),
        ([1], r"tokens=\(1,\), but expected shape"),
        (np.zeros((1, 0), dtype=int), r"tokens=\(1, 0\), but expected shape"),
        ([[1.0]], "tokens='float64', but expected integers"),
        ([[1] * (POSITIONS - 3)], f"positions={POSITIONS + 1}, but expected at most {POSITIONS}"),
    ],
)
def test_tokens_that_cannot_be_fed_leave_the_session_as_it_was(stepper, point, tokens, message):
    session, _ = opened(stepper, point)
    before = state(session)
    with pytest.raises(BadArgument, match=message):
        session.feed(np.asarray(tokens))
    assert state(session) == before


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        ([[0]], r"depth\[0, 0\]=0, but row 0 admits 1–4 here"),
        ([[5]], r"depth\[0, 0\]=5, but row 0 admits 1–4 here; under the monotone schedule depth never rises"),
        ([[LAYERS + 1]], "admits 1–4 here"),
        ([[3, 4]], r"depth\[0, 1\]=4, but row 0 admits 1–3 here"),
        ([[4, -1]], r"depth\[0, 1\]=-1"),
    ],
)
def test_an_inadmissible_depth_leaves_the_session_as_it_was(stepper, point, depth, message):
    session, _ = opened(stepper, point)
    session.rollback(np.array([3]))
    session.feed(HISTORY[None, 3:], np.array([[4]]))
    before, depth = state(session), np.array(depth)
    with pytest.raises(InadmissibleDepth, match=message):
        session.feed(np.full(depth.shape, 7), depth)
    assert state(session) == before
    undisturbed, _ = opened(stepper, point)
    undisturbed.rollback(np.array([3]))
    undisturbed.feed(HISTORY[None, 3:], np.array([[4]]))
    one, other = (s.feed(np.array([[7]]), np.array([[4]])) for s in (session, undisturbed))
    assert np.array_equal(one.logits, other.logits)


def test_free_depth_may_rise_up_to_the_ceiling(stepper, point):
    session, _ = opened(stepper, replace(point, schedule="free_eager"))
    step = session.feed(np.array([[7, 8, 9]]), np.array([[2, LAYERS, 3]]))
    assert step.depth.tolist() == [[2, LAYERS, 3]]
    assert session.cap.tolist() == [LAYERS]
    with pytest.raises(InadmissibleDepth, match=f"row 0 admits 1–{LAYERS} here"):
        session.feed(np.array([[7]]), np.array([[LAYERS + 1]]))


@pytest.mark.parametrize(("depth", "message"), [([[2, 2]], "the shape of tokens"), ([[2.0]], "depth='float64'")])
def test_depths_of_another_shape_or_kind_are_refused(stepper, point, depth, message):
    session, _ = opened(stepper, point)
    with pytest.raises(BadArgument, match=message):
        session.feed(np.array([[7]]), np.array(depth))


def test_a_chunk_at_forced_depths_is_its_tokens_one_by_one(stepper, point):
    tokens, depth = np.array([[7, 8, 9]]), np.array([[4, 4, 4]])
    chunk = opened(stepper, point)[0]
    single = opened(stepper, point)[0]
    for session in (chunk, single):
        session.rollback(np.array([3]))
    whole = chunk.feed(tokens, depth)
    parts = [single.feed(tokens[:, [i]], depth[:, [i]]) for i in range(3)]
    assert np.abs(whole.logits - np.concatenate([p.logits for p in parts], axis=1)).max() < EXACT
    assert whole.depth.tolist() == [[4, 4, 4]]
    assert whole.signal.shape == (1, 3, 2)
    assert np.isnan(whole.signal).all()


# ---------------------------------------------------------------- logits of the last tokens alone


FED = np.array([[95, 3, 14]])  # under the rule the first two fire nowhere, the last at layer 4
WAYS = {  # processing of a chunk of three → requested depths, in a session of cap 5 without probes
    "one pass at one depth": ("monotone", [[5, 5, 5]]),
    "one by one at several depths": ("monotone", [[5, 4, 3]]),
    "decided in one pass": ("monotone", None),
    "decided one by one": ("free_eager", None),
}


@pytest.mark.parametrize(("schedule", "depth"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_only_the_last_logits_are_computed_where_only_they_are_wanted(stepper, point, schedule, depth, last):
    """Probes are still read, because they decide. Tokens, depths, signals and cache do not depend on shown logits."""
    whole, part = (opened(stepper, replace(point, schedule=schedule))[0] for _ in range(2))
    for session in (whole, part):
        session.rollback(np.array([3]))
        session.feed(HISTORY[None, 3:], np.array([[5]]))
    before = part.work
    depth = None if depth is None else np.array(depth)
    everything, some = whole.feed(FED, depth), part.feed(FED, depth, last)
    assert some.depth[0, 0] > 4, "a head must be left to save"
    assert some.logits.shape == (1, last, VOCABULARY)
    assert np.abs(some.logits - everything.logits[:, 3 - last :]).max(initial=0) < EXACT
    assert some.depth.tolist() == everything.depth.tolist()
    assert np.array_equal(some.signal, everything.signal, equal_nan=True)
    spent, heads = part.work - before, np.zeros(LAYERS, dtype=np.int64)
    for column, read in enumerate(~np.isnan(some.signal[0])):
        for probe in np.array(point.probes)[read]:
            heads[probe - 1] += 1
        stopped = int(some.depth[0, column])
        heads[stopped - 1] += column >= 3 - last and (depth is not None or stopped not in point.probes)
    assert spent.readout_rows[0].tolist() == heads.tolist()
    assert spent.tokens.tolist() == (whole.work - before).tokens.tolist()
    one, other = (session.feed(np.array([[5]]), np.array([[1]])) for session in (whole, part))
    assert np.abs(one.logits - other.logits).max() < EXACT


def test_rows_that_stop_apart_keep_their_own_last_logits(stepper, point):
    prompts, fed = [Prompt(HISTORY), prompt(3), prompt(8, 8)], np.array([[7, 8], [9, 1], [2, 3]])
    whole, part = (opened(stepper, replace(point, schedule="free_deferred"), *prompts)[0] for _ in range(2))
    depth, before = np.array([[2, 2], [5, 5], [LAYERS, LAYERS]]), part.work
    assert np.abs(part.feed(fed, depth, 1).logits - whole.feed(fed, depth).logits[:, 1:]).max() < EXACT
    assert (part.work - before).readout_rows[0].tolist() == [0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("last", [-1, 4])
def test_more_logits_than_tokens_are_refused(stepper, point, last):
    session, _ = opened(stepper, point)
    before = state(session)
    with pytest.raises(BadArgument, match=f"last={last}, but expected 0–3, tokens of this feed; None asks for"):
        session.feed(FED, None, last)
    assert state(session) == before


# ---------------------------------------------------------------- deepening


@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one != "free_deferred"])
def test_only_deferred_states_can_be_taken_up_again(stepper, schedule):
    more = {"chunked": {"period": 3}, "positional": {"period": 4, "floor": 2}}.get(schedule, {})
    if schedule == "translated":
        more = {"translators": attached_translators(stepper, (2,))}
    chosen = replace(full_depth(LAYERS), schedule=schedule, **more)
    decoder = WalkedDecoder(stepper, chosen)
    assert not decoder.capabilities.deepens
    session, _ = decoder.start([Prompt(HISTORY)])
    if schedule in ("monotone", "free_eager", "copying", "translated"):
        session.feed(np.array([[7]]), np.array([[2]]))
    before = state(session)
    with pytest.raises(
        Unsupported, match=f"deepen under schedule='{schedule}', but only free_deferred keeps the states"
    ):
        session.deepen(session.length - 1)
    assert state(session) == before


NOT_SHALLOW = [
    ([4, 1], r"length\[0\]=4.*the depths from there on are \[6, 2, 3\]; logits at the ceiling were shown"),
    ([7, 4], r"length\[0\]=7.*the depths from there on are \[\]"),
    ([8, 5], r"length\[0\]=8"),
    ([5, 3], r"length=\[5, 3\], but expected one per row, each as far below the held \[7, 4\] as the others"),
    ([-1, -4], r"length=\[-1, -4\]"),
    ([5], r"length=\[5\]"),
    ([5.0, 2.0], "length='float64', but expected integers"),
]


@pytest.mark.parametrize(("length", "message"), NOT_SHALLOW)
def test_lengths_that_cannot_be_deepened_leave_the_session_as_it_was(stepper, length, message):
    sessions = [
        opened(stepper, replace(full_depth(LAYERS), schedule="free_deferred"), Prompt(HISTORY), prompt(3))[0]
        for _ in "ab"
    ]
    for session in sessions:
        session.feed(np.array([[7], [8]]), np.array([[LAYERS], [4]]))
        session.feed(np.array([[5, 6], [1, 2]]), np.array([[2, 3], [2, 3]]))
    disturbed, undisturbed = sessions
    before = state(disturbed)
    with pytest.raises(BadArgument, match=message):
        disturbed.deepen(np.array(length))
    assert state(disturbed) == before
    one, other = (session.deepen(np.array([5, 2])) for session in sessions)
    assert np.array_equal(one.logits, other.logits)
    assert disturbed.work == undisturbed.work


def test_a_token_is_deepened_once(stepper):
    session, _ = opened(stepper, replace(full_depth(LAYERS), schedule="free_deferred"))
    session.feed(np.array([[7]]), np.array([[2]]))
    session.deepen(np.array([4]))
    with pytest.raises(BadArgument, match=r"the depths from there on are \[6\]"):
        session.deepen(np.array([4]))


@pytest.mark.parametrize("verb", ["rollback", "commit"])
@pytest.mark.parametrize("length", [[5], [0], [-1], [3, 3], [2.0]])
def test_lengths_that_were_never_held_are_refused(stepper, point, verb, length):
    session, _ = opened(stepper, point)
    before = state(session)
    with pytest.raises(BadArgument, match="length="):
        getattr(session, verb)(np.array(length))
    assert state(session) == before


def test_nothing_goes_back_behind_a_commitment(stepper, point):
    session, _ = opened(stepper, point)
    session.commit(np.array([3]))
    session.rollback(np.array([3]))
    with pytest.raises(BadArgument, match=r"length=\[2\].*between the committed \[3\] and the held \[3\].*a rollback"):
        session.rollback(np.array([2]))


def test_rollback_gives_back_tokens_and_cap_and_keeps_the_work(stepper, point):
    session, first = opened(stepper, point)
    before = state(session)
    session.feed(np.array([[7, 8]]), np.array([[2, 1]]))
    assert session.cap.tolist() == [1]
    spent = session.work
    session.rollback(np.array([4]))
    assert state(session)[:2] == before[:2]
    assert session.work == spent
    assert session.cap.tolist() == first.depth[:, 0].tolist()


@pytest.mark.parametrize("rows", [[2], [-1], [0, 1], [True, False], [0.0]])
def test_rows_that_cannot_be_dropped_are_refused(stepper, point, rows):
    session, _ = opened(stepper, point, Prompt(HISTORY), prompt(3))
    before = state(session)
    with pytest.raises(BadArgument, match="rows="):
        session.drop(np.array(rows))
    assert state(session) == before


def test_dropped_rows_leave_the_others_as_they_were(stepper, point):
    prompts = [Prompt(HISTORY), prompt(3), prompt(8, 8)]
    session, _ = opened(stepper, point, *prompts)
    whole, _ = opened(stepper, point, *prompts)
    session.drop(np.array([0]))
    assert session.length.tolist() == [1, 2]
    kept = session.feed(np.array([[6], [7]]))
    reference = whole.feed(np.array([[5], [6], [7]]))
    assert kept.depth.tolist() == reference.depth[1:].tolist()
    assert np.abs(kept.logits - reference.logits[1:]).max() < EXACT


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.feed(np.array([[7]])),
        lambda s: s.rollback(np.array([4])),
        lambda s: s.commit(np.array([4])),
        lambda s: s.deepen(np.array([3])),
        lambda s: s.drop(np.array([0])),
    ],
)
def test_a_closed_session_says_so(stepper, point, use):
    session, _ = opened(stepper, point)
    session.close()
    session.close()
    with pytest.raises(SessionClosed, match="session=closed, but expected an open one; start"):
        use(session)


def test_the_work_handed_out_does_not_change_later(stepper, point):
    session, _ = opened(stepper, point)
    handed = session.work
    copy = handed + Work.none(LAYERS)
    session.feed(np.array([[7]]))
    assert handed == copy
    assert session.work != copy


# ---------------------------------------------------------------- logits that are not finite


@pytest.fixture
def poisoned():
    """Return a model whose layer 5 writes NaN after the check of its constructor."""
    model = small_model("gpt_neox")
    stepper = CausalStepper(model)
    with torch.no_grad():
        model.gpt_neox.layers[4].mlp.dense_4h_to_h.bias[0] = torch.nan
    return stepper


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error_and_not_a_token(poisoned, point, temperature):
    for tried in (full_depth(LAYERS), truncated(LAYERS, 5), replace(point, thresholds=((-1.0, -1.0),))):
        decoder = WalkedDecoder(poisoned, tried, temperature=temperature)
        with pytest.raises(NotFinite, match="logits at the depth of emission: 1 of 1 rows"):
            decoder.generate([Prompt(HISTORY)], 2)
        with pytest.raises(NotFinite):
            decoder.start([Prompt(HISTORY)])


def test_nan_at_a_probe_is_an_error_and_not_an_exit(poisoned):
    probing = OperatingPoint("p", "emad", LAYERS, LAYERS, (5,), ((9.0,),))
    with pytest.raises(NotFinite, match="logits after layer 5"):
        WalkedDecoder(poisoned, probing).generate([Prompt(HISTORY)], 2)


def test_nan_at_the_ceiling_is_an_error_when_a_token_gets_there(poisoned):
    chosen = replace(truncated(LAYERS, 5), schedule="free_deferred")
    session = WalkedDecoder(poisoned, chosen)._open([Prompt(HISTORY)], 16)
    session.feed(HISTORY[None], np.full((1, 4), 4))
    with pytest.raises(NotFinite, match="logits at the ceiling: 4 of 4 rows"):
        session.deepen(np.array([0]))


def test_layers_that_are_not_run_poison_nothing(poisoned):
    assert len(WalkedDecoder(poisoned, truncated(LAYERS, 4)).generate([Prompt(HISTORY)], 2).emitted[0]) == 2


# ---------------------------------------------------------------- generate


def test_a_row_ends_with_its_stop_token_or_at_max_new(stepper, point):
    decoder = WalkedDecoder(stepper, point, max_rows=2)
    free = decoder.generate([Prompt(HISTORY)], 12).emitted[0].tolist()
    end = free[5]
    stopped = decoder.generate([Prompt(HISTORY)], 12, frozenset({end}))
    assert stopped.emitted[0].tolist() == free[: free.index(end) + 1]
    assert stopped.stop == ["stop token"]
    capped = decoder.generate([Prompt(HISTORY)], 4)
    assert capped.emitted[0].tolist() == free[:4]
    assert capped.stop == ["length"]


def test_a_stop_token_at_max_new_is_a_stop_token(stepper, point):
    decoder = WalkedDecoder(stepper, point)
    first = int(decoder.generate([Prompt(HISTORY)], 1).emitted[0][0])
    assert decoder.generate([Prompt(HISTORY)], 1, frozenset({first})).stop == ["stop token"]


@pytest.mark.parametrize("schedule", ["monotone", "free_eager"])
def test_a_record_holds_together(stepper, point, schedule):
    prompts = [Prompt(HISTORY), prompt(7), prompt(3, 1, 4, 1, 5)]
    decoder = WalkedDecoder(stepper, replace(point, schedule=schedule), max_rows=3)
    record = decoder.generate(prompts, 10, frozenset({11}))
    assert record.signal.shape == (len(record.tokens), 2)
    assert record.tokens.kept.all()
    assert set(record.tokens.model.tolist()) == {0}
    for row, given in enumerate(prompts):
        mine = record.tokens.select_sequence(row)
        history = [*given.tokens.tolist(), *record.emitted[row].tolist()]
        assert mine.token.tolist() == history[:-1], "every token but the last emitted was fed, once"
        assert mine.position.tolist() == list(range(len(history) - 1))
        assert mine.phase.tolist() == [PROMPT] * (len(given.tokens) - 1) + [DECODE] * len(record.emitted[row])
        assert mine.depth[mine.phase == PROMPT].tolist() == [LAYERS] * (len(given.tokens) - 1)
        assert (mine.depth <= mine.cap).all()
        decode = record.tokens.select_sequence(row, DECODE)
        caps = [LAYERS, *decode.depth[:-1].tolist()] if schedule == "monotone" else [LAYERS] * len(decode)
        assert decode.cap.tolist() == caps


def test_signals_are_those_compared_and_unread_ones_are_nan(stepper, point):
    record = WalkedDecoder(stepper, point).generate([Prompt(HISTORY)], 20)
    for depth, cap, phase, signal in zip(
        record.tokens.depth, record.tokens.cap, record.tokens.phase, record.signal, strict=True
    ):
        for probe, value, threshold in zip(point.probes, signal, point.thresholds[0], strict=True):
            read = phase == DECODE and probe <= min(depth, cap)
            assert np.isnan(value) != read
            if read and probe < cap:  # a row stops at its cap, whether it fires or not
                assert (value <= np.float32(threshold)) == (probe == depth)
    assert len(set(record.tokens.depth.tolist())) > 1, "the drawn case must exit somewhere"


def test_work_of_the_prompt_is_part_of_the_whole(stepper, point):
    record = WalkedDecoder(stepper, point).generate([Prompt(HISTORY)], 1)
    assert record.prompt_work[0].tokens.tolist() == [3] * LAYERS
    assert record.prompt_work[0].context.tolist() == [9] * LAYERS
    decode = record.work[0] - record.prompt_work[0]
    depth = int(record.tokens.select_sequence(0, DECODE).depth[0])
    assert decode.tokens.tolist() == [1] * depth + [0] * (LAYERS - depth)


def test_sampling_follows_the_seed_and_each_row_its_own(stepper, point):
    def sampled(seed, rows):
        decoder = WalkedDecoder(stepper, point, seed=seed, max_rows=4, temperature=1.0)
        return [e.tolist() for e in decoder.generate([Prompt(HISTORY)] * rows, 8).emitted]

    assert sampled(1, 2) == sampled(1, 2)
    assert sampled(1, 2) != sampled(2, 2)
    assert sampled(1, 3)[:2] == sampled(1, 2)
    assert sampled(1, 2)[0] != sampled(1, 2)[1]


def test_capabilities_promise_what_was_tried(stepper, point):
    decoder = WalkedDecoder(stepper, point)
    assert decoder.capabilities.counted
    assert decoder.capabilities.schedules == set(SCHEDULES)
    assert WalkedDecoder(stepper, replace(point, schedule="free_deferred")).capabilities.deepens
    session, _ = decoder.start([Prompt(HISTORY)])
    assert session.feed(np.full((1, decoder.capabilities.max_feed), 7)).depth.shape == (
        1,
        decoder.capabilities.max_feed,
    )
    decoder.synchronize()
    decoder.close()


@pytest.mark.parametrize("schedule", ["monotone", "chunked", "free_deferred"])
def test_what_follows_a_prompt_that_was_cut_is_decided(stepper, point, schedule):
    """After a rollback into the prompt, the next token is the first of its sequence: its depth binds the later ones."""
    period = {"period": 3} if schedule == "chunked" else {}
    cut, _ = WalkedDecoder(stepper, replace(point, schedule=schedule, **period)).start([Prompt(HISTORY)])
    cut.rollback(np.array([1]))
    tokens = np.array([[5], [9], [2], [7], [1]])
    forced = cut.feed(tokens[:1], np.array([[2]])).depth[0, 0]
    later = [int(cut.feed(token[None]).depth[0, 0]) for token in tokens[1:]]
    assert forced == 2
    if schedule == "monotone":
        assert max(later) <= 2
    if schedule == "chunked":
        assert later[:2] == [2, 2]


@pytest.mark.parametrize("asked", [[True, False], [False, True], [True, True], [False, False]])
@torch.inference_mode()
def test_a_row_that_is_not_asked_takes_its_cap_whatever_fires_beside_it(stepper, asked):
    always = OperatingPoint("always", "quantile", LAYERS, LAYERS, (2, 4), ((math.inf, math.inf),), "free_deferred")
    session, _ = opened(stepper, always, prompt(1, 2), prompt(3, 4))
    caps, decided, by_rule = np.full(2, LAYERS), np.zeros(2, dtype=np.int64), np.array(asked)
    inputs = stepper.prepare_forward(session.length[:, None], session.state.cache, caps=caps, by_rule=by_rule)
    step = StepInput(torch.tensor([[5], [6]]), inputs, session.state, decided, last=1)
    output = AdaptiveForward(stepper, always).run_step(step)
    assert output.depth[:, 0].tolist() == [2 if each else LAYERS for each in asked]
