"""Attention that never leaves a document, registered with transformers under one name.

Owns the choice of kernel. transformers infers documents from `position_ids` only where they restart
at 0; ours are contiguous over a pack, as Levanter's, so the segments are always passed explicitly:
`cu_seq_lens_q`, `max_length_q` (for varlen kernels) and `segment_lengths` (for the loop).

Three kernels compute the same thing: flash-attn's varlen function, torch's `varlen_attn`, and one
`scaled_dot_product_attention` call per document. The last one runs everywhere, and its cost is the
sum of squared document lengths instead of the square of the row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ds_sft.errors import ConfigError

NAME = "ds_sft_documents"
FLASH_DTYPES = (torch.bfloat16, torch.float16)

# [1, heads, T, head_dim] query, key and value -> [1, T, heads, head_dim]
Kernel = Callable[..., torch.Tensor]


def choose(asked: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Kernel to use for `--attn-impl asked`, and the reason in a few words.

    Raises ConfigError when what was asked for cannot run here.
    """
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
        segment_lengths: Sequence[int],
        cu_seq_lens_q: torch.Tensor,
        max_length_q: int,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        assert dropout == 0.0, "attention dropout is not supported"
        assert sliding_window is None or sliding_window >= max_length_q, sliding_window
        out = kernel(query, key, value, scaling, segment_lengths, cu_seq_lens_q, max_length_q)
        return out, None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def _per_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    segment_lengths: Sequence[int],
    cu_seq_lens: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    """One causal call per document; bit-identical to a block-diagonal mask."""
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scaling)
        for q, k, v in zip(
            query.split(segment_lengths, dim=2),  # type: ignore[arg-type]
            key.split(segment_lengths, dim=2),  # type: ignore[arg-type]
            value.split(segment_lengths, dim=2),  # type: ignore[arg-type]
            strict=True,
        )
    ]
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1)


def _torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    segment_lengths: Sequence[int],
    cu_seq_lens: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attn(
        q, k, v, cu_seq_lens, cu_seq_lens, max_length, max_length,
        scale=scaling, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None]  # type: ignore[call-overload,no-any-return]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    segment_lengths: Sequence[int],
    cu_seq_lens: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return flash_attn_varlen_func(
        q, k, v, cu_seq_lens, cu_seq_lens, max_length, max_length,
        softmax_scale=scaling, causal=True,
    )[None]  # fmt: skip
