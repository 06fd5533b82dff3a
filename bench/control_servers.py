"""Simulated workers and their frontend, each a real HTTP server on loopback: `python -m bench.control_servers WORKERS`.

A worker keeps its version label and the prompts in its cache; every other call is answered with ok at once. Prints the
ports as JSON, the frontend's first, and serves until its standard input closes.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[str, dict[str, Any], dict[str, str]], dict[str, Any]]


@dataclass
class SimulatedWorker:
    label: str = "unproved"
    cache: set[tuple[int, ...]] = field(default_factory=set)

    def answer(self, path: str, body: dict[str, Any], _headers: dict[str, str]) -> dict[str, Any]:
        route = path.rsplit("/", 1)[-1]
        if route in ("flush_cache", "pause_generation"):
            self.cache.clear()
        if "weight_version" in body:
            self.label = body["weight_version"]
        return {"status": "ok", "version": self.label}


def completion(workers: list[SimulatedWorker], body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """One token, as Dynamo's frontend gives it."""
    instance = body["nvext"]["backend_instance_id"]
    cache, prompt = workers[instance].cache, tuple(body["prompt"])
    cached = len(prompt) - 1 if prompt in cache else 0
    cache.add(prompt)
    engine = {"prompt_token_ids": list(prompt), "completion_token_ids": [1], "completion_logprobs": [-1.0]}
    nvext = {"completion_token_ids": [1], "engine_data": engine, "worker_id": {"decode_worker_id": instance}}
    nvext["prompt_logprobs"] = [None, *({str(token): {"logprob": -1.0, "rank": 1}} for token in prompt[1:])]
    return {
        "id": f"cmpl-{headers['x-dynamo-request-id']}",
        "choices": [{"finish_reason": "length", "logprobs": {"token_logprobs": [-1.0]}}],
        "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
        "nvext": nvext,
    }


async def serve(answer: Answer) -> int:
    """A server on a port of its own, which it returns."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length") or 0))
                text = json.dumps(answer(first.split()[1], json.loads(body or b"{}"), headers)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n%b" % (len(text), text))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0, backlog=1024)
    return int(server.sockets[0].getsockname()[1])


async def main(count: int) -> None:
    workers = [SimulatedWorker() for _ in range(count)]
    ports = [await serve(lambda _, body, headers: completion(workers, body, headers))]
    ports += [await serve(worker.answer) for worker in workers]
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
