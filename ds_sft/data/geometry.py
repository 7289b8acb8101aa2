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
_GLOBAL_HEAD = 512  # of Gemma 4 where nothing else is said
_TOO_LARGE, _MOST_LAYERS = 1 << 31, 10_000

_GEMMA = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA4 = {
    **_GEMMA, "num_hidden_layers": 30, "vocab_size": 262144, "sliding_window": 512,
    "num_kv_shared_layers": 0,
}  # fmt: skip
_QWEN2 = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gemma3_text": {
        **_GEMMA, "num_hidden_layers": 26, "vocab_size": 262208, "sliding_window": 4096,
    },
    "gemma4_text": {
        **_GEMMA4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    },
    "gemma4_unified_text": {**_GEMMA4, "max_position_embeddings": 262144, "sliding_window": 1024},
}  # fmt: skip
"""Published Gemma files hold only what differs from these, Qwen's leave out what does not count."""


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

    The others say everything that is read here. An entry that says null is left as it is: it means
    something else, or transformers refuses it.
    """
    return {**DEFAULTS.get(str(config.get("model_type")), {}), **config}


def size(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A whole number of config.json. Raises KeyError when it is not said, ConfigError otherwise."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _TOO_LARGE:
        raise ConfigError(f"config.json: {key} is {value!r}, not a number from {least} up")
    return value


def layers(config: Mapping[str, Any]) -> list[Layer]:
    """The layers of a completed config.json, in order.

    A null is refused where transformers refuses it, and is its default where that takes it.
    Raises KeyError for what is not said and ConfigError for what cannot be.
    """
    model_type = str(config.get("model_type"))
    if model_type.startswith("gemma4"):
        found = list(_gemma4_layers(config))
        if len({(x.window, x.head, x.kv_heads) for x in found}) > len({x.window for x in found}):
            raise ConfigError("config.json: per_layer_config does not go with layer_types")
        return found
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    kv_heads, head = (
        size(config, key) if model_type.startswith(strict) else _size_or(config, key, other)
        for key, strict, other in (
            ("num_key_value_heads", "gemma", heads),
            ("head_dim", ("gemma", "qwen3"), hidden // heads),
        )
    )
    windows = not model_type.startswith("qwen") or config.get("use_sliding_window")
    return [
        Layer(
            heads=heads, kv_heads=kv_heads, head=head, inner=size(config, "intermediate_size"),
            window=size(config, "sliding_window") if kind == SLIDING and windows else None,
        )
        for kind in layer_types(config)
    ]  # fmt: skip


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Kind of attention of each layer, as transformers decides it."""
    given, count = config.get("layer_types"), size(config, "num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {count}, above {_MOST_LAYERS}")
    if given is not None and not isinstance(given, list):
        raise ConfigError(f"config.json: layer_types is {given!r}, not a list")
    if given is not None:
        if len(given) != count:
            raise ConfigError(
                f"config.json: layer_types has {len(given)} entries for num_hidden_layers={count}"
            )
        return [str(kind) for kind in given]
    model_type = str(config.get("model_type"))
    if model_type.startswith("gemma"):
        pattern = _size_or(config, "sliding_window_pattern", _PATTERN)
        if model_type.startswith("gemma4"):
            pattern = _PATTERN
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    if not (config.get("use_sliding_window") and config.get("sliding_window")):
        return [FULL] * count
    return [SLIDING if i >= size(config, "max_window_layers", 0) else FULL for i in range(count)]


def _gemma4_layers(config: Mapping[str, Any]) -> Iterator[Layer]:
    types = layer_types(config)
    types[-1] = FULL
    first_shared = max(0, len(types) - size(config, "num_kv_shared_layers", 0))
    if set(types[:first_shared]) != set(types):
        raise ConfigError(
            f"config.json: num_kv_shared_layers is {len(types) - first_shared}, which leaves a "
            "kind of attention without a layer that makes keys and values"
        )
    overrides = config.get("per_layer_config")
    if overrides is None:
        overrides = {str(i): _global_sizes(config) for i, kind in enumerate(types) if kind == FULL}
    if not isinstance(overrides, dict) or not all(
        str(index).isdecimal() and isinstance(sizes, dict) for index, sizes in overrides.items()
    ):
        raise ConfigError(f"config.json: per_layer_config is {overrides!r}, not sizes by layer")
    by_layer = {int(index): sizes for index, sizes in overrides.items()}  # "04" in a file
    for index, kind in enumerate(types):
        own = {**config, **by_layer.get(index, {})}
        shares = index >= first_shared
        wide = 2 if shares and config.get("use_double_wide_mlp") else 1
        yield Layer(
            heads=size(config, "num_attention_heads"),
            kv_heads=size(own, "num_key_value_heads"),
            head=size(own, "head_dim"),
            inner=wide * size(config, "intermediate_size"),
            window=size(config, "sliding_window") if kind == SLIDING else None,
            shares_kv=shares,
            values_are_keys=kind == FULL and bool(config.get("attention_k_eq_v")),
        )


def _global_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """What a full layer of Gemma 4 has of its own."""
    sizes = {"head_dim": _size_or(config, "global_head_dim", _GLOBAL_HEAD)}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = size(config, "num_global_key_value_heads")
    return sizes


def _size_or(config: Mapping[str, Any], key: str, other: int) -> int:
    """A whole number of config.json, or `other` where it says nothing, null or 0."""
    return size(config, key) if config.get(key) not in (None, 0) else other


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
