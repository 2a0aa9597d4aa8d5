"""The stand-in for vLLM: what it refuses, how it answers in batches, and how it merges the events of a stream."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from tests.decoders.engine_server import serve
from tests.decoders.vllm_server import BATCH, Model, VLLMServer, make_server

MODEL, WINDOW, NEW = "emad-nano", 512, 12
PROMPTS = [list(range(40, 40 + n)) for n in (30, 1, 7, 300, 2, 64)]
IDS = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


def ask(url: str, **fields: Any) -> tuple[int, Any]:
    """Return the status of a completion and its reply, or the events of its stream."""
    data = json.dumps({"prompt": PROMPTS[0]} | IDS | fields).encode()
    try:
        with urlopen(Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})) as reply:
            text = reply.read().decode()
    except HTTPError as error:
        return error.code, json.load(error)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return 200, [json.loads(each) for each in events if each != "[DONE]"] if events else json.loads(text)


def tokens_of(reply: Any) -> list[int]:
    events = reply if isinstance(reply, list) else [reply]
    return [token for each in events for choice in each["choices"] for token in choice["token_ids"]]


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {  # fields, and the field and the words of the error
    "hot": ({"temperature": 2.1}, "temperature", "must be in [0, 2], got 2.1"),
    "cold": ({"temperature": -0.1}, "temperature", "must be non-negative"),
    "a temperature in words": ({"temperature": "warm"}, "body.temperature", "a valid number"),
    "an unknown field": ({"warmth": 1}, "body.warmth", "not permitted"),
    "21 likeliest": ({"logprobs": 21}, "logprobs", "greater than max allowed: 20"),
    "21 likeliest of a prompt": ({"prompt_logprobs": 21}, "prompt_logprobs", "greater than max allowed: 20"),
    "fewer than all": ({"logprobs": -2}, "logprobs", "a positive value or -1"),
    "prompt log-probabilities of a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=True"),
    "options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options", "stream=True"),
    "top-k": ({"top_k": -2}, None, "at least 1, got -2"),
    "top-p": ({"top_p": 0.0}, "top_p", "must be in (0, 1]"),
    "min-p": ({"min_p": 2.0}, None, "must be in [0, 1]"),
    "two greedy choices": ({"n": 2}, None, "n must be 1 when using greedy sampling"),
    "no choice": ({"n": 0}, None, "at least 1, got 0"),
    "no new token": ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    "more new tokens than the window": ({"max_tokens": WINDOW + 1}, "max_tokens", "cannot be greater than"),
    "beyond the window": ({"prompt": [1] * (WINDOW - NEW + 1)}, "input_tokens", "maximum context length is 512"),
    "no prompt": ({"prompt": None}, "prompt", "must be provided"),
    "an empty prompt": ({"prompt": []}, None, "at least one prompt"),
    "one empty prompt": ({"prompt": [[]]}, None, "cannot be empty"),
    "an id beyond the vocabulary": ({"prompt": [512]}, None, "Token id 512 is out of vocabulary"),
    "a stop id beyond it": ({"stop_token_ids": [512]}, "stop_token_ids", "out-of-vocab"),
    "a seed of 65 bits": ({"seed": -(2**63) - 1}, "body.seed", "Input should be"),
    "a penalty": ({"presence_penalty": 3.0}, None, "must be in [-2, 2]"),
    "another penalty": ({"repetition_penalty": 0.0}, None, "greater than zero"),
}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(MODEL)


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses_what_vllm_refuses(model: Model, case: str) -> None:
    fields, param, words = REFUSED[case]
    with serve(VLLMServer(model, WINDOW)) as url:
        status, reply = ask(url, **fields)
    assert status == 400, reply
    assert reply["error"]["code"] == 400
    assert reply["error"]["param"] == param
    assert words in reply["error"]["message"]


def test_without_strict_it_ignores_unknown_fields_and_fills_the_window(model: Model) -> None:
    with serve(VLLMServer(model, WINDOW, strict=False)) as url:
        assert ask(url, warmth=1)[0] == 200
        status, reply = ask(url, prompt=[1] * (WINDOW - 2))
    assert status == 200
    assert len(tokens_of(reply)) == 2


def test_another_model_is_not_found(model: Model) -> None:
    with serve(VLLMServer(model, WINDOW)) as url:
        assert ask(url, model="other")[0] == 404


@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_a_batch_are_those_of_the_models_own_generate(model: Model, stream: bool) -> None:
    with serve(server := VLLMServer(model, WINDOW)) as url, ThreadPoolExecutor(len(PROMPTS)) as pool:
        replies = list(pool.map(lambda prompt: ask(url, prompt=prompt, stream=stream)[1], PROMPTS))
        _, together = ask(url, prompt=PROMPTS)
    assert 1 < max(server.sizes) <= BATCH, "no two requests shared a batch"
    told = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        own = [model.module.generate(torch.tensor([each]), **told)[0, len(each) :].tolist() for each in PROMPTS]
    assert [tokens_of(reply) for reply in replies] == own
    assert [choice["token_ids"] for choice in together["choices"]] == own
    assert together["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))


def test_a_stream_that_lags_sends_several_tokens_in_one_event(model: Model) -> None:
    with serve(VLLMServer(model, WINDOW)) as url:
        first, second = (ask(url, stream=True, stream_options={"include_usage": True})[1] for _ in range(2))
    assert len(first) == 2, "all tokens, then the usage"
    assert len(second) > 2
    assert tokens_of(first) == tokens_of(second)
    text = ["".join(choice["text"] for each in events for choice in each["choices"]) for events in (first, second)]
    assert text[0] == text[1]
    assert first[-1]["usage"] == second[-1]["usage"] == {
        "prompt_tokens": 30, "completion_tokens": NEW, "total_tokens": 30 + NEW, "prompt_tokens_details": None,
    }  # fmt: skip


def test_a_seed_repeats_its_draws_and_another_one_does_not(model: Model) -> None:
    with serve(VLLMServer(model, WINDOW)) as url:
        one, again, other = (tokens_of(ask(url, temperature=2.0, seed=seed)[1]) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_stop_ids_and_the_models_end_of_text_end_a_row(model: Model) -> None:
    with serve(VLLMServer(model, WINDOW)) as url:
        whole = tokens_of(ask(url)[1])
        stop = next(token for token in whole[1:] if token != whole[0])
        choice = ask(url, stop_token_ids=[stop])[1]["choices"][0]
        model.end = frozenset({stop})
        try:
            ended, ignored = (ask(url, ignore_eos=ignores)[1]["choices"][0] for ignores in (False, True))
        finally:
            model.end = frozenset({0})
    assert choice["token_ids"] == ended["token_ids"] == whole[: whole.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
    assert ignored["token_ids"] == whole


def test_log_probabilities_are_those_of_the_module(model: Model) -> None:
    """Of new tokens and of a prompt, asked for by name and by ``echo``."""
    by_id = {"logprobs": 3, "return_tokens_as_token_ids": True}
    with serve(VLLMServer(model, WINDOW)) as url:
        named = ask(url, prompt_logprobs=1, **by_id)[1]["choices"][0]
        echoed = ask(url, echo=True, **by_id)[1]["choices"][0]
    history = torch.tensor([*PROMPTS[0], *named["token_ids"]])
    with torch.inference_mode():
        log_p = model.module(history[None]).logits[0].log_softmax(-1)
    own = log_p[:-1].gather(1, history[1:, None])[:, 0]
    told = [
        each[str(token)]["logprob"] for each, token in zip(named["prompt_logprobs"][1:], PROMPTS[0][1:], strict=True)
    ]
    told += named["logprobs"]["token_logprobs"]
    torch.testing.assert_close(torch.tensor(told), own, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(echoed["logprobs"]["token_logprobs"][1:]), own, atol=1e-4, rtol=0)
    assert all(3 <= len(each) <= 4 for each in named["logprobs"]["top_logprobs"])
    assert echoed["logprobs"]["tokens"][:2] == ["token_id:40", "token_id:41"]


def test_in_bfloat16_it_rounds() -> None:
    with serve(make_server(MODEL, WINDOW)) as url, serve(make_server(MODEL, WINDOW, dtype=torch.bfloat16)) as other:
        exact, rounded = (
            ask(each, logprobs=1)[1]["choices"][0]["logprobs"]["token_logprobs"][0] for each in (url, other)
        )
    assert 1e-6 < abs(exact - rounded) < 0.3
