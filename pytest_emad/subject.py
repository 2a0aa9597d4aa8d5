"""The model under test as suites meet it: its text, its decoders, and what it says by itself.

A ``Subject`` measures nothing about depth. It reads documents, opens decoders (from the hook, ours like anybody's) and
answers as an oracle: the model's own logits after every layer, its own greedy text. ``session.Evidence`` builds on it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache

from emad_ref.audit.bridge import bridge
from emad_ref.audit.finding import Finding
from emad_ref.audit.oracle import ModelLens, replayed_by
from emad_ref.audit.tolerances import tolerance
from emad_ref.calibration.trace import TokenSequence, Trace, lens_logits, take_trace, windows
from emad_ref.decoding.selftext import own_documents
from emad_ref.errors import EmadError
from emad_ref.models.loading import Loaded, load
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Decoder, ModelRef, Prompt, Request
from emad_ref.record import Floats, Ints
from emad_ref.replay import depths
from emad_ref.text.documents import SPLITS, Split
from emad_ref.text.sources import CorpusUnavailable, documents_of
from pytest_emad import progress
from pytest_emad.options import Settings
from pytest_emad.sourced import Sourced

LONGEST_WINDOW = 512  # METHODS, "Depth and documents"
FEWEST_DOCUMENTS = 30  # METHODS, "Level": no document gives more windows than leaves room for so many
PROBED, PROBED_TOKENS = 12, 32
PROBING_QUANTILES = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005)
NEAR_TIES = 0.003  # share of positions within the tolerance of a threshold that needs no avoiding
BRIDGED = 3  # documents, of at most BRIDGED_TOKENS, on which replay is held against the decoder
BRIDGED_TOKENS = 64
UNTRAINED = {"documents": 4, "tokens": 48}  # random weights: enough for thresholds that fire, no more
LARGEST_NATS = float(np.finfo(np.float32).max)  # a threshold that every signal passes
NEVER_NATS = -1.0  # a threshold that no entropy passes
SINGLE_THREADED = 50_000_000  # parameters
SOURCE_TOKENS = 24  # of the source that an encoder-decoder reads in audits: whatever it is, it is the same everywhere
PLAIN = "an encoder-decoder model: this claim reads plain documents, which only a decoder alone continues"


class Subject:
    """One loaded model under the settings of one run.

    Questions about quality ask ``without_quality`` first: a reason, or "" where quality means something.
    """

    def __init__(self, loaded: Loaded, settings: Settings, make_decoder: Callable[[Request], Decoder]):
        self.loaded, self.settings, self._make_decoder = loaded, settings, make_decoder
        self.data, self.seed, self.budget = settings.data, settings.seed, settings.budget
        self.ref = ModelRef(loaded.name, lambda: loaded)
        self._read: dict[Split, tuple[list[Ints], Iterator[Ints]]] = {}

    # ------------------------------------------------------------ model and text

    @property
    def stepper(self) -> Stepper:
        return self.loaded.stepper

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def fingerprint(self) -> str:
        return self.loaded.fingerprint

    @cached_property
    def tolerance(self) -> float:
        """Largest honest difference of a logit or signal for this family, dtype and device."""
        return tolerance(self.loaded.geometry.family, self.dtype, self.stepper.device.type)

    @property
    def dtype(self) -> str:
        return str(self.stepper.dtype).removeprefix("torch.")

    @cached_property
    def window(self) -> int:
        limit = self.stepper.max_positions or LONGEST_WINDOW
        return min(limit, LONGEST_WINDOW)

    @property
    def opening(self) -> int | None:
        return self.loaded.opening

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for a corpus of text.

        Raises:
            EmadError: it came without one.
        """
        if self.loaded.tokenizer is None:
            raise EmadError(
                f"corpus={self.corpus!r} is text, but model {self.name!r} came without a tokenizer; put tokenizer.json "
                "into its folder, or choose --emad-corpus self"
            )
        return self.loaded.tokenizer

    @cached_property
    def corpus(self) -> str:
        """The corpus asked for, else METHODS' default for this kind of model."""
        if not self.loaded.trained or self.seq2seq:
            return "random tokens"
        if self.settings.corpus is not None:
            return self.settings.corpus
        if self.loaded.bundled:
            return "world:premise"
        if self.loaded.tokenizer is None:
            return "self"
        try:
            next(documents_of("wikitext", "evaluate", data=self.data))
        except CorpusUnavailable:
            return "self"
        return "wikitext"

    @property
    def without_quality(self) -> str:
        """Why quality rows of plain documents do not apply; empty where they do."""
        if not self.loaded.trained:
            return "random weights: perplexity and accuracy of noise say nothing"
        return PLAIN if self.seq2seq else ""

    @property
    def seq2seq(self) -> bool:
        """Whether the model reads a source: an encoder-decoder. ``exits`` then holds its tasks."""
        return self.stepper.geometry.encoder_layers > 0

    @cached_property
    def source(self) -> Ints | None:
        """int64 [s] the source of every audit, fixed by the seed; None for decoder-only models."""
        if not self.seq2seq:
            return None
        rng = np.random.default_rng([self.seed, len(SPLITS)])
        drawn: Ints = rng.integers(0, self.stepper.vocabulary, SOURCE_TOKENS)
        return drawn

    @property
    def stop(self) -> frozenset[int]:
        """Tokens that end what an encoder-decoder writes."""
        end = self.loaded.model.config.eos_token_id
        return frozenset() if end is None else frozenset(np.atleast_1d(end).tolist())

    def documents(self, split: Split) -> Iterator[Ints]:
        """int64 documents of the run's corpus, without the opening token; endless where they are generated.

        Each is read, sampled or encoded once: reading again starts from what is already there.
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
                    del self._read[split]  # a source that raised is exhausted: read on, it would look like a short one
                    raise
            yield read[at]
            at += 1

    def _source(self, split: Split) -> Iterator[Ints]:
        if self.corpus == "random tokens":
            rng = np.random.default_rng([self.seed, SPLITS.index(split)])
            while True:
                longest = max(UNTRAINED["tokens"], self.budget.prompt_tokens)  # a timed prompt is cut from one document
                yield rng.integers(0, self.stepper.vocabulary, longest)
        if self.corpus == "self":
            opening = 0 if self.opening is None else self.opening
            yield from own_documents(self.stepper, opening, min(self.window, 256) - 1, split, self.seed)
            return
        for text in documents_of(self.corpus, split, seed=self.seed, data=self.data):
            yield np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def sequences(self, split: Split, count: int) -> list[TokenSequence]:
        """At most ``count`` windows, from 30 documents or more where the corpus has them."""
        count = UNTRAINED["documents"] if self.corpus == "random tokens" else count
        each = max(1, count // FEWEST_DOCUMENTS)
        cut = windows(self.documents(split), self.window, self.opening, count, each)
        return [replace(window, source=self.source) for window in cut]

    def trace(self, sequences: Sequence[TokenSequence], what: str, rules: Sequence[OperatingPoint] = ()) -> Trace:
        named = f"{self.name}: {what}"
        return take_trace(self.stepper, sequences, rules=rules, progress=named, file=progress.stream())

    # ------------------------------------------------------------ decoders

    def decoder(self, point: OperatingPoint, *, max_rows: int = 1, temperature: float = 0.0, seed: int = 0) -> Decoder:
        """A decoder from ``pytest_emad_make_decoder``; the caller closes it (or uses ``open``).

        Raises:
            Unsupported: the provider declines this request.
        """
        decoder = self._make_decoder(Request(self.ref, point, self.seed + seed, max_rows, temperature))
        return decoder if self.source is None else Sourced(decoder, self.source)

    @contextmanager
    def open(
        self, point: OperatingPoint, *, max_rows: int = 1, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[Decoder]:
        decoder = self.decoder(point, max_rows=max_rows, temperature=temperature, seed=seed)
        try:
            yield decoder
        finally:
            decoder.close()

    @cached_property
    def flop_evidence(self) -> str:
        """``counted``: the decoder counts what it runs, and audits hold that against replay; else ``claimed``."""
        with self.open(self.full) as decoder:
            return "counted" if decoder.capabilities.counted else "claimed"

    @cached_property
    def full(self) -> OperatingPoint:
        return full_depth(self.stepper.layers)

    @cached_property
    def probing_point(self) -> OperatingPoint:
        """A point whose depth comes down in many steps on this run's text: for invariants, not for quality.

        Thresholds are quantiles of the model's own entropies. Among a few quantiles it is the one under which short
        documents use half the layers on average, as long as hardly any signal lies so near its threshold that rounding
        decides. Shallow probes, because there depth changes what is emitted.
        """
        short = [replace(s, tokens=s.tokens[:PROBED_TOKENS]) for s in self.sequences("validate", PROBED)]
        trace = take_trace(self.stepper, short)
        layers = self.stepper.layers
        probes = tuple(range(1, layers, max(1, layers // 6)))
        entropy = trace.entropy_nats[:, np.array(probes) - 1]
        candidates = []
        for quantile in PROBING_QUANTILES:
            thresholds = np.quantile(entropy, quantile, axis=0)
            # signals that crowd around any low quantile (entropies near zero) decide by rounding: leave that layer out
            crowded = (np.abs(entropy - thresholds) <= self.tolerance).mean(axis=0) > NEAR_TIES
            thresholds = np.where(crowded, NEVER_NATS, thresholds)
            point = OperatingPoint("probing", "quantile", layers, layers, probes, (tuple(map(float, thresholds)),))
            near = float((np.abs(entropy - thresholds) <= self.tolerance).any(axis=1).mean())
            away = abs(float(depths(trace, point).mean()) - layers / 2)
            candidates.append((max(near, NEAR_TIES), away, quantile, point))
        return min(candidates)[-1]

    @cached_property
    def shallow_point(self) -> OperatingPoint:
        """Every token exits after the first third of the layers: depth matters most, and full-depth tokens show."""
        layers = self.stepper.layers
        return OperatingPoint("shallow", "quantile", layers, layers, (max(1, layers // 3),), ((LARGEST_NATS,),))

    @cached_property
    def bridge(self) -> Finding:
        """Whether replay speaks for the decoder under test."""
        return self.bridged(self.probing_point)

    def bridged(self, point: OperatingPoint) -> Finding:
        """Whether replay of ``point`` speaks for the decoder under test."""
        sequences = [replace(s, tokens=s.tokens[:BRIDGED_TOKENS]) for s in self.sequences("evaluate", BRIDGED)][
            :BRIDGED
        ]
        replayed = [replayed_by(self.stepper, sequence, point, self.tolerance) for sequence in sequences]
        with self.open(point) as decoder:
            return bridge(decoder, point, replayed, self.tolerance)

    # ------------------------------------------------------------ prompts and oracles

    def prompts(self, count: int, tokens: int) -> list[Prompt]:
        """``count`` prompts of exactly ``tokens`` tokens: openings of documents, then, where those run out, pieces.

        Raises:
            EmadError: the corpus is too small.
        """
        starts = (self._opened(document)[:tokens] for document in self.documents("evaluate"))
        pieces = (s.tokens for s in windows(self.documents("evaluate"), tokens, self.opening))
        found: list[Prompt] = []
        for source, limit in ((starts, 20 * count), (pieces, 200 * count)):
            for piece in islice(source, limit):
                if len(piece) == tokens:
                    found.append(Prompt(piece))
                if len(found) == count:
                    return found
        raise EmadError(
            f"corpus={self.corpus!r} gives {len(found)} prompts of {tokens} tokens, but {count} are needed; "
            "use a larger corpus"
        )

    def _opened(self, document: Ints) -> Ints:
        return document if self.opening is None else np.concatenate([[self.opening], document])

    def rows(self, count: int, fed: int) -> tuple[list[Prompt], Ints]:
        """``count`` ragged prompts and int64 [count, fed] tokens that continue them, from text of this run."""
        lengths = [5 + (4 * row) % 7 for row in range(count)]
        texts = [p.tokens for p in self.prompts(count, max(lengths) + fed)]
        prompts = [Prompt(text[:n]) for text, n in zip(texts, lengths, strict=True)]
        return prompts, np.stack([text[n : n + fed] for text, n in zip(texts, lengths, strict=True)])

    @cached_property
    def lens(self) -> ModelLens:
        """The oracle of every audit: called with tokens [n], reference logits [n, L, V] after every layer."""
        return ModelLens(self.stepper, self.source)

    def lens_at_end(self, tokens: Ints) -> Floats:
        """Reference logits [L, V] of the last position."""
        last: Floats = lens_logits(self.stepper, tokens, len(tokens) - 1, self.source)[0]
        return last

    @torch.inference_mode()
    def own_logits(self, tokens: Ints) -> Floats:
        """Logits [n, V] that the model's own forward gives after each of ``tokens``."""
        ids = torch.from_numpy(tokens)[None].to(self.stepper.device)
        given = {"input_ids": self._sources(1), "decoder_input_ids": ids} if self.seq2seq else {"input_ids": ids}
        logits: Floats = self.loaded.model(**given).logits[0].double().cpu().numpy()
        return logits

    def _sources(self, rows: int) -> torch.Tensor:
        assert self.source is not None, "only an encoder-decoder is given sources"
        return torch.from_numpy(self.source).repeat(rows, 1).to(self.stepper.device)

    @torch.inference_mode()
    def own_greedy(self, prompts: Sequence[Prompt], new: int) -> Ints:
        """int64 [rows, new]: what the model's own ``generate`` emits greedily after prompts of equal length."""
        model = self.loaded.model
        ids = torch.from_numpy(np.stack([p.tokens for p in prompts])).to(self.stepper.device)
        kept, plain = model.generation_config, copy.deepcopy(model.generation_config)
        plain.eos_token_id, plain.pad_token_id, plain.max_length = None, 0, None
        plain.do_sample, plain.temperature, plain.top_p, plain.top_k = False, None, None, None
        model.generation_config = plain  # a stop token would end rows early, and arms must do equal work
        given: dict[str, Any] = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
        if self.seq2seq:
            plain.decoder_start_token_id = self.opening
            sources = self._sources(len(ids))
            given = {"inputs": sources, "attention_mask": torch.ones_like(sources), "decoder_input_ids": ids}
            # generate() sizes the cache it makes by the encoder's layers, of which there may be fewer
            given["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        try:
            out = model.generate(**given, max_new_tokens=new)
        finally:
            model.generation_config = kept
        emitted: Ints = out[:, ids.shape[1] :].cpu().numpy()
        return emitted


@contextmanager
def open_model(name: str, settings: Settings) -> Iterator[Loaded]:
    """Load a model for as long as the block lasts.

    A small one runs on one thread, unless OMP_NUM_THREADS says otherwise: its kernels take microseconds, and waking a
    second thread for each made a run three times as long.
    """
    loaded = load(name, device=settings.device, dtype=getattr(torch, settings.dtype), seed=settings.seed)
    threads = torch.get_num_threads()
    if loaded.geometry.parameters() < SINGLE_THREADED and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield loaded
    finally:
        torch.set_num_threads(threads)
        del loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
