"""lm-eval model that runs published tasks with a decoder at an operating point.

    simple_evaluate(model=EmadLM("emad-tiny", profile="profile.json", margin=0.1), tasks=[…])
    python -m pytest_emad.lm_eval --model_args pretrained=emad-tiny,profile=profile.json,margin=0.1
        --tasks gsm8k --metadata '{"data": "DIR"}'

The second command is that of lm-eval. Importing this module registers the model ``emad`` with it.

In all three requests of lm-eval, context positions before the last run at the ceiling, and the rule decides from the
last context position on.

``loglikelihood``          Σ log p(continuation | context), each token read at its depth D_t
``loglikelihood_rolling``  the same over windows of up to ``max_length`` tokens; every token is predicted once
``generate_until``         greedy decoding up to a stop string, the end-of-text token or a maximum length

Tokenisation, truncation and windows are those of lm-eval's ``hf`` model. ``continuations`` scores and generates.

lm-eval's own request cache would mix operating points, since its keys do not name the model, and is refused.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import torch
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from emad_ref.calibration.profile import load_profile
from emad_ref.calibration.windows import TOKENS_PER_BATCH, TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument, is_number, suggest_nearest
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.tokenizers import decode_tokens
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Decoder, Prompt
from pytest_emad.tasks.continuation_scoring import (
    Answer,
    ForcedInput,
    generate_greedy,
    is_replayable,
    make_stop_string_check,
    score_by_decoding,
    score_by_replay,
    start_generation,
    start_generation_on_device,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

NEW_TOKENS = 256  # default length, as in lm-eval
QUIET_SECONDS = 3.0  # shorter work shows no progress bar
GREEDY_SETTINGS = frozenset({"do_sample", "temperature", "top_p", "top_k"})  # without effect on greedy decoding


@register_model("emad")
class EmadLM(TemplateLM):  # type: ignore[misc]  # lm-eval ships no types
    """lm-eval model that decodes at an operating point.

    ``pretrained``     a name as for ``models.loading.load``, or a loaded model.
    ``point``          the operating point, or instead ``profile``, a file of ``emad calibrate``, with ``margin`` in
                       nats; without both, full depth.
    ``decoder``        a decoder of the same model and point, instead of the reference; it must take ``batch_size``
                       rows.
    ``batch_size``     rows per forward pass. None, ``auto`` or ``auto:N``: as many as fit ``TOKENS_PER_BATCH`` padded
                       tokens, at most ``max_batch_size``. It changes results only by rounding.
    ``max_length``     largest number of context and continuation tokens; by default that of the model.
    ``add_bos_token``  None: as the tokenizer does, like ``hf``. True: beginning-of-text token before every context.
                       False: no special token.
    ``progress``       stream of progress bars; None: standard error.
    ``device``, ``dtype``, ``revision``  as for ``load``, if ``pretrained`` is a name.

    ``cut`` counts per task the requests whose context was cut on the left to fit the window. ``decided`` lists the
    tokens of every request, read or written, from which a point's saving on a task is replayed.

    Raises:
        BadArgument: contradictory or impossible arguments, a model without a tokenizer.
        BadProfile: a profile of another model.
    """

    def __init__(
        self,
        pretrained: str | LoadedModel,
        *,
        point: OperatingPoint | None = None,
        profile: str | Path | None = None,
        margin: float | None = None,
        decoder: Decoder | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        progress: TextIO | None = None,
        device: str = "cpu",
        dtype: str | None = None,
        revision: str | None = None,
        max_batch_size: int | None = None,
        **others: Any,
    ):
        super().__init__()
        if others:
            raise BadArgument(
                "model_args", others, f"arguments of this model: {', '.join(ARGUMENTS)}", _argument_remedy(others)
            )
        self.loaded = _load_model(pretrained, device, dtype, revision)
        self.tokenizer: Any = self.loaded.tokenizer
        self.stepper = self.loaded.stepper
        self._device = self.stepper.device
        self.point = _operating_point(self.loaded, point, profile, margin)
        if self.point.layers != self.stepper.layers:
            raise BadArgument("point.layers", self.point.layers, f"{self.stepper.layers}, the layers of this model")
        self.batch_size = _parse_batch_size(batch_size)
        self._most_rows = _parse_batch_size(max_batch_size)
        self.max_length: int = self.stepper.max_positions if max_length is None else max_length
        if not 1 <= self.max_length <= self.stepper.max_positions:
            raise BadArgument("max_length", max_length, f"1–{self.stepper.max_positions}, what this model was made for")
        self.add_bos_token = add_bos_token
        self._decoder, self._progress = decoder, progress
        self.cut: dict[str, int] = {}
        self.decided: list[TokenSequence] = []
        self._shortened: list[bool] = []  # per request of the last scoring call: context cut

    # ------------------------------------------------------------ tokens, as in lm-eval's `hf`

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end-of-text token, else the lowest end id of the model; all of them end a generation."""
        own = self.tokenizer.eos_token_id
        return min(self.loaded.end_token_ids) if own is None else int(own)

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context: the beginning-of-text token, else the end-of-text token."""
        opening = self.loaded.opening_token_id
        return self.eot_token_id if opening is None else opening

    @property
    def max_gen_toks(self) -> int:
        return NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Token ids; no second prefix token is added to a string that starts with one."""
        opened = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        if add_special_tokens is None and not opened:
            add_special_tokens = self.add_bos_token
        special = {} if add_special_tokens is None and not opened else {"add_special_tokens": bool(add_special_tokens)}
        ids: list[int] = self.tokenizer.encode(string, **special)
        if self.add_bos_token and special.get("add_special_tokens") and ids[:1] != [self.prefix_token_id]:
            ids = [self.prefix_token_id, *ids]  # some tokenizers do not add it
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text by the tokenizer's chat template, as in lm-eval's ``hf`` model.

        Raises:
            BadArgument: the tokenizer has no template, or its template refuses these roles.
        """
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        without_system = [message for message in chat_history if message["role"] != "system"]
        try:
            try:
                return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **ends))
            except TemplateError:  # several templates have no system role
                log.warning("the chat template refuses the system message, which is left out")
                return str(self.tokenizer.apply_chat_template(without_system, tokenize=False, **ends))
        except (TemplateError, ValueError, AttributeError) as error:
            expected = "a model whose tokenizer has a chat template for these messages"
            raise BadArgument("--apply_chat_template", self.loaded.name, expected, str(error)) from error

    # ------------------------------------------------------------ requests

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """[requests] log p of a continuation after its context, and whether greedy decoding gives it."""
        answers: list[Answer] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self._count_cut(requests, self._shortened)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """[requests] Σ log p of whole texts; long ones in windows, each token predicted once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            cut = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += cut
            counts.append(len(cut))
        answers = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        ends = np.cumsum(counts)
        return [sum(a[0] for a in answers[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **ignored: Any
    ) -> list[Answer]:
        """[requests] answers to (text, context ids, continuation ids)."""
        fitted = [self._fitted(context, continuation) for _, context, continuation in requests]
        self._shortened = [
            len(tokens) < len(context) + len(continuation)
            for (tokens, _), (_, context, continuation) in zip(fitted, requests, strict=True)
        ]
        self.decided += [TokenSequence(np.array(tokens, dtype=np.int64), start) for tokens, start in fitted]
        distinct = list(dict.fromkeys(fitted))
        inputs = [
            (ForcedInput(tokens, start, tuple(request[0][-1] for request in group)), group)
            for (tokens, start), group in _sorted_groups(distinct, lambda request: (request[0][:-1], request[1]))
        ]
        found: dict[tuple[tuple[int, ...], int], Answer] = {}
        score = self._scorer()
        with self._bar("scoring", len(distinct), disable_tqdm) as bar:
            for batch in self._batches(inputs, lambda item: len(item[0].tokens)):
                answers = score([forced for forced, _ in batch])
                found.update(zip((request for _, group in batch for request in group), answers, strict=True))
                bar.update(len(answers))
        return [(float(found[request][0]), bool(found[request][1])) for request in fitted]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """[requests] greedy continuations, cut before their first stop string.

        Raises:
            BadArgument: a request for sampling or another option than greedy decoding has, or for more new tokens than
                the model has positions.
        """
        generations = [self._generation(*request.args[:2]) for request in requests]
        self._count_cut(requests, [shortened for _, shortened in generations])
        distinct = list(dict.fromkeys(generation for generation, _ in generations))
        found: dict[tuple[tuple[int, ...], tuple[str, ...], int], str] = {}
        with self._bar("generating", len(distinct), disable_tqdm) as bar:
            for (stops, max_new), group in _sorted_groups(distinct, lambda generation: generation[1:]):
                for batch in self._batches(group, lambda item, new=max_new: len(item[0]) + new):  # type: ignore[misc]
                    texts = self._generate([tokens for tokens, _, _ in batch], stops, max_new)
                    found.update(zip(batch, texts, strict=True))
                    bar.update(len(batch))
        self.decided += [self._as_written(generation[0], found[generation]) for generation, _ in generations]
        return [found[generation] for generation, _ in generations]

    def _as_written(self, context: Sequence[int], text: str) -> TokenSequence:
        """Tokens of a context and its continuation; an empty ``text`` stands for the end-of-text token."""
        new = self.tokenizer.encode(text, add_special_tokens=False) or [self.eot_token_id]
        tokens = np.array([*context, *new][: self.max_length + 1], dtype=np.int64)
        return TokenSequence(tokens, len(context) - 1)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Reject lm-eval's request cache, whose keys do not name the model.

        Raises:
            BadArgument: always.
        """
        raise BadArgument(
            "use_cache",
            "a file",
            "None",
            "lm-eval would answer for one operating point with another's results; leave --use_cache out",
        )

    def get_model_info(self) -> dict[str, Any]:
        """Information about the model, which lm-eval stores with its results."""
        return {
            "model": self.loaded.name,
            "fingerprint": self.loaded.fingerprint,
            "dtype": str(self.stepper.dtype),
            "point": self.point.to_json(),
            "special_tokens": self.loaded.special_tokens.facts,
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "batch_size": self.batch_size,
            "max_length": self.max_length,
        }

    # ------------------------------------------------------------ private

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """(tokens cut on the left to the model's window, last context position)."""
        if not context or not continuation or len(continuation) > self.max_length:
            raise BadArgument(
                "request",
                f"{len(context)} context and {len(continuation)} continuation tokens",
                f"at least one of each, and at most {self.max_length} to predict",
                "leave the document out, or choose a larger max_length",
            )
        tokens = (*context, *continuation)[-(self.max_length + 1) :]
        return tokens, len(tokens) - len(continuation) - 1

    def _generation(
        self, context: str, settings: dict[str, Any]
    ) -> tuple[tuple[tuple[int, ...], tuple[str, ...], int], bool]:
        """(context cut on the left, stop strings, number of new tokens) of a request, and whether it was cut."""
        settings_given = normalize_gen_kwargs(settings, self.max_gen_toks)
        stops = handle_stop_sequences(settings_given.pop("until", None), eos=self.tokenizer.decode([self.eot_token_id]))
        max_new = int(settings_given.pop("max_gen_toks"))
        strange = {name: value for name, value in settings_given.items() if name not in GREEDY_SETTINGS}
        if settings_given.get("do_sample") or strange:
            raise BadArgument("generation_kwargs", settings, "greedy decoding", "drop sampling, beams and penalties")
        room = self.max_length - max_new
        if not 1 <= room < self.max_length:
            raise BadArgument(
                "max_gen_toks", max_new, f"1–{self.max_length - 1} for this model", "a context needs room too"
            )
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        return (tuple(tokens[-room:]), tuple(stops), max_new), len(tokens) > room

    def _count_cut(self, requests: Sequence[Instance], shortened: Sequence[bool]) -> None:
        """Count shortened contexts in ``cut``, with one warning per task."""
        tasks = [getattr(request, "task_name", None) or "requests without a task" for request in requests]
        for task, count in Counter(task for task, was in zip(tasks, shortened, strict=True) if was).items():
            self.cut[task] = self.cut.get(task, 0) + count
            log.warning(
                "%s: the contexts of %d of %d requests are cut on the left: %s sees %d tokens, new ones included",
                task,
                count,
                tasks.count(task),
                self.loaded.name,
                self.max_length,
            )

    def _generate(self, contexts: Sequence[Sequence[int]], stops: Sequence[str], max_new: int) -> list[str]:
        def text(tokens: Sequence[int]) -> str:
            return decode_tokens(self.tokenizer, tokens, skip_special_tokens=True)

        prompts = [Prompt(np.array(context, dtype=np.int64)) for context in contexts]
        stopped = make_stop_string_check(text, stops)
        if self._decoder is None:
            begun = start_generation_on_device(self._own_decoder(len(prompts)), prompts, max_new)
        else:
            begun = start_generation(self._decoder, prompts)
        emitted = generate_greedy(begun, max_new, self.loaded.end_token_ids, stopped)
        return [postprocess_generated_text(text(tokens), list(stops), None) for tokens in emitted]

    def _scorer(self) -> Callable[[Sequence[ForcedInput]], list[Answer]]:
        if self._decoder is None and is_replayable(self.point):
            return lambda batch: score_by_replay(self.stepper, self.point, batch)
        return lambda batch: score_by_decoding(self._decoder or self._own_decoder(len(batch)), batch)

    def _own_decoder(self, rows: int) -> WalkedDecoder:
        return WalkedDecoder(self.stepper, self.point, max_rows=rows)

    def _batches(self, items: Iterable[T], length_of: Callable[[T], int]) -> Iterator[list[T]]:
        """Batches in order of falling length, so that memory runs out in the first batch or never."""
        batch: list[T] = []
        for item in sorted(items, key=length_of, reverse=True):
            if batch and len(batch) == (self.batch_size or self._rows_of(length_of(batch[0]))):
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    def _rows_of(self, length: int) -> int:
        """Rows of ``length`` tokens per batch if no batch size is given."""
        rows = max(1, TOKENS_PER_BATCH // length)
        return rows if self._most_rows is None else min(rows, self._most_rows)

    def _bar(self, what: str, total: int, disable: bool) -> Any:
        named = f"{what} at {self.point.name}"
        return tqdm(total=total, desc=named, disable=disable, delay=QUIET_SECONDS, unit="req", file=self._progress)


def _sorted_groups(items: Sequence[T], key: Callable[[T], Any]) -> Iterator[tuple[Any, list[T]]]:
    for value, group in groupby(sorted(items, key=key), key=key):
        yield value, list(group)


# names that lm-eval's `--model_args` may use
ARGUMENTS = (
    "pretrained", "profile", "margin", "batch_size", "max_batch_size", "max_length", "add_bos_token", "device",
    "dtype", "revision",
)  # fmt: skip


def _argument_remedy(others: dict[str, Any]) -> str:
    """Remedy for arguments that only other models of lm-eval have."""
    if "trust_remote_code" in others:
        return "leave --trust_remote_code out: model families are walked by code of this package, never by theirs"
    return suggest_nearest(min(others), ARGUMENTS) or "leave the others out"


def _load_model(pretrained: str | LoadedModel, device: str, dtype: str | None, revision: str | None) -> LoadedModel:
    if isinstance(pretrained, LoadedModel):
        if dtype is not None or revision is not None:
            raise BadArgument("dtype, revision", (dtype, revision), "None for a loaded model", "pass them to load()")
        loaded = pretrained
    else:
        loaded = load(pretrained, device=device, dtype=_parse_dtype(dtype), revision=revision)
    if loaded.tokenizer is None or not loaded.end_token_ids:
        raise BadArgument(
            "pretrained",
            loaded.name,
            "a model with a tokenizer that has an end-of-text token",
            str(loaded.provenance.get("tokenizer_missing", "")),
        )
    return loaded


def _parse_dtype(name: str | None) -> torch.dtype | None:
    dtypes = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in dtypes:
        raise BadArgument("dtype", name, f"one of {', '.join(dtypes)}")
    return None if name is None else dtypes[name]


def _operating_point(
    loaded: LoadedModel, point: OperatingPoint | None, profile: str | Path | None, margin: float | None
) -> OperatingPoint:
    if point is not None and profile is not None:
        raise BadArgument("profile", str(profile), "None beside a point", "pass one of the two")
    if profile is None:
        if margin is not None:
            raise BadArgument("margin", margin, "a profile beside it", "pass profile=FILE, written by `emad calibrate`")
        return point or full_depth(loaded.geometry.layers)
    if margin is not None and not is_number(margin):
        raise BadArgument("margin", margin, "a number of nats", "pass margin=0.2, without a unit")
    loaded_profile = load_profile(Path(profile))
    loaded_profile.require(loaded.fingerprint, str(loaded.provenance["dtype"]))
    return loaded_profile.point(float(margin or 0.0))


def _parse_batch_size(batch_size: int | str | None) -> int | None:
    if batch_size is None or re.fullmatch(r"auto(:\d+)?", str(batch_size)):
        return None
    rows = int(batch_size) if str(batch_size).isdecimal() else 0
    if rows < 1:
        raise BadArgument("batch_size", batch_size, "a number of rows ≥ 1, or auto")
    return rows
