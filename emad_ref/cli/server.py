"""``emad serve``: the reference decoder behind the wire protocol (docs/wire.md), for judges in other processes.

emad serve emad-tiny                          # over standard input and output, as --emad-decoder exec: starts it
emad serve emad-tiny --tcp 127.0.0.1:7007     # over a socket, one judge or several

Over a pipe, standard output belongs to replies: whatever else is printed goes to standard error.
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
from typing import TYPE_CHECKING, Any, NoReturn

from emad_ref.cli.arguments import add_examples
from emad_ref.errors import BadArgument, EmadError
from emad_ref.measurements import option_values
from emad_ref.measurements.study import Study
from emad_ref.protocol import Decoder, Request, Unsupported
from emad_ref.wire.address import parse_host_and_port
from emad_ref.wire.client import FAILURE
from emad_ref.wire.frames import WireFrame, encode_frame
from emad_ref.wire.messages import ServedModel
from emad_ref.wire.server import DecoderServer, ServerLimits
from emad_ref.wire.transport import Stream

if TYPE_CHECKING:  # it brings torch, which bad arguments need not wait for
    from emad_ref.models.loading import LoadedModel

NAME = "emad serve"
LAST_CALL_S = 5.0  # for the call that a judge is in when the server ends
FRAME_S = 120.0  # for one frame of a judge behind a socket, in either direction
PAUSE_S, FIRST_CALL_S = (
    0.5,
    0.2,
)  # after a connection that could not be taken; for the first call of one that is turned away
TRANSIENT_ERRNOS = frozenset(  # of accept: what ends by itself, and is no end of the service
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO, errno.EPERM,
     errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
)  # fmt: skip


class ServerStopped(BaseException):
    """SIGINT or SIGTERM: the server is asked to end. No call may take it for a failure of its own."""


def serve(args: argparse.Namespace) -> None:
    """Serve the reference decoder to judges in other processes."""
    if args.tokens < 1:
        raise BadArgument("tokens", args.tokens, "a whole number ≥ 1")
    if args.tcp is None:
        with _reserve_stdout() as replies, _stops_on_signals():
            _serve_pipe(args, replies)
    else:
        listener = _listener(args.tcp, args.anywhere)
        with listener, _stops_on_signals():
            _serve_sockets(args, listener)


def serve_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("models", nargs="+", metavar="MODEL", help="bundled name, folder or hub name")
    sub.add_argument("--tcp", metavar="HOST:PORT", help="a socket in place of the pipe; port 0: any, which is printed")
    sub.add_argument("--anywhere", action="store_true", help="let --tcp listen beyond the loopback interface")
    sub.add_argument("--connections", type=int, default=16, metavar="N", help="judges of --tcp at once; 16 by default")
    sub.add_argument("--idle", type=float, default=3600.0, metavar="SECONDS",
                     help="after which a silent judge of --tcp is let go; 3600 by default")  # fmt: skip
    sub.add_argument("--sessions", type=int, default=ServerLimits.sessions, metavar="N",
                     help=f"open sessions of one judge, and decoders; {ServerLimits.sessions} by default")  # fmt: skip
    sub.add_argument("--tokens", type=int, default=ServerLimits.tokens, metavar="N",
                     help=f"positions that one judge's sessions hold, over all rows; {ServerLimits.tokens} by default"
                     )  # fmt: skip
    sub.add_argument("--device", default="cpu", metavar="DEVICE", help="as torch names it, or auto; cpu by default")
    sub.add_argument(
        "--dtype", choices=option_values.DTYPES, default="float32", help="of the weights; float32 by default"
    )
    sub.add_argument("--threads", type=int, metavar="N", help="of torch; default: one for small models")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of random: and control: weights; 0 by default")
    sub.add_argument("--lens", action="append", default=[], metavar="FILE",
                     help="a tuned lens that points may name, written by emad lens; again for more")  # fmt: skip
    sub.add_argument("--exit", action="append", default=[], metavar="FILE",
                     help="lens and maps that points may name, written by emad screen; again for more")  # fmt: skip
    add_examples(
        sub,
        "emad serve emad-tiny",
        "emad serve emad-tiny-plain --lens lens.safetensors",
        "emad serve emad-tiny-plain --exit exit.safetensors",
        "emad serve emad-tiny emad-nano --tcp 127.0.0.1:7007 --threads 2",
        "emad serve emad-tiny --tcp 127.0.0.1:7007 --connections 4 --idle 600 --sessions 16 --tokens 65536",
        "emad serve random:gpt2 --tcp 0.0.0.0:7007 --anywhere --device cuda --dtype bfloat16 --seed 3",
    )


# ---------------------------------------------------------------- models


@contextmanager
def _load_models(args: argparse.Namespace) -> Iterator[Callable[[Request], Decoder]]:
    """What makes decoders of the models asked for, loaded as long as the block lasts."""
    import torch

    from emad_ref.measurements.model_under_test import open_model

    with ExitStack() as stack:
        study = Study(device=args.device, dtype=args.dtype, seed=args.seed)
        models = [stack.enter_context(open_model(name, study)) for name in args.models]
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        for model in models:
            assert model.stepper.layers  # walked once and compared before the first judge waits for it
        _attach(args, models)
        yield partial(_make_decoder, models, args.dtype)


def _attach(args: argparse.Namespace, models: Sequence[LoadedModel]) -> None:
    """Attach what ``--lens`` and ``--exit`` name to the models that it was made on."""
    from emad_ref.calibration.lens_files import load_lens
    from emad_ref.probes.lens import attach_lens
    from emad_ref.screening.exit import load_exit

    for path in args.lens:
        lens = load_lens(path).lens
        for model in _models_of_file("--lens", path, lens.fingerprint, models):
            attach_lens(model.stepper, lens, model.fingerprint)
    for path in args.exit:
        found = load_exit(path)
        for model in _models_of_file("--exit", path, found.fingerprint, models):
            found.attach(model)


def _models_of_file(option: str, path: str, fingerprint: str, models: Sequence[LoadedModel]) -> Sequence[LoadedModel]:
    """The models that a file was made on, by its ``fingerprint``. Raises BadArgument where that is none of them."""
    meant = [model for model in models if model.fingerprint == fingerprint]
    if not meant:
        served = ", ".join(f"{model.name} ({model.fingerprint[:12]})" for model in models)
        raise BadArgument(option, path, f"one of {served}", f"it is of {fingerprint[:12]}")
    return meant


def _make_decoder(models: Sequence[LoadedModel], dtype: str, request: Request) -> Decoder:
    """Our decoder of the model that is meant: the one with those very weights.

    Raises:
        Unsupported: a model that is not served here.
        BadArgument: one of that name is, with other weights or in another precision.
    """
    from emad_ref.measurements.run_resources import make_reference_decoder
    from emad_ref.protocol import ModelRef

    wanted: ServedModel = request.model.load()
    meant = next((model for model in models if model.fingerprint == wanted.fingerprint), None)
    if meant is not None:
        return make_reference_decoder(replace(request, model=ModelRef(meant.name, lambda: meant)))
    for model in models:
        if model.name == wanted.name:
            raise BadArgument(
                "model.fingerprint",
                f"{wanted.fingerprint[:12]} in {wanted.dtype}",
                f"{model.fingerprint[:12]} in {dtype}, the {model.name} of this server",
                "start it with the judge's --dtype, --seed and weights",
            )
    served = ", ".join(model.name for model in models)
    raise Unsupported(f"{NAME} has {served}, not {wanted.name}; name it on its command line, too")


# ---------------------------------------------------------------- a pipe


@contextmanager
def _reserve_stdout() -> Iterator[int]:
    """A descriptor of standard output; meanwhile whatever is printed there goes to standard error."""
    sys.stdout.flush()
    replies = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):  # which need not lead to descriptor 1
            yield replies
    finally:
        os.dup2(replies, 1)
        os.close(replies)


def _serve_pipe(args: argparse.Namespace, replies: int) -> None:
    try:
        with _load_models(args) as make:
            _log(f"serving {', '.join(args.models)} over standard input and output")
            limits = ServerLimits(sessions=args.sessions, tokens=args.tokens)
            DecoderServer(make, NAME, limits=limits).serve(Stream(0, replies))
    except ServerStopped:
        return
    except OSError as error:
        raise EmadError(f"the judge is gone: {error}") from error


# ---------------------------------------------------------------- sockets


def _listener(text: str, anywhere: bool) -> socket.socket:
    """Raises BadArgument: no address, one beyond this machine without ``anywhere``, one that cannot be had."""
    host, port = parse_host_and_port(text, text, "--tcp", range(65536))
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if not anywhere and not ipaddress.ip_address(place[0]).is_loopback:
            raise BadArgument(
                "--tcp",
                text,
                "an address of the loopback interface, e.g. 127.0.0.1:7007",
                "add --anywhere to serve whoever can reach this machine: nothing asks who they are",
            )
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        raise BadArgument("--tcp", text, "an address to listen on", str(error)) from error


def _serve_sockets(args: argparse.Namespace, listener: socket.socket) -> None:
    limits = ServerLimits(args.idle, FRAME_S, args.sessions, args.tokens)
    with _load_models(args) as make:
        host, port = listener.getsockname()[:2]
        _log(f"listening on tcp:{f'[{host}]' if ':' in host else host}:{port}")
        try:
            _serve_judges(listener, make, args.connections, limits)
        except ServerStopped:
            return


def _serve_judges(
    listener: socket.socket, make: Callable[[Request], Decoder], connections: int, limits: ServerLimits
) -> NoReturn:
    """One thread for each of at most so many judges; their calls take turns, for the models are shared."""
    judges: dict[threading.Thread, socket.socket] = {}
    turn = threading.Lock()
    try:
        while True:
            judge = _accept(listener)
            judges = {thread: known for thread, known in judges.items() if thread.is_alive()}
            if len(judges) >= connections:
                _refuse_connection(
                    judge, f"{connections} judges are served already; --connections of {NAME} allows more"
                )
                continue
            thread = threading.Thread(target=_serve_judge, args=(judge, make, turn, limits), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                _refuse_connection(judge, str(error))
            else:
                judges[thread] = judge
    finally:
        for thread, judge in judges.items():
            if thread.is_alive():
                _close_connection(judge)
                thread.join(LAST_CALL_S)


def _accept(listener: socket.socket) -> socket.socket:
    """The next connection. What ends by itself, such as too many open files, is said once and waited for."""
    said = False
    while True:
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS:
                raise
            if not said:
                _log(f"a connection could not be taken: {error}")
            said = True
            time.sleep(PAUSE_S)


def _refuse_connection(judge: socket.socket, reason: str) -> None:
    """Answer its first call with ``reason``, and close."""
    _log(f"a judge was turned away: {reason}")
    with judge, suppress(OSError):
        judge.settimeout(FIRST_CALL_S)
        judge.sendall(b"".join(map(bytes, encode_frame(WireFrame({"error": FAILURE, "message": reason})))))
        judge.shutdown(socket.SHUT_WR)
        judge.recv(4096)  # what is left unread would take the answer with it


def _serve_judge(
    judge: socket.socket, make: Callable[[Request], Decoder], turn: threading.Lock, limits: ServerLimits
) -> None:
    try:
        with judge:
            judge.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            judge.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            judge.setblocking(False)  # so that writing ends in time
            DecoderServer(make, NAME, turn, limits).serve(Stream(judge.fileno(), judge.fileno()))
    except (EmadError, OSError) as error:  # the end of this judge's connection: others are served on
        _log(f"a judge left: {error}")


def _close_connection(judge: socket.socket) -> None:
    """Wake the thread that waits for it."""
    try:
        judge.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has left by itself
        return


def _log(what: str) -> None:
    print(f"{NAME}: {what}", file=sys.stderr, flush=True)


@contextmanager
def _stops_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the block by ``ServerStopped``."""

    def stop(number: int, frame: Any) -> None:
        raise ServerStopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
