"""What one run knows of a pair: a small and a large model that write one text; items of tasks, answered by decoding.

    validation   which tasks the large model is better at; τ for several shares of the large model; what each costs
    evaluation   the points so chosen, speculative decoding (drafted by the small model, or by the first layers of the
                 large one) and the large model alone, on the same items

    saving = 1 − (s + (1 − s) · P_S / P_L)     s: the large model's share of emitted tokens (EAD, abstract; ``cost``)

Score is the share of items answered right by greedy generation. Work, shares and acceptance are read off records and
kept; nothing is derived from what a run should have done. Requests of equal length share a batch, so that no padding
is charged to anybody; where the score alone is asked for, any do. Switching runs row by row (``decoding.switching``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from emad_ref.decoding.acceptance import ACCEPTED, GATED, Speculated
from emad_ref.decoding.pair import Log, Partner, Seat, shared_vocabulary
from emad_ref.decoding.selfdraft import drafting_point, self_speculate
from emad_ref.decoding.speculative import VERIFIER, speculate
from emad_ref.decoding.switching import LARGE, SMALL, Switched, SwitchingRule, switch
from emad_ref.errors import BadArgument
from emad_ref.meters.clock import Timings, paired
from emad_ref.meters.cost import token_share_cost
from emad_ref.meters.flops import flops
from emad_ref.models.loading import Loaded
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import default_probes
from emad_ref.protocol import Capabilities, Decoder, Prompt, Request, Session, Step, Unsupported
from emad_ref.record import DECODE, DRAFT, PROMPT, Bools, Floats, Ints, Record, Tokens, Work
from emad_ref.sweep.routing import Routing, best_within_share, threshold_for_share
from emad_ref.tasks.scoring import Item, item_of, runs
from emad_ref.text import world
from emad_ref.text.documents import Split
from emad_ref.verdict.interval import Estimate, mean_rate
from pytest_emad.auditing import Auditor
from pytest_emad.options import Settings
from pytest_emad.recording import Recorder
from pytest_emad.scored import GENERATED_LINE
from pytest_emad.session import Evidence

WORTH_ROUTING = 0.10  # accuracy by which the large model must be better on a task
SHARES = (0.1, 0.5, 0.9)  # of the small model's rolling entropies above τ: thresholds tried on validation
DRAFTED = 4  # k of speculative decoding where none is named
ROWS = 32
CORPUS = "world tasks"

Result = Switched | Speculated | Record
Arm = Callable[[Prompt, int], Result]
Done = TypeVar("Done", Speculated, Record)


@dataclass(frozen=True)
class Sizes:
    """Items per task: on which models are compared, on which thresholds are tried, and on which verdicts rest.

    ``calibrate``: documents behind EMAD's thresholds of either model; ``reported``: pairs of a row that only reports.
    """

    compared: int
    tried: int
    judged: int
    calibrate: int
    reported: int


SIZES: dict[str, Sizes] = {
    "smoke": Sizes(60, 16, 100, 30, 8),
    "standard": Sizes(200, 60, 300, 100, 30),
    "full": Sizes(400, 150, 800, 300, 60),
}


@dataclass(frozen=True, eq=False)  # holds arrays: a result is itself, not its values
class Answered:
    """How items were answered, every column [items]: ``right``, tokens ``emitted``, and those ``by_large``.

    ``flops`` executed, prompts included; None where a decoder does not count. ``runs``: the results they came from.
    """

    right: Bools
    emitted: Ints
    by_large: Ints
    flops: int | None
    runs: tuple[Result, ...]

    @property
    def score(self) -> float:
        return float(self.right.mean())

    @property
    def large_share(self) -> float:
        return float(self.by_large.sum() / self.emitted.sum())

    @property
    def flops_per_token(self) -> float | None:
        return None if self.flops is None else self.flops / int(self.emitted.sum())

    @property
    def acceptance(self) -> float | None:
        """Accepted over judged drafts of all runs; None where nothing was drafted."""
        runs = [one for one in self.runs if isinstance(one, Speculated)]
        judged = sum(one.judged for one in runs)
        return sum(int(one.drafted(ACCEPTED).sum()) for one in runs) / judged if judged else None


class Pair:
    """Lazily gathered evidence about two loaded models that read the same ids.

    ``least_saving``: what the rule put forward must save on validation, by the paper's cost.

    Raises:
        BadArgument: tokenizers that differ or are missing, an encoder-decoder, or a small model that is not smaller.
    """

    def __init__(
        self,
        small: Loaded,
        large: Loaded,
        settings: Settings,
        make_decoder: Callable[[Request], Decoder],
        *,
        least_saving: float,
    ) -> None:
        _require_decoders(small, large)
        self.vocabulary = shared_vocabulary(small, large)
        sizes = small.geometry.parameters(), large.geometry.parameters()
        if sizes[0] >= sizes[1]:
            raise BadArgument(
                "--emad-small-model, --emad-large-model",
                f"{small.name} ({sizes[0]:,} parameters), {large.name} ({sizes[1]:,})",
                "the small model to have fewer parameters than the large one",
                "name them the other way round, or take another pair",
            )
        self.settings, self.size, self.least_saving = settings, SIZES[settings.budget.name], least_saving
        # a profile or margin of the command line belongs to the model under test
        budget = replace(settings.budget, calibrate=self.size.calibrate)
        own = replace(settings, profile=None, margin=None, budget=budget)
        self.small, self.large = (Evidence(loaded, own, make_decoder) for loaded in (small, large))
        self.parameters = {"small_parameters": float(sizes[0]), "large_parameters": float(sizes[1])}
        self._items: dict[tuple[str, Split, int], list[Item]] = {}
        self._answers: dict[tuple[object, ...], Answered] = {}

    @property
    def name(self) -> str:
        return name_of(self.settings)

    @property
    def fingerprint(self) -> str:
        return f"{self.small.fingerprint}+{self.large.fingerprint}"

    @property
    def without_quality(self) -> str:
        """Why scores mean nothing; empty where they do."""
        return self.small.without_quality or self.large.without_quality

    def saving(self, large_share: float) -> float:
        """The paper's: tokens weighted by parameters, catch-up left out."""
        return 1 - token_share_cost(large_share, **self.parameters)

    def flops(self, work: Mapping[int, Work]) -> int:
        """FLOPs of what the models executed, by their numbers."""
        models = (self.small, self.large)
        return sum(flops(part, models[model].loaded.geometry).total for model, part in work.items())

    # ------------------------------------------------------------ decoders

    @contextmanager
    def partners(
        self, small: OperatingPoint | None = None, large: OperatingPoint | None = None, rows: int = 1
    ) -> Iterator[tuple[Partner, Partner]]:
        """Decoders of both models from the hook, at full depth unless points are given, open as long as the block."""
        points = small or self.small.full, large or self.large.full
        with ExitStack() as stack:
            yield (
                Partner(stack.enter_context(self.small.open(points[0], max_rows=rows)), points[0], self.vocabulary),
                Partner(stack.enter_context(self.large.open(points[1], max_rows=rows)), points[1], self.vocabulary),
            )

    @contextmanager
    def drafting(self, rows: int = 1) -> Iterator[Partner]:
        """The large model at full depth, able to draft for itself, open as long as the block.

        Raises:
            Unsupported: its decoder does not take up tokens that stopped early.
        """
        point = drafting_point(self.large.stepper.layers)
        with self.large.open(point, max_rows=rows) as decoder:
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
        return () if self.without_drafting else default_probes(self.large.stepper.layers)

    # ------------------------------------------------------------ answers

    def items(self, task: str, split: Split, count: int) -> list[Item]:
        key = (task, split, count)
        if key not in self._items:
            made = world.examples(task, split, count, self.settings.seed)
            self._items[key] = [item_of(example, self.large.tokenizer, self.large.opening) for example in made]
        return self._items[key]

    @cached_property
    def stop(self) -> frozenset[int]:
        return frozenset(self.large.tokenizer.encode("\n", add_special_tokens=False))

    def alone(self, model: int, task: str, split: Split, count: int, point: OperatingPoint | None = None) -> Answered:
        """Items answered by the ``SMALL`` or the ``LARGE`` model alone, at full depth or at ``point``."""
        evidence = (self.small, self.large)[model]
        chosen = point or evidence.full

        def run() -> Answered:
            items = self.items(task, split, count)
            emitted, done, _ = self._generated(evidence, chosen, items, _equal(items))
            lengths = np.array([len(tokens) for tokens in emitted])
            by_large = lengths if model == LARGE else np.zeros_like(lengths)
            return Answered(self._right(items, emitted), lengths, by_large, self._total(done, model), tuple(done))

        return self._kept(("alone", model, chosen, task, split, count), run)

    def _generated(
        self, evidence: Evidence, point: OperatingPoint, items: Sequence[Item], groups: list[list[int]]
    ) -> tuple[list[Ints], list[Record], list[list[int]]]:
        with evidence.open(point, max_rows=ROWS) as decoder:
            return _in_groups(items, groups, lambda prompts, new: decoder.generate(prompts, new, self.stop))

    def switched(self, rule: SwitchingRule, task: str, split: Split, count: int) -> Answered:
        """Items answered by EAD, both models at full depth."""

        def run() -> Answered:
            items = self.items(task, split, count)
            with self.partners() as (small, large):
                done = switch(small, large, rule, _prompts(items), longest(items), stop=self.stop)
            lengths = np.array([len(models) for models in done.model])
            by_large = np.array([int(models.sum()) for models in done.model])
            right = self._right(items, done.record.emitted)
            return Answered(right, lengths, by_large, self._total([done]), (done,))

        return self._kept(("switched", rule, task, split, count), run)

    def speculated(
        self,
        task: str,
        split: Split,
        count: int,
        *,
        k: int = DRAFTED,
        gate_bits: float | None = None,
        padded: bool = False,
    ) -> Answered:
        """Items answered by speculative decoding, both models at full depth; ``padded``: in full batches, where FLOPs
        do not matter.

        The large model's tokens are those that no draft stands for, whether accepted or waved through by the gate.
        """

        def run() -> Answered:
            items = self.items(task, split, count)
            with self.partners(rows=ROWS) as (small, large):

                def decode(prompts: list[Prompt], new: int) -> Speculated:
                    return speculate(small, large, prompts, new, k=k, stop=self.stop, gate_bits=gate_bits)

                emitted, done, groups = _in_groups(items, _full(items) if padded else _equal(items), decode)
            lengths = np.array([len(tokens) for tokens in emitted])
            by_large = lengths.copy()
            for rows, one in zip(groups, done, strict=True):
                by_large[rows] -= one.drafted(ACCEPTED) + one.drafted(GATED)
            return Answered(self._right(items, emitted), lengths, by_large, self._total(done), tuple(done))

        return self._kept(("speculated", k, gate_bits, padded, task, split, count), run)

    def self_speculated(self, exit_layer: int, task: str, split: Split, count: int, *, k: int = DRAFTED) -> Answered:
        """Items answered by the large model, which drafts for itself after ``exit_layer``: all tokens are its own."""

        def run() -> Answered:
            items = self.items(task, split, count)
            with self.drafting(rows=ROWS) as model:

                def decode(prompts: list[Prompt], new: int) -> Speculated:
                    return self_speculate(model, exit_layer, prompts, new, k=k, stop=self.stop)

                emitted, done, _ = _in_groups(items, _equal(items), decode)
            lengths = np.array([len(tokens) for tokens in emitted])
            return Answered(self._right(items, emitted), lengths, lengths, self._total(done), tuple(done))

        return self._kept(("self-speculated", exit_layer, k, task, split, count), run)

    def _kept(self, key: tuple[object, ...], run: Callable[[], Answered]) -> Answered:
        if key not in self._answers:
            self._answers[key] = run()
        return self._answers[key]

    def _total(self, results: Sequence[Result], model: int = LARGE) -> int | None:
        spent = self.spent(results, model)
        return None if spent is None else int(spent.sum())

    def spent(self, results: Sequence[Result], model: int = LARGE) -> Floats | None:
        """FLOPs of each result, prompts included; None if a decoder does not count.

        Where one model alone did the work, it was ``model``.
        """
        spent = []
        for one in results:
            work = _record(one).work
            if work is None:
                return None
            spent.append(self.flops({model: work[0]} if len(work) == 1 else work))
        return np.array(spent, dtype=np.float64)

    def _right(self, items: Sequence[Item], emitted: Sequence[Ints]) -> Bools:
        texts = [self.large.tokenizer.decode(tokens.tolist()) for tokens in emitted]
        return np.array([is_right(item, text) for item, text in zip(items, texts, strict=True)], dtype=bool)

    def auditor(self, record: Recorder) -> Auditor:
        """Compares tokens with the large model's, up to ties of its logits."""
        return Auditor(self.large.lens, self.large.tolerance, self.settings, record)

    # ------------------------------------------------------------ which tasks, which thresholds

    @cached_property
    def compared(self) -> dict[str, tuple[float, float]]:
        """Task → validation score of the small and of the large model."""
        return {task: (self._score(self.small, task), self._score(self.large, task)) for task in world.TASKS}

    def _score(self, evidence: Evidence, task: str) -> float:
        items = self.items(task, "validate", self.size.compared)
        emitted, _, _ = self._generated(evidence, evidence.full, items, _full(items))
        return float(self._right(items, emitted).mean())

    @property
    def tasks(self) -> list[str]:
        """Tasks worth routing, the one of the largest gap first."""
        gaps = {task: large - small for task, (small, large) in self.compared.items()}
        return sorted((task for task in gaps if gaps[task] >= WORTH_ROUTING), key=lambda task: -gaps[task])

    @property
    def note(self) -> str:
        """One sentence: where the pair is useless."""
        said = ", ".join(
            f"{task} ({large:.3f} against {small:.3f})"
            for task, (small, large) in self.compared.items()
            if task not in self.tasks
        )
        return (
            f"{self.name}: the pair is useless on {said or 'no task'}: the large model is not "
            f"{100 * WORTH_ROUTING:.0f} points better there on {self.size.compared} validation items"
        )

    def premise(self) -> str:
        """Why EAD cannot be judged on this pair; empty where it can."""
        if self.without_quality:
            return self.without_quality
        return "" if self.tasks else f"{self.note}; there is nothing to route"

    @cached_property
    def _rolling_bits(self) -> dict[str, Floats]:
        return {}

    def rolling_bits(self, task: str) -> Floats:
        """H̄ of the small model alone on the validation items, bits."""
        if task not in self._rolling_bits:
            never = SwitchingRule(float(np.log2(self.vocabulary)), start=SMALL)
            (done,) = self.switched(never, task, "validate", self.size.tried).runs
            assert isinstance(done, Switched)
            self._rolling_bits[task] = np.concatenate(done.rolling_bits)
        return self._rolling_bits[task]

    def tried(self, task: str) -> dict[SwitchingRule, Routing]:
        """Rules with the paper's w and d_min, τ for several shares and either model first, as validation found them."""
        thresholds = [threshold_for_share(self.rolling_bits(task), share) for share in SHARES]
        rules = [SwitchingRule(tau, start=start) for start in (SMALL, LARGE) for tau in thresholds]
        found = {rule: self.switched(rule, task, "validate", self.size.tried) for rule in rules}
        return {rule: Routing(rule.threshold_bits, done.large_share, done.score) for rule, done in found.items()}

    def chosen(self, task: str, saving: float) -> SwitchingRule | None:
        """The rule of highest validation score among those that save at least ``saving``; None where none does."""
        tried = self.tried(task)
        best = best_within_share(list(tried.values()), self.share_for(saving))
        return next((rule for rule, routing in tried.items() if routing is best), None)

    def put_forward(self, task: str) -> SwitchingRule:
        """The rule of highest validation score that saves ``least_saving``; where none does, the cheapest tried."""
        rule = self.chosen(task, self.least_saving)
        return rule or min(self.tried(task).items(), key=lambda tried: tried[1].large_share)[0]

    def share_for(self, saving: float) -> float:
        """The largest share of the large model that saves ``saving`` by the paper's cost; below 0 where none does."""
        ratio = self.parameters["small_parameters"] / self.parameters["large_parameters"]
        return (1 - saving - ratio) / (1 - ratio)

    def judged(self, rule: SwitchingRule, task: str) -> Answered:
        return self.switched(rule, task, "evaluate", self.size.judged)

    # ------------------------------------------------------------ greedy choices of the large model

    def agreement(self, done: Switched, items: Sequence[Item]) -> list[Bools]:
        """Per item, [emitted] whether each emitted token is the large model's greedy choice after the same history."""
        found = []
        with self.partners() as (_, large):
            for item, emitted in zip(items, done.record.emitted, strict=True):
                seat = Seat(large, LARGE, Log(), [0], [Prompt(item.prompt)], PROMPT, DECODE)
                logits = seat.logits[:, None]
                if len(emitted) > 1:
                    read = seat.feed(emitted[None, :-1], [DECODE] * (len(emitted) - 1))
                    logits = np.concatenate([logits, read], axis=1)
                seat.close()
                found.append(logits[0].argmax(axis=-1) == emitted)
        return found

    # ------------------------------------------------------------ time

    @property
    def timed_task(self) -> str:
        """The task whose prompts are timed: the one most worth routing, else the first."""
        return next(iter(self.tasks or world.TASKS))

    @cached_property
    def timed_new(self) -> int:
        """New tokens of a timed request, no stop token: as many as its answers take on average."""
        items = self.items(self.timed_task, "evaluate", self.size.judged)
        return round(float(np.mean([len(continuation) for item in items for continuation in item.continuations])))

    def prompts(self, count: int) -> list[Prompt]:
        """Prompts of judged items of ``timed_task``."""
        return _prompts(self.items(self.timed_task, "evaluate", max(self.size.judged, count))[:count])

    def timed(self, arms: Mapping[str, Arm], pairs: int) -> tuple[Timings, dict[str, list[Result]]]:
        """Paired seconds of ``arms`` on the same fresh prompts, and the results of the very same runs.

        An arm takes a prompt and a number of new tokens, and stops at none.
        """
        warm_up = 2
        prompts = self.prompts(pairs + warm_up)
        results: dict[str, list[Result]] = {name: [] for name in arms}

        def timed_arm(name: str) -> Callable[[int], None]:
            return lambda pair: results[name].append(arms[name](prompts[pair], self.timed_new))

        with self.large.open(self.large.full) as decoder:
            timings = paired(
                {name: timed_arm(name) for name in arms},
                pairs,
                np.random.default_rng(self.settings.seed),
                warm_up=warm_up,
                synchronize=decoder.synchronize,
            )
        return timings, {name: done[warm_up:] for name, done in results.items()}

    @cached_property
    def rivals(self) -> tuple[Timings, dict[str, list[Result]]]:
        """``large``, ``EMAD``, ``speculative``, ``EAD`` as put forward where there is something to route, and
        ``self-speculative`` after the first of ``exit_layers`` where there is one."""
        with ExitStack() as stack:
            small, large = stack.enter_context(self.partners())
            emad = stack.enter_context(self.large.open(self.emad_point))
            arms: dict[str, Arm] = {
                "large": lambda prompt, new: large.decoder.generate([prompt], new, frozenset()),
                "EMAD": lambda prompt, new: emad.generate([prompt], new, frozenset()),
                "speculative": lambda prompt, new: speculate(small, large, [prompt], new, k=DRAFTED),
            }
            if self.tasks:
                rule = self.put_forward(self.timed_task)
                arms["EAD"] = lambda prompt, new: switch(small, large, rule, [prompt], new)
            if self.exit_layers:
                arms["self-speculative"] = self_drafted(stack.enter_context(self.drafting()), self.exit_layers[0])
            return self.timed(arms, self.settings.budget.pairs)

    @cached_property
    def emad_point(self) -> OperatingPoint:
        """EMAD of the large model at its calibrated default."""
        return self.large.profile.point(0.0)


def self_drafted(model: Partner, exit_layer: int) -> Arm:
    """Self-speculation as a timed arm."""
    return lambda prompt, new: self_speculate(model, exit_layer, [prompt], new, k=DRAFTED)


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding seen as a decoder of its verifier's point, which is what it promises to be.

    ``decode``: what emits; ``promised``: which rows of its record are the verifier's, for drafts are no part of the
    promise. Its ledger is not the verifier's alone, so it does not claim to count.
    """

    verifier: Partner
    decode: Callable[[Sequence[Prompt], int, frozenset[int]], Speculated]
    promised: Callable[[Tokens], Bools]

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.verifier.decoder.capabilities, counted=False, deepens=False)

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        raise Unsupported("speculative decoding has no session of its own: judge what it generates")

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        record = self.decode(prompts, max_new, stop).record
        mine, table = self.promised(record.tokens), record.tokens
        columns = {field.name: getattr(table, field.name)[mine] for field in fields(Tokens)}
        tokens = Tokens(**columns | {"model": np.zeros(int(mine.sum()), dtype=np.int64)})
        signal = record.signal[mine][:, : len(self.verifier.point.probes)]
        return Record(tokens, signal, record.emitted, record.stop)

    def synchronize(self) -> None:
        self.verifier.decoder.synchronize()

    def close(self) -> None:
        """The partners belong to the caller."""


def speculation(draft: Partner, verifier: Partner, k: int = DRAFTED) -> Speculation:
    """One model drafts, another verifies."""
    return Speculation(
        verifier,
        lambda prompts, new, stop: speculate(draft, verifier, prompts, new, k=k, stop=stop),
        lambda tokens: tokens.model == VERIFIER,
    )


def self_speculation(model: Partner, exit_layer: int, k: int = DRAFTED) -> Speculation:
    """One model drafts after ``exit_layer`` and verifies at its ceiling."""
    return Speculation(
        model,
        lambda prompts, new, stop: self_speculate(model, exit_layer, prompts, new, k=k, stop=stop),
        lambda tokens: tokens.phase != DRAFT,
    )


def name_of(settings: Settings) -> str:
    """How reports call the pair: both names, the small model first."""
    return f"{settings.small_model} + {settings.large_model}"


def is_right(item: Item, text: str) -> bool:
    """Whether ``text``, generated greedily after the item's prompt, answers it: by its beginning, or as a program."""
    return runs(item.example, text) if item.example.scoring == "runs" else text.startswith(item.example.answer)


def longest(items: Sequence[Item]) -> int:
    """New tokens that the longest right answer takes; of a program, a line."""
    if any(item.example.scoring == "runs" for item in items):
        return GENERATED_LINE
    return max(len(continuation) for item in items for continuation in item.continuations)


def retained(candidate: Bools, reference: Bools, kept: float, rng: np.random.Generator) -> Estimate:
    """Σ candidate / Σ reference over paired items, tested against ``kept``.

    The ratio exceeds ``kept`` exactly where the mean of candidate_i − kept · reference_i exceeds 0: that mean is
    resampled. The interval divides it by the reference's score as measured.

    Raises:
        BadArgument: a reference that is never right.
    """
    if not reference.any():
        raise BadArgument("reference", "no item right", "at least one", "a share of no score is no number")
    above = (candidate - kept * reference) / reference.mean()
    found = mean_rate(above, np.ones(len(above), dtype=np.int64), threshold=0.0, rng=rng, unit="share of the score")
    return replace(found, value=found.value + kept, low=found.low + kept, high=found.high + kept)


def described(rule: SwitchingRule) -> str:
    """``τ = 0.27 bits, w = 5, d_min = 10, small first``."""
    first = ("small", "large")[rule.start]
    return f"τ = {rule.threshold_bits:.3g} bits, w = {rule.window}, d_min = {rule.least_run}, {first} first"


def table_row(name: str, done: Answered, **more: Any) -> dict[str, Any]:
    """A row of the table of ways to answer: everything off records; ``more`` columns stand last."""
    return {
        "decoding": name,
        "score": done.score,
        "large-model share %": done.large_share,
        "MFLOPs per token": None if done.flops_per_token is None else done.flops_per_token / 1e6,
        "items": len(done.right),
    } | more


def _require_decoders(*models: Loaded) -> None:
    readers = [model.name for model in models if model.geometry.encoder_layers]
    if readers:
        raise BadArgument(
            "--emad-small-model, --emad-large-model", ", ".join(readers), "decoder-only models", "tasks have no source"
        )


def _prompts(items: Sequence[Item]) -> list[Prompt]:
    return [Prompt(item.prompt) for item in items]


def _equal(items: Sequence[Item]) -> list[list[int]]:
    """Indices of items in groups of equally long prompts, at most ``ROWS`` each."""
    groups: list[list[int]] = []
    for index in _ascending(items):
        last = groups[-1] if groups else []
        if last and len(items[last[0]].prompt) == len(items[index].prompt) and len(last) < ROWS:
            last.append(index)
        else:
            groups.append([index])
    return groups


def _full(items: Sequence[Item]) -> list[list[int]]:
    """Indices of items in groups of ``ROWS``, prompts of a group as nearly equal as can be."""
    order = _ascending(items)
    return [order[at : at + ROWS] for at in range(0, len(order), ROWS)]


def _ascending(items: Sequence[Item]) -> list[int]:
    return sorted(range(len(items)), key=lambda index: len(items[index].prompt))


def _in_groups(
    items: Sequence[Item], groups: list[list[int]], decode: Callable[[list[Prompt], int], Done]
) -> tuple[list[Ints], list[Done], list[list[int]]]:
    """Emitted tokens per item, and the result of each group."""
    new, results = longest(items), []
    emitted: list[Ints] = [np.empty(0, dtype=np.int64)] * len(items)
    for rows in groups:
        done = decode(_prompts([items[row] for row in rows]), new)
        results.append(done)
        for row, tokens in zip(rows, _record(done).emitted, strict=True):
            emitted[row] = tokens
    return emitted, results, groups


def _record(result: Result) -> Record:
    return result if isinstance(result, Record) else result.record
