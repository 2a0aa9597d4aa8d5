"""Decoders in another process under the suites: an honest one passes, one that dies fails the tests that called it."""

from __future__ import annotations

import re
import sys

import pytest

from tests.suites.conftest import Run, text_of

# greets, opens a decoder, and dies at the third call; it imports the standard library alone
DYING = """
import json, os, sys

def request():
    head = sys.stdin.buffer.read(16)
    if not head:
        sys.exit(0)
    sizes = int.from_bytes(head[4:8], "little"), int.from_bytes(head[8:], "little")
    header, _ = (sys.stdin.buffer.read(size) for size in sizes)
    return json.loads(header)

def reply(**header):
    text = json.dumps({**header, "arrays": []}).encode()
    os.write(1, b"EMW1" + len(text).to_bytes(4, "little") + bytes(8) + text)

open("started", "a").write("once ")
request()
reply(reply="hello", wire=1, name="dying")
request()
capabilities = {"max_feed": 1, "schedules": ["monotone"], "counted": False, "logit_noise": 0, "deepens": False}
reply(reply="open", decoder=1, capabilities=capabilities)
request()
print("the third call is one too many", file=sys.stderr)
os._exit(7)
"""
ASKING = """
def ask(evidence):
    subject = evidence.subject
    with subject.open_decoder(subject.full_depth_point) as decoder:
        decoder.start(subject.make_equal_prompts(1, 4))

def test_that_asks_nothing():
    pass

def test_that_asks(emad_evidence):
    ask(emad_evidence)

def test_of_the_model_alone(emad_evidence):
    assert emad_evidence.subject.full_depth_point.layers == 4

def test_that_asks_again(emad_evidence):
    ask(emad_evidence)
"""


@pytest.mark.slow
def test_the_reference_decoder_behind_a_pipe_passes_a_suite(judge: Run) -> None:
    decoder = f"exec:{sys.executable} -m pytest_emad serve emad-tiny"
    result = judge("invariants/test_depth.py", "invariants/test_session_machine.py", model="emad-tiny", decoder=decoder)
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    result.assert_outcomes(passed=3)
    assert f"; decoder {decoder}" in text_of(result)


def test_a_program_that_dies_fails_exactly_the_tests_that_asked_it(
    pytester: pytest.Pytester, judge: Run, tiny: object
) -> None:
    pytester.makepyfile(test_asking=ASKING)
    (pytester.path / "dying.py").write_text(DYING)
    result = judge(more=("test_asking.py", "-rA"), model=tiny, decoder=f"exec:{sys.executable} -S dying.py")
    result.assert_outcomes(passed=2, failed=2)
    text = text_of(result)
    for name in ("test_that_asks", "test_that_asks_again"):
        assert re.search(rf"^FAILED \S+::{name}\[", text, re.MULTILINE)
    said = f"decoder=exec:{sys.executable} -S dying.py: call 'start': no reply: it ended with status 7"
    assert text.count(f"DecoderFailed: {said}") >= 2
    assert text.count("\n  the third call is one too many\n") == 2
    assert "Traceback" not in text
    assert (pytester.path / "started").read_text() == "once once "
