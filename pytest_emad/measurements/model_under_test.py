"""The model under test: its text, its decoders, and its own logits as reference. This module measures no depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import count, islice
from typing import Any, TextIO

import numpy as np
import torch
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache

from emad_ref.absent import Absent
from emad_ref.calibration.calibration_run import iterate_worker_traces
from emad_ref.calibration.trace import Trace, TraceOptions, take_trace, trace_and_assemble_batches
from emad_ref.calibration.windows import (
    MOST_WINDOWS,
    TokenSequence,
    cut_windows,
    select_windows_round_robin,
    window_size,
)
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_corpus import iterate_sampled_documents
from emad_ref.errors import EmadError
from emad_ref.models.generation import count_traced_graphs, fail_on_recompile_limit, greedy_generate
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.model_spec import ModelSpec
from emad_ref.models.stepper import Stepper
from emad_ref.models.threads import one_thread_for_steps
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Capabilities, Decoder, Prompt, Request, Session, Step
from emad_ref.record import Floats, Ints, Record
from emad_ref.signals import to_numpy_float64
from emad_ref.text.corpora import (
    CorpusUnavailable,
    DistinctDocumentIterator,
    LazyDocumentTokens,
    group_of_document,
    iterate_corpus_documents,
    require_corpus_with_fields,
    tokenize_without_special_tokens,
)
from emad_ref.text.documents import SPLITS, Documents, Split
from pytest_emad.audit.model_lens import ModelLens
from pytest_emad.audit.positions import MAX_SHORT_LENGTH, draw_short_lengths
from pytest_emad.audit.spot_checks import AuditedDecoder
from pytest_emad.audit.tolerances import largest_declarable_noise, tolerance
from pytest_emad.audit.trajectory import DecoderUnderTest
from pytest_emad.measurements.run_resources import ModelIsolation, RunResources
from pytest_emad.measurements.study import Study
from pytest_emad.screening.settings import compute_traced_token_flops, work_share_for_token_cost


class FixedEncoderInput:
    """``decoder`` of an encoder-decoder with ``source`` int64 [s] as encoder input of every prompt without one.

    Audits check tokens and depths, so the source is fixed like the weights.
    """

    def __init__(self, decoder: Decoder, source: Ints):
        self._decoder, self._source = decoder, source

    @property
    def wrapped(self) -> Decoder:
        return self._decoder

    @property
    def capabilities(self) -> Capabilities:
        return self._decoder.capabilities

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        return self._decoder.start(self._complete(prompts))

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        return self._decoder.generate(self._complete(prompts), max_new, stop)

    def synchronize(self) -> None:
        self._decoder.synchronize()

    def close(self) -> None:
        self._decoder.close()

    def _complete(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [replace(prompt, source=self._source) if prompt.source is None else prompt for prompt in prompts]


UNTRAINED = {"documents": 4, "tokens": 48}  # windows for random weights: enough for thresholds that fire
SOURCE_TOKENS = 24  # tokens of the audits' fixed encoder input
AUDITED_AT_LEAST = 160  # positions: buffers of 64 and 128 end below
NOISE_TOKENS = 32  # tokens of text that determine the largest noise
ENCODER_DECODER_REFUSAL = (
    "an encoder-decoder model: this claim reads plain documents, which only a decoder alone continues"
)


class ModelUnderTest:
    """One loaded model under one study. ``isolation``: of the judge's model; None: decoders load another copy."""

    def __init__(
        self, loaded: LoadedModel, study: Study, resources: RunResources, isolation: ModelIsolation | None = None
    ):
        self.loaded, self.study, self._resources = loaded, study, resources
        self.data, self.seed = study.data, study.seed
        self.budget = study.budget.reduce_for_token_cost(compute_traced_token_flops(loaded.geometry))
        self.isolation = isolation or ModelIsolation(loaded)
        self._read: dict[Split, tuple[list[Ints | LazyDocumentTokens], Iterator[Ints | LazyDocumentTokens]]] = {}
        self._texts: dict[Split, Documents] = {}

    # ------------------------------------------------------------ model and text

    @property
    def reductions_note(self) -> str:
        """Note on reductions by the run's budget for a model of this size; empty without any."""
        return self.budget.describe_reductions(self.study.budget)

    @property
    def stepper(self) -> Stepper:
        """The judge's model, layer by layer."""
        return self.loaded.stepper

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def fingerprint(self) -> str:
        return self.loaded.fingerprint

    @cached_property
    def tolerance(self) -> float:
        """Largest honest difference of a logit or signal for this family, dtype, device and attention kernel."""
        return tolerance(
            self.loaded.geometry.family, self.dtype, self.stepper.device.type, self.stepper.attention_kernel
        )

    @cached_property
    def max_declarable_noise(self) -> float:
        """The largest noise, in logits, that a decoder may declare (``audit.tolerances``)."""
        (prompt,), _ = self.draw_prompts_with_continuations(
            np.random.default_rng(self.seed), [min(NOISE_TOKENS, self.window_size)], 0
        )
        return largest_declarable_noise(self.reference_lens, prompt.tokens, self.tolerance)

    def compute_allowed_difference(self, declared: Capabilities) -> float:
        """Largest honest difference of a logit of a decoder: ``tolerance``, or its declared noise up to the largest."""
        return max(self.tolerance, min(declared.logit_noise, self.max_declarable_noise))

    @property
    def dtype(self) -> str:
        return str(self.stepper.dtype).removeprefix("torch.")

    @cached_property
    def window_size(self) -> int:
        return window_size(self.stepper.max_positions)

    @cached_property
    def audited_window_size(self) -> int:
        """Positions of the window that audits of long prompts reach; raises as ``open_decoder``."""
        return self.scale_by_audit_share(self.window_size, AUDITED_AT_LEAST)

    @property
    def opening_token(self) -> int | None:
        return self.loaded.opening_token_id

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises EmadError if the model has none."""
        if self.loaded.tokenizer is None:
            raise EmadError(
                f"corpus={self.corpus!r} is text, but model {self.name!r} came without a tokenizer; put tokenizer.json "
                "into its folder, or choose --emad-corpus self"
            )
        return self.loaded.tokenizer

    @cached_property
    def corpus(self) -> str:
        """The study's corpus, else the default for this kind of model."""
        if not self.loaded.trained or self.is_seq2seq:
            return "random tokens"
        if self.study.corpus is not None:
            return self.study.corpus
        if self.loaded.bundled:
            return "world:premise"
        if self.loaded.tokenizer is None:
            return "self"
        try:
            next(iterate_corpus_documents("wikitext", "evaluate", data=self.data))
        except CorpusUnavailable:
            return "self"
        return "wikitext"

    @property
    def corpus_group(self) -> str | None:
        """The field that groups documents; None if each is its own group."""
        return None if self.corpus == "random tokens" else self.study.corpus_group

    def get_group_numbering(self, split: Split) -> Callable[[int], int] | None:
        """Number of a document of ``split`` that was read → its group; None if each document is its own.

        The texts of a group count as one document wherever documents are cut, summed or resampled.
        """
        return None if self.corpus_group is None else lambda place: group_of_document(self._texts[split], place)

    @property
    def absent_quality(self) -> Absent | None:
        """Why quality rows of plain documents do not apply; None if they do."""
        if not self.loaded.trained:
            return Absent("random weights: perplexity and accuracy of noise say nothing", "premise")
        return Absent(ENCODER_DECODER_REFUSAL, "premise") if self.is_seq2seq else None

    @property
    def is_seq2seq(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self.stepper.geometry.encoder_layers > 0

    @cached_property
    def audit_source_ids(self) -> Ints | None:
        """The source of every audit, int64 [s], fixed by the seed; None for decoder-only models."""
        if not self.is_seq2seq:
            return None
        rng = np.random.default_rng([self.seed, len(SPLITS)])
        tokens: Ints = rng.integers(0, self.stepper.vocabulary_size, SOURCE_TOKENS)
        return tokens

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a text of the model."""
        return self.loaded.end_token_ids

    @property
    def special_tokens(self) -> list[int]:
        """Ids of openings, ends, padding and unknown text, and 0: a decoder may treat them in a special way."""
        named = (getattr(self.loaded.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk"))
        padding = getattr(self.loaded.model.config, "pad_token_id", None)
        ids = (0, self.opening_token, padding, *named, *sorted(self.stop_tokens))
        return [id for id in dict.fromkeys(ids) if id is not None and 0 <= id < self.stepper.vocabulary_size]

    def iterate_documents(self, split: Split) -> Iterator[Ints | LazyDocumentTokens]:
        """Documents of the run's corpus, int64, without the opening token; cached, endless if generated.

        Slice the iterator, which tokenises long documents only as far as they are read.
        """
        read, source = self._read.setdefault(split, ([], self._source(split)))
        at = 0
        while True:
            if at == len(read):
                try:
                    read.append(next(source))
                except StopIteration:
                    return
                except EmadError:
                    del self._read[split]  # an exhausted source would look like a short corpus
                    raise
            yield read[at]
            at += 1

    def _source(self, split: Split) -> Iterator[Ints | LazyDocumentTokens]:
        if self.corpus == "random tokens":
            longest = max(UNTRAINED["tokens"], self.budget.prompt_tokens)  # a timed prompt is cut from one document
            for number in count():  # each is drawn separately, so its opening does not depend on the budget
                rng = np.random.default_rng([self.seed, SPLITS.index(split), number])
                yield rng.integers(0, self.stepper.vocabulary_size, longest)
        if self.corpus == "self":
            require_corpus_with_fields(self.corpus, self.corpus_group)
            longest, ends = min(self.window_size, 256) - 1, self.loaded.end_token_ids
            yield from iterate_sampled_documents(self.stepper, self.opening_token, longest, split, self.seed, ends)
            return
        self._texts[split] = iterate_corpus_documents(
            self.corpus, split, seed=self.seed, data=self.data, corpus_group=self.corpus_group
        )
        for text in self._texts[split]:
            yield tokenize_without_special_tokens(self.tokenizer, text)

    def count_dropped_near_duplicates(self, split: Split) -> int:
        """Number of documents of ``split`` dropped so far as near-duplicates."""
        texts = self._texts.get(split)
        return texts.left_out if isinstance(texts, DistinctDocumentIterator) else 0

    def cut_windows(self, split: Split, count: int) -> list[TokenSequence]:
        """Cut at most ``count`` windows from as many documents as possible, second windows only after all first ones.

        Intervals resample documents, so a third window of one document adds less information than the first of another.
        In judged splits a document gives at most ``MOST_WINDOWS``.
        """
        count = UNTRAINED["documents"] if self.corpus == "random tokens" else count

        def cut_at_most(limit: int | None, per_document: int) -> Iterator[TokenSequence]:
            sizes = self.window_size, self.opening_token, limit, per_document
            return cut_windows(self.iterate_documents(split), *sizes, self.get_group_numbering(split))

        cut = list(cut_at_most(count, 1))
        if len(cut) < count:  # the corpus is exhausted: each document has given one
            most = count if split == "calibrate" else MOST_WINDOWS
            cut = select_windows_round_robin(cut_at_most(None, most), count)
        return [replace(window, source=self.audit_source_ids) for window in cut]

    def make_opening_prompts(self, count: int, longest: int) -> list[Prompt]:
        """Prompts of at most ``longest`` tokens: beginnings of at most ``count`` evaluation documents.

        The corpus ``self`` is sampled only up to that number.
        """
        documents, group_of = self.iterate_documents("evaluate"), self.get_group_numbering("evaluate")
        if self.corpus == "self":
            ends = self.loaded.end_token_ids
            documents = iterate_sampled_documents(
                self.stepper, self.opening_token, longest, "evaluate", self.seed, ends
            )
        cut = cut_windows(documents, longest, self.opening_token, count, 1, group_of)
        return [Prompt(window.tokens, self.audit_source_ids) for window in cut]

    def get_progress_stream(self) -> TextIO | None:
        """Stream of progress bars; None: standard error."""
        return self._resources.progress_stream()

    def take_lens_trace(
        self,
        sequences: Sequence[TokenSequence],
        what: str,
        rules: Sequence[OperatingPoint] = (),
        layers: Sequence[int] | None = None,
        sample_every: int | None = None,
    ) -> Trace:
        """The lens trace of ``sequences``, taken by the run's workers if it has any.

        ``rules``, ``layers``, ``sample_every``: as of ``take_trace``.
        """
        at_layers = None if layers is None else tuple(layers)
        read: dict[str, Any] = {"rules": tuple(rules), "layers": at_layers, "sample_every": sample_every}
        named, file = f"{self.name}: {what}", self.get_progress_stream()
        if (workers := self._resources.workers) is not None:
            spec = ModelSpec.from_loaded(self.loaded)

            def traced(ordered: list[TokenSequence]) -> Iterator[Trace]:
                return iterate_worker_traces(workers, spec, ordered, TraceOptions(**read))

            return trace_and_assemble_batches(sequences, traced, named, file)
        return take_trace(self.stepper, sequences, **read, progress=named, file=file)

    # ------------------------------------------------------------ decoders

    @contextmanager
    def open_decoder(
        self,
        point: OperatingPoint,
        *,
        max_rows: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        own_rule: bool = False,
    ) -> Iterator[Decoder]:
        """Open a decoder for the block, and close it. ``own_rule``: with its own exit rule.

        Raises:
            Unsupported: the provider declines this request.
        """
        request = Request(self.isolation.ref, point, self.seed + seed, max_rows, temperature, own_rule)
        with self.isolation.expose_judge_model(lambda: self.max_declarable_noise):
            decoder = self._with_source(self._resources.make_decoder(request))
        try:
            yield decoder
        finally:
            decoder.close()

    @contextmanager
    def open_audited_decoder(self, point: OperatingPoint, *, max_rows: int = 1) -> Iterator[Decoder]:
        """Open a decoder for greedy answers that a verdict reads; check a few random ones after the block.

        Raises:
            AuditRefutedError: an answer is not the model's at its claimed depth (``audit.spot_checks``).
        """
        with self.open_decoder(point, max_rows=max_rows) as decoder:
            audited = AuditedDecoder(
                decoder,
                point,
                self._lens_of,
                self.tolerance,
                lambda: self._with_source(WalkedDecoder(self.stepper, point)),
            )
            yield audited
            audited.check_kept_answers().require()

    def _lens_of(self, source: Ints | None) -> ModelLens:
        return self.reference_lens if source is None else ModelLens(self.stepper, source)

    def _with_source(self, decoder: Decoder) -> Decoder:
        return decoder if self.audit_source_ids is None else FixedEncoderInput(decoder, self.audit_source_ids)

    def is_reference_decoder(self, decoder: Decoder) -> bool:
        """Whether ``decoder`` is the reference decoder over the judge's model."""
        while isinstance(decoder, FixedEncoderInput | AuditedDecoder):
            decoder = decoder.wrapped
        return type(decoder) is WalkedDecoder and decoder.stepper is self.loaded.stepper

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the decoder at full depth. Raises as ``open_decoder``."""
        return self._at_full_depth[0]

    @property
    def has_reference_decoder(self) -> bool:
        """Whether the decoder at full depth ``is_reference_decoder``. Raises as ``open_decoder``."""
        return self._at_full_depth[1]

    @cached_property
    def audit_share(self) -> float:
        """Share of an audit's rows, tokens and seeds in this run: 1 except for the reference decoder.

        Under ``smoke`` audits of the reference decoder on a large model are smaller, so that the run ends in minutes;
        smaller models judge the same code in full. Raises as ``open_decoder``.
        """
        if self.study.budget.rank or not self.has_reference_decoder:
            return 1.0
        return work_share_for_token_cost(compute_traced_token_flops(self.loaded.geometry))

    def scale_by_audit_share(self, amount: int, least: int) -> int:
        """``audit_share`` of ``amount``, at least ``least``; raises as ``open_decoder``."""
        return min(amount, max(least, round(self.audit_share * amount)))

    @cached_property
    def _at_full_depth(self) -> tuple[Capabilities, bool]:
        with self.open_decoder(self.full_depth_point) as decoder:
            return decoder.capabilities, self.is_reference_decoder(decoder)

    @cached_property
    def full_depth_point(self) -> OperatingPoint:
        return full_depth(self.stepper.layers)

    # ------------------------------------------------------------ prompts and oracles

    def make_equal_prompts(self, count: int, tokens: int) -> list[Prompt]:
        """Make ``count`` prompts of exactly ``tokens`` tokens: openings of documents, then later pieces.

        Raises:
            EmadError: the corpus is too small.
        """
        starts = (self._opened(document[:tokens])[:tokens] for document in self.iterate_documents("evaluate"))
        pieces = (s.tokens for s in cut_windows(self.iterate_documents("evaluate"), tokens, self.opening_token))
        prompts: list[Prompt] = []
        for source, limit in ((starts, 20 * count), (pieces, 200 * count)):
            for piece in islice(source, limit):
                if len(piece) == tokens:
                    prompts.append(Prompt(piece))
                if len(prompts) == count:
                    return prompts
        raise EmadError(
            f"corpus={self.corpus!r} gives {len(prompts)} prompts of {tokens} tokens, but {count} are needed; "
            "use a larger corpus"
        )

    def _opened(self, document: Ints) -> Ints:
        return document if self.opening_token is None else np.concatenate([[self.opening_token], document])

    def make_ragged_prompts_with_continuations(self, count: int, fed: int) -> tuple[list[Prompt], Ints]:
        """``count`` ragged prompts and int64 [count, fed] tokens that continue them, from text of this run."""
        lengths = [5 + (4 * row) % 7 for row in range(count)]
        texts = [p.tokens for p in self.make_equal_prompts(count, max(lengths) + fed)]
        prompts = [Prompt(text[:n]) for text, n in zip(texts, lengths, strict=True)]
        return prompts, np.stack([text[n : n + fed] for text, n in zip(texts, lengths, strict=True)])

    def draw_prompts_with_continuations(
        self, rng: np.random.Generator, lengths: Sequence[int], fed: int
    ) -> tuple[list[Prompt], Ints]:
        """Prompts of these ``lengths`` and int64 [rows, fed] tokens that continue them, cut at random from the text.

        The text concatenates documents, each behind its opening token, so short documents give long pieces too.
        """
        length, joined = 4 * (max(lengths) + fed), np.zeros(0, dtype=np.int64)
        for document in self.iterate_documents("evaluate"):
            joined = np.concatenate([joined, self._opened(document[:length])])
            if len(joined) >= length:
                break
        text = np.resize(joined, length)  # a small corpus repeats
        starts = rng.integers(0, length - max(lengths) - fed + 1, len(lengths))
        cut = [text[start : start + n + fed] for start, n in zip(starts, lengths, strict=True)]
        prompts = [Prompt(piece[:n]) for piece, n in zip(cut, lengths, strict=True)]
        return prompts, np.stack([piece[n:] for piece, n in zip(cut, lengths, strict=True)])

    def draw_short_lengths(self, rng: np.random.Generator, rows: int, fed: int) -> list[int]:
        """Random lengths of ``rows`` short prompts that leave room for ``fed`` tokens; raises EmadError."""
        if self.window_size <= fed:
            raise EmadError(
                f"model {self.name!r} holds {self.window_size} positions, but this audit feeds {fed} tokens after a "
                f"prompt; judge a model of at least {fed + 1} positions"
            )
        return draw_short_lengths(rng, rows, min(MAX_SHORT_LENGTH, self.window_size - fed))

    @contextmanager
    def open_decoder_and_draw_prompts(
        self,
        point: OperatingPoint,
        rng: np.random.Generator,
        lengths: Sequence[int],
        fed: int,
        *,
        forces: bool = True,
        max_rows: int | None = None,
    ) -> Iterator[tuple[DecoderUnderTest, list[Prompt], Ints]]:
        """Open a decoder under test with ``draw_prompts_with_continuations`` of these ``lengths``.

        ``max_rows``: of a request; by default the number of prompts. Raises as ``open_decoder``.
        """
        prompts, continuation = self.draw_prompts_with_continuations(rng, lengths, fed)
        with self.open_decoder(point, max_rows=max_rows or len(prompts)) as decoder:
            yield self.make_decoder_under_test(decoder, point, forces=forces), prompts, continuation

    def make_decoder_under_test(
        self, decoder: Decoder, point: OperatingPoint, *, forces: bool = True
    ) -> DecoderUnderTest:
        """``decoder`` at ``point`` with this model's lens and tolerance, for audits."""
        return DecoderUnderTest(
            decoder, self.reference_lens, point, self.tolerance, window=self.window_size, forces=forces
        )

    @cached_property
    def reference_lens(self) -> ModelLens:
        """The lens of every audit: tokens [n] → reference logits [n, L, V] after every layer, from ``first`` on."""
        return ModelLens(self.stepper, self.audit_source_ids)

    @torch.inference_mode()
    def compute_model_logits(self, tokens: Ints) -> Floats:
        """Logits [n, V] of the model's own forward after each of ``tokens``."""
        ids = torch.from_numpy(tokens)[None].to(self.stepper.device)
        inputs = {"input_ids": self._sources(1), "decoder_input_ids": ids} if self.is_seq2seq else {"input_ids": ids}
        return to_numpy_float64(self.loaded.model(**inputs).logits[0])

    def _sources(self, rows: int) -> torch.Tensor:
        assert self.audit_source_ids is not None, "only an encoder-decoder is given sources"
        return torch.from_numpy(self.audit_source_ids).repeat(rows, 1).to(self.stepper.device)

    def generate_greedy(self, prompts: Sequence[Prompt], new: int, *, compiled: bool = False) -> Ints:
        """Greedy tokens [rows, new] of the model's own ``generate`` after prompts of equal length.

        ``compiled``: by ``torch.compile`` over a static cache, as transformers compiles if the model allows it; the
        first request of a batch size compiles.
        """
        ids = torch.from_numpy(np.stack([p.tokens for p in prompts])).to(self.stepper.device)
        inputs: dict[str, Any] = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
        settings: dict[str, Any] = {}
        if compiled:
            settings = {"cache_implementation": "static", "compile_config": CompileConfig()}
            settings["compile_config"]._compile_all_devices = True
        if self.is_seq2seq:
            settings["decoder_start_token_id"] = self.opening_token
            sources = self._sources(len(ids))
            inputs = {"inputs": sources, "attention_mask": torch.ones_like(sources), "decoder_input_ids": ids}
            # generate() sizes the cache by the encoder's layers, of which there may be fewer
            inputs["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with fail_on_recompile_limit() if compiled else nullcontext():  # no stop token: arms must do equal work
            out = greedy_generate(self.loaded.model, inputs, new, **settings)
        emitted: Ints = out[:, ids.shape[1] :].cpu().numpy()
        return emitted

    def absent_compiled_generate(self, batch_sizes: Sequence[int] = (1,)) -> Absent | None:
        """Why ``generate`` cannot be compiled here for these rows; None if it just was. It takes a minute on a CPU.

        Each batch size comes with another length, so both are free in one graph.
        """
        if self.is_seq2seq:
            return Absent("an encoder-decoder model: transformers compiles no cache of two kinds")
        model, before = self.loaded.model, count_traced_graphs()
        had_compiled = "_compiled_call" in vars(model)
        try:
            for at, rows in enumerate(batch_sizes):
                self.generate_greedy(self.make_equal_prompts(rows, 8 + at), 3, compiled=True)
        except (
            RuntimeError,
            ValueError,
            OSError,
        ) as refusal:  # from TorchDynamo, transformers, or a missing C++ compiler
            said = f"{type(refusal).__name__}: {str(refusal).strip().partition(chr(10))[0]}"
            return Absent(f"torch.compile: {said}")
        # transformers may fall back to the plain step with only a warning
        if "_compiled_call" not in vars(model):
            return Absent("transformers does not compile this model's steps")
        # so may TorchDynamo if it can trace nothing
        if had_compiled or count_traced_graphs() > before:
            return None
        return Absent("TorchDynamo traces no graph of this model's steps")


@contextmanager
def open_model(name: str, study: Study) -> Iterator[LoadedModel]:
    """Load a model for the block, in which a small one runs on one thread (``benchmark.machine``)."""
    dtype = getattr(torch, study.dtype)
    loaded = load(name, device=study.device, dtype=dtype, seed=study.seed, backend=study.walk)
    try:
        with one_thread_for_steps(loaded.geometry.parameter_count()):
            yield loaded
    finally:
        del loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
