"""The implied ledger by hand: prompt of 3 tokens, then depths 4, 2, 2 under probes at 1 and 2."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.audit.finding import Tally
from emad_ref.audit.ledger import implied, judge_ledger
from emad_ref.audit.trajectory import Trajectory
from emad_ref.point import OperatingPoint
from emad_ref.record import Work

POINT = OperatingPoint("p", "emad", 4, 4, (1, 2), ((0.5, 0.5),))
SIGNAL = np.array([[0.9, 0.8], [0.7, 0.4], [0.6, np.nan]])
ROW = Trajectory("row 0", np.arange(5), 2, np.array([4, 2, 2]), SIGNAL, np.ones(3, dtype=bool))


def complaint(
    work: Work | None, rows: list[Trajectory], exact: bool = True, point: OperatingPoint = POINT
) -> str | None:
    with Tally("t") as tally:
        judge_ledger(tally, work, rows, point, exact_context=exact)
    return tally.complaint


def test_implied_work_by_hand() -> None:
    work = implied(ROW, POINT)
    assert work.tokens.tolist() == [5, 5, 3, 3]
    assert work.context.tolist() == [4 + 3 + 4 + 5, 4 + 3 + 4 + 5, 4 + 3, 4 + 3]
    assert work.readout_rows[0].tolist() == [3, 3, 0, 1]  # layer 2: probed twice, the exit at the cap read once
    assert implied(ROW, POINT, masked_prompt=False).context[0] == 3 + 3 + 4 + 5


@pytest.mark.parametrize("name", ["tokens", "context", "readout_rows", "fills"])
@pytest.mark.parametrize("change", [1, -1])
def test_one_row_alone_is_exact(name: str, change: int) -> None:
    work = implied(ROW, POINT)
    assert complaint(work, [ROW]) is None
    array = getattr(work, name).copy()
    array.flat[0] += change
    found = complaint(replace(work, **{name: array}), [ROW])
    assert found is not None


def test_padded_keys_may_cost_more_but_never_less() -> None:
    work = implied(ROW, POINT, masked_prompt=False)
    assert complaint(work, [ROW], exact=False) is None
    assert complaint(work, [ROW], exact=True) is not None
    assert complaint(replace(work, context=work.context * 7), [ROW], exact=False) is None
    assert complaint(replace(work, context=work.context - 1), [ROW], exact=False) is not None


def test_rows_together_may_cost_more_but_never_less() -> None:
    both = implied(ROW, POINT) + implied(ROW, POINT)
    assert complaint(both, [ROW, ROW]) is None
    assert complaint(replace(both, tokens=both.tokens + 2), [ROW, ROW]) is None
    assert complaint(replace(both, tokens=both.tokens - 1), [ROW, ROW]) is not None
    assert complaint(replace(both, readout_rows=both.readout_rows - 1), [ROW, ROW]) is not None


def test_free_depth_owes_every_layer_a_block_or_a_fill() -> None:
    point = replace(POINT, schedule="free_eager")
    work = implied(ROW, point)
    assert "tokens" in (complaint(work, [ROW], point=point) or "")
    work.fills[0, 2:] += 2
    assert complaint(work, [ROW], point=point) is None


def test_missing_work_and_another_number_of_layers_are_refused() -> None:
    assert "reports none" in (complaint(None, [ROW]) or "")
    assert "3 layers" in (complaint(Work.none(3), [ROW]) or "")
