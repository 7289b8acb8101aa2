"""What each decoder layer of a model looks like, read from config.json.

Owns the sizes that differ between layers of one model (Gemma 4: head size, key heads, MLP width,
windows, shared keys and values) and the values that transformers fills in where a config.json
leaves them out. Everything that counts tensors, operations or bytes by layer asks here. Leaves the
tensors' names to `architectures`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_sft.errors import ConfigError

SLIDING, FULL = "sliding_attention", "full_attention"
LARGEST_HEAD = 256
"""Size of a head that flash-attn and torch's varlen kernel still take."""
_PATTERN = 6  # Gemma: every sixth layer is a full one where nothing else is said
_LARGEST_GLOBAL_HEAD = 512  # of Gemma 4 where nothing else is said

_GEMMA = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA4 = {**_GEMMA, "num_hidden_layers": 30, "vocab_size": 262144, "sliding_window": 512}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **_GEMMA, "num_hidden_layers": 26, "vocab_size": 262208, "sliding_window": 4096,
    },
    "gemma4_text": {
        **_GEMMA4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    },
    "gemma4_unified_text": {**_GEMMA4, "max_position_embeddings": 262144, "sliding_window": 1024},
}  # fmt: skip
"""Published Gemma files hold only what differs from these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head: int
    """Size of a head."""
    inner: int
    """Width inside the MLP."""
    window: int | None
    """Tokens that a token attends to at most, itself included; None = its whole document."""
    shares_kv: bool = False
    """Whether it uses the keys and values of an earlier layer."""
    values_are_keys: bool = False
    """Whether its values are its keys, from one projection."""


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the values that transformers would fill in, for families that leave them out.

    The others say everything that is read here. An entry that says null is left as it is.
    """
    return {**DEFAULTS.get(str(config.get("model_type")), {}), **config}


def layers(config: Mapping[str, Any]) -> list[Layer]:
    """The layers of a completed config.json, in order. Raises KeyError for what is not said."""
    if str(config.get("model_type")).startswith("gemma4"):
        return list(_gemma4_layers(config))
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return [
        Layer(
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or hidden // heads),
            inner=int(config["intermediate_size"]),
            window=int(config["sliding_window"]) if kind == SLIDING else None,
        )
        for kind in layer_types(config)
    ]


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Kind of attention of each layer, as transformers decides it."""
    given, count = config.get("layer_types"), int(config["num_hidden_layers"])
    if given:
        return [str(given[i]) if i < len(given) else FULL for i in range(count)]
    model_type = str(config.get("model_type"))
    if model_type.startswith("gemma"):
        pattern = int(config.get("sliding_window_pattern") or _PATTERN)
        if model_type.startswith("gemma4"):
            pattern = _PATTERN
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    if not (config.get("use_sliding_window") and config.get("sliding_window")):
        return [FULL] * count
    return [SLIDING if i >= int(config["max_window_layers"]) else FULL for i in range(count)]


def _gemma4_layers(config: Mapping[str, Any]) -> Iterator[Layer]:
    types = layer_types(config)
    types[-1] = FULL
    first_shared = len(types) - int(config.get("num_kv_shared_layers") or 0)
    overrides = config.get("per_layer_config")
    if overrides is None:
        overrides = {i: _global_sizes(config) for i, kind in enumerate(types) if kind == FULL}
    overrides = {int(index): sizes for index, sizes in overrides.items()}
    for index, kind in enumerate(types):
        own = overrides.get(index, {})
        shares = index >= first_shared
        wide = 2 if shares and config.get("use_double_wide_mlp") else 1
        yield Layer(
            heads=int(config["num_attention_heads"]),
            kv_heads=int(own.get("num_key_value_heads", config["num_key_value_heads"])),
            head=int(own.get("head_dim", config["head_dim"])),
            inner=wide * int(config["intermediate_size"]),
            window=int(config["sliding_window"]) if kind == SLIDING else None,
            shares_kv=shares,
            values_are_keys=kind == FULL and bool(config.get("attention_k_eq_v")),
        )


def _global_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """What a full layer of Gemma 4 has of its own."""
    sizes = {"head_dim": int(config.get("global_head_dim") or _LARGEST_GLOBAL_HEAD)}
    kv_heads = config.get("num_global_key_value_heads")
    if config.get("attention_k_eq_v") and kv_heads is not None:
        sizes["num_key_value_heads"] = int(kv_heads)
    return sizes


def head_sizes(config: Mapping[str, Any]) -> list[int]:
    """The sizes of heads that a model has, each once."""
    return sorted({layer.head for layer in layers(config)})


def check_head_sizes(attn_impl: str, sizes: Sequence[int]) -> None:
    """Raise ConfigError when the kernel that --attn-impl names cannot take heads of these sizes."""
    large = [size for size in sizes if size > LARGEST_HEAD]
    if large and attn_impl not in ("auto", "sdpa"):
        raise ConfigError(
            f"--attn-impl {attn_impl} takes heads of up to {LARGEST_HEAD}, and this model has "
            f"layers with heads of {', '.join(map(str, large))}: use --attn-impl auto, which runs "
            "only those layers on sdpa, or --attn-impl sdpa"
        )


def note_large_heads(attn_impl: str, sizes: Sequence[int]) -> list[str]:
    """What is said about heads that only sdpa takes. Raises ConfigError like the check."""
    check_head_sizes(attn_impl, sizes)
    large = [size for size in sizes if size > LARGEST_HEAD]
    if not large or attn_impl == "sdpa":
        return []
    return [
        f"layers with heads of {', '.join(map(str, large))} run on sdpa: flash-attn and varlen "
        f"take up to {LARGEST_HEAD}"
    ]


def width_times_context(config: Mapping[str, Any], doc_lens: npt.ArrayLike) -> float:
    """Over all layers: width of the attention times the mean number of tokens attended to, doubled.

    A token in a document of n attends to n / 2 tokens on average, in a layer with a window w < n to
    w - w^2 / 2n; the doubled values are n and 2 w - w^2 / n.
    """
    lengths = np.asarray(doc_lens, dtype=np.float64)
    total = 0.0
    for layer in layers(config):
        seen = np.minimum(lengths, np.inf if layer.window is None else layer.window)
        pairs = float((2 * seen * lengths - seen**2).sum())
        total += layer.heads * layer.head * pairs / max(float(lengths.sum()), 1.0)
    return total
