"""All evidence about one pair under one study: where its holders meet. None of them knows this module."""

from __future__ import annotations

from functools import cached_property

from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.host import Host
from emad_ref.evidence.pair.answers import Answers
from emad_ref.evidence.pair.asked import TEXTS, WORLD, WorldTask
from emad_ref.evidence.pair.models import Models
from emad_ref.evidence.pair.names import PairNames
from emad_ref.evidence.pair.rules import Rules
from emad_ref.evidence.pair.sizes import SIZES, Sizes
from emad_ref.evidence.pair.timing import Timing
from emad_ref.evidence.study import Study
from emad_ref.models.loading import Loaded


class Pair:
    """Lazily gathered evidence about two loaded models that read the same ids.

    Args:
        names: as the user gave them, the small model's first.
        savings: of the paper's results, thresholds of EAD-F1 in force; the rule put forward must save the first.
        size: items and pairs; None: those of the study's budget.

    Raises:
        BadArgument: as ``Models``.
    """

    def __init__(
        self,
        small: Loaded,
        large: Loaded,
        study: Study,
        host: Host,
        *,
        names: tuple[str, str],
        savings: tuple[float, ...],
        size: Sizes | None = None,
    ):
        self.names, self.study, self.savings = PairNames(*names), study, savings
        self.size = size or SIZES[study.budget.name]
        self.models = Models(small, large, study, host, self.size)

    # ------------------------------------------------------------ what reports say of it

    @property
    def name(self) -> str:
        return self.names.name

    @property
    def corpus(self) -> str:
        """What it was asked: the world's tasks, lm-eval's that were named, plain documents where there is neither."""
        scored = self.answers.scored if not self.models.without_quality else {}
        own = [WORLD] if any(isinstance(task, WorldTask) for task in scored.values()) else []
        named = [name for name, task in scored.items() if not isinstance(task, WorldTask)]
        return ", ".join([*own, *named]) or TEXTS

    @property
    def fingerprint(self) -> str:
        return self.models.fingerprint

    # ------------------------------------------------------------ holders

    @property
    def small(self) -> Evidence:
        return self.models.small

    @property
    def large(self) -> Evidence:
        return self.models.large

    @cached_property
    def answers(self) -> Answers:
        """Items answered by each way to decode."""
        return Answers(self.models, self.study.seed, self.size.compared)

    @cached_property
    def rules(self) -> Rules:
        """Tasks worth routing, and the rules that validation puts forward."""
        return Rules(self.answers, self.size, self.name, self.savings)

    @cached_property
    def timing(self) -> Timing:
        """Paired seconds of the ways to answer."""
        return Timing(self.rules, self.names, self.study)
