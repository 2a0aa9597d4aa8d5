"""Sandbox for an untrusted program, such as a model's answer to a programming task.

``check_program`` decides whether a function of a program is right. One process runs the program. Another, the judge,
runs the trusted check, calls the function through pipes and receives plain values (``sandbox_protocol``). The judge's
exit code is the verdict. The program can change it only by answering the calls correctly: not by its own exit code, by
its output, by a result that equals all values, or by anything else in its own process.

Both processes have limits on memory, CPU time, file size and open files, one thread, an environment of a few fixed
variables and a wall-clock limit. ``confined`` runs them under bubblewrap (https://github.com/containers/bubblewrap),
without network, and without files but the interpreter, the system's libraries (both read-only) and an empty /tmp in
memory. System calls are not filtered. ``unconfined`` runs them with the caller's files and network.

The caller must ask the user for permission to run generated code.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument, EmadError
from emad_ref.workers.child_process import kill_process_tree
from pytest_emad.tasks import sandbox_protocol

CodeExecution = Literal["confined", "unconfined"]
CODE_EXECUTION: tuple[CodeExecution, ...] = ("confined", "unconfined")
Ending = Literal["passed", "failed", "timeout", "memory", "killed"]

SCRATCH = "/tmp"
SCRATCH_BYTES = 16 << 20
MESSAGE_BYTES = 4096
TRIAL_S = 60.0  # a loaded machine may start two interpreters slowly
NOBODY = 65534
LIMITS = {
    "RLIMIT_AS": 512 << 20,
    "RLIMIT_FSIZE": 8 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_NPROC": 0,  # the other limits hold per process, so the program may have only one; also of threads
    "RLIMIT_CORE": 0,
}
REMEDY = (
    "install bubblewrap 0.7 or newer (apt-get install bubblewrap) and allow user namespaces (sysctl "
    "user.max_user_namespaces > 0, kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container CAP_SYS_ADMIN), or run the programs with your files and network: "
    "--emad-allow-code-execution unconfined"
)


class SandboxUnavailable(EmadError):
    """This machine cannot run a program as requested, so no program is run."""


@dataclass(frozen=True)
class SandboxResult:
    """Result of a check.

    ``outcome``  ``passed``: the check ran to its last line. ``failed``: an exception or a wrong answer. ``timeout``:
                 wall-clock or CPU limit. ``memory``: MemoryError. ``killed``: a signal, usually a crash. A hostile
                 program can choose among the last four by its exit code.
    ``message``  the last ``MESSAGE_BYTES`` that the program and then the judge wrote to stderr.
    """

    outcome: Ending
    message: str


@dataclass(frozen=True)
class FunctionCheckScript:
    """A task: ``check`` must run without error with the program's function ``name``; it may use ``definitions``."""

    name: str
    definitions: str
    check: str


def check_program(
    task: FunctionCheckScript, program: str, *, execution: CodeExecution = "confined", seconds: float = 5.0
) -> SandboxResult:
    """Run the check of ``task`` on the function of ``program``.

    Parameters
    ----------
    task : FunctionCheckScript
        The function's name and its check. Arguments and results are plain values (``sandbox_protocol.KINDS``), passed
        by value: the check does not see changes that the program makes to its arguments.
    program : str
        Python source.
    execution : str
        ``confined`` needs bubblewrap. ``unconfined`` gives the program the caller's files and network. As root, the
        kernel does not limit the number of unconfined processes.
    seconds : float
        Wall-clock limit, including the start of the interpreters. After it, every process of the program is killed.

    Raises
    ------
    SandboxUnavailable
        The program cannot be run like this, for the reason of ``absent_sandbox()`` or another.
    BadArgument
        The check sends the function other than plain values.
    """
    if execution == "confined" and (absent := absent_sandbox()):
        raise SandboxUnavailable(absent.reason)
    return _check(task, program, execution, seconds)


@cache
def absent_sandbox() -> Absent | None:
    """Why programs cannot be confined here, with the remedy; None if they can."""
    trial = FunctionCheckScript("f", "", "assert f(1) == 2")
    try:
        # a module that is not loaded yet, so that the library must be readable
        result = _check(trial, "import decimal\ndef f(a): return a + 1", "confined", TRIAL_S)
    except SandboxUnavailable as error:
        return Absent(f"generated programs cannot be confined here ({error}); {REMEDY}")
    if result.outcome == "passed":
        return None
    return Absent(
        f"generated programs cannot be confined here (trial run {result.outcome}: {result.message}); {REMEDY}"
    )


def _check(task: FunctionCheckScript, source: str, execution: CodeExecution, seconds: float) -> SandboxResult:
    assert 0 < seconds < math.inf
    deadline = time.monotonic() + seconds
    check = json.dumps([task.definitions, task.check])
    with ExitStack() as stack:
        calls, into_calls = stack.enter_context(_open_pipe())
        answers, into_answers = stack.enter_context(_open_pipe())

        def start(role: str, text: str, *pipes: IO[bytes]) -> LimitedProcess:
            return stack.enter_context(_start([role, task.name], text, pipes, execution, seconds))

        program = start("answers", source, calls, into_answers)
        judge = start("check", check, into_calls, answers)
        for end_of_pipe in (calls, into_calls, answers, into_answers):
            end_of_pipe.close()  # only the two processes keep them open, so each notices when the other ends
        code = judge.exit_code(deadline)
        own = program.exit_code(deadline) if code == sandbox_protocol.GONE else None
        message, judged = program.read_message(), judge.read_message()
    if code == sandbox_protocol.PASSED:
        return SandboxResult("passed", message + judged)
    if code == sandbox_protocol.GONE:
        return SandboxResult(_classify_failure(own), message + judged)
    if code == sandbox_protocol.UNFIT:
        raise BadArgument("check", judged.strip(), "calls with plain values", "sandbox_protocol.KINDS lists them")
    if code == sandbox_protocol.NOT_STARTED:
        raise SandboxUnavailable(f"the program's process could not start: {message.strip()}")
    outcome = _classify_failure(code)
    if outcome == "failed" and code != sandbox_protocol.REFUTED:
        raise SandboxUnavailable(f"the judge's process gave no verdict: {judged.strip() or f'exit code {code}'}")
    return SandboxResult(outcome, message + judged)


def _classify_failure(code: int | None) -> Ending:
    """Outcome of a program that did not pass. ``code``: exit code, 128 + signal, or None after the time limit."""
    if code is None or code == 128 + signal.SIGXCPU:
        return "timeout"
    if code == sandbox_protocol.OUT_OF_MEMORY:
        return "memory"
    return "killed" if code - 128 in signal.valid_signals() else "failed"


@contextmanager
def _open_pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a pipe for the block: (read end, write end)."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as source, os.fdopen(writing, "wb", 0) as target:
        yield source, target


@dataclass(frozen=True)
class LimitedProcess:
    """A process of ``_start``, and the file that it writes its stderr to."""

    process: subprocess.Popen[bytes]
    stderr: IO[bytes]

    def exit_code(self, deadline: float) -> int | None:
        """Wait for the exit code: 128 + signal if killed, None if it did not end before ``deadline``."""
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def read_message(self) -> str:
        size = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, size - MESSAGE_BYTES))
        return self.stderr.read(MESSAGE_BYTES).decode("utf-8", "replace")


@contextmanager
def _start(
    words: Sequence[str], text: str, pipes: Sequence[IO[bytes]], execution: CodeExecution, seconds: float
) -> Iterator[LimitedProcess]:
    """Run a process for the block, and kill it with all its processes.

    ``words``: its role in ``sandbox_protocol``, and the function's name. ``text``: its standard input. ``pipes``: open
    files that it inherits.
    """
    numbers = [pipe.fileno() for pipe in pipes]
    limits = LIMITS | {"RLIMIT_CPU": math.ceil(seconds) + 1}  # for a dead caller; else the wall-clock limit comes first
    user = None
    with ExitStack() as stack:
        source, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        source.write(text.encode("utf-8", "surrogatepass"))
        source.seek(0)
        if execution == "confined":
            folder, command = SCRATCH, _bubblewrap_command()
            user = NOBODY if os.geteuid() == 0 else None
        else:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="emad-program-", ignore_cleanup_errors=True)
            )
            command = [*_python(), sandbox_protocol.__file__]
        process = subprocess.Popen(
            [*command, *words, json.dumps({"limits": limits, "user": user}), *map(str, numbers)],
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # a fixed order of sets, so that repeated runs have one verdict
            env={"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
            cwd=folder,
            pass_fds=numbers,
            start_new_session=True,
        )
        stack.callback(kill_process_tree, process)
        yield LimitedProcess(process, errors)


def _python() -> list[str]:
    """The real interpreter, not a link of a virtual environment, so without installed packages."""
    return [str(Path(getattr(sys, "_base_executable", sys.executable)).resolve()), "-sPS", "-X", "utf8"]


def _bubblewrap_command() -> list[str]:
    """The command line of ``sandbox_protocol`` under bubblewrap.

    Raises
    ------
    SandboxUnavailable
        There is no ``bwrap``.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable("no bwrap on PATH")
    python, script = _python(), "/sandbox_protocol.py"
    prefixes = {str(Path(prefix).resolve()) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    libraries = {f"{prefix}/{name}" for prefix in prefixes for name in ("lib", sys.platlibdir)}
    system = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"}
    shared = sorted(system | libraries | {python[0]})
    devices = ("/dev/null", "/dev/zero", "/dev/urandom")
    parents = sorted({str(folder) for path in (*shared, *devices) for folder in Path(path).parents} - {"/"})
    options = [
        *("--die-with-parent", "--new-session"),
        *("--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", SCRATCH, "--chdir", SCRATCH),
        *(word for folder in parents for word in ("--perms", "0755", "--dir", folder)),
        *(word for path in shared for word in ("--ro-bind-try", path, path)),
        *("--ro-bind", sandbox_protocol.__file__, script),
        *(word for path in devices for word in ("--dev-bind", path, path)),
        *("--remount-ro", "/"),
    ]
    if os.geteuid():
        return [bwrap, "--unshare-all", *options, "--", *python, script]
    # The kernel does not hold root's processes to RLIMIT_NPROC, even in a user namespace. So there is none, and the
    # process has the privilege to become nobody before the program runs.
    namespaces = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
    privileges = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    return [bwrap, *namespaces, *privileges, *options, "--", *python, script]
