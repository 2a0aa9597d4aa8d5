"""A supervised program ends as it would alone, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from emad_ref.workers import supervisor
from tests.unit.workers.test_child_process import gone

pytestmark = pytest.mark.skipif(not supervisor.is_supervision_available(), reason="no supervisor on this system")

LEAVES = {  # a process that leaves the group and session of its parent, by method; it prints its id
    "setsid": "if not os.fork(): os.setsid(); stay()",
    "daemon": "if not os.fork():\n    os.setsid()\n    if not os.fork(): stay()\n    os._exit(0)\nos.wait()",
    "orphan without a name": (
        "if not os.fork():\n    if not os.fork():\n        os.setsid()\n"
        "        os.write(1, b'%d\\n' % os.getpid())\n"
        "        os.execve('/bin/sleep', ['[kworker/0:1) S 1 (]', '60'], {})\n    os._exit(0)\nos.wait()"
    ),
    "chain": (
        "if not os.fork():\n    for _ in range(5):\n        if os.fork(): os._exit(0)\n        os.setsid()\n"
        "    stay()\nos.wait()"
    ),
}
PROGRAM = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
def stay():
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)
    os._exit(0)
"""


def started(program, *words, **options):
    line = supervisor.supervised_command([sys.executable, "-c", program, *words])
    return subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True, **options)


@pytest.mark.parametrize("left", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("ends", [False, True], ids=["killed", "ends by itself"])
def test_nothing_is_left_behind(left, ends):
    after = "os.write(1, b'over\\n')" if ends else "time.sleep(60)"
    process = started(f"{PROGRAM}\n{left}\ntime.sleep(0.3)\n{after}")
    child = int(process.stdout.readline())
    began = time.monotonic()
    if not ends:
        supervisor.kill_process_tree(process)
    process.wait(10)
    assert gone(child)
    assert time.monotonic() - began < supervisor.KILL_S
    process.stdout.close()


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os.close(0); os.close(1)", 0),
    ],
)
def test_it_ends_as_the_program_ends(program, status):
    with started(program) as process:
        assert process.wait(10) == status


def test_an_interrupt_reaches_the_program_once():
    # without ``print``: a signal may arrive while it still holds the buffer that the handler would write to
    program = "import os, signal, time\nsignal.signal(signal.SIGINT, lambda *_: os.write(1, b'heard\\n'))\n"
    with started(f"{program}os.write(1, b'ready\\n')\ntime.sleep(0.5)") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)  # as a terminal sends it, to the program itself
        process.send_signal(supervisor.INTERRUPT)
        assert process.stdout.read() == b"heard\n"


def test_streams_signals_environment_and_folder_are_the_programs_own(tmp_path):
    program = (
        "import os, signal, sys\n"
        "print(os.getcwd(), os.environ['MARK'], sys.stdin.read(), signal.getsignal(signal.SIGINT) is not None,\n"
        "      signal.getsignal(signal.SIGINT) is signal.default_int_handler, sorted(os.listdir('/proc/self/fd'))[:4])"
    )
    environment = os.environ | {"MARK": "x"}
    line = supervisor.supervised_command([sys.executable, "-c", program])
    found = subprocess.run(line, input=b"in", capture_output=True, cwd=tmp_path, env=environment, check=True)
    heeded = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # ignored in a shell's background job
    assert found.stdout.decode().split() == [
        *(str(tmp_path), "x", "in", "True", str(heeded)),
        *("['0',", "'1',", "'2',", "'3']"),
    ]


def test_a_stream_that_the_program_closes_is_closed():
    with started("import os, time\nos.close(1)\ntime.sleep(5)") as process:
        began = time.monotonic()
        assert process.stdout.read() == b""
        assert time.monotonic() - began < 4
        supervisor.kill_process_tree(process)


def test_a_program_that_cannot_be_started_is_said(tmp_path):
    script = tmp_path / "script"
    script.write_text("no interpreter is named here")
    script.chmod(0o755)
    found = subprocess.run(supervisor.supervised_command([str(script)]), capture_output=True, check=False)
    assert found.returncode == 1
    assert found.stderr.decode() == f"{script} cannot be started: Exec format error\n"


def test_elsewhere_a_program_is_started_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert supervisor.supervised_command(("./decoder", "--threads", "1")) == ["./decoder", "--threads", "1"]


def test_it_can_be_imported_where_there_are_fewer_signals():
    """Windows has no SIGUSR1, and starts without a supervisor."""
    line = "import signal; del signal.SIGUSR1; import emad_ref.workers.supervisor"
    subprocess.run([sys.executable, "-c", line], check=True)
