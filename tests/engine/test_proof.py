"""Proofs of single tensors, of ranks and engines, and how differences are told."""

import hashlib
import json

import pytest
import torch

from functional.engine import proof
from functional.engine.nh import Key
from functional.engine.proof import EngineProof, Proof, TensorProof, differences, prove_all, prove_tensor, refuse

Q = torch.randn(4, 6).to(torch.bfloat16)


@pytest.mark.parametrize("key", [None, Key.draw()], ids=["sha256", "nh"])
def test_every_byte_shape_and_dtype_counts(key: Key | None) -> None:
    right = one(Q, key)
    flipped = Q.clone()
    flipped.view(torch.uint8)[-1, -1] ^= 1
    assert one(Q.t().contiguous().t(), key) == right, "strides are no content"
    for other in (flipped, Q.reshape(6, 4), Q.view(torch.int16)):
        assert one(other, key) != right
    assert one(torch.tensor(1.0), key).shape == ()
    with pytest.raises(ValueError, match="parts do not join"):
        prove_all([("t", [Q, Q.float()])], key)


def one(tensor: torch.Tensor, key: Key | None) -> TensorProof:
    return prove_all([("t", [tensor])], key)["t"]


def test_a_rank_takes_its_own_part_of_a_proof_that_travels_whole() -> None:
    for key in (None, Key.draw()):
        made = EngineProof(key, ({"a": one(Q, key)}, {"b": one(Q[:1], key), "c": one(Q[1:], key)}))
        assert EngineProof.parse(json.loads(json.dumps(made.as_dict()))) == made
        assert made.parameters == 3
        assert made.of_rank(1, 2) == Proof(key, made.ranks[1])
        with pytest.raises(ValueError, match=r"not proved: the proof is of 2 rank\(s\), the engine has 4"):
            made.of_rank(1, 4)


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_the_hash_is_that_of_the_bytes_wherever_they_are(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_STAGING_BYTES", 64)
    for tensor in (torch.randn(37, 3), torch.zeros(0, 3), torch.randn(8, 4).t()):
        content = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        assert one(tensor.to(device), None) == prove_tensor(tensor.to(device))
        assert prove_tensor(tensor.to(device)).digest == content


def test_tensors_of_the_host_go_to_a_gpu_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_COPIED_BYTES", 100)
    parameters = [[torch.zeros(size, dtype=torch.uint8)] for size in (60, 30, 20, 500, 0, 1)]
    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")
    assert [*proof._groups(parameters, gpu)] == [(gpu, [0, 1, 2]), (gpu, [3]), (gpu, [4, 5])]
    assert [*proof._groups(parameters, None)] == [*proof._groups(parameters, cpu)] == [(cpu, [0, 1, 2, 3, 4, 5])]


def test_differences_name_three_and_count_all() -> None:
    right = TensorProof("bfloat16", (2,), 4, "a" * 64)
    expected = {f"t{index}": right for index in range(5)}
    assert differences(expected, expected) == []
    with pytest.raises(ValueError, match=r"5 problem\(s\) among 5 tensors: t0: missing .*and 2 more"):
        refuse(differences(expected, {}), len(expected))
    with pytest.raises(ValueError, match="extra: in the engine, but not expected"):
        refuse(differences({}, {"extra": right}), 0)
    with pytest.raises(ValueError, match=r"float32 \(2,\) of 8 bytes, expected bfloat16 \(2,\) of 4"):
        refuse(differences({"t": right}, {"t": TensorProof("float32", (2,), 8, "a" * 64)}), 1)
