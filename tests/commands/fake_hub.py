"""The part of the hub's HTTP API that uploads a model, on loopback: repositories, small files in the commit, large ones beside it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_tests_only"


class FakeHub:
    """Holds what was uploaded, by the name of the repository."""

    def __init__(self) -> None:
        self.address = ""
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.blobs: dict[str, bytes] = {}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        match method, [part for part in path.partition("?")[0].split("/") if part]:
            case "POST", ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                known = name in self.private
                self.private[name] = asked.get("visibility") == "private"
                return (409 if known else 200), {"url": f"{self.address}/{name}", "id": name}
            case "POST", ["api", "validate-yaml"]:
                return 200, {"errors": [], "warnings": []}
            case "POST", ["api", "models", _, _, "preupload", "main"]:
                return 200, {"files": [self._mode(one) for one in json.loads(body)["files"]]}
            case "POST", [org, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                return 200, {"transfer": "basic", "objects": [self._place(one) for one in json.loads(body)["objects"]]}
            case "PUT", ["blobs", oid]:
                assert hashlib.sha256(body).hexdigest() == oid
                self.blobs[oid] = body
                return 200, {}
            case "POST", ["api", "models", org, name, "commit", "main"]:
                return 200, self._commit(f"{org}/{name}", [json.loads(line) for line in body.splitlines()])
            case "GET", ["api", "models", org, name, *_]:
                return 200, {"id": f"{org}/{name}", "sha": "0" * 40, "siblings": [], "private": False, "tags": []}
        return 404, {"error": f"the fake has no {method} {path}"}

    @staticmethod
    def _mode(one: dict[str, Any]) -> dict[str, Any]:
        large = one["path"].endswith((".safetensors", ".gguf"))
        return {"path": one["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def _place(self, one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "actions": {"upload": {"href": f"{self.address}/blobs/{one['oid']}"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        files = self.files.setdefault(name, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
        oid = f"{len(self.messages):040x}"
        return {"commitUrl": f"{self.address}/{name}/commit/{oid}", "commitOid": oid}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            open_to_all = self.command == "PUT" or self.path.startswith("/api/validate-yaml")
            if not open_to_all and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                code, found = 401, {"error": "Invalid username or password."}
            else:
                code, found = hub.answer(self.command, self.path, body)
            data = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if code == 401:
                self.send_header("X-Error-Message", str(found["error"]))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _do

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
