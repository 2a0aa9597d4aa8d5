"""Settings of a screening, and its amounts of text: counted in documents, never in seconds.

One seed reads the same text on every machine under any load. The duration of most phases is predicted
(``screening.timing``), without reducing the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from emad_ref.errors import BadArgument
from emad_ref.models.geometry import Geometry
from emad_ref.text.documents import DEFAULT_CORPUS

EXCESS_CAP_NATS = 0.2  # a document's excess loss per token is clipped here, which bounds the loss of the guarantee
RISE_LEVELS = (0.001, 0.01, 0.05)  # rises of perplexity in tables
DOCUMENTS = 300
LARGE_TOKEN_FLOPS = 250e6  # FLOPs of a traced token: its blocks, and a head after every probe and at the end
FEWEST_DOCUMENTS = 220  # documents for a large model: recommending a lossy point needs 200 of full length
LARGE_WINDOW = 128  # tokens of a window if a head costs more than a block, as traces read a dozen heads of each token
SETTLED_DOCUMENTS = 300  # documents from which on lens, gate and drafts are fitted in their full number of steps
PROFILE_WINDOWS, FEWEST_PROFILE_WINDOWS = 100, 40  # windows, for EMAD's profile
WINDOWS_PER_DOCUMENT = 2  # fitting windows per choosing or judging window; 1 if a head costs more than a block


@dataclass(frozen=True)
class ScreeningSettings:
    """Settings of a screening.

    ``corpus``, ``data``: text and its folder. ``corpus_group``: the field of its lines that groups documents.
    ``documents``: to certify and to judge on, each; where a head costs more than a block, half as many choose if there
    are enough. The duration of a screening is about proportional to its documents. ``rise``: upper bound of the
    perplexity rise of a recommendation. ``seed``: of held-out documents and resampling. ``window``: the most tokens of
    a window; None: 512.

    Raises:
        BadArgument: fewer than two documents, a rise outside (0, exp(``EXCESS_CAP_NATS``) − 1), a window of less than
            two tokens.
    """

    corpus: str = DEFAULT_CORPUS
    data: Path | None = None
    documents: int = DOCUMENTS
    rise: float = 0.01
    seed: int = 0
    window: int | None = None
    corpus_group: str | None = None

    def __post_init__(self) -> None:
        if self.documents < 2:
            raise BadArgument("documents", self.documents, "at least 2", "one has no spread")
        if not 0 < self.rise < math.expm1(EXCESS_CAP_NATS):
            expected = f"a fraction above 0 and below {math.expm1(EXCESS_CAP_NATS):.2f}"
            remedy = f"0.01 is 1 %; the guarantee clips a document's loss at {EXCESS_CAP_NATS:g} nats per token"
            raise BadArgument("rise", self.rise, expected, remedy)
        if self.window is not None and self.window < 2:
            raise BadArgument("window", self.window, "at least 2 tokens", "one to see and one to predict")

    @property
    def text_description(self) -> str:
        """Description of the text."""
        grouped = "" if self.corpus_group is None else f", documents grouped by {self.corpus_group}"
        windows = "" if self.window is None else f" in windows of at most {self.window} tokens"
        return f"{self.corpus}{windows}{grouped}"

    @property
    def n_profile_windows(self) -> int:
        """Windows that EMAD's profile is calibrated on."""
        return self.scale_amount_by_documents(PROFILE_WINDOWS, FEWEST_PROFILE_WINDOWS)

    def for_model(
        self, geometry: Geometry, documents: int | None = None, window: int | None = None
    ) -> ScreeningSettings:
        """The same settings with these documents and windows; None: the default for a model of this size."""
        return replace(
            self,
            documents=default_document_count(compute_traced_token_flops(geometry)) if documents is None else documents,
            window=default_window_size(geometry) if window is None else window,
        )

    def scale_amount_by_documents(self, whole: int, fewest: int = 1) -> int:
        """``whole``, the amount for ``SETTLED_DOCUMENTS`` documents, in proportion for fewer; at least ``fewest``."""
        return max(fewest, round(whole * min(1.0, self.documents / SETTLED_DOCUMENTS)))


def default_window_size(geometry: Geometry) -> int | None:
    """Most tokens of a window: ``LARGE_WINDOW`` where a head costs more than a block, else None."""
    return LARGE_WINDOW if geometry.has_costly_head else None


def compute_traced_token_flops(geometry: Geometry) -> float:
    """FLOPs of one token of a lens trace: all blocks, and a head after every default probe and at the end."""
    from emad_ref.exit_rules import default_probes  # also imports NumPy, which pytest must not load at its start

    heads = 1 + len(default_probes(geometry.layers))
    return geometry.layers * geometry.block_flops() + heads * geometry.head_flops()


def work_share_for_token_cost(token_flops: float) -> float:
    """Share of the usual work for a model with this cost of a traced token: 1 unless the model is large."""
    return min(1.0, LARGE_TOKEN_FLOPS / token_flops)


def default_document_count(token_flops: float) -> int:
    """``DOCUMENTS``, and fewer for a model whose traced token costs more FLOPs than ``LARGE_TOKEN_FLOPS``."""
    return max(FEWEST_DOCUMENTS, round(DOCUMENTS * work_share_for_token_cost(token_flops)))
