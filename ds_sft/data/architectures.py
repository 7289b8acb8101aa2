"""Which architectures are trained, and what their tensors are: names and shapes from config.json.

Owns the list of tested architectures and the reasons for which others are refused. Leaves the files
to `model_files` and the modules to the model room. No torch: a model that does not fit its
config.json is found before anything is loaded.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from ds_sft.errors import ConfigError

TESTED_ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")


def check_architecture(directory: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError unless the model in `directory` is of a tested architecture."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(
            f"{directory}/config.json names no architecture: save the model with transformers' "
            "save_pretrained"
        )
    name = str(names[0])
    if name in TESTED_ARCHITECTURES:
        return
    experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts")
                    if config.get(k)), None)  # fmt: skip
    if experts or "moe" in name.lower() or "Mixtral" in name:
        raise ConfigError(
            f"{directory}: {name} is a mixture of experts, which ds_sft does not train: "
            "use a dense model"
        )
    if "auto_map" in config:
        raise ConfigError(
            f"{directory}: {name} needs code from its own repository (auto_map), which ds_sft does "
            f"not run: use {' or '.join(TESTED_ARCHITECTURES)}"
        )
    near = difflib.get_close_matches(name, TESTED_ARCHITECTURES, n=1)
    raise ConfigError(
        f"{directory}: architecture {name} is not tested: use "
        f"{near[0] if near else ' or '.join(TESTED_ARCHITECTURES)}"
    )


def expected_shapes(config: dict[str, Any], tied: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a tested architecture, by name. Raises KeyError.

    Linear weights are [out, in]. Qwen3 differs from Llama by a norm on each head of q and k.
    """
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    inner, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    linear = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["architectures"][0] == "Qwen3ForCausalLM":
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        for name, shape in linear.items():
            if config.get("attention_bias" if name.startswith("self_attn") else "mlp_bias"):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes
