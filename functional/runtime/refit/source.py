"""The weight source of a trainer that has its weights in this process: a version in, named tensors out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional.engine.errors import TransferError
from functional.runtime.errors import RefitError
from functional.runtime.refit.names import expected_proof
from functional.runtime.refit.probe import ProbeScore
from functional.runtime.refit.sender import Sender, make_sender, update_info
from functional.runtime.rollout.client import Completion

NamedTensors = Iterable[tuple[str, Tensor]]


class LocalWeights:
    """A `WeightSource`. Tensors are taken from the iterator one by one, each time anew: none is kept.

    packed: many small tensors travel in one buffer.
    """

    packed = True

    def __init__(
        self,
        weights: Callable[[int], NamedTensors],
        score: Callable[[int, Sequence[Completion]], ProbeScore],
        config: Any,
        *,
        transport: str,
        device: torch.device | str,
        timeout_s: float,
    ) -> None:
        """weights: version → (checkpoint name, bfloat16 tensor) of every weight, always in the same order; raises
        RefitError for a version it does not hold. score: as `WeightSource.score`, under the given version.

        config: the model's Hugging Face configuration; transport: gloo or nccl.
        """
        self._weights = weights
        self._score = score
        self._config = config
        self._transport = transport
        self._device = device
        self._timeout_s = timeout_s
        self._version = 0
        self._sender: Sender | None = None

    def select(self, version: int) -> None:
        self._weights(version)
        self._version = version

    def update_info(self) -> dict[str, Any]:
        total = 0

        def counted() -> NamedTensors:
            nonlocal total
            for name, tensor in self._on_wire():
                total += tensor.numel() * tensor.element_size()
                yield name, tensor

        info = update_info(counted(), self.packed)
        return info | {"total_bytes": total}

    def expected_proof(self) -> dict[str, Any]:
        return expected_proof(self._weights(self._version), self._config)

    def listen(self, address: str) -> int:
        self.close()
        self._sender = make_sender(self._transport, self._device, self._timeout_s)
        return self._sender.listen(address)

    def connect(self, address: str, port: int, world_size: int) -> None:
        self._attempt(lambda sender: sender.connect(address, port, world_size))

    def send(self) -> None:
        info = update_info(self._on_wire(), self.packed)
        self._attempt(lambda sender: sender.send(self._sending(self._on_wire()), self.packed, info))

    def abort(self, reason: str) -> None:
        if self._sender is not None:
            self._sender.abort(reason)

    def score(self, completions: Sequence[Completion]) -> ProbeScore:
        return self._score(self._version, completions)

    def close(self) -> None:
        """Let the transfer group go. Harmless when repeated."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _on_wire(self) -> NamedTensors:
        """What is announced and sent; a fault test tampers with it."""
        return self._weights(self._version)

    def _sending(self, named: NamedTensors) -> NamedTensors:
        """Wraps the tensors while they are sent; a fault test fails or waits in it."""
        return named

    def _attempt(self, action: Callable[[Sender], Any]) -> None:
        if self._sender is None:
            raise RefitError("trainer: no transfer group, call listen first")
        try:
            action(self._sender)
        except TransferError as error:
            raise RefitError(f"trainer: {type(error).__name__}: {error}") from error
