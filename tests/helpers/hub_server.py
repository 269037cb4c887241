"""A stand-in for the Hub on this machine: what the real client needs to create, push, list and pull models.

Repositories live in memory; every commit is a complete mapping from paths to contents, so that a commit is there as a
whole or not at all. Tokens are checked, pages and the Xet protocol do not exist (set HF_HUB_DISABLE_XET=1). It says
nothing about limits and checks of the real Hub.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]
LARGE = ".safetensors"


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """Commits by hash, branches by name, and who may read."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: Files) -> str:
        listing = "\n".join(f"{path} {git_hash(content)}" for path, content in sorted(files.items()))
        number = hashlib.sha1(f"{len(self.commits)}\n{listing}".encode()).hexdigest()
        self.commits[number], self.branches[branch] = files, number
        return number

    def files(self, branch: str = "main") -> Files:
        return self.commits[self.branches[branch]]


class HubServer:
    """The server; as a context manager it runs on a free port.

    Attributes:
        token: the one that may write, and read private repositories.
        repositories: by name.
        hold: if set, the content of large files is awaited, but never acknowledged; `held` tells that one came.
    """

    def __init__(self) -> None:
        self.token = "hf_" + "TestTokenOfNobody"
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.hold, self.held = False, threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Refusal(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        data = self._body()
        try:
            for pattern, method in _ROUTES:
                if match := re.fullmatch(pattern, path):
                    return method(self, data, *match.groups())
            raise _Refusal(404, "NotFound")
        except _Refusal as refusal:
            self._send({"error": refusal.code}, refusal.status, {"X-Error-Code": refusal.code})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _authorize(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise _Refusal(401, "Unauthorized")

    def _repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository is None or (repository.private and not known):
            # The Hub does not tell whether a private repository exists.
            raise _Refusal(404 if known else 401, "RepoNotFound")
        return repository

    def _revision(self, name: str, revision: str) -> tuple[str, Files]:
        repository = self._repository(name)
        number = repository.branches.get(revision, revision)
        if number not in repository.commits:
            raise _Refusal(404, "RevisionNotFound")
        return number, repository.commits[number]

    # ------------------------------------------------------------------------------------------------------- writing
    def create(self, data: bytes) -> None:
        self._authorize()
        wanted = json.loads(data)
        name = f"{wanted.get('organization') or 'nobody'}/{wanted['name']}"
        exists = name in self.hub.repositories
        if not exists:
            repository = self.hub.repositories[name] = Repository(wanted.get("visibility") == "private")
            repository.commit("main", {})
        self._send({"url": f"{self.hub.url}/{name}", "error": "exists"}, 409 if exists else 200)

    def branch(self, data: bytes, name: str, branch: str) -> None:
        self._authorize()
        repository = self._repository(name)
        exists = branch in repository.branches
        if not exists:
            start = json.loads(data or b"{}").get("startingPoint", "main")
            repository.branches[branch] = self._revision(name, start)[0]
        self._send({"error": "exists"}, 409 if exists else 200)

    def preupload(self, data: bytes, name: str, revision: str) -> None:
        self._authorize()
        self._revision(name, revision)
        paths = [file["path"] for file in json.loads(data)["files"]]
        modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
        self._send({"files": [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]})

    def batch(self, data: bytes, name: str) -> None:
        self._authorize()
        objects = [{key: item[key] for key in ("oid", "size")} for item in json.loads(data)["objects"]]
        for item in objects:
            if item["oid"] not in self.hub.large:
                item["actions"] = {"upload": {"href": f"{self.hub.url}/large/{item['oid']}"}}
        self._send({"objects": objects, "transfer": "basic"})

    def store(self, data: bytes, oid: str) -> None:
        if self.hub.hold:
            self.hub.held.set()
            threading.Event().wait(60)
        if hashlib.sha256(data).hexdigest() != oid:
            raise _Refusal(400, "WrongContent")
        self.hub.large[oid] = data
        self._send(b"")

    def commit(self, data: bytes, name: str, branch: str) -> None:
        self._authorize()
        files = dict(self._revision(name, branch)[1])
        for line in map(json.loads, data.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        number = self._repository(name).commit(branch, files)
        self._send({"commitOid": number, "commitUrl": f"{self.hub.url}/{name}/commit/{number}", "success": True})

    # ------------------------------------------------------------------------------------------------------- reading
    def describe(self, data: bytes, name: str, revision: str | None) -> None:
        number, files = self._revision(name, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(files)]
        self._send({"id": name, "sha": number, "private": False, "tags": [], "siblings": siblings})

    def tree(self, data: bytes, name: str, revision: str, folder: str | None) -> None:
        _, files = self._revision(name, revision)
        listed = {path: content for path, content in files.items() if path.startswith(f"{folder}/" if folder else "")}
        if folder and not listed:
            raise _Refusal(404, "EntryNotFound")
        kinds = {path: {"type": "file", "path": path, "size": len(listed[path])} for path in sorted(listed)}
        self._send([{**kinds[path], "oid": git_hash(listed[path])} for path in kinds])

    def resolve(self, data: bytes, name: str, revision: str, path: str) -> None:
        number, files = self._revision(name, revision)
        if path not in files:
            return self._send({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": number})
        content, headers = files[path], {"X-Repo-Commit": number, "ETag": f'"{git_hash(files[path])}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            return self._send(content, 200, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        self._send(content[first : last + 1], 206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"})

    def validate(self, data: bytes) -> None:
        self._send({"errors": [], "warnings": []})

    def whoami(self, data: bytes) -> None:
        self._authorize()
        self._send({"type": "user", "name": "nobody", "orgs": []})


_NAME = r"/api/models/([^/]+/[^/]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.validate),
    (r"/api/whoami-v2", _Handler.whoami),
    (rf"{_NAME}/branch/(.+)", _Handler.branch),
    (rf"{_NAME}/preupload/(.+)", _Handler.preupload),
    (rf"{_NAME}/commit/(.+)", _Handler.commit),
    (rf"{_NAME}/tree/([^/]+)(?:/(.+))?", _Handler.tree),
    (rf"{_NAME}(?:/revision/(.+))?", _Handler.describe),
    (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/large/(\w+)", _Handler.store),
    (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", _Handler.resolve),
]
