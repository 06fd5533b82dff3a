"""Calls to a worker's control server (`POST /engine/<route>`) and to the frontend's discovery routes.

Routes, payloads and the fact that errors come back as HTTP 200 with `status: error` are Dynamo 1.3.0.post1's
(dynamo/vllm/handlers.py, worker_factory.py).
"""

import json
from http.client import HTTPException
from typing import Any

import httpx

from functional.runtime.errors import RunError
from functional.runtime.fleet.http_server import HttpServer


class ControlError(RunError):
    """A worker refused a control call or did not answer in time."""


class WorkerLostError(ControlError):
    """A worker missed the deadline of a call: it counts as dead, for the route may hang for good."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class WorkerControl:
    """One worker's control server. Every call has a deadline; a timeout says which route hung."""

    def __init__(self, index: int, url: str, timeout_s: float) -> None:
        self.index = index
        self.url = url
        self._timeout_s = timeout_s
        self._server = HttpServer(url)

    def call(self, route: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> dict[str, Any]:
        """Post `body` to `/engine/<route>` and return the answer. Raises WorkerLostError when none comes
        in time, ControlError on any other failure."""
        what = f"{route} ({body['engine_rpc']})" if body and "engine_rpc" in body else route
        return self._post(route, what, json.dumps(body or {}).encode(), timeout_s)

    def engine_rpc(self, method: str, weight_version: str, timeout_s: float | None = None, **arguments: Any) -> None:
        """Run `method` of the engine's workers, see `rpc_body`."""
        self.send_rpc(method, rpc_body(method, weight_version, **arguments), timeout_s)

    def send_rpc(self, method: str, body: bytes, timeout_s: float | None = None) -> None:
        """The same with what `rpc_body` made, once for many workers."""
        self._post(RPC_ROUTE, f"{RPC_ROUTE} ({method})", body, timeout_s)

    def is_ready(self) -> bool:
        """Whether the worker's own health route says that every endpoint is ready."""
        try:
            answer = json.loads(self._server.ask("GET", "/health", None, 2)[1])
        except (OSError, HTTPException, ValueError):
            return False
        return bool(answer.get("endpoints")) and all(state == "ready" for state in answer["endpoints"].values())

    def metrics(self) -> str:
        """Prometheus text of the worker. Raises ControlError where none comes."""
        try:
            return self._server.ask("GET", "/metrics", None, 5)[1].decode()
        except (OSError, HTTPException, ValueError) as error:
            raise ControlError(f"worker {self.index}: metrics: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._server.close()

    def _post(self, route: str, what: str, body: bytes, timeout_s: float | None) -> dict[str, Any]:
        what = f"worker {self.index}: {what}"
        try:
            deadline_s = self._timeout_s if timeout_s is None else timeout_s
            status, content = self._server.ask("POST", f"/engine/{route}", body, deadline_s)
            answer = json.loads(content)
        except TimeoutError as error:
            raise WorkerLostError(self.index, f"{what}: no answer within the deadline") from error
        except (OSError, HTTPException, ValueError) as error:
            raise ControlError(f"{what}: {type(error).__name__}: {error}") from error
        if status != 200 or not isinstance(answer, dict) or answer.get("status") != "ok":
            message = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise ControlError(f"{what}: {' '.join(str(message).split())}")
        return answer


RPC_ROUTE = "update_weights_from_distributed"


def rpc_body(method: str, weight_version: str, **arguments: Any) -> bytes:
    """A call of `method` of the engine's workers through the weight-update route, leaving the prefix cache as it is.

    The route sets the worker's version to `weight_version`, so every call but the last of a transaction names the
    version the worker already has.
    """
    body = {"engine_rpc": method, "weight_version": weight_version, "reset_prefix_cache": False, **arguments}
    return json.dumps(body).encode()


class FrontendControl:
    """The frontend's discovery and metrics routes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=5, trust_env=False)

    def instances(self, endpoint: str) -> dict[str, int]:
        """Registered instances of `endpoint`: request-plane address («host:port») → instance id."""
        try:
            answer = self._client.get("/health").json()
        except (httpx.HTTPError, ValueError):
            return {}
        return {
            str(instance["transport"]["tcp"]).split("/")[0]: int(instance["instance_id"])
            for instance in answer.get("instances", [])
            if instance["component"] == "backend" and instance["endpoint"] == endpoint
        }

    def has_model(self, name: str) -> bool:
        """Whether the model's route is up (later than the instances are)."""
        try:
            models = self._client.get("/v1/models").json()
        except (httpx.HTTPError, ValueError):
            return False
        return any(model["id"] == name for model in models.get("data", []))

    def metrics(self) -> str:
        """Prometheus text of the frontend."""
        return self._client.get("/metrics").text

    def close(self) -> None:
        self._client.close()
