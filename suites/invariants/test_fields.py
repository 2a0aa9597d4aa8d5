"""Does the decoder read all of an operating point: every field, every digit, and what ``feed`` is asked to show?"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from emad_ref.audit.comparisons import comparisons
from emad_ref.audit.fields import fields
from emad_ref.audit.shapes import brief
from emad_ref.audit.variants import Sizes
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.sourced import Sourced
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder
from pytest_emad.auditing import Auditor

LENGTH, FED, NEW = 6, 14, 8
ROWS, BATCHES = 4, 6


def test_every_field_of_a_point_is_honoured_or_declined(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject, stepper = emad_evidence.subject, emad_evidence.subject.stepper

    def own(point: OperatingPoint) -> Decoder:
        decoder = WalkedDecoder(stepper, point)
        return decoder if subject.source is None else Sourced(decoder, subject.source)

    sizes = Sizes(stepper.layers, stepper.vocabulary, int(stepper.unembedding.shape[1]))
    (prompt,), continuation = subject.drawn_rows(emad_rng, [LENGTH], FED)
    emad_audit(
        fields(subject.open, own, subject.lens, sizes, prompt, continuation[0], NEW, emad_rng, subject.tolerance)
    )


def test_thresholds_are_compared_to_the_last_digit(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    if subject.stepper.layers < 2:
        pytest.skip("not applicable (a model of one layer has no probe)")
    batches = [subject.drawn_rows(emad_rng, brief(emad_rng, ROWS), 1)[0] for _ in range(BATCHES)]
    emad_audit(comparisons(partial(subject.open, max_rows=ROWS), subject.stepper.layers, batches))
