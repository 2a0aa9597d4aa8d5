"""Black-box checks of any Decoder, through ``emad_ref.protocol`` alone.

``forced``      logits at forced depths equal the lens; inadmissible depths are refused
``decisions``   signals, depths and ledger on given tokens are the rule's
``rollback``    after a rollback a session is what it was
``generation``  the timed path emits the argmax at the depths it claims
``rows``        rows of a batch decide on their own
``sessions``    sessions side by side keep to themselves, whatever happens to their rows
``sampling``    tokens are drawn at the temperature and by the seed, from the distribution at their depths
``requests``    many rows, stop sets, shared beginnings, requests between the steps of sessions
``answers``     a random few of the answers that a verdict reads are right
``positions``   every position of the window is written and read
``fields``      every field of an operating point is honoured, or the point is declined
``comparisons`` signals and thresholds are compared to the last digit
``last``        ``feed`` shows as many logits as are wanted
``counters``    the same tokens cost the same at every point
``golden``      tokens and depths are those on record, up to ties
``memory``      closed sessions give their memory back
``noise``       what a decoder declares is what rounding can need
``timed``       what was emitted while a clock ran is what is claimed of it
``witness``     what was seen to run is what is said to have run
``bridge``      teacher-forced depths and NLL equal replay's

Each returns a ``Finding``; ``logit_tolerances`` says how far numbers may differ, ``shapes`` what is asked for. The
oracle is a ``Lens``; NumPy only, but for ``oracle``, which makes one of a model that the stepper knows.
"""

from __future__ import annotations

from emad_ref.audit.decoding_checks import ReplayedDocument, bridge, decisions, generation, rows
from emad_ref.audit.finding import Finding
from emad_ref.audit.lens import Lens, LogitLens
from emad_ref.audit.session_checks import forced, rollback, sessions
from emad_ref.audit.tolerances import tolerance

__all__ = [
    "Finding",
    "Lens",
    "LogitLens",
    "ReplayedDocument",
    "bridge",
    "decisions",
    "forced",
    "generation",
    "rollback",
    "rows",
    "sessions",
    "tolerance",
]
