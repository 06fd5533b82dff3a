"""A transfer between real processes, no vLLM: right bytes, and an error in time whichever side is lost.

Over gloo on a CPU; with TRANSPORT=nccl on one GPU or two (receiver on the first, sender on the last).
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from functional.engine.errors import TransferError
from functional.engine.gloo import GlooGroup
from functional.engine.group import join_store, local_address
from functional.engine.nccl import NcclGroup
from functional.engine.proof import prove_tensor
from functional.engine.wire import Manifest, receive
from functional.runtime.refit.source import Sender

TRANSPORT = os.environ.get("TRANSPORT", "gloo")
MIB = 1 << 20
SIZE = (64 if TRANSPORT == "gloo" else 1200) * MIB
BUFFER = SIZE // 5
TIMEOUT_S = 6.0
SLACK_S = 7.0
pytestmark = pytest.mark.faults


def weights(device: torch.device | str, seed: int) -> list[tuple[str, Tensor]]:
    """Odd sizes and mixed dtypes, so that some start unaligned on the wire."""
    generator = torch.Generator(device).manual_seed(seed)
    parts = [("odd", 3, torch.bfloat16), ("scale", 1, torch.float32)]
    parts += [(f"big{index}", SIZE // 20 // 2, torch.bfloat16) for index in range(20)]
    return [
        (name, torch.randint(-99, 99, (size,), device=device, generator=generator).to(dtype))
        for name, size, dtype in parts
    ]


def receiver(pipe: Connection, port: int, info: dict[str, Any], lost: str) -> None:
    """Receives in a loop, one group after the other, as a worker does; tells what it got."""
    while True:
        store = join_store("127.0.0.1", port, 30)
        group = (
            GlooGroup(store, 1, 2, local_address("127.0.0.1", port))
            if TRANSPORT == "gloo"
            else NcclGroup(store, 1, 2, torch.device("cuda", 0))
        )
        got: dict[str, str] = {}

        def load(tensors: list[tuple[str, Tensor]], got: dict[str, str] = got, lost: str = lost) -> None:
            for name, tensor in tensors:
                got[name] = prove_tensor(tensor).digest
            if len(got) > 8 and lost:
                if lost == "raise":
                    raise ValueError("cannot load")
                os.kill(os.getpid(), signal.Signals[lost])

        started = time.monotonic()
        try:
            group.form(30)
            manifest = Manifest.from_info(**info)
            for _ in range(3):
                started = time.monotonic()
                receive(group, manifest, load, TIMEOUT_S)
                pipe.send(("got", got, time.monotonic() - started))
        except (TransferError, ValueError) as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}", time.monotonic() - started))
        port = pipe.recv()
        lost = ""


class Receiver:
    """The other end, in its own process."""

    def __init__(self, port: int, manifest: Manifest, lost: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receiver, args=(theirs, port, manifest.info(), lost), daemon=True)
        self.process.start()

    def answer(self) -> Any:
        assert self.pipe.poll(60), "the receiver says nothing"
        return self.pipe.recv()


@pytest.fixture
def device() -> torch.device:
    if TRANSPORT == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.device_count() - 1)


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    started: list[Receiver] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.join()


def test_bytes_arrive_and_the_group_lasts(device: torch.device, receivers: list[Receiver]) -> None:
    named = weights(device, 1)
    manifest = Manifest.of(named, True, BUFFER)
    sender = Sender(TRANSPORT, device, 60)
    receivers.append(Receiver(sender.listen("127.0.0.1"), manifest))
    sender.connect("127.0.0.1", 0, 2)
    for seed in (1, 2, 3):
        named = weights(device, seed)
        started = time.monotonic()
        sender.send(iter(named), manifest)
        seconds = time.monotonic() - started
        kind, got, _ = receivers[0].answer()
        assert kind == "got"
        assert got == {name: prove_tensor(tensor).digest for name, tensor in named}
        print(f"{TRANSPORT}: {manifest.nbytes / 1e9:.2f} GB in {seconds:.3f} s, {len(list(manifest.chunks()))} chunks")
    sender.close()


@pytest.mark.parametrize("lost", ["SIGKILL", "SIGSTOP", "raise"])
def test_receiver_lost(device: torch.device, receivers: list[Receiver], lost: str) -> None:
    named = weights(device, 1)
    manifest = Manifest.of(named, True, BUFFER)
    sender = Sender(TRANSPORT, device, 60)
    receivers.append(Receiver(sender.listen("127.0.0.1"), manifest, lost))
    sender.connect("127.0.0.1", 0, 2)
    sender._timeout_s = TIMEOUT_S
    started = time.monotonic()
    with pytest.raises(TransferError) as failure:
        sender.send(named, manifest)
    print(f"{TRANSPORT}, {lost}: {failure.value!r} after {time.monotonic() - started:.2f} s")
    assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    sender.close()

    again = Sender(TRANSPORT, device, 60)
    port = again.listen("127.0.0.1")
    if lost == "raise":
        assert receivers[0].answer()[1] == "ValueError: cannot load"
        receivers[0].pipe.send(port)
    else:
        receivers[0].process.kill()
        receivers.append(Receiver(port, manifest))
    again.connect("127.0.0.1", 0, 2)
    again.send(named, manifest)
    assert receivers[-1].answer()[0] == "got"
    again.close()


def lost_sender(device: str, ports: Connection, how: str) -> None:
    named = weights(device, 1)
    sender = Sender(TRANSPORT, device, 60)
    ports.send(sender.listen("127.0.0.1"))
    sender.connect("127.0.0.1", 0, 2)

    def until() -> Iterator[tuple[str, Tensor]]:
        for index, item in enumerate(named):
            if index == 12:
                os.kill(os.getpid(), signal.Signals[how])
            yield item

    sender.send(until(), Manifest.of(named, True, BUFFER))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_sender_lost(device: torch.device, receivers: list[Receiver], how: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lost_sender, args=(str(device), theirs, how), daemon=True)
    process.start()
    named = weights(device, 1)
    manifest = Manifest.of(named, True, BUFFER)
    receivers.append(Receiver(ours.recv(), manifest))
    kind, reason, seconds = receivers[0].answer()
    process.kill()
    process.join()
    print(f"{TRANSPORT}, sender {how}: {reason} after {seconds:.2f} s")
    assert kind == "failed"
    assert seconds < TIMEOUT_S + SLACK_S

    sender = Sender(TRANSPORT, device, 60)
    receivers[0].pipe.send(sender.listen("127.0.0.1"))
    sender.connect("127.0.0.1", 0, 2)
    sender.send(named, manifest)
    assert receivers[0].answer()[0] == "got"
    sender.close()


def test_not_everyone_comes(device: torch.device) -> None:
    sender = Sender(TRANSPORT, device, 1)
    with pytest.raises(TransferError, match=r"rank\(s\) \[1, 2\] of 3 did not join"):
        sender.connect("127.0.0.1", 0, 3)


def test_sender_refuses_tensors_that_differ_from_the_manifest(device: torch.device, receivers: list[Receiver]) -> None:
    named = weights(device, 1)
    manifest = Manifest.of(named, True, BUFFER)
    sender = Sender(TRANSPORT, device, 20)
    receivers.append(Receiver(sender.listen("127.0.0.1"), manifest))
    sender.connect("127.0.0.1", 0, 2)
    with pytest.raises(TransferError, match="sending odd"):
        sender.send([("odd", torch.zeros(4)), *named[1:]], manifest)
    assert "sending odd" in receivers[0].answer()[1]
