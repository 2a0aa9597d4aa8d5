"""Seconds a token, predicted from what parts cost, beside those that decoding takes: within a tenth, in both modes.

Run on request: ``pytest --run-slow -s tests/benchmarks/test_predicted_time.py``; a minute or two.

Random weights of Pythia-410M's geometry, one thread, one row. Predicted and measured take turns in one process, and are
compared by their medians, in seconds of CPU time: on a machine that is shared, the wall clock also shows who else ran.
Depths and acceptance are fixed by the test: exits by thresholds at each position, drafts by a reader that runs as usual
and then says the model's own next token, or another, as often as it is told to.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

import emad_ref
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, DraftingDecoder
from emad_ref.point import BinSpec, Estimator, OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.screening.drafts import seconds_per_token_drafting
from emad_ref.screening.prediction import measure_costs, passes_of, seconds_per_token, shares_of
from tests.lenses import attached
from tests.rounds import rounds_of

pytestmark = pytest.mark.slow

WITHIN = 0.10
SECONDS = 8.0
EARLY, LATER = 8, 16
PROMPT = Prompt(np.array([1, 2, 3, 4]))
NEW = 13
MIXED = (24, 8, 16, 24, 8, 8, 16, 24)
FALLING = tuple(sorted(MIXED, reverse=True))
DRAFTS = {  # name → layer, longest, share of drafts that are right
    "2 layers, 3 drafts, 80 %": (2, 3, 0.8),
    "4 layers, 5 drafts, 90 %": (4, 5, 0.9),
}


class Scripted:
    """A reader of drafts that runs as ``reader`` does, and says what the model itself would with this probability."""

    def __init__(self, reader, text, share):
        self.reader, self.text, self.share = reader, text, share
        self.begin()

    def begin(self):
        self.rng, self.at, self.right = np.random.default_rng(0), 1, []

    def expected(self, hidden, work):
        return self.reader.expected(hidden, work)

    def tokens(self, hidden, work):
        said = self.reader.tokens(hidden, work)
        own = self.text[self.at + len(self.right)]
        self.right.append(bool(self.rng.random() < self.share))
        return torch.full_like(said, own if self.right[-1] else own + 1)

    def verified(self):
        self.at += [*self.right, False].index(False) + 1
        self.right = []


class ScriptedDecoder(DraftingDecoder):
    """Drafts by a script."""

    def __init__(self, stepper, drafting, text, share):
        super().__init__(stepper, drafting)
        self._reader = Scripted(self._reader, text, share)

    def generate(self, prompts, max_new, stop=frozenset()):
        self._reader.begin()
        return super().generate(prompts, max_new, stop)

    def _verified(self, *run):
        found = super()._verified(*run)
        self._reader.verified()
        return found


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield emad_ref.load("random:pythia-410m")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def compared(model):
    """Arm → (predicted, [laps] measured) seconds a token; whole full-depth tokens by the costs' own check, too."""
    stepper = model.stepper
    layers, width = stepper.layers, stepper.unembedding.shape[1]
    digest = attached(stepper, (2, 4, EARLY, LATER))
    points = _points(layers, width, digest)
    ids = np.arange(0, stepper.vocabulary, 32)
    gate = Estimator("linear", weights=((0.0,) * (width + 1),))  # 0 √nats: always below
    drafts = {
        name: Drafting(layer, longest, threshold=1.0, lens=digest, gate=gate, vocabulary=ids)
        for name, (layer, longest, _) in DRAFTS.items()
    }
    text = WalkedDecoder(stepper, full_depth(layers)).generate([PROMPT], NEW + 8).emitted[0].tolist()
    decoders = {name: WalkedDecoder(stepper, point) for name, (point, _) in points.items()}
    decoders |= {name: ScriptedDecoder(stepper, each, text, DRAFTS[name][2]) for name, each in drafts.items()}
    taken = {name: [] for name in decoders}
    records = {}

    def beside(lap):
        order = np.random.default_rng(lap).permutation(list(decoders)).tolist()
        for name in order:
            prompt, new = (PROMPT, NEW) if name in drafts else (Prompt(np.array([1])), len(MIXED))
            opened = _timed(decoders[name], prompt, 1)[0] if name in drafts else 0.0
            seconds, records[name] = _timed(decoders[name], prompt, new)
            taken[name].append((seconds - opened) / (new - (name in drafts)))

    costs = measure_costs(stepper, seconds=SECONDS, clock=time.process_time, between=beside)
    found = {}
    for name, (point, depths) in points.items():
        assert records[name].tokens.depth.tolist() == list(depths), name
        passes = passes_of([np.array(depths)], layers) if point.schedule == "free_deferred" else None
        shares = shares_of(np.array(depths), layers)
        found[name] = seconds_per_token(costs, point, shares, keys=len(depths) / 2, passes=passes)
    for name, drafting in drafts.items():
        assert records[name].emitted[0].tolist() == text[:NEW], "drafting changes nothing"
        rounds = rounds_of(records[name], drafting.longest)
        found[name] = seconds_per_token_drafting(costs, drafting, rounds, keys=len(PROMPT.tokens) + NEW / 2)
    return {name: (seconds, np.array(taken[name])) for name, seconds in found.items()}


def _timed(decoder, prompt, new):
    start = time.process_time()
    record = decoder.generate([prompt], new, frozenset())
    return time.process_time() - start, record


def _points(layers, width, lens):
    """Name → (point, the depth it gives to each position)."""
    levels = {
        EARLY: (math.inf, math.inf),
        LATER: (-math.inf, math.inf),
        layers: (-math.inf, -math.inf),
    }

    def forced(schedule, depths, **fields):
        bins = BinSpec(("position",), position_edges=tuple(range(1, len(depths))))
        rows = tuple(levels[depth] for depth in depths)
        probes = (EARLY, LATER)
        return OperatingPoint(schedule, "forced", layers, layers, probes, rows, schedule, bins=bins, **fields), depths

    linear = Estimator("linear", weights=((0.0,) * (width + 1),) * 2)
    return {
        "full depth": (full_depth(layers), (layers,) * 8),
        "monotone through a lens": forced("monotone", FALLING, lens=lens),
        "copying": forced("copying", MIXED),
        "copying by a gate through a lens": forced("copying", MIXED, estimator=linear, lens=lens),
        "deferred by a gate": forced("free_deferred", MIXED, estimator=linear),
    }


def test_time_is_predicted_within_a_tenth_in_both_modes(compared):
    off = {}
    for name, (predicted, taken) in compared.items():
        measured = float(np.median(taken))
        off[name] = predicted / measured - 1
        low, high = taken.min() / measured - 1, taken.max() / measured - 1
        print(
            f"{name:34s} predicted {predicted * 1e3:7.1f} ms, measured {measured * 1e3:7.1f} ms a token: "
            f"{off[name]:+.1%}; {len(taken)} laps from {low:+.1%} to {high:+.1%}"
        )
    assert len(off) == 5 + len(DRAFTS)
    assert all(abs(each) <= WITHIN for each in off.values()), off
