"""Requests to one HTTP server over connections that are kept: a fourth of httpx's processor time, of which an update of
many workers has a dozen requests each."""

import http.client
import select
from collections import deque
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Reply:
    """What came of a request: HTTP status and body; with status 0, why none came."""

    status: int
    body: bytes = b""
    problem: str = ""
    timed_out: bool = False


class ControlServer(Protocol):
    """The way to one worker's control server, which listens on the loopback of the worker's node only."""

    def ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        """A failure on the way is in the reply."""

    def close(self) -> None:
        """Let connections go. Harmless when repeated."""


class HttpServer:
    """The way from the worker's own node. May be used by several threads at once: each takes a connection that no other
    has."""

    def __init__(self, url: str) -> None:
        """url: http://host:port, no path."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._idle: deque[http.client.HTTPConnection] = deque()

    def ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        """`timeout_s` bounds each wait for the network."""
        try:
            return self._asked(method, path, body, timeout_s)
        except TimeoutError:
            return Reply(0, timed_out=True)
        except (OSError, http.client.HTTPException) as error:
            return Reply(0, problem=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

    def _asked(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        headers = {} if body is None else {"content-type": "application/json"}
        connection = self._connection(timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            reply = Reply(response.status, response.read())
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return reply

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        try:
            connection = self._idle.pop()
        except IndexError:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        connection.timeout = timeout_s
        if connection.sock is not None:
            if is_readable(connection.sock.fileno()):
                connection.close()  # the server has closed it; `request` opens it anew
            else:
                connection.sock.settimeout(timeout_s)
        return connection


def is_readable(descriptor: int) -> bool:
    """Whether there is something to read, the end included: of a connection that waits for nothing, the end alone."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
