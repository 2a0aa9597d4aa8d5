"""Self-speculation for one model: whether and how it should draft for itself, and other lossless ways beside it.

    agrees[e, S][p]   the readout after layer e, over the vocabulary S, and the model itself have one argmax at p
    gate[e][p]        the gate's expected √KL there
    copies[p], stands[p]   whether the text repeats itself there, and how many copies in a row would stand
    a round at p      k = copies, where there are any, else drafts while gate ≤ τ, k ≤ longest;
                      a = of these, those up to the first that does not stand; emits a + 1 tokens, goes on at p + a + 1

Drafts are about text that the model writes: greedy continuations of prompts. A lens of their own is fitted on such
continuations, since one fitted on given text agrees with them far less often. Rounds of drafting are simulated on
columns of continuations, exactly at temperature 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.lens_fit import LensPlan, fit_lens, held_out_windows, states_and_final
from emad_ref.calibration.linear_maps import fit_gate
from emad_ref.calibration.trace import EmptyCorpus, TokenSequence, batched
from emad_ref.decoding.pair import shared_vocabulary
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, DraftingDecoder, PromptLookup
from emad_ref.errors import BadArgument
from emad_ref.models.bundled import bundled_names
from emad_ref.models.generation import greedy_generate
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator, full_depth
from emad_ref.probes.draft_reader import DraftReader
from emad_ref.probes.lens import attach_lens
from emad_ref.probes.signal_values import to_host
from emad_ref.protocol import Prompt
from emad_ref.record import Bools, Floats, Ints, Work
from emad_ref.screening.prediction import ComponentCosts, require_shares
from emad_ref.screening.settings import ScreeningSettings
from emad_ref.screening.timing import full_seconds, unsound
from emad_ref.screening.traces import ScreeningText, TextSplits

LOOKUP, ASSISTED, OWN_HEAD_DRAFTS, LENS_DRAFTS, COPIES_ALONE = "prompt lookup", "assisted", "self", "lens", "copies"
LOOKUP_TOKENS = 10  # tokens that prompt lookup drafts: transformers' documentation

LosslessDecoding = Callable[[Prompt, int], Ints]


def by_drafting(loaded: LoadedModel, drafting: Drafting) -> LosslessDecoding:
    """Our decoder, drafting for itself."""
    decoder = DraftingDecoder(loaded.stepper, drafting)
    return lambda prompt, new: decoder.generate([prompt], new).emitted[0]


def by_halves(loaded: LoadedModel, drafting: Drafting) -> dict[str, LosslessDecoding]:
    """Our decoder with either half of ``drafting`` alone, where it has two; and by the model's own head."""
    ways = {}
    if drafting.longest:
        ways[OWN_HEAD_DRAFTS] = Drafting(drafting.layer, drafting.longest)
    if drafting.longest and drafting.copied:
        ways[LENS_DRAFTS] = replace(drafting, copied=0)
        ways[COPIES_ALONE] = Drafting(drafting.layer, 0, copied=drafting.copied)
    return {name: by_drafting(loaded, way) for name, way in ways.items()}


def by_generate(loaded: LoadedModel, **options: Any) -> LosslessDecoding:
    """The model's own ``generate``, plainly greedy, with further settings of ``models.generation.greedy_generate``."""
    return lambda prompt, new: _generate_greedily(loaded, prompt, new, options)


def by_lookup(loaded: LoadedModel) -> LosslessDecoding:
    """Transformers' prompt lookup: what followed the last n-gram earlier in the text is drafted."""
    return by_generate(loaded, prompt_lookup_num_tokens=LOOKUP_TOKENS)


def by_assistant(loaded: LoadedModel, assistant: LoadedModel) -> LosslessDecoding:
    """Transformers' assisted generation: another model drafts.

    Raises:
        BadArgument: models that do not read the same ids.
    """
    shared_vocabulary(loaded, assistant)
    return by_generate(loaded, assistant=assistant.model)


def assistant_of(loaded: LoadedModel) -> LoadedModel | None:
    """The smallest bundled decoder-only model that reads the same ids and has fewer parameters; None: there is none."""
    found = []
    for name in bundled_names():
        other = load(name, device=str(loaded.stepper.device), dtype=loaded.stepper.dtype)
        if other.geometry.encoder_layers or other.geometry.parameters() >= loaded.geometry.parameters():
            continue
        try:
            shared_vocabulary(loaded, other)
        except BadArgument:  # it reads another text
            continue
        found.append(other)
    return min(found, key=lambda each: each.geometry.parameters(), default=None)


def _generate_greedily(loaded: LoadedModel, prompt: Prompt, new: int, options: Mapping[str, Any]) -> Ints:
    ids = torch.from_numpy(np.asarray(prompt.tokens))[None].to(loaded.stepper.device)
    given = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    emitted: Ints = greedy_generate(loaded.model, given, new, **options)[0, ids.shape[1] :].cpu().numpy()
    return emitted


@dataclass(frozen=True, eq=False)
class DraftingRounds:
    """Rounds of drafting: share of rounds with 0, 1, … ``drafts`` read after the layer, and with so many ``copies`` in
    their place, the first of which is 0; all of them sum to 1. ``tokens`` emitted a round."""

    drafts: Floats
    tokens: float
    copies: Floats = field(default_factory=lambda: np.zeros(1))

    def __post_init__(self) -> None:
        require_shares("rounds.drafts and rounds.copies", np.concatenate([self.drafts, self.copies]))
        most = max(len(self.drafts), len(self.copies))
        if not 1 <= self.tokens <= most:
            raise BadArgument("rounds.tokens", self.tokens, f"1–{most}", "a round emits one more at most")
        if self.copies[0]:
            raise BadArgument("rounds.copies", float(self.copies[0]), "0 rounds that copy nothing", "they draft")


def seconds_per_token_drafting(
    costs: ComponentCosts, drafting: Drafting, rounds: DraftingRounds, *, keys: float | None = None
) -> float:
    """Seconds of one emitted token where a model drafts for itself (``decoding.self_speculation``).

    Raises:
        BadArgument: more drafts than ``drafting`` allows; a part whose cost was not measured.
    """
    if len(rounds.drafts) > drafting.longest + 1:
        raise BadArgument("rounds.drafts", len(rounds.drafts) - 1, f"at most {drafting.longest} drafts a round")
    if len(rounds.copies) > drafting.copied + 1:
        raise BadArgument("rounds.copies", len(rounds.copies) - 1, f"at most {drafting.copied} copies a round")
    drafting.require(costs.layers, costs.vocabulary)
    drafts, copies = (enumerate(shares.tolist()) for shares in (rounds.drafts, rounds.copies))
    seconds = sum(share * seconds_of_round(costs, drafting, count, keys=keys) for count, share in drafts if share)
    copying = sum(share * seconds_of_copies(costs, count, keys=keys) for count, share in copies if share)
    return float(seconds + copying) / rounds.tokens


def seconds_of_copies(costs: ComponentCosts, copies: int, *, keys: float | None = None) -> float:
    """Seconds of a round of so many ``copies``: one pass of them and the last token through all layers."""
    return costs.step + costs.blocks(costs.layers, copies + 1, keys) + costs.heads(copies + 1)


def seconds_of_round(costs: ComponentCosts, drafting: Drafting, drafts: int, *, keys: float | None = None) -> float:
    """Seconds of a round of so many ``drafts``: they and the last token go to the draft layer one by one, then on."""
    above = costs.layers - drafting.layer
    asked = 0 if drafting.gate is None or np.isinf(drafting.threshold) else min(drafts + 1, drafting.longest)
    ids = drafting.vocabulary
    drafted = costs.heads() if ids is None else costs.pruned_head(len(ids))
    lens = 0.0 if drafting.lens is None or not drafts else costs.of("lens")
    alone = costs.shallow(drafting.layer, keys) if drafts else costs.blocks(drafting.layer, keys=keys)
    return (
        costs.step
        + drafts * costs.token
        + (drafts + 1) * alone
        + drafts * (drafted + lens)
        + (asked * costs.of("gate") if asked else 0.0)
        + costs.blocks(above, drafts + 1, keys)
        + costs.heads(drafts + 1)
    )


LONGEST = (1, 2, 3, 4, 6, 8)
COPIED = (0, 4, 8)
SURE = (0.3, 0.5, 0.7, 0.85)  # shares of tokens that thresholds let through; and inf lets through all
SHARES_OF_VOCABULARY = (1 / 8, 1 / 2)

PredictedSeconds = Callable[[Drafting, DraftingRounds], float]
ColumnsOfKinds = tuple["DraftColumns", ...]


@dataclass(frozen=True, eq=False)
class DraftColumns:
    """What drafts of one kind would have done on texts: one layer, readout and vocabulary.

    ``drafting``  the kind, with threshold inf and longest 1.
    ``agrees`` [tokens], ``gate`` float64 [tokens] √nats, None without one; ``starts`` int64 [texts + 1] offsets.
    ``stands`` int64 [tokens] how many of ``max(COPIED)`` copies would stand, −1 where there is nothing to copy.
    """

    drafting: Drafting
    agrees: Bools
    gate: Floats | None
    starts: Ints
    stands: Ints


@dataclass(frozen=True, eq=False)
class DraftingChoice:
    """A way of drafting, the rounds it made on the columns, and the predicted ``seconds`` of a token."""

    drafting: Drafting
    rounds: DraftingRounds
    seconds: float


def continuations(
    stepper: Stepper, windows: Iterable[TokenSequence], prompt: int, new: int, *, rows: int = 16
) -> list[TokenSequence]:
    """What the model says, greedily, after the first ``prompt`` tokens of each window that has as many.

    ``new`` tokens are decided in each, the first by the prompt's last position. Windows with a source keep it.

    Raises:
        BadArgument: no window is as long.
    """
    asked = [window for window in windows if len(window.tokens) >= prompt]
    if not asked:
        raise BadArgument("windows", 0, f"some of at least {prompt} tokens", "shorten the prompt")
    decoder = WalkedDecoder(stepper, full_depth(stepper.layers), max_rows=rows)
    texts = []
    for first in range(0, len(asked), rows):
        batch = asked[first : first + rows]
        emitted = decoder.generate([Prompt(each.tokens[:prompt], each.source) for each in batch], new).emitted
        for window, tokens in zip(batch, emitted, strict=True):
            texts.append(
                replace(window, tokens=np.concatenate([window.tokens[:prompt], tokens]), adaptive_from=prompt - 1)
            )
    return texts


def frequent_tokens(texts: Iterable[TokenSequence], size: int) -> Ints:
    """int64 [≤ size] ascending ids: those the model emitted most, the smaller id first where two are as many."""
    if size < 1:
        raise BadArgument("size", size, "at least one id")
    said = np.concatenate([text.tokens[text.adaptive_from + 1 :] for text in texts])
    ids, counts = np.unique(said, return_counts=True)
    most: Ints = np.sort(ids[np.argsort(-counts, kind="stable")[:size]]).astype(np.int64)
    return most


def draft_vocabularies(stepper: Stepper, texts: Sequence[TokenSequence]) -> list[Ints | None]:
    """All ids, and the most frequent ones at ``SHARES_OF_VOCABULARY`` of them, each size once."""
    sizes = [max(1, int(share * stepper.vocabulary)) for share in SHARES_OF_VOCABULARY]
    found = {len(ids): ids for ids in (frequent_tokens(texts, size) for size in sizes)}
    return [None, *found.values()]


def gate_at_layer(gate: Estimator, layers: Sequence[int], layer: int) -> Estimator:
    """Of a gate with probes at ``layers`` the one after ``layer``."""
    return replace(gate, weights=(gate.weights[list(layers).index(layer)],))


@torch.inference_mode()
def draft_columns(
    stepper: Stepper,
    texts: Sequence[TokenSequence],
    layers: Sequence[int],
    lens: str | None,
    gates: Mapping[int, Estimator],
    among: Sequence[Ints | None] = (None,),
) -> ColumnsOfKinds:
    """Columns of every layer and vocabulary, in that order, of the decided positions of ``texts``.

    Raises:
        BadArgument: a lens that is not attached or lacks a layer, layers outside 1 … L − 1.
    """
    kinds = [Drafting(layer, 1, lens=lens, gate=gates.get(layer), vocabulary=ids) for layer in layers for ids in among]
    for kind in kinds:
        kind.require(stepper.layers, stepper.vocabulary)
    readers = [DraftReader(stepper, kind.layer, lens, kind.gate, kind.vocabulary) for kind in kinds]
    agrees: list[list[Bools]] = [[] for _ in kinds]
    gate: list[list[Floats]] = [[] for _ in kinds]
    uncounted = Work.none(stepper.layers)
    for batch in batched(texts):
        states, final = states_and_final(stepper, layers, batch)
        own = final.argmax(dim=-1)
        for kind, reader, right, expected in zip(kinds, readers, agrees, gate, strict=True):
            hidden = states[kind.layer]
            right.append((reader.tokens(hidden, uncounted) == own).cpu().numpy())
            if kind.gate is not None:
                expected.append(to_host(reader.expected(hidden, uncounted)))
    starts = np.cumsum([0, *(len(text.tokens) - 1 - text.adaptive_from for text in texts)])
    stands = np.concatenate([_standing_copies(text) for text in texts])
    return tuple(
        DraftColumns(kind, np.concatenate(right), np.concatenate(expected) if expected else None, starts, stands)
        for kind, right, expected in zip(kinds, agrees, gate, strict=True)
    )


def select_texts(columns: DraftColumns, which: Sequence[int]) -> DraftColumns:
    """The columns of some of its texts, by number, in this order."""
    slices = [slice(columns.starts[number], columns.starts[number + 1]) for number in which]
    lengths = [each.stop - each.start for each in slices]
    agrees, stands = (np.concatenate([each[at] for at in slices]) for each in (columns.agrees, columns.stands))
    gate = None if columns.gate is None else np.concatenate([columns.gate[at] for at in slices])
    return DraftColumns(columns.drafting, agrees, gate, np.cumsum([0, *lengths]), stands)


def simulate_rounds(columns: DraftColumns, threshold: float, longest: int, copied: int = 0) -> DraftingRounds:
    """The rounds that drafting makes of the texts: the first decided token of each comes from the prompt."""
    if threshold < math.inf and columns.gate is None:
        raise BadArgument("threshold", threshold, "inf where no gate was read", "read the columns with one")
    sure = np.ones(len(columns.agrees), dtype=bool) if columns.gate is None else columns.gate <= threshold
    drafts, copies, emitted = np.zeros(longest + 1), np.zeros(copied + 1), 0
    for first, end in zip(columns.starts[:-1], columns.starts[1:], strict=True):
        going, right = _runs(sure[first:end]), _runs(columns.agrees[first:end])
        stands = columns.stands[first:end].tolist()
        at, last = 1, end - first  # the prompt's last position decided the first token
        while at < last:
            room = last - at - 1
            if copied and room and stands[at] >= 0:
                count, stood = min(copied, room), stands[at]
                copies[count] += 1
            else:
                count, stood = min(longest, going[at], room), right[at]
                drafts[count] += 1
            at += min(count, stood) + 1
        emitted += last - 1
    if emitted == 0:
        raise BadArgument("columns.starts", columns.starts.tolist(), "texts of two decided tokens or more")
    rounds = drafts.sum() + copies.sum()
    return DraftingRounds(drafts / rounds, emitted / rounds, copies / rounds)


def rank_choices(
    columns: Iterable[DraftColumns],
    seconds: PredictedSeconds,
    *,
    longest: Sequence[int] = LONGEST,
    sure: Sequence[float] = SURE,
    copied: Sequence[int] = COPIED,
) -> list[DraftingChoice]:
    """Every setting of every kind of draft, the fastest first; and copies alone, where nothing is read after a layer.

    ``sure``: thresholds as shares of tokens that they let through; without a gate, and besides, there is none.
    """
    found = []

    def tried(each: DraftColumns, threshold: float, most: int, copies: int) -> None:
        drafting = replace(each.drafting, threshold=threshold, longest=most, copied=copies)
        rounds = simulate_rounds(each, threshold, most, copies)
        found.append(DraftingChoice(drafting, rounds, seconds(drafting, rounds)))

    kinds = list(columns)
    for each in kinds:
        levels = [] if each.gate is None else np.unique(np.quantile(each.gate, sure)).tolist()
        for setting in product((*levels, math.inf), longest, copied):
            tried(each, *setting)
    if kinds:  # alone, copies read nothing, and go through all layers at once
        alone = replace(kinds[0], drafting=Drafting(kinds[0].drafting.layer, 1), gate=None)
        for copies in filter(None, copied):
            tried(alone, math.inf, 0, copies)
    return sorted(found, key=lambda choice: choice.seconds)


def _standing_copies(text: TokenSequence) -> Ints:
    """[decided] how many copies in a row the text itself goes on with, −1 where nothing before is like its end."""
    tokens, seen, most = text.tokens.tolist(), PromptLookup(), max(COPIED)
    found = []
    for known in range(text.adaptive_from + 1, len(tokens)):  # the token at ``known`` − 1 is fed, the next is drafted
        offered = seen.of(tokens[:known], most)
        right = 0
        while right < len(offered) and known + right < len(tokens) and offered[right] == tokens[known + right]:
            right += 1
        found.append(right if offered else -1)
    return np.array(found, dtype=np.int64)


def _runs(flags: Bools) -> list[int]:
    """[n] how many in a row are set from each place on."""
    runs, running = [0] * len(flags), 0
    for place in range(len(flags) - 1, -1, -1):
        running = running + 1 if flags[place] else 0
        runs[place] = running
    return runs


DRAFT_LENS_STEPS = 500  # of 512 tokens: held-out agreement of small models has settled


def draft_layers(layers: int) -> tuple[int, ...]:
    """Candidates: the first third of the layers, four at most. Each costs every drafted token its blocks."""
    return tuple(range(1, max(1, min(4, layers // 3)) + 1))


def fit_draft_lens(
    model: LoadedModel,
    texts: Sequence[TokenSequence],
    layers: Sequence[int],
    *,
    corpus: str,
    rank: int | None = None,
    steps: int = DRAFT_LENS_STEPS,
    seed: int = 0,
    progress: str | None = None,
) -> FittedLens:
    """A lens of ``layers`` with its gate, attached to the model's stepper.

    ``texts``: what the model says after text of split calibrate (``drafts.own_texts``); ``corpus``: that text's name,
    for the record.

    Raises:
        BadArgument: layers or a rank that the model has not.
        EmptyCorpus: no text, or too few documents to hold any out.
    """
    stepper = model.stepper
    plan = LensPlan(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=str(stepper.dtype).removeprefix("torch."),
        corpus=f"{corpus}, continued by the model",
        window=max((len(text.tokens) for text in texts), default=0),
        layers=tuple(layers),
        rank=rank,
        steps=steps,
        held_out=0.3,
        seed=seed,
    )
    fitted = fit_lens(stepper, plan, lambda: iter(texts), progress=progress)
    name = attach_lens(stepper, fitted.lens, model.fingerprint)
    named = None if progress is None else f"{progress}, gate"
    gate = fit_gate(stepper, held_out_windows(plan, lambda: iter(texts)), plan.layers, name, progress=named)
    return replace(fitted, gate=gate)


@dataclass(frozen=True)
class AfterPrompt:
    """``texts`` of the model's own after prompts of ``prompt`` tokens, ``emitted`` tokens in rounds.

    ``agreement``: share of drafts that the model itself would emit; ``tokens`` a round; predicted ``seconds`` of one,
    and ``full`` those at full depth, both against as many keys as there are to look back on, on average.
    """

    prompt: int
    texts: int
    emitted: int
    agreement: float
    tokens: float
    seconds: float
    full: float

    @property
    def fast(self) -> float:
        """How many times as fast as full depth."""
        return self.full / self.seconds

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> AfterPrompt:
        """What ``asdict`` gave. Raises BadArgument for fields that are missing, or no numbers above 0."""
        held: dict[str, Any] = {field.name: given.get(field.name) for field in fields(AfterPrompt)}
        for name, value in held.items():
            share = name == "agreement"
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and not share):
                expected = "a share" if share else "a number above 0"
                raise BadArgument(f"after prompts: {name}", value, expected, "screen the model again")
        return AfterPrompt(**held)


def predict_after_prompts(
    costs: ComponentCosts, way: Drafting, texts: Sequence[TokenSequence], columns: DraftColumns
) -> tuple[AfterPrompt, ...]:
    """A row per length of prompt, the shortest first, of ``columns`` of ``texts``.

    Raises:
        BadArgument: as ``seconds_per_token_drafting`` and ``simulate_rounds``.
    """
    lengths = np.array([text.adaptive_from + 1 for text in texts])
    found = []
    for prompt in np.unique(lengths).tolist():
        at = np.flatnonzero(lengths == prompt).tolist()
        ends = [len(texts[number].tokens) for number in at]
        mine, keys = select_texts(columns, at), (prompt + float(np.mean(ends))) / 2
        rounds = simulate_rounds(mine, way.threshold, way.longest, way.copied)
        seconds = seconds_per_token_drafting(costs, way, rounds, keys=keys)
        emitted = sum(ends) - len(ends) * (prompt + 1)  # the first comes from the prompt's pass
        agreement = float(mine.agrees.mean())
        found.append(
            AfterPrompt(prompt, len(at), emitted, agreement, rounds.tokens, seconds, full_seconds(costs, keys))
        )
    return tuple(found)


def read_after_prompts(screened: Mapping[str, Any]) -> tuple[AfterPrompt, ...]:
    """The rows in a screening's record (``tabled``); none in one that has none.

    Raises:
        BadArgument: as ``AfterPrompt.from_json``.
    """
    return tuple(AfterPrompt.from_json(row) for row in screened.get("drafts", {}).get("after", ()))


def nearest(rows: Sequence[AfterPrompt], prompt: int) -> AfterPrompt | None:
    """The row whose prompts are most like one of ``prompt`` tokens, in proportion; None where there is none."""
    return min(rows, key=lambda row: max(row.prompt / prompt, prompt / row.prompt), default=None)


PROMPTS = (16, 64, 128)  # tokens: what a model says right away is another text than what it says after a long prompt
CONTINUED_TOKENS = 112  # tokens
CONTINUED_ROWS = 32
MAX_WINDOWS, MAX_LESSONS = 64, 256  # windows to choose or to show on, and to fit on, after each prompt length
WORTH_SPEEDUP = 1.05  # times as fast, predicted: prediction is good to within a tenth


@dataclass(frozen=True, eq=False)
class SelfDraftingResult:
    """``drafting``: the way to recommend, or None, and ``why_none``. ``best``: the fastest, recommended or not.

    ``spoken``: the lens and gate that drafts are read by, attached to the model's stepper.
    ``after``: on continuations of evaluation text, what it is predicted to do after prompts of each length.
    """

    best: Drafting | None
    drafting: Drafting | None
    why_none: str
    spoken: FittedLens | None = None
    after: tuple[AfterPrompt, ...] = ()

    @property
    def agreement(self) -> float:
        """Share of drafts of its kind that the model itself would emit."""
        return sum(row.emitted * row.agreement for row in self.after) / self._emitted

    @property
    def tokens(self) -> float:
        """Emitted a round."""
        return self._emitted / sum(row.emitted / row.tokens for row in self.after)

    @property
    def seconds(self) -> float:
        """Of a token, predicted, over all of these texts."""
        return sum(row.emitted * row.seconds for row in self.after) / self._emitted

    @property
    def fast(self) -> float:
        """How many times as fast as full depth these texts are predicted to be written."""
        return sum(row.emitted * row.full for row in self.after) / self._emitted / self.seconds

    @property
    def _emitted(self) -> int:
        return sum(row.emitted for row in self.after)

    @property
    def reads(self) -> bool:
        """Whether what is recommended reads drafts through the lens; copies alone do without."""
        return self.drafting is not None and self.drafting.lens is not None

    @property
    def said(self) -> str:
        """The same in words."""
        if self.drafting is None:
            return f"lossless: {self.why_none}"
        return (
            f"lossless: {' '.join(self._how(self.drafting))}; {self.tokens:.2f} tokens a round, predicted "
            f"{self.fast:.2f}× as fast as full depth ({self._apart}), its output unchanged"
        )

    @property
    def _apart(self) -> str:
        rows = ", ".join(f"{row.fast:.2f}× after {row.prompt}" for row in self.after)
        return f"{rows} tokens of prompt"

    def _how(self, way: Drafting) -> Iterator[str]:
        if way.copied:
            yield f"let it copy up to {way.copied} tokens where its text repeats itself{', and' if way.longest else ''}"
        if way.longest:
            head = (
                "the whole vocabulary" if way.vocabulary is None else f"{len(way.vocabulary)} words of the vocabulary"
            )
            stop = "as long as its gate lets it" if way.gated else "always"
            yield (
                f"{'' if way.copied else 'let it '}draft for itself after layer {way.layer} by {head}, {stop}, up to "
                f"{way.longest} tokens a round ({self.agreement:.0%} of drafts agree)"
            )


def choose_drafting(
    model: LoadedModel, texts: TextSplits, fitted: FittedLens, costs: ComponentCosts, settings: ScreeningSettings
) -> SelfDraftingResult:
    layers = draft_layers(model.geometry.layers)
    try:
        lessons, chosen, judged = _continued_splits(model, texts)
        spoken = fit_draft_lens(
            model,
            lessons,
            layers,
            corpus=settings.corpus,
            rank=fitted.lens.rank,
            steps=settings.part(DRAFT_LENS_STEPS),
            seed=settings.seed,
        )
    except (BadArgument, EmptyCorpus) as error:
        return _no_drafting(f"no text to draft on: {error}")
    assert spoken.gate is not None, "a lens for drafts has a gate"
    among = draft_vocabularies(model.stepper, lessons)
    gates = {layer: gate_at_layer(spoken.gate, layers, layer) for layer in layers}
    read = partial(draft_columns, model.stepper, lens=spoken.lens.digest, gates=gates)
    best = rank_choices(read(chosen, layers, among=among), lambda *each: seconds_per_token_drafting(costs, *each))[0]
    way = best.drafting
    (shown,) = read(judged, [way.layer], among=[way.vocabulary])
    found = SelfDraftingResult(way, way, "", spoken, predict_after_prompts(costs, way, judged, shown))
    why = unsound(costs)
    if not why and found.fast < WORTH_SPEEDUP:
        why = (
            f"drafting for itself is predicted to be {found.fast:.2f}× as fast as full depth, "
            f"{WORTH_SPEEDUP:.2f}× is the least"
        )
    return replace(found, drafting=None, why_none=why) if why else found


def _no_drafting(why: str) -> SelfDraftingResult:
    return SelfDraftingResult(None, None, why)


def continuation_steps(texts: TextSplits) -> int:
    """Steps of a batch in which continuations are written, at most."""
    counts = [min(most, len(text.windows)) for text, most in _continued_windows(texts)]
    return CONTINUED_TOKENS * len(PROMPTS) * sum(math.ceil(count / CONTINUED_ROWS) for count in counts)


def _continued_windows(texts: TextSplits) -> list[tuple[ScreeningText, int]]:
    """What is continued to fit on, to choose on and to show, and at most so many windows of it."""
    return [(texts.calibrate, MAX_LESSONS), (texts.choose, MAX_WINDOWS), (texts.evaluate, MAX_WINDOWS)]


def _continued_splits(model: LoadedModel, texts: TextSplits) -> list[list[TokenSequence]]:
    """Continuations to fit on, to choose on and to show, after every prompt length.

    Raises:
        BadArgument: no window is long enough.
    """
    room = model.stepper.max_positions

    def written(text: ScreeningText, count: int) -> list[TokenSequence]:
        found = []
        for prompt in PROMPTS:
            long = [window for window in text.windows if len(window.tokens) >= prompt][:count]
            if long and prompt + 1 < room:  # one token comes from the prompt's pass: there is nothing to draft
                found += continuations(
                    model.stepper, long, prompt, min(CONTINUED_TOKENS, room - prompt), rows=CONTINUED_ROWS
                )
        if not found:
            raise BadArgument("windows", 0, f"some of at least {min(PROMPTS)} tokens", "give longer documents")
        return found

    return [written(text, most) for text, most in _continued_windows(texts)]
