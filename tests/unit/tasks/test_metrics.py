"""HumanEval is read, cut and scored as published; a program passes only if its check reaches the last assert."""

from __future__ import annotations

from functools import partial

import pytest

from pytest_emad.tasks import metrics
from pytest_emad.tasks.metrics import (
    compute_humaneval_metrics,
    humaneval_check_script,
    join_humaneval_prompt_completion,
    truncate_completion,
)
from pytest_emad.tasks.sandbox import FunctionCheckScript, absent_sandbox, check_program

ADD = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a: int, b: int) -> int:\n    """Sum of both.\u2028\n    >>> add(1, 2)\n    3\n    """\n',
    "canonical_solution": "    return a + b\n",
    "test": "\n\nMETA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert not candidate(0, 0)\n",
    "entry_point": "add",
}
TWICE = {
    "task_id": "HumanEval/1",
    "prompt": 'from typing import List\n\n\ndef twice(items: List[int]) -> List[int]:\n    """All of it twice."""\n',
    "canonical_solution": "    return items * 2\n",
    "test": "def check(candidate):\n    assert candidate([1]) == [1, 1]\n",
    "entry_point": "twice",
}


@pytest.fixture(scope="module")
def execution():
    """Return how programs run here: no attack reaches beyond its own processes, so they may run unconfined."""
    return "unconfined" if absent_sandbox() else "confined"


def outcome_of(doc, completion, execution, seconds):
    program = join_humaneval_prompt_completion(doc, completion)
    return check_program(humaneval_check_script(doc), program, execution=execution, seconds=seconds).outcome


@pytest.mark.parametrize("stop", ["\nclass", "\ndef", "\n#", "\nif", "\nprint"])
def test_a_completion_is_cut_at_what_follows_the_function(stop):
    assert truncate_completion(f"    return 1\n{stop} more\n{stop}") == "    return 1\n"


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "    return 1\n",
        "    if a:\n        print(1)  # one\n    return a\n",
        "def at_the_start(): ...",
        "\nclas",
        "\n",
    ],
)
def test_a_completion_without_a_stop_stays_whole(completion):
    assert truncate_completion(completion) == completion


def test_the_earliest_of_several_stops_cuts():
    assert truncate_completion("    return 1\nprint(2)\n# three\ndef four(): ...") == "    return 1"


def test_program_and_check_are_texts_of_their_own():
    completion = TWICE["canonical_solution"] + "\nprint(twice([1]))"
    assert join_humaneval_prompt_completion(TWICE, completion) == TWICE["prompt"] + TWICE["canonical_solution"] + "\n"
    assert humaneval_check_script(TWICE) == FunctionCheckScript(
        "twice", TWICE["prompt"], TWICE["test"] + "\ncheck(twice)\n"
    )


def test_a_prompt_that_ends_at_a_colon_is_completed_by_its_own_solution():
    bare = TWICE | {"prompt": "def helper(a): return a\n\ndef twice(items):\n"}
    assert humaneval_check_script(bare).definitions == bare["prompt"] + bare["canonical_solution"]


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [
        (ADD["canonical_solution"], "passed"),
        (ADD["canonical_solution"] + "\nprint(add(1, 2))\nraise ValueError", "passed"),  # cut before it runs
        ("    return a - b\n", "failed"),
        ("    return a +\n", "failed"),
        ("    raise SystemExit\n", "failed"),
        ("    import os; os._exit(0)\n", "failed"),
        ("", "failed"),
        ("    while True: pass\n", "timeout"),
    ],
)
def test_right_wrong_and_evasive_completions_are_told_apart(execution, completion, outcome, monkeypatch):
    assert outcome_of(ADD, completion, execution, 1.0 if outcome == "timeout" else 60.0) == outcome
    if outcome == "passed":
        monkeypatch.setattr(metrics, "check_program", partial(check_program, seconds=60.0))
        assert compute_humaneval_metrics(ADD, [completion], execution=execution) == {
            "pass@1": 1.0,
            "timeout": 0.0,
            "memory": 0.0,
            "killed": 0.0,
        }


# --- programs that forge a pass -----------------------------------------------------------------------------------

FORGE = """
import ctypes, gc, os, stat, sys
def is_pipe(fd):
    try: return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError: return False
def say(text):
    for fd in filter(is_pipe, range(3, 64)): os.write(fd, text)
def forge(*_):
    frame = sys._getframe()
    while frame:
        names = frame.f_globals
        names.update({name: lambda *_: None for name in ("check", "candidate", "_exit", "_check") if name in names})
        frame = frame.f_back
    say(b'["value", 3]\\n')
    os._exit(ENDED)
"""
ANSWERS = {  # results that claim to equal everything
    "object": "type('A', (), {'__eq__': lambda *_: True, '__hash__': None})()",
    "int": "type('A', (int,), {'__eq__': lambda *_: True, '__ne__': lambda *_: False})()",
    "str": "type('A', (str,), {'__eq__': lambda *_: True, '__hash__': str.__hash__})()",
    "list": "type('A', (list,), {'__eq__': lambda *_: True})()",
    "bool": "type('A', (), {'__eq__': lambda a, b: type('B', (), {'__bool__': lambda _: True})()})()",
    "reflected": "type('A', (int,), {'__eq__': lambda *_: True, '__rsub__': lambda *_: 3})(7)",
    "generator": "(i for i in iter(int, 1))",
    "nan": "float('nan')",
    "function": "add",
    "instance of everything": "type('A', (), {'__class__': property(lambda _: int), '__eq__': lambda *_: True})()",
    "huge": "'x' * (20 << 20)",
    "deep": "__import__('functools').reduce(lambda a, _: [a], range(100_000), 3)",
}
LEAVING = {  # of the call itself
    "os._exit 0": "__import__('os')._exit(0)",
    "os._exit 93": "__import__('os')._exit(93)",
    "sys.exit": "__import__('sys').exit(93)",
    "SystemExit with a truth": "(_ for _ in ()).throw(SystemExit(None))",
    "KeyboardInterrupt": "(_ for _ in ()).throw(KeyboardInterrupt)",
    "GeneratorExit": "(_ for _ in ()).throw(GeneratorExit)",
    "C exit": "__import__('ctypes').CDLL(None).exit(93)",
    "abort": "__import__('os').abort()",
    "exec": "__import__('os').execv(__import__('sys').executable, ['python', '-c', 'raise SystemExit(93)'])",
    "fork": "__import__('os').fork()",
    "kill": "__import__('os').killpg(0, 9)",
}
AFTERWARDS = {  # code that runs after the failed check, or around it
    "excepthook": "sys.excepthook = forge",
    "excepthook of the interpreter": "sys.__excepthook__ = sys.excepthook = forge",
    "unraisable hook": "sys.unraisablehook = forge\nclass A:\n    def __del__(self): 1 / 0\nkept = A()",
    "atexit": "import atexit; atexit.register(forge)",
    "exit functions": "import atexit; atexit.register(os._exit, 93); atexit._run_exitfuncs = forge",
    "finalize": "import weakref; kept = type('A', (), {})(); weakref.finalize(kept, forge)",
    "__del__": "class A: __del__ = forge\nkept = A()",
    "garbage": "gc.callbacks.append(forge); gc.set_threshold(1)",
    "stderr": "class A:\n    write = flush = forge\nsys.stderr = sys.__stderr__ = A()",
    "stdout": "class A:\n    write = flush = forge\nsys.stdout = sys.__stdout__ = A()",
    "threading": "import threading; threading._shutdown = forge",
    "trace": "sys.settrace(lambda frame, event, _: forge() if event == 'exception' else None)",
    "trace that skips": (
        "def skip(frame, event, _):\n"
        "    if frame.f_code.co_name == 'check' and event == 'line':\n"
        "        try: frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)\n"
        "        except ValueError: pass\n"
        "    return skip\n"
        "sys.settrace(skip)\nf = sys._getframe()\n"
        "while f: f.f_trace = skip; f = f.f_back"
    ),
    "profile": "sys.setprofile(lambda frame, event, _: forge() if frame.f_code.co_name == 'check' else None)",
    "audit": "sys.addaudithook(lambda event, _: forge() if event == 'sys.excepthook' else None)",
    "signal": "import signal; signal.signal(signal.SIGALRM, forge); signal.setitimer(signal.ITIMER_REAL, 0.001)",
    "AssertionError": "import builtins; builtins.AssertionError = type('A', (SystemExit,), {})",
    "exit": "import builtins; builtins.exit = builtins.quit = sys.exit = forge",
    "exec and compile": "import builtins; builtins.exec = builtins.compile = forge",
    "imports": "import builtins; builtins.__import__ = lambda *_, **__: forge()",
    "finders": "sys.modules.update(traceback=None); sys.meta_path[:] = [type('A', (), {'find_spec': forge})]",
    "modules": "import types; sys.modules.update(__main__=types.SimpleNamespace(check=print, add=forge))",
    "json": "import json; json.dumps = lambda *_, **__: '[\"value\", 3]'; json.loads = lambda *_: [[], {}]",
    "writers": "import io; [o.write(b'[1]\\n') for o in gc.get_objects() if isinstance(o, io.BufferedWriter)]",
    "answers in advance": "say(b'[\"value\", 3]\\n' * 9)",
    "descriptors": "[os.dup2(os.open('/dev/null', os.O_RDWR), fd) for fd in range(64)]",
    "os._exit": "leave = os._exit; os._exit = lambda _: leave(93); 1 / 0",
    "frames": "forge()",
    "equality of int": "ctypes.memset(id(3) + 24, 255, 4)",  # this interpreter's only 3 now has another value
}


def hostile(expression, afterwards="", code=93):
    """Return a wrong ``add`` with the result ``expression``; ``afterwards`` runs when the program is loaded."""
    compile(afterwards, "afterwards", "exec")  # a syntax error would not be an attack
    loaded = f"exec({FORGE.replace('ENDED', str(code)) + afterwards!r})\n" if afterwards else ""
    return f"    return {expression}\n\n{loaded}"


HOSTILE = {f"result: {name}": hostile(result) for name, result in ANSWERS.items()}
HOSTILE |= {f"leaving: {name}": hostile(result) for name, result in LEAVING.items()}
HOSTILE |= {f"afterwards: {name}": hostile("a - b", code) for name, code in AFTERWARDS.items()}
HOSTILE |= {
    "__str__": hostile("(_ for _ in ()).throw(type('E', (Exception,), {'__str__': forge})())", "pass", 0),
    "__repr__": hostile("(_ for _ in ()).throw(type('E', (Exception,), {'__repr__': forge})(1))", "pass", 0),
    "excepthook that leaves with 0": hostile("a - b", AFTERWARDS["excepthook of the interpreter"], 0),
    "its caller's names": hostile("__import__('sys')._getframe(1).f_globals.update(check=print, add=print)"),
    "its caller's code": hostile("__import__('sys')._getframe(1).f_locals.update(candidate=print)"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_program_forges_a_pass(execution, name):
    assert outcome_of(ADD, HOSTILE[name], execution, 3.0) != "passed"
