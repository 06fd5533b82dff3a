"""The agents' side of bench.chat: turns over kept connections, as fast as they are answered.

    python -m bench.chat_agents URL BODIES IN_FLIGHT TURNS

BODIES: a JSON list of requests, taken in turns. It says «ready», waits for a line, asks, says «done».
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

BETWEEN = b"\r\n\r\n"


class Agent(asyncio.Protocol):
    """One connection; a request as soon as the one before is answered. Nothing is read of an answer but its length, so
    that the agents' own processor time, on processors that they share, counts for little."""

    def __init__(self, requests: Iterator[bytes], done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._done = done
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, between, body = self._heard.partition(BETWEEN)
        if not between:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(SystemExit(f"error: the chat server answers {self._heard[:400]!r}"))
            self._transport.close()
            return
        length = head.lower().index(b"content-length: ") + len(b"content-length: ")
        if len(body) == int(head[length:].split(b"\r\n", 1)[0]):
            self._heard = b""
            self._ask()

    def _ask(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._transport.write(request)
        elif not self._done.done():
            self._transport.close()
            self._done.set_result(None)


async def ask(url: str, bodies: list[bytes], inflight: int, turns: int) -> None:
    place = urlsplit(url)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: "
    whole = [f"{head}{len(body)}".encode() + BETWEEN + body for body in bodies]
    requests = (whole[index % len(whole)] for index in range(turns))
    loop = asyncio.get_running_loop()
    finished = [loop.create_future() for _ in range(inflight)]
    for done in finished:
        await loop.create_connection(partial(Agent, requests, done), place.hostname or "", place.port or 0)
    await asyncio.gather(*finished)


def main(url: str, bodies: str, inflight: str, turns: str) -> None:
    requests = [body.encode() for body in json.loads(Path(bodies).read_text())]
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(ask(url, requests, int(inflight), int(turns)))
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
