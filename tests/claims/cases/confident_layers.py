"""Simulated documents whose perplexity changes by a known amount where another layer than the last is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pytest_emad.claims.confident_layers import ConfidentLayerEvidence, find_confident_layers
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.cases.quality import documents, items
from tests.claims.simulated_exits import leg_by_name, near
from tests.claims.simulation import Case, celled, says

# ---------------------------------------------------------------- EMAD-X7
#
# Documents of a known rise of perplexity; and tokens whose entropies lead the search to a good or a bad layer.

LAYERS, WINDOW = 8, 2
Draw = Callable[[np.random.Generator], ConfidentLayerEvidence]


def risen(rise: float, count: int = 400, lost: float = 0.02) -> Draw:
    def draw(rng: np.random.Generator) -> ConfidentLayerEvidence:
        return ConfidentLayerEvidence(*documents(rng, rise, count), 0.2, {"facts": items(rng, lost, 400)})

    return draw


def searched(perturbed: bool) -> Draw:
    """At half of the tokens the last layer raises entropy, and their loss as well if it perturbs; else it refines."""

    def draw(rng: np.random.Generator) -> ConfidentLayerEvidence:
        entropy = rng.uniform(1.0, 2.0, (400, 50, 1)) - 0.1 * np.arange(LAYERS)  # falls from layer to layer
        nll = entropy + rng.normal(0.0, 0.01, entropy.shape)
        late = rng.random((400, 50)) < 0.5
        entropy[late, -1] += 0.3
        nll[late, -1] += 0.2 if perturbed else 0.0
        chosen = find_confident_layers(entropy.reshape(-1, LAYERS), WINDOW).reshape(late.shape)
        assert ((chosen == LAYERS - 1) == late).all()
        found = np.take_along_axis(nll, chosen[..., None] - 1, axis=-1)[..., 0].sum(axis=1)
        columns = map(ByDocument.from_whole_documents, (found, nll[..., -1].sum(axis=1), np.full(400, 50)))
        return ConfidentLayerEvidence(*columns, float(late.mean()), {})

    return draw


def never_moved(rng: np.random.Generator) -> ConfidentLayerEvidence:
    return replace(risen(0.0)(rng), moved=0.0)


def the_task_is_measured(verdict: Verdict) -> None:
    near({"facts: accuracy lost": 0.02}, 0.03)(verdict)  # 400 items: four errors of 0.7 points
    assert leg_by_name(verdict)["facts: accuracy lost"].outcome == "measured"


EMAD_X7 = [
    Case("perplexity falls by a twentieth", "holds", risen(-0.05), draws=5, check=the_task_is_measured),
    Case("perplexity rises by a per cent", "fails", risen(0.01), draws=5),
    Case("a last layer that perturbs", "holds", searched(perturbed=True), draws=3),
    Case("a last layer that refines", "fails", searched(perturbed=False), draws=3),
    Case("no other layer is found", "premise", never_moved, check=says("entropy falls into the last layer")),
    *celled(
        "perplexity stays as it is",
        "edge",
        lambda n, icc: risen(0.0, n),
        n=(200, 400),
        icc=(0.0,),
        draws=12,
    ),
]

CASES = {"EMAD-X7": EMAD_X7}
