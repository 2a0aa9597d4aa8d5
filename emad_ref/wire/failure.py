"""The one way in which a decoder in another process breaks, as whoever called it sees it."""

from __future__ import annotations

from collections.abc import Sequence

from emad_ref.errors import EmadError


class DecoderFailed(EmadError):
    """A call that did not come to its reply: where, which call, what came instead, what to do, and what it last said.

    ``said``: the last lines of standard error, where there is one.
    """

    def __init__(self, where: str, call: str, came: str, remedy: str, said: Sequence[str] = ()):
        self.where, self.call, self.came = where, call, came
        lines = "".join(f"\n  {line}" for line in said)
        heard = f"\nlast lines of its standard error:{lines}" if said else ""
        super().__init__(f"decoder={where}: call {call!r}: {came}; {remedy}{heard}")
