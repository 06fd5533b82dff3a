"""Calls to a worker's control server (`POST /engine/<route>`) and to the frontend's discovery routes.

Routes, payloads and the fact that errors come back as HTTP 200 with `status: error` are Dynamo 1.3.0.post1's
(dynamo/vllm/handlers.py, worker_factory.py).
"""

from typing import Any

import httpx

from functional.runtime.errors import RunError


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
        self._client = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def call(self, route: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> dict[str, Any]:
        """Post `body` to `/engine/<route>` and return the answer. Raises WorkerLostError when none comes
        in time, ControlError on any other failure."""
        what = f"worker {self.index}: {route}" + (f" ({body['engine_rpc']})" if body and "engine_rpc" in body else "")
        try:
            deadline_s = self._timeout_s if timeout_s is None else timeout_s
            response = self._client.post(f"/engine/{route}", json=body or {}, timeout=deadline_s)
            answer = response.json()
        except httpx.TimeoutException as error:
            raise WorkerLostError(self.index, f"{what}: no answer within the deadline") from error
        except (httpx.HTTPError, ValueError) as error:
            raise ControlError(f"{what}: {type(error).__name__}: {error}") from error
        if response.status_code != 200 or not isinstance(answer, dict) or answer.get("status") != "ok":
            message = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise ControlError(f"{what}: {' '.join(str(message).split())}")
        return answer

    def engine_rpc(self, method: str, weight_version: str, timeout_s: float | None = None, **arguments: Any) -> None:
        """Run `method` of the engine's workers through the weight-update route, leaving the prefix cache as it is.

        The route sets the worker's version to `weight_version`, so every call but the last of a transaction names the
        version the worker already has.
        """
        body = {"engine_rpc": method, "weight_version": weight_version, "reset_prefix_cache": False, **arguments}
        self.call("update_weights_from_distributed", body, timeout_s)

    def is_ready(self) -> bool:
        """Whether the worker's own health route says that every endpoint is ready."""
        try:
            answer = self._client.get("/health", timeout=2).json()
        except (httpx.HTTPError, ValueError):
            return False
        return bool(answer.get("endpoints")) and all(state == "ready" for state in answer["endpoints"].values())

    def metrics(self) -> str:
        """Prometheus text of the worker."""
        return self._client.get("/metrics", timeout=5).text

    def close(self) -> None:
        self._client.close()


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
