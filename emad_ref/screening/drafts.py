"""How should a model draft for itself? Rounds of drafting simulated on columns of its text, and what they would cost.

    agrees[e, S][p]   the readout after layer e, over the vocabulary S, and the model itself have one argmax at p
    gate[e][p]        the gate's expected √KL there
    copies[p], stands[p]   whether the text repeats itself there, and how many copies in a row would stand
    a round at p      k = copies, where there are any, else drafts while gate ≤ τ, k ≤ longest;
                      a = of these, those up to the first that does not stand; emits a + 1 tokens, goes on at p + a + 1

The text is the model's own greedy continuation of prompts (``own_texts``): what drafting at temperature 0 will meet.
There a and the rounds are exact. Drafts after one that does not agree would be read on another text; how many of them
there are is taken from the gates of this one. A vocabulary is what a model says most, on text that judges nothing.

Which settings are worth it is arithmetic: ``Seconds`` of a token, e.g. ``screening.predicted_rounds``, of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from emad_ref.calibration.trace import TokenSequence, batched
from emad_ref.calibration.tuning import states_and_final
from emad_ref.decoding.copying import Copies
from emad_ref.decoding.drafting import Drafting
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator, full_depth
from emad_ref.protocol import Prompt
from emad_ref.readout.drafts import DraftReader
from emad_ref.readout.signals import on_host
from emad_ref.record import Bools, Floats, Ints, Work
from emad_ref.screening.predicted_rounds import Rounds

LONGEST = (1, 2, 3, 4, 6, 8)
COPIED = (0, 4, 8)
SURE = (0.3, 0.5, 0.7, 0.85)  # shares of tokens that thresholds let through; and inf lets through all
SHARES_OF_VOCABULARY = (1 / 8, 1 / 2)

Seconds = Callable[[Drafting, Rounds], float]
Columns = tuple["DraftColumns", ...]


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
class Choice:
    """A way of drafting, the rounds it made on the columns, and the predicted ``seconds`` of a token."""

    drafting: Drafting
    rounds: Rounds
    seconds: float


def own_texts(
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


def frequent(texts: Iterable[TokenSequence], size: int) -> Ints:
    """int64 [≤ size] ascending ids: those the model emitted most, the smaller id first where two are as many."""
    if size < 1:
        raise BadArgument("size", size, "at least one id")
    said = np.concatenate([text.tokens[text.adaptive_from + 1 :] for text in texts])
    ids, counts = np.unique(said, return_counts=True)
    most: Ints = np.sort(ids[np.argsort(-counts, kind="stable")[:size]]).astype(np.int64)
    return most


def vocabularies(stepper: Stepper, texts: Sequence[TokenSequence]) -> list[Ints | None]:
    """All ids, and the most frequent ones at ``SHARES_OF_VOCABULARY`` of them, each size once."""
    sizes = [max(1, int(share * stepper.vocabulary)) for share in SHARES_OF_VOCABULARY]
    found = {len(ids): ids for ids in (frequent(texts, size) for size in sizes)}
    return [None, *found.values()]


def gate_after(gate: Estimator, layers: Sequence[int], layer: int) -> Estimator:
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
) -> Columns:
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
                expected.append(on_host(reader.expected(hidden, uncounted)))
    starts = np.cumsum([0, *(len(text.tokens) - 1 - text.adaptive_from for text in texts)])
    stands = np.concatenate([_standing_copies(text) for text in texts])
    return tuple(
        DraftColumns(kind, np.concatenate(right), np.concatenate(expected) if expected else None, starts, stands)
        for kind, right, expected in zip(kinds, agrees, gate, strict=True)
    )


def of_texts(columns: DraftColumns, which: Sequence[int]) -> DraftColumns:
    """The columns of some of its texts, by number, in this order."""
    slices = [slice(columns.starts[number], columns.starts[number + 1]) for number in which]
    lengths = [each.stop - each.start for each in slices]
    agrees, stands = (np.concatenate([each[at] for at in slices]) for each in (columns.agrees, columns.stands))
    gate = None if columns.gate is None else np.concatenate([columns.gate[at] for at in slices])
    return DraftColumns(columns.drafting, agrees, gate, np.cumsum([0, *lengths]), stands)


def simulated(columns: DraftColumns, threshold: float, longest: int, copied: int = 0) -> Rounds:
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
    return Rounds(drafts / rounds, emitted / rounds, copies / rounds)


def choices(
    columns: Iterable[DraftColumns],
    seconds: Seconds,
    *,
    longest: Sequence[int] = LONGEST,
    sure: Sequence[float] = SURE,
    copied: Sequence[int] = COPIED,
) -> list[Choice]:
    """Every setting of every kind of draft, the fastest first; and copies alone, where nothing is read after a layer.

    ``sure``: thresholds as shares of tokens that they let through; without a gate, and besides, there is none.
    """
    found = []

    def tried(each: DraftColumns, threshold: float, most: int, copies: int) -> None:
        drafting = replace(each.drafting, threshold=threshold, longest=most, copied=copies)
        rounds = simulated(each, threshold, most, copies)
        found.append(Choice(drafting, rounds, seconds(drafting, rounds)))

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
    tokens, seen, most = text.tokens.tolist(), Copies(), max(COPIED)
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
