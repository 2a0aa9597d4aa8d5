"""The reference decoder on T5: EMAD on the decoder's layers, sources of several lengths, one ledger."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, Work
from emad_ref.replay.losses import decode_losses
from pytest_emad.audit.tolerances import tolerance
from tests.laws.test_seq2seq import SETTINGS, counted, readouts
from tests.small_models import small_config, small_model
from tests.unit.models.test_seq2seq import EXACT, LAYERS, START, TOKENS, small_t5, some_sources, some_targets

pytestmark = pytest.mark.each_value

SOURCES = some_sources(15, 6, 9)


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def stepper(request):
    return Seq2SeqStepper(small_t5(request.param[0], attention=request.param[1]))


@pytest.fixture(scope="module")
def point(stepper):
    """Return a point that fires for about a third of random tokens at each probe."""
    with torch.inference_mode():
        logits = readouts(stepper, some_sources(*[9] * 8), some_targets(8, 20))
    entropy = torch.distributions.Categorical(logits=logits).entropy().flatten(1)
    thresholds = tuple(float(entropy[probe - 1].quantile(0.3)) for probe in (2, 4))
    return OperatingPoint("third", "quantile", LAYERS, LAYERS, (2, 4), (thresholds,))


def prompts(*tokens):
    return [Prompt(np.array([START, *tokens[:row]]), source) for row, source in enumerate(SOURCES)]


def starts():
    return [Prompt(np.array([START]), source) for source in SOURCES]


def test_full_depth_is_the_models_own_greedy_generation(stepper):
    record = WalkedDecoder(stepper, full_depth(LAYERS), max_rows=3).generate(starts(), 10)
    for source, emitted in zip(SOURCES, record.emitted, strict=True):
        own = stepper.model.generate(
            torch.from_numpy(source)[None], max_new_tokens=10, min_new_tokens=10, do_sample=False, num_beams=1,
            eos_token_id=None,
            # transformers sizes its own cache by the encoder's layers: too few for a deeper decoder
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
        )  # fmt: skip
        assert own[0, 1:].tolist() == emitted.tolist()


@pytest.mark.parametrize("schedule", ["monotone", "free_eager"])
def test_emitted_tokens_are_the_full_models_readout_at_their_depth(stepper, point, schedule):
    """Position 0, the start token, is the first decoding step and obeys the rule; rows equal rows decoded alone."""
    decoder = WalkedDecoder(stepper, replace(point, schedule=schedule), max_rows=3)
    record = decoder.generate(prompts(5, 7), 9)
    for row, prompt in enumerate(prompts(5, 7)):
        alone = WalkedDecoder(stepper, decoder.point).generate([prompt], 9)
        decided = record.tokens.select_sequence(row, DECODE)
        assert record.emitted[row].tolist() == alone.emitted[0].tolist()
        assert decided.depth.tolist() == alone.tokens.select_sequence(0, DECODE).depth.tolist()
        assert decided.position[0] == len(prompt.tokens) - 1
        fed = torch.from_numpy(np.concatenate([prompt.tokens, record.emitted[row][:-1]]))[None]
        with torch.inference_mode():
            own = readouts(stepper, [SOURCES[row]], fed)[:, 0]
        best = own.argmax(dim=-1).numpy()
        assert best[decided.depth - 1, decided.position].tolist() == record.emitted[row].tolist()
    assert len(set(record.tokens.depth[record.tokens.phase == DECODE].tolist())) > 1, "the point must discriminate"


@torch.inference_mode()
def test_forced_depths_give_the_full_models_logits(stepper):
    targets = some_targets(3)
    wanted = readouts(stepper, SOURCES, targets).numpy()
    session, _ = WalkedDecoder(stepper, full_depth(LAYERS), max_rows=3).start(starts())
    depths = -np.sort(-np.random.default_rng(2).integers(1, LAYERS + 1, (3, TOKENS - 1)), axis=1)
    for at in range(1, TOKENS):
        step = session.feed(targets[:, at : at + 1].numpy(), depths[:, at - 1 : at])
        if at % 4 == 0:  # and again, from before
            session.rollback(session.length - 1)
            step = session.feed(targets[:, at : at + 1].numpy(), depths[:, at - 1 : at])
        session.commit(session.length)
        for row in range(3):
            assert np.abs(step.logits[row, 0] - wanted[depths[row, at - 1] - 1, row, at]).max() <= EXACT


@pytest.mark.parametrize("words", [(), (5, 7)])
@pytest.mark.parametrize("adaptive", [True, False])
def test_the_ledger_is_pytorchs_count(stepper, point, adaptive, words):
    """Generation of ragged sources and prompts, rows ending at different times; all FLOPs are assigned to a part."""
    decoder = WalkedDecoder(stepper, point if adaptive else full_depth(LAYERS), max_rows=3)
    given = prompts(*words) if words else starts()
    never = decoder.generate(given, 8)
    stop = frozenset({int(never.emitted[1][3])})  # row 1 leaves early
    records = []
    theirs = counted(lambda: records.append(decoder.generate(given, 8, stop)))
    work = records[0].work[0]
    assert flops(work, stepper.geometry).total == theirs
    prompt = records[0].prompt_work[0]
    assert (prompt.encoder_tokens, prompt.encoder_context) == (3 * 15, 3 * 15 * 15)
    decode = work - prompt
    assert decode.encoder_tokens == decode.encoder_context == 0
    assert decode.cross_fills.tolist() == ([15] if words else [45]) * 2 + decode.cross_fills[2:].tolist()
    assert min(int(getattr(decode, name).min()) for name in ("tokens", "context", "cross_fills", "cross_context")) >= 0
    assert decode.cross_context.tolist() == (decode.tokens * 15).tolist()


def test_layers_that_no_token_reaches_never_read_the_source(stepper, point):
    always = replace(point, thresholds=((float("inf"),) * 2,))
    session, _ = WalkedDecoder(stepper, always, max_rows=3).start(starts())
    assert session.work.cross_fills.tolist() == [45, 45, 0, 0, 0, 0]
    session.drop(np.array([1]))
    before = session.work
    session.close()
    assert session.work == before


def test_a_source_is_needed_here_and_refused_elsewhere(stepper):
    with pytest.raises(BadArgument, match=r"sources\[0\]=None.*T5 reads a source"):
        WalkedDecoder(stepper, full_depth(LAYERS)).start([Prompt(np.array([START]))])
    with pytest.raises(BadArgument, match=r"prompts\[0\].source=.*no encoder to read it"):
        CausalStepper(small_model("gpt_neox")).open_cache([SOURCES[0]])
    work = Work.none(LAYERS)
    work.cross_fills[0] = 1
    with pytest.raises(BadArgument, match="decoder-only"):
        flops(work, geometry_of(small_config("gpt_neox")))


def test_copied_states_in_float16_are_those_of_float32_rounded():
    """Transformers keeps ``wo`` in float32 there, so states are float16 before the first block and float32 after it."""
    point = OperatingPoint("first probe", "quantile", LAYERS, LAYERS, (2,), ((99.0,),), schedule="copying")
    pairs = [
        TokenSequence(target.numpy(), 0, number, source)
        for number, (target, source) in enumerate(zip(some_targets(3), SOURCES, strict=True))
    ]
    found = []
    for dtype in (torch.float32, torch.float16):
        stepper = Seq2SeqStepper(small_t5("t5", dtype))
        record = WalkedDecoder(stepper, point, max_rows=3).generate(starts(), 8)
        assert {*record.tokens.depth} == {2}
        found.append(decode_losses(stepper, stepper.geometry, pairs, [point]).nats)
    tokens = TOKENS - 1
    assert np.abs(found[0] - found[1]).max() < tokens * tolerance("t5", "float16", "cpu")
    assert (found[0] != found[1]).any()
