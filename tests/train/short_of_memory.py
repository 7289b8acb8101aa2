"""A training whose step 3 allocates more than there is, on the rank that SHORT names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from ds_sft import train
from ds_sft.engine import step

BAD_STEP = 3
MORE_THAN_THERE_IS = 1 << 50


def main(argv: list[str]) -> None:
    """Let the step fail, then train."""
    real = step.prefetched

    def prefetched(data: Any, batches: Any, number: int, device: Any) -> Iterator[Any]:
        if number == BAD_STEP and os.environ["RANK"] == os.environ["SHORT"]:
            torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
        return real(data, batches, number, device)

    step.prefetched = prefetched
    train.main(argv)
