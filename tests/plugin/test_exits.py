"""What a run knows of early exits: the same items under every rule, scores in 0–1, FLOPs in parts that add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax

from emad_ref.calibration.trace import lens_logits
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.meters.flops import flops
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.policy.early_exit import kept_tokens
from emad_ref.protocol import Decoder, Prompt, Request, Unsupported
from emad_ref.verdict.claims import load_register
from pytest_emad import exit_tasks, exits
from pytest_emad.exits import LEAST_VOCABULARY, Answered, difference, earlier, minimum_layers, premise
from pytest_emad.options import BUDGETS, Settings
from pytest_emad.session import Evidence
from pytest_emad.sourced import Sourced
from pytest_emad.subject import PLAIN

ITEMS, SMALL = 6, "emad-t5-tiny"
CLAIM = load_register()["EE-3"]


def ours(request: Request) -> Decoder:
    return WalkedDecoder(request.model.load().stepper, request.point, max_rows=request.max_rows)


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    options = dict.fromkeys(Settings.__dataclass_fields__)
    settings = Settings(**{**options, "budget": BUDGETS["smoke"], "seed": 0, "device": "cpu"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(exit_tasks.ITEMS, "smoke", ITEMS)
        made = Evidence(load(SMALL), settings, ours)
        for task in made.exits.tasks:
            made.exits.items(task)
        yield made


def test_a_threshold_above_one_is_full_depth_item_by_item(evidence: Evidence) -> None:
    full = evidence.exits.under("qa", evidence.exits.full)
    never = evidence.exits.answered("qa", "JSD", 2, threshold=1.5)
    assert never.texts == full.texts
    assert set(full.exit_block) == set(never.exit_block) == {8.0}
    assert len(full.texts) == len(full.score) == ITEMS


def test_items_of_a_batch_answer_as_they_do_alone(evidence: Evidence) -> None:
    """Sources of different lengths are decoded together: item i must be item i."""
    exits, item = evidence.exits, 3
    together = exits.answered("summary", "softmax", 2)
    with evidence.open(together.point) as decoder:
        alone = decoder.generate([exits.prompts("summary")[item]], exit_tasks.TASKS["summary"].new, evidence.stop)
    text = evidence.tokenizer.decode(alone.emitted[0].tolist(), skip_special_tokens=True).strip()
    assert text == together.texts[item]
    assert alone.tokens.depth.sum() == together.depth_sums[item]


def test_confidence_decoder_and_encoder_are_everything_executed(evidence: Evidence) -> None:
    geometry = evidence.loaded.geometry
    done = evidence.exits.answered("qa", "softmax, fixed", 2)
    parts = done.costs(geometry)
    assert parts.together * ITEMS == pytest.approx(flops(done.counted, geometry).total)
    assert min(parts.confidence, parts.decoder, parts.encoder) > 0
    assert parts.decoding == pytest.approx(parts.together - parts.encoder)


def test_a_decoder_that_does_not_count_is_no_evidence_of_flops(evidence: Evidence) -> None:
    done = evidence.exits.answered("qa", "softmax", 2)
    blind = Answered(done.point, done.texts, done.score, done.depth_sums, done.tokens, None)
    with pytest.raises(Unsupported, match="does not count"):
        blind.costs(evidence.loaded.geometry)


def test_teacher_forcing_reads_every_token_of_every_answer(evidence: Evidence) -> None:
    read = evidence.exits.read("qa")
    targets = [len(evidence.tokenizer.encode(item.target)) for item in evidence.exits.items("qa")]
    assert np.bincount(read.item).tolist() == targets
    assert (read.ranks[:, -1] == 1).all()
    for (signal, _), (confidence, correct) in read.contrasts.items():
        assert confidence.shape == correct.shape == (sum(targets), 8 - 2 - (signal == "jsd_contrast"))
        assert ((confidence >= 0) & (confidence <= 1)).all()


def test_response_is_how_far_the_best_token_leads_after_each_layer(evidence: Evidence) -> None:
    read, prompt = evidence.exits.read("qa"), evidence.exits.prompts("qa")[0]
    target = evidence.exits.asked.items("qa").targets[0]
    fed = np.concatenate([prompt.tokens, target[:-1]])
    p = softmax(lens_logits(evidence.stepper, fed, source=prompt.source), axis=-1)
    first, second = np.sort(p, axis=-1)[..., -1], np.sort(p, axis=-1)[..., -2]
    np.testing.assert_allclose(read.response[read.item == 0], first - second, atol=1e-12)  # float64
    assert ((p.argmax(axis=-1) == target[:, None]) == read.correct[read.item == 0]).all()


def test_fewer_items_than_timed_requests_are_asked_again(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exit_tasks.ITEMS, "smoke", 1)
    alone = Evidence(evidence.loaded, evidence.settings, ours).exits
    one, many = (alone.forced_costs(alone.full, "qa", pairs, 3) for pairs in (1, 4))
    assert one == many
    assert one.together > 0


def test_long_references_are_contrasted_block_by_block(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evidence.exits.read("summary")
    assert max(np.bincount(whole.item)) > 7
    monkeypatch.setattr(exits, "READ_TOKENS", 7)
    blocks = Evidence(evidence.loaded, evidence.settings, ours).exits.read("summary")
    for key, (confidence, correct) in whole.contrasts.items():
        np.testing.assert_allclose(blocks.contrasts[key][0], confidence, atol=1e-12)  # float64; rows do not mix
        np.testing.assert_array_equal(blocks.contrasts[key][1], correct)


@pytest.mark.parametrize(("layers", "minima"), [(24, (7, 19)), (12, (4, 10)), (8, (2, 6)), (6, (2, 4)), (4, (2,))])
def test_minimum_layers_stand_at_the_papers_share_of_depth(layers: int, minima: tuple[int, ...]) -> None:
    assert minimum_layers(layers) == minima


def test_no_differing_item_is_not_certainty() -> None:
    """Of 100 items that agree, 3 % of all items may yet differ (the rule of three)."""
    same = np.full(100, 0.5)
    found = difference(same, same, threshold=0.0, rng=np.random.default_rng(0), unit="score")
    assert found.value == 0
    assert 0.03 < found.high < 0.06
    assert found.p_above > 0.05


@pytest.mark.parametrize("sign", [1, -1])
def test_one_differing_item_decides_nothing(sign: int) -> None:
    """The bootstrap of one item in a hundred would be sure of its sign, or bound it by millions."""
    a, b = np.full(100, 0.5), np.full(100, 0.5)
    a[3] += 0.4 * sign
    found = difference(a, b, threshold=0.0, rng=np.random.default_rng(0), unit="score")
    assert found.value == pytest.approx(0.004 * sign)
    assert -0.08 < found.low < -0.03
    assert 0.03 < found.high < 0.08
    assert min(found.p_above, found.p_below) > 0.05


def test_many_differing_items_decide() -> None:
    rng = np.random.default_rng(0)
    b = rng.uniform(0, 0.5, 100)
    found = difference(b + rng.uniform(0, 0.2, 100), b, threshold=0.02, rng=rng, unit="score")
    assert found.low < found.value < found.high < 0.15
    assert found.p_above < 0.001


def test_earlier_is_in_blocks_and_positive_for_the_earlier_side() -> None:
    rng = np.random.default_rng(0)
    depths = rng.integers(3, 7, size=100).astype(float)
    point, ones = full_depth(8), np.ones(100, dtype=np.int64)
    late = Answered(point, ("",) * 100, np.zeros(100), depths + rng.integers(0, 3, 100), ones, None)
    early = Answered(point, ("",) * 100, np.zeros(100), depths, ones, None)
    found = earlier(early, late, layers=8, threshold=0.0, rng=rng)
    assert found.value == pytest.approx((late.depth_sums - depths).mean())
    assert found.low < found.value < found.high
    assert found.p_above < 0.01


def test_premises_say_what_is_absent(evidence: Evidence) -> None:
    assert premise(evidence, CLAIM) is None
    random = Evidence(replace(evidence.loaded, trained=False), evidence.settings, ours)
    assert "random weights" in premise(random, CLAIM).reason
    wordless = Evidence(replace(evidence.loaded, tokenizer=None), evidence.settings, ours)
    assert premise(wordless, CLAIM).verdict == "unmeasured"


def test_the_least_vocabulary_is_the_least_that_can_be_pruned() -> None:
    assert kept_tokens(8, 8, LEAST_VOCABULARY) == 2
    with pytest.raises(BadArgument, match="two can be kept"):
        kept_tokens(8, 8, LEAST_VOCABULARY - 1)


def test_rows_about_plain_documents_are_refused_with_a_reason(evidence: Evidence) -> None:
    assert evidence.without_quality == PLAIN
    with pytest.raises(Unsupported, match="an encoder-decoder model"):
        evidence.profile.point(0.0)


def test_audits_read_one_fixed_source_and_tasks_their_own(evidence: Evidence) -> None:
    tokens = np.array([evidence.opening, 5, 9])
    own = evidence.own_logits(tokens)
    assert np.abs(evidence.lens(tokens)[:, -1] - own).max() <= evidence.tolerance
    with evidence.open(evidence.full) as decoder:
        assert isinstance(decoder, Sourced)
        _, fixed = decoder.start([Prompt(tokens)])
        _, other = decoder.start([Prompt(tokens, evidence.source[::-1].copy())])
    assert np.abs(fixed.logits[0, 0] - own[-1]).max() <= evidence.tolerance
    assert np.abs(other.logits - fixed.logits).max() > 0.01
