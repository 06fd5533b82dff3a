"""Calls to a worker's control server, on its node and through the owner of another node."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import ray

from functional.runtime.fleet.control import ControlError, WorkerControl, WorkerLostError
from functional.runtime.fleet.http_server import HttpServer, Reply
from functional.runtime.fleet.node import Node, OwnedServer


class Handler(BaseHTTPRequestHandler):
    """A worker that pauses, refuses, answers no JSON, or hangs, by the route it is asked."""

    def do_POST(self):
        route = self.path.removeprefix("/engine/")
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if route == "hang":
            time.sleep(2)
        answers = {
            "echo": {"status": "ok", "got": body},
            "refuse": {"status": "error", "message": "not\npaused"},
        }
        self._answer(json.dumps(answers[route]) if route in answers else "<html>")

    def do_GET(self):
        text = {"/health": '{"endpoints": {"generate": "ready"}}', "/metrics": "up 1\n"}
        self._answer(text[self.path])

    def _answer(self, text):
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


class Owner:
    """A node's owner, but for Ray: `ask.remote` gives the answer itself, or raises."""

    def __init__(self, url, error=None):
        self._server = HttpServer(url)
        self._error = error
        self.ask = self

    def remote(self, _index, *words):
        if self._error:
            raise self._error
        return self._server.ask(*words)


@pytest.fixture(params=["own node", "another node"])
def control(request, url, monkeypatch):
    if request.param == "own node":
        return WorkerControl(3, HttpServer(url), 5)
    monkeypatch.setattr(ray, "get", lambda reply, timeout: reply)
    return WorkerControl(3, OwnedServer(node(Owner(url)), 3), 5)


def node(owner):
    return Node("far", "10.0.0.2", "id", (3,), False, False, owner)


def test_an_answer(control):
    assert control.call("echo", {"a": [1, "ü"]})["got"] == {"a": [1, "ü"]}
    assert control.is_ready()
    assert control.metrics() == "up 1\n"


def test_a_refusal_is_one_line(control):
    with pytest.raises(ControlError, match=r"^worker 3: refuse: not paused$"):
        control.call("refuse")


def test_no_json(control):
    with pytest.raises(ControlError, match=r"^worker 3: what: JSONDecodeError: "):
        control.call("what")


def test_a_worker_that_misses_the_deadline_is_lost(control):
    with pytest.raises(WorkerLostError, match=r"^worker 3: hang \(start\): no answer within the deadline$"):
        control.call("hang", {"engine_rpc": "start"}, timeout_s=0.2)


def test_nobody_is_there():
    control = WorkerControl(3, HttpServer("http://127.0.0.1:9"), 5)
    with pytest.raises(ControlError, match=r"^worker 3: pause: ConnectionRefusedError: "):
        control.call("pause")
    assert not control.is_ready()
    with pytest.raises(ControlError, match=r"^worker 3: metrics: ConnectionRefusedError"):
        control.metrics()


@pytest.mark.parametrize(
    ("error", "reply"),
    [
        (ray.exceptions.GetTimeoutError("late"), Reply(0, timed_out=True)),
        (ray.exceptions.ActorDiedError(), Reply(0, problem="node far: its owner is gone (ActorDiedError)")),
    ],
)
def test_an_owner_that_is_silent_or_gone(url, error, reply):
    assert OwnedServer(node(Owner(url, error)), 3).ask("GET", "/health", None, 1) == reply
