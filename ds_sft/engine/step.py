"""One optimizer step: every microbatch of this rank, then the single update.

Owns the loss scaling and the order of things inside a step. Invariants: loss and gradient norm are
known to be finite before any weight changes; every rank runs the same number of microbatches of
the same shape; there is one collective of ours per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_sft.data.collate import collate
from ds_sft.data.packed import PackedDataset
from ds_sft.engine import nonfinite
from ds_sft.model.sft import DeviceBatch
from ds_sft.recipe.batching import BatchPlan, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    step: int
    """0-based optimizer step, which is also its label."""
    loss: float
    """Mean over loss groups of the mean loss of a target token; not finite if it was so."""
    lr: float
    """Learning rate of the update."""
    grad_norm: float
    """Global norm of the averaged gradient, before clipping."""
    target_tokens: int
    """Trained tokens of the batch."""
    tokens: int
    """Document tokens of the batch, without padding."""
    rank0_flag: bool
    """What rank 0 passed as `flag`, known to all ranks."""
    over_budget: bool
    """Whether any rank said `over_budget`."""
    problem: str
    """Why the update was dropped, with what is to blame; empty when it was applied."""


def train_step(
    engine: Any,
    data: PackedDataset,
    batches: BatchPlan,
    step: int,
    lr: float,
    *,
    flag: Callable[[], bool] = lambda: False,
    stop: Callable[[], bool] = lambda: False,
    over_budget: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> StepResult | None:
    """Run every microbatch of optimizer step `step`, then apply the update with `lr`.

    Loss = mean over loss groups of (summed loss / target tokens of the group). `micro.scale` is
    world_size / (num_groups * group_tokens): DeepSpeed averages over ranks, the world_size undoes
    it. Once the microbatches are done, `flag` is asked on rank 0 and `over_budget` on every rank,
    which thus sees the memory of the update before. `stop` is asked before each microbatch, on
    every rank with the same answer; then what was computed is thrown away: None.
    When the loss or the gradient is not finite the update is dropped, and the result says why.
    """
    sums = torch.zeros(batches.num_groups, device=engine.device)  # [G], this rank's share
    done: list[tuple[MicroBatch, torch.Tensor]] = []
    last = batches.micro_per_step - 1
    for i, (micro, batch) in enumerate(prefetched(data, batches, step, engine.device)):
        if stop():
            return None
        engine.set_gradient_accumulation_boundary(is_boundary=i == last)
        loss_sum = engine(batch)  # [], fp32
        engine.backward(loss_sum * micro.scale, scale_wrt_gas=False)
        sums[micro.group] += loss_sum.detach()
        done.append((micro, loss_sum.detach()))
        progress(i + 1, batches.micro_per_step)
    group_tokens = batches.step_tokens(step)
    group_sums, (fired, too_large) = agree(sums, dist.get_rank() == 0 and flag(), over_budget())
    losses = [total / tokens for total, tokens in zip(group_sums, group_tokens, strict=True)]
    loss = sum(losses) / len(losses)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    blamed = nonfinite.update(engine, loss_is_finite=math.isfinite(loss))
    return StepResult(
        step=step,
        loss=loss,
        lr=lr,
        grad_norm=float(engine.get_global_grad_norm()),
        target_tokens=sum(group_tokens),
        tokens=document_tokens(data, batches, step),
        rank0_flag=fired,
        over_budget=too_large,
        problem="" if blamed is None else _problem(engine, step, loss, done, blamed),
    )


def _problem(
    engine: Any,
    step: int,
    loss: float,
    done: list[tuple[MicroBatch, torch.Tensor]],
    blamed: list[str],
) -> str:
    """Label, packs and parameters of a dropped update; every rank calls it."""
    what = "gradient" if math.isfinite(loss) else "loss"
    value = "not finite" if math.isfinite(loss) else str(loss)
    mine = [p for m, total in done for p in m.packs[: m.num_active] if not total.isfinite()]
    packs = sorted(nonfinite.everywhere(mine))
    gradients = nonfinite.in_model_order(engine, nonfinite.everywhere(blamed))
    weights = nonfinite.bad_weights(engine)
    parts = [
        f"packs {nonfinite.first(packs)}" if packs else "each pack has a finite loss",
        f"gradient of {nonfinite.first(gradients)}" if gradients else "all gradients are finite",
        f"weights of {nonfinite.first(weights)}" if weights else "all weights are finite",
    ]
    return f"the {what} of step {step} is {value} ({'; '.join(parts)})"


def agree(sums: torch.Tensor, *flags: bool) -> tuple[list[float], list[bool]]:
    """`sums` [G] over all ranks, and which flags any has: the one collective of ours in a step."""
    raised = sums.new_tensor([float(flag) for flag in flags], dtype=torch.float64)
    shared = torch.cat([sums.double(), raised])
    dist.all_reduce(shared)
    totals = shared.tolist()
    return totals[: len(sums)], [count > 0 for count in totals[len(sums) :]]


def prefetched(
    data: PackedDataset, batches: BatchPlan, step: int, device: torch.device
) -> Iterator[tuple[MicroBatch, DeviceBatch]]:
    """This rank's microbatches of a step, each prepared while the one before it computes."""
    return in_advance(data, list(batches.micro_batches(step, dist.get_rank())), device)


def in_advance(
    data: PackedDataset, micros: Sequence[MicroBatch], device: torch.device
) -> Iterator[tuple[MicroBatch, DeviceBatch]]:
    """`micros` as the model reads them, each prepared while the one before it computes."""

    def prepare(micro: MicroBatch) -> DeviceBatch:
        return DeviceBatch.from_host(collate(data, micro.packs, micro.num_active), device)

    with ThreadPoolExecutor(max_workers=1) as pool:
        upcoming = pool.submit(prepare, micros[0])
        for i, micro in enumerate(micros):
            batch = upcoming.result()
            if i + 1 < len(micros):
                upcoming = pool.submit(prepare, micros[i + 1])
            yield micro, batch


def document_tokens(data: PackedDataset, batches: BatchPlan, step: int) -> int:
    """Tokens of the step's documents, over all ranks, without padding and idle slots."""
    packs = (p for g in range(batches.num_groups) for p in batches.group_packs(step, g))
    return sum(sum(data.doc_lengths(pack)) for pack in packs)
