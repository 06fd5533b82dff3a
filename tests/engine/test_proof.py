"""What is expected of the engine, and how differences are told."""

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch

from functional.engine import proof
from functional.engine.nh import Key
from functional.engine.proof import Proof, TensorProof, differences, prove_all, prove_tensor, refuse
from functional.engine.transports import ProofKind
from functional.runtime.refit.names import engine_name, expected_proof

UNTIED = SimpleNamespace(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
TIED = SimpleNamespace(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
Q, K, V = (torch.randn(rows, 6).to(torch.bfloat16) for rows in (4, 2, 2))
ATTENTION = "model.layers.0.self_attn"


def test_checkpoint_names_become_the_engines() -> None:
    assert engine_name(f"{ATTENTION}.k_proj.weight") == (f"{ATTENTION}.qkv_proj.weight", 1, 3)
    assert engine_name("model.layers.3.mlp.up_proj.bias") == ("model.layers.3.mlp.gate_up_proj.bias", 1, 2)
    assert engine_name("lm_head.weight") == ("lm_head.weight", 0, 1)


def test_parts_are_proved_as_the_fused_tensor_whatever_their_order() -> None:
    named = [(f"{ATTENTION}.{part}_proj.weight", tensor) for part, tensor in (("v", V), ("q", Q), ("k", K))]
    fused = f"{ATTENTION}.qkv_proj.weight"
    assert expected_proof(named, UNTIED) == Proof(None, {fused: prove_tensor(torch.cat([Q, K, V]))})
    keyed = expected_proof(named, UNTIED, "nh")
    assert keyed.tensors == prove_all([(fused, [torch.cat([Q, K, V])])], keyed.key)


def test_tied_embeddings_drop_the_head() -> None:
    named = [("model.embed_tokens.weight", Q), ("lm_head.weight", Q)]
    assert list(expected_proof(named, TIED).tensors) == ["model.embed_tokens.weight"]
    assert len(expected_proof(named, UNTIED).tensors) == 2


@pytest.mark.parametrize("kind", ["sha256", "nh"])
def test_incomplete_or_repeated_tensors_are_refused(kind: ProofKind) -> None:
    part = (f"{ATTENTION}.q_proj.weight", Q)
    with pytest.raises(ValueError, match="are missing"):
        expected_proof([part], UNTIED, kind)
    with pytest.raises(ValueError, match="given twice"):
        expected_proof([part, part], UNTIED, kind)
    with pytest.raises(ValueError, match="given twice"):
        expected_proof([("model.norm.weight", Q), ("model.norm.weight", Q)], UNTIED, kind)
    with pytest.raises(ValueError, match="architecture GPT2LMHeadModel"):
        expected_proof([part], SimpleNamespace(architectures=["GPT2LMHeadModel"]))


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


def test_each_keyed_proof_has_a_key_of_its_own_and_travels_whole() -> None:
    named = [("model.norm.weight", Q)]
    first, second = (expected_proof(named, UNTIED, "nh") for _ in range(2))
    assert first.key != second.key
    assert first.tensors != second.tensors
    for made in (first, expected_proof(named, UNTIED)):
        assert Proof.parse(json.loads(json.dumps(made.as_dict()))) == made


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
