"""Black-box checks of any Decoder, only through ``emad_ref.protocol``. Each returns a ``Finding``.

covering               every pair of values of the ``dimensions`` of requests and of sessions, by cases
request_cases          cases of requests
session_cases          cases of sessions
session_checks         ``last`` of ``feed``
decoding_checks        decisions on given tokens, ``generate``, agreement with replay
requests               special tokens, requests at once, streamed answers
shared_prefixes        prompts with a common beginning, which a prefix cache may confuse
positions              every position of the window is written and read
point_fields           every field of an operating point is honoured, or the point is declined
threshold_comparisons  signals and thresholds are compared to the last digit
sampling               tokens are drawn at the temperature and by the seed, from the distribution at their depths
work                   counted work matches the decisions, other points, and observed matrix products
memory                 closed sessions free their memory
spot_checks            answers that a verdict used, and timed requests, are right
token_comparison       tokens and depths equal another decoder's, or recorded ones, up to ties

``reference_logits`` has the lens, ``trajectory`` judges one row, ``tolerances`` bounds differences. NumPy and SciPy
only, except for ``model_lens``, which turns a model into a lens.
"""

from __future__ import annotations

from pytest_emad.audit.decoding_checks import (
    ReplayedDocument,
    check_decisions,
    check_generation,
    check_replay_agreement,
)
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.reference_logits import Lens, LogitLens
from pytest_emad.audit.tolerances import tolerance

__all__ = [
    "Finding",
    "Lens",
    "LogitLens",
    "ReplayedDocument",
    "check_decisions",
    "check_generation",
    "check_replay_agreement",
    "tolerance",
]
