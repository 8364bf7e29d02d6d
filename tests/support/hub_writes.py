"""The hub on the loopback, which is written to as well: repositories, large files and commits."""

import base64
import hashlib
import json
import re
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.hub import Answer, Hub, Repository, _error, _json

_WRITES = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<action>preupload|commit)/main")
_BATCH = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")


class WritableHub(Hub):
    """Takes what ``HfApi.create_repo`` and ``upload_folder`` send, from who has the token.

    ``messages`` holds those of all commits. Files called ``*.safetensors`` are large: they are
    uploaded before the commit that names them, and need not be twice.
    """

    def __init__(self, token: str = "hf_of_this_hub") -> None:
        super().__init__(token)
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.stored: dict[str, bytes] = {}

    def answer(self, method: str, target: str, body: bytes, token: str) -> Answer:
        path = unquote(urlsplit(target).path)
        if method == "PUT" and path.startswith("/lfs/"):  # its address is the permission
            self.stored[path.removeprefix("/lfs/")] = body
            return 200, b"", {}
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        writes, batch = _WRITES.fullmatch(path), _BATCH.fullmatch(path)
        if method == "POST" and (path == "/api/repos/create" or writes or batch):
            if token != self.token:
                return _error(401, "Unauthorized", "Invalid credentials")
            if path == "/api/repos/create":
                return self._created(json.loads(body))
            if batch:
                return self._batch(json.loads(body))
            assert writes is not None
            if writes["action"] == "preupload":
                return self._preupload(json.loads(body))
            return self._commit(writes["repo"], body)
        return super().answer(method, target, body, token)

    def _created(self, asked: dict[str, Any]) -> Answer:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        told = {"url": f"{self.url}/{name}", "id": name}
        if ("models", name) in self.repositories:
            return 409, json.dumps(told | {"error": "You already created this"}).encode(), {}
        self.repositories["models", name] = Repository()
        self.repositories["models", name].commit({})
        self.private[name] = asked.get("visibility") == "private"
        return _json(told)

    @staticmethod
    def _preupload(asked: dict[str, Any]) -> Answer:
        def mode(path: str) -> str:
            return "lfs" if path.endswith(".safetensors") else "regular"

        paths = [file["path"] for file in asked["files"]]
        return _json(
            {"files": [{"path": p, "uploadMode": mode(p), "shouldIgnore": False} for p in paths]}
        )

    def _batch(self, asked: dict[str, Any]) -> Answer:
        objects = []
        for one in asked["objects"]:
            href = {"upload": {"href": f"{self.url}/lfs/{one['oid']}", "header": {}}}
            actions = {} if one["oid"] in self.stored else {"actions": href}
            objects.append({"oid": one["oid"], "size": one["size"], **actions})
        return _json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes) -> Answer:
        files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.stored[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                files[value["path"]] = content
        sha = self.repositories["models", name].commit(files)
        return _json({"commitOid": sha, "commitUrl": f"{self.url}/{name}/commit/{sha}"})

    def files(self, name: str) -> dict[str, bytes]:
        """Return what the model's main branch holds."""
        repository = self.repositories["models", name]
        return repository.commits[repository.refs["main"]]
