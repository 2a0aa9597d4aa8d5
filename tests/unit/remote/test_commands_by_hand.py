"""A fault of a server ends as a short history whose printed commands, sent by hand, show the fault."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any
from urllib.request import Request as Message
from urllib.request import urlopen

import pytest

from pytest_emad.cli.replay import describe_failing_input
from tests.decoders.audited_model import lens_of, spread_point, tiny_neox
from tests.decoders.covering_cases import WINDOW, check_small_cases
from tests.decoders.engine_server import Complete, Engine, serve
from tests.unit.remote.test_inference_server import TOLERANCE, complete, first_stop_alone, opened

MOST_STEPS = 6


def lose_entry(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
    """The K/V entry of the sixth token is that of token 0."""
    return complete([*prompt[:5], 0, *prompt[6:]] if len(prompt) > 6 else prompt, *rest)


def cut_at_window_end(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
    """Of a prompt the last tokens are read, four fewer than the window has."""
    return complete(prompt[-(WINDOW - 4) :], *rest)


def keep_beginnings() -> Complete:
    """A prefix cache finds prompts by their length and first four tokens."""
    kept: dict[tuple[int, ...], list[int]] = {}

    def answer(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
        return complete(kept.setdefault((len(prompt), *prompt[:4]), prompt), *rest)

    return answer


FAULTS: dict[str, tuple[Callable[[], Complete], dict[str, tuple[str, ...]]]] = {
    "K/V cache": (lambda: lose_entry, {}),
    "stop set": (lambda: first_stop_alone, {"stops": ("none", "21")}),
    "prefix cache": (keep_beginnings, {"prompt": ("within a block", "prefix"), "rows": ("1", "2")}),
    "window's end": (
        lambda: cut_at_window_end,
        {"prompt": ("within a block", "window"), "place": ("start", "window's end"), "new": ("8", "1")},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_printed_commands_show_the_fault(fault: str) -> None:
    make, values = FAULTS[fault]
    asked = {"point": ("full",), "neighbours": ("none",), "arrays": ("kept",), **values}
    with serve(engine := Engine(make(), window=WINDOW)) as url:
        finding = check_small_cases(
            "requests", lambda point: opened(url), lens_of(tiny_neox()), spread_point(), TOLERANCE, **asked
        )
        assert finding.passed is False
        assert finding.sample is not None
        assert len(finding.sample["steps"]) <= MOST_STEPS, finding.detail
        by_hand = finding.detail.partition(". By hand: ")[2].partition(" (")[0].split("; ")
        commands = [line.strip() for line in describe_failing_input(finding.sample) if " curl -s http" in line]
        assert set(by_hand) <= set(commands), "emad replay prints them all"
        assert any(is_wrong(engine, command) for command in by_hand), finding.detail


def is_wrong(engine: Engine, command: str) -> bool:
    """Send a ``command`` as a shell would by curl; return whether the model's own answer is another."""
    program, _, url, _, header, _, data = shlex.split(command)
    assert program == "curl"
    name, _, value = header.partition(": ")
    with urlopen(Message(url, data.encode(), {name: value})) as reply:
        (choice,) = json.load(reply)["choices"]
    body = engine.bodies[-1]
    assert body == json.loads(data), "the server got what was printed"
    stop = frozenset(body["stop_token_ids"])
    right, _ = complete(body["prompt"], body["max_tokens"], stop, body["temperature"], body["seed"])
    return bool(choice["token_ids"] != right)
