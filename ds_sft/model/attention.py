"""Attention that never leaves a document, registered with transformers under one name.

Owns the choice of kernel. transformers infers documents from `position_ids` only where they restart
at 0; ours are contiguous over a pack, as Levanter's, so the segments are always passed explicitly:
`cu_seq_lens_q`, `max_length_q` (for varlen kernels) and `segment_lengths` (for the loop).

Three kernels compute the same thing: flash-attn's varlen function, torch's `varlen_attn`, and one
`scaled_dot_product_attention` call per document. The last one runs everywhere, and its cost is the
sum of squared document lengths instead of the square of the row; in a layer with a window it is
the sum of the lengths times the window. The first two take heads of up to 256: larger ones go to
the loop. What a layer asks for beyond that is an error, never left out in silence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ds_sft.data.geometry import LARGEST_HEAD, check_head_sizes
from ds_sft.errors import ConfigError

NAME = "ds_sft_documents"
FLASH_DTYPES = (torch.bfloat16, torch.float16)
# What transformers hands to an attention function and changes nothing here.
_WITHOUT_EFFECT = frozenset(
    ("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
     "return_dict", "is_causal", "cu_seq_lens_k", "max_length_k", "cache")
)  # fmt: skip

# [1, heads, T, head_dim] query, key and value -> [1, T, heads, head_dim]
Kernel = Callable[..., torch.Tensor]


def choose(
    asked: str, device: torch.device, dtype: torch.dtype, head_sizes: Sequence[int] = ()
) -> tuple[str, str]:
    """Kernel to use for `--attn-impl asked`, and the reason in a few words.

    Raises ConfigError when what was asked for cannot run here.
    """
    check_head_sizes(asked, head_sizes)
    kernel, why = _choose(asked, device, dtype)
    large = [size for size in head_sizes if size > LARGEST_HEAD] if kernel != "sdpa" else []
    if large:
        sizes = ", ".join(map(str, large))
        why += f"; sdpa where a head has {sizes}, more than its {LARGEST_HEAD}"
    return kernel, why


def _choose(asked: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    varlen_ok = device.type == "cuda" and dtype in FLASH_DTYPES
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if asked == "auto":
        if not varlen_ok:
            return "sdpa", f"{device.type} and {str(dtype).removeprefix('torch.')}"
        return ("flash_attention_2", "installed") if has_flash else ("varlen", "no flash-attn here")
    if asked == "flash_attention_2" and not has_flash:
        raise ConfigError(
            "--attn-impl flash_attention_2: flash-attn is not installed: pip install ds-sft[gpu], "
            "or use --attn-impl auto"
        )
    if asked != "sdpa" and not varlen_ok:
        raise ConfigError(
            f"--attn-impl {asked} needs a CUDA device and bfloat16, not {device.type} and "
            f"{str(dtype).removeprefix('torch.')}: use --attn-impl auto"
        )
    return asked, "asked for"


def register(kernel_name: str) -> None:
    """Make `attn_implementation=NAME` run the kernel; no mask is ever built."""
    kernel = {"flash_attention_2": _flash, "varlen": _torch_varlen, "sdpa": _per_document}[
        kernel_name
    ]

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        scaling: float,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        segment_lengths: Sequence[int] | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        refuse_unknown(module, dropout, rest)
        if segment_lengths is None or cu_seq_lens_q is None or max_length_q is None:
            raise ConfigError(
                f"{type(module).__name__} does not hand on to its attention where documents end: "
                "use a tested architecture"
            )
        window = None if (sliding_window or max_length_q) >= max_length_q else sliding_window
        run = kernel if query.shape[-1] <= LARGEST_HEAD else _per_document
        out = run(query, key, value, scaling, window, segment_lengths, cu_seq_lens_q, max_length_q)
        return out, None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def refuse_unknown(module: torch.nn.Module, dropout: float, rest: Mapping[str, Any]) -> None:
    """Raise ConfigError for what a layer asks of its attention and no kernel here does."""
    if dropout:
        raise ConfigError(f"attention_dropout={dropout} is not supported: set it to 0")
    unknown = sorted(k for k, v in rest.items() if v is not None and k not in _WITHOUT_EFFECT)
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which the "
            "kernels here do not know: use a tested architecture"
        )


def _per_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    segment_lengths: Sequence[int],
    cu_seq_lens: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    """One causal call per document; bit-identical to a block-diagonal mask."""
    if query.device.type == "cuda" and query.shape[-1] > LARGEST_HEAD:
        # With grouped heads only the kernel that holds all scores takes heads of this size.
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    parts = [
        _one_document(q, k, v, scaling, window)
        for q, k, v in zip(
            query.split(segment_lengths, dim=2),  # type: ignore[arg-type]
            key.split(segment_lengths, dim=2),  # type: ignore[arg-type]
            value.split(segment_lengths, dim=2),  # type: ignore[arg-type]
            strict=True,
        )
    ]
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1)


def _one_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of one document, [1, heads, n, head_dim]; each token sees `window` at most."""
    grouped = query.shape[1] != key.shape[1]
    length = query.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped, scale=scaling
        )
    parts = []
    for start in range(0, length, window):
        # `window` queries at a time see fewer than twice as many keys, however long the document.
        end, first = min(start + window, length), max(0, start - window + 1)
        seen = torch.ones(end - start, end - first, dtype=torch.bool, device=query.device)
        seen = seen.tril(start - first).triu(start - first - window + 1)
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, start:end], key[:, :, first:end], value[:, :, first:end],
                attn_mask=seen, enable_gqa=grouped, scale=scaling,
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2)


def _torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    segment_lengths: Sequence[int],
    cu_seq_lens: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attn(
        q, k, v, cu_seq_lens, cu_seq_lens, max_length, max_length,
        scale=scaling, window_size=(_left(window), 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None]  # type: ignore[call-overload,no-any-return]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    segment_lengths: Sequence[int],
    cu_seq_lens: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return flash_attn_varlen_func(
        q, k, v, cu_seq_lens, cu_seq_lens, max_length, max_length,
        softmax_scale=scaling, causal=True, window_size=(_left(window), 0 if window else -1),
    )[None]  # fmt: skip


def _left(window: int | None) -> int:
    """Tokens before its own that a token sees, as varlen kernels count them; -1 = all."""
    return window - 1 if window else -1
