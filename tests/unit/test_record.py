"""Records: rows of one sequence, sums of work, and a protocol that needs no torch."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.protocol import Capabilities, InadmissibleDepth, ModelRef, Request, Unsupported
from emad_ref.record import DECODE, FILLS, PHASES, PROMPT, READOUTS, Record, TokenTable, Work


def tokens() -> TokenTable:
    sequence = np.array([0, 1, 0, 1, 0])
    phase = np.array([PROMPT, PROMPT, DECODE, DECODE, DECODE])
    number = np.arange(5)
    return TokenTable(sequence, number, number + 10, number + 1, number + 1, phase, 0 * number, np.ones(5, dtype=bool))


def work(layers: int = 3) -> Work:
    kinds = {"readout_rows": READOUTS, "readout_macs": READOUTS, "fills": FILLS}
    shape = {name: (len(of), layers) for name, of in kinds.items()}
    arrays = {
        f.name: np.arange(1, 1 + np.prod(shape.get(f.name, (layers,)))).reshape(shape.get(f.name, (layers,)))
        for f in fields(Work)
        if f.name not in ("encoder_tokens", "encoder_context")
    }
    return Work(**arrays, encoder_tokens=7, encoder_context=9)


def test_the_rows_of_a_sequence_keep_their_order_and_all_their_columns():
    chosen = tokens().select_sequence(0)
    assert len(chosen) == 3
    assert chosen.token.tolist() == [10, 12, 14]
    assert chosen.depth.tolist() == [1, 3, 5]
    assert tokens().select_sequence(0, DECODE).token.tolist() == [12, 14]
    assert len(tokens().select_sequence(2)) == 0


def test_what_is_kept_of_a_sequence_comes_by_position():
    rewound = replace(tokens(), position=np.array([0, 0, 2, 1, 1]), kept=np.array([True, True, True, False, True]))
    assert rewound.kept_row_indices(0).tolist() == [0, 4, 2]
    assert rewound.kept_row_indices(1).tolist() == [1]


def test_phases_are_indices_into_their_names():
    assert (PHASES[PROMPT], PHASES[DECODE]) == ("prompt", "decode")


def test_work_adds_and_subtracts_every_part():
    twice = work() + work()
    for part in fields(Work):
        assert np.array_equal(getattr(twice, part.name), 2 * np.asarray(getattr(work(), part.name))), part.name
    assert twice - work() == work()
    assert work() - work() == Work.none(3)
    assert work() + Work.none(3) == work()
    assert Work.none(3).layers == 3


def test_adding_makes_new_arrays():
    """Sessions return their running sums as ``work + none``: a later step must not change a returned sum."""
    mine = work()
    copy = mine + Work.none(3)
    mine.tokens[0] += 5
    assert copy == work()


@pytest.mark.parametrize("part", [f.name for f in fields(Work)])
def test_any_part_that_differs_makes_work_unequal_and_is_named(part):
    other = replace(work(), **{part: getattr(work(), part) + 1})
    assert work() != other
    difference = work().describe_difference(other)
    assert difference.startswith(f"{part}: ")
    assert "≠" in difference
    assert ";" not in difference


def test_equal_work_has_no_difference_and_cannot_be_a_key():
    assert work().describe_difference(work()) == ""
    assert work() != "work"
    with pytest.raises(TypeError, match="unhashable"):
        hash(work())


def test_a_model_reference_compares_by_name_and_loads_only_when_asked():
    loaded = []
    mine, yours = (ModelRef("emad-tiny", lambda: loaded.append(1)) for _ in range(2))
    assert mine == yours
    assert not loaded
    assert "lambda" not in repr(mine)


def test_a_model_reference_has_a_folder_only_where_a_caller_names_one(tmp_path):
    assert ModelRef("emad-tiny", lambda: None, lambda: tmp_path).folder == str(tmp_path)
    with pytest.raises(BadArgument, match=r"request\.model\.folder=None, but expected a folder of mine; use request\."):
        ModelRef("mine", lambda: None).folder  # noqa: B018  # reading it is what fails


def test_defaults_promise_the_least():
    assert Capabilities() == Capabilities(max_feed=1, schedules=frozenset({"monotone"}), counted=True, logit_noise=0.0)
    defaults = {f.name: f.default for f in fields(Request)}
    assert (defaults["max_rows"], defaults["temperature"], defaults["seed"]) == (1, 0.0, 0)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *(("max_feed", value, "a whole number ≥ 1") for value in (0, "8", None, 2.5, True)),
        *(("max_positions", value, "a whole number ≥ 1, or None") for value in (0, "8", 2.5, True)),
        *(("logit_noise", value, "a finite number ≥ 0") for value in (math.nan, math.inf, -1.0, "0", None, True)),
        *((name, value, "True or False") for name in ("counted", "deepens") for value in ("no", None, 1)),
        *(("schedules", value, "a frozenset of names") for value in (None, "monotone", [1])),
    ],
)
def test_capabilities_hold_what_they_can_mean(field, value, expected):
    """Noise of NaN once counted as none, ``counted="no"`` as yes; a feed of 0 tokens was an error of NumPy."""
    with pytest.raises(BadArgument) as refused:
        Capabilities(**{field: value})
    assert f"Capabilities.{field}={value!r}, but expected {expected}; see docs/protocol.md" in str(refused.value)


def test_refusals_are_errors_of_this_package():
    assert issubclass(Unsupported, EmadError)
    assert issubclass(InadmissibleDepth, EmadError)
    assert issubclass(InadmissibleDepth, ValueError)


def test_a_copy_stays_what_it_was_and_reads_every_column():
    columns = [np.arange(3) for _ in fields(TokenTable)]
    work = Work.none(2)
    record = Record(TokenTable(*columns), np.zeros((3, 1)), [np.arange(2)], ["length"], {0: work}, {0: work})
    copy = Record.copied(record)
    for array in (*columns, record.signal, record.emitted[0], work.tokens):
        array[...] = 7
    record.stop[0] = "stop token"
    assert all(getattr(copy.tokens, f.name).tolist() == [0, 1, 2] for f in fields(TokenTable))
    assert (copy.signal.max(), copy.emitted[0].tolist(), copy.stop) == (0, [0, 1], ["length"])
    assert copy.work == copy.prompt_work == {0: Work.none(2)}
    assert Record.copied(replace(record, work=None, prompt_work=None)).work is None
