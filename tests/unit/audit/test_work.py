"""The audit of counted work: the work implied by decisions, by hand, and limits for padding and larger batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from emad_ref.exit_rules import early_exit_point
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, Prompt
from emad_ref.record import READOUTS, Ints, Work
from pytest_emad.audit.finding import Tally
from pytest_emad.audit.reference_logits import ProbeReadoutWork
from pytest_emad.audit.trajectory import Judge, Trajectory
from pytest_emad.audit.work import check_full_and_exiting_work, implied_work, require_counted_work

POINT = OperatingPoint("p", "emad", 4, 4, (1, 2), ((0.5, 0.5),))
SIGNAL = np.array([[0.9, 0.8], [0.7, 0.4], [0.6, np.nan]])
ROW = Trajectory("row 0", np.arange(5), 2, np.array([4, 2, 2]), SIGNAL, np.ones(3, dtype=bool))

WHOLE = ProbeReadoutWork.from_point_with_full_heads(POINT, 3)


def complaint(
    work: Work | None, rows: list[Trajectory], exact: bool = True, point: OperatingPoint = POINT
) -> str | None:
    with Tally("t") as tally:
        require_counted_work(Judge(tally, None, point, 0.0, exact_context=exact), work, rows, [WHOLE] * len(rows))
    return tally.complaint


def test_implied_work_by_hand() -> None:
    work = implied_work(ROW, WHOLE, POINT)
    assert work.tokens.tolist() == [5, 5, 3, 3]
    assert work.context.tolist() == [4 + 3 + 4 + 5, 4 + 3 + 4 + 5, 4 + 3, 4 + 3]
    assert work.readout_rows[0].tolist() == [3, 3, 0, 1]  # layer 2: probed twice, the exit at the cap read once
    assert implied_work(ROW, WHOLE, POINT, masked_prompt=False).context[0] == 3 + 3 + 4 + 5


@pytest.mark.parametrize("name", ["tokens", "context", "readout_rows", "readout_macs", "fills"])
@pytest.mark.parametrize("change", [1, -1])
def test_one_row_alone_is_exact(name: str, change: int) -> None:
    work = implied_work(ROW, WHOLE, POINT)
    assert complaint(work, [ROW]) is None
    array = getattr(work, name).copy()
    array.flat[-1 if name == "readout_macs" else 0] += change  # the geometry has a full head's multiply-adds
    found = complaint(replace(work, **{name: array}), [ROW])
    assert found is not None


def test_what_a_rule_runs_is_counted_by_kind_and_a_pruned_head_shows_what_is_emitted() -> None:
    """A full head at layer 1, and a pruned one at 2, which also serves the exit there."""
    rule = early_exit_point("softmax_response", 4, 1000, 1, pruning="fixed", schedule="monotone")
    point = replace(rule, ceiling=4, thresholds=((0.5, 0.5, math.inf),))
    heads = np.zeros((len(READOUTS), 4), dtype=bool)
    heads[READOUTS.index("full"), 0] = heads[READOUTS.index("subset"), 1:3] = True
    shows = np.array([True, True, True, False])
    macs = np.array([[0, 10, 20, 0], [0, 11, 21, 0], [0, 12, 22, 0]])
    signal = np.array([[0.1, 0.2, 0.3], [0.1, 0.6, np.nan], [0.1, 0.7, np.nan]])
    work = implied_work(replace(ROW, signal=signal), ProbeReadoutWork(heads, shows, macs), point)
    assert work.readout_rows[READOUTS.index("full")].tolist() == [3, 0, 0, 1]
    assert work.readout_rows[READOUTS.index("subset")].tolist() == [0, 3, 1, 0]
    assert work.readout_macs[READOUTS.index("subset")].tolist() == [0, 33, 20, 0]
    forced = implied_work(replace(ROW, chosen=np.zeros(3, dtype=bool)), ProbeReadoutWork(heads, shows, macs), point)
    assert forced.readout_rows.sum(axis=0).tolist() == [0, 2, 0, 1], "a forced depth is read by a full head"
    assert not forced.readout_macs.any()


@pytest.mark.parametrize(("off", "passes"), [(-6, False), (-5, True), (7, True), (8, False)])
def test_a_size_that_follows_a_confidence_may_be_off_by_what_the_tolerance_explains(off: int, passes: bool) -> None:
    """Row 1 exits at layer 2, where three readouts may be 5 below and 7 above their expected work."""
    heads, shows = np.zeros((len(READOUTS), 4), dtype=bool), np.array([True, True, True, False])
    heads[READOUTS.index("full"), 0] = heads[READOUTS.index("subset"), 1:3] = True
    macs = np.array([[0, 10, 0, 0]] * 3)
    low, high = np.array([[0, 9, 0, 0], [0, 6, 0, 0], [0, 10, 0, 0]]), np.array([[0, 10, 0, 0], [0, 17, 0, 0], macs[2]])
    rule = early_exit_point("softmax_response", 4, 1000, 1, pruning="adaptive", schedule="monotone")
    point = replace(rule, thresholds=((0.5, 0.5, math.inf),))
    row = replace(ROW, signal=np.array([[0.1, 0.2, 0.3], [0.1, 0.6, np.nan], [0.1, 0.7, np.nan]]))
    errors: list[float] = []

    def within(error: float) -> tuple[Ints, Ints]:
        errors.append(error)
        return low, high

    readouts = ProbeReadoutWork(heads, shows, macs, macs_within=within)
    work = implied_work(row, readouts, point)
    work.readout_macs[READOUTS.index("subset"), 1] += off
    with Tally("t") as tally:
        require_counted_work(Judge(tally, None, point, 0.25, exact_context=True), work, [row], [readouts])
    assert (tally.complaint is None) is passes, tally.complaint
    assert errors == [0.25]


def test_padded_keys_may_cost_more_but_never_less() -> None:
    work = implied_work(ROW, WHOLE, POINT, masked_prompt=False)
    assert complaint(work, [ROW], exact=False) is None
    assert complaint(work, [ROW], exact=True) is not None
    assert complaint(replace(work, context=work.context * 7), [ROW], exact=False) is None
    assert complaint(replace(work, context=work.context - 1), [ROW], exact=False) is not None


def test_rows_together_may_cost_more_but_never_less() -> None:
    """Three rows padded to four; two rows of one length need no padding."""
    one = implied_work(ROW, WHOLE, POINT)
    both, three = one + one, one + one + one
    assert complaint(both, [ROW, ROW]) is None
    assert complaint(replace(three, tokens=three.tokens + 3), [ROW] * 3) is None
    assert complaint(replace(both, tokens=both.tokens - 1), [ROW, ROW]) is not None
    assert complaint(replace(both, readout_rows=both.readout_rows - 1), [ROW, ROW]) is not None


def test_rows_together_may_cost_no_more_than_padding_explains() -> None:
    """Prompts of two and of no token before the last: both as long as the longer, and as deep as the deeper one."""
    shallow = Trajectory("row 1", np.arange(3), 0, np.array([2, 2, 2]), SIGNAL[[1] * 3], np.ones(3, dtype=bool))
    both = implied_work(ROW, WHOLE, POINT) + implied_work(shallow, WHOLE, POINT)
    padded = replace(both, tokens=2 * np.array([5, 5, 3, 3]))
    assert complaint(both, [ROW, shallow]) is None
    assert complaint(padded, [ROW, shallow]) is None
    for name in ("tokens", "readout_rows"):
        counted = getattr(padded, name)
        more = replace(padded, **{name: counted + 5 * (counted > 0)})
        assert f"work.{name} per layer" in (complaint(more, [ROW, shallow]) or ""), name
    assert "at most" in (complaint(replace(padded, readout_macs=both.readout_macs + 1), [ROW, shallow]) or "")
    assert "no states are translated" in (complaint(replace(both, fill_macs=both.tokens), [ROW, shallow]) or "")


def test_stacks_of_deferred_layers_have_no_bound_beside_other_rows() -> None:
    """Several rows run their deferred layers together, padded to the longest stack: more than steps times rows."""
    deferred = replace(POINT, schedule="free_deferred")
    both = implied_work(ROW, WHOLE, deferred) + implied_work(ROW, WHOLE, deferred)
    more = replace(both, tokens=both.tokens + 50)
    assert complaint(more, [ROW, ROW], point=deferred) is None
    assert "at most" in (complaint(more, [ROW, ROW]) or "")


LONG = replace(ROW, tokens=np.arange(403), first=400)


@pytest.mark.parametrize(
    ("context", "complains"),
    [
        (lambda work: work.context, None),
        (lambda work: work.tokens * 512, None),  # a buffer that doubles
        (lambda work: work.tokens * 2048, None),  # one of constant size
        (lambda work: work.tokens * 1001, None),  # of any size
        (lambda work: 400**2 + (work.tokens - 400) * 2048, None),
        (lambda work: work.context * 2, "at most 512 keys each"),
        (lambda work: work.context * 4, "at most 512 keys each"),
        (lambda work: np.where(np.arange(4) == 2, work.tokens * 512, work.context), "grows at layers [3]"),
    ],
)
def test_context_has_an_upper_bound(context: Any, complains: str | None) -> None:
    work = implied_work(LONG, WHOLE, POINT)
    found = complaint(replace(work, context=context(work)), [LONG], exact=False)
    assert found is None if complains is None else complains in (found or ""), found


def test_a_model_of_one_layer_has_a_ledger() -> None:
    point = OperatingPoint("p", "emad", 1, 1)
    row = replace(ROW, depth=np.array([1, 1, 1]), signal=np.empty((3, 0)))
    readouts = ProbeReadoutWork.from_point_with_full_heads(point, 3)
    with Tally("t") as tally:
        judge = Judge(tally, None, point, 0.0, exact_context=True)
        require_counted_work(judge, implied_work(row, readouts, point), [row], [readouts])
    assert tally.complaint is None


def test_tokens_that_are_fed_at_once_may_all_run_as_deep_as_the_deepest() -> None:
    both = implied_work(ROW, WHOLE, POINT) + implied_work(ROW, WHOLE, POINT)
    wide = replace(both, tokens=2 * np.array([5, 5, 4, 4]))
    for widest, passes in ((1, False), (2, True)):
        with Tally("t") as tally:
            require_counted_work(Judge(tally, None, POINT, 0.0), wide, [ROW, ROW], [WHOLE] * 2, widest=widest)
        assert (tally.complaint is None) is passes, tally.complaint


def test_the_longest_prompt_pads_rows_that_outlive_its_own() -> None:
    """A prompt of 255 tokens that ends at once, and one token followed by three: 258 keys in all."""
    ended = Trajectory("row 1", np.arange(255), 254, ROW.depth[:1], SIGNAL[:1], np.ones(1, dtype=bool))
    alive = replace(ROW, tokens=np.arange(3), first=0)
    both = implied_work(ended, WHOLE, POINT) + implied_work(alive, WHOLE, POINT)
    assert complaint(replace(both, context=both.tokens * 257), [ended, alive], exact=False) is None


def test_free_depth_owes_every_layer_a_block_or_a_fill() -> None:
    point = replace(POINT, schedule="free_eager")
    work = implied_work(ROW, WHOLE, point)
    assert "tokens" in (complaint(work, [ROW], point=point) or "")
    work.fills[0, 2:] += 2
    assert complaint(work, [ROW], point=point) is None


def test_missing_work_and_another_number_of_layers_are_refused() -> None:
    assert "reports none" in (complaint(None, [ROW]) or "")
    assert "3 layers" in (complaint(Work.none(3), [ROW]) or "")


PROMPT, FED = Prompt(np.arange(60)), np.arange(20)
BUFFER = 4096


@dataclass
class Counting:
    """A decoder of two layers that counts ``keys`` of a step at each position; its prompt attends to its own keys.

    ``apart``: positions of the prompt that are separate steps.
    """

    keys: Any
    apart: int
    capabilities: ClassVar = Capabilities()

    def _work(self, steps: int) -> Work:
        prompt = len(PROMPT.tokens) - self.apart
        work = Work.none(2)
        work.tokens[:] = prompt + self.apart + steps
        work.context[:] = prompt**2 + sum(self.keys(prompt + at) for at in range(self.apart + steps))
        return work

    def start(self, prompts: Any) -> tuple[Any, None]:
        self.fed = 0
        return self, None

    def feed(self, tokens: Ints) -> None:
        self.fed += 1

    @property
    def work(self) -> Work:
        return self._work(self.fed)

    def close(self) -> None: ...

    def generate(self, prompts: Any, max_new: int, stop: Any) -> Any:
        return Record(self._work(max_new - 1))


@dataclass
class Record:
    only: Work

    @property
    def work(self) -> dict[int, Work]:
        return {0: self.only}


@pytest.mark.parametrize(
    "keys", [lambda at: at + 1, lambda at: 256, lambda at: BUFFER], ids=["causal", "doubling", "constant"]
)
def test_a_prompt_in_one_forward_or_but_its_last_position_costs_the_same(keys: Any) -> None:
    finding = check_full_and_exiting_work(Counting(keys, 0), Counting(keys, 1), PROMPT, FED, 20, 0)
    assert finding.passed is True, finding.detail


def test_keys_that_are_counted_twice_at_full_depth_are_named() -> None:
    finding = check_full_and_exiting_work(
        Counting(lambda at: 3 * at, 0), Counting(lambda at: at + 1, 1), PROMPT, FED, 20, 0
    )
    assert finding.passed is False
    assert "layer 1 counts" in finding.detail
