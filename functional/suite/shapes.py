"""Shapes of the models that are made on the spot, with random weights. Needs neither torch nor transformers.

The small ones are one of each family that can be proved. Their vocabulary is no multiple of 64, which an engine pads it
to, and they have one KV head, so that two tensor parallel ranks share it.
"""

from dataclasses import dataclass, field
from typing import Any

from functional.suite.vocabulary import QWEN3_VOCAB

_SMALL: dict[str, Any] = {
    "vocab_size": 134,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_SMALL_SPREAD = 0.1
QWEN3: dict[str, Any] = {
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True)
class Shape:
    """family: transformers' prefix of the classes; config: of its configuration, beside what all have.

    spread: standard deviation of what norms and biases are moved by, so that no two are alike.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    spread: float = 0.0

    @property
    def architecture(self) -> str:
        return f"{self.family}ForCausalLM"

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def as_config(self) -> dict[str, Any]:
        """What a rule on models reads of its config.json."""
        return {"architectures": [self.architecture], **self.config}


def _small(family: str, **changes: Any) -> Shape:
    return Shape(family, {**_SMALL, **changes}, _SMALL_SPREAD)


SHAPES: dict[str, Shape] = {
    "Qwen3-0.6B": Shape(
        "Qwen3",
        {
            **QWEN3,
            "vocab_size": QWEN3_VOCAB,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-8B": Shape(
        "Qwen3",
        {
            **QWEN3,
            "vocab_size": QWEN3_VOCAB,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-MoE-2.5B": Shape(
        "Qwen3Moe",
        {
            **QWEN3,
            "vocab_size": QWEN3_VOCAB,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "Llama-small": _small("Llama", tie_word_embeddings=True),
    "Qwen2-small": _small("Qwen2"),
    "Qwen3-small": _small("Qwen3", **QWEN3, tie_word_embeddings=True),
    "Mistral-small": _small("Mistral", sliding_window=None),
    "Gemma3-small": _small("Gemma3", sliding_window=32, tie_word_embeddings=True),
    "Granite-small": _small("Granite", logits_scaling=8.0, attention_multiplier=0.25, residual_multiplier=0.5),
    "Qwen3-MoE-small": _small(
        "Qwen3Moe", **QWEN3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    ),
}

MADE = {
    "builtin:random-0.6b": "Qwen3-0.6B",
    "builtin:random-moe": "Qwen3-MoE-2.5B",
    **{f"builtin:random-{name.removesuffix('-small').lower()}": name for name in SHAPES if name.endswith("-small")},
}
"""Names that `policy.model_name` may hold, and the shapes that they stand for."""
