"""What is expected of the engine, and how differences are told."""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from functional.engine import proof
from functional.engine.proof import TensorProof, differences, prove_all, prove_tensor, refuse
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
    assert expected_proof(named, UNTIED) == {
        f"{ATTENTION}.qkv_proj.weight": prove_tensor(torch.cat([Q, K, V])).as_dict()
    }


def test_tied_embeddings_drop_the_head() -> None:
    named = [("model.embed_tokens.weight", Q), ("lm_head.weight", Q)]
    assert list(expected_proof(named, TIED)) == ["model.embed_tokens.weight"]
    assert len(expected_proof(named, UNTIED)) == 2


def test_incomplete_or_repeated_tensors_are_refused() -> None:
    part = (f"{ATTENTION}.q_proj.weight", Q)
    with pytest.raises(ValueError, match="are missing"):
        expected_proof([part], UNTIED)
    with pytest.raises(ValueError, match="given twice"):
        expected_proof([part, part], UNTIED)
    with pytest.raises(ValueError, match="given twice"):
        expected_proof([("model.norm.weight", Q), ("model.norm.weight", Q)], UNTIED)
    with pytest.raises(ValueError, match="architecture GPT2LMHeadModel"):
        expected_proof([part], SimpleNamespace(architectures=["GPT2LMHeadModel"]))


def test_every_byte_shape_and_dtype_counts() -> None:
    right = prove_tensor(Q)
    flipped = Q.clone()
    flipped.view(torch.uint8)[-1, -1] ^= 1
    assert prove_tensor(Q.t().contiguous().t()) == right, "strides are no content"
    for other in (flipped, Q.reshape(6, 4), Q.view(torch.int16)):
        assert prove_tensor(other) != right
    assert prove_tensor(torch.tensor(1.0)).shape == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_the_hash_is_that_of_the_bytes_wherever_they_are(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_STAGING_BYTES", 64)
    for tensor in (torch.randn(37, 3), torch.zeros(0, 3), torch.randn(8, 4).t()):
        content = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        assert prove_tensor(tensor.to(device)).sha256 == content
        assert list(prove_all([("t", [tensor.to(device)])])) == ["t"]


def test_differences_name_three_and_count_all() -> None:
    one = TensorProof("bfloat16", (2,), "a" * 64)
    expected = {f"t{index}": one for index in range(5)}
    assert differences(expected, expected) == []
    with pytest.raises(ValueError, match=r"5 problem\(s\) among 5 tensors: t0: missing .*and 2 more"):
        refuse(differences(expected, {}), len(expected))
    with pytest.raises(ValueError, match="extra: in the engine, but not expected"):
        refuse(differences({}, {"extra": one}), 0)
    with pytest.raises(ValueError, match=r"float32 \(2,\), expected bfloat16"):
        refuse(differences({"t": one}, {"t": TensorProof("float32", (2,), "a" * 64)}), 1)
