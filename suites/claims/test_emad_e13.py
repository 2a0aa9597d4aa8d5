"""EMAD-E13 (premise): is the unembedding tied to the embedding?"""

from __future__ import annotations

import pytest

from emad_ref.verdict.judge import judge_e13


@pytest.mark.emad(claim="EMAD-E13")
def test_unembedding_is_tied(emad_evidence, emad_record, emad_register):
    verdict = judge_e13(emad_evidence.loaded.geometry.tied, emad_register["EMAD-E13"], emad_evidence.name)
    emad_record.claim(verdict, fingerprint=emad_evidence.fingerprint)
