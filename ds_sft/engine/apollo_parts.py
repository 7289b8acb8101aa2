"""What a rank holds of a ZeRO-3 sub-group under APOLLO: slices of parameters, and their moments.

DeepSpeed joins the slices of a sub-group's parameters into one flat master; the moments of those
with plain AdamW lie joined in the same way, the low-rank ones in tensors of their own. Owns these
places. Invariant: they depend on the model, the number of ranks and the rank of the moments alone,
so that every rank cuts a sub-group into the same parts. Leaves what is done with them to `apollo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_sft.engine import apollo_maths as maths
from ds_sft.recipe import low_rank
from ds_sft.recipe.low_rank import BUCKET, LOW_RANK, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's share of one parameter, and where its state lies in the sub-group's."""

    name: str
    """Hugging Face name."""
    index: int
    """Place in the order of the model, which chooses the projections."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: int
    """Of the slice, in the flat master."""
    size: int
    """Elements of the slice, padding included."""
    start: int
    """Of the slice, in the flat parameter."""
    own: int
    """Elements of the slice without the padding of the last ranks."""
    state: int
    """Of its moments, in elements of the flat moments of its kind."""
    channels: int
    """Whose moments this rank keeps; 0 = plain AdamW."""

    def moments(self, rank: int) -> int:
        """Elements of one of its moments here."""
        return self.channels * rank if self.channels else self.size

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The slice of a flat master or gradient, without the padding."""
        return flat.narrow(0, self.offset, self.own)

    def blocks(self) -> Iterator[maths.Block]:
        """The slice as rectangles of the weight."""
        return maths.blocks(self.start, self.own, self.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """The parameters of one flat master."""

    dense: list[Part]
    """Those with plain AdamW."""
    projected: list[Part]
    """Those with low-rank moments."""


def sub_group_of(
    members: list[tuple[str, Any, Any]],
    places: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    rank: int,
) -> SubGroup:
    """The parts of a sub-group whose moments have `rank`, in the order of the flat master.

    A member is a name, its parameter and DeepSpeed's place (sub-group, offset, size); `places` are
    those in the model.
    """
    found: dict[bool, list[Part]] = {False: [], True: []}
    filled = {False: 0, True: 0}
    for name, param, (_, offset, size) in members:
        low = low_rank.route(tensors[name], rank) == LOW_RANK
        shape, numel = tuple(param.ds_shape), param.ds_numel
        start = min(dist.get_rank() * size, numel)
        part = Part(
            name=name, index=places[name], shape=shape, offset=offset, size=size, start=start,
            own=min(size, numel - start), state=filled[low],
            channels=low_rank.channels(shape, dist.get_world_size()) if low else 0,
        )  # fmt: skip
        found[low].append(part)
        filled[low] += part.moments(rank)
    return SubGroup(dense=found[False], projected=found[True])


def buckets(parts: list[Part], rank: int) -> Iterator[list[Part]]:
    """Neighbours whose projected gradients fit together into BUCKET elements."""
    bucket: list[Part] = []
    filled = 0
    for part in parts:
        numel = dist.get_world_size() * part.moments(rank)
        if bucket and filled + numel > BUCKET:
            yield bucket
            bucket, filled = [], 0
        bucket.append(part)
        filled += numel
    if bucket:
        yield bucket
