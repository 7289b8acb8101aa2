"""Liger's kernels for RMSNorm, rotary embedding and SwiGLU, where they are known to be right.

Owns the list of architectures, the conditions and the patch. An architecture is on the list when
its patched forward and backward have been compared with the plain ones (tests/model/test_liger.py).
The head stays ours in any case: Liger's fused head is given the weight of a module that it never
calls, which under ZeRO-3 is an empty placeholder, in evaluation too; and it sums the gradient of a
bfloat16 weight in bfloat16 unless told otherwise. Ours has the same idea without either.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import partial
from typing import Any

import torch

from ds_sft.errors import ConfigError

ARCHITECTURES = ("qwen3", "qwen2", "llama")


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
    """Let norms, rotation and MLPs of a model on the list run on Liger's Triton kernels.

    The rotation is a function of the architecture's own module, so every model of that
    architecture in this process rotates by the kernel from then on.
    """
    sys.modules[type(causal_lm).__module__].apply_rotary_pos_emb = _rotate  # type: ignore[attr-defined]
    for module in causal_lm.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    for layer in causal_lm.model.layers:
        layer.mlp.forward = partial(_mlp, layer.mlp)


# From the kernels' own modules: the names that Liger re-exports can be another implementation than
# the compared one, chosen by the machine or a variable of the environment.


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in one kernel, [T, I] each."""
    kernel = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    return kernel.apply(gate, up, 1.0, 1.0)


def _mlp(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(silu_mul(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


def _norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Normalised in float32 and rounded before the weight, as Llama and Qwen3 do."""
    kernel = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    # Not in place: its backward would write into a gradient that others may still read.
    return kernel.apply(hidden, norm.weight, norm.variance_epsilon, 0.0, "llama", False, None)


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of query and key [1, heads, T, head_dim] by cos and sin [1, T, head_dim]."""
    kernel = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    return kernel.apply(query, key, cos, sin)
