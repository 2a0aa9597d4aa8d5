"""Answers that verdicts read: right ones pass, a wrong row, ending or session is named, however few are looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.audit.answers import KEPT_REQUESTS, AuditedDecoder
from emad_ref.audit.finding import Finding
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt, Step
from emad_ref.record import Ints, Record
from tests.decoders.cached import CachedDecoder, CachedSession
from tests.decoders.subject import drawn, lens_of, spread_point, tiny_neox
from tests.small import LAYERS, VOCABULARY, small_model

TOLERANCE, NEW = 1e-9, 6
PROMPTS, CONTINUATION = drawn((4, 1, 6, 3), 8)
POINT = spread_point()


class OtherLastToken(CachedDecoder):
    """The last row's last token is another one."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        record = super().generate(prompts, max_new, stop)
        record.emitted[-1][-1] = (record.emitted[-1][-1] + 1) % 101
        return record


class OneShort(CachedDecoder):
    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        return super().generate(prompts, max_new - 1, stop)


class OffByOne(CachedSession):
    """Logits that are fed are those of the row's neighbours in the vocabulary."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        return replace(step, logits=np.roll(step.logits, 1, axis=-1))


class ShowsOthers(CachedDecoder):
    session = OffByOne


def audited(decoder: CachedDecoder) -> AuditedDecoder:
    lens = lens_of(tiny_neox())
    return AuditedDecoder(decoder, POINT, lambda source: lens, TOLERANCE, lambda: pytest.fail("the lens says it"))


def generated(decoder: AuditedDecoder) -> None:
    for _ in range(2 * KEPT_REQUESTS):
        decoder.generate(PROMPTS, NEW, frozenset())


def fed(decoder: AuditedDecoder) -> None:
    """Rows are dropped, tokens rolled back, depths forced: what is left of each session is still held."""
    for _ in range(KEPT_REQUESTS):
        session, _ = decoder.start(PROMPTS)
        session.feed(CONTINUATION[:, :1])
        length = session.length.copy()
        session.feed(CONTINUATION[:, 1:2])
        session.rollback(length)
        session.feed(CONTINUATION[:, 2:3], session.cap[:, None].copy())
        session.drop(np.array([1]))
        session.feed(CONTINUATION[[0, 2, 3], 3:4])
        session.close()


@pytest.mark.parametrize("ask", [generated, fed])
def test_right_answers_pass(ask: Callable[[AuditedDecoder], None]) -> None:
    decoder = audited(CachedDecoder(tiny_neox(), POINT))
    ask(decoder)
    finding = decoder.finding()
    assert finding.passed is True, finding.detail
    assert finding.n > 0


@pytest.mark.parametrize(
    ("made", "ask", "said"),
    [
        (OtherLastToken, generated, r"row 3, position \d+, depth \d+: emitted \d+, but the argmax"),
        (OneShort, generated, r"row 0: 5 tokens and 'length', but max_new=6"),
        (ShowsOthers, fed, r"session, row \d, position \d+, depth \d+: logits off"),
    ],
)
def test_wrong_answers_are_named(made: type[CachedDecoder], ask: Callable[[AuditedDecoder], None], said: str) -> None:
    decoder = audited(made(tiny_neox(), POINT))
    ask(decoder)
    finding: Finding = decoder.finding()
    assert finding.passed is False
    assert re.search(f"of the answers that this verdict reads, {said}", finding.detail), finding


def test_a_decoder_that_is_asked_nothing_is_not_complained_of() -> None:
    assert audited(CachedDecoder(tiny_neox(), POINT)).finding().passed is True


def test_which_answers_are_kept_follows_no_seed() -> None:
    """Of sixteen requests eight are looked at; which, changes from run to run."""
    kept = set()
    for _ in range(20):
        np.random.default_rng(0)
        decoder = audited(CachedDecoder(tiny_neox(), POINT))
        kept.add(tuple(decoder._place(number, KEPT_REQUESTS) for number in range(1, 3 * KEPT_REQUESTS)))
    assert len(kept) > 1


# ---------------------------------------------------------------- where states above an exit are made up


def copying(changed: float = 0.0) -> Finding:
    """What is found of a decoder under ``copying`` whose thresholds are ``changed`` by so much."""
    stepper = CausalStepper(small_model("gpt_neox", seed=3))
    asked = OperatingPoint("c", "quantile", LAYERS, LAYERS, (1, 3), ((4.0, 4.0),), "copying")
    theirs = replace(asked, thresholds=tuple(tuple(one + changed for one in row) for row in asked.thresholds))
    decoder = AuditedDecoder(
        WalkedDecoder(stepper, theirs, max_rows=3), asked, lambda source: pytest.fail("the lens says nothing"), 1e-6,
        lambda: WalkedDecoder(stepper, asked),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [Prompt(rng.integers(0, VOCABULARY, n)) for n in (3, 1, 5)]
    decoder.generate(prompts, NEW, frozenset())
    session, _ = decoder.start(prompts)
    session.feed(rng.integers(0, VOCABULARY, (3, 4)))
    session.feed(rng.integers(0, VOCABULARY, (3, 2)), np.full((3, 2), LAYERS - 1))  # as deep as the rule goes nowhere
    return decoder.finding()


def test_where_states_are_made_up_a_decoder_of_ours_is_asked_the_same() -> None:
    finding = copying()
    assert finding.passed is True, finding.detail
    assert finding.n >= 2 * NEW
    finding = copying(changed=10.0)
    assert finding.passed is False
    assert re.search(r"position \d+, depth \d+: our own decoder stops at depth \d+", finding.detail), finding
