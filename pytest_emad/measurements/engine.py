"""Plain requests to the decoder under test, as users of inference engines send them (claims ENG-1 to ENG-6).

Every request is at full depth. ``EngineAnswers`` sends prompts from evaluation documents: with log-probabilities, alone
and together with other rows, repeatedly, token by token, sampled, and with counters of accepted drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax

from emad_ref.absent import Absent
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.self_speculation import drafting_point, self_speculate
from emad_ref.decoding.speculation import ACCEPTED, UNREACHED, SpeculationResult
from emad_ref.models.loading import copy_in_dtype
from emad_ref.models.quantisation import copy_with_int8_weights
from emad_ref.protocol import Decoder, DraftCounts, Prompt, TokenLogProbs, Unsupported
from emad_ref.record import Floats, Ints
from emad_ref.signals import to_numpy_float64
from pytest_emad.audit.finding import AuditRefutedError, prefix_raised_complaints
from pytest_emad.audit.log_probs import (
    generate_greedy_log_probs,
    own_log_probs,
    require_greedy_log_probs,
    session_prompt_log_probs,
    truncated_divergence,
)
from pytest_emad.audit.sampling import SampledRow, pit_values_in_rank_order
from pytest_emad.audit.token_comparison import check_same_tokens
from pytest_emad.audit.tolerances import max_log_prob_error
from pytest_emad.measurements.acceptance_record import AcceptanceRecord
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.statistics.units import ByDocument

PROMPT, NEW, TOP = 48, 16, 5  # most tokens of a prompt, new tokens, requested likeliest tokens
ROWS = 8  # of a request
SIZES = (1, 3, 8, 16)  # rows of requests for log-probabilities, in turn
DOCUMENTS = 800  # least documents: against a rise of 0.5 % no row survives with fewer than 600
HALF, INT8 = ("float16", "bfloat16"), "int8 weights"  # precisions of twins, from the finest on
SECOND_PATH = "its own kernels"  # a second path of the folder's model, in the judge's precision
REPORTED = 2.0**-22  # nats: largest mean error of log-probabilities written as float32
COMPANY = tuple(range(1, 16))  # numbers of other rows in a request, since engines pad batches to their own sizes
REPEATED = 16  # rows with compared tokens
IN_FLIGHT = 8  # simultaneous requests
TEMPERATURES = (0.5, 1.0, 2.0)  # the hottest last; engines may treat 1 as a special setting
DRAWN, DRAWN_TOGETHER, DRAWS = 208, 16, 2  # sampled documents, those of a request, and seeds for each
HEAD, TAIL = 0.5, 0.1  # probability mass of the likeliest tokens, and of the least likely ones
LEAST_OPEN = 0.5  # least chance that two draws differ; a more certain first token shows little
LONGEST_DRAFT = 16  # most drafted tokens of a round, where an engine does not count them by position
SPECULATED, DRAFTED, ACCEPTANCE_NEW = 400, 4, 32  # documents; tokens of self-speculative drafts; new tokens


@dataclass(frozen=True)
class GivenTextLosses:
    """``loss``, ``own_loss`` [documents]: −log p in nats of given tokens, by the engine and the judge's model.

    Tokens of the engine's own choice would say how sure it is: a sharper, worse engine would look better.
    """

    loss: ByDocument
    own_loss: ByDocument
    tokens: ByDocument


@dataclass(frozen=True)
class DistributionEvidence:
    """Log-probabilities of new tokens and of given text, by document: engine against the judge's model.

    ``divergence`` [documents]: KL of the likeliest new tokens, summed, nats. ``agreeing``: new tokens with equal top-1,
    of ``positions`` [documents]. ``given``: losses of the prompts' own tokens. ``dtype``: the engine's stated
    precision. ``own``: name → the same KL of the folder's own model on the same tokens, by its own kernels and in the
    stated precision.
    """

    divergence: ByDocument
    agreeing: ByDocument
    positions: ByDocument
    given: GivenTextLosses | Absent
    dtype: str
    own: Mapping[str, ByDocument]


@dataclass(frozen=True)
class PrecisionEvidence:
    """Errors of log-probabilities of new tokens, by document, against the judge's model.

    ``error`` [documents]: |Δ log p| of the likeliest of ``positions`` [documents] new tokens, summed, nats. ``twins``:
    precision → the same of the folder's own model in it, on the same tokens: ``dtype``, the engine's stated one, unless
    it is the judge's, then coarser ones, the next one first.
    """

    error: ByDocument
    positions: ByDocument
    dtype: str
    twins: Mapping[str, ByDocument]


@dataclass(frozen=True)
class _Reading:
    """Answers of the engine: its rows, the judge's log-probabilities of the reported ids of each, sums by document."""

    shown: Sequence[TokenLogProbs]
    known: Sequence[Floats]
    divergence: ByDocument
    error: ByDocument
    agreeing: ByDocument
    given: GivenTextLosses | Absent

    @property
    def positions(self) -> ByDocument:
        return ByDocument.from_whole_documents(np.full(len(self.shown), NEW))


PartedRows = Mapping[str, Ints]  # request → [rows] 1 if a row got other tokens without an excusing tie, else 0


@dataclass(frozen=True)
class SamplingEvidence:
    """Tokens drawn at each of ``TEMPERATURES``, by document.

    ``head``, ``tail``: temperature → tokens drawn from the likeliest half of the probability and the least likely
    tenth, of ``tokens`` [documents]. ``repeats``: difference between two draws of one prompt → share that repeats the
    first token beyond chance, in documents with an uncertain first token: 0 on average, 1 if all repeat it.
    """

    head: Mapping[float, ByDocument]
    tail: Mapping[float, ByDocument]
    tokens: ByDocument
    repeats: Mapping[str, ByDocument]


@dataclass(frozen=True)
class AcceptanceEvidence:
    """``drafts`` [documents]: verifications. ``accepted``: those that accepted each drafted position.

    ``by_position`` False: ``accepted`` [1] are all accepted tokens. ``record``: the length to hold it against.
    """

    drafts: ByDocument
    accepted: Sequence[ByDocument]
    by_position: bool = True
    record: AcceptanceRecord | None = None


class EngineAnswers:
    """Answers of the decoder under test to plain requests about at least ``documents`` evaluation documents."""

    def __init__(self, subject: ModelUnderTest, documents: int = DOCUMENTS):
        self._subject, self._documents = subject, documents
        self._twins: dict[str, tuple[ByDocument, ByDocument]] = {}

    @property
    def stated_dtype(self) -> str:
        """The decoder's stated precision: ``--emad-decoder-dtype``, else the judge's."""
        return self._subject.study.decoder_dtype or self._subject.dtype

    @cached_property
    def _prompts(self) -> list[Prompt]:
        return self._subject.make_opening_prompts(self._documents, min(PROMPT, self._subject.window_size - NEW))

    @cached_property
    def _varied(self) -> list[Prompt]:
        """Prompts, every third as long as its document."""
        both = zip(self._prompts, self._longer, strict=True)
        return [long if at % 3 == 2 else short for at, (short, long) in enumerate(both)]

    @cached_property
    def _longer(self) -> list[Prompt]:
        """``_prompts``, each as long as its document, within the positions that audits reach."""
        return self._subject.make_opening_prompts(self._documents, self._subject.audited_window_size - NEW)

    @cached_property
    def distributions(self) -> DistributionEvidence:
        """Divergence from the judge's model (ENG-1). Raises Unsupported without log-probabilities."""
        found, dtype = self._reading, self.stated_dtype
        own = {SECOND_PATH: self._twin(SECOND_PATH)[0]}
        own |= {f"{dtype} here": self._twin(dtype)[0]} if dtype in HALF else {}
        return DistributionEvidence(found.divergence, found.agreeing, found.positions, found.given, dtype, own)

    @cached_property
    def precisions(self) -> PrecisionEvidence:
        """Errors beside those of the folder's model in other precisions (ENG-4). Raises as ``distributions``."""
        found, dtype = self._reading, self.stated_dtype
        twins = {name: self._twin(name)[1] for name in find_twin_precisions(dtype)}
        return PrecisionEvidence(found.error, found.positions, dtype, twins)

    @cached_property
    def _reading(self) -> _Reading:
        subject = self._subject
        shown: list[TokenLogProbs] = []
        with subject.open_decoder(subject.full_depth_point, max_rows=max(SIZES)) as decoder:
            for rows in itertools.cycle(SIZES):
                if not (batch := self._varied[len(shown) : len(shown) + rows]):
                    break
                shown += self._read_log_probs(decoder, batch)
        compared: list[tuple[float, ...]] = []
        expected: list[Floats] = []  # of the reported ids alone: a whole row has the size of the vocabulary
        own_given: list[Floats] = []
        for prompt, row in zip(self._varied, shown, strict=True):
            whole = subject.reference_lens(np.concatenate([prompt.tokens, row.tokens[:-1]])).last_layer
            own = log_softmax(whole[-len(row.tokens) :], axis=-1)
            expected.append(np.take_along_axis(own, row.ids, axis=-1))
            equal = float((row.ids[:, 0] == own.argmax(axis=-1)).sum())
            compared.append((*_compare(row.log_probs, expected[-1]), equal))
            given = prompt.tokens[:PROMPT]
            own_given.append(own_log_probs(whole[: len(given) - 1], given[1:]))
        divergence, error, agreeing = map(ByDocument.from_whole_documents, np.array(compared).T)
        given_text = _given_text_losses([row.prompt for row in shown], own_given)
        return _Reading(shown, expected, divergence, error, agreeing, given_text)

    def _read_log_probs(self, decoder: Decoder, prompts: Sequence[Prompt]) -> Sequence[TokenLogProbs]:
        """Request log-probabilities. Raises AuditRefutedError if an answer does not match its request."""
        found = generate_greedy_log_probs(decoder, prompts, NEW, TOP)
        with prefix_raised_complaints("log-probabilities: "):
            if len(found) != len(prompts):
                raise AuditRefutedError(f"{len(found)} rows for {len(prompts)} prompts")
            for row, prompt in zip(found, prompts, strict=True):
                require_greedy_log_probs(row, NEW, TOP, max_log_prob_error(None, self._subject.tolerance))
                if row.prompt is not None and len(row.prompt) != len(prompt.tokens) - 1:
                    told = f"{len(row.prompt)} log-probabilities of a prompt of {len(prompt.tokens)} tokens"
                    raise AuditRefutedError(told)
        if getattr(decoder, "log_probs", None) is not None:
            return found
        given = [replace(prompt, tokens=prompt.tokens[:PROMPT]) for prompt in prompts]
        prompted = zip(found, given, strict=True)
        return [replace(row, prompt=session_prompt_log_probs(decoder, prompt)) for row, prompt in prompted]

    @torch.inference_mode()
    def _twin(self, name: str) -> tuple[ByDocument, ByDocument]:
        """KL and |Δ log p| [documents] of the folder's own model in precision ``name``, on the engine's tokens.

        Without another precision it is a second path to the same numbers: the model's own forward over the prompt, and
        over the new tokens by its cache.
        """
        if name not in self._twins:
            model, device = self._make_twin(name), self._subject.stepper.device
            rows = []
            for prompt, row, known in zip(self._varied, self._reading.shown, self._reading.known, strict=True):
                read, fed = (
                    torch.from_numpy(np.asarray(part, dtype=np.int64))[None].to(device)
                    for part in (prompt.tokens, row.tokens[:-1])
                )
                first = model(read, use_cache=True)
                rest = model(fed, past_key_values=first.past_key_values)
                logits = to_numpy_float64(torch.cat([first.logits[0, -1:], rest.logits[0]]).double())
                told = np.take_along_axis(log_softmax(logits, axis=-1), row.ids, axis=-1)
                rows.append(_compare(told, known))
            divergence, error = map(ByDocument.from_whole_documents, np.array(rows).T)
            self._twins[name] = divergence, error
        return self._twins[name]

    def _make_twin(self, name: str) -> Any:
        model = self._subject.loaded.model
        if name == SECOND_PATH:
            return model
        return copy_with_int8_weights(model) if name == INT8 else copy_in_dtype(model, getattr(torch, name))

    @cached_property
    def batch_invariance(self) -> PartedRows:
        """Compare rows alone with the same rows in larger requests, reordered, and token by token (ENG-2)."""
        subject, prompts = self._subject, self._ragged
        with subject.open_decoder(subject.full_depth_point, max_rows=max(COMPANY) + 1) as decoder:

            def tokens(rows: Sequence[Prompt], new: int = NEW) -> list[Ints]:
                return [np.asarray(each) for each in decoder.generate(rows, new, frozenset()).emitted]

            alone = [tokens([prompt])[0] for prompt in prompts]
            beside = {
                f"beside {others}": [
                    each
                    for start in range(0, len(prompts), others + 1)
                    for each in tokens(prompts[start : start + others + 1])
                ]
                for others in COMPANY
            }
            backwards = tokens(prompts[::-1])[::-1]
            stepwise = [self._stepwise(prompt, row, tokens) for prompt, row in zip(prompts, alone, strict=True)]
            noise = decoder.capabilities.logit_noise
        runs = beside | {"reordered": backwards, "one token at a time": stepwise}
        return {name: self._parted(prompts, run, alone, noise) for name, run in runs.items()}

    @staticmethod
    def _stepwise(prompt: Prompt, row: Ints, tokens: Callable[[Sequence[Prompt], int], list[Ints]]) -> Ints:
        """Request the last of ``row``'s tokens one by one, each after a prompt with all previous ones."""
        fed = [np.concatenate([prompt.tokens, row[:at]]) for at in range(len(row))]
        return np.array([tokens([Prompt(each)], 1)[0][0] for each in fed])

    @cached_property
    def repeatability(self) -> PartedRows:
        """Repeat the same requests immediately, alone, after other requests, in flight, and under one seed (ENG-3).

        Only in flight a near-tie excuses a difference: what is computed together there depends on arrival.
        """
        subject, prompts = self._subject, self._ragged
        with subject.open_decoder(subject.full_depth_point, max_rows=len(prompts)) as decoder:

            def together() -> list[Ints]:
                return decoder.generate(prompts, NEW, frozenset()).emitted

            def alone(rows: Sequence[Prompt]) -> list[Ints]:
                return [decoder.generate([prompt], NEW, frozenset()).emitted[0] for prompt in rows]

            first, again, one_by_one = together(), together(), alone(prompts)
            for other in self._prompts[-REPEATED:]:
                decoder.generate([other], 2, frozenset())
            backwards, later = alone(prompts[::-1]), together()  # other distances between requests per row
            flights, noise = _answers_in_flight(decoder, prompts), decoder.capabilities.logit_noise
        runs = {"again": again, "after other requests": later}
        found = {name: _differing(run, first) for name, run in runs.items()}
        found |= {"alone, again": _differing(backwards[::-1], one_by_one)}
        if flights:
            parted = [self._parted(prompts, flight, one_by_one, noise) for flight in flights]
            found[f"with {IN_FLIGHT} requests in flight"] = np.maximum(*parted)
        return found | self._sampled(prompts)

    def _sampled(self, prompts: Sequence[Prompt]) -> dict[str, Ints]:
        """Tokens drawn twice under one seed; empty for a decoder that declines sampling."""
        drawn = []
        for _ in range(2):
            try:
                with self._subject.open_decoder(
                    self._subject.full_depth_point, max_rows=len(prompts), temperature=1.0
                ) as decoder:
                    drawn.append(decoder.generate(prompts, NEW, frozenset()).emitted)
            except Unsupported:
                return {}
        return {"sampled under one seed": _differing(*drawn)}

    @cached_property
    def sampling(self) -> SamplingEvidence:
        """Sample prompts twice a request, under each of ``DRAWS`` seeds (ENG-6). Raises Unsupported if greedy only."""
        rng = np.random.default_rng([self._subject.seed, DRAWN])
        prompts = self._prompts[:DRAWN]
        head, tail = {}, {}
        for temperature in TEMPERATURES:
            rows = [self._drawn_twice(prompts, temperature, rng) for _ in range(DRAWS)]  # [draws][documents][2]
            placed = [
                [pit_values_in_rank_order(row, temperature, rng) for draw in rows for row in draw[at]]
                for at in range(len(prompts))
            ]
            head[temperature] = ByDocument.from_whole_documents(
                np.array([(np.concatenate(u) < HEAD).sum() for u in placed])
            )
            tail[temperature] = ByDocument.from_whole_documents(
                np.array([(np.concatenate(u) > 1 - TAIL).sum() for u in placed])
            )
        tokens = ByDocument.from_whole_documents(np.full(len(prompts), 2 * DRAWS * NEW))
        return SamplingEvidence(head, tail, tokens, _repeated_draws(rows, temperature))

    def _drawn_twice(
        self, prompts: Sequence[Prompt], temperature: float, rng: np.random.Generator
    ) -> list[list[SampledRow]]:
        """Rows [documents][2]; each request has its own seed, so that its rows draw differently from the last one's."""
        subject, rows = self._subject, []
        for start in range(0, len(prompts), DRAWN_TOGETHER):
            batch, seed = prompts[start : start + DRAWN_TOGETHER], int(rng.integers(2**30))
            with subject.open_decoder(
                subject.full_depth_point, max_rows=2 * len(batch), temperature=temperature, seed=seed
            ) as decoder:
                emitted = decoder.generate([*batch, *batch], NEW, frozenset()).emitted
            for at, prompt in enumerate(batch):
                rows.append([self._sampled_row(prompt, seed, np.asarray(emitted[at + n * len(batch)])) for n in (0, 1)])
        return rows

    def _sampled_row(self, prompt: Prompt, seed: int, emitted: Ints) -> SampledRow:
        history = np.concatenate([prompt.tokens, emitted[:-1]])
        return SampledRow(seed, 0, emitted, self._subject.reference_lens(history).last_layer[-len(emitted) :])

    @cached_property
    def acceptance(self) -> AcceptanceEvidence:
        """Counters of the decoder, else of self-speculation at half of its layers (ENG-5). Raises Unsupported."""
        prompts = self._prompts[:SPECULATED]
        with self._subject.open_decoder(self._subject.full_depth_point) as decoder:
            counters = getattr(decoder, "draft_counts", None)
            by_position, rows = (True, []) if counters is None else self._counted_drafts(decoder, counters, prompts)
        rows = rows or self._own_drafts(prompts)
        longest = max(len(accepted) for _, accepted in rows)
        table = np.array([[drafts, *accepted, *[0] * (longest - len(accepted))] for drafts, accepted in rows])
        table = table[table[:, 0] > 0]
        if not len(table):
            raise Unsupported("the decoder verified no draft")
        drafts, *accepted = map(ByDocument.from_whole_documents, table.T)
        return AcceptanceEvidence(drafts, accepted, by_position, self._subject.study.acceptance_record)

    @staticmethod
    def _counted_drafts(
        decoder: Decoder, counters: Callable[[], DraftCounts], prompts: Sequence[Prompt]
    ) -> tuple[bool, list[tuple[int, list[int]]]]:
        """Whether accepted tokens are counted by position, and the rise of the counters in each request.

        Raises:
            AuditRefutedError: they vanish, fall, or rise by more than the tokens allow.
        """
        rows, new, before = [], 0, counters()
        first = before
        for number, prompt in enumerate(prompts, start=1):
            new += len(decoder.generate([prompt], ACCEPTANCE_NEW, frozenset()).emitted[0])
            try:
                after = counters()
            except Unsupported as error:
                raise AuditRefutedError(f"counters of drafts are gone after request {number}: {error}") from error
            if after.drafts < before.drafts or (_risen(before, after) < 0).any():
                raise AuditRefutedError(
                    f"counters of drafts fell in request {number}, from {_counts_text(before)} to "
                    f"{_counts_text(after)}: the server was restarted, or its counters were; judge one that keeps them"
                )
            rows.append((after.drafts - before.drafts, _risen(before, after).tolist()))
            before = after
        # totals only, since a server may count the end of one request during the next
        risen = _risen(first, before)
        _require_possible(before.drafts - first.drafts, risen, new, len(prompts), before.by_position)
        return before.by_position, rows

    def _own_drafts(self, prompts: Sequence[Prompt]) -> list[tuple[int, list[int]]]:
        """Self-speculation over the decoder's sessions, after half of its layers."""
        subject, layers = self._subject, self._subject.stepper.layers
        point, rows = drafting_point(layers), []
        with subject.open_decoder(point, max_rows=ROWS) as decoder:
            for start in range(0, len(prompts), ROWS):
                batch = prompts[start : start + ROWS]
                found = self_speculate(Partner(decoder, point), layers // 2, batch, ACCEPTANCE_NEW, k=DRAFTED)
                rows += _accepted_by_position(found, len(batch))
        return rows

    @cached_property
    def _ragged(self) -> list[Prompt]:
        """Rows of different lengths, from one token on; every fourth is as long as its document."""
        return [
            prompt if row % 4 == 3 else Prompt(prompt.tokens[: 1 + 3 * row])
            for row, prompt in enumerate(self._longer[:REPEATED])
        ]

    def _parted(self, prompts: Sequence[Prompt], run: Sequence[Ints], alone: Sequence[Ints], noise: float) -> Ints:
        """[rows] 1 if tokens differ without an excusing tie."""
        given = self._subject.reference_lens, self._subject.tolerance
        rows = zip(prompts, run, alone, strict=True)
        found = [
            check_same_tokens(*given, [prompt], [one.tolist()], [other.tolist()], declared=noise, most_ties=1.0).passed
            for prompt, one, other in rows
        ]
        return np.array([passed is False for passed in found], dtype=np.int64)


def _risen(before: DraftCounts, after: DraftCounts) -> Ints:
    """[k] rise of each count; one that is gone has fallen."""
    risen = np.zeros(max(len(before.accepted), len(after.accepted)), dtype=np.int64)
    risen[: len(after.accepted)] += np.asarray(after.accepted, dtype=np.int64)
    risen[: len(before.accepted)] -= np.asarray(before.accepted, dtype=np.int64)
    return risen


def _counts_text(counts: DraftCounts) -> str:
    return f"{counts.drafts} drafts that accepted {np.asarray(counts.accepted).tolist()}"


def _require_possible(drafts: int, accepted: Ints, new: int, requests: int, by_position: bool) -> None:
    """Require that ``drafts`` verifications may have accepted each position ``accepted`` times in ``new`` tokens.

    A verification gives one token besides those that it accepts. The last one of a request may give more tokens than
    requested.
    """
    counts, given = [drafts, *accepted.tolist(), 0], drafts + int(accepted.sum())
    longest = len(accepted) if by_position else LONGEST_DRAFT
    fault = ""
    if by_position and counts != sorted(counts, reverse=True):
        fault = "where each position may be accepted at most as often as the one before it"
    elif given > new + requests * longest:
        fault = f"which give {given} tokens where the requests got {new}"
    if fault:
        raise AuditRefutedError(
            f"counters rise by {drafts} drafts that accept {accepted.tolist()}{' by position' * by_position}, {fault}"
        )


def _answers_in_flight(decoder: Decoder, prompts: Sequence[Prompt]) -> list[list[Ints]]:
    """Tokens of each prompt's request, ``IN_FLIGHT`` at a time, twice; [] for a decoder that answers one at a time."""
    ask = getattr(decoder, "generate_at_once", None)
    if ask is None:
        return []
    requests = [([prompt], NEW, frozenset[int]()) for prompt in prompts]
    try:
        return [[np.asarray(record.emitted[0]) for record in ask(requests, IN_FLIGHT)] for _ in range(2)]
    except Unsupported:
        return []


def _differing(run: Sequence[Ints], first: Sequence[Ints]) -> Ints:
    """[rows] 1 if tokens differ, without excuse, since the same request has the same sums."""
    return np.array([not np.array_equal(one, other) for one, other in zip(run, first, strict=True)], dtype=np.int64)


def _compare(told: Floats, known: Floats) -> tuple[float, float]:
    """KL of ``known`` log-probabilities [m, k] from ``told`` ones, and their |Δ log p|, summed over a row."""
    return float(truncated_divergence(known, told).sum()), float(np.abs(known - told).mean(axis=-1).sum())


def _given_text_losses(told: Sequence[Floats | None], own: Sequence[Floats]) -> GivenTextLosses | Absent:
    """Losses of the tokens of ``own``, each prompt's first ``PROMPT`` but one: ``told`` by the engine, and the judge.

    Longer prompts count as much as others, since unequal documents are fewer effective ones.
    """
    rows = zip(told, own, strict=True)
    pairs = [(row[: len(mine)], mine) for row, mine in rows if row is not None and len(mine)]
    if len(pairs) < sum(len(mine) > 0 for mine in own):
        return Absent("no prompt log-probabilities: the decoder does not report those of given text")
    columns = np.array([(-row.sum(), -mine.sum(), len(mine)) for row, mine in pairs]).T
    return GivenTextLosses(*map(ByDocument.from_whole_documents, columns))


def _repeated_draws(rows: Sequence[Sequence[Sequence[SampledRow]]], temperature: float) -> dict[str, ByDocument]:
    """``SamplingEvidence.repeats`` of ``rows`` [draws][documents][2], from the hottest temperature."""
    one, other = rows
    pairs = {
        "seeds": [(a[n], b[n]) for n in (0, 1) for a, b in zip(one, other, strict=True)],
        "rows of a request": [(row[0], row[1]) for draw in rows for row in draw],
    }
    chance = np.array([(row[0].all_and_own_probabilities(temperature)[0][0] ** 2).sum() for row in one])
    shares = {}
    for name, both in pairs.items():
        equal = np.array([a.emitted[0] == b.emitted[0] for a, b in both]).reshape(2, -1).mean(axis=0)
        shares[name] = ByDocument.from_whole_documents(((equal - chance) / (1 - chance))[1 - chance > LEAST_OPEN])
    return shares


def _accepted_by_position(found: SpeculationResult, rows: int) -> list[tuple[int, list[int]]]:
    """(Rounds with drafts, rounds that accepted each position) of each row.

    After a refusal only unreached drafts are of the same round; after a round without refusal a position is skipped.
    """
    counts = [(0, [0] * DRAFTED) for _ in range(rows)]
    at, before = 0, (-1, -1, ACCEPTED)  # sequence, position, verdict
    for one in zip(found.drafts.sequence, found.drafts.position, found.drafts.verdict, strict=True):
        sequence, position, verdict = map(int, one)
        follows = (sequence, position) == (before[0], before[1] + 1)
        at = at + 1 if follows and (before[2] == ACCEPTED or verdict == UNREACHED) else 0
        drafts, accepted = counts[sequence]
        accepted[at] += verdict == ACCEPTED
        counts[sequence] = drafts + (at == 0), accepted
        before = sequence, position, verdict
    return counts


def find_twin_precisions(dtype: str) -> tuple[str, ...]:
    """Precisions that the folder's model is run in beside an engine of ``dtype``: its own if half, and coarser ones.

    >>> [find_twin_precisions(dtype) for dtype in ("float32", "float16", "bfloat16")]
    [('float16',), ('float16', 'bfloat16', 'int8 weights'), ('bfloat16', 'int8 weights')]
    """
    return (*HALF[HALF.index(dtype) :], INT8) if dtype in HALF else HALF[:1]
