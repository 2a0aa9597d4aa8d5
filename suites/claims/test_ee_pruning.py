"""EE-1, EE-2, EE-4, EE-8: what pruned vocabularies save, of the confidence, of the decoder and of everything.

FLOPs are counted, so such a leg has no interval: at one operating point and on these items, that is what was executed.
Beside it stands the token that never exits, by arithmetic, on the model under test and on the paper's T5-large.
"""

from __future__ import annotations

import pytest

from emad_ref.models.geometry import geometry_named
from emad_ref.policy.early_exit import early_exit, kept_tokens
from emad_ref.sweep.exits import gain_bound, published_gain, unexited
from emad_ref.verdict.claims import Leg
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.legs import counted, decided, estimated, not_applicable, row, weighed
from pytest_emad import exits
from pytest_emad.exits import RULES, costs, decide, difference, premise, ratio
from pytest_emad.family import other_legs

PAPERS = "t5-large"
PAPERS_MINIMA = (2, 7, 19)
CONTEXT = {"keys": 16, "source_keys": 128}  # a short answer to a paragraph
PARTS = ("confidence", "decoding", "together")
UNIT = "× fewer FLOPs"


@pytest.mark.emad(claim="EE-1")
def test_pruning_saves_a_hundredfold(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    """Confidence FLOPs against the threshold; decoder and whole model beside it; score within 2 points."""
    evidence, claim = emad_evidence, emad_register["EE-1"]
    # items decide where they can be decoded, geometry where they cannot: scores of random weights say nothing
    least = None if premise(evidence, claim) is None else claim.thresholds["flop_ratio"]
    arithmetic = never_exiting(evidence, "softmax", "softmax, fixed", least)

    def judged():
        others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
        legs, tests = list(arithmetic), []
        for task, minimum, plain, pruned in compared(evidence, "softmax", "softmax, fixed"):
            where = f"{task}, j={minimum}"
            legs += part_legs(evidence, where, plain, pruned, claim.thresholds["flop_ratio"])
            drop = loss_of(plain, pruned, claim.thresholds["score_drop"], emad_rng)
            tests.append(
                weighed(f"{where}: score", drop, "above", claim.thresholds["score_drop"], claim.minimum, "items")
            )
        legs = [*[leg for leg in legs if leg.outcome == "falsified"], *[x for x in legs if x.outcome != "falsified"]]
        return row(claim, evidence.name, [*legs, *decided(tests, others), *evidence.exits.missing])

    decide(evidence, emad_record, claim, judged, arithmetic)


@pytest.mark.emad(claim="EE-2")
def test_decaying_against_fixed(emad_evidence, emad_record, emad_register, emad_rng):
    evidence, claim = emad_evidence, emad_register["EE-2"]

    def judged():
        legs = []
        for task, minimum, fixed, decaying in compared(evidence, "softmax, fixed", "softmax, decaying"):
            where = f"{task}, j={minimum}"
            legs += part_legs(evidence, where, fixed, decaying, None)
            legs.append(estimated(f"{where}: score lost", loss_of(fixed, decaying, 0.0, emad_rng)))
        return row(claim, evidence.name, legs)

    decide(evidence, emad_record, claim, judged)


@pytest.mark.emad(claim="EE-4")
def test_jsd_with_adaptive_pruning(emad_evidence, emad_record, emad_register, emad_rng):
    evidence, claim = emad_evidence, emad_register["EE-4"]
    arithmetic = never_exiting(evidence, "JSD", "JSD, adaptive", None)

    def judged():
        legs = []
        for task, minimum, plain, pruned in compared(evidence, "JSD", "JSD, adaptive"):
            where = f"{task}, j={minimum}"
            legs += part_legs(evidence, where, plain, pruned, None)
            legs.append(estimated(f"{where}: score lost", loss_of(plain, pruned, 0.0, emad_rng)))
        return row(claim, evidence.name, [*legs, *arithmetic])

    decide(evidence, emad_record, claim, judged, arithmetic)


@pytest.mark.emad(claim="EE-8")
def test_the_published_formula_supports_a_hundredfold(emad_evidence, emad_record, emad_register):
    """Arithmetic on T5-large, whatever the model under test: the formula, its bound L/j, and what would be executed."""
    evidence, claim = emad_evidence, emad_register["EE-8"]
    if not evidence.seq2seq:
        reason = "a decoder-only model: the formula is decided where an encoder-decoder is under test"
        emad_record.claim(not_applicable(claim, evidence.name, reason))
        return
    geometry, least = geometry_named(PAPERS), claim.thresholds["flop_ratio"]
    layers, vocabulary = geometry.layers, geometry.vocabulary
    legs = []
    for minimum in PAPERS_MINIMA:
        k = kept_tokens(minimum, layers, vocabulary)
        gain, bound = published_gain(layers, vocabulary, minimum, k), gain_bound(layers, minimum)
        legs.append(judged_count(f"{PAPERS}, j={minimum}: formula at k={k:,}", gain, 1, least))
        legs.append(counted(f"{PAPERS}, j={minimum}: bound L/j", bound, 1, UNIT, "the formula at k = 0"))
    legs += paper_sized("softmax", "softmax, fixed", None)
    emad_record.claim(row(claim, evidence.name, legs), fingerprint=evidence.fingerprint)


# ---------------------------------------------------------------- shared by the rows


def compared(evidence, first, second):
    """(task, minimum layer, all items under the first rule, and under the second)."""
    found = evidence.exits
    for task in found.tasks:
        for minimum in found.minima:
            yield task, minimum, found.answered(task, first, minimum), found.answered(task, second, minimum)


def loss_of(reference, candidate, threshold, rng) -> Estimate:
    return difference(reference.score, candidate.score, threshold=threshold, rng=rng, unit="score lost")


def part_legs(evidence, where, plain, pruned, least) -> list[Leg]:
    """FLOP ratios of the three parts; the confidence part is judged where a threshold is given."""
    geometry, n = evidence.loaded.geometry, len(plain.texts)
    ours, theirs = pruned.costs(geometry), plain.costs(geometry)
    ratios = {part: ratio(getattr(theirs, part), getattr(ours, part)) for part in PARTS}
    first = judged_count(f"{where}: confidence FLOPs", ratios["confidence"], n, least)
    return [
        first,
        counted(f"{where}: decoder and confidence FLOPs", ratios["decoding"], n, UNIT),
        counted(f"{where}: all FLOPs, encoder included", ratios["together"], n, UNIT),
    ]


def judged_count(name, value, n, least) -> Leg:
    """A counted number against a threshold, or a measured one where there is none."""
    if least is None:
        return counted(name, value, n, UNIT)
    return Leg(name, "survived" if value >= least else "falsified", float(value), None, n, least, UNIT, "counted")


def never_exiting(evidence, plain, pruned, least) -> list[Leg]:
    """A token that never exits: on the model under test and, measured beside it, on the paper's T5-large."""
    if not evidence.seq2seq or not exits.has_room(evidence.loaded.geometry):
        return []
    geometry = evidence.loaded.geometry
    minima = exits.minimum_layers(geometry.layers)
    return [*sized(evidence.name, geometry, minima, plain, pruned, least), *paper_sized(plain, pruned, None)]


def paper_sized(plain, pruned, least) -> list[Leg]:
    return sized(PAPERS, geometry_named(PAPERS), exits.PUBLISHED_MINIMA, plain, pruned, least)


def sized(name, geometry, minima, plain, pruned, least) -> list[Leg]:
    """Ratios for one token of ``geometry`` that never exits; adaptive sizes as if every readout were sure."""
    legs = []
    for minimum in minima:
        both = []
        for rule in (plain, pruned):
            signal, pruning = RULES[rule]
            point = early_exit(signal, geometry.layers, geometry.vocabulary, minimum, 2.0, pruning=pruning)
            both.append(costs(unexited(point, geometry, **CONTEXT), geometry))
        where = f"{name}, never exiting, j={minimum}"
        legs.append(judged_count(f"{where}: confidence FLOPs", ratio(both[0].confidence, both[1].confidence), 1, least))
        legs.append(
            counted(f"{where}: decoder and confidence FLOPs", ratio(both[0].decoding, both[1].decoding), 1, UNIT)
        )
    return legs
