"""The two models of a pair: shared vocabulary, decoders and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from emad_ref.absent import Absent
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.prefix_tree import SwitchedText
from emad_ref.decoding.self_speculation import drafting_point, self_speculate
from emad_ref.decoding.speculation import VERIFIER, SpeculationResult, speculate
from emad_ref.decoding.switching import LARGE, SMALL
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import default_probes
from emad_ref.flop_ledger import flops, two_model_cost_at_large_share
from emad_ref.models.loading import LoadedModel, shared_vocabulary_size
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, Prompt, Session, Step, Unsupported
from emad_ref.record import DRAFT, Bools, Floats, Record, TokenTable, Work
from pytest_emad.measurements.latency import Decoding, get_decoding_record
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import PairSampleSizes, Study

PAIR_OPTION = "--emad-pair"
DRAFT_TOKENS = 4  # default k of speculative decoding


class PairModels:
    """``small`` and ``large``: measurements of each; both read the same token ids.

    Raises:
        BadArgument: tokenizers that differ or are missing, an encoder-decoder, or a small model that is not smaller.
    """

    def __init__(
        self, small: LoadedModel, large: LoadedModel, study: Study, resources: RunResources, size: PairSampleSizes
    ):
        _require_decoders(small, large)
        self.vocabulary = shared_vocabulary_size(small, large)
        parameters = small.geometry.parameter_count(), large.geometry.parameter_count()
        if parameters[0] >= parameters[1]:
            raise BadArgument(
                PAIR_OPTION,
                f"{small.name} ({parameters[0]:,} parameters), {large.name} ({parameters[1]:,})",
                "the small model to have fewer parameters than the large one",
                "name them the other way round, or take another pair",
            )
        self.parameters = {"small_parameters": float(parameters[0]), "large_parameters": float(parameters[1])}
        # a profile or margin of the study belongs to the model under test
        budget = replace(study.budget, calibrate=size.calibrate)
        own = replace(study, profile=None, margin=None, budget=budget)
        self.small, self.large = (ModelMeasurements(loaded, own, resources) for loaded in (small, large))

    @property
    def both(self) -> tuple[ModelMeasurements, ModelMeasurements]:
        """Both, in the order of ``switching.SMALL`` and ``LARGE``."""
        return self.small, self.large

    @property
    def fingerprint(self) -> str:
        return "+".join(evidence.fingerprint for evidence in self.both)

    @property
    def absent_quality(self) -> Absent | None:
        """Why scores are meaningless; None if they are meaningful."""
        return self.small.subject.absent_quality or self.large.subject.absent_quality

    # ------------------------------------------------------------ cost

    def compute_paper_saving(self, large_share: float) -> float:
        """The paper's saving (EAD, abstract): tokens weighted by parameters, without catch-up."""
        return 1 - two_model_cost_at_large_share(large_share, **self.parameters)

    def large_share_at_saving(self, saving: float) -> float:
        """The largest share of the large model that saves ``saving`` by the paper's cost; below 0 if none does."""
        ratio = self.parameters["small_parameters"] / self.parameters["large_parameters"]
        return (1 - saving - ratio) / (1 - ratio)

    @cached_property
    def _capabilities(self) -> tuple[Capabilities, ...]:
        """Of both decoders, small first."""
        with self.open_partners() as both:
            return tuple(partner.decoder.capabilities for partner in both)

    @property
    def has_work_counts(self) -> bool:
        """Whether both decoders count their work."""
        return all(each.counted for each in self._capabilities)

    def compute_flops_of_work(self, work: Mapping[int, Work]) -> int:
        """FLOPs of the models' executed work, by their geometries."""
        return sum(flops(part, self.both[model].loaded.geometry).total for model, part in work.items())

    def compute_switched_flops(self, walks: Sequence[SwitchedText], opening: bool = False) -> int:
        """FLOPs of ``walks``, or only of ``opening`` them with the prompts, at full depth by these decoders' feeds."""
        sizes = [
            (evidence.subject.stepper.layers, each.max_feed)
            for evidence, each in zip(self.both, self._capabilities, strict=True)
        ]
        return sum(
            self.compute_flops_of_work({model: walk.compute_work_of_model(model, *sizes[model], opening)})
            for walk in walks
            for model in (SMALL, LARGE)
        )

    def compute_flops_per_decoding(self, results: Sequence[Decoding]) -> Floats | None:
        """FLOPs of each result, prompts included, of the large model if only one worked; None without counts."""
        spent = []
        for one in results:
            work = get_decoding_record(one).work
            if work is None:
                return None
            spent.append(self.compute_flops_of_work({LARGE: work[0]} if len(work) == 1 else work))
        return np.array(spent, dtype=np.float64)

    # ------------------------------------------------------------ decoders

    @contextmanager
    def open_partners(
        self,
        small: OperatingPoint | None = None,
        large: OperatingPoint | None = None,
        rows: int = 1,
        *,
        audited: bool = False,
    ) -> Iterator[tuple[Partner, Partner]]:
        """Open decoders of both models for the block, at full depth unless points are given.

        ``audited``: check a few random answers, which may raise AuditRefutedError; too costly for timed ones.
        """
        points = small or self.small.subject.full_depth_point, large or self.large.subject.full_depth_point
        with ExitStack() as stack:
            partners = [
                (evidence.subject.open_audited_decoder if audited else evidence.subject.open_decoder)(
                    point, max_rows=rows
                )
                for evidence, point in zip(self.both, points, strict=True)
            ]
            one, other = (
                Partner(stack.enter_context(each), point, self.vocabulary)
                for each, point in zip(partners, points, strict=True)
            )
            yield one, other

    @contextmanager
    def open_self_drafter(self, rows: int = 1) -> Iterator[Partner]:
        """Open the large model at full depth for self-speculation in the block.

        Raises:
            Unsupported: its decoder cannot complete tokens that stopped early.
        """
        point = drafting_point(self.large.subject.stepper.layers)
        with self.large.subject.open_decoder(point, max_rows=rows) as decoder:
            if not decoder.capabilities.deepens:
                raise Unsupported("the decoder does not take up tokens that stopped early: it cannot draft for itself")
            yield Partner(decoder, point, self.vocabulary)

    @cached_property
    def absent_drafting(self) -> Absent | None:
        """Why the large model cannot draft for itself; None if it can."""
        try:
            with self.open_self_drafter():
                return None
        except Unsupported as refusal:
            return Absent(str(refusal), "premise")

    @property
    def drafting_exit_layers(self) -> tuple[int, ...]:
        """Exit layers of the large model's self-speculation: its default probes; empty if it cannot draft."""
        return () if self.absent_drafting else default_probes(self.large.subject.stepper.layers)


def _require_decoders(*models: LoadedModel) -> None:
    readers = [model.name for model in models if model.geometry.encoder_layers]
    if readers:
        raise BadArgument(PAIR_OPTION, ", ".join(readers), "decoder-only models", "tasks have no source")


@dataclass(frozen=True)
class SpeculativeDecoder:
    """Speculative decoding as a decoder of its verifier's point, with the same output.

    ``decode`` emits; ``promised`` selects the verifier's rows of its record. It does not count work, since drafts add
    work to the verifier's.
    """

    verifier: Partner
    decode: Callable[[Sequence[Prompt], int, frozenset[int]], SpeculationResult]
    promised: Callable[[TokenTable], Bools]

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.verifier.decoder.capabilities, counted=False, deepens=False)

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        raise Unsupported("speculative decoding has no session of its own: judge what it generates")

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        record = self.decode(prompts, max_new, stop).record
        mine, table = self.promised(record.tokens), record.tokens
        columns = {field.name: getattr(table, field.name)[mine] for field in fields(TokenTable)}
        tokens = TokenTable(**columns | {"model": np.zeros(int(mine.sum()), dtype=np.int64)})
        signal = record.signal[mine][:, : len(self.verifier.point.probes)]
        return Record(tokens, signal, record.emitted, record.stop)

    def synchronize(self) -> None:
        self.verifier.decoder.synchronize()

    def close(self) -> None:
        """The partners belong to the caller."""


def make_speculative_decoder(draft: Partner, verifier: Partner) -> SpeculativeDecoder:
    """One model drafts ``DRAFT_TOKENS``, another verifies."""
    return SpeculativeDecoder(
        verifier,
        lambda prompts, new, stop: speculate(draft, verifier, prompts, new, k=DRAFT_TOKENS, stop=stop),
        lambda tokens: tokens.model == VERIFIER,
    )


def make_self_speculative_decoder(model: Partner, exit_layer: int) -> SpeculativeDecoder:
    """One model drafts ``DRAFT_TOKENS`` after ``exit_layer`` and verifies at its ceiling."""
    return SpeculativeDecoder(
        model,
        lambda prompts, new, stop: self_speculate(model, exit_layer, prompts, new, k=DRAFT_TOKENS, stop=stop),
        lambda tokens: tokens.phase != DRAFT,
    )
