"""The two models of a pair: what they share, the decoders that stand for them, and what their work costs.

    saving = 1 − (s + (1 − s) · P_S / P_L)     s: the large model's share of emitted tokens (EAD, abstract; ``cost``)

Which rule of switching or acceptance they decode under is said by whoever opens them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np

from emad_ref.decoding.branching import Walk
from emad_ref.decoding.drafting import drafting_point
from emad_ref.decoding.pair import Partner, shared_vocabulary
from emad_ref.decoding.switching import LARGE, SMALL
from emad_ref.errors import BadArgument
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.host import Host
from emad_ref.evidence.pair.answered import Result, record_of
from emad_ref.evidence.pair.sizes import Sizes
from emad_ref.evidence.study import Study
from emad_ref.meters.cost import token_share_cost
from emad_ref.meters.flops import flops
from emad_ref.models.loading import Loaded
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import default_probes
from emad_ref.protocol import Unsupported
from emad_ref.record import Floats, Work

OPTIONS = "--emad-pair"


class Models:
    """``small`` and ``large``: the evidence of each, which read the same ids. ``parameters``: of both, by argument.

    Raises:
        BadArgument: tokenizers that differ or are missing, an encoder-decoder, or a small model that is not smaller.
    """

    def __init__(self, small: Loaded, large: Loaded, study: Study, host: Host, size: Sizes):
        _require_decoders(small, large)
        self.vocabulary = shared_vocabulary(small, large)
        parameters = small.geometry.parameters(), large.geometry.parameters()
        if parameters[0] >= parameters[1]:
            raise BadArgument(
                OPTIONS,
                f"{small.name} ({parameters[0]:,} parameters), {large.name} ({parameters[1]:,})",
                "the small model to have fewer parameters than the large one",
                "name them the other way round, or take another pair",
            )
        self.parameters = {"small_parameters": float(parameters[0]), "large_parameters": float(parameters[1])}
        # a profile or margin of the study belongs to the model under test
        budget = replace(study.budget, calibrate=size.calibrate)
        own = replace(study, profile=None, margin=None, budget=budget)
        self.small, self.large = (Evidence(loaded, own, host) for loaded in (small, large))

    @property
    def both(self) -> tuple[Evidence, Evidence]:
        """In the order of ``switching.SMALL`` and ``LARGE``."""
        return self.small, self.large

    @property
    def fingerprint(self) -> str:
        return "+".join(evidence.fingerprint for evidence in self.both)

    @property
    def without_quality(self) -> str:
        """Why scores mean nothing; empty where they do."""
        return self.small.subject.without_quality or self.large.subject.without_quality

    # ------------------------------------------------------------ cost

    def saving(self, large_share: float) -> float:
        """The paper's: tokens weighted by parameters, catch-up left out."""
        return 1 - token_share_cost(large_share, **self.parameters)

    def share_for(self, saving: float) -> float:
        """The largest share of the large model that saves ``saving`` by the paper's cost; below 0 where none does."""
        ratio = self.parameters["small_parameters"] / self.parameters["large_parameters"]
        return (1 - saving - ratio) / (1 - ratio)

    @cached_property
    def counted(self) -> bool:
        """Whether both decoders count their work, so that the ledger speaks for them."""
        with self.partners() as both:
            return all(partner.decoder.capabilities.counted for partner in both)

    def flops(self, work: Mapping[int, Work]) -> int:
        """FLOPs of what the models executed, by their numbers."""
        return sum(flops(part, self.both[model].loaded.geometry).total for model, part in work.items())

    def walked(self, walks: Sequence[Walk], opening: bool = False) -> int:
        """FLOPs of ``walks``, or of ``opening`` them with the prompts alone, by what our full depth executes."""
        layers = [evidence.subject.stepper.layers for evidence in self.both]
        return sum(
            self.flops({model: walk.work(model, layers[model], opening)}) for walk in walks for model in (SMALL, LARGE)
        )

    def spent(self, results: Sequence[Result], model: int = LARGE) -> Floats | None:
        """FLOPs of each result, prompts included; None if a decoder does not count.

        Where one model alone did the work, it was ``model``.
        """
        spent = []
        for one in results:
            work = record_of(one).work
            if work is None:
                return None
            spent.append(self.flops({model: work[0]} if len(work) == 1 else work))
        return np.array(spent, dtype=np.float64)

    # ------------------------------------------------------------ decoders

    @contextmanager
    def partners(
        self,
        small: OperatingPoint | None = None,
        large: OperatingPoint | None = None,
        rows: int = 1,
        *,
        audited: bool = False,
    ) -> Iterator[tuple[Partner, Partner]]:
        """Decoders of both models from the host, at full depth unless points are given, open as long as the block.

        ``audited``: a verdict reads what they answer, which costs too much to watch where it is timed.

        Raises:
            Refuted: as ``Subject.open_audited``.
        """
        points = small or self.small.subject.full, large or self.large.subject.full
        with ExitStack() as stack:
            made = [
                (evidence.subject.open_audited if audited else evidence.subject.open)(point, max_rows=rows)
                for evidence, point in zip(self.both, points, strict=True)
            ]
            one, other = (
                Partner(stack.enter_context(each), point, self.vocabulary)
                for each, point in zip(made, points, strict=True)
            )
            yield one, other

    @contextmanager
    def drafting(self, rows: int = 1) -> Iterator[Partner]:
        """The large model at full depth, able to draft for itself, open as long as the block.

        Raises:
            Unsupported: its decoder does not take up tokens that stopped early.
        """
        point = drafting_point(self.large.subject.stepper.layers)
        with self.large.subject.open(point, max_rows=rows) as decoder:
            if not decoder.capabilities.deepens:
                raise Unsupported("the decoder does not take up tokens that stopped early: it cannot draft for itself")
            yield Partner(decoder, point, self.vocabulary)

    @cached_property
    def without_drafting(self) -> str:
        """Why the large model cannot draft for itself; empty where it can."""
        try:
            with self.drafting():
                return ""
        except Unsupported as refusal:
            return str(refusal)

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """After which layers the large model drafts for itself: its default probes; none where it cannot."""
        return () if self.without_drafting else default_probes(self.large.subject.stepper.layers)


def _require_decoders(*models: Loaded) -> None:
    readers = [model.name for model in models if model.geometry.encoder_layers]
    if readers:
        raise BadArgument(OPTIONS, ", ".join(readers), "decoder-only models", "tasks have no source")
