"""The weight source of a trainer's own process: tensors gone through once, sent to a real group, and proved."""

import contextlib
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from functional.engine.gloo import GlooGroup
from functional.engine.group import join_store
from functional.engine.plan import Copy, Learned, PlanRefused, Target, View, make_plan
from functional.engine.plan_wire import join_agreement
from functional.engine.proof import prove_all
from functional.engine.wire import Manifest, exchange, receive
from functional.runtime.errors import RefitError
from functional.runtime.refit import expected
from functional.runtime.refit.source import LocalWeights

CONFIG = SimpleNamespace(tie_word_embeddings=False)
WEIGHTS = {
    f"model.layers.0.self_attn.{name}_proj.weight": torch.full((rows, 3), float(rows)).to(torch.bfloat16)
    for name, rows in (("q", 4), ("k", 2), ("v", 2), ("o", 3))
}
DEADLINE_S = 5.0


def plan_for(slots):
    """As an engine of one rank with these would tell it: q, k and v fused, o as it is; and none is written in place."""
    sizes = {slot.name: slot.shape for slot in slots}
    targets, copies = {}, []
    for name, (rows, columns) in sizes.items():
        target = re.sub(r"\.[qkv]_proj", ".qkv_proj", name)
        start = targets.get(target, 0)
        copies.append(Copy(name, whole(0, rows, columns), target, whole(start * columns, rows, columns)))
        targets[target] = start + rows
    shapes = [Target(name, torch.bfloat16, (rows, 3), (3, 1)) for name, rows in targets.items()]
    return Learned(make_plan(slots, shapes, copies), {"norm": "its layer packs it"})


def whole(offset, rows, columns):
    return View(offset, (rows, columns), (columns, 1))


class Trainer:
    """Holds version 7, and counts how often its tensors are gone through."""

    def __init__(self, timeout_s=DEADLINE_S, proof=None):
        self.passes = 0
        self.source = LocalWeights(
            self.layout, self.weights, None, CONFIG, transport="gloo", device="cpu", timeout_s=timeout_s, proof=proof
        )

    def layout(self, version):
        if version != 7:
            raise RefitError(f"no version {version}")
        return Manifest.of(WEIGHTS.items(), packed=True).slots

    def weights(self, version):
        self.passes += 1
        yield from WEIGHTS.items()


class Receiver(threading.Thread):
    """The one worker: receives what is announced."""

    def __init__(self, source, manifest, part=None, plan=plan_for):
        super().__init__(daemon=True)
        self.port, self.manifest, self.got = source.listen("127.0.0.1"), manifest, {}
        self.plan = plan
        self.part = part or (lambda group, manifest, timeout_s: receive(group, manifest, self.load, timeout_s))
        self.start()
        source.connect("127.0.0.1", self.port, 2)
        source.agree(7)

    def run(self):
        group = GlooGroup(join_store("127.0.0.1", self.port, DEADLINE_S), 1, 2, "127.0.0.1")
        group.form(DEADLINE_S)
        with contextlib.suppress(PlanRefused):
            join_agreement(group, lambda manifest: self.plan(manifest.slots), 1, DEADLINE_S)
        self.part(group, self.manifest, DEADLINE_S)
        group.close()

    def load(self, tensors):
        self.got |= {name: tensor.clone() for name, tensor in tensors}


@pytest.fixture
def slow(monkeypatch):
    """Hashing that waits until the test says so."""
    release, prove = threading.Event(), expected.prove_tensor
    monkeypatch.setattr(expected, "prove_tensor", lambda *parts: release.wait(30) and prove(*parts))
    yield release
    release.set()


def test_metadata_goes_through_no_tensor_and_refuses_a_version_that_is_not_held():
    trainer = Trainer()
    manifest = trainer.source.metadata(7)
    assert [slot.name for slot in manifest.slots] == list(WEIGHTS)
    assert (manifest.nbytes, manifest.packed) == (2 * 11 * 3, True)
    assert trainer.passes == 0
    with pytest.raises(RefitError, match="no version 8"):
        trainer.source.metadata(8)


@pytest.mark.parametrize("kind", [None, "sha256", "nh"])
def test_an_update_goes_through_the_tensors_once_and_proves_what_it_sent(kind):
    trainer = Trainer(proof=kind)
    receiver = Receiver(trainer.source, trainer.source.metadata(7))
    trainer.source.send(7)
    receiver.join(DEADLINE_S)
    assert receiver.got.keys() == WEIGHTS.keys()
    assert all(torch.equal(receiver.got[name], tensor) for name, tensor in WEIGHTS.items())
    proof = trainer.source.proof(7)
    assert trainer.passes == 1
    (held,) = proof.ranks
    assert sorted(held) == [f"model.layers.0.self_attn.{name}_proj.weight" for name in ("o", "qkv")]
    assert (proof.key is not None) == (kind == "nh")
    fused = [WEIGHTS[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert held[name] == prove_all([(name, fused)], proof.key)[name]
    again = trainer.source.proof(7)
    assert trainer.passes == 2
    assert (again == proof) == (kind != "nh"), "a keyed proof is made with a key of its own"


def test_hashing_keeps_no_transfer_waiting_and_its_time_is_not_the_transfer_s(slow):
    trainer = Trainer(timeout_s=0.5)
    receiver = Receiver(trainer.source, trainer.source.metadata(7))
    began = time.monotonic()
    trainer.source.send(7)
    with pytest.raises(RefitError, match=r"2 of 2 parameters not hashed within 0\.5 s"):
        trainer.source.proof(7)
    assert time.monotonic() - began < DEADLINE_S
    receiver.join(DEADLINE_S)
    assert receiver.got.keys() == WEIGHTS.keys()


def test_an_abort_ends_a_proof_that_still_hashes(slow):
    trainer = Trainer(timeout_s=30)
    receiver = Receiver(trainer.source, trainer.source.metadata(7))
    trainer.source.send(7)
    threading.Timer(0.3, trainer.source.abort, ("worker 1 is dead",)).start()
    began = time.monotonic()
    with pytest.raises(RefitError, match="TransferError: worker 1 is dead"):
        trainer.source.proof(7)
    assert time.monotonic() - began < DEADLINE_S
    receiver.join(DEADLINE_S)


def test_an_exchange_moves_as_many_bytes_and_no_tensor(monkeypatch):
    moved, start = [], GlooGroup.start

    def counted(group, buffer):
        moved.append(len(buffer))
        return start(group, buffer)

    monkeypatch.setattr(GlooGroup, "start", counted)
    trainer = Trainer()
    receiver = Receiver(trainer.source, trainer.source.metadata(7), exchange)
    trainer.source.exchange(7)
    receiver.join(DEADLINE_S)
    assert not receiver.is_alive()
    agreed = 16  # bytes of each broadcast by which the agreement measures
    assert sum(size for size in moved if size != agreed) == 2 * 2 * 11 * 3
    assert trainer.passes == 0


def test_without_a_group_nothing_is_sent():
    trainer = Trainer()
    trainer.source._plans = []
    with pytest.raises(RefitError, match="call listen first"):
        trainer.source.send(7)
    assert trainer.passes == 0


def test_without_plans_no_tensor_is_sent():
    trainer = Trainer()
    trainer.source._sender = SimpleNamespace(send=None)
    with pytest.raises(RefitError, match="call agree first"):
        trainer.source.send(7)
    assert trainer.passes == 0


def without_o(slots):
    return plan_for([slot for slot in slots if ".o_proj" not in slot.name])


def refused(slots):
    return Learned(None, {slots[0].name: "the loader computes it"})


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (without_o, r"o_proj\.weight: no rank of the engine takes 9 of its 9 elements"),
        (refused, r"q_proj\.weight: the loader computes it \(rank 0 of engine 0\)"),
    ],
)
def test_a_tensor_that_cannot_be_proved_is_named_before_one_is_sent(plan, why):
    trainer = Trainer()
    with pytest.raises(RefitError, match="cannot be proved: .*" + why):
        Receiver(trainer.source, trainer.source.metadata(7), part=lambda *_: None, plan=plan)
    assert trainer.passes == 0
