"""Which rank computes which packs of a step, and with which factor on its loss.

Owns the split step -> loss groups -> microbatches -> ranks. Invariants: every rank has the same
number of microbatches of the same shape in every step, so that collectives match; every pack of the
batch is active exactly once; the order is a pure function of the step, so resume needs no more.

A loss group's summed loss is divided by the group's own target count, and the groups are averaged:
Levanter's gradient accumulation (`grad_accum.py`). DeepSpeed averages gradients over ranks, so the
factor carries the world size to undo that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_sft.errors import ConfigError, DataError
from ds_sft.recipe.recipe import Recipe

MAX_IDLE_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward of one rank."""

    group: int
    """Loss group that the loss belongs to."""
    packs: tuple[int, ...]
    """Packs in the row, `per_device_batch` of them."""
    num_active: int
    """The first so many packs count; the rest are idle slots, computed with no targets."""
    scale: float
    """Factor on the summed loss: world_size / (loss_groups * target tokens of the group)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """One pass over every pack of a validation set, by rank."""

    num_packs: int
    """Packs of the validation set."""
    world_size: int
    """Ranks that share them."""
    per_device_batch: int
    """Packs per rank in one microbatch."""

    @property
    def num_micro(self) -> int:
        """Microbatches of each rank, forward only."""
        return -(-self.num_packs // (self.world_size * self.per_device_batch))

    def micro_batches(self, rank: int) -> Iterator[MicroBatch]:
        """The microbatches of `rank`; as many on every rank, the loss summed and not scaled."""
        packs = range(self.num_packs)
        for row, num_active in rank_rows(packs, rank, self.world_size, self.per_device_batch):
            yield MicroBatch(group=0, packs=row, num_active=num_active, scale=1.0)


def rank_rows(
    packs: Sequence[int], rank: int, world_size: int, per_device_batch: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Rows of `per_device_batch` packs for one rank, each with the number of packs that count.

    Every rank gets as many rows. An idle slot repeats the first pack: a row of the usual shape
    keeps memory, kernels and the number of collectives the same on every rank.
    """
    for start in range(0, len(packs), world_size * per_device_batch):
        offset = start + rank * per_device_batch
        mine = tuple(packs[offset : offset + per_device_batch])
        yield mine + (packs[0],) * (per_device_batch - len(mine)), len(mine)


class BatchPlan:
    """The batches of a run: `order` holds pack indices, walked once around and again.

    It may compute them when they are asked for. `assistant_counts` belong to packs, not to places.

    Raises ConfigError when too many slots would idle, DataError when a group has no target.
    """

    def __init__(
        self,
        recipe: Recipe,
        assistant_counts: Sequence[int],
        *,
        world_size: int,
        per_device_batch: int = 1,
        order: Sequence[int] | None = None,
        allow_idle: bool = False,
    ) -> None:
        if world_size < 1 or per_device_batch < 1:
            raise ConfigError(
                f"world_size={world_size} and per_device_batch={per_device_batch} "
                "must be at least 1"
            )
        self.order = range(len(assistant_counts)) if order is None else order
        self.counts = [int(count) for count in assistant_counts]
        if not len(self.order):
            raise DataError("the data set holds no packs: run ds-sft prepare again")
        self.batch_size = recipe.train_batch_size
        self.num_groups = recipe.loss_groups
        self.group_size = recipe.train_batch_size // recipe.loss_groups
        self.world_size = world_size
        self.per_device_batch = per_device_batch
        row = world_size * per_device_batch
        self.micro_per_group = -(-self.group_size // row)
        if self.idle_share > MAX_IDLE_SHARE and not allow_idle:
            raise ConfigError(
                f"{self.idle_share:.0%} of the slots would idle: a loss group of {self.group_size} "
                f"packs on {world_size} ranks x {per_device_batch} packs: use a world size that "
                f"divides {self.group_size}, or --allow-idle"
            )

    @property
    def micro_per_step(self) -> int:
        """Microbatches of each rank in one optimizer step."""
        return self.num_groups * self.micro_per_group

    @property
    def idle_slots(self) -> int:
        """Pack slots of one step, over all ranks, that carry no pack."""
        return self.micro_per_step * self.world_size * self.per_device_batch - self.batch_size

    @property
    def idle_share(self) -> float:
        """Idle slots relative to all slots."""
        return self.idle_slots / (self.idle_slots + self.batch_size)

    def group_packs(self, step: int, group: int) -> list[int]:
        """Pack indices of one loss group, in order."""
        start = step * self.batch_size + group * self.group_size
        return [self.order[(start + i) % len(self.order)] for i in range(self.group_size)]

    def group_tokens(self, step: int, group: int) -> int:
        """Trained target tokens of one loss group, over all ranks."""
        return sum(self.counts[pack] for pack in self.group_packs(step, group))

    def step_tokens(self, step: int) -> list[int]:
        """Target tokens per group [G]."""
        return [self.group_tokens(step, g) for g in range(self.num_groups)]

    def micro_batches(self, step: int, rank: int) -> Iterator[MicroBatch]:
        """The microbatches of `rank` in optimizer step `step`; as many on every rank."""
        pdb = self.per_device_batch
        for group in range(self.num_groups):
            packs = self.group_packs(step, group)
            scale = self.world_size / (self.num_groups * self.group_tokens(step, group))
            for row, num_active in rank_rows(packs, rank, self.world_size, pdb):
                yield MicroBatch(group=group, packs=row, num_active=num_active, scale=scale)

    def check_targets(self, num_steps: int) -> None:
        """Raise DataError if some group of the run would divide by zero target tokens."""
        if min(self.counts) > 0:
            return
        if len(self.order) >= self.group_size and self._shortest_window() > 0:
            return
        for step in range(num_steps):
            for group in range(self.num_groups):
                if self.group_tokens(step, group) == 0:
                    raise DataError(
                        f"loss group {group} of step {step} (packs "
                        f"{self.group_packs(step, group)[:8]}) has no trained token: "
                        "use fewer --loss-groups, a larger --train-batch-size, or drop those "
                        "documents in ds-sft prepare"
                    )

    def _shortest_window(self) -> int:
        """Smallest target count of any `group_size` neighbouring packs, with wraparound."""
        counts = [self.counts[pack] for pack in self.order]
        window = sum(counts[: self.group_size])
        smallest = window
        for i in range(len(counts)):
            window += counts[(i + self.group_size) % len(counts)] - counts[i]
            smallest = min(smallest, window)
        return smallest
