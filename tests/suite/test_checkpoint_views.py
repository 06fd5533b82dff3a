"""The views are what transformers would save, they show later steps, and cost no memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from functional.suite.checkpoint_views import checkpoint_views

SHAPE: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma3", "Granite", "Qwen3Moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_views_are_what_is_saved(tmp_path: Path, family: str, tied: bool) -> None:
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**SHAPE, tie_word_embeddings=tied, **(MOE if family == "Qwen3Moe" else {}))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    views = checkpoint_views(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(views) == set(saved)
    assert all(torch.equal(views[name], tensor) for name, tensor in saved.items())
    assert sum(view.numel() for view in views.values()) == sum(p.numel() for p in model.parameters())


def test_what_is_no_part_of_a_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))
    monkeypatch.setattr(
        "functional.suite.checkpoint_views.revert_weight_conversion",
        lambda model, own: {name: tensor + 1 for name, tensor in own.items()},
    )
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight: transformers computes it"):
        checkpoint_views(model)
