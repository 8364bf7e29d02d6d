"""A hub on the loopback: what huggingface_hub and datasets ask for when they read, and faults."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.serving import Loopback, Quiet

CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: socratic
  data_files: socratic/*.jsonl
---
"""
"""The card of a data set with two configurations."""

Answer = tuple[int, bytes, dict[str, str]]
_API = re.compile(r"/api/(?P<kind>datasets|models)/(?P<repo>[^/]+/[^/]+)(?:/(?P<rest>.*))?")
_FILE = re.compile(r"/(?:(?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<rest>.+)")


class Repository:
    """Commits of files, oldest first. ``gated``: only a request with the hub's token may read."""

    def __init__(self, gated: bool = False) -> None:
        self.gated = gated
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files beside the branch's earlier ones; its name."""
        before = self.commits.get(self.refs.get(branch, ""), {})
        sha = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[sha] = before | dict(files)
        self.refs[branch] = sha
        return sha


class Hub(Loopback):
    """Serves ``repositories``, by kind (``datasets`` or ``models``) and name.

    ``fail`` says what befalls the next requests whose method and path begin so: a status, a status
    with headers, ``drop`` (the connection breaks at once) or ``cut`` (it breaks amid the answer).
    ``requests`` counts those that came, and ``tokens`` holds the tokens that they brought.
    """

    def __init__(self, token: str = "hf_of_this_hub") -> None:
        super().__init__(_Handler)
        self.token = token
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.faults: dict[str, Iterator[Any]] = {}
        self.requests: Counter[str] = Counter()
        self.tokens: set[str] = set()
        self.lock = threading.Lock()

    def repository(self, name: str, kind: str = "datasets", gated: bool = False) -> Repository:
        """Return the repository of this name; made if it is not there."""
        return self.repositories.setdefault((kind, name), Repository(gated))

    def fail(self, request: str, *faults: Any) -> None:
        """Let the next requests of this kind fail; ``itertools.repeat(fault)``: all of them."""
        self.faults[request] = iter(faults[0] if len(faults) == 1 and _lasts(faults[0]) else faults)

    # ---------------------------------------------------------------- what is asked for

    def answer(self, method: str, target: str, body: bytes, token: str) -> Answer:
        """Return the answer to a request without a fault."""
        place = urlsplit(target)
        path, query = unquote(place.path), parse_qs(place.query)
        if listed := re.fullmatch("/api/(datasets|models)", path):
            return self._search(listed[1], query)
        if asked := _API.fullmatch(path):
            return self._api(asked, query, body, token)
        if asked := _FILE.fullmatch(path):
            return self._file(asked, token)
        return _error(404, "EntryNotFound", f"there is no {path}")

    def _search(self, kind: str, query: Mapping[str, list[str]]) -> Answer:
        [words] = query.get("search", [""])
        names = [name for of, name in self.repositories if of == kind and words in name]
        return _json([{"id": name, "_id": name} for name in names])

    def _api(
        self, asked: re.Match[str], query: Mapping[str, list[str]], body: bytes, token: str
    ) -> Answer:
        found = self._readable(asked, token)
        if not isinstance(found, Repository):
            return found
        if asked["rest"] == "refs":
            refs = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
                for name, sha in found.refs.items()
            ]
            return _json({"branches": refs, "tags": [], "converts": [], "pullRequests": []})
        action, _, rest = (asked["rest"] or "revision/main").partition("/")
        revision, _, path = rest.partition("/")
        sha = found.refs.get(revision, revision)
        if sha not in found.commits:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = found.commits[sha]
        if action == "revision":
            info = {"id": asked["repo"], "sha": sha, "private": False, "gated": found.gated}
            return _json(info | {"siblings": [{"rfilename": name} for name in files]})
        if action == "paths-info":
            paths = self.paths_of(body)
            return _json([one for path in paths for one in _entries(files, path, itself=True)])
        if action == "tree":
            deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            entries = _entries(files, path, itself=False, deep=deep)
            if path and not entries:
                return _error(404, "EntryNotFound", f"{path} does not exist on {revision}")
            return _json(entries)
        return _error(404, "EntryNotFound", f"there is no {action}")

    @staticmethod
    def paths_of(body: bytes) -> list[str]:
        """Return the paths that a form or JSON asks about."""
        text = body.decode()
        return json.loads(text)["paths"] if text.startswith("{") else parse_qs(text)["paths"]

    def _file(self, asked: re.Match[str], token: str) -> Answer:
        found = self._readable(asked, token)
        if not isinstance(found, Repository):
            return found
        revision, _, path = asked["rest"].partition("/")
        sha = found.refs.get(revision, revision)
        if sha not in found.commits:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        content = found.commits[sha].get(path)
        if content is None:
            message = f"{path} does not exist on {revision}"
            return _error(404, "EntryNotFound", message, X_Repo_Commit=sha)
        return 200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": sha}

    def _readable(self, asked: re.Match[str], token: str) -> Repository | Answer:
        kind = asked["kind"] or "models"
        found = self.repositories.get((kind, asked["repo"]))
        # The hub does not tell anonymous clients which repositories there are.
        if found is None:
            status = 404 if token == self.token else 401
            return _error(status, "RepoNotFound", "Repository not found")
        if found.gated and token != self.token:
            return _error(401, "GatedRepo", f"Access to {asked['repo']} is restricted")
        return found


class _Handler(Quiet):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        body = self.body()
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        with self.server.lock:
            asked = f"{method} {unquote(urlsplit(self.path).path)}"
            self.server.requests[asked] += 1
            self.server.tokens.add(token)
            found = [f for begin, f in self.server.faults.items() if asked.startswith(begin)]
            fault = next((one for faults in found for one in faults), None)
        if fault == "drop":
            self.close_connection = True
            return
        if fault is None or fault == "cut":
            status, content, headers = self.server.answer(method, self.path, body, token)
        else:
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            content = b'{"error": "no"}'
        self._send(method, status, content, headers, cut=fault == "cut")

    def _send(
        self, method: str, status: int, content: bytes, headers: Mapping[str, str], cut: bool
    ) -> None:
        part, wanted = content, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if status == 200 and wanted:
            start, stop = int(wanted[1]), int(wanted[2] or len(content) - 1) + 1
            status, part = 206, content[start:stop]
            headers = {
                **headers,
                "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}",
            }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(part[: len(part) // 2] if cut else part)
        self.close_connection = self.close_connection or cut


def _entries(
    files: Mapping[str, bytes], path: str, itself: bool, deep: bool = True
) -> list[dict[str, Any]]:
    """List what is at a path or below it, as the hub does."""
    if itself and path in files:
        return [_entry(path, files[path])]
    below = f"{path}/" if path else ""
    inside = {name: content for name, content in files.items() if name.startswith(below)}
    if itself:
        return [_folder(path)] if inside else []
    folders = {
        below + "/".join(parts[: end + 1])
        for name in inside
        for parts in [name.removeprefix(below).split("/")[:-1]]
        for end in range(len(parts))
    }
    listed = [_folder(name) for name in sorted(folders)]
    listed += [_entry(name, content) for name, content in sorted(inside.items())]
    return [one for one in listed if deep or "/" not in one["path"].removeprefix(below)]


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": _etag(path.encode())}


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _lasts(fault: Any) -> bool:
    return hasattr(fault, "__next__")


def _json(answer: Any) -> Answer:
    return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}


def _error(status: int, code: str, message: str, **headers: str) -> Answer:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    told = {"X-Error-Code": code, "X-Error-Message": message, **more}
    return status, json.dumps({"error": message}).encode(), told
