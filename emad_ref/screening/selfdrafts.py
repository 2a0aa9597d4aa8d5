"""Whether a model should draft for itself: the way that would be fastest here, its output unchanged.

Where a text repeats itself, what followed there is copied (``decoding.copying``). Elsewhere drafts are read through a
lens of their own, fitted on the model's own continuations of text to fit on
(``screening.draft_lens``). Settings are chosen on continuations of text to choose on, by predicted time
(``screening.drafts``), and what is shown is what the chosen one does on continuations of evaluation text. Its
vocabulary is what the model says most after text to fit on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from emad_ref.calibration.lens_file import FittedLens
from emad_ref.calibration.trace import EmptyCorpus, TokenSequence
from emad_ref.decoding.drafting import Drafting
from emad_ref.errors import BadArgument
from emad_ref.meters.costs import Costs
from emad_ref.models.loading import Loaded
from emad_ref.screening.after_prompts import AfterPrompt, after_prompts
from emad_ref.screening.draft_lens import STEPS, draft_layers, fit_draft_lens
from emad_ref.screening.drafts import choices, draft_columns, gate_after, own_texts, vocabularies
from emad_ref.screening.predicted_rounds import seconds_per_token_drafting
from emad_ref.screening.settings import Settings
from emad_ref.screening.texts import Text, Texts
from emad_ref.screening.timing import unsound

PROMPTS = (16, 64, 128)  # tokens: what a model says right away is another text than what it says after a long prompt
NEW = 112  # tokens
ROWS = 32
MOST, LESSONS = 64, 256  # windows to choose or to show on, and to fit on, after each prompt length
WORTH = 1.05  # times as fast, predicted: prediction is good to within a tenth


@dataclass(frozen=True, eq=False)
class SelfDrafting:
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


def self_drafting(model: Loaded, texts: Texts, fitted: FittedLens, costs: Costs, settings: Settings) -> SelfDrafting:
    layers = draft_layers(model.geometry.layers)
    try:
        lessons, chosen, judged = _own_texts(model, texts)
        spoken = fit_draft_lens(
            model,
            lessons,
            layers,
            corpus=settings.corpus,
            rank=fitted.lens.rank,
            steps=settings.part(STEPS),
            seed=settings.seed,
        )
    except (BadArgument, EmptyCorpus) as error:
        return _none(f"no text to draft on: {error}")
    assert spoken.gate is not None, "a lens for drafts has a gate"
    among = vocabularies(model.stepper, lessons)
    gates = {layer: gate_after(spoken.gate, layers, layer) for layer in layers}
    read = partial(draft_columns, model.stepper, lens=spoken.lens.digest, gates=gates)
    best = choices(read(chosen, layers, among=among), lambda *each: seconds_per_token_drafting(costs, *each))[0]
    way = best.drafting
    (shown,) = read(judged, [way.layer], among=[way.vocabulary])
    found = SelfDrafting(way, way, "", spoken, after_prompts(costs, way, judged, shown))
    why = unsound(costs)
    if not why and found.fast < WORTH:
        why = (
            f"drafting for itself is predicted to be {found.fast:.2f}× as fast as full depth, {WORTH:.2f}× is the least"
        )
    return replace(found, drafting=None, why_none=why) if why else found


def _none(why: str) -> SelfDrafting:
    return SelfDrafting(None, None, why)


def written_batches(texts: Texts) -> int:
    """Steps of a batch in which continuations are written, at most."""
    counts = [min(most, len(text.windows)) for text, most in _wanted(texts)]
    return NEW * len(PROMPTS) * sum(math.ceil(count / ROWS) for count in counts)


def _wanted(texts: Texts) -> list[tuple[Text, int]]:
    """What is continued to fit on, to choose on and to show, and at most so many windows of it."""
    return [(texts.calibrate, LESSONS), (texts.choose, MOST), (texts.evaluate, MOST)]


def _own_texts(model: Loaded, texts: Texts) -> list[list[TokenSequence]]:
    """Continuations to fit on, to choose on and to show, after every prompt length.

    Raises:
        BadArgument: no window is long enough.
    """
    room = model.stepper.max_positions

    def written(text: Text, count: int) -> list[TokenSequence]:
        found = []
        for prompt in PROMPTS:
            long = [window for window in text.windows if len(window.tokens) >= prompt][:count]
            if long and prompt + 1 < room:  # one token comes from the prompt's pass: there is nothing to draft
                found += own_texts(model.stepper, long, prompt, min(NEW, room - prompt), rows=ROWS)
        if not found:
            raise BadArgument("windows", 0, f"some of at least {min(PROMPTS)} tokens", "give longer documents")
        return found

    return [written(text, most) for text, most in _wanted(texts)]
