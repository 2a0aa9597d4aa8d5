"""Parse the address of a decoder: ``exec:COMMAND`` is a program, ``tcp:HOST:PORT`` a server of the wire protocol, a URL
an inference server. ``ServerLimits`` bounds a server's work for one client.

This module starts no process and does not import NumPy. A command is split like in a shell, but no shell runs it.
"""

from __future__ import annotations

import math
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from emad_ref.errors import BadArgument

ADDRESS_FORMS = "exec:COMMAND, tcp:HOST:PORT or http(s)://HOST:PORT"
SCHEMES = ("exec", "tcp", "http", "https")
PORTS = range(1, 65536)


@dataclass(frozen=True)
class ProgramAddress:
    """A command to run in ``folder``; its first word is an executable file."""

    text: str
    words: tuple[str, ...]
    folder: Path

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ServerAddress:
    text: str
    host: str
    port: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class UrlAddress:
    """``secure``: https. ``path``: before those of the interface; "" at the root."""

    text: str
    host: str
    port: int
    path: str
    secure: bool

    def __str__(self) -> str:
        return self.text


WireAddress = ProgramAddress | ServerAddress
Address = WireAddress | UrlAddress


def is_address(text: str) -> bool:
    """Whether ``text`` begins with the scheme of an address."""
    return text.strip().partition(":")[0] in SCHEMES


def parse_address(text: str, base: Path, where: str) -> Address:
    """The address in ``text``; a program's path is relative to ``base``, where it runs.

    Raises:
        BadArgument: with the name ``where``: another scheme, an empty command, a program that is missing or not
            executable, no host and port, a URL with a user, a query or a fragment.
    """
    scheme, _, rest = text.strip().partition(":")
    if scheme == "exec":
        return _parse_program(text.strip(), rest, base, where)
    if scheme == "tcp":
        return ServerAddress(text.strip(), *parse_host_and_port(rest, text, where))
    if scheme in ("http", "https"):
        return _parse_url(text.strip(), where)
    raise BadArgument(where, text, ADDRESS_FORMS)


def parse_url(text: str, base: Path, where: str) -> UrlAddress:
    """The URL of an inference server; ``base`` is not used. Raises BadArgument as ``parse_address``."""
    if text.strip().partition(":")[0] not in ("http", "https"):
        raise BadArgument(where, text, "http(s)://HOST:PORT, with a path or without")
    return _parse_url(text.strip(), where)


def _parse_url(text: str, where: str) -> UrlAddress:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadArgument(where, text, "a URL", str(error)) from error
    if not host or parts.query or parts.fragment or "@" in parts.netloc or port == 0:
        remedy = "a key goes into the environment as EMAD_DECODER_TOKEN"
        raise BadArgument(where, text, "http(s)://HOST:PORT, with a path or without", remedy)
    secure = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return UrlAddress(text, host, port or (443 if secure else 80), path, secure)


def _parse_program(text: str, command: str, base: Path, where: str) -> ProgramAddress:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadArgument(where, text, "a command with its quotes closed", str(error)) from error
    if not words or not words[0]:
        raise BadArgument(where, text, "a command behind exec:", "e.g. exec:./decoder --threads 1")
    program = words[0]
    # a bare name is searched along PATH, as in a shell; a name with a slash is relative to base
    executable = shutil.which(str(base / program) if "/" in program else program)
    if executable is None:
        looked = f"looked at {base / program}" if "/" in program else "looked along PATH; ./NAME means this folder"
        raise BadArgument(where, text, "a program that is there and can be run", looked)
    return ProgramAddress(text, (executable, *words[1:]), base)


def parse_host_and_port(rest: str, text: str, where: str, ports: range = PORTS) -> tuple[str, int]:
    """``HOST:PORT``, an IPv6 address in brackets or not. Raises BadArgument."""
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        scheme = text.removesuffix(rest)  # of an address; an option for a host and a port has none
        raise BadArgument(
            where, text, ADDRESS_FORMS if scheme else "HOST:PORT", f"name both, e.g. {scheme.strip()}127.0.0.1:7007"
        )
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) in ports):
        raise BadArgument(where, text, f"a port in {ports[0]}–{ports[-1]} behind the last colon")
    return host, int(port)


@dataclass(frozen=True)
class ServerLimits:
    """Limits for one client; ``inf`` is no limit.

    ``idle_s``: seconds between two calls. ``frame_s``: seconds that one frame takes, in either direction. ``sessions``:
    open at once, and as many decoders. ``tokens``: positions of all open sessions over all rows, including those of a
    ``generate`` in progress: K/V is kept for each.
    """

    idle_s: float = math.inf
    frame_s: float = math.inf
    sessions: int = 64
    tokens: int = 1 << 17
