"""The judge decides about an untrusted program; bubblewrap and limits keep a hostile one from doing harm."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from textwrap import indent

import pytest

from emad_ref.errors import BadArgument
from pytest_emad.tasks import sandbox, sandbox_protocol
from pytest_emad.tasks.sandbox import (
    FunctionCheckScript,
    SandboxUnavailable,
    absent_sandbox,
    check_program,
)

LONG_S = 60.0  # for what ends by itself, also on a loaded machine
NUMBERS = count()


@pytest.fixture(params=sandbox.CODE_EXECUTION)
def execution(request):
    """Give each way to run a program that works on this machine."""
    if request.param == "confined" and (absent := absent_sandbox()):
        pytest.skip(absent.reason)
    return request.param


@pytest.fixture
def confined():
    if absent := absent_sandbox():
        pytest.skip(absent.reason)
    return "confined"


def check(execution, program, text="assert f(1) == 2", definitions="", seconds=LONG_S):
    """Check a program with a function ``f`` that should add one, or with another check."""
    task = FunctionCheckScript("f", definitions, text)
    return check_program(task, program, execution=execution, seconds=seconds)


def returned(execution, source, expected):
    """Whether the body ``source`` of a function returns ``expected``; the result's message has what it returned."""
    program = f"def f():\n{indent(source.strip(), '    ')}\n"
    return check(execution, program, f"value = f()\nassert value == {expected!r}, value")


def unique_name():
    """A function name that is on the command lines of one check only."""
    return f"f_{os.getpid()}_{next(NUMBERS)}"


def with_name(name: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if name.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def is_gone(name: str, seconds: float = LONG_S) -> bool:
    """Return whether no process has ``name`` on its command line; the kernel may take a moment after a kill."""
    deadline = time.monotonic() + seconds
    while with_name(name) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not with_name(name)


# --- the verdict ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("def f(a): return a + 1", "passed"),
        ("def f(a): return a", "failed"),
        ("def f(a): return 1 / 0", "failed"),
        ("def g(a): return a + 1", "failed"),
        ("def f(a", "failed"),
        ("x = '\0'", "failed"),
        ("x = '\ud800'", "failed"),
        ("input()", "failed"),
        ("raise SystemExit", "failed"),
        ("import os; os._exit(0)", "failed"),
        ("print('passed')", "failed"),
        ("def f(a):\n    import sys\n    sys.exit(0)", "failed"),
        ("def f(a):\n    import os\n    os._exit(93)", "failed"),
        ("def f(a): return bytearray(1 << 40)", "memory"),
        ("held = [0] * (1 << 40)\ndef f(a): return 2", "memory"),
        ("def f(a):\n    import os\n    os.kill(os.getpid(), 11)", "killed"),
    ],
)
def test_outcome_names_how_a_program_ended(execution, program, outcome):
    result = check(execution, program)
    assert result.outcome == outcome, result


def test_the_message_has_the_programs_traceback_and_the_checks(execution):
    result = check(execution, "import sys\nsys.stderr.write('err\\n')\ndef f(a): return a")
    assert result.message.startswith("err\n")
    assert result.message.endswith("AssertionError\n")
    assert 'File "<program>", line 2' in check(execution, "\n1 / 0").message


def test_a_check_that_leaves_early_does_not_pass(execution):
    """Only its last line does."""
    assert check(execution, "def f(a): return a + 1", "raise SystemExit").outcome == "failed"
    with pytest.raises(SandboxUnavailable, match="gave no verdict: exit code 0"):
        check(execution, "def f(a): return a + 1", "import os; os._exit(0)")


@pytest.mark.parametrize(
    "preparation",
    [
        "import sys; sys.stdout.close()",
        "import os; os.close(0); os.close(1); os.close(2)",
        "import sys; sys.stdout = sys.stderr = object()",
        "import atexit; atexit.register(lambda: 1 / 0)",
        "import sys; sys.setrecursionlimit(10_000); sys.settrace(lambda *_: None)",
        "print('x' * 30_000_000)",
        "assert __name__ == '__main__'\nimport sys\nassert sys.modules['__main__'].__dict__ is globals()",
        "import collections, ctypes, decimal, hashlib, json, re, typing, zlib",
    ],
)
def test_a_right_program_passes_whatever_it_does_besides(execution, preparation):
    result = check(execution, f"{preparation}\ndef f(a): return a + 1")
    assert result.outcome == "passed", result


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("def f(a, *, b): return {a: [b]}", "assert f(1, b=(2,)) == {1: [(2,)]}"),
        ("def f(a): a.append(1); return a", "x = [0]\nassert f(x) == [0, 1]\nassert x == [0]"),  # by value
        ("def f(a): yield from a", "assert tuple(f([1, 2])) == (1, 2)\nassert f([1]) != [1]"),
        ("def f(a): return f", "assert f(1) != f\nassert f(1)"),
        (
            "def f(a): return int(a)",
            "try: f('x')\nexcept ValueError as error: assert 'invalid literal' in str(error)\nelse: assert 0",
        ),
        (
            "def f(a):\n    class Own(KeyError): pass\n    raise Own('x')",
            "try: f(1)\nexcept KeyError as error: assert error.args == ('x',)\nelse: assert 0",
        ),
        ("def f(a): return b'\\xff'.decode()", "try: f(1)\nexcept UnicodeDecodeError: pass\nelse: assert 0"),
        ("def f(a): return helper(a)\ndef helper(a): return -a", "assert f(2) == -helper(2)"),
        ("from collections import Counter as f", "assert f('aab') == {'a': 2, 'b': 1}"),
    ],
)
def test_a_check_sees_values_and_exceptions_as_if_it_called_the_function_itself(execution, program, text):
    result = check(execution, program, text, definitions="def helper(a): return a\ndef f(a): return None")
    assert result.outcome == "passed", result


def test_an_exception_that_a_check_expects_is_not_forged_by_leaving(execution):
    text = "try: f(1)\nexcept BaseException: pass\nelse: assert 0"
    assert check(execution, "def f(a): raise ValueError", text).outcome == "passed"
    assert check(execution, "import os\ndef f(a): os._exit(0)", text).outcome == "failed"
    assert check(execution, "def f(a): raise SystemExit", text).outcome == "failed"


@pytest.mark.parametrize("raised", ["StopIteration", "StopIteration(2)", "type('Mine', (StopIteration,), {})"])
def test_an_exception_of_the_program_does_not_end_a_loop_of_the_check(execution, raised):
    result = check(execution, f"def f(a): raise {raised}", "assert all(map(f, [1, 2]))")
    assert result.outcome == "failed"
    assert "RuntimeError: f raised StopIteration" in result.message


def test_an_exception_that_cannot_be_printed_fails_the_program_alone(execution):
    """The judge still gives its verdict."""
    result = check(execution, "def f(a): raise SyntaxError('x', ({}, 'no number', [], {}))")
    assert result.outcome == "failed", result


def test_a_check_whose_calls_cannot_be_sent_is_refused(execution):
    with pytest.raises(BadArgument, match="check='f is called with something that is no plain value'"):
        check(execution, "def f(a): return a", "f(lambda: 0)")


@pytest.mark.parametrize("given", ["f(1)", "[f(1)]", "{'a': (f(1),)}"])
def test_an_object_that_comes_back_to_the_program_fails_the_program_and_not_the_check(execution, given):
    result = check(execution, "def f(a): return object()", f"try: f({given})\nexcept TypeError: pass")
    assert result.outcome == "failed"
    assert "f is called with an object that it returned before, which is no plain value" in result.message


def test_the_order_of_a_set_is_the_same_in_every_run(execution):
    text = "raise ValueError([*{str(n) for n in range(50)}])"
    assert check(execution, "def f(a): ...", text).message == check(execution, "def f(a): ...", text).message


def test_programs_that_run_at_the_same_time_keep_apart(execution):
    def writes(n):
        return returned(execution, f"open('same', 'x').write('{n}'); return open('same').read()", str(n)).outcome

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(writes, range(4))] == ["passed"] * 4


# --- time, memory, files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "def f(a):\n    while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor s in {1, 2, 3, 10, 14, 15, 24}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os\nos.closerange(0, 100)\nwhile True: pass",
        "while True: print('x' * 10_000)",
    ],
)
def test_a_program_that_never_ends_is_stopped_on_time(execution, program):
    name, began = unique_name(), time.monotonic()
    task = FunctionCheckScript(name, "", f"{name}(1)")
    result = check_program(task, program.replace("def f", f"def {name}"), execution=execution, seconds=1.0)
    assert result.outcome == "timeout", result
    assert time.monotonic() - began < LONG_S
    assert is_gone(name)


def test_the_whole_tree_of_a_program_is_stopped():
    if os.geteuid():
        pytest.skip("only root's unconfined programs can start processes: the limit of one holds for all others")
    name = unique_name()
    program = f"""
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        os.execv({sys.executable!r}, ["python", "-c", "import time; time.sleep(1000)", {name!r}])
open("started", "w")
time.sleep(1000)
"""
    task = FunctionCheckScript("f", "", "f(1)")
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(check_program, task, program, execution="unconfined", seconds=5.0)
        while len(with_name(name)) < 3 and not result.done():
            time.sleep(0.02)
        assert with_name(name), "no process was started in five seconds"
        assert result.result().outcome == "timeout"
    assert is_gone(name)


@pytest.mark.parametrize(
    "program", ["import time; time.sleep(1000)", "import signal; signal.alarm(0)\nwhile True: pass"]
)
def test_a_program_ends_after_the_process_that_started_it(execution, program, tmp_path):
    """Bubblewrap ends it at once; an unconfined one meets its limit of time or of CPU time."""
    name = unique_name()
    # the two interpreters, confined each below two processes of bubblewrap
    processes, seconds = {"unconfined": (2, 3.0), "confined": (6, 10 * LONG_S)}[execution]
    source = (
        "from pytest_emad.tasks.sandbox import *\n"
        f"check_program(FunctionCheckScript({name!r}, '', ''), {program!r}, execution={execution!r}, seconds={seconds})"
    )
    # the killed parent cannot remove its folder
    parent = subprocess.Popen([sys.executable, "-c", source], env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        while len(with_name(name)) < processes and parent.poll() is None:
            time.sleep(0.02)
        assert with_name(name)
    finally:
        parent.kill()
        parent.wait()
    assert is_gone(name)


@pytest.mark.parametrize(
    "source",
    ["held = []\nwhile True: held.append(bytes(1 << 20))", "x = 'x'\nwhile True: x += x", "return [0] * (1 << 40)"],
)
def test_a_memory_bomb_ends_itself(execution, source):
    assert returned(execution, source, None).outcome == "memory"


def test_a_huge_file_is_refused(execution):
    for write in ("file.truncate(1 << 40)", "[file.write(bytes(1 << 20)) for _ in range(100)]"):
        source = f"""
try:
    with open("huge", "wb", buffering=0) as file: {write}
except OSError as error: return error.errno
"""
        result = returned(execution, source, errno.EFBIG)
        assert result.outcome == "passed", result


def test_many_files_fill_a_small_folder(confined):
    source = f"""
written = 0
try:
    for number in range(1000):
        with open(str(number), "wb", buffering=0) as file:
            for _ in range(7): written += file.write(bytes(1 << 20))
except OSError as error:
    return error.errno, written <= {sandbox.SCRATCH_BYTES}
"""
    result = returned(confined, source, (errno.ENOSPC, True))
    assert result.outcome == "passed", result


def test_the_message_is_short_however_much_a_program_writes(execution):
    result = check(execution, "import sys\nwhile True: sys.stderr.write('x' * 10_000)")
    assert result.outcome == "failed"
    assert len(result.message) <= 2 * sandbox.MESSAGE_BYTES


# --- what a program can see and reach ---------------------------------------------------------------------------------


def test_a_program_has_one_process_with_one_thread(execution):
    """A fork bomb does not get to its first fork."""
    if execution == "unconfined" and os.geteuid() == 0:
        pytest.skip("the kernel does not hold root's processes to RLIMIT_NPROC")
    source = """
import os, subprocess, threading
def refused(attempt):
    try: attempt()
    except (OSError, RuntimeError): return True
    return False
attempts = [
    os.fork,
    lambda: subprocess.Popen([os.sys.executable]),
    threading.Thread(target=print).start,
    lambda: os.posix_spawn(os.sys.executable, ["python"], {}),
]
return [refused(attempt) for attempt in attempts]
"""
    result = returned(execution, source, [True] * 4)
    assert result.outcome == "passed", result
    assert check(execution, "import os\nwhile True: os.fork()").outcome == "failed"


def test_the_callers_environment_is_not_to_be_seen(execution, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "a-secret")
    source = "import os; return sorted({*os.environ} - {'PWD', 'LC_CTYPE'})"
    result = returned(execution, source, ["HOME", "PYTHONHASHSEED", "TMPDIR"])
    assert result.outcome == "passed", result


def test_installed_packages_are_not_to_be_seen(execution):
    source = "import importlib.util as u; return [n for n in ('numpy', 'pytest', 'emad_ref', 'pip') if u.find_spec(n)]"
    result = returned(execution, source, [])
    assert result.outcome == "passed", result


def test_open_files_of_the_caller_do_not_come_along(execution, tmp_path):
    """Besides its streams a program has the two pipes."""
    (tmp_path / "secret").write_text("a-secret")
    source = """
import os
found = 0
for fd in range(3, 64):
    try: found += bool(os.fstat(fd))
    except OSError: pass
return found
"""
    with (tmp_path / "secret").open() as file:
        os.set_inheritable(file.fileno(), True)
        result = returned(execution, source, 2)
    assert result.outcome == "passed", result


def test_files_of_the_caller_are_not_to_be_seen(confined, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-secret")
    secret.chmod(0o644)
    ours = [secret, tmp_path, Path(__file__), Path(sandbox.__file__), Path.cwd(), Path.home() / ".profile"]
    paths = [*map(str, ours), "/etc/passwd", "/proc/self/environ", "/proc", "/sys", "/var", "/usr/bin/env"]
    source = f"import os\nreturn [path for path in {paths!r} if os.path.exists(path)]"
    result = returned(confined, source, [])
    assert result.outcome == "passed", result


def test_only_the_scratch_folder_can_be_written_to(confined, tmp_path):
    tmp_path.chmod(0o777)
    folders = ["/made", "/usr/lib/made", "/dev/made", f"{os.path.dirname(os.__file__)}/made.py"]
    others = [os.__file__, "/var/made", "/etc/ld.so.cache", "/sandbox_protocol.py", str(tmp_path / "made")]
    source = f"""
import errno, os, tempfile
def refusal(path):
    try: open(path, "a").write("text")
    except OSError as error: return errno.errorcode[error.errno]
assert os.getcwd() == os.path.expanduser("~") == tempfile.gettempdir()
with tempfile.NamedTemporaryFile() as file: file.write(b"text")
open("file", "w").write("text")
return [refusal(path) for path in {folders!r}], [refusal(path) is not None for path in {others!r}], os.listdir()
"""
    result = returned(confined, source, (["EROFS"] * 4, [True] * 5, ["file"]))
    assert result.outcome == "passed", result
    assert not (tmp_path / "made").exists()
    assert not Path(sandbox.SCRATCH, "file").exists()


def test_there_is_no_network(confined):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = f"""
import socket
failed = 0
for address in (("127.0.0.1", {listener.getsockname()[1]}), ("192.0.2.1", 80)):
    try: socket.create_connection(address, timeout=5)
    except OSError: failed += 1
return failed, socket.if_nameindex()
"""
        result = returned(confined, source, (2, [(1, "lo")]))
        assert result.outcome == "passed", result
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_no_other_process_can_be_signalled(confined):
    source = f"""
import os, signal
for process in (1, {os.getpid()}, {os.getppid()}, -1, -{os.getpgid(0)}):
    try: os.kill(process, signal.SIGKILL)
    except OSError: pass
return "alive"
"""
    assert returned(confined, source, "alive").outcome == "passed"
    left = "import os, signal\ndef f(a):\n    os.killpg(0, signal.SIGKILL)"
    assert check(confined, left).outcome == "killed"


def test_there_is_no_privilege(confined):
    source = """
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
attempts = {
    "mount": lambda: c.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None),
    "remount": lambda: c.mount(None, b"/", None, 32, None),
    "unmount": lambda: c.umount2(b"/tmp", 2),
    "chroot": lambda: c.chroot(b"/"),
    "root": lambda: c.setuid(0),
    "group": lambda: c.setgid(0),
    "host name": lambda: c.sethostname(b"x", 1),
    "device": lambda: c.mknod(b"/tmp/memory", 0o20666, os.makedev(1, 1)),
}
return os.geteuid() == 0, [name for name, attempt in attempts.items() if attempt() != -1]
"""
    result = returned(confined, source, (False, []))
    assert result.outcome == "passed", result


# --- where a program cannot be run ------------------------------------------------------------------------------------


@pytest.fixture
def bwrap(monkeypatch, tmp_path):
    """Put a program of these lines of shell on PATH as ``bwrap``, or nothing."""

    def put(lines):
        folder = tmp_path / "bin"
        folder.mkdir()
        if lines is not None:
            (folder / "bwrap").write_text(f"#!/bin/sh\n{lines}\n")
            (folder / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        absent_sandbox.cache_clear()

    yield put
    absent_sandbox.cache_clear()


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (None, "no bwrap on PATH"),
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create new namespace"),
        ("echo 'bwrap: Unknown option --size' >&2; exit 1", "Unknown option --size"),
        ("exit 0", "exit code 0"),
        ("kill -9 $$", "trial run killed"),
    ],
)
def test_without_a_working_bubblewrap_no_program_runs_confined(bwrap, tmp_path, lines, cause):
    bwrap(lines)
    reason = absent_sandbox().reason
    assert cause in reason
    for remedy in ("install bubblewrap", "allow user namespaces", "--emad-allow-code-execution unconfined"):
        assert remedy in reason
    with pytest.raises(SandboxUnavailable, match="cannot be confined here"):
        check("confined", f"open({str(tmp_path / 'witness')!r}, 'w')")
    assert not (tmp_path / "witness").exists()


@pytest.mark.parametrize("lines", ["echo 'no such luck' >&2; exit 1", "exit 3"])
def test_a_bubblewrap_that_breaks_later_is_no_outcome_of_the_program(bwrap, monkeypatch, lines):
    bwrap(lines)
    monkeypatch.setattr(sandbox, "absent_sandbox", lambda: None)
    with pytest.raises(SandboxUnavailable, match=r"no such luck|exit code 3"):
        check("confined", "def f(a): return a + 1")


def test_a_program_whose_process_does_not_start_is_no_outcome_of_the_program(bwrap, monkeypatch):
    """The judge starts."""
    judge = f'shift $(($# - 5)); exec {sys.executable} -S {sandbox_protocol.__file__} "$@"'
    bwrap(f'case "$*" in *" answers "*) echo "no such luck" >&2; exit 1;; esac; {judge}')
    monkeypatch.setattr(sandbox, "absent_sandbox", lambda: None)
    with pytest.raises(SandboxUnavailable, match="the program's process could not start: no such luck"):
        check("confined", "def f(a): return a + 1")


def test_a_lower_limit_of_our_own_is_refused_instead_of_passing_for_the_programs(execution, monkeypatch):
    monkeypatch.setitem(sandbox.LIMITS, "RLIMIT_NOFILE", 1 << 40)
    with pytest.raises(SandboxUnavailable, match=r"RLIMIT_NOFILE of this process is \d+, but the sandbox needs \d+"):
        check(execution, "def f(a): return a + 1")
