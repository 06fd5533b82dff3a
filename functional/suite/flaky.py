"""A TCP proxy whose connections break at random: what a bad network does between the client and the frontend."""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PLACES = {"before": 0.0, "during": 0.5, "after": 1.0}
"""Where a connection breaks → how much of what it carried still arrives."""


@dataclass
class FlakyProxy:
    """Where the proxy listens, and how many connections broke: «before request», «during answer» and so on."""

    url: str = ""
    broken: Counter[str] = field(default_factory=Counter)

    def counted(self) -> dict[str, str]:
        return {what: str(number) for what, number in self.broken.items()}


@contextmanager
def flaky_proxy(url: str, chance: float, seed: int) -> Iterator[FlakyProxy]:
    """A proxy to `url` that breaks a connection with probability `chance` at each request or answer it carries:
    before, during or after that, each as often."""
    target = urlsplit(url)
    loop = asyncio.new_event_loop()
    rng = random.Random(seed)
    ready: threading.Event = threading.Event()
    proxy = FlakyProxy()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str) -> None:
        """Copy bytes until the end, or until a break."""
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(65536):
                if rng.random() < chance:
                    place = rng.choice(list(PLACES))
                    proxy.broken[f"{place} {what}"] += 1
                    writer.write(chunk[: int(len(chunk) * PLACES[place])])
                    await writer.drain()
                    return
                writer.write(chunk)
                await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(target.hostname, target.port)
        directions = [pump(reader, upstream_writer, "request"), pump(upstream_reader, writer, "answer")]
        tasks = [asyncio.ensure_future(direction) for direction in directions]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for end in (writer, upstream_writer):
            end.close()  # what was written still arrives

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=4096)
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        async with server:
            await server.serve_forever()

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)

    serving = loop.create_task(serve())
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(10)
