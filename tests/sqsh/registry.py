"""A registry on loopback that serves one layout as `r:t`, and lets a test answer first."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Hook = Callable[["Request"], bool]


class Request(http.server.BaseHTTPRequestHandler):
    """One request; a hook answers it by `send` or `reset`, and then returns True."""

    server: Server
    protocol_version = "HTTP/1.1"
    form = ""

    def do_GET(self) -> None:
        self.server.log.append((self.command, self.path, self.headers.get("Authorization"), self.form))
        if any(hook(self) for hook in self.server.hooks):
            return
        blobs = self.server.layout / "blobs"
        kind, name = self.path.removeprefix("/v2/r/").split("/")
        if kind == "manifests" and ":" not in name:
            name = json.loads((self.server.layout / "index.json").read_text())["manifests"][0]["digest"]
        path = blobs / name.replace(":", "/")
        if not path.exists():
            self.send(404, b"{}")
            return
        data = path.read_bytes()
        media_type = json.loads(data)["mediaType"] if kind == "manifests" else "application/octet-stream"
        self.send(200, data, {"Content-Type": media_type})

    def do_POST(self) -> None:
        self.form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.do_GET()

    def send(
        self, status: int, body: bytes = b"{}", headers: dict[str, Any] | None = None, cut: int | None = None
    ) -> bool:
        """A header may have several values; `cut`: so much of the body, and the connection breaks."""
        self.send_response(status)
        for name, values in {**(headers or {}), "Content-Length": str(len(body))}.items():
            for value in values if isinstance(values, list) else [values]:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = cut is not None or self.close_connection
        return True

    def reset(self) -> bool:
        self.close_connection = True
        return True

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Server(http.server.ThreadingHTTPServer):
    layout: Path
    hooks: list[Hook] = field(default_factory=list)
    log: list[tuple[str, str, str | None, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)

    __hash__ = object.__hash__

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def image(self) -> str:
        return f"{self.host}/r:t"


@contextmanager
def served(layout: Path, *hooks: Hook) -> Iterator[Server]:
    server = Server(layout, list(hooks))
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
