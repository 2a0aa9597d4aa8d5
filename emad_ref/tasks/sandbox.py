"""Runs a program nobody has read, such as a model's answer to a programming task, where it can do no harm.

``run_program`` gives the program one process and one thread on Linux with

- a file system of its own: the interpreter, its standard library and the system's libraries, all read-only, and one
  empty scratch folder in memory, which is its cwd, HOME and TMPDIR and vanishes with it; no /proc, no site-packages,
- user, mount, pid, network, ipc, uts and cgroup namespaces of its own, no privilege, no way to gain one,
- a system-call filter against new processes, sockets, memory that no limit counts, and the kernel's sharper tools,
- limits on memory, CPU time, file size and open files; a wall clock that ends everything that was started,
- an environment of five fixed variables; bounded output.

The backends are rows of one table: ``namespaces`` does it with the kernel's own calls, ``bwrap`` with bubblewrap's, for
systems that permit namespaces to bubblewrap only. A backend counts as available once it has run a program that tries
the above (``PROBE``) and seen it refused. Without one ``run_program`` raises SandboxUnavailable: code is either
confined or not executed.

``passed`` means that the program ran to its last line: ``exit()`` before the asserts passes nothing, whatever the exit
code, and what became of stdout does not matter. The proof is a random token. It reaches the program's interpreter on a
page of memory shared with the caller, leaves the page before the program starts, and is put back behind its last line.
In between no Python object that frames, modules or the garbage collector lead to refers to it: it is the argument of a
call that C code makes, which has let go of the list it came from. No file descriptor leads to the page.

What stays possible, here as in any judge that shares a process with what it judges: a program that is out to deceive
its own asserts (a result whose ``__eq__`` is always true, a trace function that skips lines), and one that searches the
interpreter's memory, byte by byte, with ctypes.

This module knows nothing of tasks, models, or whether the user has allowed code to be run: its caller asks for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import json
import math
import os
import platform
import secrets
import select
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from emad_ref.errors import BadArgument, EmadError

Ending = Literal["passed", "failed", "timeout", "memory", "killed"]

SCRATCH = "/scratch"
SCRATCH_BYTES = 16 << 20
FILE_BYTES = 8 << 20
OPEN_FILES = 64
LEAST_MEMORY_BYTES = 64 << 20  # below this the interpreter itself does not start
NOBODY = 65534
OUT_OF_MEMORY = 94  # exit code of the launcher
TOKEN_BYTES, PAGE_BYTES = 32, 4096
ENVIRONMENT = {
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "PATH": "/nonexistent",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set must not change a verdict from run to run
}

# The program's own interpreter starts here, confined already. Limits come last, so that they bind the program alone.
# Nothing below catches what the program raises: a handler is a line, and a trace function may jump from any.
LAUNCHER = f"""
import contextlib, mmap, os, resource, sys, types
limits, channel = sys.argv.pop(), int(sys.argv.pop())
unused = os.dup(channel)
os.close(unused)
page = mmap.mmap(channel, {PAGE_BYTES})
os.close(channel)
os.close(unused)  # mmap keeps a duplicate, under the lowest free number: the mapping lives without it
held = [page[:{TOKEN_BYTES}]]
page[:] = bytes({PAGE_BYTES})
def run(token):
    del token  # the sort's own memory holds it now, and nothing else
    exec(compile(sys.stdin.buffer.read(), "<program>", "exec"), vars(main))
def ended(kind, error, trace):
    if issubclass(kind, MemoryError):
        os._exit({OUT_OF_MEMORY})
    sys.__excepthook__(kind, error, trace)
sys.excepthook = ended
sys.modules["__main__"] = main = types.ModuleType("__main__")
for limit in limits.split():
    name, value = limit.split("=")
    over = 1 if name == "RLIMIT_CPU" else 0  # at the first limit a signal that says why, at the second the end
    resource.setrlimit(getattr(resource, name), (int(value), int(value) + over))
held.sort(key=run)  # a list that is being sorted looks empty to everybody else
page[:{TOKEN_BYTES}] = held[0]
for stream in (sys.stdout, sys.__stdout__):
    with contextlib.suppress(BaseException):  # closed, or replaced by anything: the program has passed
        stream.flush()
os._exit(0)
"""

# Succeeds only where everything that matters is refused.
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
    """This machine cannot confine a program, so none is run."""


@dataclass(frozen=True)
class Result:
    """How a program ended.

    ``outcome``    ``passed``: ran to its last line. ``failed``: an exception, or it left early. ``timeout``: wall-clock
                   or CPU time was up. ``memory``: ended by MemoryError. ``killed``: by a signal (a crash, as a rule).
                   Of those that did not pass it is the program's own exit code that tells them apart, so a hostile one
                   chooses among them.
    ``stdout``, ``stderr``  at most ``output_bytes`` each, undecodable bytes replaced.
    ``exit_code``  0 if passed, 128 + signal if killed, None if the wall clock ended it.
    ``truncated``  whether output was left out.
    """

    outcome: Ending
    stdout: str
    stderr: str
    exit_code: int | None
    truncated: bool = False


def run_program(
    source: str, *, seconds: float = 5.0, memory_bytes: int = 512 << 20, output_bytes: int = 64 << 10
) -> Result:
    """Run Python ``source`` confined, for at most ``seconds`` of wall-clock time, the interpreter's start included.

    ``memory_bytes`` limits the address space of the one process; ``SCRATCH_BYTES`` of files in memory come on top.
    The program ends with its caller, even a killed one (bwrap has a moment at its start when it does not notice).

    Raises:
        SandboxUnavailable: no backend of this machine confines (``availability()`` says why), or it broke.
        BadArgument: no time, less memory than an interpreter needs, a negative amount of output.
    """
    if not (0 < seconds < math.inf):
        raise BadArgument("seconds", seconds, "a positive, finite time")
    if memory_bytes < LEAST_MEMORY_BYTES:
        raise BadArgument("memory_bytes", memory_bytes, f"{LEAST_MEMORY_BYTES} or more", "an interpreter takes that")
    if output_bytes < 0:
        raise BadArgument("output_bytes", output_bytes, "0 or more")
    reason = availability()
    if reason:
        raise SandboxUnavailable(reason)
    backend = next(backend for backend in BACKENDS if not refusal(backend))
    return run_in(backend, source, seconds, memory_bytes, output_bytes)


def availability() -> str:
    """Empty if programs can be confined here; otherwise what is missing, backend by backend, and the remedy."""
    refusals = {backend.name: refusal(backend) for backend in BACKENDS}
    if not all(refusals.values()):
        return ""
    listed = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    return (
        f"generated programs cannot be confined on this machine, so none is run ({listed}); use Linux with "
        "unprivileged user namespaces (sysctl user.max_user_namespaces > 0, kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or install bubblewrap, or let the container have "
        "CAP_SYS_ADMIN and the unshare, mount and pivot_root calls"
    )


@dataclass(frozen=True)
class View:
    """What a program sees of the host: ``shared`` paths read-only, ``links`` as they are, ``hidden`` folders empty."""

    shared: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    devices: tuple[str, ...] = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class Plan:
    """One run: what the program sees, what is started, and the files that stay open for the backend."""

    view: View
    command: tuple[str, ...]
    staging: str  # an empty folder to mount the new root on; nothing is ever written into it
    report: int  # where the backend says how the program ended, as lines of JSON
    page: int  # the shared page of the token, for the program's interpreter
    filter: int  # the compiled system-call filter
    caller: int  # the process whose end is also the program's


def interpreter() -> str:
    """The real executable, not a virtual environment's link to it: it finds its library by its own place."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


@cache
def view() -> View:
    """The interpreter, its library folder, the system's libraries; installed packages hidden."""
    prefixes = {str(Path(prefix).resolve()) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    folders = system + [f"{prefix}/{name}" for prefix in sorted(prefixes) for name in ("lib", sys.platlibdir)]
    links = tuple((path, os.readlink(path)) for path in system if os.path.islink(path))
    real = sorted({path for path in folders if os.path.isdir(path) and not os.path.islink(path)})
    top = [path for path in real if not any(path.startswith(f"{other}/") for other in real)]
    files = [path for path in (interpreter(), "/etc/ld.so.cache") if not any(path.startswith(f"{f}/") for f in top)]
    packages = (found for folder in real for kind in ("site", "dist") for found in installed(Path(folder), kind))
    return View((*top, *(f for f in files if os.path.isfile(f))), links, tuple(sorted({str(p) for p in packages})))


def installed(library: Path, kind: str) -> Iterator[Path]:
    return library.glob(f"python3*/{kind}-packages")


def limits(seconds: float, memory_bytes: int) -> dict[str, int]:
    """Per process; only one process is possible, so also per program."""
    return {
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_CPU": math.ceil(seconds) + 1,  # the wall clock is first; this holds if whoever watches it is gone
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_NPROC": 16,  # a second line: the filter refuses the first new process already
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_CORE": 0,
    }


def run_in(backend: Backend, source: str, seconds: float, memory_bytes: int, output_bytes: int) -> Result:
    given = " ".join(f"{name}={value}" for name, value in within_ours(limits(seconds, memory_bytes)).items())
    token = secrets.token_bytes(TOKEN_BYTES)
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(tempfile.TemporaryDirectory(prefix="emad-sandbox-"))
        program = stack.enter_context(sealed("program", source.encode("utf-8", "surrogatepass")))
        calls = stack.enter_context(sealed("filter", system_call_filter(platform.machine())))
        page = stack.enter_context(sealed("page", token.ljust(PAGE_BYTES, b"\0"), writable=True))
        command = (interpreter(), "-sPS", "-X", "utf8", "-c", LAUNCHER, str(page.fileno()), given)
        reading, writing = os.pipe()
        report = stack.enter_context(os.fdopen(reading, "rb"))
        reporting = stack.enter_context(os.fdopen(writing, "wb"))
        plan = Plan(view(), command, staging, writing, page.fileno(), calls.fileno(), os.getpid())
        process = subprocess.Popen(
            backend.command(plan),
            stdin=program,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            pass_fds=(plan.report, plan.page, plan.filter),
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        stack.enter_context(process.stdout)
        stack.enter_context(process.stderr)
        reporting.close()  # the copy in the backend is the only one now: its end ends the stream
        streams = {process.stdout.fileno(): output_bytes, process.stderr.fileno(): output_bytes, report.fileno(): 4096}
        try:
            kept, truncated, in_time = collect(streams, process, time.monotonic() + seconds)
        finally:
            end(process)
        proved = hmac.compare_digest(os.pread(page.fileno(), TOKEN_BYTES, 0), token)
    stdout, stderr, told = (content.decode("utf-8", "replace") for content in kept.values())
    how = {key: value for line in told.splitlines() for key, value in json.loads(line).items()}
    if "failed" in how or (in_time and "exit-code" not in how and process.returncode >= 0):
        reason = how.get("failed") or stderr.strip() or f"it ended with code {process.returncode} and said nothing"
        raise SandboxUnavailable(f"the sandbox {backend.name!r} could not be set up: {reason}")
    code = how.get("exit-code", 128 - process.returncode) if in_time else None
    outcome = "passed" if proved and in_time else outcome_of(code)
    if code == 0 and not proved:
        stderr += "the program left with exit code 0 before its last line\n"
    return Result(outcome, stdout, stderr, code, truncated)


def outcome_of(code: int | None) -> Ending:
    """Of a program that has not proved that it passed. ``code`` as shells count: 128 + signal; None: the wall clock."""
    told: dict[int | None, Ending] = {None: "timeout", OUT_OF_MEMORY: "memory"}
    told |= {128 + signal_: "killed" for signal_ in signal.valid_signals()}
    told |= {128 + signal.SIGXCPU: "timeout"}
    return told.get(code, "failed")


def within_ours(wanted: dict[str, int]) -> dict[str, int]:
    """The limits themselves, if this process may set them: a lower limit of its own would pass for the program's."""
    import resource  # absent on Windows, where this module can still be asked for its availability

    for name, value in wanted.items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        if hard != resource.RLIM_INFINITY and hard < value:
            raise SandboxUnavailable(f"{name} of this process is {hard}, but the sandbox needs {value}; raise it")
    return wanted


@contextlib.contextmanager
def sealed(name: str, content: bytes, *, writable: bool = False) -> Iterator[Any]:
    """A file in memory that holds ``content``, at its start, and can never change its size, nor be written again."""
    import fcntl

    with os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0) as file:
        file.write(content)
        file.seek(0)
        size = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, size if writable else size | fcntl.F_SEAL_WRITE)
        yield file


def collect(
    streams: dict[int, int], process: subprocess.Popen[bytes], deadline: float
) -> tuple[dict[int, bytes], bool, bool]:
    """Read every stream to its end, keeping so many bytes of each: contents, whether any was cut, whether in time."""
    kept = dict.fromkeys(streams, b"")
    truncated, in_time = False, True
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if in_time and left <= 0:
                in_time = False
                end(process)  # closes the streams: what is still in them is read below
            for key, _ in selector.select(left if in_time else None):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fd)
                room = streams[key.fd] - len(kept[key.fd])
                kept[key.fd] += chunk[:room]
                truncated |= len(chunk) > room
    return kept, truncated, in_time


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the group; with the first process of its pid namespace every other one in there dies."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it ended between the two calls
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- backends -----------------------------------------------------------------------------------------------------


def namespaces_command(plan: Plan) -> list[str]:
    """This module again, in a process of its own: threads and open files of the caller's must not come along."""
    root = str(Path(__file__).resolve().parents[2])
    entry = f"import sys; sys.path.append({root!r}); from emad_ref.tasks.sandbox import enter; enter(sys.argv[1])"
    return [interpreter(), "-IS", "-c", entry, json.dumps(asdict(plan))]


def bwrap_command(plan: Plan) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable("there is no bwrap on PATH")
    seen = plan.view
    options = [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL", "--new-session", "--die-with-parent"),
        *(word for path in seen.shared for word in ("--ro-bind", path, path)),
        *(word for path, target in seen.links for word in ("--symlink", target, path)),
        *(word for path in seen.hidden for word in ("--size", "4096", "--tmpfs", path, "--remount-ro", path)),
        *(word for path in seen.devices for word in ("--dev-bind", path, path)),
        *("--size", str(SCRATCH_BYTES), "--tmpfs", SCRATCH, "--chdir", SCRATCH, "--remount-ro", "/"),
        *("--seccomp", str(plan.filter), "--json-status-fd", str(plan.report)),
    ]
    return [bwrap, *options, "--", *plan.command]


@dataclass(frozen=True)
class Backend:
    """``command`` makes the words that run a plan; raises SandboxUnavailable when something is not installed."""

    name: str
    command: Callable[[Plan], list[str]]


BACKENDS = (Backend("namespaces", namespaces_command), Backend("bwrap", bwrap_command))


@cache
def refusal(backend: Backend) -> str:
    """Empty if ``backend`` ran the probe and the probe was refused everything; otherwise the reason."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if platform.machine() not in MACHINES:
        return f"no system-call filter for {platform.machine()}, only for {', '.join(MACHINES)}"
    with tempfile.NamedTemporaryFile() as outside:
        os.chmod(outside.name, 0o644)  # so that only its being out of sight can hide it
        probe = PROBE.format(outside=outside.name, parent=os.getpid())
        try:
            result = run_in(backend, probe, seconds=20.0, memory_bytes=512 << 20, output_bytes=4096)
        except (SandboxUnavailable, OSError) as error:
            return str(error)
    if result.outcome == "passed":
        return ""
    lines = result.stderr.strip().splitlines()
    return f"the trial run ended as {result.outcome!r}: {lines[-1] if lines else 'no message'}"


# --- system-call filter -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """An architecture: the kernel's audit number of it, its pivot_root, its column of ``REFUSED``."""

    audit: int
    pivot_root: int
    column: int


MACHINES = {"x86_64": Machine(0xC000003E, 155, 0), "aarch64": Machine(0xC00000B7, 41, 1)}
# Only what a process without privilege could use: mount, chroot, reboot … the kernel refuses by itself.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220),  # one process: its limits are the program's
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),  # a namespace of its own would come with privilege inside it
    "setns": (308, 268),
    "socket": (41, 198),  # the network namespace has no vsock in it: a virtual machine's host would be in reach
    "io_uring_setup": (425, 425),  # makes calls that no filter sees
    "shmget": (29, 194),  # memory that RLIMIT_AS does not count
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "ptrace": (101, 117),  # the first process of its namespace keeps privileges
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "add_key": (248, 217),  # keyrings are inherited
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),  # long records of holes in the kernel
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
}
LOAD, EQUALS, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
X32 = 0x40000000  # x86-64's second table of the same calls; no number of another architecture is that high


def system_call_filter(machine: str) -> bytes:
    """The filter as ``struct sock_filter[]``: foreign tables kill, refused calls give EPERM, the rest goes through."""
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
READ_ONLY = 1  # attributes of mount_setattr(2) have the same numbers as these four flags of mount(2)


def enter(plan_json: str) -> NoReturn:
    """Outside → first process of the new namespaces → the program. Each waits for the next; the first one reports."""
    plan = json.loads(plan_json)
    os.umask(0o022)
    try:
        privileged = leave_namespaces()
        die_with_parent()  # only now: the kernel forgets it when credentials change
        if os.getppid() != plan["caller"]:
            os._exit(0)  # the caller died before that
        outside, held = os.pipe()
        first = os.fork()
        if first:
            os.waitpid(first, 0)
            os._exit(0)
        os.close(held)
        die_with_parent()
        if select.select([outside], [], [], 0)[0]:
            os._exit(0)  # the end of the pipe: the outer process died before that
        build_root(plan["view"], plan["staging"])
        program = os.fork()
        if not program:
            become(plan, privileged)
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        tell(plan, {"exit-code": status if status >= 0 else 128 - status})
    except SandboxUnavailable as error:
        tell(plan, {"failed": str(error)})
    except Exception as error:  # in any of the three, and whatever it is: the caller raises it
        tell(plan, {"failed": f"{type(error).__name__}: {error}"})
    os._exit(0)


def tell(plan: dict[str, Any], what: dict[str, Any]) -> None:
    os.write(plan["report"], json.dumps(what).encode() + b"\n")


def leave_namespaces() -> bool:
    """Leave all of the caller's namespaces; whether real root's privilege did it, or that over a new user namespace."""
    user, group = os.geteuid(), os.getegid()
    try:
        if user == 0:
            with contextlib.suppress(PermissionError):  # root of a container, perhaps without the capability
                call("unshare", NAMESPACES)
                return True
        call("unshare", NEW_USER | NAMESPACES)
    except OSError as error:
        raise SandboxUnavailable(why_no_namespaces(error)) from error
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    return False


def why_no_namespaces(error: OSError) -> str:
    """The kernel says "no space left on device" where an administrator set their number to 0."""
    if error.errno == errno.ENOSPC:
        return "user namespaces are off, or all are in use: sysctl user.max_user_namespaces says how many there may be"
    if error.errno == errno.EPERM:
        return "user namespaces are not permitted here"
    return str(error)


def build_root(seen: dict[str, Any], root: str) -> None:
    """Mount what is seen below ``root``, all read-only but the scratch folder, and make it this process's /."""
    mount("none", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEV, "mode=755,size=1m")
    for path in [*seen["shared"], *seen["devices"]]:
        place(path, root + path)
        mount(path, root + path, "", BIND | RECURSIVE)
        is_device = path in seen["devices"]
        restrict(root + path, READ_ONLY | NO_SUID | (NO_EXEC if is_device else NO_DEV), recursive=True)
    for path, target in seen["links"]:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for path in seen["hidden"]:
        mount("tmpfs", root + path, "tmpfs", NO_SUID | NO_DEV | READ_ONLY, "mode=755,size=4k")
    os.mkdir(root + SCRATCH)
    scratch = f"mode=777,size={SCRATCH_BYTES},nr_inodes=1024"
    mount("tmpfs", root + SCRATCH, "tmpfs", NO_SUID | NO_DEV | NO_EXEC, scratch)
    restrict(root, READ_ONLY | NO_SUID | NO_DEV, recursive=False)
    os.chdir(root)
    call("syscall", MACHINES[platform.machine()].pivot_root, b".", b".")  # the old root now lies on top of the new
    call("umount2", b".", 2)  # 2 = detach, busy or not
    os.chdir(SCRATCH)


def place(path: str, target: str) -> None:
    """An empty file or folder to mount ``path`` on."""
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()


def become(plan: dict[str, Any], privileged: bool) -> NoReturn:
    """Give up every privilege, install the filter, be the program. Not root after exec: no capability survives it."""
    os.set_inheritable(plan["report"], False)
    os.set_inheritable(plan["filter"], False)
    os.setsid()  # its signals to "my group" must not reach those who wait for it
    if privileged:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", 38, 1, 0, 0, 0)  # 38 = no_new_privs
    install(os.pread(plan["filter"], 1 << 16, 0))
    os.execve(plan["command"][0], plan["command"], ENVIRONMENT)


def install(steps: bytes) -> None:
    """``steps`` as ``struct sock_fprog`` to prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER)."""
    buffer = ctypes.create_string_buffer(steps, len(steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps) // 8, ctypes.addressof(buffer)))
    call("prctl", 22, 2, ctypes.addressof(program), 0, 0)


def die_with_parent() -> None:
    call("prctl", 1, int(signal.SIGKILL), 0, 0, 0)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    call("mount", *(os.fsencode(word) for word in (source, target, kind)), flags, data.encode())


def restrict(target: str, attributes: int, *, recursive: bool) -> None:
    """mount_setattr(2): unlike a remount it reaches the mounts below a mount, and keeps the flags that are locked."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    call("syscall", 442, -100, os.fsencode(target), 0x8000 if recursive else 0, wanted, len(wanted))


def call(name: str, *arguments: int | bytes) -> None:
    """A function of the C library that returns 0 on success.

    Raises:
        OSError: it returned something else.
    """
    library = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    if library[name](*words) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
