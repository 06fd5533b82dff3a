"""Requests over kept connections, to a real server that closes, hangs and breaks."""

import http.server
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import ClassVar

import pytest

from functional.runtime.fleet.control import ControlError, WorkerControl, WorkerLostError
from functional.runtime.fleet.http_server import HttpServer


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections: ClassVar[set] = set()

    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["content-length"])))

    def answer(self, body):
        self.connections.add(self.client_address)
        if self.path == "/engine/hang":
            time.sleep(1)
        if self.path == "/engine/break":
            self.close_connection = True
            return
        text = {"/engine/list": b"[1]", "/engine/error": b'{"status": "error", "message": "no\\nway"}'}.get(self.path)
        text = text or b'{"status": "ok", "got": %d}' % len(body)
        self.send_response(500 if self.path == "/engine/500" else 200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        self.close_connection = self.path == "/engine/last"

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    Handler.connections = set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_one_connection_serves_one_request_after_the_other(url):
    server = HttpServer(url)
    for size in (0, 1, 1_000_000):
        assert server.ask("POST", "/engine/x", b"x" * size, 5) == (200, b'{"status": "ok", "got": %d}' % size)
    assert server.ask("GET", "/health", None, 5)[0] == 200
    assert len(Handler.connections) == 1
    server.close()
    server.ask("GET", "/health", None, 5)
    assert len(Handler.connections) == 2


def test_a_connection_that_the_server_has_closed_is_opened_anew(url):
    server = HttpServer(url)
    for path in ("/engine/last", "/engine/x", "/engine/last", "/engine/x"):
        assert server.ask("POST", path, b"", 5)[0] == 200
        time.sleep(0.05)
    assert len(Handler.connections) == 3


def test_threads_have_a_connection_each(url):
    server = HttpServer(url)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda size: server.ask("POST", "/engine/x", b"x" * size, 5), range(64)))
    assert answers == [(200, b'{"status": "ok", "got": %d}' % size) for size in range(64)]
    assert len(Handler.connections) <= 8


def test_a_wait_ends_at_its_deadline_and_spoils_no_later_request(url):
    server = HttpServer(url)
    server.ask("GET", "/health", None, 5)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        server.ask("POST", "/engine/hang", b"", 0.2)
    assert time.monotonic() - began < 0.9
    assert server.ask("POST", "/engine/x", b"ab", 5) == (200, b'{"status": "ok", "got": 2}')
    with pytest.raises((OSError, HTTPException)):
        server.ask("POST", "/engine/break", b"", 5)
    assert server.ask("POST", "/engine/x", b"ab", 5)[0] == 200


def test_a_worker_s_control_names_what_failed(url):
    control = WorkerControl(3, url, 0.2)
    assert control.call("x", {"a": 1})["got"] == 8
    control.engine_rpc("prove_weights", "7", expected={})
    with pytest.raises(WorkerLostError, match="worker 3: hang: no answer within the deadline"):
        control.call("hang")
    for route, complaint in (("error", "no way"), ("500", "ok"), ("list", r"\[1\]"), ("break", "RemoteDisconnected")):
        with pytest.raises(ControlError, match=f"worker 3: {route}: .*{complaint}"):
            control.call(route)
    gone = WorkerControl(3, "http://127.0.0.1:1", 0.2)
    with pytest.raises(ControlError, match=r"worker 3: .* \(prove_weights\): ConnectionRefusedError"):
        gone.engine_rpc("prove_weights", "7")
    with pytest.raises(ControlError, match="worker 3: metrics: ConnectionRefusedError"):
        gone.metrics()
    assert not gone.is_ready()
