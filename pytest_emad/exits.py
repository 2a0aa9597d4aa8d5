"""Early exits of an encoder-decoder: its tasks decoded under rules, with score, exit block and FLOPs per item.

Two tasks, question → answer (token F1) and dialogue → summary (ROUGE-L), of the world or published (``exit_tasks``),
written by greedy decoding from the decoder's start token to the stop token. Every item is decoded under every rule that
a claim asks about, once, so that rules are compared item by item. FLOPs are the decoder's own count, in the parts that
the paper mixes:

    confidence   every readout executed: full heads and pruned ones, the emitting one included
    decoder      everything else of the decoder: blocks, attention, K/V copies, K and V of the sources
    encoder      the sources

The paper's minimum layers 7 and 19 belong to 24 layers; here they stand at the same share of depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest

from emad_ref.calibration.trace import lens_logits
from emad_ref.meters.clock import Timings
from emad_ref.meters.clock import paired as timed_in_pairs
from emad_ref.meters.flops import flops
from emad_ref.models.geometry import Geometry
from emad_ref.models.loading import bundled_names
from emad_ref.point import Confidence, OperatingPoint, ScheduleName, full_depth
from emad_ref.policy.early_exit import early_exit
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.readout.contrast import score_of
from emad_ref.record import Bools, Floats, Ints, Work
from emad_ref.signals import SIGNALS
from emad_ref.sweep.exits import final_token_ranks
from emad_ref.text.pairs import Pair
from emad_ref.verdict.claims import Claim, Leg, Verdict
from emad_ref.verdict.interval import Estimate, accuracy_drop, mean_rate
from emad_ref.verdict.legs import not_applicable, row, unmeasured, unseen
from pytest_emad.exit_tasks import TASKS, ExitTasks, exactly, scored

if TYPE_CHECKING:
    from pytest_emad.recording import Recorder
    from pytest_emad.session import Evidence

PUBLISHED_MINIMA, PUBLISHED_LAYERS = (7, 19), 24
LEAST_LAYERS = 4  # fewer leave no room for two minimum layers and a pruned one
LEAST_VOCABULARY = 258  # of fewer tokens the published k*, scaled, keeps less than two
# name → (signal, pruning)
RULES: dict[str, tuple[str, str]] = {
    "softmax": ("softmax_response", "none"),
    "softmax, fixed": ("softmax_response", "fixed"),
    "softmax, decaying": ("softmax_response", "decaying"),
    "weighted contrast": ("weighted_contrast", "none"),
    "JSD": ("jsd_contrast", "none"),
    "JSD, fixed": ("jsd_contrast", "fixed"),
    "JSD, decaying": ("jsd_contrast", "decaying"),
    "JSD, adaptive": ("jsd_contrast", "adaptive"),
}
THRESHOLD = 0.9  # the paper's λ
FEWEST_DIFFERING = 10  # items, for a bootstrap of their differences to mean anything
ROWS = 25  # items decoded together
WARM_UP = 2  # pairs that are not timed
READ_TOKENS = 32  # contrasted at once: the readouts of T5-large's layers at so many positions are 0.2 GB
ALPHAS: dict[str, float | None] = {"α = 0.1": None, "α′": 1.0}  # decay rate of α′, which the paper does not give
TWINS = {"emad-t5-tiny": "emad-t5-tiny-tuned", "emad-t5-tiny-tuned": "emad-t5-tiny"}
PRETRAINED = "emad-t5-tiny"


@dataclass(frozen=True)
class Costs:
    """FLOPs per item."""

    confidence: float
    decoder: float
    encoder: float

    @property
    def together(self) -> float:
        """Everything executed."""
        return self.confidence + self.decoder + self.encoder

    @property
    def decoding(self) -> float:
        """Without the encoder, which no rule touches."""
        return self.confidence + self.decoder


def costs(work: Work, geometry: Geometry, items: int = 1) -> Costs:
    """``work`` of ``items`` items in parts."""
    found = flops(work, geometry)
    confidence = sum(found.readouts.values())
    return Costs(confidence / items, (found.total - confidence - found.encoder) / items, found.encoder / items)


@dataclass(frozen=True, eq=False)
class Answered:
    """All items of one task under one rule: texts, ``score`` [items] in 0–1, Σ depth and decided tokens [items].

    ``exact``: share of answers that are a reference word for word; None for a task without right answers.
    """

    point: OperatingPoint
    texts: tuple[str, ...]
    score: Floats
    depth_sums: Floats
    tokens: Ints
    counted: Work | None
    exact: float | None = None

    @property
    def exit_block(self) -> Floats:
        """[items] mean exit block of each item's tokens."""
        found: Floats = self.depth_sums / self.tokens
        return found

    @property
    def mean_exit(self) -> float:
        """Blocks per token, over all items."""
        return float(self.depth_sums.sum() / self.tokens.sum())

    def costs(self, geometry: Geometry) -> Costs:
        """FLOPs per item.

        Raises:
            Unsupported: the decoder does not count its work.
        """
        if self.counted is None:
            raise Unsupported("the decoder does not count its work")
        return costs(self.counted, geometry, len(self.texts))


@dataclass(frozen=True, eq=False)
class Read:
    """What every layer says of the reference answers under teacher forcing; ``item`` int64 [tokens].

    ``ranks``, ``response``, ``correct`` [tokens, L]: of the last layer's best token, top-1 minus top-2, top-1 right.
    ``contrasts``: (signal, α) → confidence and correctness of what it would emit, [tokens, layers that can decide].
    """

    item: Ints
    ranks: Ints
    response: Floats
    correct: Bools
    contrasts: dict[tuple[str, str], tuple[Floats, Bools]]

    def by_item(self, values: NDArray[np.floating]) -> Floats:
        """Sums of ``values`` [tokens, …] within each item, the unit that intervals resample."""
        _, first = np.unique(self.item, return_index=True)
        sums: Floats = np.add.reduceat(values, first, axis=0)
        return sums


class Exits:
    """Answers of one encoder-decoder, taken when first asked for and kept."""

    def __init__(self, evidence: Evidence):
        self._evidence = evidence
        self.asked = ExitTasks(evidence)
        self._answered: dict[tuple[str, OperatingPoint], Answered] = {}
        self._read: dict[str, Read] = {}

    # ------------------------------------------------------------ tasks and rules

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that can be asked."""
        return self.asked.names

    @property
    def missing(self) -> list[Leg]:
        """A leg for each task that cannot."""
        return self.asked.missing

    @property
    def corpus(self) -> str:
        """What verdicts are decided on."""
        return self.asked.corpus

    @property
    def minima(self) -> tuple[int, ...]:
        """The paper's minimum layers at this depth."""
        return minimum_layers(self._evidence.stepper.layers)

    def point(
        self, rule: str, minimum: int, threshold: float = THRESHOLD, schedule: ScheduleName = "copying"
    ) -> OperatingPoint:
        """The point of a row of ``RULES``."""
        signal, pruning = RULES[rule]
        stepper = self._evidence.stepper
        return early_exit(
            signal, stepper.layers, stepper.vocabulary, minimum, threshold, pruning=pruning, schedule=schedule
        )

    @property
    def full(self) -> OperatingPoint:
        return full_depth(self._evidence.stepper.layers)

    def items(self, task: str) -> tuple[Pair, ...]:
        """The evaluated items, the same for every rule."""
        return self.asked.items(task).pairs

    def prompts(self, task: str) -> list[Prompt]:
        """The decoder's start token, after each item's source."""
        opening = self._evidence.opening
        assert opening is not None, "an encoder-decoder has a start token"
        return [Prompt(np.array([opening], dtype=np.int64), source) for source in self.asked.items(task).sources]

    # ------------------------------------------------------------ decoding

    def answered(self, task: str, rule: str, minimum: int, **options: object) -> Answered:
        """All items of ``task`` under a row of ``RULES``; options as of ``point``."""
        return self.under(task, self.point(rule, minimum, **options))  # type: ignore[arg-type]

    def under(self, task: str, point: OperatingPoint) -> Answered:
        """All items of ``task`` under ``point``."""
        if (task, point) not in self._answered:
            self._answered[task, point] = self._decode(task, point)
        return self._answered[task, point]

    def _decode(self, task: str, point: OperatingPoint) -> Answered:
        evidence, items, prompts = self._evidence, self.items(task), self.prompts(task)
        texts: list[str] = []
        depths: list[Ints] = []
        work: Work | None = Work.none(evidence.stepper.layers)
        with evidence.open(point, max_rows=ROWS) as decoder:
            for start in range(0, len(items), ROWS):
                batch = prompts[start : start + ROWS]
                record = decoder.generate(batch, TASKS[task].new, evidence.stop)
                work = work + record.work[0] if work is not None and record.work is not None else None
                depths += [record.tokens.of(row, phase=1).depth for row in range(len(batch))]
                texts += [
                    evidence.tokenizer.decode(emitted.tolist(), skip_special_tokens=True).strip()
                    for emitted in record.emitted
                ]
        answered = list(zip(texts, (item.answers for item in items), strict=True))
        exact = [exactly(task, text, answers) for text, answers in answered]
        return Answered(
            point,
            tuple(texts),
            np.array([scored(task, text, answers) for text, answers in answered]),
            np.array([float(depth.sum()) for depth in depths]),
            np.array([len(depth) for depth in depths]),
            work,
            None if None in exact else float(np.mean(exact)),  # type: ignore[arg-type]
        )

    def timed(self, rules: Mapping[str, OperatingPoint], task: str, pairs_: int, new: int) -> Timings:
        """Paired seconds of full depth (``full``) and of each rule: one item per pair, ``new`` tokens each."""
        evidence, prompts = self._evidence, self.prompts(task)
        decoders = {name: evidence.decoder(point) for name, point in {"full": self.full, **rules}.items()}

        def arm(name: str) -> Callable[[int], None]:
            def run(pair: int) -> None:
                decoders[name].generate([prompts[pair % len(prompts)]], new, frozenset())

            return run

        try:
            return timed_in_pairs(
                {name: arm(name) for name in decoders},
                pairs_,
                np.random.default_rng(evidence.seed),
                warm_up=WARM_UP,
                synchronize=decoders["full"].synchronize,
            )
        finally:
            for decoder in decoders.values():
                decoder.close()

    def forced_costs(self, point: OperatingPoint, task: str, pairs_: int, new: int) -> Costs:
        """FLOPs per item of the requests that ``timed`` times."""
        evidence, prompts = self._evidence, self.prompts(task)
        timed = range(WARM_UP, WARM_UP + pairs_)
        with evidence.open(point) as decoder:
            records = [decoder.generate([prompts[pair % len(prompts)]], new, frozenset()) for pair in timed]
        works = [record.work[0] for record in records if record.work is not None]
        if len(works) < len(records):
            raise Unsupported("the decoder does not count its work")
        return costs(sum(works, Work.none(evidence.stepper.layers)), evidence.loaded.geometry, len(works))

    def table(self) -> list[dict[str, object]]:
        """Every rule decoded so far, full depth first: exit, score and FLOPs per item; FLOPs None where not counted."""
        for task in self.tasks:
            self.under(task, self.full)
        names = {self.point(rule, minimum): (rule, minimum) for rule in RULES for minimum in self.minima}
        names[self.full] = ("full depth", self._evidence.stepper.layers)
        return [self.row(task, *names[point], done) for (task, point), done in self._answered.items() if point in names]

    def row(self, task: str, rule: str, minimum: int, done: Answered) -> dict[str, object]:
        """One line of a table about ``done``."""
        parts = None if done.counted is None else done.costs(self._evidence.loaded.geometry)
        return {
            "task": task,
            "rule": rule,
            "j": minimum,
            "mean exit": done.mean_exit,
            "score": float(done.score.mean()),
            "exact match": done.exact,
            "confidence MFLOPs": None if parts is None else parts.confidence / 1e6,
            "decoder MFLOPs": None if parts is None else parts.decoder / 1e6,
            "together MFLOPs": None if parts is None else parts.together / 1e6,
        }

    # ------------------------------------------------------------ teacher forcing

    def read(self, task: str) -> Read:
        """What every layer says of the reference answers."""
        if task not in self._read:
            items = zip(self.prompts(task), self.asked.items(task).targets, strict=True)
            self._read[task] = _joined([self._read_item(i, *item) for i, item in enumerate(items)])
        return self._read[task]

    def _read_item(self, number: int, prompt: Prompt, target: Ints) -> Read:
        fed = np.concatenate([prompt.tokens, target[:-1]])
        logits = lens_logits(self._evidence.stepper, fed, source=prompt.source)  # [n, L, V]
        return Read(
            np.full(len(target), number),
            final_token_ranks(logits),
            np.stack([_response(logits[:, layer]) for layer in range(logits.shape[1])], axis=1),
            logits.argmax(axis=-1) == target[:, None],
            {
                (signal, name): self._contrast(signal, rate, logits, target)
                for signal in ("weighted_contrast", "jsd_contrast")
                for name, rate in ALPHAS.items()
            },
        )

    def _contrast(self, signal: str, rate: float | None, logits: Floats, target: Ints) -> tuple[Floats, Bools]:
        """Confidence and correctness [n, layers that can decide] of one contrast from the least minimum layer on."""
        blocks = [slice(start, start + READ_TOKENS) for start in range(0, len(target), READ_TOKENS)]
        parts = [self._contrast_block(signal, rate, logits[block], target[block]) for block in blocks]
        return np.concatenate([sure for sure, _ in parts]), np.concatenate([right for _, right in parts])

    def _contrast_block(self, signal: str, rate: float | None, logits: Floats, target: Ints) -> tuple[Floats, Bools]:
        minimum, layers = self.minima[0], logits.shape[1]
        parameters = Confidence(minimum, alpha_decay=rate)
        tensors = torch.from_numpy(logits).to(self._evidence.stepper.device)
        seen = {m: tensors[:, m - 1] for m in range(1, layers)}
        confidence, correct = [], []
        for layer in range(minimum + SIGNALS[signal].needs.delay, layers):
            shallower = {m: z for m, z in seen.items() if m < layer}
            read = score_of(signal)(parameters, layer, seen[layer], shallower)
            assert read.logits is not None, "contrasts emit what they compare"
            confidence.append(read.signal.cpu().numpy())
            correct.append(read.logits.argmax(dim=-1).cpu().numpy() == target)
        return np.stack(confidence, axis=1), np.stack(correct, axis=1)

    # ------------------------------------------------------------ the other model of a pair

    @cached_property
    def twin(self) -> Exits | str:
        """The same model before or after tuning; or why there is none."""
        name = TWINS.get(self._evidence.name)
        if name is None:
            return f"only {' and '.join(TWINS)} are one model before and after tuning"
        if name not in bundled_names():
            return f"{name} does not come with this package"
        return self._evidence.beside(name).exits


def minimum_layers(layers: int) -> tuple[int, ...]:
    """The paper's minimum layers 7 and 19 of 24, at the same share of ``layers`` ≥ 4."""
    scaled = (round(layers * minimum / PUBLISHED_LAYERS) for minimum in PUBLISHED_MINIMA)
    # contrasts need a layer below, pruning one above that is not the last
    return tuple(sorted({max(2, min(layers - 2, minimum)) for minimum in scaled}))


def premise(evidence: Evidence, claim: Claim) -> Verdict | None:
    """Why a claim about early exits cannot be judged on this model; None where it can."""
    if not evidence.seq2seq:
        return not_applicable(claim, evidence.name, "a decoder-only model: the claim is about encoder-decoders")
    if not evidence.loaded.trained:
        return not_applicable(claim, evidence.name, "random weights: confidence and score of noise say nothing")
    if evidence.loaded.tokenizer is None:
        return unmeasured(claim, evidence.name, "the model came without a tokenizer, and the tasks are text")
    if not has_room(evidence.loaded.geometry):
        few = f"fewer than {LEAST_LAYERS} decoder layers or {LEAST_VOCABULARY} tokens: no room for the paper's settings"
        return not_applicable(claim, evidence.name, few)
    if absent := evidence.exits.asked.none:
        return unmeasured(claim, evidence.name, absent)
    return None


def has_room(geometry: Geometry) -> bool:
    """Whether the paper's minimum layers and pruned vocabularies exist at this size."""
    return geometry.layers >= LEAST_LAYERS and geometry.vocabulary >= LEAST_VOCABULARY


def decide(
    evidence: Evidence,
    record: Recorder,
    claim: Claim,
    judged: Callable[[], Verdict],
    arithmetic: Sequence[Leg] = (),
) -> None:
    """Record ``judged()``, or why the claim cannot be judged on this model.

    ``arithmetic``: legs that need geometry alone. They are the whole row where scores would say nothing, and stand
    beside what is unmeasured.
    """
    with record.unless_unsupported(claim.id, evidence.name):
        verdict, corpus = premise(evidence, claim), evidence.corpus
        if verdict is None:
            for note in evidence.exits.asked.notes:  # reads every file before anything is decoded
                record.note(note)
            verdict, corpus = judged(), evidence.exits.corpus
        elif arithmetic:
            unseen_items = [unseen("items", verdict.reason)] if verdict.verdict == "unmeasured" else []
            verdict = row(claim, evidence.name, [*arithmetic, *unseen_items])
        record.claim(verdict, corpus=corpus, fingerprint=evidence.fingerprint)


def difference(a: Floats, b: Floats, *, threshold: float, rng: np.random.Generator, unit: str) -> Estimate:
    """Mean of a − b over items, both [items] in 0–1, paired; studentised bootstrap over items.

    Where few items differ a bootstrap resamples those few, and makes a bound of any size out of one: then the mean lies
    between minus the share of items that are worse and the share that are better, each with its Clopper–Pearson bound.
    """
    worse, better = a < b, a > b
    if int(worse.sum() + better.sum()) >= FEWEST_DIFFERING:
        return mean_rate(a - b, np.ones(len(a), dtype=np.int64), threshold=threshold, rng=rng, unit=unit)
    every = np.ones(len(a), dtype=bool)
    up, down = accuracy_drop(every, ~better, threshold=threshold), accuracy_drop(~worse, every, threshold=threshold)
    method = f"{int(worse.sum() + better.sum())} items differ: Clopper–Pearson on how many do"
    return Estimate(float((a - b).mean()), down.low, up.high, len(a), down.p_above, up.p_below, unit, method)


def earlier(a: Answered, b: Answered, *, layers: int, threshold: float, rng: np.random.Generator) -> Estimate:
    """How many blocks earlier ``a`` exits than ``b``, mean over items of b's exit block minus a's."""
    # as shares of depth, so that differences lie within ±1
    scaled = difference(
        b.exit_block / layers, a.exit_block / layers, threshold=threshold / layers, rng=rng, unit="blocks earlier"
    )
    return replace(scaled, value=scaled.value * layers, low=scaled.low * layers, high=scaled.high * layers)


def share_estimate(kept: int, n: int, items: int, threshold: float, unit: str) -> Estimate:
    """A share of ``n`` draws against ``threshold``, Clopper–Pearson; ``items``: what was drawn from."""
    test = binomtest(kept, n, threshold)
    bounds = test.proportion_ci(0.95, method="exact")
    above = binomtest(kept, n, threshold, alternative="greater").pvalue
    below = binomtest(kept, n, threshold, alternative="less").pvalue
    method = f"Clopper–Pearson, {n} calibration sets drawn from {items} items"
    return Estimate(kept / n, bounds.low, bounds.high, items, float(above), float(below), unit, method)


def ratio(a: float, b: float) -> float:
    """a / b of FLOPs: how many times fewer b are."""
    return float(a / b)


def _response(logits: Floats) -> Floats:
    """[n] top-1 minus top-2 probability of ``logits`` [n, V]."""
    away = np.exp(logits - logits.max(axis=-1, keepdims=True))
    best = np.partition(away, -2, axis=-1)[:, -2:] / away.sum(axis=-1, keepdims=True)
    found: Floats = best[:, 1] - best[:, 0]
    return found


def _joined(parts: Sequence[Read]) -> Read:
    return Read(
        item=np.concatenate([part.item for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        response=np.concatenate([part.response for part in parts]),
        correct=np.concatenate([part.correct for part in parts]),
        contrasts={
            key: (
                np.concatenate([part.contrasts[key][0] for part in parts]),
                np.concatenate([part.contrasts[key][1] for part in parts]),
            )
            for key in parts[0].contrasts
        },
    )
