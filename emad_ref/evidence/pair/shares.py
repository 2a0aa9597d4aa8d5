"""A race of a pair divided over fresh processes: as ``evidence.fresh`` divides one model's, with both models loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from emad_ref.evidence.fresh import require_same_arms
from emad_ref.evidence.host import Host
from emad_ref.evidence.pair.arms import WARM_UP, Arming, Drawn, Timed, clocked
from emad_ref.evidence.pair.library import library
from emad_ref.evidence.pair.models import Models
from emad_ref.evidence.pair.sizes import Sizes
from emad_ref.evidence.study import Study
from emad_ref.evidence.subject import open_model
from emad_ref.models.again import OtherWeights
from emad_ref.readout.attached import attach_all
from emad_ref.record import Ints
from emad_ref.verdict.units import ByPair


@dataclass(frozen=True, eq=False)
class Share:
    """What one process times: the models ``names`` under ``study``, by ``arming`` and by transformers' own ways.

    ``attached``  of the small and of the large model, what points name by digest.
    """

    names: tuple[str, str]
    fingerprint: str
    study: Study
    size: Sizes
    arming: Arming
    attached: tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
    drawn: Drawn

    def run(self, host: Host) -> Timed:
        """This share's pairs, timed.

        Raises:
            OtherWeights: a model has changed since the run began.
            Unsupported, BadArgument, DecoderFailed: as the decoder under test raises them.
        """
        with ExitStack() as stack:
            small, large = (stack.enter_context(open_model(name, self.study)) for name in self.names)
            models = Models(small, large, self.study, host, self.size)
            if models.fingerprint != self.fingerprint:
                raise OtherWeights(f"{' + '.join(self.names)} are not the models any more with which the run began")
            for evidence, attached in zip(models.both, self.attached, strict=True):
                attach_all(evidence.subject.stepper, attached)
            others = library(small, large, self.drawn.prompts[0]).arms
            return clocked(models, {**self.arming(models, stack), **others}, self.drawn)


def share_of(drawn: Drawn, pairs: Ints, number: int) -> Drawn:
    """``pairs`` of all that is drawn, behind the same warm-up, in an order of arms that ``number`` draws."""
    prompts = [*drawn.prompts[:WARM_UP], *(drawn.prompts[WARM_UP + pair] for pair in pairs)]
    return replace(drawn, prompts=prompts, seed=(*drawn.seed, number))


def joined(parts: Sequence[Timed]) -> Timed:
    """All pairs, in the order of ``parts``, one of each process.

    Raises:
        AfreshFailed: they timed different arms.
    """
    arms = require_same_arms([list(part.seconds) for part in parts])
    process = np.repeat(np.arange(len(parts)), [len(part.prompts) for part in parts])
    return Timed(
        {arm: ByPair(np.concatenate([part.seconds[arm].values for part in parts]), process) for arm in arms},
        {arm: list(chain.from_iterable(part.results[arm] for part in parts)) for arm in arms},
        parts[0].new,
        list(chain.from_iterable(part.prompts for part in parts)),
    )
