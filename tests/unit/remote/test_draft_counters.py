"""Counters of drafts in ``/metrics``: of vLLM, of llama.cpp, and of servers that count accepted tokens alone."""

from __future__ import annotations

import pytest

from emad_ref.protocol import Unsupported
from pytest_emad.remote.draft_counters import BadCounter, parse_draft_counts

LLAMA_CPP = """# HELP llamacpp:spec_decode_num_drafts_total Verifications
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:tokens_predicted_total 40
llamacpp:spec_decode_num_draft_tokens_total 33
llamacpp:spec_decode_num_accepted_tokens_total 14
llamacpp:spec_decode_num_drafts_total 12
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 5
"""


def without(*parts: str) -> str:
    return "\n".join(line for line in LLAMA_CPP.splitlines() if not any(part in line for part in parts))


def test_llama_cpp_counts_by_position() -> None:
    counts = parse_draft_counts(LLAMA_CPP)
    assert (counts.drafts, counts.accepted.tolist(), counts.by_position) == (12, [9, 5], True)


def test_before_the_first_draft_no_position_is_counted() -> None:
    before = "\n".join(f"llamacpp:spec_decode_num_{name}_total 0" for name in ("drafts", "accepted_tokens"))
    counts = parse_draft_counts(before)
    assert (counts.drafts, counts.accepted.tolist(), counts.by_position) == (0, [], True)


def test_accepted_tokens_without_positions_are_their_number() -> None:
    counts = parse_draft_counts(without("per_pos"))
    assert (counts.drafts, counts.accepted.tolist(), counts.by_position) == (12, [14], False)


def test_new_and_accepted_tokens_give_the_rounds() -> None:
    """Each round emits one token besides the accepted ones: the length is new / (new − accepted)."""
    counts = parse_draft_counts(without("per_pos", "num_drafts"))
    assert (counts.drafts, counts.accepted.tolist(), counts.by_position) == (26, [14], False)
    assert 1 + counts.accepted.sum() / counts.drafts == pytest.approx(40 / (40 - 14))


@pytest.mark.parametrize(
    "text", ["", "vllm:num_requests_running 1", without("num_drafts", "accepted"), without("drafts", "predicted")]
)
def test_a_server_that_counts_too_little_declines(text: str) -> None:
    with pytest.raises(Unsupported, match="the server counts no drafts: /metrics has no spec_decode_num_drafts"):
        parse_draft_counts(text)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "12.5", "twelve"])
def test_a_value_that_is_no_count_is_named(value: str) -> None:
    with pytest.raises(BadCounter, match=r"spec_decode_num_drafts of /metrics is .* but expected a whole number"):
        parse_draft_counts(LLAMA_CPP.replace("num_drafts_total 12", f"num_drafts_total {value}"))


def test_more_accepted_than_new_tokens_are_no_counts() -> None:
    with pytest.raises(BadCounter, match="spec_decode_num_accepted_tokens is 41, more than tokens_predicted, 40"):
        parse_draft_counts(without("per_pos", "num_drafts").replace("tokens_total 14", "tokens_total 41"))
