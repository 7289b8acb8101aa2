"""The arithmetic of APOLLO on one weight matrix: projection, moments, scale, growth limit.

Owns the formulas (arXiv:2412.05270) and nothing of ZeRO-3: tensors in, tensors out. A weight
[m, n] has C = max(m, n) channels (rows if m >= n, else columns) of D = min(m, n) numbers each. With
X = the gradient, one channel a row [C, D], and a normal matrix P [D, r] of variance 1/r, everything
happens on R = X P [C, r]. Leaves the rule which weights these are to `recipe.low_rank`.

Invariant: P depends on a seed, the parameter's place in the model and the number of the projection
alone. It is made on the CPU, whatever the device of the update, and nothing of it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

TINY = 1e-8  # keeps a channel without gradient, and a first norm, from dividing by zero
MAX_GROWTH = 1.01  # of an update's norm from one step to the next


def is_tall(shape: tuple[int, ...]) -> bool:
    """Whether the channels of a weight are its rows."""
    return shape[0] >= shape[1]


def projection(
    seed: int, index: int, number: int, shape: tuple[int, ...], rank: int
) -> torch.Tensor:
    """P [D, r] on the CPU: the `number`-th projection of the `index`-th parameter of the model."""
    # torch's CPU generator looks at 32 bits of a seed only, so the three are mixed down to those.
    (word,) = np.random.SeedSequence((seed, index, number)).generate_state(1, np.uint32)
    generator = torch.Generator().manual_seed(int(word))
    return torch.randn(min(shape), rank, generator=generator).div_(math.sqrt(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A rectangle of a weight that lies in one piece in its row-major order."""

    offset: int
    """Where it begins in the slice, in elements."""
    rows: slice
    """Rows of the weight."""
    columns: slice
    """Columns of the weight."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The rectangle as a view of the slice `flat` [elements]."""
        shape = (self.rows.stop - self.rows.start, self.columns.stop - self.columns.start)
        return flat.narrow(0, self.offset, shape[0] * shape[1]).view(shape)


def blocks(start: int, size: int, width: int) -> Iterator[Block]:
    """Cut elements [start, start + size) of a row-major matrix `width` wide into rectangles.

    There are three at most: the end of a row, whole rows, the beginning of a row.
    """
    at, end = start, start + size
    while at < end:
        row, column = divmod(at, width)
        whole_rows = (end - at) // width
        if column == 0 and whole_rows:
            rows, columns = slice(row, row + whole_rows), slice(0, width)
        else:
            rows, columns = slice(row, row + 1), slice(column, min(width, column + end - at))
        yield Block(offset=at - start, rows=rows, columns=columns)
        at += (rows.stop - rows.start) * (columns.stop - columns.start)


def add_projected(
    out: torch.Tensor, values: torch.Tensor, block: Block, tall: bool, p: torch.Tensor
) -> None:
    """Add the part of R [C, r] that comes from one rectangle `values` of the gradient."""
    if tall:
        out[block.rows].addmm_(values, p[block.columns])
    else:
        out[block.columns].addmm_(values.T, p[block.rows])


def direction(
    r: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
    betas: tuple[float, float], eps: float,
) -> torch.Tensor:  # fmt: skip
    """N = m / (sqrt(v) + eps), of the shape of `r`; brings both moments up to date.

    Without bias correction: that is part of the step size, see `step_size`.
    """
    exp_avg.lerp_(r, 1.0 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(r, r, value=1.0 - betas[1])
    return exp_avg / exp_avg_sq.sqrt().add_(eps)


def factors(n: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """|N| / |R| of every channel [C], from rows of N and R [C, r]."""
    return n.norm(dim=1) / (r.norm(dim=1) + TINY)


def factor_of_squares(n: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """|N| / |R| of a whole tensor, from its two sums of squares."""
    return n.sqrt() / (r.sqrt() + TINY)


def multiply(values: torch.Tensor, block: Block, tall: bool, factor: torch.Tensor) -> None:
    """Scale one rectangle of a gradient in place by its channels' factors [C]."""
    values.mul_(factor[block.rows, None] if tall else factor[block.columns])


def limit(norm: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """What to multiply updates of these norms by, so that none grows by more than MAX_GROWTH.

    A previous norm of 0 sets no bound: there was no update yet, or one without any gradient.
    """
    growth = norm / (previous + TINY)
    bounded = MAX_GROWTH / growth.clamp(min=MAX_GROWTH)
    return torch.where(previous > 0, bounded, torch.ones_like(bounded))


def step_size(lr: float, betas: tuple[float, float], step: int) -> float:
    """Learning rate of the `step`-th update (from 1), with Adam's bias corrections."""
    return lr * math.sqrt(1.0 - betas[1] ** step) / (1.0 - betas[0] ** step)
