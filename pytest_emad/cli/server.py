"""``emad serve`` serves the reference decoder over the wire protocol (docs/wire.md) to clients in other processes.

    emad serve emad-tiny                          # one client over standard input and output, for --emad-decoder exec:
    emad serve emad-tiny --tcp 127.0.0.1:7007     # one or more clients over TCP

Over a pipe, only replies go to standard output; all other output goes to standard error.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from emad_ref.errors import BadArgument, EmadError
from pytest_emad.cli.arguments import (
    add_examples,
    add_suite_option,
    parse_float_argument,
    parse_path,
    parse_whole_number,
)
from pytest_emad.measurements.study import Study
from pytest_emad.remote.address import ServerLimits, parse_host_and_port

if TYPE_CHECKING:  # these import torch or NumPy, which is slow, so bad arguments are rejected before
    from emad_ref.models.loading import LoadedModel
    from emad_ref.protocol import Decoder, Request
    from pytest_emad.remote.messages import RequestedModel

NAME = "emad serve"
LAST_CALL_S = 5.0  # seconds for a running call when the server stops
FRAME_S = 120.0  # time limit of one frame over a socket, in either direction
PAUSE_S = 0.5  # between two attempts to accept a connection
REFUSAL_S = 0.2  # wait for the first call of a refused connection
TRANSIENT_ERRNOS = frozenset(  # errors of accept after which the server tries again
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO, errno.EPERM,
     errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
)  # fmt: skip


class ServerStopped(BaseException):
    """Raised when SIGINT or SIGTERM stops the server. It is no Exception, so that calls do not catch it."""


def serve_decoder_over_wire_protocol(args: argparse.Namespace) -> None:
    """Serve the reference decoder to clients in other processes."""
    if args.tcp is None:
        with _reserve_stdout() as replies, _stop_on_signals():
            _serve_pipe(args, replies)
    else:
        with _open_listener(args.tcp, args.anywhere) as listener, _stop_on_signals():
            _serve_sockets(args, listener)


def add_serve_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("models", nargs="+", metavar="MODEL", help="bundled name, folder or hub name")
    add("--tcp", metavar="HOST:PORT",
        help="listen on this address instead of standard input; port 0 selects a free port and prints it")  # fmt: skip
    add("--anywhere", action="store_true", help="allow --tcp to listen beyond the loopback interface")
    add(
        "--connections", type=parse_whole_number, default=16, metavar="N", help="clients of --tcp at once (default: 16)"
    )
    add("--idle", type=parse_float_argument, default=3600.0, metavar="SECONDS",
        help="disconnect a client of --tcp that sends no call for this long (default: 3600)")  # fmt: skip
    add("--sessions", type=parse_whole_number, default=ServerLimits.sessions, metavar="N",
        help=f"open sessions, and decoders, per client (default: {ServerLimits.sessions})")  # fmt: skip
    add("--positions", type=parse_whole_number, default=ServerLimits.tokens, metavar="N",
        help=f"positions in all rows of all sessions of a client (default: {ServerLimits.tokens})")  # fmt: skip
    add_suite_option(sub, "device")
    add_suite_option(sub, "dtype")
    add("--threads", type=parse_whole_number, metavar="N", help="threads of torch (default: 1 for a small model)")
    add_suite_option(sub, "seed", "here of the weights of random: and control:")
    add("--lens", action="append", type=parse_path, default=[], metavar="FILE",
        help="tuned lens of emad lens, for points that name it; repeatable")  # fmt: skip
    exit = "exit of emad screen, for points that name its lens or maps; repeatable"
    add_suite_option(sub, "exit", action="append", default=[], help=exit)
    add_examples(
        sub,
        "emad serve emad-tiny",
        "emad serve emad-tiny-plain --lens lens.safetensors",
        "emad serve emad-tiny-plain --exit exit.safetensors",
        "emad serve emad-tiny emad-nano --tcp 127.0.0.1:7007 --threads 2",
        "emad serve emad-tiny --tcp 127.0.0.1:7007 --connections 4 --idle 600 --sessions 16 --positions 65536",
        "emad serve random:gpt2 --tcp 0.0.0.0:7007 --anywhere --device cuda --dtype bfloat16 --seed 3",
    )


# ---------------------------------------------------------------- models


@contextmanager
def _load_models(args: argparse.Namespace) -> Iterator[Callable[[Request], Decoder]]:
    """Function that makes decoders of the models of ``args``, which stay loaded within the block."""
    import torch

    from pytest_emad.measurements.model_under_test import open_model

    with ExitStack() as stack:
        study = Study(device=args.device, dtype=args.dtype, seed=args.seed)
        models = [stack.enter_context(open_model(name, study)) for name in args.models]
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        for model in models:
            assert model.stepper.layers  # build and check the stepper before a client waits for it
        _attach_files(args, models)
        yield partial(_make_decoder, models, args.dtype)


def _attach_files(args: argparse.Namespace, models: Sequence[LoadedModel]) -> None:
    """Attach the files of ``--lens`` and ``--exit`` to the models that they were made for."""
    from emad_ref.calibration.lens_files import load_lens
    from emad_ref.probes.tuned_lens import attach_lens
    from pytest_emad.screening.exit import load_exit

    for file in args.lens:
        lens = load_lens(file).lens
        for model in _models_of_file("--lens", file, lens.fingerprint, models):
            attach_lens(model.stepper, lens, model.fingerprint)
    for file in args.exit:
        exit = load_exit(file)
        for model in _models_of_file("--exit", file, exit.fingerprint, models):
            exit.attach(model)


def _models_of_file(option: str, file: Path, fingerprint: str, models: Sequence[LoadedModel]) -> Sequence[LoadedModel]:
    """The served models with the ``fingerprint`` of a file.

    Raises:
        BadArgument: there is none.
    """
    matches = [model for model in models if model.fingerprint == fingerprint]
    if not matches:
        served = ", ".join(f"{model.name} ({model.fingerprint[:12]})" for model in models)
        raise BadArgument(option, str(file), f"a file of {served}", f"it was made for the model {fingerprint[:12]}")
    return matches


def _make_decoder(models: Sequence[LoadedModel], dtype: str, request: Request) -> Decoder:
    """The reference decoder of the requested model, which is identified by its weights.

    Raises:
        Unsupported: the model is not served.
        BadArgument: a model of this name is served, with other weights or another dtype.
    """
    from emad_ref.protocol import ModelRef, Unsupported
    from pytest_emad.measurements.run_resources import make_reference_decoder

    requested: RequestedModel = request.model.load()
    match = next((model for model in models if model.fingerprint == requested.fingerprint), None)
    if match is not None:
        return make_reference_decoder(replace(request, model=ModelRef(match.name, lambda: match)))
    for model in models:
        if model.name == requested.name:
            raise BadArgument(
                "model.fingerprint",
                f"{requested.fingerprint[:12]} in {requested.dtype}",
                f"{model.fingerprint[:12]} in {dtype}, the {model.name} of this server",
                f"start {NAME} with the client's weights, --dtype and --seed",
            )
    served = ", ".join(model.name for model in models)
    raise Unsupported(f"{NAME} serves {served}, not {requested.name}; add {requested.name} to its command line")


# ---------------------------------------------------------------- a pipe


@contextmanager
def _reserve_stdout() -> Iterator[int]:
    """Descriptor of standard output; within the block, everything printed there goes to standard error."""
    sys.stdout.flush()
    replies = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):  # sys.stdout may not write to descriptor 1
            yield replies
    finally:
        os.dup2(replies, 1)
        os.close(replies)


def _serve_pipe(args: argparse.Namespace, replies: int) -> None:
    from pytest_emad.remote.server import DecoderServer
    from pytest_emad.remote.transport import Stream

    try:
        with _load_models(args) as make:
            _log(f"serving {', '.join(args.models)} over standard input and output")
            served = DecoderServer(make, NAME, limits=ServerLimits(sessions=args.sessions, tokens=args.positions))
            try:
                served.serve(Stream(0, replies))
            except OSError as error:
                raise EmadError(f"lost the client: {error}") from error
    except ServerStopped:
        return


# ---------------------------------------------------------------- sockets


def _open_listener(text: str, anywhere: bool) -> socket.socket:
    """A socket that listens on the address ``text``, ``HOST:PORT``.

    Raises:
        BadArgument: no address, one beyond the loopback interface without ``anywhere``, or one that cannot be bound.
    """
    host, port = parse_host_and_port(text, text, "--tcp", range(65536))
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if not anywhere and not ipaddress.ip_address(address[0]).is_loopback:
            raise BadArgument(
                "--tcp",
                text,
                "an address of the loopback interface, e.g. 127.0.0.1:7007",
                "add --anywhere to serve every host that reaches this machine, without authentication",
            )
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise BadArgument("--tcp", text, "an address to listen on", str(error)) from error


def _serve_sockets(args: argparse.Namespace, listener: socket.socket) -> None:
    limits = ServerLimits(args.idle, FRAME_S, args.sessions, args.positions)
    with _load_models(args) as make:
        host, port = listener.getsockname()[:2]
        _log(f"listening on tcp:{f'[{host}]' if ':' in host else host}:{port}")
        try:
            _serve_clients(listener, make, args.connections, limits)
        except ServerStopped:
            return


def _serve_clients(
    listener: socket.socket, make: Callable[[Request], Decoder], connections: int, limits: ServerLimits
) -> NoReturn:
    """Serve up to ``connections`` clients at once, each in a thread; a lock serialises calls on the shared models."""
    clients: dict[threading.Thread, socket.socket] = {}
    lock = threading.Lock()
    try:
        while True:
            client = _accept(listener)
            clients = {thread: connected for thread, connected in clients.items() if thread.is_alive()}
            if len(clients) >= connections:
                _refuse_connection(
                    client, f"all {connections} connections are in use; start {NAME} with more --connections"
                )
                continue
            thread = threading.Thread(target=_serve_client, args=(client, make, lock, limits), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                _refuse_connection(client, str(error))
            else:
                clients[thread] = client
    finally:
        for thread, client in clients.items():
            if thread.is_alive():
                with suppress(OSError):  # the client has closed the connection
                    client.shutdown(socket.SHUT_RDWR)  # wakes the thread
                thread.join(LAST_CALL_S)


def _accept(listener: socket.socket) -> socket.socket:
    """Accept the next connection. After a transient error, such as too many open files, log it once and retry."""
    is_logged = False
    while True:
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS:
                raise
            if not is_logged:
                _log(f"a connection could not be accepted: {error}")
            is_logged = True
            time.sleep(PAUSE_S)


def _refuse_connection(client: socket.socket, reason: str) -> None:
    """Answer the first call of ``client`` with an error, ``reason``, and close the connection."""
    from pytest_emad.remote.client import FAILURE
    from pytest_emad.remote.frames import WireFrame, encode_frame_to_buffers

    _log(f"a client was refused: {reason}")
    with client, suppress(OSError):
        client.settimeout(REFUSAL_S)
        client.sendall(b"".join(map(bytes, encode_frame_to_buffers(WireFrame({"error": FAILURE, "message": reason})))))
        client.shutdown(socket.SHUT_WR)
        client.recv(4096)  # closing with unread data would reset the connection and lose the answer


def _serve_client(
    client: socket.socket, make: Callable[[Request], Decoder], lock: threading.Lock, limits: ServerLimits
) -> None:
    from pytest_emad.remote.server import DecoderServer
    from pytest_emad.remote.transport import Stream

    try:
        with client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            client.setblocking(False)  # deadlines of writes need it
            DecoderServer(make, NAME, lock, limits).serve(Stream(client.fileno(), client.fileno()))
    except (EmadError, OSError) as error:  # ends this connection; other clients are not affected
        _log(f"a connection ended: {error}")


def _log(message: str) -> None:
    print(f"{NAME}: {message}", file=sys.stderr, flush=True)


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Raise ``ServerStopped`` in the block on SIGINT or SIGTERM."""

    def stop(number: int, frame: Any) -> None:
        raise ServerStopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
