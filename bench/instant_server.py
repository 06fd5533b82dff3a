"""An HTTP server on loopback that answers at once, in the shape and size of Dynamo 1.3.0.post1's answers: completions
and chat.

    python -m bench.instant_server HOLD

prints its URL. HOLD: how many requests must have come before any is answered; 0 for none.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

Answer = Callable[[int], dict[str, Any]]

VOCAB_SIZE = 151_936
MODEL = "instant"
WORKER = 5_960_129_467_663_136_265


class Server:
    def __init__(self, hold: int) -> None:
        self._missing = hold
        self._all_here = asyncio.Event()
        self._templates: dict[tuple[Answer, int], tuple[bytes, bytes, bytes]] = {}

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, b'"prompt":', answer)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, b'"token_data":', chat_answer)

    async def _respond(self, request: web.Request, prompt_key: bytes, make: Answer) -> web.StreamResponse:
        body = await request.read()
        self._missing -= 1
        if self._missing <= 0:
            self._all_here.set()
        await self._all_here.wait()
        asked = body.index(prompt_key) + len(prompt_key)
        prompt = body[asked : body.index(b"]", asked) + 1]
        limit = body.index(b'"max_tokens":') + len(b'"max_tokens":')
        before, between, after = self._template(make, int(body[limit : body.index(b",", limit)]))
        request_id = request.headers["x-dynamo-request-id"].encode()
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()  # as the frontend does
        await response.prepare(request)
        await response.write(before + request_id + between + prompt + after)
        await response.write_eof()
        return response

    def _template(self, make: Answer, tokens: int) -> tuple[bytes, bytes, bytes]:
        if (make, tokens) not in self._templates:
            text = msgspec.json.encode(make(tokens))
            before, rest = text.split(b"<request>")
            between, after = rest.split(b'"<prompt>"')
            self._templates[make, tokens] = before, between, after
        return self._templates[make, tokens]


def answer(tokens: int) -> dict[str, Any]:
    """A completion of `tokens` tokens, cut at its limit; `<request>` and `<prompt>` stand for what each has its own."""
    rng = random.Random(tokens)
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(tokens)]
    texts = ["".join(rng.choices("abcdefghij klmnopqrst", k=rng.randint(1, 8))) for _ in range(tokens)]
    precise = [-rng.expovariate(1.0) for _ in range(tokens)]
    return {
        "id": "cmpl-<request>",
        "choices": [
            {
                "text": "".join(texts),
                "index": 0,
                "logprobs": {
                    "tokens": texts,
                    "token_logprobs": [round(value, 7) for value in precise],
                    "top_logprobs": [
                        [{"token": text, "logprob": value, "bytes": list(text.encode())}]
                        for text, value in zip(texts, precise, strict=True)
                    ],
                    "text_offset": [],
                },
                "finish_reason": "length",
            }
        ],
        "created": 1_796_038_184,
        "model": MODEL,
        "system_fingerprint": None,
        "object": "text_completion",
        "usage": {"prompt_tokens": 512, "completion_tokens": tokens, "total_tokens": 512 + tokens},
        "nvext": {
            "worker_id": {
                "prefill_worker_id": WORKER,
                "prefill_dp_rank": 0,
                "decode_worker_id": WORKER,
                "decode_dp_rank": 0,
            },
            "timing": {
                "request_received_ms": 1_796_038_184_778,
                "prefill_wait_time_ms": 0.581874,
                "prefill_time_ms": 109.86702199999999,
                "ttft_ms": 110.448896,
                "total_time_ms": 110.497147,
                "kv_hit_rate": 0.0,
                "router_queue_depth": 0,
            },
            "engine_data": {
                "completion_token_ids": ids,
                "finished": True,
                "completion_logprobs": precise,
                "prompt_token_ids": "<prompt>",
            },
            "completion_token_ids": ids,
        },
    }


def chat_answer(tokens: int) -> dict[str, Any]:
    """The same as a chat completion."""
    plain = answer(tokens)
    (choice,) = plain["choices"]
    content = [{**alternatives[0], "top_logprobs": alternatives} for alternatives in choice["logprobs"]["top_logprobs"]]
    message = {"content": choice["text"], "role": "assistant", "reasoning_content": None}
    chosen = {"index": 0, "message": message, "finish_reason": "length", "logprobs": {"content": content}}
    return plain | {"id": "chatcmpl-<request>", "object": "chat.completion", "choices": [chosen]}


async def serve(hold: int) -> None:
    app = web.Application(client_max_size=1 << 30)
    server = Server(hold)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    host, port = runner.addresses[0]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    from functional.runtime.rollout.pool import spare_connections

    spare_connections()  # so that as many may connect
    asyncio.run(serve(int(sys.argv[1])))
