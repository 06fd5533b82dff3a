"""The agents' side of bench.chat: turns over kept connections, as fast as they are answered.

    python -m bench.chat_agents URL BODIES IN_FLIGHT TURNS

BODIES: a JSON list of requests, taken in turns. It says «ready», waits for a line, asks, says «done».
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp


async def ask(url: str, bodies: list[bytes], inflight: int, turns: int) -> None:
    left = iter(range(turns))
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as http:

        async def agent() -> None:
            for index in left:
                async with http.post(f"{url}/v1/chat/completions", data=bodies[index % len(bodies)]) as response:
                    answer = await response.read()
                    if response.status != 200 or b'"generation_log_probs"' not in answer:
                        raise SystemExit(f"error: the chat server answered {response.status}: {answer[:300]!r}")

        await asyncio.gather(*(agent() for _ in range(inflight)))


def main(url: str, bodies: str, inflight: str, turns: str) -> None:
    requests = [body.encode() for body in json.loads(Path(bodies).read_text())]
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(ask(url, requests, int(inflight), int(turns)))
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
