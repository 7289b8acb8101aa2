"""Liger's kernels for RMSNorm, rotary embedding and SwiGLU, where they are known to be right.

Owns the list of architectures, the conditions and the patch. An architecture is on the list when
its patched forward and backward have been compared with the plain ones (tests/model/test_liger.py).
The head stays ours in any case: Liger's fused head reads the weight past the hook that gathers it
under ZeRO-3, and computes its gradient with a mean that does not know the tokens of a loss group.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from ds_sft.errors import ConfigError

ARCHITECTURES = ("qwen3", "llama")


def obstacle(config: dict[str, Any], device: torch.device) -> str | None:
    """Why Liger cannot be used for a model (its config.json) on this rank; None when it can."""
    model_type, activation = config.get("model_type"), config.get("hidden_act")
    if model_type not in ARCHITECTURES:
        return f"{model_type} is not among the compared architectures {', '.join(ARCHITECTURES)}"
    if activation != "silu":
        return f"its MLP uses {activation}, not silu"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton compiles for a GPU, this is a {device.type}"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed: pip install liger-kernel"
    try:
        probe = importlib.import_module("ds_sft.model.liger_probe")
        right = probe.doubles(device)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"Triton cannot compile here ({first}): install a C compiler and python3-dev"
    return None if right else "Triton compiles a kernel here that computes wrong numbers"


def choose(asked: str, obstacles: list[str | None]) -> tuple[bool, str]:
    """Whether Liger is used for `--liger asked` and why, given the obstacle of every rank.

    All ranks decide alike. Raises ConfigError when what was asked for cannot be.
    """
    if asked == "off":
        return False, "asked for"
    rank, found = next(((r, o) for r, o in enumerate(obstacles) if o), (0, None))
    if found is None:
        return True, f"{asked}: Triton compiles on {len(obstacles)} ranks"
    where = f"rank {rank}: " if len(obstacles) > 1 else ""
    if asked == "on":
        raise ConfigError(f"--liger on: {where}{found}; or use --liger auto")
    return False, f"auto: {where}{found}"


def apply(causal_lm: Any) -> None:
    """Patch norms, rotation and MLPs of a model on the list; the head is not touched."""
    patches = importlib.import_module("liger_kernel.transformers")
    patch = getattr(patches, f"apply_liger_kernel_to_{causal_lm.config.model_type}")
    patch(
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=causal_lm,
    )


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in one kernel, [T, I] each."""
    ops = importlib.import_module("liger_kernel.ops")
    return ops.LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)
