"""Which architectures are trained, and what their tensors are: names and shapes from config.json.

Owns the list of tested architectures, the reasons for which others are refused, and the text part
of a multimodal model. Leaves the sizes of layers to `geometry`, the files to `model_files` and the
modules to the model room. No torch: a model that does not fit its config.json is found before
anything is loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_sft.data.geometry import FULL, SLIDING, Layer, layers, size
from ds_sft.errors import ConfigError

TESTED_ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
}
"""Compared with plain transformers in tests/model/test_families.py; the `model_type` of each, by
which transformers chooses the class."""

TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
}
"""Multimodal models whose `text_config` describes a tested architecture."""

_SUFFIX = "ForCausalLM"
TO_BE_CHECKED = (
    "that packed documents do not see each other, that only distances between positions count, "
    "which layers have windows or soft caps, what multiplies embeddings and logits, and that an "
    "export loads"
)
_MIXTURES = ("num_experts", "num_local_experts", "n_routed_experts")
# They look at the positions of the whole row, which here runs over several documents.
_ROPE_OF_THE_ROW = ("dynamic", "longrope")
_NEEDED = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
# Of architectures that nobody tested: what changes logits and is not in our head.
_UNKNOWN_HEADS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "mup_width_multiplier")


def architecture(config: Mapping[str, Any]) -> str:
    """Name of the model's class; empty when config.json does not say."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def check_architecture(
    directory: Path, config: dict[str, Any], allow_untested: bool = False
) -> None:
    """Raise ConfigError unless the model in `directory` is of a tested architecture.

    `allow_untested` lets other dense ones through that need nothing which is known to be missing.
    """
    name = architecture(config)
    if not name:
        raise ConfigError(
            f"{directory}/config.json names no architecture: save the model with transformers' "
            "save_pretrained"
        )
    _refuse_mixtures(directory, name, config)
    _refuse_attention(directory, config)
    if name in TESTED_ARCHITECTURES:
        return _check_model_type(directory, name, config)
    if "auto_map" in config:
        raise ConfigError(
            f"{directory}: {name} needs code from its own repository (auto_map), which ds_sft does "
            f"not run: use {_tested()}"
        )
    if not name.endswith(_SUFFIX) or "text_config" in config:
        raise ConfigError(
            f"{directory}: {name} is not a text model, and its text part is not tested either: "
            f"use {_tested()}"
        )
    if allow_untested:
        return _check_untested(directory, name, config)
    stems = [tested.removesuffix(_SUFFIX) for tested in TESTED_ARCHITECTURES]
    near = difflib.get_close_matches(name.removesuffix(_SUFFIX), stems, n=1)
    raise ConfigError(
        f"{directory}: architecture {name} is not tested: use "
        f"{near[0] + _SUFFIX if near else _tested()}, or check {TO_BE_CHECKED}, and go on with "
        "--allow-untested-architecture"
    )


def _check_model_type(directory: Path, name: str, config: Mapping[str, Any]) -> None:
    wanted, given = TESTED_ARCHITECTURES[name], config.get("model_type")
    if given != wanted:
        raise ConfigError(
            f"{directory}/config.json says {name} and model_type={given!r}, by which transformers "
            f"would make another model than {wanted!r}: copy the model again"
        )


def _tested() -> str:
    return " or ".join(TESTED_ARCHITECTURES)


def _refuse_mixtures(directory: Path, name: str, config: Mapping[str, Any]) -> None:
    experts = next((k for k in _MIXTURES if config.get(k)), None) or config.get("enable_moe_block")
    if experts or "moe" in name.lower() or "Mixtral" in name:
        raise ConfigError(
            f"{directory}: {name} is a mixture of experts, which ds_sft does not train: "
            "use a dense model"
        )


def _refuse_attention(directory: Path, config: Mapping[str, Any]) -> None:
    """What would let a token see the documents around its own or later tokens, or is not here."""
    ropes = [config.get("rope_scaling"), config.get("rope_parameters")]
    ropes += [r for rope in ropes if isinstance(rope, dict) for r in rope.values()]
    rope_types = {str(r.get("rope_type", r.get("type"))) for r in ropes if isinstance(r, dict)}
    for kind in _ROPE_OF_THE_ROW:
        if kind in rope_types:
            raise ConfigError(
                f"{directory}: rope_type {kind} depends on the longest position of a row, which "
                "here holds several documents: use a model with another rope_type"
            )
    if config.get("use_bidirectional_attention") in (True, "all"):
        raise ConfigError(
            f"{directory}: use_bidirectional_attention lets a token see the ones after it, which "
            "is no language model: use a causal one"
        )
    given = config.get("layer_types")
    kinds = {str(kind) for kind in given} - {FULL, SLIDING} if isinstance(given, list) else set()
    if kinds:
        raise ConfigError(
            f"{directory}: its layers have {', '.join(sorted(kinds))}, which the "
            "attention kernels here do not know: use another model"
        )
    if config.get("attention_dropout"):
        raise ConfigError(
            f"{directory}: attention_dropout={config['attention_dropout']}, which the attention "
            "kernels here do not have: set it to 0 in config.json"
        )
    if config.get("attn_logit_softcapping"):
        raise ConfigError(
            f"{directory}: attn_logit_softcapping={config['attn_logit_softcapping']}, which the "
            "attention kernels here do not have: use another model"
        )


def _check_untested(directory: Path, name: str, config: Mapping[str, Any]) -> None:
    """Refuse what is known to be missing here, and a config.json that says too little."""
    unsaid = [key for key in _NEEDED if config.get(key) is None]
    if unsaid:
        raise ConfigError(
            f"{directory}/config.json of {name} has no {', '.join(unsaid)}: use {_tested()}"
        )
    layers(config)
    for key in _UNKNOWN_HEADS:
        if config.get(key) not in (None, 1, 1.0):
            raise ConfigError(
                f"{directory}: {name} has {key}={config[key]}, which the head here does not know: "
                f"use {_tested()}"
            )


def text_part(config: dict[str, Any]) -> dict[str, Any] | None:
    """config.json of the text part of a multimodal model; None for any other model."""
    inner = TEXT_PARTS.get(architecture(config))
    text = config.get("text_config")
    if inner is None or not isinstance(text, dict):
        return None
    outer = {k: config[k] for k in ("tie_word_embeddings", "dtype", "torch_dtype") if k in config}
    return {**outer, **text, "architectures": [inner]}


def expected_shapes(config: dict[str, Any], tied: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a tested architecture, by name. Raises KeyError.

    Linear weights are [out, in].
    """
    hidden, vocab = size(config, "hidden_size"), size(config, "vocab_size")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    per_layer = _per_layer_input(config)
    if per_layer:
        total = size(config, "num_hidden_layers") * per_layer
        rows = size(config, "vocab_size_per_layer_input")
        if rows < vocab:
            raise ConfigError(
                f"config.json: vocab_size_per_layer_input is {rows}, fewer than "
                f"vocab_size={vocab}: some tokens have no row there"
            )
        shapes["model.embed_tokens_per_layer.weight"] = (rows, total)
        shapes["model.per_layer_model_projection.weight"] = (total, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (per_layer,)
    for index, layer in enumerate(layers(config)):
        prefix = f"model.layers.{index}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config, layer).items()}
    return shapes


def _layer_shapes(config: Mapping[str, Any], layer: Layer) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer, without its prefix."""
    name, hidden = architecture(config), size(config, "hidden_size")
    linear = {
        "self_attn.q_proj": (layer.heads * layer.head, hidden),
        "self_attn.o_proj": (hidden, layer.heads * layer.head),
        "mlp.gate_proj": (layer.inner, hidden),
        "mlp.up_proj": (layer.inner, hidden),
        "mlp.down_proj": (hidden, layer.inner),
    }
    if not layer.shares_kv:
        linear["self_attn.k_proj"] = (layer.kv_heads * layer.head, hidden)
        if not layer.values_are_keys:
            linear["self_attn.v_proj"] = (layer.kv_heads * layer.head, hidden)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if name.startswith(("Qwen3", "Gemma")):
        norms["self_attn.q_norm"] = layer.head
        if not layer.shares_kv:
            norms["self_attn.k_norm"] = layer.head
    if name.startswith("Gemma"):
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    per_layer = _per_layer_input(config)
    if per_layer:
        linear["per_layer_input_gate"] = (per_layer, hidden)
        linear["per_layer_projection"] = (hidden, per_layer)
        norms["post_per_layer_input_norm"] = hidden
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": shape for n, shape in linear.items()}
    shapes |= {f"{n}.weight": (size,) for n, size in norms.items()}
    shapes |= {f"{n}.bias": shape[:1] for n, shape in linear.items() if _has_bias(config, n)}
    return shapes


def _has_bias(config: Mapping[str, Any], module: str) -> bool:
    part, _, projection = module.partition(".")
    if part == "self_attn":
        if architecture(config).startswith("Qwen2"):
            return projection != "o_proj"
        return bool(config.get("attention_bias"))
    return part == "mlp" and bool(config.get("mlp_bias"))


def _per_layer_input(config: Mapping[str, Any]) -> int:
    """Width of Gemma 4's embeddings for each layer; 0 where there are none."""
    if architecture(config) != "Gemma4ForCausalLM":
        return 0
    return size(config, "hidden_size_per_layer_input", 0)


def expected_buffers(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every buffer that is stored with the weights and not trained."""
    if not architecture(config).startswith("Gemma4"):
        return {}
    return {
        f"model.layers.{i}.layer_scalar": (1,) for i in range(size(config, "num_hidden_layers"))
    }


def unused_tensors(config: Mapping[str, Any]) -> set[str]:
    """Tensors that published files hold and the architecture does not use.

    Gemma 4's layers that share keys and values keep the projections they were once made with.
    """
    if not architecture(config).startswith("Gemma4"):
        return set()
    unused = ("k_proj", "v_proj", "k_norm", "v_norm")
    return {
        f"model.layers.{i}.self_attn.{name}.weight"
        for i, layer in enumerate(layers(config)) if layer.shares_kv
        for name in unused
    }  # fmt: skip
