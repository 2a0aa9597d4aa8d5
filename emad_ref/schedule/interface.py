"""What there is to know about a schedule, and in which form: each module beside this one answers for its own.

A schedule turns fires of a rule into admissible depth, and says what K/V repair is owed:

    admission   what the next token may take, given the depths of the decided tokens before it
    flow        what a decoding step does with rows that stop, and with the K/V they leave unwritten above (``flow``)
    replay      fires → depth over whole sequences, where that is exact
    work        who is asked, and what each layer runs, given the depths: token by token, and all together (``derived``)
    refusal     why a depth other than the admitted ones is wrong, and why there is no replay

``table`` lists all of them; replay and decoding read it, so that a schedule is one module and one row. This module
knows no schedule, and no rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.record import Bools, Floats, Ints
from emad_ref.schedule.flow import Flow, Start


@dataclass(frozen=True)
class Admission:
    """``cap``: the largest admissible depth; ``held``: the token takes it unasked."""

    cap: int
    held: bool = False


class Ran(NamedTuple):
    """What decoding makes one layer run, token by token: ``keys`` int64 [tokens] that each attended to, 0 for those
    that did not run the block.

    ``fills`` bool [tokens]: of which it only writes K and V; None: of none.
    """

    keys: Ints
    fills: Bools | None = None


class Counted(NamedTuple):
    """``Ran`` of every layer, all tokens together, int64 [L]: how many ran it, against how many keys in all.

    ``fills``: how many only write K and V there; None: none anywhere.
    """

    tokens: Ints
    context: Ints
    fills: Ints | None = None


@dataclass(frozen=True)
class Places:
    """Where a trace's tokens stand: ``position`` int64 [tokens] of each in its sequence, prompt included.

    ``starts`` int64 [sequences + 1]: offsets of the sequences.
    """

    position: Ints
    starts: Ints

    @cached_property
    def keys(self) -> Ints:
        """int64 [tokens] keys that each attends to in a step of its own: all positions up to its own."""
        return self.position + 1

    @cached_property
    def float_keys(self) -> Floats:
        """float64 [tokens] the same, whose products are several times as fast, and exact below 2⁵³."""
        return self.keys.astype(np.float64)

    @cached_property
    def keys_before(self) -> Ints:
        """int64 [tokens + 1] ``keys`` of all tokens before each, and of all at last."""
        sums: Ints = np.concatenate([[0], self.keys.cumsum()])
        return sums

    @cached_property
    def decided(self) -> Ints:
        """int64 [tokens] index of each among the decided ones of its sequence."""
        index: Ints = np.arange(len(self.position)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return index

    @cached_property
    def ends(self) -> Ints:
        """int64 [tokens] end of each one's sequence."""
        ends: Ints = np.repeat(self.starts[1:], np.diff(self.starts))
        return ends


Settle = Callable[[OperatingPoint, NDArray[np.int16]], None]


@dataclass(frozen=True)
class Schedule:
    """One schedule.

    ``admit(point, trail, first, length)`` what the token after ``trail[:length]`` may take. ``trail``: depths of a
                    sequence's tokens, oldest first; those before index ``first`` are its prompt.
    ``flow``        opens the flow of one step.
    ``why``         why a depth it does not admit is wrong, as messages end.
    ``asked(point, decided)`` bool [tokens]: whether the rule is asked about the tokens of these indices [tokens].
    ``ran(places, depth, layer, ceiling)`` what ``layer`` ran for tokens of ``depth`` [tokens], fed one by one. It
                    depends on who went as deep, and on whether ``layer`` lies below, at or above the ceiling.
    ``counted(places, depth, histogram, ceiling)`` the same of all layers, added up over tokens, without a look at each
                    of them in every layer. ``histogram`` int64 [L + 1]: tokens of each depth. Equality is a law.
    ``fills``       which of ``record.FILLS`` its K/V-only passes are.
    ``settle(point, depth)`` turns first fires int16 [longest, sequences], rows being decided tokens from each
                    sequence's first, into depths, in place: exact where the state of every token at its depth is the
                    full model's. None where only decoding knows the depths; then ``unreplayable`` says why.
    ``never_rises`` K/V above a row's cap are never asked for again: a commit frees them.
    ``deepens``     tokens that stopped keep their state, and may be taken up to any depth again (``Session.deepen``).
    ``ruleless``    the place of a token decides its depth, whatever fires.
    ``by_prefix``   the tokens of a chunk that still run after a layer are a prefix of it, and the rule decides of each
                    how far: depths can be read off in one pass (``decoding.chunk``).
    """

    name: ScheduleName
    admit: Callable[[OperatingPoint, Sequence[int], int, int], Admission]
    flow: Callable[[Start], Flow]
    why: str
    asked: Callable[[OperatingPoint, Ints], Bools]
    ran: Callable[[Places, Ints, int, int], Ran]
    counted: Callable[[Places, Ints, Ints, int], Counted]
    settle: Settle | None
    unreplayable: str = ""
    fills: str = "exact"
    never_rises: bool = False
    deepens: bool = False
    ruleless: bool = False
    by_prefix: bool = False

    def in_replay(self) -> Settle:
        """How fires become depths where it is replayed.

        Raises:
            BadArgument: it cannot be.
        """
        if self.settle is None:
            raise BadArgument("point.schedule", self.name, "an exact schedule", self.unreplayable)
        return self.settle


def every_token(point: OperatingPoint, decided: Ints) -> Bools:
    """The rule is asked about all of them."""
    return np.ones(len(decided), dtype=np.bool_)


def ran_once(places: Places, depth: Ints, layer: int, ceiling: int) -> Ran:
    """A token runs a layer on its own way up, against the keys of all positions up to its own, or never."""
    return Ran((depth >= layer) * places.keys)


def counted_once(places: Places, depth: Ints, histogram: Ints, ceiling: int) -> Counted:
    """``ran_once``, in each stretch of layers to which the same tokens go."""
    tokens = reaching(histogram)
    context = (tokens == len(depth)) * places.keys_before[-1]
    for layers, deep in stretches(depth, histogram):
        context[layers] = int(places.float_keys @ deep)
    return Counted(tokens, context)


def reaching(histogram: Ints) -> Ints:
    """int64 [L] how many tokens go to each layer, or past it."""
    sums: Ints = histogram[:0:-1].cumsum()[::-1]
    return sums


def stretches(depth: Ints, histogram: Ints) -> Iterator[tuple[slice, Bools]]:
    """Layers to which the same tokens go, not all of them, but some; and bool [tokens] which those are."""
    small = depth.astype(np.int16)  # compared in a third of the time
    for below, top in itertools.pairwise(np.flatnonzero(histogram).tolist()):
        yield slice(below, top), small >= top
