"""What a run knows of early exits: the same items under every rule, scores in 0–1, FLOPs in parts that add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax

from emad_ref.benchmark.flops import flops
from emad_ref.calibration.trace import lens_logits
from emad_ref.errors import BadArgument
from emad_ref.exit_rules.rules import kept_vocabulary
from emad_ref.measurements import early_exit_tasks, early_exits
from emad_ref.measurements.early_exits import (
    AS_CODED,
    LEAST_VOCABULARY,
    FlopsPerItem,
    first_amateur,
    flop_saving,
    flops_per_item,
    minimum_layers,
    time_rules,
    timed_flops,
)
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.model_under_test import ENCODER_DECODER_REFUSAL, FixedEncoderInput
from emad_ref.measurements.run_resources import RunResources
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import Work
from tests.small_exits import LAYERS, MINIMA, few_items

ITEMS, SMALL = 6, "emad-t5-tiny"


@pytest.fixture(scope="module")
def evidence() -> Iterator[ModelMeasurements]:
    with few_items(SMALL, ITEMS) as made:
        yield made


def test_a_threshold_above_one_is_full_depth_item_by_item(evidence: ModelMeasurements) -> None:
    full = evidence.exits.under("qa", evidence.exits.full)
    never = evidence.exits.answered("qa", "JSD", 2, threshold=1.5)
    assert never.texts == full.texts
    assert set(full.exited.exit_block.values) == set(never.exited.exit_block.values) == {float(LAYERS)}
    assert len(full.texts) == len(full.exited) == ITEMS


def test_items_of_a_batch_answer_as_they_do_alone(evidence: ModelMeasurements) -> None:
    """Sources of different lengths are decoded together: item i must be item i."""
    exits, subject, item = evidence.exits, evidence.subject, 3
    together = exits.answered("summary", "softmax", 2)
    with subject.open(together.point) as decoder:
        alone = decoder.generate([exits.prompts("summary")[item]], early_exit_tasks.TASKS["summary"].new, subject.stop)
    text = subject.tokenizer.decode(alone.emitted[0].tolist(), skip_special_tokens=True).strip()
    assert text == together.texts[item]
    assert alone.tokens.depth.sum() == together.exited.depth_sums.values[item]


def test_confidence_decoder_and_encoder_are_everything_executed(evidence: ModelMeasurements) -> None:
    geometry = evidence.loaded.geometry
    done = evidence.exits.answered("qa", "softmax, fixed", 2)
    parts = done.costs(geometry)
    assert parts.together * ITEMS == pytest.approx(flops(done.counted, geometry).total)
    assert min(parts.confidence, parts.decoder, parts.encoder) > 0
    assert parts.decoding == pytest.approx(parts.together - parts.encoder)


def test_a_decoder_that_does_not_count_is_no_evidence_of_flops(evidence: ModelMeasurements) -> None:
    done = evidence.exits.answered("qa", "softmax", 2)
    with pytest.raises(Unsupported, match="does not count"):
        replace(done, counted=None).costs(evidence.loaded.geometry)


def test_teacher_forcing_reads_every_token_of_every_answer(evidence: ModelMeasurements) -> None:
    read = evidence.exits.read("qa")
    targets = [len(evidence.subject.tokenizer.encode(item.target)) for item in evidence.exits.asked.items("qa").pairs]
    assert np.bincount(read.item).tolist() == read.tokens.values.tolist() == targets
    assert (read.ranks[:, -1] == 1).all()
    for (signal, _), (confidence, correct) in read.contrasts.items():
        assert confidence.shape == correct.shape == (sum(targets), LAYERS - MINIMA[0] - (signal == "jsd_contrast"))
        assert ((confidence >= 0) & (confidence <= 1)).all()


def test_response_is_how_far_the_best_token_leads_after_each_layer(evidence: ModelMeasurements) -> None:
    read, prompt = evidence.exits.read("qa"), evidence.exits.prompts("qa")[0]
    target = evidence.exits.asked.items("qa").targets[0]
    fed = np.concatenate([prompt.tokens, target[:-1]])
    p = softmax(lens_logits(evidence.subject.stepper, fed, source=prompt.source), axis=-1)
    first, second = np.sort(p, axis=-1)[..., -1], np.sort(p, axis=-1)[..., -2]
    np.testing.assert_allclose(read.response[read.item == 0], first - second, atol=1e-12)  # float64
    assert ((p.argmax(axis=-1) == target[:, None]) == read.correct[read.item == 0]).all()


def test_fewer_items_than_timed_requests_are_asked_again(
    evidence: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(early_exit_tasks.ITEMS, "smoke", 1)
    alone = ModelMeasurements(evidence.loaded, evidence.study, RunResources()).exits
    asked = alone.subject, alone.prompts("qa")
    one, many = (timed_flops(*asked, alone.full, pairs, 3) for pairs in (1, 4))
    assert one == many
    assert one.together > 0
    seconds = time_rules(*asked, {"softmax": alone.point("softmax", 2)}, 4, 3).seconds
    assert {name: len(each) for name, each in seconds.items()} == {"full": 4, "softmax": 4}


def test_long_references_are_contrasted_block_by_block(
    evidence: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evidence.exits.read("summary")
    assert max(np.bincount(whole.item)) > 7
    monkeypatch.setattr(early_exits, "READ_TOKENS", 7)
    blocks = ModelMeasurements(evidence.loaded, evidence.study, RunResources()).exits.read("summary")
    for key, (confidence, correct) in whole.contrasts.items():
        np.testing.assert_allclose(blocks.contrasts[key][0], confidence, atol=1e-12)  # float64; rows do not mix
        np.testing.assert_array_equal(blocks.contrasts[key][1], correct)


@pytest.mark.parametrize(
    ("layers", "minima"), [(24, (7, 19)), (12, (4, 10)), (10, (3, 8)), (8, (2, 6)), (6, (2, 4)), (4, (2,))]
)
def test_minimum_layers_stand_at_the_papers_share_of_depth(layers: int, minima: tuple[int, ...]) -> None:
    assert minimum_layers(layers) == minima


def test_both_readings_of_jsd_meet_softmax_response_at_the_layer_from_which_they_decide(
    evidence: ModelMeasurements,
) -> None:
    """A threshold of 0 leaves at once: where each rule may, at the earliest."""
    exits = evidence.exits
    for minimum in exits.minima:
        for rule, first in (("JSD", minimum + 1), (AS_CODED, minimum)):
            jsd, softmax = (exits.answered("qa", *side, 0.0).exited for side in ((rule, minimum), ("softmax", first)))
            assert set(jsd.exit_block.values) == set(softmax.exit_block.values) == {float(first)}


def test_jsd_as_coded_contrasts_with_layers_from_the_second_on_or_with_the_one_below() -> None:
    assert [first_amateur(minimum) for minimum in (2, 3, 8)] == [1, 2, 2]


def test_a_model_that_solves_nothing_has_no_task_that_counts(evidence: ModelMeasurements) -> None:
    """The pre-trained T5 fills gaps; it was never shown a task."""
    exits = evidence.exits
    assert set(exits.unsolved) == set(exits.tasks)
    assert all("not solved: full depth scores" in reason for reason in exits.unsolved.values())
    assert exits.counting == []
    assert len(exits.settings) == len(exits.tasks) * len(MINIMA)


def test_calibration_sets_share_no_item_and_stray_nowhere_under_a_threshold_that_never_fires(
    evidence: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_exits, "SET_SIZE", 3)
    found = evidence.exits.consistency("qa", (1.5, 0.0))
    assert (found.pool.shape, found.sets.shape) == ((ITEMS, 2), (2, 3, 2))
    assert (found.pool[:, 0] == 0).all()
    assert (found.sets[..., 0] == 0).all()
    assert found.mean_exit.tolist() == [LAYERS, MINIMA[0]]
    assert found.sets[..., 1].max() > 0


def test_a_saving_compares_part_by_part() -> None:
    before, after = FlopsPerItem(6.0, 4.0, 10.0), FlopsPerItem(2.0, 3.0, 10.0)
    saved = flop_saving(before, after)
    assert (saved.confidence, saved.decoding, saved.together) == (3.0, 2.0, 20 / 15)


def test_costs_are_per_item(evidence: ModelMeasurements) -> None:
    geometry, work = evidence.loaded.geometry, evidence.exits.answered("qa", "softmax", 2).counted
    assert isinstance(work, Work)
    assert flops_per_item(work, geometry).together == pytest.approx(
        ITEMS * flops_per_item(work, geometry, ITEMS).together
    )


def test_the_least_vocabulary_is_the_least_that_can_be_pruned() -> None:
    assert kept_vocabulary(8, 8, LEAST_VOCABULARY) == 2
    with pytest.raises(BadArgument, match="two can be kept"):
        kept_vocabulary(8, 8, LEAST_VOCABULARY - 1)


def test_rows_about_plain_documents_are_refused_with_a_reason(evidence: ModelMeasurements) -> None:
    assert evidence.subject.without_quality == ENCODER_DECODER_REFUSAL
    with pytest.raises(Unsupported, match="an encoder-decoder model"):
        evidence.traces.profile.point(0.0)


def test_audits_read_one_fixed_source_and_tasks_their_own(evidence: ModelMeasurements) -> None:
    subject = evidence.subject
    tokens = np.array([subject.opening, 5, 9])
    own = subject.own_logits(tokens)
    assert np.abs(subject.lens(tokens)[:, -1] - own).max() <= subject.tolerance
    with subject.open(subject.full) as decoder:
        assert isinstance(decoder, FixedEncoderInput)
        _, fixed = decoder.start([Prompt(tokens)])
        _, other = decoder.start([Prompt(tokens, subject.source[::-1].copy())])
    assert np.abs(fixed.logits[0, 0] - own[-1]).max() <= subject.tolerance
    assert np.abs(other.logits - fixed.logits).max() > 0.01
