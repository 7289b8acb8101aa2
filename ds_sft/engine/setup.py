"""What is trained, on how many ranks, in which precision: the sizes that predictions start from.

Owns the counts of elements and bytes that follow from the list of parameters alone. What a
configuration makes of them is `memory`'s, `host_memory`'s and `rates`'. Numbers in, numbers out: no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is to be trained, on what."""

    numels: Mapping[str, int]
    """Elements of every trained tensor by Hugging Face name; a tied head is not among them."""
    tied: bool
    """Whether the head is the embedding."""
    world_size: int
    """Ranks."""
    gpus_per_node: int
    """Ranks that share a node's host memory and disk."""
    compute_bytes: int
    """Of one element in forward and backward: 2 or 4."""
    reduce_bytes: int
    """Of one element while gradients are summed over ranks: 2 or 4."""
    moments: int | None = None
    """Elements of each of the two moments of one rank with APOLLO; None = AdamW: all it owns."""
    master_bytes: int = 4
    """Of one element of the masters: 2 or 4."""
    moment_width: int = 4
    """Of one element of a moment: 2 or 4."""

    @property
    def total(self) -> int:
        """Elements of the model."""
        return sum(self.numels.values())

    def part(self, numel: int) -> int:
        """Elements of a tensor that one rank owns, padding included."""
        return -(-numel // self.world_size)

    @property
    def own(self) -> int:
        """Elements that one rank owns."""
        return sum(map(self.part, self.numels.values()))

    @property
    def moment_bytes(self) -> int:
        """Of both moments of one rank."""
        return 2 * self.moment_width * (self.own if self.moments is None else self.moments)

    @property
    def state_bytes(self) -> int:
        """Of the masters and moments of one rank."""
        return self.master_bytes * self.own + self.moment_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Of the masters and moments of all ranks, without padding of the masters."""
        moments = 2 * self.moment_width * self.total
        if self.moments is not None:
            moments = self.moment_bytes * self.world_size
        return self.master_bytes * self.total + moments

    def at_precision(self, ds_config: Mapping[str, Any]) -> Setup:
        """A copy whose masters and moments are as wide as the complete `ds_config` makes them."""
        bf16 = ds_config.get("bf16", {})
        return replace(
            self,
            master_bytes=2 if bf16.get("bf16_master_weights_and_grads") else 4,
            moment_width=2 if bf16.get("bf16_optimizer_states") else 4,
        )
