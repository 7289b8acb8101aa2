"""DeepSpeed's CPU Adam with a bias correction that is a function of the step alone.

DeepSpeed's C++ code multiplies a running beta^t in float32 while steps follow each other, and
computes it as a power after a load. The two differ in the last bits, so that a resumed run would
leave the curve of the uninterrupted one; and the product drifts over thousands of steps. Here the
C++ object forgets its product before every update, so that it always takes the power.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def cpu_adam(
    groups: list[dict[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    *,
    float32_states: bool = True,
) -> DeepSpeedCPUAdam:
    """A DeepSpeedCPUAdam (ZeRO-3 compares the type, so no subclass) that resumes bit-identically.

    Without `float32_states` the moments have the type of the masters.
    Raises RuntimeError when its C++ code cannot be built.
    """
    optimizer = DeepSpeedCPUAdam(
        groups, lr=lr, betas=betas, eps=eps, adamw_mode=True, fp32_optimizer_states=float32_states
    )
    optimizer.ds_opt_adam = _Forgetful(optimizer.ds_opt_adam)
    return optimizer


class _Forgetful:
    """The C++ module of DeepSpeedCPUAdam, whose updates do not depend on the ones before them."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def adam_update(self, opt_id: int, step: int, *rest: Any) -> Any:
        """Update one tensor at `step`, counted from 1."""
        _, beta1, beta2 = rest[:3]
        # Of nothing, at step 0: no step continues from there but the first, for which the product
        # and the power are the same.
        nothing = [torch.zeros(1) for _ in range(4)]
        self._native.adam_update(opt_id, 0, 0.0, beta1, beta2, 1.0, 0.0, False, *nothing)
        return self._native.adam_update(opt_id, step, *rest)
