"""``python -m MODULE …`` in a fork of a process that has already imported torch and transformers, to save seconds.

A fork has its own memory, environment, folder and streams, and exits as an interpreter does. Tests of startup itself
(imported modules, encodings, ``-X`` options) start an interpreter instead. The packages of this project are not
imported beforehand, so a fork reads a copy of them on ``PYTHONPATH`` as a new interpreter would.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the forking process must not have imported pytest
    import pytest

IMPORTED = (
    "numpy", "scipy.stats", "scipy.optimize", "torch", "torch._dynamo", "torch.distributed.fsdp", "transformers",
    "transformers.generation", "transformers.models.auto.modeling_auto",
    "transformers.models.gpt_neox.modeling_gpt_neox", "transformers.models.llama.modeling_llama", "tokenizers",
    "safetensors.torch",
)  # fmt: skip
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # read at import, so every fork has them
_RUNS = count()
FORWARDED = (
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
)  # Python's own variables that a fork can still obey


def run_forked(
    arguments: Sequence[object], *, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return ``python -m ARGUMENTS`` with these variables (default: this process's), like ``subprocess.run``.

    Raises ValueError for a variable that only the start of an interpreter can obey.
    """
    words, variables = [*map(str, arguments)], dict(os.environ if env is None else env)
    late = [name for name in variables if name.startswith("PYTHON") and name not in FORWARDED]
    late += [name for name, value in OFFLINE.items() if variables.setdefault(name, value) != value]
    if late:
        raise ValueError(f"{', '.join(late)}: read when Python starts or imports, so start an interpreter")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        _ask({"words": words, "cwd": str(cwd), "env": variables}, [nothing.fileno(), out.fileno(), err.fileno()])
        status = os.waitstatus_to_exitcode(json.loads(_server().recv(64)))
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
    return subprocess.CompletedProcess([sys.executable, "-m", *words], status, *texts)


def run_pytest(pytester: pytest.Pytester, *arguments: object) -> pytest.RunResult:
    """Replace ``pytester.runpytest_subprocess`` by a fork."""
    plugins = [words for plugin in pytester.plugins for words in ("-p", plugin)]
    temporary = f"--basetemp={pytester.path}/forked-{next(_RUNS)}"
    start = time.perf_counter()
    done = run_forked(["pytest", temporary, *plugins, *arguments], cwd=pytester.path)
    for stream, text in ((sys.stdout, done.stdout), (sys.stderr, done.stderr)):
        print(text, file=stream)
    lines = done.stdout.splitlines(), done.stderr.splitlines()
    from _pytest.pytester import RunResult

    return RunResult(done.returncode, *lines, time.perf_counter() - start)


def _ask(request: dict[str, Any], streams: list[int]) -> None:
    message = json.dumps(request).encode()
    socket.send_fds(_server(), [len(message).to_bytes(8, "big")], streams)
    _server().sendall(message)


@cache
def _server() -> socket.socket:
    """Return the connection to the forking process, which ends when this end closes."""
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | OFFLINE
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    atexit.register(ours.close)
    return ours


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """In a fork, return the request to run; in the forking process, None once the test process has closed its end."""
    while True:
        size, streams, _, _ = socket.recv_fds(connection, 8, 3)
        if not size:
            return None
        text = b""
        while len(text) < int.from_bytes(size, "big"):
            text += connection.recv(1 << 16)
        if child := os.fork():
            for stream in streams:
                os.close(stream)
            connection.sendall(json.dumps(os.waitpid(child, 0)[1]).encode())
            continue
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return json.loads(text)


def _become(request: dict[str, Any], path: list[str]) -> None:
    """Run the request as ``python -m`` would."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [os.getcwd(), *added, *path]
    importlib.invalidate_caches()
    module, *rest = request["words"]
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    beginning = sys.path[1:]  # without this file's folder
    for name in IMPORTED:
        importlib.import_module(name)
    sys.modules["anyio"].__doc__ = "PYTEST_DONT_REWRITE"  # or pytest warns that its plugin was imported before
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would touch, and so copy, all of these pages
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        _become(asked, beginning)
