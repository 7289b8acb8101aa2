"""A tiny model of every tested family, with what makes the family different in it.

Weights are drawn so that nothing hides: norms are not one, biases are not zero, logits are large
enough to be capped, Gemma 4's layer scalars differ.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import harness
import torch
import transformers

VOCAB = 320
WINDOW = 5
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_PATTERN = ["sliding_attention", "full_attention"] * 2
_GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": _PATTERN,
    "final_logit_softcapping": 3.0, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}  # fmt: skip
_SHARED = {
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": False,
    "num_global_key_value_heads": None, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen2.5": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2.5-window": (
        "Qwen2Config", "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "llama3": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "smollm2": ("LlamaConfig", "LlamaForCausalLM", {"num_attention_heads": 8, "head_dim": 8}),
    "gemma3": (
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _PATTERN,
         "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    ),
    "gemma4-e": ("Gemma4TextConfig", "Gemma4ForCausalLM", {**_GEMMA4, **_SHARED}),
    "gemma4": (
        "Gemma4TextConfig", "Gemma4ForCausalLM", {**_GEMMA4, "hidden_size_per_layer_input": 0},
    ),
    "gemma4-unified": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM", _GEMMA4),
}  # fmt: skip
"""Configuration class, model class and what differs from the others, by family."""

TIED = ("smollm2", "gemma3", "gemma4-e", "gemma4", "gemma4-unified")
"""Families whose published models share head and embedding."""


def config_of(family: str, tied: bool | None = None, **changes: Any) -> Any:
    """Configuration of a tiny model; tied as its family's published models are."""
    config, _, own = FAMILIES[family]
    tie = family in TIED if tied is None else tied
    sizes = {**_SIZES, **own, "tie_word_embeddings": tie, **changes}
    return getattr(transformers, config)(**sizes)


def make(family: str, tied: bool | None = None, **changes: Any) -> Any:
    """A tiny float32 model with drawn weights; plain transformers throughout."""
    generator = torch.Generator().manual_seed(0)
    model = getattr(transformers, FAMILIES[family][1])(config_of(family, tied, **changes))
    for name, parameter in sorted(model.named_parameters()):
        scale = 0.3 if "embed" in name or "lm_head" in name else 0.15
        values = scale * torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data * ("norm" in name) + values
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.data.fill_(0.6 + 0.1 * int(name.split(".")[2]))
    return model.eval()


def save(family: str, to: Path, **changes: Any) -> Path:
    """A tiny model with the golden data's vocabulary and tokenizer as a Hugging Face directory."""
    vocab = {"vocab_size": 512}
    if "vocab_size_per_layer_input" in FAMILIES[family][2]:
        vocab["vocab_size_per_layer_input"] = 512
    make(family, **vocab, **changes).save_pretrained(to)
    shutil.copytree(harness.GOLDEN / "tiny_tokenizer", to, dirs_exist_ok=True)
    return to
