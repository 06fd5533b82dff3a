"""The weight source of a trainer that has its weights in this process, and the sender that it sends them with."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from functional.engine.errors import TransferError
from functional.engine.gloo import GlooGroup
from functional.engine.group import Group, Rendezvous
from functional.engine.nccl import NcclGroup
from functional.engine.plan import Plan, PlanRefused
from functional.engine.plan_wire import Agreement, Verdict, lead_agreement
from functional.engine.proof import EngineProof
from functional.engine.transports import BACKENDS, PROOFS, ProofKind
from functional.engine.wire import DEFAULT_TIMEOUT_S, Manifest, Slot, exchange, send
from functional.runtime.errors import RefitError
from functional.runtime.refit.expected import ExpectedProof, NamedTensors, check_coverage
from functional.runtime.refit.planned import PlannedSender
from functional.runtime.refit.probe import ProbeScore

T = TypeVar("T")


class LocalWeights:
    """A `WeightSource`. An update goes through the tensors once: each is sent, and kept or hashed for the proof."""

    def __init__(
        self,
        layout: Callable[[int], Iterable[Slot]],
        weights: Callable[[int], NamedTensors],
        score: Callable[[int, Sequence[int]], ProbeScore],
        config: Any,
        *,
        transport: str,
        device: torch.device | str,
        timeout_s: float,
        proof: ProofKind | None = None,
        resident: bool = True,
    ) -> None:
        """layout: version → checkpoint name, dtype and shape of every weight, without a tensor; raises RefitError for a
        version that is not held. weights: version → (checkpoint name, bfloat16 tensor) of the same, in the same order;
        a tensor must not change until `proof` has returned, or the next `send` begins. score: as `WeightSource.score`.

        config: the model's Hugging Face configuration; transport: gloo or nccl; timeout_s: of each wait; proof: what
        weights are proved by, as fits the transport if not given; resident: the tensors lie at the same
        place in every update, and may be held on to (not gathered ones).
        """
        self._layout = layout
        self._weights = weights
        self._score = score
        self._config = config
        self._transport = transport
        self._device = device
        self._timeout_s = timeout_s
        self._proof: ProofKind = proof or PROOFS[transport]
        self._sender: Sender | None = None
        self._resident = resident
        self._plans: list[Plan] | None = None
        self._planned: PlannedSender | None = None
        self._sent: tuple[int, ExpectedProof] | None = None

    def metadata(self, version: int) -> Manifest:
        return Manifest(tuple(self._layout(version)), packed=True)

    def listen(self, address: str) -> int:
        self.close()
        self._sender = Sender(self._transport, self._device, self._timeout_s)
        return self._sender.listen(address)

    def connect(self, address: str, port: int, world_size: int) -> None:
        self._with_sender(lambda sender: sender.connect(address, port, world_size))
        if self._proof == "nh" and torch.device(self._device).type == "cuda":
            from functional.engine import nh_triton  # needs a GPU

            nh_triton.check(torch.device(self._device))

    def send(self, version: int) -> None:
        self._send(version, self.metadata(version), self._weights(version))

    def agree(self, version: int) -> dict[str, str]:
        self._plans = self._planned = None
        slots = tuple(self._layout(version))
        try:
            agreement = self._with_sender(lambda sender: sender.agree(slots))
            tied = getattr(self._config, "tie_word_embeddings", False)
            check_coverage(agreement.of_engine, slots, frozenset({"lm_head.weight"} if tied else ()))
        except PlanRefused as refused:
            raise RefitError(f"the weights cannot be proved: {refused}") from refused
        self._plans = agreement.of_engine
        if agreement.schedule is not None:
            self._planned = self._with_sender(lambda sender: sender.planned(agreement, self._proof, self._resident))
        return dict(agreement.problems)

    def send_by_plan(self, version: int) -> Verdict:
        return self._send_by_plan(version)

    def prove_by_plan(self, version: int) -> Verdict:
        planned, named = self._agreed(), self._weights(version)
        return self._with_sender(lambda _: planned.prove(named))

    def proof(self, version: int) -> EngineProof:
        with self._expected(version) as expected:
            check = (lambda: None) if self._sender is None else self._sender.check
            try:
                return expected.result(self._timeout_s, check)
            except (TransferError, TimeoutError) as error:
                raise RefitError(f"trainer: {type(error).__name__}: {error}") from error

    def exchange(self, version: int) -> None:
        """Broadcast as many bytes as `send` would, beside the workers' `exchange_bytes`: for benchmarks."""
        self._with_sender(lambda sender: sender.exchange(self.metadata(version)))

    def abort(self, reason: str) -> None:
        if self._sender is not None:
            self._sender.abort(reason)

    def score(self, version: int, prompt: Sequence[int]) -> ProbeScore:
        return self._score(version, prompt)

    def close(self) -> None:
        """Let the transfer group go. Harmless when repeated."""
        self._forget_sent()
        self._planned = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _send(
        self,
        version: int,
        manifest: Manifest,
        named: NamedTensors,
        on_wire: Callable[[NamedTensors], NamedTensors] = lambda named: named,
    ) -> None:
        """Send `named`, and keep what their proof needs; `on_wire` makes of them what is sent, and a fault test
        tampers there."""
        self._forget_sent()
        expected = self._new_expected()
        self._sent = version, expected
        self._with_sender(lambda sender: sender.send(on_wire(expected.watch(named)), manifest))

    def _send_by_plan(
        self, version: int, on_wire: Callable[[NamedTensors], NamedTensors] = lambda named: named
    ) -> Verdict:
        """on_wire: as for `_send`."""
        planned, named = self._agreed(), self._weights(version)
        return self._with_sender(lambda _: planned.send(named, on_wire))

    def _agreed(self) -> PlannedSender:
        if self._planned is None:
            raise RefitError("trainer: no plan was agreed on in this transfer group")
        return self._planned

    def _expected(self, version: int) -> ExpectedProof:
        """What the last send kept, if it was of this version; else the tensors are gone through once more."""
        if self._sent is not None and self._sent[0] == version:
            expected, self._sent = self._sent[1], None
            return expected
        expected = self._new_expected()
        for name, tensor in self._weights(version):
            expected.add(name, tensor)
        return expected

    def _new_expected(self) -> ExpectedProof:
        if self._plans is None:
            raise RefitError("trainer: what the engines hold is not known, call agree first")
        return ExpectedProof(self._plans, self._proof, torch.device(self._device))

    def _forget_sent(self) -> None:
        if self._sent is not None:
            self._sent[1].close()
            self._sent = None

    def _with_sender(self, action: "Callable[[Sender], T]") -> T:
        if self._sender is None:
            raise RefitError("trainer: no transfer group, call listen first")
        try:
            return action(self._sender)
        except (TransferError, TimeoutError) as error:
            raise RefitError(f"trainer: {type(error).__name__}: {error}") from error


class Sender:
    """The trainer's end of a transfer: rank 0 of a group with every worker, with a deadline on each wait.

    Forms a group, sends, is thrown away after the first failure. The workers' `init_weights_update_group` and
    `update_weights` calls must run while `connect` and `send` do: each side waits for the other.
    """

    def __init__(self, transport: str, device: torch.device | str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """`transport` is the recipe's (gloo, nccl); `device` the trainer's (nccl sends from there)."""
        if transport not in BACKENDS:
            raise ValueError(f"transport {transport!r} is not one of {', '.join(BACKENDS)}")
        self._transport = transport
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._rendezvous: Rendezvous | None = None
        self._group: Group | None = None
        self._aborted: str | None = None
        self._lock = threading.Lock()

    def listen(self, address: str, port: int = 0) -> int:
        """Open the rendezvous on `address`; returns its port, for the workers' `init_info`."""
        self._rendezvous = Rendezvous(address, port, self._timeout_s)
        return self._rendezvous.port

    def connect(self, address: str, port: int, world_size: int) -> None:
        """Form the group of this sender and `world_size - 1` workers.

        Raises TransferTimeout naming the ranks that did not come, TransferError for one that failed.
        """
        if self._rendezvous is None:
            self.listen(address, port)
        assert self._rendezvous is not None
        group = self._new_group(self._rendezvous, world_size)
        with self._lock:
            self._group = group
            if self._aborted is not None:
                group.abort(self._aborted)
        group.form(self._timeout_s)

    def send(self, named: NamedTensors, manifest: Manifest) -> None:
        """Send every tensor, each taken once, to every worker; returns when the last byte has left.

        Raises TransferTimeout, or TransferError, also for tensors that differ from the manifest; the group is then
        broken.
        """
        send(self._connected(), manifest, named, self._timeout_s)

    def agree(self, slots: Sequence[Slot]) -> Agreement:
        """Agree with the workers, beside their `learn_plan`, on how updates are made. Raises as `lead_agreement`."""
        return lead_agreement(self._connected(), slots, self._timeout_s)

    def planned(self, agreement: Agreement, proof: ProofKind, resident: bool) -> PlannedSender:
        """What sends by plan in this group. resident: as for `LocalWeights`."""
        return PlannedSender(self._connected(), agreement, proof, self._timeout_s, resident)

    def exchange(self, manifest: Manifest) -> None:
        """Rank 0's part of `wire.exchange`."""
        exchange(self._connected(), manifest, self._timeout_s)

    def abort(self, reason: str) -> None:
        """From another thread, when a worker is known to be lost: ends a blocked `send` with TransferError."""
        with self._lock:
            self._aborted = reason
            if self._group is not None:
                self._group.abort(reason)

    def check(self) -> None:
        """Raises TransferError once aborted."""
        if self._aborted is not None:
            raise TransferError(self._aborted)

    def close(self) -> None:
        """Let the group and the rendezvous go, once the workers' update calls have returned. Harmless when repeated."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._rendezvous = None

    def _connected(self) -> Group:
        if self._group is None:
            raise TransferError("send: connect first")
        return self._group

    def _new_group(self, rendezvous: Rendezvous, world_size: int) -> Group:
        if self._transport == "gloo":
            return GlooGroup(rendezvous.store, 0, world_size, rendezvous.address)
        return NcclGroup(rendezvous.store, 0, world_size, self._device)
