"""What one rank's offloaded states and swap buffers take of host memory.

Owns the one count of it, for `fit`, `plan`, `doctor` and the start of a run; measured with
DeepSpeed 0.19.8 (tests/train/test_memory_truth.py). Numbers in, numbers out: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_sft.engine.config import BUFFERS_OF_ADAM

if TYPE_CHECKING:
    from ds_sft.engine.setup import Setup

SUM_BYTES = 4  # of the sum over microbatches
OFFLOADED_BYTES = 20  # of a parameter in float32, see `offloaded_bytes`


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """Of one rank."""

    states: int
    """States that live in host memory."""
    buffers: int
    """Buffers of swapping, and what page-locking rounds up."""


def device(zero: Mapping[str, Any], section: str) -> str:
    """Where `offload_optimizer` or `offload_param` puts things: none, cpu or nvme."""
    return str(zero.get(section, {}).get("device", "none")).lower()


def offloaded_bytes(setup: Setup) -> int:
    """Masters, moments, the sum over microbatches, and the gradient that Adam reads."""
    return setup.state_bytes + (SUM_BYTES + setup.master_bytes) * setup.own


def of_rank(setup: Setup, zero: Mapping[str, Any]) -> HostBytes:
    """Bytes of one rank under a `zero_optimization` section that says every size."""
    states = buffers = 0
    optimizer, params = zero.get("offload_optimizer", {}), zero.get("offload_param", {})
    home, own, compute = device(zero, "offload_optimizer"), setup.own, setup.compute_bytes
    pinned = optimizer.get("pin_memory", True)
    if home == "cpu":
        states += offloaded_bytes(setup)
        buffers += rounding(SUM_BYTES * own, pinned) + rounding(setup.master_bytes * own, pinned)
    elif home == "nvme":
        states += SUM_BYTES * own
        sub_group = min(own, zero["sub_group_size"] + setup.part(max(setup.numels.values())))
        count = optimizer.get("buffer_count", BUFFERS_OF_ADAM)
        buffers += rounding(SUM_BYTES * own, pinned) + 4 * count * sub_group
    if device(zero, "offload_param") == "cpu":
        states += compute * own
        buffers += rounding(compute * own, pinned=True)
    elif device(zero, "offload_param") == "nvme":
        count, size = params.get("buffer_count", 5), params.get("buffer_size", 100_000_000)
        states += int(compute * min(own, params.get("max_in_cpu", 0)))
        buffers += int(compute * count * size)
    return HostBytes(states=states, buffers=buffers)


def rounding(size: int, pinned: bool) -> int:
    """What torch's pinned allocator adds: sizes are powers of two."""
    return (1 << (size - 1).bit_length()) - size if pinned and size else 0
