"""A Hugging Face hub on the loopback interface: it answers the requests of huggingface_hub from folders.

    GET, HEAD  /OWNER/NAME/resolve/REVISION/FILE       content, ETag, X-Repo-Commit; a Range continues
    GET        /api/models/OWNER/NAME[/revision/REVISION], …/tree/REVISION

Faults belong to a repository: gated, absent, weight files cut in the middle.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.decoders.engine_server import in_thread

RESOLVE = re.compile(r"^/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
API = re.compile(r"^/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+).*)?$")


@dataclass
class Repository:
    """``commits``: revision → (commit, folder). ``cuts``: the number of further downloads of weights to break off."""

    commits: dict[str, tuple[str, Path]]
    gated: bool = False
    cuts: int = 0

    def at(self, revision: str) -> tuple[str, Path] | None:
        by_commit = {commit: (commit, folder) for commit, folder in self.commits.values()}
        return self.commits.get(revision) or by_commit.get(revision)


@dataclass
class Hub:
    """``asked``: requests per path; ``ranges``: the requested ranges."""

    repositories: dict[str, Repository]
    asked: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    address: str = ""

    @contextmanager
    def running(self) -> Iterator[Hub]:
        """Serve in threads of this process until the block ends."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.address = f"http://127.0.0.1:{server.server_address[1]}"
        with in_thread(server):
            yield self


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and content are sent separately

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        """Log nothing; ``Hub.asked`` has the requests."""

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked[path] += body
        if path == "/":
            return self._send(200, b"", body)
        if path == "/mend":
            for repository in self.hub.repositories.values():
                repository.cuts = 0
            return self._send(200, b"", body)
        asked = RESOLVE.match(path) or API.match(path)
        repository = self.hub.repositories.get(asked[1]) if asked else None
        if asked is None or repository is None:
            return self._send(401, b"Invalid username or password.", body, {"X-Error-Code": "RepoNotFound"})
        resolves = asked.re is RESOLVE
        place = repository.at((asked[2] if resolves else asked[3]) or "main")
        if place is None:
            return self._send(404, b"Invalid rev id", body, {"X-Error-Code": "RevisionNotFound"})
        commit, folder = place
        if not resolves:
            return self._send(200, json.dumps(_listed(asked[1], asked[2], commit, folder)).encode(), body)
        if repository.gated:
            return self._send(403, b"Access is restricted.", body, {"X-Error-Code": "GatedRepo"})
        if not (folder / asked[3]).is_file():
            missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            return self._send(404, b"Entry not found", body, missing)
        content = (folder / asked[3]).read_bytes()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        return self._content(repository, asked[3], content, headers, body)

    def _content(self, repository: Repository, name: str, content: bytes, headers: dict[str, str], body: bool) -> None:
        status, first = 200, 0
        if body and (asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            self.hub.ranges.append(f"{name} {asked[1]}")
            status, first = 206, int(asked[1])
            headers |= {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
        if body and name.endswith((".safetensors", ".bin")) and repository.cuts:
            repository.cuts -= 1
            self._send(status, content[first:], True, headers, upto=max(len(content) // 2 - first, 0))
            self.close_connection = True
            return
        self._send(status, content[first:], body, headers)

    def _send(
        self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None, upto: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[:upto])
            self.wfile.flush()


def _listed(name: str, kind: str | None, commit: str, folder: Path) -> Any:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if kind == "tree":
        oid = hashlib.sha1(commit.encode()).hexdigest()
        return [{"type": "file", "oid": oid, "size": path.stat().st_size, "path": path.name} for path in files]
    return {"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": path.name} for path in files]}
