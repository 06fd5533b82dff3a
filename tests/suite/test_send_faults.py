"""Faults of a send, as the proof has to see them: each changes what is expected, and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from functional.engine.plan import Copy, Target, View, make_plan
from functional.engine.plan_wire import Agreement
from functional.engine.wire import Manifest
from functional.suite.send_faults import FaultyWeights, SendFault, tampered

CONFIG = SimpleNamespace(tie_word_embeddings=False)


def named():
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (4, 2), "k": (2, 2), "v": (2, 2), "norm": (4,)}
    return [(n, torch.randn(s, generator=generator).to(torch.bfloat16)) for n, s in shapes.items()]


def layout():
    return Manifest.of(named(), packed=True).slots


def sent(kind, after=0):
    return list(tampered(named(), SendFault(kind, after)))


def test_swap_exchanges_two_of_equal_shape():
    clean, faulty = dict(named()), dict(sent("swap"))
    assert torch.equal(faulty["k"], clean["v"])
    assert torch.equal(faulty["v"], clean["k"])
    assert torch.equal(faulty["q"], clean["q"])


def test_flip_changes_one_bit():
    clean, faulty = dict(named()), dict(sent("flip", 1))
    difference = clean["k"].view(torch.int16) ^ faulty["k"].view(torch.int16)
    assert difference.count_nonzero() == 1
    assert difference.sum() == 1


def test_skip_and_twice():
    assert [name for name, _ in sent("skip", 2)] == ["q", "k", "norm"]
    assert [name for name, _ in sent("twice", 3)] == ["q", "k", "v", "norm", "norm"]


def source():
    made = FaultyWeights(
        lambda v: layout(), lambda v: named(), None, CONFIG, transport="gloo", device="cpu", timeout_s=1
    )
    made._with_sender = lambda act: act(made.wire)
    made.wire = Wire()
    made.agree(1)
    return made


class Wire:
    """A sender that keeps what it is given, to an engine of one rank that holds the tensors as they are."""

    def agree(self, slots):
        targets, copies = [], []
        for slot in slots:
            own = View(0, slot.shape, tuple(torch.empty(slot.shape).stride()))
            targets.append(Target(slot.name, slot.dtype, slot.shape, own.strides))
            copies.append(Copy(slot.name, own, slot.name, own))
        return Agreement({1: make_plan(slots, targets, copies)}, 1, {"q": "its layer packs it"}, None)

    def send(self, tensors, manifest):
        self.packed = manifest.packed
        self.sent = [(name, tuple(tensor.shape)) for name, tensor in tensors]
        self.announced = [(slot.name, slot.shape) for slot in manifest.slots]

    def check(self):
        pass


@pytest.mark.parametrize("kind", ["pause", "swap", "flip", "skip", "twice", "old"])
def test_a_fault_strikes_one_send_whose_manifest_and_proof_fit(kind):
    weights = source()
    weights.fault = SendFault(kind, 3, version=2, pause_s=0.0)
    proof = weights.proof(2)
    weights.send(1)
    assert weights.proof(1) == proof
    assert weights.wire.packed
    weights.send(2)
    assert weights.proof(2) == proof, "of the true weights, whatever was sent"
    assert weights.wire.sent == weights.wire.announced
    assert not weights.wire.packed
    assert len(weights.wire.sent) == {"skip": 3, "twice": 5}.get(kind, 4)
    assert weights.fault.times == 0
    weights.send(2)
    assert weights.proof(2) == proof
    assert weights.wire.packed


def test_a_send_that_fails_does_so_as_often_as_told():
    weights = source()
    weights.fault = SendFault("fail", 1, times=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="injected: the send fails after 1 tensors"):
            weights.send(1)
    weights.send(1)


def test_old_weights_are_sent_and_proved_as_those_of_the_version_before():
    asked = []
    weights = source()
    weights._weights = lambda version: asked.append(version) or named()
    weights.fault = SendFault("old")
    for _ in range(2):
        weights.send(7)
        weights.proof(7)
    assert asked == [6, 7]


class Planned:
    """A sender by plan that keeps what it would send, and what it would prove."""

    def send(self, named, on_wire):
        self.proved = []
        self.sent = list(on_wire(self.watched(named)))

    def watched(self, named):
        for name, tensor in named:
            self.proved.append((name, tensor))
            yield name, tensor


@pytest.mark.parametrize(
    ("kind", "differ"), [("swap", {"k", "v"}), ("flip", {"norm"}), ("skip", {"norm"}), ("old", set())]
)
def test_by_plan_a_fault_changes_what_is_sent_and_not_what_is_proved(kind, differ):
    weights = source()
    weights._planned = Planned()
    weights._weights = lambda version: [(name, tensor + version) for name, tensor in named()]
    weights.fault = SendFault(kind, 3, version=2)
    weights.send_by_plan(2)
    true = dict(weights._weights(1 if kind == "old" else 2))
    assert all(torch.equal(true[name], tensor) for name, tensor in weights._planned.proved)
    assert {name for name, tensor in weights._planned.sent if not torch.equal(true[name], tensor)} == differ
    assert (weights.fault.times, [name for name, _ in weights._planned.sent]) == (0, ["q", "k", "v", "norm"])
