"""Sandbox for an untrusted program, such as a model's answer to a programming task.

``run_program`` runs the program on Linux as one process with one thread and with

- its own file system: the interpreter, its standard library and the system libraries, all read-only, and an empty
  scratch folder in memory, which is its cwd, HOME and TMPDIR. There is no /proc and no site-packages.
- its own user, mount, pid, network, ipc, uts and cgroup namespaces, without privileges or a way to gain them.
- a system-call filter against new processes, sockets, memory outside RLIMIT_AS, and calls with frequent holes.
- limits on memory, CPU time, file size, open files and output, and a wall-clock limit that kills the whole sandbox.
- an environment of five fixed variables.

There are two backends. ``namespaces`` calls the kernel itself. ``bwrap`` uses bubblewrap, for systems that allow only
bubblewrap to create namespaces. A backend is available if a program that tries to break out (``PROBE``) fails at every
attempt. Without an available backend ``run_program`` raises SandboxUnavailable and runs nothing.

``check_program`` decides whether a function of a program is right. The trusted check runs in a second confined process,
calls the function through pipes and receives plain values (``sandbox_protocol``). The verdict is the exit code of the
check's process. The program can change it only by answering the calls correctly, not by code after a failed assert, a
result that equals all values, or the interpreter's memory.

The caller must ask the user for permission to run generated code.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import platform
import select
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

from emad_ref.errors import BadArgument, EmadError
from pytest_emad.tasks import sandbox_protocol

Ending = Literal["passed", "ended", "failed", "timeout", "memory", "killed"]

SCRATCH = "/scratch"
SCRATCH_BYTES = 16 << 20
FILE_BYTES = 8 << 20
OPEN_FILES = 64
LEAST_MEMORY_BYTES = 64 << 20  # least memory for starting the interpreter
NOBODY = 65534
EXIT_GRACE_S = 0.5  # seconds for an unresponsive program to end with its exit code
ENVIRONMENT = {
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "PATH": "/nonexistent",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a fixed order of sets, so that repeated runs have one verdict
}

# Succeeds only if the sandbox refuses every attempt.
PROBE = """
import os, socket
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False
assert refused(open, {outside!r}), "a file outside can be read"
assert refused(open, os.__file__, "a"), "the standard library can be written to"
assert refused(open, "/file", "w"), "files can be made outside the scratch folder"
assert refused(os.fork), "processes can be made"
assert refused(socket.socket), "sockets can be made"
assert refused(os.chroot, "/"), "privilege is left"
assert refused(os.kill, {parent}, 0), "the process that started this can be signalled"
open("file", "w").write("text")
"""


class SandboxUnavailable(EmadError):
    """This machine cannot confine a program, so no program is run."""


@dataclass(frozen=True)
class SandboxResult:
    """Result of a program.

    ``outcome``    ``passed``: the check ran to its last line (``check_program`` only). ``ended``: exit code 0.
                   ``failed``: an exception or a wrong answer. ``timeout``: wall-clock or CPU limit. ``memory``:
                   MemoryError. ``killed``: a signal, usually a crash. A hostile program can choose among the last
                   four by its exit code.
    ``stdout``, ``stderr``  at most ``output_bytes`` each, undecodable bytes replaced. ``stderr`` includes that of a
                   failed check.
    ``exit_code``  0 if passed, 128 + signal if killed, None after the wall-clock limit.
    ``truncated``  whether output was dropped.
    """

    outcome: Ending
    stdout: str
    stderr: str
    exit_code: int | None
    truncated: bool = False


def run_program(
    source: str, *, seconds: float = 5.0, memory_bytes: int = 512 << 20, output_bytes: int = 64 << 10
) -> SandboxResult:
    """Run Python ``source`` in the sandbox for at most ``seconds`` of wall-clock time, including interpreter start.

    ``memory_bytes`` limits the address space of the process; files in the scratch folder may take ``SCRATCH_BYTES``
    more. The program is killed if its caller dies, except for a moment while bwrap starts.

    Raises:
        SandboxUnavailable: no backend is available (``sandbox_unavailable_reason()`` returns the reason), or it failed.
        BadArgument: ``seconds`` or ``output_bytes`` out of range, or less memory than the interpreter needs.
    """
    return run_in_backend(
        require_available_backend(seconds, memory_bytes, output_bytes), source, seconds, memory_bytes, output_bytes
    )


@dataclass(frozen=True)
class FunctionCheckScript:
    """A task: ``check`` must run without error with the program's function ``name``; it may use ``definitions``."""

    name: str
    definitions: str
    check: str


def check_program(
    task: FunctionCheckScript,
    program: str,
    *,
    seconds: float = 5.0,
    memory_bytes: int = 512 << 20,
    output_bytes: int = 64 << 10,
) -> SandboxResult:
    """Run the check of ``task`` in one process; it calls the function of ``program`` in another process.

    Both processes are confined; the check decides. Arguments and results are plain values
    (``sandbox_protocol.encode_value``), passed by value: the check does not see changes that the program makes to its
    arguments. The limits of ``run_program`` hold for each process.

    Raises:
        SandboxUnavailable, BadArgument: as ``run_program``.
    """
    return check_in_backend(
        require_available_backend(seconds, memory_bytes, output_bytes),
        task,
        program,
        seconds,
        memory_bytes,
        output_bytes,
    )


def require_available_backend(seconds: float, memory_bytes: int, output_bytes: int) -> SandboxBackend:
    """The first available backend.

    Raises:
        SandboxUnavailable: there is none.
        BadArgument: invalid limits.
    """
    if not (0 < seconds < math.inf):
        raise BadArgument("seconds", seconds, "a positive, finite time")
    if memory_bytes < LEAST_MEMORY_BYTES:
        raise BadArgument("memory_bytes", memory_bytes, f"{LEAST_MEMORY_BYTES} or more", "an interpreter takes that")
    if output_bytes < 0:
        raise BadArgument("output_bytes", output_bytes, "0 or more")
    reason = sandbox_unavailable_reason()
    if reason:
        raise SandboxUnavailable(reason)
    return next(backend for backend in BACKENDS if not backend_unavailable_reason(backend))


def sandbox_unavailable_reason() -> str:
    """Reason why no backend is available, with the remedy; "" if one is."""
    refusals = {backend.name: backend_unavailable_reason(backend) for backend in BACKENDS}
    if not all(refusals.values()):
        return ""
    listed = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    return (
        f"this machine cannot confine generated programs, so none is run ({listed}); use Linux with "
        "unprivileged user namespaces (sysctl user.max_user_namespaces > 0, kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or install bubblewrap, or let the container have "
        "CAP_SYS_ADMIN and the unshare, mount and pivot_root calls"
    )


@dataclass(frozen=True)
class FilesystemView:
    """The program's view of the host: ``shared`` paths read-only, ``links`` unchanged, ``hidden`` folders empty."""

    shared: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    devices: tuple[str, ...] = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class SandboxPlan:
    """One run: the program's file system, its command, and the files that stay open for the backend."""

    view: FilesystemView
    command: tuple[str, ...]
    staging: str  # an empty mount point for the new root; nothing is ever written into it
    report: int  # descriptor for the backend's report of the program's end, as lines of JSON
    filter: int  # descriptor of the compiled system-call filter
    caller: int  # pid of the calling process; the program is killed when it ends


def interpreter_path() -> str:
    """Path of the real executable, not a link of a virtual environment: it finds its library relative to itself."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


@cache
def make_filesystem_view() -> FilesystemView:
    """The interpreter, its library folder and the system libraries, without installed packages."""
    prefixes = {str(Path(prefix).resolve()) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    folders = system + [f"{prefix}/{name}" for prefix in sorted(prefixes) for name in ("lib", sys.platlibdir)]
    links = tuple((path, os.readlink(path)) for path in system if os.path.islink(path))
    real = sorted({path for path in folders if os.path.isdir(path) and not os.path.islink(path)})
    top = [path for path in real if not any(path.startswith(f"{other}/") for other in real)]
    files = [
        path for path in (interpreter_path(), "/etc/ld.so.cache") if not any(path.startswith(f"{f}/") for f in top)
    ]
    packages = (
        package_folder
        for folder in real
        for kind in ("site", "dist")
        for package_folder in Path(folder).glob(f"python3*/{kind}-packages")
    )
    return FilesystemView(
        (*top, *(f for f in files if os.path.isfile(f))), links, tuple(sorted({str(p) for p in packages}))
    )


def process_limits(seconds: float, memory_bytes: int) -> dict[str, int]:
    """Limits of setrlimit by name. They hold per process, and the program has only one."""
    return {
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_CPU": math.ceil(seconds) + 1,  # for a dead caller; else the wall-clock limit comes first
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_NPROC": 16,  # second barrier; the filter already refuses new processes
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_CORE": 0,
    }


def run_in_backend(
    backend: SandboxBackend, source: str, seconds: float, memory_bytes: int, output_bytes: int
) -> SandboxResult:
    """Run ``source`` in one backend, as ``run_program``."""
    bounds = ResourceLimits(time.monotonic() + seconds, process_limits(seconds, memory_bytes), output_bytes)
    with start_confined(backend, bounds, ["program"], encode_source(source)) as program:
        code = program.exit_code() if wait_until_ended([program], bounds.deadline) else None
    return SandboxResult(
        "ended" if code == 0 else classify_failure(code), program.stdout, program.stderr, code, program.truncated
    )


def check_in_backend(
    backend: SandboxBackend,
    task: FunctionCheckScript,
    program: str,
    seconds: float,
    memory_bytes: int,
    output_bytes: int,
) -> SandboxResult:
    """Check ``program`` in one backend, as ``check_program``."""
    bounds = ResourceLimits(time.monotonic() + seconds, process_limits(seconds, memory_bytes), output_bytes)
    trusted = json.dumps([task.definitions, task.check]).encode()
    with contextlib.ExitStack() as stack:
        calls, into_calls = stack.enter_context(open_pipe())
        answers, into_answers = stack.enter_context(open_pipe())
        words, channels = ["answers", task.name], [calls, into_answers]
        judged = stack.enter_context(start_confined(backend, bounds, words, encode_source(program), channels))
        words, others = ["check", task.name], [into_calls, answers]
        judge = stack.enter_context(start_confined(backend, bounds, words, trusted, others))
        for end_of_pipe in (*channels, *others):
            end_of_pipe.close()  # only the two processes keep them open, so each notices when the other ends
        in_time = wait_until_ended([judged, judge], bounds.deadline)
        own = judged.exit_code() if in_time and judged.has_backend_reported_end else None
        code = judge.exit_code() if in_time else None
    if code == sandbox_protocol.UNFIT:
        raise BadArgument("check", judge.stderr.strip(), "calls with plain values", "sandbox_protocol.KINDS lists them")
    truncated = judged.truncated or judge.truncated
    if code == sandbox_protocol.PASSED:
        return SandboxResult("passed", judged.stdout, judged.stderr, 0, truncated)
    if own not in (None, sandbox_protocol.OVER):  # otherwise the program outlived its check, which failed
        code = own
    return SandboxResult(
        classify_failure(code), judged.stdout, (judged.stderr + judge.stderr)[:output_bytes], code, truncated
    )


@contextlib.contextmanager
def open_pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a pipe for the block: (read end, write end)."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as source, os.fdopen(writing, "wb", 0) as target:
        yield source, target


def encode_source(source: str) -> bytes:
    return source.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class ResourceLimits:
    """``deadline`` of ``time.monotonic``, ``limits`` of setrlimit by name, ``output_bytes`` to keep of each stream."""

    deadline: float
    limits: dict[str, int]
    output_bytes: int


@dataclass
class ConfinedProcess:
    """A confined process. ``room``: stream descriptor → number of bytes still to keep."""

    backend: SandboxBackend
    process: subprocess.Popen[bytes]
    report: int
    room: dict[int, int]
    truncated: bool = False

    def __post_init__(self) -> None:
        self._kept = dict.fromkeys(self.room, b"")

    def read_available(self, descriptor: int) -> bool:
        """Read the available bytes of a stream; False at its end."""
        chunk = os.read(descriptor, 1 << 16)
        kept_part = chunk[: self.room[descriptor]]
        self._kept[descriptor] += kept_part
        self.room[descriptor] -= len(kept_part)
        self.truncated |= len(chunk) > len(kept_part)
        return bool(chunk)

    @property
    def stdout(self) -> str:
        return self._text(0)

    @property
    def stderr(self) -> str:
        return self._text(1)

    def _text(self, index: int) -> str:
        return list(self._kept.values())[index].decode("utf-8", "replace")

    @property
    def _told(self) -> dict[str, Any]:
        return {key: value for line in self._text(2).splitlines() for key, value in json.loads(line).items()}

    @property
    def has_backend_reported_end(self) -> bool:
        """Whether the backend reported that the program ended by itself or failed to start."""
        return bool(self._told)

    @property
    def has_exited_for_gone_peer(self) -> bool:
        return self._told.get("exit-code") == sandbox_protocol.GONE

    def exit_code(self) -> int:
        """Exit code of the program, 128 + signal if it or its backend was killed.

        Raises:
            SandboxUnavailable: the program did not start.
        """
        if "exit-code" in self._told and "failed" not in self._told:
            return int(self._told["exit-code"])
        if "failed" in self._told or self.process.returncode >= 0:
            ended = f"it ended with code {self.process.returncode} and said nothing"
            reason = self._told.get("failed") or self.stderr.strip() or ended
            raise SandboxUnavailable(f"the sandbox {self.backend.name!r} could not be set up: {reason}")
        return 128 - self.process.returncode

    def kill(self) -> None:
        """Kill the process group; the kernel then kills every process of its pid namespace."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended between the two calls
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def start_confined(
    backend: SandboxBackend,
    bounds: ResourceLimits,
    words: Sequence[str],
    content: bytes,
    channels: Sequence[IO[bytes]] = (),
) -> Iterator[ConfinedProcess]:
    """Run a confined process for the block.

    ``words``: its role in ``sandbox_protocol``, and the role's arguments. ``content``: its standard input.
    ``channels``: open files that it inherits.
    """
    role, *rest = words
    limits = " ".join(f"{name}={value}" for name, value in require_settable_limits(bounds.limits).items())
    numbers = [channel.fileno() for channel in channels]
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(tempfile.TemporaryDirectory(prefix="emad-sandbox-"))
        program = stack.enter_context(sealed_file("program", content))
        calls = stack.enter_context(sealed_file("filter", system_call_filter(platform.machine())))
        command = (
            interpreter_path(),
            "-sPS",
            "-X",
            "utf8",
            "-c",
            launcher_source(),
            role,
            limits,
            *rest,
            *map(str, numbers),
        )
        report, reporting = stack.enter_context(open_pipe())
        plan = SandboxPlan(make_filesystem_view(), command, staging, reporting.fileno(), calls.fileno(), os.getpid())
        process = subprocess.Popen(
            backend.command(plan),
            stdin=program,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            pass_fds=(plan.report, plan.filter, *numbers),
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        stack.enter_context(process.stdout)
        stack.enter_context(process.stderr)
        reporting.close()  # only the backend keeps it open, so the stream ends with the backend
        room = {process.stdout.fileno(): bounds.output_bytes, process.stderr.fileno(): bounds.output_bytes}
        running = ConfinedProcess(backend, process, report.fileno(), room | {report.fileno(): 4096})
        stack.callback(running.kill)
        yield running


@cache
def launcher_source() -> str:
    """Source text that defines ``sandbox_protocol`` and starts it."""
    return f"{Path(sandbox_protocol.__file__).read_text(encoding='utf-8')}\nstart_role(*sys.argv[1:])\n"


def wait_until_ended(running: Sequence[ConfinedProcess], deadline: float) -> bool:
    """Read every stream to its end, and return whether the last of ``running`` ended before ``deadline``.

    All are killed at the deadline or when the last has ended. If it ended because another process did not answer, that
    process gets ``EXIT_GRACE_S`` to end by itself.
    """
    *others, last = running
    ends, in_time = deadline, False
    with selectors.DefaultSelector() as selector:
        for process in running:
            for stream in process.room:
                selector.register(stream, selectors.EVENT_READ, process)
        while selector.get_map():
            left = ends - time.monotonic()
            if left <= 0:
                ends = math.inf
                for process in running:
                    process.kill()  # closes the streams; their remaining bytes are read below
            for key, _ in selector.select(None if ends == math.inf else left):
                if key.data.read_available(key.fd):
                    continue
                selector.unregister(key.fd)
                if key.fd == last.report and ends == deadline:
                    in_time = True
                    ends = min(deadline, time.monotonic() + EXIT_GRACE_S)
                if in_time and not (
                    last.has_exited_for_gone_peer and any(not other.has_backend_reported_end for other in others)
                ):
                    ends = min(ends, time.monotonic())
    for process in running:
        process.kill()
    return in_time


def classify_failure(code: int | None) -> Ending:
    """Outcome of a program that did not pass. ``code``: exit code, 128 + signal, or None after the time limit."""
    endings: dict[int | None, Ending] = {None: "timeout", sandbox_protocol.OUT_OF_MEMORY: "memory"}
    endings |= {128 + signal_: "killed" for signal_ in signal.valid_signals()}
    endings |= {128 + signal.SIGXCPU: "timeout"}
    return endings.get(code, "failed")


def require_settable_limits(limits: dict[str, int]) -> dict[str, int]:
    """Return ``limits`` if this process may set them; a lower limit of its own would be mistaken for the program's.

    Raises:
        SandboxUnavailable: a hard limit of this process is lower.
    """
    import resource  # missing on Windows, where this module must still be importable

    for name, value in limits.items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        if hard != resource.RLIM_INFINITY and hard < value:
            raise SandboxUnavailable(f"{name} of this process is {hard}, but the sandbox needs {value}; raise it")
    return limits


@contextlib.contextmanager
def sealed_file(name: str, content: bytes) -> Iterator[Any]:
    """An immutable file in memory with ``content``, positioned at its start."""
    import fcntl

    with os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0) as file:
        file.write(content)
        file.seek(0)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        yield file


# --- backends -----------------------------------------------------------------------------------------------------


def namespaces_command(plan: SandboxPlan) -> list[str]:
    """Command that runs ``run_sandbox_plan`` in a new process, which has no threads and no open files of the caller."""
    root = str(Path(__file__).resolve().parents[2])
    entry = (
        f"import sys; sys.path.append({root!r}); "
        "from pytest_emad.tasks.sandbox import run_sandbox_plan; run_sandbox_plan(sys.argv[1])"
    )
    return [interpreter_path(), "-IS", "-c", entry, json.dumps(asdict(plan))]


def bwrap_command(plan: SandboxPlan) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable("there is no bwrap on PATH")
    view = plan.view
    options = [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL", "--new-session", "--die-with-parent"),
        *(word for path in view.shared for word in ("--ro-bind", path, path)),
        *(word for path, target in view.links for word in ("--symlink", target, path)),
        *(word for path in view.hidden for word in ("--size", "4096", "--tmpfs", path, "--remount-ro", path)),
        *(word for path in view.devices for word in ("--dev-bind", path, path)),
        *("--size", str(SCRATCH_BYTES), "--tmpfs", SCRATCH, "--chdir", SCRATCH, "--remount-ro", "/"),
        *("--seccomp", str(plan.filter), "--json-status-fd", str(plan.report)),
    ]
    return [bwrap, *options, "--", *plan.command]


@dataclass(frozen=True)
class SandboxBackend:
    """A backend. ``command`` returns the command line of a plan, or raises SandboxUnavailable without its program."""

    name: str
    command: Callable[[SandboxPlan], list[str]]


BACKENDS = (SandboxBackend("namespaces", namespaces_command), SandboxBackend("bwrap", bwrap_command))


@cache
def backend_unavailable_reason(backend: SandboxBackend) -> str:
    """Reason why ``backend`` is not available; "" if it is, that is, if every attempt of ``PROBE`` failed."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if platform.machine() not in MACHINES:
        return f"no system-call filter for {platform.machine()}, only for {', '.join(MACHINES)}"
    with tempfile.NamedTemporaryFile() as outside:
        os.chmod(outside.name, 0o644)  # readable for all, so that only the sandbox can hide it
        probe = PROBE.format(outside=outside.name, parent=os.getpid())
        try:
            result = run_in_backend(backend, probe, seconds=20.0, memory_bytes=512 << 20, output_bytes=4096)
        except (SandboxUnavailable, OSError) as error:
            return str(error)
    if result.outcome == "ended":
        return ""
    lines = result.stderr.strip().splitlines()
    return f"the trial run ended as {result.outcome!r}: {lines[-1] if lines else 'no message'}"


# --- system-call filter -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeccompTarget:
    """An architecture: its audit number in the kernel, number of pivot_root, and column of ``REFUSED``."""

    audit: int
    pivot_root: int
    column: int


MACHINES = {"x86_64": SeccompTarget(0xC000003E, 155, 0), "aarch64": SeccompTarget(0xC00000B7, 41, 1)}
# call → its number on each machine. Calls that need privileges, such as mount and reboot, the kernel refuses itself.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220),  # limits hold per process, so the program may have only one
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),  # a new user namespace grants privileges inside it
    "setns": (308, 268),
    "socket": (41, 198),  # a network namespace does not cover vsock, which reaches the host of a virtual machine
    "io_uring_setup": (425, 425),  # its calls bypass the filter
    "shmget": (29, 194),  # memory outside RLIMIT_AS
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "ptrace": (101, 117),  # the first process of the namespace is privileged
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "add_key": (248, 217),  # keyrings are inherited
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),  # many past kernel holes
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
}
LOAD, EQUALS, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
X32 = 0x40000000  # bit of the x32 system-call table of x86-64; no other architecture has such high numbers


def system_call_filter(machine: str) -> bytes:
    """The filter as ``struct sock_filter[]``: refused calls return EPERM, calls of another table kill the process."""
    here = MACHINES[machine]
    steps = [(LOAD, 0, 0, 4), (EQUALS, 1, 0, here.audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for number in (numbers[here.column] for numbers in REFUSED.values()):
        if number is not None:
            steps += [(EQUALS, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (RETURN, 0, 0, ALLOW)])


# --- the namespaces backend, in its own process -------------------------------------------------------------------

NEW_USER, NEW_MOUNT = 0x10000000, 0x00020000
NAMESPACES = NEW_MOUNT | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # cgroup, uts, ipc, pid, net
NO_SUID, NO_DEV, NO_EXEC, BIND, RECURSIVE, PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18  # flags of mount(2)
READ_ONLY = 1  # mount_setattr(2) has the same numbers for READ_ONLY, NO_SUID, NO_DEV and NO_EXEC


def run_sandbox_plan(plan_json: str) -> NoReturn:
    """Run the program of a plan in new namespaces and report its exit code to the caller.

    This process forks the first process of the namespaces, which forks the program, waits for it, and reports.
    """
    plan = json.loads(plan_json)
    os.umask(0o022)
    try:
        privileged = enter_new_namespaces()
        die_with_parent()  # after enter_new_namespaces: the kernel drops this setting when credentials change
        if os.getppid() != plan["caller"]:
            os._exit(0)  # the caller died before that
        outside, alive = os.pipe()
        first = os.fork()
        if first:
            os.waitpid(first, 0)
            os._exit(0)
        os.close(alive)
        die_with_parent()
        if select.select([outside], [], [], 0)[0]:
            os._exit(0)  # the pipe has ended: the outer process died before that
        build_root_filesystem(plan["view"], plan["staging"])
        program = os.fork()
        if not program:
            exec_program(plan, privileged)
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        write_report_line(plan, {"exit-code": status if status >= 0 else 128 - status})
    except SandboxUnavailable as error:
        write_report_line(plan, {"failed": str(error)})
    except Exception as error:  # in any of the three processes; the caller raises it
        write_report_line(plan, {"failed": f"{type(error).__name__}: {error}"})
    os._exit(0)


def write_report_line(plan: dict[str, Any], what: dict[str, Any]) -> None:
    os.write(plan["report"], json.dumps(what).encode() + b"\n")


def enter_new_namespaces() -> bool:
    """Enter new namespaces. Returns True if that used the privilege of root, False if a new user namespace."""
    user, group = os.geteuid(), os.getegid()
    try:
        if user == 0:
            with contextlib.suppress(PermissionError):  # root in a container may lack the capability
                call_libc("unshare", NAMESPACES)
                return True
        call_libc("unshare", NEW_USER | NAMESPACES)
    except OSError as error:
        raise SandboxUnavailable(describe_namespace_error(error)) from error
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    return False


def describe_namespace_error(error: OSError) -> str:
    """Text of the reason. The kernel reports "no space left on device" if the limit of namespaces is 0."""
    if error.errno == errno.ENOSPC:
        return "user namespaces are off, or all are in use: sysctl user.max_user_namespaces says how many there may be"
    if error.errno == errno.EPERM:
        return "user namespaces are not permitted here"
    return str(error)


def build_root_filesystem(view: dict[str, Any], root: str) -> None:
    """Mount the paths of ``view`` below ``root``, read-only except the scratch folder, and make ``root`` the new /."""
    mount("none", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEV, "mode=755,size=1m")
    for path in [*view["shared"], *view["devices"]]:
        create_mount_point(path, root + path)
        mount(path, root + path, "", BIND | RECURSIVE)
        is_device = path in view["devices"]
        set_mount_attributes(root + path, READ_ONLY | NO_SUID | (NO_EXEC if is_device else NO_DEV), recursive=True)
    for path, target in view["links"]:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for path in view["hidden"]:
        mount("tmpfs", root + path, "tmpfs", NO_SUID | NO_DEV | READ_ONLY, "mode=755,size=4k")
    os.mkdir(root + SCRATCH)
    scratch = f"mode=777,size={SCRATCH_BYTES},nr_inodes=1024"
    mount("tmpfs", root + SCRATCH, "tmpfs", NO_SUID | NO_DEV | NO_EXEC, scratch)
    set_mount_attributes(root, READ_ONLY | NO_SUID | NO_DEV, recursive=False)
    os.chdir(root)
    call_libc(
        "syscall", MACHINES[platform.machine()].pivot_root, b".", b"."
    )  # mounts the old root on top of the new one
    call_libc("umount2", b".", 2)  # 2 = MNT_DETACH: unmount although it is busy
    os.chdir(SCRATCH)


def create_mount_point(path: str, target: str) -> None:
    """Create the empty file or folder ``target`` to mount ``path`` on."""
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()


def exec_program(plan: dict[str, Any], privileged: bool) -> NoReturn:
    """Drop all privileges, install the filter and exec the program. Exec without root drops all capabilities."""
    os.set_inheritable(plan["report"], False)
    os.set_inheritable(plan["filter"], False)
    os.setsid()  # so that signals of the program to its group do not reach the waiting processes
    if privileged:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call_libc("prctl", 38, 1, 0, 0, 0)  # 38 = no_new_privs
    install_filter(os.pread(plan["filter"], 1 << 16, 0))
    os.execve(plan["command"][0], plan["command"], ENVIRONMENT)


def install_filter(steps: bytes) -> None:
    """Pass ``steps`` as ``struct sock_fprog`` to prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER)."""
    buffer = ctypes.create_string_buffer(steps, len(steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps) // 8, ctypes.addressof(buffer)))
    call_libc("prctl", 22, 2, ctypes.addressof(program), 0, 0)


def die_with_parent() -> None:
    call_libc("prctl", 1, int(signal.SIGKILL), 0, 0, 0)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    call_libc("mount", *(os.fsencode(word) for word in (source, target, kind)), flags, data.encode())


def set_mount_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    """Set attributes with mount_setattr(2), which unlike a remount includes submounts and keeps locked flags."""
    request = struct.pack("=QQQQ", attributes, 0, 0, 0)
    call_libc("syscall", 442, -100, os.fsencode(target), 0x8000 if recursive else 0, request, len(request))


def call_libc(name: str, *arguments: int | bytes) -> None:
    """Call a function of the C library that returns 0 on success.

    Raises:
        OSError: it returned something else.
    """
    library = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    if library[name](*words) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
