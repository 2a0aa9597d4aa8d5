"""The same requests in time and in FLOPs: one item per pair, as many new tokens for every rule, no stop token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from emad_ref.evidence.exits.costs import Costs, costs
from emad_ref.evidence.subject import Subject
from emad_ref.meters.clock import Timings, paired
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import Work

WARM_UP = 2  # pairs that are not timed


def timed(
    subject: Subject, prompts: Sequence[Prompt], points: Mapping[str, OperatingPoint], pairs: int, new: int
) -> Timings:
    """Paired seconds of full depth (``full``) and of each of ``points``; items are asked again where there are fewer.

    Raises:
        Unsupported: the decoder under test declines one of them.
    """
    with ExitStack() as stack:
        decoders = {
            name: stack.enter_context(subject.open(point)) for name, point in {"full": subject.full, **points}.items()
        }

        def arm(decoder: Decoder) -> Callable[[int], None]:
            def run(pair: int) -> None:
                decoder.generate([prompts[pair % len(prompts)]], new, frozenset())

            return run

        return paired(
            {name: arm(decoder) for name, decoder in decoders.items()},
            pairs,
            np.random.default_rng(subject.seed),
            warm_up=WARM_UP,
            synchronize=decoders["full"].synchronize,
        )


def forced_costs(subject: Subject, prompts: Sequence[Prompt], point: OperatingPoint, pairs: int, new: int) -> Costs:
    """FLOPs per item of the requests that ``timed`` times.

    Raises:
        Unsupported: the decoder under test declines the point, or does not count its work.
    """
    requests = range(WARM_UP, WARM_UP + pairs)
    with subject.open_audited(point) as decoder:
        records = [decoder.generate([prompts[pair % len(prompts)]], new, frozenset()) for pair in requests]
    works = [record.work[0] for record in records if record.work is not None]
    if len(works) < len(records):
        raise Unsupported("the decoder does not count its work")
    return costs(sum(works, Work.none(subject.stepper.layers)), subject.loaded.geometry, len(works))
