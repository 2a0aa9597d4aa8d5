"""Early exits of an encoder-decoder (CALM and its successors): answers with score, exit block, FLOPs and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from emad_ref.absent import Absent
from emad_ref.calibration.learn_then_test import require_textual_consistency_losses
from emad_ref.calibration.trace import compute_layer_logits
from emad_ref.exit_rules import ALPHA, early_exit_point
from emad_ref.flop_ledger import flops
from emad_ref.models.bundled import bundled_model_names
from emad_ref.models.geometry import Geometry
from emad_ref.models.tokenizers import decode_tokens
from emad_ref.point import ConfidenceParameters, OperatingPoint, ScheduleName
from emad_ref.probes.contrast import get_score_function
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import Bools, Floats, Ints, Record, Work
from emad_ref.signals import SIGNALS, log_probabilities
from pytest_emad.benchmark.clock import WARM_UP, PairedTimings, time_pairs
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.early_exit_tasks import TASKS, EarlyExitTasks, TaskItems, exact_match, score_answer
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.statistics.accuracy import estimate_score_difference
from pytest_emad.statistics.units import ByItem
from pytest_emad.sweep.diagnostics import final_token_ranks


class EarlyExitRule(NamedTuple):
    """A signal and a pruning, as ``exit_rules`` names them; ``alpha``: α of the plausible tokens of a contrast."""

    signal: str
    pruning: str = "none"
    alpha: float = ALPHA


# The paper substitutes the plausible tokens of the contrast by the top-k of the pruning: α = 0 compares all of these.
RULES: dict[str, EarlyExitRule] = {
    "softmax": EarlyExitRule("softmax_response"),
    "softmax, fixed": EarlyExitRule("softmax_response", "fixed"),
    "softmax, decaying": EarlyExitRule("softmax_response", "decaying"),
    "weighted contrast": EarlyExitRule("weighted_contrast"),
    "JSD": EarlyExitRule("jsd_contrast"),
    "JSD, fixed": EarlyExitRule("jsd_contrast", "fixed", alpha=0.0),
    "JSD, decaying": EarlyExitRule("jsd_contrast", "decaying", alpha=0.0),
    "JSD, adaptive": EarlyExitRule("jsd_contrast", "adaptive", alpha=0.0),
}
# Reading of JSD with pruning → ending of its rules' names. In the other one, α chooses plausible tokens of the top-k.
PRUNED_JSD_READINGS = {"paper": "", "plausible top-k": ", plausible"}
PLAUSIBLE_TOP_K = {f"{name}, plausible": rule._replace(alpha=ALPHA) for name, rule in RULES.items() if not rule.alpha}
# The paper's JSD has no layer to contrast with at j and decides from j + 1 on. The authors' code also contrasts with
# layers below j and decides from j on; here that is a separate rule. It also multiplies JSD's score by Σ p_ℓ, which is
# 1, so ``rescale`` stays off.
AS_CODED = "JSD, as coded"
FIRST_AMATEUR = 2  # of the authors' code; 1 if j is 2, which has no other layer to contrast with
THRESHOLD = 0.9  # the paper's λ
PUBLISHED_MINIMA, PUBLISHED_LAYERS = (7, 19), 24
LEAST_LAYERS = 4  # least layers for two minimum layers and a pruned one
LEAST_VOCABULARY = 258  # least vocabulary for which the published k*, scaled, keeps two tokens
ITEM_ROWS = 25  # items decoded together
SET_SIZE = 50  # items of a calibration set; 29 without a loss certify δ = 10 %
SETS = {"smoke": 2, "standard": 12, "full": 64}  # 63 sets that all keep the promise show a coverage of 95 %
CONTRASTS = tuple(name for name, signal in SIGNALS.items() if signal.is_contrastive)
ALPHAS: dict[str, float | None] = {"α = 0.1": None, "α′": 1.0}  # decay rate of α′, which the paper does not state
READ_TOKENS = 32  # tokens per contrast; the readouts of T5-large's layers take 0.2 GB
SOLVED = 0.05  # level at which full depth must beat an honest guess
PRETRAINED = "emad-t5-tiny"
TWINS = {PRETRAINED: "emad-t5-tiny-tuned", "emad-t5-tiny-tuned": PRETRAINED}
FULL_DEPTH = "full depth"

ContrastReading = tuple[Floats, Bools]  # confidence, and whether the emitted token is right: [tokens, deciding layers]
RuleRow = dict[str, object]


def first_amateur_layer(minimum: int) -> int:
    """The first layer that the authors' JSD contrasts with, for decisions from ``minimum`` ≥ 2 on."""
    return min(FIRST_AMATEUR, minimum - 1)


def scale_minimum_exit_layers(layers: int, published: Sequence[int] = PUBLISHED_MINIMA) -> tuple[int, ...]:
    """The paper's minimum exit layers, by default 7 and 19 of 24, at the same share of ``layers`` ≥ 4."""
    scaled = (round(layers * minimum / PUBLISHED_LAYERS) for minimum in published)
    # contrasts need a layer below, pruning one above besides the last
    return tuple(sorted({max(2, min(layers - 2, minimum)) for minimum in scaled}))


def can_use_paper_settings(geometry: Geometry) -> bool:
    """Whether the model is deep and wide enough for the paper's minimum layers and pruned vocabularies."""
    return geometry.layers >= LEAST_LAYERS and geometry.vocabulary >= LEAST_VOCABULARY


# ------------------------------------------------------------ FLOPs


@dataclass(frozen=True)
class ItemFlopsByPart:
    """FLOPs by the paper's parts, as the decoder under test counted them.

    ``confidence``: every readout, the emitting one included. ``decoder``: blocks, attention, K/V copies, and K and V of
    the sources. ``encoder``: the sources.
    """

    confidence: float
    decoder: float
    encoder: float

    @property
    def total(self) -> float:
        return self.confidence + self.decoder + self.encoder

    @property
    def without_encoder(self) -> float:
        """FLOPs without the encoder, which no rule changes."""
        return self.confidence + self.decoder


FlopSaving = tuple[float, float, float]  # FLOPs before over after: of confidence, of decoding, together


def split_flops_per_item(work: Work, geometry: Geometry, items: int = 1) -> ItemFlopsByPart:
    """Split ``work`` of ``items`` items into parts."""
    counted = flops(work, geometry)
    confidence = sum(counted.readouts.values())
    decoder = counted.total - confidence - counted.encoder
    return ItemFlopsByPart(confidence / items, decoder / items, counted.encoder / items)


def compute_flop_ratios(before: ItemFlopsByPart, after: ItemFlopsByPart) -> FlopSaving:
    """Ratios of the FLOPs of ``before`` and ``after``; below 1 if more are executed."""
    return (
        float(before.confidence / after.confidence),
        float(before.without_encoder / after.without_encoder),
        float(before.total / after.total),
    )


# ------------------------------------------------------------ answers


@dataclass(frozen=True, eq=False)
class ExitScores:
    """Per item: ``score`` in 0–1, ``depth_sums`` Σ D_t, decided ``tokens``."""

    score: ByItem
    depth_sums: ByItem
    tokens: ByItem

    def __len__(self) -> int:
        return len(self.score)

    @property
    def mean_exit_by_item(self) -> ByItem:
        """Mean exit block of each item's tokens."""
        return self.depth_sums.with_values(self.depth_sums.values / self.tokens.values)

    def has_same_depth_sums(self, other: ExitScores) -> bool:
        """Whether every item took as many tokens and blocks as in ``other``."""
        same = np.array_equal(self.depth_sums.values, other.depth_sums.values)
        return same and np.array_equal(self.tokens.values, other.tokens.values)

    @property
    def mean_exit_block(self) -> float:
        """Blocks per token, over all items."""
        return float(self.depth_sums.values.sum() / self.tokens.values.sum())


@dataclass(frozen=True, eq=False)
class EarlyExitAnswers:
    """All items of one task under ``point``, in their order.

    ``counted``: the decoder's work on all of them; None if it does not count. ``exact``: share of answers equal to a
    reference word for word; None for a task without right answers.
    """

    point: OperatingPoint
    texts: tuple[str, ...]
    exited: ExitScores
    counted: Work | None
    exact: float | None = None

    def compute_flops_per_item(self, geometry: Geometry) -> ItemFlopsByPart:
        """FLOPs per item. Raises Unsupported if the decoder does not count its work."""
        if self.counted is None:
            raise Unsupported("the decoder does not count its work")
        return split_flops_per_item(self.counted, geometry, len(self.texts))


def make_item_prompts(subject: ModelUnderTest, items: TaskItems) -> list[Prompt]:
    """The decoder's start token, after each item's source."""
    assert subject.opening_token is not None, "an encoder-decoder has a start token"
    return [Prompt(np.array([subject.opening_token], dtype=np.int64), source) for source in items.sources]


def decode_items(subject: ModelUnderTest, task: str, items: TaskItems, point: OperatingPoint) -> EarlyExitAnswers:
    """Decode every item of ``task`` greedily under ``point``, ``ITEM_ROWS`` at a time.

    Raises:
        Unsupported: the decoder under test declines the point.
    """
    prompts = make_item_prompts(subject, items)
    texts: list[str] = []
    depths: list[Ints] = []
    work: Work | None = Work.none(subject.stepper.layers)
    with subject.open_audited_decoder(point, max_rows=ITEM_ROWS) as decoder:
        for start in range(0, len(prompts), ITEM_ROWS):
            batch = prompts[start : start + ITEM_ROWS]
            record = decoder.generate(batch, TASKS[task].new, subject.stop_tokens)
            work = work + record.work[0] if work is not None and record.work is not None else None
            depths += [record.tokens.select_sequence(row, phase=1).depth for row in range(len(batch))]
            texts += [
                decode_tokens(subject.tokenizer, emitted.tolist(), skip_special_tokens=True).strip()
                for emitted in record.emitted
            ]
    pairs = [(text, item.answers) for text, item in zip(texts, items.pairs, strict=True)]
    exited = ExitScores(
        items.cluster_values_by_text([score_answer(task, *pair) for pair in pairs]),
        items.cluster_values_by_text([float(depth.sum()) for depth in depths]),
        items.cluster_values_by_text([len(depth) for depth in depths]),
    )
    exact = [share for pair in pairs if (share := exact_match(task, *pair)) is not None]
    mean = float(np.mean(exact)) if len(exact) == len(pairs) else None
    return EarlyExitAnswers(point, tuple(texts), exited, work, mean)


@dataclass(frozen=True, eq=False)
class TextConsistency:
    """Difference of early answers from the full-depth text in 0–1, 0 = equal; it calibrates thresholds.

    ``pool`` float64 [items, λ] judges them; ``sets`` [sets, items, λ] choose them. Every item is about another text, so
    all are independent. ``mean_exit`` [λ] blocks per token of the pool.
    """

    pool: Floats
    sets: Floats
    mean_exit: Floats


def text_differences(task: str, full: EarlyExitAnswers, early: Sequence[EarlyExitAnswers]) -> Floats:
    """float64 [items, rules]: one minus the score of each early text against the full one."""
    dissimilar = [
        [
            1 - score_answer(task, text, [own]) if text != own else 0.0
            for text, own in zip(one.texts, full.texts, strict=True)
        ]
        for one in early
    ]
    return require_textual_consistency_losses(np.array(dissimilar).T)


# ------------------------------------------------------------ readings under teacher forcing


@dataclass(frozen=True, eq=False)
class LayerReadings:
    """Readouts of every layer on the reference answers; ``item`` int64 [tokens], the item of each token.

    ``cluster`` int64 [items]: items about the same text have the same number.
    ``ranks``, ``response``, ``correct`` [tokens, L]: of the last layer's best token, top-1 minus top-2, top-1 right.
    ``contrasts``: (signal, α) → confidence and correctness of what it would emit, [tokens, deciding layers].
    """

    item: Ints
    cluster: Ints
    ranks: Ints
    response: Floats
    correct: Bools
    contrasts: dict[tuple[str, str], ContrastReading]

    def sum_by_item(self, values: NDArray[np.floating]) -> ByItem:
        """Sums of ``values`` [tokens, …] within each item, the resampled unit."""
        _, first = np.unique(self.item, return_index=True)
        return ByItem(np.add.reduceat(values, first, axis=0), self.cluster)

    @property
    def token_counts(self) -> ByItem:
        """Number of tokens of each item's reference."""
        return self.sum_by_item(np.ones(len(self.item)))


def read_layers(subject: ModelUnderTest, prompts: Sequence[Prompt], items: TaskItems, minimum: int) -> LayerReadings:
    """Feed every item's reference after its source and read each layer; contrasts decide from layer ``minimum`` on."""
    each = enumerate(zip(prompts, items.targets, items.text_ids, strict=True))
    parts = [_read_item(subject, number, *item, minimum) for number, item in each]
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("item", "cluster", "ranks", "response", "correct")
    }
    contrasts = {
        key: (
            np.concatenate([part.contrasts[key][0] for part in parts]),
            np.concatenate([part.contrasts[key][1] for part in parts]),
        )
        for key in parts[0].contrasts
    }
    return LayerReadings(**columns, contrasts=contrasts)


def _read_item(
    subject: ModelUnderTest, number: int, prompt: Prompt, target: Ints, cluster: int, minimum: int
) -> LayerReadings:
    fed = np.concatenate([prompt.tokens, target[:-1]])
    logits = compute_layer_logits(subject.stepper, fed, source=prompt.source)  # [n, L, V]
    return LayerReadings(
        np.full(len(target), number),
        np.array([cluster]),
        final_token_ranks(logits),
        np.stack([_top_two_difference(logits[:, layer]) for layer in range(logits.shape[1])], axis=1),
        logits.argmax(axis=-1) == target[:, None],
        {
            (signal, name): _contrast(signal, ConfidenceParameters(minimum, alpha_decay=rate), logits, target, subject)
            for signal in CONTRASTS
            for name, rate in ALPHAS.items()
        },
    )


def _contrast(
    signal: str, parameters: ConfidenceParameters, logits: Floats, target: Ints, subject: ModelUnderTest
) -> ContrastReading:
    blocks = [slice(start, start + READ_TOKENS) for start in range(0, len(target), READ_TOKENS)]
    parts = [_contrast_block(signal, parameters, logits[block], target[block], subject) for block in blocks]
    return np.concatenate([sure for sure, _ in parts]), np.concatenate([right for _, right in parts])


def _contrast_block(
    signal: str, parameters: ConfidenceParameters, logits: Floats, target: Ints, subject: ModelUnderTest
) -> ContrastReading:
    layers = logits.shape[1]
    tensors = torch.from_numpy(logits).to(subject.stepper.device)
    log_probs = {m: log_probabilities(tensors[:, m - 1]) for m in range(1, layers)}
    confidence, correct = [], []
    for layer in range(parameters.minimum + SIGNALS[signal].needs.delay, layers):
        scores = get_score_function(signal)(parameters, layer, tensors[:, layer - 1], log_probs)
        assert scores.logits is not None, "contrasts emit what they compare"
        confidence.append(scores.signal.cpu().numpy())
        correct.append(scores.logits.argmax(dim=-1).cpu().numpy() == target)
    return np.stack(confidence, axis=1), np.stack(correct, axis=1)


def _top_two_difference(logits: Floats) -> Floats:
    away = np.exp(logits - logits.max(axis=-1, keepdims=True))
    best = np.partition(away, -2, axis=-1)[:, -2:] / away.sum(axis=-1, keepdims=True)
    difference: Floats = best[:, 1] - best[:, 0]
    return difference


# ------------------------------------------------------------ time


def time_rules(
    subject: ModelUnderTest, prompts: Sequence[Prompt], points: Mapping[str, OperatingPoint], pairs: int, new: int
) -> PairedTimings:
    """Paired seconds of full depth (``full``) and of each of ``points``, ``new`` tokens each. Few prompts repeat.

    Raises:
        Unsupported: the decoder under test declines one of them.
    """
    with ExitStack() as stack:
        every = {"full": subject.full_depth_point, **points}
        decoders = {name: stack.enter_context(subject.open_decoder(point)) for name, point in every.items()}

        def run(decoder: Decoder, pair: int) -> Record:
            return decoder.generate([prompts[pair % len(prompts)]], new, frozenset())

        rng = np.random.default_rng(subject.seed)
        arms = {name: partial(run, decoder) for name, decoder in decoders.items()}
        return time_pairs(arms, pairs, rng, synchronize=decoders["full"].synchronize)


def count_timed_flops(
    subject: ModelUnderTest, prompts: Sequence[Prompt], point: OperatingPoint, pairs: int, new: int
) -> ItemFlopsByPart:
    """FLOPs per item of the requests that ``time_rules`` times.

    Raises:
        Unsupported: the decoder under test declines the point, or does not count its work.
    """
    requests = range(WARM_UP, WARM_UP + pairs)
    with subject.open_audited_decoder(point) as decoder:
        records = [decoder.generate([prompts[pair % len(prompts)]], new, frozenset()) for pair in requests]
    works = [record.work[0] for record in records if record.work is not None]
    if len(works) < len(records):
        raise Unsupported("the decoder does not count its work")
    return split_flops_per_item(sum(works, Work.none(subject.stepper.layers)), subject.loaded.geometry, len(works))


# ------------------------------------------------------------ all of one model


class EarlyExitMeasurements:
    """Answers and readings of one encoder-decoder, each decoded once and kept.

    ``beside``: name of another model → its measurements under the same study.
    """

    def __init__(self, subject: ModelUnderTest, beside: Callable[[str], EarlyExitMeasurements]):
        self.subject, self._beside = subject, beside
        self.task_items = EarlyExitTasks(subject)
        self._answered: dict[tuple[str, OperatingPoint], EarlyExitAnswers] = {}
        self._read: dict[str, LayerReadings] = {}

    @property
    def absent_premise(self) -> Absent | None:
        """The first absent premise of all claims about early exits; None if items are available."""
        loaded = self.subject.loaded
        if not self.subject.is_seq2seq:
            return Absent("the claim needs an encoder-decoder model, not a decoder-only model", "premise")
        if not loaded.trained:
            return Absent("random weights: confidence and score of noise say nothing", "premise")
        if loaded.tokenizer is None:
            return Absent("the model came without a tokenizer, and the tasks are text")
        if not can_use_paper_settings(loaded.geometry):
            few = f"fewer than {LEAST_LAYERS} decoder layers or {LEAST_VOCABULARY} tokens"
            return Absent(f"{few}: no room for the paper's settings", "premise")
        return self.task_items.absent_tasks

    @property
    def task_names(self) -> tuple[str, ...]:
        return self.task_items.names

    @property
    def absent_by_task(self) -> Mapping[str, Absent]:
        """Unavailable task → why."""
        return self.task_items.absent_by_task

    @property
    def corpus(self) -> str:
        return self.task_items.corpus

    @property
    def minimum_exit_layers(self) -> tuple[int, ...]:
        """The paper's minimum layers for this depth."""
        return scale_minimum_exit_layers(self.subject.stepper.layers)

    @property
    def task_layer_pairs(self) -> list[tuple[str, int]]:
        """(task, minimum layer) of every comparison."""
        return [(task, minimum) for task in self.task_names for minimum in self.minimum_exit_layers]

    @cached_property
    def unsolved_by_task(self) -> Mapping[str, Absent]:
        """Unsolved task → why: full depth is not shown to beat an honest guess, so exits cannot lower its score."""
        return {task: absent for task in self.task_names if (absent := self._absent_solution(task))}

    def _absent_solution(self, task: str) -> Absent | None:
        score = self.answer_at_point(task, self.full_depth_point).exited.score
        guess = self.task_items.compute_guess_scores(task)
        rng = np.random.default_rng(self.subject.seed)
        beaten = estimate_score_difference(
            score, score.with_values(guess), threshold=0.0, rng=rng, unit="score above a guess"
        )
        if beaten.p_above <= SOLVED:
            return None
        said = f"not solved: full depth scores {score.values.mean():.3f}, an honest guess {guess.mean():.3f}"
        return Absent(said, "premise")

    @property
    def solved_task_names(self) -> list[str]:
        return [task for task in self.task_names if task not in self.unsolved_by_task]

    @property
    def solved_task_layer_pairs(self) -> list[tuple[str, int]]:
        """``task_layer_pairs`` of the solved tasks."""
        return [(task, minimum) for task in self.solved_task_names for minimum in self.minimum_exit_layers]

    @property
    def full_depth_point(self) -> OperatingPoint:
        return self.subject.full_depth_point

    def make_point(
        self, rule: str, minimum: int, threshold: float = THRESHOLD, schedule: ScheduleName = "copying"
    ) -> OperatingPoint:
        """The point of a row of ``RULES`` or ``PLAUSIBLE_TOP_K``, or of JSD ``AS_CODED``."""
        sizes = self.subject.stepper.layers, self.subject.stepper.vocabulary_size
        if rule == AS_CODED:
            first = first_amateur_layer(minimum)
            return early_exit_point(
                "jsd_contrast", *sizes, minimum, threshold, schedule=schedule, emit="expert", amateurs_from=first
            )
        signal, pruning, alpha = (RULES | PLAUSIBLE_TOP_K)[rule]
        return early_exit_point(signal, *sizes, minimum, threshold, pruning=pruning, schedule=schedule, alpha=alpha)

    def make_prompts(self, task: str) -> list[Prompt]:
        return make_item_prompts(self.subject, self.task_items.load_items(task))

    def answer_by_rule(
        self, task: str, rule: str, minimum: int, threshold: float = THRESHOLD, schedule: ScheduleName = "copying"
    ) -> EarlyExitAnswers:
        """All items of ``task`` under the point of ``make_point``."""
        return self.answer_at_point(task, self.make_point(rule, minimum, threshold, schedule))

    def answer_at_point(self, task: str, point: OperatingPoint) -> EarlyExitAnswers:
        """All items of ``task`` under ``point``."""
        if (task, point) not in self._answered:
            self._answered[task, point] = decode_items(self.subject, task, self.task_items.load_items(task), point)
        return self._answered[task, point]

    def read_layers(self, task: str) -> LayerReadings:
        """Readings of the reference answers; contrasts from the least minimum layer on."""
        if task not in self._read:
            self._read[task] = read_layers(
                self.subject, self.make_prompts(task), self.task_items.load_items(task), self.minimum_exit_layers[0]
            )
        return self._read[task]

    def find_layer_of_lowest_confidence(self, task: str) -> int | Absent:
        """The paper's choice of j: the layer of least mean softmax response, on items that are not judged.

        Absent if it is the first layer, which leaves none out.
        """
        others = self.task_items.load_items_of_other_texts(task, SET_SIZE)
        if not others.pairs:
            return Absent("every item is judged: none is left to choose j by")
        read = read_layers(self.subject, make_item_prompts(self.subject, others), others, self.minimum_exit_layers[0])
        confidence = read.response.mean(axis=0)[:-1]  # after the last layer no token exits early
        if not confidence.argmin():
            said = f"confidence is lowest after the first layer, {confidence[0]:.2f}: no layer is left out"
            return Absent(said, "premise")
        return int(confidence.argmin()) + 1

    def measure_consistency(self, task: str, thresholds: tuple[float, ...]) -> TextConsistency:
        """Consistency of softmax response at ``thresholds``: on judged items, and in sets of other items.

        Judged items have one text each.
        """
        points = [self.make_point("softmax", self.minimum_exit_layers[0], threshold) for threshold in thresholds]
        early = [self.answer_at_point(task, point) for point in points]
        _, first = np.unique(self.task_items.load_items(task).text_ids, return_index=True)
        pool = text_differences(task, self.answer_at_point(task, self.full_depth_point), early)[first]
        others = self.task_items.load_items_of_other_texts(task, SET_SIZE * SETS[self.subject.budget.name], by=SET_SIZE)
        sets = np.empty((0, SET_SIZE, len(points)))
        if others.pairs:
            full, *rest = (
                decode_items(self.subject, task, others, point) for point in (self.full_depth_point, *points)
            )
            sets = text_differences(task, full, rest).reshape(-1, SET_SIZE, len(points))
        return TextConsistency(pool, sets, np.array([one.exited.mean_exit_block for one in early]))

    @cached_property
    def models_before_and_after_tuning(self) -> tuple[EarlyExitMeasurements, EarlyExitMeasurements] | Absent:
        """The same model before and after tuning: this one and its twin."""
        name = TWINS.get(self.subject.name)
        if name is None:
            return Absent(f"only {' and '.join(TWINS)} are one model before and after tuning", "premise")
        if name not in bundled_model_names():
            return Absent(f"{name} does not come with this package", "premise")
        twin = self._beside(name)
        return (self, twin) if self.subject.name == PRETRAINED else (twin, self)


# ------------------------------------------------------------ tables


def make_rule_row(exits: EarlyExitMeasurements, task: str, rule: str, minimum: int, done: EarlyExitAnswers) -> RuleRow:
    """Exit, score and FLOPs per item of ``done``; FLOPs are None without counts."""
    parts = None if done.counted is None else done.compute_flops_per_item(exits.subject.loaded.geometry)
    return {
        "task": task,
        "rule": rule,
        "j": minimum,
        "mean exit": done.exited.mean_exit_block,
        "score": float(done.exited.score.values.mean()),
        "exact match": done.exact,
        "confidence MFLOPs": None if parts is None else parts.confidence / 1e6,
        "decoder MFLOPs": None if parts is None else parts.decoder / 1e6,
        "together MFLOPs": None if parts is None else parts.total / 1e6,
    }


def tabulate_rules_of_all_tasks(exits: EarlyExitMeasurements) -> Attachments:
    """Full depth, then every row of ``RULES`` at the paper's minimum layers, task by task; a note on unsolved tasks."""
    rows = [line for task in exits.task_names for line in _rule_rows(exits, task, exits.minimum_exit_layers)]
    notes = tuple(f"{exits.subject.name}: {task}: {absent.reason}" for task, absent in exits.unsolved_by_task.items())
    return Attachments((AttachedTable(f"early exits on {exits.corpus}", rows, "FLOPs by rule"),), notes)


def tabulate_minimum_layers_by_task(exits: EarlyExitMeasurements) -> Attachments:
    """Early-exit LLMs, Figures 6 to 13: for each task, every rule at every minimum layer that it supports."""
    # a contrast needs a layer below, a pruned readout one above besides the last
    minima = range(2, exits.subject.stepper.layers - 1)
    ablation = "ablation, minimum exit layer on"
    titles = {task: f"{ablation} {exits.task_items.format_title(task)}" for task in exits.task_names}
    figure = "exits by minimum layer"
    return Attachments(
        tuple(AttachedTable(title, _rule_rows(exits, task, minima), figure) for task, title in titles.items())
    )


def _rule_rows(exits: EarlyExitMeasurements, task: str, minima: Sequence[int]) -> list[RuleRow]:
    full = make_rule_row(
        exits, task, FULL_DEPTH, exits.subject.stepper.layers, exits.answer_at_point(task, exits.full_depth_point)
    )
    each = [(rule, minimum) for minimum in minima for rule in RULES]
    return [
        full,
        *(
            make_rule_row(exits, task, rule, minimum, exits.answer_by_rule(task, rule, minimum))
            for rule, minimum in each
        ),
    ]
