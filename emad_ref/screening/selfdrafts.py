"""Whether a model should draft for itself: the way that would be fastest here, its output unchanged.

Settings are chosen on the model's own continuations of text to choose on, by predicted time (``screening.drafts``), and
what is shown is what the chosen one does on continuations of evaluation text. Its vocabulary is what the model says
most after text that the lens was fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from emad_ref.calibration.lens_file import FittedLens
from emad_ref.calibration.trace import TokenSequence
from emad_ref.decoding.drafting import Drafting
from emad_ref.errors import BadArgument
from emad_ref.meters.costs import Costs
from emad_ref.models.loading import Loaded
from emad_ref.screening.drafts import (
    Columns,
    choices,
    draft_columns,
    gate_after,
    own_texts,
    simulated,
    vocabularies,
)
from emad_ref.screening.predicted import seconds_per_token_drafting
from emad_ref.screening.settings import Settings, affordable
from emad_ref.screening.texts import Text, Texts
from emad_ref.screening.timing import full_seconds, unsound

LAYERS = (1, 2, 3, 4)  # shallow drafts win, where drafting pays at all
PROMPT, NEW = 16, 48  # tokens
ROWS = 16
MOST = 96  # windows of each text
WORTH = 1.05  # times as fast, predicted: prediction is good to within a tenth


@dataclass(frozen=True, eq=False)
class SelfDrafting:
    """``drafting``: the way to recommend, or None, and ``why_none``. ``best``: the fastest, recommended or not.

    ``agreement``: share of drafts of its kind that the model itself would emit; ``tokens`` emitted a round, ``seconds``
    a token and times as ``fast`` as full depth, all predicted, on continuations of evaluation text.
    """

    best: Drafting | None
    drafting: Drafting | None
    why_none: str
    agreement: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    fast: float = 0.0

    @property
    def said(self) -> str:
        """The same in words."""
        if self.drafting is None:
            return f"lossless: {self.why_none}"
        way, head = self.drafting, "the whole vocabulary"
        if way.vocabulary is not None:
            head = f"{len(way.vocabulary)} words of the vocabulary"
        stop = "as long as its gate lets it" if way.gated else "always"
        return (
            f"lossless: let it draft for itself after layer {way.layer} by {head}, {stop}, up to {way.longest} tokens "
            f"a round; {self.agreement:.0%} of drafts agree, {self.tokens:.2f} tokens a round, predicted "
            f"{self.fast:.2f}× as fast as full depth, its output unchanged"
        )


def self_drafting(model: Loaded, texts: Texts, fitted: FittedLens, costs: Costs, settings: Settings) -> SelfDrafting:
    """The fastest way to draft, by what was measured to cost here."""
    layers = [layer for layer in LAYERS if layer in fitted.lens.translators]
    if not layers:
        return _none(f"the lens translates none of the layers {', '.join(map(str, LAYERS))}")
    count = _count(model, texts.choose, settings)
    try:
        own = [_written(model, text, count) for text in (texts.calibrate, texts.choose, texts.evaluate)]
    except BadArgument as error:
        return _none(f"no text to draft on: {error}")
    among = vocabularies(model.stepper, own[0])
    gate, known = fitted.gate, tuple(fitted.lens.translators)
    gates = {} if gate is None else {layer: gate_after(gate, known, layer) for layer in layers}
    read = partial(draft_columns, model.stepper, lens=fitted.lens.digest, gates=gates)
    best = choices(read(own[1], layers, among=among), lambda *each: seconds_per_token_drafting(costs, *each))[0]
    way = best.drafting
    shown: Columns = read(own[2], [way.layer], among=[way.vocabulary])
    rounds = simulated(shown[0], way.threshold, way.longest)
    seconds = seconds_per_token_drafting(costs, way, rounds)
    fast = full_seconds(costs) / seconds
    why = unsound(costs)
    if not why and fast < WORTH:
        why = f"drafting for itself is predicted to be {fast:.2f}× as fast as full depth, {WORTH:.2f}× is the least"
    agreement = float(shown[0].agrees.mean())
    return SelfDrafting(way, None if why else way, why, agreement, rounds.tokens, seconds, fast)


def _none(why: str) -> SelfDrafting:
    return SelfDrafting(None, None, why)


def _written(model: Loaded, text: Text, count: int) -> list[TokenSequence]:
    """What the model goes on to say after the first of the windows that are long enough."""
    long = [window for window in text.windows if len(window.tokens) >= PROMPT][:count]
    return own_texts(model.stepper, long, PROMPT, min(NEW, model.stepper.max_positions - PROMPT), rows=ROWS)


def _count(model: Loaded, text: Text, settings: Settings) -> int:
    """Windows of each of three texts that can be continued in time."""
    timed = text.first(ROWS)
    if not any(len(window.tokens) >= PROMPT for window in timed.windows):
        return MOST
    seconds = settings.seconds("drafts") / 3
    return ROWS * affordable(lambda: _written(model, timed, ROWS), seconds, MOST // ROWS)
