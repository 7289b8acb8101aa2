"""A loss, a gradient or a weight that is not finite: nothing is updated, and it is named.

Owns the way round DeepSpeed's update. DeepSpeed drops an update whose gradient norm is not finite
and clears the gradients in doing so, in every offload mode; here a loss that is not finite takes
the same path, and the parameters to blame are read before they are cleared. Invariants: all ranks
drop an update or none does; after a dropped one, weights, moments and Adam's step are what they
were. Leaves counting and stopping to `run.health`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from deepspeed.utils import safe_get_local_grad

FIRST = 3  # names and packs in a message


def update(engine: Any, *, loss_is_finite: bool) -> list[str] | None:
    """Apply the engine's update, unless the loss or the gradient norm is not finite.

    None when it was applied; else the parameters of this rank whose gradient is not finite. Every
    rank calls it with the same `loss_is_finite`.
    """
    optimizer = engine.optimizer
    measure = optimizer._get_norm_groups
    blamed: list[str] = []

    def measure_and_blame() -> list[Any]:
        norms = list(measure())  # DeepSpeed marks a norm that is not finite by -1
        if loss_is_finite and all(math.isfinite(norm) and norm >= 0 for norm in map(float, norms)):
            return norms
        blamed.extend(_bad_gradients(engine))
        return [math.inf]

    optimizer._get_norm_groups = measure_and_blame
    try:
        engine.step()
    finally:
        del optimizer._get_norm_groups
    return None if engine.was_step_applied() else blamed


def _bad_gradients(engine: Any) -> list[str]:
    named = ((engine.param_names[p], safe_get_local_grad(p)) for p in _parameters(engine))
    return [name for name, gradient in named if not _is_finite(gradient)]


def bad_weights(engine: Any) -> list[str]:
    """Names of the parameters with a value that is not finite, in the model's order; all ranks.

    Looks at the weights of the forward pass, each rank at its own part; a part that lies on NVMe
    at this moment is passed over.
    """
    mine = [
        engine.param_names[p]
        for p in _parameters(engine)
        if p.ds_tensor.status == PartitionedParamStatus.AVAILABLE and not _is_finite(p.ds_tensor)
    ]
    return in_model_order(engine, everywhere(mine))


def _parameters(engine: Any) -> Iterable[Any]:
    return (p for group in engine.optimizer.fp16_groups for p in group)


def _is_finite(values: torch.Tensor) -> bool:
    """Without a mask as large as the values."""
    return values.numel() == 0 or all(math.isfinite(bound) for bound in torch.aminmax(values))


def everywhere(mine: Sequence[Any]) -> set[Any]:
    """The union of what each rank found; every rank must call it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(mine))
    return {item for part in found for item in part}


def in_model_order(engine: Any, names: set[str]) -> list[str]:
    """`names` as the forward pass meets them, which is where to look first."""
    return [name for name, _ in engine.module.named_parameters() if name in names]


def first(items: Sequence[Any]) -> str:
    """The first few, for a message."""
    more = f" and {len(items) - FIRST} more" if len(items) > FIRST else ""
    return ", ".join(map(str, items[:FIRST])) + more
