"""The numbers of an export's weights, tensor by tensor: `numerics_scan.json`.

Owns what is counted and how. Invariants: the values are those that are written, after the cast;
they are looked at once, while they are written, and never all together; the result depends on the
values alone, not on the pieces that they come in or on the number of threads, so that a live export
and an offline one hold the same file. Leaves the writing to `shards`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_sft.errors import CheckpointError

NUMERICS_SCAN = "numerics_scan.json"
FORMAT = 1
# Sums are made of float32 sums over rows, and these of blocks that start at fixed places: neither
# is cut differently by other pieces or more threads.
_ROW = 1 << 10
_BLOCK = 1 << 18
_SQUARE_FITS = (1e-15, 1e15)  # float32 values between these have squares and sums of squares

Numbers = dict[str, float | int]


class Scan:
    """Counts over one tensor whose values come piece by piece, in order."""

    def __init__(self) -> None:
        self._rest = torch.empty(0)
        # Memory that is new for every block costs more than the arithmetic on it.
        self._held = torch.empty(2, _BLOCK)
        self._count = self._zeros = self._odd = 0
        self._low, self._high = math.inf, -math.inf
        self._mean = self._spread = 0.0  # of the finite values; the sum of their squared distances

    def add(self, values: torch.Tensor) -> None:
        """Take the next values of the tensor, flat and on the CPU."""
        if self._rest.numel():
            missing = _BLOCK - self._rest.numel()
            self._rest = torch.cat([self._rest, values[:missing]])
            values = values[missing:]
            if self._rest.numel() < _BLOCK:
                return
            self._add_block(self._rest)
        whole = values.numel() // _BLOCK * _BLOCK
        for start in range(0, whole, _BLOCK):
            self._add_block(values[start : start + _BLOCK])
        self._rest = values[whole:].clone()

    def result(self) -> Numbers:
        """The numbers of all values; nothing can be added afterwards."""
        if self._rest.numel():
            self._add_block(self._rest)
        low, high = (0.0, 0.0) if self._low > self._high else (self._low, self._high)
        return {
            "count": self._count,
            "non_finite": self._odd,
            "min": low,
            "max": high,
            "abs_max": max(abs(low), abs(high)),
            "mean": self._mean,
            "std": math.sqrt(self._spread / max(1, self._count - self._odd)),
            "zero_share": self._zeros / max(1, self._count),
        }

    def _add_block(self, block: torch.Tensor) -> None:
        before, numel = self._count - self._odd, block.numel()
        self._count += numel
        self._zeros += numel - int(torch.count_nonzero(block))
        values = self._held[0][:numel].copy_(block)
        low, high = (bound.item() for bound in torch.aminmax(values))
        if not math.isfinite(low + high):  # one pass more, and only where something is wrong
            good = torch.isfinite(values)
            values = values[good]
            self._odd += numel - values.numel()
            numel = values.numel()
            if not numel:
                return
            low, high = (bound.item() for bound in torch.aminmax(values))
        self._low, self._high = min(self._low, low), max(self._high, high)
        mean, spread = _moments(values, max(abs(low), abs(high)), self._held[1][:numel])
        # Chan, Golub and LeVeque: two sets' squared distances from the mean of both.
        apart, total = mean - self._mean, before + numel
        self._mean += apart * numel / total
        self._spread += spread + apart * apart * before * numel / total


def _moments(values: torch.Tensor, largest: float, distances: torch.Tensor) -> tuple[float, float]:
    """Mean, and sum of squared distances from it, which are left in `distances`.

    The distances are taken before they are squared: the weights of a norm are near one, and the
    difference of their large squares would say nothing about how far apart they are.
    """
    if not _SQUARE_FITS[0] < largest < _SQUARE_FITS[1]:
        values, distances = values.double(), distances.double()
    numel = values.numel()
    mean = sum(rows.sum(1).double().sum().item() for rows in _rows(values)) / numel
    shift = torch.tensor(mean, dtype=values.dtype)
    torch.sub(values, shift, out=distances)
    norms = (torch.linalg.vector_norm(rows, dim=1) for rows in _rows(distances))
    squares = sum(norm.double().square().sum().item() for norm in norms)
    return mean, max(0.0, squares - numel * (mean - shift.item()) ** 2)


def _rows(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """The full rows, and the rest as one."""
    whole = values.numel() // _ROW * _ROW
    if whole:
        yield values[:whole].view(-1, _ROW)
    if whole < values.numel():
        yield values[whole:].view(1, -1)


def text(scans: Mapping[str, Numbers]) -> str:
    """`numerics_scan.json` of an export."""
    return json.dumps({"format": FORMAT, "tensors": dict(scans)}, indent=1) + "\n"


def summary(directory: Path) -> str:
    """One line about the scan of an export. Raises CheckpointError when it cannot be read."""
    path = directory / NUMERICS_SCAN
    try:
        tensors: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["tensors"]
        largest = max(tensors, key=lambda name: tensors[name]["abs_max"])
        zero = [name for name, numbers in tensors.items() if numbers["zero_share"] == 1]
        odd = sum(numbers["non_finite"] for numbers in tensors.values())
        most = f"{tensors[largest]['abs_max']:.4g}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    zeros = f"{len(zero)} hold zeros only ({zero[0]})" if zero else "none holds zeros only"
    return (
        f"{len(tensors)} tensors, {odd} values that are not finite, {zeros}; largest {most} in "
        f"{largest}"
    )
