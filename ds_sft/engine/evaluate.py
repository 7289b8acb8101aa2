"""The loss on the validation set, by all ranks together.

Owns one pass over it: token-weighted, through the same chunked head as training. Invariants: every
rank runs the same number of microbatches of the same shape, also when it has no pack of its own;
weights, gradients, random numbers and the order of the training data are left as they were, so a
run has the same losses with and without evaluations. Leaves when it is due to `train`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_sft.data.packed import PackedDataset
from ds_sft.engine.step import in_advance
from ds_sft.recipe.batching import EvalPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What one evaluation found; the same on every rank, up to its own seconds."""

    loss: float
    """Mean over all trained tokens of the validation set; not finite if the model's is not."""
    target_tokens: int
    """How many tokens that were."""
    seconds: float
    """How long it took."""


@torch.no_grad()
def evaluate(
    engine: Any,
    data: PackedDataset,
    batches: EvalPlan,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvalResult | None:
    """Mean loss of a trained token of `data`, with the weights as they are.

    `stop` is asked before each microbatch, on every rank with the same answer; then: None.
    """
    started = time.monotonic()
    was_training = engine.module.training
    # [summed loss, tokens]: exact sums of float32 losses, whatever the split over ranks.
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    micros = list(batches.micro_batches(dist.get_rank()))
    engine.eval()
    try:
        for i, (_, batch) in enumerate(in_advance(data, micros, engine.device)):
            if stop():
                return None
            totals[0] += engine(batch)
            totals[1] += batch.labels.numel()
            progress(i + 1, len(micros))
    finally:
        engine.train(was_training)
    dist.all_reduce(totals)
    loss_sum, tokens = totals.tolist()
    return EvalResult(
        loss=loss_sum / tokens if tokens else math.nan,
        target_tokens=int(tokens),
        seconds=time.monotonic() - started,
    )
