"""Requests to one HTTP server over connections that are kept: a fourth of httpx's processor time, of which an update of
many workers has a dozen requests each."""

import http.client
import select
from collections import deque
from urllib.parse import urlsplit


class HttpServer:
    """May be used by several threads at once: each takes a connection that no other has."""

    def __init__(self, url: str) -> None:
        """url: http://host:port, no path."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._idle: deque[http.client.HTTPConnection] = deque()

    def ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Status and content of the answer. `timeout_s` bounds each wait for the network.

        Raises TimeoutError for such a wait, another OSError or HTTPException for all else.
        """
        headers = {} if body is None else {"content-type": "application/json"}
        connection = self._connection(timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = response.status, response.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

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
