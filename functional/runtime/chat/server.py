"""The HTTP server that agents talk to: `GET /health`, `POST /v1/chat/completions`."""

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from functional.runtime.chat.client import ChatClient, ContextFullError
from functional.runtime.chat.request import ChatError
from functional.runtime.errors import AdmissionShutError, RolloutError, RunError, UnansweredError
from functional.runtime.rollout.gate import AdmissionGate

RETRY_AFTER_S = 1
"""What a client is told to wait while admission is shut; it asks as often as it must."""
BUSY = frozenset({429, 503, 529})
IDEMPOTENCY_KEY = "Idempotency-Key"
ANSWER_REJECTED, CONTEXT_FULL = "answer_rejected", "context_length_exceeded"
"""Types of errors that say something of the conversation, not of the fleet."""


class RejectedError(RolloutError):
    """The fleet's answer breaks a rule of rollouts: it may not be trained on."""


@dataclass(frozen=True)
class _Kept:
    """An answer under a client's key. digest: of the request that it was made for."""

    digest: bytes
    answer: "asyncio.Future[bytes]"


class ChatServer:
    """On the client's pool and loop. A request that has come in is answered whether or not its client waits; with an
    Idempotency-Key the same client, asking again, gets the same answer."""

    def __init__(self, client: ChatClient, gate: AdmissionGate, host: str, port: int = 0) -> None:
        """port: 0 for one that the kernel chooses."""
        self._client = client
        self._gate = gate
        self._host, self._port = host, port
        self._kept: dict[str, _Kept] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    def start(self) -> None:
        """Listen; `url` is where. Raises RunError where that cannot be."""
        try:
            self._client.pool.run(self._start())
        except OSError as error:
            raise RunError(f"chat server: cannot listen on {self._host} port {self._port}: {error}") from error

    def close(self) -> None:
        """Stop listening, and end what is under way. Harmless when repeated."""
        if self._runner is not None:
            self._client.pool.run(self._runner.cleanup())
            self._runner = None
            self._client.give_up("the chat server was closed")  # what was asked under a key, which no client ends

    def give_up(self, reason: str) -> None:
        """Answer what is under way with 502: for a fleet that will not answer any more. From any thread but the
        pool's."""
        self._client.give_up(reason)

    async def _start(self) -> None:
        # No limit on a request's size: a conversation carries its token IDs once a turn.
        app = web.Application(client_max_size=0)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=4096).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _health(self, _: web.Request) -> web.Response:
        admission = "open" if self._gate.is_open else "shut"
        return web.json_response({"status": "ok", "model": self._client.served.model, "admission": admission})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            answer = await self._answer(body, request.headers.get(IDEMPOTENCY_KEY))
        except RunError as error:
            return refusal(error)
        return web.Response(body=answer, content_type="application/json")

    async def _answer(self, body: bytes, key: str | None) -> bytes:
        if key is None:
            return await self._completed(body)
        digest = hashlib.sha256(body).digest()
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(digest, asyncio.ensure_future(self._completed(body)))
            kept.answer.add_done_callback(lambda answer: self._forget(key, answer))
        elif kept.digest != digest:
            raise ChatError(IDEMPOTENCY_KEY, "was given with another request before")
        return await asyncio.shield(kept.answer)

    def _forget(self, key: str, answer: "asyncio.Future[bytes]") -> None:
        """An answer after as long as one may take; a failure at once, since it may be asked for again."""
        if answer.cancelled() or answer.exception() is not None:
            del self._kept[key]
        else:
            asyncio.get_running_loop().call_later(self._client.served.timeout_s, self._kept.pop, key)

    async def _completed(self, body: bytes) -> bytes:
        answer = await self._client.complete(body)
        if answer.problem is not None:
            raise RejectedError(f"request {answer.completion.request_id}: {answer.problem}")
        return answer.body


def refusal(error: RunError) -> web.Response:
    """An error as OpenAI's API words it: the field at fault, or what the fleet did."""
    status, kind = status_of(error)
    field = error.field if isinstance(error, ChatError) else None
    told: dict[str, Any] = {"message": str(error), "type": kind, "param": field, "code": status}
    headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, AdmissionShutError) else {}
    return web.Response(
        status=status, body=msgspec.json.encode({"error": told}), content_type="application/json", headers=headers
    )


def status_of(error: RunError) -> tuple[int, str]:
    """400 for the request, 502 for an answer that is none, 503 for a fleet that takes no more, 504 for one that is
    late, 500 for what went wrong here."""
    if isinstance(error, ChatError):
        return 400, CONTEXT_FULL if isinstance(error, ContextFullError) else "invalid_request_error"
    if isinstance(error, RejectedError):
        return 502, ANSWER_REJECTED
    if isinstance(error, AdmissionShutError):
        return 503, "admission_shut"
    if isinstance(error, UnansweredError):
        if error.is_late:
            return 504, "fleet_late"
        if error.status in BUSY:
            return 503, "fleet_busy"
        if error.status is not None and error.status < 500 and error.status != 408:
            return 400, "invalid_request_error"
    if isinstance(error, RolloutError):
        return 502, "fleet_error"
    return 500, "internal_error"
