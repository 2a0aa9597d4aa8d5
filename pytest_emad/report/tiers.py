"""Tiers of decoders: offered features, tests of each tier, and the least amounts that a run must test.

Requests determine a decoder's tier. Each provider counts the features that it answered and declined
(``report.provenance``); the tier is the highest one whose features it answered. ``TIERS`` is the one table of tests and
promises. A tier includes the tests and the promise of every tier in ``includes``.

A test counts as live if its audit passed. ``live_answer_counts_by_model`` adds up the decoder's answers in them:

    pairs            of values of the dimensions of requests and sessions (``audit.dimensions``): rows, lengths of
                     prompts, places in the window, stop sets, rollbacks, drops and so on
    positions        new tokens of ``generate``, each compared with the lens
    samples          tokens drawn at a temperature above 0, if the decoder offers sampling at all
    streamed_tokens  tokens that were streamed, if the decoder streams
    requests_at_once simultaneous requests from separate threads, if the decoder takes them
    samples_at_once  tokens drawn in such requests, if the decoder offers both
    log_probs, prompt_log_probs   log-probabilities of new tokens and their rivals, and of prompt tokens
    session_positions  tokens of sessions
    forced_positions tokens fed to sessions at a depth chosen by the judge

An undecided audit of pairs also counts ``unanswered_pairs``, with which a report is no proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_emad.report.deselection import is_in_selection
from pytest_emad.report.known_gaps import KNOWN_GAP
from pytest_emad.report.provenance import (
    CONCURRENCY,
    EXITS,
    LOG_PROBS,
    OWN_RULE,
    SAMPLING,
    SESSIONS,
    STREAMING,
    declined_features,
    offered_features,
)
from pytest_emad.report.schema import Report

STATED_CLAIM = "ENG-7"  # decides a decoder's statement of its own rule
UNANSWERED_PAIRS = "unanswered_pairs"
# Pairs of requests, and with those of sessions, that the least decoder of a tier offers: greedy, one request at a time,
# sessions at full depth and one token a feed, without the largest batches, in a window too short for far places. A pair
# of more that a decoder offers and does not answer leaves its audit undecided.
LEAST_PAIRS, LEAST_SESSION_PAIRS = 516, 924


@dataclass(frozen=True)
class TierRequirements:
    """``feature``: what a decoder must have answered besides ``includes``; "" for plain requests.

    ``tests``: (shipped test or folder, a part of its parameters or "" for all). ``promise``: the fewest of each count.
    """

    feature: str
    tests: tuple[tuple[str, str], ...]
    promise: Mapping[str, int]
    includes: tuple[str, ...] = ()


_FULL_DEPTH = "suites/fidelity/test_full_depth.py::"
_REQUESTS = "suites/invariants/test_requests.py::"
_SAMPLING = "suites/fidelity/test_sampling.py::test_tokens_are_drawn_at_temperatures_that_are_not_round"
_STREAMS = f"{_REQUESTS}test_streamed_tokens_are_those_of_whole_answers"
_AT_ONCE = f"{_REQUESTS}test_requests_at_once_get_the_answers_that_each_gets_alone"
_PAIRS = "suites/invariants/test_pairs.py::test_every_pair_of_values_is_asked_and_answered"
_ORDERS = "suites/invariants/test_request_machine.py::test_requests_in_any_order_get_the_answers_of_each_alone"
_PREFIXES = f"{_REQUESTS}test_prompts_that_share_a_beginning_are_read_to_their_ends"

TIERS: dict[str, TierRequirements] = {
    "tokens": TierRequirements(
        "",
        (
            (f"{_FULL_DEPTH}test_without_exits_tokens_are_the_models_own_greedy_continuation", ""),
            (f"{_FULL_DEPTH}test_declared_noise_is_what_rounding_can_honestly_need", "full"),
            (_SAMPLING, ""),
            ("suites/invariants/test_apart.py::test_the_judges_model_is_left_alone", "full depth"),
            ("suites/invariants/test_positions.py::test_generation_holds_far_into_the_window", "full"),
            (_PREFIXES, "full"),
            (_PAIRS, "requests"),
            (_ORDERS, "full"),
            (_STREAMS, ""),
            (_AT_ONCE, ""),
        ),
        {
            "pairs": LEAST_PAIRS,
            "positions": 2000,
            "samples": 1500,
            "streamed_tokens": 400,
            "requests_at_once": 32,
            "samples_at_once": 1500,
        },
    ),
    "logprobs": TierRequirements(
        LOG_PROBS,
        (("suites/fidelity/test_log_probs.py::test_log_probabilities_are_the_models", ""),),
        {"log_probs": 200},
        includes=("tokens",),
    ),
    "sessions": TierRequirements(
        SESSIONS,
        (
            (f"{_FULL_DEPTH}test_last_layer_readout_is_the_models_distribution", ""),
            (_PAIRS, "sessions"),
            (_PREFIXES, "sessions"),
            ("suites/invariants/test_positions.py::test_every_position_is_written_and_read", ""),
            ("suites/invariants/test_session_machine.py::test_session_survives_any_order_of_operations", "full"),
            ("suites/invariants/test_fields.py::test_as_many_logits_are_shown_as_are_wanted", "full"),
            ("suites/invariants/test_memory.py::test_what_is_closed_or_rolled_back_gives_its_memory_back", ""),
        ),
        {"pairs": LEAST_PAIRS + LEAST_SESSION_PAIRS, "session_positions": 500},
        includes=("tokens", "logprobs"),
    ),
    "depth": TierRequirements(
        EXITS,
        (("suites/invariants", ""), ("suites/fidelity", "")),
        {"forced_positions": 200},
        includes=("tokens", "logprobs", "sessions"),
    ),
    "claims": TierRequirements(
        OWN_RULE, (("suites/cost/test_claims.py::test_claim", STATED_CLAIM),), {}, includes=("tokens",)
    ),
}


# features that a decoder may always decline, without their test and counts
OPTIONAL = {
    SAMPLING: (_SAMPLING, _AT_ONCE, "samples", "samples_at_once"),
    STREAMING: (_STREAMS, "streamed_tokens"),
    CONCURRENCY: (_AT_ONCE, "requests_at_once", "samples_at_once"),
}
LIMITS = {SAMPLING: "greedy alone", STREAMING: "streams nothing", CONCURRENCY: "one request at a time"}


def included_tiers(tier: str) -> list[str]:
    """``tier`` and the tiers that it includes, in the order of ``TIERS``."""
    return [name for name in TIERS if name == tier or name in TIERS[tier].includes]


def required_tier_test_cases(tier: str) -> list[tuple[str, str]]:
    """(test or folder, case) of ``tier`` and of all that it includes."""
    return [test for name in included_tiers(tier) for test in TIERS[name].tests]


def is_tier_test(tier: str, shipped: str, parameters: Iterable[str]) -> bool:
    """Whether the shipped test with these parameters, without the model's name, judges ``tier``."""
    return any(
        is_in_selection(shipped, [name]) and _holds_case(parameters, case)
        for name, case in required_tier_test_cases(tier)
    )


def _holds_case(parameters: Iterable[str], case: str) -> bool:
    """Whether ``case`` is one of the parameters, or ""."""
    return not case or any(f"-{case}-" in f"-{parameter}-" for parameter in parameters)


def model_names_for_test_ids(models: Sequence[str]) -> list[str]:
    """Names of ``models`` in test ids: the last part of a path or repository, else the whole name."""
    ids = [name.rstrip("/").rpartition("/")[2] for name in models]
    return ids if len(set(ids)) == len(ids) else [name.replace("/", "|") for name in models]


def test_parameters_without_models(nodeid: str, models: Iterable[str]) -> list[str]:
    """The parameters in ``nodeid``, without the names of ``models``, which may hold any word."""
    text = f"-{nodeid.partition('[')[2].removesuffix(']')}-"
    for name in sorted(model_names_for_test_ids(list(models)), key=len, reverse=True):
        text = text.replace(f"-{name}-", "-", 1)
    return [text.strip("-")]


def offered_tiers(report: Report) -> list[str]:
    """Tiers with every feature answered by the judged decoder, in the order of ``TIERS``."""
    answered = offered_features(report["decoder"]["providers"]) | {""}
    return [name for name in TIERS if all(TIERS[each].feature in answered for each in included_tiers(name))]


def live_answer_counts_by_model(report: Report) -> dict[str, Counter[str]]:
    """Model → counts of the decoder's answers in passed audits."""
    counts: dict[str, Counter[str]] = {}
    for audit in report["audits"]:
        if audit["passed"] is not True or "live" not in audit or audit.get("attempt", 1) > 1:
            continue
        counts.setdefault(audit.get("model", ""), Counter()).update(audit["live"])
    return counts


def find_tier_shortfalls(report: Report, tier: str) -> Iterator[str]:
    """What ``report`` lacks of ``tier``, one sentence each; none if it is judged at ``tier``.

    A known gap was live, but its failed audit counts no answer, so a run with one owes no amounts. Amounts that other
    failures keep from being reached are one sentence.
    """
    providers = report["decoder"]["providers"]
    if tier not in (reached := offered_tiers(report)):
        missing = [TIERS[name].feature for name in included_tiers(tier) if name not in reached]
        yield f"the decoder never answered {', '.join(missing)}; its tier is {reached[-1]}"
    declined = OPTIONAL.keys() & declined_features(providers)
    if not any(provider["foreign"] for provider in providers):
        declined |= {STREAMING, CONCURRENCY}  # the reference decoder does not stream, and takes one request at a time
    free = {part for name in declined for part in OPTIONAL[name]}
    models, counts = report["settings"]["models"], live_answer_counts_by_model(report)
    for model, id in zip(models, model_names_for_test_ids(models), strict=True):
        about = [entry for entry in report["tests"] if _is_about(entry, id)]
        known = {
            entry["nodeid"]
            for entry in about
            if KNOWN_GAP in entry
            and is_tier_test(tier, entry["shipped"], test_parameters_without_models(entry["nodeid"], models))
        }
        live = [entry for entry in about if _is_live(entry) or entry["nodeid"] in known]
        for test, case in required_tier_test_cases(tier):
            if test in free:
                continue
            if not any(is_in_selection(e["shipped"], [test]) and _has_case(e, case, models) for e in live):
                yield f"{test}{f' [{case}]' if case else ''} is not live for {model}"
        found: Mapping[str, int] = counts.get(model, {})
        promise = {name: n for each in included_tiers(tier) for name, n in TIERS[each].promise.items()}
        short = {name: n for name, n in promise.items() if found.get(name, 0) < n and name not in free and not known}
        if len(short) > 1 and any(entry["outcome"] in ("failed", "error") for entry in live):
            yield f"its promise is not kept for {model}, since tests failed: fewer live {', '.join(short)}"
            continue
        for name, least in short.items():
            yield f"it promises {name}={least} for {model}, but {found.get(name, 0)} were live"


def _is_live(entry: Mapping[str, Any]) -> bool:
    """Whether a shipped test ran, or found its premise absent. A failed one fails the run anyway."""
    ran = entry["outcome"] in ("passed", "failed") or (
        entry["outcome"] == "skipped" and entry["kind"] == "not applicable"
    )
    return entry["shipped"] is not None and ran


def _is_about(entry: Mapping[str, Any], model: str) -> bool:
    """Whether the test ran on the model of this id, or without a model."""
    parameters = entry["nodeid"].partition("[")[2].removesuffix("]")
    return not parameters or f"-{model}-" in f"-{parameters}-"


def _has_case(entry: Mapping[str, Any], case: str, models: Iterable[str]) -> bool:
    return _holds_case(test_parameters_without_models(entry["nodeid"], models), case)


def build_tier_entry(report: Report) -> dict[str, Any]:
    """The entry ``tier`` of ``report.json``: ``offered_features``, and ``live`` counts by model."""
    return {"offered": offered_tiers(report)[-1], "live": live_answer_counts_by_model(report)}


def format_tier(report: Report) -> str:
    """The decoder's tier and its live counts, in one line."""
    counts = live_answer_counts_by_model(report)
    parts = []
    for model, found in counts.items():
        told = [f"{value} {name.replace('_', ' ')}" for name, value in found.items()]
        parts.append(f"{f'{model}: ' if len(counts) > 1 else ''}{', '.join(told)}")
    missing = declined_features(report["decoder"]["providers"])
    limits = [words for name, words in LIMITS.items() if name in missing]
    limited = f" ({', '.join(limits)})" if limits else ""
    return f"tier {offered_tiers(report)[-1]}{limited}; live: {'; '.join(parts) or 'nothing'}"
