"""A TCP proxy whose connections break at random: what a bad network does between the client and the frontend."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def flaky_proxy(url: str, chance: float, seed: int) -> Iterator[str]:
    """Yield the URL of a proxy to `url` that breaks each request or answer it carries with probability `chance`."""
    target = urlsplit(url)
    loop = asyncio.new_event_loop()
    rng = random.Random(seed)
    ready: threading.Event = threading.Event()
    address: list[str] = []

    async def serve() -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream_reader, upstream_writer = await asyncio.open_connection(target.hostname, target.port)
            directions = [_pump(reader, upstream_writer, chance, rng), _pump(upstream_reader, writer, chance, rng)]
            tasks = [asyncio.ensure_future(direction) for direction in directions]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            for end in (writer, upstream_writer):
                end.transport.abort()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
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
        yield address[0]
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(10)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: float, rng: random.Random) -> None:
    """Copy bytes until the end, or until a random break, before which half of the chunk is sent."""
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(65536):
            if rng.random() < chance:
                writer.write(chunk[: len(chunk) // 2])
                return
            writer.write(chunk)
            await writer.drain()
