"""The sandbox runs untrusted programs confined or not at all: hostile ones harm, see and leave nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from emad_ref.errors import BadArgument
from pytest_emad.tasks import sandbox, sandbox_protocol
from pytest_emad.tasks.sandbox import (
    FunctionCheckScript,
    SandboxBackend,
    SandboxUnavailable,
    backend_unavailable_reason,
    check_in_backend,
    run_in_backend,
    run_program,
    sandbox_unavailable_reason,
)

MEMORY_BYTES = 512 << 20
PAGES = count(1 + os.getpid() % 50_000)  # this many pages more: a number in the command lines of one run only


@pytest.fixture(params=sandbox.BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    """Give every backend that confines on this machine."""
    if reason := backend_unavailable_reason(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def run(backend, monkeypatch, tmp_path):
    """Run ``run_program`` on one backend; afterwards no process, file or folder of the run may remain."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    marks = []

    def run(source, *, seconds=10.0, output_bytes=64 << 10):
        marks.append(MEMORY_BYTES + next(PAGES) * 4096)
        return run_in_backend(backend, source, seconds, marks[-1], output_bytes)

    yield run
    assert all(is_gone(mark) for mark in marks)
    assert list(folder.iterdir()) == []


def is_gone(mark: int, seconds: float = 5.0) -> bool:
    """Return whether no process has ``mark`` on its command line; the kernel may take a moment after a kill."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not with_mark(mark):
            return True
        time.sleep(0.02)
    return False


def with_mark(mark: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if f"RLIMIT_AS={mark}".encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


# --- outcome of a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "outcome", "exit_code"),
    [
        ("print('hello')", "ended", 0),
        ("assert 1 + 1 == 3", "failed", 1),
        ("def broken(:", "failed", 1),
        ("x = '\0'", "failed", 1),
        ("x = '\ud800'", "failed", 1),
        ("input()", "failed", 1),
        ("import sys; sys.exit(0)", "ended", 0),
        ("import os; os._exit(0)", "ended", 0),
        ("bytearray(1 << 40)", "memory", sandbox_protocol.OUT_OF_MEMORY),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed", 128 + signal.SIGSEGV),
    ],
)
def test_outcome_names_how_a_program_ended(run, source, outcome, exit_code):
    result = run(source)
    assert (result.outcome, result.exit_code) == (outcome, exit_code), result


def test_output_comes_back_and_a_traceback_names_the_line(run):
    result = run("import sys\nprint('out')\nsys.stderr.write('err\\n')\n1 / 0")
    assert result.stdout == "out\n"
    assert result.stderr.startswith("err\n")
    assert 'File "<program>", line 4' in result.stderr


def test_a_program_is_the_main_module_with_nothing_imported_for_it(run):
    assert (
        run("assert __name__ == '__main__'\nimport sys\nassert sys.modules['__main__'].__dict__ is globals()").outcome
        == "ended"
    )
    assert "NameError" in run("os.getpid()").stderr


def test_the_standard_library_is_there_and_installed_packages_are_not(run):
    source = """
import collections, ctypes, decimal, hashlib, importlib.util, json, re, typing, zlib
print([name for name in ("numpy", "pytest", "emad_ref", "pip", "setuptools") if importlib.util.find_spec(name)])
"""
    assert run(source).stdout == "[]\n"
    hidden = (
        f"import os\nprint([name for path in {sandbox.make_filesystem_view().hidden!r} for name in os.listdir(path)])"
    )
    assert run(hidden).stdout == "[]\n"


def test_the_order_of_a_set_is_the_same_in_every_run(run):
    source = "print({str(n) for n in range(50)})"
    assert run(source).stdout == run(source).stdout


def test_runs_at_the_same_time_keep_apart(run):
    sources = [f"open('same', 'x').write('{n}'); print(open('same').read())" for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert [result.stdout for result in pool.map(run, sources)] == ["0\n", "1\n", "2\n", "3\n"]


# --- passing checks -----------------------------------------------------------------------------------------------


@pytest.fixture
def check(backend, monkeypatch, tmp_path):
    """Run ``check_program`` on one backend with a function ``f`` that should add one, or with another check."""

    def check(program, text="assert f(1) == 2", definitions="", seconds=10.0, output_bytes=64 << 10):
        task = FunctionCheckScript("f", definitions, text)
        return check_in_backend(backend, task, program, seconds, MEMORY_BYTES, output_bytes)

    return check


@pytest.mark.parametrize(
    ("program", "outcome", "exit_code"),
    [
        ("def f(a): return a + 1", "passed", 0),
        ("def f(a): return a", "failed", 1),
        ("def f(a): return 1 / 0", "failed", 1),
        ("def g(a): return a + 1", "failed", 1),
        ("def f(a", "failed", 1),
        ("def f(a):\n    import sys\n    sys.exit(0)", "failed", 0),
        ("def f(a):\n    import os\n    os._exit(93)", "failed", 93),
        ("raise SystemExit", "failed", 0),
        ("def f(a): return bytearray(1 << 40)", "memory", sandbox_protocol.OUT_OF_MEMORY),
        ("held = [0] * (1 << 40)\ndef f(a): return 2", "memory", sandbox_protocol.OUT_OF_MEMORY),
        ("def f(a):\n    import os\n    os.kill(os.getpid(), 11)", "killed", 128 + signal.SIGSEGV),
    ],
)
def test_a_check_names_how_the_program_ended(check, program, outcome, exit_code):
    result = check(program)
    assert (result.outcome, result.exit_code) == (outcome, exit_code), result


@pytest.mark.parametrize(
    "program",
    [
        "def f(a):\n    while True: pass",
        "while True: pass",
        "import os\nos.closerange(0, 100)\nwhile True: pass",
        "def f(a):\n    import sys\n    while True: print('x' * 10_000)",
    ],
)
def test_a_program_that_never_answers_is_stopped_on_time(check, program):
    began = time.monotonic()
    result = check(program, seconds=0.8, output_bytes=1000)
    assert (result.outcome, result.exit_code) == ("timeout", None)
    assert len(result.stdout) <= 1000
    assert time.monotonic() - began < 3.8  # 3 s for a loaded machine to kill and reap it


@pytest.mark.parametrize(
    "preparation",
    [
        "import sys; sys.stdout.close()",
        "import os; os.close(0); os.close(1); os.close(2)",
        "import sys; sys.stdout = sys.stderr = object()",
        "import atexit; atexit.register(lambda: 1 / 0)",
        "import sys; sys.setrecursionlimit(10_000); sys.settrace(lambda *_: None)",
    ],
)
def test_a_right_program_passes_whatever_it_does_with_its_streams(check, preparation):
    result = check(f"{preparation}\ndef f(a): return a + 1")
    assert (result.outcome, result.exit_code) == ("passed", 0), result


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
def test_a_check_sees_values_and_exceptions_as_if_it_called_the_function_itself(check, program, text):
    assert check(program, text, definitions="def helper(a): return a\ndef f(a): return None").outcome == "passed"


def test_an_exception_that_a_check_expects_is_not_forged_by_leaving(check):
    text = "try: f(1)\nexcept BaseException: pass\nelse: assert 0"
    assert check("def f(a): raise ValueError", text).outcome == "passed"
    assert check("import os\ndef f(a): os._exit(0)", text).outcome == "failed"
    assert check("def f(a): raise SystemExit", text).outcome == "failed"


@pytest.mark.parametrize("raised", ["StopIteration", "StopIteration(2)", "type('Mine', (StopIteration,), {})"])
def test_an_exception_of_the_program_does_not_end_a_loop_of_the_check(check, raised):
    result = check(f"def f(a): raise {raised}", "assert all(map(f, [1, 2]))")
    assert result.outcome == "failed"
    assert "RuntimeError: f raised StopIteration" in result.stderr


def test_a_check_whose_calls_cannot_be_sent_is_refused(check):
    with pytest.raises(BadArgument, match="check='f is called with something that is no plain value'"):
        check("def f(a): return a", "f(lambda: 0)")


@pytest.mark.parametrize("given", ["f(1)", "[f(1)]", "{'a': (f(1),)}"])
def test_an_object_that_comes_back_to_the_program_fails_the_program_and_not_the_check(check, given):
    result = check("def f(a): return object()", f"try: f({given})\nexcept TypeError: pass")
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert "f is called with an object that it returned before, which is no plain value" in result.stderr


# --- time, memory, output -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor s in {1, 2, 3, 10, 15, 24}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass",
    ],
)
def test_an_endless_program_is_stopped_on_time(run, source):
    began = time.monotonic()
    result = run(source, seconds=0.7)
    assert (result.outcome, result.exit_code) == ("timeout", None)
    assert time.monotonic() - began < 3.7  # 3 s for a loaded machine to kill and reap it


def test_cpu_time_is_limited_even_if_nobody_watches_the_clock(backend, monkeypatch):
    monkeypatch.setattr(
        sandbox, "process_limits", lambda *given, original=sandbox.process_limits: original(*given) | {"RLIMIT_CPU": 1}
    )
    result = run_in_backend(backend, "while True: pass", 20.0, MEMORY_BYTES, 0)
    assert (result.outcome, result.exit_code) == ("timeout", 128 + signal.SIGXCPU)


@pytest.mark.parametrize(
    "source",
    ["held = []\nwhile True: held.append(bytes(1 << 20))", "x = 'x'\nwhile True: x += x", "[0] * (1 << 40)"],
)
def test_a_memory_bomb_ends_itself(run, source):
    assert run(source).outcome == "memory"


def test_memory_outside_the_address_space_is_limited_too(run):
    """Only files in memory are left, and they fill the scratch folder of fixed size."""
    source = """
import os
written = 0
try:
    for number in range(1000):
        with open(str(number), "wb", buffering=0) as file:
            for block in range(7):
                written += file.write(bytes(1 << 20))
except OSError as error:
    print(error.errno, written)
"""
    result = run(source)
    number, written = map(int, result.stdout.split())
    assert number == errno.ENOSPC
    assert written <= sandbox.SCRATCH_BYTES
    assert run("import os; os.memfd_create('hidden')").stderr.endswith("[Errno 1] Operation not permitted\n")


def test_a_huge_file_is_refused(run):
    result = run("with open('huge', 'wb') as file:\n    file.truncate(1 << 40)")
    assert "File too large" in result.stderr
    result = run("with open('huge', 'wb') as file:\n    while True: file.write(bytes(1 << 20))")
    assert "File too large" in result.stderr


def test_output_is_bounded_and_more_of_it_does_not_block(run):
    result = run("import sys\nprint('x' * 3_000_000)\nsys.stderr.write('y' * 3_000_000)", output_bytes=1000)
    assert (result.outcome, result.stdout, result.stderr) == ("ended", "x" * 1000, "y" * 1000)
    assert result.truncated
    assert not run("print('x' * 999)", output_bytes=1000).truncated


def test_endless_output_is_stopped_on_time(run):
    result = run("while True: print('x' * 10_000)", seconds=1.5, output_bytes=1000)
    assert (result.outcome, len(result.stdout), result.truncated) == ("timeout", 1000, True)


# --- visible and reachable resources ------------------------------------------------------------------------------


def test_the_parents_environment_is_not_to_be_seen(run, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "a-secret")
    result = run("import json, os; print(json.dumps(dict(os.environ)))")
    assert json.loads(result.stdout).items() - {("PWD", sandbox.SCRATCH)} == sandbox.ENVIRONMENT.items()


def test_files_of_the_parent_are_not_to_be_seen(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-secret")
    secret.chmod(0o644)
    ours = [secret, tmp_path, Path(__file__), Path(sandbox.__file__), Path.cwd()]
    paths = [*map(str, ours), "/etc/passwd", "/proc/self/environ", "/proc", "/sys", "/var", "/usr/bin/env"]
    source = f"""
import os
for path in {paths!r}:
    try: print(os.listdir(path) if os.path.isdir(path) else open(path).read())
    except FileNotFoundError: pass
"""
    result = run(source)
    assert (result.outcome, result.stdout) == ("ended", ""), result


def test_open_files_of_the_parent_do_not_come_along(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-secret")
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        result = run(
            "import os\nfor fd in range(3, 4096):\n    try: os.fstat(fd)\n    except OSError: continue\n    print(fd)"
        )
    assert (result.outcome, result.stdout) == ("ended", "")


def test_only_the_scratch_folder_can_be_written_to(run, tmp_path):
    tmp_path.chmod(0o777)
    program = """
import errno, os, tempfile
def refusal(path):
    try: open(path, "a").write("text")
    except OSError as error: return errno.errorcode[error.errno]
print([refusal(path) for path in {folders!r}])  # by the mount, not only by their owner
print([refusal(path) is not None for path in {others!r}])
assert os.getcwd() == os.path.expanduser("~") == tempfile.gettempdir()
with tempfile.NamedTemporaryFile() as file: file.write(b"text")
open("file", "w").write("text")
assert os.listdir() == ["file"]
"""
    folders = ["/made", "/usr/lib/made", "/dev/made", f"{os.path.dirname(os.__file__)}/made.py"]
    others = [os.__file__, "/var/made", "/etc/ld.so.cache", str(tmp_path / "made")]
    result = run(program.format(folders=folders, others=others))
    assert (result.outcome, result.stdout) == ("ended", f"{['EROFS'] * 4}\n{[True] * 4}\n"), result
    assert not (tmp_path / "made").exists()
    assert not Path(sandbox.SCRATCH, "file").exists()


def test_no_socket_can_be_made(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = f"""
import socket
families = ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK")
attempts = [lambda name=name: socket.socket(getattr(socket, name), socket.SOCK_STREAM) for name in families]
attempts.append(lambda: socket.create_connection(("127.0.0.1", {listener.getsockname()[1]}), timeout=1))
attempts.append(lambda: socket.create_connection(("192.0.2.1", 80), timeout=1))
for attempt in attempts:
    try: attempt()
    except PermissionError: continue
    raise SystemError(attempt)
"""
        assert run(source).outcome == "ended"
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize(
    "source",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError as error: raise SystemError from error",
        "import subprocess; subprocess.Popen(['/bin/sh'])",
        "import threading; threading.Thread(target=print).start()",
        "import os; os.posix_spawn('/bin/sh', ['sh'], {})",
    ],
)
def test_a_fork_bomb_does_not_get_to_its_first_fork(run, source):
    result = run(source)
    assert result.outcome == "failed"
    assert any(said in result.stderr for said in ("PermissionError", "can't start new thread")), result


def test_nobody_else_can_be_signalled(run):
    source = f"""
import os, signal
for process in (1, {os.getpid()}, {os.getppid()}, -1, -{os.getpgid(0)}):
    try: os.kill(process, signal.SIGKILL)
    except OSError: pass
print("alive")
"""
    result = run(source)
    assert (result.outcome, result.stdout) == ("ended", "alive\n")


def test_a_signal_to_its_own_group_reaches_the_program_alone(run):
    result = run("import os, signal\nprint(os.getpgrp() > 0, flush=True)\nos.killpg(0, signal.SIGKILL)")
    assert result.stdout == "True\n"  # 0 would be a group with a leader outside
    assert (result.outcome, result.exit_code) == ("killed", 128 + signal.SIGKILL)


def test_there_is_no_privilege_and_no_way_to_gain_any(run):
    source = """
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
attempts = {
    "user namespace": lambda: c.unshare(0x10000000),
    "mount": lambda: c.mount(b"tmpfs", b"/scratch", b"tmpfs", 0, None),
    "remount": lambda: c.mount(None, b"/", None, 32, None),
    "unmount": lambda: c.umount2(b"/scratch", 2),
    "chroot": lambda: c.chroot(b"/"),
    "root": lambda: c.setuid(0),
    "trace": lambda: c.ptrace(16, 1, 0, 0),
    "host name": lambda: c.sethostname(b"x", 1),
    "device": lambda: c.mknod(b"/scratch/memory", 0o20666, os.makedev(1, 1)),
    "keys": lambda: c.syscall({keyctl}, 0, -3, 0),
}
print([name for name, attempt in attempts.items() if attempt() != -1])
"""
    keyctl = sandbox.REFUSED["keyctl"][sandbox.MACHINES[os.uname().machine].column]
    result = run(source.replace("{keyctl}", str(keyctl)))
    assert result.stdout == "[]\n", result


# --- the second line: namespaces alone, without the system-call filter --------------------------------------------


@pytest.fixture
def unfiltered(run, monkeypatch):
    monkeypatch.setattr(sandbox, "REFUSED", {})
    return run


def test_without_the_filter_children_left_behind_die_with_the_program(unfiltered):
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)"
    )
    began = time.monotonic()
    assert unfiltered(source).outcome == "ended"
    assert time.monotonic() - began < 9.0  # no process waits for them: below the time limit


def test_without_the_filter_the_number_of_processes_is_limited(unfiltered, backend):
    if backend.name == "bwrap" and os.geteuid() == 0:
        pytest.skip("the kernel does not hold root's processes to RLIMIT_NPROC, and bwrap maps nobody to root here")
    source = """
import os, time
for made in range(100):
    try:
        if os.fork() == 0: time.sleep(1000)
    except BlockingIOError:
        print(made)
        break
"""
    result = unfiltered(source)
    assert result.outcome == "ended"
    assert 1 <= int(result.stdout) <= 16


def test_without_the_filter_there_is_still_no_network(unfiltered):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert unfiltered(source).outcome == "failed"
        assert unfiltered("import socket; print(socket.if_nameindex())").stdout == "[(1, 'lo')]\n"
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()


# --- the machinery ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [["--user", "--map-root-user"], []], ids=["user namespace", "privilege"])
def test_where_the_kernel_permits_it_the_namespaces_backend_confines(ours):
    """Otherwise an error in the backend would skip every test above."""
    words = ["unshare", *ours, "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "true"]
    if shutil.which("unshare") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("the system's own unshare is refused too")
    assert backend_unavailable_reason(sandbox.BACKENDS[0]) == ""


def test_a_program_dies_with_the_process_that_started_it(backend, tmp_path):
    mark = MEMORY_BYTES + next(PAGES) * 4096
    chosen = f"sandbox.BACKENDS[{sandbox.BACKENDS.index(backend)}]"
    source = (
        f"from pytest_emad.tasks import sandbox\nsandbox.run_in_backend({chosen}, 'while True: pass', 60.0, {mark}, 0)"
    )
    # the killed parent cannot remove its empty folder
    parent = subprocess.Popen([sys.executable, "-c", source], env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        deadline = time.monotonic() + 10
        while not any(burns_time(process) for process in with_mark(mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert with_mark(mark)
    finally:
        parent.kill()
        parent.wait()
    assert is_gone(mark)


def burns_time(process: str) -> bool:
    """Return whether it used a tenth of a second: then the program runs, past the start (bwrap's has a gap)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        words = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
        return int(words[11]) / os.sysconf("SC_CLK_TCK") > 0.1 and words[0] == "R"
    return False


UNCONFINED = """
import json, os, subprocess, sys
code = subprocess.run(sys.argv[2:], cwd="/", close_fds=False).returncode
os.write(int(sys.argv[1]), json.dumps({"exit-code": code}).encode())
"""


def test_a_backend_that_does_not_confine_is_found_out_and_never_runs_a_program(monkeypatch, tmp_path):
    def command(plan):
        return [sys.executable, "-c", UNCONFINED, str(plan.report), *plan.command]

    monkeypatch.setattr(sandbox, "BACKENDS", (SandboxBackend("none", command),))
    assert "a file outside can be read" in sandbox_unavailable_reason()
    with pytest.raises(SandboxUnavailable, match=r"none is run.*user namespaces.*bubblewrap"):
        run_program(f"open({str(tmp_path / 'witness')!r}, 'w')")
    assert not (tmp_path / "witness").exists()


def test_a_backend_without_the_filter_is_found_out(backend, monkeypatch):
    monkeypatch.setattr(sandbox, "REFUSED", {})
    assert "processes can be made" in backend_unavailable_reason(SandboxBackend("unfiltered", backend.command))


@pytest.mark.parametrize("words", [["/bin/false"], ["/bin/sh", "-c", "echo no such luck >&2; exit 1"]])
def test_a_backend_that_breaks_is_no_outcome_of_the_program(words):
    with pytest.raises(SandboxUnavailable, match=r"'broken' could not be set up: (no such luck|it ended with code 1)"):
        run_in_backend(SandboxBackend("broken", lambda plan: words), "pass", 5.0, MEMORY_BYTES, 100)


def test_a_caller_that_died_before_the_way_in_leaves_no_program_behind():
    """The outermost process requests its parent's death signal too late: it must see that its parent has changed."""
    backend = sandbox.BACKENDS[0]
    if reason := backend_unavailable_reason(backend):
        pytest.skip(reason)

    def command(plan):
        return sandbox.namespaces_command(replace(plan, caller=plan.caller + 1))

    with pytest.raises(SandboxUnavailable, match="it ended with code 0 and said nothing"):
        run_in_backend(SandboxBackend("orphan", command), "pass", 5.0, MEMORY_BYTES, 100)


def test_a_failing_step_on_the_way_in_is_no_outcome_of_the_program(monkeypatch):
    backend = sandbox.BACKENDS[0]
    if reason := backend_unavailable_reason(backend):
        pytest.skip(reason)

    def command(plan):
        return sandbox.namespaces_command(replace(plan, command=("/nowhere/python",)))

    with pytest.raises(SandboxUnavailable, match="No such file"):
        run_in_backend(SandboxBackend("lost", command), "pass", 5.0, MEMORY_BYTES, 100)


def test_namespaces_that_are_switched_off_are_called_so(monkeypatch):
    """The kernel's own message is "No space left on device"."""

    def off(name, *arguments):
        raise OSError(errno.ENOSPC, f"{name}: {os.strerror(errno.ENOSPC)}")

    monkeypatch.setattr(sandbox, "call_libc", off)
    for user in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(SandboxUnavailable, match=r"^user namespaces are off, .*sysctl user\.max_user_namespaces"):
            sandbox.enter_new_namespaces()


def test_a_lower_limit_of_our_own_is_refused_instead_of_passing_for_the_programs(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    with pytest.raises(SandboxUnavailable, match="RLIMIT_AS of this process is 1048576"):
        run_in_backend(sandbox.BACKENDS[0], "pass", 5.0, MEMORY_BYTES, 100)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_time_that_limits_nothing_is_refused(value):
    with pytest.raises(BadArgument, match="seconds"):
        run_program("pass", seconds=value)


@pytest.mark.parametrize(("argument", "value"), [("memory_bytes", 1 << 20), ("output_bytes", -1)])
def test_limits_no_program_can_meet_are_refused(argument, value):
    with pytest.raises(BadArgument, match=argument):
        run_program("pass", **{argument: value})


def test_run_program_runs_where_programs_can_be_confined():
    if reason := sandbox_unavailable_reason():
        pytest.skip(reason)
    assert run_program("print(6 * 7)").stdout == "42\n"


def answer(steps: bytes, audit: int, number: int) -> int:
    """Return the kernel's answer to a filter: four instructions of classic BPF."""
    data, at, loaded = {0: number, 4: audit}, 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", steps, at * 8)
        if code == sandbox.RETURN:
            return value
        if code == sandbox.LOAD:
            loaded = data[value]
        else:
            holds = {sandbox.EQUALS: loaded == value, sandbox.AT_LEAST: loaded >= value}[code]
            at += if_true if holds else if_false
        at += 1


@pytest.mark.parametrize("name", sandbox.MACHINES)
def test_the_filter_refuses_its_list_lets_the_rest_through_and_kills_foreign_calls(name):
    machine, steps = sandbox.MACHINES[name], sandbox.system_call_filter(name)
    listed = {numbers[machine.column] for numbers in sandbox.REFUSED.values()}
    for number in range(500):
        expected = sandbox.REFUSE if number in listed else sandbox.ALLOW
        assert answer(steps, machine.audit, number) == expected
    assert answer(steps, machine.audit, 0x40000000 + 57) == sandbox.KILL
    assert answer(steps, 0x40000003, 2) == sandbox.KILL  # i386, whose number 2 is fork
