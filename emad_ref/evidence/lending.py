"""Judge and judged apart: what a decoder under test is lent, and whether the judge's own model stayed as it was.

The oracle, ``generate`` and every baseline run on the judge's model. ``request.model.load()`` gives any decoder a copy
of its own, loaded anew when first asked for and freed with the subject: what it does to that copy (quantised weights,
hooks, a compiled forward) is its own business, and slows or changes nothing here. Our own decoder changes nothing and
walks the judge's model, which saves the memory; it enters by a door that no request holds (``judges_own``).

A point may name a tuned lens, which is no part of the model: those attached to the judge's model are attached to the
copy whenever it is asked for, as copies of their own.

Whenever somebody else's decoder is closed the judge's model is held against its seal (``models.seal``). Nothing in the
protocol leads to it, so a change is an error and no finding, and everything asked afterwards says so again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

from emad_ref.models.again import Whence
from emad_ref.models.layout import lay_out
from emad_ref.models.loading import Loaded
from emad_ref.models.seal import Meddled, Seal, Surroundings
from emad_ref.protocol import ModelRef
from emad_ref.readout.attached import lend_attached

_OWN: ContextVar[Loaded | None] = ContextVar("the judge's model, while a host is asked for a decoder", default=None)


class Lending:
    """What decoders of ``loaded`` are lent: ``ref``, whose ``load`` gives the copy, and never the judge's model.

    ``lend`` makes the copy, by default from where the judge's model came.
    """

    def __init__(self, loaded: Loaded, lend: Callable[[Loaded], Loaded] | None = None):
        self._own, self._lend, self._broken = loaded, lend or loaded_again, ""
        self.ref = ModelRef(loaded.name, self._lent)

    @cached_property
    def copy(self) -> Loaded:
        """The decoder's own: equal to the judge's in everything, and nowhere the same object.

        Raises:
            OtherWeights: the files have changed since the judge's model was read.
        """
        return self._lend(self._own)

    def _lent(self) -> Loaded:
        """The copy, with every lens and translator that points may name by now."""
        lend_attached(self._own.stepper, self.copy.stepper)
        return self.copy

    @property
    def copies(self) -> tuple[Loaded, ...]:
        """The copy, where a decoder has asked for it."""
        return (self.copy,) if "copy" in vars(self) else ()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Inside the block, ``judges_own`` is the judge's model."""
        token = _OWN.set(self._own)
        try:
            yield
        finally:
            _OWN.reset(token)

    # ------------------------------------------------------------ afterwards

    def seal(self) -> None:
        """Before the first decoder: what the judge's model is now, once."""
        _ = self._seal

    @cached_property
    def _seal(self) -> Seal:
        return Seal(self._own.model)

    def look(self) -> None:
        """Hold the judge's model against its seal; what has changed is said by whoever requires it to be whole."""
        self._broken = self._broken or self._seal.broken()

    def require_untouched(self, before: Surroundings) -> None:
        """Raises Meddled: the model is not as it was sealed, or the process not as ``before``, which is put back."""
        self.look()
        around = before.restored()
        self.require_whole()
        if around:
            raise Meddled(
                f"a decoder of {self._own.name} changed what the judge runs in, and every baseline with it: {around}; "
                "it was put back: set it where it is needed, and put it back there, or decode in another process"
            )

    def require_whole(self) -> None:
        """Raises Meddled: an earlier look found the model changed."""
        if self._broken:
            raise Meddled(
                f"the judge's own model was changed: {self._broken} of {self._own.name} differs since the first "
                "decoder was opened; a decoder has request.model.load() to itself, and must leave alone what else the "
                "process holds"
            )


def judges_own() -> Loaded | None:
    """The judge's model, for our own decoder alone; None where no subject is asking."""
    return _OWN.get()


def loaded_again(loaded: Loaded) -> Loaded:
    """The same model from where it came. Raises OtherWeights."""
    return Whence.of(loaded).load()


def copied(loaded: Loaded) -> Loaded:
    """A copy of a model that was made in memory, and that no name leads to.

    Its stepper is not checked again: the judge's was, or could not be (quantised weights).
    """
    again = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
    lay_out(again.model)  # a copy has the strides, not the pages
    again.__dict__["stepper"] = type(loaded.stepper)(again.model, check=False)  # type: ignore[call-arg]  # both take it
    return again
