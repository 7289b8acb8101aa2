"""Which parameters APOLLO gives low-rank moments, and how many numbers its state has.

Owns the rule and the arithmetic; the update itself is the engine room's. Only the weight of a
linear layer with more than `rank` rows and columns is low-rank: embeddings, the head, norms,
biases, vectors and small matrices take plain AdamW. Leaves the kinds to `decay`: the engine knows
them by the classes of the modules, a plan by the names.

Source: APOLLO (arXiv:2412.05270).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ds_sft.errors import ConfigError
from ds_sft.recipe.decay import LINEAR, kind_of_name
from ds_sft.recipe.recipe import WIDTHS, Recipe

Shape = tuple[int, ...]
LOW_RANK = "low-rank"
BUCKET = 1 << 24
"""Elements of projected gradient that are in memory at a time, or one tensor's if that is more:
64 MiB, a layer of an 8B model at rank 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A parameter as the rule sees it."""

    kind: str
    """One of `decay.KINDS`."""
    shape: Shape
    """Of the whole parameter."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def route(tensor: Tensor, rank: int) -> str:
    """`LOW_RANK`, or in a word why the parameter takes plain AdamW."""
    if tensor.kind != LINEAR:
        return tensor.kind
    if len(tensor.shape) != 2:
        return "vector" if len(tensor.shape) < 2 else "tensor of 3 or more dimensions"
    return LOW_RANK if min(tensor.shape) > rank else f"matrix with min(m, n) <= {rank}"


def by_name(shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Every parameter of a list of names and shapes; a tied head is not among them."""
    return {name: Tensor(kind=kind_of_name(name), shape=s) for name, s in shapes.items()}


def channels(shape: Shape, world_size: int) -> int:
    """Channels (rows or columns, whichever are more) whose moments one rank keeps."""
    return -(-max(shape) // world_size)


def moment_numel(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> int:
    """Elements of one of Adam's two moments on one rank, padding included; `rank` 0 = AdamW."""
    total = 0
    for tensor in tensors.values():
        if rank and route(tensor, rank) == LOW_RANK:
            total += channels(tensor.shape, world_size) * rank
        else:
            total += -(-tensor.numel // world_size)
    return total


def moments_of(shapes: Mapping[str, Shape], recipe: Recipe, world_size: int) -> int | None:
    """`moment_numel` of APOLLO for a list of names and shapes; None with AdamW."""
    if recipe.apollo is None:
        return None
    return moment_numel(by_name(shapes), recipe.apollo.rank, world_size)


def checkpoint_bytes(shapes: Mapping[str, Shape], recipe: Recipe) -> int:
    """Of a native checkpoint under ZeRO-3: masters and two moments.

    The weights for computing are not in it, only placeholders, whatever the compute dtype.
    """
    total, moments = sum(map(math.prod, shapes.values())), moments_of(shapes, recipe, 1)
    master, moment = WIDTHS[recipe.master_dtype], WIDTHS[recipe.optimizer_state_dtype]
    return master * total + 2 * moment * (total if moments is None else moments)


def state_bytes(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> int:
    """Bytes of APOLLO's state on one rank: both moments, and a norm for each low-rank tensor."""
    bounded = sum(rank > 0 and route(tensor, rank) == LOW_RANK for tensor in tensors.values())
    return 8 * moment_numel(tensors, rank, world_size) + 4 * bounded


def check(tensors: Mapping[str, Tensor], rank: int) -> None:
    """Raise ConfigError when `rank` leaves no parameter low-rank."""
    if any(route(tensor, rank) == LOW_RANK for tensor in tensors.values()):
        return
    smaller = [min(t.shape) for t in tensors.values() if t.kind == LINEAR and len(t.shape) == 2]
    largest = max(smaller, default=0) - 1
    if largest < 1:
        raise ConfigError(
            "the model has no linear layer that could have low-rank moments: use --optimizer adamw"
        )
    raise ConfigError(
        f"--apollo-rank {rank} leaves no parameter with low-rank moments (a matrix must have more "
        f"rows and columns): use at most --apollo-rank {largest}"
    )


def table(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> list[str]:
    """How many tensors and parameters take which route, a line each, and what the state takes."""
    found: dict[str, list[int]] = {}
    for tensor in tensors.values():
        found.setdefault(route(tensor, rank), []).append(tensor.numel)
    low = found.pop(LOW_RANK, [])
    lines = [
        f"low-rank moments: {len(low)} tensors, {sum(low):,} parameters",
        f"plain AdamW: {sum(map(len, found.values()))} tensors, "
        f"{sum(map(sum, found.values())):,} parameters",
    ]
    for why, numels in sorted(found.items(), key=lambda item: -sum(item[1])):
        lines.append(f"... {why}: {len(numels)} tensors, {sum(numels):,} parameters")
    own, full = (state_bytes(tensors, r, world_size) for r in (rank, 0))
    return [*lines, f"moments of a rank: {own:,} bytes (AdamW: {full:,})"]


def in_words(recipe: Recipe) -> str:
    """The optimizer with what sets it apart, for console and plan."""
    settings = recipe.apollo
    if settings is None:
        return recipe.optimizer
    factor = "one factor a tensor" if settings.tensor_wise else "one factor a channel"
    return (
        f"{recipe.optimizer}: rank {settings.rank}, scale {settings.scale:g}, {factor}, a new "
        f"projection every {settings.update_proj_gap} updates"
    )
